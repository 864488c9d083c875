//! What affinity and spreading say by the counts that are kept is what they would say if they looked at
//! every pod, on random clusters whose pods, nodes and namespaces come, change and go.
//!
//! The recount below is the definition: it knows no index. A failure names the seed and the step.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use base::rng::below;
use serde_json::{Value, from_value, json};

use super::PLUGINS;
use crate::cluster::{Cluster, WhatIf};
use crate::config::Args;
use crate::framework::{CycleState, ExtensionPoints, Handle, Next};
use crate::node::{NodeInfo, tolerates_all};
use crate::pod::{PodInfo, Spread, Template, Term};

const SEEDS: u64 = 40;
const STEPS: usize = 120;
const HARD_WEIGHT: i64 = 3;
const KEYS: [&str; 4] = ["zone", "rack", "kubernetes.io/hostname", "nowhere"];
const SPACES: [&str; 3] = ["one", "two", "three"];

fn pick<T: Copy>(all: &[T]) -> T {
    all[below(all.len() as u64) as usize]
}

fn maybe(percent: u64) -> bool {
    below(100) < percent
}

fn some<T>(make: impl Fn() -> T) -> Vec<T> {
    (0..pick(&[0, 0, 0, 1, 1, 2])).map(|_| make()).collect()
}

fn selector() -> Value {
    match below(5) {
        0 => json!({"matchLabels": {"app": pick(&["a", "b", "c"])}}),
        1 => json!({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["a"]}]}),
        2 => json!({"matchLabels": {"app": "a", "tier": "x"}}),
        3 => json!({"matchExpressions": [{"key": "tier", "operator": "Exists"}]}),
        _ => json!({}),
    }
}

fn term() -> Value {
    let mut term = json!({"topologyKey": pick(&KEYS), "labelSelector": selector()});
    if maybe(30) {
        term["namespaces"] = json!([pick(&SPACES)]);
    }
    if maybe(30) {
        term["namespaceSelector"] = json!({"matchLabels": {"team": pick(&["x", "y"])}});
    }
    term
}

fn preferred() -> Value {
    json!({"weight": pick(&[1, 10]), "podAffinityTerm": term()})
}

fn constraint() -> Value {
    json!({"maxSkew": pick(&[1, 2]), "topologyKey": pick(&KEYS[..3]), "labelSelector": selector(),
        "whenUnsatisfiable": pick(&["DoNotSchedule", "ScheduleAnyway"]),
        "nodeAffinityPolicy": pick(&["Honor", "Ignore"]),
        "nodeTaintsPolicy": pick(&["Honor", "Ignore"]), "minDomains": pick(&[1, 4])})
}

fn labels() -> Value {
    let mut labels = json!({"app": pick(&["a", "b", "c"])});
    if maybe(50) {
        labels["tier"] = pick(&["x", "y"]).into();
    }
    labels
}

fn pod(uid: u64) -> PodInfo {
    const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
    const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";
    let mut pod = json!({"metadata": {"name": format!("p{uid}"), "uid": format!("p{uid}"),
            "namespace": pick(&SPACES), "labels": labels()},
        "spec": {"containers": [{"name": "c"}], "affinity": {
            "podAffinity": {REQUIRED: some(term), PREFERRED: some(preferred)},
            "podAntiAffinity": {REQUIRED: some(term), PREFERRED: some(preferred)}},
            "topologySpreadConstraints": some(constraint)}});
    if maybe(30) {
        pod["spec"]["nodeSelector"] = json!({"zone": pick(&["a", "b"])});
    }
    if maybe(30) {
        pod["spec"]["tolerations"] = json!([{"key": "t", "operator": "Exists"}]);
    }
    if maybe(10) {
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    }
    PodInfo::new(&from_value(pod).expect("a pod"))
}

