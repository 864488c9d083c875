//! The static CPU policy: containers of Guaranteed pods with whole CPUs get CPUs of their own.
//!
//! ```text
//!   all CPUs ─┬─ reserved for the system ┐
//!             ├─ shared pool             ┴─ default set: all other containers
//!             └─ exclusive: pod ► container ► CPUs
//! ```
//!
//! In: pods, NUMA affinities. Out: CPUs of containers, hints, the record on the disk.
//! Invariants: exclusive sets are disjoint, and disjoint from the default set, except that later containers
//! of a pod reuse the CPUs of its init containers; together they are all CPUs. The record is written before
//! a container starts.
//! Upstream: `cm/cpumanager/policy_static.go`, `policy_options.go`. Pods with pod-level resources share
//! (the gate PodLevelResourceManagers is alpha).

use std::collections::BTreeMap;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::{Container, Pod};

use super::Refusal;
use super::assignment::{AssignmentError, Manner, choose};
use super::checkpoint::{self, CpuRecord, Entries, RecordError};
use super::cpuset::CpuSet;
use super::hints::{Hint, Hints, Mask};
use super::machine::{Level, Topology};
use super::options::CpuOptions;
use crate::names;
use crate::resources::{self, GUARANTEED, is_sidecar, qos_class};

pub const POLICY: &str = "static";

#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    #[error(
        "[cpumanager] the static policy requires systemreserved.cpu + kubereserved.cpu to be greater than zero"
    )]
    NothingReserved,
    #[error(
        "new static policy error: [cpumanager] unable to reserve the required amount of CPUs (size of {0} did not equal {1})"
    )]
    Reserve(CpuSet, usize),
    #[error(
        "could not restore state from checkpoint: {0}, please drain this node and delete the CPU manager checkpoint file {1:?} before restarting Kubelet"
    )]
    Record(RecordError, PathBuf),
    #[error("{0}")]
    State(String),
}

pub struct CpuPolicy {
    topology: Topology,
    options: CpuOptions,
    reserved: CpuSet,
    /// The reserved CPUs with their siblings.
    reserved_cores: CpuSet,
    file: PathBuf,
    shared: CpuSet,
    assigned: Entries<CpuSet>,
    /// CPUs of finished init containers, of the pod that was admitted last.
    reusable: Option<(String, CpuSet)>,
}

impl CpuPolicy {
    /// `reserved`: these CPUs, or so many thousandths of CPUs.
    pub fn open(
        topology: Topology,
        options: CpuOptions,
        reserved: (Option<CpuSet>, i64),
        file: PathBuf,
    ) -> Result<Self, CpuError> {
        let count = usize::try_from((reserved.1 + 999) / 1000).unwrap_or_default();
        if count == 0 {
            return Err(CpuError::NothingReserved);
        }
        let mut own = Self {
            topology,
            options,
            reserved: CpuSet::default(),
            reserved_cores: CpuSet::default(),
            file,
            shared: CpuSet::default(),
            assigned: BTreeMap::new(),
            reusable: None,
        };
        let all = own.topology.cpus.all();
        let named = reserved.0.filter(|named| !named.is_empty());
        own.reserved = named.unwrap_or_else(|| own.take(&all, count).unwrap_or_default());
        if own.reserved.len() != count || !own.reserved.is_subset(&all) {
            return Err(CpuError::Reserve(own.reserved, count));
        }
        let cores = &own.topology.cpus;
        own.reserved_cores = own
            .reserved
            .iter()
            .flat_map(|cpu| cores.of(Level::Core, cores.0[&cpu].core).iter().collect::<Vec<_>>())
            .collect();
        own.restore()?;
        Ok(own)
    }

    fn restore(&mut self) -> Result<(), CpuError> {
        let broken = |own: &Self, error| CpuError::Record(error, own.file.clone());
        let known = checkpoint::read::<CpuRecord>(&self.file, POLICY);
        let known = known.map_err(|error| broken(self, error))?;
        if let Some(record) = known {
            let parse = |text: &str| {
                text.parse::<CpuSet>().map_err(|error| RecordError::CpuSet(text.to_owned(), error))
            };
            self.shared = parse(&record.default_cpu_set).map_err(|error| broken(self, error))?;
            for (pod, containers) in &record.entries {
                for (container, set) in containers {
                    let set = parse(set).map_err(|error| broken(self, error))?;
                    self.assigned.entry(pod.clone()).or_default().insert(container.clone(), set);
                }
            }
        }
        self.validate()?;
        self.save().map_err(|error| broken(self, error.into()))
    }

