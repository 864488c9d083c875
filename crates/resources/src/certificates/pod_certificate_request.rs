//! PodCertificateRequest: a kubelet asks a signer for a certificate of a pod.

use aws_lc_rs::signature::{self, UnparsedPublicKey, VerificationAlgorithm};
use base::pem::{self, Block};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;
use machinery::names;
use release::features::Feature;
use x509_parser::certificate::X509Certificate;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::prelude::FromDer;
use x509_parser::public_key::PublicKey;
use x509_parser::x509::SubjectPublicKeyInfo;

use super::{CERTIFICATE, LONGEST, signer_name};
use crate::kind::{Fields, Kind, Rules, STATUS, field, name, spec_and_bare_status, text};
use crate::print::labels;
use crate::validate::at::At;
use crate::validate::shared::conditions;

const DAY: i32 = 86_400;

pub(crate) static KIND: Kind<PodCertificateRequest> = Kind {
    optional: true,
    gate: Some(Feature::PodCertificateRequest),
    subresources: &[STATUS],
    default: |request| {
        request.spec.max_expiration_seconds.get_or_insert(DAY);
    },
    parts: Some(spec_and_bare_status!()),
    rules: Rules {
        create: request,
        update: Some(request_update),
        parts: &[("status", request_status)],
        unconditional_update: false,
        ..Rules::NONE
    },
    columns: &[
        name(),
        field(
            "PodName",
            "string",
            "api.certificates.v1beta1.PodCertificateRequestSpec.podName",
            |request| request.spec.pod_name.clone().into(),
        ),
        field(
            "ServiceAccountName",
            "string",
            "api.certificates.v1beta1.PodCertificateRequestSpec.serviceAccountName",
            |request| request.spec.service_account_name.clone().into(),
        ),
        field(
            "NodeName",
            "string",
            "api.certificates.v1beta1.PodCertificateRequestSpec.nodeName",
            |request| request.spec.node_name.clone().into(),
        ),
        field(
            "SignerName",
            "string",
            "api.certificates.v1beta1.PodCertificateRequestSpec.signerName",
            |request| request.spec.signer_name.clone().into(),
        ),
        text("State", "string", "Is the request Pending, Issued, Denied, or Failed?", |request| {
            state(request).into()
        }),
        field(
            "UnverifiedUserAnnotations",
            "string",
            "api.certificates.v1beta1.PodCertificateRequestSpec.unverifiedUserAnnotations",
            |request| labels(request.spec.unverified_user_annotations.as_ref()).into(),
        ),
    ],
    fields: Fields::Of(&[
        ("spec.signerName", |request| request.spec.signer_name.clone()),
        ("spec.podName", |request| request.spec.pod_name.clone()),
        ("spec.nodeName", |request| request.spec.node_name.clone()),
    ]),
    ..Kind::BASE
};

fn state(request: &PodCertificateRequest) -> &str {
    let conditions = request.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let mut kinds = conditions.map(|one| one.type_.as_str());
    let state = kinds.rfind(|kind| matches!(*kind, "Issued" | "Denied" | "Failed"));
    state.unwrap_or("Pending")
}

fn request(at: &At<'_>) {
    let spec = at.get("spec");
    signer_name(&spec.get("signerName"));
    for (key, one) in spec.get("unverifiedUserAnnotations").entries() {
        let wrong = match key.contains('/') {
            false => vec!["must be a domain-prefixed key (such as \"acme.io/foo\")".to_owned()],
            true => names::qualified_name(&key.to_lowercase()),
        };
        let place = one.called(spec.child_path("unverifiedUserAnnotations"));
        wrong.iter().for_each(|why| place.invalid_as(key.to_lowercase(), why));
    }
    let owners = [
        ("podName", "podUID"),
        ("serviceAccountName", "serviceAccountUID"),
        ("nodeName", "nodeUID"),
    ];
    for (name, uid) in owners {
        const LONGEST_ID: usize = 128;
        spec.get(name).name(names::dns1123_subdomain);
        let id = spec.get(uid);
        if id.is_empty() {
            id.invalid_text("must not be empty");
        }
        if id.len() > LONGEST_ID {
            id.too_long(LONGEST_ID);
        }
    }
    if !lifetime(&spec) {
        return;
    }
    let fields = ["stubPKCS10Request", "pkixPublicKey", "proofOfPossession"];
    match fields.map(|field| !spec.get(field).is_empty()) {
        [true, false, false] => stub(&spec.get(fields[0])),
        [false, true, true] => proof(&spec),
        _ => spec.errors().invalid_shown(
            &spec.path,
            None,
            "exactly one of (stubPKCS10Request) or (pkixPublicKey, proofOfPossession) must be set",
        ),
    }
}

