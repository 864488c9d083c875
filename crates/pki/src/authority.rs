//! A certificate authority: its certificate and key, and the issuing of certificates.

use std::net::IpAddr;
use std::time::Duration;

use base64::Engine;
use jiff::Timestamp;
use rcgen::{KeyPair, PublicKeyData, SigningKey};
use sha2::{Digest, Sha256};

use crate::der::{self, sequence};
use crate::parsed::{self, Certificate};
use crate::sec1::private_key_pem;
use crate::{Csr, Error, malformed};

/// Upstream: the lifetime of kubeadm's certificates is one year, of its authorities ten.
pub const LEAF_LIFETIME: Duration = Duration::from_secs(365 * 24 * 3600);
/// The lifetime of a certificate for a join token: long enough to register the Node. The next
/// certificate has the Node's UID.
pub const JOIN_LIFETIME: Duration = Duration::from_secs(3600);
const AUTHORITY_LIFETIME: Duration = Duration::from_secs(3650 * 24 * 3600);
/// Clocks differ: certificates are valid from five minutes before their issue, as upstream.
pub const BACKDATE: Duration = Duration::from_secs(300);

/// The subject attribute with the user's UID: upstream's `UserUIDOID`.
const USER_UID: [u64; 8] = [1, 3, 6, 1, 4, 1, 57683, 2];

/// The allowed use of a leaf certificate (extended key usage).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    Client,
    Server,
}

/// A subject alternative name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum San {
    Dns(String),
    Ip(IpAddr),
    Email(String),
    Uri(String),
}

impl San {
    /// An IP address when it parses as one, a DNS name otherwise.
    pub fn parse(text: &str) -> Self {
        text.parse().map_or_else(|_| Self::Dns(text.to_owned()), Self::Ip)
    }

    fn encode(&self) -> Vec<u8> {
        match self {
            Self::Email(name) => der::implicit(1, name.as_bytes()),
            Self::Dns(name) => der::implicit(2, name.as_bytes()),
            Self::Uri(name) => der::implicit(6, name.as_bytes()),
            Self::Ip(IpAddr::V4(address)) => der::implicit(7, &address.octets()),
            Self::Ip(IpAddr::V6(address)) => der::implicit(7, &address.octets()),
        }
    }
}

/// The content of a leaf certificate: user name, groups, addresses, usages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    pub common_name: String,
    pub organizations: Vec<String>,
    pub sans: Vec<San>,
    pub usages: Vec<Usage>,
    pub lifetime: Duration,
}

impl Profile {
    pub fn client(common_name: impl Into<String>, organizations: &[&str]) -> Self {
        Self {
            common_name: common_name.into(),
            organizations: organizations.iter().map(|&name| name.to_owned()).collect(),
            sans: vec![],
            usages: vec![Usage::Client],
            lifetime: LEAF_LIFETIME,
        }
    }

    pub fn server(common_name: impl Into<String>, sans: Vec<San>) -> Self {
        Self {
            common_name: common_name.into(),
            organizations: vec![],
            sans,
            usages: vec![Usage::Server],
            lifetime: LEAF_LIFETIME,
        }
    }

    /// Adds SANs from a command line: addresses or DNS names.
    pub fn with_sans<S: AsRef<str>>(mut self, sans: impl IntoIterator<Item = S>) -> Self {
        for san in sans {
            let san = San::parse(san.as_ref());
            if !self.sans.contains(&san) {
                self.sans.push(san);
            }
        }
        self
    }
}

/// A certificate chain and its key, as PEM.
#[derive(Clone)]
pub struct Issued {
    pub cert_pem: String,
    pub key_pem: String,
}

/// Omits the key, to keep it out of logs.
impl std::fmt::Debug for Issued {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Issued").field("cert_pem", &self.cert_pem).finish_non_exhaustive()
    }
}

/// A certificate authority that can sign.
pub struct Authority {
    cert_pem: String,
    cert: Certificate,
    /// Certificates of this authority that other authorities signed, PEM. They go with every leaf,
    /// so that a client that trusts one of those authorities trusts the leaf.
    chain_pem: String,
    key: KeyPair,
    /// The original text: an administrator's key keeps its encoding.
    key_pem: String,
}

