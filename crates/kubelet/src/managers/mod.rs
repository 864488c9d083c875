//! CPUs, memory and huge pages of containers: who gets which, aligned to NUMA nodes.
//!
//! ```text
//!  pod worker, before all else: admit ─► hints of all providers ─► merged ─► each provider allocates
//!                                         (device plugins, CPUs, memory)      │ refused: the pod fails
//!  container created: cpuset of CPUs and memory nodes                         ▼
//!  shared pool changed: cpusets of running containers ◄── reconcile.rs     records on the disk
//!  pod stopped: forget
//! ```
//!
//! In: pods, the machine, settings. Out: cpusets, refusals with upstream's reasons, records, figures for
//! the pod-resources API.
//! Invariants: with a topology policy one pod is admitted at a time, so that hints stay true until they are
//! used; no lock is held across await but that turn.
//! Cost: an admission looks at the machine's CPUs and NUMA nodes, not at other pods.
//! Upstream: `pkg/kubelet/cm/{cpumanager,memorymanager,topologymanager}`. Deviations: with the policy `none`
//! no state file is written; a pod keeps its CPUs until its containers have ended.

mod assignment;
mod checkpoint;
mod cpu;
pub mod cpuset;
pub mod hints;
pub mod machine;
mod memory;
pub mod options;
pub mod reconcile;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::sync::watch;

pub use checkpoint::Block;
use cpu::{CpuError, CpuPolicy};
use cpuset::CpuSet;
use hints::{Hint, Hints, Mask, Merger, Policy};
use machine::Machine;
use memory::{Amounts, MemoryError, MemoryPolicy};
use options::{CpuOptions, TopologyOptions};

use crate::reason::Reason;

/// The settings of all policies.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `None`: all containers share all CPUs.
    pub static_cpus: Option<CpuOptions>,
    /// How often cpusets of running containers are compared.
    pub reconcile_period: Duration,
    pub static_memory: bool,
    /// Bytes reserved for the system, by NUMA node and resource.
    pub reserved_memory: BTreeMap<usize, BTreeMap<String, u64>>,
    pub topology: Policy,
    /// Align all containers of a pod together.
    pub aligns_pods: bool,
    pub topology_options: TopologyOptions,
    /// The machine's `/sys`.
    pub sys: PathBuf,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            static_cpus: None,
            reconcile_period: Duration::from_secs(10),
            static_memory: false,
            reserved_memory: BTreeMap::new(),
            topology: Policy::None,
            aligns_pods: false,
            topology_options: TopologyOptions::default(),
            sys: "/sys".into(),
        }
    }
}

/// The node's reservations, which the policies must agree with.
#[derive(Clone, Debug, Default)]
pub struct Reserved {
    /// These CPUs; `None`: any, as many as `milli_cpu`.
    pub cpus: Option<CpuSet>,
    pub milli_cpu: i64,
    /// Bytes of memory and huge pages, with the eviction threshold.
    pub memory: BTreeMap<String, u64>,
}

/// Why a kubelet does not start.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    #[error(transparent)]
    Cpu(#[from] CpuError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("unsupported on machines with more than {0} NUMA Nodes")]
    TooManyNodes(usize),
    #[error(
        "Topolgy manager single-numa-node policy is incompatible with CPUManager align-by-socket policy option"
    )]
    SocketsInOneNode,
    #[error(
        "Align by socket is not compatible with hardware where number of sockets are more than number of NUMA"
    )]
    MoreSocketsThanNodes,
}

/// Why a pod fails at its admission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub reason: &'static str,
    pub message: String,
}

impl Refusal {
    /// An error without a reason of its own.
    pub fn unexpected(why: impl Display) -> Self {
        let message = format!("Allocate failed due to {why}, which is unexpected");
        Self { reason: "UnexpectedAdmissionError", message }
    }

    fn no_locality() -> Self {
        let message = "Resources cannot be allocated with Topology locality".into();
        Self { reason: "TopologyAffinityError", message }
    }

    /// The event and the status of the pod.
    pub fn into_reason(self) -> Reason {
        Reason::new(self.reason, self.message)
    }
}

/// A source of resources that belong to NUMA nodes.
#[async_trait]
pub trait HintProvider: Send + Sync {
    /// Where the container's resources can come from.
    fn hints(&self, pod: &Pod, container: &Container) -> Hints;

    /// The same for all containers of the pod together.
    fn pod_hints(&self, pod: &Pod) -> Hints;

    /// Waits while pods that end may free what the pod lacks. Other pods are admitted meanwhile.
    async fn wait_for_room(&self, _pod: &Pod) {}

