//! An unmodified device plugin: upstream's stub, which upstream's tests run in their own process. Leaves
//! nothing.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testkit::daemon::Daemon;
use testkit::places;

use crate::story::{LONG, Story};

const RESOURCE: &str = "decapod.test/dongle";

/// A pod that prints its devices and keeps running.
fn pod(name: &str, count: u32) -> String {
    let script = "echo $DONGLES; echo x > /dev/dongle-$DONGLES && echo written; sleep 3600";
    format!(
        r#"{{"apiVersion": "v1", "kind": "Pod", "metadata": {{"name": "{name}"}},
        "spec": {{"terminationGracePeriodSeconds": 0, "nodeName": "node1",
        "containers": [{{"name": "main", "image": "busybox:1.35", "command": ["sh", "-c", "{script}"],
        "resources": {{"limits": {{"{RESOURCE}": {count}}}}}}}]}}}}"#
    )
}

/// The plugin on the node; stopped on drop.
struct Plugin {
    daemon: Daemon,
    socket: PathBuf,
}

impl Plugin {
    fn tell(&self, signal: Signal) -> Result<()> {
        let id = self.daemon.process_id().context("it runs")?;
        Ok(kill(Pid::from_raw(id.cast_signed()), signal)?)
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = std::fs::remove_file(&self.socket);
    }
}

pub fn plugin(story: &mut Story) -> Result<()> {
    let Some(program) = places::device_plugin() else {
        println!("skipped: no plugin in the cache (`cargo xtask device-plugin` builds it)");
        return Ok(());
    };
    let folder = story.server.data_directory().join("kubelet/device-plugins");
    let words = vec![format!("{}/", folder.display()), RESOURCE.to_owned()];
    let host = story.server.host();
    let mut daemon = Daemon::new(host, "device-plugin", &program, words);
    daemon.launch(host)?;
    let mut plugin = Plugin { daemon, socket: folder.join("dongle.sock") };
    let told = tell(story, &mut plugin);
    told.with_context(|| format!("the plugin's log: {}", plugin.daemon.log()))
}

/// Waits for (capacity, allocatable).
fn soon_has(story: &Story, capacity: &str, allocatable: &str) -> Result<()> {
    for (list, wanted) in [("capacity", capacity), ("allocatable", allocatable)] {
        let path = format!(".status.{list}.{}", RESOURCE.replace('.', "\\."));
        story.soon(LONG, "node node1", &path, wanted)?;
    }
    Ok(())
}

fn tell(story: &Story, plugin: &mut Plugin) -> Result<()> {
    soon_has(story, "2", "2")?;
    story.apply(&pod("one", 1))?;
    story.kubectl("wait --for=condition=Ready pod/one --timeout=90s")?;
    story.soon_shows(LONG, "logs one", "a\nwritten")?;
    // A pod that needs more devices than exist fails, even if it is bound already.
    story.apply(&pod("many", 2))?;
    story.soon(LONG, "pod many", ".status.reason", "UnexpectedAdmissionError")?;
    let message = story.value("pod many", ".status.message")?;
    ensure!(message.ends_with("Requested: 2, Available: 1, which is unexpected"), "{message}");
    plugin.tell(Signal::SIGUSR1)?;
    soon_has(story, "2", "1")?;
    let health = ".status.containerStatuses[0].allocatedResourcesStatus[0].resources[0].health";
    story.soon(LONG, "pod one", health, "Unhealthy")?;
    plugin.tell(Signal::SIGUSR2)?;
    soon_has(story, "2", "2")?;
    // Without the plugin the pod keeps running; no other pod gets devices.
    plugin.daemon.kill()?;
    soon_has(story, "2", "0")?;
    std::fs::remove_file(&plugin.socket)?;
    plugin.daemon.launch(story.server.host())?;
    soon_has(story, "2", "2")?;
    story.apply(&pod("two", 1))?;
    story.kubectl("wait --for=condition=Ready pod/two --timeout=90s")?;
    story.soon_shows(LONG, "logs two", "b\nwritten")?;
    story.shows("get pod one -o jsonpath={.status.containerStatuses[0].restartCount}", "0")?;
    story.kubectl("delete pod one two many --wait=true").map(|_| ())
}
