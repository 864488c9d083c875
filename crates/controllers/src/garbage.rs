//! The garbage collector: what has lost its owners goes.
//!
//! In: metadata of every resource that can be listed, watched and deleted. Out: deletions, owner
//! references and finalizers removed.
//! Upstream: `pkg/controller/garbagecollector`. Its graph is here the owner index that every
//! informer keeps: dependents are looked up by the owner's uid, owners by name.
//!
//! | the owner is deleted with | meanwhile |
//! |---|---|
//! | Background | the owner is gone; dependents whose owners are all gone follow |
//! | Foreground (finalizer `foregroundDeletion`) | blocking dependents go first, then the owner |
//! | Orphan (finalizer `orphan`) | dependents lose their reference first, then the owner goes |
//!
//! Invariant: nothing is deleted on the word of a cache: the item and an owner that seems absent
//! are asked for at the API.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use base::backoff::Backoff;
use client::discovery::{self, Discovered};
use client::{
    Client, Entry, ErrorExt, Gvr, Header, Informers, ObjectKey, Outcome, RawEvent, RawInformer,
    Result, WorkQueue,
};
use http::Method;
use machinery::{ObjectMeta, OwnerReference};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::descriptor::{Descriptor, Row, first, task};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller, Item> {
    name: "garbage-collector-controller",
    account: "generic-garbage-collector",
    component: "generic-garbage-collector",
    queue: "garbage_collector_attempt_to_delete",
    workers: 20,
    new: |setup| {
        Some(Controller {
            client: setup.client.clone(),
            informers: setup.informers.clone(),
            queue: setup.queue.clone(),
            monitors: RwLock::default(),
            absent: Mutex::default(),
            rediscover: Notify::new(),
        })
    },
    watches: &[
        &first(|this: Arc<Controller>| {
            Box::pin(async move {
                this.discover().await;
                this.wait_synced().await;
            })
        }),
        &task(|this: Arc<Controller>| Box::pin(this.follow_discovery())),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

/// Decisions about foreground deletion wait until the graph is complete, but only for this time.
const SYNC_LIMIT: Duration = Duration::from_secs(30);
const FOREGROUND: &str = "foregroundDeletion";
const ORPHAN: &str = "orphan";
const ABSENT_KNOWN: usize = 500;
const MERGE: &str = "application/merge-patch+json";

/// One object, by where it is and which one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Item {
    gvr: Gvr,
    key: ObjectKey,
    uid: Arc<str>,
}

struct Monitor {
    resource: Discovered,
    informer: RawInformer,
}

struct Controller {
    client: Client,
    informers: Informers,
    queue: WorkQueue<Item>,
    /// Guards the set of watched resources; written when discovery changes.
    monitors: RwLock<BTreeMap<Gvr, Monitor>>,
    /// Guards the owners that the API said are gone, each where it was looked for: a reference may
    /// have the uid of what lives elsewhere. A hint, bounded.
    absent: Mutex<HashSet<Item>>,
    rediscover: Notify,
}

impl Controller {
    async fn follow_discovery(self: Arc<Self>) {
        loop {
            self.rediscover.notified().await;
            self.discover().await;
        }
    }

    /// Follows discovery: watches new resources, forgets removed ones.
    async fn discover(self: &Arc<Self>) {
        let mut backoff =
            Backoff::new(Duration::from_millis(200), Duration::from_secs(30)).with_jitter(0.2);
        loop {
            match discovery::preferred(&self.client).await {
                Ok((resources, complete)) => {
                    self.follow(resources, complete);
                    if complete {
                        return;
                    }
                }
                Err(error) => {
                    tracing::warn!(
                        error = error.text(),
                        "failed to read discovery for the garbage collector"
                    )
                }
            }
            tokio::time::sleep(backoff.step()).await;
        }
    }

    fn follow(self: &Arc<Self>, resources: Vec<Discovered>, complete: bool) {
        let wanted: BTreeMap<_, _> = resources
            .into_iter()
            .filter(is_collectable)
            .map(|one| (one.gvr.clone(), one))
            .collect();
        let known: BTreeSet<_> = self.monitors().keys().cloned().collect();
        // The resources of a group that does not answer are kept: it may come back.
        for gvr in known.iter().filter(|gvr| complete && !wanted.contains_key(*gvr)) {
            self.informers.forget(gvr);
            self.monitors.write().expect("no panic while held").remove(gvr);
        }
        for (gvr, resource) in wanted.into_iter().filter(|(gvr, _)| !known.contains(gvr)) {
            let informer = self.informers.metadata(&gvr);
            let monitor = Monitor { resource, informer: informer.clone() };
            self.monitors.write().expect("no panic while held").insert(gvr.clone(), monitor);
            let this = Arc::downgrade(self);
            informer.subscribe(move |event| {
                if let Some(this) = this.upgrade() {
                    this.event(&gvr, event);
                }
            });
        }
    }

    async fn wait_synced(&self) {
        let all: Vec<_> = self.monitors().values().map(|one| one.informer.clone()).collect();
        let synced = async {
            for informer in all {
                informer.synced().await;
            }
        };
        if tokio::time::timeout(SYNC_LIMIT, synced).await.is_err() {
            tracing::warn!("the garbage collector starts before every resource is listed");
        }
    }

    fn monitors(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<Gvr, Monitor>> {
        self.monitors.read().expect("no panic while held")
    }

    fn event(&self, gvr: &Gvr, event: &RawEvent) {
        if gvr.resource == "customresourcedefinitions" || gvr.resource == "apiservices" {
            self.rediscover.notify_one();
        }
        let header = &event.entry().header;
        let item = Item { gvr: gvr.clone(), key: header.key.clone(), uid: header.uid.clone() };
        match event {
            RawEvent::Deleted(_) => {
                self.dependents(&header.uid).into_iter().for_each(|(item, _)| self.queue.add(item));
                // An owner may wait for its last dependent.
                for owner in &header.owners {
                    self.owner_item(owner, &header.key)
                        .into_iter()
                        .for_each(|owner| self.queue.add(owner));
                }
            }
            RawEvent::Applied { old, new } => {
                let same = old.as_ref().is_some_and(|old| {
                    let (old, new) = (&old.header, &new.header);
                    (&old.owners, &old.finalizers, old.deleting)
                        == (&new.owners, &new.finalizers, new.deleting)
                });
                // Whom it blocked until now need not wait for it any more.
                for owner in old.iter().flat_map(|old| unblocked(&old.header, header)) {
                    self.owner_item(owner, &header.key)
                        .into_iter()
                        .for_each(|owner| self.queue.add(owner));
                }
                let waits = header.deleting && (has(header, FOREGROUND) || has(header, ORPHAN));
                if !same && (waits || !header.owners.is_empty()) {
                    self.queue.add(item);
                }
            }
        }
    }

    /// Everything with a reference to `uid`, with its header's entry.
    fn dependents(&self, uid: &str) -> Vec<(Item, Arc<Entry>)> {
        let monitors = self.monitors();
        let of = |(gvr, monitor): (&Gvr, &Monitor)| {
            let entries = monitor.informer.by_owner(uid);
            let gvr = gvr.clone();
            entries.into_iter().map(move |entry| {
                let header = &entry.header;
                (Item { gvr: gvr.clone(), key: header.key.clone(), uid: header.uid.clone() }, entry)
            })
        };
        monitors.iter().flat_map(of).collect()
    }

    fn owner_item(&self, owner: &OwnerReference, dependent: &ObjectKey) -> Option<Item> {
        let group = owner.api_version.split_once('/').map_or("", |(group, _)| group);
        let monitors = self.monitors();
        let found = monitors
            .values()
            .find(|one| one.resource.gvr.group == group && one.resource.kind == owner.kind)?;
        let namespace = if found.resource.namespaced { &*dependent.namespace } else { "" };
        Some(Item {
            gvr: found.resource.gvr.clone(),
            key: ObjectKey::new(namespace, &owner.name),
            uid: owner.uid.as_str().into(),
        })
    }

    fn cached(&self, item: &Item) -> Option<Arc<Entry>> {
        let informer = self.monitors().get(&item.gvr)?.informer.clone();
        informer.get(&item.key).filter(|entry| entry.header.uid == item.uid)
    }

    async fn reconcile(&self, item: &Item) -> Result<Outcome> {
        let Some(entry) = self.cached(item) else {
            return Ok(Outcome::Done);
        };
        let header = &entry.header;
        if header.deleting && has(header, ORPHAN) {
            return self.orphan(item).await;
        }
        if header.deleting && has(header, FOREGROUND) {
            return self.finish_foreground(item).await;
        }
        if header.deleting || header.owners.is_empty() {
            return Ok(Outcome::Done);
        }
        self.attempt_to_delete(item, header).await
    }

    /// The dependents lose their reference, then the owner its finalizer.
    async fn orphan(&self, item: &Item) -> Result<Outcome> {
        for (dependent, _) in self.dependents(&item.uid) {
            self.drop_owners(&dependent, &BTreeSet::from([item.uid.to_string()])).await?;
        }
        self.drop_finalizer(item, ORPHAN).await
    }

    async fn finish_foreground(&self, item: &Item) -> Result<Outcome> {
        let blocks = |entry: &Entry| {
            let mut ours = entry.header.owners.iter().filter(|owner| owner.uid == *item.uid);
            ours.any(|owner| owner.block_owner_deletion == Some(true))
        };
        let blocking: Vec<_> =
            self.dependents(&item.uid).into_iter().filter(|(_, entry)| blocks(entry)).collect();
        if blocking.is_empty() {
            return self.drop_finalizer(item, FOREGROUND).await;
        }
        for (dependent, entry) in blocking {
            if !entry.header.deleting {
                self.queue.add(dependent);
            }
        }
        Ok(Outcome::Done)
    }

    async fn attempt_to_delete(&self, item: &Item, header: &Header) -> Result<Outcome> {
        // Most items: every owner is in the cache and stays.
        let solid_in_cache = |owner: &OwnerReference| {
            let known = self.owner_item(owner, &item.key).and_then(|owner| self.cached(&owner));
            known.is_some_and(|known| !(known.header.deleting && has(&known.header, FOREGROUND)))
        };
        if header.owners.iter().all(solid_in_cache) {
            return Ok(Outcome::Done);
        }
        let Some(live) = self.live(item).await? else {
            return Ok(Outcome::Done);
        };
        let owners = live.owner_references.clone().unwrap_or_default();
        let (mut solid, mut dangling, mut waiting) = (0, BTreeSet::new(), BTreeSet::new());
        for owner in &owners {
            match self.owner_state(owner, item).await? {
                OwnerState::Solid => solid += 1,
                OwnerState::Dangling => drop(dangling.insert(owner.uid.clone())),
                OwnerState::Waiting => drop(waiting.insert(owner.uid.clone())),
                OwnerState::Unknown => return Ok(Outcome::Backoff),
            }
        }
        if dangling.is_empty() && waiting.is_empty() {
            return Ok(Outcome::Done);
        }
        if solid > 0 {
            dangling.append(&mut waiting);
            self.drop_owners(item, &dangling).await?;
            return Ok(Outcome::Done);
        }
        let finalizers = live.finalizers.clone().unwrap_or_default();
        let wants = |finalizer: &str| finalizers.iter().any(|one| one == finalizer);
        let dependents = self.dependents(&item.uid);
        let policy = if !waiting.is_empty() && !dependents.is_empty() {
            // A dependent that waits for its own dependents might wait for us: break the circle.
            if dependents.iter().any(|(_, one)| one.header.deleting && has(&one.header, FOREGROUND))
            {
                self.unblock(item, &live).await?;
            }
            "Foreground"
        } else if wants(ORPHAN) {
            "Orphan"
        } else if wants(FOREGROUND) {
            "Foreground"
        } else {
            "Background"
        };
        self.delete(item, policy).await
    }

    /// How an owner reference stands.
    async fn owner_state(&self, owner: &OwnerReference, item: &Item) -> Result<OwnerState> {
        let Some(target) = self.owner_item(owner, &item.key) else {
            return Ok(OwnerState::Unknown);
        };
        if self.absent.lock().expect("no panic while held").contains(&target) {
            return Ok(OwnerState::Dangling);
        }
        if item.key.namespace.is_empty() && !target.key.namespace.is_empty() {
            return Ok(OwnerState::Solid); // a reference that cannot be: never act on it
        }
        let live = match self.cached(&target) {
            Some(known) => Some(known.header.deleting && has(&known.header, FOREGROUND)),
            None => self.live(&target).await?.map(|meta| {
                let finalizers = meta.finalizers.unwrap_or_default();
                meta.deletion_timestamp.is_some() && finalizers.iter().any(|one| one == FOREGROUND)
            }),
        };
        Ok(match live {
            Some(true) => OwnerState::Waiting,
            Some(false) => OwnerState::Solid,
            None => {
                let mut absent = self.absent.lock().expect("no panic while held");
                if absent.len() >= ABSENT_KNOWN {
                    absent.clear();
                }
                absent.insert(target);
                OwnerState::Dangling
            }
        })
    }

    /// The metadata as the API has it now, if it is still that object.
    async fn live(&self, item: &Item) -> Result<Option<ObjectMeta>> {
        #[derive(Deserialize)]
        struct Partial {
            metadata: ObjectMeta,
        }
        match self.client.get::<Partial>(&self.path(item)).await {
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
            Ok(found) => {
                Ok(Some(found.metadata).filter(|meta| meta.uid.as_deref() == Some(&item.uid)))
            }
        }
    }

    fn path(&self, item: &Item) -> String {
        let namespace = Some(&*item.key.namespace).filter(|namespace| !namespace.is_empty());
        item.gvr.object(namespace, &item.key.name)
    }

    async fn delete(&self, item: &Item, policy: &str) -> Result<Outcome> {
        let options = json!({
            "kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": policy,
            "preconditions": {"uid": item.uid},
        });
        let sent = self
            .client
            .call(Method::DELETE, &self.path(item), "application/json", options.to_string())
            .await;
        match sent {
            Err(error) if error.is_not_found() => Ok(Outcome::Done),
            Err(error) if error.is_conflict() => Ok(Outcome::Backoff),
            done => done.map(|_| Outcome::Done),
        }
    }

    async fn patch(&self, item: &Item, live: &ObjectMeta, mut metadata: Value) -> Result<()> {
        metadata["resourceVersion"] = live.resource_version.clone().unwrap_or_default().into();
        metadata["uid"] = (*item.uid).into();
        let patch = json!({ "metadata": metadata }).to_string();
        match self.client.call(Method::PATCH, &self.path(item), MERGE, patch).await {
            Err(error) if error.is_not_found() => Ok(()),
            done => done.map(drop),
        }
    }

    async fn drop_owners(&self, item: &Item, gone: &BTreeSet<String>) -> Result<()> {
        let Some(live) = self.live(item).await? else {
            return Ok(());
        };
        let mut owners = live.owner_references.clone().unwrap_or_default();
        owners.retain(|owner| !gone.contains(&owner.uid));
        let owners = if owners.is_empty() { Value::Null } else { json!(owners) };
        self.patch(item, &live, json!({ "ownerReferences": owners })).await
    }

    async fn unblock(&self, item: &Item, live: &ObjectMeta) -> Result<()> {
        let mut owners = live.owner_references.clone().unwrap_or_default();
        owners.iter_mut().for_each(|owner| owner.block_owner_deletion = Some(false));
        self.patch(item, live, json!({ "ownerReferences": owners })).await
    }

    async fn drop_finalizer(&self, item: &Item, finalizer: &str) -> Result<Outcome> {
        let Some(live) = self.live(item).await? else {
            return Ok(Outcome::Done);
        };
        let mut finalizers = live.finalizers.clone().unwrap_or_default();
        let before = finalizers.len();
        finalizers.retain(|one| one != finalizer);
        if finalizers.len() != before {
            let finalizers = if finalizers.is_empty() { Value::Null } else { json!(finalizers) };
            self.patch(item, &live, json!({ "finalizers": finalizers })).await?;
        }
        Ok(Outcome::Done)
    }
}

enum OwnerState {
    Solid,
    /// Gone.
    Dangling,
    /// Going, and waiting for its dependents.
    Waiting,
    /// The owner's kind is unknown to discovery.
    Unknown,
}

/// The owners whose deletion waited for the object as it was, and does not for what it is now.
fn unblocked<'a>(old: &'a Header, new: &Header) -> Vec<&'a OwnerReference> {
    let blocks = |owner: &&OwnerReference| owner.block_owner_deletion == Some(true);
    let still = |owner: &OwnerReference| {
        new.owners.iter().filter(blocks).any(|other| other.uid == owner.uid)
    };
    old.owners.iter().filter(blocks).filter(|owner| !still(owner)).collect()
}

