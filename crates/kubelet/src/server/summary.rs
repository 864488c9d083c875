//! `/stats/summary`: usage of the node, its pods and their volumes.
//!
//! In: the runtime's counters, the kernel's, the file systems'. Out: upstream's summary JSON.
//! Upstream: `pkg/kubelet/server/stats/summary.go`, `k8s.io/kubelet/pkg/apis/stats/v1alpha1`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use cri::{ContainerStats, CpuUsage, FilesystemUsage, MemoryUsage, NetworkUsage, PodSandboxStats};
use http::Response;
use jiff::Timestamp;
use serde_json::{Map, Value, json};
use transport::Body;

use super::context::Context;
use super::json_answer;
use super::readings::{Rates, Readings, total};
use crate::names;
use crate::node::local_storage::disk_usage;
use crate::node::machine::{self, Disk, available_memory};
use crate::pod::observed::{ObservedContainer, State};
use crate::pod::set::PodSet;
use crate::pod::worker::View;
use crate::volumes::claims::claim_of;
use crate::volumes::csi::usage::{Amount, Usage};
use crate::volumes::{self, PodDir};

pub fn stamp(nanoseconds: i64) -> String {
    let time =
        Timestamp::from_nanosecond(i128::from(nanoseconds)).unwrap_or_else(|_| base::clock::now());
    Timestamp::from_second(time.as_second()).unwrap_or(time).to_string()
}

fn nanoseconds(time: Timestamp) -> i64 {
    i64::try_from(time.as_nanosecond()).unwrap_or(i64::MAX)
}

/// Drops the values that are unknown.
fn known<const N: usize>(pairs: [(&str, Option<u64>); N]) -> Map<String, Value> {
    let pairs = pairs.into_iter();
    pairs.filter_map(|(key, value)| Some((key.to_string(), json!(value?)))).collect()
}

fn value(number: &Option<cri::UInt64Value>) -> Option<u64> {
    number.as_ref().map(|number| number.value)
}

fn cpu(id: &str, cpu: &CpuUsage, start: i64, rates: &Rates) -> Value {
    let used = total(cpu);
    let rate =
        value(&cpu.usage_nano_cores).unwrap_or_else(|| rates.rate(id, cpu.timestamp, used, start));
    json!({"time": stamp(cpu.timestamp), "usageNanoCores": rate, "usageCoreNanoSeconds": used})
}

fn memory(memory: &MemoryUsage) -> Value {
    let mut out = known([
        ("availableBytes", value(&memory.available_bytes)),
        ("usageBytes", value(&memory.usage_bytes)),
        ("workingSetBytes", value(&memory.working_set_bytes)),
        ("rssBytes", value(&memory.rss_bytes)),
        ("pageFaults", value(&memory.page_faults)),
        ("majorPageFaults", value(&memory.major_page_faults)),
    ]);
    out.insert("time".into(), json!(stamp(memory.timestamp)));
    out.into()
}

fn network(network: &NetworkUsage) -> Value {
    let interface = |one: &cri::NetworkInterfaceUsage| {
        let mut out = known([
            ("rxBytes", value(&one.rx_bytes)),
            ("rxErrors", value(&one.rx_errors)),
            ("txBytes", value(&one.tx_bytes)),
            ("txErrors", value(&one.tx_errors)),
        ]);
        out.insert("name".into(), json!(one.name));
        out
    };
    let mut out = network.default_interface.as_ref().map(interface).unwrap_or_default();
    out.insert("time".into(), json!(stamp(network.timestamp)));
    let all: Vec<_> = network.interfaces.iter().map(interface).collect();
    out.insert("interfaces".into(), json!(all));
    out.into()
}

/// A file system, with `used` bytes and `inodes` of one user.
fn fs_of(disk: &Disk, used: Option<u64>, inodes: Option<u64>, now: &str) -> Map<String, Value> {
    let mut out = known([
        ("availableBytes", Some(disk.free_bytes)),
        ("capacityBytes", Some(disk.bytes)),
        ("usedBytes", used),
        ("inodesFree", Some(disk.free_inodes)),
        ("inodes", Some(disk.inodes)),
        ("inodesUsed", inodes),
    ]);
    out.insert("time".into(), json!(now));
    out
}

fn whole(disk: &Disk, now: &str) -> Map<String, Value> {
    let used = disk.bytes.saturating_sub(disk.free_bytes);
    fs_of(disk, Some(used), Some(disk.inodes.saturating_sub(disk.free_inodes)), now)
}

