//! The init systems: where their files are, and the commands that start, stop and enable a service.
//!
//! Invariant: a command that fails is an error with the words that a user types to see why.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::files::Root;

const UNIT: &str = "decapod.service";

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    Systemd,
    Openrc,
}

impl Init {
    /// The init system that runs; for a directory, the one that it has.
    pub fn of(root: &Root) -> Result<Self> {
        // sd_booted(3); a directory of an image does not run.
        let has_systemd = match root.is_machine() {
            true => root.exists("/run/systemd/system"),
            false => !root.exists("/sbin/openrc-run"),
        };
        if has_systemd {
            return Ok(Self::Systemd);
        }
        if root.exists("/sbin/openrc-run") {
            return Ok(Self::Openrc);
        }
        bail!(
            "neither systemd nor OpenRC runs on this machine, so nothing can be installed as a service; start `decapod server` or `decapod agent` by your own init system, or write the files with --init systemd --no-start"
        )
    }

    /// The service's file.
    pub fn path(self) -> &'static str {
        match self {
            Self::Systemd => "/etc/systemd/system/decapod.service",
            Self::Openrc => "/etc/init.d/decapod",
        }
    }

    /// Links that start it at boot.
    pub fn links(self) -> impl Iterator<Item = &'static str> {
        std::iter::once(match self {
            Self::Systemd => "/etc/systemd/system/multi-user.target.wants/decapod.service",
            Self::Openrc => "/etc/runlevels/default/decapod",
        })
    }

    /// Enables it in a directory, where no init system runs.
    pub fn enable_offline(self, root: &Root) -> Result<()> {
        for link in self.links() {
            root.link(Path::new(link), Path::new(self.path()))?;
        }
        Ok(())
    }

    pub fn by_hand(self) -> &'static str {
        match self {
            Self::Systemd => "systemctl enable --now decapod",
            Self::Openrc => "rc-update add decapod default; rc-service decapod start",
        }
    }

    pub fn log_by_hand(self) -> &'static str {
        match self {
            Self::Systemd => "journalctl -u decapod",
            Self::Openrc => "/var/log/decapod.log",
        }
    }

    /// Enables the service, and starts it, or restarts it if files have changed.
    pub fn start(self, has_changed: bool) -> Result<()> {
        match self {
            Self::Systemd => {
                run(&["systemctl", "daemon-reload"])?;
                // logind reads its drop-in again. Upstream: ReloadLogindConf of the kubelet.
                if has_changed {
                    let _ = run(&["systemctl", "kill", "--signal=HUP", "systemd-logind.service"]);
                }
                run(&["systemctl", "enable", "--quiet", UNIT])?;
                println!("starting decapod; this returns when the node is Ready");
                let verb = if has_changed { "restart" } else { "start" };
                run(&["systemctl", verb, UNIT])
            }
            Self::Openrc => {
                run(&["rc-update", "--quiet", "add", "decapod", "default"])?;
                match has_changed {
                    true => run(&["rc-service", "decapod", "restart"]),
                    false => run(&["rc-service", "--ifstopped", "decapod", "start"]),
                }
            }
        }
        .with_context(|| format!("the service did not start; see why: {}", self.log_by_hand()))
    }

    pub fn stop(self) -> Result<()> {
        match self {
            Self::Systemd => run(&["systemctl", "disable", "--quiet", "--now", UNIT]),
            Self::Openrc => {
                run(&["rc-service", "--ifstarted", "decapod", "stop"])?;
                run(&["rc-update", "--quiet", "delete", "decapod", "default"])
            }
        }
    }

    /// After the files are gone.
    pub fn forget(self) -> Result<()> {
        match self {
            Self::Systemd => {
                run(&["systemctl", "daemon-reload"])?;
                // Fails if the service did not fail.
                let _ = run(&["systemctl", "reset-failed", UNIT]);
                Ok(())
            }
            Self::Openrc => Ok(()),
        }
    }
}

fn run(words: &[&str]) -> Result<()> {
    let (program, arguments) = words.split_first().context("a command")?;
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot run {program}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{} failed: {}", words.join(" "), said.trim());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_the_init_system_of_its_files() {
        let directory = tempfile::tempdir().expect("a directory");
        let root = Root::new(Some(directory.path()));
        assert_eq!(Init::of(&root).expect("a default"), Init::Systemd);
        root.write(Path::new("/sbin/openrc-run"), b"", 0o755).expect("written");
        assert_eq!(Init::of(&root).expect("OpenRC"), Init::Openrc);
    }

    #[test]
    fn a_failure_is_told_with_its_command() {
        let error = run(&["sh", "-c", "echo broken >&2; false"]).expect_err("it fails");
        assert_eq!(error.to_string(), "sh -c echo broken >&2; false failed: broken");
        assert!(run(&["no-such-program-here"]).is_err());
    }
}
