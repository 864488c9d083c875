//! TLS settings from PEM texts, and when certificates are checked.
//!
//! A server usually *requests* client certificates and proves possession of their keys. An authenticator
//! checks the signer later ([`ChainVerifier`]): an unknown certificate must get a 401, not a broken
//! handshake, and there are several authorities (clients, front proxies). Upstream: `tls.RequestClientCert`.

mod listeners;
mod pinned;

use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    ClientConfig, DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig,
    SignatureScheme,
};

pub use listeners::Listeners;
pub use pinned::ChainVerifier;

/// A server's settings, replaceable at any time; new connections use the new ones.
pub type ServerTls = Arc<ArcSwap<ServerConfig>>;

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{0}: {1}")]
    Pem(&'static str, String),
    #[error(transparent)]
    Rustls(#[from] rustls::Error),
    #[error("certificate verifier: {0}")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
}

/// A certificate chain, leaf first, and its private key.
#[derive(Debug)]
pub struct Identity {
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
}

impl Identity {
    pub fn from_pem(cert_pem: &str, key_pem: &str) -> Result<Self, TlsError> {
        let chain = certificates(cert_pem)?;
        if chain.is_empty() {
            return Err(TlsError::Pem("certificate", "no certificate in the text".to_owned()));
        }
        let key = PrivateKeyDer::from_pem_slice(key_pem.as_bytes())
            .map_err(|error| TlsError::Pem("private key", error.to_string()))?;
        Ok(Self { chain, key })
    }
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        Self { chain: self.chain.clone(), key: self.key.clone_key() }
    }
}

/// All certificates of a PEM text.
pub fn certificates(pem: &str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|error| TlsError::Pem("certificate", error.to_string()))
}

/// How a server treats client certificates.
#[derive(Clone, Debug)]
pub enum ClientCerts {
    /// Not asked for.
    Ignore,
    /// Asked for; possession is proven, and an authenticator checks the chain.
    Request,
    /// Asked for; a certificate that these authorities (PEM) did not sign fails the handshake.
    Verify(String),
}

/// A server's settings: `h2` and `http/1.1` by ALPN, TLS 1.2 and 1.3 unless [`Listeners`] were installed.
pub fn server_config(identity: &Identity, clients: &ClientCerts) -> Result<ServerConfig, TlsError> {
    server_config_by_name(identity, &[], clients)
}

/// The same, with other certificates for clients that ask for these names.
pub fn server_config_by_name(
    identity: &Identity,
    named: &[(Vec<String>, Identity)],
    clients: &ClientCerts,
) -> Result<ServerConfig, TlsError> {
    let (provider, versions) = listeners::of_process();
    let algorithms = provider.signature_verification_algorithms;
    let builder =
        ServerConfig::builder_with_provider(provider.clone()).with_protocol_versions(versions)?;
    let builder = match clients {
        ClientCerts::Ignore => builder.with_no_client_auth(),
        ClientCerts::Request => builder.with_client_cert_verifier(Arc::new(AskOnly { algorithms })),
        ClientCerts::Verify(ca_pem) => {
            let roots = Arc::new(roots(ca_pem)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider)
                .allow_unauthenticated()
                .build()?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = match named {
        [] => builder.with_single_cert(identity.chain.clone(), identity.key.clone_key())?,
        named => builder.with_cert_resolver(Arc::new(listeners::Named::new(identity, named)?)),
    };
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// [`server_config`], shareable and replaceable.
pub fn server_tls(identity: &Identity, clients: &ClientCerts) -> Result<ServerTls, TlsError> {
    Ok(Arc::new(ArcSwap::from_pointee(server_config(identity, clients)?)))
}

/// The authorities that a client trusts.
#[derive(Clone, Debug)]
pub enum Trust {
    /// These authorities, PEM.
    Authorities(String),
    /// The machine's authorities.
    System,
    /// Any server: `--insecure-skip-tls-verify`, and the first contact of a joining node, which
    /// compares the authority's hash itself.
    Anyone,
}

/// A client's settings, without ALPN: the connector sets it per use.
pub fn client_config(trust: &Trust, identity: Option<&Identity>) -> Result<ClientConfig, TlsError> {
    let provider = provider();
    let algorithms = provider.signature_verification_algorithms;
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let builder = match trust {
        Trust::Authorities(pem) => builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(pinned::ServerPins::new(pem)?)),
        Trust::System => builder.with_root_certificates(system_roots()),
        Trust::Anyone => {
            builder.dangerous().with_custom_certificate_verifier(Arc::new(AskOnly { algorithms }))
        }
    };
    Ok(match identity {
        Some(identity) => {
            builder.with_client_auth_cert(identity.chain.clone(), identity.key.clone_key())?
        }
        None => builder.with_no_client_auth(),
    })
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

fn roots(pem: &str) -> Result<RootCertStore, TlsError> {
    let mut store = RootCertStore::empty();
    for cert in certificates(pem)? {
        store.add(cert)?;
    }
    if store.is_empty() {
        return Err(TlsError::Pem("authorities", "no certificate in the text".to_owned()));
    }
    Ok(store)
}

/// The distribution's CA bundle; empty if there is none (then no server is trusted).
fn system_roots() -> RootCertStore {
    const BUNDLES: [&str; 3] = [
        "/etc/ssl/certs/ca-certificates.crt",
        "/etc/pki/tls/certs/ca-bundle.crt",
        "/etc/ssl/cert.pem",
    ];
    let mut store = RootCertStore::empty();
    if let Some(pem) = BUNDLES.iter().find_map(|path| std::fs::read_to_string(path).ok()) {
        store.add_parsable_certificates(certificates(&pem).unwrap_or_default());
    }
    store
}

/// Accepts any chain, but requires that the peer has the leaf's key.
#[derive(Debug)]
struct AskOnly {
    algorithms: WebPkiSupportedAlgorithms,
}

impl AskOnly {
    fn check_tls12(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, cert, signature, &self.algorithms)
    }

    fn check_tls13(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, cert, signature, &self.algorithms)
    }
}

impl ClientCertVerifier for AskOnly {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn verify_client_cert(
        &self,
        _leaf: &CertificateDer<'_>,
        _rest: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.check_tls12(message, cert, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.check_tls13(message, cert, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl ServerCertVerifier for AskOnly {
    fn verify_server_cert(
        &self,
        _leaf: &CertificateDer<'_>,
        _rest: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.check_tls12(message, cert, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.check_tls13(message, cert, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
