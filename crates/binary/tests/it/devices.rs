//! Extended resources of a DeviceClass, on a whole control plane: a pod that requests one gets a claim, a
//! node and its mappings; quotas count it once; the claim is deleted with the pod.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testkit::http::{ApiClient, Connection};
use testkit::wait;

use crate::support::{LONG, Server};

const JSON: (&str, &str) = ("Content-Type", "application/json");
const MERGE: (&str, &str) = ("Content-Type", "application/merge-patch+json");
const NAMESPACE: &str = "/api/v1/namespaces/default";
const CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims";

struct World {
    api: ApiClient,
    connection: Connection,
}

impl World {
    fn create(&mut self, path: &str, object: &Value) -> Result<Value> {
        let text = object.to_string();
        let answer = self.connection.send("POST", path, &[JSON], text.as_bytes())?;
        ensure!(answer.status == 201, "{path}: {}", answer.body);
        Ok(serde_json::from_str(&answer.body)?)
    }

    fn patch(&mut self, path: &str, patch: &Value) -> Result<()> {
        let text = patch.to_string();
        let answer = self.connection.send("PATCH", path, &[MERGE], text.as_bytes())?;
        ensure!(answer.status == 200, "{path}: {}", answer.body);
        Ok(())
    }

    fn get(&self, path: &str) -> Result<Value> {
        let answer = self.api.get(path, LONG)?;
        ensure!(answer.status == 200, "{path}: {}", answer.body);
        Ok(serde_json::from_str(&answer.body)?)
    }

    /// Waits until an object satisfies a condition; returns it.
    fn until(&self, path: &str, is_so: impl Fn(&Value) -> bool) -> Result<Value> {
        wait::until(LONG, path, || {
            let object = self.get(path)?;
            ensure!(is_so(&object), "{object}");
            Ok(object)
        })
    }

    /// A node with two devices, and no other resources.
    fn prepare(&mut self) -> Result<()> {
        self.create("/api/v1/nodes", &json!({"metadata": {"name": "n1"}}))?;
        let allocatable = json!({"cpu": "4", "memory": "8Gi", "pods": "110"});
        let ready = json!([{"type": "Ready", "status": "True", "reason": "KubeletReady",
            "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
        let status = json!({"status": {"allocatable": allocatable, "capacity": allocatable,
            "conditions": ready}});
        self.patch("/api/v1/nodes/n1/status", &status)?;
        // The pods stay, although the node sends no heartbeats.
        self.patch("/api/v1/nodes/n1", &json!({"spec": {"taints": null}}))?;
        let class = json!({"metadata": {"name": "gpu"},
            "spec": {"extendedResourceName": "example.com/gpu"}});
        self.create("/apis/resource.k8s.io/v1/deviceclasses", &class)?;
        let slice = json!({"metadata": {"name": "n1"}, "spec": {"driver": "d.example",
            "nodeName": "n1", "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "one"}, {"name": "two"}]}});
        self.create("/apis/resource.k8s.io/v1/resourceslices", &slice)?;
        let hard = json!({"pods": "9", "requests.example.com/gpu": "9",
            "gpu.deviceclass.resource.k8s.io/devices": "9",
            "count/resourceclaims.resource.k8s.io": "9"});
        let quota = json!({"metadata": {"name": "q"}, "spec": {"hard": hard}});
        self.create(&format!("{NAMESPACE}/resourcequotas"), &quota)?;
        let counted = |quota: &Value| quota["status"]["used"]["pods"] == "0";
        self.until(&format!("{NAMESPACE}/resourcequotas/q"), counted)?;
        Ok(())
    }

    fn pod(&mut self, name: &str, gpus: &str) -> Result<Value> {
        let container = |name: &str, count: &str| {
            let resources = json!({"limits": {"example.com/gpu": count}});
            json!({"name": name, "image": "i", "resources": resources})
        };
        let tolerations = json!([{"operator": "Exists"}]);
        let spec = json!({"containers": [container("c", gpus)], "tolerations": tolerations,
            "initContainers": [container("i", "1")]});
        let pod = json!({"metadata": {"name": name}, "spec": spec});
        self.create(&format!("{NAMESPACE}/pods"), &pod)
    }
}

#[test]
fn a_pod_gets_devices_for_its_extended_resources() -> Result<()> {
    let server = Server::start(&[])?;
    let api = server.api()?;
    let mut world = World { connection: Connection::new(api.clone(), LONG), api };
    world.prepare()?;
    let uid = world.pod("a", "2")?["metadata"]["uid"].clone();
    let bound = |pod: &Value| pod["spec"]["nodeName"] == "n1";
    let pod = world.until(&format!("{NAMESPACE}/pods/a"), bound)?;
    let claims = world.get(CLAIMS)?["items"].clone();
    let claim = claims.get(0).context("a claim")?;
    let name = claim["metadata"]["name"].as_str().context("a name")?.to_owned();
    ensure!(name.starts_with("a-extended-resources-"), "{name}");
    let annotation = "resource.kubernetes.io/extended-resource-claim";
    ensure!(claim["metadata"]["annotations"][annotation] == "true", "{claim}");
    let owner = json!([{"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": uid,
        "controller": true}]);
    ensure!(claim["metadata"]["ownerReferences"] == owner, "{claim}");
    let exactly = json!({"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 2});
    let requests = json!([{"name": "container-1-request-0", "exactly": exactly}]);
    ensure!(claim["spec"]["devices"]["requests"] == requests, "{claim}");
    ensure!(claim["status"]["reservedFor"][0]["uid"] == uid, "{claim}");
    let devices = &claim["status"]["allocation"]["devices"]["results"];
    ensure!(devices.as_array().is_some_and(|all| all.len() == 2), "{claim}");
    let mapping = |container: &str| {
        json!({"containerName": container, "resourceName": "example.com/gpu",
            "requestName": "container-1-request-0"})
    };
    let status =
        json!({"resourceClaimName": name, "requestMappings": [mapping("c"), mapping("i")]});
    ensure!(pod["status"]["extendedResourceClaimStatus"] == status, "{pod}");

    // The quota counts the pod and its claim once.
    let quota = format!("{NAMESPACE}/resourcequotas/q");
    let used = json!({"pods": "1", "requests.example.com/gpu": "2",
        "gpu.deviceclass.resource.k8s.io/devices": "2",
        "count/resourceclaims.resource.k8s.io": "1"});
    world.until(&quota, |quota| quota["status"]["used"] == used)?;

    // Another pod waits until the first is done, because its claim is deleted then.
    world.pod("b", "1")?;
    let waits = |pod: &Value| {
        let text = "0/1 nodes are available: 1 cannot allocate all claims.";
        let told = pod["status"]["conditions"][0]["message"].as_str().unwrap_or_default();
        told.starts_with(text)
    };
    world.until(&format!("{NAMESPACE}/pods/b"), waits)?;
    let done = json!({"status": {"phase": "Succeeded"}});
    world.patch(&format!("{NAMESPACE}/pods/a/status"), &done)?;
    world.until(&format!("{NAMESPACE}/pods/b"), bound)?;
    let is_second = |claims: &Value| {
        let all = claims["items"].as_array().cloned().unwrap_or_default();
        let starts = |claim: &Value| {
            let name = claim["metadata"]["name"].as_str().unwrap_or_default();
            name.starts_with("b-extended-resources-")
        };
        all.len() == 1 && all.iter().all(starts)
    };
    world.until(CLAIMS, is_second)?;
    Ok(())
}
