//! A fleet of simulated nodes: what nodes and pods cost the control plane, at rest and in motion.
//!
//! ```text
//! register ─► rest ─► create pods (watched to Running) ─► reads ─► rollouts ─► evictions
//!                                        ─► a tenth of the nodes fails and comes back ─► rest ─► SIGTERM
//! ```
//!
//! In: a binary, sizes. Out: markdown: a column for each size, and how much dearer a node or pod is among
//! many. The hollow kubelets are a process of their own, so that the server's CPU is the server's.
//! Invariant: what a phase costs is told without what renewals of Leases cost meanwhile: how many there are
//! depends on the time that it takes.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures::StreamExt;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::Deserialize;
use serde_json::{Value, json};

use super::fleet::{Fleet, Question};
use crate::control_plane::ControlPlane;
use crate::simulator::Simulator;
use crate::wait;

/// Clients that write side by side.
const WRITERS: usize = 32;
/// Reads that are measured.
const READS: usize = 2000;
const LISTS: usize = 5;
const LOOK: Duration = Duration::from_millis(200);
/// Longer than any size takes that is measured.
const LIMIT: Duration = Duration::from_secs(900);
const NODES: &str = "/api/v1/nodes";
const PODS: &str = "/api/v1/namespaces/default/pods";
const DEPLOYMENTS: &str = "/apis/apps/v1/namespaces/default/deployments";
/// Deployments that roll out at one time.
const ROLLOUTS: usize = 10;

/// How much is measured.
#[derive(Clone, Copy)]
pub struct Plan {
    pub nodes: usize,
    pub pods: usize,
    pub depth: Depth,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Nodes and pods, as short as the figures of a test may be.
    Brief,
    /// Reads, too, and a fleet that is at rest for longer.
    Calm,
    /// Rollouts, evictions and failing nodes, too.
    Churn,
}

impl Depth {
    /// How long a fleet at rest is watched.
    fn rest(self) -> Duration {
        Duration::from_secs(if self == Self::Brief { 4 } else { 10 })
    }

    /// Renewals of a test are rarer: it measures something else.
    fn lease_interval(self) -> &'static [&'static str] {
        if self == Self::Brief { &["--lease-interval", "30s"] } else { &[] }
    }

    /// What a change still causes is over by then.
    fn settle(self) -> Duration {
        Duration::from_secs(if self == Self::Brief { 2 } else { 5 })
    }
}

/// What a value is, so that sizes can be compared.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Of one node or pod: it should not depend on how many there are.
    Each,
    Whole,
}

struct Figure {
    what: &'static str,
    kind: Kind,
    value: f64,
    unit: &'static str,
}

/// What one size costs.
#[derive(Default)]
pub struct Figures {
    all: Vec<Figure>,
}

impl Figures {
    fn each(&mut self, what: &'static str, value: f64, unit: &'static str) {
        self.all.push(Figure { what, kind: Kind::Each, value, unit });
    }

    fn whole(&mut self, what: &'static str, value: f64, unit: &'static str) {
        self.all.push(Figure { what, kind: Kind::Whole, value, unit });
    }

    fn latencies(&mut self, names: [&'static str; 2], mut times: Vec<Duration>) {
        times.sort_unstable();
        for (name, share) in names.into_iter().zip([50, 99]) {
            let at = (times.len() * share / 100).min(times.len().saturating_sub(1));
            let time = times.get(at).copied().unwrap_or_default();
            self.whole(name, time.as_secs_f64() * 1e3, "ms");
        }
    }

    /// A value that was measured.
    pub fn get(&self, what: &str) -> Result<f64> {
        let found = self.all.iter().find(|figure| figure.what == what);
        found.map(|figure| figure.value).with_context(|| what.to_owned())
    }
}

pub const NODE_CPU: &str = "server CPU per node registered";
pub const POD_CPU: &str = "server CPU per pod, created to Running";
pub const RENEWAL_CPU: &str = "server CPU per renewal of a Lease, at rest";

/// Measures one size after the other; a table of all.
pub fn report(binary: &Path, plans: &[Plan]) -> Result<String> {
    let mut all = Vec::new();
    for plan in plans {
        eprintln!("{} nodes", plan.nodes);
        all.push(run(binary, *plan).with_context(|| format!("{} nodes", plan.nodes))?);
    }
    let mut text = String::from("| what |");
    plans.iter().try_for_each(|plan| write!(text, " {} nodes |", plan.nodes))?;
    let compares = plans.len() > 1;
    text.push_str(if compares { " last ÷ first |\n|---|" } else { "\n|---|" });
    text.push_str(&"---|".repeat(plans.len() + usize::from(compares)));
    text.push('\n');
    for figure in &all[0].all {
        write!(text, "| {} |", figure.what)?;
        let values = all.iter().map(|figures| figures.get(figure.what));
        let values: Vec<f64> = values.collect::<Result<_>>()?;
        values.iter().try_for_each(|value| write!(text, " {value:.2} {} |", figure.unit))?;
        let ratio = values[values.len() - 1] / values[0];
        match (compares, figure.kind) {
            (true, Kind::Each) if ratio.is_finite() => writeln!(text, " {ratio:.2} |")?,
            (true, _) => writeln!(text, " |")?,
            (false, _) => writeln!(text)?,
        }
    }
    Ok(text)
}

pub fn run(binary: &Path, plan: Plan) -> Result<Figures> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(measure(binary, plan))
}

