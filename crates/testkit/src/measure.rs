//! The figures of docs/performance.md.
//!
//! In: a release binary. Out: markdown. Every run has its own host and data directory. Times are measured
//! from outside, by a TLS client that polls and watches; the server itself reports none.
//!
//! ```text
//! exec ──► /readyz says ok ──► node Ready ──► first pod Running ──► 60 s ──► memory ──► 60 s ──► CPU
//! ```

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::cluster::Server;
use crate::host::Host;
use crate::http::ApiClient;
use crate::switch::Switch;
use crate::{images, wait};

const LIMIT: Duration = Duration::from_secs(60);
/// How long an idle cluster settles, and how long its CPU is measured after that.
const SETTLE: Duration = Duration::from_secs(60);
const WATCH: Duration = Duration::from_secs(60);

/// One run's figures.
#[derive(Default)]
struct Run {
    ready: f64,
    node_ready: f64,
    pod_running: f64,
    rss: f64,
    pss: f64,
    cpu: f64,
    wake_ups: f64,
    processes: f64,
}

struct Row {
    name: &'static str,
    goal: &'static str,
    value: fn(&Run) -> f64,
    unit: &'static str,
}

const STARTS: &[Row] = &[
    Row { name: "exec to /readyz", goal: "150", value: |run| run.ready, unit: "ms" },
    Row { name: "exec to node Ready", goal: "1000", value: |run| run.node_ready, unit: "ms" },
    Row {
        name: "exec to first pod Running",
        goal: "1500",
        value: |run| run.pod_running,
        unit: "ms",
    },
];

const IDLE: &[Row] = &[
    Row { name: "RSS of all processes", goal: "64", value: |run| run.rss, unit: "MiB" },
    Row { name: "PSS of all processes", goal: "", value: |run| run.pss, unit: "MiB" },
    Row { name: "processes", goal: "", value: |run| run.processes, unit: "" },
    Row { name: "idle CPU", goal: "0.5", value: |run| run.cpu, unit: "% of a core" },
    Row { name: "idle wake-ups", goal: "", value: |run| run.wake_ups, unit: "per minute" },
];

/// Runs `count` times and returns the report; `idle` adds two minutes to each run.
pub fn report(binary: &Path, count: usize, idle: bool) -> Result<String> {
    let mut runs = Vec::new();
    for number in 1..=count {
        eprintln!("run {number} of {count}");
        runs.push(run(binary, idle).with_context(|| format!("run {number}"))?);
    }
    let size = fs::metadata(binary)?.len() as f64 / 1e6;
    let mut text = String::from("| what | median | all runs | goal |\n|---|---|---|---|\n");
    let rows = STARTS.iter().chain(if idle { IDLE } else { &[] });
    for row in rows {
        let mut values: Vec<f64> = runs.iter().map(row.value).collect();
        let all = values.iter().map(|value| format!("{value:.1}")).collect::<Vec<_>>().join(" ");
        values.sort_by(f64::total_cmp);
        let median = values[values.len() / 2];
        writeln!(text, "| {} | {median:.1} {} | {all} | {} |", row.name, row.unit, row.goal)?;
    }
    writeln!(text, "| size of the binary | {size:.1} MB | | 60 |")?;
    Ok(text)
}

fn run(binary: &Path, idle: bool) -> Result<Run> {
    let mut switch = Switch::new()?;
    let host = Host::new("node1")?;
    let address = switch.connect(&host)?;
    let arguments = ["--node-name", "node1", "--node-ip", &address];
    let mut server = Server::new(host, binary, &arguments)?;
    let image = images::all()?.remove(0);
    server.decapod(&["images", "import", &image.display().to_string()])?;
    let started = wait::now();
    server.launch()?;
    let mut run = Run::default();
    if let Err(error) = times(&server, started, &mut run) {
        bail!("{error:#}\n{}", server.report());
    }
    if idle {
        settle(SETTLE)?;
        memory(&server, &mut run)?;
        let before = activity(&server)?;
        settle(WATCH)?;
        let after = activity(&server)?;
        run.cpu = (after.0 - before.0) / WATCH.as_secs_f64() * 100.0;
        run.wake_ups = (after.1 - before.1) * 60.0 / WATCH.as_secs_f64();
    }
    Ok(run)
}

