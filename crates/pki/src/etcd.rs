//! The certificates of an etcd member, of an authority of their own: certificates of the cluster's
//! authority, which every node has, must open no etcd.
//!
//! ```text
//! pki/etcd/ca.crt, ca.key          signs all of these, on all servers
//!          server.*, peer.*        of the member on this machine
//!          client.*                of the API server and of `decapod member`
//! ```
//!
//! Upstream: kubeadm's `pki/etcd`. etcd reads its files at each handshake, so that a new one needs no
//! restart.

use std::path::{Path, PathBuf};

use crate::store::{Lacking, authority, ensure};
use crate::{Authority, Error, Issued, Profile, San, Usage, file};

const COMMON_NAME: &str = "etcd-ca";

pub struct EtcdPki {
    directory: PathBuf,
    ca: Authority,
}

/// The files of a certificate.
pub struct Files {
    pub cert: PathBuf,
    pub key: PathBuf,
    pub issued: Issued,
}

impl EtcdPki {
    /// Loads `etcd` in the directory of the cluster's certificates; creates a missing authority.
    pub fn open_or_create(pki: &Path) -> Result<Self, Error> {
        let directory = pki.join("etcd");
        file::private_dir(&directory)?;
        let ca = authority(&directory, "ca", COMMON_NAME, Lacking::Made)?;
        Ok(Self { directory, ca })
    }

    pub fn ca_file(&self) -> PathBuf {
        self.directory.join("ca.crt")
    }

    pub fn ca(&self) -> &Authority {
        &self.ca
    }

    /// For a listener, and for connections to other members.
    pub fn member(&self, name: &str, kind: Kind, addresses: &[&str]) -> Result<Files, Error> {
        let mut profile = Profile::server(name, vec![San::parse(name)]).with_sans(addresses);
        profile.usages.push(Usage::Client);
        self.leaf(kind.file(), &profile)
    }

    pub fn client(&self) -> Result<Files, Error> {
        self.leaf("client", &Profile::client("decapod-etcd-client", &[]))
    }

    fn leaf(&self, name: &str, profile: &Profile) -> Result<Files, Error> {
        let issued = ensure(&self.directory, name, profile, &self.ca)?;
        let path = |kind: &str| self.directory.join(format!("{name}.{kind}"));
        Ok(Files { cert: path("crt"), key: path("key"), issued })
    }
}

/// What a member's certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Server,
    Peer,
}

impl Kind {
    fn file(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Peer => "peer",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_have_certificates_of_an_authority_of_their_own() {
        let root = tempfile::tempdir().expect("a directory");
        let pki = EtcdPki::open_or_create(root.path()).expect("created");
        let again = EtcdPki::open_or_create(root.path()).expect("loaded");
        assert_eq!(pki.ca().fingerprint(), again.ca().fingerprint());
        let peer = pki.member("n1", Kind::Peer, &["192.0.2.1"]).expect("issued");
        let same = again.member("n1", Kind::Peer, &["192.0.2.1"]).expect("loaded");
        assert_eq!(peer.issued.cert_pem, same.issued.cert_pem);
        let parsed = crate::certificates(peer.issued.cert_pem.as_bytes()).expect("PEM");
        assert!(parsed[0].usages.contains(&Usage::Client) && parsed[0].usages.len() == 2);
        assert!(parsed[0].is_issued_by(pki.ca().certificate()));
        assert!(parsed[0].sans.contains(&San::parse("192.0.2.1")));
        assert!(pki.client().expect("issued").cert.exists());
    }
}
