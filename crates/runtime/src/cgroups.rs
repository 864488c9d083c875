//! Control groups, versions 1 and 2: mounted hierarchies, statistics, killing, removal.
//!
//! A cgroup is named by its path from the root of the hierarchies (`/kubepods/pod1/<id>`). With
//! version 1 that path exists once per controller. The kubelet creates pod cgroups; libcontainer
//! creates the containers' cgroups. This module reads them, kills their processes and removes them.
//!
//! In a hybrid setup (version 1 controllers beside an empty version 2 tree) this module uses version 1.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How many times one `kill` looks for newly forked processes.
const KILL_ROUNDS: usize = 16;
const MEMORY_AND_SWAP: &str = "memory.memsw.limit_in_bytes";
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// The mounted hierarchies: controller → mount point. With version 2 all controllers share one mount point.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hierarchies {
    v1: BTreeMap<String, PathBuf>,
    v2: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Figures {
    pub cpu_nanos: u64,
    pub memory_usage: u64,
    pub memory_working_set: u64,
    pub memory_rss: u64,
    pub page_faults: u64,
    pub major_page_faults: u64,
    pub processes: u64,
    pub swap_usage: u64,
}

impl Hierarchies {
    pub(crate) fn discover() -> io::Result<Self> {
        Ok(Self::parse(&fs::read_to_string("/proc/self/mountinfo")?))
    }

    fn parse(mountinfo: &str) -> Self {
        let mut found = Self::default();
        for line in mountinfo.lines() {
            let Some((left, right)) = line.split_once(" - ") else { continue };
            let mut left = left.split(' ').skip(3);
            let (Some(root), Some(point)) = (left.next(), left.next()) else { continue };
            let mut right = right.split(' ');
            let (kind, options) = (right.next().unwrap_or(""), right.nth(1).unwrap_or(""));
            // A bind mount of a subdirectory (as in a container) is not the hierarchy's root.
            if root != "/" {
                continue;
            }
            match kind {
                "cgroup2" => found.v2 = Some(point.into()),
                "cgroup" => {
                    for option in options.split(',').filter(|o| !matches!(*o, "rw" | "ro")) {
                        found.v1.insert(option.to_owned(), point.into());
                    }
                }
                _ => {}
            }
        }
        // Mount options like `xattr` are stored like controllers. That is harmless: no caller asks for them.
        found
    }

    pub(crate) fn is_v2(&self) -> bool {
        self.v1.is_empty() && self.v2.is_some()
    }

    /// The cgroup's directory in every hierarchy, without duplicates.
    fn directories(&self, cgroup: &str) -> Vec<PathBuf> {
        let below = cgroup.trim_start_matches('/');
        let mut all: Vec<PathBuf> =
            self.v1.values().chain(&self.v2).map(|point| point.join(below)).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    fn of(&self, controller: &str, cgroup: &str) -> Option<PathBuf> {
        let point = if self.is_v2() { self.v2.as_ref() } else { self.v1.get(controller) };
        point.map(|point| point.join(cgroup.trim_start_matches('/')))
    }

    /// Moves a process (0: the caller) into the cgroup and, with `create`, creates the cgroup.
    /// Without `create`, hierarchies that lack the cgroup are skipped.
    pub(crate) fn join(&self, cgroup: &str, pid: i32, create: bool) -> io::Result<()> {
        for directory in self.directories(cgroup) {
            if create {
                fs::create_dir_all(&directory)?;
                self.inherit_cpuset(&directory);
            } else if !directory.is_dir() {
                continue;
            }
            let procs = directory.join("cgroup.procs");
            fs::OpenOptions::new()
                .write(true)
                .open(&procs)?
                .write_all(pid.to_string().as_bytes())?;
        }
        Ok(())
    }

    /// Creates a container's cgroup in every version 1 hierarchy, so that it can be mounted in the
    /// container. With version 2 libcontainer creates the only one.
    pub(crate) fn prepare(&self, cgroup: &str) -> io::Result<()> {
        if self.is_v2() || cgroup.trim_matches('/').is_empty() {
            return Ok(());
        }
        for directory in self.directories(cgroup) {
            fs::create_dir_all(&directory)?;
            self.inherit_cpuset(&directory);
        }
        Ok(())
    }

    /// Moves a process into the cgroup in those hierarchies where it is elsewhere: libcontainer
    /// skips hierarchies whose controllers it does not know.
    pub(crate) fn join_missing(&self, cgroup: &str, pid: i32) -> io::Result<()> {
        if self.is_v2() {
            return Ok(());
        }
        let table = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        for directory in self.elsewhere(&table, cgroup) {
            fs::write(directory.join("cgroup.procs"), pid.to_string())?;
        }
        Ok(())
    }

    /// The cgroup's directories in the hierarchies where a process belongs to another cgroup.
    /// `table` is its `/proc/<pid>/cgroup`.
    fn elsewhere(&self, table: &str, cgroup: &str) -> BTreeSet<PathBuf> {
        let mut found = BTreeSet::new();
        for line in table.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
            let point = match controllers {
                "" => self.v2.as_ref(),
                some => some.split(',').find_map(|name| self.v1.get(name)),
            };
            if path != cgroup {
                found.extend(point.map(|point| point.join(cgroup.trim_start_matches('/'))));
            }
        }
        found
    }

