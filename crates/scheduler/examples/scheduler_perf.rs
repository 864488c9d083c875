//! Decisions per second, in the shapes of upstream's scheduler_perf.
//!
//! `cargo run --release -p decapod-scheduler --example scheduler_perf [SHAPE…]` prints a table. Each shape fills a cluster, then
//! decides about more pods of the same kind, one after the other as the scheduler does, each placed
//! before the next. The API is not part of it: these are the decisions alone, on one core. "µs CPU" is the
//! processor time of a decision: it is the same on a busy machine.
//!
//! Upstream: `test/integration/scheduler_perf`, whose templates of nodes and pods these are.

use std::time::Duration;

use decapod_scheduler::cluster::Cluster;
use decapod_scheduler::config::{Args, ConfigError, Profile};
use decapod_scheduler::framework::{Framework, Handle};
use decapod_scheduler::plugins::PLUGINS;
use decapod_scheduler::pod::PodInfo;
use nix::sys::resource::{UsageWho, getrusage};
use serde_json::{Value, from_value, json};
use tokio::time::Instant;

const SIZES: [usize; 2] = [1000, 5000];
/// Pods that are there beforehand, per node.
const BEFORE: usize = 1;
const MEASURED: usize = 1000;
const ZONE: &str = "topology.kubernetes.io/zone";
const HOST: &str = "kubernetes.io/hostname";

