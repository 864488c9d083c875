//! The figures of a control plane under load: writes, reads, lists, watches, memory per object.
//!
//! In: a release binary, and the amount of load. Out: markdown. The client speaks HTTP/2 over TLS, like
//! other clients, with many concurrent requests on a few connections. It shares the machine with the
//! server, so the server's CPU per operation is the figure that repeats best.
//!
//! Each part has its own server with an empty data directory: the memory of an earlier part would
//! falsify the next one's.

mod fleet;
pub mod hollow;
pub mod nodes;

use std::fmt::Write as _;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures::StreamExt;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::control_plane::ControlPlane;
use crate::wait;
use fleet::{Fleet, Question};

/// Makes the object with a number.
type Make = fn(usize) -> Value;

/// Concurrent requests, as in upstream's figures.
const WORKERS: usize = 64;
const CRDS: usize = 100;
/// Time for the server to free the memory that only requests needed.
const SETTLE: Duration = Duration::from_secs(5);

/// The amount of load.
#[derive(Clone, Copy)]
pub struct Scale {
    requests: usize,
    objects: usize,
    watchers: usize,
    writes: usize,
    /// Sizes of clusters that are measured one after the other.
    nodes: &'static [usize],
}

impl Scale {
    /// The load behind docs/performance.md.
    pub const FULL: Self = Self {
        requests: 20_000,
        objects: 10_000,
        watchers: 1000,
        writes: 200,
        nodes: &[100, 1000],
    };
    /// A short load that only tests the measurement.
    pub const SMALL: Self =
        Self { requests: 500, objects: 300, watchers: 50, writes: 20, nodes: &[20] };
}

struct Table(String);

impl Table {
    fn row(&mut self, what: &str, value: &str, goal: &str) {
        let _ = writeln!(self.0, "| {what} | {value} | {goal} |");
    }
}

/// The measured parts, in this order.
const PARTS: [&str; 5] = ["requests", "lists", "watches", "memory", "nodes"];
/// Pods for each node of the part `nodes`.
const PODS: usize = 5;
/// The page size of kubectl and of informers.
const PAGE: usize = 500;

/// `parts` selects some of them by name; empty means all.
pub fn report(binary: &Path, scale: Scale, parts: &[&str]) -> Result<String> {
    if let Some(unknown) = parts.iter().find(|part| !PARTS.contains(part)) {
        bail!("no part {unknown:?}; there are {}", PARTS.join(", "));
    }
    let parts = if parts.is_empty() { &PARTS[..] } else { parts };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let mut table = Table("| what | value | goal |\n|---|---|---|\n".to_owned());
    runtime.block_on(async {
        for part in parts {
            let done = match *part {
                "requests" => requests(binary, scale, &mut table).await,
                "lists" => lists(binary, scale, &mut table).await,
                "watches" => watches(binary, scale, &mut table).await,
                "nodes" => many_nodes(binary, scale, &mut table).await,
                _ => memory(binary, scale, &mut table).await,
            };
            done.context((*part).to_owned())?;
        }
        anyhow::Ok(())
    })?;
    Ok(table.0)
}

/// Registers nodes and schedules pods onto them, for each size of cluster.
async fn many_nodes(binary: &Path, scale: Scale, table: &mut Table) -> Result<()> {
    for count in scale.nodes {
        let found = nodes::measure(binary, *count, count * PODS).await?;
        let each = |cpu: f64, count: usize| cpu * 1e3 / count as f64;
        let rate = |count: usize, time: Duration| count as f64 / time.as_secs_f64();
        let value = format!(
            "{:.1} s ({:.0}/s), {:.2} ms CPU a node",
            found.registered.as_secs_f64(),
            rate(found.nodes, found.registered),
            each(found.node_cpu, found.nodes)
        );
        table.row(&format!("register {count} nodes"), &value, "2 s for 1,000");
        let value = format!(
            "{:.1} s ({:.0}/s), {:.2} ms CPU a pod, then {:.1} % of a core",
            found.bound.as_secs_f64(),
            rate(found.pods, found.bound),
            each(found.pod_cpu, found.pods),
            found.idle * 100.0
        );
        table.row(&format!("create and bind {} pods on them", found.pods), &value, "1,000/s");
        let value = format!("{:.1} s", found.stopped.as_secs_f64());
        table.row("SIGTERM until the end", &value, "10 s");
    }
    Ok(())
}

