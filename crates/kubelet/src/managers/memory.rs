//! The static memory policy: containers of Guaranteed pods get memory and huge pages of chosen NUMA nodes.
//!
//! ```text
//!  NUMA node n: total = reserved for the system + allocatable;  allocatable = reserved for pods + free
//!  cells: the nodes that containers use together; a node is used alone or in one group, never both
//! ```
//!
//! In: pods, NUMA affinities. Out: blocks of memory of containers, hints, the record on the disk.
//! Invariant: the machine's state is the sum of the containers' blocks. The record is written before a
//! container starts.
//! Upstream: `cm/memorymanager/policy_static.go`. Pods with pod-level resources are not pinned.

use std::collections::BTreeMap;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::{Container, Pod};

use super::Refusal;
use super::checkpoint::{self, Block, Entries, MemoryRecord, NodeState, RecordError, Table};
use super::cpu::is_init;
use super::hints::{Hint, Hints, Mask};
use super::machine::{Machine, huge_page_resource};
use crate::names;
use crate::resources::{GUARANTEED, bytes_quantity, is_sidecar, qos_class, units};

pub const POLICY: &str = "Static";
const MEMORY: &str = "memory";

#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("[memorymanager] you should specify the system reserved memory")]
    NothingReserved,
    #[error(
        "the reserved memory configuration references a NUMA node {0} that does not exist on this machine"
    )]
    NoNode(usize),
    #[error(
        "the total amount {reserved:?} of type {resource:?} is not equal to the value {expected:?} determined by Node Allocatable feature"
    )]
    Sum { resource: String, reserved: String, expected: String },
    #[error(
        "could not restore state from checkpoint: {0}, please drain this node and delete the memory manager checkpoint file {1:?} before restarting Kubelet"
    )]
    Record(RecordError, PathBuf),
    #[error("[memorymanager] the expected machine state is different from the real one")]
    OtherMachine,
    #[error(
        "[memorymanager] (pod: {0}, container: {1}) the memory assignment uses the NUMA that does not exist"
    )]
    UnknownNode(String, String),
    #[error(
        "[memorymanager] (pod: {0}, container: {1}) the memory assignment uses memory resource that does not exist"
    )]
    UnknownResource(String, String),
}

/// Why a container gets no memory; the texts are upstream's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum NoMemory {
    #[error(
        "[memorymanager] failed to get the default NUMA affinity, no NUMA nodes with enough memory is available"
    )]
    NoNode,
    #[error("[memorymanager] failed to find the default preferred hint")]
    NotPreferred,
    #[error("[memorymanager] failed to find NUMA nodes to extend the current topology hint")]
    NoExtension,
    #[error("[memorymanager] failed to find the extended preferred hint")]
    ExtensionNotPreferred,
    #[error("[memorymanager] preferred hint violates NUMA node allocation")]
    Violation,
}

type Nodes = BTreeMap<usize, NodeState>;
/// Bytes by resource.
pub type Amounts = BTreeMap<String, u64>;

pub struct MemoryPolicy {
    file: PathBuf,
    nodes: Nodes,
    assigned: Entries<Vec<Block>>,
    /// Memory of finished init containers, by NUMA nodes and resource, of the pod admitted last.
    reusable: Option<(String, BTreeMap<Mask, Amounts>)>,
}

impl MemoryPolicy {
    /// `reserved`: bytes for the system by NUMA node; `expected`: what the node reserves in all.
    pub fn open(
        machine: &Machine,
        reserved: &BTreeMap<usize, Amounts>,
        expected: &Amounts,
        file: PathBuf,
    ) -> Result<Self, MemoryError> {
        check_reserved(machine, reserved, expected)?;
        let nodes = fresh_nodes(machine, reserved);
        let known = checkpoint::read::<MemoryRecord>(&file, POLICY);
        let known = known.map_err(|error| MemoryError::Record(error, file.clone()))?;
        let mut own = Self { file, nodes, assigned: BTreeMap::new(), reusable: None };
        if let Some(record) = known.filter(|record| !record.machine_state.is_empty()) {
            own.validate(&record)?;
            own.nodes = record.machine_state;
            own.assigned = record.entries;
        }
        own.save().map_err(|error| MemoryError::Record(error.into(), own.file.clone()))?;
        Ok(own)
    }

