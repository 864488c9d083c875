//! A kind: all that the server knows about it, in one value.
//!
//! In: a static [`Kind`] in the kind's own file. Out: the row that routes, discovery, columns and
//! storage keys derive from; [`crate::generic`] makes the row's strategy. Group, version, plural and
//! scope are the type's.
//!
//! Invariant: a column and its cell are one entry, and so are a selectable field and its value.

use std::sync::Arc;

use apiserver::request::RequestContext;
use apiserver::resource::{
    ALL_VERBS, Allocator, Behaviour, CREATED_AT_COLUMN, Doc, Examined, FieldValues, Grace,
    MetadataRules, NAME_COLUMN, SelectableFields, Storage, Subresource, SubresourceKind,
};
use machinery::field::FieldErrors;
use machinery::{Object, ObjectMeta, names};
use release::features::Feature;
use serde_json::Value;

use crate::validate::at::{At, NameCheck};
use crate::{Wiring, print};

pub(crate) type MakeAllocator = fn(Option<&Wiring>) -> Arc<dyn Allocator>;
pub(crate) type Check = fn(&At<'_>);
pub(crate) type UpdateCheck = fn(&At<'_>, &At<'_>);
pub(crate) type Warn = fn(&At<'_>, &mut Vec<String>);

pub(crate) struct Kind<T: 'static> {
    pub(crate) short: &'static [&'static str],
    pub(crate) categories: &'static [&'static str],
    /// The storage prefix below `/registry/`, if it is not the plural.
    pub(crate) storage: Option<&'static str>,
    pub(crate) verbs: &'static [&'static str],
    /// For kinds of which nothing is stored.
    pub(crate) unstored: Option<fn() -> Storage>,
    pub(crate) subresources: &'static [Sub],
    /// No version is served unless `--runtime-config` enables one.
    pub(crate) optional: bool,
    /// The kind is served only while this gate is enabled.
    pub(crate) gate: Option<Feature>,
    /// Sets defaults. Repeating it changes nothing.
    pub(crate) default: fn(&mut T),
    /// For kinds whose spec and status are written separately.
    pub(crate) parts: Option<Parts<T>>,
    /// Whether a change increases the generation, if objects have one.
    pub(crate) generation: Option<fn(&T, &T) -> bool>,
    /// Drops fields of disabled gates, see [`crate::gated`]. In: the new object, and the old one
    /// (`None` on creation).
    pub(crate) gated: fn(&mut T, Option<&T>),
    pub(crate) rules: Rules,
    /// Warnings about valid objects.
    pub(crate) warnings: Option<Warn>,
    /// Which updates get these warnings, too.
    pub(crate) warns_on_update: Updates,
    /// Warnings of a new status.
    pub(crate) status_warnings: Option<Warn>,
    /// The deprecation warning; empty if the kind is not deprecated.
    pub(crate) deprecation: &'static str,
    /// The group in errors, if it is not the kind's.
    pub(crate) error_group: Option<&'static str>,
    /// See [`apiserver::resource::Settings::annotation_of_whole_objects`].
    pub(crate) annotation_of_whole_objects: Option<&'static str>,
    /// Whether a delete answers with the object. Upstream: `ReturnDeletedObject` of the kind's store.
    pub(crate) returns_deleted: bool,
    /// Whether a delete without a propagation policy keeps the dependents.
    pub(crate) orphans: bool,
    /// A warning for a delete without a propagation policy.
    pub(crate) delete_warning: Option<&'static str>,
    pub(crate) columns: &'static [Column<T>],
    /// Conditions of an object's row in a Table.
    pub(crate) row_conditions: fn(&T) -> Vec<Value>,
    pub(crate) fields: Fields<T>,
    /// The error for a selector with a field that is not selectable, if it is not the usual one.
    pub(crate) unknown_field: Option<fn(&str) -> String>,
    /// See [`apiserver::resource::Settings::ttl_seconds`].
    pub(crate) ttl_seconds: fn() -> Option<i64>,
    pub(crate) allocator: Option<MakeAllocator>,
    /// The behaviour that only this kind has.
    pub(crate) hooks: &'static dyn Hooks<T>,
}

impl<T: Object> Kind<T> {
    const COLUMNS: [Column<T>; 2] = [name(), created_at()];

