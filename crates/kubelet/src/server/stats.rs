//! `/metrics`, `/metrics/probes` and `/metrics/resource`; `kubectl top` and autoscalers use the last.
//!
//! In: the runtime's counters, the machine. Out: Prometheus text.
//! Upstream: `pkg/kubelet/metrics`, `pkg/kubelet/metrics/collectors/resource_metrics.go`.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

use bytes::Bytes;
use cri::ContainerStats;
use http::{Response, StatusCode};
use transport::Body;

use super::context::Context;
use super::readings::Readings;
use super::summary;
use super::text;
use crate::names;
use crate::node::families;
use crate::node::machine::{self, available_memory};
use crate::pod::observed::State;
use crate::pod::probe_counts::Counts;
use crate::pod::set::PodSet;
use crate::pod::worker::View;
use crate::volumes::claims::claim_of;
use crate::volumes::plugin_names;

pub fn prometheus(body: String) -> Response<Body> {
    let mut response = text(StatusCode::OK, "");
    let kind = http::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(http::header::CONTENT_TYPE, kind);
    response.map(|_| transport::full(Bytes::from(body)))
}

/// The probes' metrics.
pub fn probes(counts: &Counts) -> Response<Body> {
    prometheus(counts.text())
}

/// The kubelet's own metrics.
pub async fn metrics(pods: &PodSet, context: &Context) -> Response<Body> {
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
    let name = "kubelet_node_name";
    let help = "[ALPHA] The node's name. The count is always 1.";
    let node = &context.node.config.node_name;
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge\n{name}{{node={node:?}}} 1");
    context.metrics.figures.encode(&mut out);
    families::encode(&mut out);
    encode_volume_counts(&mut out, &views);
    encode_volumes(&mut out, context, &views).await;
    release::features::encode_metrics(&mut out);
    context.metrics.users.encode(&mut out);
    context.metrics.device_plugins.counts.encode(&mut out);
    context.metrics.pod_resources.encode(&mut out);
    client::encode_queues(&mut out);
    client::encode_requests(&mut out);
    base::metrics::process::encode(&mut out);
    base::metrics::encode_registered(&mut out);
    prometheus(out)
}

/// The pods' volumes by plugin: those that should be mounted, and those of pods that have a sandbox.
fn encode_volume_counts(out: &mut String, views: &[View]) {
    let name = "volume_manager_total_volumes";
    let help = "[ALPHA] Number of volumes in Volume Manager";
    let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for view in views.iter().filter(|view| !view.stopped) {
        let is_set_up = !view.observed.containers.is_empty();
        for plugin in view.pod.iter().flat_map(|pod| plugin_names(pod)) {
            *counts.entry((plugin, "desired_state_of_world")).or_default() += 1;
            if is_set_up {
                *counts.entry((plugin, "actual_state_of_world")).or_default() += 1;
            }
        }
    }
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge");
    for ((plugin, state), count) in counts {
        let _ = writeln!(
            out,
            "{name}{{plugin_name=\"kubernetes.io/{plugin}\",state={state:?}}} {count}"
        );
    }
}

/// Usage of the claims' volumes; each claim once, for any number of pods.
async fn encode_volumes(out: &mut String, context: &Context, views: &[View]) {
    const FAMILIES: [(&str, &str); 6] = [
        ("available_bytes", "Number of available bytes in the volume"),
        ("capacity_bytes", "Capacity in bytes of the volume"),
        ("inodes", "Maximum number of inodes in the volume"),
        ("inodes_free", "Number of free inodes in the volume"),
        ("inodes_used", "Number of used inodes in the volume"),
        ("used_bytes", "Number of used bytes in the volume"),
    ];
    let mut claims = BTreeMap::new();
    for view in views {
        let Some(pod) = &view.pod else { continue };
        for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
            let Some(claim) = claim_of(names::name(pod), volume) else { continue };
            let key = (names::namespace(pod).to_owned(), claim);
            if claims.contains_key(&key) {
                continue;
            }
            if let Some(usage) = summary::usage(context, view, &volume.name).await {
                claims.insert(key, usage);
            }
        }
    }
    for (at, (name, help)) in FAMILIES.iter().enumerate() {
        let name = format!("kubelet_volume_stats_{name}");
        let mut head = format!("# HELP {name} [ALPHA] {help}\n# TYPE {name} gauge\n");
        for ((namespace, claim), usage) in &claims {
            let (bytes, inodes) = (usage.bytes.as_ref(), usage.inodes.as_ref());
            let value = [
                bytes.map(|all| all.available),
                bytes.map(|all| all.total),
                inodes.map(|all| all.total),
                inodes.map(|all| all.available),
                inodes.map(|all| all.used),
                bytes.map(|all| all.used),
            ][at];
            let Some(value) = value else { continue };
            out.push_str(&std::mem::take(&mut head));
            let _ = writeln!(
                out,
                "{name}{{namespace={namespace:?},persistentvolumeclaim={claim:?}}} {value}"
            );
        }
    }
}