pub async fn summary(context: &Context, pods: &PodSet, rates: &Rates) -> Response<Body> {
    let readings = Readings::take(&*context.runtime).await;
    let views: Vec<View> = pods.views();
    let disks = directories(context, &views).await;
    let now = base::clock::now_seconds().to_string();
    let disk = Disk::of(&context.node.config.root_dir).unwrap_or_default();
    let world = World { readings: &readings, rates, disks: &disks, disk: &disk, now: &now };
    let mut items = vec![];
    for view in &views {
        items.extend(world.pod(context, view).await);
    }
    let node = world.node(context).await;
    rates.forget_others();
    json_answer(&json!({"node": node, "pods": items}))
}

/// Bytes in the pods' directories: volumes and logs.
async fn directories(context: &Context, views: &[View]) -> BTreeMap<PathBuf, u64> {
    let mut wanted = vec![];
    for view in views {
        let Some(pod) = &view.pod else { continue };
        let dir = PodDir::new(&context.node.config.root_dir, names::uid(pod));
        wanted.extend(volumes::local_storage(pod, &dir).into_values());
        let logs = names::log_directory(&context.node.config.log_dir, pod);
        wanted.extend(view.observed.containers.iter().map(|one| logs.join(&one.name)));
    }
    let walked = tokio::task::spawn_blocking(move || {
        let size = |path: PathBuf| (path.clone(), disk_usage(&path).max(0) as u64);
        wanted.into_iter().map(size).collect()
    });
    walked.await.unwrap_or_default()
}

/// Usage of a claim's volume: the driver's numbers, else the file system's.
pub async fn usage(context: &Context, view: &View, volume: &str) -> Option<Usage> {
    let pod = view.pod.as_ref()?;
    if let Some(usage) = context.csi.usage(names::uid(pod), volume).await {
        return Some(usage);
    }
    let disk = Disk::of(view.claims.get(volume)?)?;
    let amount = |total: u64, free: u64| {
        Some(Amount { available: free, total, used: total.saturating_sub(free) })
    };
    Some(Usage {
        bytes: amount(disk.bytes, disk.free_bytes),
        inodes: amount(disk.inodes, disk.free_inodes),
    })
}

struct World<'a> {
    readings: &'a Readings,
    rates: &'a Rates,
    disks: &'a BTreeMap<PathBuf, u64>,
    /// The kubelet's file system.
    disk: &'a Disk,
    now: &'a str,
}

