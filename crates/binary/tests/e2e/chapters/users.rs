//! Pods with user namespaces (`hostUsers: false`): their images and volumes work, and their root has no
//! rights on the node. Leaves nothing.

use std::os::unix::fs::MetadataExt;

use anyhow::{Result, ensure};

use crate::processes;
use crate::story::{LONG, Story};

const MANIFEST: &str = include_str!("../manifests/users.yaml");
/// Ids below belong to the node.
const FIRST: u32 = 65536;

pub fn of_their_own(story: &mut Story) -> Result<()> {
    let feature = ".status.runtimeHandlers[?(@.name=='')].features.userNamespaces";
    story.soon(LONG, "node node1", feature, "true")?;
    story.apply(MANIFEST)?;
    story.kubectl("wait --for=condition=Ready pod/own-web pod/own-files --timeout=90s")?;
    let before = [owner(story, "own-web", "nginx")?, owner(story, "own-files", "sleep")?];
    let fits = |first: &u32| *first >= FIRST && first.is_multiple_of(FIRST);
    ensure!(before.iter().all(fits), "{before:?}");
    ensure!(before[0] != before[1], "two pods with the same users");
    inside(story)?;
    answers(story)?;

    let uid = story.value("pod own-web", ".metadata.uid")?;
    let process = processes::named(&uid, "nginx")?;
    story.server.kill()?;
    story.server.start()?;
    story.kubectl("wait --for=condition=Ready node/node1 --timeout=90s")?;
    ensure!(processes::named(&uid, "nginx")? == process, "the pod was not adopted");
    // The restarted container has the same users.
    processes::named(&story.value("pod own-files", ".metadata.uid")?, "sleep")?.kill()?;
    let counts = ".status.containerStatuses[*].restartCount";
    story
        .soon(LONG, "pod own-files", counts, "1 0")
        .or_else(|_| story.soon(LONG, "pod own-files", counts, "0 1"))?;
    story.kubectl("wait --for=condition=Ready pod/own-files --timeout=90s")?;
    let after = [owner(story, "own-web", "nginx")?, owner(story, "own-files", "sleep")?];
    ensure!(before == after, "before {before:?}, after {after:?}");
    inside(story)?;
    answers(story)?;
    story.kubectl("delete pod own-web own-files --timeout=90s")?;
    story.kubectl("delete secret users").map(drop)
}

/// The owner of the oldest process with that name, as the node sees it.
fn owner(story: &Story, pod: &str, name: &str) -> Result<u32> {
    let uid = story.value(&format!("pod {pod}"), ".metadata.uid")?;
    let all = processes::of_pod(&uid)?.into_iter().filter(|process| process.name == name);
    let owners = all.map(|process| Ok(std::fs::metadata(format!("/proc/{}", process.id))?.uid()));
    let owners = owners.collect::<Result<Vec<_>>>()?;
    owners.into_iter().min().ok_or_else(|| anyhow::anyhow!("no {name} in {pod}"))
}

/// An ordinary image serves on port 80.
fn answers(story: &Story) -> Result<()> {
    let address = story.value("pod own-web", ".status.podIP")?;
    let answer = story.get(&format!("{address}:80"), "/")?;
    ensure!(answer.body.contains("own-web"), "{}", answer.body);
    let (script, wanted) = ("cat /proc/self/uid_map", "65536");
    let map = story.server.kubectl(&["exec", "own-web", "--", "sh", "-c", script])?;
    ensure!(map.split_whitespace().nth(2) == Some(wanted), "{map}");
    Ok(())
}

fn inside(story: &Story) -> Result<()> {
    let token = "/var/run/secrets/kubernetes.io/serviceaccount/token";
    let cases = [
        ("root", "id -u", "0"),
        ("root", "cat /secret/key /one", "s3cr3ts3cr3t"),
        ("root", "stat -L -c %u:%g:%a /secret/key", "0:2000:440"),
        ("root", "cat /scratch/first", "first"),
        ("root", "stat -c %u:%g /scratch/first /etc/hosts /bin/busybox", "0:2000\n0:0\n0:0"),
        ("root", "touch /memory/m /scratch/r && chown 7 /memory/m && stat -c %u /memory/m", "7"),
        ("user", "id -u", "1000"),
        ("user", "cat /secret/key", "s3cr3t"),
        ("user", "touch /scratch/u && stat -c %u:%g /scratch/u", "1000:2000"),
        ("user", &format!("head -c 2 {token}"), "ey"),
        ("user", "grep -c own-files /etc/hosts", "1"),
    ];
    for (container, script, wanted) in cases {
        let words = ["exec", "own-files", "-c", container, "--", "sh", "-c", script];
        let printed = story.server.kubectl(&words)?;
        ensure!(printed.trim() == wanted, "{script}: {printed:?}, wanted {wanted:?}");
    }
    story.soon_shows(LONG, "logs own-files -c user", "1000")
}
