//! Deletes: preconditions, grace, finalizers, propagation.
//! Upstream: `k8s.io/apiserver/pkg/registry/{rest/delete.go, generic/registry/store.go}`.

use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use machinery::{Object, Time};
use serde_json::{Value, json};
use store::{Compare, KeyRange, Op, Txn};

use super::write::Attempt;
use super::{
    DeleteOptions, List, ListOptions, Outcome, Registry, Stored, Written, store_error, store_key,
};
use crate::StatusError;
use crate::admission::{Attributes, Operation};
use crate::request::{Key, RequestContext};
use crate::resource::Grace;

const ORPHAN: &str = "orphan";
const FOREGROUND: &str = "foregroundDeletion";

impl Registry {
    pub(super) async fn delete(
        &self,
        ctx: &RequestContext,
        key: &Key,
        options: &DeleteOptions,
    ) -> Result<Attempt, StatusError> {
        let row = &ctx.resource;
        let Some(current) = self.current(row, key).await? else {
            return Err(StatusError::not_found(&row.group, &row.plural, &key.name));
        };
        let old = current.stored_object()?;
        check_preconditions(ctx, &*old, options)?;
        let shown = options_value(ctx, options);
        let mut attributes =
            Attributes::new(ctx, self, Operation::Delete, key, None, Some(&*old), &shown);
        self.chain().admit(&mut attributes).await?;
        self.chain().validate(&attributes).await?;
        let mut object = old.boxed_clone();
        set_finalizers(&mut *object, options, row.settings.orphans_by_default);
        let waits = self.begin(ctx, &mut *object, options);
        if !waits {
            let grace = row.strategy.grace(&*old, options.grace_period_seconds);
            return match grace {
                Grace::Seconds(_) => self.mark_and_remove(ctx, key, current, &*old, object).await,
                Grace::None | Grace::Contents => self.remove(ctx, key, &current, old).await,
            };
        }
        if is_same(&*object, &*old) {
            return Ok(Attempt::Done(Written { object: current, outcome: Outcome::Deleting }));
        }
        object.meta_mut().resource_version = None;
        Ok(match self.put(ctx, key, &mut *object, current.revision()).await? {
            Some(object) => Attempt::Done(Written { object, outcome: Outcome::Deleting }),
            None => Attempt::Raced,
        })
    }

    /// The end of an object with a grace period: two events, as upstream. Watchers learn first when it began to
    /// be deleted.
    async fn mark_and_remove(
        &self,
        ctx: &RequestContext,
        key: &Key,
        current: Stored,
        old: &dyn Object,
        mut marked: Box<dyn Object>,
    ) -> Result<Attempt, StatusError> {
        if ctx.dry_run || is_same(&*marked, old) {
            return self.remove(ctx, key, &current, marked).await;
        }
        marked.meta_mut().resource_version = None;
        match self.put(ctx, key, &mut *marked, current.revision()).await? {
            Some(current) => self.remove(ctx, key, &current, marked).await,
            None => Ok(Attempt::Raced),
        }
    }

    /// Sets the deletion timestamp if a grace period or finalizers keep the object. `false`: it can be
    /// removed at once.
    fn begin(
        &self,
        ctx: &RequestContext,
        object: &mut dyn Object,
        options: &DeleteOptions,
    ) -> bool {
        let strategy = &*ctx.resource.strategy;
        let grace = match strategy.grace(object, options.grace_period_seconds) {
            Grace::None | Grace::Contents => 0,
            Grace::Seconds(seconds) => seconds.max(0),
        };
        let already = object.meta().deletion_timestamp.is_some();
        let running = object.meta().deletion_grace_period_seconds.unwrap_or_default();
        if !already {
            let now = base::clock::now_seconds();
            let meta = object.meta_mut();
            meta.deletion_timestamp = Some(Time(now + Duration::from_secs(grace as u64)));
            meta.deletion_grace_period_seconds = Some(grace);
            if let Some(generation) = meta.generation.as_mut().filter(|generation| **generation > 0)
            {
                *generation += 1;
            }
            strategy.starts_deleting(object);
        } else if grace < running {
            // A shorter grace period counts from the beginning of the deletion.
            let meta = object.meta_mut();
            if let Some(Time(at)) = meta.deletion_timestamp {
                let begun = at - Duration::from_secs(running as u64);
                meta.deletion_timestamp = Some(Time(begun + Duration::from_secs(grace as u64)));
            }
            meta.deletion_grace_period_seconds = Some(grace);
        }
        let grace = if already { grace.min(running) } else { grace };
        let finalized = object.meta().finalizers.as_ref().is_none_or(Vec::is_empty);
        grace > 0 || !finalized || strategy.holds_back_removal(object)
    }

    /// Removes the object from the store, if it is still at the revision of the decision.
    pub(super) async fn remove(
        &self,
        ctx: &RequestContext,
        key: &Key,
        current: &Stored,
        object: Box<dyn Object>,
    ) -> Result<Attempt, StatusError> {
        let row = &ctx.resource;
        let gone = |mut last: Box<dyn Object>, revision| {
            last.meta_mut().resource_version = None;
            let value = row.stored_codec().settle(last.encode());
            let object = Stored::new(row.clone(), value, revision);
            Attempt::Done(Written { object, outcome: Outcome::Deleted })
        };
        // A dry run returns the object as it would have been.
        if ctx.dry_run {
            return Ok(gone(object, current.revision()));
        }
        let path = bytes::Bytes::from(store_key(row, key));
        let txn = Txn {
            compare: vec![Compare::ModRevision(path.clone(), current.revision())],
            success: vec![Op::DeleteRange { range: KeyRange::one(path) }],
            failure: vec![],
        };
        let asked = self.0.store.txn(txn);
        let answer = self.0.numbers.timed("delete", row, asked).await.map_err(store_error)?;
        if !answer.succeeded {
            return Ok(Attempt::Raced);
        }
        self.note_written(row, answer.revision);
        if let Some(allocator) = &row.allocator {
            allocator.release(self, &*object, None).await;
        }
        Ok(gone(object, answer.revision))
    }