/// How long a certificate may live; is it said at all?
fn lifetime(spec: &At<'_>) -> bool {
    const HOUR: i64 = 3600;
    const DAY: i64 = 24 * HOUR;
    let seconds = spec.get("maxExpirationSeconds");
    let host = spec.get("signerName").str().split('/').next().unwrap_or_default();
    let is_own = host == "kubernetes.io" || host.ends_with(".kubernetes.io");
    let most = if is_own { DAY } else { 91 * DAY };
    match seconds.number() {
        None => seconds.required("must be set"),
        Some(number) if !(HOUR..=most).contains(&number) => {
            seconds.invalid(&format!("must be in the range [{HOUR}, {most}]"));
        }
        Some(_) => {}
    }
    seconds.is_set()
}

fn bytes(at: &At<'_>) -> Vec<u8> {
    STANDARD.decode(at.str()).unwrap_or_default()
}

fn invalid(at: &At<'_>, why: &str) {
    at.errors().invalid_shown(&at.path, None, why);
}

fn stub(at: &At<'_>) {
    let der = bytes(at);
    if der.len() > LONGEST {
        return at.too_long(LONGEST);
    }
    let Ok(([], request)) = X509CertificationRequest::from_der(&der) else {
        return invalid(at, "must be a valid PKCS#10 CSR");
    };
    if algorithm(at, &request.certification_request_info.subject_pki).is_none() {
        return;
    }
    if pki::verify(&request).is_err() {
        invalid(at, "invalid signature");
    }
}

fn proof(spec: &At<'_>) {
    let (key, proof) = (spec.get("pkixPublicKey"), spec.get("proofOfPossession"));
    let (der, signature) = (bytes(&key), bytes(&proof));
    for (at, length) in [(&key, der.len()), (&proof, signature.len())] {
        if length > LONGEST {
            return at.too_long(LONGEST);
        }
    }
    let Ok((_, info)) = SubjectPublicKeyInfo::from_der(&der) else {
        return key.invalid("must be a valid PKIX-serialized public key");
    };
    let Some(algorithm) = algorithm(&key, &info) else { return };
    let public = UnparsedPublicKey::new(algorithm, &info.subject_public_key.data);
    if public.verify(spec.get("podUID").str().as_bytes(), &signature).is_err() {
        invalid(&proof, "could not verify proof-of-possession signature");
    }
}

/// What a key of a kind that may be used signs with; says so if it may not.
fn algorithm(
    at: &At<'_>,
    info: &SubjectPublicKeyInfo<'_>,
) -> Option<&'static dyn VerificationAlgorithm> {
    const ED25519: &str = "1.3.101.112";
    if info.algorithm.algorithm.to_id_string() == ED25519 {
        return Some(&signature::ED25519);
    }
    match info.parsed() {
        Ok(PublicKey::EC(point)) => match point.key_size() {
            256 => Some(&signature::ECDSA_P256_SHA256_ASN1),
            384 => Some(&signature::ECDSA_P384_SHA256_ASN1),
            // The field has 521 bits, the point's halves 528.
            521 | 528 => Some(&signature::ECDSA_P521_SHA256_ASN1),
            _ => {
                let why = "elliptic public keys must use curve P256, P384, or P521";
                at.invalid_as("curve", why);
                None
            }
        },
        Ok(PublicKey::RSA(key)) => match key.key_size() {
            3072 | 4096 => Some(&signature::RSA_PSS_2048_8192_SHA256),
            bits => {
                at.invalid_as(
                    format!("{bits}-bit modulus"),
                    "RSA keys must have modulus size 3072 or 4096",
                );
                None
            }
        },
        _ => {
            invalid(at, "unknown public key type; supported types are Ed25519, ECDSA, and RSA");
            None
        }
    }
}

/// Nothing but metadata changes.
fn request_update(at: &At<'_>, old: &At<'_>) {
    at.get("spec").unchanged(&old.get("spec"));
}