impl World<'_> {
    async fn pod(&self, context: &Context, view: &View) -> Option<Value> {
        let pod = view.pod.as_ref()?;
        let uid = names::uid(pod);
        let logs = names::log_directory(&context.node.config.log_dir, pod);
        let running = view.observed.containers.iter().filter(|c| c.state == State::Running);
        let containers: Vec<Value> =
            running.filter_map(|container| self.container(container, &logs)).collect();
        let volumes = self.volumes(context, view).await;
        let bytes = |tree: &Value| tree["usedBytes"].as_u64().unwrap_or(0);
        let on_disk: u64 = containers.iter().map(|c| bytes(&c["rootfs"]) + bytes(&c["logs"])).sum();
        let local: u64 = volumes.iter().filter(|v| v["pvcRef"].is_null()).map(bytes).sum();
        let start = view.status.start_time.as_ref().map_or(0, |time| nanoseconds(time.0));
        let mut out = json!({
            "podRef": {"name": names::name(pod), "namespace": names::namespace(pod), "uid": uid},
            "startTime": view.status.start_time,
            "containers": containers,
            "ephemeral-storage": fs_of(self.disk, Some(on_disk + local), None, self.now),
        });
        if !volumes.is_empty() {
            out["volume"] = json!(volumes);
        }
        let figures = self.readings.pods.get(uid);
        self.pod_figures(&mut out, uid, figures, start);
        Some(out)
    }

    /// CPU, memory, network and processes: the pod's own numbers, or the sum of its containers'.
    fn pod_figures(
        &self,
        out: &mut Value,
        uid: &str,
        figures: Option<&PodSandboxStats>,
        start: i64,
    ) {
        let linux = figures.and_then(|figures| figures.linux.as_ref());
        let of = |key: &str| -> Vec<Value> {
            let all = out["containers"].as_array().into_iter().flatten();
            all.filter_map(|one| one.get(key).cloned()).collect()
        };
        let (cpus, memories) = (of("cpu"), of("memory"));
        out["cpu"] = match linux.and_then(|linux| linux.cpu.as_ref()) {
            Some(used) => cpu(uid, used, start, self.rates),
            None => sum(&cpus),
        };
        out["memory"] = match linux.and_then(|linux| linux.memory.as_ref()) {
            Some(used) => memory(used),
            None => sum(&memories),
        };
        if let Some(used) = linux.and_then(|linux| linux.network.as_ref()) {
            out["network"] = network(used);
        }
        if let Some(used) = linux.and_then(|linux| linux.process.as_ref()) {
            out["process_stats"] = known([("process_count", value(&used.process_count))]).into();
        }
    }

    fn container(&self, container: &ObservedContainer, logs: &Path) -> Option<Value> {
        let stats: &ContainerStats = self.readings.containers.get(&container.id)?;
        let start = container.started_at.map_or(0, nanoseconds);
        let mut out = json!({
            "name": container.name,
            "startTime": container.started_at.map(|time| stamp(nanoseconds(time))),
            "rootfs": self.layer(stats.writable_layer.as_ref()),
            "logs": fs_of(self.disk, self.disks.get(&logs.join(&container.name)).copied(), None, self.now),
        });
        if let Some(used) = &stats.cpu {
            out["cpu"] = cpu(&container.id, used, start, self.rates);
        }
        if let Some(used) = &stats.memory {
            out["memory"] = memory(used);
        }
        if let Some(swap) = &stats.swap {
            let mut used = known([
                ("swapAvailableBytes", value(&swap.swap_available_bytes)),
                ("swapUsageBytes", value(&swap.swap_usage_bytes)),
            ]);
            used.insert("time".into(), json!(stamp(swap.timestamp)));
            out["swap"] = used.into();
        }
        Some(out)
    }

    fn layer(&self, usage: Option<&FilesystemUsage>) -> Map<String, Value> {
        let used = usage.and_then(|usage| value(&usage.used_bytes));
        let inodes = usage.and_then(|usage| value(&usage.inodes_used));
        fs_of(self.disk, used, inodes, self.now)
    }

    async fn volumes(&self, context: &Context, view: &View) -> Vec<Value> {
        let Some(pod) = &view.pod else { return vec![] };
        let dir = PodDir::new(&context.node.config.root_dir, names::uid(pod));
        let (own, mut out) = (volumes::local_storage(pod, &dir), vec![]);
        for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
            let claim = claim_of(names::name(pod), volume);
            let mut fs = match own.get(&volume.name) {
                Some(path) => {
                    let disk = Disk::of(path).unwrap_or_default();
                    fs_of(&disk, self.disks.get(path).copied(), None, self.now)
                }
                None => match usage(context, view, &volume.name).await {
                    Some(usage) => self.drivers(&usage),
                    None => continue,
                },
            };
            fs.insert("name".into(), json!(volume.name));
            if let Some(claim) = claim {
                let reference = json!({"name": claim, "namespace": names::namespace(pod)});
                fs.insert("pvcRef".into(), reference);
            }
            out.push(fs.into());
        }
        out
    }

    fn drivers(&self, usage: &Usage) -> Map<String, Value> {
        let mut out = known([
            ("availableBytes", usage.bytes.map(|all| all.available)),
            ("capacityBytes", usage.bytes.map(|all| all.total)),
            ("usedBytes", usage.bytes.map(|all| all.used)),
            ("inodesFree", usage.inodes.map(|all| all.available)),
            ("inodes", usage.inodes.map(|all| all.total)),
            ("inodesUsed", usage.inodes.map(|all| all.used)),
        ]);
        out.insert("time".into(), json!(self.now));
        out
    }

    async fn node(&self, context: &Context) -> Value {
        let now = nanoseconds(base::clock::now());
        let boot = machine::boot_time();
        let available = available_memory();
        let used = (context.node.machine.memory.max(0) as u64).saturating_sub(available);
        let busy = machine::cpu_nanoseconds();
        let (running, limit) = machine::processes();
        let rate = self.rates.rate("node", now, busy, boot.saturating_mul(1_000_000_000));
        let faults = machine::page_faults();
        let images = context.runtime.image_fs_info().await.unwrap_or_default();
        let (swap, swap_free) = machine::swap();
        let mut out = json!({
            "nodeName": context.node.config.node_name,
            "startTime": stamp(boot.saturating_mul(1_000_000_000)),
            "cpu": {"time": self.now, "usageNanoCores": rate, "usageCoreNanoSeconds": busy},
            "memory": {"time": self.now, "availableBytes": available, "usageBytes": used,
                "workingSetBytes": used, "rssBytes": machine::anonymous_memory(),
                "pageFaults": faults.0, "majorPageFaults": faults.1},
            "fs": whole(self.disk, self.now),
            "runtime": {"imageFs": self.layer(images.image_filesystems.first()),
                "containerFs": self.layer(images.container_filesystems.first())},
            "rlimit": {"time": self.now, "maxpid": limit, "curproc": running},
            "swap": {"time": self.now, "swapAvailableBytes": swap_free,
                "swapUsageBytes": swap.saturating_sub(swap_free)},
        });
        if let Some(network) = node_network(self.now) {
            out["network"] = network;
        }
        for (key, file) in [("cpu", "cpu"), ("memory", "memory"), ("io", "io")] {
            let text = fs::read_to_string(format!("/proc/pressure/{file}")).unwrap_or_default();
            if let Some(pressure) = pressure(&text) {
                out[key]["time"] = json!(self.now);
                out[key]["psi"] = pressure;
            }
        }
        out
    }
}

