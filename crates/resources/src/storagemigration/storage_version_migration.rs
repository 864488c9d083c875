//! StorageVersionMigration: all objects of a resource are written again, in today's version.

use base::features::Feature;
use k8s_openapi::api::storagemigration::v1beta1::StorageVersionMigration;
use machinery::status::qualified;

use crate::kind::{Kind, Rules, STATUS, name, spec_and_status, text};
use crate::validate::migration;

pub(crate) static KIND: Kind<StorageVersionMigration> = Kind {
    optional: true,
    gate: Some(Feature::StorageVersionMigrator),
    subresources: &[STATUS],
    parts: Some(spec_and_status!()),
    rules: Rules {
        create: migration::migration,
        update: Some(migration::update),
        parts: &[("status", migration::status)],
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
