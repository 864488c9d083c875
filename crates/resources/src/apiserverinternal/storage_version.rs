//! StorageVersion: in which version each server stores a resource.

use k8s_openapi::api::apiserverinternal::v1alpha1::StorageVersion;

use crate::kind::{Kind, Rules, STATUS, age, field, name, spec_and_status};
use crate::validate::{core, optional};

pub(crate) static KIND: Kind<StorageVersion> = Kind {
    optional: true,
    subresources: &[STATUS],
    parts: Some(spec_and_status!()),
    rules: Rules {
        create: optional::storage_version,
        update: Some(core::unchecked),
        parts: &[("status", optional::storage_version_status)],
        name: optional::storage_version_name,
        unconditional_update: false,
        ..Rules::NONE
    },
    columns: &[
        name(),
        field(
            "CommonEncodingVersion",
            "string",
            "api.apiserverinternal.v1alpha1.StorageVersionStatus.commonEncodingVersion",
            |version| {
                let status = version.status.as_ref();
                let common = status.and_then(|status| status.common_encoding_version.as_deref());
                common.unwrap_or("<unset>").into()
            },
        ),
        field(
            "StorageVersions",
            "string",
            "api.apiserverinternal.v1alpha1.StorageVersionStatus.storageVersions",
            |version| servers(version).into(),
        ),
        age(),
    ],
    ..Kind::BASE
};

fn servers(version: &StorageVersion) -> String {
    let status = version.status.as_ref();
    let all = status.and_then(|status| status.storage_versions.as_deref()).unwrap_or_default();
    let shown = all.iter().map(|one| format!("{}={}", one.api_server_id, one.encoding_version));
    if all.is_empty() { "<unset>".into() } else { crate::print::first_three(shown.collect()) }
}
