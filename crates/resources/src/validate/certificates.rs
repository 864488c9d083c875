//! Certificate signing requests. Upstream: `pkg/apis/certificates/validation`.

use std::collections::HashSet;

use aws_lc_rs::signature::{self, UnparsedPublicKey, VerificationAlgorithm};
use base::pem;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use machinery::names;
use serde_json::Value;
use x509_parser::certificate::X509Certificate;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::error::X509Error;
use x509_parser::prelude::FromDer;
use x509_parser::public_key::PublicKey;

use super::at::At;

const MIN_SECONDS: i64 = 600;

const USAGES: &[&str] = &[
    "any",
    "cert sign",
    "client auth",
    "code signing",
    "content commitment",
    "crl sign",
    "data encipherment",
    "decipher only",
    "digital signature",
    "email protection",
    "encipher only",
    "ipsec end system",
    "ipsec tunnel",
    "ipsec user",
    "key agreement",
    "key encipherment",
    "microsoft sgc",
    "netscape sgc",
    "ocsp signing",
    "s/mime",
    "server auth",
    "signing",
    "timestamping",
];

pub(super) fn request(at: &At<'_>) {
    let spec = at.get("spec");
    signed_request(&spec.get("request"));
    let usages = spec.get("usages");
    usages.need();
    usages.items().for_each(|usage| usage.one_of(USAGES));
    usages.unique(|usage| usage.str().to_owned(), Clone::clone);
    signer_name(&spec.get("signerName"));
    let lifetime = spec.get("expirationSeconds");
    if lifetime.number().is_some_and(|seconds| seconds < MIN_SECONDS) {
        lifetime.invalid("may not specify a duration less than 600 seconds (10 minutes)");
    }
}

/// The spec cannot change, nor can the status here.
pub(super) fn request_update(_at: &At<'_>, _old: &At<'_>) {}

/// Verdicts, once given, stay; so does the certificate.
pub(super) fn approval(at: &At<'_>, old: &At<'_>) {
    conditions(&at.get("status.conditions"));
    kept(at, old);
    let (new, had) = (at.get("status.certificate"), old.get("status.certificate"));
    if new.value != had.value {
        new.forbidden("updates may not set certificate content");
    }
}

pub(super) fn status(at: &At<'_>, old: &At<'_>) {
    conditions(&at.get("status.conditions"));
    kept(at, old);
    for verdict in ["Approved", "Denied"] {
        if of_type(at, verdict) > of_type(old, verdict) {
            at.get("status.conditions")
                .forbidden(&format!("updates may not add a condition of type {verdict:?}"));
        }
    }
    let (new, had) = (at.get("status.certificate"), old.get("status.certificate"));
    if new.value != had.value && !had.is_empty() {
        new.forbidden("updates may not modify existing certificate content");
    }
    if new.value != had.value
        && let Some(why) = no_certificates(new.str())
    {
        new.invalid_as("<certificate data>", &why);
    }
}

/// Why base64 is none of certificates in PEM.
fn no_certificates(base64: &str) -> Option<String> {
    const CERTIFICATE: &str = "CERTIFICATE";
    let text = STANDARD.decode(base64).unwrap_or_default();
    if text.is_empty() {
        return None;
    }
    let mut count = 0;
    for block in pem::blocks(&text) {
        count += 1;
        if block.label != CERTIFICATE {
            let label = block.label;
            return Some(format!("only CERTIFICATE PEM blocks are allowed, found {label:?}"));
        }
        if block.has_headers {
            return Some("no PEM block headers are permitted".into());
        }
        let mut rest = block.bytes.as_slice();
        if rest.is_empty() {
            return Some("found CERTIFICATE PEM block containing 0 certificates".into());
        }
        while !rest.is_empty() {
            let Ok((behind, _)) = X509Certificate::from_der(rest) else {
                return Some("x509: malformed certificate".into());
            };
            rest = behind;
        }
    }
    (count == 0).then(|| "must contain at least one CERTIFICATE PEM block".to_owned())
}

fn of_type(at: &At<'_>, wanted: &str) -> usize {
    at.get("status.conditions").items().filter(|one| one.get("type").is(wanted)).count()
}

fn kept(at: &At<'_>, old: &At<'_>) {
    for verdict in ["Approved", "Denied", "Failed"] {
        if of_type(at, verdict) < of_type(old, verdict) {
            at.get("status.conditions")
                .forbidden(&format!("updates may not remove a condition of type {verdict:?}"));
        }
    }
}

fn conditions(list: &At<'_>) {
    let mut seen = HashSet::new();
    for condition in list.items() {
        let (kind, status) = (condition.get("type"), condition.get("status"));
        kind.need();
        match (kind.str(), status.str()) {
            (_, "") => status.required(""),
            ("Approved" | "Denied" | "Failed", _) => status.one_of(&["True"]),
            _ => status.one_of(&["False", "True", "Unknown"]),
        }
        let other = match kind.str() {
            "Approved" => "Denied",
            "Denied" => "Approved",
            _ => "",
        };
        if !other.is_empty() && seen.contains(other) {
            let detail = "Approved and Denied conditions are mutually exclusive";
            list.invalid_as(kind.str(), detail);
        }
        if !seen.insert(kind.str()) {
            kind.duplicate();
        }
    }
}

