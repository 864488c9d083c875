//! The files that make Decapod a service: systemd's unit, OpenRC's script, logind's drop-in.
//!
//! Invariant: [`role_of`] and [`program_of`] read what [`unit`] and [`init_script`] write; that is how a later run and
//! `decapod uninstall` know their own files.

use std::path::{Path, PathBuf};

use super::Role;

/// In files that `decapod install` may replace and remove.
const MARK: &str = "# Written by `decapod install`, which replaces it; change decapod.service.d/*.conf or config.yaml.";
const MARK_START: &str = "# Written by `decapod install`";

pub const ENVIRONMENT: &str = "\
# Variables of the service. Each flag is one: DECAPOD_NODE_NAME=a, HTTPS_PROXY=http://proxy:3128
";

/// Pods get this long at a reboot; the second one is the part for critical pods.
pub const GRACE: [(&str, &str); 2] =
    [("shutdown-grace-period", "30s"), ("shutdown-grace-period-critical-pods", "10s")];

/// crictl searches for the sockets of other runtimes only.
pub const CRICTL: &str = "\
# Written by `decapod install`: the embedded runtime.
runtime-endpoint: unix:///run/decapod/cri.sock
image-endpoint: unix:///run/decapod/cri.sock
";

/// Longer than [`GRACE`], so that a longer one works without another drop-in.
pub const LOGIND: &str = "\
# Written by `decapod install`: a shutdown waits this long at most for pods to end (shutdown-grace-period).
[Login]
InhibitDelayMaxSec=120
";

/// `KillMode` and `Delegate` keep pods running and their cgroups untouched when the service stops. The start may take
/// any time, because an agent waits for its server; the watchdog is told after it.
pub fn unit(program: &Path, role: Role) -> String {
    format!(
        "{MARK}
[Unit]
Description=Decapod {command} (Kubernetes)
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
EnvironmentFile=-/etc/default/decapod
EnvironmentFile=-/etc/sysconfig/decapod
EnvironmentFile=-/etc/decapod/decapod.env
ExecStart={program} {command}
KillMode=process
Delegate=yes
WatchdogSec=60
TimeoutStartSec=infinity
TimeoutStopSec=30
Restart=always
RestartSec=2
LimitNOFILE=1048576
LimitNPROC=infinity
LimitCORE=infinity
TasksMax=infinity
OOMScoreAdjust=-999

[Install]
WantedBy=multi-user.target
",
        command = role.command(),
        program = program.display(),
    )
}

/// `supervise-daemon` restarts it; pods are not its children's children, so they stay.
pub fn init_script(program: &Path, role: Role) -> String {
    format!(
        "#!/sbin/openrc-run
{MARK_START}, which replaces it; change config.yaml or decapod.env.
name=decapod
description=\"Decapod {command} (Kubernetes)\"
supervisor=supervise-daemon
command=\"{program}\"
command_args=\"{command}\"
output_log=/var/log/decapod.log
error_log=/var/log/decapod.log
pidfile=/run/decapod.pid
respawn_delay=2
respawn_max=0
rc_ulimit=\"-n 1048576 -u unlimited -c unlimited\"

depend() {{
    after network-online
    want cgroups
}}

set -o allexport
if [ -f /etc/decapod/decapod.env ]; then . /etc/decapod/decapod.env; fi
set +o allexport
",
        command = role.command(),
        program = program.display(),
    )
}

/// The role of a service file that `decapod install` wrote.
pub fn role_of(text: &str) -> Option<Role> {
    if !text.contains(MARK_START) {
        return None;
    }
    let (_, command) = started(text)?;
    [Role::Server, Role::Agent].into_iter().find(|role| role.command() == command)
}

/// The program that it starts.
pub fn program_of(text: &str) -> Option<PathBuf> {
    started(text).map(|(program, _)| program.into())
}

fn started(text: &str) -> Option<(&str, &str)> {
    let value = |start: &str| text.lines().find_map(|line| line.strip_prefix(start));
    if let Some(line) = value("ExecStart=") {
        return line.rsplit_once(' ');
    }
    let quoted = |start| value(start).map(|text| text.trim_matches('"'));
    quoted("command=").zip(quoted("command_args="))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_files_are_known_again() {
        let program = Path::new("/opt/my tools/decapod");
        for role in [Role::Server, Role::Agent] {
            for text in [unit(program, role), init_script(program, role)] {
                assert_eq!(role_of(&text), Some(role), "{text}");
                assert_eq!(program_of(&text).as_deref(), Some(program));
            }
        }
        let foreign = "[Service]\nExecStart=/usr/bin/decapod server\n";
        assert_eq!(role_of(foreign), None);
    }
}