    /// Upstream: validateState.
    fn validate(&mut self) -> Result<(), CpuError> {
        let wrong = |text: String| Err(CpuError::State(text));
        let mut all = self.topology.cpus.all();
        if self.options.strict_reservation {
            all = all.difference(&self.reserved);
        }
        if self.shared.is_empty() {
            if !self.assigned.is_empty() {
                return wrong("default cpuset cannot be empty".into());
            }
            self.shared = all;
            return Ok(());
        }
        let kept = self.reserved.intersection(&self.shared);
        let (reserved, shared) = (self.reserved.to_string(), self.shared.to_string());
        if self.options.strict_reservation && !kept.is_empty() {
            let kept = kept.to_string();
            return wrong(format!(
                "some of strictly reserved cpus: {kept:?} are present in defaultCpuSet: {shared:?}"
            ));
        }
        if !self.options.strict_reservation && kept != self.reserved {
            return wrong(format!(
                "not all reserved cpus: {reserved:?} are present in defaultCpuSet: {shared:?}"
            ));
        }
        let mut known = self.shared.clone();
        for (pod, containers) in &self.assigned {
            for (container, set) in containers {
                if !set.intersection(&self.shared).is_empty() {
                    let set = set.to_string();
                    return wrong(format!(
                        "pod: {pod}, container: {container} cpuset: {set:?} overlaps with default cpuset {shared:?}"
                    ));
                }
                known = known.union(set);
            }
        }
        if known != all {
            let (all, known) = (all.to_string(), known.to_string());
            return wrong(format!(
                "current set of available CPUs {all:?} doesn't match with CPUs in state {known:?}"
            ));
        }
        Ok(())
    }

    fn save(&self) -> std::io::Result<()> {
        let texts = |containers: &BTreeMap<String, CpuSet>| {
            containers.iter().map(|(name, set)| (name.clone(), set.to_string())).collect()
        };
        let entries = self.assigned.iter().map(|(pod, all)| (pod.clone(), texts(all))).collect();
        let record = CpuRecord {
            policy_name: POLICY.into(),
            default_cpu_set: self.shared.to_string(),
            entries,
            checksum: 0,
        };
        checkpoint::write(&self.file, record)
    }

    fn save_or_log(&self) {
        if let Err(error) = self.save() {
            tracing::error!(file = %self.file.display(), %error, "failed to record the CPUs of pods");
        }
    }

    fn take(&self, free: &CpuSet, count: usize) -> Result<CpuSet, AssignmentError> {
        let group = if self.options.full_cores { self.topology.per_core() } else { 1 };
        let manner = Manner {
            spreads_over_cores: self.options.distribute_across_cores,
            prefers_uncore_caches: self.options.prefer_uncore_cache,
            distributes_by: self.options.distribute_across_numa.then_some(group),
        };
        choose(&self.topology, free, count, manner)
    }

    pub fn allocatable(&self) -> CpuSet {
        self.topology.cpus.all().difference(&self.reserved)
    }

    fn available(&self) -> CpuSet {
        self.shared.difference(&self.reserved)
    }

    /// The container's own CPUs.
    pub fn exclusive(&self, pod: &str, container: &str) -> Option<&CpuSet> {
        self.assigned.get(pod)?.get(container)
    }

    /// The CPUs that the container may use.
    pub fn of(&self, pod: &str, container: &str) -> CpuSet {
        self.exclusive(pod, container).unwrap_or(&self.shared).clone()
    }

    pub fn has_exclusive(&self, pod: &str) -> bool {
        self.assigned.contains_key(pod)
    }

    pub fn pods(&self) -> impl Iterator<Item = &String> {
        self.assigned.keys()
    }

    fn reusable(&self, pod: &str) -> CpuSet {
        let known = self.reusable.as_ref().filter(|(uid, _)| uid == pod);
        known.map(|(_, set)| set.clone()).unwrap_or_default()
    }

    /// An ordinary init container gives its CPUs to later containers.
    fn note_reusable(&mut self, pod: &Pod, container: &Container, set: &CpuSet) {
        let uid = names::uid(pod);
        let known = self.reusable(uid);
        let next = match is_init(pod, container) {
            true => known.union(set),
            false => known.difference(set),
        };
        self.reusable = Some((uid.to_owned(), next));
    }

