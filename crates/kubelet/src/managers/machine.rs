//! The machine's CPUs, NUMA nodes and huge pages.
//!
//! In: a directory like `/sys`, and the machine's memory. Out: the topology. A machine without NUMA has
//! one node with everything.
//! Upstream: cAdvisor's `GetTopology` and `cm/cpumanager/topology`: a core is named by its lowest CPU.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use super::cpuset::CpuSet;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cpu {
    pub numa: usize,
    pub socket: usize,
    pub core: usize,
    /// The last-level cache that some cores share.
    pub uncore: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Numa,
    Socket,
    Uncore,
    Core,
}

/// CPUs by number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cpus(pub BTreeMap<usize, Cpu>);

impl Cpus {
    pub fn all(&self) -> CpuSet {
        self.0.keys().copied().collect()
    }

    /// Only these CPUs.
    pub fn only(&self, some: &CpuSet) -> Self {
        let kept = self.0.iter().filter(|(cpu, _)| some.contains(**cpu));
        Self(kept.map(|(cpu, at)| (*cpu, *at)).collect())
    }

    /// The CPUs of one socket, core, ...
    pub fn of(&self, level: Level, id: usize) -> CpuSet {
        self.matching(|cpu| cpu.at(level) == id).collect()
    }

    pub fn count(&self, level: Level, id: usize) -> usize {
        self.matching(|cpu| cpu.at(level) == id).count()
    }

    fn matching(&self, is: impl Fn(&Cpu) -> bool) -> impl Iterator<Item = usize> {
        self.0.iter().filter(move |(_, cpu)| is(cpu)).map(|(number, _)| *number)
    }

    pub fn ids(&self, level: Level) -> BTreeSet<usize> {
        self.0.values().map(|cpu| cpu.at(level)).collect()
    }

    /// The sockets of a NUMA node, the cores of a socket, ...
    pub fn ids_in(&self, level: Level, within: Level, id: usize) -> BTreeSet<usize> {
        self.0.values().filter(|cpu| cpu.at(within) == id).map(|cpu| cpu.at(level)).collect()
    }
}

impl Cpu {
    pub fn at(&self, level: Level) -> usize {
        match level {
            Level::Numa => self.numa,
            Level::Socket => self.socket,
            Level::Uncore => self.uncore,
            Level::Core => self.core,
        }
    }
}

/// The topology, and how many CPUs a full unit has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    pub cpus: Cpus,
}

impl Topology {
    fn share(&self, level: Level) -> usize {
        self.cpus.0.len() / self.cpus.ids(level).len().max(1)
    }

    pub fn per_core(&self) -> usize {
        self.share(Level::Core)
    }

    pub fn per_socket(&self) -> usize {
        self.share(Level::Socket)
    }

    pub fn per_uncore(&self) -> usize {
        self.share(Level::Uncore)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumaNode {
    pub id: usize,
    /// Bytes.
    pub memory: u64,
    /// The number of huge pages, by their size in bytes.
    pub huge_pages: BTreeMap<u64, u64>,
    pub distances: Vec<u64>,
}

/// The parts of a machine that containers can be pinned to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    pub topology: Topology,
    pub nodes: Vec<NumaNode>,
}

impl Machine {
    /// Reads `sys`; `memory` are the bytes of a machine without NUMA.
    pub fn read(sys: &Path, memory: u64) -> Self {
        let nodes = numa_nodes(sys, memory);
        let online: CpuSet = text(&sys.join("devices/system/cpu/online"))
            .and_then(|all| all.parse().ok())
            .unwrap_or_default();
        let numa_of: BTreeMap<usize, usize> =
            nodes.iter().flat_map(|(node, cpus)| cpus.iter().map(|cpu| (cpu, node.id))).collect();
        let one = |cpu: usize| (cpu, cpu_at(sys, cpu, &online, numa_of.get(&cpu).copied()));
        let cpus = Cpus(online.iter().map(one).collect());
        Self {
            topology: Topology { cpus },
            nodes: nodes.into_iter().map(|(node, _)| node).collect(),
        }
    }

