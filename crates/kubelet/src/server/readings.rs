//! A sample of the usage of containers and pods, and CPU rates between two samples.
//!
//! In: the runtime's counters. Out: statistics by container id and by pod uid, with CPU rates if the
//! runtime has only totals.
//! Invariant: usage is read only on request; a rate covers at least a second.

use std::collections::HashMap;
use std::sync::Mutex;

use cri::{ContainerStats, CpuUsage, PodSandboxStats};

/// The minimum interval of a rate, in nanoseconds.
const SPAN: i64 = 1_000_000_000;

#[derive(Clone, Copy, Debug)]
struct Sample {
    at: i64,
    total: u64,
    rate: u64,
    /// It was requested in this round.
    is_fresh: bool,
}

/// The last samples, for CPU rates.
#[derive(Default)]
pub struct Rates(Mutex<HashMap<String, Sample>>);

impl Rates {
    /// Nanoseconds of CPU per second: since the last sample, or since `start` if this is the first.
    /// All times are in nanoseconds.
    pub fn rate(&self, id: &str, at: i64, total: u64, start: i64) -> u64 {
        let mut samples = self.0.lock().expect("no panic while held");
        let known = samples.get(id).copied();
        let (since, base) = known.map_or((start, 0), |known| (known.at, known.total));
        if let Some(known) = known.filter(|known| at - known.at < SPAN) {
            samples.insert(id.to_string(), Sample { is_fresh: true, ..known });
            return known.rate;
        }
        let span = (at - since).max(1) as u128;
        let rate = u128::from(total.saturating_sub(base)) * 1_000_000_000 / span;
        let rate = u64::try_from(rate).unwrap_or(u64::MAX);
        samples.insert(id.to_string(), Sample { at, total, rate, is_fresh: true });
        rate
    }

    /// Ends a round: samples that it did not request are dropped.
    pub fn forget_others(&self) {
        let mut samples = self.0.lock().expect("no panic while held");
        samples.retain(|_, sample| std::mem::take(&mut sample.is_fresh));
    }
}

/// The runtime's statistics.
#[derive(Default)]
pub struct Readings {
    pub containers: HashMap<String, ContainerStats>,
    pub pods: HashMap<String, PodSandboxStats>,
    /// The runtime did not answer.
    pub failed: bool,
}

impl Readings {
    pub async fn take(runtime: &dyn cri::Runtime) -> Self {
        let mut out = Self::default();
        match runtime.list_container_stats(None).await {
            Ok(all) => {
                let id = |one: &ContainerStats| one.attributes.as_ref().map(|a| a.id.clone());
                out.containers = all.into_iter().filter_map(|one| Some((id(&one)?, one))).collect();
            }
            Err(error) => {
                tracing::debug!(%error, "failed to list the containers' statistics");
                out.failed = true;
            }
        }
        // If a runtime has no statistics of pods, the sums of their containers replace them.
        for pod in runtime.list_pod_sandbox_stats(None).await.unwrap_or_default() {
            let meta = pod.attributes.as_ref().and_then(|a| a.metadata.as_ref());
            if let Some(uid) = meta.map(|meta| meta.uid.clone()) {
                out.pods.insert(uid, pod);
            }
        }
        out
    }
}

pub fn total(cpu: &CpuUsage) -> u64 {
    cpu.usage_core_nano_seconds.as_ref().map_or(0, |value| value.value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_between_readings() {
        let rates = Rates::default();
        let check = |second: i64, total: u64, expected: u64| {
            let rate = rates.rate("a", second * SPAN, total * 1_000_000, 0);
            assert_eq!(rate / 1_000_000, expected, "after {second} s");
        };
        check(10, 5000, 500);
        check(20, 25_000, 2000);
        // Too soon: the earlier rate stays.
        assert_eq!(rates.rate("a", 20 * SPAN + 5, 25_000_000_001, 0), 2_000_000_000);
        // A restarted counter gives no negative rate.
        check(30, 1, 0);
        rates.forget_others();
        rates.forget_others();
        check(40, 4000, 100);
    }
}