fn has(header: &Header, finalizer: &str) -> bool {
    header.finalizers.iter().any(|one| one == finalizer)
}

/// Upstream: `DefaultIgnoredResources`: events come and go by themselves.
fn is_collectable(resource: &Discovered) -> bool {
    resource.gvr.resource != "events"
        && ["list", "watch", "delete"].iter().all(|verb| resource.can(verb))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn header(owners: &[(&str, bool)]) -> Header {
        let owner = |(uid, blocks): &(&str, bool)| OwnerReference {
            uid: (*uid).to_owned(),
            block_owner_deletion: Some(*blocks),
            ..OwnerReference::default()
        };
        Header {
            key: ObjectKey::new("ns", "one"),
            uid: "u".into(),
            resource_version: String::new(),
            generation: 0,
            labels: machinery::Pairs::default(),
            owners: owners.iter().map(owner).collect(),
            finalizers: vec![],
            deleting: false,
        }
    }

    /// A reference across namespaces made its owner's uid count as gone everywhere.
    #[tokio::test]
    async fn what_is_absent_here_may_live_there() {
        let gvr = Gvr::new("", "v1", "configmaps");
        let client = testing::client(|request| match request.path() {
            "/api/v1/namespaces/a/configmaps/owner" => Some(json!({"metadata": {"uid": "u"}})),
            "/api/v1/configmaps" => {
                Some(json!({"metadata": {"resourceVersion": "1"}, "items": []}))
            }
            _ => None,
        });
        let tasks = base::task::Tasks::new("test");
        let informers = Informers::new(client.clone(), tasks.clone());
        let resource = Discovered {
            gvr: gvr.clone(),
            kind: "ConfigMap".into(),
            namespaced: true,
            verbs: vec![],
        };
        let monitor = Monitor { resource, informer: informers.metadata(&gvr) };
        let controller = Controller {
            client,
            informers,
            queue: WorkQueue::new("test"),
            monitors: RwLock::new([(gvr.clone(), monitor)].into()),
            absent: Mutex::default(),
            rediscover: Notify::new(),
        };
        let owner = |name: &str| OwnerReference {
            api_version: "v1".into(),
            kind: "ConfigMap".into(),
            name: name.into(),
            uid: "u".into(),
            ..OwnerReference::default()
        };
        // In this order: each answer is remembered, and right for its own reference only.
        for (namespace, name, is_there) in [
            ("b", "owner", false),
            ("a", "other", false),
            ("a", "owner", true),
            ("b", "owner", false),
        ] {
            let key = ObjectKey::new(namespace, "dependent");
            let item = Item { gvr: gvr.clone(), key, uid: "d".into() };
            let standing = controller.owner_state(&owner(name), &item).await.expect("an answer");
            let right = match standing {
                OwnerState::Solid => is_there,
                OwnerState::Dangling => !is_there,
                OwnerState::Waiting | OwnerState::Unknown => false,
            };
            assert!(right, "{namespace}/{name}");
        }
        tasks.shutdown(Duration::from_secs(5)).await;
    }

    /// A circle of owners was never deleted: the last owner, which was no longer blocked, was not queued.
    #[test]
    fn owners_that_are_blocked_no_more_are_told() {
        let old = header(&[("a", true), ("b", true), ("c", false)]);
        for (new, expected) in [
            (header(&[("a", true), ("b", true)]), vec![]),
            (header(&[("a", false), ("b", true)]), vec!["a"]),
            (header(&[("c", false)]), vec!["a", "b"]),
        ] {
            let found: Vec<&str> =
                unblocked(&old, &new).iter().map(|owner| owner.uid.as_str()).collect();
            assert_eq!(found, expected);
        }
    }
}
