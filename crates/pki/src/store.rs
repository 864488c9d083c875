//! The key material of a cluster in its directory, under kubeadm's file names:
//!
//! ```text
//! pki/ca.crt, ca.key                            signs servers and clients
//!     front-proxy-ca.crt, front-proxy-ca.key    signs the aggregator's client
//!     sa.key, sa.pub                            signs and checks service account tokens
//!     NAME.crt, NAME.key                        leaves, created on demand
//! ```
//!
//! Existing files are used unchanged, so that administrators can bring their own. Missing files are created.

use std::path::{Path, PathBuf};

use rcgen::{KeyPair, PublicKeyData};

use crate::authority::{self, Issued};
use crate::file::{self, write_private};
use crate::kubeconfig::Kubeconfig;
use crate::parsed::{self, Certificate};
use crate::{Authority, Component, Error, Identity, Profile, malformed};

pub struct Pki {
    directory: PathBuf,
    pub cluster_ca: Authority,
    pub front_proxy_ca: Authority,
    /// The private key that signs service account tokens, PEM.
    service_account_key: String,
    /// Public keys that verify service account tokens, PEM, including the signer's own.
    service_account_public: String,
}

impl Pki {
    /// Loads the directory and creates missing files. Takes a few milliseconds, plus disk syncs.
    pub fn open_or_create(directory: &Path) -> Result<Self, Error> {
        file::private_dir(directory)?;
        Self::load(directory, Lacking::Made)
    }

    /// Loads the directory and creates nothing: a reader during the creation must not replace files
    /// that are still missing.
    pub fn open(directory: &Path) -> Result<Self, Error> {
        Self::load(directory, Lacking::Refused)
    }

    fn load(directory: &Path, lacking: Lacking) -> Result<Self, Error> {
        let cluster_ca = authority(directory, "ca", "kubernetes", lacking)?;
        let front_proxy_ca = authority(directory, "front-proxy-ca", "front-proxy-ca", lacking)?;
        let key_path = directory.join("sa.key");
        let service_account_key = match file::read(&key_path)? {
            Some(text) => text,
            None => {
                lacking.may_be_made(&key_path)?;
                let text = KeyPair::generate()?.serialize_pem();
                write_private(&key_path, text.as_bytes(), 0o600)?;
                text
            }
        };
        let public_path = directory.join("sa.pub");
        let service_account_public = match file::read(&public_path)? {
            Some(text) => text,
            None => {
                let key = KeyPair::from_pem(&service_account_key)
                    .map_err(|error| malformed(key_path.display().to_string(), error))?;
                let text = authority::pem("PUBLIC KEY", &key.subject_public_key_info());
                if lacking == Lacking::Made {
                    write_private(&public_path, text.as_bytes(), 0o600)?;
                }
                text
            }
        };
        let directory = directory.to_owned();
        Ok(Self {
            directory,
            cluster_ca,
            front_proxy_ca,
            service_account_key,
            service_account_public,
        })
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    pub fn service_account_key_pem(&self) -> &str {
        &self.service_account_key
    }

    pub fn service_account_public_pem(&self) -> &str {
        &self.service_account_public
    }

    /// Issues a certificate of the cluster authority; does not store it.
    pub fn issue(&self, profile: &Profile) -> Result<Issued, Error> {
        self.cluster_ca.issue(profile)
    }

    /// The client certificate of a component, stored under its name and renewed when due.
    pub fn component(&self, component: Component) -> Result<Issued, Error> {
        let authority = match component {
            Component::FrontProxyClient => &self.front_proxy_ca,
            _ => &self.cluster_ca,
        };
        ensure(&self.directory, component.file_name(), &component.profile(), authority)
    }

    /// A leaf of the cluster authority, stored as `NAME.crt` and `NAME.key`. The stored one is used
    /// while it fits `profile`, is not due for renewal, and comes from this authority.
    pub fn ensure(&self, name: &str, profile: &Profile) -> Result<Issued, Error> {
        ensure(&self.directory, name, profile, &self.cluster_ca)
    }

    /// A kubeconfig with a new certificate for `identity`.
    pub fn kubeconfig(&self, server: &str, identity: &Identity) -> Result<Kubeconfig, Error> {
        let issued = self.issue(&identity.profile())?;
        Ok(Kubeconfig::with_certificate(
            server,
            self.cluster_ca.cert_pem(),
            &identity.user,
            &issued,
        ))
    }
}

/// What to do about missing files.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lacking {
    Made,
    Refused,
}

