//! The strategy of custom resources. Upstream: `registry/customresource/strategy.go`.

use std::sync::Arc;

use apiserver::request::RequestContext;
use apiserver::resource::{
    Column, Examined, FieldValues, NAME_COLUMN, SelectableFields, Strategy, TableConvertor,
};
use machinery::field::{FieldError, FieldErrors, Path};
use machinery::names;
use machinery::object::Unstructured;
use machinery::{Object, ObjectMeta};
use serde_json::{Value, json};

use super::codec::normalize;
use super::{Family, Version, print};
use crate::schema::{embedded, lists, rules, validate};

pub struct Custom {
    pub family: Arc<Family>,
    pub index: usize,
}

impl Custom {
    fn version(&self) -> &Version {
        &self.family.versions[self.index]
    }
}

fn of(object: &dyn Object) -> &Unstructured {
    object.expect()
}

/// The fields apiVersion, kind and metadata, which schemas see, too.
fn head(object: &Unstructured) -> Value {
    json!({
        "apiVersion": object.api_version, "kind": object.kind, "metadata": object.metadata,
    })
}

impl Strategy for Custom {
    fn default(&self, object: &mut dyn Object) {
        let custom = object.expect_mut::<Unstructured>();
        if let Err(error) = normalize(custom, self.version()) {
            // Admission changed the object. Validation refuses it.
            tracing::debug!(%error, "an embedded object has invalid metadata");
        }
    }

    fn prepare_create(&self, _: &RequestContext, object: &mut dyn Object) {
        if self.version().has_status {
            object.expect_mut::<Unstructured>().fields.remove("status");
        }
    }

    fn prepare_update(&self, ctx: &RequestContext, object: &mut dyn Object, old: &dyn Object) {
        if !self.version().has_status {
            return;
        }
        let (custom, old) = (object.expect_mut::<Unstructured>(), of(old));
        if ctx.subresource == "status" {
            let status = custom.fields.remove("status");
            custom.fields = old.fields.clone();
            put(custom, status);
            let managed = custom.metadata.managed_fields.take();
            let version = custom.metadata.resource_version.take();
            custom.metadata = ObjectMeta {
                managed_fields: managed,
                resource_version: version,
                ..old.metadata.clone()
            };
        } else {
            put(custom, old.fields.get("status").cloned());
        }
    }

    fn bumps_generation(&self, object: &dyn Object, old: &dyn Object) -> bool {
        of(object).fields != of(old).fields
    }

    fn validate(&self, object: &Examined<'_>) -> FieldErrors {
        let (version, object) = (self.version(), of(&**object));
        let mut errors = FieldErrors::default();
        let schema = version.schema.as_ref();
        if let Some(schema) = schema {
            errors.append(validate::validate_fields(&object.fields, &head(object), None, schema));
        }
        if let Some(scaling) = &version.scaling {
            errors.append(scaling.check(&object.fields, false));
        }
        if let Some(schema) = schema {
            errors.append(embedded::check(&object.fields, schema));
            errors.append(lists::check(&object.fields, schema));
        }
        ask_rules(version, object, None, &mut errors);
        errors
    }

    fn validate_update(
        &self,
        ctx: &RequestContext,
        object: &Examined<'_>,
        old: &Examined<'_>,
    ) -> FieldErrors {
        let (version, object, old) = (self.version(), of(&**object), of(&**old));
        let is_status = ctx.subresource == "status";
        let mut errors = FieldErrors::default();
        let schema = version.schema.as_ref();
        if let Some(schema) = schema {
            errors.append(if is_status {
                status_errors(object, old, version)
            } else {
                let before = head(old);
                let before = Some((&old.fields, &before));
                validate::validate_fields(&object.fields, &head(object), before, schema)
            });
        }
        if let Some(scaling) = &version.scaling {
            errors.append(scaling.check(&object.fields, is_status));
        }
        if let Some(schema) = schema {
            errors.append(embedded::check(&object.fields, schema));
            if lists::check(&old.fields, schema).is_empty() {
                errors.append(lists::check(&object.fields, schema));
            }
        }
        ask_rules(version, object, Some(old), &mut errors);
        errors
    }

