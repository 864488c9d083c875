//! Simulated nodes, from the outside: a Deployment, a Job, an eviction, a node that fails, the end.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testkit::control_plane::ControlPlane;
use testkit::http::{ApiClient, Connection};
use testkit::simulator::Simulator;
use testkit::wait::{self, LONG};

const BINARY: &str = env!("CARGO_BIN_EXE_decapod");
const NODES: &str = "/api/v1/nodes";
const PODS: &str = "/api/v1/namespaces/default/pods";
const DEPLOYMENTS: &str = "/apis/apps/v1/namespaces/default/deployments";

fn list(api: &ApiClient, path: &str) -> Result<Vec<Value>> {
    let answer = api.get(path, LONG)?;
    ensure!(answer.status == 200, "{}", answer.body);
    let list: Value = serde_json::from_str(&answer.body)?;
    Ok(list["items"].as_array().context("a list")?.clone())
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

fn ready(node: &Value) -> Option<&str> {
    let conditions = node["status"]["conditions"].as_array()?;
    conditions.iter().find(|one| one["type"] == "Ready")?["status"].as_str()
}

/// Waits until so many nodes say this of being ready.
fn nodes_are(api: &ApiClient, status: &str, count: usize) -> Result<()> {
    wait::until(LONG, "nodes", || {
        let nodes = list(api, NODES)?;
        let found = nodes.iter().filter(|node| ready(node) == Some(status)).count();
        ensure!(found == count, "{found} of {} are {status}", nodes.len());
        Ok(())
    })
}

fn template(metadata: &Value) -> Value {
    json!({"metadata": metadata, "spec": {"containers": [{"name": "main", "image": "any"}]}})
}

/// What `decapod simulate` says with these arguments, and whether it succeeded.
fn said(arguments: &[&str]) -> Result<(bool, String)> {
    let output = Command::new(BINARY).arg("simulate").args(arguments).output()?;
    let text = [output.stdout, output.stderr].concat();
    Ok((output.status.success(), String::from_utf8_lossy(&text).into_owned()))
}

#[test]
fn pods_live_on_simulated_nodes_as_on_others() -> Result<()> {
    let server = ControlPlane::start(BINARY.as_ref())?;
    let (api, kubeconfig) = (server.client()?, server.kubeconfig());
    let mut simulator = Simulator::start(BINARY.as_ref(), &kubeconfig, &["--nodes", "10"])?;
    nodes_are(&api, "True", 10)?;
    deployment_runs(&api)?;
    job_succeeds(&api)?;
    evicted_pod_is_replaced(&api)?;
    let status = simulator.terminate()?;
    ensure!(status.success() && simulator.log().contains("--cleanup"), "{}", simulator.log());
    // The next run adopts the nodes and pods that the first one left: it registers no node.
    let _simulator = Simulator::start(BINARY.as_ref(), &kubeconfig, &["--nodes", "12"])?;
    nodes_are(&api, "True", 12)?;
    let text = kubeconfig.display().to_string();
    let (succeeded, text) = said(&["--cleanup", "--kubeconfig", &text])?;
    ensure!(succeeded && text.contains("deleted 12 Nodes of the fleet default"), "{text}");
    ensure!(list(&api, NODES)?.is_empty(), "nodes are left");
    Ok(())
}

fn deployment_runs(api: &ApiClient) -> Result<()> {
    let labels = json!({"app": "web"});
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"},
        "spec": {"replicas": 30, "selector": {"matchLabels": labels},
            "template": template(&json!({"labels": labels}))}});
    create(api, DEPLOYMENTS, &deployment)?;
    wait::until(LONG, "the Deployment is available", || {
        let status = object(api, &format!("{DEPLOYMENTS}/web"))?["status"].clone();
        ensure!(status["availableReplicas"] == 30, "{status}");
        Ok(())
    })?;
    let pods = list(api, PODS)?;
    let addresses: std::collections::BTreeSet<&str> =
        pods.iter().filter_map(|pod| pod["status"]["podIP"].as_str()).collect();
    ensure!(addresses.len() == 30, "{addresses:?}");
    Ok(())
}

