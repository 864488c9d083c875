//! ResourceQuota: how much a namespace may have in all.

use k8s_openapi::api::core::v1::ResourceQuota;

use super::podspec;
use crate::kind::{Kind, Rules, STATUS, Updates, age, name, spec_and_status, text};
use crate::validate::{core, warnings};

pub(crate) static KIND: Kind<ResourceQuota> = Kind {
    short: &["quota"],
    subresources: &[STATUS],
    default: |quota| {
        let (spec, status) = (quota.spec.as_mut(), quota.status.as_mut());
        podspec::round(spec.map(|spec| &mut spec.hard));
        podspec::round(status.into_iter().flat_map(|it| [&mut it.hard, &mut it.used]));
    },
    parts: Some(spec_and_status!()),
    rules: Rules {
        create: core::resource_quota,
        update: Some(core::resource_quota_update),
        parts: &[("status", core::resource_quota_status)],
        ..Rules::NONE
    },
    returns_deleted: true,
    warnings: Some(warnings::kinds::resource_quota),
    warns_on_update: Updates::None,
    columns: &[
        name(),
        text(
            "Request",
            "string",
            "Request represents a minimum amount of cpu/memory that a container may consume.",
            |quota| used(quota, |name| !name.starts_with(LIMITS)).into(),
        ),
        text(
            "Limit",
            "string",
            "Limits control the maximum amount of cpu/memory that a container may use independent of contention on the node.",
            |quota| used(quota, |name| name.starts_with(LIMITS)).into(),
        ),
        age(),
    ],
    ..Kind::BASE
};

const LIMITS: &str = "limits.";

fn used(quota: &ResourceQuota, is_shown: fn(&str) -> bool) -> String {
    let status = quota.status.as_ref();
    let used = status.and_then(|status| status.used.as_ref());
    let hard = status.and_then(|status| status.hard.as_ref()).into_iter().flatten();
    let shown = hard.filter(|(name, _)| is_shown(name)).map(|(name, hard)| {
        let used = used.and_then(|used| used.get(name)).map_or("0", |one| one.0.as_str());
        format!("{name}: {used}/{}", hard.0)
    });
    shown.collect::<Vec<_>>().join(", ")
}
