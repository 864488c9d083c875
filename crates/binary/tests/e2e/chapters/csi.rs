//! An unmodified storage driver: the mock driver of upstream's end-to-end suite. Leaves nothing.
//!
//! Its sidecars (provisioner, attacher, resizer) are separate programs. The chapter writes what they would
//! write: a PersistentVolume, the attachment's status, the new size. The mock driver creates directories
//! and mounts nothing, but checks the order of calls and their content.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use testkit::daemon::Daemon;
use testkit::{places, wait};

use crate::story::{LONG, Story};

const NAME: &str = "mock.csi.decapod.test";
const MANIFEST: &str = include_str!("../manifests/csi.yaml");
const INLINE: &str = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "inline"},
    "spec": {"terminationGracePeriodSeconds": 0, "containers": [{"name": "main",
        "image": "busybox:1.35", "command": ["sleep", "3600"],
        "volumeMounts": [{"name": "own", "mountPath": "/own"}]}],
    "volumes": [{"name": "own", "csi": {"driver": "mock.csi.decapod.test"}}]}}"#;

/// The driver on the node; stopped on drop.
struct Driver {
    daemon: Daemon,
    /// Its sockets.
    files: [PathBuf; 2],
}

impl Driver {
    fn start(story: &Story, program: &std::path::Path) -> Result<Self> {
        let kubelet = story.server.data_directory().join("kubelet");
        let home = kubelet.join("plugins").join(NAME);
        std::fs::create_dir_all(&home)?;
        let registry = kubelet.join("plugins_registry").join(format!("{NAME}-reg.sock"));
        let files = [home.join("csi.sock"), registry];
        let words = ["-name", NAME, "-endpoint"].map(str::to_owned).into_iter().chain([
            files[0].display().to_string(),
            "-registration".to_owned(),
            files[1].display().to_string(),
        ]);
        let host = story.server.host();
        let mut daemon = Daemon::new(host, "csi-driver", program, words.collect());
        daemon.launch(host)?;
        Ok(Self { daemon, files })
    }

    /// The calls about volumes so far, in order.
    fn calls(&self) -> Vec<String> {
        let log = self.daemon.log();
        log.lines().filter(|line| line.contains("Volume")).map(str::to_owned).collect()
    }

    fn soon_called(&self, from: usize, wanted: &[&str]) -> Result<()> {
        wait::until(LONG, "the driver's calls", || {
            let calls = self.calls();
            // The number of calls for statistics is not specified.
            let of_life = calls.iter().skip(from).filter(|call| *call != "NodeGetVolumeStats");
            let calls: Vec<&String> = of_life.collect();
            ensure!(calls == wanted, "{calls:?}");
            Ok(())
        })
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        for file in &self.files {
            let _ = std::fs::remove_file(file);
        }
    }
}

pub fn driver(story: &mut Story) -> Result<()> {
    let Some(program) = places::csi_driver() else {
        println!("skipped: no driver in the cache (`cargo xtask csi-driver` builds it)");
        return Ok(());
    };
    let driver = Driver::start(story, &program)?;
    let told = tell(story, &driver);
    told.with_context(|| format!("the driver's calls: {}", driver.daemon.log()))?;
    drop(driver);
    story.soon(LONG, "csinode node1", ".spec.drivers[*].name", "")
}

fn tell(story: &Story, driver: &Driver) -> Result<()> {
    story.soon(LONG, "csinode node1", ".spec.drivers[0].name", NAME)?;
    story.soon(LONG, "csinode node1", ".spec.drivers[0].allocatable.count", "7")?;
    story.apply(MANIFEST)?;
    story.soon(LONG, "pvc mocked", ".status.phase", "Bound")?;
    attached(story, driver)?;
    used(story)?;
    grown(story, driver)?;
    inline(story, driver)?;
    given_back(story, driver)
}

