//! Images from a real registry on the node's loopback address, through a mirror. Leaves nothing.

use anyhow::Result;
use testkit::images;
use testkit::registry::Registry;

use crate::story::{LONG, Story};

const IMAGE: &str = "registry.test/tools/busybox:1";

pub fn through_a_mirror(story: &mut Story) -> Result<()> {
    let host = story.server.host();
    let registry = Registry::start(host)?;
    registry.push(host, &images::all()?[0], "tools/busybox", "1")?;
    let command =
        ["run", "pulled", "--image", IMAGE, "--restart=Never", "--", "sh", "-c", "echo from afar"];
    story.server.kubectl(&command)?;
    story.soon(LONG, "pod pulled", ".status.phase", "Succeeded")?;
    story.soon_shows(LONG, "logs pulled", "from afar")?;
    story.soon_has_events("pulled", &["Pulling", "Pulled"])?;
    story.kubectl("run absent --image=registry.test/tools/nothing:1 --restart=Never")?;
    let waiting = ".status.containerStatuses[0].state.waiting.reason";
    story.soon(LONG, "pod absent", waiting, "ImagePullBackOff")?;
    story.soon_has_events("absent", &["Pulling", "Failed", "BackOff"])?;
    story.kubectl("delete pod pulled absent").map(drop)
}