    fn warnings(&self, object: &Examined<'_>, old: Option<&Examined<'_>>) -> Vec<String> {
        let known = old.and_then(|old| old.meta().finalizers.clone()).unwrap_or_default();
        let mut added = object.meta().finalizers.clone().unwrap_or_default();
        added.retain(|one| !known.contains(one));
        added.sort_unstable();
        added.dedup();
        added.iter().flat_map(|name| finalizer_warnings(name)).collect()
    }
}

impl TableConvertor for Custom {
    fn columns(&self) -> Vec<Column> {
        let own = self.version().columns.iter().map(|one| one.column.clone());
        [NAME_COLUMN].into_iter().chain(own).collect()
    }

    fn cells(&self, object: &dyn Object) -> Vec<Value> {
        let tree = object.to_value();
        let columns = self.version().columns.iter();
        [object.name().into()]
            .into_iter()
            .chain(columns.map(|one| print::cell(one, &tree)))
            .collect()
    }
}

/// The selectable fields of a version.
pub fn fields(family: &Arc<Family>, index: usize) -> SelectableFields {
    let names = family.versions[index].selectable.iter();
    let names = names.map(|field| field.name.clone().into()).collect();
    let family = family.clone();
    let read = move |object: &dyn Object| {
        let tree = Value::Object(of(object).fields.clone());
        let fields = family.versions[index].selectable.iter();
        fields.map(|field| field.path.first(&tree).map(text).unwrap_or_default()).collect()
    };
    SelectableFields { names, values: FieldValues::OfObject(Arc::new(read)), unknown: None }
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn put(custom: &mut Unstructured, status: Option<Value>) {
    match status {
        Some(status) => drop(custom.fields.insert("status".into(), status)),
        None => drop(custom.fields.remove("status")),
    }
}

/// Validates the status with its part of the schema.
fn status_errors(object: &Unstructured, old: &Unstructured, version: &Version) -> FieldErrors {
    let schema = version.schema.as_ref().and_then(|schema| schema.property("status"));
    match (object.fields.get("status"), schema) {
        (Some(status), Some(schema)) => {
            validate::validate(status, old.fields.get("status"), schema, "status")
        }
        _ => FieldErrors::default(),
    }
}

/// Evaluates the rules of the schema, unless earlier errors block them.
fn ask_rules(
    version: &Version,
    object: &Unstructured,
    old: Option<&Unstructured>,
    errors: &mut FieldErrors,
) {
    let Some(schema) = version.schema.as_ref().filter(|_| version.has_rules) else { return };
    if errors.0.iter().any(is_blocking) {
        let detail = "some validation rules were not checked because the object was invalid; correct the existing errors to complete validation";
        return errors.invalid(&Path::default(), Value::Null, detail);
    }
    let (now, before) = (object.to_value(), old.map(Object::to_value));
    errors.append(rules::check(&now, before.as_ref(), schema));
}

/// Errors that block the evaluation of rules.
fn is_blocking(error: &FieldError) -> bool {
    matches!(
        error.reason,
        "FieldValueRequired" | "FieldValueTooLong" | "FieldValueTooMany" | "FieldValueTypeInvalid"
    )
}

fn finalizer_warnings(name: &str) -> Vec<String> {
    const PATH: &str = "metadata.finalizers";
    let mut all: Vec<String> =
        names::qualified_name(name).iter().map(|why| format!("{PATH}: {name:?}: {why}")).collect();
    let is_standard = matches!(name, "orphan" | "foregroundDeletion" | "kubernetes");
    if !name.contains('/') && !is_standard {
        let including = if name.contains('.') { " including a path (/)" } else { "" };
        all.push(format!("{PATH}: {name:?}: prefer a domain-qualified finalizer name{including} to avoid accidental conflicts with other finalizer writers"));
    }
    all
}