/// Nothing is mounted before the volume is attached.
fn attached(story: &Story, driver: &Driver) -> Result<()> {
    let attachments = "volumeattachments";
    story.soon(LONG, attachments, ".items[*].spec.source.persistentVolumeName", "mocked")?;
    story.soon(LONG, attachments, ".items[*].spec.attacher", NAME)?;
    ensure!(driver.calls().is_empty(), "{:?}", driver.calls());
    let name = story.value(attachments, ".items[0].metadata.name")?;
    let status =
        json!({"status": {"attached": true, "attachmentMetadata": {"device": "/dev/mock"}}});
    story.server.kubectl(&[
        "patch",
        "volumeattachment",
        &name,
        "--subresource=status",
        "--type=merge",
        "-p",
        &status.to_string(),
    ])?;
    story.kubectl("wait --for=condition=Ready pod/mocked --timeout=90s")?;
    driver.soon_called(0, &["NodeStageVolume", "NodePublishVolume"])?;
    let unique = format!("kubernetes.io/csi/{NAME}^1");
    story.soon(LONG, "node node1", ".status.volumesInUse[*]", &unique)?;
    story.soon(LONG, "node node1", ".status.volumesAttached[*].name", &unique)
}

fn used(story: &Story) -> Result<()> {
    story.server.kubectl(&["exec", "mocked", "--", "sh", "-c", "echo kept > /data/file"])?;
    story.shows("exec mocked -- cat /data/file", "kept")?;
    // The pod's fsGroup owns the files.
    story.shows("exec mocked -- stat -c %g /data", "4711")
}

/// The claim requests more; the test acts as the resizer, the node expands the volume itself.
fn grown(story: &Story, driver: &Driver) -> Result<()> {
    let patch = |what: &str, patch: serde_json::Value| {
        story.server.kubectl(&["patch", what, "mocked", "--type=merge", "-p", &patch.to_string()])
    };
    let asked = json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}});
    patch("persistentvolumeclaim", asked)?;
    patch("persistentvolume", json!({"spec": {"capacity": {"storage": "2Gi"}}}))?;
    // The kubelet checks the size when it syncs the pod.
    story.kubectl("label pod mocked look=again")?;
    story.soon(LONG, "pvc mocked", ".status.capacity.storage", "2Gi")?;
    driver.soon_called(2, &["NodeExpandVolume"])?;
    story.soon_has_events("mocked", &["FileSystemResizeSuccessful"])
}

/// An inline volume of one pod, which is not attached.
fn inline(story: &Story, driver: &Driver) -> Result<()> {
    story.apply(INLINE)?;
    story.kubectl("wait --for=condition=Ready pod/inline --timeout=90s")?;
    driver.soon_called(3, &["NodePublishVolume"])?;
    story.shows("exec inline -- touch /own/file", "")?;
    story.shows("exec inline -- rm /own/file", "")?;
    story.kubectl("delete pod inline --timeout=90s")?;
    driver.soon_called(4, &["NodeUnpublishVolume"])
}

fn given_back(story: &Story, driver: &Driver) -> Result<()> {
    story.kubectl("delete pod mocked --timeout=90s")?;
    driver.soon_called(5, &["NodeUnpublishVolume", "NodeUnstageVolume"])?;
    story.soon(LONG, "volumeattachments", ".items[*].metadata.name", "")?;
    story.soon(LONG, "node node1", ".status.volumesInUse", "")?;
    story.soon(LONG, "node node1", ".status.volumesAttached", "")?;
    story.kubectl("delete pvc mocked --timeout=90s")?;
    story.soon(LONG, "pv mocked", ".status.phase", "Released")?;
    story.kubectl("delete pv mocked --timeout=90s")?;
    story.kubectl(&format!("delete storageclass/mock csidriver/{NAME}"))?;
    let plugins = story.server.data_directory().join("kubelet/plugins/kubernetes.io/csi");
    let left = story.server.host().run("find", &[&plugins.display().to_string(), "-type", "f"])?;
    ensure!(left.is_empty(), "{left}");
    Ok(())
}
