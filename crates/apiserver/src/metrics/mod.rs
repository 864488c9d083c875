//! `/metrics`: the server's metrics with upstream's names, in Prometheus' text format.
//!
//! Families have one entry per label set, made on first use. Other parts of the process add theirs with
//! [`Metrics::register`]; a source is called at each scrape and costs nothing otherwise.
//!
//! Invariant: label values come from rows and from tables here, never from clients, so that clients cannot
//! make the families grow.

pub(crate) mod families;
pub(crate) mod storage;
mod text;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

pub use families::ADMISSION_WEBHOOK;
pub(crate) use text::{Histogram, Labels, histograms};
pub use text::{family, label, labels, samples};

use crate::request::RequestInfo;
use crate::resource::Resource;

/// Upstream's buckets of request durations, in seconds.
const DURATIONS: &[f64] = &[
    0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0,
    10.0, 15.0, 20.0, 30.0, 45.0, 60.0,
];
const SLI_DURATIONS: &[f64] = &[
    0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0,
    30.0, 45.0, 60.0,
];
const RESPONSE_BYTES: &[f64] = &[1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9];
const EVENT_BYTES: &[f64] = &[1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131_072.0];

/// Writes families in the text format.
pub type Source = Box<dyn Fn(&mut String) + Send + Sync>;

#[derive(Default)]
pub struct Metrics {
    /// Locked for a few instructions at a time; never held across an await.
    families: Mutex<Families>,
    sources: Mutex<Vec<Source>>,
    /// Of the page `/metrics/resources`.
    resources: Mutex<Vec<Source>>,
}

#[derive(Default)]
struct Families {
    requests: BTreeMap<Labels, u64>,
    durations: BTreeMap<Labels, Histogram>,
    sli_durations: BTreeMap<Labels, Histogram>,
    response_sizes: BTreeMap<Labels, Histogram>,
    long_running: BTreeMap<Labels, i64>,
    /// Reads and writes in flight, and their maximum since the last scrape.
    in_flight: [InFlight; 2],
    terminations: BTreeMap<Labels, u64>,
    aborts: BTreeMap<Labels, u64>,
    watches: BTreeMap<Labels, Arc<WatchNumbers>>,
}

#[derive(Clone, Copy, Default)]
struct InFlight {
    now: i64,
    most: i64,
}

const KINDS: [&str; 2] = ["mutating", "readOnly"];

/// The labels of a request.
pub(crate) struct Subject {
    labels: Labels,
    pub is_long: bool,
    pub is_read: bool,
    is_dry_run: bool,
}

/// How a request ended.
pub(crate) struct Answer {
    pub code: u16,
    pub time: Duration,
    /// The part of `time` that it waited for its place.
    pub waited: Duration,
    /// Size of the body, if known.
    pub bytes: Option<u64>,
}

/// The events of all watches on one resource.
pub(crate) struct WatchNumbers {
    sizes: Mutex<Histogram>,
}

impl WatchNumbers {
    pub fn sent(&self, bytes: usize) {
        self.sizes.lock().expect("no panic under the lock").observe(bytes as f64);
    }
}

impl Metrics {
    pub fn register(&self, source: Source) {
        self.sources.lock().expect("no panic under the lock").push(source);
    }

    /// Adds a source to `/metrics/resources`, which upstream's scheduler serves.
    pub fn register_resources(&self, source: Source) {
        self.resources.lock().expect("no panic under the lock").push(source);
    }

    /// The page `/metrics/resources`; `None` without a source.
    pub fn encode_resources(&self) -> Option<String> {
        let sources = self.resources.lock().expect("no panic under the lock");
        let mut out = String::new();
        sources.iter().for_each(|source| source(&mut out));
        (!sources.is_empty()).then_some(out)
    }

