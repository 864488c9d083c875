//! Statistics: the summary that `kubectl top` and autoscalers come from, and metrics for scrapers.
//!
//! In: the runtime's counters, the machine. Out: upstream's summary JSON and Prometheus text.
//! Upstream: `pkg/kubelet/server/stats`, `pkg/kubelet/metrics/collectors/resource_metrics.go`.

use std::collections::HashMap;
use std::fmt::Write;

use bytes::Bytes;
use cri::ContainerStats;
use http::{Response, StatusCode};
use jiff::Timestamp;
use serde_json::{Value, json};
use transport::Body;

use super::{json_answer, text};
use crate::context::Context;
use crate::machine::{Disk, available_memory};
use crate::names;
use crate::observed::State;
use crate::pods::PodSet;
use crate::worker::View;

fn stamp(nanoseconds: i64) -> String {
    let time =
        Timestamp::from_nanosecond(i128::from(nanoseconds)).unwrap_or_else(|_| base::clock::now());
    Timestamp::from_second(time.as_second()).unwrap_or(time).to_string()
}

fn cpu(stats: &ContainerStats) -> Value {
    let Some(cpu) = &stats.cpu else { return json!({}) };
    json!({
        "time": stamp(cpu.timestamp),
        "usageNanoCores": cpu.usage_nano_cores.as_ref().map_or(0, |v| v.value),
        "usageCoreNanoSeconds": cpu.usage_core_nano_seconds.as_ref().map_or(0, |v| v.value),
    })
}

fn memory(stats: &ContainerStats) -> Value {
    let Some(memory) = &stats.memory else { return json!({}) };
    json!({
        "time": stamp(memory.timestamp),
        "usageBytes": memory.usage_bytes.as_ref().map_or(0, |v| v.value),
        "workingSetBytes": memory.working_set_bytes.as_ref().map_or(0, |v| v.value),
        "rssBytes": memory.rss_bytes.as_ref().map_or(0, |v| v.value),
        "pageFaults": memory.page_faults.as_ref().map_or(0, |v| v.value),
        "majorPageFaults": memory.major_page_faults.as_ref().map_or(0, |v| v.value),
    })
}

/// Adds the numbers of several readings; texts come from the first.
fn sum(all: &[Value]) -> Value {
    let mut out = all.first().cloned().unwrap_or_else(|| json!({}));
    for other in all.iter().skip(1) {
        if let (Some(out), Some(other)) = (out.as_object_mut(), other.as_object()) {
            for (key, value) in out {
                if let (Some(a), Some(b)) = (value.as_u64(), other.get(key).and_then(Value::as_u64))
                {
                    *value = json!(a + b);
                }
            }
        }
    }
    out
}

async fn by_id(context: &Context) -> HashMap<String, ContainerStats> {
    let all = context.runtime.list_container_stats(None).await.unwrap_or_default();
    let id = |stats: &ContainerStats| stats.attributes.as_ref().map(|a| a.id.clone());
    all.into_iter().filter_map(|stats| Some((id(&stats)?, stats))).collect()
}

pub async fn summary(context: &Context, pods: &PodSet) -> Response<Body> {
    let stats = by_id(context).await;
    let now = base::clock::now_seconds().to_string();
    let mut items = vec![];
    for view in pods.views() {
        items.extend(pod_summary(&view, &stats));
    }
    let disk = Disk::of(&context.config.root_dir).unwrap_or_default();
    let fs = json!({
        "time": now,
        "availableBytes": disk.free_bytes, "capacityBytes": disk.bytes,
        "usedBytes": disk.bytes.saturating_sub(disk.free_bytes),
        "inodesFree": disk.free_inodes, "inodes": disk.inodes,
        "inodesUsed": disk.inodes.saturating_sub(disk.free_inodes),
    });
    let available = available_memory();
    let used = (context.machine.memory.max(0) as u64).saturating_sub(available);
    let total = node_cpu_nanoseconds();
    json_answer(&json!({
        "node": {
            "nodeName": context.config.node_name,
            "startTime": now,
            "cpu": {"time": now, "usageNanoCores": 0, "usageCoreNanoSeconds": total},
            "memory": {"time": now, "availableBytes": available, "usageBytes": used,
                "workingSetBytes": used, "rssBytes": used},
            "fs": fs,
            "runtime": {"imageFs": fs, "containerFs": fs},
        },
        "pods": items,
    }))
}

fn pod_summary(view: &View, stats: &HashMap<String, ContainerStats>) -> Option<Value> {
    let pod = view.pod.as_ref()?;
    let running = view.observed.containers.iter().filter(|c| c.state == State::Running);
    let mut containers = vec![];
    for container in running {
        let Some(stats) = stats.get(&container.id) else { continue };
        containers.push(json!({
            "name": container.name,
            "startTime": container.started_at.map(|t| t.to_string()),
            "cpu": cpu(stats), "memory": memory(stats),
        }));
    }
    let of = |key: &str| -> Vec<Value> { containers.iter().map(|c| c[key].clone()).collect() };
    Some(json!({
        "podRef": {"name": names::name(pod), "namespace": names::namespace(pod), "uid": names::uid(pod)},
        "startTime": view.status.start_time,
        "cpu": sum(&of("cpu")), "memory": sum(&of("memory")),
        "containers": containers,
    }))
}

/// CPU time of the whole machine since it started.
fn node_cpu_nanoseconds() -> u64 {
    let table = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let fields: Vec<u64> = table
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .filter_map(|field| field.parse().ok())
        .collect();
    // user nice system idle iowait irq softirq steal: all but idle and iowait, in hundredths.
    let busy: u64 = fields
        .iter()
        .enumerate()
        .filter(|(i, _)| !matches!(i, 3 | 4) && *i < 8)
        .map(|(_, v)| v)
        .sum();
    busy * 10_000_000
}

