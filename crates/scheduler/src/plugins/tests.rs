//! Decisions of the whole framework on small clusters.

use std::sync::Arc;

use base::task::Tasks;
use http::{Request, Response};
use http_body_util::Full;
use serde_json::{Value, from_value, json};

use super::PLUGINS;
use crate::cluster::Cluster;
use crate::framework::{Framework, Handle};
use crate::pod::PodInfo;

/// A framework whose client is never used.
fn framework() -> Framework {
    let service = tower::service_fn(async |_: Request<kube::client::Body>| {
        Ok::<_, std::convert::Infallible>(Response::new(Full::<bytes::Bytes>::default()))
    });
    let _ = Tasks::new("unused");
    Framework::new(PLUGINS, &Handle { client: client::Client::new(service, "test"), volumes: None })
}

fn node(name: &str, extra: Value) -> Value {
    let mut node = json!({"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "spec": {}, "status": {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "110"}}});
    merge(&mut node, extra);
    node
}

fn pod(name: &str, extra: Value) -> PodInfo {
    let mut pod = json!({"metadata": {"name": name, "namespace": "default", "uid": name, "labels": {"app": "web"}},
        "spec": {"containers": [{"name": "c", "image": "i"}]}});
    merge(&mut pod, extra);
    PodInfo::new(&from_value(pod).unwrap())
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

fn cluster(nodes: &[Value], pods: &[(PodInfo, &str)]) -> Cluster {
    let mut cluster = Cluster::default();
    for node in nodes {
        cluster.update_node(&from_value(node.clone()).unwrap());
    }
    for (pod, node) in pods {
        cluster.put_pod(Arc::new(PodInfo { node_name: (*node).into(), ..pod.clone() }));
    }
    cluster
}

fn cpu(amount: &str) -> Value {
    json!({"spec": {"containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": amount}}}]}})
}

#[tokio::test]
async fn a_pod_goes_where_it_fits_best() {
    let framework = framework();
    let check =
        |what: &str, pod: PodInfo, nodes: &[Value], pods: &[(PodInfo, &str)], expected: &str| {
            let cluster = cluster(nodes, pods);
            match framework.schedule(&pod, &cluster) {
                Ok(node) => assert_eq!(node, expected, "{what}"),
                Err(diagnosis) => assert_eq!(diagnosis.to_string(), expected, "{what}"),
            }
        };
    let (a, b) = (node("a", json!({})), node("b", json!({})));
    let two = [a.clone(), b.clone()];
    let plain = || pod("p", json!({}));
    check("no node", plain(), &[], &[], "no nodes available to schedule pods");
    check("the emptier", plain(), &two, &[(pod("x", cpu("3")), "a")], "b");
    check("too big", pod("p", cpu("5")), &two, &[], "0/2 nodes are available: 2 Insufficient cpu.");
    check(
        "a selector",
        pod("p", json!({"spec": {"nodeSelector": {"kubernetes.io/hostname": "a"}}})),
        &two,
        &[],
        "a",
    );
    let tainted = node("a", json!({"spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}}));
    let cordoned = node("b", json!({"spec": {"unschedulable": true}}));
    let why = "0/2 nodes are available: 1 node(s) had untolerated taint(s), 1 node(s) were unschedulable.";
    check("taints", plain(), &[tainted.clone(), cordoned], &[], why);
    let tolerant = json!({"spec": {"tolerations": [{"key": "k", "operator": "Exists"}]}});
    check("tolerations", pod("p", tolerant), &[tainted], &[], "a");
    let port = json!({"spec": {"containers": [{"name": "c", "image": "i", "ports": [{"containerPort": 80, "hostPort": 80}]}]}});
    let taken = [(pod("x", port.clone()), "a")];
    check("host ports", pod("p", port.clone()), &two, &taken, "b");
    check(
        "host ports",
        pod("p", port),
        std::slice::from_ref(&a),
        &taken,
        "0/1 nodes are available: 1 node(s) didn't have free ports for the requested pod ports.",
    );
    let image = node(
        "b",
        json!({"status": {"images": [{"names": ["i:latest"], "sizeBytes": 900_000_000_i64}]}}),
    );
    check("images", plain(), &[a, image], &[], "b");
}

#[tokio::test]
async fn pods_attract_and_repel_each_other() {
    let framework = framework();
    let term = json!([{"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "web"}}}]);
    let near = json!({"spec": {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term}}}});
    let far = json!({"spec": {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term}}}});
    let spread = json!({"spec": {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "web"}}}]}});
    let two = [node("a", json!({})), node("b", json!({}))];
    let on_a = [(pod("x", json!({})), "a")];
    let check = |what: &str, pod: PodInfo, pods: &[(PodInfo, &str)], expected: &str| {
        let found =
            framework.schedule(&pod, &cluster(&two, pods)).unwrap_or_else(|why| why.to_string());
        assert_eq!(found, expected, "{what}");
    };
    check("near", pod("p", near.clone()), &on_a, "a");
    check("far", pod("p", far.clone()), &on_a, "b");
    check(
        "an existing pod keeps others away",
        pod("p", json!({})),
        &[(pod("x", far.clone()), "a")],
        "b",
    );
    let both = [(pod("x", json!({})), "a"), (pod("y", json!({})), "b")];
    check(
        "far from both",
        pod("p", far),
        &both,
        "0/2 nodes are available: 2 node(s) didn't match pod anti-affinity rules.",
    );
    check("spread", pod("p", spread), &on_a, "b");
    let stranger = pod("x", json!({"metadata": {"labels": {"app": "db"}}}));
    let lonely = json!({"metadata": {"labels": {"app": "db"}}, "spec": near["spec"]});
    check(
        "near nobody",
        pod("p", lonely),
        &[(stranger, "a")],
        "0/2 nodes are available: 2 node(s) didn't match pod affinity rules.",
    );
    let first = framework.schedule(&pod("p", near), &cluster(&two, &[]));
    assert!(first.is_ok(), "the first of its kind goes anywhere");
}

#[tokio::test]
async fn the_important_take_room_from_as_few_as_possible() {
    let framework = framework();
    let with = |amount: &str, priority: i32| {
        let mut extra = cpu(amount);
        extra["spec"]["priority"] = priority.into();
        extra
    };
    let pods = [
        (pod("low", with("2", 1)), "a"),
        (pod("middle", with("2", 5)), "a"),
        (pod("other", with("4", 7)), "b"),
    ];
    let cluster = cluster(&[node("a", json!({})), node("b", json!({}))], &pods);
    let check = |important: PodInfo, node: Option<&str>, victims: &[&str], message: &str| {
        let why = framework.schedule(&important, &cluster).expect_err("full");
        let outcome = framework.post_filter(&important, &cluster, &why).expect("a plugin");
        let names: Vec<_> = outcome.victims.iter().map(|one| one.uid.clone()).collect();
        assert_eq!((outcome.nominated.as_deref(), outcome.message.as_str()), (node, message));
        assert_eq!(names, victims);
    };
    check(pod("p", with("2", 10)), Some("a"), &["low"], "");
    check(pod("p", with("3", 10)), Some("a"), &["middle", "low"], "");
    let nobody =
        "preemption: 0/2 nodes are available: 2 No preemption victims found for incoming pod.";
    check(pod("p", with("2", 0)), None, &[], nobody);
}
