//! Which thresholds are met, since when, and the node's conditions that follow.
//!
//! ```text
//!  observations ─► met (with minimum reclaim: still met) ─► conditions, kept for the transition period
//!                                          └─► met for the grace period ─► the one to act on
//! ```
//!
//! In: thresholds, observations, the time. Out: conditions, the thresholds to act on. Pure.
//! Upstream: `eviction_manager.go` synchronize.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::threshold::{Condition, Signal, Threshold};

/// The free amount of one resource, and all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observation {
    pub available: u64,
    pub capacity: u64,
}

pub type Observations = BTreeMap<Signal, Observation>;

/// The thresholds that the observations meet; with `reclaims`, until the minimum is freed on top.
pub fn met(thresholds: &[Threshold], seen: &Observations, reclaims: bool) -> Vec<Threshold> {
    let is_met = |threshold: &&Threshold| {
        let Some(seen) = seen.get(&threshold.signal) else { return false };
        let more = threshold.reclaim.filter(|_| reclaims).map_or(0, |more| more.of(seen.capacity));
        threshold.value.of(seen.capacity).saturating_add(more) > seen.available
    };
    thresholds.iter().filter(is_met).copied().collect()
}

#[derive(Default)]
pub struct State {
    /// The thresholds that are met, with the time since when.
    met: Vec<(Threshold, Instant)>,
    /// Those whose grace period was over.
    due: Vec<Threshold>,
    /// When each condition was last observed.
    conditions: BTreeMap<Condition, Instant>,
}

impl State {
    /// Takes observations over; returns the thresholds to act on, memory first.
    pub fn observe(
        &mut self,
        thresholds: &[Threshold],
        seen: &Observations,
        now: Instant,
    ) -> Vec<Threshold> {
        let mut all = met(thresholds, seen, false);
        for threshold in met(&self.due, seen, true) {
            if !all.contains(&threshold) {
                all.push(threshold);
            }
        }
        let since = |threshold: &Threshold| {
            let known = self.met.iter().find(|(known, _)| known == threshold);
            known.map_or(now, |(_, since)| *since)
        };
        let next: Vec<(Threshold, Instant)> =
            all.iter().map(|threshold| (*threshold, since(threshold))).collect();
        for threshold in &all {
            self.conditions.insert(threshold.signal.condition(), now);
        }
        let lasts = |(threshold, since): &&(Threshold, Instant)| {
            now.duration_since(*since) >= threshold.grace
        };
        let mut due: Vec<Threshold> = next.iter().filter(lasts).map(|(one, _)| *one).collect();
        due.sort_by_key(|threshold| !threshold.signal.is_memory());
        self.met = next;
        self.due.clone_from(&due);
        due
    }

    /// The conditions that were observed within the transition period.
    pub fn conditions(&self, transition: Duration, now: Instant) -> Vec<Condition> {
        let fresh = self.conditions.iter().filter(|(_, at)| now.duration_since(**at) < transition);
        fresh.map(|(condition, _)| *condition).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::threshold::Value;
    use super::*;

    fn threshold(signal: Signal, value: u64, grace: u64, reclaim: u64) -> Threshold {
        Threshold {
            signal,
            value: Value::Amount(value),
            grace: Duration::from_secs(grace),
            reclaim: (reclaim > 0).then_some(Value::Amount(reclaim)),
        }
    }

    fn seen(pairs: &[(Signal, u64)]) -> Observations {
        let one = |(signal, available): &(Signal, u64)| {
            (*signal, Observation { available: *available, capacity: 1000 })
        };
        pairs.iter().map(one).collect()
    }

    #[test]
    fn soft_thresholds_wait_and_conditions_last() {
        let all = [threshold(Signal::NodeFs, 200, 60, 0), threshold(Signal::Memory, 100, 0, 0)];
        let (mut state, start) = (State::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let transition = Duration::from_secs(300);
        let low = seen(&[(Signal::NodeFs, 150), (Signal::Memory, 500)]);
        assert_eq!(state.observe(&all, &low, at(0)), []);
        assert_eq!(state.conditions(transition, at(0)), [Condition::Disk], "at once");
        assert_eq!(state.observe(&all, &low, at(59)), []);
        assert_eq!(state.observe(&all, &low, at(60)), [all[0]]);
        let both = seen(&[(Signal::NodeFs, 150), (Signal::Memory, 50)]);
        assert_eq!(state.observe(&all, &both, at(61)), [all[1], all[0]], "memory first");
        let fine = seen(&[(Signal::NodeFs, 900), (Signal::Memory, 900)]);
        assert_eq!(state.observe(&all, &fine, at(70)), []);
        assert_eq!(state.conditions(transition, at(360)), [Condition::Memory, Condition::Disk]);
        assert_eq!(state.conditions(transition, at(361)), []);
        // The grace period starts again.
        assert_eq!(state.observe(&all, &low, at(400)), []);
    }

    #[test]
    fn more_is_freed_once_evicting() {
        let all = [threshold(Signal::Memory, 100, 0, 50)];
        let (mut state, now) = (State::default(), Instant::now());
        let at = |available| seen(&[(Signal::Memory, available)]);
        assert_eq!(state.observe(&all, &at(120), now), []);
        assert_eq!(state.observe(&all, &at(90), now), all);
        assert_eq!(state.observe(&all, &at(120), now), all, "30 more are to be freed");
        assert_eq!(state.observe(&all, &at(150), now), []);
        assert_eq!(state.observe(&all, &at(120), now), []);
        assert_eq!(state.observe(&all, &seen(&[]), now), [], "nothing was observed");
    }
}
