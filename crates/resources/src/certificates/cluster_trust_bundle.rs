//! ClusterTrustBundle: certificates to trust, for pods to mount.

use base::features::Feature;
use k8s_openapi::api::certificates::v1beta1::ClusterTrustBundle;
use machinery::names;

use crate::kind::{Fields, Kind, Rules, field, name};
use crate::print::or_none;
use crate::validate::trust;

pub(crate) static KIND: Kind<ClusterTrustBundle> = Kind {
    optional: true,
    gate: Some(Feature::ClusterTrustBundle),
    rules: Rules {
        create: trust::bundle,
        update: Some(trust::bundle_update),
        name: names::path_segment,
        unconditional_update: false,
        ..Rules::NONE
    },
    columns: &[
        name(),
        field(
            "SignerName",
            "string",
            "api.certificates.v1beta1.ClusterTrustBundleSpec.signerName",
            |bundle| or_none(signer(bundle)).into(),
        ),
    ],
    fields: Fields::Of(&[("spec.signerName", signer)]),
    ..Kind::BASE
};

fn signer(bundle: &ClusterTrustBundle) -> String {
    bundle.spec.signer_name.clone().unwrap_or_default()
}