/// Creates and reads, 64 at a time.
async fn requests(binary: &Path, scale: Scale, table: &mut Table) -> Result<()> {
    let server = ControlPlane::start(binary)?;
    let fleet = Fleet::connect(&server.client()?, 8).await?;
    let maps = "/api/v1/namespaces/default/configmaps";
    let create_map = |index| Question::post(maps, &config_map(index));
    let figures = many(&server, &fleet, scale.requests, create_map).await?;
    table.row("create ConfigMap, 64 writers, durable", &figures, "7,000/s, 0.15 ms CPU");
    let create_pod = |index| Question::post("/api/v1/namespaces/default/pods", &pod(index));
    let figures = many(&server, &fleet, scale.requests / 2, create_pod).await?;
    table.row("create Pod, 64 writers", &figures, "3,200/s, 0.4 ms CPU");
    let get = |index: usize| Question::get(&format!("{maps}/m{}", index % scale.requests));
    let figures = many(&server, &fleet, scale.requests * 2, get).await?;
    table.row("get ConfigMap, 64 readers", &figures, "18,000/s, 0.05 ms CPU");
    fleet.close().await;
    Ok(())
}

async fn many(
    server: &ControlPlane,
    fleet: &Fleet,
    count: usize,
    make: impl Fn(usize) -> Question,
) -> Result<String> {
    let (started, cpu) = (wait::now(), server.cpu()?);
    let asked = (0..count).map(|index| {
        let question = make(index);
        async move {
            let started = wait::now();
            let (status, body) = fleet.ask(index, question).await?;
            ensure!(status < 300, "status {status}: {}", String::from_utf8_lossy(&body));
            Ok(started.elapsed())
        }
    });
    let mut answers = futures::stream::iter(asked).buffer_unordered(WORKERS);
    let mut times = Vec::with_capacity(count);
    while let Some(time) = answers.next().await {
        times.push(time?);
    }
    let seconds = started.elapsed().as_secs_f64();
    let each = (server.cpu()? - cpu) * 1e3 / count as f64;
    Ok(format!("{:.0}/s, {each:.3} ms CPU, {}", count as f64 / seconds, percentiles(times)))
}

fn percentiles(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |share: usize| times.get(times.len() * share / 100).copied().unwrap_or_default();
    let millis = |time: Duration| time.as_secs_f64() * 1e3;
    format!("p50 {:.2}, p99 {:.2} ms", millis(at(50)), millis(at(99)))
}

/// Creates objects and lists all of them, in one answer and in pages.
async fn lists(binary: &Path, scale: Scale, table: &mut Table) -> Result<()> {
    let server = ControlPlane::start(binary)?;
    let fleet = Fleet::connect(&server.client()?, 4).await?;
    fill(&fleet, 0..scale.objects, |index| {
        Question::post("/api/v1/namespaces/default/pods", &pod(index))
    })
    .await?;
    let (started, cpu, runs) = (wait::now(), server.cpu()?, 5);
    let mut bytes = 0;
    for run in 0..runs {
        let (status, body) = fleet.ask(run, Question::get("/api/v1/pods")).await?;
        ensure!(status == 200, "status {status}");
        bytes = body.len();
    }
    let each = started.elapsed().as_secs_f64() * 1e3 / runs as f64;
    let cpu = (server.cpu()? - cpu) * 1e3 / runs as f64;
    let what =
        format!("LIST {} pods ({:.1} MiB)", scale.objects, bytes as f64 / f64::from(1 << 20));
    table.row(&what, &format!("{each:.0} ms, {cpu:.0} ms CPU"), "100 ms CPU for 10,000");
    let before = server.cpu()?;
    for _ in 0..runs {
        let listed = paged(&fleet).await?;
        ensure!(listed == scale.objects, "{listed} pods in the pages of {}", scale.objects);
    }
    let pages = (server.cpu()? - before) * 1e3 / runs as f64;
    let value = format!("{pages:.0} ms CPU: {:.2} × one answer", pages / cpu);
    table.row(&format!("the same in pages of {PAGE}"), &value, "1.2 ×");
    fleet.close().await;
    Ok(())
}

