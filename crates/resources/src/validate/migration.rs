//! Migrations of storage. Upstream: `pkg/apis/storagemigration/validation`.

use machinery::names;

use super::at::At;
use super::policy::conditions;

pub(crate) fn migration(at: &At<'_>) {
    let resource = at.get("spec.resource");
    let plural = resource.get("resource");
    match plural.is_empty() {
        true => plural.required("resource is required to be set"),
        false => plural.name(names::dns1035_label),
    }
    resource.get("group").any_name(names::dns1123_subdomain);
}

pub(crate) fn update(at: &At<'_>, old: &At<'_>) {
    migration(at);
    at.get("spec").unchanged(&old.get("spec"));
}

pub(crate) fn status(at: &At<'_>, old: &At<'_>) {
    let (new, before) = (at.get("status"), old.get("status"));
    let version = new.get("resourceVersion");
    let is_number = |text: &str| {
        text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'))
    };
    if !version.is_empty() && !is_number(version.str()) {
        version.invalid(&format!("resource version is not well formed: {}", version.str()));
    }
    conditions(&new.get("conditions"));
    let known = before.get("resourceVersion");
    if !known.is_empty() && known.str() != version.str() {
        version.invalid("field is immutable");
    }
    let is = |status: &At<'_>, kind: &str| {
        let all = status.get("conditions");
        all.items().any(|one| one.get("type").is(kind) && one.get("status").is("True"))
    };
    let all = new.get("conditions");
    if is(&new, "Succeeded") && is(&new, "Failed") {
        all.invalid("Both success and failed conditions cannot be true at the same time");
    }
    for (kind, shown) in [("Succeeded", "Success"), ("Failed", "Failed")] {
        if is(&before, kind) && !is(&new, kind) {
            all.invalid(&format!("{shown} condition cannot be set to false once it is true"));
        }
    }
}
