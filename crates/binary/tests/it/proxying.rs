//! Targets that the `proxy` subresources must not reach, on the whole server: this machine, its
//! link-local addresses, and hosts that a port's text could name.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use testkit::http::Connection;
use testkit::wait;

use crate::support::{LONG, Server};

fn post(server: &Server, path: &str, body: &Value) -> Result<()> {
    let answer = server.api()?.post(path, &body.to_string(), LONG)?;
    ensure!(answer.status == 201, "{path}: {answer:?}");
    Ok(())
}

/// A pod whose status claims this address.
fn pod_at(server: &Server, name: &str, ip: &str) -> Result<()> {
    let pods = "/api/v1/namespaces/default/pods";
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"nodeName": "evil", "containers": [
            {"name": "c", "image": "i", "ports": [{"name": "web", "containerPort": 8080}]}]}});
    // A controller creates the namespace's service account.
    wait::until(LONG, "a pod", || post(server, pods, &pod))?;
    let status = json!({"status": {"podIP": ip, "podIPs": [{"ip": ip}]}}).to_string();
    let kind = [("Content-Type", "application/merge-patch+json")];
    let mut connection = Connection::new(server.api()?, LONG);
    let answer =
        connection.send("PATCH", &format!("{pods}/{name}/status"), &kind, status.as_bytes())?;
    ensure!(answer.status == 200, "{answer:?}");
    Ok(())
}

#[test]
fn a_proxy_reaches_neither_this_machine_nor_another_host() -> Result<()> {
    let server = Server::start(&[])?;
    let api = server.api()?;
    // A port that answers: the server's own.
    let port = api.tls().0.rsplit(':').next().unwrap_or_default().to_owned();
    for (name, kind, address) in [
        ("evil", "InternalIP", "127.0.0.1"),
        ("metadata", "InternalIP", "169.254.169.254"),
        ("mapped", "InternalIP", "::ffff:127.0.0.1"),
        ("named", "Hostname", "localhost"),
    ] {
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
            "status": {"addresses": [{"type": kind, "address": address}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}}}});
        post(&server, "/api/v1/nodes", &node)?;
    }
    pod_at(&server, "near", "127.0.0.1")?;
    pod_at(&server, "far", "192.0.2.1")?;
    let refused = |id: &str, why: &str| -> Result<()> {
        let (kind, name) = id.split_once('/').unwrap_or((id, ""));
        let place = if kind == "nodes" { "/api/v1" } else { "/api/v1/namespaces/default" };
        let answer = api.get(&format!("{place}/{kind}/{name}/proxy/latest/meta-data"), LONG)?;
        ensure!(answer.status == 400 && answer.body.contains(why), "{id}: {answer:?}");
        Ok(())
    };
    let not_allowed = "address not allowed";
    for node in ["evil", "metadata", "mapped", "named"] {
        refused(&format!("nodes/{node}"), not_allowed)?;
        refused(&format!("nodes/{node}:{port}"), not_allowed)?;
        refused(&format!("nodes/https:{node}:{port}"), not_allowed)?;
    }
    refused(&format!("pods/https:near:{port}"), not_allowed)?;
    refused("pods/near", not_allowed)?;
    for id in [
        "far:80@169.254.169.254",
        "far:80%40127.0.0.1",
        "far:@localhost",
        "far:0@127.0.0.1%3F",
        "far:80%2Fx",
        "far:0",
        "far:65536",
        "https:far:443@10.43.0.1",
    ] {
        refused(&format!("pods/{id}"), "invalid pod request")?;
        refused(&format!("services/{id}"), "invalid service request")?;
        refused(&format!("nodes/{id}"), "invalid node request")?;
    }
    Ok(())
}
