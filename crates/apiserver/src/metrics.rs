//! `/metrics`: what the server counts, under upstream's names, in Prometheus' text format.
//!
//! Families are kept per label set, made on first use. Other parts of the process add theirs by
//! [`Metrics::register`]; a source is asked when somebody scrapes, so it costs nothing else.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;

use crate::request::RequestInfo;

/// Upstream's buckets of request durations, in seconds.
const DURATION_BUCKETS: &[f64] = &[
    0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0,
    10.0, 15.0, 20.0, 30.0, 45.0, 60.0,
];

/// Writes families in the text format.
pub type Source = Box<dyn Fn(&mut String) + Send + Sync>;

/// A sample's labels, as they are written: `verb="GET",code="200"`.
type Labels = String;

#[derive(Default)]
pub struct Metrics {
    /// Guards plain numbers, for a few instructions at a time; never held across an await.
    families: Mutex<Families>,
    sources: Mutex<Vec<Source>>,
}

#[derive(Default)]
struct Families {
    requests: BTreeMap<Labels, u64>,
    durations: BTreeMap<Labels, Histogram>,
    long_running: BTreeMap<Labels, i64>,
    in_flight: BTreeMap<Labels, i64>,
}

#[derive(Clone)]
struct Histogram {
    buckets: Vec<u64>,
    sum: f64,
    count: u64,
}

impl Histogram {
    fn observe(&mut self, value: f64) {
        if let Some(index) = DURATION_BUCKETS.iter().position(|limit| value <= *limit) {
            self.buckets[index] += 1;
        }
        self.sum += value;
        self.count += 1;
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: vec![0; DURATION_BUCKETS.len()], sum: 0.0, count: 0 }
    }
}

impl Metrics {
    pub fn register(&self, source: Source) {
        self.sources.lock().expect("no panic under the lock").push(source);
    }

    pub(crate) fn request_started(&self, info: &RequestInfo, is_long: bool, is_read: bool) {
        self.gauge(info, is_long, is_read, 1);
    }

    pub(crate) fn request_ended(&self, info: &RequestInfo, is_long: bool, is_read: bool) {
        self.gauge(info, is_long, is_read, -1);
    }

    fn gauge(&self, info: &RequestInfo, is_long: bool, is_read: bool, by: i64) {
        let mut families = self.families.lock().expect("no panic under the lock");
        if is_long {
            *families.long_running.entry(subject(info)).or_default() += by;
        } else {
            let kind = if is_read { "readOnly" } else { "mutating" };
            *families.in_flight.entry(format!("request_kind=\"{kind}\"")).or_default() += by;
        }
    }

    pub(crate) fn request_answered(
        &self,
        info: &RequestInfo,
        is_dry_run: bool,
        code: u16,
        seconds: f64,
        is_long: bool,
    ) {
        let dry_run = if is_dry_run { "All" } else { "" };
        let subject = subject(info);
        let mut families = self.families.lock().expect("no panic under the lock");
        let request = format!("code=\"{code}\",dry_run=\"{dry_run}\",{subject}");
        *families.requests.entry(request).or_default() += 1;
        if !is_long {
            let duration = format!("dry_run=\"{dry_run}\",{subject}");
            families.durations.entry(duration).or_default().observe(seconds);
        }
    }

    /// The whole page.
    pub fn encode(&self) -> String {
        let mut out = String::with_capacity(16 << 10);
        self.families.lock().expect("no panic under the lock").encode(&mut out);
        for source in self.sources.lock().expect("no panic under the lock").iter() {
            source(&mut out);
        }
        out
    }
}

/// Which requests are counted together. Labels in alphabetical order, as Prometheus writes them.
fn subject(info: &RequestInfo) -> Labels {
    let scope = match (info.is_resource, info.name.is_empty(), info.namespace.is_empty()) {
        (false, ..) => "",
        (true, false, _) => "resource",
        (true, true, false) => "namespace",
        (true, true, true) => "cluster",
    };
    let mut labels = String::with_capacity(128);
    for (name, value) in [
        ("component", "apiserver"),
        ("group", &info.group),
        ("resource", &info.resource),
        ("scope", scope),
        ("subresource", if info.is_resource { &info.subresource } else { known_path(&info.path) }),
        ("verb", verb(info)),
        ("version", &info.version),
    ] {
        if !labels.is_empty() {
            labels.push(',');
        }
        // Names come from URLs: they may hold anything.
        let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let _ = write!(labels, "{name}=\"{value}\"");
    }
    labels
}