impl Lacking {
    fn may_be_made(self, path: &Path) -> Result<(), Error> {
        match self {
            Self::Made => Ok(()),
            Self::Refused => Err(malformed(path.display().to_string(), "missing")),
        }
    }
}

pub(crate) fn authority(
    directory: &Path,
    name: &str,
    common_name: &str,
    lacking: Lacking,
) -> Result<Authority, Error> {
    let cert_path = directory.join(format!("{name}.crt"));
    let key_path = directory.join(format!("{name}.key"));
    match (file::read(&cert_path)?, file::read(&key_path)?) {
        (Some(cert), Some(key)) => Authority::from_pem(&cert, &key).map_err(|error| match error {
            Error::Mismatch(..) => {
                Error::Mismatch(cert_path.display().to_string(), key_path.display().to_string())
            }
            Error::Malformed { why, .. } => malformed(cert_path.display().to_string(), why),
            other => other,
        }),
        // The key is written first: a crash in between leaves a key without a certificate, which is
        // replaced here at the next start. A certificate without its key would be an error.
        (None, key) => {
            lacking.may_be_made(&cert_path)?;
            let authority = Authority::generate(common_name)?;
            if key.is_some() {
                tracing::warn!(path = %key_path.display(), "replacing a private key that has no certificate");
            }
            write_private(&key_path, authority.key_pem().as_bytes(), 0o600)?;
            write_private(&cert_path, authority.cert_pem().as_bytes(), 0o600)?;
            Ok(authority)
        }
        (Some(_), None) => Err(malformed(
            key_path.display().to_string(),
            "missing, but the authority's certificate exists",
        )),
    }
}

/// Leaves are not synced; authorities, the service account key and tokens are. If a power failure
/// damages a leaf or one half of it, the checks below fail at the next start, and it is issued
/// again. A first start writes a dozen leaves and would wait for the disk for each.
pub(crate) fn ensure(
    directory: &Path,
    name: &str,
    profile: &Profile,
    authority: &Authority,
) -> Result<Issued, Error> {
    let cert_path = directory.join(format!("{name}.crt"));
    let key_path = directory.join(format!("{name}.key"));
    let stored = (file::read_replaceable(&cert_path)?, file::read_replaceable(&key_path)?);
    if let (Some(cert_pem), Some(key_pem)) = stored {
        let cert = parsed::certificates(cert_pem.as_bytes())
            .ok()
            .and_then(|mut all| (!all.is_empty()).then(|| all.swap_remove(0)));
        let key = KeyPair::from_pem(&key_pem).ok();
        if let (Some(cert), Some(key)) = (cert, key)
            && cert.public_key_info() == key.subject_public_key_info()
            && is_fit(&cert, profile, authority)
        {
            return Ok(Issued { cert_pem, key_pem });
        }
    }
    let issued = authority.issue(profile)?;
    file::write_replaceable(&key_path, issued.key_pem.as_bytes())?;
    file::write_replaceable(&cert_path, issued.cert_pem.as_bytes())?;
    Ok(issued)
}