impl Authority {
    /// A new self-signed P-256 authority, valid for ten years.
    pub fn generate(common_name: &str) -> Result<Self, Error> {
        let key = KeyPair::generate()?;
        let subject = encode_name(common_name, &[], None);
        let now = base::clock::now();
        let mut extensions = authority_extensions(&key_id(&key));
        let name = sequence(&[San::Dns(common_name.into()).encode()]);
        extensions.push(extension(&[2, 5, 29, 17], false, name));
        let tbs = Tbs {
            issuer: &subject,
            subject: &subject,
            not_before: now - BACKDATE,
            not_after: now + AUTHORITY_LIFETIME,
            spki: &key.subject_public_key_info(),
            extensions: &extensions,
        };
        let cert_der = tbs.sign(&key)?;
        let cert = Certificate::parse(&cert_der)?;
        let key_pem = private_key_pem(&key.serialize_pem());
        let cert_pem = pem("CERTIFICATE", &cert_der);
        Ok(Self { cert_pem, cert, chain_pem: String::new(), key, key_pem })
    }

    /// A certificate for this authority, signed by another one. A client that trusts the other one
    /// then also trusts this one's certificates.
    pub fn vouched_for_by(&self, other: &Self) -> Result<String, Error> {
        let mut extensions = authority_extensions(&self.cert.key_id());
        let issuer_key = sequence(&[der::implicit(0, &other.cert.key_id())]);
        extensions.push(extension(&[2, 5, 29, 35], false, issuer_key));
        let tbs = Tbs {
            issuer: other.cert.subject_der(),
            subject: self.cert.subject_der(),
            not_before: self.cert.not_before,
            not_after: self.cert.not_after.min(other.cert.not_after),
            spki: self.cert.public_key_info(),
            extensions: &extensions,
        };
        Ok(pem("CERTIFICATE", &tbs.sign(&other.key)?))
    }

    /// An administrator's own authority: its certificate and key. The first of several certificates
    /// is the authority's. Certificates among them that another authority signed go with every
    /// leaf; the others are trusted, too.
    pub fn from_pem(cert_pem: &str, key_pem: &str) -> Result<Self, Error> {
        let cert = parsed::certificates(cert_pem.as_bytes())?
            .into_iter()
            .next()
            .ok_or_else(|| malformed("authority", "no certificate in the PEM text"))?;
        let key = KeyPair::from_pem(key_pem).map_err(|error| malformed("authority key", error))?;
        if cert.public_key_info() != key.subject_public_key_info() {
            return Err(Error::Mismatch("certificate".into(), "key of the authority".into()));
        }
        let all = parsed::certificates(cert_pem.as_bytes())?;
        let signed_by_others = all.iter().filter(|one| !one.is_issued_by(one));
        let chain_pem = signed_by_others.map(|one| pem("CERTIFICATE", one.der())).collect();
        let (cert_pem, key_pem) = (cert_pem.to_owned(), key_pem.to_owned());
        Ok(Self { cert_pem, cert, chain_pem, key, key_pem })
    }

    pub fn cert_pem(&self) -> &str {
        &self.cert_pem
    }

    pub fn cert_der(&self) -> &[u8] {
        self.cert.der()
    }

    pub fn key_pem(&self) -> &str {
        &self.key_pem
    }

    pub fn certificate(&self) -> &Certificate {
        &self.cert
    }

    /// SHA-256 of the DER certificate, as in join tokens.
    pub fn fingerprint(&self) -> [u8; 32] {
        Sha256::digest(self.cert_der()).into()
    }

    /// A leaf certificate with a new P-256 key.
    pub fn issue(&self, profile: &Profile) -> Result<Issued, Error> {
        let key = KeyPair::generate()?;
        let cert_pem = self.issue_for(profile, &key.subject_public_key_info())?;
        Ok(Issued { cert_pem, key_pem: private_key_pem(&key.serialize_pem()) })
    }

    /// A leaf certificate for the public key (a DER SubjectPublicKeyInfo) of another process.
    pub fn issue_for(&self, profile: &Profile, spki: &[u8]) -> Result<String, Error> {
        let subject = encode_name(&profile.common_name, &profile.organizations, None);
        // Digital signature and key encipherment, as in upstream's leaves.
        self.sign_leaf(&subject, spki, &profile.sans, &profile.usages, 1 | 1 << 2, profile.lifetime)
    }

    /// Signs a request. Its subject and SANs are copied unchanged (approval has allowed them);
    /// usages and lifetime come from the signer's policy. `key_usage` has RFC 5280's bits: bit 0 =
    /// digital signature, bit 2 = key encipherment.
    pub fn sign_request(
        &self,
        csr: &Csr,
        usages: &[Usage],
        key_usage: u16,
        lifetime: Duration,
    ) -> Result<String, Error> {
        self.sign_leaf(
            csr.subject_der(),
            csr.public_key_info(),
            &csr.sans,
            usages,
            key_usage,
            lifetime,
        )
    }

