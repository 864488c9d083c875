//! The cgroups above containers: kubepods, its QoS classes, and one per pod.
//!
//! ```text
//! <root>/kubepods                    all pods, Guaranteed ones directly below: the node's allocatable
//! <root>/kubepods/burstable          CPU weight: the sum of its pods' requests
//! <root>/kubepods/besteffort         the lowest weight
//! <root>/kubepods[/<qos>]/pod<uid>   the cgroup parent that the runtime gets
//! ```
//!
//! In: pods. Out: directories with limits in every hierarchy. cgroup v1 has a hierarchy per
//! controller, v2 has one; a hybrid machine is treated as v1.
//! Invariant: a limit that cannot be set is logged; the pod runs anyway.
//! With the systemd driver the same tree is made of slices ([`slices`]).
//! Upstream: `pkg/kubelet/cm`, cgroupfs driver. Deviation: each pod updates the weight of the burstable
//! class at once, where upstream does so once a minute.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use base::metrics::Timer;
use cri::{CgroupDriver, ContainerConfig, HugepageLimit, LinuxContainerResources};
use k8s_openapi::api::core::v1::{Container, Pod};

use crate::config::{KernelLimits, Swap};
use crate::managers::machine::huge_page_resource;
use crate::names;
use crate::node::machine::Machine;
use crate::node::reserve::Limits;
use crate::node::{families, slices};
use crate::pod::amounts::Resource;
use crate::pod::sandbox::pod_resources;
use crate::resources::{
    self, BEST_EFFORT, BURSTABLE, Cfs, MIN_SHARES, cpu_shares, cpu_weight, huge_page_size,
    pod_limits, pod_requests, qos_class,
};

const CONTROLLERS: [&str; 8] =
    ["cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "hugetlb", "pids"];
/// The empty hierarchy of version 2 on a hybrid machine.
const UNIFIED: &str = "unified";

/// Where the cgroup hierarchies are mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Mount point by controller, or by `name=…` for a named hierarchy; controllers may share one.
    V1(BTreeMap<String, PathBuf>),
    V2(PathBuf),
    None,
}

impl Layout {
    /// Reads a mountinfo table.
    pub fn parse(mountinfo: &str) -> Self {
        let (mut v1, mut v2) = (BTreeMap::new(), None);
        for line in mountinfo.lines() {
            let Some((left, right)) = line.split_once(" - ") else { continue };
            let Some(point) = left.split(' ').nth(4) else { continue };
            let mut right = right.split(' ');
            match right.next() {
                Some("cgroup") => {
                    let options = right.nth(1).unwrap_or_default();
                    let known = |o: &&str| CONTROLLERS.contains(o) || o.starts_with("name=");
                    for controller in options.split(',').filter(known) {
                        v1.entry(controller.to_string()).or_insert_with(|| PathBuf::from(point));
                    }
                }
                Some("cgroup2") if v2.is_none() => v2 = Some(PathBuf::from(point)),
                _ => {}
            }
        }
        match v2 {
            None if v1.is_empty() => Self::None,
            Some(root) if v1.is_empty() => Self::V2(root),
            unified => {
                v1.extend(unified.map(|point| (UNIFIED.to_string(), point)));
                Self::V1(v1)
            }
        }
    }

    pub fn of_this_machine() -> Self {
        fs::read_to_string("/proc/self/mountinfo").map_or(Self::None, |table| Self::parse(&table))
    }
}

pub struct Cgroups {
    layout: Layout,
    /// `/` or `/<cluster>`: the parent of `kubepods`.
    root: String,
    enabled: bool,
    /// The creator of the cgroups: the kubelet, or systemd ([`slices`]).
    driver: CgroupDriver,
    settings: KernelLimits,
    /// Of the machine, in bytes.
    memory: i64,
    swap: i64,
    /// The sizes of huge pages that the machine has, in bytes.
    huge_pages: Vec<u64>,
    /// Guards a sum and its parts; held while the sum is written, so that the newest sum is written last.
    burstable: Mutex<Burstable>,
}

/// CPU requests of the burstable pods, in thousandths, by uid.
#[derive(Default)]
struct Burstable {
    requests: BTreeMap<String, i64>,
    sum: i64,
}

