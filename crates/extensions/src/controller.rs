//! The controller of CRDs: accepts names, serves established CRDs, cleans up deleted ones.
//!
//! In: the CRDs' events from the watch cache. Out: their status, their registrations in the resource
//! table, the published schemas; at the end, the deletion of instances and of the finalizer.
//! Upstream: `controller/{status,establish,finalizer,openapi}`, as one loop.
//!
//! ```text
//!  created ─► names accepted ─► rows served ─► Established
//!  deleted ─► Terminating: rows read-only, instances deleted ─► rows gone ─► finalizer gone
//! ```
//!
//! A failed write is tried again after a pause, because no event follows it.
//! Invariant: kinds are registered before the condition `Established` is true, and removed before the
//! CRD is. A client that reads discovery after a CRD's event sees the right state.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use apiserver::StatusError;
use apiserver::cacher::{CacheEvent, Cursor};
use apiserver::registry::{DeleteOptions, Intent, ListOptions, Registry, Stored};
use apiserver::request::{Key, RequestContext, UserInfo};
use apiserver::resource::Resource;
use arc_swap::ArcSwap;
use base::backoff::Backoff;
use base::task::Tasks;
use bytes::Bytes;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionNames, CustomResourceDefinitionStatus,
};
use machinery::Object;
use tokio::time::Instant;

use crate::custom::{Kinds, Post};
use crate::definition::{FINALIZER, conditions};
use crate::names::{self, Taken};
use crate::openapi::{Published, PublishedKinds, definition_name};

type Crd = CustomResourceDefinition;

/// The interval between checks for instances with finalizers during a deletion.
const CLEANUP_WAIT: Duration = Duration::from_secs(60);

/// The first and the longest pause after a failure.
const RETRY: Duration = Duration::from_millis(200);
const RETRY_CEILING: Duration = Duration::from_secs(30);

/// The controller's state of a CRD.
struct Known {
    group: String,
    accepted: CustomResourceDefinitionNames,
    /// The currently served CRD.
    served: Option<Served>,
    bytes: Bytes,
}

struct Served {
    uid: Option<String>,
    generation: Option<i64>,
    names: CustomResourceDefinitionNames,
    is_terminating: bool,
    kinds: Kinds,
}

struct Controller {
    registry: Registry,
    published: Arc<ArcSwap<PublishedKinds>>,
    /// Calls conversion webhooks.
    post: Post,
    tasks: Tasks,
    /// By name. The lock is held for short reads. Only the loop writes; cleanups remove registrations.
    known: Mutex<BTreeMap<String, Known>>,
    /// CRDs whose instances are being deleted.
    cleaning: Mutex<BTreeSet<String>>,
    /// CRDs whose processing failed. No event follows, so the loop tries again.
    failed: Mutex<BTreeSet<String>>,
}

pub async fn start(
    registry: Registry,
    published: Arc<ArcSwap<PublishedKinds>>,
    post: Post,
    tasks: &Tasks,
) {
    let (now, cursor) = registry.follow::<Crd>().await;
    let controller = Arc::new(Controller {
        registry,
        published,
        post,
        tasks: tasks.clone(),
        known: Mutex::default(),
        cleaning: Mutex::default(),
        failed: Mutex::default(),
    });
    let crds: Vec<(Crd, Bytes)> = now.iter().filter_map(decoded).collect();
    // All registrations at once: each change of the table costs its whole length.
    let mut rows = vec![];
    for (crd, bytes) in &crds {
        rows.extend(controller.note(crd, bytes));
    }
    controller.registry.change_resources(|table| {
        rows.into_iter().for_each(|row| table.insert(Arc::new(row)));
    });
    controller.publish();
    tasks.spawn("custom-resources", async move {
        for (crd, _) in &crds {
            controller.sync_all(&crd.metadata.name.clone().unwrap_or_default()).await;
        }
        controller.run(cursor).await;
    });
}