fn job_succeeds(api: &ApiClient) -> Result<()> {
    let mut pods = template(&json!({"annotations": {"decapod.io/simulate": "run-for=1s"}}));
    pods["spec"]["restartPolicy"] = "Never".into();
    let job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "once"},
        "spec": {"completions": 4, "parallelism": 2, "template": pods}});
    let jobs = "/apis/batch/v1/namespaces/default/jobs";
    create(api, jobs, &job)?;
    wait::until(LONG, "the Job succeeds", || {
        let status = object(api, &format!("{jobs}/once"))?["status"].clone();
        ensure!(status["succeeded"] == 4, "{status}");
        Ok(())
    })
}

fn evicted_pod_is_replaced(api: &ApiClient) -> Result<()> {
    let selected = format!("{PODS}?labelSelector=app%3Dweb");
    let first = list(api, &selected)?.remove(0);
    let name = first["metadata"]["name"].as_str().context("a name")?;
    let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": {"name": name, "namespace": "default"}});
    create(api, &format!("{PODS}/{name}/eviction"), &eviction)?;
    wait::until(LONG, "another pod is in its place", || {
        let pods = list(api, &selected)?;
        let runs = |pod: &&Value| {
            pod["status"]["phase"] == "Running"
                && pod["metadata"]["uid"] != first["metadata"]["uid"]
        };
        let count = pods.iter().filter(runs).count();
        ensure!(count == 30 && pods.len() == 30, "{count} of {}", pods.len());
        Ok(())
    })
}

#[test]
fn nodes_of_a_server_and_of_a_file_fail_when_they_are_told_to() -> Result<()> {
    let scratch = crate::support::Scratch::new()?;
    let file = "nodes: [{name: w, count: 3, labels: {pool: x}, zones: [a, b]}]\n\
                failures: [{after: 1s, mode: not-ready, labels: topology.kubernetes.io/zone=b}]\n";
    let file = scratch.file("fleet.yaml", file)?;
    let server = ControlPlane::start_with(BINARY.as_ref(), &["--simulation-config", &file])?;
    let api = server.client()?;
    nodes_are(&api, "False", 1)?;
    let node = object(&api, "/api/v1/nodes/w-00001")?;
    ensure!(ready(&node) == Some("False") && node["metadata"]["labels"]["pool"] == "x", "{node}");
    let patch = json!({"metadata": {"annotations": {"decapod.io/simulate": "not-ready"}}});
    let headers = [("content-type", "application/merge-patch+json")];
    let mut connection = Connection::new(server.client()?, LONG);
    let body = patch.to_string();
    let answer = connection.send("PATCH", "/api/v1/nodes/w-00000", &headers, body.as_bytes())?;
    ensure!(answer.status == 200, "{}", answer.body);
    nodes_are(&api, "False", 2)
}

#[test]
fn mistakes_are_said_before_anything_starts() -> Result<()> {
    let scratch = crate::support::Scratch::new()?;
    let missing = scratch.path().join("missing").display().to_string();
    let wrong = scratch.file("wrong.yaml", "nodes: [{name: w, count: 1, colour: red}]")?;
    let check = |arguments: &[&str], expected: &str| -> Result<()> {
        let (succeeded, text) = said(arguments)?;
        ensure!(!succeeded && text.contains(expected), "{arguments:?}: {text}");
        Ok(())
    };
    check(&[], "how many nodes?")?;
    check(&["--nodes", "many"], "invalid value 'many' for '--nodes <N>'")?;
    check(&["--nodes", "60000"], "60000 are more than 50000")?;
    check(&["--nodes", "1", "--lease-interval", "soon"], "invalid duration \"soon\"")?;
    check(&["--nodes", "1", "--fleet", "a b"], "fleet: \"a b\"")?;
    check(&["--nodes", "1", "--cleanup"], "cannot be used with")?;
    check(&["--config", &missing], "missing: No such file or directory")?;
    check(&["--config", &wrong], "colour")?;
    check(&["--nodes", "1", "--kubeconfig", &missing], "no cluster found")
}
