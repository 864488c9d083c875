//! Limits, policies and other settings of the kubelet: KubeletConfiguration's fields, and upstream's flags.
//!
//! ```text
//!  --config FILE, --config-dir DIR ─► --kubelet-field evictionHard={…} ─┐
//!  --eviction-hard memory.available<1Gi ────────────────────────────────┴─► Fields ─► kubelet::Config
//! ```
//!
//! In: both; a flag wins over the field. Out: the kubelet's configuration, or upstream's validation errors.
//! Invariant: what is not given leaves the default.
//! Upstream: `pkg/kubelet/apis/config/{v1beta1,validation}`, `cmd/kubelet/app/options`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Component, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use k8s_openapi::api::core::v1::Taint;
use kubelet::{
    CpuOptions, CpuSet, Enforcement, ManifestUrl, Swap, TopologyOptions, TopologyPolicy,
};
use machinery::quantity::Amount;
use release::features::{self, Feature};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

type Strings = BTreeMap<String, String>;

/// Flags of these settings that upstream has, and one for fields without a flag.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct FieldFlags {
    /// A field of KubeletConfiguration, NAME=JSON
    #[arg(long, value_name = "NAME=JSON", hide = true)]
    kubelet_field: Vec<String>,
    /// Enforce CPU limits by quotas
    #[arg(long)]
    cpu_cfs_quota: Option<bool>,
    /// The period of quotas
    #[arg(long, value_name = "DURATION")]
    cpu_cfs_quota_period: Option<String>,
    /// none or static
    #[arg(long, value_name = "POLICY")]
    cpu_manager_policy: Option<String>,
    #[arg(long, value_name = "NAME=VALUE", value_delimiter = ',')]
    cpu_manager_policy_options: Vec<String>,
    #[arg(long, value_name = "DURATION")]
    cpu_manager_reconcile_period: Option<String>,
    /// pods, system-reserved, kube-reserved, …
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    enforce_node_allocatable: Vec<String>,
    #[arg(long, value_name = "NUMBER")]
    event_burst: Option<i32>,
    #[arg(long, value_name = "NUMBER")]
    event_qps: Option<i32>,
    /// Thresholds at which pods are evicted at once, for example memory.available<1Gi
    #[arg(long, value_name = "SIGNAL<QUANTITY", value_delimiter = ',')]
    eviction_hard: Vec<String>,
    /// The longest grace period of pods after a soft threshold, in seconds
    #[arg(long, value_name = "SECONDS")]
    eviction_max_pod_grace_period: Option<i32>,
    #[arg(long, value_name = "SIGNAL=QUANTITY", value_delimiter = ',')]
    eviction_minimum_reclaim: Vec<String>,
    #[arg(long, value_name = "DURATION")]
    eviction_pressure_transition_period: Option<String>,
    #[arg(long, value_name = "SIGNAL<QUANTITY", value_delimiter = ',')]
    eviction_soft: Vec<String>,
    #[arg(long, value_name = "SIGNAL=DURATION", value_delimiter = ',')]
    eviction_soft_grace_period: Vec<String>,
    /// Do not start on a machine with cgroup v1 [default: false, upstream's is true]
    #[arg(long)]
    fail_cgroupv1: Option<bool>,
    /// Do not start on a machine with swap [default: false, upstream's is true]
    #[arg(long)]
    fail_swap_on: Option<bool>,
    /// How often the server of --manifest-url is asked
    #[arg(long, value_name = "DURATION")]
    http_check_frequency: Option<String>,
    #[arg(long, value_name = "CGROUP")]
    kube_reserved_cgroup: Option<String>,
    /// A server that lists static pods
    #[arg(long, value_name = "URL")]
    manifest_url: Option<String>,
    #[arg(long, value_name = "NAME:VALUE", value_delimiter = ',')]
    manifest_url_header: Vec<String>,
    /// The largest number of open files of this process
    #[arg(long, value_name = "NUMBER")]
    max_open_files: Option<i64>,
    /// None or Static
    #[arg(long, value_name = "POLICY")]
    memory_manager_policy: Option<String>,
    /// The number of images in the node's status; -1: all
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    node_status_max_images: Option<i32>,
    /// This process's score, between -1000 and 1000
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    oom_score_adj: Option<i32>,
    /// The largest number of processes of a pod
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pod_max_pids: Option<i64>,
    /// The largest number of pods for each CPU
    #[arg(long, value_name = "NUMBER")]
    pods_per_core: Option<i32>,
    /// A port without authentication for pods and figures; 0: none
    #[arg(long, value_name = "PORT")]
    read_only_port: Option<i32>,
    #[arg(long, value_name = "NUMBER")]
    registry_burst: Option<i32>,
    #[arg(long, value_name = "NUMBER")]
    registry_qps: Option<i32>,
    /// CPUs for the system, for example 0-1
    #[arg(long, value_name = "CPUS")]
    reserved_cpus: Option<String>,
    /// NODE:RESOURCE=QUANTITY,…;NODE:…
    #[arg(long, value_name = "RESERVATIONS")]
    reserved_memory: Vec<String>,
    /// Containers get the runtime's seccomp profile unless they name another
    #[arg(long)]
    seccomp_default: Option<bool>,
    #[arg(long, value_name = "CGROUP")]
    system_reserved_cgroup: Option<String>,
    /// none, best-effort, restricted or single-numa-node
    #[arg(long, value_name = "POLICY")]
    topology_manager_policy: Option<String>,
    #[arg(long, value_name = "NAME=VALUE", value_delimiter = ',')]
    topology_manager_policy_options: Vec<String>,
    /// container or pod
    #[arg(long, value_name = "SCOPE")]
    topology_manager_scope: Option<String>,
}