    /// Allocates the container's resources, near `hint` if that is possible. Without a topology policy
    /// ([`Hint::NONE`]) it may wait for room.
    async fn allocate(&self, pod: &Pod, container: &Container, hint: Hint) -> Result<(), Refusal>;
}

#[derive(Default)]
struct State {
    cpu: Option<CpuPolicy>,
    memory: Option<MemoryPolicy>,
}

/// Held for single look-ups and changes, and while a record is written; never across await.
type Shared = Arc<Mutex<State>>;

fn locked(state: &Shared) -> MutexGuard<'_, State> {
    state.lock().expect("no panic while held")
}

pub struct Managers {
    state: Shared,
    merger: Option<Merger>,
    aligns_pods: bool,
    /// The pod whose admission looks at hints and uses them.
    turn: tokio::sync::Mutex<()>,
    /// Notified when the shared pool changed.
    pub changed: watch::Sender<()>,
    pub period: Duration,
}

impl Managers {
    pub fn open(
        settings: &Settings,
        machine: &Machine,
        reserved: &Reserved,
        root: &Path,
    ) -> Result<Self, ManagerError> {
        check(settings, machine)?;
        let cpu = match settings.static_cpus {
            None => None,
            Some(options) => {
                let reserved = (reserved.cpus.clone(), reserved.milli_cpu);
                let file = root.join(checkpoint::CPU_FILE);
                Some(CpuPolicy::open(machine.topology.clone(), options, reserved, file)?)
            }
        };
        let memory = match settings.static_memory {
            false => None,
            true => {
                let file = root.join(checkpoint::MEMORY_FILE);
                let expected: &Amounts = &reserved.memory;
                Some(MemoryPolicy::open(machine, &settings.reserved_memory, expected, file)?)
            }
        };
        let closest = settings.topology_options.prefers_closest;
        let merger = || Merger::new(settings.topology, &machine.nodes, closest);
        Ok(Self {
            state: Arc::new(Mutex::new(State { cpu, memory })),
            merger: (settings.topology != Policy::None).then(merger),
            aligns_pods: settings.aligns_pods,
            turn: tokio::sync::Mutex::default(),
            changed: watch::channel(()).0,
            period: settings.reconcile_period,
        })
    }

    /// Whether any policy but `none` is in force.
    pub fn is_on(&self) -> bool {
        let state = locked(&self.state);
        self.merger.is_some() || state.cpu.is_some() || state.memory.is_some()
    }

    /// Whether containers are pinned to CPUs, and whether to memory.
    pub fn pins(&self) -> (bool, bool) {
        let state = locked(&self.state);
        (state.cpu.is_some(), state.memory.is_some())
    }

    /// Allocates the resources of a new pod. An error means that the pod must not start.
    pub async fn admit(&self, pod: &Pod, devices: &dyn HintProvider) -> Result<(), Refusal> {
        if self.merger.is_some() {
            devices.wait_for_room(pod).await;
        }
        let (cpus, memory) = (CpuProvider(self.state.clone()), MemoryProvider(self.state.clone()));
        let providers: [&dyn HintProvider; 3] = [devices, &cpus, &memory];
        let had = self.shared();
        let done = match &self.merger {
            None => allocate_all(pod, &providers, |_| Ok(Hint::NONE)).await,
            Some(merger) => {
                let _turn = self.turn.lock().await;
                self.aligned(pod, merger, &providers).await
            }
        };
        if self.shared() != had {
            self.changed.send_replace(());
        }
        done
    }

    async fn aligned(
        &self,
        pod: &Pod,
        merger: &Merger,
        providers: &[&dyn HintProvider],
    ) -> Result<(), Refusal> {
        let merged = |hints: Vec<Hints>| match merger.merge(&hints) {
            (hint, true) => Ok(hint),
            (_, false) => Err(Refusal::no_locality()),
        };
        if self.aligns_pods {
            let hint = merged(providers.iter().map(|one| one.pod_hints(pod)).collect())?;
            return allocate_all(pod, providers, |_| Ok(hint)).await;
        }
        let of = |container: &Container| {
            merged(providers.iter().map(|one| one.hints(pod, container)).collect())
        };
        allocate_all(pod, providers, of).await
    }

    fn shared(&self) -> Option<CpuSet> {
        // The shared pool is what a container without CPUs of its own gets.
        locked(&self.state).cpu.as_ref().map(|cpu| cpu.of("", ""))
    }

    /// The CPUs that the container may use; `None`: all.
    pub fn cpus(&self, pod: &str, container: &str) -> Option<CpuSet> {
        locked(&self.state).cpu.as_ref().map(|cpu| cpu.of(pod, container))
    }