fn decoded(stored: &Stored) -> Option<(Crd, Bytes)> {
    let object = match stored.object() {
        Ok(object) => object,
        Err(error) => {
            tracing::error!(%error, "failed to decode a CustomResourceDefinition");
            return None;
        }
    };
    Some((object.downcast::<Crd>()?.clone(), stored.bytes()))
}

fn name_of(crd: &Crd) -> String {
    crd.metadata.name.clone().unwrap_or_default()
}

fn accepted(crd: &Crd) -> CustomResourceDefinitionNames {
    crd.status.as_ref().and_then(|status| status.accepted_names.clone()).unwrap_or_default()
}

impl Controller {
    fn known(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Known>> {
        self.known.lock().expect("no panic under the lock")
    }

    /// Processes events until the tasks end, and retries failures.
    async fn run(self: Arc<Self>, mut cursor: Cursor) {
        let mut backoff = Backoff::new(RETRY, RETRY_CEILING).with_jitter(0.2);
        let mut retry_at = None;
        loop {
            let is_settled = self.failed().is_empty();
            if is_settled {
                backoff.reset();
                retry_at = None;
            } else {
                retry_at.get_or_insert_with(|| Instant::now() + backoff.step());
            }
            let retry = async move {
                tokio::time::sleep_until(retry_at.unwrap_or_else(Instant::now)).await
            };
            tokio::select! {
                events = cursor.next() => match events {
                    Ok(events) => self.apply_all(&events).await,
                    Err(error) => {
                        tracing::warn!(%error, "missed events of CustomResourceDefinitions; listing them again");
                        let (now, fresh) = self.registry.follow::<Crd>().await;
                        cursor = fresh;
                        self.reload(&now).await;
                    }
                },
                () = retry, if retry_at.is_some() => {
                    retry_at = None;
                    let failed = self.failed().clone();
                    for name in failed {
                        self.sync_all(&name).await;
                    }
                }
            }
        }
    }

    async fn apply_all(self: &Arc<Self>, events: &[CacheEvent]) {
        for event in events {
            let is_gone = event.entry.is_none();
            let Some(stored) = self.registry.stored_of::<Crd>(event) else { continue };
            let Some((crd, bytes)) = decoded(&stored) else { continue };
            self.apply(crd, bytes, is_gone).await;
        }
    }

    fn failed(&self) -> std::sync::MutexGuard<'_, BTreeSet<String>> {
        self.failed.lock().expect("no panic under the lock")
    }

    async fn apply(self: &Arc<Self>, crd: Crd, bytes: Bytes, is_gone: bool) {
        let name = name_of(&crd);
        if is_gone {
            self.forget(&name);
            self.known().remove(&name);
            // The names are free now. Other CRDs may want them.
            return self.sync_group(&crd.spec.group, &name).await;
        }
        if let Some(rows) = self.noted(&crd, &bytes) {
            self.serve(&crd, rows);
        }
        self.sync_all(&name).await;
    }

    /// After a gap in the events, forgets deleted CRDs and processes all others.
    async fn reload(self: &Arc<Self>, now: &[Stored]) {
        let crds: Vec<(Crd, Bytes)> = now.iter().filter_map(decoded).collect();
        let names: BTreeSet<String> = crds.iter().map(|(crd, _)| name_of(crd)).collect();
        let gone: Vec<String> =
            self.known().keys().filter(|name| !names.contains(*name)).cloned().collect();
        for name in gone {
            self.forget(&name);
            self.known().remove(&name);
        }
        for (crd, bytes) in crds {
            self.apply(crd, bytes, false).await;
        }
    }

    /// Records a CRD. Returns its registrations if it is established.
    fn note(&self, crd: &Crd, bytes: &Bytes) -> Vec<Resource> {
        self.noted(crd, bytes).unwrap_or_default()
    }

