//! `/metrics/cadvisor`: metrics of containers and pods with the names that dashboards expect.
//!
//! In: the runtime's counters. Out: Prometheus text; a pod's own series have an empty `container`.
//! Upstream: cAdvisor's `metrics/prometheus.go`, as far as the runtime has the numbers.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use cri::{CpuUsage, MemoryUsage, NetworkUsage, UInt64Value};
use http::Response;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use machinery::quantity;
use transport::Body;

use super::context::Context;
use super::kernel_counts;
use super::readings::Readings;
use super::stats::prometheus;
use crate::names;
use crate::node::cgroups::Cgroups;
use crate::node::machine::{Machine, available_memory, boot_time, cpu_nanoseconds};
use crate::pod::observed::{ObservedContainer, State};
use crate::pod::set::PodSet;
use crate::pod::worker::View;
use crate::resources::cpu_shares;

/// Name, type, help.
const FAMILIES: &[(&str, &str, &str)] = &[
    (
        "container_cpu_cfs_periods_total",
        "counter",
        "Number of elapsed enforcement period intervals.",
    ),
    (
        "container_cpu_cfs_throttled_periods_total",
        "counter",
        "Number of throttled period intervals.",
    ),
    (
        "container_cpu_cfs_throttled_seconds_total",
        "counter",
        "Total time duration the container has been throttled.",
    ),
    (
        "container_cpu_system_seconds_total",
        "counter",
        "Cumulative system cpu time consumed in seconds.",
    ),
    ("container_cpu_usage_seconds_total", "counter", "Cumulative cpu time consumed in seconds."),
    (
        "container_cpu_user_seconds_total",
        "counter",
        "Cumulative user cpu time consumed in seconds.",
    ),
    ("container_fs_inodes_used", "gauge", "Number of inodes used by the writable layer."),
    (
        "container_fs_limit_bytes",
        "gauge",
        "Number of bytes that can be consumed by the container on this filesystem.",
    ),
    ("container_fs_reads_bytes_total", "counter", "Cumulative count of bytes read"),
    ("container_fs_reads_total", "counter", "Cumulative count of reads completed"),
    (
        "container_fs_usage_bytes",
        "gauge",
        "Number of bytes that are consumed by the container on this filesystem.",
    ),
    ("container_fs_writes_bytes_total", "counter", "Cumulative count of bytes written"),
    ("container_fs_writes_total", "counter", "Cumulative count of writes completed"),
    ("container_last_seen", "gauge", "Last time a container was seen by the exporter"),
    ("container_memory_cache", "gauge", "Number of bytes of page cache memory."),
    ("container_memory_failcnt", "counter", "Number of memory usage hits limits"),
    (
        "container_memory_failures_total",
        "counter",
        "Cumulative count of memory allocation failures.",
    ),
    ("container_memory_mapped_file", "gauge", "Size of memory mapped files in bytes."),
    ("container_memory_max_usage_bytes", "gauge", "Maximum memory usage recorded in bytes"),
    ("container_memory_rss", "gauge", "Size of RSS in bytes."),
    ("container_memory_swap", "gauge", "Container swap usage in bytes."),
    (
        "container_memory_usage_bytes",
        "gauge",
        "Current memory usage in bytes, including all memory regardless of when it was accessed",
    ),
    ("container_memory_working_set_bytes", "gauge", "Current working set in bytes."),
    ("container_network_receive_bytes_total", "counter", "Cumulative count of bytes received"),
    (
        "container_network_receive_errors_total",
        "counter",
        "Cumulative count of errors encountered while receiving",
    ),
    (
        "container_network_receive_packets_dropped_total",
        "counter",
        "Cumulative count of packets dropped while receiving",
    ),
    ("container_network_receive_packets_total", "counter", "Cumulative count of packets received"),
    ("container_network_transmit_bytes_total", "counter", "Cumulative count of bytes transmitted"),
    (
        "container_network_transmit_errors_total",
        "counter",
        "Cumulative count of errors encountered while transmitting",
    ),
    (
        "container_network_transmit_packets_dropped_total",
        "counter",
        "Cumulative count of packets dropped while transmitting",
    ),
    (
        "container_network_transmit_packets_total",
        "counter",
        "Cumulative count of packets transmitted",
    ),
    ("container_processes", "gauge", "Number of processes running inside the container."),
    ("container_spec_cpu_period", "gauge", "CPU period of the container."),
    ("container_spec_cpu_quota", "gauge", "CPU quota of the container."),
    ("container_spec_cpu_shares", "gauge", "CPU share of the container."),
    ("container_spec_memory_limit_bytes", "gauge", "Memory limit for the container."),
    (
        "container_spec_memory_reservation_limit_bytes",
        "gauge",
        "Memory reservation limit for the container.",
    ),
    ("container_spec_memory_swap_limit_bytes", "gauge", "Memory swap limit for the container."),
    (
        "container_start_time_seconds",
        "gauge",
        "Start time of the container since unix epoch in seconds.",
    ),
    ("container_threads", "gauge", "Number of threads running inside the container"),
    ("machine_cpu_cores", "gauge", "Number of logical CPU cores."),
    ("machine_memory_bytes", "gauge", "Amount of memory installed on the machine."),
    (
        "machine_scrape_error",
        "gauge",
        "1 if there was an error while getting machine metrics, 0 otherwise.",
    ),
    ("machine_swap_bytes", "gauge", "Amount of swap memory available on the machine."),
];