    /// The container's own CPUs.
    pub fn exclusive(&self, pod: &str, container: &str) -> CpuSet {
        let state = locked(&self.state);
        let own = state.cpu.as_ref().and_then(|cpu| cpu.exclusive(pod, container));
        own.cloned().unwrap_or_default()
    }

    /// Whether a container of the pod has CPUs of its own: then CPU quotas do not apply.
    pub fn has_exclusive(&self, pod: &str) -> bool {
        locked(&self.state).cpu.as_ref().is_some_and(|cpu| cpu.has_exclusive(pod))
    }

    /// The NUMA nodes of the container's memory; empty: all.
    pub fn memory_nodes(&self, pod: &str, container: &str) -> Mask {
        let state = locked(&self.state);
        state.memory.as_ref().map(|memory| memory.nodes_of(pod, container)).unwrap_or_default()
    }

    pub fn memory_blocks(&self, pod: &str, container: &str) -> Vec<Block> {
        let state = locked(&self.state);
        state.memory.as_ref().map(|one| one.blocks(pod, container).to_vec()).unwrap_or_default()
    }

    /// CPUs and memory that containers can get for themselves.
    pub fn allocatable(&self) -> (CpuSet, Vec<Block>) {
        let state = locked(&self.state);
        let cpus = state.cpu.as_ref().map(CpuPolicy::allocatable).unwrap_or_default();
        (cpus, state.memory.as_ref().map(MemoryPolicy::allocatable).unwrap_or_default())
    }

    /// A container starts: memory of the init containers before it is free.
    pub fn started(&self, pod: &Pod, container: &Container) {
        if let Some(memory) = &mut locked(&self.state).memory {
            memory.started(pod, container);
        }
    }

    /// Frees the resources of a pod whose containers have ended.
    pub fn forget(&self, pod: &str) {
        let is_news = {
            let mut state = locked(&self.state);
            if let Some(memory) = &mut state.memory {
                memory.forget(pod);
            }
            state.cpu.as_mut().is_some_and(|cpu| cpu.forget(pod))
        };
        if is_news {
            self.changed.send_replace(());
        }
    }

    /// Frees the resources of all pods but these.
    pub fn keep_only(&self, pods: &BTreeSet<String>) {
        let known: BTreeSet<String> = {
            let state = locked(&self.state);
            let cpus = state.cpu.iter().flat_map(|cpu| cpu.pods().cloned());
            cpus.chain(state.memory.iter().flat_map(|one| one.pods().cloned())).collect()
        };
        for pod in known.difference(pods) {
            self.forget(pod);
        }
    }
}

fn check(settings: &Settings, machine: &Machine) -> Result<(), ManagerError> {
    let most = settings.topology_options.most_nodes;
    if settings.topology != Policy::None && machine.nodes.len() > most {
        return Err(ManagerError::TooManyNodes(most));
    }
    if settings.static_cpus.is_some_and(|options| options.align_by_socket) {
        let count = |level| machine.topology.cpus.ids(level).len();
        if settings.topology == Policy::SingleNumaNode {
            return Err(ManagerError::SocketsInOneNode);
        }
        if count(machine::Level::Socket) > count(machine::Level::Numa) {
            return Err(ManagerError::MoreSocketsThanNodes);
        }
    }
    Ok(())
}

/// The containers in the order of their start; ephemeral containers have no resources.
fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}

async fn allocate_all(
    pod: &Pod,
    providers: &[&dyn HintProvider],
    hint: impl Fn(&Container) -> Result<Hint, Refusal>,
) -> Result<(), Refusal> {
    for container in containers(pod) {
        let hint = hint(container)?;
        for provider in providers {
            provider.allocate(pod, container, hint).await?;
        }
    }
    Ok(())
}

struct CpuProvider(Shared);

#[async_trait]
impl HintProvider for CpuProvider {
    fn hints(&self, pod: &Pod, container: &Container) -> Hints {
        locked(&self.0).cpu.as_ref().map(|cpu| cpu.hints(pod, container)).unwrap_or_default()
    }

    fn pod_hints(&self, pod: &Pod) -> Hints {
        locked(&self.0).cpu.as_ref().map(|cpu| cpu.pod_hints(pod)).unwrap_or_default()
    }

    async fn allocate(&self, pod: &Pod, container: &Container, hint: Hint) -> Result<(), Refusal> {
        match &mut locked(&self.0).cpu {
            Some(cpu) => cpu.allocate(pod, container, hint.affinity),
            None => Ok(()),
        }
    }
}

struct MemoryProvider(Shared);

#[async_trait]
impl HintProvider for MemoryProvider {
    fn hints(&self, pod: &Pod, container: &Container) -> Hints {
        locked(&self.0).memory.as_ref().map(|one| one.hints(pod, container)).unwrap_or_default()
    }

