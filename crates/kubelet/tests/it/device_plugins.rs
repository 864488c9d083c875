//! Device plugins: from registration, over pods that use their devices, to the plugin's end.

use std::path::PathBuf;

use prost::Message;
use serde_json::{Value, json};

use crate::device_plugin::{Plugin, RESOURCE, ask, register};
use crate::pods::{Bench, container_id};

const OK: &str = "Healthy";
const ILL: &str = "Unhealthy";

fn root(bench: &Bench) -> PathBuf {
    bench.dir.path().join("kubelet")
}

/// Containers that request these numbers of devices.
fn asking(init: u32, main: u32) -> Value {
    let container = |name: &str, count: u32| {
        let amounts = json!({RESOURCE: count.to_string()});
        json!({"name": name, "image": "img:1", "env": [{"name": "OWN", "value": "$(DONGLE)"}],
            "resources": {"limits": amounts.clone(), "requests": amounts}})
    };
    let mut spec = json!({"restartPolicy": "Always", "terminationGracePeriodSeconds": 30,
        "containers": [container("c", main)]});
    if init > 0 {
        spec["initContainers"] = json!([container("i", init)]);
    }
    spec
}

fn amounts(api: &crate::api::Api) -> (Value, Value) {
    let status = api.get("/api/v1/nodes/n1").unwrap_or_default()["status"].clone();
    (status["capacity"][RESOURCE].clone(), status["allocatable"][RESOURCE].clone())
}

async fn until_amounts(bench: &Bench, capacity: &str, allocatable: &str) {
    let expected = (json!(capacity), json!(allocatable));
    bench.api.until(&format!("{expected:?}"), |api| amounts(api) == expected).await;
}

async fn until_listening(bench: &Bench) {
    let socket = root(bench).join("device-plugins/kubelet.sock");
    bench.api.until("a socket", |_| std::os::unix::net::UnixStream::connect(&socket).is_ok()).await;
}

async fn until_refused(bench: &Bench, pod: &str, why: &str) {
    bench.until_phase(pod, "Failed").await;
    let status = bench.api.pod(pod)["status"].clone();
    let message = format!("Pod was rejected: Allocate failed due to {why}, which is unexpected");
    assert_eq!(
        (&status["reason"], &status["message"]),
        (&json!("UnexpectedAdmissionError"), &json!(message))
    );
}

#[tokio::test]
async fn a_pod_gets_devices_of_a_plugin() {
    let mut bench = Bench::new();
    until_listening(&bench).await;
    let refused = register(&root(&bench), "v2", RESOURCE).await.expect_err("a wrong version");
    assert_eq!(
        refused,
        "requested API version \"v2\" is not supported by kubelet. Supported version is [\"v1beta1\"]"
    );
    let refused = register(&root(&bench), "v1beta1", "dongle").await.expect_err("a wrong name");
    assert_eq!(refused, "the ResourceName \"dongle\" is invalid");
    let plugin = Plugin::new(&root(&bench), &[("a", OK), ("b", OK), ("c", ILL)]);
    assert_eq!(plugin.register().await, Ok(()));
    until_amounts(&bench, "3", "2").await;

    bench.api.put_pod("p", asking(0, 1));
    bench.until_ready("p").await;
    assert_eq!(plugin.calls(), ["Allocate b", "PreStart b"], "the plugin's choice");
    let config = bench.runtime.container_config(&container_id(&bench.api.pod("p"))).expect("one");
    let env: Vec<(&str, &[u8])> =
        config.envs.iter().map(|one| (one.key.as_str(), &one.value[..])).collect();
    assert!(env.contains(&("DONGLE", b"b")), "{env:?}");
    let device = &config.devices[0];
    assert_eq!(
        (device.container_path.as_str(), device.host_path.as_str()),
        ("/dev/b", "/dev/null")
    );
    assert_eq!(config.cdi_devices[0].name, format!("{RESOURCE}=b"));
    assert_eq!(config.annotations["dongle"], "b");
    assert!(config.mounts.iter().any(|mount| mount.container_path == "/lib/dongle"));

    // Too many; the plugin refuses; devices of init containers are reused.
    bench.api.put_pod("many", asking(0, 2));
    let why = format!(
        "requested number of devices unavailable for {RESOURCE}. Requested: 2, Available: 1"
    );
    until_refused(&bench, "many", &why).await;
    plugin.refuse(true);
    bench.api.put_pod("unlucky", asking(0, 1));
    until_refused(&bench, "unlucky", "rpc error: code = Unknown desc = refused").await;
    plugin.refuse(false);
    bench.api.put_pod("q", asking(1, 1));
    bench.api.until("its init container runs", |_| bench.count("start_container") == 2).await;
    assert_eq!(plugin.calls().iter().filter(|call| *call == "Allocate a").count(), 3);
    bench.api.mark_deleted("q", 1);
    bench.api.until("gone", |api| api.pod("q").is_null()).await;

    // Health: in the node's status, and in the container's.
    plugin.lists(&[("a", OK), ("b", ILL)]);
    until_amounts(&bench, "2", "1").await;
    let ill = json!([{"name": RESOURCE, "resources": [{"resourceID": "b", "health": ILL}]}]);
    let told =
        |pod: &Value| pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"].clone();
    bench.api.until("its device is unhealthy", |api| told(&api.pod("p")) == ill).await;
    bench.stop().await;
}

