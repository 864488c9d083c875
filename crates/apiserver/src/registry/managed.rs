//! Field ownership on the write path: `metadata.managedFields`, and server-side apply.
//!
//! In: objects before and after a write, or an applied configuration. Out: the entries, and for apply the
//! merged object. Everything is in the version of the request; the rules are in
//! `machinery::patch::apply`.
//!
//! Writes that the server computes itself ([`Intent::Modify`](super::Intent::Modify)) own no fields, like
//! upstream's binding and eviction.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, Time};
use machinery::Object;
use machinery::patch::apply::managed::group_version_kind;
use machinery::patch::apply::managers::{Conflict, conflict_message, is_reset, scale};
use machinery::patch::apply::types::TypeRef;
use machinery::patch::apply::{ApplyError, FieldsError, Resets, Versions, Write};
use machinery::status::Reason;
use machinery::tree::Tree;
use serde_json::Value;

use super::Registry;
use crate::StatusError;
use crate::request::RequestContext;
use crate::resource::{Behaviour, Resource, SubresourceKind, View};

/// The definition of every scale subresource.
const SCALE: &str = "io.k8s.api.autoscaling.v1.Scale";

/// The kind of a write: the row's own, or that of a view.
struct Kind<'a> {
    registry: &'a Registry,
    row: &'a Resource,
    subresource: &'a str,
    view: Option<SubresourceKind>,
}

impl Kind<'_> {
    /// The row that serves the same objects in another version.
    fn row_in(&self, api_version: &str) -> Option<Arc<Resource>> {
        let table = self.registry.resources();
        let same = |row: &&Arc<Resource>| {
            row.prefix() == self.row.prefix() && row.api_version() == api_version
        };
        table.iter().find(same).cloned()
    }
}

impl Versions for Kind<'_> {
    fn type_of(&self, api_version: &str) -> TypeRef {
        let known = |row: &Resource, definition: &str| {
            row.schema.as_ref().and_then(|schema| schema.type_of(definition))
        };
        let of = match self.view {
            Some(_) => known(self.row, SCALE),
            None if self.row.api_version() == api_version => {
                served(self.row).and_then(|definition| known(self.row, &definition))
            }
            None => self
                .row_in(api_version)
                .and_then(|row| served(&row).and_then(|definition| known(&row, &definition))),
        };
        of.map_or(TypeRef::Deduced, TypeRef::To)
    }

    fn convert(&self, tree: &Value, from: &str, to: &str) -> Result<Option<Value>, FieldsError> {
        let (Some(from), Some(to)) = (self.row_in(from), self.row_in(to)) else { return Ok(None) };
        let decoded = from.codec.decode_value(tree.clone()).map_err(unconverted)?;
        let stored = to_stored(&from, decoded.object).map_err(unconverted)?;
        let shown = to_served(&to, stored).map_err(unconverted)?;
        Ok(Some(shown.to_value()))
    }

    fn resets(&self) -> Resets {
        let has_status = self.row.subresource("status").is_some();
        match (&self.row.schema, self.view) {
            (_, None) if self.subresource.is_empty() && !has_status => Resets::NOTHING,
            (Some(schema), None) => schema.resets(&self.row.definition, self.subresource),
            (None, None) => Resets::of_subresources(self.subresource, &[&["metadata"], &["spec"]]),
            (_, Some(_)) => Resets::NOTHING,
        }
    }
}

/// The definition of the served version; the row's own definition is that of the stored version.
fn served(row: &Resource) -> Option<String> {
    if row.conversion.is_none() || row.custom {
        return Some(row.definition.clone());
    }
    let (rest, kind) = row.definition.rsplit_once('.')?;
    let (group, _) = rest.rsplit_once('.')?;
    Some(format!("{group}.{}.{kind}", row.version))
}

fn to_stored(row: &Resource, object: Box<dyn Object>) -> Result<Box<dyn Object>, StatusError> {
    match &row.conversion {
        None => Ok(object),
        Some(conversion) => conversion.to_stored(object),
    }
}