fn is_fit(cert: &Certificate, profile: &Profile, authority: &Authority) -> bool {
    cert.common_name == profile.common_name
        && cert.organizations == profile.organizations
        && profile.sans.iter().all(|san| cert.sans.contains(san))
        && profile.usages.iter().all(|usage| cert.usages.contains(usage))
        && !cert.needs_renewal(base::clock::now())
        && cert.is_issued_by(authority.certificate())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).expect("exists").permissions().mode() & 0o777
    }

    #[test]
    fn a_directory_is_created_once_and_kept() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let directory = root.path().join("data/pki");
        let first = Pki::open_or_create(&directory).expect("creates");
        let again = Pki::open_or_create(&directory).expect("loads");
        assert_eq!(first.cluster_ca.fingerprint(), again.cluster_ca.fingerprint());
        assert_eq!(first.front_proxy_ca.fingerprint(), again.front_proxy_ca.fingerprint());
        assert_eq!(first.service_account_key_pem(), again.service_account_key_pem());
        assert_eq!(mode(&directory), 0o700);
        for entry in std::fs::read_dir(&directory).expect("lists") {
            assert_eq!(mode(&entry.expect("lists").path()), 0o600);
        }
    }

    #[test]
    fn open_creates_nothing() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let directory = root.path().join("pki");
        assert!(Pki::open(&directory).is_err());
        let made = Pki::open_or_create(&directory).expect("creates");
        let seen = Pki::open(&directory).expect("all is there");
        assert_eq!(seen.cluster_ca.fingerprint(), made.cluster_ca.fingerprint());
        for name in ["ca.crt", "front-proxy-ca.crt", "front-proxy-ca.key", "sa.key"] {
            let (path, aside) = (directory.join(name), directory.join("aside"));
            std::fs::rename(&path, &aside).expect("moved");
            let error = Pki::open(&directory).err().expect("something is missing").to_string();
            assert!(error.contains(name) && error.contains("missing"), "{error}");
            assert!(!path.exists(), "{name}");
            std::fs::rename(&aside, &path).expect("moved back");
        }
    }

    #[test]
    fn a_leaf_is_kept_until_it_no_longer_fits() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let pki = Pki::open_or_create(root.path()).expect("creates");
        let profile = Profile::server("kube-apiserver", vec![]).with_sans(["localhost"]);
        let first = pki.ensure("apiserver", &profile).expect("issues").cert_pem;
        assert_eq!(pki.ensure("apiserver", &profile).expect("loads").cert_pem, first);
        let wider = profile.with_sans(["10.0.0.1"]);
        let second = pki.ensure("apiserver", &wider).expect("issues").cert_pem;
        assert_ne!(second, first);
        std::fs::remove_file(root.path().join("ca.crt")).expect("removes");
        let other = Pki::open_or_create(root.path()).expect("creates");
        assert_ne!(other.ensure("apiserver", &wider).expect("issues").cert_pem, second);
    }

    #[test]
    fn a_component_that_has_lost_a_group_gets_another_certificate() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let pki = Pki::open_or_create(root.path()).expect("creates");
        let component = Component::KubeletClient;
        let of_before = Profile::client(component.identity().user, &["system:masters"]);
        let before = pki.ensure(component.file_name(), &of_before).expect("issues");
        let after = pki.component(component).expect("issues another");
        assert_ne!(before.cert_pem, after.cert_pem);
        let certificate = parsed::certificates(after.cert_pem.as_bytes()).expect("PEM");
        assert!(certificate[0].organizations.is_empty());
        assert_eq!(pki.component(component).expect("loads").cert_pem, after.cert_pem);
    }

    #[test]
    fn a_leaf_damaged_by_a_power_failure_is_issued_again() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let pki = Pki::open_or_create(root.path()).expect("creates");
        let profile = Profile::server("kube-apiserver", vec![]);
        let check = |name: &str, left: &[u8]| {
            pki.ensure("apiserver", &profile).expect("issues");
            std::fs::write(root.path().join(name), left).expect("tears");
            let issued = pki.ensure("apiserver", &profile).expect("issues again");
            let there = |name| std::fs::read_to_string(root.path().join(name)).expect("reads");
            assert_eq!(there("apiserver.crt"), issued.cert_pem, "{name}: {left:?}");
            assert_eq!(there("apiserver.key"), issued.key_pem, "{name}: {left:?}");
            assert!(issued.key_pem.starts_with("-----BEGIN"), "{name}: {left:?}");
        };
        for left in [&b""[..], &[0; 600], &[0xff; 600], b"-----BEGIN CERTIFICATE-----\nMII"] {
            check("apiserver.crt", left);
            check("apiserver.key", left);
        }
    }

    #[test]
    fn a_lost_key_is_an_error_not_a_new_authority() {
        let root = tempfile::tempdir().expect("a temporary directory");
        Pki::open_or_create(root.path()).expect("creates");
        std::fs::remove_file(root.path().join("ca.key")).expect("removes");
        assert!(matches!(Pki::open_or_create(root.path()), Err(Error::Malformed { .. })));
    }
}
