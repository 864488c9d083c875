//! Approves and signs certificate requests of kubelets.
//!
//! In: CertificateSigningRequests, Nodes. Out: approvals, denials, certificates.
//! Upstream: `pkg/controller/certificates/{approver,signer}`. Approval asks the API whether the
//! requestor may have such a certificate (a SubjectAccessReview); signing checks that the request
//! is what its signer signs.
//!
//! ```text
//!  who asks         for what                    approved when
//!  a join token     a kubelet's client          no Node has that name; denied otherwise
//!  a node           its own client              always
//!  a node           its proxy's, its DNS's      it is of this node
//!  a node           its kubelet's serving       it names nothing but the node, see `serving`
//! ```
//!
//! Invariants: a node's own claims approve nothing; requests that are not approved here wait for an
//! administrator, and an event says why. A client certificate of a node carries the UID of its Node
//! and counts as long as that Node is there (`auth::node_certificates`); without a Node it lives an hour.
//!
//! Deviation: upstream's approver leaves kubelets' serving certificates to people, so that logs and
//! exec wait for them, and knows no requests of proxies and DNS servers. Both are rights of group
//! system:nodes that an administrator can take away. Upstream's gives a join token the certificate of a
//! node that exists, and its signer knows no UIDs.

mod approval;
mod serving;
mod signing;

use std::sync::Arc;

use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestCondition, CertificateSigningRequestSpec,
};
use machinery::Time;
use pki::{Component, Csr, Identity, San};

use crate::descriptor::{Descriptor, Row, own};

pub const APPROVER: &dyn Row = &Descriptor::<approval::Approver, Arc<str>> {
    name: "certificatesigningrequest-approving-controller",
    account: "certificate-controller",
    component: "certificate-controller",
    queue: "csr-approver",
    workers: 5,
    new: |setup| Some(approval::Approver::new(setup)),
    watches: &[&own::<CertificateSigningRequest>()],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

pub const SIGNER: &dyn Row = &Descriptor::<signing::Signer, Arc<str>> {
    name: "certificatesigningrequest-signing-controller",
    account: "certificate-controller",
    component: "certificate-controller",
    queue: "csr-signer",
    workers: 5,
    new: signing::Signer::new,
    watches: &[&own::<CertificateSigningRequest>()],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

const KUBELET_CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
const KUBELET_SERVING: &str = "kubernetes.io/kubelet-serving";
const CLIENT: &str = "kubernetes.io/kube-apiserver-client";
const LEGACY: &str = "kubernetes.io/legacy-unknown";
const NODES: &str = "system:nodes";
const NODE_PREFIX: &str = "system:node:";
fn has_condition(csr: &CertificateSigningRequest, kind: &str) -> bool {
    let conditions = csr.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|one| one.type_ == kind)
}

fn add_condition(csr: &mut CertificateSigningRequest, kind: &str, reason: &str, message: String) {
    let now = Time(base::clock::now_seconds());
    let conditions = csr.status.get_or_insert_default().conditions.get_or_insert_default();
    conditions.push(CertificateSigningRequestCondition {
        type_: kind.into(),
        status: "True".into(),
        reason: Some(reason.into()),
        message: Some(message),
        last_update_time: Some(now.clone()),
        last_transition_time: Some(now),
    });
}

/// Whether the usages are all of the first list, and none but those of both.
fn uses(spec: &CertificateSigningRequestSpec, needed: &[&str], also: &[&str]) -> bool {
    let usages = spec.usages.as_deref().unwrap_or_default();
    let is_known = |one: &String| needed.contains(&one.as_str()) || also.contains(&one.as_str());
    usages.iter().all(is_known) && needed.iter().all(|one| usages.iter().any(|usage| usage == one))
}

/// Does the request come from the user that it names?
fn is_own(spec: &CertificateSigningRequestSpec, csr: &Csr) -> bool {
    spec.username.as_deref() == Some(&csr.common_name)
}

/// A kubelet's client certificate, for the node that its request names.
fn is_kubelet_client(spec: &CertificateSigningRequestSpec, csr: &Csr) -> bool {
    spec.signer_name == KUBELET_CLIENT
        && csr.organizations == [NODES]
        && csr.common_name.starts_with(NODE_PREFIX)
        && csr.sans.is_empty()
        && uses(spec, &["digital signature", "client auth"], &["key encipherment"])
}

/// A kubelet's serving certificate: signed when it is approved.
fn is_kubelet_serving(spec: &CertificateSigningRequestSpec, csr: &Csr) -> bool {
    spec.signer_name == KUBELET_SERVING
        && csr.organizations == [NODES]
        && csr.common_name.starts_with(NODE_PREFIX)
        && csr.sans.iter().any(|san| matches!(san, San::Dns(_) | San::Ip(_)))
        && !csr.sans.iter().any(|san| matches!(san, San::Email(_) | San::Uri(_)))
        && uses(spec, &["digital signature", "server auth"], &["key encipherment"])
}

/// The proxy's or the DNS server's client certificate of a node, asked for by that node.
fn is_node_component(spec: &CertificateSigningRequestSpec, csr: &Csr) -> bool {
    let asks = spec.username.as_deref().and_then(|user| user.strip_prefix(NODE_PREFIX));
    let Some(node) = asks.filter(|node| !node.is_empty()) else { return false };
    let wanted = Identity { user: csr.common_name.clone(), groups: csr.organizations.clone() };
    let components = [Component::Proxy, Component::Dns];
    spec.signer_name == CLIENT
        && components.iter().any(|one| one.on_node(node).as_ref() == Some(&wanted))
        && csr.sans.is_empty()
        && uses(spec, &["client auth"], &["digital signature", "key encipherment"])
}