fn signed_request(at: &At<'_>) {
    let text = STANDARD.decode(at.str()).unwrap_or_default();
    if let Some(why) = no_request(&text) {
        let shown = if at.is_empty() { Value::Null } else { at.value.clone() };
        at.invalid_as(shown, &why);
    }
}

/// Why a text is no request that its own key signed. Upstream: `ParseCSR`, Go's `CheckSignature`.
fn no_request(text: &[u8]) -> Option<String> {
    let block = pem::next(text).map(|(block, _)| block);
    let Some(block) = block.filter(|block| block.label == "CERTIFICATE REQUEST") else {
        return Some("PEM block type must be CERTIFICATE REQUEST".into());
    };
    match X509CertificationRequest::from_der(&block.bytes) {
        Ok(([], request)) => bad_signature(&request).map(Into::into),
        Ok(_) => Some("asn1: syntax error: trailing data".into()),
        Err(_) if block.bytes.is_empty() => Some("asn1: syntax error: sequence truncated".into()),
        Err(_) if is_cut(&block.bytes) => Some("asn1: syntax error: data truncated".into()),
        // Go says which part of it.
        Err(_) => Some("asn1: structure error: malformed certificate request".into()),
    }
}

/// A sequence that says it is longer than what there is?
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

fn bad_signature(request: &X509CertificationRequest<'_>) -> Option<&'static str> {
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
                return Some("x509: cannot verify signature: algorithm unimplemented");
            }
            checked => checked.is_ok(),
        },
    };
    if is_signed {
        return None;
    }
    Some(match key {
        Ok(PublicKey::EC(_)) => "x509: ECDSA verification failure",
        Ok(PublicKey::RSA(_)) => "crypto/rsa: verification error",
        _ => "x509: Ed25519 verification failure",
    })
}

/// By the signature's object identifier and the bits of a curve: what Go verifies and x509-parser
/// does not, or not of keys as short.
const ALGORITHMS: &[(&str, &[usize], &dyn VerificationAlgorithm)] = &[
    ("1.2.840.113549.1.1.11", &[0], &signature::RSA_PKCS1_1024_8192_SHA256_FOR_LEGACY_USE_ONLY),
    ("1.2.840.113549.1.1.13", &[0], &signature::RSA_PKCS1_1024_8192_SHA512_FOR_LEGACY_USE_ONLY),
    ("1.2.840.10045.4.3.2", P521, &signature::ECDSA_P521_SHA256_ASN1),
    ("1.2.840.10045.4.3.3", P521, &signature::ECDSA_P521_SHA384_ASN1),
    ("1.2.840.10045.4.3.4", P521, &signature::ECDSA_P521_SHA512_ASN1),
    ("1.2.840.10045.4.3.4", &[256], &signature::ECDSA_P256_SHA512_ASN1),
    ("1.2.840.10045.4.3.4", &[384], &signature::ECDSA_P384_SHA512_ASN1),
];

/// The field has 521 bits, the point's halves 528.
const P521: &[usize] = &[521, 528];

/// `domain/path`
pub(super) fn signer_name(at: &At<'_>) {
    if !at.need() {
        return;
    }
    let parts: Vec<&str> = at.str().split('/').collect();
    let [domain, path] = parts[..] else {
        return at.invalid(
            "must be a fully qualified domain and path of the form 'example.com/signer-name'",
        );
    };
    let bad_label = |text: &str, check: fn(&str) -> Vec<String>| {
        text.split('.')
            .map(|label| (label.to_owned(), check(label)))
            .find(|(_, bad)| !bad.is_empty())
    };
    if domain.len() > 253 {
        at.too_long(253);
    }
    if let Some((label, wrong)) = bad_label(domain, names::dns1123_label) {
        for why in wrong {
            at.invalid_as(domain, &format!("validating label {label:?}: {why}"));
        }
    }
    if !domain.contains('.') {
        at.invalid_as(domain, "should be a domain with at least two segments separated by dots");
    }
    if let Some((label, wrong)) = bad_label(path, names::dns1123_subdomain) {
        for why in wrong {
            at.invalid_as(path, &format!("validating label {label:?}: {why}"));
        }
    }
    if at.len() > 571 {
        at.too_long(571);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert_eq!(no_request(text.as_bytes()).as_deref(), expected, "{text}");
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
            // Another name than was signed.
            let place = other.windows(3).position(|at| at == [0x0c, 1, b'a']).expect("the name");
            other[place + 2] = b'b';
            check(&of(&STANDARD.encode(&other)), Some(why));
        }
    }

    #[test]
    fn certificates_are_blocks_of_certificates_and_no_others() {
        let check = |text: &str, expected: Option<&str>| {
            let why = no_certificates(&STANDARD.encode(text));
            assert_eq!(why.as_deref(), expected, "{text}");
        };
        check("", None);
        const NONE: Option<&str> = Some("must contain at least one CERTIFICATE PEM block");
        check("junk", NONE);
        check(&block("CERTIFICATE", "!"), NONE);
        check(
            &of(P256),
            Some("only CERTIFICATE PEM blocks are allowed, found \"CERTIFICATE REQUEST\""),
        );
        let with_headers = block("CERTIFICATE", "K: v\n\nMAA=");
        check(&with_headers, Some("no PEM block headers are permitted"));
        check(&block("CERTIFICATE", "MAA="), Some("x509: malformed certificate"));
        let empty = Some("found CERTIFICATE PEM block containing 0 certificates");
        check(&block("CERTIFICATE", ""), empty);
    }
}
