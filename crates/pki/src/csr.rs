//! PKCS#10 certificate signing requests: reading them, and making them (for kubelets and clients).

use rcgen::{CertificateParams, DnType, KeyPair, SanType};
use rustls_pki_types::CertificateSigningRequestDer;
use rustls_pki_types::pem::PemObject;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::extensions::ParsedExtension;
use x509_parser::prelude::FromDer;

use crate::parsed::{alternative_names, names};
use crate::{Error, Profile, San, malformed};

/// A request whose self-signature was checked.
#[derive(Clone, Debug)]
pub struct Csr {
    subject: Vec<u8>,
    spki: Vec<u8>,
    pub common_name: String,
    pub organizations: Vec<String>,
    pub sans: Vec<San>,
}

impl Csr {
    /// Reads the first `CERTIFICATE REQUEST` block of a PEM text (the bytes in `spec.request`).
    pub fn parse(pem: &[u8]) -> Result<Self, Error> {
        let der = CertificateSigningRequestDer::from_pem_slice(pem)
            .map_err(|_| malformed("request", "PEM block type must be CERTIFICATE REQUEST"))?;
        let (_, csr) = X509CertificationRequest::from_der(&der)
            .map_err(|error| malformed("request", error))?;
        csr.verify_signature().map_err(|_| Error::BadSignature)?;
        let info = &csr.certification_request_info;
        let (common_name, organizations) = names(&info.subject);
        let mut sans = vec![];
        for extension in csr.requested_extensions().into_iter().flatten() {
            if let ParsedExtension::SubjectAlternativeName(san) = extension {
                sans = alternative_names(&san.general_names);
            }
        }
        Ok(Self {
            subject: info.subject.as_raw().to_vec(),
            spki: info.subject_pki.raw.to_vec(),
            common_name,
            organizations,
            sans,
        })
    }

    pub(crate) fn subject_der(&self) -> &[u8] {
        &self.subject
    }

    /// The SubjectPublicKeyInfo, DER.
    pub fn public_key_info(&self) -> &[u8] {
        &self.spki
    }
}

/// A new P-256 key and a request for it, both PEM: `(request, key)`. The request names the
/// profile's common name, its first organization (a kubelet's subject has one) and its names.
pub fn new_request(profile: &Profile) -> Result<(String, String), Error> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    if let Some(organization) = profile.organizations.first() {
        params.distinguished_name.push(DnType::OrganizationName, organization.as_str());
    }
    params.distinguished_name.push(DnType::CommonName, profile.common_name.as_str());
    for san in &profile.sans {
        params.subject_alt_names.push(match san {
            San::Dns(name) => SanType::DnsName(name.as_str().try_into()?),
            San::Email(name) => SanType::Rfc822Name(name.as_str().try_into()?),
            San::Uri(name) => SanType::URI(name.as_str().try_into()?),
            San::Ip(address) => SanType::IpAddress(*address),
        });
    }
    Ok((params.serialize_request(&key)?.pem()?, key.serialize_pem()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Authority, Usage, certificates};

    fn node_profile() -> Profile {
        Profile::client("system:node:n1", &["system:nodes"]).with_sans(["n1", "10.0.0.7"])
    }

    #[test]
    fn a_request_is_signed_as_it_stands() {
        let (request, _) = new_request(&node_profile()).expect("makes a request");
        let csr = Csr::parse(request.as_bytes()).expect("parses");
        assert_eq!(csr.common_name, "system:node:n1");
        assert_eq!(csr.organizations, ["system:nodes"]);
        let authority = Authority::generate("ca").expect("keys can be made");
        let lifetime = Duration::from_secs(3600);
        let pem = authority.sign_request(&csr, &[Usage::Server], 1, lifetime).expect("signs");
        let cert = certificates(pem.as_bytes()).expect("parses").remove(0);
        assert_eq!((cert.common_name, cert.organizations), (csr.common_name, csr.organizations));
        assert_eq!(cert.sans, [San::Dns("n1".into()), San::parse("10.0.0.7")]);
    }

    #[test]
    fn a_broken_request_is_refused() {
        let (request, _) = new_request(&node_profile()).expect("makes a request");
        let der = CertificateSigningRequestDer::from_pem_slice(request.as_bytes()).expect("PEM");
        let mut bytes = der.to_vec();
        *bytes.last_mut().expect("not empty") ^= 1;
        let broken = crate::authority::pem("CERTIFICATE REQUEST", &bytes);
        assert!(matches!(Csr::parse(broken.as_bytes()), Err(Error::BadSignature)));
        assert!(matches!(Csr::parse(b"nonsense"), Err(Error::Malformed { .. })));
    }
}
