//! The one write path.
//!
//! ```text
//! old state ─► intent applied ─► default ─► mutating admission ─► default ─► prepare ─► validate
//!                                    ─► validating admission ─► allocate ─► compare-and-put
//! ```
//!
//! If the compare fails and the intent names no revision, the path runs again on the current state, a
//! bounded number of times. A dry run stops before the put.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use machinery::Object;
use machinery::object::{DecodeError, Decoded};
use machinery::patch::apply::described;
use machinery::patch::{self, PatchError, PatchKind};
use machinery::status::Reason;
use serde_json::Value;
use store::{Compare, LeaseId, Op, Revision, Txn};

use super::patched::{misfit, misfit_tree};
use super::{
    Intent, Outcome, Registry, Stored, Written, managed, metadata, store_error, store_key,
};
use crate::StatusError;
use crate::admission::{Attributes, Operation};
use crate::codec::decode::patched_misfit;
use crate::codec::explain::Reader;
use crate::codec::{decode, gojson};
use crate::request::{FieldValidation, Key, RequestContext};
use crate::resource::{Behaviour, Examined, MetadataRules, Resource};

/// Maximum runs after lost races. Upstream's patch gives up after 5; the server's own updates of single
/// objects race with frequent status writers, so they get a few more.
const ATTEMPTS: usize = 12;
/// Retries if a generated name exists already.
const NAME_ATTEMPTS: usize = 8;
/// Objects that expire within this many seconds of each other share a lease.
const LEASE_SLACK_SECONDS: i64 = 60;

/// The result of one run of the path.
pub(super) enum Attempt {
    Done(Written),
    /// Another write came first.
    Raced,
}

/// The shared lease of new expiring objects, and its end.
#[derive(Default)]
pub(super) struct Leases(Mutex<Option<SharedLease>>);

#[derive(Clone, Copy)]
struct SharedLease {
    id: LeaseId,
    ttl_seconds: i64,
    reuse_until: jiff::Timestamp,
}

impl Registry {
    /// See the module: every write of the server goes through this function.
    pub async fn write(
        &self,
        ctx: &RequestContext,
        key: &Key,
        intent: Intent,
    ) -> Result<Written, StatusError> {
        for _ in 0..ATTEMPTS {
            let attempt = match &intent {
                Intent::Create { object } => self.create(ctx, key, &**object).await?,
                Intent::Delete { options } => self.delete(ctx, key, options).await?,
                Intent::Update { .. } | Intent::Patch { .. } | Intent::Modify(_) => {
                    self.update(ctx, key, &intent).await?
                }
            };
            match attempt {
                Attempt::Done(written) => return Ok(written),
                Attempt::Raced => {}
            }
        }
        Err(metadata::modified(&ctx.resource, &key.name))
    }

    async fn create(
        &self,
        ctx: &RequestContext,
        key: &Key,
        object: &dyn Object,
    ) -> Result<Attempt, StatusError> {
        let generates = object.name().is_empty();
        let mut last = None;
        for _ in 0..NAME_ATTEMPTS {
            match self.create_once(ctx, key, object.boxed_clone(), New::Posted).await {
                Err(error) if generates && error.is(Reason::AlreadyExists) => last = Some(error),
                other => return other,
            }
        }
        let error = last.expect("the loop ran");
        Err(StatusError::new(
            Reason::AlreadyExists,
            format!("{error}, the server was not able to generate a unique name for the object"),
        ))
    }