fn settle(span: Duration) -> Result<()> {
    wait::throughout(span, "quiet", || Ok(()))
}

fn times(server: &Server, started: Instant, run: &mut Run) -> Result<()> {
    let elapsed = || started.elapsed().as_secs_f64() * 1e3;
    server.host().in_network(|| {
        let client = wait::until_every(Duration::from_millis(1), LIMIT, "/readyz", || {
            let client = server.api()?;
            let answer = client.get("/readyz", LIMIT)?;
            ensure!(answer.status == 200, "{}", answer.body);
            Ok(client)
        })?;
        run.ready = elapsed();
        // Created at once, so that the pod waits only for the cluster.
        wait::until_every(Duration::from_millis(1), LIMIT, "a pod is accepted", || {
            let answer = client.post("/api/v1/namespaces/default/pods", &pod(), LIMIT)?;
            ensure!(answer.status == 201, "{}", answer.body);
            Ok(())
        })?;
        until(&client, "/api/v1/nodes?watch=true", |node| {
            let conditions = node["status"]["conditions"].as_array();
            conditions.is_some_and(|all| {
                all.iter().any(|c| c["type"] == "Ready" && c["status"] == "True")
            })
        })?;
        run.node_ready = elapsed();
        until(&client, "/api/v1/namespaces/default/pods?watch=true", |pod| {
            pod["status"]["phase"] == "Running"
        })?;
        run.pod_running = elapsed();
        Ok(())
    })?
}

fn pod() -> String {
    let container =
        json!({"name": "shell", "image": images::BUSYBOX, "command": ["sleep", "3600"]});
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "first"},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
    })
    .to_string()
}

/// Watches until an object satisfies a condition.
fn until(client: &ApiClient, path: &str, wanted: impl Fn(&Value) -> bool) -> Result<()> {
    let mut seen = false;
    client.stream(path, LIMIT, |line| {
        let event: Value = serde_json::from_str(line).unwrap_or_default();
        seen = wanted(&event["object"]);
        !seen
    })?;
    ensure!(seen, "{path} ended early");
    Ok(())
}

/// Memory in MiB of every process of a host, without the test kit and the workload.
#[derive(Default)]
pub struct Footprint {
    pub rss: f64,
    pub pss: f64,
    pub processes: f64,
}

pub fn footprint(server: &Server) -> Result<Footprint> {
    let mut sum = Footprint::default();
    for id in processes(server)? {
        let Ok(text) = fs::read_to_string(format!("/proc/{id}/smaps_rollup")) else { continue };
        sum.rss += field(&text, "Rss:") / 1024.0;
        sum.pss += field(&text, "Pss:") / 1024.0;
        sum.processes += 1.0;
    }
    Ok(sum)
}

fn memory(server: &Server, run: &mut Run) -> Result<()> {
    let sum = footprint(server)?;
    (run.rss, run.pss, run.processes) = (sum.rss, sum.pss, sum.processes);
    Ok(())
}

/// CPU seconds and context switches so far.
fn activity(server: &Server) -> Result<(f64, f64)> {
    let (mut seconds, mut switches) = (0.0, 0.0);
    for id in processes(server)? {
        let Ok(stat) = fs::read_to_string(format!("/proc/{id}/stat")) else { continue };
        let fields: Vec<&str> =
            stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks =
            |at: usize| fields.get(at).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
        // The kernel counts in hundredths of a second.
        seconds += (ticks(11) + ticks(12)) / 100.0;
        for task in fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten() {
            let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
            switches += field(&status, "voluntary_ctxt_switches:");
        }
    }
    Ok((seconds, switches))
}

/// Our own processes on the host: those that run the measured binary.
fn processes(server: &Server) -> Result<Vec<u32>> {
    let namespace = fs::read_link(format!("/proc/{}/ns/pid", server.host().init()))?;
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let same = fs::read_link(entry.path().join("ns/pid")).is_ok_and(|own| own == namespace);
        let binary = fs::read_link(entry.path().join("exe")).unwrap_or_default();
        if same
            && binary.file_name().is_some_and(|name| name.to_string_lossy().starts_with("decapod"))
        {
            found.push(id);
        }
    }
    found.retain(|id| i64::from(*id) != i64::from(server.host().init()));
    Ok(found)
}

fn field(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0.0)
}