    fn pod_hints(&self, pod: &Pod) -> Hints {
        locked(&self.0).memory.as_ref().map(|one| one.pod_hints(pod)).unwrap_or_default()
    }

    async fn allocate(&self, pod: &Pod, container: &Container, hint: Hint) -> Result<(), Refusal> {
        match &mut locked(&self.0).memory {
            Some(memory) => memory.allocate(pod, container, hint),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::machine::tests::make_sys;
    use super::*;
    use serde_json::json;

    /// Devices that are all near one NUMA node.
    struct Near(Option<usize>);

    #[async_trait]
    impl HintProvider for Near {
        fn hints(&self, _: &Pod, _: &Container) -> Hints {
            let hint = |node| Hint { affinity: Some(Mask::of([node])), is_preferred: true };
            self.0.map(|node| ("r/d".to_owned(), Some(vec![hint(node)]))).into_iter().collect()
        }

        fn pod_hints(&self, pod: &Pod) -> Hints {
            self.hints(pod, &Container::default())
        }

        async fn allocate(&self, _: &Pod, _: &Container, _: Hint) -> Result<(), Refusal> {
            Ok(())
        }
    }

    fn pod(uid: &str, cpu: &[&str]) -> Pod {
        let one = |(index, cpu): (usize, &&str)| {
            json!({"name": format!("c{index}"),
                "resources": {"limits": {"cpu": cpu, "memory": "64Mi"}}})
        };
        let all: Vec<_> = cpu.iter().enumerate().map(one).collect();
        serde_json::from_value(json!({"metadata": {"name": uid, "uid": uid},
            "spec": {"containers": all}}))
        .expect("a pod")
    }

    /// Two sockets of four cores.
    fn open(root: &Path, policy: Policy, aligns_pods: bool) -> Managers {
        make_sys(root, 2, 1, 4, 1);
        let settings = Settings {
            static_cpus: Some(CpuOptions::default()),
            topology: policy,
            aligns_pods,
            ..Settings::default()
        };
        let reserved = Reserved { milli_cpu: 500, ..Reserved::default() };
        Managers::open(&settings, &Machine::read(root, 0), &reserved, root).expect("managers")
    }

    #[tokio::test]
    async fn cpus_are_near_the_devices() {
        let root = tempfile::tempdir().expect("a directory");
        let managers = open(root.path(), Policy::BestEffort, false);
        managers.admit(&pod("a", &["2"]), &Near(Some(1))).await.expect("room");
        assert_eq!(managers.exclusive("a", "c0").to_string(), "4-5");
        assert_eq!(managers.cpus("b", "c0").expect("a cpuset").to_string(), "0-3,6-7");
        assert!(managers.has_exclusive("a") && !managers.has_exclusive("b"));
        managers.keep_only(&BTreeSet::new());
        assert_eq!(managers.cpus("b", "c0").expect("a cpuset").to_string(), "0-7");
        assert_eq!(managers.allocatable().0.to_string(), "1-7");
    }

    #[tokio::test]
    async fn a_strict_policy_refuses_pods() {
        let root = tempfile::tempdir().expect("a directory");
        let managers = open(root.path(), Policy::SingleNumaNode, false);
        let refused = managers.admit(&pod("a", &["5"]), &Near(None)).await.expect_err("too wide");
        assert_eq!(
            (refused.reason, refused.message.as_str()),
            ("TopologyAffinityError", "Resources cannot be allocated with Topology locality")
        );
        managers.admit(&pod("b", &["4"]), &Near(None)).await.expect("room on node 1");
        assert_eq!(managers.exclusive("b", "c0").to_string(), "4-7");
        let far = managers.admit(&pod("c", &["2"]), &Near(Some(1))).await;
        assert_eq!(far.expect_err("node 1 is full").reason, "TopologyAffinityError");
        managers.admit(&pod("d", &["500m"]), &Near(Some(1))).await.expect("shares CPUs");
    }

    #[tokio::test]
    async fn a_pod_is_aligned_as_a_whole() {
        let root = tempfile::tempdir().expect("a directory");
        let managers = open(root.path(), Policy::SingleNumaNode, true);
        let refused = managers.admit(&pod("a", &["3", "2"]), &Near(None)).await;
        assert_eq!(refused.expect_err("five CPUs").reason, "TopologyAffinityError");
        managers.admit(&pod("b", &["2", "2"]), &Near(None)).await.expect("room");
        let both = managers.exclusive("b", "c0").union(&managers.exclusive("b", "c1"));
        assert_eq!(both.to_string(), "4-7");
        let _ = managers.changed.subscribe();
    }
}
