//! Decisions that depend on claims, volumes, drivers, services and devices.

use std::time::Duration;

use base::task::Tasks;
use serde_json::{Value, json};

use super::PLUGINS;
use super::tests::{cluster, cpu, node, pod};
use crate::config::{Args, Profile};
use crate::framework::{ClusterEvent, Framework, Handle};
use crate::pod::PodInfo;
use crate::testing::lookups;

/// The default framework over an API with these objects.
async fn framework(tasks: &Tasks, collections: Vec<(&'static str, Vec<Value>)>) -> Framework {
    let found = lookups(tasks, collections).await;
    let handle = Handle {
        client: found.client,
        volumes: Some(found.volumes),
        objects: Some(found.objects),
        args: Args::default(),
    };
    Framework::new(PLUGINS, &Profile::default(), &handle).expect("the default profile")
}

/// The node of a pod, or why it has none.
fn placed(framework: &Framework, pod: &PodInfo, cluster: &crate::cluster::Cluster) -> String {
    framework.schedule(pod, cluster).unwrap_or_else(|why| why.to_string())
}

fn claim(name: &str, mode: &str, volume: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "default", "uid": name, "resourceVersion": "1",
        "annotations": {"pv.kubernetes.io/bind-completed": "yes"}},
        "spec": {"accessModes": [mode], "volumeName": volume, "storageClassName": "s"},
        "status": {"phase": "Bound"}})
}

fn volume(name: &str) -> Value {
    json!({"metadata": {"name": name, "uid": name, "resourceVersion": "1"}, "spec":
        {"csi": {"driver": "csi.example.com", "volumeHandle": name}, "storageClassName": "s"}})
}

fn mounts(claims: &[&str]) -> Value {
    let volumes: Vec<Value> = claims
        .iter()
        .map(|name| json!({"name": name, "persistentVolumeClaim": {"claimName": name}}))
        .collect();
    json!({"spec": {"volumes": volumes}})
}

#[tokio::test]
async fn a_claim_for_one_pod_is_taken_over_by_preemption_only() {
    let tasks = Tasks::new("test");
    let collections = vec![
        ("persistentvolumeclaims", vec![claim("one", "ReadWriteOncePod", "v")]),
        ("persistentvolumes", vec![volume("v")]),
    ];
    let framework = framework(&tasks, collections).await;
    let two = [node("a", json!({})), node("b", json!({}))];
    let used = cluster(&two, &[(pod("x", mounts(&["one"])), "a")]);
    let why = "0/2 nodes are available: 2 node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod access mode.";
    assert_eq!(placed(&framework, &pod("p", mounts(&["one"])), &used), why);

    let mut important = mounts(&["one"]);
    important["spec"]["priority"] = 10.into();
    let important = pod("p", important);
    let why = framework.schedule(&important, &used).expect_err("it is taken");
    let outcome = framework.post_filter(&important, &used, &why);
    assert_eq!(outcome.nominated.as_deref(), Some("a"));
    let victims: Vec<_> = outcome.victims.iter().map(|one| one.uid.as_str()).collect();
    assert_eq!(victims, ["x"]);

    let equal = pod("p", mounts(&["one"]));
    let outcome = framework.post_filter(&equal, &used, &why);
    assert_eq!(outcome.nominated, None);
    assert!(outcome.message.starts_with("no new claims to deallocate, preemption: 0/2"));
    let free = cluster(&two[..1], &[(pod("x", json!({})), "a")]);
    assert_eq!(placed(&framework, &equal, &free), "a");
    tasks.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn a_node_takes_as_many_volumes_as_its_driver_attaches() {
    let tasks = Tasks::new("test");
    let claims = ["one", "two", "three"];
    let all = claims.map(|name| claim(name, "ReadWriteMany", name)).to_vec();
    let volumes = claims.map(volume).to_vec();
    let limits = json!({"metadata": {"name": "a", "uid": "a", "resourceVersion": "1"}, "spec": {"drivers": [{"name":
        "csi.example.com", "nodeID": "a", "allocatable": {"count": 2}}]}});
    let collections = vec![
        ("persistentvolumeclaims", all),
        ("persistentvolumes", volumes),
        ("csinodes", vec![limits]),
    ];
    let framework = framework(&tasks, collections).await;
    let check = |there: &[&str], wanted: &[&str], expected: &str| {
        let one = [node("a", json!({}))];
        let cluster = cluster(&one, &[(pod("x", mounts(there)), "a")]);
        let found = placed(&framework, &pod("p", mounts(wanted)), &cluster);
        assert_eq!(found, expected, "{there:?} {wanted:?}");
    };
    let full = "0/1 nodes are available: 1 node(s) exceed max volume count.";
    check(&["one"], &["two"], "a");
    check(&["one", "two"], &["three"], full);
    check(&["one"], &["two", "three"], full);
    // Volumes that are there already are attached once.
    check(&["one", "two"], &["two"], "a");
    tasks.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn pods_of_a_service_or_a_set_are_spread_without_being_told_to() {
    let tasks = Tasks::new("test");
    let service = json!({"metadata": {"name": "s", "namespace": "default", "uid": "s", "resourceVersion": "1"},
        "spec": {"selector": {"app": "web"}}});
    let set = json!({"metadata": {"name": "r", "namespace": "default", "uid": "r", "resourceVersion": "1"},
        "spec": {"selector": {"matchLabels": {"app": "db"}}}});
    let collections = vec![("services", vec![service]), ("replicasets", vec![set])];
    let framework = framework(&tasks, collections).await;
    let two = [node("a", json!({})), node("b", json!({}))];
    let check = |labels: Value, owner: Value, expected: &str| {
        let meta = json!({"metadata": {"labels": labels, "ownerReferences": owner}});
        // The other node is fuller, but not of these.
        let mut other = cpu("1");
        other["metadata"] = json!({"labels": {"app": "other"}});
        let pods = [(pod("x", meta.clone()), "a"), (pod("y", other), "b")];
        let found = placed(&framework, &pod("p", meta), &cluster(&two, &pods));
        assert_eq!(found, expected);
    };
    let of_set = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r",
        "controller": true}]);
    check(json!({"app": "web"}), json!([]), "b");
    check(json!({"app": "db"}), of_set, "b");
    check(json!({"app": "db"}), json!([]), "a");
    tasks.shutdown(Duration::from_secs(5)).await;
}

