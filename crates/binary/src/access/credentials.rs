//! The API server's authorities, certificates and keys.

use std::path::PathBuf;

use anyhow::Context;
use auth::service_account::TokenKeys;
use pki::{Component, Issued, Pki};

/// The issuer and the audience of service account tokens.
pub const ISSUER: &str = "https://kubernetes.default.svc";

/// Authorities that the API server trusts, and its own certificates: from the data directory or from flags.
pub struct Credentials {
    /// Authorities of clients, PEM.
    pub client_ca_pem: String,
    /// The listener's certificate and its files; `None`: the cluster's authority issues one.
    pub serving: Option<Brought>,
    /// Whether `client_ca_pem` is the cluster's own authority, not one from a flag.
    pub is_of_cluster: bool,
    /// The client certificate for kubelets.
    pub kubelet_client: Issued,
    /// The files of that certificate, if flags name them.
    pub kubelet_client_files: Option<(PathBuf, PathBuf)>,
    /// Authorities of kubelets' serving certificates, PEM. `None`: they are not verified, as upstream without
    /// `--kubelet-certificate-authority`.
    pub kubelet_ca_pem: Option<String>,
    pub keys: TokenKeys,
}

/// A certificate and its files, which are watched.
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
