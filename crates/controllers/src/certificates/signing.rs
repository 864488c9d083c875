//! Signs approved requests that are what their signer signs.
//!
//! In: approved CertificateSigningRequests, Nodes. Out: certificates, or the condition `Failed`.
//! Invariant: a subject of a node's client certificate is the name, the groups and the Node's UID; what
//! else the request has there is left out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use client::{Api, Lister, Outcome, PostParams, Result};
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestSpec,
};
use k8s_openapi::api::core::v1::Node;
use pki::{Authority, Csr, Identity, JOIN_LIFETIME, Usage};

use super::{
    CLIENT, KUBELET_CLIENT, KUBELET_SERVING, LEGACY, NODE_PREFIX, add_condition, has_condition,
    is_kubelet_client, is_kubelet_serving, is_node_component, uses,
};
use crate::context::{Context, Options};
use crate::descriptor::{Setup, or_gone};

/// RFC 5280's key usage bits.
const KEY_USAGES: [(&str, u16); 6] = [
    ("digital signature", 0),
    ("content commitment", 1),
    ("key encipherment", 2),
    ("data encipherment", 3),
    ("key agreement", 4),
    ("signing", 0),
];

/// Why nothing is signed: of the condition `Failed`.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error("the request is not one that signer {0} signs")]
    Unfit(String),
    #[error("unrecognized key usage {0:?}")]
    Usage(String),
    #[error(transparent)]
    Pki(#[from] pki::Error),
}

pub(super) struct Signer {
    context: Context,
    /// By signer.
    authorities: BTreeMap<&'static str, Authority>,
    nodes: Lister<Node>,
    requests: Lister<CertificateSigningRequest>,
}

impl Signer {
    pub(super) fn new(setup: &Setup<Arc<str>>) -> Option<Self> {
        let authorities = authorities(&setup.options);
        if authorities.is_empty() {
            tracing::info!("no signing certificate is given: no requests are signed");
            return None;
        }
        Some(Self {
            context: setup.context.clone(),
            authorities,
            nodes: setup.lister(),
            requests: setup.lister(),
        })
    }

    pub(super) async fn reconcile(&self, name: &str) -> Result<Outcome> {
        let Some(csr) = self.requests.get("", name) else { return Ok(Outcome::Done) };
        match self.authorities.get(csr.spec.signer_name.as_str()) {
            Some(authority) => reconcile(&self.context, authority, &self.nodes, &csr).await,
            None => Ok(Outcome::Done),
        }
    }
}

async fn reconcile(
    context: &Context,
    authority: &Authority,
    nodes: &Lister<Node>,
    csr: &CertificateSigningRequest,
) -> Result<Outcome> {
    let is_issued = csr.status.as_ref().is_some_and(|status| status.certificate.is_some());
    let is_done = is_issued
        || !has_condition(csr, "Approved")
        || has_condition(csr, "Denied")
        || has_condition(csr, "Failed");
    if is_done {
        return Ok(Outcome::Done);
    }
    let mut updated = csr.clone();
    let uid_of = |name: &str| nodes.get("", name)?.metadata.uid.clone();
    match certificate(&csr.spec, authority, context.options.signing_duration, uid_of) {
        Ok(pem) => {
            updated.status.get_or_insert_default().certificate = Some(ByteString(pem.into_bytes()))
        }
        Err(why) => {
            add_condition(&mut updated, "Failed", "SignerValidationFailure", why.to_string());
        }
    }
    let name = csr.metadata.name.as_deref().unwrap_or_default();
    let api: Api<CertificateSigningRequest> = context.client.api(None);
    or_gone(api.replace_status(name, &PostParams::default(), &updated).await)
}

/// The authority of each signer, as far as flags name one that can be used.
fn authorities(options: &Options) -> BTreeMap<&'static str, Authority> {
    let usual = options.signing_cert.as_ref().zip(options.signing_key.as_ref());
    let pair = |signer: &str| match options.signing_by_signer.is_empty() {
        true => usual,
        false => options.signing_by_signer.get(signer).map(|(cert, key)| (cert, key)),
    };
    let mut all = BTreeMap::new();
    for signer in [KUBELET_CLIENT, KUBELET_SERVING, CLIENT, LEGACY] {
        let Some((cert, key)) = pair(signer) else { continue };
        match Authority::from_pem(cert, key) {
            Ok(authority) => drop(all.insert(signer, authority)),
            Err(error) => tracing::error!(
                signer, %error, "the signing certificate cannot be used: no requests are signed"
            ),
        }
    }
    all
}

