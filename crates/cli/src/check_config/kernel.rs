//! The kernel: version, modules, namespaces, options, security modules.

use super::machine::{Has, Machine};
use super::{Report, State};

/// Older kernels have no `pidfd_open`, with which containers are watched.
const OLDEST: (u32, u32) = (5, 4);
/// From here on everything works; see docs/node.md.
const FULL: (u32, u32) = (5, 12);

/// Module, option of the kernel's configuration, whether a node needs it, purpose. Pods are routed, so
/// br_netfilter is not among them.
const MODULES: [(&str, &str, State, &str); 6] = [
    ("overlay", "CONFIG_OVERLAY_FS", State::Missing, "containers' file systems"),
    ("nf_tables", "CONFIG_NF_TABLES", State::Missing, "Services"),
    ("nft_chain_nat", "CONFIG_NFT_NAT", State::Missing, "Services"),
    ("veth", "CONFIG_VETH", State::Missing, "pods' interfaces"),
    ("bridge", "CONFIG_BRIDGE", State::Missing, "the pods' bridge"),
    ("vxlan", "CONFIG_VXLAN", State::Warning, "pods of other nodes"),
];

/// Options with the reason why a node wants them.
const OPTIONS: [(&str, State, &str); 8] = [
    ("CONFIG_MEMCG", State::Missing, "memory limits"),
    ("CONFIG_CGROUP_PIDS", State::Missing, "limits on processes"),
    ("CONFIG_CGROUP_DEVICE", State::Warning, "access to devices on cgroup v1"),
    ("CONFIG_CGROUP_BPF", State::Warning, "access to devices on cgroup v2"),
    ("CONFIG_CFS_BANDWIDTH", State::Warning, "CPU limits"),
    ("CONFIG_CPUSETS", State::Warning, "pods with CPUs of their own"),
    ("CONFIG_SECCOMP_FILTER", State::Warning, "the profile RuntimeDefault"),
    ("CONFIG_POSIX_MQUEUE", State::Warning, "message queues in containers"),
];

const NAMESPACES: [&str; 6] = ["mnt", "uts", "ipc", "pid", "net", "cgroup"];

pub fn check(machine: &Machine, report: &mut Report) {
    version(machine, report);
    for (module, option, severity, purpose) in MODULES {
        let check = format!("module {module}");
        match machine.has(module, option) {
            Has::Loaded => report.ok(&check, "loaded, or part of the kernel"),
            Has::Loadable => report.ok(&check, "there, the start loads it"),
            Has::Unknown => report.warning(
                &check,
                "not known: neither its list of modules nor its configuration can be read",
                format!("needed for {purpose}; try: modprobe {module}"),
            ),
            Has::No => report.add(
                severity,
                &check,
                "not there".into(),
                Some(format!(
                    "needed for {purpose}; install the package with the kernel's further modules, or a kernel with {option}"
                )),
            ),
        }
    }
    options(machine, report);
    namespaces(machine, report);
    security(machine, report);
}

fn version(machine: &Machine, report: &mut Report) {
    let release = machine.release.clone();
    match numbers(&release) {
        Some(version) if version < OLDEST => report.missing(
            "kernel",
            release,
            format!("Linux {}.{} is the oldest that works: upgrade the kernel", OLDEST.0, OLDEST.1),
        ),
        Some(version) if version < FULL => report.warning(
            "kernel",
            release,
            format!(
                "volumes of pods with user namespaces need Linux {}.{} or newer",
                FULL.0, FULL.1
            ),
        ),
        _ => report.ok("kernel", release),
    }
}

