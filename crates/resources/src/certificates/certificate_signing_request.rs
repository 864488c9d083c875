//! CertificateSigningRequest: who asks is the server's to say, and the request itself never changes.

use std::collections::{BTreeMap, HashSet};

use api::nodes;
use apiserver::request::RequestContext;
use apiserver::resource::MetadataRules;
use base::pem;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestStatus,
};
use machinery::names;
use pki::Csr;
use serde_json::Value;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use super::signer_name;
use crate::kind::{Fields, Hooks, Kind, Rules, STATUS, age, field, name, part, text};
use crate::print::or_none;
use crate::validate::at::At;

const KUBELET_SERVING: &str = "kubernetes.io/kubelet-serving";

const METADATA: MetadataRules = MetadataRules {
    part: MetadataRules::WHOLE_AND_UPDATE.update,
    ..MetadataRules::WHOLE_AND_UPDATE
};

pub(crate) static KIND: Kind<CertificateSigningRequest> = Kind {
    short: &["csr"],
    subresources: &[STATUS, part("approval")],
    default: |csr| {
        csr.status.get_or_insert_default();
    },
    rules: Rules {
        create: request,
        update: Some(request_update),
        parts: &[("approval", approval), ("status", status)],
        name: names::path_segment,
        metadata: METADATA,
        ..Rules::NONE
    },
    columns: &[
        name(),
        age(),
        text(
            "SignerName",
            "string",
            "Requested signer for the request. It is a qualified name in the form: `scope-hostname.io/name`. If empty, it will be defaulted:\n 1. If it's a kubelet client certificate, it is assigned\n    \"kubernetes.io/kube-apiserver-client-kubelet\".\n 2. If it's a kubelet serving certificate, it is assigned\n    \"kubernetes.io/kubelet-serving\".\n 3. Otherwise, it is assigned \"kubernetes.io/legacy-unknown\".\nDistribution of trust for signers happens out of band. You can select on this field using `spec.signerName`.",
            |csr| csr.spec.signer_name.clone().into(),
        ),
        text("Requestor", "string", "Base64-encoded PKCS#10 CSR data", |csr| {
            csr.spec.username.clone().unwrap_or_default().into()
        }),
        field(
            "RequestedDuration",
            "string",
            "api.certificates.v1.CertificateSigningRequestSpec.expirationSeconds",
            |csr| {
                let lifetime = csr.spec.expiration_seconds;
                let shown = lifetime.map(|seconds| base::duration::human(seconds.into()));
                or_none(shown.unwrap_or_default()).into()
            },
        ),
        text(
            "Condition",
            "string",
            "Conditions applied to the request, such as approval or denial.",
            |csr| verdict(csr).into(),
        ),
    ],
    fields: Fields::Of(&[("spec.signerName", |csr| csr.spec.signer_name.clone())]),
    hooks: &Life,
    ..Kind::BASE
};

struct Life;

impl Hooks<CertificateSigningRequest> for Life {
    fn prepare_create(&self, ctx: &RequestContext, csr: &mut CertificateSigningRequest) {
        let mut extra: BTreeMap<String, Vec<String>> = ctx.user.extra.clone();
        // Users' extra fields can be impersonated, the connection cannot.
        extra.remove(nodes::SOURCE_ADDRESS);
        if csr.spec.signer_name == KUBELET_SERVING
            && let Some(remote) = ctx.remote
        {
            extra.insert(nodes::SOURCE_ADDRESS.to_owned(), vec![remote.to_string()]);
        }
        csr.spec.username = Some(ctx.user.name.clone());
        csr.spec.uid = Some(ctx.user.uid.clone()).filter(|uid| !uid.is_empty());
        csr.spec.groups = Some(ctx.user.groups.clone());
        csr.spec.extra = Some(extra).filter(|extra| !extra.is_empty());
        csr.status = Some(CertificateSigningRequestStatus::default());
    }

    fn prepare_update(
        &self,
        ctx: &RequestContext,
        csr: &mut CertificateSigningRequest,
        old: &CertificateSigningRequest,
    ) {
        csr.spec = old.spec.clone();
        let before = old.status.clone().unwrap_or_default();
        let status = csr.status.get_or_insert_default();
        match ctx.subresource.as_str() {
            // Approval changes the verdict only, status all but the verdict.
            "approval" => status.certificate = before.certificate,
            "status" => {
                let verdict = |kind: &str| kind == "Approved" || kind == "Denied";
                let mut conditions = before.conditions.unwrap_or_default();
                conditions.retain(|one| verdict(&one.type_));
                let new = status.conditions.take().unwrap_or_default();
                conditions.extend(new.into_iter().filter(|one| !verdict(&one.type_)));
                status.conditions = Some(conditions).filter(|list| !list.is_empty());
            }
            _ => csr.status = old.status.clone(),
        }
        let now = machinery::Time(base::clock::now_seconds());
        let had = old.status.as_ref().and_then(|status| status.conditions.as_deref());
        let status = csr.status.iter_mut();
        for one in status.flat_map(|status| status.conditions.iter_mut().flatten()) {
            let same = had.iter().copied().flatten();
            let mut same = same.filter(|had| had.type_ == one.type_ && had.status == one.status);
            let since = same.find_map(|had| had.last_transition_time.clone());
            one.last_update_time.get_or_insert_with(|| now.clone());
            one.last_transition_time.get_or_insert_with(|| since.unwrap_or(now.clone()));
        }
    }
}

