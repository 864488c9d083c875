//! Identity material: certificate authorities, leaf certificates, signing requests, kubeconfigs and
//! join tokens.
//!
//! In: a data directory (own files, or brought along under kubeadm's names), profiles, PKCS#10
//! requests. Out: PEM and DER bytes that `transport` and `auth` consume; this crate opens no socket.
//!
//! Invariants: private keys only ever land in files of mode 0600 inside directories of mode 0700,
//! written to a temporary name and renamed, so that a crash leaves the old file or the new one.
//! Files that exist are loaded and never overwritten, expired or foreign leaves excepted.
//!
//! Why an encoder of our own next to rcgen: subjects must hold any number of organizations (they
//! are Kubernetes' groups) and must be copied byte for byte from requests and issuers, and rcgen's
//! names are maps that hold one value per type. Keys, signatures and new requests are rcgen's.

mod authority;
mod csr;
mod der;
mod file;
mod identity;
pub mod kubeconfig;
mod parsed;
mod sec1;
mod store;
mod token;

pub use authority::{
    Authority, BACKDATE, Issued, JOIN_LIFETIME, LEAF_LIFETIME, Profile, San, Usage, public_key_info,
};
pub use csr::{Csr, new_request, verify};
pub use file::write_private;
pub use identity::{Component, Identity};
pub use kubeconfig::{Credentials, Exec, Kubeconfig};
pub use parsed::{Certificate, certificates, needs_renewal};
pub use rcgen::KeyPair;
pub use sec1::private_key_pem;
pub use store::Pki;
pub use token::{BootstrapToken, JoinToken, random_token};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path}: {source}")]
    File { path: String, source: std::io::Error },
    /// A certificate, key, request, kubeconfig or token that cannot be read.
    #[error("{what}: {why}")]
    Malformed { what: String, why: String },
    /// A signing request that cannot be read.
    #[error("{0}")]
    Request(&'static str),
    /// A signing request that its own key did not sign.
    #[error("{0}")]
    BadSignature(&'static str),
    #[error("{0} and {1} do not belong together")]
    Mismatch(String, String),
    #[error("cryptography: {0}")]
    Crypto(String),
}

pub(crate) fn malformed(what: impl Into<String>, why: impl std::fmt::Display) -> Error {
    Error::Malformed { what: what.into(), why: why.to_string() }
}

impl From<rcgen::Error> for Error {
    fn from(error: rcgen::Error) -> Self {
        Self::Crypto(error.to_string())
    }
}

/// Bytes for secrets, from the crypto provider (never from the seeded source of simulations).
pub fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes).expect("the system's random source works");
    bytes
}
