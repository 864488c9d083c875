//! The back-off before containers are restarted and image pulls are retried.
//!
//! In: a key and the time of its failure. Out: wait or go. Entries expire after twice the maximum.
//! Upstream: `client-go/util/flowcontrol` Backoff, 10 s doubling to 300 s.

use std::collections::HashMap;
use std::time::Duration;

use jiff::Timestamp;
use release::features::{self, Feature};

pub const FIRST: Duration = Duration::from_secs(10);
pub const CEILING: Duration = Duration::from_secs(300);
/// With the gate `ReduceDefaultCrashLoopBackOffDecay`.
const REDUCED_FIRST: Duration = Duration::from_secs(1);
const REDUCED_CEILING: Duration = Duration::from_secs(60);

struct Entry {
    delay: Duration,
    updated: Timestamp,
}

/// The backoffs of many keys.
pub struct Delays {
    entries: HashMap<String, Entry>,
    first: Duration,
    ceiling: Duration,
}

impl Default for Delays {
    fn default() -> Self {
        Self { entries: HashMap::new(), first: FIRST, ceiling: CEILING }
    }
}

fn since(now: Timestamp, then: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(then)).unwrap_or_default()
}

impl Delays {
    /// For containers that crash; `ceiling` is the node's own (`crashLoopBackOff`).
    pub fn of_crashes(ceiling: Option<Duration>) -> Self {
        let usual = match features::enabled(Feature::ReduceDefaultCrashLoopBackOffDecay) {
            true => Self { first: REDUCED_FIRST, ceiling: REDUCED_CEILING, ..Self::default() },
            false => Self::default(),
        };
        let Some(ceiling) = ceiling else { return usual };
        Self { first: usual.first.min(ceiling), ceiling, ..usual }
    }

    /// The remaining delay of `key` after a failure at `failed`; `None` if it has passed.
    pub fn remaining(&self, key: &str, failed: Timestamp, now: Timestamp) -> Option<Duration> {
        let entry = self.entries.get(key)?;
        if since(failed, entry.updated) > self.ceiling * 2 {
            return None;
        }
        entry.delay.checked_sub(since(now, failed)).filter(|left| !left.is_zero())
    }

    /// The current delay, for messages.
    pub fn delay(&self, key: &str) -> Duration {
        self.entries.get(key).map_or(Duration::ZERO, |entry| entry.delay)
    }

    /// Records a retry after a failure at `failed`: the next delay is longer.
    pub fn step(&mut self, key: &str, failed: Timestamp, now: Timestamp) {
        let fresh = Entry { delay: self.first, updated: now };
        match self.entries.get_mut(key) {
            Some(entry) if since(failed, entry.updated) <= self.ceiling * 2 => {
                entry.delay = (entry.delay * 2).min(self.ceiling);
                entry.updated = now;
            }
            _ => {
                self.entries.insert(key.to_string(), fresh);
            }
        }
    }

    pub fn forget(&mut self, keep: impl Fn(&str) -> bool) {
        self.entries.retain(|key, _| keep(key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("in range")
    }

    #[test]
    fn doubles_and_expires() {
        let mut delays = Delays::default();
        assert_eq!(delays.remaining("k", at(0), at(0)), None, "the first restart is at once");
        delays.step("k", at(0), at(0));
        assert_eq!(delays.remaining("k", at(1), at(2)), Some(Duration::from_secs(9)));
        assert_eq!(delays.remaining("k", at(1), at(11)), None);
        delays.step("k", at(1), at(11));
        assert_eq!(delays.delay("k"), Duration::from_secs(20));
        for _ in 0..9 {
            delays.step("k", at(12), at(12));
        }
        assert_eq!(delays.delay("k"), CEILING);
        assert_eq!(
            delays.remaining("k", at(700), at(700)),
            None,
            "ten minutes without a failure reset it"
        );
        delays.step("k", at(700), at(700));
        assert_eq!(delays.delay("k"), FIRST);
    }

    #[test]
    fn a_gate_shortens_the_backoff() {
        let gates = features::Gates::DEFAULT;
        for (is_on, first, last) in [(false, 10, 300), (true, 1, 60)] {
            let gates = gates.with(Feature::ReduceDefaultCrashLoopBackOffDecay, is_on);
            let mut delays = features::scoped(gates, || Delays::of_crashes(None));
            delays.step("k", at(0), at(0));
            assert_eq!(delays.delay("k"), Duration::from_secs(first));
            (0..9).for_each(|_| delays.step("k", at(0), at(0)));
            assert_eq!(delays.delay("k"), Duration::from_secs(last));
        }
        let mut short = Delays::of_crashes(Some(Duration::from_secs(3)));
        (0..9).for_each(|_| short.step("k", at(0), at(0)));
        assert_eq!(short.delay("k"), Duration::from_secs(3), "also the first delay");
    }
}
