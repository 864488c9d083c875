//! Feature gates on a real server: their effect, their warnings at the start, and rights on subresources
//! of pods.

use std::process::Command;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use testkit::http::{Connection, Response};
use testkit::wait;

use crate::support::{LONG, Server};

const JSON: (&str, &str) = ("Content-Type", "application/json");
const PODS: &str = "/api/v1/namespaces/default/pods";
const AUTOSCALERS: &str = "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers";

fn send(
    server: &Server,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &Value,
) -> Result<Response> {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    Connection::new(server.api()?, LONG).send(method, path, headers, body.as_bytes())
}

/// A pod that sets fields of two gates, as the server stores it.
fn kept_pod(server: &Server) -> Result<Value> {
    let container = json!({"name": "c", "image": "i", "lifecycle": {"stopSignal": "SIGUSR1"}});
    let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [container],
        "os": {"name": "linux"}, "hostnameOverride": "h"}});
    // The namespace's service account is created a moment later.
    let made = wait::until(LONG, "the pod is created", || {
        let answer = send(server, "POST", PODS, &[JSON], &pod)?;
        ensure!(answer.status == 201, "{answer:?}");
        Ok(answer)
    })?;
    Ok(serde_json::from_str(&made.body)?)
}

fn scale_to_zero(server: &Server) -> Result<Response> {
    let metric = json!({"type": "External", "external": {"metric": {"name": "m"},
        "target": {"type": "Value", "value": "1"}}});
    let target = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"});
    let autoscaler = json!({"metadata": {"name": "a"}, "spec": {"minReplicas": 0, "maxReplicas": 3,
        "metrics": [metric], "scaleTargetRef": target}});
    send(server, "POST", AUTOSCALERS, &[JSON], &autoscaler)
}

#[test]
fn gates_are_as_upstream_has_them() -> Result<()> {
    let server = Server::start(&["--runtime-config", "certificates.k8s.io/v1beta1=true"])?;
    let pod = kept_pod(&server)?;
    ensure!(pod.pointer("/spec/containers/0/lifecycle").is_none(), "{pod}");
    ensure!(pod["spec"]["hostnameOverride"] == "h", "{pod}");
    let refused = scale_to_zero(&server)?;
    let why = "spec.minReplicas: Invalid value: 0: must be greater than or equal to 1";
    ensure!(refused.status == 422 && refused.body.contains(why), "{refused:?}");
    // A version that is turned on has only the kinds whose gates are on.
    let bundles = "/apis/certificates.k8s.io/v1beta1/clustertrustbundles";
    ensure!(server.api()?.get(bundles, LONG)?.status == 404);
    let why = "ClusterTrustBundle storage is disabled because the ClusterTrustBundle feature gate is disabled";
    ensure!(server.log().contains(why), "{}", server.log());
    let figures = server.api()?.get("/metrics", LONG)?.body;
    for line in [
        "kubernetes_feature_enabled{name=\"ContainerStopSignals\",stage=\"ALPHA\"} 0",
        "kubernetes_feature_enabled{name=\"HostnameOverride\",stage=\"BETA\"} 1",
    ] {
        ensure!(figures.lines().any(|one| one == line), "{line}");
    }
    acting_inside_of_pods_is_creating(&server)
}