    async fn create_once(
        &self,
        ctx: &RequestContext,
        key: &Key,
        object: Box<dyn Object>,
        new: New,
    ) -> Result<Attempt, StatusError> {
        let row = &ctx.resource;
        let strategy = &*row.strategy;
        let mut object = self.to_stored(ctx, object)?;
        strategy.default(&mut *object);
        // Before the server sets missing fields. Apply did this when it merged.
        metadata::wipe_system_fields(object.meta_mut());
        metadata::drop_repeated_owners(ctx, object.meta_mut(), "");
        if new != New::Applied {
            self.own(ctx, &mut *object, None);
        }
        metadata::fill_new(row, key, &mut *object);
        let key = Key::new(key.namespace.clone(), object.name());
        let options = write_options("CreateOptions", ctx);
        let mut attributes =
            Attributes::new(ctx, self, Operation::Create, &key, Some(&mut object), None, &options);
        self.chain().admit(&mut attributes).await?;
        metadata::drop_repeated_owners(ctx, object.meta_mut(), metadata::AFTER_ADMISSION);
        strategy.default(&mut *object);
        strategy.prepare_create(ctx, &mut *object);
        self.settle(ctx, &mut *object, None).await?;
        // No strategy has rules about managed fields, which would be half of the tree.
        let owners = object.meta_mut().managed_fields.take();
        let examined = Examined::new(&*object);
        let mut errors = strategy.validate(&examined);
        errors = match (row.settings.metadata_rules, errors.is_empty()) {
            (MetadataRules { last: true, .. }, false) => errors,
            _ => {
                let mut all = metadata::validate_new(row, &*object);
                all.append(std::mem::take(&mut errors));
                all
            }
        };
        if !errors.is_empty() {
            let group = row.settings.error_group.unwrap_or(&row.group);
            return Err(StatusError::invalid(group, &row.kind, object.name(), errors));
        }
        strategy.warnings(&examined, None).into_iter().for_each(|text| ctx.warn(text));
        object.meta_mut().managed_fields = owners;
        if let Some(may_create) = &ctx.may_create {
            may_create().await?;
        }
        let attributes =
            Attributes::new(ctx, self, Operation::Create, &key, Some(&mut object), None, &options);
        self.chain().validate(&attributes).await?;
        let ctx = &ctx.relying_on(attributes.relied());
        // As late as upstream, whose storage checks it: a policy's refusal comes first, and a dry run stores
        // nothing.
        if new == New::Posted && !ctx.dry_run {
            metadata::check_new_version(&*object)?;
        }
        self.check_absent(row, &key).await?;
        match self.place(ctx, &key, &mut *object, None).await? {
            Some(written) => Ok(Attempt::Done(written)),
            // The object does not exist: another object that admission relied on has changed.
            None if self.current(row, &key).await?.is_none() => Ok(Attempt::Raced),
            None => Err(StatusError::already_exists(&row.group, &row.plural, &key.name)),
        }
    }

    /// Checks before the allocation that the object does not exist. A lost create releases its allocations,
    /// which must not be those of an existing object, for example if both request the same cluster IP.
    async fn check_absent(&self, row: &Arc<Resource>, key: &Key) -> Result<(), StatusError> {
        let Some(there) = self.current(row, key).await? else { return Ok(()) };
        let error = StatusError::already_exists(&row.group, &row.plural, &key.name);
        let is_going = there.object()?.meta().deletion_timestamp.is_some();
        let message = format!("object is being deleted: {error}");
        Err(if is_going { error.with_message(message) } else { error })
    }

    /// The end of the path: allocates what the object needs, and puts it. Unused allocations are released,
    /// and after an update those that are no longer needed. `None` after a lost race.
    async fn place(
        &self,
        ctx: &RequestContext,
        key: &Key,
        object: &mut dyn Object,
        mut before: Option<(&Stored, &mut dyn Object)>,
    ) -> Result<Option<Written>, StatusError> {
        let placed = self.allocate_and_put(ctx, key, object, before.as_mut()).await;
        let Some(allocator) = ctx.resource.allocator.as_ref().filter(|_| !ctx.dry_run) else {
            return placed;
        };
        match (&placed, before) {
            (Ok(Some(written)), _) if written.outcome == Outcome::Unchanged => {}
            (Ok(Some(_)), Some((_, old))) => allocator.release(self, old, Some(object)).await,
            (Ok(Some(_)), None) => {}
            (Ok(None) | Err(_), _) => allocator.abandoned(self, object).await,
        }
        placed
    }

    async fn allocate_and_put(
        &self,
        ctx: &RequestContext,
        key: &Key,
        object: &mut dyn Object,
        before: Option<&mut (&Stored, &mut dyn Object)>,
    ) -> Result<Option<Written>, StatusError> {
        let row = &ctx.resource;
        let old = before.as_ref().map(|(_, old)| &**old);
        if let Some(allocator) = &row.allocator {
            allocator.allocate(self, ctx, object, old).await?;
        }
        // Nothing is stored by a dry run: a creator's own version is shown.
        if before.is_some() || !ctx.dry_run {
            object.meta_mut().resource_version = None;
        }
        let mut encoded = object.encode();
        let (expected, outcome) = match before {
            None => (Revision(0), Outcome::Created),
            Some((current, old)) => {
                if is_unchanged(object, &encoded, *old) {
                    if !self.is_stale(row, key, current).await? {
                        let object = current.clone();
                        return Ok(Some(Written { object, outcome: Outcome::Unchanged }));
                    }
                    encoded = object.encode();
                }
                (current.revision(), Outcome::Updated)
            }
        };
        let put = self.put_encoded(ctx, key, object, encoded, expected).await?;
        Ok(put.map(|object| Written { object, outcome }))
    }