fn node(name: &str) -> Value {
    let mut labels = json!({});
    for (key, values) in [("zone", ["a", "b", "c"]), ("rack", ["1", "2", "3"])] {
        if maybe(85) {
            labels[key] = pick(&values).into();
        }
    }
    if maybe(90) {
        // Two nodes may have one name there.
        labels["kubernetes.io/hostname"] = if maybe(90) { name } else { "shared" }.into();
    }
    let taints = json!([{"key": "t", "effect": pick(&["NoSchedule", "PreferNoSchedule"])}]);
    let taints = if maybe(20) { taints } else { json!([]) };
    json!({"metadata": {"name": name, "labels": labels}, "spec": {"taints": taints}})
}

fn name() -> String {
    format!("n{}", below(9))
}

/// Something happens.
fn step(cluster: &mut Cluster) {
    let uid = below(30);
    match below(20) {
        0..4 => cluster.update_node(&from_value(node(&name())).expect("a node")),
        4 => cluster.remove_node(&name()),
        5..12 => cluster.put_pod(Arc::new(PodInfo { node_name: name(), ..pod(uid) })),
        12..14 => cluster.assume(&pod(uid), &name()),
        14 => {
            let known = cluster.nodes().find_map(|node| node.pods.get(&format!("p{uid}")));
            let Some(pod) = known.map(|pod| PodInfo::clone(pod)) else { return };
            let changed = match maybe(50) {
                true => PodInfo { deleting: true, ..pod },
                false => {
                    let labels = self::pod(uid).labels.clone();
                    let template = Template { labels, ..Template::clone(&pod.template) };
                    PodInfo { template: Arc::new(template), ..pod }
                }
            };
            cluster.put_pod(Arc::new(changed));
        }
        15 => drop(cluster.forget(&format!("p{uid}"))),
        16..19 => cluster.remove_pod(&format!("p{uid}")),
        _ => {
            let labels = BTreeMap::from([("team".into(), pick(&["x", "y"]).into())]);
            let labels = Some(labels).filter(|_| maybe(80));
            drop(cluster.set_namespace(pick(&SPACES).into(), labels));
        }
    }
}

/// The cluster with some node's pods changed.
fn what_if(cluster: &Cluster) -> Option<WhatIf> {
    let nodes: Vec<&NodeInfo> = cluster.nodes().collect();
    let last = nodes.len().checked_sub(1)? as u64;
    let node = nodes[below(last + 1) as usize];
    let mut other = cluster.what_if(node);
    if let Some((uid, pod)) = node.pods.first_key_value().filter(|_| maybe(70)) {
        other.remove(uid);
        if maybe(30) {
            other.add(pod.clone());
        }
    }
    if maybe(70) {
        other.add(Arc::new(pod(100)));
    }
    if maybe(20) {
        other.remove("p100");
    }
    Some(other)
}

fn plugin(name: &str) -> ExtensionPoints {
    let service = tower::service_fn(async |_: http::Request<kube::client::Body>| {
        let body = http_body_util::Full::<bytes::Bytes>::default();
        Ok::<_, std::convert::Infallible>(http::Response::new(body))
    });
    let args = Args { hard_pod_affinity_weight: HARD_WEIGHT, ..Args::default() };
    let client = client::Client::new(service, "test");
    let handle = Handle { client, volumes: None, objects: None, args };
    let row = PLUGINS.iter().find(|row| row.name == name).expect("a plugin");
    (row.build)(&handle)
}

/// What a plugin says of each node: why not, and the score.
fn said(
    points: &ExtensionPoints,
    pod: &PodInfo,
    cluster: &Cluster,
) -> BTreeMap<String, (String, i64)> {
    let nodes: Vec<&NodeInfo> = cluster.nodes().collect();
    let mut state = CycleState::default();
    let before = points.pre_filter.as_ref().expect("it filters");
    let next = before.pre_filter(&mut state, pod, cluster).expect("it cannot fail");
    let scores = points.pre_score.as_ref().expect("it scores");
    let scored = scores.pre_score(&mut state, pod, cluster, &nodes) == Next::Filter;
    let of = |node: &&NodeInfo| {
        let filter = points.filter.as_ref().filter(|_| next == Next::Filter);
        let why = filter.map_or(Ok(()), |one| one.filter(&state, pod, node));
        let why = why.err().map(|why| why.reasons.join(", ")).unwrap_or_default();
        let score = points.score.as_ref().filter(|_| scored);
        let score = score.map_or(0, |one| one.score(&state, pod, node, cluster));
        (node.name.clone(), (why, score))
    };
    nodes.iter().map(of).collect()
}

