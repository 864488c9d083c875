//! Static pods: from a file, with a mirror in the API. Leaves none.

use anyhow::{Result, ensure};
use testkit::wait;

use crate::processes;
use crate::story::{LONG, Story};

const FIXED: &str = include_str!("../manifests/static.yaml");

pub fn mirror(story: &mut Story) -> Result<()> {
    let file = story.static_manifests.join("fixed.yaml");
    std::fs::write(&file, FIXED)?;
    let pod = "pod fixed-node1 -n kube-system";
    story.soon(LONG, pod, ".status.phase", "Running")?;
    let source = story.value(pod, r".metadata.annotations.kubernetes\.io/config\.source")?;
    ensure!(source == "file", "{source}");
    let owner = story.value(pod, ".metadata.ownerReferences[0].kind")?;
    ensure!(owner == "Node", "{owner}");
    let hash = story.value(pod, r".metadata.annotations.kubernetes\.io/config\.mirror")?;
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