/// A user who may only read `pods/exec` cannot use it with GET.
fn acting_inside_of_pods_is_creating(server: &Server) -> Result<()> {
    const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1/namespaces/default";
    let path = format!("{PODS}/p/exec?command=id&container=c&stdout=true");
    for (user, verbs) in [("reader", json!(["get"])), ("actor", json!(["get", "create"]))] {
        let rule = json!({"apiGroups": [""], "resources": ["pods/exec"], "verbs": verbs});
        let role = json!({"metadata": {"name": user}, "rules": [rule]});
        let group = "rbac.authorization.k8s.io";
        let binding = json!({"metadata": {"name": user},
            "roleRef": {"apiGroup": group, "kind": "Role", "name": user},
            "subjects": [{"apiGroup": group, "kind": "User", "name": user}]});
        for (resource, object) in [("roles", role), ("rolebindings", binding)] {
            let made = send(server, "POST", &format!("{RBAC}/{resource}"), &[JSON], &object)?;
            ensure!(made.status == 201, "{made:?}");
        }
        let (status, why) = match user {
            "reader" => (403, "pods \\\"p\\\" is forbidden: "),
            _ => (400, "pod p does not have a host assigned"),
        };
        wait::until(LONG, "the role counts", || {
            let as_user = [("Impersonate-User", user)];
            let answer = send(server, "GET", &path, &as_user, &Value::Null)?;
            // Before that, the request is refused because of the verb, with another message.
            ensure!(!answer.body.contains("cannot get resource"), "{answer:?}");
            ensure!(answer.status == status && answer.body.contains(why), "{answer:?}");
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn gates_open_and_close() -> Result<()> {
    let gates = "ContainerStopSignals=true,HPAScaleToZero=true,NativeHistograms=true";
    let more = ["--feature-gates", "HostnameOverride=false,OpenAPIEnums=false"];
    let server = Server::start(&["--feature-gates", gates, more[0], more[1]])?;
    let pod = kept_pod(&server)?;
    let signal = pod.pointer("/spec/containers/0/lifecycle/stopSignal");
    ensure!(signal == Some(&json!("SIGUSR1")), "{pod}");
    ensure!(pod["spec"].get("hostnameOverride").is_none(), "{pod}");
    ensure!(scale_to_zero(&server)?.status == 201);
    for notice in [
        "feature gate NativeHistograms is known but not implemented: it changes nothing",
        "feature gate OpenAPIEnums cannot be closed: its feature is built in",
    ] {
        ensure!(server.log().contains(notice), "{}", server.log());
    }
    Ok(())
}

/// A user who may update a request's status can answer only for signers that it may sign for.
#[test]
fn answers_to_certificate_requests_need_the_right_to_sign() -> Result<()> {
    const GROUP: &str = "certificates.k8s.io";
    const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
    let server = Server::start(&[
        "--runtime-config",
        "certificates.k8s.io/v1beta1=true",
        "--feature-gates",
        "PodCertificateRequest=true",
    ])?;
    let requests = format!("/apis/{GROUP}/v1beta1/namespaces/default/podcertificaterequests");
    let request = json!({"metadata": {"name": "r"}, "spec": {"signerName": "e.example/one",
        "podName": "p", "podUID": "1", "serviceAccountName": "default", "serviceAccountUID": "2",
        "nodeName": "n", "nodeUID": "3", "stubPKCS10Request": crate::versions::request()}});
    let made = send(&server, "POST", &requests, &[JSON], &request)?;
    ensure!(made.status == 201, "{made:?}");
    let update = json!({"apiGroups": [GROUP], "resources": ["podcertificaterequests/status"],
        "verbs": ["patch", "update"]});
    let sign = json!({"apiGroups": [GROUP], "resources": ["signers"], "verbs": ["sign"],
        "resourceNames": ["e.example/*"]});
    for (user, rules) in [("clerk", json!([update])), ("signer", json!([update, sign]))] {
        let role = json!({"metadata": {"name": user}, "rules": rules});
        let group = "rbac.authorization.k8s.io";
        let binding = json!({"metadata": {"name": user},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": user},
            "subjects": [{"apiGroup": group, "kind": "User", "name": user}]});
        for (resource, object) in [("clusterroles", role), ("clusterrolebindings", binding)] {
            let made = send(&server, "POST", &format!("{RBAC}/{resource}"), &[JSON], &object)?;
            ensure!(made.status == 201, "{made:?}");
        }
        let denied = json!({"status": {"conditions": [{"type": "Denied", "status": "True",
            "reason": "No", "message": "no", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
        let merge = ("Content-Type", "application/merge-patch+json");
        let why = "spec.signerName: Forbidden: User \\\"clerk\\\" is not permitted to \\\"sign\\\" for signer \\\"e.example/one\\\"";
        let (status, why) = if user == "clerk" { (422, why) } else { (200, "Denied") };
        wait::until(LONG, "the role counts", || {
            let headers = [merge, ("Impersonate-User", user)];
            let answer =
                send(&server, "PATCH", &format!("{requests}/r/status"), &headers, &denied)?;
            ensure!(answer.status == status && answer.body.contains(why), "{answer:?}");
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn invalid_gates_end_the_start() -> Result<()> {
    for (command, gates, why) in [
        ("server", "Nonsense=true", "unrecognized feature gate: Nonsense"),
        ("kube-apiserver", "ImageVolume=false", "feature is locked to true"),
        ("agent", "EnvFiles", "missing bool value for EnvFiles"),
    ] {
        let mut start = Command::new(env!("CARGO_BIN_EXE_decapod"));
        start.args([command, "--feature-gates", gates]);
        if command == "agent" {
            start.args(["--server", "https://127.0.0.1:1"]);
        }
        let output = start.output()?;
        let text = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.status.success() && text.contains(why), "{command}: {text}");
    }
    Ok(())
}
