//! Capabilities: the common runtimes' defaults, changed by the pod's `add` and `drop`.

use std::collections::BTreeSet;

use cri::{Error, LinuxContainerSecurityContext, Result};
use serde_json::{Value, json};

const DEFAULT: &[&str] = &[
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "NET_RAW",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];

/// By number.
const ALL: &[&str] = &[
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

pub(super) struct Capabilities {
    pub bounding: BTreeSet<String>,
    ambient: BTreeSet<String>,
}

pub(super) fn of(security: &LinuxContainerSecurityContext) -> Result<Capabilities> {
    let names = |all: &[&str]| all.iter().map(|c| format!("CAP_{c}")).collect::<BTreeSet<_>>();
    // Capabilities that this process lacks cannot be granted (a node in a container lacks some).
    let ours = permitted();
    let everything: BTreeSet<String> = names(ALL).intersection(&ours).cloned().collect();
    if security.privileged {
        return Ok(Capabilities { bounding: everything, ambient: BTreeSet::new() });
    }
    let wanted = security.capabilities.clone().unwrap_or_default();
    let is_all = |list: &[String]| list.iter().any(|c| c.eq_ignore_ascii_case("ALL"));
    let mut set = if is_all(&wanted.add_capabilities) {
        everything
    } else if is_all(&wanted.drop_capabilities) {
        BTreeSet::new()
    } else {
        names(DEFAULT)
    };
    for name in wanted.drop_capabilities.iter().filter(|c| !c.eq_ignore_ascii_case("ALL")) {
        set.remove(&known(name)?);
    }
    for name in wanted.add_capabilities.iter().filter(|c| !c.eq_ignore_ascii_case("ALL")) {
        set.insert(known(name)?);
    }
    let ambient =
        wanted.add_ambient_capabilities.iter().map(|c| known(c)).collect::<Result<_>>()?;
    set.retain(|name| ours.contains(name));
    Ok(Capabilities { bounding: set, ambient })
}

impl Capabilities {
    /// Only root starts with effective capabilities; other users get them from file capabilities.
    pub(super) fn section(&self, root: bool) -> Value {
        let none = BTreeSet::new();
        let effective = if root { &self.bounding } else { &self.ambient };
        let ambient = if root { &none } else { &self.ambient };
        json!({
            "bounding": self.bounding,
            "effective": effective,
            "permitted": effective,
            "inheritable": ambient,
            "ambient": ambient,
        })
    }
}

fn known(name: &str) -> Result<String> {
    let bare = name.to_ascii_uppercase();
    let bare = bare.strip_prefix("CAP_").unwrap_or(&bare);
    if ALL.contains(&bare) {
        Ok(format!("CAP_{bare}"))
    } else {
        Err(Error::InvalidArgument(format!("unknown capability {name:?}")))
    }
}

/// The bounding set of this process.
fn permitted() -> BTreeSet<String> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("CapBnd:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(u64::MAX);
    (0..)
        .zip(ALL)
        .filter(|(bit, _)| mask >> bit & 1 == 1)
        .map(|(_, c)| format!("CAP_{c}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_add_and_drop_capabilities() {
        let check = |add: &[&str], drop: &[&str], has: &[&str], has_not: &[&str]| {
            let own = |all: &[&str]| all.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
            let capabilities = cri::Capability {
                add_capabilities: own(add),
                drop_capabilities: own(drop),
                ..Default::default()
            };
            let security = LinuxContainerSecurityContext {
                capabilities: Some(capabilities),
                ..Default::default()
            };
            let got = of(&security).expect("known names").bounding;
            assert!(has.iter().all(|c| got.contains(*c)), "{got:?}");
            assert!(!has_not.iter().any(|c| got.contains(*c)), "{got:?}");
        };
        check(&[], &[], &["CAP_CHOWN", "CAP_NET_RAW"], &["CAP_NET_ADMIN"]);
        check(&["NET_ADMIN"], &["ALL"], &["CAP_NET_ADMIN"], &["CAP_CHOWN"]);
        check(&["ALL"], &["MKNOD"], &["CAP_SYS_ADMIN"], &["CAP_MKNOD"]);
        check(&["cap_sys_time"], &["NET_RAW"], &["CAP_SYS_TIME"], &["CAP_NET_RAW"]);
    }
}
