//! PodCertificateRequest: a kubelet asks a signer for a certificate of a pod.

use base::features::Feature;
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;

use crate::kind::{Fields, Kind, Rules, STATUS, field, name, spec_and_status, text};
use crate::print::labels;
use crate::validate::trust;

const DAY: i32 = 86_400;

pub(crate) static KIND: Kind<PodCertificateRequest> = Kind {
    optional: true,
    gate: Some(Feature::PodCertificateRequest),
    subresources: &[STATUS],
    default: |request| {
        request.spec.max_expiration_seconds.get_or_insert(DAY);
    },
    parts: Some(spec_and_status!()),
    rules: Rules {
        create: trust::request,
        update: Some(trust::request_update),
        parts: &[("status", trust::request_status)],
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
