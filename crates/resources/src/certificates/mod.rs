//! certificates.k8s.io: who wants a certificate, and whom to trust.

use machinery::names;

use crate::validate::at::At;

pub(crate) mod certificate_signing_request;
pub(crate) mod cluster_trust_bundle;
pub(crate) mod pod_certificate_request;

const CERTIFICATE: &str = "CERTIFICATE";

const LONGEST: usize = 10 << 10;

/// `domain/path`
fn signer_name(at: &At<'_>) {
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