/// The kernel's PSI statistics as JSON.
fn pressure(text: &str) -> Option<Value> {
    let none = || json!({"total": 0, "avg10": 0.0, "avg60": 0.0, "avg300": 0.0});
    let mut out = json!({"full": none(), "some": none()});
    let mut found = false;
    for line in text.lines() {
        let (kind, rest) = line.split_once(' ')?;
        for pair in rest.split_whitespace() {
            let (key, number) = pair.split_once('=')?;
            out[kind][key] = match key {
                // The kernel counts microseconds, upstream nanoseconds.
                "total" => json!(number.parse::<u64>().ok()?.saturating_mul(1000)),
                _ => json!(number.parse::<f64>().ok()?),
            };
        }
        found = true;
    }
    found.then_some(out)
}

/// All interfaces of the node; the default route's comes first and is also the node's own.
fn node_network(now: &str) -> Option<Value> {
    let table = fs::read_to_string("/proc/thread-self/net/dev").ok()?;
    let routes = fs::read_to_string("/proc/thread-self/net/route").unwrap_or_default();
    let main = default_interface(&routes);
    let mut all = vec![];
    for line in table.lines().skip(2) {
        let (name, numbers) = line.split_once(':')?;
        let numbers: Vec<u64> = numbers.split_whitespace().filter_map(|n| n.parse().ok()).collect();
        // The pods' ends of veth pairs are reported with the pods.
        let name = name.trim();
        if name == "lo" || name.starts_with("veth") {
            continue;
        }
        let at = |index: usize| numbers.get(index).copied().unwrap_or(0);
        all.push(json!({"name": name, "rxBytes": at(0), "rxErrors": at(2), "txBytes": at(8),
            "txErrors": at(10)}));
    }
    let main = all.iter().find(|one| main.is_some_and(|main| one["name"] == main));
    let mut out = main.cloned().unwrap_or_else(|| json!({"name": ""}));
    out["time"] = json!(now);
    out["interfaces"] = json!(all);
    Some(out)
}

fn default_interface(routes: &str) -> Option<&str> {
    routes.lines().skip(1).find_map(|line| {
        let mut fields = line.split_whitespace();
        let (name, target) = (fields.next()?, fields.next()?);
        (target == "00000000").then_some(name)
    })
}

/// Adds the numbers of several samples; texts come from the first.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_pressure() {
        let text = "some avg10=1.50 avg60=0.00 avg300=0.10 total=7\n\
                    full avg10=0.00 avg60=0.00 avg300=0.00 total=2\n";
        let expected = json!({
            "some": {"avg10": 1.5, "avg60": 0.0, "avg300": 0.1, "total": 7000},
            "full": {"avg10": 0.0, "avg60": 0.0, "avg300": 0.0, "total": 2000}});
        assert_eq!(pressure(text), Some(expected));
        assert_eq!(pressure(""), None);
        assert_eq!(pressure("nonsense"), None);
    }

    #[test]
    fn the_default_routes_interface() {
        let table = "Iface\tDestination\tGateway\ncni0\t00002A0A\t0\neth0\t00000000\t0100A8C0\n";
        assert_eq!(default_interface(table), Some("eth0"));
        assert_eq!(default_interface("Iface\n"), None);
    }

    #[test]
    fn sums_of_containers() {
        let all = [json!({"time": "t", "a": 1}), json!({"time": "u", "a": 2})];
        assert_eq!(sum(&all), json!({"time": "t", "a": 3}));
        assert_eq!(sum(&[]), json!({}));
    }
}
