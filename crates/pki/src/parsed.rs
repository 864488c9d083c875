//! Parsed certificates: the few fields that callers use.

use jiff::Timestamp;
use sha2::{Digest, Sha256};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer;
use x509_parser::x509::X509Name;

use crate::{Error, San, Usage, malformed};

/// [`crate::authority::USER_UID`] as text.
const USER_UID_TEXT: &str = "1.3.6.1.4.1.57683.2";

/// A parsed certificate. Parsing proves nothing about who signed it.
#[derive(Clone, Debug)]
pub struct Certificate {
    der: Vec<u8>,
    subject: Vec<u8>,
    spki: Vec<u8>,
    subject_key_id: Option<Vec<u8>>,
    /// The user name, in Kubernetes' terms. Empty if the subject has none.
    pub common_name: String,
    /// The groups, in Kubernetes' terms.
    pub organizations: Vec<String>,
    /// The user's UID, in Kubernetes' terms. A node's certificate carries the UID of its Node.
    pub uid: Option<String>,
    pub sans: Vec<San>,
    pub usages: Vec<Usage>,
    pub is_authority: bool,
    pub not_before: Timestamp,
    pub not_after: Timestamp,
}

impl Certificate {
    pub fn parse(der: &[u8]) -> Result<Self, Error> {
        let bad = |why: &dyn std::fmt::Display| malformed("certificate", why);
        let (_, cert) = X509Certificate::from_der(der).map_err(|error| bad(&error))?;
        let time = |seconds| Timestamp::from_second(seconds).map_err(|error| bad(&error));
        let (common_name, organizations) = names(cert.subject());
        let mut out = Self {
            der: der.to_vec(),
            subject: cert.subject().as_raw().to_vec(),
            spki: cert.public_key().raw.to_vec(),
            subject_key_id: None,
            common_name,
            organizations,
            uid: user_uid(cert.subject()),
            sans: vec![],
            usages: vec![],
            is_authority: cert.is_ca(),
            not_before: time(cert.validity().not_before.timestamp())?,
            not_after: time(cert.validity().not_after.timestamp())?,
        };
        for extension in cert.extensions() {
            match extension.parsed_extension() {
                ParsedExtension::SubjectAlternativeName(san) => {
                    out.sans = alternative_names(&san.general_names)
                }
                ParsedExtension::SubjectKeyIdentifier(id) => {
                    out.subject_key_id = Some(id.0.to_vec())
                }
                ParsedExtension::ExtendedKeyUsage(usage) => {
                    let found =
                        [(usage.client_auth, Usage::Client), (usage.server_auth, Usage::Server)];
                    out.usages =
                        found.iter().filter(|(set, _)| *set).map(|(_, usage)| *usage).collect();
                }
                _ => {}
            }
        }
        Ok(out)
    }

    pub fn der(&self) -> &[u8] {
        &self.der
    }

    /// The subject's name, DER.
    pub fn subject_der(&self) -> &[u8] {
        &self.subject
    }

    /// The SubjectPublicKeyInfo, DER.
    pub fn public_key_info(&self) -> &[u8] {
        &self.spki
    }

    /// SHA-256 of the DER, the name of a certificate in kubeconfigs, audit and join tokens.
    pub fn fingerprint(&self) -> [u8; 32] {
        Sha256::digest(&self.der).into()
    }

    /// The identifier with which issued certificates refer to this one.
    pub(crate) fn key_id(&self) -> Vec<u8> {
        self.subject_key_id.clone().unwrap_or_else(|| Sha256::digest(&self.spki)[..20].to_vec())
    }

    /// Whether `issuer`'s key signed this certificate. Does not check names and times.
    pub fn is_issued_by(&self, issuer: &Certificate) -> bool {
        let Ok((_, cert)) = X509Certificate::from_der(&self.der) else { return false };
        let Ok((_, issuer)) = X509Certificate::from_der(&issuer.der) else { return false };
        cert.verify_signature(Some(issuer.public_key())).is_ok()
    }