    pub fn allocate(
        &mut self,
        pod: &Pod,
        container: &Container,
        affinity: Option<Mask>,
    ) -> Result<(), Refusal> {
        let count = exclusive_count(pod, container);
        if count == 0 {
            return Ok(());
        }
        self.check_cores(count)?;
        let uid = names::uid(pod).to_owned();
        if let Some(set) = self.exclusive(&uid, &container.name).cloned() {
            self.note_reusable(pod, container, &set);
            return Ok(());
        }
        let free = self.available().union(&self.reusable(&uid));
        let mut set = CpuSet::default();
        if let Some(mask) = affinity {
            let near = self.near(mask, &free);
            set = self.take(&near, count.min(near.len())).map_err(Refusal::unexpected)?;
        }
        let rest = self.take(&free.difference(&set), count - set.len());
        set = set.union(&rest.map_err(Refusal::unexpected)?);
        self.shared = self.shared.difference(&set);
        self.note_reusable(pod, container, &set);
        self.assigned.entry(uid).or_default().insert(container.name.clone(), set);
        self.save().map_err(Refusal::unexpected)
    }

    /// Upstream: enforceSMTAlignment.
    fn check_cores(&self, count: usize) -> Result<(), Refusal> {
        let per_core = self.topology.per_core();
        if !self.options.full_cores {
            return Ok(());
        }
        let refuse = |message: String| Err(Refusal { reason: "SMTAlignmentError", message });
        if !count.is_multiple_of(per_core.max(1)) {
            return refuse(format!(
                "SMT Alignment Error: requested {count} cpus not multiple cpus per core = {per_core}"
            ));
        }
        let free = self.shared.difference(&self.reserved_cores).len();
        if count > free {
            return refuse(format!(
                "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = {free}, \
                 requested CPUs = {count}, CPUs per core = {per_core}"
            ));
        }
        Ok(())
    }

    fn near(&self, mask: Mask, free: &CpuSet) -> CpuSet {
        let cpus = &self.topology.cpus;
        let sockets: Vec<usize> =
            mask.nodes().flat_map(|node| cpus.ids_in(Level::Socket, Level::Numa, node)).collect();
        let is_near = |cpu: &usize| {
            let at = cpus.0[cpu];
            match self.options.align_by_socket {
                true => sockets.contains(&at.socket),
                false => mask.has(at.numa),
            }
        };
        free.iter().filter(is_near).collect()
    }

    /// Frees the CPUs of a pod; true if it had any.
    pub fn forget(&mut self, pod: &str) -> bool {
        let Some(containers) = self.assigned.remove(pod) else { return false };
        for set in containers.values() {
            self.shared = self.shared.union(set);
        }
        if self.reusable.as_ref().is_some_and(|(uid, _)| uid == pod) {
            self.reusable = None;
        }
        self.save_or_log();
        true
    }

    pub fn hints(&self, pod: &Pod, container: &Container) -> Hints {
        let count = exclusive_count(pod, container);
        if count == 0 {
            return Hints::new();
        }
        let uid = names::uid(pod);
        let list = match self.exclusive(uid, &container.name) {
            Some(set) if set.len() != count => vec![],
            Some(set) => self.hints_of(set, &CpuSet::default(), count),
            None => self.hints_of(&self.available(), &self.reusable(uid), count),
        };
        [("cpu".to_owned(), Some(list))].into()
    }

    pub fn pod_hints(&self, pod: &Pod) -> Hints {
        let count = pod_count(pod);
        if count == 0 {
            return Hints::new();
        }
        let uid = names::uid(pod);
        let mut had = CpuSet::default();
        for container in super::containers(pod) {
            if let Some(set) = self.exclusive(uid, &container.name) {
                if set.len() != exclusive_count(pod, container) {
                    return [("cpu".to_owned(), Some(vec![]))].into();
                }
                had = had.union(set);
            }
        }
        let list = match had.len() == count {
            true => self.hints_of(&had, &CpuSet::default(), count),
            false => self.hints_of(&self.available(), &self.reusable(uid).union(&had), count),
        };
        [("cpu".to_owned(), Some(list))].into()
    }

