//! Pod cgroups as systemd slices, for the systemd cgroup driver.
//!
//! ```text
//! kubepods.slice                                     all pods
//! └ kubepods-burstable.slice                         a QoS class
//!   └ kubepods-burstable-pod<uid with _ for ->.slice a pod: the parent that the runtime gets
//! ```
//!
//! In: a path of cgroup names, limits. Out: a slice's name; calls of `systemctl`. The runtime's first
//! container starts the slice; earlier limits apply from then on.
//! Invariant: only systemd writes below its cgroups: it would reset other writes.
//! Upstream: `pkg/kubelet/cm`, systemd driver (which speaks to systemd over D-Bus).

use std::io;
use std::process::{Command, Stdio};

use cri::LinuxContainerResources;

/// The slice of a path: dashes separate its parts, so dashes within a part become underscores.
pub fn name(path: &str) -> String {
    let parts = path.split('/').filter(|part| !part.is_empty());
    let escaped: Vec<String> = parts.map(|part| part.replace('-', "_")).collect();
    format!("{}.slice", escaped.join("-"))
}

/// Its directory in the cgroup hierarchy: a slice lies inside the slices that are its prefixes.
pub fn directory(path: &str) -> String {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    (1..=parts.len()).map(|count| format!("/{}", name(&parts[..count].join("/")))).collect()
}

/// The limits as systemd properties.
pub fn properties(limits: &LinuxContainerResources, is_v2: bool) -> Vec<String> {
    let mut out = vec![];
    if limits.cpu_shares > 0 {
        out.push(match is_v2 {
            true => format!("CPUWeight={}", crate::resources::cpu_weight(limits.cpu_shares)),
            false => format!("CPUShares={}", limits.cpu_shares),
        });
    }
    if limits.cpu_quota > 0 && limits.cpu_period > 0 {
        // Systemd's unit is a hundredth of a percent; upstream rounds up to whole percents.
        let percent = (limits.cpu_quota * 100 + limits.cpu_period - 1) / limits.cpu_period;
        out.push(format!("CPUQuota={percent}%"));
    }
    if limits.memory_limit_in_bytes > 0 {
        let name = if is_v2 { "MemoryMax" } else { "MemoryLimit" };
        out.push(format!("{name}={}", limits.memory_limit_in_bytes));
    }
    out
}

/// Sets properties until the machine restarts.
pub fn set(slice: &str, properties: &[String]) -> io::Result<()> {
    if properties.is_empty() {
        return Ok(());
    }
    let words = ["set-property", "--runtime", slice];
    systemctl(words.into_iter().chain(properties.iter().map(String::as_str)))
}

/// Stops an empty slice and removes its limits.
pub fn remove(slice: &str) -> io::Result<()> {
    let stopped = systemctl(["stop", slice]);
    stopped.and(systemctl(["revert", slice]))
}

fn systemctl<'a>(words: impl IntoIterator<Item = &'a str>) -> io::Result<()> {
    let mut command = Command::new("systemctl");
    command.args(words).stdin(Stdio::null());
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_become_slices() {
        let check = |path: &str, expected: &str| assert_eq!(name(path), expected, "{path}");
        check("/kubepods", "kubepods.slice");
        check("/kubepods/burstable", "kubepods-burstable.slice");
        check("/kubepods/burstable/poda-b-c", "kubepods-burstable-poda_b_c.slice");
        check("/my-node/kubepods/podu", "my_node-kubepods-podu.slice");
        assert_eq!(directory("/kubepods/burstable"), "/kubepods.slice/kubepods-burstable.slice");
    }

    #[test]
    fn limits_become_properties() {
        let limits = LinuxContainerResources {
            cpu_shares: 1024,
            cpu_quota: 12_500,
            cpu_period: 100_000,
            memory_limit_in_bytes: 1 << 20,
            ..LinuxContainerResources::default()
        };
        assert_eq!(
            properties(&limits, false),
            ["CPUShares=1024", "CPUQuota=13%", "MemoryLimit=1048576"]
        );
        assert_eq!(properties(&limits, true)[1..], ["CPUQuota=13%", "MemoryMax=1048576"]);
        assert!(properties(&LinuxContainerResources::default(), true).is_empty());
    }
}