fn prometheus(body: String) -> Response<Body> {
    let mut response = text(StatusCode::OK, "");
    let kind = http::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(http::header::CONTENT_TYPE, kind);
    response.map(|_| transport::full(Bytes::from(body)))
}

pub fn no_metrics() -> Response<Body> {
    prometheus(String::new())
}

/// The kubelet's own figures.
pub fn metrics(pods: &PodSet) -> Response<Body> {
    let views = pods.views();
    let running = views.iter().filter(|v| v.observed.running().next().is_some()).count();
    let mut states: HashMap<&str, usize> = HashMap::new();
    for container in views.iter().flat_map(|v| &v.observed.containers) {
        let state = match container.state {
            State::Created => "created",
            State::Running => "running",
            State::Exited => "exited",
            State::Unknown => "unknown",
        };
        *states.entry(state).or_default() += 1;
    }
    let mut out = String::new();
    out.push_str("# HELP kubelet_running_pods Number of pods that have a running pod sandbox\n");
    out.push_str("# TYPE kubelet_running_pods gauge\n");
    let _ = writeln!(out, "kubelet_running_pods {running}");
    out.push_str("# HELP kubelet_running_containers Number of containers currently running\n");
    out.push_str("# TYPE kubelet_running_containers gauge\n");
    for (state, count) in states {
        let _ = writeln!(out, "kubelet_running_containers{{container_state=\"{state}\"}} {count}");
    }
    prometheus(out)
}

/// The families of `/metrics/resource`: name, type, help.
const FAMILIES: [(&str, &str, &str); 8] = [
    (
        "container_cpu_usage_seconds_total",
        "counter",
        "Cumulative cpu time consumed by the container in core-seconds",
    ),
    (
        "container_memory_working_set_bytes",
        "gauge",
        "Current working set of the container in bytes",
    ),
    (
        "container_start_time_seconds",
        "gauge",
        "Start time of the container since unix epoch in seconds",
    ),
    (
        "node_cpu_usage_seconds_total",
        "counter",
        "Cumulative cpu time consumed by the node in core-seconds",
    ),
    ("node_memory_working_set_bytes", "gauge", "Current working set of the node in bytes"),
    (
        "pod_cpu_usage_seconds_total",
        "counter",
        "Cumulative cpu time consumed by the pod in core-seconds",
    ),
    ("pod_memory_working_set_bytes", "gauge", "Current working set of the pod in bytes"),
    (
        "resource_scrape_error",
        "gauge",
        "1 if there was an error while getting container metrics, 0 otherwise",
    ),
];

/// Samples by family.
#[derive(Default)]
struct Samples(HashMap<&'static str, String>);

impl Samples {
    /// `at` in milliseconds since 1970; 0 for none.
    fn add(&mut self, family: &'static str, labels: &str, value: f64, at: i64) {
        let lines = self.0.entry(family).or_default();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let at = if at == 0 { String::new() } else { format!(" {at}") };
        let _ = writeln!(lines, "{family}{labels} {value}{at}");
    }

    fn pod(&mut self, view: &View, stats: &HashMap<String, ContainerStats>) {
        let Some(pod) = &view.pod else { return };
        let home = format!("namespace={:?},pod={:?}", names::namespace(pod), names::name(pod));
        let (mut cpu_seconds, mut memory_bytes, mut at) = (0.0, 0.0, 0);
        for container in view.observed.containers.iter().filter(|c| c.state == State::Running) {
            let Some(stats) = stats.get(&container.id) else { continue };
            let labels = format!("container={:?},{home}", container.name);
            if let Some(cpu) = &stats.cpu {
                let used = cpu.usage_core_nano_seconds.as_ref().map_or(0, |v| v.value);
                let seconds = used as f64 / 1e9;
                at = cpu.timestamp / 1_000_000;
                self.add("container_cpu_usage_seconds_total", &labels, seconds, at);
                cpu_seconds += seconds;
            }
            if let Some(memory) = &stats.memory {
                let bytes = memory.working_set_bytes.as_ref().map_or(0, |v| v.value) as f64;
                let at = memory.timestamp / 1_000_000;
                self.add("container_memory_working_set_bytes", &labels, bytes, at);
                memory_bytes += bytes;
            }
            if let Some(start) = container.started_at {
                let seconds = start.as_millisecond() as f64 / 1e3;
                self.add("container_start_time_seconds", &labels, seconds, 0);
            }
        }
        self.add("pod_cpu_usage_seconds_total", &home, cpu_seconds, at);
        self.add("pod_memory_working_set_bytes", &home, memory_bytes, at);
    }
}

/// CPU and memory per container, pod and node: what metrics-server scrapes.
pub async fn resource_metrics(context: &Context, pods: &PodSet) -> Response<Body> {
    let stats = by_id(context).await;
    let mut samples = Samples::default();
    for view in pods.views() {
        samples.pod(&view, &stats);
    }
    let used = (context.machine.memory.max(0) as u64).saturating_sub(available_memory());
    let now = base::clock::now().as_millisecond();
    let seconds = node_cpu_nanoseconds() as f64 / 1e9;
    samples.add("node_cpu_usage_seconds_total", "", seconds, now);
    samples.add("node_memory_working_set_bytes", "", used as f64, now);
    samples.add("resource_scrape_error", "", 0.0, 0);
    let mut out = String::new();
    for (name, kind, help) in FAMILIES {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        out.push_str(samples.0.get(name).map(String::as_str).unwrap_or_default());
    }
    prometheus(out)
}
