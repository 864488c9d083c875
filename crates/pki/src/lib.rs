//! Identity material: certificate authorities, leaf certificates, signing requests, kubeconfigs and
//! join tokens.
//!
//! In: a data directory (own files, or an administrator's files under kubeadm's names), profiles,
//! PKCS#10 requests. Out: PEM and DER bytes for `transport` and `auth`. This crate opens no socket.
//!
//! Invariants: private keys are only in files of mode 0600 inside directories of mode 0700. Files are written
//! under a temporary name and renamed, so that a crash leaves the old file or the new one. Existing files are
//! loaded and never overwritten, except leaves that are expired or do not fit.
//!
//! Why an own encoder beside rcgen: subjects must hold any number of organizations (Kubernetes'
//! groups) and must be copied byte for byte from requests and issuers. rcgen's names are maps with
//! one value per type. Keys, signatures and new requests come from rcgen.

mod authority;
mod csr;
mod der;
pub mod etcd;
mod file;
mod identity;
pub mod kubeconfig;
mod parsed;
pub mod sealed;
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
    /// An unreadable certificate, key, request, kubeconfig or token.
    #[error("{what}: {why}")]
    Malformed { what: String, why: String },
    /// An unreadable signing request.
    #[error("{0}")]
    Request(&'static str),
    /// A signing request with an invalid self-signature.
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

/// Random bytes for secrets, from the crypto provider (never from the seeded source of simulations).
pub fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes).expect("the system's random source works");
    bytes
}
