//! PKCS#10 certificate signing requests: reading them, and creating them (for kubelets and clients).
//!
//! Invariant: validation, approval and signing read a request with the same function, so that all
//! see the same content. It accepts what Go's `encoding/pem` and `crypto/x509` accept, and reports
//! errors with their texts. Upstream: `ParseCSR` of `pkg/apis/certificates`.

use aws_lc_rs::signature::{self, UnparsedPublicKey, VerificationAlgorithm};
use base::pem;
use rcgen::{CertificateParams, DnType, KeyPair, SanType};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::error::X509Error;
use x509_parser::extensions::ParsedExtension;
use x509_parser::prelude::FromDer;
use x509_parser::public_key::PublicKey;

use crate::authority::encode_name;
use crate::parsed::{alternative_names, names};
use crate::{Error, Profile, San};

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
    /// Reads the first PEM block of a text (the bytes in `spec.request`), which must be a
    /// `CERTIFICATE REQUEST`.
    pub fn parse(text: &[u8]) -> Result<Self, Error> {
        let block = pem::next(text).map(|(block, _)| block);
        let Some(block) = block.filter(|block| block.label == "CERTIFICATE REQUEST") else {
            return Err(Error::Request("PEM block type must be CERTIFICATE REQUEST"));
        };
        let csr = read(&block.bytes)?;
        verify(&csr)?;
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

    /// The same request with a subject of only its name, its groups and this user UID. All other
    /// attributes are dropped, above all a UID from the requestor.
    pub fn with_uid(mut self, uid: Option<&str>) -> Self {
        self.subject = encode_name(&self.common_name, &self.organizations, uid);
        self
    }

    pub(crate) fn subject_der(&self) -> &[u8] {
        &self.subject
    }

    /// The SubjectPublicKeyInfo, DER.
    pub fn public_key_info(&self) -> &[u8] {
        &self.spki
    }
}

fn read(der: &[u8]) -> Result<X509CertificationRequest<'_>, Error> {
    match X509CertificationRequest::from_der(der) {
        Ok(([], request)) => Ok(request),
        Ok(_) => Err(Error::Request("asn1: syntax error: trailing data")),
        Err(_) if der.is_empty() => Err(Error::Request("asn1: syntax error: sequence truncated")),
        Err(_) if is_cut(der) => Err(Error::Request("asn1: syntax error: data truncated")),
        // Go's error also names the malformed part.
        Err(_) => Err(Error::Request("asn1: structure error: malformed certificate request")),
    }
}

/// Whether a sequence claims to be longer than the available bytes.
fn is_cut(der: &[u8]) -> bool {
    let [0x30, length, rest @ ..] = der else { return false };
    match (usize::from(*length), rest) {
        (short, rest) if short < 0x80 => rest.len() < short,
        (0x81, [length, rest @ ..]) => rest.len() < usize::from(*length),
        (0x82, [high, low, rest @ ..]) => {
            rest.len() < usize::from(u16::from_be_bytes([*high, *low]))
        }
        _ => true,
    }
}

/// Verifies a request with the key in it, like Go's `CheckSignature`.
pub fn verify(request: &X509CertificationRequest<'_>) -> Result<(), Error> {
    let info = &request.certification_request_info;
    let key = info.subject_pki.parsed();
    let bits = match &key {
        Ok(PublicKey::EC(point)) => point.key_size(),
        _ => 0,
    };
    let algorithm = request.signature_algorithm.algorithm.to_id_string();
    let known = ALGORITHMS.iter().find(|(id, of, _)| *id == algorithm && of.contains(&bits));
    let is_signed = match known {
        Some((_, _, algorithm)) => {
            let key = UnparsedPublicKey::new(*algorithm, &info.subject_pki.subject_public_key.data);
            key.verify(info.raw, &request.signature_value.data).is_ok()
        }
        None => match request.verify_signature() {
            Err(X509Error::SignatureUnsupportedAlgorithm) => {
                let why = "x509: cannot verify signature: algorithm unimplemented";
                return Err(Error::BadSignature(why));
            }
            checked => checked.is_ok(),
        },
    };
    if is_signed {
        return Ok(());
    }
    Err(Error::BadSignature(match key {
        Ok(PublicKey::EC(_)) => "x509: ECDSA verification failure",
        Ok(PublicKey::RSA(_)) => "crypto/rsa: verification error",
        _ => "x509: Ed25519 verification failure",
    }))
}