async fn measure(binary: &Path, plan: Plan) -> Result<Figures> {
    // The default range has room for 256 nodes.
    let mut server = ControlPlane::start_with(binary, &["--cluster-cidr", "10.128.0.0/9"])?;
    let fleet = Fleet::connect(&server.client()?, 4).await?;
    let count = plan.nodes.to_string();
    let begun = wait::now();
    let cpu = server.cpu()?;
    let arguments = [&["--nodes", &count], plan.depth.lease_interval()].concat();
    let mut simulator = Simulator::start(binary, &server.kubeconfig(), &arguments)?;
    let mut course = Course {
        plan,
        server: &server,
        simulator: &simulator,
        fleet: &fleet,
        figures: Figures::default(),
        renewal: 0.0,
    };
    let measured = async {
        course.register(begun, cpu).await?;
        course.create_pods().await?;
        if plan.depth == Depth::Brief {
            return Ok(());
        }
        course.read().await?;
        if plan.depth == Depth::Churn {
            course.roll_out().await?;
            course.evict().await?;
            course.fail().await?;
        }
        course.end().await
    };
    if let Err(error) = measured.await {
        bail!("{error:#}\n{}\n{}", simulator.log(), server.log());
    }
    let mut figures = course.figures;
    let started = wait::now();
    simulator.terminate()?;
    figures.whole("SIGTERM until the simulation's end", started.elapsed().as_secs_f64(), "s");
    fleet.close().await;
    let started = wait::now();
    server.terminate()?;
    figures.whole("SIGTERM until the server's end", started.elapsed().as_secs_f64(), "s");
    Ok(figures)
}

struct Course<'a> {
    plan: Plan,
    server: &'a ControlPlane,
    simulator: &'a Simulator,
    fleet: &'a Fleet,
    figures: Figures,
    /// Seconds of the server's CPU that a renewal of a Lease costs: all that it does at rest.
    renewal: f64,
}

/// A time, the server's CPU and the renewals of Leases until then.
type Mark = (Instant, f64, f64);

