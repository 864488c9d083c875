//! Decides which requests are approved automatically, and which are denied.
//!
//! In: a CertificateSigningRequest; Nodes, ServiceCIDRs, the API servers' endpoints. Out: a condition on
//! the request, or an event that says why it waits for an administrator.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use api::nodes::SOURCE_ADDRESS;
use base::memory::{Memory, key_of};
use client::{Api, EventType, Lister, Outcome, PostParams, Result, View, Whole};
use ipnet::IpNet;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use pki::{Csr, Identity};

use super::{
    KUBELET_CLIENT, KUBELET_SERVING, add_condition, has_condition, is_kubelet_client,
    is_kubelet_serving, is_node_component, is_own, serving,
};
use crate::context::Context;
use crate::descriptor::Setup;

const BY_ADDRESS: &str = "address";
const BOOTSTRAP_PREFIX: &str = "system:bootstrap:";
/// Why a request waits is said once in this time, for this many requests.
const SAID: Duration = Duration::from_secs(3600);
const SAID_OF: usize = 1024;

/// The objects that a verdict depends on.
pub(super) struct Approver {
    context: Context,
    requests: Lister<CertificateSigningRequest>,
    nodes: Lister<Node>,
    slices: Lister<EndpointSlice>,
    ranges: View<Whole<ServiceCIDR>>,
    said: Memory<()>,
}

/// The decision on a request.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// Approved where the requestor has the right: a subresource, and what the approval says.
    Approve(&'static str, &'static str),
    /// Denied where the requestor has the right.
    Deny(&'static str, String),
    /// For an administrator, because of this; another look may say otherwise.
    Leave(String),
    /// Not a matter of this approver.
    Pass,
}

const SELF_CLIENT: Verdict = Verdict::Approve(
    "selfnodeclient",
    "Auto approving self kubelet client certificate after SubjectAccessReview.",
);
const CLIENT: Verdict = Verdict::Approve(
    "nodeclient",
    "Auto approving kubelet client certificate after SubjectAccessReview.",
);
const SELF_SERVING: Verdict = Verdict::Approve(
    "selfnodeserver",
    "Auto approving self kubelet serving certificate after SubjectAccessReview.",
);
const COMPONENT: Verdict = Verdict::Approve(
    "nodecomponent",
    "Auto approving node component certificate after SubjectAccessReview.",
);

impl Approver {
    pub(super) fn new(setup: &Setup<Arc<str>>) -> Self {
        let nodes = setup.informer::<Node>();
        nodes.index(BY_ADDRESS, addresses);
        Self {
            context: setup.context.clone(),
            requests: setup.lister(),
            nodes: nodes.lister(),
            slices: setup.lister(),
            ranges: setup.view::<ServiceCIDR, _>(),
            said: Memory::new(SAID_OF),
        }
    }

    pub(super) async fn reconcile(&self, name: &str) -> Result<Outcome> {
        let Some(csr) = self.requests.get("", name) else { return Ok(Outcome::Done) };
        let (csr, context) = (&*csr, &self.context);
        let is_decided =
            ["Approved", "Denied", "Failed"].iter().any(|kind| has_condition(csr, kind));
        let Some(parsed) = Csr::parse(&csr.spec.request.0).ok().filter(|_| !is_decided) else {
            return Ok(Outcome::Done);
        };
        let why = match self.verdict(context, csr, &parsed) {
            Verdict::Pass => return Ok(Outcome::Done),
            Verdict::Leave(why) => why,
            Verdict::Approve(right, message) => {
                if may(context, csr, right).await? {
                    return write(context, csr, "Approved", "AutoApproved", message.into()).await;
                }
                lacks(right)
            }
            Verdict::Deny(right, message) => {
                if may(context, csr, right).await? {
                    return write(context, csr, "Denied", "NodeExists", message).await;
                }
                lacks(right)
            }
        };
        self.say(context, csr, &why);
        // The right may be granted later, and the node may be known better.
        Ok(Outcome::Backoff)
    }

    fn verdict(&self, context: &Context, csr: &CertificateSigningRequest, parsed: &Csr) -> Verdict {
        let spec = &csr.spec;
        let name = Identity::node_of(&parsed.common_name, &parsed.organizations);
        let node = name.and_then(|name| self.nodes.get("", name));
        if is_kubelet_client(spec, parsed) {
            let asks = spec.username.as_deref().unwrap_or_default();
            return client_verdict(is_own(spec, parsed), asks, name, node.is_some());
        }
        if is_node_component(spec, parsed) {
            return COMPONENT;
        }
        match spec.signer_name.as_str() {
            KUBELET_SERVING if is_own(spec, parsed) && is_kubelet_serving(spec, parsed) => {
                match self.serving_refusal(context, csr, parsed, node.as_deref()) {
                    Some(why) => Verdict::Leave(why),
                    None => SELF_SERVING,
                }
            }
            KUBELET_SERVING if is_own(spec, parsed) => {
                Verdict::Leave("the request is not one for a kubelet's serving certificate".into())
            }
            KUBELET_SERVING => Verdict::Leave("the request is not the node's own".into()),
            KUBELET_CLIENT => {
                Verdict::Leave("the request is not one for a kubelet's client certificate".into())
            }
            _ => Verdict::Pass,
        }
    }