    /// Upstream: generateCPUTopologyHints.
    fn hints_of(&self, free: &CpuSet, reusable: &CpuSet, count: usize) -> Vec<Hint> {
        let cpus = &self.topology.cpus;
        let nodes: Vec<usize> = cpus.ids(Level::Numa).into_iter().collect();
        let mut fewest = nodes.len();
        let mut out = vec![];
        for mask in Mask::subsets(&nodes) {
            let is_in = |cpu: &usize| mask.has(cpus.0[cpu].numa);
            if cpus.0.keys().filter(|cpu| is_in(cpu)).count() >= count {
                fewest = fewest.min(mask.count());
            }
            let near = free.iter().filter(is_in).count();
            if reusable.iter().all(|cpu| is_in(&cpu)) && near + reusable.len() >= count {
                out.push(mask);
            }
        }
        let is_preferred = |mask: Mask| {
            mask.count() == fewest
                || (self.options.align_by_socket && self.is_aligned(mask, fewest))
        };
        let hint = |mask| Hint { affinity: Some(mask), is_preferred: is_preferred(mask) };
        out.into_iter().map(hint).collect()
    }

    /// Whether the nodes are in as few sockets as possible.
    fn is_aligned(&self, mask: Mask, fewest: usize) -> bool {
        let cpus = &self.topology.cpus;
        let per_socket = cpus.ids(Level::Numa).len() / cpus.ids(Level::Socket).len().max(1);
        if per_socket == 0 {
            return false;
        }
        let sockets: std::collections::BTreeSet<usize> =
            mask.nodes().flat_map(|node| cpus.ids_in(Level::Socket, Level::Numa, node)).collect();
        sockets.len() == fewest.div_ceil(per_socket)
    }
}

/// Whether this is an init container that ends before the others start.
pub fn is_init(pod: &Pod, container: &Container) -> bool {
    let inits = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
    inits.into_iter().any(|one| one.name == container.name && !is_sidecar(one))
}

/// The number of CPUs that the container gets for itself; 0: it shares.
pub fn exclusive_count(pod: &Pod, container: &Container) -> usize {
    let whole = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    if qos_class(pod) != GUARANTEED || whole.is_some() {
        return 0;
    }
    let request = resources::request(container.resources.as_ref(), "cpu");
    // A request defaults to the limit.
    let request = request.or(resources::limit(container.resources.as_ref(), "cpu"));
    let milli = request.map_or(0, resources::milli);
    let is_whole = milli % 1000 == 0;
    if is_whole { usize::try_from(milli / 1000).unwrap_or_default() } else { 0 }
}

