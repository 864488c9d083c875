//! Probe metrics: results and durations for `/metrics/probes`.
//!
//! In: results of probes. Out: Prometheus text. A probe's metrics are removed when it ends.
//! Upstream: `prober_manager.go`.

use std::fmt::Write;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// Prometheus' default buckets.
const BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Result {
    Successful,
    Failed,
    Unknown,
}

const RESULTS: [(&str, Result); 3] =
    [("failed", Result::Failed), ("successful", Result::Successful), ("unknown", Result::Unknown)];

#[derive(Clone, Debug, Default)]
struct Figures {
    /// In the order of [`RESULTS`].
    results: [u64; 3],
    buckets: [u64; BUCKETS.len()],
    seconds: f64,
}

/// One probe of one container.
#[derive(Debug)]
pub struct Record {
    container: String,
    namespace: String,
    pod: String,
    pod_uid: String,
    kind: &'static str,
    figures: Mutex<Figures>,
}

impl Record {
    pub fn note(&self, result: Result, took: Duration) {
        let mut figures = self.figures.lock().expect("no panic while held");
        if let Some(at) = RESULTS.iter().position(|(_, one)| *one == result) {
            figures.results[at] += 1;
        }
        let seconds = took.as_secs_f64();
        figures.seconds += seconds;
        for (bucket, limit) in figures.buckets.iter_mut().zip(BUCKETS) {
            *bucket += u64::from(seconds <= limit);
        }
    }
}

/// The probes of all pods.
#[derive(Default)]
pub struct Counts(Mutex<Vec<Weak<Record>>>);

impl Counts {
    /// Starts a probe's metrics, which are shown while the record is held.
    pub fn begin(
        &self,
        kind: &'static str,
        container: &str,
        about: &k8s_openapi::api::core::v1::ObjectReference,
    ) -> Arc<Record> {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let record = Arc::new(Record {
            container: container.into(),
            namespace: text(&about.namespace),
            pod: text(&about.name),
            pod_uid: text(&about.uid),
            kind,
            figures: Mutex::default(),
        });
        let mut all = self.0.lock().expect("no panic while held");
        all.retain(|known| known.strong_count() > 0);
        all.push(Arc::downgrade(&record));
        record
    }

    pub fn text(&self) -> String {
        let records: Vec<Arc<Record>> = {
            let all = self.0.lock().expect("no panic while held");
            all.iter().filter_map(Weak::upgrade).collect()
        };
        let (mut total, mut duration) = (String::new(), String::new());
        for record in &records {
            let figures = record.figures.lock().expect("no panic while held").clone();
            let Record { container, namespace, pod, pod_uid, kind, .. } = record.as_ref();
            for ((name, _), count) in RESULTS.iter().zip(figures.results) {
                if count > 0 {
                    let _ = writeln!(
                        total,
                        "prober_probe_total{{container={container:?},namespace={namespace:?},pod={pod:?},pod_uid={pod_uid:?},probe_type={kind:?},result={name:?}}} {count}"
                    );
                }
            }
            let labels = format!(
                "container={container:?},namespace={namespace:?},pod={pod:?},probe_type={kind:?}"
            );
            let name = "prober_probe_duration_seconds";
            for (limit, count) in BUCKETS.iter().zip(figures.buckets) {
                let _ = writeln!(duration, "{name}_bucket{{{labels},le=\"{limit}\"}} {count}");
            }
            let count: u64 = figures.results.iter().sum();
            let _ = writeln!(duration, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
            let _ = writeln!(duration, "{name}_sum{{{labels}}} {}", figures.seconds);
            let _ = writeln!(duration, "{name}_count{{{labels}}} {count}");
        }
        let mut out = String::new();
        for (name, kind, help, lines) in [
            (
                "prober_probe_duration_seconds",
                "histogram",
                "[ALPHA] Duration in seconds for a probe response.",
                duration,
            ),
            (
                "prober_probe_total",
                "counter",
                "[BETA] Cumulative number of a liveness, readiness or startup probe for a container by result.",
                total,
            ),
        ] {
            if !lines.is_empty() {
                let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{lines}");
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::ObjectReference;

    #[test]
    fn probes_are_counted_while_they_run() {
        let counts = Counts::default();
        assert_eq!(counts.text(), "");
        let about = ObjectReference {
            name: Some("p".into()),
            namespace: Some("ns".into()),
            uid: Some("u".into()),
            ..ObjectReference::default()
        };
        let record = counts.begin("Liveness", "c", &about);
        record.note(Result::Successful, Duration::from_millis(20));
        record.note(Result::Successful, Duration::from_millis(30));
        record.note(Result::Failed, Duration::from_secs(20));
        let text = counts.text();
        for line in [
            "prober_probe_total{container=\"c\",namespace=\"ns\",pod=\"p\",pod_uid=\"u\",probe_type=\"Liveness\",result=\"successful\"} 2",
            "prober_probe_total{container=\"c\",namespace=\"ns\",pod=\"p\",pod_uid=\"u\",probe_type=\"Liveness\",result=\"failed\"} 1",
            "prober_probe_duration_seconds_bucket{container=\"c\",namespace=\"ns\",pod=\"p\",probe_type=\"Liveness\",le=\"0.025\"} 1",
            "prober_probe_duration_seconds_bucket{container=\"c\",namespace=\"ns\",pod=\"p\",probe_type=\"Liveness\",le=\"10\"} 2",
            "prober_probe_duration_seconds_bucket{container=\"c\",namespace=\"ns\",pod=\"p\",probe_type=\"Liveness\",le=\"+Inf\"} 3",
            "prober_probe_duration_seconds_count{container=\"c\",namespace=\"ns\",pod=\"p\",probe_type=\"Liveness\"} 3",
        ] {
            assert!(text.lines().any(|own| own == line), "{line}\n{text}");
        }
        drop(record);
        assert_eq!(counts.text(), "");
    }
}