    /// All huge pages: bytes by the size of a page.
    pub fn huge_pages(&self) -> BTreeMap<u64, u64> {
        let mut out = BTreeMap::new();
        for (size, count) in self.nodes.iter().flat_map(|node| &node.huge_pages) {
            *out.entry(*size).or_default() += size * count;
        }
        out
    }
}

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn number(path: &Path) -> Option<usize> {
    text(path)?.parse().ok()
}

fn cpu_at(sys: &Path, cpu: usize, online: &CpuSet, numa: Option<usize>) -> Cpu {
    let home = sys.join(format!("devices/system/cpu/cpu{cpu}"));
    let siblings = text(&home.join("topology/thread_siblings_list"));
    let siblings: Option<CpuSet> = siblings.and_then(|all| all.parse().ok());
    let threads = siblings.map(|all| all.intersection(online)).unwrap_or_default();
    // Some virtual machines have package -1.
    let socket = number(&home.join("topology/physical_package_id")).unwrap_or(0);
    Cpu {
        numa: numa.unwrap_or(0),
        socket,
        core: threads.iter().next().unwrap_or(cpu),
        uncore: uncore_cache(&home).unwrap_or(socket),
    }
}

/// The id of the CPU's level-3 cache.
fn uncore_cache(cpu: &Path) -> Option<usize> {
    let caches = fs::read_dir(cpu.join("cache")).ok()?;
    let is_third = |cache: &std::path::PathBuf| number(&cache.join("level")) == Some(3);
    let third = caches.flatten().map(|entry| entry.path()).find(is_third)?;
    let id = number(&third.join("id"));
    id.or_else(|| {
        // Old kernels have no id: the lowest CPU that shares the cache names it.
        let shared: CpuSet = text(&third.join("shared_cpu_list"))?.parse().ok()?;
        shared.iter().next()
    })
}

fn numa_nodes(sys: &Path, memory: u64) -> Vec<(NumaNode, CpuSet)> {
    let home = sys.join("devices/system/node");
    let named = |name: &str| name.strip_prefix("node")?.parse::<usize>().ok();
    let entries = fs::read_dir(&home).into_iter().flatten().flatten();
    let mut ids: Vec<usize> =
        entries.filter_map(|entry| named(&entry.file_name().to_string_lossy())).collect();
    ids.sort_unstable();
    if ids.is_empty() {
        let huge_pages = huge_pages(&sys.join("kernel/mm/hugepages"));
        let online = text(&sys.join("devices/system/cpu/online")).unwrap_or_default();
        let node = NumaNode { id: 0, memory, huge_pages, distances: vec![10] };
        return vec![(node, online.parse().unwrap_or_default())];
    }
    let one = |id: usize| {
        let home = home.join(format!("node{id}"));
        let distances = text(&home.join("distance")).unwrap_or_default();
        let node = NumaNode {
            id,
            memory: node_memory(&text(&home.join("meminfo")).unwrap_or_default()),
            huge_pages: huge_pages(&home.join("hugepages")),
            distances: distances.split_whitespace().filter_map(|word| word.parse().ok()).collect(),
        };
        let cpus = text(&home.join("cpulist")).unwrap_or_default();
        (node, cpus.parse().unwrap_or_default())
    };
    ids.into_iter().map(one).collect()
}

/// `Node 0 MemTotal:  1024 kB`
fn node_memory(meminfo: &str) -> u64 {
    let line = meminfo.lines().find(|line| line.contains("MemTotal:")).unwrap_or_default();
    let kibibytes = line.split_whitespace().rev().nth(1).and_then(|word| word.parse::<u64>().ok());
    kibibytes.unwrap_or(0) * 1024
}

/// The number of pages in `hugepages-2048kB/nr_hugepages`, by size.
fn huge_pages(home: &Path) -> BTreeMap<u64, u64> {
    let one = |entry: fs::DirEntry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        let kibibytes: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let count: u64 = text(&entry.path().join("nr_hugepages"))?.parse().ok()?;
        Some((kibibytes * 1024, count))
    };
    fs::read_dir(home).into_iter().flatten().flatten().filter_map(one).collect()
}

