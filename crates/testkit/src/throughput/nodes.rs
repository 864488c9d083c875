//! Many nodes without a kubelet: the cost of a Node and of a pod on it for the control plane.
//!
//! In: a binary, a number of nodes, pods for each. Out: [`Figures`]. Nodes register as Ready and send no
//! heartbeats, so the run must be shorter than the grace period of silent nodes.
//!
//! The cost of a node must not depend on the number of nodes: `crates/binary/tests/it/scale.rs` compares
//! two sizes by CPU, which repeats on a busy machine; seconds do not. [`super::hollow`] has kubelets that
//! renew Leases and run pods.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use serde_json::{Value, json};

use super::fleet::{Fleet, Question};
use crate::control_plane::ControlPlane;
use crate::wait;

/// Clients that write concurrently.
const WRITERS: usize = 32;
/// Interval between two checks of the server's progress.
const LOOK: Duration = Duration::from_millis(100);
/// A server is at rest if it uses less of a core than this in [`REST`].
const AT_REST: f64 = 0.05;
const REST: Duration = Duration::from_secs(2);
/// Longer than any measured size takes.
const LIMIT: Duration = Duration::from_secs(600);

/// The cost of a run.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    pub nodes: usize,
    pub pods: usize,
    /// Time until every node had its pod addresses.
    pub registered: Duration,
    /// Seconds of the server's CPU, until it was at rest.
    pub node_cpu: f64,
    /// Time until every pod had a node.
    pub bound: Duration,
    pub pod_cpu: f64,
    /// The share of a core that the server uses at rest.
    pub idle: f64,
    /// Time from SIGTERM to the end of the server.
    pub stopped: Duration,
}

/// Registers nodes, lets the server schedule pods onto them, stops the server.
pub(super) async fn measure(binary: &Path, nodes: usize, pods: usize) -> Result<Figures> {
    // The default cluster CIDR has room for 256 nodes.
    let mut server = ControlPlane::start_with(binary, &["--cluster-cidr", "10.128.0.0/9"])?;
    let fleet = Fleet::connect(&server.client()?, 4).await?;
    let (started, cpu) = (wait::now(), server.cpu()?);
    create(&fleet, nodes, "/api/v1/nodes", node).await?;
    until(&fleet, "/api/v1/nodes", nodes, |node| !node["spec"]["podCIDR"].is_null()).await?;
    let registered = started.elapsed();
    rest(&server).await?;
    let node_cpu = server.cpu()? - cpu;
    let (started, cpu) = (wait::now(), server.cpu()?);
    let path = "/api/v1/namespaces/default/pods";
    create(&fleet, pods, path, pod).await?;
    none_left(&fleet, &format!("{path}?fieldSelector=spec.nodeName%3D&limit=1")).await?;
    let bound = started.elapsed();
    let idle = rest(&server).await?;
    let pod_cpu = server.cpu()? - cpu;
    fleet.close().await;
    let started = wait::now();
    server.terminate()?;
    let stopped = started.elapsed();
    Ok(Figures { nodes, pods, registered, node_cpu, bound, pod_cpu, idle, stopped })
}

async fn create(fleet: &Fleet, count: usize, path: &str, make: fn(usize) -> Value) -> Result<()> {
    let asked = (0..count).map(|index| fleet.ask(index, Question::post(path, &make(index))));
    let mut answers = futures::stream::iter(asked).buffer_unordered(WRITERS);
    while let Some(answer) = answers.next().await {
        let (status, body) = answer?;
        ensure!(status < 300, "status {status}: {}", String::from_utf8_lossy(&body));
    }
    Ok(())
}

/// Waits until a list has `count` objects that are all `done`.
async fn until(fleet: &Fleet, path: &str, count: usize, done: fn(&Value) -> bool) -> Result<()> {
    let mut pace = tokio::time::interval(LOOK);
    let started = wait::now();
    loop {
        pace.tick().await;
        let (status, body) = fleet.ask(0, Question::get(path)).await?;
        ensure!(status == 200, "{path}: status {status}");
        let list: Value = serde_json::from_slice(&body)?;
        let items = list["items"].as_array().context("a list")?;
        let ready = items.iter().filter(|item| done(item)).count();
        if ready >= count {
            return Ok(());
        }
        ensure!(started.elapsed() < LIMIT, "{path}: {ready} of {count} after {LIMIT:?}");
    }
}

/// Waits until a list is empty.
async fn none_left(fleet: &Fleet, path: &str) -> Result<()> {
    let mut pace = tokio::time::interval(LOOK);
    let started = wait::now();
    loop {
        pace.tick().await;
        let (status, body) = fleet.ask(0, Question::get(path)).await?;
        ensure!(status == 200, "{path}: status {status}");
        let list: Value = serde_json::from_slice(&body)?;
        if list["items"].as_array().is_some_and(Vec::is_empty) {
            return Ok(());
        }
        ensure!(started.elapsed() < LIMIT, "{path}: not empty after {LIMIT:?}");
    }
}

/// Waits until the server is at rest. Returns the share of a core that it uses then.
async fn rest(server: &ControlPlane) -> Result<f64> {
    let started = wait::now();
    loop {
        let before = server.cpu()?;
        tokio::time::sleep(REST).await;
        let share = (server.cpu()? - before) / REST.as_secs_f64();
        if share < AT_REST {
            return Ok(share);
        }
        ensure!(started.elapsed() < LIMIT, "the server does not come to rest: {share} of a core");
    }
}

/// A Node as a kubelet registers it.
fn node(index: usize) -> Value {
    let now = base::clock::now_seconds().to_string();
    let name = format!("node-{index:05}");
    let condition = |kind: &str, status: &str, reason: &str| {
        json!({"type": kind, "status": status, "reason": reason, "message": "told by the test",
            "lastHeartbeatTime": now, "lastTransitionTime": now})
    };
    let room = json!({"cpu": "16", "memory": "64Gi", "pods": "110", "ephemeral-storage": "100Gi"});
    let zone = format!("zone-{}", index % 3);
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {
            "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
            "topology.kubernetes.io/region": "region", "topology.kubernetes.io/zone": zone,
        }},
        "status": {
            "capacity": room, "allocatable": room,
            "addresses": [
                {"type": "InternalIP", "address": format!("172.16.{}.{}", index / 250, index % 250 + 1)},
                {"type": "Hostname", "address": name},
            ],
            "conditions": [
                condition("MemoryPressure", "False", "KubeletHasSufficientMemory"),
                condition("DiskPressure", "False", "KubeletHasNoDiskPressure"),
                condition("PIDPressure", "False", "KubeletHasSufficientPID"),
                condition("Ready", "True", "KubeletReady"),
            ],
        },
    })
}

/// Two containers that ask for little.
pub(super) fn pod(index: usize) -> Value {
    let container = |name: &str| {
        json!({"name": name, "image": "registry.example.com/app:1",
            "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}}})
    };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("pod-{index:06}"), "labels": {"app": format!("a{}", index % 100)}},
        "spec": {"containers": [container("main"), container("beside")]},
    })
}
