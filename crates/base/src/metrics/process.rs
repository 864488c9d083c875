//! Metrics of this process, with the names of Prometheus' client libraries.

use std::fmt::Write;
use std::fs;

/// Ticks a second in `/proc`, the same on every Linux.
const TICKS_PER_SECOND: f64 = 100.0;
const PAGE: u64 = 4096;

const START: &str = "process_start_time_seconds";

/// Only the start time of the process.
pub fn encode_start(out: &mut String) {
    let mut all = String::new();
    encode(&mut all);
    let is_it = |line: &&str| line.split([' ', '{']).any(|word| word == START);
    all.lines().filter(is_it).for_each(|line| {
        let _ = writeln!(out, "{line}");
    });
}

/// Read at each scrape; values that cannot be read are omitted.
pub fn encode(out: &mut String) {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name, in parentheses, may contain spaces.
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .map(|(_, rest)| rest.split_whitespace().collect())
        .unwrap_or_default();
    let field = |index: usize| fields.get(index).and_then(|text| text.parse::<u64>().ok());
    let seconds = |ticks: u64| ticks as f64 / TICKS_PER_SECOND;
    let cpu = field(11).zip(field(12)).map(|(user, system)| seconds(user + system));
    let started = field(19).zip(boot_time()).map(|(ticks, boot)| boot as f64 + seconds(ticks));
    let files = fs::read_dir("/proc/self/fd").map(Iterator::count).ok();
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let limit = |name: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
        let value = line.split_whitespace().next()?;
        // Unlimited is the largest number, as in Go.
        Some(if value == "unlimited" { u64::MAX as f64 } else { value.parse().ok()? })
    };
    for (name, kind, help, value) in [
        (
            "process_cpu_seconds_total",
            "counter",
            "[ALPHA] Total user and system CPU time spent in seconds.",
            cpu,
        ),
        (
            "process_max_fds",
            "gauge",
            "[ALPHA] Maximum number of open file descriptors.",
            limit("Max open files"),
        ),
        (
            "process_open_fds",
            "gauge",
            "[ALPHA] Number of open file descriptors.",
            files.map(|files| files as f64),
        ),
        (
            "process_resident_memory_bytes",
            "gauge",
            "[ALPHA] Resident memory size in bytes.",
            field(21).map(|pages| (pages * PAGE) as f64),
        ),
        (START, "gauge", "[ALPHA] Start time of the process since unix epoch in seconds.", started),
        (
            "process_virtual_memory_bytes",
            "gauge",
            "[ALPHA] Virtual memory size in bytes.",
            field(20).map(|bytes| bytes as f64),
        ),
        (
            "process_virtual_memory_max_bytes",
            "gauge",
            "[ALPHA] Maximum amount of virtual memory available in bytes.",
            limit("Max address space"),
        ),
    ] {
        if let Some(value) = value {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
        }
    }
}

fn boot_time() -> Option<u64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_process_has_memory_and_files() {
        let mut page = String::new();
        super::encode(&mut page);
        for name in [
            "process_cpu_seconds_total ",
            "process_open_fds ",
            "process_max_fds ",
            "process_resident_memory_bytes ",
            "process_start_time_seconds 1",
        ] {
            assert!(page.contains(&format!("\n{name}")), "{name} in {page}");
        }
    }
}