fn numbers(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn options(machine: &Machine, report: &mut Report) {
    if !machine.knows_options() {
        report.ok("kernel configuration", "not readable, so its options are not checked");
        return;
    }
    let before = report.0.len();
    for (option, severity, purpose) in OPTIONS {
        if machine.option(option).is_none() {
            let advice = format!("needed for {purpose}; use a kernel with {option}=y");
            report.add(severity, option, "not set".into(), Some(advice));
        }
    }
    if report.0.len() == before {
        report.ok("kernel configuration", "all options are set");
    }
}

fn namespaces(machine: &Machine, report: &mut Report) {
    let is_absent = |name: &&str| !machine.exists(&format!("/proc/self/ns/{name}"));
    let absent: Vec<&str> = NAMESPACES.into_iter().filter(is_absent).collect();
    match absent.as_slice() {
        [] => report.ok("namespaces", NAMESPACES.join(", ")),
        some => report.missing(
            "namespaces",
            format!("not there: {}", some.join(", ")),
            "use a kernel with CONFIG_NAMESPACES and all kinds of them",
        ),
    }
    match machine.number("/proc/sys/user/max_user_namespaces") {
        Some(0) => report.warning(
            "user namespaces",
            "forbidden",
            "pods with hostUsers: false need them: sysctl -w user.max_user_namespaces=65536",
        ),
        Some(limit) => report.ok("user namespaces", format!("up to {limit}")),
        None => report.warning(
            "user namespaces",
            "not there",
            "pods with hostUsers: false need a kernel with CONFIG_USER_NS",
        ),
    }
}

fn security(machine: &Machine, report: &mut Report) {
    match machine.exists("/proc/sys/kernel/seccomp/actions_avail") {
        true => report.ok("seccomp", "there"),
        false => report.warning(
            "seccomp",
            "not there",
            "pods with a seccomp profile do not start; use a kernel with CONFIG_SECCOMP_FILTER",
        ),
    }
    let apparmor = machine.read("/sys/module/apparmor/parameters/enabled");
    match apparmor.as_deref().map(str::trim) {
        Some("Y") => report.ok("AppArmor", "enabled"),
        _ => report.ok("AppArmor", "not enabled, so its profiles have no effect"),
    }
    match machine.number("/sys/fs/selinux/enforce") {
        Some(1) => report.warning(
            "SELinux",
            "enforcing",
            "containers get no SELinux labels; if pods are denied files, allow them by a policy or use `setenforce 0`",
        ),
        Some(_) => report.ok("SELinux", "permissive"),
        None => report.ok("SELinux", "not enabled"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::machine::tests::machine;
    use super::*;

    fn state(report: &Report, check: &str) -> Option<State> {
        report.0.iter().find(|line| line.check == check).map(|line| line.state)
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        assert_eq!(numbers("6.12.30+deb13-amd64"), Some((6, 12)));
        assert_eq!(numbers("5.4"), Some((5, 4)));
        assert!(numbers("5.10.0").is_some_and(|version| version > OLDEST));
        assert_eq!(numbers("x"), None);
    }

    #[test]
    fn a_bare_machine_lacks_much() {
        let (_root, bare) = machine(&[
            ("lib/modules/6.1.0/modules.dep", "kernel/overlay.ko:\n"),
            ("boot/config-6.1.0", "CONFIG_OVERLAY_FS=m\nCONFIG_MEMCG=y\n"),
            ("sys/fs/selinux/enforce", "1"),
            ("proc/sys/user/max_user_namespaces", "0\n"),
        ]);
        let mut report = Report::default();
        check(&bare, &mut report);
        assert_eq!(state(&report, "kernel"), Some(State::Ok));
        assert_eq!(state(&report, "module overlay"), Some(State::Ok));
        assert_eq!(state(&report, "module nf_tables"), Some(State::Missing));
        assert_eq!(state(&report, "module vxlan"), Some(State::Warning));
        assert_eq!(state(&report, "CONFIG_MEMCG"), None);
        assert_eq!(state(&report, "CONFIG_CGROUP_PIDS"), Some(State::Missing));
        assert_eq!(state(&report, "namespaces"), Some(State::Missing));
        assert_eq!(state(&report, "user namespaces"), Some(State::Warning));
        assert_eq!(state(&report, "SELinux"), Some(State::Warning));
    }
}