#[derive(Default)]
struct Samples(BTreeMap<&'static str, String>);

impl Samples {
    /// `at` in nanoseconds since 1970; 0 for none.
    fn add(&mut self, family: &'static str, labels: &str, value: Option<f64>, at: i64) {
        let Some(value) = value else { return };
        let lines = self.0.entry(family).or_default();
        let at = if at == 0 { String::new() } else { format!(" {}", at / 1_000_000) };
        let labels = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let _ = writeln!(lines, "{family}{labels} {value}{at}");
    }

    fn cpu(&mut self, labels: &Labels, used: &CpuUsage) {
        let seconds = number(&used.usage_core_nano_seconds).map(|nanos| nanos / 1e9);
        let labels = labels.with(&[("cpu", "total")]);
        self.add("container_cpu_usage_seconds_total", &labels, seconds, used.timestamp);
    }

    fn memory(&mut self, labels: &Labels, used: &MemoryUsage) {
        let at = used.timestamp;
        for (family, value) in [
            ("container_memory_rss", &used.rss_bytes),
            ("container_memory_usage_bytes", &used.usage_bytes),
            ("container_memory_working_set_bytes", &used.working_set_bytes),
        ] {
            self.add(family, &labels.with(&[]), number(value), at);
        }
        for (kind, value) in
            [("pgfault", &used.page_faults), ("pgmajfault", &used.major_page_faults)]
        {
            let labels = labels.with(&[("failure_type", kind), ("scope", "container")]);
            self.add("container_memory_failures_total", &labels, number(value), at);
        }
    }

    fn network(&mut self, labels: &Labels, used: &NetworkUsage) {
        for one in &used.interfaces {
            let labels = labels.with(&[("interface", &one.name)]);
            for (family, value) in [
                ("container_network_receive_bytes_total", &one.rx_bytes),
                ("container_network_receive_errors_total", &one.rx_errors),
                ("container_network_transmit_bytes_total", &one.tx_bytes),
                ("container_network_transmit_errors_total", &one.tx_errors),
            ] {
                self.add(family, &labels, number(value), used.timestamp);
            }
        }
    }

    /// Counters of the kernel that the runtime does not report.
    fn kernel(&mut self, labels: &Labels, cgroup: &Path) {
        let Some(counted) = kernel_counts::throttling(cgroup) else { return };
        let plain = labels.with(&[]);
        for (family, value) in [
            ("container_cpu_cfs_periods_total", counted.periods as f64),
            ("container_cpu_cfs_throttled_periods_total", counted.throttled_periods as f64),
            ("container_cpu_cfs_throttled_seconds_total", counted.throttled_seconds),
        ] {
            self.add(family, &plain, Some(value), 0);
        }
    }

    /// The container's limits, and what the kernel counts of its memory, tasks and disks.
    fn details(&mut self, labels: &Labels, pod: &Pod, one: &ObservedContainer, cgroups: &Cgroups) {
        let plain = labels.with(&[]);
        let spec = specified(pod, &one.name);
        for (family, value) in [
            ("container_spec_cpu_period", spec.cpu_period),
            ("container_spec_cpu_quota", spec.cpu_quota),
            ("container_spec_cpu_shares", Some(spec.cpu_shares)),
            ("container_spec_memory_limit_bytes", Some(spec.memory)),
            ("container_spec_memory_reservation_limit_bytes", Some(0)),
            ("container_spec_memory_swap_limit_bytes", Some(spec.memory)),
            ("container_last_seen", Some(base::clock::now().as_second())),
        ] {
            self.add(family, &plain, value.map(|value| value as f64), 0);
        }
        let of = |controller| cgroups.of_container(pod, &one.id, controller);
        let memory = of("memory").map(|at| kernel_counts::memory(&at)).unwrap_or_default();
        let threads = of("pids").and_then(|at| kernel_counts::threads(&at));
        for (family, value) in [
            ("container_memory_cache", memory.cache),
            ("container_memory_failcnt", memory.limit_hits),
            ("container_memory_mapped_file", memory.mapped_file),
            ("container_memory_max_usage_bytes", memory.most),
            ("container_threads", threads),
        ] {
            self.add(family, &plain, value.map(|value| value as f64), 0);
        }
        for disk in of("blkio").map(|at| kernel_counts::transfers(&at)).unwrap_or_default() {
            let labels = labels.with(&[("device", &disk.device)]);
            for (family, value) in [
                ("container_fs_reads_bytes_total", disk.read_bytes),
                ("container_fs_reads_total", disk.reads),
                ("container_fs_writes_bytes_total", disk.written_bytes),
                ("container_fs_writes_total", disk.writes),
            ] {
                self.add(family, &labels, Some(value as f64), 0);
            }
        }
    }

    /// The whole node, as the root of all cgroups.
    fn root(&mut self, machine: &Machine) {
        let labels = Labels { id: "/".into(), ..Labels::default() };
        let (plain, now) = (labels.with(&[]), base::clock::now().as_second());
        let used = (machine.memory.max(0) as u64).saturating_sub(available_memory());
        for (family, value) in [
            ("container_memory_usage_bytes", used as f64),
            ("container_memory_working_set_bytes", used as f64),
            ("container_start_time_seconds", boot_time() as f64),
            ("container_spec_memory_limit_bytes", machine.memory as f64),
            ("container_last_seen", now as f64),
        ] {
            self.add(family, &plain, Some(value), 0);
        }
        let total = labels.with(&[("cpu", "total")]);
        let seconds = cpu_nanoseconds() as f64 / 1e9;
        self.add("container_cpu_usage_seconds_total", &total, Some(seconds), 0);
    }

    fn machine(&mut self, machine: &Machine) {
        let labels = format!(
            "boot_id={:?},machine_id={:?},system_uuid={:?}",
            machine.boot_id, machine.machine_id, machine.system_uuid
        );
        for (family, value) in [
            ("machine_cpu_cores", machine.cpus),
            ("machine_memory_bytes", machine.memory),
            ("machine_swap_bytes", machine.swap),
        ] {
            self.add(family, &labels, Some(value as f64), 0);
        }
        self.add("machine_scrape_error", "", Some(0.0), 0);
    }

    /// A pod in the host's network has no packets of its own.
    fn packets(&mut self, labels: &Labels, view: &View, cgroups: &Cgroups) {
        let Some(pod) = &view.pod else { return };
        let on_host = pod.spec.as_ref().and_then(|spec| spec.host_network) == Some(true);
        let mut running = view.observed.running().filter(|_| !on_host);
        let Some(cgroup) = running.find_map(|one| cgroups.of_container(pod, &one.id, "cpu")) else {
            return;
        };
        for one in kernel_counts::packets(&cgroup) {
            let labels = labels.with(&[("interface", &one.interface)]);
            for (family, value) in [
                ("container_network_receive_packets_dropped_total", one.received_dropped),
                ("container_network_receive_packets_total", one.received),
                ("container_network_transmit_packets_dropped_total", one.sent_dropped),
                ("container_network_transmit_packets_total", one.sent),
            ] {
                self.add(family, &labels, Some(value as f64), 0);
            }
        }
    }

    fn pod(&mut self, view: &View, readings: &Readings, cgroups: &Cgroups) {
        let Some(pod) = &view.pod else { return };
        let mut labels = Labels {
            container: String::new(),
            id: cgroups.id_of_pod(pod),
            image: String::new(),
            name: String::new(),
            namespace: names::namespace(pod).to_string(),
            pod: names::name(pod).to_string(),
        };
        let linux = readings.pods.get(names::uid(pod)).and_then(|one| one.linux.as_ref());
        if let Some(linux) = linux {
            linux.cpu.iter().for_each(|used| self.cpu(&labels, used));
            linux.memory.iter().for_each(|used| self.memory(&labels, used));
            linux.network.iter().for_each(|used| self.network(&labels, used));
            if let Some(used) = &linux.process {
                let count = number(&used.process_count);
                self.add("container_processes", &labels.with(&[]), count, used.timestamp);
            }
        }
        self.packets(&labels, view, cgroups);
        for one in view.observed.containers.iter().filter(|one| one.state == State::Running) {
            let Some(stats) = readings.containers.get(&one.id) else { continue };
            labels.container.clone_from(&one.name);
            labels.image.clone_from(&one.image);
            labels.name.clone_from(&one.id);
            labels.id = cgroups.id_of_container(pod, &one.id);
            self.details(&labels, pod, one, cgroups);
            if let Some(cgroup) = cgroups.of_container(pod, &one.id, "cpu") {
                self.kernel(&labels, &cgroup);
            }
            stats.cpu.iter().for_each(|used| self.cpu(&labels, used));
            stats.memory.iter().for_each(|used| self.memory(&labels, used));
            let plain = labels.with(&[]);
            if let Some(layer) = &stats.writable_layer {
                let at = layer.timestamp;
                self.add("container_fs_usage_bytes", &plain, number(&layer.used_bytes), at);
                self.add("container_fs_inodes_used", &plain, number(&layer.inodes_used), at);
            }
            if let Some(swap) = &stats.swap {
                let used = number(&swap.swap_usage_bytes);
                self.add("container_memory_swap", &plain, used, swap.timestamp);
            }
            let start = one.started_at.map(|at| at.as_second() as f64);
            self.add("container_start_time_seconds", &plain, start, 0);
        }
    }
}

/// What cAdvisor reads from a container's cgroup.
struct Specified {
    cpu_period: Option<i64>,
    cpu_quota: Option<i64>,
    cpu_shares: i64,
    /// 0 for no limit.
    memory: i64,
}

fn specified(pod: &Pod, container: &str) -> Specified {
    const PERIOD: i64 = 100_000;
    let spec = pod.spec.as_ref();
    let init = spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
    let mut all = spec.iter().flat_map(|spec| &spec.containers).chain(init);
    let resources = all.find(|one| one.name == container).and_then(|one| one.resources.as_ref());
    let of = |of: Option<&BTreeMap<String, Quantity>>, name: &str, read: fn(&Quantity) -> i64| {
        of?.get(name).map(read)
    };
    let limits = resources.and_then(|one| one.limits.as_ref());
    let requests = resources.and_then(|one| one.requests.as_ref());
    let limit = of(limits, "cpu", quantity::milli);
    let request = of(requests, "cpu", quantity::milli);
    Specified {
        cpu_period: limit.map(|_| PERIOD),
        cpu_quota: limit.map(|milli| milli.saturating_mul(PERIOD) / 1000),
        cpu_shares: cpu_shares(request.or(limit).unwrap_or(0)),
        memory: of(limits, "memory", quantity::units).unwrap_or(0),
    }
}

fn number(value: &Option<UInt64Value>) -> Option<f64> {
    value.as_ref().map(|value| value.value as f64)
}

#[derive(Default)]
struct Labels {
    container: String,
    id: String,
    image: String,
    name: String,
    namespace: String,
    pod: String,
}

impl Labels {
    /// Sorted by name, like cAdvisor's.
    fn with(&self, more: &[(&str, &str)]) -> String {
        let mut all = vec![
            ("container", self.container.as_str()),
            ("id", &self.id),
            ("image", &self.image),
            ("name", &self.name),
            ("namespace", &self.namespace),
            ("pod", &self.pod),
        ];
        all.extend(more);
        all.sort_unstable();
        let pairs: Vec<String> =
            all.iter().map(|(key, value)| format!("{key}={value:?}")).collect();
        pairs.join(",")
    }
}

pub async fn metrics(context: &Context, pods: &PodSet) -> Response<Body> {
    let readings = Readings::take(&*context.runtime).await;
    let mut samples = Samples::default();
    for view in pods.views() {
        samples.pod(&view, &readings, &context.cgroups);
    }
    samples.root(&context.node.machine);
    samples.machine(&context.node.machine);
    let mut out = String::new();
    for (name, kind, help) in FAMILIES {
        if let Some(lines) = samples.0.get(name) {
            let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{lines}");
        }
    }
    prometheus(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_in_order_and_quoted() {
        let labels = Labels {
            container: "c".into(),
            id: "u".into(),
            image: "i".into(),
            name: "n".into(),
            namespace: "ns".into(),
            pod: "p\"q".into(),
        };
        let expected = "container=\"c\",cpu=\"total\",id=\"u\",image=\"i\",name=\"n\",\
                        namespace=\"ns\",pod=\"p\\\"q\"";
        assert_eq!(labels.with(&[("cpu", "total")]), expected);
    }

    #[test]
    fn families_are_sorted() {
        assert!(FAMILIES.is_sorted_by_key(|family| family.0));
    }
}
