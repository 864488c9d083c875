//! Client certificates: the common name is the user, organizations are groups.
//!
//! TLS proved possession of the key; that the chain leads to the client authority is checked here,
//! because a stranger's certificate is a 401 and not a broken handshake (see `transport::tls`).

use std::sync::Arc;

use apiserver::StatusError;
use apiserver::authn::{Authenticator, PeerCertificates};
use apiserver::request::UserInfo;
use async_trait::async_trait;
use http::request::Parts;
use rustls_pki_types::CertificateDer;
use transport::ConnectionInfo;
use transport::tls::{ChainVerifier, TlsError};

use crate::sightings::Sightings;

pub struct X509 {
    verifier: Arc<ChainVerifier>,
    sightings: Sightings,
}

impl X509 {
    /// `ca_pem`: the authorities that sign clients.
    pub fn new(ca_pem: &str) -> Result<Self, TlsError> {
        let verifier = Arc::new(ChainVerifier::new(ca_pem)?);
        Ok(Self { verifier, sightings: Sightings::of(ca_pem) })
    }

    /// Who came with a certificate of any authority but the first.
    pub fn sightings(&self) -> &Sightings {
        &self.sightings
    }
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
        let leaf = verified_leaf(&self.verifier, &chain)?;
        if leaf.common_name.is_empty() {
            return Ok(None);
        }
        self.sightings.note(&leaf.common_name, &leaf, &chain);
        let digest: String = leaf.fingerprint().iter().map(|byte| format!("{byte:02x}")).collect();
        let id = format!("X509SHA256={digest}");
        Ok(Some(UserInfo {
            name: leaf.common_name,
            groups: leaf.organizations,
            extra: [("authentication.kubernetes.io/credential-id".to_owned(), vec![id])].into(),
            ..UserInfo::default()
        }))
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
}
