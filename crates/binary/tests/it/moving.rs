//! Clusters that were moved from another distribution: their tokens and objects are still accepted.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testkit::http::Connection;
use testkit::wait;

use crate::support::{LONG, Server};

/// As after a move from another distribution: old tokens are accepted, new tokens have our issuer.
#[test]
fn tokens_of_an_older_issuer_are_accepted() -> Result<()> {
    let (old, new) = ("https://kubernetes.default.svc.cluster.local", "https://issuer.example");
    let mut server = Server::start(&["--service-account-issuer", old])?;
    wait::until(LONG, "the service account", || {
        let path = "/api/v1/namespaces/default/serviceaccounts/default";
        let answer = server.api()?.get(path, LONG)?;
        ensure!(answer.status == 200, "{answer:?}");
        Ok(())
    })?;
    let token = issued(&server)?;
    server.stop()?;
    server.launch_with(&["--service-account-issuer", new, "--service-account-issuer", old])?;
    server.ready()?;
    for token in [token, issued(&server)?] {
        let authorization = format!("Bearer {token}");
        let mut anybody = Connection::new(server.api()?.without_identity()?, LONG);
        let answer = anybody.send("GET", "/api", &[("Authorization", &authorization)], b"")?;
        ensure!(answer.status == 200, "{answer:?}");
    }
    let told = server.api()?.get("/.well-known/openid-configuration", LONG)?;
    ensure!(told.body.contains(&format!("\"issuer\":\"{new}\"")), "{told:?}");
    server.stop()?;
    server.launch_with(&[])?;
    server.ready()
}

fn issued(server: &Server) -> Result<String> {
    let path = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let request =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
    let answer = server.api()?.post(path, &request.to_string(), LONG)?;
    let answer: Value = serde_json::from_str(&answer.body)?;
    Ok(answer["status"]["token"].as_str().with_context(|| answer.to_string())?.to_owned())
}

/// For example if another distribution's DNS Service has another name.
#[test]
fn a_server_starts_although_a_bootstrap_object_cannot_be_written() -> Result<()> {
    let mut server = Server::start(&["--cluster-dns", "10.43.0.99"])?;
    let taken = json!({"metadata": {"name": "rke-dns", "namespace": "kube-system"},
        "spec": {"clusterIP": "10.43.0.10", "ports": [{"port": 53}]}});
    let services = "/api/v1/namespaces/kube-system/services";
    let answer = server.api()?.post(services, &taken.to_string(), LONG)?;
    ensure!(answer.status == 201, "{answer:?}");
    let mut admin = Connection::new(server.api()?, LONG);
    let answer = admin.send("DELETE", &format!("{services}/kube-dns"), &[], b"")?;
    ensure!(answer.status == 200, "{answer:?}");
    server.stop()?;
    server.launch_with(&[])?;
    server.ready()?;
    ensure!(
        server.lines_about("failed to write an object that every cluster has") == 1,
        "{}",
        server.log()
    );
    let config =
        server.api()?.get("/api/v1/namespaces/kube-system/configmaps/decapod-cluster", LONG)?;
    ensure!(config.status == 200, "later objects are written: {config:?}");
    Ok(())
}