    /// The time when four fifths of the lifetime have passed: late enough to be rare, early enough
    /// to retry for weeks. Upstream: the kubelet renews between 70 % and 90 %.
    pub fn renew_at(&self) -> Timestamp {
        let lifetime = self.not_after.as_second() - self.not_before.as_second();
        let at = self.not_before.as_second() + lifetime / 5 * 4;
        Timestamp::from_second(at).unwrap_or(self.not_after)
    }

    pub fn needs_renewal(&self, now: Timestamp) -> bool {
        now >= self.renew_at()
    }
}

/// All certificates of a PEM text, in order; skips other blocks.
pub fn certificates(pem: &[u8]) -> Result<Vec<Certificate>, Error> {
    use rustls_pki_types::CertificateDer;
    use rustls_pki_types::pem::PemObject;
    CertificateDer::pem_slice_iter(pem)
        .map(|der| {
            let der = der.map_err(|error| malformed("PEM", format!("{error:?}")))?;
            Certificate::parse(&der)
        })
        .collect()
}

/// Whether the first certificate of a PEM text is due for renewal, or missing.
pub fn needs_renewal(cert_pem: &str, now: Timestamp) -> bool {
    match certificates(cert_pem.as_bytes()) {
        Ok(certs) => certs.first().is_none_or(|cert| cert.needs_renewal(now)),
        Err(_) => true,
    }
}

/// Common name (the last one, as in Go) and organizations, in order.
pub(crate) fn names(name: &X509Name<'_>) -> (String, Vec<String>) {
    let text = |attribute: &x509_parser::x509::AttributeTypeAndValue<'_>| {
        attribute
            .as_str()
            .map_or_else(|_| String::from_utf8_lossy(attribute.as_slice()).into_owned(), Into::into)
    };
    let common_name = name.iter_common_name().last().map(text).unwrap_or_default();
    (common_name, name.iter_organization().map(text).collect())
}

/// The UID attribute of a subject; `None` if there are several.
/// Upstream: `parseUIDFromCert` of `k8s.io/apiserver/pkg/authentication/request/x509`.
fn user_uid(name: &X509Name<'_>) -> Option<String> {
    let is_uid = |one: &&x509_parser::x509::AttributeTypeAndValue<'_>| {
        one.attr_type().to_id_string() == USER_UID_TEXT
    };
    let mut found = name.iter_attributes().filter(is_uid);
    let uid = found.next()?.as_str().ok()?.to_owned();
    (found.next().is_none() && !uid.is_empty()).then_some(uid)
}

pub(crate) fn alternative_names(names: &[GeneralName<'_>]) -> Vec<San> {
    let address = |bytes: &[u8]| -> Option<San> {
        if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
            return Some(San::Ip(v4.into()));
        }
        <[u8; 16]>::try_from(bytes).ok().map(|v6| San::Ip(v6.into()))
    };
    let name = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) => Some(San::Dns((*name).to_owned())),
        GeneralName::RFC822Name(name) => Some(San::Email((*name).to_owned())),
        GeneralName::URI(name) => Some(San::Uri((*name).to_owned())),
        GeneralName::IPAddress(bytes) => address(bytes),
        _ => None,
    };
    names.iter().filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Authority, Profile};

    #[test]
    fn renewal_is_due_after_four_fifths() {
        let authority = Authority::generate("ca").expect("keys can be made");
        let mut profile = Profile::client("a", &[]);
        profile.lifetime = std::time::Duration::from_secs(1000 * 3600);
        let issued = authority.issue(&profile).expect("signs");
        let after = |hours: i64| {
            Timestamp::from_second(base::clock::now().as_second() + hours * 3600).expect("in range")
        };
        let check = |hours, expected| {
            assert_eq!(needs_renewal(&issued.cert_pem, after(hours)), expected, "{hours}");
        };
        check(0, false);
        check(799, false);
        check(801, true);
        check(2000, true);
        assert!(needs_renewal("no certificate", after(0)));
    }
}
