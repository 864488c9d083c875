//! CustomResourceDefinitions as objects: their registration, defaults, and the rules of updates.
//!
//! In: CRDs of clients. Out: stored CRDs. The [`controller`](crate::controller) acts on them: names,
//! registrations, deletion of instances.
//! Upstream: `apiextensions-apiserver/pkg/registry/customresourcedefinition`.

mod columns;
pub mod conditions;
mod defaults;
mod hoisted;
pub mod older;
mod rules;
mod schemas;
mod selectable;
mod structural;
mod validation;

use std::collections::BTreeSet;
use std::sync::Arc;

use apiserver::request::RequestContext;
use apiserver::resource::{
    Behaviour, Examined, Grace, MetadataRules, Resource, Settings, Storage, Strategy, Subresource,
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceConversion, CustomResourceDefinition, CustomResourceDefinitionNames,
    CustomResourceDefinitionSpec, CustomResourceDefinitionStatus, JSONSchemaProps,
};
use machinery::field::FieldErrors;
use machinery::patch::Schema as PatchFacts;
use machinery::{Object, ObjectMeta};

use crate::schema::{Kind, formats};

pub const GROUP: &str = "apiextensions.k8s.io";
pub const PLURAL: &str = "customresourcedefinitions";
/// The finalizer that keeps a CRD until its instances are deleted.
pub const FINALIZER: &str = "customresourcecleanup.apiextensions.k8s.io";

/// The registration of the kind CustomResourceDefinition.
pub fn row(facts: Option<Arc<dyn PatchFacts>>) -> Resource {
    let codec = api::kinds::codec("apiextensions.k8s.io/v1", "CustomResourceDefinition")
        .expect("api knows every kind with a row");
    Resource {
        short_names: vec!["crd".into(), "crds".into()],
        categories: vec!["api-extensions".into()],
        storage: Storage::Stored(format!("{GROUP}/{PLURAL}")),
        strategy: Arc::new(Definitions),
        settings: Settings {
            has_generation: true,
            unconditional_update: false,
            // The server's own finalizer has no domain.
            metadata_rules: MetadataRules::PLAIN,
            ..Settings::DEFAULT
        },
        subresources: vec![Subresource {
            name: "status",
            kind: None,
            verbs: &["get", "patch", "update"],
            behaviour: Behaviour::Part,
        }],
        definition:
            "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.CustomResourceDefinition"
                .into(),
        schema: facts,
        ..Resource::of::<CustomResourceDefinition>(codec)
    }
}

struct Definitions;

fn of(object: &dyn Object) -> &CustomResourceDefinition {
    object.expect()
}

impl Strategy for Definitions {
    fn default(&self, object: &mut dyn Object) {
        let crd = object.expect_mut::<CustomResourceDefinition>();
        default_spec(&mut crd.spec);
        let stored = crd.status.as_ref().and_then(|status| status.stored_versions.as_ref());
        if stored.is_none_or(Vec::is_empty)
            && let Some(version) = storage_version(&crd.spec)
        {
            let version = version.to_owned();
            crd.status.get_or_insert_default().stored_versions = Some(vec![version]);
        }
    }

    fn own_name_errors(&self, object: &dyn Object, name: &str) -> Vec<String> {
        validation::name(object.expect(), name)
    }

    fn grace(&self, _: &dyn Object, _: Option<i64>) -> Grace {
        Grace::Contents
    }

    fn prepare_create(&self, _: &RequestContext, object: &mut dyn Object) {
        let crd = object.expect_mut::<CustomResourceDefinition>();
        crd.status = Some(CustomResourceDefinitionStatus {
            accepted_names: Some(CustomResourceDefinitionNames::default()),
            ..CustomResourceDefinitionStatus::default()
        });
        note_storage_version(crd);
    }

    fn prepare_update(&self, ctx: &RequestContext, object: &mut dyn Object, old: &dyn Object) {
        let (crd, old) = (object.expect_mut::<CustomResourceDefinition>(), of(old));
        if ctx.subresource == "status" {
            // Upstream intends to keep the metadata, too, but does not.
            crd.spec = old.spec.clone();
            return;
        }
        crd.status = old.status.clone();
        note_storage_version(crd);
    }