impl Cgroups {
    pub fn new(layout: Layout, root: &str, enabled: bool) -> Self {
        let root = root.trim_end_matches('/').to_string();
        let driver = CgroupDriver::Cgroupfs;
        Self {
            layout,
            root,
            enabled,
            driver,
            settings: KernelLimits::default(),
            memory: 0,
            swap: 0,
            huge_pages: vec![],
            burstable: Mutex::default(),
        }
    }

    /// With the node's settings.
    pub fn with(self, settings: KernelLimits, machine: &Machine) -> Self {
        let huge_pages = machine.hardware.huge_pages().into_keys().collect();
        Self { settings, memory: machine.memory, swap: machine.swap, huge_pages, ..self }
    }

    pub fn driven_by(self, driver: CgroupDriver) -> Self {
        Self { driver, ..self }
    }

    /// The parent of the pod's containers, in the form that the runtime expects.
    pub fn pod_path(&self, pod: &Pod) -> String {
        match self.driver {
            CgroupDriver::Cgroupfs => self.pod_directory(pod),
            CgroupDriver::Systemd => slices::name(&self.pod_directory(pod)),
        }
    }

    fn pod_directory(&self, pod: &Pod) -> String {
        let class = match qos_class(pod) {
            BURSTABLE => "/burstable",
            BEST_EFFORT => "/besteffort",
            _ => "",
        };
        format!("{}/kubepods{class}/pod{}", self.root, names::uid(pod))
    }

    /// The directory of one controller of a container; `None` where the runtime chooses the names of its
    /// cgroups.
    pub fn of_container(&self, pod: &Pod, id: &str, controller: &str) -> Option<PathBuf> {
        let ours = self.enabled && self.driver == CgroupDriver::Cgroupfs;
        ours.then(|| self.file(controller, &self.pod_directory(pod), id)).flatten()
    }

    /// A pod's name in cAdvisor's metrics: the path of its cgroup.
    pub fn id_of_pod(&self, pod: &Pod) -> String {
        let path = self.pod_directory(pod);
        match self.driver {
            CgroupDriver::Cgroupfs => path,
            CgroupDriver::Systemd => slices::directory(&path),
        }
    }

    /// The same of a container. Under systemd the runtime chooses the last part; this is containerd's choice.
    pub fn id_of_container(&self, pod: &Pod, id: &str) -> String {
        let pod = self.id_of_pod(pod);
        match self.driver {
            CgroupDriver::Cgroupfs => format!("{pod}/{id}"),
            CgroupDriver::Systemd => format!("{pod}/cri-containerd-{id}.scope"),
        }
    }

    /// Creates the cgroups that all pods share; `node`: the limits of all pods together.
    pub fn prepare(&self, node: &Limits) {
        if !self.enabled {
            return;
        }
        self.make(&format!("{}/kubepods", self.root), node);
        let weak = LinuxContainerResources { cpu_shares: MIN_SHARES, ..Default::default() };
        let weak = Limits { resources: weak, pids: 0 };
        for class in ["burstable", "besteffort"] {
            self.make(&format!("{}/kubepods/{class}", self.root), &weak);
        }
    }

    /// Creates a cgroup with these limits.
    fn make(&self, path: &str, limits: &Limits) {
        if self.driver == CgroupDriver::Systemd {
            self.warn("set", self.limit_slice(path, limits));
            return;
        }
        self.warn("create", self.create(path));
        self.limit_directory(path, limits);
    }

    fn limit_directory(&self, path: &str, Limits { resources: limits, pids }: &Limits) {
        if limits.cpu_shares > 0 {
            self.warn("set", self.set_shares(path, limits.cpu_shares));
        }
        if limits.cpu_quota > 0 {
            self.warn("set", self.set_quota(path, limits.cpu_quota, limits.cpu_period));
        }
        if limits.memory_limit_in_bytes > 0 {
            self.warn("set", self.set_memory(path, limits.memory_limit_in_bytes));
        }
        if *pids > 0 {
            let value = [pids.to_string(), pids.to_string()];
            self.warn("set", self.write("pids", path, "pids.max", "pids.max", value));
        }
        for huge in &limits.hugepage_limits {
            let (size, value) = (&huge.page_size, huge.limit.to_string());
            let names = [format!("hugetlb.{size}.limit_in_bytes"), format!("hugetlb.{size}.max")];
            let done =
                self.write("hugetlb", path, &names[0], &names[1], [value.clone(), value.clone()]);
            self.warn("set", done);
        }
    }