/// The certificate, or why the signer does not sign. Pure but for the signature. `uid_of` knows Nodes.
fn certificate(
    spec: &CertificateSigningRequestSpec,
    authority: &Authority,
    longest: Duration,
    uid_of: impl Fn(&str) -> Option<String>,
) -> std::result::Result<String, Refusal> {
    let csr = Csr::parse(&spec.request.0)?;
    let is_fit = match spec.signer_name.as_str() {
        KUBELET_CLIENT => is_kubelet_client(spec, &csr),
        KUBELET_SERVING => is_kubelet_serving(spec, &csr),
        CLIENT => {
            uses(spec, &["client auth"], &["digital signature", "key encipherment"])
                && !csr.organizations.iter().any(|one| one == "system:masters")
        }
        _ => true,
    };
    if !is_fit {
        return Err(Refusal::Unfit(spec.signer_name.clone()));
    }
    let (extended, bits) = usages(spec)?;
    let asked = spec.expiration_seconds.map(|seconds| Duration::from_secs(seconds.max(600) as u64));
    let lifetime = asked.map_or(longest, |asked| asked.min(longest));
    let (csr, lifetime) = match is_kubelet_client(spec, &csr) || is_node_component(spec, &csr) {
        true => of_node(spec, csr, lifetime, uid_of),
        false => (csr, lifetime),
    };
    Ok(authority.sign_request(&csr, &extended, bits, lifetime)?)
}

/// A node's client certificate carries the UID of its Node, if the node itself asks. Otherwise it is for
/// joining, and short.
fn of_node(
    spec: &CertificateSigningRequestSpec,
    csr: Csr,
    lifetime: Duration,
    uid_of: impl Fn(&str) -> Option<String>,
) -> (Csr, Duration) {
    let asks = spec.username.as_deref().and_then(|user| user.strip_prefix(NODE_PREFIX));
    let named = Identity::node_of(&csr.common_name, &csr.organizations);
    let uid = asks.filter(|asks| named == Some(*asks)).and_then(uid_of);
    let lifetime = if uid.is_some() { lifetime } else { lifetime.min(JOIN_LIFETIME) };
    (csr.with_uid(uid.as_deref()), lifetime)
}

fn usages(spec: &CertificateSigningRequestSpec) -> std::result::Result<(Vec<Usage>, u16), Refusal> {
    let (mut extended, mut bits) = (vec![], 0);
    for usage in spec.usages.iter().flatten() {
        match usage.as_str() {
            "client auth" => extended.push(Usage::Client),
            "server auth" => extended.push(Usage::Server),
            other => match KEY_USAGES.iter().find(|(name, _)| *name == other) {
                Some((_, bit)) => bits |= 1 << bit,
                None => return Err(Refusal::Usage(other.to_owned())),
            },
        }
    }
    Ok((extended, bits))
}

#[cfg(test)]
mod tests {
    use pki::{Component, Profile, new_request};

    use super::*;

    const YEAR: Duration = pki::LEAF_LIFETIME;

    fn spec(
        user: &str,
        signer: &str,
        usages: &[&str],
        profile: &Profile,
    ) -> CertificateSigningRequestSpec {
        let (request, _) = new_request(profile).expect("makes a request");
        CertificateSigningRequestSpec {
            signer_name: signer.into(),
            username: Some(user.into()),
            usages: Some(usages.iter().map(|usage| (*usage).to_owned()).collect()),
            request: ByteString(request.into_bytes()),
            ..Default::default()
        }
    }

    fn signed(spec: &CertificateSigningRequestSpec) -> Option<pki::Certificate> {
        let authority = Authority::generate("ca").expect("keys can be made");
        let uid_of = |name: &str| (name == "n1").then(|| "1-2-3".to_owned());
        let pem = certificate(spec, &authority, YEAR, uid_of).ok()?;
        Some(pki::certificates(pem.as_bytes()).expect("parses").remove(0))
    }

    const CLIENT_USES: [&str; 2] = ["digital signature", "client auth"];
    const SERVER_USES: [&str; 2] = ["digital signature", "server auth"];