fn verdict(csr: &CertificateSigningRequest) -> String {
    let status = csr.status.clone().unwrap_or_default();
    let has = |kind: &str| status.conditions.iter().flatten().any(|one| one.type_ == kind);
    let mut text = match (has("Denied"), has("Approved")) {
        (true, _) => "Denied",
        (false, true) => "Approved",
        (false, false) => "Pending",
    }
    .to_owned();
    if has("Failed") {
        text.push_str(",Failed");
    }
    if status.certificate.is_some_and(|certificate| !certificate.0.is_empty()) {
        text.push_str(",Issued");
    }
    text
}

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

fn request(at: &At<'_>) {
    let spec = at.get("spec");
    signed_request(&spec.get("request"));
    let usages = spec.get("usages");
    usages.need();
    usages.items().for_each(|usage| usage.one_of(USAGES));
    usages.unique(|usage| usage.str().to_owned(), Clone::clone);
    let signer = spec.get("signerName");
    if signer.is("kubernetes.io/legacy-unknown") {
        signer.invalid("the legacy signerName is not allowed via this API version");
    } else {
        signer_name(&signer);
    }
    let lifetime = spec.get("expirationSeconds");
    if lifetime.number().is_some_and(|seconds| seconds < MIN_SECONDS) {
        lifetime.invalid("may not specify a duration less than 600 seconds (10 minutes)");
    }
}

/// The spec cannot change, nor can the status here.
fn request_update(_at: &At<'_>, _old: &At<'_>) {}

/// Verdicts, once given, stay; so does the certificate.
fn approval(at: &At<'_>, old: &At<'_>) {
    conditions(&at.get("status.conditions"));
    kept(at, old);
    let (new, had) = (at.get("status.certificate"), old.get("status.certificate"));
    if new.value != had.value {
        new.forbidden("updates may not set certificate content");
    }
}

fn status(at: &At<'_>, old: &At<'_>) {
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
    // Validated with the parser of approvers and signers, so that all see the same request.
    if let Err(why) = Csr::parse(&text) {
        let shown = if at.is_empty() { Value::Null } else { at.value.clone() };
        at.invalid_as(shown, &why.to_string());
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::Arc;

    use apiserver::request::UserInfo;
    use k8s_openapi::api::certificates::v1::CertificateSigningRequestSpec;

    use super::*;
    use crate::generic::AnyKind;

    #[test]
    fn only_the_connection_says_where_a_request_comes_from() {
        let check = |signer: &str, remote: Option<&str>, expected: Option<&str>| {
            let mut user = UserInfo::new("system:node:n1", &["system:nodes"]);
            // As an impersonator could have it.
            user.extra.insert(nodes::SOURCE_ADDRESS.into(), vec!["10.0.0.66".into()]);
            let row = KIND.row(None).build(None);
            let mut ctx = RequestContext::new(user, Arc::new(row), "");
            ctx.remote = remote.map(|ip| ip.parse::<IpAddr>().expect("an address"));
            let claimed = [(nodes::SOURCE_ADDRESS.to_owned(), vec!["10.0.0.66".to_owned()])];
            let spec = CertificateSigningRequestSpec {
                signer_name: signer.into(),
                extra: Some(claimed.into()),
                ..CertificateSigningRequestSpec::default()
            };
            let mut csr = CertificateSigningRequest { spec, ..Default::default() };
            Life.prepare_create(&ctx, &mut csr);
            let extra = csr.spec.extra.unwrap_or_default();
            let told = extra.get(nodes::SOURCE_ADDRESS).map(|all| all.join(","));
            assert_eq!(told.as_deref(), expected, "{signer} {remote:?}");
        };
        check(KUBELET_SERVING, Some("10.0.0.7"), Some("10.0.0.7"));
        check(KUBELET_SERVING, None, None);
        check("kubernetes.io/kube-apiserver-client", Some("10.0.0.7"), None);
    }

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
