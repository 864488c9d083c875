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
    /// Whether `client_ca_pem` is the cluster's own authority, which was not brought along.
    pub is_of_cluster: bool,
    /// As whom kubelets are called.
    pub kubelet_client: Issued,
    /// Where that was brought from, unless it is our own.
    pub kubelet_client_files: Option<(PathBuf, PathBuf)>,
    /// Who signs kubelets' serving certificates, PEM. `None`: they are not verified, as upstream does
    /// without `--kubelet-certificate-authority`.
    pub kubelet_ca_pem: Option<String>,
    pub keys: TokenKeys,
}

/// A certificate with the files that it came from, which are followed.
pub struct Brought {
    pub issued: Issued,
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl Credentials {
    /// `issuers` of service account tokens: the first one signs, all are accepted.
    pub fn of_cluster(pki: &Pki, issuers: &[String]) -> anyhow::Result<Self> {
        let (key, public) = (pki.service_account_key_pem(), pki.service_account_public_pem());
        let keys = TokenKeys::new(key, public, issuers.to_vec(), vec![])
            .context("the service account key cannot be used")?;
        Ok(Self {
            client_ca_pem: pki.cluster_ca.cert_pem().to_owned(),
            is_of_cluster: true,
            serving: None,
            kubelet_client: pki.component(Component::KubeletClient)?,
            kubelet_client_files: None,
            kubelet_ca_pem: Some(pki.cluster_ca.cert_pem().to_owned()),
            keys,
        })
    }
}