    /// Limits a cgroup of the system. It must exist: the kubelet does not move processes there.
    pub fn limit_existing(&self, path: &str, limits: &Limits) -> io::Result<()> {
        let at = match self.driver {
            CgroupDriver::Cgroupfs => path.to_owned(),
            CgroupDriver::Systemd => slices::directory(path),
        };
        let has = |dir: &PathBuf| dir.is_dir();
        if !self.directories(&at).iter().any(has) {
            let text = format!("cgroup {path:?} does not exist");
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        }
        match self.driver {
            CgroupDriver::Systemd => self.limit_slice(path, limits),
            CgroupDriver::Cgroupfs => {
                self.limit_directory(path, limits);
                Ok(())
            }
        }
    }

    /// The memory that all pods together can still use, and their limit; `None` without a limit.
    pub fn memory_of_pods(&self) -> Option<(u64, u64)> {
        if !self.enabled {
            return None;
        }
        let path = format!("{}/kubepods", self.root);
        let path = match self.driver {
            CgroupDriver::Cgroupfs => path,
            CgroupDriver::Systemd => slices::directory(&path),
        };
        let is_v2 = matches!(self.layout, Layout::V2(_));
        let all = self.limit("memory", &path, "memory.limit_in_bytes", "memory.max");
        // Version 1 shows a very large number instead of no limit.
        let limit = u64::try_from(all).ok().filter(|limit| *limit < 1 << 60)?;
        let read = |name: &str| fs::read_to_string(self.file("memory", &path, name)?).ok();
        let used: u64 = read(if is_v2 { "memory.current" } else { "memory.usage_in_bytes" })?
            .trim()
            .parse()
            .ok()?;
        let field = if is_v2 { "inactive_file " } else { "total_inactive_file " };
        let stat = read("memory.stat").unwrap_or_default();
        let line = stat.lines().find_map(|line| line.strip_prefix(field));
        let inactive: u64 = line.and_then(|number| number.trim().parse().ok()).unwrap_or(0);
        Some((limit.saturating_sub(used.saturating_sub(inactive)), limit))
    }

    /// The number of processes of a pod.
    pub fn processes_of(&self, pod: &Pod) -> i64 {
        let path = self.id_of_pod(pod);
        let file = self.file("pids", &path, "pids.current").filter(|_| self.enabled);
        let text = file.and_then(|file| fs::read_to_string(file).ok()).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }

    /// Adds the pod's requests to those of its class, or updates them.
    pub fn count_pod(&self, pod: &Pod) {
        if !self.enabled {
            return;
        }
        let request = || pod.spec.as_ref().and_then(|spec| pod_requests(spec).remove("cpu"));
        let request = (qos_class(pod) == BURSTABLE).then(|| request().unwrap_or(0));
        self.count(names::uid(pod), request);
    }

    fn count(&self, uid: &str, request: Option<i64>) {
        let mut burstable = self.burstable.lock().expect("no panic while held");
        let before = match request {
            Some(request) => burstable.requests.insert(uid.to_string(), request),
            None => burstable.requests.remove(uid),
        };
        let sum = burstable.sum - before.unwrap_or(0) + request.unwrap_or(0);
        if sum == burstable.sum {
            return;
        }
        burstable.sum = sum;
        let path = format!("{}/kubepods/burstable", self.root);
        let shares = cpu_shares(sum);
        let done = match self.driver {
            CgroupDriver::Cgroupfs => self.set_shares(&path, shares),
            CgroupDriver::Systemd => {
                let resources =
                    LinuxContainerResources { cpu_shares: shares, ..Default::default() };
                self.limit_slice(&path, &Limits { resources, pids: 0 })
            }
        };
        self.warn("set", done);
    }

