//! Many pods on one node: a separate cluster, `DECAPOD_PODS` pods (a node must support 300), and the
//! figures of docs/performance.md. It takes long, so it runs only with that variable.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testkit::cluster::Server;
use testkit::host::Host;
use testkit::measure::footprint;
use testkit::switch::Switch;
use testkit::{images, wait};

use crate::story::Story;

const SWITCH: &str = "DECAPOD_PODS";
const PODS: &str = "/api/v1/namespaces/default/pods";
const CALL: Duration = Duration::from_secs(30);
const START: Duration = Duration::from_secs(60);
/// Time for a pod, in a debug build on two busy cores.
const EACH: Duration = Duration::from_secs(4);
const LOOK: Duration = Duration::from_millis(100);

pub fn many_pods(told: &mut Story) -> Result<()> {
    let Some(count) = std::env::var(SWITCH).ok().and_then(|text| text.parse::<u32>().ok()) else {
        println!("skipped: {SWITCH} does not say how many");
        return Ok(());
    };
    let mut switch = Switch::new()?;
    let host = Host::new("node1")?;
    let address = switch.connect(&host)?;
    let most = (count + 10).to_string();
    let arguments = [
        "--node-name",
        "node1",
        "--node-ip",
        &address,
        "--max-pods",
        &most,
        "--node-cidr-mask-size",
        "20",
    ];
    let mut server = Server::new(host, &told.binary, &arguments)?;
    let image = images::all()?.remove(0);
    server.decapod(&["images", "import", &image.display().to_string()])?;
    server.start()?;
    run(&server, count).with_context(|| server.report())
}

fn run(server: &Server, count: u32) -> Result<()> {
    let limit = EACH * count + START;
    // The first pod warms everything up, and shows the memory of a node with little to do.
    create(server, 0..=0)?;
    until_ready(server, 1, START)?;
    let before = footprint(server)?;
    let started = wait::now();
    create(server, 1..=count)?;
    let created = started.elapsed();
    let addresses = until_ready(server, count + 1, limit)?;
    let ready = started.elapsed();
    let after = footprint(server)?;
    ensure!(after.processes > before.processes, "shims are found by their name, which is decapod…");
    ensure!(addresses.len() == count as usize + 1, "{} addresses", addresses.len());
    let gone = remove_all(server, limit)?;
    let each = |seconds: Duration| f64::from(count) / seconds.as_secs_f64();
    let share = |a: f64, b: f64| (a - b) * 1024.0 / f64::from(count);
    println!(
        "{count} pods: created in {:.1} s, Ready after {:.1} s ({:.1} pods/s), gone after {:.1} s \
         ({:.1} pods/s)",
        created.as_secs_f64(),
        ready.as_secs_f64(),
        each(ready),
        gone.as_secs_f64(),
        each(gone),
    );
    println!(
        "memory per pod: {:.0} KiB PSS, {:.0} KiB RSS; all of Decapod: {:.1} MiB PSS in {} processes",
        share(after.pss, before.pss),
        share(after.rss, before.rss),
        after.pss,
        after.processes,
    );
    Ok(())
}

/// One client for all pods, which resumes its TLS session: handshakes are not measured.
fn create(server: &Server, numbers: std::ops::RangeInclusive<u32>) -> Result<()> {
    server.host().in_network(|| {
        let client = server.api()?;
        for number in numbers {
            // The namespace's service account is created a moment after the server is ready.
            wait::until_every(LOOK, START, "a pod is accepted", || {
                let answer = client.post(PODS, &pod(number), CALL)?;
                ensure!(answer.status == 201, "{}", answer.body);
                Ok(())
            })?;
        }
        Ok(())
    })?
}

fn name(number: u32) -> String {
    format!("pod-{number}")
}

fn pod(number: u32) -> String {
    let container =
        json!({"name": "shell", "image": images::BUSYBOX, "command": ["sleep", "36000"]});
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name(number)},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
    })
    .to_string()
}

fn list(server: &Server) -> Result<Vec<Value>> {
    let answer = server.host().in_network(|| server.api()?.get(PODS, CALL))??;
    ensure!(answer.status == 200, "{}", answer.body);
    let list: Value = serde_json::from_str(&answer.body)?;
    Ok(list["items"].as_array().cloned().unwrap_or_default())
}

/// Waits until this number of pods are Ready; returns their addresses. It polls one pod after the other:
/// repeated lists of all pods would be a large part of the measured load.
fn until_ready(server: &Server, count: u32, limit: Duration) -> Result<BTreeSet<String>> {
    let deadline = wait::now() + limit;
    server.host().in_network(|| {
        let client = server.api()?;
        let one = |number| {
            let path = format!("{PODS}/{}", name(number));
            let left = deadline.saturating_duration_since(wait::now());
            wait::until_every(LOOK, left, "a pod is Ready", || {
                let answer = client.get(&path, CALL)?;
                let pod: Value = serde_json::from_str(&answer.body)?;
                ensure!(is_ready(&pod), "{path}: {}", pod["status"]);
                pod["status"]["podIP"].as_str().map(str::to_owned).context("it has no address")
            })
        };
        (0..count).map(one).collect()
    })?
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|c| c["type"] == "Ready" && c["status"] == "True"))
}

fn remove_all(server: &Server, limit: Duration) -> Result<Duration> {
    let started: Instant = wait::now();
    server.kubectl(&["delete", "pods", "--all", "--wait=false"])?;
    wait::until_every(LOOK, limit, "no pod is left", || {
        let left = list(server)?.len();
        ensure!(left == 0, "{left} pods are left");
        Ok(())
    })?;
    Ok(started.elapsed())
}
