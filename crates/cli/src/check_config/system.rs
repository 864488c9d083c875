//! The machine around the kernel: rights, memory, swap, limits, clock, init system, disk.

use std::path::Path;

use nix::sys::statfs::statfs;

use super::Report;
use super::machine::Machine;

/// Capabilities that containers and networks need, by their number in `CapEff`.
const CAPABILITIES: [(u32, &str); 4] =
    [(21, "CAP_SYS_ADMIN"), (12, "CAP_NET_ADMIN"), (16, "CAP_SYS_MODULE"), (19, "CAP_SYS_PTRACE")];
/// Without this one modules must be loaded before.
const OPTIONAL: &str = "CAP_SYS_MODULE";
const MEBI: u64 = 1 << 20;
/// Memory, in MiB: below the first one a server does not run, below the second one hardly anything beside it.
const MEMORY: (u64, u64) = (256, 512);
/// Free disk space, in MiB.
const DISK: (u64, u64) = (1 << 10, 5 << 10);
/// Free inodes.
const INODES: u64 = 100_000;
/// Certificates made before this time are not valid at the right time: 2025-01-01.
const EPOCH: i64 = 1_735_689_600;

pub fn check(machine: &Machine, report: &mut Report) {
    rights(machine, report);
    let memory = kibibytes(machine, "MemTotal").map(|kib| kib / 1024);
    match memory {
        Some(mib) if mib < MEMORY.0 => report.missing(
            "memory",
            format!("{mib} MiB"),
            format!("a server needs {} MiB at least", MEMORY.0),
        ),
        Some(mib) if mib < MEMORY.1 => report.warning(
            "memory",
            format!("{mib} MiB"),
            format!("there is little room for pods below {} MiB", MEMORY.1),
        ),
        Some(mib) => report.ok("memory", format!("{mib} MiB")),
        None => report.warning("memory", "not known", "/proc/meminfo cannot be read"),
    }
    match kibibytes(machine, "SwapTotal") {
        None | Some(0) => report.ok("swap", "off"),
        Some(kib) => report.warning(
            "swap",
            format!("on, {} MiB", kib / 1024),
            "pods that swap are slow, and evictions come late: swapoff -a, and remove it from /etc/fstab",
        ),
    }
    limits(machine, report);
    clock(report);
    init(machine, report);
}

fn rights(machine: &Machine, report: &mut Report) {
    match nix::unistd::geteuid().is_root() {
        true => report.ok("root", "yes"),
        false => report.missing("root", "no", "a node needs root: sudo decapod …"),
    }
    let status = machine.read("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let Some(bits) = effective.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()) else {
        return;
    };
    let lacks = |(number, _): &&(u32, &str)| bits & (1 << number) == 0;
    let lacking: Vec<&str> = CAPABILITIES.iter().filter(lacks).map(|(_, name)| *name).collect();
    match lacking.as_slice() {
        [] => report.ok("capabilities", "all"),
        [OPTIONAL] => report.warning(
            "capabilities",
            format!("without {OPTIONAL}"),
            "load the kernel's modules before the start: overlay, nf_tables, vxlan",
        ),
        some => report.missing(
            "capabilities",
            format!("without {}", some.join(", ")),
            "run it as root, and in a container with --privileged",
        ),
    }
}

