//! A Ready node without a kubelet: a Node object and a thread that renews its heartbeat.
//!
//! In: a kubeconfig. Out: a Node with room for pods, with a heartbeat every ten seconds until this is
//! dropped. Pods are scheduled to it and stay Pending, so a run tests the control plane alone.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::sh::{self, Outcome};

const HEARTBEAT: Duration = Duration::from_secs(10);

const NODE: &str = r#"{"apiVersion":"v1","kind":"Node","metadata":{"name":"fake","labels":
{"kubernetes.io/hostname":"fake","kubernetes.io/os":"linux","kubernetes.io/arch":"amd64"}}}"#;

const RESOURCES: &str = r#"{"cpu":"4","memory":"8Gi","pods":"110","ephemeral-storage":"50Gi"}"#;

pub struct FakeNode {
    /// Dropped to end the heartbeat.
    stop: Option<SyncSender<()>>,
    heart: Option<JoinHandle<()>>,
}

impl FakeNode {
    pub fn create(kubectl: &Path, kubeconfig: &Path) -> Outcome<Self> {
        let heart = Heart { kubectl: kubectl.to_owned(), kubeconfig: kubeconfig.to_owned() };
        let directory = sh::temporary_directory("node")?;
        let file = directory.join("node.json");
        let made = std::fs::write(&file, NODE)
            .map_err(|error| error.to_string())
            .and_then(|()| sh::capture(heart.kubectl().args(["create", "-f"]).arg(&file)));
        let _ = std::fs::remove_dir_all(&directory);
        made?;
        heart.beat()?;
        let (stop, stopped) = sync_channel(1);
        let heart = std::thread::spawn(move || {
            while stopped.recv_timeout(HEARTBEAT) == Err(RecvTimeoutError::Timeout) {
                if let Err(error) = heart.beat() {
                    eprintln!("failed to send the node's heartbeat: {error}");
                }
            }
        });
        Ok(Self { stop: Some(stop), heart: Some(heart) })
    }
}

impl Drop for FakeNode {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(heart) = self.heart.take() {
            let _ = heart.join();
        }
    }
}

struct Heart {
    kubectl: PathBuf,
    kubeconfig: PathBuf,
}

impl Heart {
    fn kubectl(&self) -> Command {
        let mut command = Command::new(&self.kubectl);
        command.arg("--kubeconfig").arg(&self.kubeconfig);
        command
    }

    fn beat(&self) -> Outcome {
        let now = sh::capture(Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%SZ"]))?;
        let mut command = self.kubectl();
        command.args(["patch", "node", "fake", "--subresource=status", "--type=strategic", "-p"]);
        sh::capture(command.arg(status(now.trim()))).map(drop)
    }
}

fn status(now: &str) -> String {
    format!(
        r#"{{"status":{{"capacity":{RESOURCES},"allocatable":{RESOURCES},
"addresses":[{{"type":"InternalIP","address":"192.0.2.77"}},{{"type":"Hostname","address":"fake"}}],
"conditions":[{{"type":"Ready","status":"True","reason":"KubeletReady","message":"it says so",
"lastHeartbeatTime":"{now}"}}],
"nodeInfo":{{"machineID":"","systemUUID":"","bootID":"","kernelVersion":"6.1","osImage":"none",
"containerRuntimeVersion":"none://1","kubeletVersion":"{}","kubeProxyVersion":"",
"operatingSystem":"linux","architecture":"amd64"}}}}}}"#,
        release::KUBERNETES.tag
    )
}