    fn sign_leaf(
        &self,
        subject: &[u8],
        spki: &[u8],
        sans: &[San],
        usages: &[Usage],
        key_usage: u16,
        lifetime: Duration,
    ) -> Result<String, Error> {
        let now = base::clock::now();
        let mut extensions = vec![extension(&[2, 5, 29, 15], true, der::named_bits(key_usage))];
        if !usages.is_empty() {
            extensions.push(extension(&[2, 5, 29, 37], false, encode_usages(usages)));
        }
        // An empty sequence means "not an authority".
        extensions.push(extension(&[2, 5, 29, 19], true, sequence(&[])));
        let issuer_key = sequence(&[der::implicit(0, &self.cert.key_id())]);
        extensions.push(extension(&[2, 5, 29, 35], false, issuer_key));
        if !sans.is_empty() {
            let names: Vec<_> = sans.iter().map(San::encode).collect();
            extensions.push(extension(&[2, 5, 29, 17], false, sequence(&names)));
        }
        let tbs = Tbs {
            issuer: self.cert.subject_der(),
            subject,
            not_before: now - BACKDATE,
            // No certificate outlives its issuer.
            not_after: (now + lifetime).min(self.cert.not_after),
            spki,
            extensions: &extensions,
        };
        Ok(pem("CERTIFICATE", &tbs.sign(&self.key)?) + &self.chain_pem)
    }
}

/// The extensions of an authority's certificate: digital signature, key encipherment and
/// certificate signing, as kubeadm's.
fn authority_extensions(key_id: &[u8]) -> Vec<Vec<u8>> {
    vec![
        extension(&[2, 5, 29, 15], true, der::named_bits(1 | 1 << 2 | 1 << 5)),
        extension(&[2, 5, 29, 19], true, sequence(&[der::boolean_true()])),
        extension(&[2, 5, 29, 14], false, der::element(der::OCTET_STRING, key_id)),
    ]
}

/// The signed part of a certificate.
struct Tbs<'a> {
    issuer: &'a [u8],
    subject: &'a [u8],
    not_before: Timestamp,
    not_after: Timestamp,
    spki: &'a [u8],
    extensions: &'a [Vec<u8>],
}

impl Tbs<'_> {
    fn sign(&self, key: &KeyPair) -> Result<Vec<u8>, Error> {
        let mut serial: [u8; 16] = crate::random_bytes();
        serial[0] = serial[0] & 0x7f | 0x40;
        let algorithm = signature_algorithm(key)?;
        let tbs = sequence(&[
            der::explicit(0, &der::unsigned(&[2])),
            der::unsigned(&serial),
            algorithm.clone(),
            self.issuer.to_vec(),
            sequence(&[der::time(self.not_before), der::time(self.not_after)]),
            self.subject.to_vec(),
            self.spki.to_vec(),
            der::explicit(3, &sequence(self.extensions)),
        ]);
        let signature = key.sign(&tbs)?;
        Ok(sequence(&[tbs, algorithm, der::bits(&signature)]))
    }
}

/// The public key as a DER SubjectPublicKeyInfo.
pub fn public_key_info(key: &KeyPair) -> Vec<u8> {
    key.subject_public_key_info()
}

/// The AlgorithmIdentifier of `KeyPair::sign`'s signatures.
fn signature_algorithm(key: &KeyPair) -> Result<Vec<u8>, Error> {
    let null = der::element(0x05, &[]);
    let table = [
        (&rcgen::PKCS_ECDSA_P256_SHA256, sequence(&[der::oid(&[1, 2, 840, 10045, 4, 3, 2])])),
        (&rcgen::PKCS_ECDSA_P384_SHA384, sequence(&[der::oid(&[1, 2, 840, 10045, 4, 3, 3])])),
        (&rcgen::PKCS_RSA_SHA256, sequence(&[der::oid(&[1, 2, 840, 113549, 1, 1, 11]), null])),
        (&rcgen::PKCS_ED25519, sequence(&[der::oid(&[1, 3, 101, 112])])),
    ];
    let found = table.into_iter().find(|(algorithm, _)| **algorithm == *key.algorithm());
    found.map(|(_, der)| der).ok_or_else(|| malformed("authority key", "unsupported key type"))
}

fn encode_usages(usages: &[Usage]) -> Vec<u8> {
    let oid = |usage: &Usage| match usage {
        Usage::Server => der::oid(&[1, 3, 6, 1, 5, 5, 7, 3, 1]),
        Usage::Client => der::oid(&[1, 3, 6, 1, 5, 5, 7, 3, 2]),
    };
    sequence(&usages.iter().map(oid).collect::<Vec<_>>())
}