    /// The directories that a container sees with version 1: its own cgroup in each hierarchy, with
    /// the hierarchy's names below `/sys/fs/cgroup`. Empty with version 2.
    pub(crate) fn shown(&self, cgroup: &str) -> Vec<(PathBuf, Vec<String>)> {
        let points: BTreeSet<&PathBuf> = self.v1.values().collect();
        let named = points.into_iter().filter_map(|point| {
            let name = point.file_name()?.to_str()?;
            let mut names = vec![name.to_owned()];
            // Each controller of a shared hierarchy has a name.
            names.extend(name.split(',').filter(|part| *part != name).map(str::to_owned));
            Some((point.join(cgroup.trim_start_matches('/')), names))
        });
        named.collect()
    }

    /// Thaws the cgroup and those below it: a frozen process does not end.
    fn thaw(&self, cgroup: &str) {
        let below = cgroup.trim_start_matches('/');
        let v1 = self.v1.get("freezer").map(|point| (point, "freezer.state", "THAWED"));
        let v2 = self.v2.as_ref().map(|point| (point, "cgroup.freeze", "0"));
        for (point, file, free) in v1.into_iter().chain(v2) {
            for directory in tree(&point.join(below)) {
                let path = directory.join(file);
                let held = fs::read_to_string(&path).is_ok_and(|state| state.trim() != free);
                if held && let Ok(mut file) = fs::OpenOptions::new().write(true).open(&path) {
                    // The cgroup may be gone by now; the caller checks for remaining processes.
                    let _ = file.write_all(free.as_bytes());
                }
            }
        }
    }

