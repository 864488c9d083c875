//! Raw block volumes: a device of the node reaches containers as a device. Leaves nothing.

use anyhow::{Result, ensure};

use crate::story::{LONG, Story};

const MANIFEST: &str = include_str!("../manifests/block.yaml");
/// The sector that the test writes.
const SECTOR: usize = 4;

/// A loop device over a file; detached on drop.
struct Loop<'a> {
    story: &'a Story,
    device: String,
}

impl<'a> Loop<'a> {
    /// `None`, with a printed line, if the machine has no loop device.
    fn new(story: &'a Story) -> Result<Option<Self>> {
        let file = story.server.host().directory().join("disk");
        std::fs::File::create(&file)?.set_len(8 << 20)?;
        let file = file.display().to_string();
        match story.server.host().run("losetup", &["--find", "--show", &file]) {
            Ok(device) => Ok(Some(Self { story, device: device.trim().to_owned() })),
            Err(error) => {
                println!("skipped: no loop devices here: {error:#}");
                Ok(None)
            }
        }
    }
}

impl Drop for Loop<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.story.server.host().run("losetup", &["--detach", &self.device]) {
            eprintln!("{}: {error:#}", self.device);
        }
    }
}

pub fn raw(story: &mut Story) -> Result<()> {
    let Some(disk) = Loop::new(story)? else { return Ok(()) };
    let told = tell(story, &disk);
    if told.is_err() {
        // The device must not be in use when it is detached.
        let _ = story.kubectl("delete pod writer reader --ignore-not-found --timeout=90s");
    }
    told
}

fn tell(story: &Story, disk: &Loop<'_>) -> Result<()> {
    story.apply(&MANIFEST.replace("DEVICE", &disk.device))?;
    story.kubectl("wait --for=condition=Ready pod/writer pod/reader --timeout=90s")?;
    story.soon_has_events("writer", &["SuccessfulMountVolume"])?;
    let exec =
        |pod: &str, script: &str| story.server.kubectl(&["exec", pod, "--", "sh", "-c", script]);
    let shown = exec("writer", "stat -c %F /dev/disk")?;
    ensure!(shown.trim() == "block special file", "{shown}");
    exec(
        "writer",
        &format!("echo raw words | dd of=/dev/disk bs=512 seek={SECTOR} conv=sync,fsync"),
    )?;
    let read = format!("dd if=/dev/disks/first bs=512 skip={SECTOR} count=1 2>/dev/null");
    let found = exec("reader", &read)?;
    ensure!(found.starts_with("raw words\n"), "{found:?}");
    let disk_now = std::fs::read(story.server.host().directory().join("disk"))?;
    ensure!(disk_now[SECTOR * 512..].starts_with(b"raw words\n"), "the node's file has it");

    // A read-only volume cannot be written, and no other device is accessible.
    let refused = exec("reader", "echo x | dd of=/dev/disks/first bs=512 conv=sync");
    let refused = format!("{:#}", refused.expect_err("the claim is used read-only"));
    ensure!(refused.contains("Operation not permitted"), "{refused}");
    let refused = exec("writer", "mknod /tmp/other b 7 250 && dd if=/tmp/other count=1");
    let refused = format!("{:#}", refused.expect_err("another device"));
    ensure!(refused.contains("Operation not permitted"), "{refused}");

    story.kubectl("delete pod writer reader --timeout=90s")?;
    story.kubectl("delete pvc raw --timeout=90s")?;
    story.soon(LONG, "pv raw", ".status.phase", "Released")?;
    story.kubectl("delete pv raw")?;
    story.soon(LONG, "pv", ".items[?(@.metadata.name=='raw')].metadata.name", "")
}