impl Course<'_> {
    async fn mark(&self) -> Result<Mark> {
        Ok((wait::now(), self.server.cpu()?, self.renewals().await?))
    }

    async fn renewals(&self) -> Result<f64> {
        let (status, body) = self.fleet.ask(0, Question::get("/metrics")).await?;
        ensure!(status == 200, "/metrics: status {status}");
        let text = String::from_utf8_lossy(&body);
        let is = |line: &&str| {
            line.starts_with("apiserver_request_total{")
                && line.contains("resource=\"leases\"")
                && line.contains("verb=\"PUT\"")
        };
        let counts =
            text.lines().filter(is).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        Ok(counts.sum())
    }

    /// Seconds of CPU since, without what renewals of Leases cost meanwhile.
    async fn spent(&self, since: Mark) -> Result<f64> {
        let renewals = self.renewals().await? - since.2;
        Ok((self.server.cpu()? - since.1 - self.renewal * renewals).max(0.0))
    }

    async fn register(&mut self, begun: Instant, cpu: f64) -> Result<()> {
        let nodes = self.plan.nodes;
        self.nodes_become("True", nodes).await?;
        let elapsed = begun.elapsed().as_secs_f64();
        tokio::time::sleep(self.plan.depth.settle()).await;
        let (total, renewals) = (self.server.cpu()? - cpu, self.renewals().await?);
        self.rest("server CPU at rest, without pods", "simulation's CPU at rest, without pods")
            .await?;
        let spent = (total - self.renewal * renewals).max(0.0);
        self.figures.whole("registered and Ready with pod addresses", elapsed, "s");
        self.figures.whole("registration rate", nodes as f64 / elapsed, "/s");
        self.figures.each(NODE_CPU, spent * 1e3 / nodes as f64, "ms");
        self.figures.each(RENEWAL_CPU, self.renewal * 1e3, "ms");
        let resident = self.simulator.resident()? as f64 / f64::from(1 << 20);
        self.figures.whole("simulation's RSS, without pods", resident, "MiB");
        Ok(())
    }

    async fn rest(&mut self, server: &'static str, simulation: &'static str) -> Result<()> {
        let (begun, own) = (self.mark().await?, self.simulator.cpu()?);
        tokio::time::sleep(self.plan.depth.rest()).await;
        let spent = self.server.cpu()? - begun.1;
        let own = self.simulator.cpu()? - own;
        let renewals = self.renewals().await? - begun.2;
        ensure!(renewals > 0.0, "no Lease was renewed at rest");
        self.renewal = spent / renewals;
        let seconds = begun.0.elapsed().as_secs_f64();
        self.figures.whole(server, spent / seconds * 100.0, "% of a core");
        self.figures.whole(simulation, own / seconds * 100.0, "% of a core");
        Ok(())
    }

    /// Waits until so many nodes have pod addresses and say this of being ready. Watched, as lists of all
    /// nodes again and again would be most of what is measured.
    async fn nodes_become(&self, ready: &str, count: usize) -> Result<()> {
        let path = format!("{NODES}?watch=true");
        let mut watch = Lines::new(self.fleet.open(2, Question::get(&path)).await?);
        let mut found = HashSet::new();
        let following = async {
            while found.len() < count {
                for line in watch.next().await? {
                    let event: Event<Node> = serde_json::from_slice(&line)?;
                    let (name, is) = (event.object.metadata.name.clone(), event.object.is(ready));
                    if is {
                        found.insert(name)
                    } else {
                        found.remove(&name)
                    };
                }
            }
            anyhow::Ok(())
        };
        let done = tokio::time::timeout(LIMIT, following).await;
        done.with_context(|| format!("{count} nodes are not {ready} after {LIMIT:?}"))?
    }

    async fn create_pods(&mut self) -> Result<()> {
        let count = self.plan.pods;
        let version = version_of(self.fleet, PODS).await?;
        let path = format!("{PODS}?watch=true&resourceVersion={version}");
        let watch = self.fleet.open(3, Question::get(&path)).await?;
        let begun = self.mark().await?;
        let own = self.simulator.cpu()?;
        let created = created(self.fleet, count, PODS, super::nodes::pod);
        let watched = tokio::time::timeout(LIMIT, follow(watch, count));
        let (created, seen) = tokio::try_join!(created, async {
            watched.await.context("not all pods ran in time")?
        })?;
        let elapsed = begun.0.elapsed().as_secs_f64();
        let simulation = (self.simulator.cpu()? - own) * 1e3 / count as f64;
        tokio::time::sleep(self.plan.depth.settle()).await;
        let spent = self.spent(begun).await?;
        let last_bound = seen.values().filter_map(|life| life.bound).max();
        let binding = last_bound.map_or(elapsed, |last| (last - begun.0).as_secs_f64());
        let (mut bound, mut ran, mut event) = (Vec::new(), Vec::new(), Vec::new());
        let mut answered = Vec::new();
        for (name, (sent, answer)) in &created {
            let life = seen.get(name).context("every pod was seen")?;
            answered.push(*answer - *sent);
            event.extend(life.added.map(|at| at.saturating_duration_since(*answer)));
            bound.extend(life.bound.map(|at| at.saturating_duration_since(*sent)));
            ran.extend(life.running.map(|at| at.saturating_duration_since(*sent)));
        }
        let figures = &mut self.figures;
        figures.whole("pods created by 32 clients and Running", elapsed, "s");
        figures.whole("bind rate", count as f64 / binding, "/s");
        figures.each(POD_CPU, spent * 1e3 / count as f64, "ms");
        figures.each("simulation's CPU per pod", simulation, "ms");
        figures.latencies(["create pod, p50", "create pod, p99"], answered);
        figures.latencies(["event after the answer, p50", "event after the answer, p99"], event);
        figures.latencies(["create to bound, p50", "create to bound, p99"], bound);
        figures.latencies(["create to Running, p50", "create to Running, p99"], ran);
        self.memory()
    }

    fn memory(&mut self) -> Result<()> {
        let mib = f64::from(1 << 20);
        let server = self.server.memory()? as f64 / mib;
        self.figures.whole("server's own memory", server, "MiB");
        self.figures.whole("simulation's RSS", self.simulator.resident()? as f64 / mib, "MiB");
        Ok(())
    }

    async fn read(&mut self) -> Result<()> {
        let count = self.plan.pods;
        let begun = self.mark().await?;
        let times = times(
            self.fleet,
            (0..READS)
                .map(|index| Question::get(&format!("{PODS}/pod-{:06}", index * 7919 % count))),
        )
        .await?;
        let spent = self.spent(begun).await?;
        self.figures.each("server CPU per get", spent * 1e3 / READS as f64, "ms");
        self.figures.latencies(["get, p50", "get, p99"], times);
        let begun = self.mark().await?;
        let mut lists = Vec::new();
        for _ in 0..LISTS {
            let started = wait::now();
            get(self.fleet, &format!("{PODS}?limit=500")).await?;
            lists.push(started.elapsed());
        }
        let spent = self.spent(begun).await?;
        self.figures.each("server CPU per list of 500", spent * 1e3 / LISTS as f64, "ms");
        self.figures.latencies(["list of 500, p50", "list of 500, p99"], lists);
        Ok(())
    }

    /// Deployments with a pod for each node, all changed at once.
    async fn roll_out(&mut self) -> Result<()> {
        let replicas = (self.plan.nodes / ROLLOUTS).max(1);
        let total = replicas * ROLLOUTS;
        let begun = self.mark().await?;
        created(self.fleet, ROLLOUTS, DEPLOYMENTS, |index| deployment(index, replicas)).await?;
        until("Deployments are available", || self.count_updated(), total).await?;
        let elapsed = begun.0.elapsed().as_secs_f64();
        let spent = self.spent(begun).await?;
        self.figures.whole("10 Deployments, a pod per node in all, available", elapsed, "s");
        self.figures.each("server CPU per pod of a Deployment", spent * 1e3 / total as f64, "ms");
        let begun = self.mark().await?;
        for index in 0..ROLLOUTS {
            let template = json!({"metadata": {"annotations": {"turn": "second"}}});
            let patch = json!({"spec": {"template": template}});
            let path = format!("{DEPLOYMENTS}/roll-{index}");
            let (status, _) = self.fleet.ask(index, Question::patch(&path, &patch)).await?;
            ensure!(status == 200, "{path}: status {status}");
        }
        until("Deployments are rolled out", || self.count_updated(), total).await?;
        let elapsed = begun.0.elapsed().as_secs_f64();
        tokio::time::sleep(self.plan.depth.settle()).await;
        let spent = self.spent(begun).await?;
        self.figures.whole("all of them rolled out", elapsed, "s");
        self.figures.each("server CPU per pod rolled out", spent * 1e3 / total as f64, "ms");
        Ok(())
    }

    /// Pods of the newest templates that are available, where nothing else is left.
    async fn count_updated(&self) -> Result<usize> {
        let list = get(self.fleet, DEPLOYMENTS).await?;
        let items = list["items"].as_array().context("a list")?;
        Ok(items
            .iter()
            .map(|one| {
                let number = |field: &str| one["status"][field].as_u64().unwrap_or(0);
                let seen = one["status"]["observedGeneration"] == one["metadata"]["generation"];
                let whole = number("replicas") == number("updatedReplicas");
                if seen && whole {
                    number("availableReplicas").min(number("updatedReplicas")) as usize
                } else {
                    0
                }
            })
            .sum())
    }

    /// A pod for each node, bare ones: nothing replaces them.
    async fn evict(&mut self) -> Result<()> {
        let count = self.plan.nodes.min(1000);
        let begun = self.mark().await?;
        let eviction = |index: usize| {
            let name = format!("pod-{index:06}");
            let body = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": "default"}});
            Question::post(&format!("{PODS}/{name}/eviction"), &body)
        };
        let times = times(self.fleet, (0..count).map(eviction)).await?;
        until(
            "evicted pods are gone",
            || async {
                let (status, _) = self
                    .fleet
                    .ask(0, Question::get(&format!("{PODS}/pod-{:06}", count - 1)))
                    .await?;
                Ok(usize::from(status == 404))
            },
            1,
        )
        .await?;
        tokio::time::sleep(self.plan.depth.settle()).await;
        let spent = self.spent(begun).await?;
        self.figures.each("server CPU per eviction", spent * 1e3 / count as f64, "ms");
        self.figures.latencies(["evict, p50", "evict, p99"], times);
        Ok(())
    }

    /// A tenth of the nodes falls silent at once and comes back when all are not ready.
    async fn fail(&mut self) -> Result<()> {
        let failing = (self.plan.nodes / 10).max(1);
        let begun = self.mark().await?;
        let asked = wait::now();
        self.say(failing, json!("silent")).await?;
        let probe = self.probe(self.nodes_become("Unknown", failing));
        let mut late = probe.await?;
        let unknown = asked.elapsed().as_secs_f64();
        let asked = wait::now();
        self.say(failing, Value::Null).await?;
        let nodes = self.plan.nodes;
        let probe = self.probe(self.nodes_become("True", nodes));
        late.extend(probe.await?);
        let back = asked.elapsed().as_secs_f64();
        tokio::time::sleep(self.plan.depth.settle()).await;
        let spent = self.spent(begun).await?;
        self.figures.whole("a tenth of the nodes fails: all of them NotReady", unknown, "s");
        self.figures.whole("they come back: all of them Ready", back, "s");
        self.figures.each(
            "server CPU per node that failed and came back",
            spent * 1e3 / failing as f64,
            "ms",
        );
        self.figures.latencies(["get meanwhile, p50", "get meanwhile, p99"], late);
        Ok(())
    }

    async fn say(&self, count: usize, mode: Value) -> Result<()> {
        let patch = json!({"metadata": {"annotations": {"decapod.io/simulate": mode}}});
        let asked =
            (0..count).map(|index| Question::patch(&format!("{NODES}/sim-{index:05}"), &patch));
        times(self.fleet, asked).await.map(drop)
    }

    /// How long single gets take while something else happens.
    async fn probe(&self, work: impl Future<Output = Result<()>>) -> Result<Vec<Duration>> {
        let mut times = Vec::new();
        tokio::pin!(work);
        let mut pace = tokio::time::interval(LOOK / 4);
        loop {
            tokio::select! {
                done = &mut work => return done.map(|()| times),
                _ = pace.tick() => {}
            }
            let started = wait::now();
            let (status, _) = self.fleet.ask(1, Question::get("/api/v1/nodes/sim-00000")).await?;
            ensure!(status == 200, "status {status}");
            times.push(started.elapsed());
        }
    }

    async fn end(&mut self) -> Result<()> {
        tokio::time::sleep(self.plan.depth.settle()).await;
        self.rest("server CPU at rest, in the end", "simulation's CPU at rest, in the end").await
    }
}

