//! The cloud-controller-manager with its provider `metal`, as a process of its own with an account for each
//! controller: nodes, a load balancer, a machine that is gone.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testkit::control_plane::ControlPlane;
use testkit::http::ApiClient;
use testkit::wait::{self, LONG};

use crate::support::Scratch;

const BINARY: &str = env!("CARGO_BIN_EXE_decapod");
const NODES: &str = "/api/v1/nodes";
const SERVICES: &str = "/api/v1/namespaces/default/services";
const TAINT: &str = "node.cloudprovider.kubernetes.io/uninitialized";

/// Killed on drop.
struct Manager(Child);

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn object(api: &ApiClient, path: &str) -> Result<Value> {
    let answer = api.get(path, LONG)?;
    ensure!(answer.status == 200, "{path}: {}", answer.body);
    Ok(serde_json::from_str(&answer.body)?)
}

fn create(api: &ApiClient, path: &str, body: &Value) -> Result<()> {
    let answer = api.post(path, &body.to_string(), LONG)?;
    ensure!(answer.status == 201, "{path}: {}", answer.body);
    Ok(())
}

fn inventory(scratch: &Scratch, machines: &str) -> Result<String> {
    let balancer = scratch.path().join("balancer");
    if !balancer.exists() {
        let said = scratch.path().join("said");
        let script = format!("#!/bin/sh\ncat >> {}\necho 203.0.113.10\n", said.display());
        fs::write(&balancer, script)?;
        fs::set_permissions(&balancer, fs::Permissions::from_mode(0o755))?;
    }
    let balancer = balancer.display();
    let text =
        format!("region: r\nmachines: [{machines}]\nloadBalancers: {{command: [{balancer}]}}\n");
    scratch.file("machines.yaml", &text)
}

#[test]
fn machines_of_a_file_are_nodes_and_load_balancers() -> Result<()> {
    let server = ControlPlane::start_with(BINARY.as_ref(), &["--cloud-provider", "external"])?;
    let api = server.client()?;
    let scratch = Scratch::new()?;
    let file = inventory(
        &scratch,
        "{name: m1, zone: z1, type: big, addresses: [{type: ExternalIP, address: 203.0.113.1}]}",
    )?;
    let log = scratch.path().join("log");
    let manager = Command::new(BINARY)
        .args(["cloud-controller-manager", "--cloud-provider=metal", "--secure-port=0"])
        .arg(format!("--cloud-config={file}"))
        .arg(format!("--kubeconfig={}", server.kubeconfig().display()))
        .args(["--use-service-account-credentials", "--node-monitor-period=1s"])
        .stdout(Stdio::null())
        .stderr(File::create(&log)?)
        .spawn()?;
    let _manager = Manager(manager);
    let checked = node_is_described(&api)
        .and_then(|()| service_has_an_address(&api, &scratch))
        .and_then(|()| node_without_a_machine_is_deleted(&api, &scratch));
    checked.with_context(|| fs::read_to_string(&log).unwrap_or_default())
}

fn node_is_described(api: &ApiClient) -> Result<()> {
    let taints = json!([{"key": TAINT, "value": "true", "effect": "NoSchedule"}]);
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "m1"},
        "spec": {"taints": taints}});
    create(api, NODES, &node)?;
    wait::until(LONG, "the node is described", || {
        let node = object(api, &format!("{NODES}/m1"))?;
        ensure!(!node["spec"]["taints"].to_string().contains(TAINT), "{node}");
        ensure!(node["spec"]["providerID"] == "metal://m1", "{node}");
        let labels = &node["metadata"]["labels"];
        ensure!(labels["topology.kubernetes.io/zone"] == "z1", "{node}");
        ensure!(labels["node.kubernetes.io/instance-type"] == "big", "{node}");
        let addresses = json!([{"type": "ExternalIP", "address": "203.0.113.1"}]);
        ensure!(node["status"]["addresses"] == addresses, "{node}");
        Ok(())
    })
}

fn service_has_an_address(api: &ApiClient, scratch: &Scratch) -> Result<()> {
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"},
        "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]}});
    create(api, SERVICES, &service)?;
    wait::until(LONG, "the Service has an address", || {
        let service = object(api, &format!("{SERVICES}/web"))?;
        let ingress = &service["status"]["loadBalancer"]["ingress"][0];
        ensure!(ingress["ip"] == "203.0.113.10", "{service}");
        Ok(())
    })?;
    let answer = api.delete(&format!("{SERVICES}/web"), LONG)?;
    ensure!(answer.status == 200, "{}", answer.body);
    wait::until(LONG, "the Service is gone", || {
        let answer = api.get(&format!("{SERVICES}/web"), LONG)?;
        ensure!(answer.status == 404, "{}", answer.body);
        Ok(())
    })?;
    let said = fs::read_to_string(scratch.path().join("said"))?;
    ensure!(said.contains("\"operation\":\"ensure\"") && said.contains("metal://m1"), "{said}");
    ensure!(said.contains("\"operation\":\"delete\""), "{said}");
    wait::until(LONG, "the Events of the Service", || {
        let events = object(api, "/api/v1/namespaces/default/events")?.to_string();
        for reason in ["EnsuredLoadBalancer", "DeletedLoadBalancer", "Synced"] {
            ensure!(events.contains(reason), "no {reason}: {events}");
        }
        Ok(())
    })
}

fn node_without_a_machine_is_deleted(api: &ApiClient, scratch: &Scratch) -> Result<()> {
    inventory(scratch, "{name: other}")?;
    wait::until(LONG, "the node is deleted", || {
        let answer = api.get(&format!("{NODES}/m1"), LONG)?;
        ensure!(answer.status == 404, "{}", answer.body);
        Ok(())
    })
}
