//! Facts about the machine: processors, memory, disk, names.
//!
//! In: /proc, /sys, /etc, statvfs. Out: numbers and texts for the node object. The topology is read by
//! `managers/machine.rs`.

use std::fs;
use std::path::Path;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    pub cpus: i64,
    /// Bytes.
    pub memory: i64,
    pub swap: i64,
    pub machine_id: String,
    pub system_uuid: String,
    pub boot_id: String,
    pub kernel: String,
    pub os_image: String,
    pub architecture: &'static str,
    /// CPUs, NUMA nodes and huge pages.
    pub hardware: crate::managers::machine::Machine,
}

impl Machine {
    /// `sys`: the machine's `/sys`.
    pub fn read(sys: &Path) -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_string();
        let meminfo = text("/proc/meminfo");
        let memory = meminfo_bytes(&meminfo, "MemTotal");
        let Names { machine_id, system_uuid, boot_id } = Names::read(Path::new("/"));
        let kernel = text("/proc/sys/kernel/osrelease");
        Self {
            cpus: std::thread::available_parallelism().map_or(1, |n| n.get() as i64),
            memory,
            hardware: crate::managers::machine::Machine::read(sys, memory.max(0) as u64),
            swap: meminfo_bytes(&meminfo, "SwapTotal"),
            system_uuid,
            machine_id,
            boot_id,
            kernel,
            os_image: os_image(&text("/etc/os-release")),
            architecture: base::platform::ARCHITECTURE,
        }
    }
}

/// The ids of the installed system, of the (virtual) machine and of this boot.
/// Upstream: cAdvisor's `machine.Info` and `GetSystemUUID`.
#[derive(Debug, PartialEq, Eq)]
struct Names {
    machine_id: String,
    system_uuid: String,
    boot_id: String,
}

impl Names {
    fn read(root: &Path) -> Self {
        const MACHINE: [&str; 2] = ["etc/machine-id", "var/lib/dbus/machine-id"];
        // Set by firmware: x86 and arm64 have DMI, POWER a device tree, s390x neither.
        const SYSTEM: [&str; 4] = [
            "sys/class/dmi/id/product_uuid",
            "proc/device-tree/system-id",
            "proc/device-tree/vm,uuid",
            "etc/machine-id",
        ];
        let first = |places: &[&str]| {
            let read = |place: &&str| fs::read_to_string(root.join(place)).ok();
            let texts = places.iter().filter_map(read);
            let mut trimmed =
                texts.map(|text| text.trim_matches(['\0', ' ', '\n', '\t']).to_owned());
            trimmed.find(|text| !text.is_empty()).unwrap_or_default()
        };
        Self {
            machine_id: first(&MACHINE),
            system_uuid: first(&SYSTEM),
            boot_id: first(&["proc/sys/kernel/random/boot_id"]),
        }
    }
}

fn meminfo_bytes(meminfo: &str, field: &str) -> i64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kibibytes = line.and_then(|line| line.split_whitespace().next()?.parse::<i64>().ok());
    kibibytes.unwrap_or(0) * 1024
}

/// Bytes that are available without swapping.
pub fn available_memory() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    meminfo_bytes(&meminfo, "MemAvailable").max(0) as u64
}

/// Anonymous memory of all processes, in bytes.
pub fn anonymous_memory() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    meminfo_bytes(&meminfo, "AnonPages").max(0) as u64
}

/// (total swap, free swap) in bytes.
pub fn swap() -> (u64, u64) {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let bytes = |field| meminfo_bytes(&meminfo, field).max(0) as u64;
    (bytes("SwapTotal"), bytes("SwapFree"))
}

/// (page faults, major page faults) since the machine started.
pub fn page_faults() -> (u64, u64) {
    let table = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let field = |name: &str| {
        let line = table.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
    };
    (field("pgfault"), field("pgmajfault"))
}

/// When the machine started, in seconds since 1970.
pub fn boot_time() -> i64 {
    let table = fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = table.lines().find_map(|line| line.strip_prefix("btime "));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

/// CPU time of the whole machine since it started, in nanoseconds.
pub fn cpu_nanoseconds() -> u64 {
    let table = fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = table.lines().next().unwrap_or_default();
    let fields = line.split_whitespace().skip(1).filter_map(|field| field.parse::<u64>().ok());
    // user nice system idle iowait irq softirq steal, in hundredths of a second: all but idle and iowait.
    let busy = fields.enumerate().filter(|(i, _)| !matches!(i, 3 | 4) && *i < 8);
    busy.map(|(_, ticks)| ticks).sum::<u64>() * 10_000_000
}

fn os_image(os_release: &str) -> String {
    let pretty = os_release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    pretty.map_or_else(|| "Unknown".into(), |name| name.trim_matches('"').to_string())
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    pub bytes: u64,
    pub free_bytes: u64,
    pub inodes: u64,
    pub free_inodes: u64,
}

impl Disk {
    /// The file system that holds `path` (or its nearest parent that exists).
    pub fn of(path: &Path) -> Option<Self> {
        let path = path.ancestors().find(|path| path.exists())?;
        let stat = nix::sys::statvfs::statvfs(path).ok()?;
        let block = stat.fragment_size();
        Some(Self {
            bytes: stat.blocks() * block,
            free_bytes: stat.blocks_available() * block,
            inodes: stat.files(),
            free_inodes: stat.files_free(),
        })
    }
}

/// (process ids in use, their limit)
pub fn processes() -> (u64, u64) {
    let loads = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let used = loads.split(' ').nth(3).and_then(|field| field.split('/').nth(1)?.parse().ok());
    // Upstream: the smaller of both limits.
    let limit = |name: &str| -> u64 {
        let text = fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok();
        text.and_then(|text| text.trim().parse().ok()).unwrap_or(u64::MAX)
    };
    (used.unwrap_or(0), limit("pid_max").min(limit("threads-max")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_has_names() {
        let root = tempfile::tempdir().expect("a directory");
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            fs::write(path, text).expect("a file");
        };
        let check = |machine_id: &str, system_uuid: &str| {
            let names = Names::read(root.path());
            assert_eq!(
                (names.machine_id.as_str(), names.system_uuid.as_str()),
                (machine_id, system_uuid)
            );
        };
        check("", "");
        put("var/lib/dbus/machine-id", "of-dbus\n");
        check("of-dbus", "");
        // An image that was never booted has an empty file.
        put("etc/machine-id", "\n");
        check("of-dbus", "");
        put("etc/machine-id", "own\n");
        check("own", "own");
        put("proc/device-tree/vm,uuid", "of-tree\0");
        check("own", "of-tree");
        put("sys/class/dmi/id/product_uuid", "OF-DMI\n");
        check("own", "OF-DMI");
    }

    #[test]
    fn files_are_read() {
        assert_eq!(
            meminfo_bytes("MemTotal:  1024 kB\nMemAvailable: 512 kB\n", "MemAvailable"),
            524_288
        );
        assert_eq!(
            os_image("NAME=x\nPRETTY_NAME=\"Debian GNU/Linux 12\"\n"),
            "Debian GNU/Linux 12"
        );
        let machine = Machine::read(Path::new("/sys"));
        assert!(machine.cpus > 0 && machine.memory > 0, "{machine:?}");
    }
}
