//! Approves and signs certificate requests of kubelets.
//!
//! In: CertificateSigningRequests. Out: approvals, certificates.
//! Upstream: `pkg/controller/certificates/{approver,signer}`. Approval asks the API whether the
//! requestor may have such a certificate (a SubjectAccessReview); signing checks that the request
//! is what its signer signs.
//!
//! Deviation: upstream's approver leaves kubelets' serving certificates to people, so that logs and
//! exec wait for them. Ours approves a request of the node itself that names nothing but what its
//! Node object has, and a node's request for the identities of the proxy and the DNS that run
//! beside its kubelet. Both are rights of group system:nodes that an administrator can take away.

use std::sync::Arc;
use std::time::Duration;

use client::{Api, ErrorExt, Lister, Outcome, PostParams, Result, WorkQueue, spawn_workers};
use k8s_openapi::ByteString;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestCondition, CertificateSigningRequestSpec,
};
use k8s_openapi::api::core::v1::Node;
use machinery::Time;
use pki::{Authority, Component, Csr, San, Usage};

use crate::context::{Context, Descriptor};

pub const APPROVER: Descriptor = Descriptor {
    name: "certificatesigningrequest-approving-controller",
    account: "certificate-controller",
    component: "certificate-controller",
    start: start_approver,
};

pub const SIGNER: Descriptor = Descriptor {
    name: "certificatesigningrequest-signing-controller",
    account: "certificate-controller",
    component: "certificate-controller",
    start: start_signer,
};

const KUBELET_CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
const KUBELET_SERVING: &str = "kubernetes.io/kubelet-serving";
const CLIENT: &str = "kubernetes.io/kube-apiserver-client";
const LEGACY: &str = "kubernetes.io/legacy-unknown";
const NODES: &str = "system:nodes";
const NODE_PREFIX: &str = "system:node:";
/// RFC 5280's key usage bits.
const KEY_USAGES: [(&str, u16); 6] = [
    ("digital signature", 0),
    ("content commitment", 1),
    ("key encipherment", 2),
    ("data encipherment", 3),
    ("key agreement", 4),
    ("signing", 0),
];

fn start_approver(context: Context) {
    let nodes = context.informers.of::<Node>();
    run(context.clone(), "csr-approver", move |context, csr| {
        let nodes = nodes.clone();
        async move {
            nodes.synced().await;
            approve(&context, &nodes.lister(), &csr).await
        }
    });
}

fn start_signer(context: Context) {
    let (Some(cert), Some(key)) = (&context.options.signing_cert, &context.options.signing_key)
    else {
        tracing::info!("no signing certificate is given: no requests are signed");
        return;
    };
    let authority = match Authority::from_pem(cert, key) {
        Ok(authority) => Arc::new(authority),
        Err(error) => {
            tracing::error!(%error, "the signing certificate cannot be used: no requests are signed");
            return;
        }
    };
    run(context.clone(), "csr-signer", move |context, csr| {
        let authority = authority.clone();
        async move { sign(&context, &authority, &csr).await }
    });
}

fn run<F>(
    context: Context,
    name: &'static str,
    work: impl Fn(Context, Arc<CertificateSigningRequest>) -> F + Clone + Send + Sync + 'static,
) where
    F: Future<Output = Result<Outcome>> + Send + 'static,
{
    let requests = context.informers.of::<CertificateSigningRequest>();
    let queue: WorkQueue<Arc<str>> = WorkQueue::new(name);
    let adds = queue.clone();
    requests.subscribe_raw(move |event| adds.add(event.entry().header.key.name.clone()));
    let tasks = context.tasks.clone();
    tasks.clone().spawn(name, async move {
        requests.synced().await;
        let lister: Lister<CertificateSigningRequest> = requests.lister();
        spawn_workers(&tasks, &queue, 5, move |name: Arc<str>| {
            let found = lister.get("", &name);
            let (work, context) = (work.clone(), context.clone());
            async move {
                match found {
                    Some(csr) => work(context, csr).await,
                    None => Ok(Outcome::Done),
                }
            }
        });
    });
}

