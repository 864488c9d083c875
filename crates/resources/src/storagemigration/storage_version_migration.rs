//! StorageVersionMigration: all objects of a resource are written again, in today's version.

use k8s_openapi::api::storagemigration::v1beta1::StorageVersionMigration;
use machinery::names;
use machinery::status::qualified;
use release::features::Feature;

use crate::kind::{Kind, Rules, STATUS, name, spec_and_bare_status, text};
use crate::validate::at::At;
use crate::validate::shared::conditions;

pub(crate) static KIND: Kind<StorageVersionMigration> = Kind {
    optional: true,
    gate: Some(Feature::StorageVersionMigrator),
    subresources: &[STATUS],
    parts: Some(spec_and_bare_status!()),
    rules: Rules {
        create: migration,
        update: Some(update),
        parts: &[("status", status)],
        unconditional_update: false,
        ..Rules::NONE
    },
    columns: &[
        name(),
        text("Resource", "string", "GroupResource to migrate", |migration| {
            let resource = migration.spec.as_ref().map(|spec| &spec.resource);
            resource.map_or(String::new(), |one| qualified(&one.resource, &one.group)).into()
        }),
        text("Status", "string", "Status of the migration", |migration| state(migration).into()),
    ],
    ..Kind::BASE
};

fn state(migration: &StorageVersionMigration) -> &str {
    let conditions = migration.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let mut known = conditions.filter(|one| {
        one.status == "True" && matches!(one.type_.as_str(), "Running" | "Failed" | "Succeeded")
    });
    known.next_back().map_or("Unknown", |one| one.type_.as_str())
}

fn migration(at: &At<'_>) {
    let resource = at.get("spec.resource");
    let plural = resource.get("resource");
    match plural.is_empty() {
        true => plural.required("resource is required to be set"),
        false => plural.name(names::dns1035_label),
    }
    resource.get("group").any_name(names::dns1123_subdomain);
}

fn update(at: &At<'_>, old: &At<'_>) {
    migration(at);
    at.get("spec").unchanged(&old.get("spec"));
}

fn status(at: &At<'_>, old: &At<'_>) {
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