    #[test]
    fn a_nodes_certificate_carries_its_uid_or_is_short() {
        let check = |user: &str, signer: &str, profile: &Profile, uid: Option<&str>| {
            let cert = signed(&spec(user, signer, &CLIENT_USES, profile)).expect("is signed");
            assert_eq!(cert.uid.as_deref(), uid, "{user}");
            let lives = cert.not_after.duration_since(cert.not_before).unsigned_abs();
            assert_eq!(lives <= JOIN_LIFETIME + pki::BACKDATE, uid.is_none(), "{user} {lives:?}");
        };
        let node = Profile::client("system:node:n1", &["system:nodes"]);
        check("system:node:n1", KUBELET_CLIENT, &node, Some("1-2-3"));
        // Not even if the Node was registered since.
        check("system:bootstrap:abcdef", KUBELET_CLIENT, &node, None);
        let new = Profile::client("system:node:n2", &["system:nodes"]);
        check("system:node:n2", KUBELET_CLIENT, &new, None);
        for component in [Component::Proxy, Component::Dns] {
            let of = |name: &str| component.on_node(name).expect("nodes have it").profile();
            check("system:node:n1", CLIENT, &of("n1"), Some("1-2-3"));
            check("system:node:n2", CLIENT, &of("n2"), None);
        }
    }

    #[test]
    fn signers_sign_what_upstreams_sign() {
        let check = |signer: &str, usages: &[&str], profile: &Profile, expected: bool| {
            let is_signed = signed(&spec("jane", signer, usages, profile)).is_some();
            assert_eq!(is_signed, expected, "{signer} {usages:?} {profile:?}");
        };
        let node = Profile::client("system:node:n1", &["system:nodes"]);
        let named = node.clone().with_sans(["n1", "10.0.0.7"]);
        let all = ["digital signature", "client auth", "key encipherment"];
        check(KUBELET_CLIENT, &CLIENT_USES, &node, true);
        check(KUBELET_CLIENT, &all, &node, true);
        check(KUBELET_CLIENT, &["client auth"], &node, false);
        check(KUBELET_CLIENT, &SERVER_USES, &node, false);
        check(KUBELET_CLIENT, &CLIENT_USES, &named, false);
        check(KUBELET_CLIENT, &CLIENT_USES, &Profile::client("n1", &["system:nodes"]), false);
        let of_masters = Profile::client("system:node:n1", &["system:masters"]);
        check(KUBELET_CLIENT, &CLIENT_USES, &of_masters, false);
        let fit = spec("jane", KUBELET_CLIENT, &CLIENT_USES, &node);
        let mut csr = Csr::parse(&fit.request.0).expect("parses");
        assert!(is_kubelet_client(&fit, &csr));
        csr.organizations.push("system:masters".into());
        assert!(!is_kubelet_client(&fit, &csr), "one group only");
        check(KUBELET_SERVING, &SERVER_USES, &named, true);
        check(KUBELET_SERVING, &SERVER_USES, &node, false);
        check(KUBELET_SERVING, &CLIENT_USES, &named, false);
        check(KUBELET_SERVING, &["digital signature", "server auth", "client auth"], &named, false);
        let jane = Profile::client("jane", &["dev"]);
        check(CLIENT, &CLIENT_USES, &jane, true);
        check(CLIENT, &["client auth"], &jane, true);
        check(CLIENT, &["digital signature"], &jane, false);
        check(CLIENT, &["client auth", "server auth"], &jane, false);
        check(CLIENT, &["client auth", "signing"], &jane, false);
        check(CLIENT, &CLIENT_USES, &Profile::client("jane", &["system:masters"]), false);
        check(LEGACY, &["server auth", "signing"], &jane, true);
        check(LEGACY, &["cert sign"], &jane, false);
    }

    #[test]
    fn a_node_asks_for_its_own_components() {
        let check = |user: &str, profile: &Profile, expected: bool| {
            let spec = spec(user, CLIENT, &CLIENT_USES, profile);
            let csr = Csr::parse(&spec.request.0).expect("parses");
            assert_eq!(is_node_component(&spec, &csr), expected, "{user} {profile:?}");
        };
        for component in [Component::Proxy, Component::Dns] {
            let own = component.on_node("n1").expect("nodes have it");
            check("system:node:n1", &own.profile(), true);
            check("system:node:n2", &own.profile(), false);
            check("jane", &own.profile(), false);
            // The server's own, which have no node.
            check("system:node:n1", &component.profile(), false);
            let grouped = Profile::client(own.user.as_str(), &["system:masters"]);
            check("system:node:n1", &grouped, false);
            check("system:node:n1", &own.profile().with_sans(["n1"]), false);
        }
        check("system:node:n1", &Component::Scheduler.profile(), false);
    }
}