type Counts = HashMap<(String, String), i64>;

fn count(counts: &mut Counts, node: &NodeInfo, key: &str, by: i64) {
    if let Some(value) = node.labels.get(key) {
        *counts.entry((key.into(), value.clone())).or_default() += by;
    }
}

fn at(counts: &Counts, node: &NodeInfo, key: &str) -> i64 {
    let value = node.labels.get(key).cloned().unwrap_or_default();
    counts.get(&(key.into(), value)).copied().unwrap_or(0)
}

fn all_at(counts: &Counts, node: &NodeInfo) -> i64 {
    let here = counts.iter().filter(|((key, value), _)| node.labels.get(key) == Some(value));
    here.map(|(_, count)| *count).sum()
}

/// Counts of required affinity, of required anti-affinity, of others' anti-affinity, and scores.
fn neighbours(pod: &PodInfo, cluster: &Cluster) -> [Counts; 4] {
    let [mut near, mut far, mut repelling, mut scores] =
        [const { Counts::new }; 4].map(|new| new());
    let spaces = cluster.namespaces();
    for (node, other) in cluster.nodes().flat_map(|node| node.pods.values().map(move |p| (node, p)))
    {
        for term in other.anti_affinity.iter().filter(|term| term.matches(pod, spaces)) {
            count(&mut repelling, node, &term.topology_key, 1);
        }
        if pod.affinity.iter().all(|term| term.matches(other, spaces)) {
            for term in &pod.affinity {
                count(&mut near, node, &term.topology_key, 1);
            }
        }
        for term in pod.anti_affinity.iter().filter(|term| term.matches(other, spaces)) {
            count(&mut far, node, &term.topology_key, 1);
        }
        let mut add = |term: &Term, subject: &PodInfo, weight: i64| {
            if term.matches(subject, spaces) {
                count(&mut scores, node, &term.topology_key, weight);
            }
        };
        for (carrier, subject) in [(pod, &**other), (other, pod)] {
            for (weight, term) in &carrier.preferred_affinity {
                add(term, subject, i64::from(*weight));
            }
            for (weight, term) in &carrier.preferred_anti_affinity {
                add(term, subject, -i64::from(*weight));
            }
        }
        other.affinity.iter().for_each(|term| add(term, pod, HARD_WEIGHT));
    }
    [near, far, repelling, scores]
}

fn affinity(pod: &PodInfo, cluster: &Cluster) -> BTreeMap<String, (String, i64)> {
    let [near, far, repelling, scores] = neighbours(pod, cluster);
    let of = |node: &NodeInfo| {
        let mut terms = pod.affinity.iter();
        let has_labels = terms.clone().all(|term| node.labels.contains_key(&term.topology_key));
        let is_first =
            near.is_empty() && terms.clone().all(|term| term.matches(pod, cluster.namespaces()));
        let is_near = terms.all(|term| at(&near, node, &term.topology_key) > 0);
        let repelled = pod.anti_affinity.iter().any(|term| at(&far, node, &term.topology_key) > 0);
        let why = match () {
            () if !(has_labels && (is_near || is_first)) => {
                "node(s) didn't match pod affinity rules"
            }
            () if repelled => "node(s) didn't match pod anti-affinity rules",
            () if all_at(&repelling, node) > 0 => {
                "node(s) didn't satisfy existing pods anti-affinity rules"
            }
            () => "",
        };
        (node.name.clone(), (why.into(), all_at(&scores, node)))
    };
    cluster.nodes().map(of).collect()
}

fn matching(spread: &Spread, pod: &PodInfo, node: &NodeInfo) -> i64 {
    if spread.selector.is_everything() {
        return 0;
    }
    let same = |other: &&Arc<PodInfo>| {
        !other.deleting
            && other.key.namespace == pod.key.namespace
            && spread.selector.matches(Some(&other.labels))
    };
    node.pods.values().filter(same).count() as i64
}