const VERDICTS: &[&str] = &["Issued", "Denied", "Failed"];

fn verdict<'a>(status: &At<'a>) -> Option<&'a str> {
    let mut all = status.get("conditions").items();
    let is_verdict =
        |one: &At<'_>| VERDICTS.contains(&one.get("type").str()) && one.get("status").is("True");
    all.find(is_verdict).map(|one| one.get("type").str())
}

/// A verdict is given once; only with it come a certificate and its times.
fn request_status(at: &At<'_>, old: &At<'_>) {
    let (status, before) = (at.get("status"), old.get("status"));
    let list = status.get("conditions");
    let (known, others): (Vec<_>, Vec<_>) =
        list.items().partition(|one| VERDICTS.contains(&one.get("type").str()));
    if let Some(second) = known.get(1) {
        let why = r#"There may be at most one condition with type "Issued", "Denied", or "Failed""#;
        second.get("type").invalid(why);
    }
    known.iter().for_each(|one| one.get("status").one_of(&["True"]));
    for one in &others {
        one.get("type").unsupported(&["Denied", "Failed", "Issued"]);
    }
    conditions(&list);
    if !at.errors().is_empty() {
        return;
    }
    let is_same = status.value == before.value;
    let with_it = ["certificateChain", "notBefore", "notAfter", "beginRefreshAt"];
    match (verdict(&before), verdict(&status)) {
        (Some(_), _) if !is_same => {
            invalid(&status, "immutable after PodCertificateRequest is issued, denied, or failed");
        }
        (Some(_), _) => {}
        (None, Some("Issued")) => issued(&at.get("spec"), &status),
        (None, Some(_)) if with_it.iter().any(|field| !status.get(field).is_empty()) => {
            invalid(
                &status,
                "non-condition status fields must be empty when denying or failing the PodCertificateRequest",
            );
        }
        (None, Some(_)) => {}
        (None, None) if !is_same => {
            invalid(
                &status,
                r#"status is immutable unless transitioning to "Issued", "Denied", or "Failed""#,
            );
        }
        (None, None) => {}
    }
}

/// The key that the certificate is to be for, DER.
fn requested_key(spec: &At<'_>) -> Option<Vec<u8>> {
    let stub = bytes(&spec.get("stubPKCS10Request"));
    if stub.is_empty() {
        return Some(bytes(&spec.get("pkixPublicKey")));
    }
    let (_, request) = X509CertificationRequest::from_der(&stub).ok()?;
    Some(request.certification_request_info.subject_pki.raw.to_vec())
}

fn issued(spec: &At<'_>, status: &At<'_>) {
    const LONGEST_CHAIN: usize = 100 << 10;
    const HOUR: i64 = 3600;
    const ALL: &str = "issued certificate chain must consist entirely of CERTIFICATE PEM blocks";
    let chain = status.get("certificateChain");
    if chain.len() > LONGEST_CHAIN {
        return chain.too_long(LONGEST_CHAIN);
    }
    let blocks: Vec<Block> = pem::blocks(chain.str().as_bytes()).collect();
    let Some(leaf) = blocks.first() else {
        let why = "issued certificate chain must contain at least one certificate";
        return chain.invalid_text(why);
    };
    if blocks.iter().any(|block| block.label != CERTIFICATE) {
        return chain.invalid_text(ALL);
    }
    let Ok((_, certificate)) = X509Certificate::from_der(&leaf.bytes) else {
        return chain.invalid_text("leaf certificate does not parse as valid X.509");
    };
    if requested_key(spec).is_none_or(|key| key != certificate.public_key().raw) {
        let why = "leaf certificate was not issued to the requested public key";
        return chain.invalid_text(why);
    }
    let validity = certificate.validity();
    let (from, to) = (validity.not_before.timestamp(), validity.not_after.timestamp());
    if !times(status, from, to) {
        return;
    }
    let longest = spec.get("maxExpirationSeconds").int();
    let shown = base::duration::show(std::time::Duration::from_secs((to - from).unsigned_abs()));
    if to - from < HOUR {
        return chain.invalid_as(shown, "leaf certificate lifetime must be >= 1 hour");
    }
    if to - from > longest {
        let why =
            format!("leaf certificate lifetime must be <= spec.maxExpirationSeconds ({longest})");
        return chain.invalid_as(shown, &why);
    }
    if blocks[1..].iter().any(|block| X509Certificate::from_der(&block.bytes).is_err()) {
        chain.invalid_text("intermediate certificate does not parse as valid X.509");
    }
}