    async fn update(
        &self,
        ctx: &RequestContext,
        key: &Key,
        intent: &Intent,
    ) -> Result<Attempt, StatusError> {
        let row = &ctx.resource;
        let Some(current) = self.current(row, key).await? else {
            return self.update_missing(ctx, key, intent).await;
        };
        let mut old = current.stored_object()?;
        let mut object = self.changed(ctx, intent, &current, &*old)?;
        if matches!(intent, Intent::Patch { .. }) {
            metadata::check_patched(row, key, &mut *object, &*old)?;
        }
        metadata::check_preconditions(row, &*object, &*old)?;
        let pinned = names_its_revision(intent);
        row.strategy.default(&mut *object);
        if matches!(intent, Intent::Update { .. }) {
            metadata::drop_repeated_owners(ctx, object.meta_mut(), "");
        }
        if self.owns_by_update(ctx, intent) {
            self.own(ctx, &mut *object, Some(&mut *old));
        }
        let options = write_options(
            if matches!(intent, Intent::Patch { .. }) { "PatchOptions" } else { "UpdateOptions" },
            ctx,
        );
        metadata::carry_over(&mut *object, &*old);
        let mut attributes = Attributes::new(
            ctx,
            self,
            Operation::Update,
            key,
            Some(&mut object),
            Some(&*old),
            &options,
        );
        self.chain().admit(&mut attributes).await?;
        metadata::drop_repeated_owners(ctx, object.meta_mut(), metadata::AFTER_ADMISSION);
        self.prepare_update(ctx, &mut *object, &mut *old).await?;
        let attributes = Attributes::new(
            ctx,
            self,
            Operation::Update,
            key,
            Some(&mut object),
            Some(&*old),
            &options,
        );
        self.chain().validate(&attributes).await?;
        if self.is_released(ctx, &*object, &*old) {
            return self.remove(ctx, key, &current, object).await;
        }
        match self.place(ctx, key, &mut *object, Some((&current, &mut *old))).await? {
            Some(written) => Ok(Attempt::Done(written)),
            None if pinned => Err(metadata::modified(row, &key.name)),
            None => Ok(Attempt::Raced),
        }
    }

    /// Whether the stored form differs from what a write would store now (an older version, another key).
    async fn is_stale(
        &self,
        row: &Resource,
        key: &Key,
        current: &Stored,
    ) -> Result<bool, StatusError> {
        let place = Bytes::from(store_key(row, key));
        Ok(current.is_stale() || self.store().is_stale(&place).await.map_err(store_error)?)
    }

    /// Sets fields that only the registry knows.
    async fn settle(
        &self,
        ctx: &RequestContext,
        object: &mut dyn Object,
        old: Option<&dyn Object>,
    ) -> Result<(), StatusError> {
        match &ctx.resource.allocator {
            Some(allocator) => allocator.settle(self, ctx, object, old).await,
            None => Ok(()),
        }
    }

    /// Everything between mutating and validating admission.
    async fn prepare_update(
        &self,
        ctx: &RequestContext,
        object: &mut dyn Object,
        old: &mut dyn Object,
    ) -> Result<(), StatusError> {
        let row = &ctx.resource;
        let strategy = &*row.strategy;
        strategy.default(object);
        metadata::carry_over(object, old);
        strategy.prepare_update(ctx, object, old);
        self.settle(ctx, object, Some(&*old)).await?;
        // Subresources that change the desired state count, too: ephemeral containers, resize, scale.
        let wish = !matches!(ctx.subresource.as_str(), "status" | "binding");
        if wish && strategy.bumps_generation(object, old) {
            object.meta_mut().generation = Some(old.meta().generation.unwrap_or_default() + 1);
        }
        let mut errors = metadata::validate_update(row, &ctx.subresource, object, old);
        let owners = [&mut *object, old].map(|one| one.meta_mut().managed_fields.take());
        let (examined, before) = (Examined::new(object), Examined::new(old));
        errors.append(strategy.validate_update(ctx, &examined, &before));
        if !errors.is_empty() {
            let group = row.settings.error_group.unwrap_or(&row.group);
            return Err(StatusError::invalid(group, &row.kind, old.name(), errors));
        }
        // A write of the same status has nothing to warn about: the strategy tells by the status which part it was.
        let is_same = |field: &str| examined.tree().get(field) == before.tree().get(field);
        if ctx.subresource != "status" || !is_same("status") {
            strategy.warnings(&examined, Some(&before)).into_iter().for_each(|text| ctx.warn(text));
        }
        [object.meta_mut().managed_fields, old.meta_mut().managed_fields] = owners;
        Ok(())
    }