/// The most CPUs that the pod has for itself at one time.
fn pod_count(pod: &Pod) -> usize {
    let (mut sidecars, mut peak) = (0, 0);
    let Some(spec) = &pod.spec else { return 0 };
    for container in spec.init_containers.iter().flatten() {
        let count = exclusive_count(pod, container);
        if is_sidecar(container) {
            sidecars += count;
        } else {
            peak = peak.max(sidecars + count);
        }
    }
    let main: usize = spec.containers.iter().map(|one| exclusive_count(pod, one)).sum();
    peak.max(main + sidecars)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::managers::assignment::tests::{dual_socket, single_socket};
    use serde_json::{Value, json};

    fn container(name: &str, cpu: &str) -> Value {
        json!({"name": name, "resources": {"limits": {"cpu": cpu, "memory": "1Gi"},
            "requests": {"cpu": cpu, "memory": "1Gi"}}})
    }

    fn pod(uid: &str, inits: &[Value], containers: &[Value]) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": uid, "uid": uid},
            "spec": {"initContainers": inits, "containers": containers}}))
        .expect("a pod")
    }

    fn open(dir: &tempfile::TempDir, topology: Topology, options: CpuOptions) -> CpuPolicy {
        let file = dir.path().join(checkpoint::CPU_FILE);
        CpuPolicy::open(topology, options, (None, 1000), file).expect("a policy")
    }

    fn admit(policy: &mut CpuPolicy, pod: &Pod) -> Result<(), Refusal> {
        let all: Vec<Container> = crate::managers::containers(pod).cloned().collect();
        all.iter().try_for_each(|one| policy.allocate(pod, one, None))
    }

    #[test]
    fn whole_cpus_of_guaranteed_pods_are_exclusive() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut policy = open(&dir, single_socket(), CpuOptions::default());
        assert_eq!(policy.allocatable().to_string(), "1-7");
        admit(&mut policy, &pod("a", &[], &[container("x", "2"), container("y", "1500m")]))
            .expect("room");
        assert_eq!(policy.of("a", "x").to_string(), "1,5");
        assert_eq!(policy.of("a", "y").to_string(), "0,2-4,6-7");
        // A restarted kubelet continues from the record.
        drop(policy);
        let mut policy = open(&dir, single_socket(), CpuOptions::default());
        assert_eq!(policy.of("a", "x").to_string(), "1,5");
        let refused =
            admit(&mut policy, &pod("b", &[], &[container("x", "6")])).expect_err("no room");
        assert_eq!(
            (refused.reason, refused.message.as_str()),
            (
                "UnexpectedAdmissionError",
                "Allocate failed due to not enough cpus available to satisfy request: requested=6, \
                 available=5, which is unexpected"
            )
        );
        assert!(policy.forget("a") && !policy.forget("a"));
        assert_eq!(policy.of("b", "x").to_string(), "0-7");
    }

    #[test]
    fn init_containers_give_their_cpus_back() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut policy = open(&dir, single_socket(), CpuOptions::default());
        let owner = pod("a", &[container("i", "6")], &[container("x", "4"), container("y", "2")]);
        admit(&mut policy, &owner).expect("room");
        let (init, x, y) = (policy.of("a", "i"), policy.of("a", "x"), policy.of("a", "y"));
        assert_eq!(init, x.union(&y), "{init} {x} {y}");
        assert!(x.intersection(&y).is_empty());
        assert_eq!(pod_count(&owner), 6);
    }

    #[test]
    fn full_cores_only() {
        let dir = tempfile::tempdir().expect("a directory");
        let options = CpuOptions { full_cores: true, ..CpuOptions::default() };
        let mut policy = open(&dir, single_socket(), options);
        let check = |policy: &mut CpuPolicy, cpu: &str, expected: &str| {
            let refused =
                admit(policy, &pod("p", &[], &[container("x", cpu)])).expect_err("refused");
            assert_eq!((refused.reason, refused.message.as_str()), ("SMTAlignmentError", expected));
        };
        check(
            &mut policy,
            "1",
            "SMT Alignment Error: requested 1 cpus not multiple cpus per core = 2",
        );
        check(
            &mut policy,
            "8",
            "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = 6, \
             requested CPUs = 8, CPUs per core = 2",
        );
    }

    #[test]
    fn reservations_may_be_strict_and_records_must_fit() {
        let dir = tempfile::tempdir().expect("a directory");
        let strict = || CpuOptions { strict_reservation: true, ..CpuOptions::default() };
        let policy = open(&dir, single_socket(), strict());
        assert_eq!(policy.of("a", "x").to_string(), "1-7");
        let file = || dir.path().join(checkpoint::CPU_FILE);
        let opened = CpuPolicy::open(single_socket(), CpuOptions::default(), (None, 1000), file());
        assert_eq!(
            opened.err().expect("another reservation").to_string(),
            "not all reserved cpus: \"0\" are present in defaultCpuSet: \"1-7\""
        );
        let none = CpuPolicy::open(single_socket(), CpuOptions::default(), (None, 0), file());
        assert!(matches!(none.err(), Some(CpuError::NothingReserved)));
        let named = "0,4".parse().expect("a set");
        let few = CpuPolicy::open(single_socket(), strict(), (Some(named), 1000), file());
        assert!(matches!(few.err(), Some(CpuError::Reserve(..))));
    }

    #[test]
    fn hints_name_the_nodes_with_room() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut policy = open(&dir, dual_socket(), CpuOptions::default());
        let hints = |policy: &CpuPolicy, cpu: &str| -> Vec<(u64, bool)> {
            let owner = pod("p", &[], &[container("x", cpu)]);
            let one = &owner.spec.as_ref().expect("a spec").containers[0];
            let mut all = policy.hints(&owner, one);
            let list = all.remove("cpu").flatten().expect("hints");
            list.iter().map(|hint| (hint.affinity.expect("a mask").0, hint.is_preferred)).collect()
        };
        assert_eq!(hints(&policy, "2"), [(1, true), (2, true), (3, false)]);
        assert_eq!(hints(&policy, "6"), [(2, true), (3, false)], "node 0 has a reserved CPU");
        assert_eq!(hints(&policy, "8"), [(3, true)]);
        let owner = pod("q", &[], &[container("x", "3")]);
        let one = owner.spec.as_ref().expect("a spec").containers[0].clone();
        policy.allocate(&owner, &one, Some(Mask::of([1]))).expect("room");
        assert_eq!(policy.of("q", "x").to_string(), "1,3,7");
    }
}