/// Lists all pods in pages; returns their number.
async fn paged(fleet: &Fleet) -> Result<usize> {
    #[derive(Deserialize)]
    struct Page<'a> {
        metadata: PageMeta,
        #[serde(borrow)]
        items: Vec<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct PageMeta {
        r#continue: Option<String>,
    }
    let (mut listed, mut token) = (0, String::new());
    loop {
        let path = format!("/api/v1/pods?limit={PAGE}&continue={token}");
        let (status, body) = fleet.ask(0, Question::get(&path)).await?;
        ensure!(status == 200, "status {status}");
        let page: Page<'_> = serde_json::from_slice(&body)?;
        listed += page.items.len();
        match page.metadata.r#continue {
            Some(next) => token = next,
            None => return Ok(listed),
        }
    }
}

async fn fill(
    fleet: &Fleet,
    indices: Range<usize>,
    make: impl Fn(usize) -> Question,
) -> Result<()> {
    let asked = indices.map(|index| fleet.ask(index, make(index)));
    let mut answers = futures::stream::iter(asked).buffer_unordered(WORKERS);
    while let Some(answer) = answers.next().await {
        let (status, body) = answer?;
        ensure!(status < 300, "status {status}: {}", String::from_utf8_lossy(&body));
    }
    Ok(())
}

/// Ten writes a second that many watchers see: measures the delay after the write's own answer.
async fn watches(binary: &Path, scale: Scale, table: &mut Table) -> Result<()> {
    let server = ControlPlane::start(binary)?;
    let client = server.client()?;
    // A connection carries a few hundred streams.
    let fleet = Fleet::connect(&client, scale.watchers.div_ceil(50)).await?;
    let writer = Fleet::connect(&client, 1).await?;
    let maps = "/api/v1/namespaces/kube-public/configmaps";
    let (status, body) = writer.ask(0, Question::post(maps, &config_map(0))).await?;
    ensure!(status == 201, "status {status}");
    let created: Value = serde_json::from_slice(&body)?;
    let version = created["metadata"]["resourceVersion"].as_str().context("a resource version")?;
    let path =
        format!("{maps}?watch=true&resourceVersion={version}&fieldSelector=metadata.name%3Dm0");
    let opened = (0..scale.watchers).map(|index| fleet.open(index, Question::get(&path)));
    let opened: Vec<_> =
        futures::future::join_all(opened).await.into_iter().collect::<Result<_>>()?;
    let cpu = server.cpu()?;
    let seen = futures::future::join_all(
        opened.into_iter().map(|body| fleet::arrivals(body, scale.writes)),
    );
    let written = format!("{maps}/m0");
    let wrote = write_slowly(&writer, &written, scale.writes);
    let (seen, wrote) = tokio::join!(seen, wrote);
    let wrote = wrote?;
    let mut late = Vec::new();
    for arrivals in seen {
        let arrivals = arrivals?;
        late.extend(
            arrivals.iter().zip(&wrote).map(|(seen, wrote)| seen.saturating_duration_since(*wrote)),
        );
    }
    let each = (server.cpu()? - cpu) * 1e6 / late.len() as f64;
    let what =
        format!("watch: {} watchers, 10 writes/s, after the write's response", scale.watchers);
    table.row(
        &what,
        &format!("{}, {each:.0} µs CPU an event", percentiles(late)),
        "p50 1, p99 4 ms",
    );
    fleet.close().await;
    writer.close().await;
    Ok(())
}

/// The times at which each write was answered.
async fn write_slowly(writer: &Fleet, path: &str, count: usize) -> Result<Vec<Instant>> {
    let mut times = Vec::with_capacity(count);
    let mut pace = tokio::time::interval(Duration::from_millis(100));
    for index in 0..count {
        pace.tick().await;
        let patch = json!({"data": {"at": index.to_string()}});
        let (status, _) = writer.ask(0, Question::patch(path, &patch)).await?;
        ensure!(status == 200, "status {status}");
        times.push(wait::now());
    }
    Ok(times)
}