    /// A kind with nothing special; what a kind's file does not say is as here.
    pub(crate) const BASE: Self = Self {
        short: &[],
        categories: &[],
        storage: None,
        verbs: ALL_VERBS,
        unstored: None,
        subresources: &[],
        optional: false,
        gate: None,
        default: |_| {},
        parts: None,
        generation: None,
        gated: |_, _| {},
        rules: Rules::NONE,
        warnings: None,
        warns_on_update: Updates::OfBody,
        status_warnings: None,
        deprecation: "",
        error_group: None,
        annotation_of_whole_objects: None,
        returns_deleted: false,
        orphans: false,
        delete_warning: None,
        columns: &Self::COLUMNS,
        row_conditions: |_| vec![],
        fields: Fields::Of(&[]),
        unknown_field: None,
        ttl_seconds: || None,
        allocator: None,
        hooks: &NoHooks,
    };
}

/// Which updates of an object, its status apart.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Updates {
    None,
    /// Those that change the spec, or the fields that a kind has in its place.
    OfBody,
    All,
}

/// The validation rules of a kind.
pub(crate) struct Rules {
    pub(crate) create: Check,
    /// `None`: as on creation.
    pub(crate) update: Option<UpdateCheck>,
    /// By subresource; the rest is not checked.
    pub(crate) parts: &'static [(&'static str, UpdateCheck)],
    /// For rules that look at the typed object; `parts` and `update` do not count then.
    pub(crate) typed: Option<TypedCheck>,
    pub(crate) name: NameCheck,
    pub(crate) metadata: MetadataRules,
    /// PUT may create.
    pub(crate) create_on_update: bool,
    /// PUT need not name the resourceVersion.
    pub(crate) unconditional_update: bool,
}

