//! Decisions of the whole framework on small clusters.

use std::sync::Arc;

use base::task::Tasks;
use http::{Request, Response};
use http_body_util::Full;
use serde_json::{Value, from_value, json};

use super::PLUGINS;
use crate::Config;
use crate::cluster::Cluster;
use crate::config::{Args, ConfigError, Profile};
use crate::framework::{Framework, Handle};
use crate::pod::PodInfo;

/// A framework whose client is never used.
fn of(profile: &Profile) -> Result<Framework, ConfigError> {
    let service = tower::service_fn(async |_: Request<kube::client::Body>| {
        Ok::<_, std::convert::Infallible>(Response::new(Full::<bytes::Bytes>::default()))
    });
    let _ = Tasks::new("unused");
    let handle = Handle {
        client: client::Client::new(service, "test"),
        volumes: None,
        objects: None,
        args: Args::default(),
    };
    Framework::new(PLUGINS, profile, &handle)
}

/// Upstream's default profile.
fn framework() -> Framework {
    of(&Profile::default()).expect("the default profile")
}

pub(super) fn node(name: &str, extra: Value) -> Value {
    let mut node = json!({"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "spec": {}, "status": {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "110"}}});
    merge(&mut node, extra);
    node
}

pub(super) fn pod(name: &str, extra: Value) -> PodInfo {
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

pub(super) fn cluster(nodes: &[Value], pods: &[(PodInfo, &str)]) -> Cluster {
    let mut cluster = Cluster::default();
    for node in nodes {
        cluster.update_node(&from_value(node.clone()).unwrap());
    }
    for (pod, node) in pods {
        cluster.put_pod(Arc::new(PodInfo { node_name: (*node).into(), ..pod.clone() }));
    }
    cluster
}

pub(super) fn cpu(amount: &str) -> Value {
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
async fn a_pod_goes_to_a_kubelet_that_can_do_what_it_asks_for() {
    let framework = framework();
    let rule = json!({"action": "RestartAllContainers", "exitCodes": {"operator": "In"}});
    let choosy = json!({"spec": {"containers": [{"name": "c", "image": "i",
        "restartPolicy": "Never", "restartPolicyRules": [rule]}]}});
    let able = json!({"status": {"declaredFeatures": ["RestartAllContainersOnContainerExits"]}});
    let nodes = [node("a", json!({})), node("b", able)];
    let check = |pod: Value, nodes: &[Value], expected: &str| {
        let found = framework.schedule(&self::pod("p", pod), &cluster(nodes, &[]));
        assert_eq!(found.unwrap_or_else(|why| why.to_string()), expected);
    };
    check(choosy.clone(), &nodes, "b");
    let why = "0/1 nodes are available: 1 node(s) didn't match Pod's required features.";
    check(choosy, &nodes[..1], why);
    check(json!({}), &nodes[..1], "a");
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
        let outcome = framework.post_filter(&important, &cluster, &why);
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

#[tokio::test]
async fn nobody_is_removed_for_room_that_another_waits_for() {
    let framework = framework();
    let with = |amount: &str, priority: i32| {
        let mut extra = cpu(amount);
        extra["spec"]["priority"] = priority.into();
        extra
    };
    let first = pod("first", with("2", 100));
    let check = |second: PodInfo, node: Option<&str>, victims: &[&str]| {
        let there = [(pod("big", with("2", 1)), "a"), (pod("small", with("1", 1)), "a")];
        let mut cluster = cluster(&[self::node("a", json!({}))], &there);
        cluster.nominate(&first, "a");
        let why = framework.schedule(&second, &cluster).expect_err("full");
        let outcome = framework.post_filter(&second, &cluster, &why);
        let mut names: Vec<_> = outcome.victims.iter().map(|one| one.uid.clone()).collect();
        names.sort_unstable();
        assert_eq!(outcome.nominated.as_deref(), node);
        assert_eq!(names, victims);
    };
    // Beside the first there is no room even if all others go.
    check(pod("second", with("3", 100)), None, &[]);
    // There is if both go, though one would do without the first.
    check(pod("second", with("2", 100)), Some("a"), &["big", "small"]);
    // The more important need not mind.
    check(pod("second", with("3", 101)), Some("a"), &["big"]);
}

/// What becomes of a file's only profile.
fn of_file(text: &str) -> Result<Framework, ConfigError> {
    let head = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n";
    let config = Config::parse(&format!("{head}{text}"))?;
    of(&config.profiles[0])
}

#[tokio::test]
async fn a_users_profile_means_what_it_says() {
    let framework = of_file(
        "
profiles:
- schedulerName: default-scheduler
  plugins:
    score:
      enabled:
      - name: NodeResourcesBalancedAllocation
        weight: 2
      - name: NodeResourcesFit
        weight: 1
      - name: InterPodAffinity
        weight: 2
      - name: ImageLocality
        weight: 1
      disabled:
      - name: NodeResourcesLeastAllocated
  pluginConfig:
  - name: NodeResourcesFit
    args:
      scoringStrategy:
        type: MostAllocated
        resources:
        - name: cpu
          weight: 1
        - name: memory
          weight: 1
",
    )
    .expect("the profile");
    let expected = [
        ("NodeResourcesBalancedAllocation", 2),
        ("NodeResourcesFit", 1),
        ("InterPodAffinity", 2),
        ("ImageLocality", 1),
        ("TaintToleration", 3),
        ("NodeAffinity", 2),
        ("PodTopologySpread", 2),
    ];
    assert_eq!(framework.weights(), expected);
    let even = json!({"spec": {"containers": [{"name": "c", "image": "i",
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}}}]}});
    let two = [node("a", json!({})), node("b", json!({}))];
    let used = cluster(&two, &[(pod("x", even.clone()), "a")]);
    let fuller = framework.schedule(&pod("p", even.clone()), &used);
    assert_eq!(fuller.map_err(|why| why.to_string()), Ok("a".into()));
    let emptier = self::framework().schedule(&pod("p", even), &used);
    assert_eq!(emptier.map_err(|why| why.to_string()), Ok("b".into()));
}

#[tokio::test]
async fn what_upstream_refuses_is_refused() {
    let check = |text: &str, expected: &str| {
        let found = of_file(text).map(drop).err().map(|why| why.0).unwrap_or_default();
        assert_eq!(found, expected, "{text}");
    };
    let plugins = |rest: &str| format!("profiles: [{{plugins: {{{rest}}}}}]\n");
    check(&plugins("score: {disabled: [{name: Nobody}]}"), "");
    let unknown = "ScorePlugin \"Nobody\" does not exist";
    check(&plugins("score: {enabled: [{name: Nobody}]}"), unknown);
    let unknown = "PreFilterPlugin \"Nobody\" does not exist";
    check(&plugins("multiPoint: {enabled: [{name: Nobody}]}"), unknown);
    let fit = |args: &str| {
        format!("profiles: [{{pluginConfig: [{{name: NodeResourcesFit, args: {{{args}}}}}]}}]\n")
    };
    let scoring = |text: &str| fit(&format!("scoringStrategy: {{{text}}}"));
    let refused = |why: &str| format!("initializing plugin \"NodeResourcesFit\": {why}");
    let known = "\"LeastAllocated\", \"MostAllocated\", \"RequestedToCapacityRatio\"";
    check(
        &scoring("type: Best"),
        &refused(&format!(
            "scoringStrategy.type: Unsupported value: \"Best\": supported values: {known}"
        )),
    );
    check(
        &scoring("type: MostAllocated, resources: [{name: cpu, weight: 101}]"),
        &refused(
            "scoringStrategy.resources[0].weight: Invalid value: 101: resource weight of cpu not in valid range (0, 100]",
        ),
    );
    let ratio = "scoringStrategy.requestedToCapacityRatio";
    check(
        &scoring("type: RequestedToCapacityRatio"),
        &refused(&format!(
            "{ratio}: Required value: must be specified when type is RequestedToCapacityRatio"
        )),
    );
    check(
        &scoring(
            "type: RequestedToCapacityRatio, requestedToCapacityRatio: {shape: [{utilization: 5, score: 11}, {utilization: 5}]}",
        ),
        &refused(&format!(
            "[{ratio}.shape[1].utilization: Invalid value: 5: values must be sorted in increasing order, {ratio}.shape[0].score: Invalid value: 11: not in valid range [0, 10]]"
        )),
    );
    check(
        &fit("ignoredResourceGroups: [a.com/b]"),
        &refused(
            "ignoredResourceGroups[0]: Invalid value: \"a.com/b\": resource group name can't contain '/'",
        ),
    );
    let other = "plugin \"NodeName\" does not extend ScorePlugin plugin";
    check(&plugins("score: {enabled: [{name: NodeName}]}"), other);
    check(
        &plugins("bind: {disabled: [{name: '*'}]}"),
        "at least one bind plugin is needed for profile with scheduler name \"default-scheduler\"",
    );
    check(
        &plugins("queueSort: {disabled: [{name: '*'}]}"),
        "only one queue sort plugin required for profile with scheduler name \"default-scheduler\", but got 0",
    );
}

#[tokio::test]
async fn disks_are_not_shared() {
    let framework = framework();
    let disk = |kind: &str, disk: Value| json!({"spec": {"volumes": [{"name": "v", kind: disk}]}});
    let aws = disk("awsElasticBlockStore", json!({"volumeID": "d"}));
    let gce = |read_only| disk("gcePersistentDisk", json!({"pdName": "d", "readOnly": read_only}));
    let check = |there: Value, wanted: Value, expected: &str| {
        let one = [node("a", json!({}))];
        let cluster = cluster(&one, &[(pod("x", there), "a")]);
        let found = framework.schedule(&pod("p", wanted), &cluster);
        assert_eq!(found.unwrap_or_else(|why| why.to_string()), expected);
    };
    let taken = "0/1 nodes are available: 1 node(s) had no available disk.";
    check(aws.clone(), aws.clone(), taken);
    check(gce(false), gce(true), taken);
    check(gce(true), gce(true), "a");
    check(aws, gce(false), "a");
}