    /// Adds the settings that a container gets on this machine: its swap, and with cgroup v2 the OOM killer
    /// ends all of its processes together.
    pub fn for_container(
        &self,
        mut limits: LinuxContainerResources,
        pod: &Pod,
        container: &Container,
    ) -> LinuxContainerResources {
        match &self.layout {
            Layout::V2(_) => {
                if !self.settings.kills_single_processes {
                    limits.unified.insert("memory.oom.group".into(), "1".into());
                }
                if self.counts_swap("memory.swap.max") {
                    let swap = self.swap_of(pod, container).to_string();
                    limits.unified.insert("memory.swap.max".into(), swap);
                }
            }
            Layout::V1(_) if self.counts_swap("memory.memsw.limit_in_bytes") => {
                // The limit for memory and swap together.
                limits.memory_swap_limit_in_bytes = limits.memory_limit_in_bytes;
            }
            _ => {}
        }
        limits
    }

    /// The container's swap in bytes: with `LimitedSwap`, containers of Burstable pods get a share as large
    /// as that of their memory request. Upstream: `calcSwapForBurstable...`, only with cgroup v2.
    fn swap_of(&self, pod: &Pod, container: &Container) -> i64 {
        let own = container.resources.as_ref();
        let request = resources::request(own, "memory").map_or(0, resources::units);
        let limit = resources::limit(own, "memory").map_or(0, resources::units);
        let is_critical =
            pod.spec.as_ref().and_then(|s| s.priority).is_some_and(|p| p >= 2_000_000_000);
        let swaps = self.settings.swap == Swap::Limited
            && qos_class(pod) == BURSTABLE
            && !is_critical
            && request > 0
            && request != limit;
        if !swaps {
            return 0;
        }
        let share = i128::from(request) * i128::from(self.swap) / i128::from(self.memory.max(1));
        i64::try_from(share).unwrap_or(i64::MAX)
    }

    /// [`Cgroups::for_container`], for a container that is not created yet.
    pub fn with_limits(
        &self,
        mut config: ContainerConfig,
        pod: &Pod,
        container: &Container,
    ) -> ContainerConfig {
        if let Some(linux) = &mut config.linux {
            let limits = linux.resources.take();
            linux.resources = limits.map(|limits| self.for_container(limits, pod, container));
        }
        config
    }

    fn counts_swap(&self, file: &str) -> bool {
        // The root of cgroup v2 has no limits; `kubepods` has them.
        let path = if self.enabled { format!("{}/kubepods", self.root) } else { self.root.clone() };
        self.file("memory", &path, file).is_some_and(|file| file.exists())
    }

    /// Creates the pod's cgroup with its limits.
    pub fn create_pod(&self, pod: &Pod, cfs: Cfs) {
        if !self.enabled {
            return;
        }
        let timer = Timer::start();
        let mut resources = pod_resources(pod, cfs);
        resources.hugepage_limits = self.huge_pages_of(pod);
        let pids = self.settings.pod_pids.unwrap_or(0);
        self.make(&self.pod_directory(pod), &Limits { resources, pids });
        families::cgroup_changed("create", timer);
    }

    /// The pod's huge pages of each size that the machine has; a pod that asks for none gets none.
    fn huge_pages_of(&self, pod: &Pod) -> Vec<HugepageLimit> {
        let limits = pod.spec.as_ref().map(pod_limits).unwrap_or_default();
        let one = |size: &u64| {
            let resource = huge_page_resource(*size);
            let page_size = huge_page_size(resource.strip_prefix("hugepages-")?)?;
            let limit = limits.get(&resource).map_or(0, |milli| milli / 1000);
            Some(HugepageLimit { page_size, limit: u64::try_from(limit).unwrap_or_default() })
        };
        self.huge_pages.iter().filter_map(one).collect()
    }