    fn bumps_generation(&self, object: &dyn Object, old: &dyn Object) -> bool {
        of(object).spec != of(old).spec
    }

    fn validate(&self, object: &Examined<'_>) -> FieldErrors {
        validation::create(of(&**object))
    }

    fn validate_update(
        &self,
        ctx: &RequestContext,
        object: &Examined<'_>,
        old: &Examined<'_>,
    ) -> FieldErrors {
        match ctx.subresource.as_str() {
            "status" => validation::status(of(&**object)),
            _ => validation::update(of(&**object), of(&**old)),
        }
    }

    fn warnings(&self, object: &Examined<'_>, old: Option<&Examined<'_>>) -> Vec<String> {
        let known = old.map(|old| unrecognized_formats(&of(&**old).spec)).unwrap_or_default();
        let now = unrecognized_formats(&of(&**object).spec);
        now.difference(&known).map(|format| format!("unrecognized format {format:?}")).collect()
    }

    /// As upstream, the first delete only sets the deletion timestamp. The controller does the rest.
    fn starts_deleting(&self, object: &mut dyn Object) {
        let crd = object.expect_mut::<CustomResourceDefinition>();
        let ObjectMeta { finalizers, generation, deletion_grace_period_seconds, .. } =
            &mut crd.metadata;
        let finalizers = finalizers.get_or_insert_default();
        if !finalizers.iter().any(|one| one == FINALIZER) {
            finalizers.push(FINALIZER.into());
        }
        // The spec does not change, and there is no grace period.
        *generation = generation.map(|generation| (generation - 1).max(1));
        *deletion_grace_period_seconds = None;
        let message =
            "CustomResourceDefinition marked for deletion; CustomResource deletion will begin soon";
        let status = crd.status.get_or_insert_default();
        conditions::set(
            status,
            conditions::new("Terminating", true, "InstanceDeletionPending", message),
        );
    }
}

fn default_spec(spec: &mut CustomResourceDefinitionSpec) {
    // Go omits a false value.
    spec.preserve_unknown_fields.take_if(|preserves| !*preserves);
    let names = &mut spec.names;
    if names.singular.as_deref().unwrap_or_default().is_empty() && !names.kind.is_empty() {
        names.singular = Some(names.kind.to_lowercase());
    }
    if names.list_kind.as_deref().unwrap_or_default().is_empty() && !names.kind.is_empty() {
        names.list_kind = Some(format!("{}List", names.kind));
    }
    let conversion = spec
        .conversion
        .get_or_insert_with(|| CustomResourceConversion { strategy: "None".into(), webhook: None });
    let client = conversion.webhook.as_mut().and_then(|webhook| webhook.client_config.as_mut());
    if let Some(service) = client.and_then(|client| client.service.as_mut()) {
        service.port.get_or_insert(443);
    }
}

/// The storage version.
pub fn storage_version(spec: &CustomResourceDefinitionSpec) -> Option<&str> {
    spec.versions.iter().find(|version| version.storage).map(|version| version.name.as_str())
}

fn note_storage_version(crd: &mut CustomResourceDefinition) {
    let Some(version) = storage_version(&crd.spec).map(str::to_owned) else { return };
    let status = crd.status.get_or_insert_default();
    let stored = status.stored_versions.get_or_insert_default();
    if !stored.contains(&version) {
        stored.push(version);
    }
}

fn unrecognized_formats(spec: &CustomResourceDefinitionSpec) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for version in &spec.versions {
        let root = version.schema.as_ref().and_then(|schema| schema.open_api_v3_schema.as_ref());
        let Some(root) = root else { continue };
        schemas::any(root, &mut |schema: &JSONSchemaProps| {
            let format = schema.format.as_deref().unwrap_or_default();
            let kind = match schema.type_.as_deref().unwrap_or_default() {
                "" | "string" => Kind::String,
                "integer" => Kind::Integer,
                "number" => Kind::Number,
                _ => return false,
            };
            if !format.is_empty() && !formats::is_checked(kind, format) {
                found.insert(format.to_owned());
            }
            false
        });
    }
    found
}
