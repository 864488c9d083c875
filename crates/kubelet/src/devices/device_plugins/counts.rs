//! Metrics of device plugins, in Prometheus' text format. Upstream: `pkg/kubelet/metrics`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;
use std::time::Duration;

use client::Histogram;

/// Prometheus' default buckets, in seconds.
const SECONDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// By resource. Locked for single counts and scrapes.
#[derive(Default)]
pub struct Counts {
    registrations: Mutex<BTreeMap<String, u64>>,
    allocations: Mutex<BTreeMap<String, Histogram<11>>>,
}

impl Counts {
    pub fn registered(&self, resource: &str) {
        let mut all = self.registrations.lock().expect("no panic while held");
        *all.entry(resource.to_owned()).or_default() += 1;
    }

    pub fn allocated(&self, resource: &str, took: Duration) {
        let mut all = self.allocations.lock().expect("no panic while held");
        let one = all.entry(resource.to_owned()).or_insert_with(|| Histogram::new(&SECONDS));
        one.observe(took.as_secs_f64());
    }

    pub fn encode(&self, out: &mut String) {
        let family = "kubelet_device_plugin_registration_total";
        let registrations = self.registrations.lock().expect("no panic while held").clone();
        if !registrations.is_empty() {
            let _ = writeln!(
                out,
                "# HELP {family} [ALPHA] Cumulative number of device plugin registrations. Broken down by resource name.\n# TYPE {family} counter"
            );
        }
        for (resource, count) in registrations {
            let _ = writeln!(out, "{family}{{resource_name={resource:?}}} {count}");
        }
        let family = "kubelet_device_plugin_alloc_duration_seconds";
        let allocations = self.allocations.lock().expect("no panic while held");
        if !allocations.is_empty() {
            let _ = writeln!(
                out,
                "# HELP {family} [ALPHA] Duration in seconds to serve a device plugin Allocation request. Broken down by resource name.\n# TYPE {family} histogram"
            );
        }
        for (resource, histogram) in allocations.iter() {
            histogram.write(out, family, &format!("resource_name={resource:?}"));
        }
    }
}