fn slice(node: &str, devices: &[&str]) -> Value {
    let devices: Vec<Value> = devices.iter().map(|name| json!({"name": name})).collect();
    json!({"metadata": {"name": node, "uid": node, "resourceVersion": "1"}, "spec": {"driver": "d", "nodeName": node,
        "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}, "devices": devices}})
}

fn device_claim(name: &str, status: Value) -> Value {
    json!({"metadata": {"name": name, "namespace": "default", "uid": name, "resourceVersion": "1"},
        "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu"}}]}},
        "status": status})
}

fn allocated(node: &str, device: &str, users: &[&str]) -> Value {
    let users: Vec<Value> =
        users.iter().map(|name| json!({"resource": "pods", "name": name, "uid": name})).collect();
    json!({"reservedFor": users, "allocation": {"devices": {"results": [{"request": "r",
        "driver": "d", "pool": node, "device": device}]}, "nodeSelector": {"nodeSelectorTerms":
        [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]}}})
}

fn wants(claim: &str) -> PodInfo {
    pod("p", json!({"spec": {"resourceClaims": [{"name": "g", "resourceClaimName": claim}]}}))
}

#[tokio::test]
async fn pods_follow_their_claims_for_devices() {
    let tasks = Tasks::new("test");
    let class =
        json!({"metadata": {"name": "gpu", "uid": "gpu", "resourceVersion": "1"}, "spec": {}});
    let mut unknown = device_claim("unknown", json!({}));
    unknown["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = "nope".into();
    let collections = vec![
        ("deviceclasses", vec![class]),
        ("resourceslices", vec![slice("a", &["taken"]), slice("b", &["free"])]),
        (
            "resourceclaims",
            vec![
                device_claim("other", allocated("a", "taken", &["x"])),
                device_claim("new", json!({})),
                device_claim("gone", allocated("c", "far", &[])),
                unknown,
            ],
        ),
        (
            "nodes",
            vec![
                node("a", json!({"metadata": {"uid": "a", "resourceVersion": "1"}})),
                node("b", json!({"metadata": {"uid": "b", "resourceVersion": "1"}})),
            ],
        ),
    ];
    let framework = framework(&tasks, collections).await;
    let all = cluster(&[node("a", json!({})), node("b", json!({}))], &[]);
    let check = |claim: &str, expected: &str| {
        assert_eq!(placed(&framework, &wants(claim), &all), expected, "{claim}");
    };
    check("new", "b");
    check("other", "a");
    check("gone", "0/2 nodes are available: 2 resourceclaim not available on the node.");
    check("unknown", "0/2 nodes are available: request r: device class nope does not exist.");
    check("x", "0/2 nodes are available: could not find ResourceClaim \"default/x\".");
    let awaited =
        json!({"spec": {"resourceClaims": [{"name": "g", "resourceClaimTemplateName": "t"}]}});
    let why = framework.pre_enqueue(&pod("p", awaited)).expect_err("no claim yet").1;
    assert_eq!(why.reasons, ["pod \"default/p\": ResourceClaim not created yet"]);

    // An unused claim is deallocated for the pod.
    let gone = wants("gone");
    let why = framework.schedule(&gone, &all).expect_err("it is elsewhere");
    let outcome = framework.post_filter(&gone, &all, &why);
    assert!(outcome.message.starts_with("deallocation of ResourceClaim completed, preemption"));
    assert!(outcome.work.is_some());

    // What one pod is to have, another cannot.
    let new = wants("new");
    let reserved = framework.reserve(&new, "b").expect("it is free");
    check(
        "new",
        "0/2 nodes are available: resource claim default/new is in the process of being allocated.",
    );
    framework.unreserve(&reserved, &new, "b");
    check("new", "b");
    tasks.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn what_happens_to_claims_wakes_those_that_wait_for_them() {
    let tasks = Tasks::new("test");
    let framework = framework(&tasks, vec![]).await;
    let check = |claim: &str, freed: bool, changed: bool, expected: bool| {
        let claim = client::ObjectKey::new("default", claim);
        let event = ClusterEvent::ClaimChanged { claim, freed, changed };
        let is_worth =
            framework.is_worth_requeuing(&["DynamicResources"].into(), &wants("own"), &event);
        assert_eq!(is_worth, expected, "{event:?}");
    };
    check("own", false, true, true);
    check("own", false, false, false);
    check("other", false, true, false);
    check("other", true, true, true);
    tasks.shutdown(Duration::from_secs(5)).await;
}

fn gpu_class() -> Value {
    json!({"metadata": {"name": "gpu", "uid": "gpu", "resourceVersion": "1"},
        "spec": {"extendedResourceName": "example.com/gpu"}})
}

fn asks(name: &str, resource: &str, count: &str) -> PodInfo {
    let containers =
        json!([{"name": "c", "image": "i", "resources": {"requests": {resource: count}}}]);
    pod(name, json!({"spec": {"containers": containers}}))
}

#[tokio::test]
async fn extended_resources_are_devices_where_no_node_offers_them() {
    let tasks = Tasks::new("test");
    let owner = json!([{"apiVersion": "v1", "kind": "Pod", "name": "late", "uid": "late",
        "controller": true}]);
    let mut stale = device_claim("stale", json!({}));
    stale["metadata"]["ownerReferences"] = owner;
    stale["metadata"]["annotations"] =
        json!({"resource.kubernetes.io/extended-resource-claim": "true"});
    let object =
        |name: &str| node(name, json!({"metadata": {"uid": name, "resourceVersion": "1"}}));
    let collections = vec![
        ("deviceclasses", vec![gpu_class()]),
        ("resourceslices", vec![slice("b", &["one", "two"])]),
        ("resourceclaims", vec![stale]),
        ("nodes", vec![object("a"), object("b")]),
    ];
    let framework = framework(&tasks, collections).await;
    let own = node("c", json!({"status": {"allocatable": {"example.com/gpu": "1"}}}));
    let two = [node("a", json!({})), node("b", json!({}))];
    let check = |pod: &PodInfo, nodes: &[Value], expected: &str| {
        assert_eq!(placed(&framework, pod, &cluster(nodes, &[])), expected);
    };
    let one = asks("p", "example.com/gpu", "1");
    check(&one, &two, "b");
    check(&asks("p", "deviceclass.resource.kubernetes.io/gpu", "2"), &two, "b");
    check(
        &asks("p", "example.com/gpu", "3"),
        &two,
        "0/2 nodes are available: 2 cannot allocate all claims.",
    );
    check(
        &asks("p", "example.com/other", "1"),
        &two,
        "0/2 nodes are available: 2 Insufficient example.com/other.",
    );
    // A node that offers it itself needs no claim, and counts as ever.
    check(&one, &[two[0].clone(), own.clone()], "c");
    check(
        &asks("p", "example.com/gpu", "2"),
        &[own],
        "0/1 nodes are available: 1 Insufficient example.com/gpu.",
    );

    // What one pod is to have, another cannot.
    let reserved = framework.reserve(&one, "b").expect("they are free");
    let other = asks("q", "example.com/gpu", "2");
    check(&other, &two, "0/2 nodes are available: 2 cannot allocate all claims.");
    framework.unreserve(&reserved, &one, "b");
    check(&other, &two, "b");

    // What an earlier attempt left is in the way, and goes.
    let late = asks("late", "example.com/gpu", "1");
    let all = cluster(&two, &[]);
    let why = framework.schedule(&late, &all).expect_err("its claim is there");
    let text = "0/2 nodes are available: 2 cannot schedule extended resource claim.";
    assert_eq!(why.to_string(), text);
    let outcome = framework.post_filter(&late, &all, &why);
    assert!(outcome.message.starts_with("deletion of ResourceClaim completed, preemption"));
    assert!(outcome.work.is_some());
    tasks.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn a_class_wakes_those_that_it_may_stand_for() {
    let tasks = Tasks::new("test");
    let framework = framework(&tasks, vec![]).await;
    let check = |pod: &PodInfo, is_new: bool, resource: Option<&str>, expected: bool| {
        let (name, resource) = ("gpu".to_owned(), resource.map(str::to_owned));
        let event = ClusterEvent::ClassChanged { name, is_new, resource };
        let is_worth = framework.is_worth_requeuing(&["NodeResourcesFit"].into(), pod, &event);
        assert_eq!(is_worth, expected, "{event:?}");
    };
    let explicit = asks("p", "example.com/gpu", "1");
    check(&explicit, true, Some("example.com/gpu"), true);
    check(&explicit, false, Some("example.com/gpu"), true);
    check(&explicit, false, None, false);
    check(&explicit, true, Some("example.com/other"), false);
    let implicit = asks("p", "deviceclass.resource.kubernetes.io/gpu", "1");
    check(&implicit, true, None, true);
    check(&implicit, false, None, false);
    tasks.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn volumes_are_made_where_there_is_room() {
    let tasks = Tasks::new("test");
    let class = |name: &str, driver: &str| {
        json!({"metadata": {"name": name}, "provisioner": driver,
            "volumeBindingMode": "WaitForFirstConsumer"})
    };
    let driver = |name: &str, tells: bool| json!({"metadata": {"name": name}, "spec": {"storageCapacity": tells}});
    let asks = |name: &str, class: &str, size: &str| {
        json!({"metadata": {"name": name, "namespace": "default", "uid": name},
            "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": class,
                "resources": {"requests": {"storage": size}}}})
    };
    let room = |name: &str, class: &str, size: &str, zone: &str| {
        json!({"metadata": {"name": name, "namespace": "kube-system"}, "storageClassName": class,
            "capacity": size, "nodeTopology": {"matchLabels": {"zone": zone}}})
    };
    let collections = vec![
        ("storageclasses", vec![class("told", "a"), class("untold", "b"), class("other", "c")]),
        ("csidrivers", vec![driver("a", true), driver("b", false)]),
        (
            "csistoragecapacities",
            vec![room("x", "told", "1Gi", "one"), room("y", "told", "10Gi", "two")],
        ),
        (
            "persistentvolumeclaims",
            vec![
                asks("small", "told", "1Gi"),
                asks("large", "told", "5Gi"),
                asks("huge", "told", "50Gi"),
                asks("untold", "untold", "50Gi"),
                asks("other", "other", "50Gi"),
            ],
        ),
    ];
    let framework = framework(&tasks, collections).await;
    let zone = |name: &str| json!({"metadata": {"labels": {"zone": name}}});
    let check = |nodes: &[(&str, &str)], claim: &str, expected: &str| {
        let nodes: Vec<_> = nodes.iter().map(|(name, of)| node(name, zone(of))).collect();
        let cluster = cluster(&nodes, &[]);
        assert_eq!(placed(&framework, &pod("p", mounts(&[claim])), &cluster), expected, "{claim}");
    };
    let both = [("n1", "one"), ("n2", "two")];
    check(&both, "large", "n2");
    check(&both[..1], "small", "n1");
    let full = "0/2 nodes are available: 2 node(s) did not have enough free storage.";
    check(&both, "huge", full);
    check(&both[..1], "untold", "n1");
    check(&both[..1], "other", "n1");
    let row = PLUGINS.iter().find(|row| row.name == "VolumeBinding").expect("a plugin");
    assert!((row.hint)(&pod("p", mounts(&["huge"])), &ClusterEvent::RoomGrew));
    tasks.shutdown(Duration::from_secs(5)).await;
}