/// The name of a resource of huge pages: `hugepages-2Mi`.
pub fn huge_page_resource(bytes: u64) -> String {
    let units = [("Gi", 30), ("Mi", 20), ("Ki", 10)];
    let fits = units.iter().find(|(_, shift)| bytes.is_multiple_of(1 << shift));
    let size = fits
        .map_or_else(|| bytes.to_string(), |(suffix, shift)| format!("{}{suffix}", bytes >> shift));
    format!("hugepages-{size}")
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Makes a directory like `/sys`: sockets × NUMA nodes of each × cores × threads. As on real machines,
    /// the second thread of a core has a number after all first ones.
    pub fn make_sys(root: &Path, sockets: usize, numas: usize, cores: usize, threads: usize) {
        let put = |path: String, text: String| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            fs::write(path, text).expect("written");
        };
        let all_cores = sockets * numas * cores;
        put("devices/system/cpu/online".into(), format!("0-{}\n", all_cores * threads - 1));
        for node in 0..sockets * numas {
            let mut list = vec![];
            for core in node * cores..(node + 1) * cores {
                let siblings: Vec<usize> = (0..threads).map(|at| core + at * all_cores).collect();
                let told = siblings.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
                for cpu in &siblings {
                    let home = format!("devices/system/cpu/cpu{cpu}");
                    let socket = node / numas;
                    put(format!("{home}/topology/thread_siblings_list"), format!("{told}\n"));
                    put(format!("{home}/topology/physical_package_id"), format!("{socket}\n"));
                    put(format!("{home}/cache/index3/level"), "3\n".into());
                    put(format!("{home}/cache/index3/id"), format!("{node}\n"));
                }
                list.push(told);
            }
            let home = format!("devices/system/node/node{node}");
            put(format!("{home}/cpulist"), format!("{}\n", list.join(",")));
            put(format!("{home}/meminfo"), format!("Node {node} MemTotal:  1048576 kB\n"));
            put(format!("{home}/hugepages/hugepages-2048kB/nr_hugepages"), "8\n".into());
            let distance = |to: usize| if to == node { "10" } else { "20" };
            let distances: Vec<&str> = (0..sockets * numas).map(distance).collect();
            put(format!("{home}/distance"), format!("{}\n", distances.join(" ")));
        }
    }

    #[test]
    fn a_machine_is_read() {
        let root = tempfile::tempdir().expect("a directory");
        make_sys(root.path(), 2, 1, 2, 2);
        let machine = Machine::read(root.path(), 7);
        assert_eq!(machine.topology.cpus.all().to_string(), "0-7");
        let cpu = |number: usize| machine.topology.cpus.0[&number];
        assert_eq!(cpu(5), Cpu { numa: 0, socket: 0, core: 1, uncore: 0 });
        assert_eq!(cpu(7), Cpu { numa: 1, socket: 1, core: 3, uncore: 1 });
        let shares = (machine.topology.per_core(), machine.topology.per_socket());
        assert_eq!(shares, (2, 4));
        assert_eq!(machine.nodes[1].memory, 1 << 30);
        assert_eq!(machine.nodes[1].distances, [20, 10]);
        assert_eq!(machine.huge_pages(), [(2 << 20, 32 << 20)].into());
    }

    #[test]
    fn a_machine_without_numa_has_one_node() {
        let root = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(root.path().join("devices/system/cpu")).expect("a directory");
        fs::write(root.path().join("devices/system/cpu/online"), "0-1\n").expect("written");
        let machine = Machine::read(root.path(), 7);
        assert_eq!(machine.topology.cpus.all().to_string(), "0-1");
        assert_eq!((machine.nodes.len(), machine.nodes[0].memory), (1, 7));
        assert!(!Machine::read(Path::new("/sys"), 1).topology.cpus.0.is_empty());
    }

    #[test]
    fn huge_pages_have_names() {
        assert_eq!(huge_page_resource(2 << 20), "hugepages-2Mi");
        assert_eq!(huge_page_resource(1 << 30), "hugepages-1Gi");
        assert_eq!(huge_page_resource(64 << 10), "hugepages-64Ki");
    }
}