/// A kind of pod: what is added to the plain one, before and measured.
struct Shape {
    name: &'static str,
    before: fn() -> Value,
    measured: fn() -> Value,
    /// Pods per node beforehand.
    density: usize,
    /// What each pod asks for, before and measured.
    cpu: [&'static str; 2],
}

fn plain() -> Value {
    json!({})
}

fn term(key: &str) -> Value {
    json!({"topologyKey": key, "labelSelector": {"matchLabels": {"color": "green"}}})
}

fn required(kind: &str, key: &str) -> Value {
    let terms = json!([term(key)]);
    json!({"affinity": {kind: {"requiredDuringSchedulingIgnoredDuringExecution": terms}}})
}

fn preferred(kind: &str, key: &str) -> Value {
    let terms = json!([{"weight": 1, "podAffinityTerm": term(key)}]);
    json!({"affinity": {kind: {"preferredDuringSchedulingIgnoredDuringExecution": terms}}})
}

fn spread(when: &str) -> Value {
    json!({"topologySpreadConstraints": [{"maxSkew": 5, "topologyKey": ZONE,
        "whenUnsatisfiable": when, "labelSelector": {"matchLabels": {"color": "green"}}}]})
}

const SMALL: [&str; 2] = ["100m", "100m"];

const SHAPES: &[Shape] = &[
    Shape { name: "SchedulingBasic", before: plain, measured: plain, density: BEFORE, cpu: SMALL },
    Shape {
        name: "SchedulingPodAntiAffinity",
        before: || json!({}),
        measured: || required("podAntiAffinity", HOST),
        density: 0,
        cpu: SMALL,
    },
    Shape {
        name: "SchedulingPodAffinity",
        before: || required("podAffinity", ZONE),
        measured: || required("podAffinity", ZONE),
        density: BEFORE,
        cpu: SMALL,
    },
    Shape {
        name: "SchedulingPreferredPodAffinity",
        before: || preferred("podAffinity", HOST),
        measured: || preferred("podAffinity", HOST),
        density: BEFORE,
        cpu: SMALL,
    },
    Shape {
        name: "SchedulingPreferredPodAntiAffinity",
        before: || preferred("podAntiAffinity", HOST),
        measured: || preferred("podAntiAffinity", HOST),
        density: BEFORE,
        cpu: SMALL,
    },
    Shape {
        name: "TopologySpreading",
        before: plain,
        measured: || spread("DoNotSchedule"),
        density: BEFORE,
        cpu: SMALL,
    },
    Shape {
        name: "PreferredTopologySpreading",
        before: plain,
        measured: || spread("ScheduleAnyway"),
        density: BEFORE,
        cpu: SMALL,
    },
    Shape {
        name: "PreemptionBasic",
        before: plain,
        measured: || json!({"priority": 10}),
        density: 4,
        cpu: ["900m", "3000m"],
    },
];

fn main() {
    let wanted: Vec<String> =
        std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime else { return eprintln!("no runtime") };
    let _entered = runtime.enter();
    println!("| shape | nodes | decisions/s | µs CPU | median | p99 |\n|---|---|---|---|---|---|");
    for shape in
        SHAPES.iter().filter(|one| wanted.is_empty() || wanted.iter().any(|w| w == one.name))
    {
        for nodes in SIZES {
            measure(shape, nodes);
        }
    }
}

fn framework() -> Result<Framework, ConfigError> {
    let service = tower::service_fn(async |_: http::Request<kube::client::Body>| {
        let body = http_body_util::Full::<bytes::Bytes>::default();
        Ok::<_, std::convert::Infallible>(http::Response::new(body))
    });
    let handle = Handle {
        client: client::Client::new(service, "bench"),
        volumes: None,
        objects: None,
        args: Args::default(),
    };
    Framework::new(PLUGINS, &Profile::default(), &handle)
}

fn pod(name: &str, cpu: &str, extra: &Value) -> Option<PodInfo> {
    let mut pod = json!({"metadata": {"name": name, "namespace": "default", "uid": name,
        "labels": {"color": "green"}}, "spec": {"containers": [{"name": "pause", "image": "pause",
        "resources": {"requests": {"cpu": cpu, "memory": "500Mi"}}}]}});
    for (key, value) in extra.as_object().into_iter().flatten() {
        pod["spec"][key] = value.clone();
    }
    from_value(pod).ok().map(|pod| PodInfo::new(&pod))
}

fn cluster(nodes: usize) -> Cluster {
    let mut cluster = Cluster::default();
    for index in 0..nodes {
        let name = format!("node-{index}");
        let node = json!({"metadata": {"name": name, "labels": {HOST: name,
            ZONE: format!("zone-{}", index % 10)}}, "status": {"allocatable":
            {"cpu": "4", "memory": "32Gi", "pods": "110"}}});
        if let Ok(node) = from_value(node) {
            cluster.update_node(&node);
        }
    }
    cluster
}

fn measure(shape: &Shape, nodes: usize) {
    let framework = match framework() {
        Ok(framework) => framework,
        Err(why) => return eprintln!("{why}"),
    };
    let mut cluster = cluster(nodes);
    let extra = (shape.before)();
    for index in 0..nodes * shape.density {
        let name = format!("before-{index}");
        let Some(pod) = pod(&name, shape.cpu[0], &extra) else { return };
        let node = format!("node-{}", index % nodes);
        let pod = cluster.shared(PodInfo { node_name: node, ..pod });
        cluster.put_pod(pod);
    }
    let extra = (shape.measured)();
    let pods = (0..MEASURED.min(nodes))
        .filter_map(|index| pod(&format!("pod-{index}"), shape.cpu[1], &extra));
    let pods: Vec<PodInfo> = pods.collect();
    let mut times: Vec<Duration> = vec![];
    let (begun, used) = (Instant::now(), used());
    for pod in &pods {
        let started = Instant::now();
        let placed = decide(&framework, &mut cluster, pod);
        times.push(started.elapsed());
        if !placed || begun.elapsed() > Duration::from_secs(60) {
            break;
        }
    }
    report(shape.name, nodes, times, self::used() - used);
}

/// The processor time of this process in microseconds.
fn used() -> i64 {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else { return 0 };
    let micros = |time: nix::sys::time::TimeVal| time.tv_sec() * 1_000_000 + time.tv_usec();
    micros(usage.user_time()) + micros(usage.system_time())
}

/// One decision, with what follows from it: the pod placed, or its victims gone and then it placed.
fn decide(framework: &Framework, cluster: &mut Cluster, pod: &PodInfo) -> bool {
    let why = match framework.schedule(pod, cluster) {
        Ok(node) => {
            cluster.assume(pod, &node);
            return true;
        }
        Err(why) => why,
    };
    let outcome = framework.post_filter(pod, cluster, &why);
    for victim in &outcome.victims {
        cluster.remove_pod(&victim.uid);
    }
    match outcome.nominated {
        Some(node) => {
            cluster.assume(pod, &node);
            true
        }
        None => {
            eprintln!("{why} {}", outcome.message);
            false
        }
    }
}

fn report(name: &str, nodes: usize, mut times: Vec<Duration>, used: i64) {
    times.sort_unstable();
    let Some(last) = times.len().checked_sub(1) else { return };
    let total: Duration = times.iter().sum();
    let rate = times.len() as f64 / total.as_secs_f64();
    let micros = |time: Duration| time.as_micros();
    let (median, late) = (times[last / 2], times[last * 99 / 100]);
    let (median, late, used) = (micros(median), micros(late), used / times.len() as i64);
    println!("| {name} | {nodes} | {rate:.0} | {used} | {median} µs | {late} µs |");
}