    /// Deletes the objects that the options select, `workers` at a time, and returns them.
    pub async fn delete_collection(
        &self,
        ctx: &RequestContext,
        namespace: &str,
        options: &ListOptions,
        delete: &DeleteOptions,
        workers: usize,
    ) -> Result<List, StatusError> {
        let list = self.list(&ctx.resource, namespace, options).await?;
        let one = async |item: &Stored| {
            let object = item.object()?;
            let key = Key::new(object.namespace(), object.name());
            let intent = super::Intent::Delete { options: delete.clone() };
            match self.write(ctx, &key, intent).await {
                Err(error) if !error.is(machinery::status::Reason::NotFound) => Err(error),
                _ => Ok(()),
            }
        };
        let deletions = futures::stream::iter(&list.items).map(one);
        deletions.buffer_unordered(workers.max(1)).try_collect::<()>().await?;
        Ok(list)
    }
}

/// Whether two forms of an object differ in their resourceVersion at most.
fn is_same(one: &dyn Object, other: &dyn Object) -> bool {
    let bare = |object: &dyn Object| {
        let mut object = object.boxed_clone();
        object.meta_mut().resource_version = None;
        object.encode()
    };
    bare(one) == bare(other)
}

/// Upstream names the kind here, where other errors name the resource.
fn check_preconditions(
    ctx: &RequestContext,
    old: &dyn Object,
    options: &DeleteOptions,
) -> Result<(), StatusError> {
    let row = &ctx.resource;
    let by_storage = row.strategy.grace(old, None) == Grace::Contents;
    let group = row.settings.error_group.unwrap_or(&row.group);
    let what = if by_storage { &row.plural } else { &row.kind };
    let conflict = |why: String| Err(StatusError::conflict(group, what, old.name(), why));
    if let Some(uid) = options.precondition_uid.as_deref().filter(|uid| *uid != old.uid()) {
        if by_storage {
            return conflict(format!(
                "Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
                old.uid()
            ));
        }
        return conflict(format!(
            "the UID in the precondition ({uid}) does not match the UID in record ({}). The object might have been deleted and then recreated",
            old.uid()
        ));
    }
    let version = old.meta().resource_version.as_deref().unwrap_or_default();
    if let Some(wanted) =
        options.precondition_resource_version.as_deref().filter(|wanted| *wanted != version)
    {
        if by_storage {
            return conflict(format!(
                "Precondition failed: ResourceVersion in precondition: {wanted}, ResourceVersion in object meta: {version}"
            ));
        }
        return conflict(format!(
            "the ResourceVersion in the precondition ({wanted}) does not match the ResourceVersion in record ({version}). The object might have been modified"
        ));
    }
    Ok(())
}

/// Sets the garbage collector's finalizers for the propagation policy.
fn set_finalizers(object: &mut dyn Object, options: &DeleteOptions, orphans_by_default: bool) {
    let has = |name: &str| object.meta().finalizers.iter().flatten().any(|one| one == name);
    let (had_orphan, had_foreground) = (has(ORPHAN), has(FOREGROUND));
    let (orphan, foreground) =
        match (options.orphan_dependents, options.propagation_policy.as_deref()) {
            (Some(orphan), _) => (orphan, false),
            (None, Some("Orphan")) => (true, false),
            (None, Some("Foreground")) => (false, true),
            (None, Some(_)) => (false, false),
            (None, None) => (had_orphan || (orphans_by_default && !had_foreground), had_foreground),
        };
    let finalizers = object.meta_mut().finalizers.get_or_insert_default();
    finalizers.retain(|one| one != ORPHAN && one != FOREGROUND);
    for (wanted, name) in [(orphan, ORPHAN), (foreground, FOREGROUND)] {
        if wanted {
            finalizers.push(name.into());
        }
    }
    let meta = object.meta_mut();
    meta.finalizers.take_if(|finalizers| finalizers.is_empty());
}

fn options_value(ctx: &RequestContext, options: &DeleteOptions) -> Value {
    let mut value = json!({ "kind": "DeleteOptions", "apiVersion": "meta.k8s.io/v1" });
    if let Some(seconds) = options.grace_period_seconds {
        value["gracePeriodSeconds"] = seconds.into();
    }
    if let Some(policy) = &options.propagation_policy {
        value["propagationPolicy"] = policy.clone().into();
    }
    if let Some(orphan) = options.orphan_dependents {
        value["orphanDependents"] = orphan.into();
    }
    let preconditions = [
        ("uid", &options.precondition_uid),
        ("resourceVersion", &options.precondition_resource_version),
    ];
    for (name, wanted) in preconditions {
        if let Some(wanted) = wanted {
            value["preconditions"][name] = wanted.clone().into();
        }
    }
    if ctx.dry_run {
        value["dryRun"] = json!(["All"]);
    }
    value
}
