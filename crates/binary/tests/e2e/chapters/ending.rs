//! The end: deletions, a clean stop, and uninstall. Leaves nothing.

use anyhow::{Result, ensure};
use testkit::wait;

use crate::processes;
use crate::story::{LONG, Story};

pub fn dependents(story: &mut Story) -> Result<()> {
    story.kubectl("create namespace doomed")?;
    story.kubectl(
        "create deployment short -n doomed --image=busybox:1.35 --replicas=2 -- sleep 3600",
    )?;
    story.kubectl("create configmap note -n doomed --from-literal=a=b")?;
    story.kubectl("rollout status deployment/short -n doomed --timeout=90s")?;
    // `sleep` as process 1 ignores TERM: its grace period of 30 s is part of the wait.
    story.shows("delete namespace doomed --timeout=80s", "namespace \"doomed\" deleted")?;
    story
        .shows("delete deployment web", "deployment.apps \"web\" deleted from default namespace")?;
    wait::until(LONG, "the dependents are gone", || {
        let rest = story.kubectl("get replicasets,pods -l app=web -o name")?;
        ensure!(rest.is_empty(), "{rest}");
        Ok(())
    })?;
    story.kubectl("delete service,configmap,secret web").map(drop)
}

pub fn interrupt(story: &mut Story) -> Result<()> {
    let uid = story.value("pod client", ".metadata.uid")?;
    let before = processes::named(&uid, "sh")?;
    let status = story.server.stop(LONG)?;
    ensure!(status.success(), "the server ended with {status}");
    let log = story.server.log();
    let last_words = log.rsplit("stopping\n").next().unwrap_or_default();
    let is_calm = !last_words.contains("WARN") && !last_words.contains("ERROR");
    ensure!(is_calm && log.contains("stopping\n"), "the server's last words:\n{last_words}");
    ensure!(processes::named(&uid, "sh")? == before, "the pod was touched");
    story.server.start()?;
    story.kubectl("wait --for=condition=Ready node/node1 --timeout=90s")?;
    ensure!(processes::named(&uid, "sh")? == before, "the pod was not adopted");
    story.kubectl("delete pod client")?;
    let rest = processes::of_pod(&uid)?;
    ensure!(rest.is_empty(), "{rest:?}");
    Ok(())
}

/// Commands that show leftovers on a host, and their output if there are none.
pub const TRACES: &[(&str, &str)] = &[
    ("ls -A /run", ""),
    ("nft list tables", ""),
    ("ip -o link | grep -v -e lo: -e eth0@ || true", ""),
    ("ip -o addr show dev lo | grep -v -e 127.0.0.1/8 -e ::1/128 || true", ""),
    ("find /sys/fs/cgroup -name '*kubepods*' -o -name 'decapod*'", ""),
    ("ps -eo comm= | grep -e decapod -e sleep || true", ""),
];

/// The last chapter: everything that the cluster created is removed.
pub fn uninstall(story: &mut Story) -> Result<()> {
    story.kubectl("create deployment rest --image=busybox:1.35 -- sleep 3600")?;
    story.kubectl("rollout status deployment/rest --timeout=90s")?;
    let printed = story.server.decapod(&["uninstall"])?;
    story.server.reap(LONG)?;
    ensure!(!story.server.data_directory().exists(), "the data directory is there:\n{printed}");
    for (what, wanted) in TRACES {
        let found = story.server.host().run("sh", &["-c", what])?;
        ensure!(found == *wanted, "{what}: {found}\n{printed}");
    }
    Ok(())
}