/// The server's memory for objects and definitions.
async fn memory(binary: &Path, scale: Scale, table: &mut Table) -> Result<()> {
    let things = "/apis/load.decapod.test/v1/namespaces/default/things0";
    let pods = "/api/v1/namespaces/default/pods";
    let count = scale.objects;
    let server = ControlPlane::start(binary)?;
    let fleet = Fleet::connect(&server.client()?, 4).await?;
    let before = server.memory()?;
    let definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    fill(&fleet, 0..CRDS, |index| Question::post(definitions, &crd(index))).await?;
    for index in 0..CRDS {
        served(&fleet, index).await?;
    }
    let each = server.memory()?.saturating_sub(before) / CRDS as u64;
    let what = format!("memory per CustomResourceDefinition, of {CRDS}");
    table.row(&what, &format!("{} KiB", each >> 10), "100 KiB");
    let kinds = [("Pod", pods, pod as Make), ("custom object", things, thing)];
    for (name, path, make) in kinds {
        // The first writes and one list allocate other memory; they come before the measurement.
        let first = count / 4;
        fill(&fleet, 0..first, |index| Question::post(path, &make(index))).await?;
        let (_, body) = fleet.ask(0, Question::get(path)).await?;
        let own = body.len() / first;
        drop(body);
        tokio::time::sleep(SETTLE).await;
        let before = server.memory()?;
        fill(&fleet, first..count, |index| Question::post(path, &make(index))).await?;
        tokio::time::sleep(SETTLE).await;
        let each = server.memory()?.saturating_sub(before) / (count - first) as u64;
        let value = format!("{each} bytes for {own} of JSON: {:.2} ×", each as f64 / own as f64);
        table.row(&format!("memory per {name}, of {count}"), &value, "1.3 ×");
    }
    fleet.close().await;
    Ok(())
}

/// Waits until the objects of a definition can be listed.
async fn served(fleet: &Fleet, index: usize) -> Result<()> {
    let path = format!("/apis/load.decapod.test/v1/things{index}");
    let limit = tokio::time::Instant::now() + Duration::from_secs(30);
    let mut pace = tokio::time::interval(Duration::from_millis(20));
    loop {
        pace.tick().await;
        let (status, _) = fleet.ask(index, Question::get(&path)).await?;
        if status == 200 {
            return Ok(());
        }
        ensure!(tokio::time::Instant::now() < limit, "{path}: status {status}");
    }
}

fn config_map(index: usize) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": format!("m{index}")},
        "data": {"text": "x".repeat(512)},
    })
}

/// A pod that the scheduler ignores.
fn pod(index: usize) -> Value {
    let variables: Vec<Value> = (0..20)
        .map(|n| json!({"name": format!("VARIABLE_{n}"), "value": "y".repeat(40)}))
        .collect();
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("p{index}"), "labels": {"app": format!("a{}", index % 100)}},
        "spec": {
            "schedulerName": "nobody",
            "containers": [{
                "name": "main", "image": "registry.example.com/app:1", "env": variables,
                "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}},
            }],
        },
    })
}

fn thing(index: usize) -> Value {
    let parts: Vec<Value> =
        (0..20).map(|n| json!({"name": format!("part-{n}"), "text": "z".repeat(60)})).collect();
    json!({
        "apiVersion": "load.decapod.test/v1", "kind": "Thing0",
        "metadata": {"name": format!("t{index}")}, "spec": {"parts": parts},
    })
}

fn crd(index: usize) -> Value {
    let part = json!({"type": "object", "properties": {
        "name": {"type": "string", "maxLength": 63}, "text": {"type": "string"},
    }});
    let spec = json!({"type": "object", "properties": {
        "parts": {"type": "array", "items": part},
        "replicas": {"type": "integer", "minimum": 0, "default": 1},
    }});
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("things{index}.load.decapod.test")},
        "spec": {
            "group": "load.decapod.test", "scope": "Namespaced",
            "names": {
                "plural": format!("things{index}"), "singular": format!("thing{index}"),
                "kind": format!("Thing{index}"), "listKind": format!("Thing{index}List"),
            },
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}},
            }],
        },
    })
}
