//! Stops servers that systemd runs: if only their process were stopped, systemd would restart it.
//!
//! In: the processes of a data directory. Out: the systemd units whose main process is one of them.
//!
//! Invariant: a unit is stopped only if systemd reports that this process, or its parent, is the unit's
//! main process: a shell in a unit (of a terminal, a container runtime) does not make the unit ours.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use tokio::process::Command;

use super::processes::Process;

pub struct Unit {
    pub name: String,
    pid: i32,
}

/// Returns each unit once.
pub async fn of(processes: &[Process]) -> Result<Vec<Unit>> {
    let mut units: Vec<Unit> = vec![];
    // sd_booted(3): without systemd, nothing restarts a server.
    if !Path::new("/run/systemd/system").exists() {
        return Ok(units);
    }
    for process in processes {
        let cgroup = fs::read_to_string(format!("/proc/{}/cgroup", process.pid));
        let Some(name) = cgroup.ok().and_then(|text| service(&text)) else { continue };
        if units.iter().any(|unit| unit.name == name) {
            continue;
        }
        let main = main_pid(&name).await.with_context(|| by_hand(process.pid, &name))?;
        if main.is_some_and(|main| main == process.pid || parent(process.pid) == Some(main)) {
            units.push(Unit { name, pid: process.pid });
        }
    }
    Ok(units)
}

impl Unit {
    pub async fn stop(&self) -> Result<()> {
        let stopped = Command::new("systemctl").args(["stop", &self.name]).status().await;
        let is_stopped = stopped.with_context(|| by_hand(self.pid, &self.name))?.success();
        ensure!(is_stopped, "systemctl failed: {}", by_hand(self.pid, &self.name));
        Ok(())
    }
}

fn by_hand(pid: i32, name: &str) -> String {
    format!(
        "pid {pid} is run by the systemd unit {name}, which would start it again; stop it and try again: systemctl disable --now {name}"
    )
}

/// The innermost service in `/proc/PID/cgroup`, from systemd's own hierarchy.
fn service(cgroup: &str) -> Option<String> {
    let path = cgroup.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        ["", "name=systemd"].contains(&controllers).then_some(path)
    })?;
    path.split('/').rev().find(|part| part.ends_with(".service")).map(ToOwned::to_owned)
}

/// `None`: the unit has no main process, or systemd does not know it.
async fn main_pid(unit: &str) -> Result<Option<i32>> {
    let show = ["show", "--property=MainPID", "--value", "--", unit];
    let output = Command::new("systemctl").args(show).output().await;
    let output = output.context("cannot ask systemctl")?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.trim().parse().ok().filter(|pid| *pid != 0))
}

fn parent(pid: i32) -> Option<i32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_services_name_is_found_in_both_versions_of_cgroups() {
        let check = |text: &str, expected: Option<&str>| {
            assert_eq!(service(text).as_deref(), expected, "{text}");
        };
        check("0::/system.slice/decapod.service\n", Some("decapod.service"));
        check("0::/system.slice/decapod.service/inner\n", Some("decapod.service"));
        check(
            "4:memory:/system.slice/other.service\n1:name=systemd:/system.slice/decapod.service\n",
            Some("decapod.service"),
        );
        check("0::/user.slice/user-0.slice/session-1.scope\n", None);
        check("0::/\n", None);
        check("", None);
    }

    #[test]
    fn a_process_has_a_parent() {
        let own = i32::try_from(std::process::id()).expect("a number");
        assert_eq!(parent(own), Some(nix::unistd::getppid().as_raw()));
        assert_eq!(parent(0), None);
    }
}