    /// Whether the record fits to this machine. Upstream: validateState.
    fn validate(&self, record: &MemoryRecord) -> Result<(), MemoryError> {
        let mut expected = self.nodes.clone();
        for (pod, containers) in &record.entries {
            for (container, block) in
                containers.iter().flat_map(|(name, all)| all.iter().map(move |one| (name, one)))
            {
                let about = || (pod.clone(), container.clone());
                for node in &block.numa_affinity {
                    let Some(known) = expected.get(node) else {
                        let (pod, container) = about();
                        return Err(MemoryError::UnknownNode(pod, container));
                    };
                    if !known.memory_map.contains_key(&block.resource) {
                        let (pod, container) = about();
                        return Err(MemoryError::UnknownResource(pod, container));
                    }
                }
                reserve(&mut expected, &block.numa_affinity, &block.resource, block.size);
            }
        }
        match is_same(&record.machine_state, &expected) {
            true => Ok(()),
            false => Err(MemoryError::OtherMachine),
        }
    }

    fn save(&self) -> std::io::Result<()> {
        let record = MemoryRecord {
            policy_name: POLICY.into(),
            machine_state: self.nodes.clone(),
            entries: self.assigned.clone(),
            checksum: 0,
        };
        checkpoint::write(&self.file, record)
    }

    fn save_or_log(&self) {
        if let Err(error) = self.save() {
            tracing::error!(file = %self.file.display(), %error, "failed to record the memory of pods");
        }
    }

    pub fn blocks(&self, pod: &str, container: &str) -> &[Block] {
        self.assigned.get(pod).and_then(|all| all.get(container)).map_or(&[], Vec::as_slice)
    }

    /// The NUMA nodes whose memory the container may use; empty: all.
    pub fn nodes_of(&self, pod: &str, container: &str) -> Mask {
        Mask::of(self.blocks(pod, container).iter().flat_map(|one| one.numa_affinity.clone()))
    }

    pub fn pods(&self) -> impl Iterator<Item = &String> {
        self.assigned.keys()
    }

    /// The memory that containers can get, for the pod-resources API.
    pub fn allocatable(&self) -> Vec<Block> {
        let all = self.nodes.iter().flat_map(|(id, node)| {
            let some = node.memory_map.iter().filter(|(_, table)| table.allocatable > 0);
            some.map(|(resource, table)| Block {
                numa_affinity: vec![*id],
                resource: resource.clone(),
                size: table.allocatable,
            })
        });
        all.collect()
    }

    pub fn hints(&self, pod: &Pod, container: &Container) -> Hints {
        if !is_pinned(pod) {
            return Hints::new();
        }
        let asked = requests(container);
        match self.blocks(names::uid(pod), &container.name) {
            [] => self.hints_of(pod, &asked),
            had => hints_of_blocks(had, &asked),
        }
    }

    pub fn pod_hints(&self, pod: &Pod) -> Hints {
        let asked = pod_requests(pod);
        if !is_pinned(pod) || asked.is_empty() {
            return Hints::new();
        }
        let uid = names::uid(pod);
        let had = super::containers(pod).map(|one| self.blocks(uid, &one.name));
        match had.into_iter().find(|blocks| !blocks.is_empty()) {
            Some(had) => hints_of_blocks(had, &asked),
            None => self.hints_of(pod, &asked),
        }
    }

    /// Upstream: calculateHints.
    fn hints_of(&self, pod: &Pod, asked: &Amounts) -> Hints {
        let all: Vec<usize> = self.nodes.keys().copied().collect();
        let mut fewest = all.len();
        let mut masks = vec![];
        for mask in Mask::subsets(&all) {
            let sum = |resource: &String, pick: fn(&Table) -> u64| -> u64 {
                let tables = mask.nodes().filter_map(|n| self.nodes[&n].memory_map.get(resource));
                tables.map(pick).sum()
            };
            if asked.iter().any(|(resource, size)| sum(resource, |one| one.allocatable) < *size) {
                continue;
            }
            fewest = fewest.min(mask.count());
            let fits = |(resource, size): (&String, &u64)| {
                sum(resource, |one| one.free) + self.reusable(pod, mask, resource) >= *size
            };
            if self.is_free(mask) && asked.iter().all(fits) {
                masks.push(mask);
            }
        }
        let hint =
            |mask: &Mask| Hint { affinity: Some(*mask), is_preferred: mask.count() == fewest };
        let list: Vec<Hint> = masks.iter().map(hint).collect();
        match list.is_empty() {
            true => Hints::new(),
            false => asked.keys().map(|name| (name.clone(), Some(list.clone()))).collect(),
        }
    }