    /// Like [`note`](Self::note). `None` if the registrations have not changed.
    fn noted(&self, crd: &Crd, bytes: &Bytes) -> Option<Vec<Resource>> {
        let mut known = self.known();
        let entry = known.entry(name_of(crd)).or_insert_with(|| Known {
            group: crd.spec.group.clone(),
            accepted: CustomResourceDefinitionNames::default(),
            served: None,
            bytes: Bytes::new(),
        });
        entry.accepted = accepted(crd);
        entry.bytes = bytes.clone();
        if !conditions::is_true(crd, "Established") {
            return None;
        }
        let is_terminating = crd.metadata.deletion_timestamp.is_some();
        let (names, meta) = (accepted(crd), &crd.metadata);
        let same_spec = entry
            .served
            .take_if(|known| known.uid == meta.uid && known.generation == meta.generation);
        let is_same = same_spec
            .as_ref()
            .is_some_and(|known| known.names == names && known.is_terminating == is_terminating);
        let kinds = same_spec.map_or_else(|| Kinds::of(crd, &self.post), |known| known.kinds);
        let rows = (!is_same).then(|| kinds.rows(crd, is_terminating));
        let (uid, generation) = (meta.uid.clone(), meta.generation);
        entry.served = Some(Served { uid, generation, names, is_terminating, kinds });
        rows
    }

    /// Replaces the CRD's registrations in the table.
    fn serve(&self, crd: &Crd, rows: Vec<Resource>) {
        let (group, plural) = (&crd.spec.group, &crd.spec.names.plural);
        self.registry.change_resources(|table| {
            table.retain(|row| !(row.custom && row.group == *group && row.plural == *plural));
            for row in rows {
                // A built-in resource of the same name stays.
                if table.get(&row.group, &row.version, &row.plural).is_none() {
                    table.insert(Arc::new(row));
                }
            }
        });
        self.publish();
    }

    /// Removes a CRD's registrations from the table.
    fn forget(&self, name: &str) {
        let Some((plural, group)) = name.split_once('.') else { return };
        if let Some(known) = self.known().get_mut(name) {
            known.served = None;
        }
        self.registry.change_resources(|table| {
            table.retain(|row| !(row.custom && row.group == group && row.plural == plural));
        });
        self.publish();
    }

    /// Publishes the schemas of registered kinds.
    fn publish(&self) {
        let table = self.registry.resources();
        let known = self.known();
        let mut kinds = PublishedKinds::new();
        for row in table.iter().filter(|row| row.custom) {
            let name = format!("{}.{}", row.plural, row.group);
            let Some(known) = known.get(&name) else { continue };
            kinds.insert(
                definition_name(&row.group, &row.version, &row.kind),
                Published {
                    group: row.group.clone(),
                    version: row.version.clone(),
                    kind: row.kind.clone(),
                    crd: known.bytes.clone(),
                },
            );
        }
        self.published.store(Arc::new(kinds));
    }

    /// Processes a CRD. If its names changed, queues the other CRDs of its group.
    async fn sync_all(self: &Arc<Self>, name: &str) {
        let before =
            self.known().get(name).map(|known| (known.group.clone(), known.accepted.clone()));
        self.try_sync(name).await;
        let after =
            self.known().get(name).map(|known| (known.group.clone(), known.accepted.clone()));
        if let (Some((group, before)), Some((_, after))) = (before, after)
            && before != after
        {
            self.sync_group(&group, name).await;
        }
    }

    async fn sync_group(self: &Arc<Self>, group: &str, except: &str) {
        let others: Vec<String> = {
            let known = self.known();
            let of_group = |(name, one): &(&String, &Known)| one.group == group && *name != except;
            known.iter().filter(of_group).map(|(name, _)| name.clone()).collect()
        };
        for name in others {
            self.try_sync(&name).await;
        }
    }

    async fn try_sync(self: &Arc<Self>, name: &str) {
        match self.sync(name).await {
            Ok(()) => {
                self.failed().remove(name);
            }
            Err(error) => {
                tracing::warn!(crd = name, %error, "failed to process CustomResourceDefinition; will retry");
                self.failed().insert(name.to_owned());
            }
        }
    }