fn to_served(row: &Resource, object: Box<dyn Object>) -> Result<Box<dyn Object>, StatusError> {
    match &row.conversion {
        None => Ok(object),
        Some(conversion) => conversion.to_served(object),
    }
}

fn unconverted(error: impl std::fmt::Display) -> FieldsError {
    FieldsError::Conversion(error.to_string())
}

/// An object of the stored version, in the version of the row.
fn shown(row: &Resource, object: &dyn Object) -> Result<Vec<u8>, FieldsError> {
    match &row.conversion {
        None => Ok(object.encode()),
        Some(_) => {
            let shown = to_served(row, object.boxed_clone()).map_err(unconverted)?;
            Ok(shown.encode())
        }
    }
}

impl Registry {
    /// Updates the managed fields of `object` after a create (`old` is `None`), an update or a patch. Both
    /// are of the stored version.
    pub(super) fn own(
        &self,
        ctx: &RequestContext,
        object: &mut dyn Object,
        old: Option<&mut dyn Object>,
    ) {
        let row = &ctx.resource;
        let sent = object.meta_mut().managed_fields.take();
        let kind = Kind { registry: self, row, subresource: &ctx.subresource, view: None };
        let api_version = row.api_version();
        let write = self.write_of(ctx, &kind, &api_version);
        let entries = match old {
            None => shown(row, object).and_then(|after| {
                let after = parsed(&after)?;
                // Upstream compares a new object with an empty one of its Go type.
                let after = if row.custom { after } else { after.without_unset() };
                write.update(None, &after, sent.as_deref())
            }),
            Some(old) => {
                let stored = old.meta_mut().managed_fields.take();
                let entries = owned_after(&write, row, object, old, sent, stored.as_deref());
                old.meta_mut().managed_fields = stored;
                entries
            }
        };
        set(object, ctx, entries);
    }

    /// The same for a view, whose entries are the part of its parent's that it shows.
    pub(super) fn own_view(
        &self,
        ctx: &RequestContext,
        view: &mut dyn Object,
        before: &dyn Object,
    ) {
        let sub = view_of(ctx);
        let kind =
            Kind { registry: self, row: &ctx.resource, subresource: &ctx.subresource, view: sub };
        let stored = before.meta().managed_fields.clone().unwrap_or_default();
        let mut before = before.boxed_clone();
        before.meta_mut().managed_fields = None;
        let sent = view.meta_mut().managed_fields.take();
        let api_version = before.api_version().to_owned();
        let write = self.write_of(ctx, &kind, &api_version);
        let entries =
            write.update(Some((&before.to_value(), &stored)), &view.to_value(), sent.as_deref());
        set(view, ctx, entries);
    }

    /// Server-side apply: merges `configuration` into the existing object (`None`: there is none).
    pub(super) fn merged_by_owner(
        &self,
        ctx: &RequestContext,
        live: Option<&dyn Object>,
        configuration: &Value,
        force: bool,
    ) -> Result<(Value, Vec<ManagedFieldsEntry>), StatusError> {
        let row = &ctx.resource;
        let sub = view_of(ctx);
        let (api_version, wanted) = match (sub, live) {
            (Some(kind), Some(live)) => (live.api_version().to_owned(), kind.kind),
            _ => (row.api_version(), &*row.kind),
        };
        let kind = Kind { registry: self, row, subresource: &ctx.subresource, view: sub };
        check_configuration(configuration, &api_version, wanted)?;
        let entries = live.and_then(|live| live.meta().managed_fields.clone()).unwrap_or_default();
        let before = live.map(|live| {
            let mut live = live.boxed_clone();
            live.meta_mut().managed_fields = None;
            live.to_value()
        });
        let write = self.write_of(ctx, &kind, &api_version);
        let live = before.as_ref().map(|before| (before, &entries[..]));
        match write.apply(live, configuration, force) {
            Ok(applied) => Ok((applied.object, applied.entries)),
            Err(ApplyError::Conflicts(conflicts)) => Err(apply_conflict(&conflicts)),
            Err(ApplyError::Failed(why)) => {
                Err(StatusError::new(Reason::Unknown, why.to_string()).without_details())
            }
        }
    }

