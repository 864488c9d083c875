//! Client certificates: the common name is the user, organizations are groups.
//!
//! TLS has proved possession of the key; this code checks that the chain leads to the client CA, because
//! an unknown certificate must give a 401, not a broken handshake (see `transport::tls`).
//!
//! A verified chain is not checked again for ten seconds, because two signatures are half of a small
//! request's cost. Upstream checks each request. Only time could change the result, and it is checked for
//! each request: no certificate is accepted after its end, also if the clock is set back.

use std::sync::Arc;
use std::time::Duration;

use api::nodes::CREDENTIAL_ID;
use apiserver::StatusError;
use apiserver::authn::{Authenticator, PeerCertificates};
use apiserver::request::UserInfo;
use async_trait::async_trait;
use base::memory::Memory;
use http::request::Parts;
use jiff::Timestamp;
use release::features::{self, Feature};
use rustls_pki_types::CertificateDer;
use sha2::{Digest, Sha256};
use transport::ConnectionInfo;
use transport::tls::{ChainVerifier, TlsError};

use crate::node_certificates::{NodeCertificates, Shown};
use crate::sightings::Sightings;

/// How long the result for a chain is cached.
const HOLDS: Duration = Duration::from_secs(10);
/// The number of cached chains; some 500 bytes each.
const REMEMBERED: usize = 1024;

pub struct X509 {
    verifier: Arc<ChainVerifier>,
    sightings: Sightings,
    /// By the chain's digest. Rejected chains are not cached.
    believed: Memory<Believed>,
    /// Checked for each request, because a Node may be deleted at any time.
    nodes: NodeCertificates,
}

/// The user of a chain (`None`: its subject has no name), and its time of validity.
#[derive(Clone)]
struct Believed {
    user: Option<UserInfo>,
    /// Set for a node's certificate.
    shown: Option<Shown>,
    from: Timestamp,
    until: Timestamp,
}

impl X509 {
    /// `ca_pem`: the CAs of client certificates.
    pub fn new(ca_pem: &str) -> Result<Self, TlsError> {
        let verifier = Arc::new(ChainVerifier::new(ca_pem)?);
        let sightings = Sightings::of(ca_pem);
        let nodes = NodeCertificates::default();
        Ok(Self { verifier, sightings, believed: Memory::new(REMEMBERED), nodes })
    }

    /// Sets the check for certificates of nodes.
    pub fn with_nodes(self, nodes: NodeCertificates) -> Self {
        Self { nodes, ..self }
    }

    /// Users with certificates of any CA but the first.
    pub fn sightings(&self) -> &Sightings {
        &self.sightings
    }