/// The families of `/metrics/resource`: name, type, help.
const FAMILIES: [(&str, &str, &str); 11] = [
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
        "container_swap_usage_bytes",
        "gauge",
        "Current amount of the container swap usage in bytes. Reported only on non-windows systems",
    ),
    (
        "node_cpu_usage_seconds_total",
        "counter",
        "Cumulative cpu time consumed by the node in core-seconds",
    ),
    ("node_memory_working_set_bytes", "gauge", "Current working set of the node in bytes"),
    (
        "node_swap_usage_bytes",
        "gauge",
        "Current swap usage of the node in bytes. Reported only on non-windows systems",
    ),
    (
        "pod_cpu_usage_seconds_total",
        "counter",
        "Cumulative cpu time consumed by the pod in core-seconds",
    ),
    ("pod_memory_working_set_bytes", "gauge", "Current working set of the pod in bytes"),
    (
        "pod_swap_usage_bytes",
        "gauge",
        "Current amount of the pod swap usage in bytes. Reported only on non-windows systems",
    ),
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
        let mut swap_bytes = None;
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
            if let Some(swap) = &stats.swap {
                let bytes = swap.swap_usage_bytes.as_ref().map_or(0, |v| v.value) as f64;
                let at = swap.timestamp / 1_000_000;
                self.add("container_swap_usage_bytes", &labels, bytes, at);
                swap_bytes = Some(swap_bytes.unwrap_or(0.0) + bytes);
            }
            if let Some(start) = container.started_at {
                let seconds = start.as_millisecond() as f64 / 1e3;
                self.add("container_start_time_seconds", &labels, seconds, 0);
            }
        }
        self.add("pod_cpu_usage_seconds_total", &home, cpu_seconds, at);
        self.add("pod_memory_working_set_bytes", &home, memory_bytes, at);
        if let Some(bytes) = swap_bytes {
            self.add("pod_swap_usage_bytes", &home, bytes, at);
        }
    }
}

/// CPU and memory per container, pod and node: what metrics-server scrapes.
pub async fn resource_metrics(context: &Context, pods: &PodSet) -> Response<Body> {
    let readings = Readings::take(&*context.runtime).await;
    let mut samples = Samples::default();
    for view in pods.views() {
        samples.pod(&view, &readings.containers);
    }
    let used = (context.node.machine.memory.max(0) as u64).saturating_sub(available_memory());
    let now = base::clock::now().as_millisecond();
    let seconds = machine::cpu_nanoseconds() as f64 / 1e9;
    let (swap, swap_free) = machine::swap();
    samples.add("node_cpu_usage_seconds_total", "", seconds, now);
    samples.add("node_memory_working_set_bytes", "", used as f64, now);
    samples.add("node_swap_usage_bytes", "", swap.saturating_sub(swap_free) as f64, now);
    samples.add("resource_scrape_error", "", f64::from(u8::from(readings.failed)), 0);
    let mut out = String::new();
    for (name, kind, help) in FAMILIES {
        if let Some(lines) = samples.0.get(name) {
            let _ = write!(out, "# HELP {name} [STABLE] {help}\n# TYPE {name} {kind}\n{lines}");
        }
    }
    prometheus(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::probe_counts;

    /// The promised families that a node serves; the other ones are a control plane's.
    const OF_NODES: [&str; 12] = [
        "container_cpu_usage_seconds_total",
        "container_memory_working_set_bytes",
        "container_start_time_seconds",
        "kubelet_image_volume_mounted_errors_total",
        "kubelet_image_volume_mounted_succeed_total",
        "kubelet_image_volume_requested_total",
        "node_cpu_usage_seconds_total",
        "node_memory_working_set_bytes",
        "pod_cpu_usage_seconds_total",
        "pod_memory_working_set_bytes",
        "prober_probe_total",
        "resource_scrape_error",
    ];

    #[test]
    fn promised_metrics_are_served() {
        let counts = Counts::default();
        let probe = counts.begin("Liveness", "c", &Default::default());
        probe.note(probe_counts::Result::Failed, std::time::Duration::ZERO);
        let mut page = counts.text();
        families::encode(&mut page);
        for (name, kind, _) in FAMILIES {
            let _ = writeln!(page, "# TYPE {name} {kind}");
        }
        let promised = release::stable_metrics::all();
        let promised: Vec<_> = promised.filter(|one| OF_NODES.contains(&one.name)).collect();
        assert_eq!(promised.len(), OF_NODES.len());
        for family in promised {
            assert_eq!(family.judge(&page), None, "{}", family.name);
        }
    }
}