    fn write_of<'a>(
        &self,
        ctx: &'a RequestContext,
        versions: &'a Kind<'a>,
        api_version: &'a str,
    ) -> Write<'a> {
        Write {
            versions,
            api_version,
            subresource: &ctx.subresource,
            manager: &ctx.field_manager,
            now: Time(base::clock::now_seconds()),
        }
    }
}

/// The kind of the subresource, if it is a view.
fn view_of(ctx: &RequestContext) -> Option<SubresourceKind> {
    let sub = ctx.resource.subresource(&ctx.subresource)?;
    sub.kind.filter(|_| matches!(sub.behaviour, Behaviour::View(_)))
}

/// An update that changes nothing needs no further work.
fn owned_after(
    write: &Write<'_>,
    row: &Resource,
    object: &dyn Object,
    old: &dyn Object,
    sent: Option<Vec<ManagedFieldsEntry>>,
    stored: Option<&[ManagedFieldsEntry]>,
) -> Result<Vec<ManagedFieldsEntry>, FieldsError> {
    let stored = stored.unwrap_or_default();
    let keeps = match &sent {
        _ if !write.subresource.is_empty() => true,
        None => true,
        sent => !is_reset(sent.as_deref()) && sent.as_deref() == Some(stored),
    };
    if keeps && stored.is_empty() {
        return Ok(vec![]);
    }
    let (mut was, mut is) = (old.encode(), object.encode());
    if keeps && was == is {
        return Ok(stored.to_vec());
    }
    if row.conversion.is_some() {
        (was, is) = (shown(row, old)?, shown(row, object)?);
    }
    write.update(Some((&parsed(&was)?, stored)), &parsed(&is)?, sent.as_deref())
}

fn parsed(json: &[u8]) -> Result<Tree<'_>, FieldsError> {
    Tree::parse(json).map_err(unconverted)
}

/// A write never fails because of ownership: if it cannot be computed, there are no entries.
fn set(
    object: &mut dyn Object,
    ctx: &RequestContext,
    entries: Result<Vec<ManagedFieldsEntry>, FieldsError>,
) {
    let entries = entries.unwrap_or_else(|why| {
        tracing::warn!(
            kind = ctx.resource.kind,
            %why,
            "failed to compute the managed fields of an object"
        );
        vec![]
    });
    object.meta_mut().managed_fields = Some(entries).filter(|entries| !entries.is_empty());
}

fn check_configuration(
    configuration: &Value,
    api_version: &str,
    kind: &str,
) -> Result<(), StatusError> {
    let text = |field: &str| configuration[field].as_str().unwrap_or_default();
    if text("apiVersion") != api_version || text("kind") != kind {
        let described = match (text("apiVersion"), text("kind")) {
            ("", kind) => format!("/, Kind={kind}"),
            _ => group_version_kind(configuration),
        };
        return Err(StatusError::bad_request(format!("invalid object type: {described}")));
    }
    if configuration["metadata"]["managedFields"].is_array() {
        return Err(StatusError::bad_request("metadata.managedFields must be nil"));
    }
    Ok(())
}

fn apply_conflict(conflicts: &[Conflict]) -> StatusError {
    let mut error = StatusError::new(Reason::Conflict, conflict_message(conflicts));
    for conflict in conflicts {
        let message = format!("conflict with {}", conflict.manager);
        error = error.cause("FieldManagerConflict", &conflict.field(), message);
    }
    error
}

/// Whether the entries differ only in their times. Such a write changes nothing.
pub(super) fn same_but_for_time(object: &dyn Object, old: &dyn Object) -> bool {
    let entries = |object: &dyn Object| object.meta().managed_fields.clone().unwrap_or_default();
    let timeless = |mut entries: Vec<ManagedFieldsEntry>| {
        entries.iter_mut().for_each(|entry| entry.time = None);
        entries
    };
    let (new, old) = (entries(object), entries(old));
    new.len() == old.len() && !new.is_empty() && timeless(new) == timeless(old)
}

