//! The life of a machine and of the service on it: boot, installation, restart, kill, reboot, removal.

use std::time::Duration;

use crate::sh::Outcome;
use crate::vm::story::{self, Story};

/// Prints the milliseconds since systemd started the service, once the node of this boot is Ready.
const NODE_READY: &str = "
    export KUBECONFIG=/var/lib/decapod/kubeconfig
    ready='{.status.nodeInfo.bootID} {.status.conditions[?(@.type==\"Ready\")].status}'
    [[ $(decapod kubectl get node node1 -o jsonpath=\"$ready\") == \
       \"$(cat /proc/sys/kernel/random/boot_id) True\" ]]
    now=$(awk '{print int($1 * 1000)}' /proc/uptime)
    echo $((now - $(systemctl show --value -p ActiveEnterTimestampMonotonic decapod) / 1000))";
/// The first processes of all containers: those that answer requests come and go.
const PROCESSES: &str = "pgrep -P $(pgrep -d , -f '^decapod-shim container') | sort | tr '\\n' ' '";
const RESTARTS: &str = "{.items[*].status.containerStatuses[*].restartCount}";
/// A machine goes down in this time, without the 90 s that systemd gives processes that ignore SIGTERM.
const DOWN: u64 = 30;

pub fn boot(story: &mut Story) -> Outcome {
    let machine = &story.machine;
    let (state, _) = machine.until(
        60,
        "systemd has started everything",
        "systemctl list-units --failed --no-legend >&2; systemctl list-jobs --no-legend >&2; \
         systemctl is-system-running; [[ $(stat -fc %T /sys/fs/cgroup) == cgroup2fs ]]",
    )?;
    let facts =
        machine.sh("uname -r; systemctl --version | head -n 1; systemd-analyze | head -n 1")?;
    let accelerator = machine.accelerator();
    story.note(format!("{accelerator:?}, {state}"));
    story.note(facts.replace('\n', ", "));
    Ok(())
}

pub fn install(story: &mut Story) -> Outcome {
    story::install(&story.machine, "server")?;
    story.machine.sh("systemctl enable --now decapod")?;
    let (milliseconds, _) = story.machine.until(90, "the node is Ready", NODE_READY)?;
    story.note(format!("first start of the service to node Ready: {milliseconds} ms"));
    let log = story
        .machine
        .sh("journalctl -u decapod --no-pager -o cat | grep -c -E ' (WARN|ERROR) ' || true")?;
    let kinds = "journalctl -u decapod --no-pager -o cat | grep -E ' (WARN|ERROR) ' | cut -c 1-160 | cut -d ' ' -f 2- | sort | uniq -c | sort -rn | head -n 5 || true";
    let kinds = story.machine.sh(kinds)?;
    story.note(format!("warnings of the first start: {log}"));
    kinds.lines().for_each(|line| story.note(line));
    Ok(())
}

/// An orderly restart of the service leaves the pods alone.
pub fn restart(story: &mut Story) -> Outcome {
    undisturbed(story, "systemctl restart decapod")
}

/// So does the death of the server; systemd starts it again.
pub fn kill(story: &mut Story) -> Outcome {
    undisturbed(story, "kill -9 $(systemctl show --value -p MainPID decapod)")
}

fn undisturbed(story: &mut Story, event: &str) -> Outcome {
    let before = (story.machine.sh(PROCESSES)?, restarts(story)?);
    let of_service = "systemctl show --value -p ActiveEnterTimestampMonotonic decapod";
    let started = story.machine.sh(of_service)?;
    story.machine.sh(event)?;
    let script = format!("[[ $({of_service}) != {started} ]]\n{NODE_READY}");
    let (milliseconds, _) = story.machine.until(60, "the node is Ready again", &script)?;
    story.note(format!("start of the service to node Ready: {milliseconds} ms"));
    story.settled()?;
    answers(story)?;
    let after = (story.machine.sh(PROCESSES)?, restarts(story)?);
    match before == after {
        true => Ok(()),
        false => {
            Err(format!("the pods' processes and restart counts were {before:?}, are {after:?}"))
        }
    }
}

fn restarts(story: &Story) -> Outcome<String> {
    story.kubectl(&format!("get pods -o jsonpath='{RESTARTS}'"))
}

/// The Service answers the node and a pod.
pub fn answers(story: &Story) -> Outcome<Duration> {
    let address = super::work::service(story)?;
    let curl = format!("curl -sf -m 2 http://{address}/");
    let (_, took) = story.machine.until(60, "the Service answers the node", &curl)?;
    let ask = format!(
        "exec client -- sh -c \"printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 2 {address} 80 | grep -q ^web-\""
    );
    let (_, more) = story.machine.until(60, "the Service answers a pod", &story::kubectl(&ask))?;
    Ok(took + more)
}

pub fn reboot(story: &mut Story) -> Outcome {
    let (down, up) = story.machine.reboot()?;
    story.note(format!("down {:.1} s, up {:.1} s", down.as_secs_f32(), up.as_secs_f32()));
    back(story)?;
    match down <= story.machine.limit(DOWN) {
        true => Ok(()),
        false => Err(format!("the machine took {down:?} to go down")),
    }
}

/// Everything is back after a boot, without a hand.
pub fn back(story: &mut Story) -> Outcome {
    let (milliseconds, _) = story.machine.until(60, "the node is Ready", NODE_READY)?;
    story.note(format!("boot: start of the service to node Ready: {milliseconds} ms"));
    story.soon_field(60, "pod client", "{.status.phase}", "Running")?;
    let settled = story.settled()?;
    let answered = answers(story)?;
    story.note(format!(
        "then {:.1} s until the pods are ready, {:.1} s more until the Service answers",
        settled.as_secs_f32(),
        answered.as_secs_f32()
    ));
    Ok(())
}

/// The kubelet delays a shutdown that logind announces, and ends the pods in order.
pub fn graceful(story: &mut Story) -> Outcome {
    let allows = "mkdir -p /etc/systemd/logind.conf.d
        printf '[Login]\\nInhibitDelayMaxSec=60\\n' >/etc/systemd/logind.conf.d/decapod.conf
        systemctl restart systemd-logind";
    story.machine.sh(allows)?;
    let command = "server --shutdown-grace-period 30s --shutdown-grace-period-critical-pods 10s";
    story::install(&story.machine, command)?;
    story.machine.sh("systemctl restart decapod")?;
    story.machine.until(
        60,
        "the kubelet has its lock",
        "busctl call org.freedesktop.login1 \
        /org/freedesktop/login1 org.freedesktop.login1.Manager ListInhibitors | grep -i kubelet",
    )?;
    story.settled()?;
    let (down, _) = story.machine.reboot()?;
    story.note(format!("down {:.1} s", down.as_secs_f32()));
    story.machine.until(60, "the node is Ready", NODE_READY)?;
    let reason = story.soon_field(60, "pod client", "{.status.reason}", "Terminated");
    let message = story.field("pod client", "{.status.message}")?;
    story.note(format!("the bare pod: {message}"));
    story.kubectl("delete pod client")?;
    story::install(&story.machine, "server")?;
    story.machine.sh("systemctl restart decapod")?;
    super::work::main_job(story)?;
    reason
}

/// Nothing is left, although systemd would start the service again.
pub fn uninstall(story: &mut Story) -> Outcome {
    let told = story.machine.sh("decapod uninstall --yes")?;
    let lines = told.lines().count();
    story.note(format!("{lines} lines, the first: {}", told.lines().next().unwrap_or_default()));
    story.machine.sh(
        "fail() { echo \"left: $*\" >&2; exit 1; }
         sleep 5 # systemd would have started it again by now
         systemctl is-active decapod && fail service
         [[ ! -e /var/lib/decapod ]] || fail files
         grep /var/lib/decapod /proc/mounts && fail mounts
         find /sys/fs/cgroup -path '*kubepods*' -o -path '/sys/fs/cgroup/decapod*' | grep . && fail cgroups
         nft list tables | grep . && fail tables
         ip -br link | grep -E '^(decapod|veth)' && fail links
         ip -br address show dev lo | grep 10.43 && fail addresses
         pgrep -x decapod && fail processes
         true",
    )?;
    Ok(())
}
