//! Counters of the kernel that CRI does not have: CPU throttling, memory details and disk transfers of
//! containers, and a pod's network packets.
//!
//! In: files of cgroups and of /proc. Out: numbers; none if the runtime has its cgroups elsewhere.
//! Upstream: cAdvisor, by the same files.

use std::fs;
use std::path::Path;

/// Totals since the container started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Throttling {
    pub periods: u64,
    pub throttled_periods: u64,
    pub throttled_seconds: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packets {
    pub interface: String,
    pub received: u64,
    pub received_dropped: u64,
    pub sent: u64,
    pub sent_dropped: u64,
}

/// Details of a container's memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryDetails {
    pub cache: Option<u64>,
    pub mapped_file: Option<u64>,
    pub most: Option<u64>,
    /// How often the limit was hit.
    pub limit_hits: Option<u64>,
}

/// Transfers with one block device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transfers {
    /// `MAJOR:MINOR`.
    pub device: String,
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub reads: u64,
    pub writes: u64,
}

/// From a cgroup of the controller `memory`.
pub fn memory(cgroup: &Path) -> MemoryDetails {
    let text = |name: &str| fs::read_to_string(cgroup.join(name)).unwrap_or_default();
    let number = |name: &str| text(name).trim().parse().ok();
    let stat = text("memory.stat");
    MemoryDetails {
        cache: field(&stat, "total_cache").or_else(|| field(&stat, "file")),
        mapped_file: field(&stat, "total_mapped_file").or_else(|| field(&stat, "file_mapped")),
        most: number("memory.max_usage_in_bytes").or_else(|| number("memory.peak")),
        limit_hits: number("memory.failcnt").or_else(|| field(&text("memory.events"), "max")),
    }
}

/// The tasks in a cgroup of the controller `pids`.
pub fn threads(cgroup: &Path) -> Option<u64> {
    fs::read_to_string(cgroup.join("pids.current")).ok()?.trim().parse().ok()
}

/// By device, from a cgroup of version 2; version 1 has them only if the runtime uses the controller `blkio`.
pub fn transfers(cgroup: &Path) -> Vec<Transfers> {
    parse_transfers(&fs::read_to_string(cgroup.join("io.stat")).unwrap_or_default())
}

fn parse_transfers(text: &str) -> Vec<Transfers> {
    let one = |line: &str| {
        let (device, rest) = line.split_once(' ')?;
        let of = |name: &str| {
            let mut words = rest.split_whitespace();
            words.find_map(|word| word.strip_prefix(name)?.parse().ok())
        };
        Some(Transfers {
            device: device.to_owned(),
            read_bytes: of("rbytes=")?,
            written_bytes: of("wbytes=")?,
            reads: of("rios=")?,
            writes: of("wios=")?,
        })
    };
    text.lines().filter_map(one).collect()
}

/// A line `name number`.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|number| number.trim().parse().ok())
}

/// From a cgroup's `cpu.stat`; `None` if no period of a quota was counted.
pub fn throttling(cgroup: &Path) -> Option<Throttling> {
    parse_throttling(&fs::read_to_string(cgroup.join("cpu.stat")).ok()?)
}

/// The network interfaces of a cgroup's first process, without the loopback.
pub fn packets(cgroup: &Path) -> Vec<Packets> {
    let processes = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    let Some(pid) = processes.lines().next() else { return vec![] };
    parse_packets(&fs::read_to_string(format!("/proc/{pid}/net/dev")).unwrap_or_default())
}

fn parse_throttling(text: &str) -> Option<Throttling> {
    let number = |name: &str| field(text, name);
    let periods = number("nr_periods").filter(|periods| *periods > 0)?;
    // Nanoseconds in cgroup v1, microseconds in v2.
    let seconds = match number("throttled_time") {
        Some(nanoseconds) => nanoseconds as f64 / 1e9,
        None => number("throttled_usec").unwrap_or(0) as f64 / 1e6,
    };
    let throttled_periods = number("nr_throttled").unwrap_or(0);
    Some(Throttling { periods, throttled_periods, throttled_seconds: seconds })
}

/// `eth0: bytes packets errs drop fifo frame compressed multicast  bytes packets errs drop …`
fn parse_packets(text: &str) -> Vec<Packets> {
    let one = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        let numbers: Vec<u64> =
            rest.split_whitespace().map_while(|number| number.parse().ok()).collect();
        let at = |index: usize| numbers.get(index).copied();
        Some(Packets {
            interface: name.trim().to_owned(),
            received: at(1)?,
            received_dropped: at(3)?,
            sent: at(9)?,
            sent_dropped: at(11)?,
        })
    };
    text.lines().filter_map(one).filter(|one| one.interface != "lo").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throttling_is_read_from_both_cgroup_versions() {
        let check = |text: &str, expected: Option<(u64, u64, f64)>| {
            let got = parse_throttling(text);
            let got = got.map(|t| (t.periods, t.throttled_periods, t.throttled_seconds));
            assert_eq!(got, expected, "{text}");
        };
        check("nr_periods 10\nnr_throttled 4\nthrottled_time 1500000000\n", Some((10, 4, 1.5)));
        let v2 = "usage_usec 5\nnr_periods 10\nnr_throttled 4\nthrottled_usec 2500000\n";
        check(v2, Some((10, 4, 2.5)));
        check("nr_periods 0\nnr_throttled 0\nthrottled_time 0\n", None);
        check("usage_usec 5\n", None);
    }

    #[test]
    fn memory_and_transfers_are_read_from_a_cgroup() {
        let dir = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| {
            std::fs::write(dir.path().join(name), text).expect("written");
        };
        assert_eq!(memory(dir.path()), MemoryDetails::default());
        write("memory.stat", "anon 1\nfile 4096\nfile_mapped 512\n");
        write("memory.peak", "9000\n");
        write("memory.events", "low 0\nhigh 0\nmax 3\noom 0\n");
        let v2 = MemoryDetails {
            cache: Some(4096),
            mapped_file: Some(512),
            most: Some(9000),
            limit_hits: Some(3),
        };
        assert_eq!(memory(dir.path()), v2);
        write("memory.stat", "cache 1\nmapped_file 1\ntotal_cache 8192\ntotal_mapped_file 1024\n");
        write("memory.max_usage_in_bytes", "10000\n");
        write("memory.failcnt", "0\n");
        let v1 = MemoryDetails {
            cache: Some(8192),
            mapped_file: Some(1024),
            most: Some(10000),
            limit_hits: Some(0),
        };
        assert_eq!(memory(dir.path()), v1);
        let text = "8:0 rbytes=10 wbytes=20 rios=1 wios=2 dbytes=0 dios=0\n259:1 \n";
        let expected = Transfers {
            device: "8:0".into(),
            read_bytes: 10,
            written_bytes: 20,
            reads: 1,
            writes: 2,
        };
        assert_eq!(parse_transfers(text), [expected]);
    }

    #[test]
    fn packets_are_read_without_the_loopback() {
        let table = "Inter-|   Receive                |  Transmit\n \
             face |bytes    packets errs drop fifo frame compressed multicast|bytes packets errs drop\n    \
             lo:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0          0\n  \
             eth0: 2000      20    1    2    0     0          0         0     3000      30    3    4    0     0       0          0\n";
        let expected = Packets {
            interface: "eth0".into(),
            received: 20,
            received_dropped: 2,
            sent: 30,
            sent_dropped: 4,
        };
        assert_eq!(parse_packets(table), [expected]);
        assert!(parse_packets("").is_empty());
    }
}