fn kibibytes(machine: &Machine, key: &str) -> Option<u64> {
    let text = machine.read("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// Sysctl, the least value, why.
const SYSCTLS: [(&str, u64, &str); 3] = [
    ("fs.inotify.max_user_instances", 512, "pods that watch files"),
    ("fs.inotify.max_user_watches", 65_536, "pods that watch files"),
    ("kernel.pid_max", 32_768, "many pods"),
];

fn limits(machine: &Machine, report: &mut Report) {
    for (sysctl, least, purpose) in SYSCTLS {
        let path = format!("/proc/sys/{}", sysctl.replace('.', "/"));
        match machine.number(&path) {
            Some(number) if number < least => report.warning(
                sysctl,
                number.to_string(),
                format!("too low for {purpose}: sysctl -w {sysctl}={least}, and in /etc/sysctl.d"),
            ),
            Some(number) => report.ok(sysctl, number.to_string()),
            None => {}
        }
    }
}

fn clock(report: &mut Report) {
    let now = base::clock::now();
    if now.as_second() < EPOCH {
        report.missing(
            "clock",
            now.to_string(),
            "certificates need the right time: set the clock, or install chrony",
        );
        return;
    }
    // SAFETY: all bits zero is a valid request, which reads only.
    let mut request: nix::libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the call gets a pointer to a request that lives during the call.
    let state = unsafe { nix::libc::adjtimex(&raw mut request) };
    let is_synchronized = state >= 0 && request.status & nix::libc::STA_UNSYNC == 0;
    match is_synchronized {
        true => report.ok("clock", "synchronized"),
        false => report.warning(
            "clock",
            "not synchronized",
            "certificates and leases need clocks that agree: install chrony or systemd-timesyncd",
        ),
    }
}

fn init(machine: &Machine, report: &mut Report) {
    if machine.exists("/run/systemd/system") {
        report.ok("init system", "systemd");
    } else if machine.exists("/sbin/openrc-run") {
        report.ok("init system", "OpenRC");
    } else {
        report.warning(
            "init system",
            "neither systemd nor OpenRC",
            "`decapod install` cannot make a service; start `decapod server` by your own means",
        );
    }
}

/// File systems that a data directory cannot be on, or should not.
const UNFIT: [(&str, bool, &str); 5] = [
    (
        "overlay",
        true,
        "containers' file systems cannot be on an overlay; use another disk or a volume with --data-dir",
    ),
    ("nfs", true, "a store and containers need a local disk; choose one with --data-dir"),
    ("nfs4", true, "a store and containers need a local disk; choose one with --data-dir"),
    ("tmpfs", false, "all data is lost at a reboot; choose a disk with --data-dir"),
    (
        "ecryptfs",
        true,
        "containers' file systems cannot be on it; choose another disk with --data-dir",
    ),
];

pub fn check_disk(machine: &Machine, data_dir: &Path, report: &mut Report) {
    // The directory comes with the first start.
    let Some(there) = data_dir.ancestors().find(|path| path.exists()) else { return };
    let kind = machine.read("/proc/self/mountinfo").and_then(|table| file_system(&table, there));
    let check = format!("disk of {}", data_dir.display());
    if let Some(kind) = &kind {
        match UNFIT.iter().find(|(name, ..)| name == kind) {
            None => report.ok(&check, kind.clone()),
            Some((_, true, advice)) => report.missing(&check, kind.clone(), *advice),
            Some((_, false, advice)) => report.warning(&check, kind.clone(), *advice),
        }
    }
    let Ok(about) = statfs(there) else { return };
    let size = u64::try_from(about.block_size()).unwrap_or_default();
    let free = about.blocks_available().saturating_mul(size) / MEBI;
    let text = format!("{free} MiB");
    match free {
        free if free < DISK.0 => report.missing(
            "free disk space",
            text,
            format!(
                "images need more than {} MiB; free some, or choose another disk with --data-dir",
                DISK.0
            ),
        ),
        free if free < DISK.1 => report.warning(
            "free disk space",
            text,
            "images and logs may fill the disk, and pods are evicted then",
        ),
        _ => report.ok("free disk space", text),
    }
    // File systems without fixed inodes report none.
    if about.files() > 0 && about.files_free() < INODES {
        report.warning(
            "free inodes",
            about.files_free().to_string(),
            "images have many files; choose another disk with --data-dir",
        );
    }
}

/// The type of the innermost mount.
fn file_system(table: &str, path: &Path) -> Option<String> {
    let path = path.canonicalize().ok()?;
    let parse = |line: &str| {
        let point = line.split(' ').nth(4)?.replace("\\040", " ");
        let (_, right) = line.split_once(" - ")?;
        let kind = right.split(' ').next()?.to_owned();
        path.starts_with(&point).then_some((point.len(), kind))
    };
    let mounts = table.lines().filter_map(parse);
    // Of two at one place the later one is seen.
    mounts.max_by_key(|(length, _)| *length).map(|(_, kind)| kind)
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::super::machine::tests::machine;
    use super::*;

    #[test]
    fn the_innermost_mount_decides() {
        let table = "30 1 8:1 / / rw - ext4 /dev/sda rw\n31 30 0:1 / /proc rw - proc proc rw\n";
        assert_eq!(file_system(table, Path::new("/")).as_deref(), Some("ext4"));
        assert_eq!(file_system(table, Path::new("/proc/self")).as_deref(), Some("proc"));
    }

    #[test]
    fn little_memory_and_swap_are_told() {
        let text = "MemTotal:         409600 kB\nSwapTotal:       1048576 kB\n";
        let (_root, small) =
            machine(&[("proc/meminfo", text), ("proc/sys/fs/inotify/max_user_instances", "128\n")]);
        let mut report = Report::default();
        check(&small, &mut report);
        let state =
            |check: &str| report.0.iter().find(|line| line.check == check).map(|line| line.state);
        assert_eq!(state("memory"), Some(State::Warning));
        assert_eq!(state("swap"), Some(State::Warning));
        assert_eq!(state("fs.inotify.max_user_instances"), Some(State::Warning));
        assert_eq!(state("init system"), Some(State::Warning));
    }
}