    /// PUT and apply create a missing object, if the kind allows it.
    async fn update_missing(
        &self,
        ctx: &RequestContext,
        key: &Key,
        intent: &Intent,
    ) -> Result<Attempt, StatusError> {
        let row = &ctx.resource;
        let missing = || StatusError::not_found(&row.group, &row.plural, &key.name);
        // Where a write may create, upstream's status does so, too: as a new object, without status.
        let makes_whole = ctx.subresource == "status" && row.settings.create_on_update;
        if !ctx.subresource.is_empty() && !makes_whole {
            return Err(missing());
        }
        let mut whole = ctx.clone();
        whole.subresource.clear();
        let ctx = &whole;
        let (mut object, new) = match intent {
            Intent::Update { object } if row.settings.create_on_update => {
                (object.boxed_clone(), New::Put)
            }
            Intent::Patch { kind: PatchKind::Apply { force }, body } => {
                (self.applied(ctx, None, body, *force, &*row.codec)?, New::Applied)
            }
            _ => return Err(missing()),
        };
        if let Some(uid) = object.meta().uid.as_deref().filter(|uid| !uid.is_empty()) {
            let why = match new {
                New::Posted | New::Put => metadata::other_uid(row, key, uid, ""),
                New::Applied => format!(
                    "uid mismatch: the provided object specified uid {uid}, and no existing object was found"
                ),
            };
            return Err(StatusError::conflict(&row.group, &row.plural, &key.name, why));
        }
        metadata::check_place(row, key, &mut *object)?;
        match self.create_once(ctx, key, object, new).await {
            Err(error) if error.is(Reason::AlreadyExists) => Ok(Attempt::Raced),
            other => other,
        }
    }

    /// Applies the intent to the current state; the result is in the stored version.
    fn changed(
        &self,
        ctx: &RequestContext,
        intent: &Intent,
        current: &Stored,
        old: &dyn Object,
    ) -> Result<Box<dyn Object>, StatusError> {
        let row = &ctx.resource;
        if let Intent::Modify(modify) = intent {
            let mut object = old.boxed_clone();
            modify(&mut *object)?;
            return Ok(object);
        }
        let view = row.subresource(&ctx.subresource).and_then(|sub| match &sub.behaviour {
            Behaviour::View(view) => Some(view),
            _ => None,
        });
        let Some(view) = view else {
            let shown = current.object()?;
            let object = self.apply_intent(ctx, intent, &*shown, &*row.codec)?;
            return self.to_stored(ctx, object);
        };
        let mut before = view.view(old)?;
        managed::show_in_view(&**view, &mut *before, old);
        let mut after = self.apply_intent(ctx, intent, &*before, view.codec())?;
        if is_apply(intent) && after.name() != before.name() {
            let why = metadata::other_name(after.name(), before.name());
            return Err(StatusError::bad_request(why));
        }
        let version = after.meta_mut().resource_version.take();
        let mut object = old.boxed_clone();
        view.merge(&*after, &mut *object)?;
        if !is_apply(intent) {
            // The parent decides the stored value: for example it may drop a zero that was sent.
            let sent = after.meta_mut().managed_fields.take();
            after = view.view(&*object)?;
            after.meta_mut().managed_fields = sent;
            self.own_view(ctx, &mut *after, &*before);
        }
        managed::carry_to_parent(&**view, &*after, &mut *object, &row.api_version());
        // The view's resourceVersion is a precondition, like the object's own.
        if version.as_deref().is_some_and(|version| !version.is_empty()) {
            object.meta_mut().resource_version = version;
        }
        Ok(object)
    }

    fn apply_intent(
        &self,
        ctx: &RequestContext,
        intent: &Intent,
        shown: &dyn Object,
        codec: &dyn machinery::object::Codec,
    ) -> Result<Box<dyn Object>, StatusError> {
        let row = &ctx.resource;
        match intent {
            Intent::Update { object } => Ok(object.boxed_clone()),
            Intent::Patch { kind, body } => {
                if let PatchKind::Apply { force } = kind {
                    return self.applied(ctx, Some(shown), body, *force, codec);
                }
                if *kind == PatchKind::Merge {
                    check_merge_patch(body)?;
                }
                if *kind == PatchKind::Strategic && !check_strategic_patch(body)? {
                    return Ok(shown.boxed_clone());
                }
                let before = shown.to_value();
                let patched = match kind {
                    PatchKind::Json => patch::json(&before, body),
                    PatchKind::Merge => patch::merge(&before, body),
                    PatchKind::Strategic => {
                        patch::strategic(&before, body, row.schema.as_deref(), &row.definition)
                    }
                    PatchKind::Apply { .. } => unreachable!("answered above"),
                };
                let mut patched = patched.map_err(patch_error)?;
                metadata::check_custom_type(row, &patched, shown)?;
                if *kind == PatchKind::Strategic {
                    keep_type(&mut patched, &before);
                }
                let json = patched.to_string();
                let explained = |reader, error: &DecodeError| {
                    let kind = (shown.api_version(), shown.kind());
                    patched_misfit(reader, json.as_bytes(), kind, self.schemas(), error)
                };
                if *kind == PatchKind::Strategic {
                    let decoded = codec.decode(json.as_bytes());
                    let refused = |error| misfit_tree(body, &explained(Reader::Tree, &error));
                    return self
                        .decoded(ctx, Ok(decoded.map_err(refused)?))
                        .map_err(|error| misfit_tree(body, &error.message));
                }
                let version = shown.api_version();
                let (group, version) = version.split_once('/').unwrap_or(("", version));
                let definition = self.schemas().definition_name(group, version, shown.kind());
                let of = (self.schemas(), definition.as_deref().unwrap_or_default());
                let refused = |why: &str| misfit(&patched, body, why, of);
                if let Some(why) = self.other_kind(row, &patched, shown) {
                    return Err(refused(&why));
                }
                let decoded = codec.decode(json.as_bytes());
                let decoded = decoded.map_err(|error| refused(&explained(Reader::Json, &error)))?;
                self.decoded(ctx, Ok(decoded)).map_err(|error| refused(&error.message))
            }
            _ => unreachable!("only updates and patches come here"),
        }
    }