fn has_condition(csr: &CertificateSigningRequest, kind: &str) -> bool {
    let conditions = csr.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|one| one.type_ == kind)
}

/// A kubelet's client certificate, for the node that its request names.
fn is_kubelet_client(spec: &CertificateSigningRequestSpec, csr: &Csr) -> bool {
    let usages = spec.usages.clone().unwrap_or_default();
    let known = |one: &String| {
        matches!(one.as_str(), "key encipherment" | "digital signature" | "client auth")
    };
    spec.signer_name == KUBELET_CLIENT
        && csr.organizations == [NODES]
        && csr.common_name.starts_with(NODE_PREFIX)
        && csr.sans.is_empty()
        && usages.iter().all(known)
        && ["digital signature", "client auth"]
            .iter()
            .all(|one| usages.iter().any(|usage| usage == one))
}

/// A kubelet's serving certificate: signed once somebody approved it.
fn is_kubelet_serving(spec: &CertificateSigningRequestSpec, csr: &Csr) -> bool {
    let usages = spec.usages.clone().unwrap_or_default();
    let known = |one: &String| {
        matches!(one.as_str(), "key encipherment" | "digital signature" | "server auth")
    };
    csr.organizations == [NODES]
        && csr.common_name.starts_with(NODE_PREFIX)
        && csr.sans.iter().any(|san| matches!(san, San::Dns(_) | San::Ip(_)))
        && !csr.sans.iter().any(|san| matches!(san, San::Email(_) | San::Uri(_)))
        && usages.iter().all(known)
        && ["digital signature", "server auth"]
            .iter()
            .all(|one| usages.iter().any(|usage| usage == one))
}

/// The proxy's or the DNS server's client certificate, asked for by a node.
fn is_node_component(spec: &CertificateSigningRequestSpec, csr: &Csr) -> bool {
    let usages = spec.usages.clone().unwrap_or_default();
    let known = |one: &String| {
        matches!(one.as_str(), "key encipherment" | "digital signature" | "client auth")
    };
    let components = [Component::Proxy, Component::Dns];
    spec.signer_name == CLIENT
        && spec.username.as_deref().is_some_and(|user| user.starts_with(NODE_PREFIX))
        && components.iter().any(|one| one.identity().user == csr.common_name)
        && csr.organizations.is_empty()
        && csr.sans.is_empty()
        && usages.iter().all(known)
        && usages.iter().any(|usage| usage == "client auth")
}

/// Whether a serving certificate's names are the node's own: its name and its addresses.
fn names_only(csr: &Csr, node: &Node) -> bool {
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let mut own = vec![San::parse(name)];
    own.extend(addresses.into_iter().map(|one| San::parse(&one.address)));
    csr.sans.iter().all(|san| own.contains(san))
}

/// Ways to be approved: the right that is asked for (a subresource), and what the approval says.
const WAYS: [(&str, &str); 4] = [
    ("selfnodeclient", "Auto approving self kubelet client certificate after SubjectAccessReview."),
    ("nodeclient", "Auto approving kubelet client certificate after SubjectAccessReview."),
    (
        "selfnodeserver",
        "Auto approving self kubelet serving certificate after SubjectAccessReview.",
    ),
    ("nodecomponent", "Auto approving node component certificate after SubjectAccessReview."),
];

/// Whether a request is of the kind that a right is about; `node` is the one that the request names.
fn applies(
    subresource: &str,
    spec: &CertificateSigningRequestSpec,
    csr: &Csr,
    node: Option<&Node>,
) -> bool {
    let own = spec.username.as_deref() == Some(&csr.common_name);
    match subresource {
        "selfnodeclient" => own && is_kubelet_client(spec, csr),
        "nodeclient" => is_kubelet_client(spec, csr),
        "selfnodeserver" => {
            own && spec.signer_name == KUBELET_SERVING
                && is_kubelet_serving(spec, csr)
                && node.is_some_and(|node| names_only(csr, node))
        }
        "nodecomponent" => is_node_component(spec, csr),
        _ => false,
    }
}