    /// Whether no container uses a node of the mask alone, or together with other nodes.
    fn is_free(&self, mask: Mask) -> bool {
        let nodes: Vec<usize> = mask.nodes().collect();
        if let [one] = nodes.as_slice() {
            return self.nodes[one].cells.len() <= 1;
        }
        let fits = |node: &usize| {
            let known = &self.nodes[node];
            known.number_of_assignments == 0 || Mask::of(known.cells.clone()) == mask
        };
        nodes.iter().all(fits)
    }

    fn reusable(&self, pod: &Pod, mask: Mask, resource: &str) -> u64 {
        let known = self.reusable.as_ref().filter(|(uid, _)| uid == names::uid(pod));
        let amounts = known.and_then(|(_, all)| all.get(&mask));
        amounts.and_then(|all| all.get(resource)).copied().unwrap_or_default()
    }

    pub fn allocate(
        &mut self,
        pod: &Pod,
        container: &Container,
        hint: Hint,
    ) -> Result<(), Refusal> {
        if !is_pinned(pod) {
            return Ok(());
        }
        let uid = names::uid(pod).to_owned();
        let had = self.blocks(&uid, &container.name).to_vec();
        if !had.is_empty() {
            self.note_reusable(pod, container, &had);
            return Ok(());
        }
        let asked = requests(container);
        let mask = self.choose(pod, &asked, hint).map_err(Refusal::unexpected)?;
        let nodes: Vec<usize> = mask.nodes().collect();
        let mut blocks = vec![];
        for (resource, size) in &asked {
            let rest = size.saturating_sub(self.reusable(pod, mask, resource));
            reserve(&mut self.nodes, &nodes, resource, rest);
            let numa_affinity = nodes.clone();
            blocks.push(Block { numa_affinity, resource: resource.clone(), size: *size });
        }
        self.note_reusable(pod, container, &blocks);
        self.take_from_inits(pod, container, &blocks);
        self.assigned.entry(uid).or_default().insert(container.name.clone(), blocks);
        self.save().map_err(Refusal::unexpected)
    }

    /// The nodes for the container: those of the hint, or more if they do not suffice.
    fn choose(&self, pod: &Pod, asked: &Amounts, hint: Hint) -> Result<Mask, NoMemory> {
        let own = || self.hints_of(pod, asked).remove(MEMORY).flatten().unwrap_or_default();
        let mut chosen = match hint.affinity {
            Some(mask) => Hint { affinity: Some(mask), ..hint },
            None => {
                let best = best(&own()).ok_or(NoMemory::NoNode)?;
                if hint.is_preferred && !best.is_preferred {
                    return Err(NoMemory::NotPreferred);
                }
                best
            }
        };
        let mask = chosen.affinity.unwrap_or_default();
        if !self.satisfies(mask, asked) {
            let mut wider = own();
            wider.retain(|one| one.affinity.is_some_and(|other| mask.and(other) == mask));
            let extended = best(&wider).ok_or(NoMemory::NoExtension)?;
            if chosen.is_preferred && !extended.is_preferred {
                return Err(NoMemory::ExtensionNotPreferred);
            }
            chosen = extended;
        }
        let mask = chosen.affinity.unwrap_or_default();
        let is_alone = mask.count() == 1;
        if !is_alone && !self.is_free(mask) {
            return Err(NoMemory::Violation);
        }
        Ok(mask)
    }

    fn satisfies(&self, mask: Mask, asked: &Amounts) -> bool {
        asked.iter().all(|(resource, size)| {
            let tables =
                mask.nodes().filter_map(|node| self.nodes.get(&node)?.memory_map.get(resource));
            tables.map(|table| table.free).sum::<u64>() >= *size
        })
    }