/// A scheduler that sees that a pod is over may give its devices to the next one at once.
#[tokio::test]
async fn a_pods_devices_are_free_once_it_is_over() {
    let mut bench = Bench::new();
    until_listening(&bench).await;
    let plugin = Plugin::new(&root(&bench), &[("a", OK)]);
    plugin.register().await.expect("registered");
    until_amounts(&bench, "1", "1").await;
    let mut job = asking(0, 1);
    job["restartPolicy"] = json!("Never");
    bench.api.put_pod("p", job);
    bench.until_ready("p").await;
    let told =
        |pod: &Value| pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"].clone();
    let well = json!([{"name": RESOURCE, "resources": [{"resourceID": "a", "health": OK}]}]);
    // The rest of the stop takes its time.
    bench.runtime.fail("stop_pod_sandbox", Some(cri::Error::Internal("busy".into())));
    bench.runtime.exit(&container_id(&bench.api.pod("p")), 0);
    bench.until_phase("p", "Succeeded").await;
    bench.api.put_pod("q", asking(0, 1));
    bench.until_ready("q").await;
    bench.runtime.fail("stop_pod_sandbox", None);
    assert_eq!(told(&bench.api.pod("p")), well, "its devices stay in the status");
    bench.stop().await;
}

/// A pod that is force-deleted disappears from the API before it ends.
#[tokio::test]
async fn the_next_pod_waits_for_a_terminating_one() {
    let mut bench = Bench::new();
    until_listening(&bench).await;
    let plugin = Plugin::new(&root(&bench), &[("a", OK)]);
    plugin.register().await.expect("registered");
    until_amounts(&bench, "1", "1").await;
    bench.api.put_pod("p", asking(0, 1));
    bench.until_ready("p").await;
    bench.api.put_pod("other", asking(0, 1));
    let why = format!(
        "requested number of devices unavailable for {RESOURCE}. Requested: 1, Available: 0"
    );
    until_refused(&bench, "other", &why).await;
    bench.runtime.fail("stop_pod_sandbox", Some(cri::Error::Internal("busy".into())));
    bench.api.remove("/api/v1/namespaces/ns/pods/p");
    bench.api.put_pod("q", asking(0, 1));
    let stopping = |_: &crate::api::Api| bench.count("stop_pod_sandbox") > 1;
    bench.api.until("the runtime is asked again", stopping).await;
    assert_eq!(bench.api.pod("q")["status"]["phase"], "Pending");
    bench.runtime.fail("stop_pod_sandbox", None);
    bench.until_ready("q").await;
    assert_eq!(plugin.calls(), ["Allocate a", "PreStart a", "Allocate a", "PreStart a"]);
    bench.stop().await;
}

#[tokio::test]
async fn a_silent_plugin_does_not_delay_a_deletion() {
    let mut bench = Bench::new();
    until_listening(&bench).await;
    let plugin = Plugin::new(&root(&bench), &[("a", OK)]);
    plugin.hang();
    plugin.register().await.expect("registered");
    until_amounts(&bench, "1", "1").await;
    bench.api.put_pod("p", asking(0, 1));
    bench.api.until("it is asked", |_| plugin.calls().len() == 2).await;
    bench.api.mark_deleted("p", 1);
    bench.api.until("gone", |api| api.pod("p").is_null()).await;
    let events = bench.api.events();
    assert!(!events.iter().any(|(reason, _)| reason == "Failed"), "no call timed out: {events:?}");
    bench.stop().await;
}

