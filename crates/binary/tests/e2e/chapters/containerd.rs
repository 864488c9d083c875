//! Another runtime: a separate cluster on its own host, whose containers a real containerd runs and a CNI
//! plugin connects. Leaves nothing.
//!
//! Most parts are chapters that the embedded runtime has passed before: there must be no difference. The
//! rest tests the difference: the runtime can stop while the kubelet runs.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use testkit::cluster::Server;
use testkit::containerd::{Containerd, ENDPOINT};
use testkit::host::Host;
use testkit::switch::Switch;
use testkit::{images, wait};

use super::{apply, commands, healing, service};
use crate::processes;
use crate::story::{LONG, Story};

const NODE: &str = "node node1";
const READY: &str = ".status.conditions[?(@.type=='Ready')]";

/// A chapter that runs inside this one.
type Part = (&'static str, fn(&mut Story) -> Result<()>);

const TOLD_AGAIN: &[Part] = &[
    ("apply: a Deployment becomes Ready", apply::ready),
    ("apply: settings, secrets and limits reach the container", apply::inside),
    ("apply: events tell what happened", apply::events),
    ("service: the ClusterIP answers on the node and spreads", service::cluster_ip),
    ("service: the NodePort answers outside", service::node_port),
    ("service: names answer in a pod", service::names),
    ("service: a pod that is not Ready gets nothing", service::not_ready),
    ("commands: logs, exec, cp, port-forward", commands::streams),
    ("healing: a killed process is restarted", healing::killed_process),
    ("healing: a deleted pod is replaced", healing::deleted_pod),
    ("healing: a failing liveness probe restarts", healing::liveness),
];

pub fn runs_a_node(told: &mut Story) -> Result<()> {
    let mut switch = Switch::new()?;
    let host = Host::new("node1")?;
    let address = switch.connect(&host)?;
    let Some(mut containerd) = containerd_on(&host) else { return Ok(()) };
    let arguments =
        ["--node-name", "node1", "--node-ip", &address, "--container-runtime-endpoint", ENDPOINT];
    let server = Server::new(host, &told.binary, &arguments)?;
    let binary = told.binary.clone();
    let mut story =
        Story { switch, agent: None, server, binary, address, static_manifests: PathBuf::new() };
    let outcome = tell(&mut story, &mut containerd);
    let outcome = outcome.with_context(|| {
        let log = containerd.log();
        let from = log.len().saturating_sub(8000);
        format!("{}\n--- containerd\n{}", story.report(), log.get(from..).unwrap_or(&log))
    });
    // Must be dropped before its host, which waits for its processes.
    drop(containerd);
    outcome
}

/// `None`, with a printed line, if its packages cannot be downloaded.
fn containerd_on(host: &Host) -> Option<Containerd> {
    match Containerd::start(host) {
        Ok(containerd) => Some(containerd),
        Err(error) => {
            println!("skipped: no containerd here: {error:#}");
            None
        }
    }
}

fn tell(story: &mut Story, containerd: &mut Containerd) -> Result<()> {
    for archive in images::all()? {
        containerd.import(story.server.host(), &archive)?;
    }
    // The control plane does not need containerd; the node waits for it.
    containerd.kill()?;
    story.server.start()?;
    wait::until(LONG, "the node waits for its runtime", || {
        let log = story.server.log();
        ensure!(log.contains("the container runtime does not answer, waiting"), "{log}");
        Ok(())
    })?;
    containerd.launch(story.server.host())?;
    story.soon(LONG, NODE, &format!("{READY}.status"), "True")?;
    story.soon(LONG, "serviceaccount default", ".metadata.name", "default")?;
    let version = story.value(NODE, ".status.nodeInfo.containerRuntimeVersion")?;
    ensure!(version.starts_with("containerd://"), "{version}");
    for (name, part) in TOLD_AGAIN {
        part(story).with_context(|| format!("with containerd: {name}"))?;
    }
    offline_images(story)?;
    our_death(story, containerd)?;
    its_death(story, containerd)?;
    deletion(story, containerd)
}

/// `decapod images` uses the runtime; one line says what CRI cannot do.
fn offline_images(story: &Story) -> Result<()> {
    let list = story.server.decapod(&["images", "list"])?;
    ensure!(list.lines().any(|line| line.contains("nginx") && line.contains("1.22")), "{list}");
    let archive = images::pause()?.display().to_string();
    let error =
        story.server.decapod(&["images", "import", &archive]).expect_err("CRI has no import");
    ensure!(format!("{error:#}").contains("ctr -n k8s.io images import"), "{error:#}");
    Ok(())
}

/// All processes of the pods, and the restart counts of their containers.
fn snapshot(story: &Story) -> Result<(BTreeSet<processes::Process>, String)> {
    let mut all = BTreeSet::new();
    for pod in story.pods("app=web")? {
        let uid = story.value(&format!("pod {pod}"), ".metadata.uid")?;
        all.extend(processes::of_pod(&uid)?);
    }
    let counts =
        "get pods -l app=web -o jsonpath={.items[*].status.containerStatuses[*].restartCount}";
    Ok((all, story.kubectl(counts)?))
}

fn our_death(story: &mut Story, containerd: &Containerd) -> Result<()> {
    let before = snapshot(story)?;
    let tasks = containerd.tasks(story.server.host())?;
    story.server.kill()?;
    let alive = containerd.tasks(story.server.host())?;
    ensure!(alive == tasks, "containers changed with the server: {tasks:?}, {alive:?}");
    story.server.start()?;
    story.soon(LONG, NODE, &format!("{READY}.status"), "True")?;
    story.soon(LONG, "deployment web", ".status.readyReplicas", "3")?;
    let now = snapshot(story)?;
    ensure!(now == before, "adopted {now:?}, before its death {before:?}");
    // The server really manages the adopted ones: a command runs, and a process's end is noticed.
    let pod = story.first_pod("app=web")?;
    story.shows(&format!("exec {pod} -- hostname"), &pod)?;
    healing::killed_process(story)
}

fn its_death(story: &mut Story, containerd: &mut Containerd) -> Result<()> {
    let before = snapshot(story)?;
    let service = format!("{}:80", story.value("service web", ".spec.clusterIP")?);
    containerd.kill()?;
    let error = story.kubectl("exec client -- true").expect_err("nobody runs it");
    ensure!(format!("{error:#}").contains("connection refused"), "{error:#}");
    // Containers run without containerd, and serve as long as the node counts as Ready.
    let answer = story.get(&service, "/")?;
    ensure!(answer.status == 200, "{answer:?}");
    story.soon(LONG, NODE, &format!("{READY}.message"), "container runtime is down")?;
    story.soon(LONG, NODE, &format!("{READY}.reason"), "KubeletNotReady")?;
    ensure!(before.0 == snapshot(story)?.0, "containers went with containerd");
    containerd.launch(story.server.host())?;
    story.soon(LONG, NODE, &format!("{READY}.status"), "True")?;
    story.soon(LONG, "deployment web", ".status.readyReplicas", "3")?;
    let now = snapshot(story)?;
    ensure!(now == before, "after its restart {now:?}, before {before:?}");
    story.soon_shows(LONG, "exec client -- echo again", "again")?;
    healing::killed_process(story)
}

/// The runtime keeps nothing of deleted pods, nor of a removed node.
fn deletion(story: &mut Story, containerd: &Containerd) -> Result<()> {
    let count = || containerd.tasks(story.server.host()).map(|tasks| tasks.len());
    story.kubectl("delete deployment web")?;
    wait::until(LONG, "containerd runs the client's pod alone", || {
        let left = count()?;
        ensure!(left == 2, "{left} containers, sandboxes included");
        Ok(())
    })?;
    let printed = story.server.decapod(&["uninstall"])?;
    // Stopped sandboxes of the Deployment's pods may still be there: the kubelet removes those later.
    ensure!(printed.contains(&format!("pod sandboxes in {ENDPOINT}")), "{printed}");
    ensure!(count()? == 0, "{:?}", containerd.tasks(story.server.host())?);
    ensure!(!story.server.data_directory().exists(), "the data directory is there:\n{printed}");
    story.server.reap(LONG).map(drop)
}