/// Paths that anybody can make up must not become label values.
fn known_path(path: &str) -> &str {
    const KNOWN: &[&str] =
        &["/healthz", "/livez", "/readyz", "/metrics", "/version", "/api", "/apis", "/openapi/v2"];
    KNOWN.iter().find(|known| **known == path).copied().unwrap_or_default()
}

fn verb(info: &RequestInfo) -> &'static str {
    match info.verb.as_str() {
        "get" => "GET",
        "list" => "LIST",
        "watch" => "WATCH",
        "create" | "post" => "POST",
        "update" | "put" => "PUT",
        "patch" => "PATCH",
        "delete" => "DELETE",
        "deletecollection" => "DELETECOLLECTION",
        _ => "other",
    }
}

impl Families {
    fn encode(&self, out: &mut String) {
        family(
            out,
            "apiserver_current_inflight_requests",
            "gauge",
            "[STABLE] Maximal number of currently used inflight request limit of this apiserver per request kind in last second.",
        );
        samples(out, "apiserver_current_inflight_requests", &self.in_flight);
        family(
            out,
            "apiserver_longrunning_requests",
            "gauge",
            "[STABLE] Gauge of all active long-running apiserver requests broken out by verb, group, version, resource, scope and component. Not all requests are tracked this way.",
        );
        samples(out, "apiserver_longrunning_requests", &self.long_running);
        family(
            out,
            "apiserver_request_duration_seconds",
            "histogram",
            "[STABLE] Response latency distribution in seconds for each verb, dry run value, group, version, resource, subresource, scope and component.",
        );
        for (labels, histogram) in &self.durations {
            histogram.encode(out, "apiserver_request_duration_seconds", labels);
        }
        family(
            out,
            "apiserver_request_total",
            "counter",
            "[STABLE] Counter of apiserver requests broken out for each verb, dry run value, group, version, resource, scope, component, and HTTP response code.",
        );
        samples(out, "apiserver_request_total", &self.requests);
    }
}

impl Histogram {
    fn encode(&self, out: &mut String, name: &str, labels: &str) {
        let mut below = 0;
        for (limit, count) in DURATION_BUCKETS.iter().zip(&self.buckets) {
            below += count;
            let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{limit}\"}} {below}");
        }
        let _ = writeln!(out, "{name}_bucket{{{labels},le=\"+Inf\"}} {}", self.count);
        let _ = writeln!(out, "{name}_sum{{{labels}}} {}", self.sum);
        let _ = writeln!(out, "{name}_count{{{labels}}} {}", self.count);
    }
}

/// The two lines that open a family.
pub fn family(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn samples(out: &mut String, name: &str, samples: &BTreeMap<Labels, impl std::fmt::Display>) {
    for (labels, value) in samples {
        let _ = writeln!(out, "{name}{{{labels}}} {value}");
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
        metrics.request_started(&info, false, true);
        metrics.request_answered(&info, false, 200, 0.03, false);
        metrics.request_ended(&info, false, true);
        metrics.register(Box::new(|out| out.push_str("other 1\n")));
        let page = metrics.encode();
        for line in [
            r#"apiserver_current_inflight_requests{request_kind="readOnly"} 0"#,
            r#"apiserver_request_total{code="200",dry_run="",component="apiserver",group="",resource="pods",scope="cluster",subresource="",verb="LIST",version="v1"} 1"#,
            r#"le="0.05"} 1"#,
            r#"le="0.025"} 0"#,
            "# TYPE apiserver_request_total counter",
            "other 1",
        ] {
            assert!(page.contains(line), "{line} in\n{page}");
        }
    }
}