    async fn sync(self: &Arc<Self>, name: &str) -> Result<(), StatusError> {
        let Some(crd) = self.registry.find::<Crd>("", name).await? else { return Ok(()) };
        if crd.metadata.deletion_timestamp.is_some() {
            self.clean_up(&crd);
            return Ok(());
        }
        let names = accepted(&crd);
        let settled = crd.spec.names == names && conditions::is_true(&crd, "Established");
        if settled {
            return Ok(());
        }
        let (names, naming) = names::accept(&crd.spec.names, &names, &self.taken(&crd));
        let mut fresh = crd.clone();
        let status = fresh.status.get_or_insert_default();
        status.accepted_names = Some(names);
        let is_accepted = naming.status == "True";
        conditions::set(status, naming);
        let was_established = conditions::is_true(&crd, "Established");
        if is_accepted && !was_established {
            let message = "the initial names have been accepted";
            let established = conditions::new("Established", true, "InitialNamesAccepted", message);
            conditions::set(status, established);
            self.serve_first(&fresh);
        } else if !was_established {
            let message = "not all names are accepted";
            conditions::set(status, conditions::new("Established", false, "NotAccepted", message));
        }
        if fresh.status == crd.status {
            return Ok(());
        }
        self.write_status(&fresh).await
    }

    /// Registers the kinds of a CRD before it becomes established.
    fn serve_first(&self, crd: &Crd) {
        let bytes = Bytes::from(crd.encode());
        if let Some(rows) = self.noted(crd, &bytes) {
            self.serve(crd, rows);
        }
    }

    /// The names of the other CRDs of the group.
    fn taken(&self, crd: &Crd) -> Taken {
        let mut taken = Taken::default();
        for (_, one) in self.known().iter().filter(|(_, one)| one.group == crd.spec.group) {
            taken.add(&one.accepted);
        }
        taken
    }

    fn context(&self, subresource: &str) -> RequestContext {
        let mut ctx = self.registry.own_context::<Crd>();
        ctx.subresource = subresource.into();
        ctx
    }