/// By the signature's object identifier and the curve's bits: algorithms that Go verifies, and
/// x509-parser does not verify or only with longer keys.
const ALGORITHMS: &[(&str, &[usize], &dyn VerificationAlgorithm)] = &[
    ("1.2.840.113549.1.1.11", &[0], &signature::RSA_PKCS1_1024_8192_SHA256_FOR_LEGACY_USE_ONLY),
    ("1.2.840.113549.1.1.13", &[0], &signature::RSA_PKCS1_1024_8192_SHA512_FOR_LEGACY_USE_ONLY),
    ("1.2.840.10045.4.3.2", P521, &signature::ECDSA_P521_SHA256_ASN1),
    ("1.2.840.10045.4.3.3", P521, &signature::ECDSA_P521_SHA384_ASN1),
    ("1.2.840.10045.4.3.4", P521, &signature::ECDSA_P521_SHA512_ASN1),
    ("1.2.840.10045.4.3.4", &[256], &signature::ECDSA_P256_SHA512_ASN1),
    ("1.2.840.10045.4.3.4", &[384], &signature::ECDSA_P384_SHA512_ASN1),
];

/// The field has 521 bits; each half of the point has 528.
const P521: &[usize] = &[521, 528];

/// A new P-256 key and a request for it, both PEM: `(request, key)`. The request has the profile's
/// common name, its first organization (a kubelet's subject has one) and its SANs.
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
    let key_pem = crate::private_key_pem(&key.serialize_pem());
    Ok((params.serialize_request(&key)?.pem()?, key_pem))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;

    use super::*;
    use crate::{Authority, Usage, certificates};

    fn node_profile() -> Profile {
        Profile::client("system:node:n1", &["system:nodes"]).with_sans(["n1", "10.0.0.7"])
    }

    #[test]
    fn a_request_is_signed_unchanged() {
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
    fn the_signer_decides_the_uid() {
        let authority = Authority::generate("ca").expect("keys can be made");
        let lifetime = Duration::from_secs(3600);
        let sign = |uid: Option<&str>, csr: &Csr| {
            let csr = csr.clone().with_uid(uid);
            let pem = authority.sign_request(&csr, &[Usage::Client], 1, lifetime).expect("signs");
            certificates(pem.as_bytes()).expect("parses").remove(0)
        };
        let (request, _) = new_request(&node_profile()).expect("makes a request");
        let csr = Csr::parse(request.as_bytes()).expect("parses");
        let cert = sign(Some("1-2-3"), &csr);
        assert_eq!(cert.uid.as_deref(), Some("1-2-3"));
        assert_eq!(
            (&cert.common_name, &cert.organizations),
            (&csr.common_name, &csr.organizations)
        );
        // A UID in the request is dropped.
        let brings = csr.clone().with_uid(Some("stolen"));
        assert_eq!(sign(None, &brings).uid, None);
    }

    /// One reader may take the first block that looks valid, another the first valid block. All
    /// must read the same one.
    #[test]
    fn an_invalid_block_does_not_hide_another() {
        let request =
            |name: &str| new_request(&Profile::client(name, &[])).expect("makes a request").0;
        let (admin, node) = (request("admin"), request("node"));
        let admin = admin.trim_end();
        for text in [format!("{admin} junk\n{node}"), format!("junk {admin}\n{node}")] {
            let csr = Csr::parse(text.as_bytes()).expect("parses");
            assert_eq!(csr.common_name, "node", "{text}");
        }
    }

    /// Every accepted request can be signed.
    #[test]
    fn keys_of_all_kinds_are_signed() {
        let authority = Authority::generate("ca").expect("keys can be made");
        for request in [P256, P521_SHA512, RSA, ED25519] {
            let csr = Csr::parse(of(request).as_bytes()).expect("parses");
            let lifetime = Duration::from_secs(3600);
            let pem = authority.sign_request(&csr, &[Usage::Client], 1, lifetime).expect("signs");
            let cert = certificates(pem.as_bytes()).expect("parses").remove(0);
            assert_eq!(cert.public_key_info(), csr.public_key_info());
        }
    }

    /// Requests of the subject `CN=a`: P-256 with SHA-256, P-521 with SHA-512, RSA of 1024 bits, Ed25519.
    const P256: &str = "MIHHMG4CAQAwDDEKMAgGA1UEAwwBYTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABO9cz+QrCERJmr5mkuJBYoze0K8pj9e+4h5BEGnKvdTI/N36bgSkV97POE2iPN4I9PQDYBWH85ySsais2MN+unWgADAKBggqhkjOPQQDAgNJADBGAiEA4zGZAP/kbn8pEuh5jpcoAzu7kNlmNJ0qwDY6lFSV9xcCIQCghtYIyyxh/2WSYswAEEpFHYIeapl1T3JZDW4wOFNmNg==";
    const P521_SHA512: &str = "MIIBTjCBsQIBADAMMQowCAYDVQQDDAFhMIGbMBAGByqGSM49AgEGBSuBBAAjA4GGAAQBJgrxbYZJokN0dF7nf9sam/aoSE+itlkudgpq1DdYxdKT7b4LagJUd7HGSP3Qarl2/MVLxRC3/q90dOtOISRQoI8AY0bvB6R/kj3Smis2xGEoyM035u/6cm8q563uFMlE5SRW1OLDYHO825Y92PwToPsi2t+B6B3Qe5k+wdPLJrthXhWgADAKBggqhkjOPQQDBAOBiwAwgYcCQXZdqtkfKS2T8EOFZYgVz1HrNiUD2dqw9NZG+wouoqUlPqW6M8Q7Vicwmv1vnvEvwkbpLFyZE7cWi/kUJeFk2iYuAkIB/UBr9AxviTmFGr2XJnGMB6i4R2NaPkKvRnOVYrVH57bwE+HehKesbJNyBBavtOHyemdcTC8VlDZhsr3jkj0nS9Q=";
    const RSA: &str = "MIIBSzCBtQIBADAMMQowCAYDVQQDDAFhMIGfMA0GCSqGSIb3DQEBAQUAA4GNADCBiQKBgQDYRNgneXW67+6cU60SRjMVuYxISDAkOPIm46cGM5NR6414ajJg9COe94A0jIsdTKc4p0OnTAEgaOkOxXluUc0dcQLwWWj/qNLW11MjdnlQiaTnrbjw63HM4AG0nAiym6VOTxkwXcF9QQTaFmRx9ic6HNZZBVinLD25ap3GRFVwcQIDAQABoAAwDQYJKoZIhvcNAQELBQADgYEAdIG23PQjH8AIZY3WeOLHcfL4O2LU3AYCCJxnTBKpKFV/BB0I1fOIFjqagCSYdv0JK0FPBpQ4gARC+FplMspwFwNh1cTB2vLLLf1B8CceTn2wS5P7YiQA695aj5sEaNtBpLiuT2XqkM7q7q9/yXlxu50qp9IvTHOcrg16UQ63TQk=";
    const ED25519: &str = "MIGLMD8CAQAwDDEKMAgGA1UEAwwBYTAqMAUGAytlcAMhALD3t1w3wcz3snydd7CfqYsUuB3o0zFfe2QVQ1lV8isRoAAwBQYDK2VwA0EAEI97824pI16U/xb+xsbIlJdhlJ4TvbytcU96q4cIr9zw+1Xrfm2+cYFIhONUT7Pr1oOm1SQBG9VxFHs0HtN8DA==";

    fn block(label: &str, base64: &str) -> String {
        format!("-----BEGIN {label}-----\n{base64}\n-----END {label}-----\n")
    }

    fn of(base64: &str) -> String {
        block("CERTIFICATE REQUEST", base64)
    }

    #[test]
    fn requests_are_judged_as_go_reads_them() {
        let check = |text: &str, expected: Option<&str>| {
            let why = Csr::parse(text.as_bytes()).err().map(|why| why.to_string());
            assert_eq!(why.as_deref(), expected, "{text}");
        };
        for good in [P256, P521_SHA512, RSA, ED25519] {
            check(&of(good), None);
        }
        check(&format!("junk\n{}junk", of(P256)), None);
        const NO_BLOCK: Option<&str> = Some("PEM block type must be CERTIFICATE REQUEST");
        check("", NO_BLOCK);
        check("-----BEGIN CERTIFICATE REQUEST-----\n", NO_BLOCK);
        check(&of(&P256.replacen('K', "!", 1)), NO_BLOCK);
        check(&format!("junk {}", of(P256)), NO_BLOCK);
        check(&block("NEW CERTIFICATE REQUEST", P256), NO_BLOCK);
        // Only the first block counts.
        check(&format!("{}{}", block("CERTIFICATE", P256), of(P256)), NO_BLOCK);
        check(&of(""), Some("asn1: syntax error: sequence truncated"));
        check(&of("MIHHMG4C"), Some("asn1: syntax error: data truncated"));
        check(&of("MIIBTjCBsQIB"), Some("asn1: syntax error: data truncated"));
        check(&of("aGVsbG8="), Some("asn1: structure error: malformed certificate request"));
        check(&of("MAA="), Some("asn1: structure error: malformed certificate request"));
        let mut longer = STANDARD.decode(P256).expect("base64");
        longer.push(0);
        check(&of(&STANDARD.encode(&longer)), Some("asn1: syntax error: trailing data"));
        for (request, why) in [
            (P256, "x509: ECDSA verification failure"),
            (P521_SHA512, "x509: ECDSA verification failure"),
            (RSA, "crypto/rsa: verification error"),
            (ED25519, "x509: Ed25519 verification failure"),
        ] {
            let mut other = STANDARD.decode(request).expect("base64");
            // Changes the signed name.
            let place = other.windows(3).position(|at| at == [0x0c, 1, b'a']).expect("the name");
            other[place + 2] = b'b';
            check(&of(&STANDARD.encode(&other)), Some(why));
        }
    }
}
