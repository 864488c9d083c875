//! Restricts a node's certificate requests: for itself, and for the pods that run on it.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::certificates::v1beta1::{PodCertificateRequest, PodCertificateRequestSpec};
use k8s_openapi::api::core::v1::{Node, Pod, ServiceAccount};
use machinery::Object;
use machinery::status::Reason;
use release::features::{self, Feature};

use super::{MIRROR, on_node};

/// A node's client and serving certificates must have its own name.
pub(super) fn of_node(attributes: &Attributes<'_>, user: &str) -> Result<(), String> {
    const SIGNERS: [&str; 2] =
        ["kubernetes.io/kube-apiserver-client-kubelet", "kubernetes.io/kubelet-serving"];
    let Some(csr) = attributes.object_as::<CertificateSigningRequest>() else { return Ok(()) };
    let created =
        attributes.operation == Operation::Create && attributes.ctx.subresource.is_empty();
    if !created || !SIGNERS.contains(&csr.spec.signer_name.as_str()) {
        return Ok(());
    }
    let parsed = pki::Csr::parse(&csr.spec.request.0)
        .map_err(|error| format!("unable to parse csr: {error}"))?;
    if parsed.common_name == user {
        return Ok(());
    }
    Err("can only create a node CSR with CN=".to_owned() + user)
}

/// Checks the pod, node and service account of a request against the existing objects.
pub(super) async fn of_pod(attributes: &Attributes<'_>, node: &str) -> Result<(), StatusError> {
    let forbidden = |why: String| Err(attributes.forbidden(why));
    if !features::enabled(Feature::PodCertificateRequest) {
        return forbidden("PodCertificateRequest feature gate is disabled".into());
    }
    if attributes.operation != Operation::Create {
        return forbidden(format!("unexpected operation {}", attributes.operation.as_str()));
    }
    let subresource = &attributes.ctx.subresource;
    if !subresource.is_empty() {
        return forbidden(format!("unexpected subresource {subresource}"));
    }
    let Some(request) = attributes.object_as::<PodCertificateRequest>() else { return Ok(()) };
    let spec = &request.spec;
    if spec.node_name != node {
        return forbidden(format!(
            "PodCertificateRequest.Spec.NodeName={:?}, which is not the requesting node {node:?}",
            spec.node_name
        ));
    }
    let name = format!("{}/{}", attributes.key.namespace, spec.pod_name);
    on_running_node(attributes, spec, &name).await?;
    let pod = running_pod(attributes, spec, &name).await?;
    with_account(attributes, spec, &pod, &name).await
}

async fn on_running_node(
    attributes: &Attributes<'_>,
    spec: &PodCertificateRequestSpec,
    pod: &str,
) -> Result<(), StatusError> {
    let name = &spec.node_name;
    let head = || format!("while retrieving node {name:?} named in the PodCertificateRequest");
    let Some(node) = attributes.registry.find::<Node>("", name).await? else {
        return Err(odd(format!("{}: node {name:?} not found", head())));
    };
    if node.uid() != spec.node_uid {
        return Err(odd(format!(
            "PodCertificateRequest for pod {pod:?} names node UID {:?}, inconsistent with the running node ({:?})",
            spec.node_uid,
            node.uid()
        )));
    }
    Ok(())
}

async fn running_pod(
    attributes: &Attributes<'_>,
    spec: &PodCertificateRequestSpec,
    name: &str,
) -> Result<Pod, StatusError> {
    let namespace = attributes.key.namespace.as_str();
    let Some(pod) = attributes.registry.find::<Pod>(namespace, &spec.pod_name).await? else {
        return Err(odd(format!(
            "while retrieving pod {name:?} named in the PodCertificateRequest: pod {:?} not found",
            spec.pod_name
        )));
    };
    if pod.uid() != spec.pod_uid {
        return Err(odd(format!(
            "PodCertificateRequest for pod {name:?} contains pod UID ({:?}) which differs from running pod {:?}",
            spec.pod_uid,
            pod.uid()
        )));
    }
    if !on_node(Some(&pod), &spec.node_name) {
        return Err(attributes.forbidden(format!(
            "pod {name:?} is not running on node {:?} named in the PodCertificateRequest",
            spec.node_name
        )));
    }
    if pod.metadata.annotations.as_ref().is_some_and(|all| all.contains_key(MIRROR)) {
        return Err(attributes.forbidden(format!("pod {name:?} is a mirror pod")));
    }
    Ok(pod)
}

async fn with_account(
    attributes: &Attributes<'_>,
    spec: &PodCertificateRequestSpec,
    pod: &Pod,
    name: &str,
) -> Result<(), StatusError> {
    let namespace = attributes.key.namespace.as_str();
    let account = &spec.service_account_name;
    let running = pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref());
    let running = running.unwrap_or_default();
    if account != running {
        return Err(attributes.forbidden(format!(
            "PodCertificateRequest for pod {name:?} contains serviceAccountName ({account:?}) that differs from running pod ({running:?})"
        )));
    }
    let Some(found) = attributes.registry.find::<ServiceAccount>(namespace, account).await? else {
        let whose = format!("{namespace}/{account}");
        return Err(odd(format!(
            "while retrieving service account {whose:?} named in the PodCertificateRequest: serviceaccount {account:?} not found"
        )));
    };
    if found.uid() != spec.service_account_uid {
        return Err(odd(format!(
            "PodCertificateRequest for pod {name:?} names service account UID {:?}, which differs from the running service account ({:?})",
            spec.service_account_uid,
            found.uid()
        )));
    }
    Ok(())
}

/// Upstream: for a state that may change soon, the error has no reason, and is no refusal.
fn odd(why: String) -> StatusError {
    StatusError::new(Reason::Unknown, why)
}