async fn approve(
    context: &Context,
    nodes: &Lister<Node>,
    csr: &CertificateSigningRequest,
) -> Result<Outcome> {
    let decided = has_condition(csr, "Approved")
        || has_condition(csr, "Denied")
        || has_condition(csr, "Failed");
    let Some(parsed) = Csr::parse(&csr.spec.request.0).ok().filter(|_| !decided) else {
        return Ok(Outcome::Done);
    };
    let node = parsed.common_name.strip_prefix(NODE_PREFIX).and_then(|name| nodes.get("", name));
    let ways: Vec<_> = WAYS
        .iter()
        .filter(|(subresource, _)| applies(subresource, &csr.spec, &parsed, node.as_deref()))
        .collect();
    for (subresource, message) in &ways {
        if may(context, csr, subresource).await? {
            return write_approval(context, csr, message).await;
        }
    }
    // The right may be granted later, and the node may say more of its addresses. What never can be
    // approved here is left to people.
    let may_come = !ways.is_empty() || csr.spec.signer_name == KUBELET_SERVING;
    Ok(if may_come { Outcome::Backoff } else { Outcome::Done })
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

async fn write_approval(
    context: &Context,
    csr: &CertificateSigningRequest,
    message: &str,
) -> Result<Outcome> {
    let now = Time(base::clock::now_seconds());
    let mut updated = csr.clone();
    let conditions = updated.status.get_or_insert_default().conditions.get_or_insert_default();
    conditions.push(CertificateSigningRequestCondition {
        type_: "Approved".into(),
        status: "True".into(),
        reason: Some("AutoApproved".into()),
        message: Some(message.into()),
        last_update_time: Some(now.clone()),
        last_transition_time: Some(now),
    });
    let name = csr.metadata.name.as_deref().unwrap_or_default();
    let api: Api<CertificateSigningRequest> = context.client.api(None);
    api.replace_subresource("approval", name, &PostParams::default(), &updated).await?;
    tracing::info!(csr = name, "approved a kubelet's certificate request");
    Ok(Outcome::Done)
}

async fn sign(
    context: &Context,
    authority: &Authority,
    csr: &CertificateSigningRequest,
) -> Result<Outcome> {
    let issued = csr.status.as_ref().is_some_and(|status| status.certificate.is_some());
    let done = issued
        || !has_condition(csr, "Approved")
        || has_condition(csr, "Denied")
        || has_condition(csr, "Failed");
    if done
        || ![KUBELET_CLIENT, KUBELET_SERVING, CLIENT, LEGACY]
            .contains(&csr.spec.signer_name.as_str())
    {
        return Ok(Outcome::Done);
    }
    let mut updated = csr.clone();
    match certificate(&csr.spec, authority, context.options.signing_duration) {
        Ok(pem) => {
            updated.status.get_or_insert_default().certificate = Some(ByteString(pem.into_bytes()))
        }
        Err(why) => {
            let now = Time(base::clock::now_seconds());
            let conditions =
                updated.status.get_or_insert_default().conditions.get_or_insert_default();
            conditions.push(CertificateSigningRequestCondition {
                type_: "Failed".into(),
                status: "True".into(),
                reason: Some("SignerValidationFailure".into()),
                message: Some(why),
                last_update_time: Some(now.clone()),
                last_transition_time: Some(now),
            });
        }
    }
    let name = csr.metadata.name.as_deref().unwrap_or_default();
    let api: Api<CertificateSigningRequest> = context.client.api(None);
    match api.replace_status(name, &PostParams::default(), &updated).await {
        Err(error) if error.is_not_found() => Ok(Outcome::Done),
        done => done.map(|_| Outcome::Done),
    }
}

/// The certificate, or why the signer does not sign. Pure but for the signature.
fn certificate(
    spec: &CertificateSigningRequestSpec,
    authority: &Authority,
    longest: Duration,
) -> Result<String, String> {
    let csr = Csr::parse(&spec.request.0).map_err(|error| error.to_string())?;
    let usages = spec.usages.clone().unwrap_or_default();
    let fits = match spec.signer_name.as_str() {
        KUBELET_CLIENT => is_kubelet_client(spec, &csr),
        KUBELET_SERVING => is_kubelet_serving(spec, &csr),
        CLIENT => {
            usages.iter().any(|one| one == "client auth")
                && !csr.organizations.iter().any(|one| one == "system:masters")
        }
        _ => true,
    };
    if !fits {
        return Err(format!("the request is not one that signer {} signs", spec.signer_name));
    }
    let mut extended = vec![];
    let mut bits = 0;
    for usage in &usages {
        match usage.as_str() {
            "client auth" => extended.push(Usage::Client),
            "server auth" => extended.push(Usage::Server),
            other => match KEY_USAGES.iter().find(|(name, _)| *name == other) {
                Some((_, bit)) => bits |= 1 << bit,
                None => return Err(format!("unrecognized key usage {other:?}")),
            },
        }
    }
    let asked = spec.expiration_seconds.map(|seconds| Duration::from_secs(seconds.max(600) as u64));
    let lifetime = asked.map_or(longest, |asked| asked.min(longest));
    authority.sign_request(&csr, &extended, bits, lifetime).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{NodeAddress, NodeStatus};
    use pki::{Profile, new_request};

    use super::*;

    fn node() -> Node {
        let address =
            |kind: &str, address: &str| NodeAddress { type_: kind.into(), address: address.into() };
        let mut node = Node::default();
        node.metadata.name = Some("n1".into());
        let addresses = vec![address("InternalIP", "10.0.0.7"), address("Hostname", "n1")];
        node.status = Some(NodeStatus { addresses: Some(addresses), ..NodeStatus::default() });
        node
    }

    fn ways(user: &str, signer: &str, usage: &str, profile: &Profile) -> Vec<&'static str> {
        let (request, _) = new_request(profile).expect("makes a request");
        let csr = Csr::parse(request.as_bytes()).expect("parses");
        let spec = CertificateSigningRequestSpec {
            signer_name: signer.into(),
            username: Some(user.into()),
            usages: Some(vec!["digital signature".into(), usage.into()]),
            request: ByteString(request.into_bytes()),
            ..Default::default()
        };
        let all = WAYS.iter().map(|(subresource, _)| *subresource);
        all.filter(|one| applies(one, &spec, &csr, Some(&node()))).collect()
    }

    #[test]
    fn a_node_gets_its_own_names_and_its_components() {
        let of_node = Profile::client("system:node:n1", &["system:nodes"]);
        let check = |user: &str, signer: &str, usage: &str, profile: Profile, expected: &[&str]| {
            assert_eq!(ways(user, signer, usage, &profile), expected, "{user} {signer} {usage}");
        };
        let own = "system:node:n1";
        let client = "client auth";
        check("system:bootstrap:abcdef", KUBELET_CLIENT, client, of_node.clone(), &["nodeclient"]);
        check(own, KUBELET_CLIENT, client, of_node.clone(), &["selfnodeclient", "nodeclient"]);

        let server = "server auth";
        let named = |names: &[&str]| of_node.clone().with_sans(names);
        let good = named(&["n1", "10.0.0.7"]);
        check(own, KUBELET_SERVING, server, good.clone(), &["selfnodeserver"]);
        check(own, KUBELET_SERVING, client, good.clone(), &[]);
        check("system:node:n2", KUBELET_SERVING, server, good, &[]);
        check(own, KUBELET_SERVING, server, named(&["n1", "kubernetes.default.svc"]), &[]);
        check(own, KUBELET_SERVING, server, named(&["10.0.0.8"]), &[]);

        for component in [Component::Proxy, Component::Dns] {
            check(own, CLIENT, client, component.profile(), &["nodecomponent"]);
            check("jane", CLIENT, client, component.profile(), &[]);
        }
        check(own, CLIENT, client, Component::Scheduler.profile(), &[]);
        let grouped = Profile::client("system:kube-proxy", &["system:masters"]);
        check(own, CLIENT, client, grouped, &[]);
    }
}
