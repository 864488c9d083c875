//! Features of single containers: restart rules, and variables from files of other containers. Leaves
//! nothing.

use anyhow::Result;

use crate::story::{LONG, Story};

const MANIFEST: &str = include_str!("../manifests/rules.yaml");

pub fn of_their_own(story: &mut Story) -> Result<()> {
    story.apply(MANIFEST)?;
    again(story)?;
    anew(story)?;
    files(story)?;
    story.kubectl("delete pod again anew file bad-file --timeout=90s").map(drop)
}

/// A rule restarts one container in a pod with `restartPolicy: Never`.
fn again(story: &Story) -> Result<()> {
    story.soon(LONG, "pod again", ".status.phase", "Succeeded")?;
    let of =
        |name: &str, field: &str| format!(".status.containerStatuses[?(@.name=='{name}')].{field}");
    story.soon(LONG, "pod again", &of("twice", "restartCount"), "1")?;
    story.soon(LONG, "pod again", &of("twice", "lastState.terminated.exitCode"), "42")?;
    story.soon(LONG, "pod again", &of("once", "restartCount"), "0")?;
    story.soon_shows(LONG, "logs again -c twice", "second")
}

/// A rule restarts all containers, from the first init container on, with the same volumes.
fn anew(story: &Story) -> Result<()> {
    story.kubectl("wait --for=condition=Ready pod/anew --timeout=90s")?;
    story.soon_shows(LONG, "logs anew -c cause", "run\nrun")?;
    for list in ["initContainerStatuses", "containerStatuses"] {
        let counts = format!(".status.{list}[*].restartCount");
        let wanted = if list == "containerStatuses" { "1 1" } else { "1" };
        story.soon(LONG, "pod anew", &counts, wanted)?;
        let last = format!(".status.{list}[0].lastState.terminated.reason");
        story.soon(LONG, "pod anew", &last, "RestartingAllContainers")?;
    }
    let condition = ".status.conditions[?(@.type=='AllContainersRestarting')].status";
    story.soon(LONG, "pod anew", condition, "False")
}

fn files(story: &Story) -> Result<()> {
    story.soon(LONG, "pod file", ".status.phase", "Succeeded")?;
    story.soon_shows(LONG, "logs file -c reader", "two\nlines and nothing")?;
    let waiting = ".status.containerStatuses[0].state.waiting";
    story.soon(LONG, "pod bad-file", &format!("{waiting}.reason"), "CreateContainerConfigError")?;
    story.soon(LONG, "pod bad-file", &format!("{waiting}.message"), "couldn't parse env file")
}