    /// Sets one resource of the pod's cgroup: a limit that `grows` before its containers change, a limit
    /// that shrinks after them.
    pub fn resize_pod(
        &self,
        pod: &Pod,
        limits: &cri::LinuxContainerResources,
        resource: Resource,
        grows: bool,
    ) -> io::Result<()> {
        if !self.enabled {
            return Ok(());
        }
        let path = self.pod_directory(pod);
        let at = match self.driver {
            CgroupDriver::Cgroupfs => path.clone(),
            CgroupDriver::Systemd => slices::directory(&path),
        };
        // Zero means that no limit is requested. A resize never removes a limit.
        let due = |wanted: i64, now: i64| wanted > 0 && wanted != now && (wanted > now) == grows;
        let mut change = LinuxContainerResources::default();
        match resource {
            Resource::Memory => {
                let wanted = limits.memory_limit_in_bytes;
                if due(wanted, self.limit("memory", &at, "memory.limit_in_bytes", "memory.max")) {
                    change.memory_limit_in_bytes = wanted;
                }
            }
            Resource::Cpu => {
                if due(limits.cpu_quota, self.limit("cpu", &at, "cpu.cfs_quota_us", "cpu.max")) {
                    (change.cpu_quota, change.cpu_period) = (limits.cpu_quota, limits.cpu_period);
                }
                let is_v2 = matches!(self.layout, Layout::V2(_));
                let shares = limits.cpu_shares;
                let wanted = if is_v2 { cpu_weight(shares) } else { shares };
                if due(wanted, self.limit("cpu", &at, "cpu.shares", "cpu.weight")) {
                    change.cpu_shares = shares;
                }
            }
        }
        if self.driver == CgroupDriver::Systemd {
            return self.limit_slice(&path, &Limits { resources: change, pids: 0 });
        }
        if change.memory_limit_in_bytes > 0 {
            self.set_memory(&path, change.memory_limit_in_bytes)?;
        }
        if change.cpu_quota > 0 {
            self.set_quota(&path, change.cpu_quota, change.cpu_period)?;
        }
        if change.cpu_shares > 0 {
            self.set_shares(&path, change.cpu_shares)?;
        }
        Ok(())
    }

    /// The value in force; `i64::MAX` for "no limit" (v1: negative, v2: `max`).
    fn limit(&self, controller: &str, path: &str, v1: &str, v2: &str) -> i64 {
        let name = if matches!(self.layout, Layout::V2(_)) { v2 } else { v1 };
        let text = self.file(controller, path, name).and_then(|f| fs::read_to_string(f).ok());
        let text = text.unwrap_or_default();
        let number = text.split_whitespace().next().and_then(|word| word.parse::<i64>().ok());
        number.filter(|number| *number >= 0).unwrap_or(i64::MAX)
    }

    /// Removes the rest of the pod's cgroup; the runtime removed those of its containers.
    pub fn remove_pod(&self, uid: &str) {
        if !self.enabled {
            return;
        }
        self.count(uid, None);
        let timer = Timer::start();
        for class in ["", "/burstable", "/besteffort"] {
            let path = format!("{}/kubepods{class}/pod{uid}", self.root);
            if self.driver == CgroupDriver::Systemd {
                // The pod is in one class only; for the other classes systemd knows no slice.
                let _ = slices::remove(&slices::name(&path));
                continue;
            }
            for dir in self.directories(&path) {
                if dir.is_dir() {
                    self.warn("remove", remove_tree(&dir));
                }
            }
        }
        families::cgroup_changed("destroy", timer);
    }

    fn limit_slice(&self, path: &str, limits: &Limits) -> io::Result<()> {
        let is_v2 = matches!(self.layout, Layout::V2(_));
        let mut properties = slices::properties(&limits.resources, is_v2);
        if limits.pids > 0 {
            properties.push(format!("TasksMax={}", limits.pids));
        }
        slices::set(&slices::name(path), &properties)
    }

    fn warn(&self, what: &str, done: io::Result<()>) {
        if let Err(error) = done {
            tracing::debug!(%error, what, "failed to change a cgroup");
        }
    }

    fn directories(&self, path: &str) -> Vec<PathBuf> {
        let below = |root: &Path| root.join(path.trim_start_matches('/'));
        match &self.layout {
            Layout::V1(points) => {
                let mut all: Vec<PathBuf> = points.values().map(|p| below(p)).collect();
                all.sort_unstable();
                all.dedup();
                all
            }
            Layout::V2(root) => vec![below(root)],
            Layout::None => vec![],
        }
    }

    fn create(&self, path: &str) -> io::Result<()> {
        for dir in self.directories(path) {
            fs::create_dir_all(&dir)?;
        }
        if let Layout::V2(root) = &self.layout {
            // A controller must be enabled in every ancestor.
            let mut at = root.clone();
            for part in path.split('/').filter(|part| !part.is_empty()) {
                for controller in ["cpu", "cpuset", "hugetlb", "memory", "pids"] {
                    let _ = fs::write(at.join("cgroup.subtree_control"), format!("+{controller}"));
                }
                at = at.join(part);
            }
        }
        if let Layout::V1(points) = &self.layout
            && let Some(root) = points.get("cpuset")
        {
            inherit_cpuset(root, path)?;
        }
        Ok(())
    }