/// Matching pods by topology value, of the nodes that take part.
fn domains(
    spread: &Spread,
    all: &[&Spread],
    pod: &PodInfo,
    cluster: &Cluster,
) -> BTreeMap<String, i64> {
    let mut counts = BTreeMap::new();
    for node in cluster.nodes() {
        let mut hard = node.taints.iter().filter(|taint| taint.effect != "PreferNoSchedule");
        let takes_part = all.iter().all(|one| node.labels.contains_key(&one.topology_key))
            && (!spread.honors_affinity || pod.selects(&node.name, &node.labels))
            && (!spread.honors_taints || tolerates_all(&pod.tolerations, hard.by_ref()));
        if takes_part {
            let value = node.labels[&spread.topology_key].clone();
            *counts.entry(value).or_default() += matching(spread, pod, node);
        }
    }
    counts
}

fn spreading(pod: &PodInfo, cluster: &Cluster) -> BTreeMap<String, (String, i64)> {
    let (hard, soft): (Vec<&Spread>, Vec<&Spread>) = pod.spread.iter().partition(|one| one.hard);
    let of = |node: &NodeInfo| {
        let mut why = "";
        for spread in &hard {
            if !why.is_empty() {
                break;
            }
            let counts = domains(spread, &hard, pod, cluster);
            let enough = counts.len() as i32 >= spread.min_domains;
            let least = if enough { counts.values().min().copied().unwrap_or(0) } else { 0 };
            let itself = i64::from(spread.selector.matches(Some(&pod.labels)));
            let here = |value: &String| counts.get(value).copied().unwrap_or(0);
            match node.labels.get(&spread.topology_key).map(here) {
                None => {
                    why = "node(s) didn't match pod topology spread constraints (missing required label)";
                }
                Some(here) if here + itself - least > i64::from(spread.max_skew) => {
                    why = "node(s) didn't match pod topology spread constraints";
                }
                Some(_) => {}
            }
        }
        let scored =
            |node: &&NodeInfo| soft.iter().all(|one| node.labels.contains_key(&one.topology_key));
        let mut score = 0.0;
        for spread in &soft {
            let Some(value) = node.labels.get(&spread.topology_key) else { continue };
            let is_host = spread.topology_key == KEYS[2];
            let all: Vec<_> = cluster.nodes().filter(scored).collect();
            let values = all.iter().map(|node| &node.labels[&spread.topology_key]);
            let values: std::collections::BTreeSet<_> = values.collect();
            let (size, here) = match is_host {
                true => (all.len(), matching(spread, pod, node)),
                false => {
                    let counts = domains(spread, &soft, pod, cluster);
                    (values.len(), counts.get(value).copied().unwrap_or(0))
                }
            };
            score += here as f64 * (size as f64 + 2.0).ln() + f64::from(spread.max_skew - 1);
        }
        let score = if scored(&node) { score.round() as i64 } else { -1 };
        (node.name.clone(), (why.to_owned(), score))
    };
    cluster.nodes().map(of).collect()
}

#[tokio::test(start_paused = true)]
async fn counts_that_are_kept_are_those_of_a_recount() {
    for seed in 0..SEEDS {
        let _world = base::sim::enter(seed);
        let (near, spread) = (plugin("InterPodAffinity"), plugin("PodTopologySpread"));
        // The pods that are asked again were counted before the change.
        let asked: Vec<PodInfo> = (0..6).map(|uid| pod(200 + uid)).collect();
        let mut cluster = Cluster::default();
        for at in 0..STEPS {
            step(&mut cluster);
            assert_eq!(cluster.count(), cluster.nodes().count(), "seed {seed}, step {at}");
            let other = what_if(&cluster);
            let what_if = other.as_ref().map(WhatIf::cluster);
            for cluster in [&cluster].into_iter().chain(what_if) {
                let one = &asked[below(asked.len() as u64) as usize];
                let place = format!("seed {seed}, step {at}");
                assert_eq!(said(&near, one, cluster), affinity(one, cluster), "{place}");
                // One without constraints is not scored at all.
                if !one.spread.is_empty() {
                    assert_eq!(said(&spread, one, cluster), spreading(one, cluster), "{place}");
                }
            }
        }
    }
}