/// Fields that arrive as JSON.
pub const STRUCTURED: &[&str] = &[
    "containerLogMaxWorkers",
    "containerLogMonitorInterval",
    "cpuCFSQuota",
    "cpuCFSQuotaPeriod",
    "cpuManagerPolicy",
    "cpuManagerPolicyOptions",
    "cpuManagerReconcilePeriod",
    "crashLoopBackOff",
    "enforceNodeAllocatable",
    "eventBurst",
    "eventRecordQPS",
    "evictionHard",
    "evictionMaxPodGracePeriod",
    "evictionMinimumReclaim",
    "evictionPressureTransitionPeriod",
    "evictionSoft",
    "evictionSoftGracePeriod",
    "failCgroupV1",
    "failSwapOn",
    "httpCheckFrequency",
    "imageMaximumGCAge",
    "kubeReservedCgroup",
    "maxOpenFiles",
    "maxParallelImagePulls",
    "memoryManagerPolicy",
    "memorySwap",
    "mergeDefaultEvictionSettings",
    "nodeLeaseDurationSeconds",
    "nodeStatusMaxImages",
    "nodeStatusReportFrequency",
    "oomScoreAdj",
    "podLogsDir",
    "podPidsLimit",
    "podsPerCore",
    "readOnlyPort",
    "registerWithTaints",
    "registryBurst",
    "registryPullQPS",
    "reservedMemory",
    "reservedSystemCPUs",
    "seccompDefault",
    "shutdownGracePeriodByPodPriority",
    "singleProcessOOMKill",
    "staticPodURL",
    "staticPodURLHeader",
    "systemReservedCgroup",
    "topologyManagerPolicy",
    "topologyManagerPolicyOptions",
    "topologyManagerScope",
];

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Fields {
    container_log_max_workers: Option<i32>,
    #[serde(deserialize_with = "time")]
    container_log_monitor_interval: Option<Duration>,
    #[serde(rename = "cpuCFSQuota")]
    cpu_cfs_quota: Option<bool>,
    #[serde(rename = "cpuCFSQuotaPeriod", deserialize_with = "time")]
    cpu_cfs_quota_period: Option<Duration>,
    cpu_manager_policy: String,
    cpu_manager_policy_options: Strings,
    #[serde(deserialize_with = "time")]
    cpu_manager_reconcile_period: Option<Duration>,
    crash_loop_back_off: CrashLoop,
    enforce_node_allocatable: Option<Vec<String>>,
    event_burst: i32,
    #[serde(rename = "eventRecordQPS")]
    event_qps: Option<i32>,
    eviction_hard: Option<Strings>,
    eviction_max_pod_grace_period: i32,
    eviction_minimum_reclaim: Strings,
    #[serde(deserialize_with = "time")]
    eviction_pressure_transition_period: Option<Duration>,
    eviction_soft: Strings,
    eviction_soft_grace_period: Strings,
    #[serde(rename = "failCgroupV1")]
    fail_cgroup_v1: Option<bool>,
    fail_swap_on: Option<bool>,
    #[serde(deserialize_with = "time")]
    http_check_frequency: Option<Duration>,
    #[serde(rename = "imageMaximumGCAge", deserialize_with = "time")]
    image_maximum_gc_age: Option<Duration>,
    kube_reserved_cgroup: String,
    max_open_files: i64,
    max_parallel_image_pulls: Option<i32>,
    memory_manager_policy: String,
    memory_swap: MemorySwap,
    merge_default_eviction_settings: bool,
    node_lease_duration_seconds: i32,
    node_status_max_images: Option<i32>,
    #[serde(deserialize_with = "time")]
    node_status_report_frequency: Option<Duration>,
    oom_score_adj: Option<i32>,
    pod_logs_dir: String,
    pod_pids_limit: Option<i64>,
    pods_per_core: i32,
    read_only_port: i32,
    register_with_taints: Vec<Taint>,
    registry_burst: i32,
    #[serde(rename = "registryPullQPS")]
    registry_qps: Option<i32>,
    reserved_memory: Vec<ReservedMemory>,
    #[serde(rename = "reservedSystemCPUs")]
    reserved_system_cpus: String,
    seccomp_default: Option<bool>,
    shutdown_grace_period_by_pod_priority: Vec<ByPriority>,
    #[serde(rename = "singleProcessOOMKill")]
    single_process_oom_kill: Option<bool>,
    #[serde(rename = "staticPodURL")]
    static_pod_url: String,
    #[serde(rename = "staticPodURLHeader")]
    static_pod_url_header: BTreeMap<String, Vec<String>>,
    system_reserved_cgroup: String,
    topology_manager_policy: String,
    topology_manager_policy_options: Strings,
    topology_manager_scope: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct CrashLoop {
    #[serde(deserialize_with = "time")]
    max_container_restart_period: Option<Duration>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct MemorySwap {
    swap_behavior: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ReservedMemory {
    numa_node: i64,
    limits: Strings,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ByPriority {
    priority: i32,
    shutdown_grace_period_seconds: i64,
}

/// A duration; zero means the default.
fn time<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    let text = Option::<String>::deserialize(from)?.unwrap_or_default();
    if text.is_empty() {
        return Ok(None);
    }
    let time = base::duration::parse(&text).map_err(serde::de::Error::custom)?;
    Ok(Some(time).filter(|time| !time.is_zero()))
}

impl FieldFlags {
    pub fn apply(&self, config: &mut kubelet::Config) -> anyhow::Result<()> {
        let fields = self.fields()?;
        fields.apply_policies(config)?;
        fields.apply_eviction(config)?;
        fields.apply_limits(config)?;
        fields.apply_images(config)?;
        fields.apply_shutdown(config)?;
        fields.apply_node(config)
    }

    /// The settings of this process, which does nothing but run a kubelet.
    pub fn apply_to_process(&self) -> anyhow::Result<()> {
        let fields = self.fields()?;
        let score = fields.oom_score_adj;
        if let Some(score) = score {
            ensure!(
                (-1000..=1000).contains(&score),
                "invalid configuration: oomScoreAdj (--oom-score-adj) {score} must be between -1000 and 1000, inclusive"
            );
            std::fs::write("/proc/self/oom_score_adj", score.to_string())
                .context("failed to set this process's OOM score (--oom-score-adj)")?;
        }
        let files = fields.max_open_files;
        ensure!(
            files >= 0,
            "invalid configuration: maxOpenFiles (--max-open-files) {files} must not be a negative number"
        );
        if let Some(files) = u64::try_from(files).ok().filter(|files| *files > 0) {
            use nix::sys::resource::{Resource, setrlimit};
            setrlimit(Resource::RLIMIT_NOFILE, files, files)
                .context("failed to set the limit of open files (--max-open-files)")?;
        }
        Ok(())
    }

    /// The fields with the flags on top.
    fn fields(&self) -> anyhow::Result<Fields> {
        let mut all = Map::new();
        for pair in &self.kubelet_field {
            let (name, json) = pair.split_once('=').context("--kubelet-field: no NAME=JSON")?;
            let value = serde_json::from_str(json).with_context(|| name.to_owned())?;
            all.insert(name.to_owned(), value);
        }
        self.put_texts(&mut all);
        self.put_numbers(&mut all);
        self.put_maps(&mut all)?;
        serde_json::from_value(Value::Object(all)).context("KubeletConfiguration")
    }

    fn put_texts(&self, all: &mut Map<String, Value>) {
        let texts = [
            ("cpuCFSQuotaPeriod", &self.cpu_cfs_quota_period),
            ("cpuManagerPolicy", &self.cpu_manager_policy),
            ("cpuManagerReconcilePeriod", &self.cpu_manager_reconcile_period),
            ("evictionPressureTransitionPeriod", &self.eviction_pressure_transition_period),
            ("httpCheckFrequency", &self.http_check_frequency),
            ("kubeReservedCgroup", &self.kube_reserved_cgroup),
            ("memoryManagerPolicy", &self.memory_manager_policy),
            ("reservedSystemCPUs", &self.reserved_cpus),
            ("staticPodURL", &self.manifest_url),
            ("systemReservedCgroup", &self.system_reserved_cgroup),
            ("topologyManagerPolicy", &self.topology_manager_policy),
            ("topologyManagerScope", &self.topology_manager_scope),
        ];
        for (name, value) in texts {
            if let Some(value) = value {
                all.insert(name.into(), value.clone().into());
            }
        }
        let switches = [
            ("cpuCFSQuota", self.cpu_cfs_quota),
            ("failCgroupV1", self.fail_cgroupv1),
            ("failSwapOn", self.fail_swap_on),
            ("seccompDefault", self.seccomp_default),
        ];
        for (name, value) in switches {
            if let Some(value) = value {
                all.insert(name.into(), value.into());
            }
        }
    }

    fn put_numbers(&self, all: &mut Map<String, Value>) {
        let of = |number: Option<i32>| number.map(i64::from);
        let numbers = [
            ("eventBurst", of(self.event_burst)),
            ("eventRecordQPS", of(self.event_qps)),
            ("evictionMaxPodGracePeriod", of(self.eviction_max_pod_grace_period)),
            ("maxOpenFiles", self.max_open_files),
            ("nodeStatusMaxImages", of(self.node_status_max_images)),
            ("oomScoreAdj", of(self.oom_score_adj)),
            ("podPidsLimit", self.pod_max_pids),
            ("podsPerCore", of(self.pods_per_core)),
            ("readOnlyPort", of(self.read_only_port)),
            ("registryBurst", of(self.registry_burst)),
            ("registryPullQPS", of(self.registry_qps)),
        ];
        for (name, value) in numbers {
            if let Some(value) = value {
                all.insert(name.into(), value.into());
            }
        }
    }

    fn put_maps(&self, all: &mut Map<String, Value>) -> anyhow::Result<()> {
        let maps = [
            ("cpuManagerPolicyOptions", &self.cpu_manager_policy_options, '='),
            ("evictionHard", &self.eviction_hard, '<'),
            ("evictionMinimumReclaim", &self.eviction_minimum_reclaim, '='),
            ("evictionSoft", &self.eviction_soft, '<'),
            ("evictionSoftGracePeriod", &self.eviction_soft_grace_period, '='),
            ("topologyManagerPolicyOptions", &self.topology_manager_policy_options, '='),
        ];
        for (name, list, separator) in maps.into_iter().filter(|(_, list, _)| !list.is_empty()) {
            let mut map = Map::new();
            for pair in list.iter().filter(|pair| !pair.is_empty()) {
                let (key, value) = pair.split_once(separator).with_context(|| {
                    format!("malformed pair, expect string{separator}string: {pair}")
                })?;
                map.insert(key.trim().into(), value.trim().into());
            }
            all.insert(name.into(), map.into());
        }
        if !self.enforce_node_allocatable.is_empty() {
            let names = self.enforce_node_allocatable.iter().filter(|name| !name.is_empty());
            all.insert("enforceNodeAllocatable".into(), names.cloned().collect());
        }
        if !self.manifest_url_header.is_empty() {
            let mut headers: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
            for pair in &self.manifest_url_header {
                let (name, value) = pair.split_once(':').context("--manifest-url-header")?;
                headers.entry(name.trim()).or_default().push(value.trim());
            }
            all.insert("staticPodURLHeader".into(), serde_json::to_value(headers)?);
        }
        if !self.reserved_memory.is_empty() {
            let text = self.reserved_memory.join(";");
            all.insert("reservedMemory".into(), reservations(&text)?);
        }
        Ok(())
    }
}

/// `0:memory=1Gi,hugepages-1Gi=2;1:memory=1Gi`
fn reservations(text: &str) -> anyhow::Result<Value> {
    let mut out = vec![];
    for one in text.split(';').filter(|one| !one.is_empty()) {
        let wrong = || format!("invalid reserved memory: {one}");
        let (node, limits) = one.split_once(':').with_context(wrong)?;
        let node: i64 = node.trim().parse().ok().with_context(wrong)?;
        let mut map = Map::new();
        for pair in limits.split(',') {
            let (resource, quantity) = pair.split_once('=').with_context(wrong)?;
            map.insert(resource.trim().into(), quantity.trim().into());
        }
        out.push(serde_json::json!({"numaNode": node, "limits": map}));
    }
    Ok(out.into())
}

/// Upstream's words for a wrong number.
fn not_negative(field: &str, flag: &str, value: i64) -> anyhow::Result<()> {
    ensure!(
        value >= 0,
        "invalid configuration: {field} (--{flag}) {value} must not be a negative number"
    );
    Ok(())
}

impl Fields {
    fn apply_policies(&self, config: &mut kubelet::Config) -> anyhow::Result<()> {
        let managers = &mut config.managers;
        managers.static_cpus = match self.cpu_manager_policy.as_str() {
            "" | "none" => {
                let none = self.cpu_manager_policy_options.is_empty();
                ensure!(none, "new none policy error: None policy: received unsupported options");
                None
            }
            "static" => {
                let options = CpuOptions::parse(&self.cpu_manager_policy_options);
                Some(options.context("new static policy error")?)
            }
            other => bail!("unknown policy: \"{other}\""),
        };
        managers.reconcile_period =
            self.cpu_manager_reconcile_period.unwrap_or(managers.reconcile_period);
        managers.static_memory = match self.memory_manager_policy.as_str() {
            "" | "None" => false,
            "Static" => true,
            other => bail!("unknown policy: {other:?}"),
        };
        managers.reserved_memory = self.memory_by_node()?;
        let policy = Some(self.topology_manager_policy.as_str()).filter(|name| !name.is_empty());
        let policy = policy.unwrap_or("none");
        managers.topology = TopologyPolicy::named(policy).with_context(|| {
            let names = TopologyPolicy::ALL.map(|(name, _)| format!("{name:?}")).join(" ");
            format!(
                "invalid configuration: topologyManagerPolicy (--topology-manager-policy) {policy:?} must be one of: [{names}]"
            )
        })?;
        managers.aligns_pods = match self.topology_manager_scope.as_str() {
            "" | "container" => false,
            "pod" => true,
            other => bail!(
                "invalid configuration: topologyManagerScope (--topology-manager-scope) {other:?} must be one of: \"container\", or \"pod\""
            ),
        };
        managers.topology_options = TopologyOptions::parse(&self.topology_manager_policy_options)?;
        Ok(())
    }

    /// Upstream: validateReservedMemoryConfiguration.
    fn memory_by_node(&self) -> anyhow::Result<BTreeMap<usize, BTreeMap<String, u64>>> {
        let mut out: BTreeMap<usize, BTreeMap<String, u64>> = BTreeMap::new();
        for one in &self.reserved_memory {
            let node = one.numa_node;
            for (resource, text) in &one.limits {
                ensure!(
                    resource == "memory" || resource.starts_with("hugepages-"),
                    "invalid configuration: the limit type {resource:?} for NUMA node {node} is not supported, only [\"memory\" \"hugepages-<HugePageSize>\"] is accepted"
                );
                let amount =
                    Amount::parse(text).map_err(|error| anyhow::anyhow!("{text}: {error}"))?;
                let bytes = u64::try_from(amount.units()).unwrap_or_default();
                ensure!(
                    bytes > 0,
                    "invalid configuration: reserved memory may not be zero for NUMA node {node} and resource {resource:?}"
                );
                let node = usize::try_from(node).context("reservedMemory: a negative NUMA node")?;
                let known = out.entry(node).or_default().insert(resource.clone(), bytes);
                ensure!(
                    known.is_none(),
                    "invalid configuration: the reserved memory has a duplicate value for NUMA node {node} and resource {resource:?}"
                );
            }
        }
        Ok(out)
    }

    fn apply_eviction(&self, config: &mut kubelet::Config) -> anyhow::Result<()> {
        let reserve = &mut config.reserve;
        if let Some(names) = &self.enforce_node_allocatable {
            reserve.enforce = self.enforced(names, config.cgroups_per_qos)?;
        }
        reserve.kube_cgroup.clone_from(&self.kube_reserved_cgroup);
        reserve.system_cgroup.clone_from(&self.system_reserved_cgroup);
        if !self.reserved_system_cpus.is_empty() {
            let text = &self.reserved_system_cpus;
            let is_alone =
                self.kube_reserved_cgroup.is_empty() && self.system_reserved_cgroup.is_empty();
            ensure!(
                is_alone,
                "invalid configuration: can't use reservedSystemCPUs (--reserved-cpus) with systemReservedCgroup (--system-reserved-cgroup) or kubeReservedCgroup (--kube-reserved-cgroup)"
            );
            let cpus = text.parse::<CpuSet>().map_err(|error| {
                anyhow::anyhow!(
                    "invalid configuration: unable to parse reservedSystemCPUs (--reserved-cpus) {text}, error: {error}"
                )
            })?;
            reserve.cpus = Some(cpus);
        }
        let maps = kubelet::EvictionMaps {
            hard: self.eviction_hard.clone(),
            soft: self.eviction_soft.clone(),
            soft_grace: self.eviction_soft_grace_period.clone(),
            reclaim: self.eviction_minimum_reclaim.clone(),
            merges_defaults: self.merge_default_eviction_settings,
        };
        let with_allocatable = reserve.enforce.contains(&Enforcement::Pods);
        config.eviction.thresholds = kubelet::parse_thresholds(&maps, with_allocatable)?;
        let grace = u64::try_from(self.eviction_max_pod_grace_period).unwrap_or_default();
        config.eviction.longest_grace = Duration::from_secs(grace);
        let transition = self.eviction_pressure_transition_period;
        config.eviction.transition = transition.unwrap_or(config.eviction.transition);
        Ok(())
    }

    fn enforced(&self, names: &[String], per_qos: bool) -> anyhow::Result<Vec<Enforcement>> {
        const WHERE: &str = "enforceNodeAllocatable (--enforce-node-allocatable)";
        let mut out = vec![];
        let mut seen = BTreeSet::new();
        for name in names {
            ensure!(
                seen.insert(name),
                "invalid configuration: duplicated enforcements {name:?} in {WHERE}"
            );
            if name == "none" {
                ensure!(
                    names.len() == 1,
                    "invalid configuration: {WHERE} may not contain additional enforcements when \"none\" is specified"
                );
                continue;
            }
            let valid: Vec<String> =
                Enforcement::ALL.iter().map(|(name, _)| format!("{name:?}")).collect();
            let what = Enforcement::named(name).with_context(|| {
                format!(
                    "invalid configuration: option {name:?} specified for {WHERE}. Valid options are {} or \"none\"",
                    valid.join(", ")
                )
            })?;
            let (field, flag, cgroup) = match what {
                Enforcement::Pods => ("", "", "pods"),
                Enforcement::System | Enforcement::SystemCompressible => (
                    "systemReservedCgroup",
                    "system-reserved",
                    self.system_reserved_cgroup.as_str(),
                ),
                Enforcement::Kube | Enforcement::KubeCompressible => {
                    ("kubeReservedCgroup", "kube-reserved", self.kube_reserved_cgroup.as_str())
                }
            };
            ensure!(
                !cgroup.is_empty(),
                "invalid configuration: {field} (--{flag}-cgroup) must be specified when \"{flag}\" or \"{flag}-compressible\" included in {WHERE}"
            );
            ensure!(
                per_qos,
                "invalid configuration: cgroupsPerQOS (--cgroups-per-qos) must be set to true when {name:?} contained in {WHERE}"
            );
            out.push(what);
        }
        for kind in ["system-reserved", "kube-reserved"] {
            let both = format!("{kind}-compressible");
            ensure!(
                !(seen.contains(&kind.to_owned()) && seen.contains(&both)),
                "invalid configuration: both {kind:?} and {both:?} cannot be specified together in {WHERE}"
            );
        }
        Ok(out)
    }

    fn apply_limits(&self, config: &mut kubelet::Config) -> anyhow::Result<()> {
        let limits = &mut config.limits;
        limits.cfs.is_on = self.cpu_cfs_quota.unwrap_or(limits.cfs.is_on);
        if let Some(period) = self.cpu_cfs_quota_period {
            let shown = base::duration::show(period);
            let is_usual = period == Duration::from_millis(100);
            ensure!(
                is_usual || features::enabled(Feature::CPUCFSQuotaPeriod),
                "invalid configuration: cpuCFSQuotaPeriod (--cpu-cfs-quota-period) {shown} requires feature gate CustomCPUCFSQuotaPeriod"
            );
            ensure!(
                (Duration::from_millis(1)..=Duration::from_secs(1)).contains(&period),
                "invalid configuration: cpuCFSQuotaPeriod (--cpu-cfs-quota-period) {shown} must be between 1ms and 1sec, inclusive"
            );
            limits.cfs.period = i64::try_from(period.as_micros()).unwrap_or(limits.cfs.period);
        }
        limits.pod_pids = self.pod_pids_limit.filter(|limit| *limit > 0);
        limits.swap = match self.memory_swap.swap_behavior.as_str() {
            "" | "NoSwap" => Swap::None,
            "LimitedSwap" => Swap::Limited,
            other => bail!(
                "invalid configuration: memorySwap.swapBehavior {other:?} must be one of: \"\", \"LimitedSwap\" or \"NoSwap\""
            ),
        };
        limits.kills_single_processes = self.single_process_oom_kill.unwrap_or(false);
        limits.seccomp_default = self.seccomp_default.unwrap_or(false);
        config.fails_on_swap = self.fail_swap_on.unwrap_or(false);
        config.fails_on_cgroup_v1 = self.fail_cgroup_v1.unwrap_or(false);
        not_negative("podsPerCore", "pods-per-core", self.pods_per_core.into())?;
        config.pods_per_core = self.pods_per_core.into();
        if let Some(longest) = self.crash_loop_back_off.max_container_restart_period {
            ensure!(
                features::enabled(Feature::KubeletCrashLoopBackOffMax),
                "invalid configuration: FeatureGate KubeletCrashLoopBackOffMax not enabled, CrashLoopBackOff.MaxContainerRestartPeriod must not be set"
            );
            ensure!(
                (Duration::from_secs(1)..=Duration::from_secs(300)).contains(&longest),
                "invalid configuration: CrashLoopBackOff.MaxContainerRestartPeriod (got: {} seconds) must be set between 1s and 300s",
                longest.as_secs_f64()
            );
            config.crash_ceiling = Some(longest);
        }
        Ok(())
    }

    fn apply_images(&self, config: &mut kubelet::Config) -> anyhow::Result<()> {
        if let Some(age) = self.image_maximum_gc_age {
            let show = base::duration::show;
            ensure!(
                age > config.image_min_age,
                "invalid configuration: imageMaximumGCAge {} must be greater than imageMinimumGCAge {}",
                show(age),
                show(config.image_min_age)
            );
            config.image_max_age = age;
        }
        if let Some(most) = self.max_parallel_image_pulls {
            ensure!(
                most >= 1,
                "invalid configuration: maxParallelImagePulls {most} must be a positive number"
            );
            ensure!(
                most == 1 || config.parallel_pulls != 1,
                "invalid configuration: maxParallelImagePulls cannot be larger than 1 unless SerializeImagePulls (--serialize-image-pulls) is set to false"
            );
            config.parallel_pulls = usize::try_from(most).unwrap_or(1);
        }
        not_negative("registryBurst", "registry-burst", self.registry_burst.into())?;
        not_negative("eventBurst", "event-burst", self.event_burst.into())?;
        config.pulls =
            rate("registryPullQPS (--registry-qps)", self.registry_qps, self.registry_burst, 10)?;
        config.events =
            rate("eventRecordQPS (--event-qps)", self.event_qps, self.event_burst, 100)?;
        if let Some(workers) = self.container_log_max_workers {
            ensure!(
                workers >= 1,
                "invalid configuration: containerLogMaxWorkers must be greater than or equal to 1"
            );
            config.log_workers = usize::try_from(workers).unwrap_or(1);
        }
        if let Some(interval) = self.container_log_monitor_interval {
            ensure!(
                interval >= Duration::from_secs(3),
                "invalid configuration: containerLogMonitorInterval must be a positive time duration greater than or equal to 3s"
            );
            config.log_interval = interval;
        }
        Ok(())
    }

    fn apply_shutdown(&self, config: &mut kubelet::Config) -> anyhow::Result<()> {
        let groups = &self.shutdown_grace_period_by_pod_priority;
        if groups.is_empty() {
            return Ok(());
        }
        ensure!(
            features::enabled(Feature::GracefulNodeShutdownBasedOnPodPriority),
            "invalid configuration: Specifying shutdownGracePeriodByPodPriority requires feature gate GracefulNodeShutdownBasedOnPodPriority"
        );
        ensure!(
            config.shutdown_grace.is_zero() && config.shutdown_grace_critical.is_zero(),
            "invalid configuration: Cannot specify both shutdownGracePeriodByPodPriority and shutdownGracePeriod at the same time"
        );
        let one = |group: &ByPriority| {
            let seconds = u64::try_from(group.shutdown_grace_period_seconds).unwrap_or_default();
            (group.priority, Duration::from_secs(seconds))
        };
        config.shutdown_groups = groups.iter().map(one).collect();
        Ok(())
    }

    fn apply_node(&self, config: &mut kubelet::Config) -> anyhow::Result<()> {
        if let Some(most) = self.node_status_max_images {
            ensure!(
                most >= -1,
                "invalid configuration: nodeStatusMaxImages (--node-status-max-images) {most} must be -1 or greater"
            );
            config.status_images = usize::try_from(most).ok();
        }
        config.status_report = self.node_status_report_frequency.unwrap_or(config.status_report);
        let seconds = self.node_lease_duration_seconds;
        ensure!(
            seconds >= 0,
            "invalid configuration: nodeLeaseDurationSeconds must be greater than 0"
        );
        if let Some(seconds) = u64::try_from(seconds).ok().filter(|seconds| *seconds > 0) {
            config.lease_duration = Duration::from_secs(seconds);
        }
        if !self.pod_logs_dir.is_empty() {
            config.log_dir = logs_directory(&self.pod_logs_dir)?;
        }
        if self.read_only_port != 0 {
            let port = u16::try_from(self.read_only_port).ok().with_context(|| {
                let port = self.read_only_port;
                format!("invalid configuration: readOnlyPort (--read-only-port) {port} must be between 0 and 65535, inclusive")
            })?;
            config.read_only_address = Some(SocketAddr::new(config.bind_address.ip(), port));
        }
        for taint in &self.register_with_taints {
            ensure!(
                taint.time_added.is_none(),
                "invalid configuration: taint.TimeAdded is not nil"
            );
            let is_known =
                matches!(taint.effect.as_str(), "NoSchedule" | "PreferNoSchedule" | "NoExecute");
            ensure!(
                is_known && !taint.key.is_empty(),
                "invalid taint: {}:{}",
                taint.key,
                taint.effect
            );
        }
        config.taints.extend(self.register_with_taints.iter().cloned());
        if !self.static_pod_url.is_empty() {
            let pairs = self.static_pod_url_header.iter();
            let headers =
                pairs.flat_map(|(name, all)| all.iter().map(|one| (name.clone(), one.clone())));
            let url = self.static_pod_url.clone();
            config.manifest_url = Some(ManifestUrl { url, headers: headers.collect() });
        }
        config.manifest_url_check = self.http_check_frequency.unwrap_or(config.manifest_url_check);
        Ok(())
    }
}

/// `None`: no limit was given.
fn rate(field: &str, qps: Option<i32>, burst: i32, usual: i32) -> anyhow::Result<kubelet::Rate> {
    let Some(qps) = qps else { return Ok(None) };
    ensure!(qps >= 0, "invalid configuration: {field} {qps} must not be a negative number");
    let burst = if burst == 0 { usual } else { burst };
    Ok((qps > 0).then(|| (f64::from(qps), f64::from(burst))))
}

fn logs_directory(text: &str) -> anyhow::Result<PathBuf> {
    let path = PathBuf::from(text);
    ensure!(
        path.is_absolute(),
        "invalid configuration: pod logs path {text:?} must be absolute path"
    );
    let is_plain =
        path.components().all(|part| !matches!(part, Component::ParentDir | Component::CurDir));
    let normal: PathBuf = path.components().collect();
    ensure!(
        is_plain && normal.as_os_str() == path.as_os_str(),
        "invalid configuration: pod logs path {text:?} must be normalized"
    );
    ensure!(
        text.is_ascii(),
        "invalid configuration: pod logs path {text:?} mut contains ASCII characters only"
    );
    Ok(path)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: FieldFlags,
    }

    fn applied(words: &[&str]) -> anyhow::Result<kubelet::Config> {
        let line = Line::try_parse_from(["x"].iter().chain(words)).expect("flags");
        let mut config = kubelet::Config::new("n", "/data".into());
        line.flags.apply(&mut config).map(|()| config)
    }

    #[test]
    fn nothing_given_leaves_the_defaults() {
        let (given, usual) =
            (applied(&[]).expect("valid"), kubelet::Config::new("n", "/data".into()));
        assert_eq!(given.eviction.thresholds, usual.eviction.thresholds);
        assert_eq!(given.reserve.enforce, usual.reserve.enforce);
        assert_eq!(given.status_images, Some(50));
        assert!(given.managers.static_cpus.is_none() && given.pulls.is_none());
        assert_eq!(given.parallel_pulls, usual.parallel_pulls);
    }

    #[test]
    fn fields_and_flags_change_the_configuration() {
        let config = applied(&[
            "--kubelet-field=cpuManagerPolicy=\"none\"",
            "--cpu-manager-policy=static",
            "--cpu-manager-policy-options=full-pcpus-only=true",
            "--reserved-cpus=0-1",
            "--kubelet-field=memoryManagerPolicy=\"Static\"",
            "--reserved-memory=0:memory=1Gi;1:memory=512Mi,hugepages-2Mi=4Mi",
            "--kubelet-field=topologyManagerPolicy=\"restricted\"",
            "--kubelet-field=topologyManagerScope=\"pod\"",
            "--eviction-hard=memory.available<1Gi",
            "--kubelet-field=evictionSoft={\"nodefs.available\": \"20%\"}",
            "--kubelet-field=evictionSoftGracePeriod={\"nodefs.available\": \"1m\"}",
            "--kubelet-field=evictionPressureTransitionPeriod=\"0s\"",
            "--kubelet-field=cpuCFSQuota=false",
            "--pod-max-pids=100",
            "--kubelet-field=memorySwap={\"swapBehavior\": \"LimitedSwap\"}",
            "--kubelet-field=crashLoopBackOff={\"maxContainerRestartPeriod\": \"10s\"}",
            "--kubelet-field=shutdownGracePeriodByPodPriority=[{\"priority\": 5, \"shutdownGracePeriodSeconds\": 9}]",
            "--kubelet-field=registerWithTaints=[{\"key\": \"a\", \"effect\": \"NoSchedule\"}]",
            "--kubelet-field=maxParallelImagePulls=3",
            "--manifest-url=http://s/pods",
            "--manifest-url-header=a:b,a:c",
            "--event-qps=5",
            "--node-status-max-images=-1",
        ]);
        let config = config.expect("valid");
        assert!(config.managers.static_cpus.expect("static").full_cores);
        assert_eq!(config.reserve.cpus.as_ref().map(CpuSet::len), Some(2));
        assert_eq!(config.managers.reserved_memory[&1]["hugepages-2Mi"], 4 << 20);
        assert_eq!(config.managers.topology, TopologyPolicy::Restricted);
        assert!(config.managers.aligns_pods && config.managers.static_memory);
        let names: Vec<&str> =
            config.eviction.thresholds.iter().map(|one| one.signal.name()).collect();
        assert_eq!(names, ["memory.available", "nodefs.available", "allocatableMemory.available"]);
        assert_eq!(config.eviction.transition, Duration::from_secs(300));
        assert!(!config.limits.cfs.is_on);
        assert_eq!((config.limits.pod_pids, config.limits.swap), (Some(100), Swap::Limited));
        assert_eq!(config.crash_ceiling, Some(Duration::from_secs(10)));
        assert_eq!(config.shutdown_groups, [(5, Duration::from_secs(9))]);
        assert_eq!(config.taints[0].key, "a");
        assert_eq!((config.parallel_pulls, config.status_images), (3, None));
        assert_eq!(config.manifest_url.expect("a URL").headers.len(), 2);
        assert_eq!(config.events, Some((5.0, 100.0)));
    }

    #[test]
    fn wrong_values_are_upstreams_errors() {
        let check = |words: &[&str], expected: &str| {
            let error = applied(words).err().expect("a wrong value");
            assert!(format!("{error:#}").contains(expected), "{error:#}");
        };
        check(
            &["--topology-manager-policy=x"],
            "topologyManagerPolicy (--topology-manager-policy) \"x\" must be one of: [\"none\" \"best-effort\" \"restricted\" \"single-numa-node\"]",
        );
        check(&["--topology-manager-scope=x"], "must be one of: \"container\", or \"pod\"");
        check(&["--eviction-hard=mem<1"], "unsupported eviction signal mem");
        check(&["--enforce-node-allocatable=pods,pods"], "duplicated enforcements \"pods\"");
        check(
            &["--enforce-node-allocatable=kube-reserved"],
            "kubeReservedCgroup (--kube-reserved-cgroup) must be specified when \"kube-reserved\" or \"kube-reserved-compressible\" included",
        );
        check(&["--cpu-cfs-quota-period=10s"], "10s must be between 1ms and 1sec, inclusive");
        check(&["--pods-per-core=-1"], "podsPerCore (--pods-per-core) -1 must not be a negative");
        check(
            &["--kubelet-field=crashLoopBackOff={\"maxContainerRestartPeriod\": \"10m\"}"],
            "(got: 600 seconds) must be set between 1s and 300s",
        );
        check(&["--kubelet-field=podLogsDir=\"logs\""], "must be absolute path");
        check(&["--kubelet-field=podLogsDir=\"/a/../b\""], "must be normalized");
        check(
            &["--kubelet-field=memorySwap={\"swapBehavior\": \"x\"}"],
            "memorySwap.swapBehavior \"x\"",
        );
        check(&["--kubelet-field=maxParallelImagePulls=0"], "maxParallelImagePulls 0 must be");
        check(&["--kubelet-field=containerLogMaxWorkers=0"], "containerLogMaxWorkers must be");
        check(
            &["--kubelet-field=imageMaximumGCAge=\"1m\""],
            "must be greater than imageMinimumGCAge",
        );
    }
}