    /// Why a patched object is invalid: its apiVersion or kind is another one.
    fn other_kind(&self, row: &Resource, patched: &Value, shown: &dyn Object) -> Option<String> {
        let is_own = |name: &str, own: &str| patched[name].is_null() || patched[name] == own;
        if row.custom || (is_own("apiVersion", shown.api_version()) && is_own("kind", shown.kind()))
        {
            return None;
        }
        let text = |name: &str| patched[name].as_str().unwrap_or_default();
        let wanted_group = shown.api_version().split_once('/').map_or("", |(group, _)| group);
        let wanted = (wanted_group, shown.kind());
        decode::type_misfit(&self.resources(), text("apiVersion"), text("kind"), wanted)
    }

    /// Server-side apply: merges by field ownership, into an empty object if there is none.
    fn applied(
        &self,
        ctx: &RequestContext,
        live: Option<&dyn Object>,
        body: &Bytes,
        force: bool,
        codec: &dyn machinery::object::Codec,
    ) -> Result<Box<dyn Object>, StatusError> {
        let configuration = parse_json(body)?;
        let (merged, entries) = self.merged_by_owner(ctx, live, &configuration, force)?;
        let decoded = codec.decode_value(merged);
        let decoded = decoded.map_err(|error| self.not_converted(&configuration, &error))?;
        let mut object = self.decoded(ctx, Ok(decoded))?;
        object.meta_mut().managed_fields = Some(entries).filter(|entries| !entries.is_empty());
        Ok(object)
    }

    /// The error of a configuration that has its type's shape, but values that the type does not have. The
    /// values of the existing object are sound.
    fn not_converted(&self, configuration: &Value, error: &DecodeError) -> StatusError {
        let text = |name: &str| configuration[name].as_str().unwrap_or_default();
        let of = (text("apiVersion"), text("kind"));
        let json = configuration.to_string();
        let why = patched_misfit(Reader::Tree, json.as_bytes(), of, self.schemas(), error);
        let object = described(configuration);
        let kind = object.split_once("; ").map_or("", |(_, kind)| kind);
        let text = format!(
            "failed to convert new object ({object}) to proper version: unable to convert unstructured object to {kind}: {why}"
        );
        StatusError::new(Reason::Unknown, text).without_details()
    }

    /// Whether this update changes field ownership. Apply and views have set it already, and the server's own
    /// writes own nothing.
    fn owns_by_update(&self, ctx: &RequestContext, intent: &Intent) -> bool {
        let sub = ctx.resource.subresource(&ctx.subresource);
        let is_view = sub.is_some_and(|sub| matches!(sub.behaviour, Behaviour::View(_)));
        !(is_apply(intent) || is_view || matches!(intent, Intent::Modify(_)))
    }

    fn decoded(
        &self,
        ctx: &RequestContext,
        decoded: Result<Decoded, machinery::object::DecodeError>,
    ) -> Result<Box<dyn Object>, StatusError> {
        let Decoded { object, unknown_fields } =
            decoded.map_err(|error| StatusError::bad_request(error.to_string()))?;
        match ctx.field_validation {
            FieldValidation::Ignore => {}
            FieldValidation::Warn => {
                unknown_fields
                    .iter()
                    .for_each(|field| ctx.warn(format!("unknown field {field:?}")));
            }
            FieldValidation::Strict if unknown_fields.is_empty() => {}
            FieldValidation::Strict => {
                let listed: Vec<String> =
                    unknown_fields.iter().map(|field| format!("unknown field {field:?}")).collect();
                return Err(StatusError::bad_request(format!(
                    "strict decoding error: {}",
                    listed.join(", ")
                )));
            }
        }
        Ok(object)
    }