/// Checks an object that a write through a subresource (empty for the object itself) leaves.
pub(crate) type TypedCheck = fn(&Examined<'_>, &str) -> FieldErrors;

impl Rules {
    pub(crate) const NONE: Self = Self {
        create: |_| {},
        update: None,
        parts: &[],
        typed: None,
        name: names::dns1123_subdomain,
        metadata: MetadataRules::FULL,
        create_on_update: false,
        unconditional_update: true,
    };
}

/// What only one kind does. Every method has a default: most kinds need none.
pub(crate) trait Hooks<T>: Sync {
    /// After the status was cleared and gated fields were taken out.
    fn prepare_create(&self, _ctx: &RequestContext, _object: &mut T) {}

    /// After the other part was kept, and before gated fields are taken out.
    fn prepare_update(&self, _ctx: &RequestContext, _object: &mut T, _old: &T) {}

    /// See [`apiserver::resource::Strategy::own_name_errors`].
    fn own_name_errors(&self, _object: &T, _name: &str) -> Vec<String> {
        vec![]
    }

    /// See [`apiserver::resource::Strategy::grace`].
    fn grace(&self, _object: &T, _requested: Option<i64>) -> Grace {
        Grace::None
    }

    /// See [`apiserver::resource::Strategy::starts_deleting`].
    fn starts_deleting(&self, _object: &mut T) {}

    /// See [`apiserver::resource::Strategy::holds_back_removal`].
    fn holds_back_removal(&self, _object: &T) -> bool {
        false
    }
}

pub(crate) struct NoHooks;

impl<T> Hooks<T> for NoHooks {}

/// Access to the spec and the status of a typed kind.
pub(crate) struct Parts<T> {
    pub(crate) clear_status: fn(&mut T),
    pub(crate) keep_status: fn(&mut T, &T),
    pub(crate) keep_spec: fn(&mut T, &T),
}

/// The [`Parts`] of a kind with the fields `spec` and `status`: closures over fields, which no
/// table can hold.
macro_rules! spec_and_status {
    () => {
        $crate::kind::Parts {
            clear_status: |object| object.status = Default::default(),
            keep_status: |object, old| object.status = old.status.clone(),
            keep_spec: |object, old| object.spec = old.spec.clone(),
        }
    };
}
pub(crate) use spec_and_status;

/// Like [`spec_and_status`], for kinds whose status is written without their metadata.
macro_rules! spec_and_bare_status {
    () => {
        $crate::kind::Parts {
            keep_spec: |object, old| {
                object.spec = old.spec.clone();
                $crate::kind::keep_metadata(&mut object.metadata, &old.metadata);
            },
            ..$crate::kind::spec_and_status!()
        }
    };
}
pub(crate) use spec_and_bare_status;

/// Upstream: `ResetObjectMetaForStatus`.
pub(crate) fn keep_metadata(meta: &mut ObjectMeta, old: &ObjectMeta) {
    meta.labels.clone_from(&old.labels);
    meta.annotations.clone_from(&old.annotations);
    meta.finalizers.clone_from(&old.finalizers);
    meta.owner_references.clone_from(&old.owner_references);
}

impl<T> Parts<T> {
    /// `status` changes the status alone, everything else all but the status.
    pub(crate) fn prepare_update(&self, ctx: &RequestContext, object: &mut T, old: &T) {
        if ctx.subresource == "status" {
            (self.keep_spec)(object, old);
        } else {
            (self.keep_status)(object, old);
        }
    }
}

/// A column of Tables, and its cell for an object.
pub(crate) struct Column<T> {
    pub(crate) name: &'static str,
    /// string, integer, number, boolean, date
    pub(crate) kind: &'static str,
    /// `name` for the column that clients take for the object's name.
    pub(crate) format: &'static str,
    pub(crate) doc: Documented,
    /// 0 is always shown, 1 with `-o wide`.
    pub(crate) priority: i32,
    pub(crate) cell: fn(&T) -> Value,
}

/// The description of a column.
#[derive(Clone, Copy)]
pub(crate) enum Documented {
    Text(&'static str),
    /// The field's description in the schema, looked up for each Table.
    Field(&'static str),
    /// A well-known column of the server.
    Known(&'static apiserver::resource::Column),
    /// There is a cell without a column: upstream's header of one kind lacks what its rows have.
    Missing,
}

pub(crate) const fn text<T>(
    name: &'static str,
    kind: &'static str,
    description: &'static str,
    cell: fn(&T) -> Value,
) -> Column<T> {
    let doc = Documented::Text(description);
    Column { name, kind, format: "", doc, priority: 0, cell }
}

/// A column that shows a field of the schema, as `api.core.v1.PodSpec.nodeName`.
pub(crate) const fn field<T>(
    name: &'static str,
    kind: &'static str,
    field: &'static str,
    cell: fn(&T) -> Value,
) -> Column<T> {
    let doc = Documented::Field(field);
    Column { name, kind, format: "", doc, priority: 0, cell }
}

const fn known<T>(
    column: &'static apiserver::resource::Column,
    cell: fn(&T) -> Value,
) -> Column<T> {
    let doc = Documented::Known(column);
    Column { name: "", kind: "", format: "", doc, priority: 0, cell }
}

static NAME: apiserver::resource::Column = NAME_COLUMN;
static CREATED_AT: apiserver::resource::Column = CREATED_AT_COLUMN;

pub(crate) const fn name<T: Object>() -> Column<T> {
    named(|object| object.name().into())
}

/// The first column, with other text than the bare name.
pub(crate) const fn named<T>(cell: fn(&T) -> Value) -> Column<T> {
    known(&NAME, cell)
}

pub(crate) const fn created_at<T: Object>() -> Column<T> {
    known(&CREATED_AT, |object| {
        object.meta().creation_timestamp.as_ref().map(|time| time.0.to_string()).into()
    })
}

pub(crate) const fn age<T: Object>() -> Column<T> {
    const CREATED: &str = "apimachinery.pkg.apis.meta.v1.ObjectMeta.creationTimestamp";
    field("Age", "string", CREATED, |object| print::age(object))
}

/// A cell that has no column.
pub(crate) const fn without_header<T>(cell: fn(&T) -> Value) -> Column<T> {
    Column { name: "", kind: "", format: "", doc: Documented::Missing, priority: 0, cell }
}

/// Only `-o wide` shows it.
pub(crate) const fn wide<T>(mut column: Column<T>) -> Column<T> {
    column.priority = 1;
    column
}

/// Clients use this column as the object's name.
pub(crate) const fn as_name<T>(mut column: Column<T>) -> Column<T> {
    column.format = "name";
    column
}

impl<T> Column<T> {
    /// The column's definition in a Table.
    pub(crate) fn header(&self) -> Option<apiserver::resource::Column> {
        let description = match self.doc {
            Documented::Text(text) => Doc::Text(text.into()),
            Documented::Field(field) => Doc::Field(api::schema::describe, field),
            Documented::Known(column) => return Some(column.clone()),
            Documented::Missing => return None,
        };
        Some(apiserver::resource::Column {
            name: self.name.into(),
            kind: self.kind.into(),
            format: self.format.into(),
            description,
            priority: self.priority,
        })
    }
}

/// The name of a field and its value in an object.
type Selectable<T> = (&'static str, fn(&T) -> String);
/// Reads fields from an encoded object.
type ReadFields = fn(&[u8]) -> serde_json::Result<Vec<String>>;

/// Fields for selectors besides name and namespace, each with its value.
pub(crate) enum Fields<T: 'static> {
    Of(&'static [Selectable<T>]),
    /// Read from the JSON without decoding all of it, in the order of the names: for kinds that have
    /// many objects.
    InBytes(&'static [&'static str], ReadFields),
}

impl<T: Object> Fields<T> {
    pub(crate) fn selectable(
        &'static self,
        unknown: Option<fn(&str) -> String>,
    ) -> SelectableFields {
        let (names, values): (Vec<_>, _) = match self {
            Self::Of(fields) => {
                let read = |object: &dyn Object| {
                    fields.iter().map(|(_, value)| value(object.expect())).collect()
                };
                let names = fields.iter().map(|(name, _)| (*name).into());
                (names.collect(), FieldValues::OfObject(Arc::new(read)))
            }
            Self::InBytes(names, read) => {
                (names.iter().map(|name| (*name).into()).collect(), FieldValues::OfJson(*read))
            }
        };
        SelectableFields { names, values, unknown }
    }
}

/// A subresource.
pub(crate) struct Sub {
    pub(crate) name: &'static str,
    /// Group, version and kind of its objects, if they differ from the parent's.
    pub(crate) kind: Option<(&'static str, &'static str, &'static str)>,
    pub(crate) verbs: &'static [&'static str],
    pub(crate) behaviour: Made,
}

impl Sub {
    /// The subresource, unless it needs a running server and there is none.
    pub(crate) fn made(&self, wiring: Option<&Wiring>) -> Option<Subresource> {
        let behaviour = match &self.behaviour {
            Made::Plain(made) => made(),
            Made::Wired(made) => made(wiring?),
        };
        let kind = self.kind.map(|(group, version, kind)| SubresourceKind { group, version, kind });
        Some(Subresource { name: self.name, kind, verbs: self.verbs, behaviour })
    }
}

pub(crate) enum Made {
    Plain(fn() -> Behaviour),
    /// Made from the parts of a running server.
    Wired(fn(&Wiring) -> Behaviour),
}

pub(crate) const PART_VERBS: &[&str] = &["get", "patch", "update"];
pub(crate) const STATUS: Sub = part("status");

/// A subresource that is a part of the same object.
pub(crate) const fn part(name: &'static str) -> Sub {
    Sub { name, kind: None, verbs: PART_VERBS, behaviour: Made::Plain(|| Behaviour::Part) }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    const GOLDEN: &str =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/spec/golden/tables.json");

    /// Upstream's own columns, where they lie beside the repository.
    #[test]
    fn columns_are_upstreams() {
        let Ok(text) = std::fs::read_to_string(GOLDEN) else {
            println!("skipped: no {GOLDEN}");
            return;
        };
        let golden: Value = serde_json::from_str(&text).expect("JSON");
        let mut checked = 0;
        // The server that was asked was not told to serve more.
        let table = crate::tests::by_default();
        for row in table.iter().filter(|row| row.is_stored()) {
            let name = if row.group.is_empty() {
                format!("{}.{}", row.plural, row.version)
            } else {
                format!("{}.{}.{}", row.plural, row.version, row.group)
            };
            let columns: Vec<Value> = row.table.columns().iter().map(shown).collect();
            assert_eq!(Value::from(columns), golden[&name], "{name}");
            checked += 1;
        }
        assert!(checked > 50);
    }

    #[test]
    fn columns_name_fields_that_have_a_description() {
        for row in crate::tests::built_in().iter() {
            for column in row.table.columns() {
                if let Doc::Field(_, path) = column.description {
                    assert_ne!(column.description.text(), "", "{}: {path}", row.kind);
                }
            }
        }
    }

    fn shown(column: &apiserver::resource::Column) -> Value {
        serde_json::json!({
            "name": column.name, "type": column.kind, "format": column.format,
            "description": column.description.text(), "priority": column.priority,
        })
    }
}