#[tokio::test]
async fn allocations_survive_a_restart() {
    let mut bench = Bench::new();
    until_listening(&bench).await;
    let plugin = Plugin::new(&root(&bench), &[("a", OK), ("b", OK)]);
    plugin.register().await.expect("registered");
    until_amounts(&bench, "2", "2").await;
    bench.api.put_pod("p", asking(0, 1));
    bench.until_ready("p").await;
    let id = container_id(&bench.api.pod("p"));

    bench.stop().await;
    drop(plugin);
    bench.start();
    until_amounts(&bench, "0", "0").await;
    bench.api.put_pod("early", asking(0, 1));
    let why = format!("no healthy devices present; cannot allocate unhealthy devices {RESOURCE}");
    until_refused(&bench, "early", &why).await;
    assert_eq!(container_id(&bench.api.pod("p")), id, "it still runs");
    until_listening(&bench).await;
    // The kubelet removed the plugin's socket.
    let plugin = Plugin::new(&root(&bench), &[("a", OK), ("b", OK)]);
    plugin.register().await.expect("registered again");
    until_amounts(&bench, "2", "2").await;
    bench.api.put_pod("q", asking(0, 1));
    bench.until_ready("q").await;
    assert_eq!(plugin.calls(), ["Allocate a", "PreStart a"], "the other one is allocated");

    // A plugin that stops leaves its capacity for a while.
    drop(plugin);
    until_amounts(&bench, "2", "0").await;
    // A freed device is available for the next pod.
    std::fs::remove_file(root(&bench).join("device-plugins/dongle.sock")).expect("removed");
    let plugin = Plugin::new(&root(&bench), &[("a", OK), ("b", OK)]);
    plugin.register().await.expect("registered again");
    until_amounts(&bench, "2", "2").await;
    bench.api.mark_deleted("p", 1);
    bench.api.until("gone", |api| api.pod("p").is_null()).await;
    bench.api.put_pod("r", asking(0, 1));
    bench.until_ready("r").await;
    assert_eq!(plugin.calls(), ["Allocate b", "PreStart b"]);
    bench.stop().await;
}

#[tokio::test]
async fn a_plugin_registers_in_the_drivers_directory() {
    let mut bench = Bench::new();
    until_listening(&bench).await;
    let registry = root(&bench).join("plugins_registry");
    bench.api.until("the registry", |_| registry.exists()).await;
    let plugin = Plugin::new(&root(&bench), &[("a", OK)]);
    plugin.show_itself();
    until_amounts(&bench, "1", "1").await;
    plugin.hide();
    until_amounts(&bench, "1", "0").await;
    bench.stop().await;
}

#[derive(Clone, PartialEq, Message)]
struct Devices {
    #[prost(string, tag = "1")]
    resource: String,
    #[prost(string, repeated, tag = "2")]
    ids: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Container {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, repeated, tag = "2")]
    devices: Vec<Devices>,
}

#[derive(Clone, PartialEq, Message)]
struct Pod {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    namespace: String,
    #[prost(message, repeated, tag = "3")]
    containers: Vec<Container>,
}

/// The answer of List and of Get.
#[derive(Clone, PartialEq, Message)]
struct Pods {
    #[prost(message, repeated, tag = "1")]
    pods: Vec<Pod>,
}

#[derive(Clone, PartialEq, Message)]
struct Allocatable {
    #[prost(message, repeated, tag = "1")]
    devices: Vec<Devices>,
}

#[tokio::test]
async fn the_pod_resources_api_lists_devices() {
    let mut bench = Bench::new();
    until_listening(&bench).await;
    let plugin = Plugin::new(&root(&bench), &[("a", OK), ("b", OK), ("c", ILL)]);
    plugin.register().await.expect("registered");
    until_amounts(&bench, "3", "2").await;
    bench.api.put_pod("p", asking(0, 1));
    bench.until_ready("p").await;
    let socket = root(&bench).join("pod-resources/kubelet.sock");
    let of = |ids: &[&str]| -> Vec<Devices> {
        let one = |id: &&str| Devices { resource: RESOURCE.into(), ids: vec![id.to_string()] };
        ids.iter().map(one).collect()
    };
    let pod = Pod {
        name: "p".into(),
        namespace: "ns".into(),
        containers: vec![Container { name: "c".into(), devices: of(&["b"]) }],
    };
    // The first two fields of Get's request are name and namespace, like those of a pod.
    let named = |name: &str| Pod { name: name.into(), ..pod.clone() };
    let named = |name: &str| Pod { containers: vec![], ..named(name) }.encode_to_vec();
    for (path, request) in [
        ("/v1.PodResourcesLister/List", vec![]),
        ("/v1alpha1.PodResourcesLister/List", vec![]),
        ("/v1.PodResourcesLister/Get", named("p")),
    ] {
        let answer = ask(&socket, path, &request).await.expect(path);
        assert_eq!(Pods::decode(answer).expect(path).pods, std::slice::from_ref(&pod), "{path}");
    }
    let refused = ask(&socket, "/v1.PodResourcesLister/Get", &named("x")).await;
    assert_eq!(refused, Err("pod x in namespace ns not found".into()));
    let answer = ask(&socket, "/v1.PodResourcesLister/GetAllocatableResources", &[]).await;
    let answer = Allocatable::decode(answer.expect("an answer")).expect("devices");
    assert_eq!(answer.devices, of(&["a", "b"]));
    bench.stop().await;
}
