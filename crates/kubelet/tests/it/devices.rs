//! DRA: from a driver's registration to the last pod's end.

use serde_json::{Value, json};

use crate::driver::{Driver, NAME};
use crate::pods::{Bench, container_id};

const CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims";

/// A claim that pods with these uids may use.
fn put_claim(bench: &Bench, name: &str, pods: &[&str]) {
    let users: Vec<Value> =
        pods.iter().map(|uid| json!({"resource": "pods", "name": uid, "uid": uid})).collect();
    let results = json!([{"request": "r1", "driver": NAME, "pool": "pool", "device": "d1"}]);
    let claim = json!({"metadata": {"name": name, "namespace": "ns", "uid": format!("uid-{name}")},
        "spec": {}, "status": {"reservedFor": users, "allocation": {"devices": {"results": results}}}});
    bench.api.put(&format!("{CLAIMS}/{name}"), claim);
}

fn containers(claims: &[&str]) -> Value {
    let claims: Vec<Value> = claims.iter().map(|name| json!({"name": name})).collect();
    json!({"restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "containers": [
        {"name": "c", "image": "img:1", "resources": {"claims": claims,
            "limits": {"example.com/gpu": "1"}, "requests": {"example.com/gpu": "1"}}}]})
}

fn put_pod(bench: &Bench, name: &str, mut spec: Value, mut status: Value) {
    spec["nodeName"] = "n1".into();
    status["phase"] = "Pending".into();
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "spec": spec, "status": status,
        "metadata": {"name": name, "namespace": "ns", "uid": name}});
    bench.api.put(&format!("/api/v1/namespaces/ns/pods/{name}"), pod);
}

async fn registered(bench: &Bench, driver: &Driver) {
    let registry = bench.dir.path().join("kubelet/plugins_registry");
    bench.api.until("the registry", |_| registry.exists()).await;
    driver.register();
    bench.api.until("registered", |_| driver.told().contains(&(true, String::new()))).await;
}

fn devices(bench: &Bench, pod: &str) -> Vec<String> {
    let config = bench.runtime.container_config(&container_id(&bench.api.pod(pod)));
    let config = config.expect("a container");
    config.cdi_devices.into_iter().map(|device| device.name).collect()
}

#[tokio::test]
async fn containers_get_the_devices_of_their_requests() {
    let mut bench = Bench::new();
    let driver = Driver::of_devices(&bench.dir.path().join("kubelet"));
    // Extended resources: found by the mappings of the scheduler.
    put_claim(&bench, "a-extended", &["a"]);
    let mapping = json!({"containerName": "c", "resourceName": "example.com/gpu",
        "requestName": "r2"});
    let extended = json!({"resourceClaimName": "a-extended", "requestMappings": [mapping]});
    put_pod(&bench, "a", containers(&[]), json!({"extendedResourceClaimStatus": extended}));
    put_claim(&bench, "shared", &["b"]);
    let mut shared = containers(&["x"]);
    shared["resourceClaims"] = json!([{"name": "x", "resourceClaimName": "shared"}]);
    put_pod(&bench, "b", shared, json!({}));
    let why = format!("prepare dynamic resources: DRA driver {NAME} is not registered");
    let told = (
        "FailedPrepareDynamicResources".to_owned(),
        format!("Failed to prepare dynamic resources: {why}"),
    );
    bench.api.until("no driver yet", |api| api.events().contains(&told)).await;
    registered(&bench, &driver).await;
    bench.until_ready("a").await;
    bench.until_ready("b").await;
    assert_eq!(devices(&bench, "a"), ["example.com/gpu=d2"]);
    assert_eq!(devices(&bench, "b"), ["example.com/gpu=d1", "example.com/gpu=d2"]);
    let status = &bench.api.pod("a")["status"]["extendedResourceClaimStatus"];
    assert_eq!(
        status["resourceClaimName"], "a-extended",
        "the kubelet keeps other writers' fields"
    );

    // A restarted kubelet knows which claims it must unprepare, and by which driver.
    bench.stop().await;
    bench.start();
    bench.api.until("registered again", |_| driver.told().len() >= 2).await;
    bench.api.mark_deleted("a", 1);
    bench.api.until("gone", |api| api.pod("a").is_null()).await;
    // The other pod's claim may have been prepared again at the same time.
    let given_back = "Unprepare a-extended uid-a-extended".to_owned();
    assert!(driver.calls().contains(&given_back), "{:?}", driver.calls());
    // While a driver cannot unprepare a claim, the pod stays.
    driver.refuse("NodeUnprepareResources", Some("14"));
    bench.api.mark_deleted("b", 1);
    bench
        .api
        .until("it stops", |_| {
            bench.runtime.calls().iter().any(|c| c.starts_with("stop_pod_sandbox"))
        })
        .await;
    assert!(!bench.api.pod("b").is_null());
    driver.refuse("NodeUnprepareResources", None);
    bench.api.until("gone", |api| api.pod("b").is_null()).await;
    let unprepared = driver.calls().into_iter().filter(|call| call.starts_with("Unprepare"));
    assert_eq!(unprepared.collect::<Vec<_>>().len(), 2, "{:?}", driver.calls());
    bench.stop().await;
}