    fn file(&self, controller: &str, path: &str, name: &str) -> Option<PathBuf> {
        let root = match &self.layout {
            Layout::V1(points) => points.get(controller)?,
            Layout::V2(root) => root,
            Layout::None => return None,
        };
        Some(root.join(path.trim_start_matches('/')).join(name))
    }

    fn write(
        &self,
        controller: &str,
        path: &str,
        v1: &str,
        v2: &str,
        value: [String; 2],
    ) -> io::Result<()> {
        let [old, new] = value;
        let (name, value) =
            if matches!(self.layout, Layout::V2(_)) { (v2, new) } else { (v1, old) };
        match self.file(controller, path, name) {
            Some(file) => fs::write(file, value),
            None => Ok(()),
        }
    }

    fn set_shares(&self, path: &str, shares: i64) -> io::Result<()> {
        let value = [shares.to_string(), cpu_weight(shares).to_string()];
        self.write("cpu", path, "cpu.shares", "cpu.weight", value)
    }

    fn set_quota(&self, path: &str, quota: i64, period: i64) -> io::Result<()> {
        if !matches!(self.layout, Layout::V2(_)) {
            let value = [period.to_string(), String::new()];
            self.write("cpu", path, "cpu.cfs_period_us", "", value)?;
        }
        let value = [quota.to_string(), format!("{quota} {period}")];
        self.write("cpu", path, "cpu.cfs_quota_us", "cpu.max", value)
    }

    fn set_memory(&self, path: &str, bytes: i64) -> io::Result<()> {
        let value = [bytes.to_string(), bytes.to_string()];
        self.write("memory", path, "memory.limit_in_bytes", "memory.max", value)
    }
}

/// v1: a new cpuset is empty, and no process can run in it until it has its parent's values.
fn inherit_cpuset(root: &Path, path: &str) -> io::Result<()> {
    let mut at = root.to_path_buf();
    for part in path.split('/').filter(|part| !part.is_empty()) {
        let parent = at.clone();
        at = at.join(part);
        for name in ["cpuset.cpus", "cpuset.mems"] {
            let Ok(own) = fs::read_to_string(at.join(name)) else { continue };
            if own.trim().is_empty() {
                fs::write(at.join(name), fs::read_to_string(parent.join(name))?.trim())?;
            }
        }
    }
    Ok(())
}