/// O=…, O=…, CN=…, UID=…, one attribute per set, in the order of Go's encoder.
pub(crate) fn encode_name(
    common_name: &str,
    organizations: &[String],
    uid: Option<&str>,
) -> Vec<u8> {
    let attribute = |oid: &[u64], value: &str| {
        let value = der::element(der::UTF8_STRING, value.as_bytes());
        der::element(der::SET, &sequence(&[der::oid(oid), value]))
    };
    let mut parts: Vec<_> =
        organizations.iter().map(|name| attribute(&[2, 5, 4, 10], name)).collect();
    parts.push(attribute(&[2, 5, 4, 3], common_name));
    parts.extend(uid.map(|uid| attribute(&USER_UID, uid)));
    sequence(&parts)
}

fn extension(oid: &[u64], critical: bool, value: Vec<u8>) -> Vec<u8> {
    let mut parts = vec![der::oid(oid)];
    if critical {
        parts.push(der::boolean_true());
    }
    parts.push(der::element(der::OCTET_STRING, &value));
    sequence(&parts)
}

/// A key's identifier: the first 20 bytes of SHA-256 over the public key (RFC 7093, method 1).
fn key_id(key: &KeyPair) -> Vec<u8> {
    Sha256::digest(key.public_key_raw())[..20].to_vec()
}

pub(crate) fn pem(label: &str, der: &[u8]) -> String {
    let body = base64::engine::general_purpose::STANDARD.encode(der);
    let mut out = format!("-----BEGIN {label}-----\n");
    for line in body.as_bytes().chunks(64) {
        out.push_str(std::str::from_utf8(line).expect("base64 is ASCII"));
        out.push('\n');
    }
    out.push_str(&format!("-----END {label}-----\n"));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leaf_carries_its_profile() {
        let authority = Authority::generate("kubernetes-ca").expect("keys can be made");
        let mut profile = Profile::client("jane", &["system:masters", "dev", "ops"]);
        profile = profile.with_sans(["10.0.0.1", "::1", "a.example", "10.0.0.1"]);
        profile.usages.push(Usage::Server);
        let issued = authority.issue(&profile).expect("signs");
        let certs = parsed::certificates(issued.cert_pem.as_bytes()).expect("parses");
        let cert = &certs[0];
        assert_eq!(cert.common_name, "jane");
        assert_eq!(cert.organizations, ["system:masters", "dev", "ops"]);
        assert_eq!(cert.sans.len(), 3);
        assert!(cert.is_issued_by(&authority.cert));
        assert_eq!(cert.usages, [Usage::Client, Usage::Server]);
        assert!(!cert.is_authority && authority.cert.is_authority);
    }

    #[test]
    fn an_authority_can_be_cross_signed() {
        let [first, second, third] =
            ["a", "b", "c"].map(|name| Authority::generate(name).expect("keys can be made"));
        let next = |new: &Authority, old: &Authority| {
            let bundle = [new.cert_pem(), &new.vouched_for_by(old).expect("signs"), old.cert_pem()];
            Authority::from_pem(&bundle.concat(), new.key_pem()).expect("loads")
        };
        let second = next(&second, &first);
        let third = next(&third, &second);
        let leaf = third.issue(&Profile::client("x", &[])).expect("signs").cert_pem;
        let chain = parsed::certificates(leaf.as_bytes()).expect("parses");
        // From the leaf to the first authority: the next key signed each of them.
        assert_eq!(chain.len(), 3);
        assert!(chain[0].is_issued_by(&chain[1]) && chain[1].is_issued_by(&chain[2]));
        assert!(chain[2].is_issued_by(&first.cert) && chain[1].is_authority);
        assert_eq!(
            first
                .issue(&Profile::client("x", &[]))
                .expect("signs")
                .cert_pem
                .matches("BEGIN")
                .count(),
            1
        );
    }

    #[test]
    fn an_authority_survives_its_pem() {
        let one = Authority::generate("a").expect("keys can be made");
        let two = Authority::generate("b").expect("keys can be made");
        let again = Authority::from_pem(one.cert_pem(), one.key_pem()).expect("loads");
        assert_eq!(again.fingerprint(), one.fingerprint());
        let leaf = again.issue(&Profile::client("x", &[])).expect("signs");
        let leaf = &parsed::certificates(leaf.cert_pem.as_bytes()).expect("parses")[0];
        assert!(leaf.is_issued_by(&one.cert) && !leaf.is_issued_by(&two.cert));
        assert!(matches!(
            Authority::from_pem(one.cert_pem(), two.key_pem()),
            Err(Error::Mismatch(..))
        ));
    }
}
