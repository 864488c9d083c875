//! Static pods: from a file, with a mirror in the API, and those of the server's own components. Leaves none
//! but the latter.

use anyhow::{Result, ensure};
use testkit::wait;

use crate::processes;
use crate::story::{LONG, Story};

const HASH: &str = r".metadata.annotations.kubernetes\.io/config\.mirror";
const FIXED: &str = include_str!("../manifests/static.yaml");

/// What users of other clusters ask the pods of the control plane.
pub fn of_components(story: &mut Story) -> Result<()> {
    story.soon_shows(
        LONG,
        "get pods -n kube-system -l tier=control-plane",
        "NAME READY STATUS RESTARTS AGE\n\
         kube-apiserver-node1 1/1 Running * *\n\
         kube-controller-manager-node1 1/1 Running * *\n\
         kube-scheduler-node1 1/1 Running * *",
    )?;
    let pod = "kube-apiserver-node1";
    let help = story.kubectl(&format!("exec -n kube-system {pod} -- kube-apiserver --help"))?;
    ensure!(help.contains("--enable-admission-plugins"), "{help}");
    let log = story.kubectl(&format!("logs -n kube-system {pod}"))?;
    ensure!(log.contains("audit is off"), "{log}");
    let refused = story.kubectl(&format!("exec -n kube-system {pod} -- sh -c id"));
    let refused = refused.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(refused.contains("has no container"), "{refused}");
    let source = story.value(&format!("pod {pod} -n kube-system"), HASH)?;
    ensure!(processes::of_pod(&source)?.is_empty(), "processes of {source}");
    Ok(())
}

pub fn mirror(story: &mut Story) -> Result<()> {
    let file = story.static_manifests.join("fixed.yaml");
    std::fs::write(&file, FIXED)?;
    let pod = "pod fixed-node1 -n kube-system";
    story.soon(LONG, pod, ".status.phase", "Running")?;
    let source = story.value(pod, r".metadata.annotations.kubernetes\.io/config\.source")?;
    ensure!(source == "file", "{source}");
    let owner = story.value(pod, ".metadata.ownerReferences[0].kind")?;
    ensure!(owner == "Node", "{owner}");
    let hash = story.value(pod, HASH)?;
    let uid = story.value(pod, ".metadata.uid")?;
    ensure!(!hash.is_empty() && hash != uid, "the mirror has a uid of its own");
    let before = processes::of_pod(&hash)?;
    ensure!(!before.is_empty(), "no process of the static pod {hash}");
    story.kubectl("delete pod fixed-node1 -n kube-system --wait=false")?;
    wait::until(LONG, "the mirror is made anew", || {
        let now = story.value(pod, ".metadata.uid")?;
        ensure!(now != uid, "it is still the old one");
        Ok(())
    })?;
    let after = processes::of_pod(&hash)?;
    let lost: Vec<_> =
        before.iter().filter(|process| process.name == "sh" && !after.contains(process)).collect();
    ensure!(lost.is_empty(), "deleting the mirror stopped {lost:?}");
    std::fs::remove_file(&file)?;
    wait::until(LONG, "the pod ends with its file", || {
        ensure!(
            story.kubectl("get pod fixed-node1 -n kube-system").is_err(),
            "the mirror is there"
        );
        ensure!(processes::of_pod(&hash)?.is_empty(), "processes are there");
        Ok(())
    })
}