    async fn write_status(&self, crd: &Crd) -> Result<(), StatusError> {
        let status = crd.status.clone();
        let generation = crd.metadata.generation;
        let key = Key::new("", name_of(crd));
        let modify = move |object: &mut dyn Object| {
            let now = object.expect_mut::<Crd>();
            // The CRD changed meanwhile. The next event processes it again.
            if now.metadata.generation == generation {
                let stored = now.status.as_ref().and_then(|status| status.stored_versions.clone());
                now.status = status.clone().map(|status| CustomResourceDefinitionStatus {
                    stored_versions: stored,
                    ..status
                });
            }
            Ok(())
        };
        let intent = Intent::Modify(Box::new(modify));
        let written = self.registry.write(&self.context("status"), &key, intent).await;
        match written {
            Ok(_) => {
                if let Some(known) = self.known().get_mut(&key.name) {
                    known.accepted = accepted(crd);
                }
                Ok(())
            }
            Err(error) if error.is(machinery::status::Reason::NotFound) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Deletes the instances of a deleted CRD, then removes its finalizer. One task per CRD at a time.
    fn clean_up(self: &Arc<Self>, crd: &Crd) {
        let waits = crd.metadata.finalizers.iter().flatten().any(|one| one == FINALIZER);
        let name = name_of(crd);
        let is_new =
            waits && self.cleaning.lock().expect("no panic under the lock").insert(name.clone());
        if !is_new {
            return;
        }
        let (this, crd) = (self.clone(), crd.clone());
        self.tasks.spawn("custom-resource-cleanup", async move {
            let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(30));
            while let Err(error) = this.terminate(&crd).await {
                tracing::warn!(crd = name, %error, "failed to delete the instances of CustomResourceDefinition; will retry");
                tokio::time::sleep(backoff.step()).await;
            }
            this.cleaning.lock().expect("no panic under the lock").remove(&name);
        });
    }

    async fn terminate(&self, crd: &Crd) -> Result<(), StatusError> {
        let name = name_of(crd);
        let condition = if conditions::is_true(crd, "Established") {
            let (reason, message) =
                ("InstanceDeletionInProgress", "CustomResource deletion is in progress");
            self.set_terminating(crd, true, reason, message).await?;
            if let Err(error) = self.delete_instances(crd).await {
                let message = format!("could not issue all deletes: {error}");
                self.set_terminating(crd, true, "InstanceDeletionFailed", &message).await?;
                return Err(error);
            }
            ("InstanceDeletionCompleted", "removed all instances")
        } else {
            ("NeverEstablished", "resource was never established")
        };
        self.forget(&name);
        let (reason, message) = condition;
        let (reason, message) = (reason.to_owned(), message.to_owned());
        let modify = move |object: &mut dyn Object| {
            let now = object.expect_mut::<Crd>();
            let status = now.status.get_or_insert_default();
            conditions::set(status, conditions::new("Terminating", false, &reason, &message));
            if let Some(finalizers) = &mut now.metadata.finalizers {
                finalizers.retain(|one| one != FINALIZER);
            }
            now.metadata.finalizers.take_if(|finalizers| finalizers.is_empty());
            Ok(())
        };
        let intent = Intent::Modify(Box::new(modify));
        let key = Key::new("", name);
        match self.registry.write(&self.context("status"), &key, intent).await {
            Err(error) if !error.is(machinery::status::Reason::NotFound) => Err(error),
            _ => Ok(()),
        }
    }

    async fn set_terminating(
        &self,
        crd: &Crd,
        is_true: bool,
        reason: &str,
        message: &str,
    ) -> Result<(), StatusError> {
        let (reason, message) = (reason.to_owned(), message.to_owned());
        let modify = move |object: &mut dyn Object| {
            let status = object.expect_mut::<Crd>().status.get_or_insert_default();
            conditions::set(status, conditions::new("Terminating", is_true, &reason, &message));
            Ok(())
        };
        let intent = Intent::Modify(Box::new(modify));
        let key = Key::new("", name_of(crd));
        self.registry.write(&self.context("status"), &key, intent).await.map(drop)
    }

    /// Deletes all instances, and returns when none is left.
    async fn delete_instances(&self, crd: &Crd) -> Result<(), StatusError> {
        let row = Kinds::of(crd, &self.post).stored_row(crd).map(Arc::new);
        let row = row.ok_or_else(|| StatusError::internal("there is no storage version"))?;
        let ctx = RequestContext::new(UserInfo::apiserver(), row.clone(), "");
        let (all, options) = (ListOptions::default(), DeleteOptions::default());
        let list = self.registry.delete_collection(&ctx, "", &all, &options, 1).await?;
        if list.items.is_empty() {
            return Ok(());
        }
        let wait = self.wait_until_empty(&row);
        match tokio::time::timeout(CLEANUP_WAIT, wait).await {
            Ok(done) => done,
            Err(_) => Err(StatusError::internal(
                "could not confirm zero CustomResources remaining: timed out waiting for the condition",
            )),
        }
    }

    async fn wait_until_empty(&self, row: &Arc<Resource>) -> Result<(), StatusError> {
        use futures::StreamExt;
        loop {
            let all = ListOptions::default();
            let list = self.registry.list(row, "", &all).await?;
            if list.items.is_empty() {
                return Ok(());
            }
            let resource_version = Some(list.revision.to_string());
            let options = ListOptions { resource_version, ..ListOptions::default() };
            let mut events = self.registry.watch(row, "", &options).await?;
            // Any event may be the deletion of the last instance.
            if events.next().await.is_none() {
                return Err(StatusError::internal("the watch for instances ended"));
            }
        }
    }
}
