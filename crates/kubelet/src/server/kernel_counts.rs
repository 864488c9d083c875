//! Counters of the kernel that CRI does not have: CPU throttling of containers, and a pod's network
//! packets.
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
    let number = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|number| number.trim().parse::<u64>().ok())
    };
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
