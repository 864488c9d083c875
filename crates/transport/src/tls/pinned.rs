//! Pinned certificates: leaf certificates that are trusted because the CA bundle contains them.
//!
//! In: a bundle and a peer's chain. Out: whether the peer is trusted. webpki decides everything
//! except one case: a leaf that is in the bundle byte for byte. Webhooks and test clusters often
//! use a self-signed certificate, which webpki refuses (`CaUsedAsEndEntity`). It also refuses a
//! leaf whose signer is not in the bundle.
//! Upstream: Go's `x509.Certificate.Verify` accepts a leaf that is in the pool.
//!
//! Invariant: a pinned leaf must still be valid in time, for the name and for the purpose.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use super::{TlsError, certificates, provider, roots};

/// The purpose of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Server,
    Client,
}

/// The certificates of a bundle, for comparison. Bundles are short, so a list is enough.
#[derive(Debug)]
pub(super) struct Pins(Vec<CertificateDer<'static>>);

impl Pins {
    pub(super) fn of(pem: &str) -> Result<Self, TlsError> {
        Ok(Self(certificates(pem)?))
    }

    /// `None`: the leaf is not in the bundle, so webpki decides.
    pub(super) fn check(
        &self,
        leaf: &CertificateDer<'_>,
        purpose: Purpose,
        now: UnixTime,
    ) -> Option<Result<(), Error>> {
        let is_pinned = self.0.iter().any(|one| one.as_ref() == leaf.as_ref());
        is_pinned.then(|| check_leaf(leaf, purpose, now).map_err(Error::from))
    }
}

fn check_leaf(
    leaf: &CertificateDer<'_>,
    purpose: Purpose,
    now: UnixTime,
) -> Result<(), CertificateError> {
    let parsed = X509Certificate::from_der(leaf).map_err(|_| CertificateError::BadEncoding)?;
    let leaf = parsed.1;
    let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    if now < leaf.validity().not_before.timestamp() {
        return Err(CertificateError::NotValidYet);
    }
    if now > leaf.validity().not_after.timestamp() {
        return Err(CertificateError::Expired);
    }
    // A certificate without the extension fits every purpose.
    let usage = leaf.extended_key_usage().map_err(|_| CertificateError::BadEncoding)?;
    let fits = usage.is_none_or(|usage| {
        let usage = usage.value;
        usage.any
            || match purpose {
                Purpose::Server => usage.server_auth,
                Purpose::Client => usage.client_auth,
            }
    });
    if fits { Ok(()) } else { Err(CertificateError::InvalidPurpose) }
}

/// Verifies servers for a client: by the bundle's own certificates, and by its authorities.
#[derive(Debug)]
pub(super) struct ServerPins {
    webpki: Arc<WebPkiServerVerifier>,
    pins: Pins,
}

impl ServerPins {
    pub(super) fn new(pem: &str) -> Result<Self, TlsError> {
        let roots = Arc::new(roots(pem)?);
        let webpki = WebPkiServerVerifier::builder_with_provider(roots, provider()).build()?;
        Ok(Self { webpki, pins: Pins::of(pem)? })
    }
}

impl ServerCertVerifier for ServerPins {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if let Some(outcome) = self.pins.check(leaf, Purpose::Server, now) {
            outcome?;
            verify_server_name(&ParsedCertificate::try_from(leaf)?, name)?;
            return Ok(ServerCertVerified::assertion());
        }
        self.webpki.verify_server_cert(leaf, rest, name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.webpki.verify_tls12_signature(message, cert, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.webpki.verify_tls13_signature(message, cert, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.webpki.supported_verify_schemes()
    }
}

/// Checks client chains against a set of authorities, outside of the handshake.
pub struct ChainVerifier {
    webpki: Arc<dyn ClientCertVerifier>,
    pins: Pins,
}

impl ChainVerifier {
    pub fn new(ca_pem: &str) -> Result<Self, TlsError> {
        let roots: Arc<RootCertStore> = Arc::new(roots(ca_pem)?);
        let webpki = WebPkiClientVerifier::builder_with_provider(roots, provider()).build()?;
        Ok(Self { webpki, pins: Pins::of(ca_pem)? })
    }

    /// Verifies `chain`, leaf first. The error text may be shown to the client.
    pub fn verify(&self, chain: &[CertificateDer<'_>], now_seconds: u64) -> Result<(), Error> {
        let (leaf, rest) = chain.split_first().ok_or(Error::NoCertificatesPresented)?;
        let now = UnixTime::since_unix_epoch(std::time::Duration::from_secs(now_seconds));
        match self.pins.check(leaf, Purpose::Client, now) {
            Some(outcome) => outcome,
            None => self.webpki.verify_client_cert(leaf, rest, now).map(|_| ()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, KeyPair, date_time_ymd,
    };

    use super::*;

    const NOW: u64 = 1_800_000_000; // January 2027

    /// A self-signed certificate for `webhook.svc`.
    fn own(change: impl FnOnce(&mut CertificateParams)) -> String {
        let names = vec!["webhook.svc".to_owned()];
        let mut params = CertificateParams::new(names).expect("a name");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(2040, 1, 1);
        change(&mut params);
        let key = KeyPair::generate().expect("a key");
        params.self_signed(&key).expect("signs").pem()
    }

    fn check(bundle: &str, leaf: &str, name: &'static str, expected: Result<(), &str>) {
        let verifier = ServerPins::new(bundle).expect("a bundle");
        let leaf = certificates(leaf).expect("parses").remove(0);
        let name = ServerName::try_from(name).expect("a name");
        let now = UnixTime::since_unix_epoch(std::time::Duration::from_secs(NOW));
        let got = verifier.verify_server_cert(&leaf, &[], &name, &[], now);
        match (got, expected) {
            (Ok(_), Ok(())) => {}
            (Err(error), Err(text)) => {
                let error = format!("{error:?}");
                assert!(error.contains(text), "{error} has no {text}");
            }
            (got, expected) => panic!("{got:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn leaves_in_the_bundle_are_trusted() {
        let leaf = own(|_| {});
        let other = own(|_| {});
        check(&leaf, &leaf, "webhook.svc", Ok(()));
        check(&format!("{other}{leaf}"), &leaf, "webhook.svc", Ok(()));
        check(&leaf, &leaf, "other.svc", Err("NotValidForName"));
        // Same subject, another key: webpki refuses it.
        check(&other, &leaf, "webhook.svc", Err("CaUsedAsEndEntity"));

        let past = own(|params| params.not_after = date_time_ymd(2021, 1, 1));
        check(&past, &past, "webhook.svc", Err("Expired"));
        let future = own(|params| params.not_before = date_time_ymd(2039, 1, 1));
        check(&future, &future, "webhook.svc", Err("NotValidYet"));
        let client = own(|params| {
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        });
        check(&client, &client, "webhook.svc", Err("InvalidPurpose"));
        let server = own(|params| {
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        });
        check(&server, &server, "webhook.svc", Ok(()));
    }

    #[test]
    fn clients_may_be_their_own_authority_too() {
        let (leaf, other) = (own(|_| {}), own(|_| {}));
        let chain = certificates(&leaf).expect("parses");
        let verify = |bundle: &str| ChainVerifier::new(bundle).expect("one").verify(&chain, NOW);
        assert_eq!(verify(&leaf), Ok(()));
        assert!(verify(&other).is_err());
    }
}