/// Sets the entries of a view: the part of its parent's that it shows.
pub(super) fn show_in_view(view: &dyn View, shown: &mut dyn Object, parent: &dyn Object) {
    let entries = parent.meta().managed_fields.as_deref().unwrap_or_default();
    let path = view.replicas_path();
    let shown_entries = scale::from_parent(entries, &path).unwrap_or_default();
    shown.meta_mut().managed_fields = Some(shown_entries).filter(|entries| !entries.is_empty());
}

/// Copies the entries after a write to a view into the parent's.
pub(super) fn carry_to_parent(
    view: &dyn View,
    shown: &dyn Object,
    parent: &mut dyn Object,
    api_version: &str,
) {
    let entries = parent.meta().managed_fields.clone().unwrap_or_default();
    let shown = shown.meta().managed_fields.as_deref().unwrap_or_default();
    let path = view.replicas_path();
    if let Ok(entries) = scale::to_parent(&entries, shown, &path, api_version) {
        parent.meta_mut().managed_fields = Some(entries).filter(|entries| !entries.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use base::task::Tasks;
    use bytes::Bytes;
    use k8s_openapi::api::core::v1::ConfigMap;
    use machinery::patch::PatchKind;
    use serde_json::json;

    use super::*;
    use crate::admission::Chain;
    use crate::registry::{Intent, Outcome, Written};
    use crate::request::Key;
    use crate::resource::ResourceTable;

    async fn write(
        registry: &Registry,
        manager: &str,
        intent: Intent,
    ) -> Result<Written, StatusError> {
        let mut ctx = registry.own_context::<ConfigMap>();
        ctx.field_manager = manager.into();
        registry.write(&ctx, &Key::new("ns", "one"), intent).await
    }

    fn patch(kind: PatchKind, body: Value) -> Intent {
        Intent::Patch { kind, body: Bytes::from(body.to_string()) }
    }

    fn apply(data: Value) -> Intent {
        let body = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "one" }, "data": data,
        });
        patch(PatchKind::Apply { force: false }, body)
    }

    /// Without a schema, too, maps are granular.
    #[tokio::test]
    async fn writes_are_owned_and_an_unchanged_object_is_not_written() {
        let row = crate::testing::row::<ConfigMap>("configmaps", &[], true);
        let table = ResourceTable::new([row]);
        let registry =
            Registry::new(store::Sim::open(), table, Chain::default(), Tasks::new("test"));
        let merge = |data: Value| patch(PatchKind::Merge, json!({ "data": data }));
        let mut revisions = vec![];
        for (manager, intent, outcome, managers) in [
            ("a", apply(json!({ "k": "v" })), Outcome::Created, "a/Apply"),
            ("a", apply(json!({ "k": "v" })), Outcome::Unchanged, "a/Apply"),
            ("b", merge(json!({ "k": "v" })), Outcome::Unchanged, "a/Apply"),
            ("b", merge(json!({ "l": "w" })), Outcome::Updated, "a/Apply b/Update"),
            ("a", apply(json!({ "m": "x" })), Outcome::Updated, "a/Apply b/Update"),
        ] {
            let written = write(&registry, manager, intent).await.expect("no conflict");
            assert_eq!(written.outcome, outcome, "{manager}: {managers}");
            revisions.push(written.object.revision());
            let object = written.object.object().expect("decodes");
            let shown: Vec<String> = object
                .meta()
                .managed_fields
                .iter()
                .flatten()
                .map(|entry| {
                    let text = |text: &Option<String>| text.clone().unwrap_or_default();
                    format!("{}/{}", text(&entry.manager), text(&entry.operation))
                })
                .collect();
            assert_eq!(shown.join(" "), managers);
        }
        assert_eq!(revisions[0], revisions[2]);
        let last = registry.find::<ConfigMap>("ns", "one").await.expect("reads").expect("is there");
        assert_eq!(json!(last.data), json!({ "l": "w", "m": "x" }));
        let error = write(&registry, "a", apply(json!({ "l": "other" }))).await.err();
        let error = error.expect("a conflict");
        assert_eq!((error.code, error.causes.len()), (409, 1));
        assert_eq!(
            error.message,
            "Apply failed with 1 conflict: conflict with \"b\" using v1: .data.l"
        );
    }
}