    fn serving_refusal(
        &self,
        context: &Context,
        csr: &CertificateSigningRequest,
        parsed: &Csr,
        node: Option<&Node>,
    ) -> Option<String> {
        let Some(reserved) = &context.options.reserved else {
            return Some("this controller manager does not know the API server's names".into());
        };
        let Some(node) = node else { return Some("the Node is not registered".into()) };
        let name = node.metadata.name.as_deref().unwrap_or_default();
        let source = csr.spec.extra.as_ref().and_then(|extra| extra.get(SOURCE_ADDRESS));
        let source: Option<IpAddr> = source.and_then(|all| all.first()?.parse().ok());
        let ranges = self.ranges.objects(None);
        let ranges = ranges.iter().flat_map(networks).collect();
        let servers = self.slices.get("default", "kubernetes");
        let servers = servers.iter().flat_map(endpoints).collect();
        let other = |address: IpAddr| other_holder(&self.nodes, address, name);
        let facts = serving::Facts { reserved, node, source, ranges, servers, other: &other };
        serving::refusal(&parsed.sans, &facts)
    }

    /// Tells an administrator, once.
    fn say(&self, context: &Context, csr: &CertificateSigningRequest, why: &str) {
        let name = csr.metadata.name.as_deref().unwrap_or_default();
        let key = key_of([name, why]);
        if self.said.get(&key).is_some() {
            return;
        }
        self.said.put(key, (), SAID);
        tracing::warn!(csr = name, why, "the certificate request waits for an administrator");
        let text =
            format!("waits for an administrator (kubectl certificate approve {name}): {why}");
        context.events.event(csr, EventType::Warning, "NotAutoApproved", text);
    }
}

fn lacks(right: &str) -> String {
    format!("the requestor has no right to create certificatesigningrequests/{right}")
}

/// On a kubelet's client certificate. A join token makes new nodes and is no way to be one that exists,
/// alive or not: its pods' Secrets would come with it.
fn client_verdict(is_own: bool, asks: &str, name: Option<&str>, is_there: bool) -> Verdict {
    if is_own {
        return SELF_CLIENT;
    }
    if !is_there {
        return CLIENT;
    }
    let name = name.unwrap_or_default();
    if !asks.starts_with(BOOTSTRAP_PREFIX) {
        return Verdict::Leave(format!("the Node {name} exists already"));
    }
    let message = format!(
        "a node named {name:?} exists already: choose another --node-name, or delete that Node if this machine is to take its place (kubectl delete node {name})"
    );
    Verdict::Deny("nodeclient", message)
}

fn addresses(node: &Node) -> Vec<String> {
    let all = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let parsed = all.filter_map(|one| one.address.parse::<IpAddr>().ok());
    let mut texts: Vec<_> = parsed.map(|address| address.to_canonical().to_string()).collect();
    texts.sort_unstable();
    texts.dedup();
    texts
}

/// Another node that says that it has the address.
fn other_holder(nodes: &Lister<Node>, address: IpAddr, own: &str) -> Option<String> {
    let holders = nodes.by_index(BY_ADDRESS, &address.to_string());
    let names = holders.iter().filter_map(|node| node.metadata.name.as_deref());
    names.into_iter().find(|name| *name != own).map(str::to_owned)
}

fn networks(range: &Arc<ServiceCIDR>) -> Vec<IpNet> {
    let all = range.spec.iter().flat_map(|spec| spec.cidrs.iter().flatten());
    all.filter_map(|cidr| cidr.parse().ok()).collect()
}

fn endpoints(slice: &Arc<EndpointSlice>) -> Vec<IpAddr> {
    let all = slice.endpoints.iter().flatten().flat_map(|endpoint| endpoint.addresses.iter());
    all.filter_map(|address| address.parse().ok()).collect()
}

async fn may(
    context: &Context,
    csr: &CertificateSigningRequest,
    subresource: &str,
) -> Result<bool> {
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: csr.spec.username.clone(),
            uid: csr.spec.uid.clone(),
            groups: csr.spec.groups.clone(),
            extra: csr.spec.extra.clone(),
            resource_attributes: Some(ResourceAttributes {
                group: Some("certificates.k8s.io".into()),
                resource: Some("certificatesigningrequests".into()),
                subresource: Some(subresource.into()),
                verb: Some("create".into()),
                version: Some("*".into()),
                ..Default::default()
            }),
            non_resource_attributes: None,
        },
        ..Default::default()
    };
    let api: Api<SubjectAccessReview> = context.client.api(None);
    let answer = api.create(&PostParams::default(), &review).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

async fn write(
    context: &Context,
    csr: &CertificateSigningRequest,
    kind: &'static str,
    reason: &str,
    message: String,
) -> Result<Outcome> {
    let name = csr.metadata.name.as_deref().unwrap_or_default();
    tracing::info!(csr = name, verdict = kind, why = message, "decided on a certificate request");
    let mut updated = csr.clone();
    add_condition(&mut updated, kind, reason, message);
    let api: Api<CertificateSigningRequest> = context.client.api(None);
    api.replace_subresource("approval", name, &PostParams::default(), &updated).await?;
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_token_makes_new_nodes_only() {
        let check = |is_own, asks: &str, is_there, expected: &Verdict| {
            let verdict = client_verdict(is_own, asks, Some("n1"), is_there);
            assert_eq!(
                std::mem::discriminant(&verdict),
                std::mem::discriminant(expected),
                "{is_own} {asks} {is_there}: {verdict:?}"
            );
        };
        let (token, denied) = ("system:bootstrap:abcdef", Verdict::Deny("", String::new()));
        check(false, token, false, &CLIENT);
        check(false, token, true, &denied);
        check(true, "system:node:n1", true, &SELF_CLIENT);
        check(true, "system:node:n1", false, &SELF_CLIENT);
        check(false, "jane", false, &CLIENT);
        check(false, "jane", true, &Verdict::Leave(String::new()));
        let Verdict::Deny(_, message) = client_verdict(false, token, Some("n1"), true) else {
            panic!("is denied");
        };
        assert_eq!(message.lines().count(), 1);
        assert!(message.contains("kubectl delete node n1"), "{message}");
    }
}