/// Are the times there, and the certificate's?
fn times(status: &At<'_>, from: i64, to: i64) -> bool {
    const SKEW: i64 = 300;
    const MARGIN: i64 = 600;
    const CONSISTENT: &str = "must be present and consistent with the issued certificate";
    let fields = ["notBefore", "notAfter", "beginRefreshAt"].map(|field| status.get(field));
    let details = [
        CONSISTENT,
        CONSISTENT,
        "must be present and in the range [notbefore+10min, notafter-10min]",
    ];
    let mut is_complete = true;
    for (one, detail) in fields.iter().zip(details).filter(|(one, _)| !one.is_set()) {
        one.required(detail);
        is_complete = false;
    }
    if !is_complete {
        return false;
    }
    let second = |at: &At<'_>| at.str().parse::<Timestamp>().map_or(0, |time| time.as_second());
    let [begins, ends, refresh] = &fields;
    let now = base::clock::now().as_second();
    let (at, why) = if second(begins) != from {
        (begins, "must be set to the NotBefore time encoded in the leaf certificate")
    } else if (from - now).abs() >= SKEW {
        (begins, "must be set to within 5 minutes of kube-apiserver's current time")
    } else if second(ends) != to {
        (ends, "must be set to the NotAfter time encoded in the leaf certificate")
    } else if second(refresh) < from + MARGIN {
        (refresh, "must be at least 10 minutes after status.notBefore")
    } else if second(refresh) > to - MARGIN {
        (refresh, "must be at least 10 minutes before status.notAfter")
    } else {
        return true;
    };
    at.invalid(why);
    false
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::validate::at::judge;

    /// A request of a key of its own (P-256).
    const REQUEST: &str = "MIHFMG4CAQAwDDEKMAgGA1UEAwwBeDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABDWE+tp5PLCcOQWhaT0tX1uzDLnA/kLrTHZEQEJSN0uT0Zt9JjKMIY41xVTO5mp9KkDau+p0I7gSMk5iQ/QobdqgADAKBggqhkjOPQQDAgNHADBEAiBTHELyypy/w6TgX//hjlN6lHoa8YNPaPW8AmScQOGEBAIgAjGon9JeENlkFiyEAIhD/p4V4NNcnwZE9D0MqAQyvBI=";

    #[test]
    fn requests_are_for_a_key() {
        let check = |changed: Value, expected: &[&str]| {
            let mut spec = json!({"signerName": "a.example/b", "podName": "p", "podUID": "1",
                "serviceAccountName": "s", "serviceAccountUID": "2", "nodeName": "n",
                "nodeUID": "3", "maxExpirationSeconds": 86400, "stubPKCS10Request": REQUEST});
            let fields = spec.as_object_mut().expect("an object");
            fields.extend(changed.as_object().cloned().unwrap_or_default());
            let errors = judge(&json!({"spec": spec}), request);
            let found: Vec<&str> = errors.0.iter().map(|error| error.field.as_str()).collect();
            assert_eq!(found, expected, "{changed}");
        };
        let broken = REQUEST.replacen('A', "B", 1);
        check(json!({}), &[]);
        check(json!({"podUID": "", "nodeName": "N"}), &["spec.podUID", "spec.nodeName"]);
        check(json!({"maxExpirationSeconds": 60}), &["spec.maxExpirationSeconds"]);
        let own = json!({"signerName": "kubernetes.io/x", "maxExpirationSeconds": 86401});
        check(own, &["spec.maxExpirationSeconds"]);
        check(json!({"stubPKCS10Request": broken}), &["spec.stubPKCS10Request"]);
        check(json!({"stubPKCS10Request": ""}), &["spec"]);
        check(json!({"pkixPublicKey": "AA==", "proofOfPossession": "AA=="}), &["spec"]);
        check(
            json!({"stubPKCS10Request": "", "pkixPublicKey": "AA==", "proofOfPossession": "AA=="}),
            &["spec.pkixPublicKey"],
        );
    }
}