    fn families(&self) -> MutexGuard<'_, Families> {
        self.families.lock().expect("no panic under the lock")
    }

    pub(crate) fn request_started(&self, subject: &Subject) {
        let mut families = self.families();
        if subject.is_long {
            *families.long_running.entry(subject.labels.clone()).or_default() += 1;
        } else {
            let kind = &mut families.in_flight[usize::from(subject.is_read)];
            kind.now += 1;
            kind.most = kind.most.max(kind.now);
        }
    }

    pub(crate) fn request_ended(&self, subject: &Subject) {
        let mut families = self.families();
        if subject.is_long {
            if let Some(count) = families.long_running.get_mut(&subject.labels) {
                *count -= 1;
            }
        } else {
            families.in_flight[usize::from(subject.is_read)].now -= 1;
        }
    }

    pub(crate) fn request_answered(&self, subject: &Subject, answer: &Answer) {
        let dry_run = if subject.is_dry_run { "All" } else { "" };
        let labels = &subject.labels;
        let mut families = self.families();
        let request = format!("code=\"{}\",dry_run=\"{dry_run}\",{labels}", answer.code);
        *families.requests.entry(request).or_default() += 1;
        match answer.code {
            429 | 504 => {
                let label = format!("code=\"{}\",{labels}", answer.code);
                *families.terminations.entry(label).or_default() += 1;
            }
            _ => {}
        }
        if subject.is_long {
            return;
        }
        let seconds = answer.time.as_secs_f64();
        let dry = format!("dry_run=\"{dry_run}\",{labels}");
        let new = || Histogram::new(DURATIONS);
        families.durations.entry(dry).or_insert_with(new).observe(seconds);
        let new = || Histogram::new(SLI_DURATIONS);
        let own = answer.time.saturating_sub(answer.waited).as_secs_f64();
        families.sli_durations.entry(labels.clone()).or_insert_with(new).observe(own);
        if let Some(bytes) = answer.bytes.filter(|_| subject.is_read) {
            let new = || Histogram::new(RESPONSE_BYTES);
            let sizes = families.response_sizes.entry(labels.clone()).or_insert_with(new);
            sizes.observe(bytes as f64);
        }
    }

    /// The client disconnected before the answer.
    pub(crate) fn request_aborted(&self, subject: &Subject) {
        *self.families().aborts.entry(subject.labels.clone()).or_default() += 1;
    }

    /// The counters of a watch on the row.
    pub(crate) fn watch(&self, row: &Resource) -> Arc<WatchNumbers> {
        let labels = labels([
            ("group", row.group.as_str()),
            ("resource", row.plural.as_str()),
            ("version", row.version.as_str()),
        ]);
        let new = || Arc::new(WatchNumbers { sizes: Mutex::new(Histogram::new(EVENT_BYTES)) });
        self.families().watches.entry(labels).or_insert_with(new).clone()
    }

    /// The whole page.
    pub fn encode(&self) -> String {
        let mut out = String::with_capacity(64 << 10);
        self.families().encode(&mut out);
        for source in self.sources.lock().expect("no panic under the lock").iter() {
            source(&mut out);
        }
        families::encode(&mut out);
        out
    }
}

impl Subject {
    /// `is_known`: the requested resource has a row.
    pub fn new(info: &RequestInfo, method: &str, is_known: bool, is_dry_run: bool) -> Self {
        let is_long = info.is_long_running();
        let is_read = info.is_read();
        let scope = match (info.name.is_empty(), info.namespace.is_empty()) {
            _ if !info.is_resource || !is_known => "",
            (false, _) => "resource",
            (true, false) => "namespace",
            (true, true) => "cluster",
        };
        let known = |text| if is_known { text } else { "" };
        let part = if info.is_resource { known(&info.subresource) } else { known_path(&info.path) };
        let labels = labels([
            ("component", "apiserver"),
            ("group", known(&info.group)),
            ("resource", known(&info.resource)),
            ("scope", scope),
            ("subresource", part),
            ("verb", verb(info, method)),
            ("version", known(&info.version)),
        ]);
        Self { labels, is_long, is_read, is_dry_run }
    }
}

/// Paths that clients can invent must not become label values.
fn known_path(path: &str) -> &str {
    const KNOWN: &[&str] =
        &["/healthz", "/livez", "/readyz", "/metrics", "/version", "/api", "/apis", "/openapi/v2"];
    KNOWN.iter().find(|known| **known == path).copied().unwrap_or_default()
}

fn verb(info: &RequestInfo, method: &str) -> &'static str {
    const STREAMS: &[&str] = &["attach", "exec", "portforward", "proxy"];
    if info.is_resource && STREAMS.contains(&info.subresource.as_str()) {
        return "CONNECT";
    }
    match info.verb.as_str() {
        "get" => "GET",
        "list" => "LIST",
        "watch" => "WATCH",
        "create" | "post" => "POST",
        "update" | "put" => "PUT",
        "patch" if method == "APPLY" => "APPLY",
        "patch" => "PATCH",
        "delete" => "DELETE",
        "deletecollection" => "DELETECOLLECTION",
        "head" => "HEAD",
        "options" => "OPTIONS",
        _ => "other",
    }
}