    fn to_stored(
        &self,
        ctx: &RequestContext,
        object: Box<dyn Object>,
    ) -> Result<Box<dyn Object>, StatusError> {
        match &ctx.resource.conversion {
            Some(conversion) if !ctx.resource.custom => conversion.to_stored(object),
            _ => Ok(object),
        }
    }

    /// Whether this update releases an object that is being deleted.
    fn is_released(&self, ctx: &RequestContext, object: &dyn Object, old: &dyn Object) -> bool {
        let meta = object.meta();
        let free =
            |meta: &machinery::ObjectMeta| meta.finalizers.as_ref().is_none_or(Vec::is_empty);
        let held_before = !free(old.meta()) || ctx.resource.strategy.holds_back_removal(old);
        meta.deletion_timestamp.is_some()
            && meta.deletion_grace_period_seconds.unwrap_or_default() == 0
            && free(meta)
            && held_before
            && !ctx.resource.strategy.holds_back_removal(object)
    }

    /// Compare-and-put: `None` if the key is no longer at `expected` (0: absent). A dry run only returns the
    /// object that would be stored.
    pub(super) async fn put(
        &self,
        ctx: &RequestContext,
        key: &Key,
        object: &mut dyn Object,
        expected: Revision,
    ) -> Result<Option<Stored>, StatusError> {
        object.meta_mut().resource_version = None;
        let encoded = object.encode();
        self.put_encoded(ctx, key, object, encoded, expected).await
    }

    /// As [`put`](Self::put); `encoded` is the object without resourceVersion.
    async fn put_encoded(
        &self,
        ctx: &RequestContext,
        key: &Key,
        object: &dyn Object,
        encoded: Vec<u8>,
        expected: Revision,
    ) -> Result<Option<Stored>, StatusError> {
        let row = &ctx.resource;
        let codec = if row.custom { &*row.codec } else { row.stored_codec() };
        let shown = Bytes::from(codec.settle(encoded));
        let value = match &row.conversion {
            // Strategies saw it in the row's version; only now it is converted to the stored one.
            Some(conversion) if row.custom => {
                conversion.to_stored(object.boxed_clone())?.encode().into()
            }
            _ => shown.clone(),
        };
        let path = Bytes::from(store_key(row, key));
        if ctx.dry_run {
            let there =
                self.current(row, key).await?.map_or(Revision(0), |stored| stored.revision());
            return Ok((there == expected).then(|| Stored::new(row.clone(), shown, expected)));
        }
        let lease = match (row.settings.ttl_seconds)() {
            Some(seconds) => self.lease(seconds).await?,
            None => 0,
        };
        let mut compare = vec![Compare::ModRevision(path.clone(), expected)];
        compare.extend_from_slice(ctx.relied());
        let txn =
            Txn { compare, success: vec![Op::Put { key: path, value, lease }], failure: vec![] };
        let operation = if expected == Revision(0) { "create" } else { "update" };
        let asked = self.0.store.txn(txn);
        let answer = self.0.numbers.timed(operation, row, asked).await.map_err(store_error)?;
        if answer.succeeded {
            self.note_written(row, answer.revision);
        }
        Ok(answer.succeeded.then(|| Stored::new(row.clone(), shown, answer.revision)))
    }

    /// A lease that lives for at least `ttl_seconds` more.
    async fn lease(&self, ttl_seconds: i64) -> Result<LeaseId, StatusError> {
        let now = base::clock::now();
        let shared = *self.0.leases.0.lock().expect("no panic under the lock");
        if let Some(shared) = shared.filter(|s| s.ttl_seconds == ttl_seconds && now < s.reuse_until)
        {
            return Ok(shared.id);
        }
        let id = self
            .0
            .store
            .lease_grant(ttl_seconds + LEASE_SLACK_SECONDS)
            .await
            .map_err(store_error)?;
        let reuse_until = now + std::time::Duration::from_secs(LEASE_SLACK_SECONDS as u64);
        let fresh = SharedLease { id, ttl_seconds, reuse_until };
        *self.0.leases.0.lock().expect("no panic under the lock") = Some(fresh);
        Ok(id)
    }
}

/// How a new object was created.
#[derive(Clone, Copy, PartialEq, Eq)]
enum New {
    Posted,
    /// By an update, for kinds that allow that.
    Put,
    /// By apply, whose merge has set the owners of its fields.
    Applied,
}

/// Whether the intent names the revision that it changes. Then the caller must resolve a lost race.
fn names_its_revision(intent: &Intent) -> bool {
    match intent {
        Intent::Update { object } => metadata::named_revision(object.meta()).is_some(),
        _ => false,
    }
}