    fn check(&self, chain: &[CertificateDer<'_>]) -> Result<Believed, StatusError> {
        let leaf = verified_leaf(&self.verifier, chain)?;
        let from = base::clock::now();
        let rest = chain.iter().skip(1).filter_map(|der| pki::Certificate::parse(der).ok());
        let ends = rest.map(|one| one.not_after).chain([leaf.not_after, from + HOLDS]);
        let until = ends.min().unwrap_or(from);
        if leaf.common_name.is_empty() {
            return Ok(Believed { user: None, shown: None, from, until });
        }
        self.sightings.note(&leaf.common_name, &leaf, chain);
        let digest: String = leaf.fingerprint().iter().map(|byte| format!("{byte:02x}")).collect();
        let id = format!("X509SHA256={digest}");
        let shown = Shown::of(&leaf, &id);
        let reads_uids = features::enabled(Feature::AllowParsingUserUIDFromCertAuth);
        let user = UserInfo {
            name: leaf.common_name,
            uid: leaf.uid.filter(|_| reads_uids).unwrap_or_default(),
            groups: leaf.organizations,
            extra: [(CREDENTIAL_ID.to_owned(), vec![id])].into(),
        };
        Ok(Believed { user: Some(user), shown, from, until })
    }

    /// The user at this moment.
    fn user(&self, believed: Believed) -> Option<UserInfo> {
        let is_retired = believed.shown.is_some_and(|shown| !self.nodes.count(&shown));
        let mut user = believed.user?;
        if is_retired {
            NodeCertificates::retire(&mut user);
        }
        Some(user)
    }
}

fn digest(chain: &[CertificateDer<'_>]) -> [u8; 32] {
    let mut digest = Sha256::new();
    for der in chain {
        digest.update(der.len().to_be_bytes());
        digest.update(der);
    }
    digest.finalize().into()
}

/// The chain that the client presented, leaf first.
pub(crate) fn peer_chain(request: &Parts) -> Option<Vec<CertificateDer<'_>>> {
    if let Some(PeerCertificates(chain)) = request.extensions.get() {
        return Some(chain.iter().map(|der| CertificateDer::from(der.as_slice())).collect());
    }
    let info = request.extensions.get::<ConnectionInfo>()?;
    Some(info.peer_certificates.as_ref()?.iter().map(|der| CertificateDer::from(&**der)).collect())
}

/// Checks the chain and reads the leaf.
pub(crate) fn verified_leaf(
    verifier: &ChainVerifier,
    chain: &[CertificateDer<'_>],
) -> Result<pki::Certificate, StatusError> {
    let now = u64::try_from(base::clock::now().as_second()).unwrap_or_default();
    let refused = |error| StatusError::unauthorized().with_message(format!("x509: {error}"));
    verifier.verify(chain, now).map_err(refused)?;
    pki::Certificate::parse(&chain[0]).map_err(|_| StatusError::unauthorized())
}

#[async_trait]
impl Authenticator for X509 {
    async fn authenticate(&self, request: &Parts) -> Result<Option<UserInfo>, StatusError> {
        let Some(chain) = peer_chain(request).filter(|chain| !chain.is_empty()) else {
            return Ok(None);
        };
        let key = digest(&chain);
        let now = base::clock::now();
        // The wall clock decides, too: certificates expire by it, and it can be set back.
        let known = self.believed.get(&key);
        if let Some(known) = known.filter(|known| (known.from..=known.until).contains(&now)) {
            return Ok(self.user(known));
        }
        let believed = self.check(&chain)?;
        self.believed.put(key, believed.clone(), HOLDS);
        Ok(self.user(believed))
    }
}

#[cfg(test)]
mod tests {
    use pki::{Authority, Profile, Usage};

    use super::*;

    fn request(cert_pem: Option<&str>) -> Parts {
        let (mut parts, ()) = http::Request::new(()).into_parts();
        if let Some(pem) = cert_pem {
            let chain = pki::certificates(pem.as_bytes()).expect("parses");
            let chain = chain.iter().map(|cert| cert.der().to_vec()).collect();
            parts.extensions.insert(PeerCertificates(chain));
        }
        parts
    }

    #[tokio::test]
    async fn names_and_groups_come_from_the_subject() {
        let authority = Authority::generate("ca").expect("keys can be made");
        let stranger = Authority::generate("ca").expect("keys can be made");
        let x509 = X509::new(authority.cert_pem()).expect("an authority");
        let jane = Profile::client("jane", &["dev", "ops"]);
        let good = authority.issue(&jane).expect("signs").cert_pem;
        let user = x509.authenticate(&request(Some(&good))).await.expect("valid").expect("a user");
        assert_eq!((user.name.as_str(), user.groups.join(",")), ("jane", "dev,ops".to_owned()));
        let ids = &user.extra["authentication.kubernetes.io/credential-id"];
        assert!(ids[0].starts_with("X509SHA256=") && ids[0].len() == 11 + 64);

        let strange = stranger.issue(&jane).expect("signs").cert_pem;
        assert!(x509.authenticate(&request(Some(&strange))).await.is_err());
        let server = Profile { usages: vec![Usage::Server], ..jane };
        let server = authority.issue(&server).expect("signs").cert_pem;
        assert!(x509.authenticate(&request(Some(&server))).await.is_err());
        assert_eq!(x509.authenticate(&request(None)).await.expect("nothing shown"), None);
    }

    #[tokio::test(start_paused = true)]
    async fn results_are_cached_for_ten_seconds_and_never_beyond_the_end() {
        const SECOND: Duration = Duration::from_secs(1);
        let _world = base::sim::enter(1);
        let authority = Authority::generate("ca").expect("keys can be made");
        let x509 = X509::new(authority.cert_pem()).expect("an authority");
        let shown =
            |profile: &Profile| request(Some(&authority.issue(profile).expect("signs").cert_pem));
        let jane = shown(&Profile::client("jane", &[]));
        let kept = || x509.believed.len();

        assert_eq!(x509.authenticate(&jane).await.expect("valid").expect("a user").name, "jane");
        assert_eq!(kept(), 1);
        // A second chain for the same name is a separate entry.
        let again = shown(&Profile::client("jane", &[]));
        assert!(x509.authenticate(&again).await.is_ok());
        assert_eq!(kept(), 2);

        let short = Profile { lifetime: 5 * SECOND, ..Profile::client("joe", &[]) };
        let short = shown(&short);
        assert!(x509.authenticate(&short).await.is_ok());
        base::sim::jump(4 * SECOND);
        assert!(x509.authenticate(&short).await.is_ok());
        base::sim::jump(2 * SECOND);
        assert!(x509.authenticate(&short).await.is_err(), "it has expired");
        assert!(x509.authenticate(&jane).await.is_ok());
        base::sim::jump(20 * SECOND);
        assert!(x509.authenticate(&jane).await.is_ok(), "checked again");

        let stranger = Authority::generate("ca").expect("keys can be made");
        let strange = stranger.issue(&Profile::client("jane", &[])).expect("signs").cert_pem;
        let before = kept();
        assert!(x509.authenticate(&request(Some(&strange))).await.is_err());
        assert_eq!(kept(), before, "rejected chains are not cached");
    }
}