impl Families {
    fn encode(&mut self, out: &mut String) {
        let name = "apiserver_current_inflight_requests";
        let help = "[STABLE] Maximal number of currently used inflight request limit of this apiserver per request kind in last second.";
        family(out, name, "gauge", help);
        for (kind, counts) in KINDS.iter().zip(&mut self.in_flight) {
            let labels = labels([("request_kind", kind)]);
            samples(out, name, [(&labels, counts.most)]);
            counts.most = counts.now;
        }
        let name = "apiserver_longrunning_requests";
        let help = "[STABLE] Gauge of all active long-running apiserver requests broken out by verb, group, version, resource, scope and component. Not all requests are tracked this way.";
        family(out, name, "gauge", help);
        samples(out, name, &self.long_running);
        for (name, help, all) in [
            (
                "apiserver_request_duration_seconds",
                "[STABLE] Response latency distribution in seconds for each verb, dry run value, group, version, resource, subresource, scope and component.",
                &self.durations,
            ),
            (
                "apiserver_request_sli_duration_seconds",
                "[BETA] Response latency distribution (not counting webhook duration and priority & fairness queue wait times) in seconds for each verb, group, version, resource, subresource, scope and component.",
                &self.sli_durations,
            ),
            (
                "apiserver_response_sizes",
                "[STABLE] Response size distribution in bytes for each group, version, verb, resource, subresource, scope and component.",
                &self.response_sizes,
            ),
        ] {
            family(out, name, "histogram", help);
            histograms(out, name, all);
        }
        self.encode_counters(out);
        self.encode_watches(out);
    }

    fn encode_counters(&self, out: &mut String) {
        for (name, help, all) in [
            (
                "apiserver_request_aborts_total",
                "[ALPHA] Number of requests which apiserver aborted possibly due to a timeout, for each group, version, verb, resource, subresource and scope",
                &self.aborts,
            ),
            (
                "apiserver_request_terminations_total",
                "[ALPHA] Number of requests which apiserver terminated in self-defense.",
                &self.terminations,
            ),
            (
                "apiserver_request_total",
                "[STABLE] Counter of apiserver requests broken out for each verb, dry run value, group, version, resource, scope, component, and HTTP response code.",
                &self.requests,
            ),
        ] {
            if !all.is_empty() {
                family(out, name, "counter", help);
                samples(out, name, all);
            }
        }
    }

    fn encode_watches(&self, out: &mut String) {
        let sizes: BTreeMap<Labels, Histogram> = self
            .watches
            .iter()
            .map(|(labels, one)| {
                (labels.clone(), one.sizes.lock().expect("no panic under the lock").clone())
            })
            .filter(|(_, sizes)| !sizes.is_empty())
            .collect();
        if sizes.is_empty() {
            return;
        }
        let name = "apiserver_watch_events_sizes";
        family(out, name, "histogram", "[ALPHA] Watch event size distribution in bytes");
        histograms(out, name, &sizes);
        let name = "apiserver_watch_events_total";
        family(out, name, "counter", "[ALPHA] Number of events sent in watch clients");
        samples(out, name, sizes.iter().map(|(labels, sizes)| (labels, sizes.count())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_prometheus_text() {
        let metrics = Metrics::default();
        let info = RequestInfo {
            is_resource: true,
            verb: "list".into(),
            version: "v1".into(),
            resource: "pods".into(),
            ..RequestInfo::default()
        };
        let subject = Subject::new(&info, "", true, false);
        let answer = Answer {
            code: 200,
            time: Duration::from_millis(30),
            waited: Duration::from_millis(10),
            bytes: Some(1500),
        };
        metrics.request_started(&subject);
        metrics.request_answered(&subject, &answer);
        metrics.request_ended(&subject);
        metrics.register(Box::new(|out| out.push_str("other 1\n")));
        let row = crate::testing::row::<k8s_openapi::api::core::v1::ConfigMap>("cms", &[], true);
        metrics.watch(&row).sent(3000);
        let page = metrics.encode();
        for line in [
            r#"apiserver_current_inflight_requests{request_kind="readOnly"} 1"#,
            r#"apiserver_request_total{code="200",dry_run="",component="apiserver",group="",resource="pods",scope="cluster",subresource="",verb="LIST",version="v1"} 1"#,
            r#"le="0.05"} 1"#,
            r#"le="0.025"} 0"#,
            r#"apiserver_request_sli_duration_seconds_sum{component="apiserver",group="",resource="pods",scope="cluster",subresource="",verb="LIST",version="v1"} 0.02"#,
            r#"apiserver_response_sizes_sum{component="apiserver",group="",resource="pods",scope="cluster",subresource="",verb="LIST",version="v1"} 1500"#,
            r#"apiserver_watch_events_total{group="",resource="cms",version="v1"} 1"#,
            "# TYPE apiserver_request_total counter",
            "other 1",
        ] {
            assert!(page.contains(line), "{line} in\n{page}");
        }
        let idle = metrics.encode();
        let line = r#"apiserver_current_inflight_requests{request_kind="readOnly"} 0"#;
        assert!(idle.contains(line), "{idle}");
    }

    #[test]
    fn invented_names_do_not_become_labels() {
        let info = RequestInfo {
            is_resource: true,
            verb: "get".into(),
            group: "made.up".into(),
            resource: "things".into(),
            ..RequestInfo::default()
        };
        let subject = Subject::new(&info, "", false, false);
        assert!(!subject.labels.contains("made") && !subject.labels.contains("things"));
    }
}