fn is_apply(intent: &Intent) -> bool {
    matches!(intent, Intent::Patch { kind: PatchKind::Apply { .. }, .. })
}

/// A strategic merge patch is applied to Go's struct, whatever kind the patch names: clients send a
/// Deployment's `kind` to its scale.
fn keep_type(patched: &mut Value, before: &Value) {
    for name in ["apiVersion", "kind"] {
        if patched[name].is_string() || patched[name].is_null() {
            patched[name] = before[name].clone();
        }
    }
}

/// Whether there is nothing to write. A write of the same content makes no revision. `encoded` is the object's JSON,
/// which is the object's no more if only times differ: it has the old ones then.
fn is_unchanged(object: &mut dyn Object, encoded: &[u8], old: &mut dyn Object) -> bool {
    old.meta_mut().resource_version = None;
    let before = old.encode();
    if encoded == before {
        return true;
    }
    if !managed::same_but_for_time(object, old) {
        return false;
    }
    let entries =
        std::mem::replace(&mut object.meta_mut().managed_fields, old.meta().managed_fields.clone());
    let same = object.encode() == before;
    if !same {
        object.meta_mut().managed_fields = entries;
    }
    same
}

/// The options in the form for admission.
pub(super) fn write_options(kind: &str, ctx: &RequestContext) -> Value {
    let mut options = serde_json::json!({ "kind": kind, "apiVersion": "meta.k8s.io/v1" });
    options["fieldManager"] = ctx.field_manager.clone().into();
    if ctx.dry_run {
        options["dryRun"] = serde_json::json!(["All"]);
    }
    options
}

/// A merge patch must be an object; otherwise the error is Go's.
fn check_merge_patch(body: &[u8]) -> Result<(), StatusError> {
    let refused = |why: String| StatusError::bad_request(format!("error decoding patch: {why}"));
    match not_a_map(body).map_err(refused)? {
        true => Err(StatusError::bad_request("Invalid JSON Patch")),
        false => Ok(()),
    }
}

/// The same for a strategic merge patch. Returns false for `null`, which changes nothing.
fn check_strategic_patch(body: &[u8]) -> Result<bool, StatusError> {
    not_a_map(body).map(|is_null| !is_null).map_err(StatusError::bad_request)
}

/// Whether a patch is `null`; Go's error if it is neither that nor an object.
fn not_a_map(body: &[u8]) -> Result<bool, String> {
    gojson::check(body)?;
    let what = match body.trim_ascii_start().first() {
        Some(b'{') => return Ok(false),
        Some(b'n') => return Ok(true),
        Some(b'[') => "array",
        Some(b'"') => "string",
        Some(b't' | b'f') => "bool",
        _ => "number",
    };
    Err(format!("json: cannot unmarshal {what} into Go value of type map[string]interface {{}}"))
}

fn parse_json(body: &[u8]) -> Result<Value, StatusError> {
    serde_json::from_slice(body).map_err(|error| StatusError::bad_request(error.to_string()))
}