/// Removes directories, the innermost first: files in a cgroup cannot and need not be removed.
fn remove_tree(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(dir)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::managers::machine::NumaNode;
    use serde_json::json;

    #[test]
    fn layouts() {
        let hybrid = "30 25 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      31 25 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      32 25 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let Layout::V1(points) = Layout::parse(hybrid) else { panic!("a hybrid machine is v1") };
        assert_eq!(points["cpu"], PathBuf::from("/sys/fs/cgroup/cpu"));
        assert_eq!(points["unified"], PathBuf::from("/sys/fs/cgroup/unified"));
        assert_eq!(points.len(), 3);
        let named = "30 25 0:26 / /s rw - cgroup cgroup rw,xattr,name=systemd\n";
        let Layout::V1(points) = Layout::parse(named) else { panic!("a hierarchy with a name") };
        assert_eq!(points, [("name=systemd".to_string(), PathBuf::from("/s"))].into());
        let unified = "32 25 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert_eq!(Layout::parse(unified), Layout::V2("/sys/fs/cgroup".into()));
        assert_eq!(Layout::parse(""), Layout::None);
    }

    fn pod() -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u1"}, "spec": {"containers":
            [{"name": "a", "resources": {"requests": {"cpu": "100m"}, "limits": {"cpu": "500m", "memory": "64Mi"}}}]}}))
        .expect("a pod")
    }

    #[test]
    fn a_pod_has_its_limits_in_both_layouts() {
        for is_v2 in [false, true] {
            let root = tempfile::tempdir().expect("a directory");
            let layout = match is_v2 {
                true => Layout::V2(root.path().into()),
                false => Layout::V1(
                    [("cpu", "cpu"), ("memory", "mem"), ("pids", "pids")]
                        .map(|(name, dir)| (name.to_string(), root.path().join(dir)))
                        .into(),
                ),
            };
            let cgroups = Cgroups::new(layout, "/test", true);
            assert_eq!(cgroups.pod_path(&pod()), "/test/kubepods/burstable/podu1");
            let by_systemd =
                Cgroups::new(Layout::None, "/test", true).driven_by(CgroupDriver::Systemd);
            assert_eq!(by_systemd.pod_path(&pod()), "test-kubepods-burstable-podu1.slice");
            let settings = KernelLimits { pod_pids: Some(99), ..KernelLimits::default() };
            let mut machine = Machine::default();
            let huge_pages = [(2 << 20, 4)].into();
            machine.hardware.nodes.push(NumaNode { huge_pages, ..NumaNode::default() });
            let cgroups = cgroups.with(settings, &machine);
            cgroups.prepare(&node_limits());
            cgroups.create_pod(&pod(), Cfs::default());
            let below = "test/kubepods/burstable/podu1";
            let read = |path: String| fs::read_to_string(root.path().join(path)).expect("a value");
            let pids = |path: &str| match is_v2 {
                true => read(format!("{path}/pids.max")),
                false => read(format!("pids/{path}/pids.max")),
            };
            assert_eq!((pids("test/kubepods").as_str(), pids(below).as_str()), ("1000", "99"));
            if is_v2 {
                assert_eq!(read(format!("{below}/hugetlb.2MB.max")), "0");
                assert_eq!(read(format!("{below}/cpu.max")), "50000 100000");
                assert_eq!(read(format!("{below}/memory.max")), "67108864");
            } else {
                assert_eq!(read(format!("cpu/{below}/cpu.shares")), "102");
                assert_eq!(read(format!("cpu/{below}/cpu.cfs_quota_us")), "50000");
                assert_eq!(read(format!("mem/{below}/memory.limit_in_bytes")), "67108864");
            }
            shared_limits(&cgroups, is_v2, &read);
            let limits = cri::LinuxContainerResources {
                memory_limit_in_bytes: 1 << 20,
                cpu_quota: 80_000,
                cpu_period: 100_000,
                cpu_shares: 102,
                ..Default::default()
            };
            let (memory, cpu) = match is_v2 {
                true => (format!("{below}/memory.max"), format!("{below}/cpu.max")),
                false => (
                    format!("mem/{below}/memory.limit_in_bytes"),
                    format!("cpu/{below}/cpu.cfs_quota_us"),
                ),
            };
            let resize = |grows| {
                for resource in [Resource::Memory, Resource::Cpu] {
                    cgroups.resize_pod(&pod(), &limits, resource, grows).expect("written");
                }
                let quota = read(cpu.clone());
                let quota = quota.split(' ').next().map(str::to_string).unwrap_or_default();
                (read(memory.clone()), quota)
            };
            assert_eq!(resize(true), ("67108864".into(), "80000".into()), "what grows comes first");
            assert_eq!(resize(false), ("1048576".into(), "80000".into()));
        }
    }

    fn node_limits() -> Limits {
        let resources = LinuxContainerResources {
            cpu_shares: 2048,
            memory_limit_in_bytes: 1 << 30,
            ..Default::default()
        };
        Limits { resources, pids: 1000 }
    }

    /// Checks the limits of the cgroups above pods.
    fn shared_limits(cgroups: &Cgroups, is_v2: bool, read: &dyn Fn(String) -> String) {
        let weight = |class: &str| match is_v2 {
            true => read(format!("test/kubepods{class}/cpu.weight")),
            false => read(format!("cpu/test/kubepods{class}/cpu.shares")),
        };
        let memory = match is_v2 {
            true => read("test/kubepods/memory.max".into()),
            false => read("mem/test/kubepods/memory.limit_in_bytes".into()),
        };
        assert_eq!(memory, (1 << 30).to_string());
        let wanted = |shares: i64| if is_v2 { cpu_weight(shares) } else { shares }.to_string();
        assert_eq!(weight(""), wanted(2048));
        assert_eq!(weight("/besteffort"), wanted(2));
        cgroups.count_pod(&pod());
        cgroups.count_pod(&pod());
        assert_eq!(weight("/burstable"), wanted(102), "each pod counts once");
        let mut other = pod();
        other.metadata.uid = Some("u2".into());
        cgroups.count_pod(&other);
        assert_eq!(weight("/burstable"), wanted(204));
        cgroups.remove_pod("u2");
        cgroups.remove_pod("u2");
        assert_eq!(weight("/burstable"), wanted(102));
    }

    #[test]
    fn containers_have_no_swap_and_are_killed_as_a_group() {
        let root = tempfile::tempdir().expect("a directory");
        let kubepods = root.path().join("kubepods");
        fs::create_dir_all(&kubepods).expect("made");
        let limits = || LinuxContainerResources { memory_limit_in_bytes: 7, ..Default::default() };
        let check = |layout: Layout, swap: i64, unified: &[(&str, &str)]| {
            let cgroups = Cgroups::new(layout, "/", true);
            let got = cgroups.for_container(limits(), &Pod::default(), &Container::default());
            assert_eq!(got.memory_swap_limit_in_bytes, swap);
            let own = |(k, v): &(&str, &str)| (k.to_string(), v.to_string());
            assert_eq!(got.unified, unified.iter().map(own).collect());
        };
        let v1 = || Layout::V1([("memory".to_string(), root.path().to_path_buf())].into());
        let v2 = || Layout::V2(root.path().into());
        check(v1(), 0, &[]);
        check(v2(), 0, &[("memory.oom.group", "1")]);
        fs::write(kubepods.join("memory.memsw.limit_in_bytes"), "").expect("written");
        fs::write(kubepods.join("memory.swap.max"), "").expect("written");
        check(v1(), 7, &[]);
        check(v2(), 0, &[("memory.oom.group", "1"), ("memory.swap.max", "0")]);
        check(Layout::None, 0, &[]);
        let settings = KernelLimits {
            swap: Swap::Limited,
            kills_single_processes: true,
            ..KernelLimits::default()
        };
        let machine = Machine { memory: 1 << 30, swap: 512 << 20, ..Machine::default() };
        let cgroups = Cgroups::new(v2(), "/", true).with(settings, &machine);
        let swap = |requests: serde_json::Value, limits_of: serde_json::Value| {
            let one =
                json!({"name": "a", "resources": {"requests": requests, "limits": limits_of}});
            let pod: Pod =
                serde_json::from_value(json!({"spec": {"containers": [one]}})).expect("a pod");
            let container = pod.spec.as_ref().expect("a spec").containers[0].clone();
            let got = cgroups.for_container(limits(), &pod, &container).unified;
            assert_eq!(got.len(), 1, "single processes are killed");
            got["memory.swap.max"].clone()
        };
        assert_eq!(swap(json!({"memory": "256Mi"}), json!({})), (128 << 20).to_string());
        assert_eq!(swap(json!({"memory": "256Mi"}), json!({"memory": "256Mi"})), "0");
        assert_eq!(swap(json!({}), json!({})), "0", "best effort");
    }

    #[test]
    fn existing_cgroups_are_limited_and_pods_memory_is_read() {
        let root = tempfile::tempdir().expect("a directory");
        let cgroups = Cgroups::new(Layout::V2(root.path().into()), "/", true);
        let resources =
            LinuxContainerResources { memory_limit_in_bytes: 100, ..Default::default() };
        let limits = Limits { resources, pids: 5 };
        assert!(cgroups.limit_existing("/system", &limits).is_err(), "it is not created");
        fs::create_dir(root.path().join("system")).expect("made");
        cgroups.limit_existing("/system", &limits).expect("limited");
        let put =
            |path: &str, text: &str| fs::write(root.path().join(path), text).expect("written");
        let read = |path: &str| fs::read_to_string(root.path().join(path)).expect("a value");
        assert_eq!(
            (read("system/memory.max").as_str(), read("system/pids.max").as_str()),
            ("100", "5")
        );
        assert_eq!(cgroups.memory_of_pods(), None);
        cgroups.prepare(&limits);
        put("kubepods/memory.current", "70\n");
        put("kubepods/memory.stat", "anon 5\ninactive_file 20\n");
        assert_eq!(cgroups.memory_of_pods(), Some((50, 100)));
    }
}