    /// Copies CPUs and memory nodes from the root: a new cpuset of version 1 has none and takes no process.
    fn inherit_cpuset(&self, directory: &Path) {
        let Some(root) = self.v1.get("cpuset") else { return };
        let Ok(below) = directory.strip_prefix(root) else { return };
        let mut at = root.clone();
        for part in below.components() {
            let parent = at.clone();
            at.push(part);
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let empty = fs::read_to_string(at.join(file)).is_ok_and(|s| s.trim().is_empty());
                if let (true, Ok(value)) = (empty, fs::read_to_string(parent.join(file))) {
                    // Best effort: joining the cgroup reports the failure.
                    let _ = fs::write(at.join(file), value.trim());
                }
            }
        }
    }

    /// The processes in the cgroup and in those below it.
    pub(crate) fn processes(&self, cgroup: &str) -> Vec<i32> {
        let mut pids: Vec<i32> = self
            .directories(cgroup)
            .iter()
            .flat_map(|directory| tree(directory))
            .filter_map(|directory| fs::read_to_string(directory.join("cgroup.procs")).ok())
            .flat_map(|text| text.lines().filter_map(|l| l.parse().ok()).collect::<Vec<_>>())
            // The kernel prints 0 for a process outside our PID namespace.
            .filter(|pid| *pid > 0)
            .collect();
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// Sends SIGKILL to all processes in the cgroup and below it: a container may create cgroups of
    /// its own. True when there was a process.
    pub(crate) fn kill(&self, cgroup: &str) -> bool {
        let mut told = BTreeSet::new();
        // A forking process can be faster than one round. After the last round the next call goes on.
        for _ in 0..KILL_ROUNDS {
            let pids = self.processes(cgroup);
            let fresh: Vec<i32> = pids.into_iter().filter(|pid| told.insert(*pid)).collect();
            if fresh.is_empty() {
                break;
            }
            if self.kill_at_once(cgroup) {
                self.thaw(cgroup);
                return true;
            }
            for pid in fresh {
                // The process may have ended by now.
                let _ = nix::sys::signal::kill(
                    nix::unistd::Pid::from_raw(pid),
                    nix::sys::signal::Signal::SIGKILL,
                );
            }
            // Thawed after the signal, so that the processes run no more code.
            self.thaw(cgroup);
        }
        !told.is_empty()
    }

    /// Kills through `cgroup.kill`, which no fork escapes. False with version 1 and before Linux 5.14.
    fn kill_at_once(&self, cgroup: &str) -> bool {
        let directory = if self.is_v2() { self.of("", cgroup) } else { None };
        let file = directory.map(|directory| directory.join("cgroup.kill"));
        // Opened without `create`: the kernel may not offer the file.
        file.and_then(|file| fs::OpenOptions::new().write(true).open(file).ok())
            .is_some_and(|mut file| file.write_all(b"1").is_ok())
    }

    /// Kills until no process is left, then removes the cgroup and those below it. Returns
    /// `TimedOut` after `limit`.
    pub(crate) async fn clear(&self, cgroup: &str, limit: Duration) -> io::Result<()> {
        let deadline = tokio::time::Instant::now() + limit;
        loop {
            let busy = self.kill(cgroup);
            match self.remove(cgroup) {
                Ok(()) => return Ok(()),
                // A process created another cgroup below it, or the last process is still ending.
                Err(error) if !busy && !is_busy(&error) => return Err(error),
                Err(_) if tokio::time::Instant::now() > deadline => {
                    let text = format!("processes in cgroup {cgroup} did not end after SIGKILL");
                    return Err(io::Error::new(io::ErrorKind::TimedOut, text));
                }
                // The kernel sends no event when a cgroup of version 1 becomes empty.
                Err(_) => tokio::time::sleep(LOOK_AGAIN).await,
            }
        }
    }

    /// Removes the cgroup and those below it. A missing cgroup is no error. EBUSY when a process is left.
    pub(crate) fn remove(&self, cgroup: &str) -> io::Result<()> {
        // An empty path would remove whole hierarchies.
        if cgroup.trim_matches('/').is_empty() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for directory in self.directories(cgroup) {
            for below in tree(&directory).iter().rev() {
                match fs::remove_dir(below) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// How many of the cgroup's processes the OOM killer killed.
    pub(crate) fn oom_kills(&self, cgroup: &str) -> u64 {
        let file = if self.is_v2() { "memory.events" } else { "memory.oom_control" };
        self.of("memory", cgroup)
            .and_then(|directory| keyed(&directory.join(file)).remove("oom_kill"))
            .unwrap_or(0)
    }

    /// `None` when the cgroup does not exist.
    pub(crate) fn figures(&self, cgroup: &str) -> Option<Figures> {
        if self.is_v2() { self.figures_v2(cgroup) } else { self.figures_v1(cgroup) }
    }

    fn figures_v1(&self, cgroup: &str) -> Option<Figures> {
        let cpu = self.of("cpuacct", cgroup)?;
        let memory = self.of("memory", cgroup)?;
        let stat = keyed(&memory.join("memory.stat"));
        let get = |key: &str| stat.get(key).copied().unwrap_or(0);
        let usage = number(&memory.join("memory.usage_in_bytes"))?;
        Some(Figures {
            cpu_nanos: number(&cpu.join("cpuacct.usage"))?,
            memory_usage: usage,
            memory_working_set: usage.saturating_sub(get("total_inactive_file")),
            memory_rss: get("total_rss"),
            page_faults: get("total_pgfault"),
            major_page_faults: get("total_pgmajfault"),
            processes: self.count(cgroup),
            swap_usage: get("total_swap"),
        })
    }

    fn figures_v2(&self, cgroup: &str) -> Option<Figures> {
        let directory = self.of("", cgroup)?;
        let stat = keyed(&directory.join("memory.stat"));
        let get = |key: &str| stat.get(key).copied().unwrap_or(0);
        let usage = number(&directory.join("memory.current"))?;
        let cpu = keyed(&directory.join("cpu.stat")).get("usage_usec").copied()?;
        Some(Figures {
            cpu_nanos: cpu.saturating_mul(1000),
            memory_usage: usage,
            memory_working_set: usage.saturating_sub(get("inactive_file")),
            memory_rss: get("anon"),
            page_faults: get("pgfault"),
            major_page_faults: get("pgmajfault"),
            processes: self.count(cgroup),
            swap_usage: number(&directory.join("memory.swap.current")).unwrap_or(0),
        })
    }

    fn count(&self, cgroup: &str) -> u64 {
        self.of("pids", cgroup)
            .and_then(|directory| number(&directory.join("pids.current")))
            .unwrap_or_else(|| self.processes(cgroup).len() as u64)
    }

    /// Changes resource limits of a running cgroup.
    pub(crate) fn update(
        &self,
        cgroup: &str,
        resources: &cri::LinuxContainerResources,
    ) -> io::Result<()> {
        let mut changes = changes(self.is_v2(), resources);
        if !self.grows(cgroup, resources) {
            // The kernel never lets the memory limit exceed the limit on memory and swap.
            changes.sort_by_key(|(_, file, _)| file == MEMORY_AND_SWAP);
        }
        for (controller, file, value) in changes {
            let Some(directory) = self.of(controller, cgroup) else { continue };
            let path = directory.join(&file);
            fs::write(&path, value).map_err(|error| {
                io::Error::new(error.kind(), format!("{}: {error}", path.display()))
            })?;
        }
        Ok(())
    }

    /// Whether the new memory limit is higher than the present one.
    fn grows(&self, cgroup: &str, resources: &cri::LinuxContainerResources) -> bool {
        let now = self.of("memory", cgroup).and_then(|d| number(&d.join("memory.limit_in_bytes")));
        let wanted = resources.memory_limit_in_bytes;
        wanted < 0 || now.is_some_and(|now| wanted as u64 > now)
    }
}

/// The files to write when the memory limit grows: (controller, file, value). Zero and empty mean
/// "no change".
fn changes(v2: bool, wanted: &cri::LinuxContainerResources) -> Vec<(&'static str, String, String)> {
    let mut out = Vec::new();
    let mut put =
        |controller, file: &str, value: String| out.push((controller, file.to_owned(), value));
    let period = if wanted.cpu_period > 0 { wanted.cpu_period } else { 100_000 };
    if v2 {
        if wanted.cpu_shares > 0 {
            put("cpu", "cpu.weight", weight(wanted.cpu_shares as u64).to_string());
        }
        match wanted.cpu_quota {
            0 => {}
            quota if quota < 0 => put("cpu", "cpu.max", format!("max {period}")),
            quota => put("cpu", "cpu.max", format!("{quota} {period}")),
        }
        if wanted.memory_limit_in_bytes != 0 {
            put("memory", "memory.max", limit(wanted.memory_limit_in_bytes, "max"));
        }
        for (file, value) in &wanted.unified {
            put("unified", file, value.clone());
        }
    } else {
        if wanted.cpu_shares > 0 {
            put("cpu", "cpu.shares", wanted.cpu_shares.to_string());
        }
        if wanted.cpu_period > 0 {
            put("cpu", "cpu.cfs_period_us", wanted.cpu_period.to_string());
        }
        if wanted.cpu_quota != 0 {
            put("cpu", "cpu.cfs_quota_us", wanted.cpu_quota.to_string());
        }
        if wanted.memory_limit_in_bytes != 0 {
            if wanted.memory_swap_limit_in_bytes != 0 {
                let swap = limit(wanted.memory_swap_limit_in_bytes, "-1");
                put("memory", MEMORY_AND_SWAP, swap);
            }
            put("memory", "memory.limit_in_bytes", limit(wanted.memory_limit_in_bytes, "-1"));
        }
    }
    for (file, value) in
        [("cpuset.cpus", &wanted.cpuset_cpus), ("cpuset.mems", &wanted.cpuset_mems)]
    {
        if !value.is_empty() {
            put("cpuset", file, value.clone());
        }
    }
    out
}

fn limit(bytes: i64, unlimited: &str) -> String {
    if bytes < 0 { unlimited.to_owned() } else { bytes.to_string() }
}

/// Upstream: runc's `ConvertCPUSharesToCgroupV2Value`: 1024 shares are a weight of 100.
pub(crate) fn weight(shares: u64) -> u64 {
    if shares == 0 {
        return 0;
    }
    if shares <= 2 {
        return 1;
    }
    if shares >= 262_144 {
        return 10_000;
    }
    let log = (shares as f64).log2();
    let exponent = (log * log + 125.0 * log) / 612.0 - 7.0 / 34.0;
    10f64.powf(exponent).ceil() as u64
}

/// The directory and all below it, parents first. Without recursion: a container decides the depth.
fn tree(directory: &Path) -> Vec<PathBuf> {
    let mut all = vec![directory.to_owned()];
    let mut at = 0;
    while let Some(entries) = all.get(at).map(fs::read_dir) {
        let below = entries.into_iter().flatten().flatten();
        all.extend(
            below.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|entry| entry.path()),
        );
        at += 1;
    }
    all
}

fn is_busy(error: &io::Error) -> bool {
    // ENOTEMPTY: a file system other than cgroupfs, or a new cgroup below.
    matches!(error.raw_os_error(), Some(libc::EBUSY | libc::ENOTEMPTY))
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Parses a file of `key value` lines.
fn keyed(path: &Path) -> BTreeMap<String, u64> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(key, value)| Some((key.to_owned(), value.trim().parse().ok()?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_tell_the_version() {
        let check = |text: &str, v2: bool, memory: Option<&str>| {
            let found = Hierarchies::parse(text);
            assert_eq!(found.is_v2(), v2, "{text}");
            assert_eq!(found.of("memory", "/a"), memory.map(PathBuf::from), "{text}");
        };
        let v1 = "30 25 0:26 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n";
        let v2 = "31 25 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n";
        check(v1, false, Some("/sys/fs/cgroup/memory/a"));
        check(&format!("{v1}{v2}"), false, Some("/sys/fs/cgroup/memory/a"));
        check(v2, true, Some("/sys/fs/cgroup/unified/a"));
        check("32 25 0:26 /b /x rw - cgroup cgroup rw,memory", false, None);
    }

    #[test]
    fn a_container_sees_its_own_cgroup_by_every_name() {
        let found = Hierarchies::parse(
            "30 25 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
             31 25 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
             32 25 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n\
             33 25 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        );
        let at = |name: &str| PathBuf::from("/sys/fs/cgroup").join(name).join("a/b");
        let expected = vec![
            (at("cpu,cpuacct"), ["cpu,cpuacct", "cpu", "cpuacct"].map(str::to_owned).to_vec()),
            (at("memory"), vec!["memory".to_owned()]),
            (at("systemd"), vec!["systemd".to_owned()]),
        ];
        assert_eq!(found.shown("/a/b"), expected);

        let table =
            "5:memory:/a/b\n4:cpu,cpuacct:/a/b\n3:name=systemd:/shims\n2:rdma:/\n0::/shims\n";
        let expected = BTreeSet::from([at("systemd"), at("unified")]);
        assert_eq!(found.elsewhere(table, "/a/b"), expected);
        let v2 = Hierarchies::parse("33 25 0:29 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        assert!(v2.shown("/a/b").is_empty());
    }

    #[test]
    fn thaw_includes_cgroups_below() {
        let root = tempfile::tempdir().expect("a directory");
        let check = |v1: bool, file: &str, frozen: &str, free: &str| {
            let point = root.path().join(file);
            for at in ["c", "c/inner/deep"] {
                fs::create_dir_all(point.join(at)).expect("made");
                fs::write(point.join(at).join(file), frozen).expect("written");
            }
            let here = match v1 {
                true => Hierarchies { v1: [("freezer".into(), point.clone())].into(), v2: None },
                false => Hierarchies { v1: BTreeMap::new(), v2: Some(point.clone()) },
            };
            here.thaw("/c");
            for at in ["c", "c/inner/deep"] {
                let state = fs::read_to_string(point.join(at).join(file)).expect("read");
                assert!(state.starts_with(free), "{file} {at} {state}");
            }
            // `thaw` creates no files.
            assert!(!point.join("c/inner").join(file).exists());
        };
        check(true, "freezer.state", "FROZEN\n", "THAWED");
        check(false, "cgroup.freeze", "1\n", "0");
    }

    #[test]
    fn figures_of_version_2_come_from_its_files() {
        let root = tempfile::tempdir().expect("a directory");
        let put = |file: &str, text: &str| {
            let path = root.path().join("pod").join(file);
            fs::create_dir_all(path.parent().expect("it has one")).expect("made");
            fs::write(path, text).expect("written");
        };
        put("cpu.stat", "usage_usec 1500\nuser_usec 1000\n");
        put("memory.current", "1000\n");
        put("memory.stat", "anon 600\ninactive_file 300\npgfault 7\npgmajfault 2\n");
        put("memory.events", "low 0\noom 1\noom_kill 1\n");
        put("pids.current", "4\n");
        let here = Hierarchies { v1: BTreeMap::new(), v2: Some(root.path().into()) };
        assert_eq!(here.figures("/none"), None);
        assert_eq!(here.oom_kills("/pod"), 1);
        let expected = Figures {
            cpu_nanos: 1_500_000,
            memory_usage: 1000,
            memory_working_set: 700,
            memory_rss: 600,
            page_faults: 7,
            major_page_faults: 2,
            processes: 4,
            swap_usage: 0,
        };
        assert_eq!(here.figures("/pod"), Some(expected));
    }

    #[test]
    fn version_2_kills_through_cgroup_kill() {
        let root = tempfile::tempdir().expect("a directory");
        let below = root.path().join("pod/inner");
        fs::create_dir_all(&below).expect("made");
        fs::write(root.path().join("pod/cgroup.procs"), "").expect("written");
        fs::write(root.path().join("pod/cgroup.kill"), "").expect("written");
        let here = Hierarchies { v1: BTreeMap::new(), v2: Some(root.path().into()) };
        assert!(!here.kill("/pod") && here.processes("/pod").is_empty());
        // No process can have this pid: the test kills nothing.
        fs::write(below.join("cgroup.procs"), format!("{}\n", i32::MAX)).expect("written");
        assert!(here.kill("/pod"));
        assert_eq!(fs::read_to_string(root.path().join("pod/cgroup.kill")).expect("read"), "1");
    }

    /// Like a container without its own PID namespace that created cgroups.
    #[tokio::test]
    async fn processes_in_cgroups_below_are_killed() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let found = Hierarchies::discover().expect("read");
        let v1 = Hierarchies { v2: None, ..found.clone() };
        let v2 = Hierarchies { v1: BTreeMap::new(), ..found };
        for here in [v1, v2] {
            let name = format!("/decapod-cgroups-{}", base::rng::alphanumeric(8));
            let inner = format!("{name}/a/b");
            if here.directories(&name).is_empty() {
                println!("skipped: no such hierarchies here");
                continue;
            }
            let mut child = tokio::process::Command::new("sleep").arg("1000").spawn().expect("run");
            let pid = child.id().expect("it runs") as i32;
            let joined = here.join(&inner, pid, true);
            let seen = here.processes(&name);
            let cleared = here.clear(&name, Duration::from_secs(20)).await;
            // Cleans up also after a failure.
            let _ = child.start_kill();
            child.wait().await.expect("reaped");
            joined.expect("moved");
            assert_eq!(seen, [pid], "{here:?}");
            cleared.expect("nothing is left");
            assert!(here.directories(&name).iter().all(|d| !d.exists()), "{here:?}");
        }
    }

    #[test]
    fn limits_are_written_where_each_version_has_them() {
        let wanted = cri::LinuxContainerResources {
            cpu_shares: 1024,
            cpu_quota: 50_000,
            memory_limit_in_bytes: 1 << 20,
            ..Default::default()
        };
        let check = |v2, expected: &[(&str, &str)]| {
            let got = changes(v2, &wanted);
            let got: Vec<_> = got.iter().map(|(_, f, v)| (f.as_str(), v.as_str())).collect();
            assert_eq!(got, expected);
        };
        check(
            true,
            &[("cpu.weight", "100"), ("cpu.max", "50000 100000"), ("memory.max", "1048576")],
        );
        check(
            false,
            &[
                ("cpu.shares", "1024"),
                ("cpu.cfs_quota_us", "50000"),
                ("memory.limit_in_bytes", "1048576"),
            ],
        );
    }
}