fn patch_error(error: PatchError) -> StatusError {
    match error {
        PatchError::Malformed(why) => StatusError::bad_request(why),
        PatchError::Unfit(why) => {
            tracing::debug!(why, "failed to apply a patch to its object");
            StatusError::new(
                Reason::Invalid,
                "the server rejected our request due to an error in our request",
            )
        }
        PatchError::Broken(why) => StatusError::new(Reason::Unknown, why).with_code(500),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use base::task::Tasks;
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;
    use crate::admission::Chain;
    use crate::registry::DeleteOptions;
    use crate::resource::{Allocator, ResourceTable, Strategy};

    /// Counts allocations and releases; objects called "none" get nothing.
    #[derive(Clone, Default)]
    struct Counting {
        allocated: Arc<AtomicUsize>,
        released: Arc<AtomicUsize>,
        abandoned: Arc<AtomicUsize>,
    }

    impl Counting {
        fn counts(&self) -> [usize; 3] {
            [&self.allocated, &self.released, &self.abandoned]
                .map(|count| count.load(Ordering::Relaxed))
        }
    }

    #[async_trait::async_trait]
    impl Allocator for Counting {
        async fn settle(
            &self,
            _: &Registry,
            _: &RequestContext,
            _: &mut dyn Object,
            _: Option<&dyn Object>,
        ) -> Result<(), StatusError> {
            Ok(())
        }

        async fn allocate(
            &self,
            _: &Registry,
            _: &RequestContext,
            object: &mut dyn Object,
            _: Option<&dyn Object>,
        ) -> Result<(), StatusError> {
            self.allocated.fetch_add(1, Ordering::Relaxed);
            if object.name() == "none" {
                return Err(StatusError::internal("there is nothing left"));
            }
            Ok(())
        }

        async fn release(&self, _: &Registry, _: &dyn Object, _: Option<&dyn Object>) {
            self.released.fetch_add(1, Ordering::Relaxed);
        }

        async fn abandoned(&self, _: &Registry, _: &dyn Object) {
            self.abandoned.fetch_add(1, Ordering::Relaxed);
        }
    }

    struct Plain;

    impl Strategy for Plain {}

    /// Objects have a period of grace, of no seconds here.
    struct Graceful;

    impl Strategy for Graceful {
        fn grace(&self, _: &dyn Object, _: Option<i64>) -> crate::resource::Grace {
            crate::resource::Grace::Seconds(0)
        }
    }

    /// Watchers hear first that the object is being deleted. Kinds without a period of grace skip that.
    #[tokio::test]
    async fn the_end_of_grace_is_two_events() {
        for (strategy, events) in
            [(Arc::new(Graceful) as Arc<dyn Strategy>, 2), (Arc::new(Plain), 1)]
        {
            let mut row = crate::testing::row::<ConfigMap>("configmaps", &[], true);
            row.strategy = strategy;
            let store = store::Sim::open();
            let table = ResourceTable::new([row]);
            let registry =
                Registry::new(store.clone(), table, Chain::default(), Tasks::new("test"));
            let ctx = registry.own_context::<ConfigMap>();
            let mut object = ConfigMap::default();
            object.metadata.name = Some("a".into());
            object.metadata.namespace = Some("ns".into());
            let key = Key::new("ns", "a");
            let create = Intent::Create { object: Box::new(object) };
            registry.write(&ctx, &key, create).await.expect("created");
            let before = store.revision().await.expect("a revision");
            let delete = Intent::Delete { options: DeleteOptions::default() };
            let gone = registry.write(&ctx, &key, delete).await.expect("deleted");
            assert_eq!(gone.outcome, Outcome::Deleted);
            assert_eq!(store.revision().await.expect("a revision").0 - before.0, events);
            let marked = gone.object.object().expect("decodes").meta().deletion_timestamp.is_some();
            assert_eq!(marked, events == 2);
        }
    }

    #[tokio::test]
    async fn allocations_are_released_when_no_longer_needed_and_not_before() {
        let counting = <Counting as Default>::default();
        let mut row = crate::testing::row::<ConfigMap>("configmaps", &[], true);
        row.allocator = Some(Arc::new(counting.clone()));
        let table = ResourceTable::new([row]);
        let store = store::Sim::open();
        let registry = Registry::new(store, table, Chain::default(), Tasks::new("test"));
        let ctx = registry.own_context::<ConfigMap>();
        let object = |name: &str, value: &str| {
            let mut object = ConfigMap::default();
            object.metadata.name = Some(name.into());
            object.metadata.namespace = Some("ns".into());
            object.data = Some([("a".to_owned(), value.to_owned())].into());
            Box::new(object)
        };
        let create = |name: &str| Intent::Create { object: object(name, "1") };
        let update = |value: &str| Intent::Update { object: object("one", value) };
        let stale = || {
            let mut object = object("one", "3");
            object.metadata.resource_version = Some("1".into());
            Intent::Update { object }
        };
        let check = async |name: &str, intent, outcome, counts: [usize; 3]| {
            let written = registry.write(&ctx, &Key::new("ns", name), intent).await;
            let got = written.map(|written| written.outcome).map_err(|error| error.reason);
            assert_eq!((got, counting.counts()), (outcome, counts), "{name}");
        };
        check("one", create("one"), Ok(Outcome::Created), [1, 0, 0]).await;
        // Nothing is released that an existing object has.
        check("one", create("one"), Err(Reason::AlreadyExists), [1, 0, 0]).await;
        check("none", create("none"), Err(Reason::InternalError), [2, 0, 1]).await;
        // A new object with a resourceVersion is refused before any allocation; `0` counts as none.
        let at = |name: &str, version: &str| {
            let mut object = object(name, "1");
            object.metadata.resource_version = Some(version.into());
            Intent::Create { object }
        };
        check("new", at("new", "7"), Err(Reason::Unknown), [2, 0, 1]).await;
        check("one", update("1"), Ok(Outcome::Unchanged), [3, 0, 1]).await;
        check("one", update("2"), Ok(Outcome::Updated), [4, 1, 1]).await;
        check("one", stale(), Err(Reason::Conflict), [4, 1, 1]).await;
        let delete = Intent::Delete { options: DeleteOptions::default() };
        check("one", delete, Ok(Outcome::Deleted), [4, 2, 1]).await;
    }
}