    /// Upstream: updatePodReusableMemory.
    fn note_reusable(&mut self, pod: &Pod, container: &Container, blocks: &[Block]) {
        let uid = names::uid(pod);
        let known = self.reusable.take().filter(|(of, _)| of == uid);
        let mut all = known.map(|(_, all)| all).unwrap_or_default();
        for block in blocks {
            let mask = Mask::of(block.numa_affinity.clone());
            let amount = all.entry(mask).or_default().entry(block.resource.clone()).or_default();
            *amount = match is_init(pod, container) {
                true => (*amount).max(block.size),
                false => amount.saturating_sub(block.size),
            };
        }
        self.reusable = Some((uid.to_owned(), all));
    }

    /// The blocks of init containers shrink by what later containers take of them, so that the sum of all
    /// blocks is what the machine gives. Upstream: updateInitContainersMemoryBlocks.
    fn take_from_inits(&mut self, pod: &Pod, container: &Container, blocks: &[Block]) {
        let Some(spec) = &pod.spec else { return };
        let Some(assigned) = self.assigned.get_mut(names::uid(pod)) else { return };
        for block in blocks {
            let mut left = block.size;
            let before = spec.init_containers.iter().flatten();
            let before = before.take_while(|init| init.name != container.name);
            for init in before.filter(|init| !is_sidecar(init)) {
                for old in assigned.get_mut(&init.name).into_iter().flatten() {
                    let is_same = old.resource == block.resource
                        && Mask::of(old.numa_affinity.clone())
                            == Mask::of(block.numa_affinity.clone());
                    if is_same {
                        let taken = old.size.min(left);
                        old.size -= taken;
                        left -= taken;
                    }
                }
            }
        }
    }

    /// A container starts: the ordinary init containers before it have ended. Upstream: AddContainer.
    pub fn started(&mut self, pod: &Pod, container: &Container) {
        let inits = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
        let before = inits.take_while(|init| init.name != container.name);
        let ended: Vec<&String> =
            before.filter(|init| !is_sidecar(init)).map(|init| &init.name).collect();
        let mut is_news = false;
        for name in ended {
            is_news |= self.release(names::uid(pod), Some(name));
        }
        if is_news {
            self.save_or_log();
        }
    }

    /// Frees the memory of a pod; true if it had any.
    pub fn forget(&mut self, pod: &str) -> bool {
        let is_news = self.release(pod, None);
        if is_news {
            self.save_or_log();
        }
        is_news
    }

    fn release(&mut self, pod: &str, container: Option<&str>) -> bool {
        let Some(all) = self.assigned.get_mut(pod) else { return false };
        let blocks: Vec<Block> = match container {
            Some(name) => all.remove(name).into_iter().flatten().collect(),
            None => std::mem::take(all).into_values().flatten().collect(),
        };
        if all.is_empty() {
            self.assigned.remove(pod);
        }
        for block in &blocks {
            give_back(&mut self.nodes, block);
        }
        !blocks.is_empty()
    }
}

fn check_reserved(
    machine: &Machine,
    reserved: &BTreeMap<usize, Amounts>,
    expected: &Amounts,
) -> Result<(), MemoryError> {
    let mut sums = Amounts::new();
    for (node, amounts) in reserved {
        if !machine.nodes.iter().any(|known| known.id == *node) {
            return Err(MemoryError::NoNode(*node));
        }
        for (resource, bytes) in amounts {
            *sums.entry(resource.clone()).or_default() += bytes;
        }
    }
    for resource in sums.keys().chain(expected.keys()) {
        let of = |all: &Amounts| all.get(resource).copied().unwrap_or_default();
        if of(&sums) != of(expected) {
            let told = |bytes: u64| bytes_quantity(i64::try_from(bytes).unwrap_or(i64::MAX)).0;
            return Err(MemoryError::Sum {
                resource: resource.clone(),
                reserved: told(of(&sums)),
                expected: told(of(expected)),
            });
        }
    }
    match sums.get(MEMORY) {
        Some(bytes) if *bytes > 0 => Ok(()),
        _ => Err(MemoryError::NothingReserved),
    }
}

