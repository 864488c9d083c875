//! Certificate signing requests. Upstream: `pkg/apis/certificates/validation`.

use std::collections::HashSet;

use base::pem;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use machinery::names;
use pki::Csr;
use serde_json::Value;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

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

pub(crate) fn request(at: &At<'_>) {
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
pub(crate) fn request_update(_at: &At<'_>, _old: &At<'_>) {}

/// Verdicts, once given, stay; so does the certificate.
pub(crate) fn approval(at: &At<'_>, old: &At<'_>) {
    conditions(&at.get("status.conditions"));
    kept(at, old);
    let (new, had) = (at.get("status.certificate"), old.get("status.certificate"));
    if new.value != had.value {
        new.forbidden("updates may not set certificate content");
    }
}

pub(crate) fn status(at: &At<'_>, old: &At<'_>) {
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
    // By what approvers and signers read it with: what is judged is what they see.
    if let Err(why) = Csr::parse(&text) {
        let shown = if at.is_empty() { Value::Null } else { at.value.clone() };
        at.invalid_as(shown, &why.to_string());
    }
}

/// `domain/path`
pub(crate) fn signer_name(at: &At<'_>) {
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

    fn block(label: &str, base64: &str) -> String {
        format!("-----BEGIN {label}-----\n{base64}\n-----END {label}-----\n")
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
            &block("CERTIFICATE REQUEST", "MAA="),
            Some("only CERTIFICATE PEM blocks are allowed, found \"CERTIFICATE REQUEST\""),
        );
        let with_headers = block("CERTIFICATE", "K: v\n\nMAA=");
        check(&with_headers, Some("no PEM block headers are permitted"));
        check(&block("CERTIFICATE", "MAA="), Some("x509: malformed certificate"));
        let empty = Some("found CERTIFICATE PEM block containing 0 certificates");
        check(&block("CERTIFICATE", ""), empty);
    }
}
