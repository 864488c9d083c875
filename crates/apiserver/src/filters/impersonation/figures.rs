//! Metrics of impersonation: duration and decisions, upstream's four families.
//!
//! Label values are names of modes and decisions, so clients cannot make the families grow.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use crate::metrics::{Histogram, Labels, family, histograms, labels, samples};

/// Upstream: `ExponentialBuckets(0.001, 2, 15)`.
const SECONDS: &[f64] = &[
    0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096,
    8.192, 16.384,
];

#[derive(Default)]
struct Families {
    attempts: BTreeMap<Labels, Histogram>,
    authorizations: BTreeMap<Labels, Histogram>,
}

/// Locked for a few instructions at a time.
#[derive(Default)]
pub struct Figures(Mutex<Families>);

impl Figures {
    fn families(&self) -> MutexGuard<'_, Families> {
        self.0.lock().expect("no panic under the lock")
    }

    pub fn attempted(&self, mode: &str, is_allowed: bool, time: Duration) {
        note(&mut self.families().attempts, mode, is_allowed, time);
    }

    pub fn authorized(&self, mode: &str, is_allowed: bool, time: Duration) {
        note(&mut self.families().authorizations, mode, is_allowed, time);
    }

    pub fn encode(&self, out: &mut String) {
        let families = self.families();
        for (name, of, all) in [
            ("attempts", "impersonation attempts", &families.attempts),
            (
                "authorization_attempts",
                "authorization checks made by the impersonation handler",
                &families.authorizations,
            ),
        ] {
            if all.is_empty() {
                continue;
            }
            let counts = format!("apiserver_impersonation_{name}_total");
            let help = format!("[ALPHA] Total number of {of} split by mode and decision.");
            family(out, &counts, "counter", &help);
            samples(out, &counts, all.iter().map(|(labels, times)| (labels, times.count())));
            let times = format!("apiserver_impersonation_{name}_duration_seconds");
            let help = format!("[ALPHA] Latency of {of} in seconds split by mode and decision.");
            family(out, &times, "histogram", &help);
            histograms(out, &times, all);
        }
    }
}

fn note(all: &mut BTreeMap<Labels, Histogram>, mode: &str, is_allowed: bool, time: Duration) {
    let decision = if is_allowed { "allowed" } else { "denied" };
    let labels = labels([("decision", decision), ("mode", mode)]);
    all.entry(labels).or_insert_with(|| Histogram::new(SECONDS)).observe(time.as_secs_f64());
}