/// The machine without pods. Upstream: getDefaultMachineState.
fn fresh_nodes(machine: &Machine, reserved: &BTreeMap<usize, Amounts>) -> Nodes {
    let mut out = Nodes::new();
    for node in &machine.nodes {
        let kept = |resource: &str| {
            reserved.get(&node.id).and_then(|all| all.get(resource)).copied().unwrap_or_default()
        };
        let table = |total: u64, kept: u64, elsewhere: u64| {
            let allocatable = total.saturating_sub(kept).saturating_sub(elsewhere);
            Table { total, system_reserved: kept, allocatable, reserved: 0, free: allocatable }
        };
        let mut memory_map = BTreeMap::new();
        let mut huge = 0;
        for (size, count) in &node.huge_pages {
            let resource = huge_page_resource(*size);
            huge += size * count;
            memory_map.insert(resource.clone(), table(size * count, kept(&resource), 0));
        }
        memory_map.insert(MEMORY.to_owned(), table(node.memory, kept(MEMORY), huge));
        out.insert(
            node.id,
            NodeState { number_of_assignments: 0, memory_map, cells: vec![node.id] },
        );
    }
    out
}

/// Upstream: updateMachineState.
fn reserve(nodes: &mut Nodes, affinity: &[usize], resource: &str, mut size: u64) {
    for id in affinity {
        let Some(node) = nodes.get_mut(id) else { continue };
        node.number_of_assignments += 1;
        node.cells = affinity.to_vec();
        let Some(table) = node.memory_map.get_mut(resource) else { continue };
        let taken = table.free.min(size);
        table.reserved += taken;
        table.free -= taken;
        size -= taken;
    }
}

/// Upstream: releaseMemory.
fn give_back(nodes: &mut Nodes, block: &Block) {
    let mut size = block.size;
    for id in &block.numa_affinity {
        let Some(node) = nodes.get_mut(id) else { continue };
        node.number_of_assignments -= 1;
        if node.number_of_assignments == 0 {
            node.cells = vec![*id];
        }
        let Some(table) = node.memory_map.get_mut(&block.resource) else { continue };
        let given = table.reserved.min(size);
        table.free += given;
        table.reserved -= given;
        size -= given;
    }
}

/// Compares two states; containers on several nodes may be spread over these in another way.
fn is_same(found: &Nodes, expected: &Nodes) -> bool {
    let sum = |nodes: &Nodes, cells: &[usize], resource: &str| -> (u64, u64) {
        let tables = cells.iter().filter_map(|id| nodes.get(id)?.memory_map.get(resource));
        tables.fold((0, 0), |(free, reserved), one| (free + one.free, reserved + one.reserved))
    };
    found.len() == expected.len()
        && found.iter().all(|(id, node)| {
            let Some(other) = expected.get(id) else { return false };
            let is_table = |resource: &String, table: &Table| {
                let Some(known) = other.memory_map.get(resource) else { return false };
                (known.total, known.system_reserved, known.allocatable)
                    == (table.total, table.system_reserved, table.allocatable)
                    && sum(found, &node.cells, resource) == sum(expected, &node.cells, resource)
            };
            node.number_of_assignments == other.number_of_assignments
                && Mask::of(node.cells.clone()) == Mask::of(other.cells.clone())
                && node.memory_map.len() == other.memory_map.len()
                && node.memory_map.iter().all(|(resource, table)| is_table(resource, table))
        })
}

/// The hints of a container that has its memory already. Upstream: regenerateHints.
fn hints_of_blocks(had: &[Block], asked: &Amounts) -> Hints {
    let fits = |block: &Block| asked.get(&block.resource) == Some(&block.size);
    if had.len() != asked.len() || !had.iter().all(fits) {
        return Hints::new();
    }
    let hint = |block: &Block| Hint {
        affinity: Some(Mask::of(block.numa_affinity.clone())),
        is_preferred: true,
    };
    had.iter().map(|block| (block.resource.clone(), Some(vec![hint(block)]))).collect()
}