/// When a pod was seen first, with a node, and Running.
#[derive(Default)]
struct Life {
    added: Option<Instant>,
    bound: Option<Instant>,
    running: Option<Instant>,
}

#[derive(Deserialize)]
struct Event<T> {
    object: T,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Pod {
    metadata: Meta,
    spec: Spec,
    status: Status,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Node {
    metadata: Meta,
    spec: NodeSpec,
    status: NodeStatus,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct NodeSpec {
    #[serde(rename = "podCIDR")]
    pod_cidr: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct NodeStatus {
    conditions: Vec<Condition>,
}

#[derive(Deserialize)]
struct Condition {
    r#type: String,
    status: String,
}

impl Node {
    fn is(&self, ready: &str) -> bool {
        let mut conditions = self.status.conditions.iter();
        !self.spec.pod_cidr.is_empty()
            && conditions.any(|one| one.r#type == "Ready" && one.status == ready)
    }
}

/// A watch, cut at newlines.
struct Lines {
    body: Incoming,
    /// Bytes after the last newline.
    rest: Vec<u8>,
}

impl Lines {
    fn new(body: Incoming) -> Self {
        Self { body, rest: Vec::new() }
    }

    /// The lines that end with what comes next.
    async fn next(&mut self) -> Result<Vec<Vec<u8>>> {
        let frame = self.body.frame().await.context("the watch ended")??;
        let Some(data) = frame.data_ref() else { return Ok(Vec::new()) };
        self.rest.extend_from_slice(data);
        let Some(end) = self.rest.iter().rposition(|byte| *byte == b'\n') else {
            return Ok(Vec::new());
        };
        let lines = self.rest[..end].split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
        self.rest.drain(..=end);
        Ok(lines)
    }
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Meta {
    name: String,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    node_name: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Status {
    phase: String,
}

/// Follows a watch until so many pods run.
async fn follow(watch: Incoming, count: usize) -> Result<HashMap<String, Life>> {
    let (mut lives, mut watch) = (HashMap::<String, Life>::new(), Lines::new(watch));
    let mut running = 0;
    while running < count {
        let lines = watch.next().await?;
        let now = wait::now();
        for line in lines {
            let Event { object }: Event<Pod> = serde_json::from_slice(&line)?;
            let life = lives.entry(object.metadata.name).or_default();
            life.added.get_or_insert(now);
            if !object.spec.node_name.is_empty() {
                life.bound.get_or_insert(now);
            }
            if object.status.phase == "Running" && life.running.is_none() {
                life.running = Some(now);
                running += 1;
            }
        }
    }
    Ok(lives)
}

/// Creates objects, many at a time: by name, when each was sent and answered.
async fn created(
    fleet: &Fleet,
    count: usize,
    path: &str,
    make: impl Fn(usize) -> Value,
) -> Result<Vec<(String, (Instant, Instant))>> {
    let asked = (0..count).map(|index| {
        let body = make(index);
        let name = body["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        async move {
            let sent = wait::now();
            let (status, body) = fleet.ask(index, Question::post(path, &body)).await?;
            ensure!(status < 300, "status {status}: {}", String::from_utf8_lossy(&body));
            Ok((name, (sent, wait::now())))
        }
    });
    let mut answers = futures::stream::iter(asked).buffer_unordered(WRITERS);
    let mut all = Vec::with_capacity(count);
    while let Some(answer) = answers.next().await {
        all.push(answer?);
    }
    Ok(all)
}

/// How long each question takes, many at a time.
async fn times(fleet: &Fleet, questions: impl Iterator<Item = Question>) -> Result<Vec<Duration>> {
    let asked = questions.enumerate().map(|(index, question)| async move {
        let started = wait::now();
        let (status, body) = fleet.ask(index, question).await?;
        ensure!(status < 300, "status {status}: {}", String::from_utf8_lossy(&body));
        Ok(started.elapsed())
    });
    let mut answers = futures::stream::iter(asked).buffer_unordered(WRITERS);
    let mut all = Vec::new();
    while let Some(time) = answers.next().await {
        all.push(time?);
    }
    Ok(all)
}

async fn get(fleet: &Fleet, path: &str) -> Result<Value> {
    let (status, body) = fleet.ask(0, Question::get(path)).await?;
    ensure!(status == 200, "{path}: status {status}");
    Ok(serde_json::from_slice(&body)?)
}

async fn version_of(fleet: &Fleet, path: &str) -> Result<String> {
    let list = get(fleet, &format!("{path}?limit=1")).await?;
    Ok(list["metadata"]["resourceVersion"].as_str().context("a resource version")?.to_owned())
}

/// Asks until a count is reached.
async fn until<F: Future<Output = Result<usize>>>(
    what: &str,
    ask: impl Fn() -> F,
    wanted: usize,
) -> Result<()> {
    let started = wait::now();
    let mut pace = tokio::time::interval(LOOK);
    pace.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        pace.tick().await;
        let found = ask().await?;
        if found >= wanted {
            return Ok(());
        }
        ensure!(started.elapsed() < LIMIT, "{what}: {found} of {wanted} after {LIMIT:?}");
    }
}

fn deployment(index: usize, replicas: usize) -> Value {
    let name = format!("roll-{index}");
    let labels = json!({"roll": name});
    let container = json!({"name": "main", "image": "registry.example.com/app:1",
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}}});
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
        "spec": {"replicas": replicas, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}}},
    })
}
