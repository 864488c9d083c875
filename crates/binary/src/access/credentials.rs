//! What an API server believes and shows: authorities, certificates, keys.

use std::path::PathBuf;

use anyhow::Context;
use auth::service_account::TokenKeys;
use pki::{Component, Issued, Pki};

/// What tokens of service accounts say they are from, and for.
pub const ISSUER: &str = "https://kubernetes.default.svc";

/// Who the API server believes, and what it shows others: from the data directory, or brought along.
pub struct Credentials {
    /// Whose signatures make clients known, PEM.
    pub client_ca_pem: String,
    /// Of the listener, and its files; without it one is made of the cluster's authority.
    pub serving: Option<Brought>,
    /// As whom kubelets are called, and who signs theirs, PEM.
    pub kubelet_client: Issued,
    /// Where that was brought from, unless it is our own.
    pub kubelet_client_files: Option<(PathBuf, PathBuf)>,
    pub kubelet_ca_pem: String,
    pub keys: TokenKeys,
}

/// A certificate with the files that it came from, which are followed.
pub struct Brought {
    pub issued: Issued,
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl Credentials {
    pub fn of_cluster(pki: &Pki) -> anyhow::Result<Self> {
        let keys =
            TokenKeys::of_cluster(pki, ISSUER).context("the service account key cannot be used")?;
        Ok(Self {
            client_ca_pem: pki.cluster_ca.cert_pem().to_owned(),
            serving: None,
            kubelet_client: pki.component(Component::KubeletClient)?,
            kubelet_client_files: None,
            kubelet_ca_pem: pki.cluster_ca.cert_pem().to_owned(),
            keys,
        })
    }
}