/// Upstream: findBestHint.
fn best(hints: &[Hint]) -> Option<Hint> {
    let key = |hint: &&Hint| {
        let mask = hint.affinity.unwrap_or_default();
        (!hint.is_preferred, mask.count(), mask.0)
    };
    hints.iter().min_by_key(key).copied()
}

fn is_pinned(pod: &Pod) -> bool {
    let whole = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    qos_class(pod) == GUARANTEED && whole.is_none()
}

/// The container's memory and huge pages. A request defaults to the limit.
fn requests(container: &Container) -> Amounts {
    let all = container.resources.clone().unwrap_or_default();
    let mut lists = all.limits.unwrap_or_default();
    lists.extend(all.requests.unwrap_or_default());
    let ours = lists.iter().filter(|(name, _)| *name == MEMORY || name.starts_with("hugepages-"));
    ours.map(|(name, quantity)| (name.clone(), u64::try_from(units(quantity)).unwrap_or(0)))
        .collect()
}

/// Upstream: getPodRequestedResources.
fn pod_requests(pod: &Pod) -> Amounts {
    let Some(spec) = &pod.spec else { return Amounts::new() };
    let (mut sidecars, mut peak, mut main) = (Amounts::new(), Amounts::new(), Amounts::new());
    for container in spec.init_containers.iter().flatten() {
        for (resource, size) in requests(container) {
            let beside = sidecars.entry(resource.clone()).or_default();
            if is_sidecar(container) {
                *beside += size;
            } else {
                let most = peak.entry(resource).or_default();
                *most = (*most).max(*beside + size);
            }
        }
    }
    for container in &spec.containers {
        for (resource, size) in requests(container) {
            *main.entry(resource).or_default() += size;
        }
    }
    for (resource, size) in &mut main {
        let of = |all: &Amounts| all.get(resource).copied().unwrap_or_default();
        *size = (*size + of(&sidecars)).max(of(&peak));
    }
    main
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::managers::machine::tests::make_sys;
    use serde_json::{Value, json};

    const GI: u64 = 1 << 30;

    fn machine(root: &tempfile::TempDir) -> Machine {
        make_sys(root.path(), 2, 1, 2, 1);
        Machine::read(root.path(), 0)
    }

    /// Two nodes of 1 GiB: 16 MiB of each are huge pages, 112 MiB are reserved.
    fn open(root: &tempfile::TempDir) -> Result<MemoryPolicy, MemoryError> {
        let kept = || Amounts::from([(MEMORY.to_owned(), 112 << 20)]);
        let reserved = [(0, kept()), (1, kept())].into();
        let expected = Amounts::from([(MEMORY.to_owned(), 224 << 20)]);
        let file = root.path().join(checkpoint::MEMORY_FILE);
        MemoryPolicy::open(&machine(root), &reserved, &expected, file)
    }

    fn container(name: &str, memory: &str) -> Value {
        json!({"name": name, "resources": {"limits": {"cpu": "1", "memory": memory}}})
    }

    fn pod(uid: &str, inits: &[Value], containers: &[Value]) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": uid, "uid": uid},
            "spec": {"initContainers": inits, "containers": containers}}))
        .expect("a pod")
    }

    fn admit(policy: &mut MemoryPolicy, pod: &Pod, hint: Hint) -> Result<(), Refusal> {
        let all: Vec<Container> = crate::managers::containers(pod).cloned().collect();
        all.iter().try_for_each(|one| policy.allocate(pod, one, hint))
    }

    #[test]
    fn memory_comes_from_one_node_or_from_a_group() {
        let root = tempfile::tempdir().expect("a directory");
        let mut policy = open(&root).expect("a policy");
        assert_eq!(policy.nodes[&0].memory_map[MEMORY].allocatable, GI - (128 << 20));
        let small = pod("a", &[], &[container("x", "512Mi")]);
        admit(&mut policy, &small, Hint::ANY).expect("room");
        assert_eq!(policy.nodes_of("a", "x"), Mask(1));
        admit(&mut policy, &pod("b", &[], &[container("x", "512Mi")]), Hint::ANY).expect("room");
        assert_eq!(policy.nodes_of("b", "x"), Mask(2), "node 0 has too little left");
        let wide = pod("c", &[], &[container("x", "700Mi")]);
        let refused = admit(&mut policy, &wide, Hint::ANY).expect_err("each node is used alone");
        assert_eq!(refused.reason, "UnexpectedAdmissionError");
        assert!(
            refused.message.contains("no NUMA nodes with enough memory"),
            "{}",
            refused.message
        );
        // A restarted kubelet continues from the record.
        let mut policy = open(&root).expect("a policy");
        assert_eq!(policy.nodes_of("b", "x"), Mask(2));
        assert!(policy.forget("a") && policy.forget("b") && !policy.forget("b"));
        let both = pod("d", &[], &[container("x", "1Gi")]);
        admit(&mut policy, &both, Hint::ANY).expect("room");
        assert_eq!(policy.nodes_of("d", "x"), Mask(3));
        assert_eq!(policy.nodes[&0].cells, [0, 1]);
        let one = pod("e", &[], &[container("x", "8Mi")]);
        let single = one.spec.as_ref().expect("a spec").containers[0].clone();
        let masks: Vec<Option<Mask>> = policy.hints(&one, &single)[MEMORY]
            .iter()
            .flatten()
            .map(|hint| hint.affinity)
            .collect();
        assert_eq!(masks, [Some(Mask(3))], "a node in a group is not used alone");
    }

    #[test]
    fn init_containers_give_their_memory_back() {
        let root = tempfile::tempdir().expect("a directory");
        let mut policy = open(&root).expect("a policy");
        let owner = pod("a", &[container("i", "600Mi")], &[container("x", "500Mi")]);
        admit(&mut policy, &owner, Hint::ANY).expect("room");
        let free = |policy: &MemoryPolicy| policy.nodes[&0].memory_map[MEMORY].free >> 20;
        assert_eq!(free(&policy), 896 - 600);
        assert_eq!(policy.blocks("a", "i")[0].size >> 20, 100);
        policy.started(&owner, &owner.spec.as_ref().expect("a spec").containers[0]);
        assert_eq!(free(&policy), 896 - 500);
        policy.forget("a");
        assert_eq!(free(&policy), 896);
        assert_eq!(policy.nodes[&0].number_of_assignments, 0);
    }

    #[test]
    fn the_affinity_of_the_other_resources_counts() {
        let root = tempfile::tempdir().expect("a directory");
        let mut policy = open(&root).expect("a policy");
        let second = Hint { affinity: Some(Mask(2)), is_preferred: true };
        admit(&mut policy, &pod("a", &[], &[container("x", "500Mi")]), second).expect("room");
        assert_eq!(policy.nodes_of("a", "x"), Mask(2));
        let refused = admit(&mut policy, &pod("b", &[], &[container("x", "500Mi")]), second);
        assert!(refused.expect_err("no room").message.contains("extend the current topology hint"));
        let mut burstable = pod("c", &[], &[container("x", "1Mi"), json!({"name": "y"})]);
        admit(&mut policy, &burstable, Hint::ANY).expect("not pinned");
        assert_eq!(policy.nodes_of("c", "x"), Mask(0));
        burstable.spec = None;
        assert_eq!(policy.pod_hints(&burstable), Hints::new());
    }

    #[test]
    fn the_reservation_must_be_that_of_the_node() {
        let root = tempfile::tempdir().expect("a directory");
        let machine = machine(&root);
        let file = root.path().join(checkpoint::MEMORY_FILE);
        let kept = Amounts::from([(MEMORY.to_owned(), 100 << 20)]);
        let check = |node: usize, expected: u64, text: &str| {
            let expected = Amounts::from([(MEMORY.to_owned(), expected)]);
            let reserved = [(node, kept.clone())].into();
            let opened = MemoryPolicy::open(&machine, &reserved, &expected, file.clone());
            assert_eq!(opened.err().expect("an error").to_string(), text);
        };
        check(
            7,
            100 << 20,
            "the reserved memory configuration references a NUMA node 7 that does not exist on this machine",
        );
        check(
            0,
            200 << 20,
            "the total amount \"100Mi\" of type \"memory\" is not equal to the value \"200Mi\" determined \
             by Node Allocatable feature",
        );
    }
}
