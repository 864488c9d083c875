//! The objects that match a selector: the pods of a Service or of a PodDisruptionBudget.
//!
//! In: selectors by the key of their owner, headers of objects. Out: the keys of the objects that an owner
//! selects. A change of an object costs what [`Selectors::matching`] costs. Only a new selector looks through
//! its namespace, by headers.
//!
//! Invariant: the members agree with the objects' cache when the handlers that subscribed after them run.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use machinery::selector::Selector;

use crate::cache::{Entry, ObjectKey};
use crate::informer::{Event, Informer, Lister, RawEvent};
use crate::resource::Kind;
use crate::selected::Selectors;

/// Cheap to clone; clones share the members.
pub struct Members<O> {
    selectors: Selectors,
    objects: Lister<O>,
    /// Guards the members by owner. Held while a namespace is looked through, so that no change of an object
    /// is lost between the look and the answer.
    known: Arc<Mutex<HashMap<ObjectKey, BTreeSet<ObjectKey>>>>,
}

impl<O> Clone for Members<O> {
    fn clone(&self) -> Self {
        Self {
            selectors: self.selectors.clone(),
            objects: self.objects.clone(),
            known: self.known.clone(),
        }
    }
}

impl<O: Kind> Members<O> {
    /// Follows the selectors of all objects of the kind `T`, as `selector` reads them.
    pub fn of<T: Kind>(
        owners: &Informer<T>,
        selector: impl Fn(&T) -> Selector + Send + Sync + 'static,
        objects: &Informer<O>,
    ) -> Self {
        let members = Self {
            selectors: Selectors::default(),
            objects: objects.lister(),
            known: Arc::default(),
        };
        let this = members.clone();
        owners.subscribe(move |event| match event {
            Event::Applied { new, .. } => this.select(event.key(), selector(new)),
            Event::Deleted(_) => this.forget(&event.key()),
        });
        let this = members.clone();
        objects.subscribe_raw(move |event| this.hear(event));
        members
    }

    /// The members by owner.
    pub fn selectors(&self) -> &Selectors {
        &self.selectors
    }

    /// The objects that the owner's selector selects, in the order of names.
    pub fn get(&self, owner: &ObjectKey) -> Vec<Arc<Entry>> {
        let keys: Vec<ObjectKey> = self.known().get(owner).into_iter().flatten().cloned().collect();
        keys.iter().filter_map(|key| self.objects.entry(key)).collect()
    }

    fn select(&self, owner: ObjectKey, selector: Selector) {
        let mut known = self.known();
        if self.selectors.get(&owner).as_ref() == Some(&selector) {
            return;
        }
        // An empty selector needs no scan.
        let found = match selector == Selector::nothing() {
            true => BTreeSet::new(),
            false => {
                let all = self.objects.entries(Some(&owner.namespace), &selector);
                all.iter().map(|entry| entry.header.key.clone()).collect()
            }
        };
        self.selectors.put(owner.clone(), selector);
        known.insert(owner, found);
    }

    fn forget(&self, owner: &ObjectKey) {
        let mut known = self.known();
        self.selectors.remove(owner);
        known.remove(owner);
    }

    fn hear(&self, event: &RawEvent) {
        let header = &event.entry().header;
        let mut known = self.known();
        let (old, new) = match event {
            RawEvent::Applied { old: Some(old), new } if old.header.labels == new.header.labels => {
                return;
            }
            RawEvent::Applied { old, new } => (old.as_ref(), Some(new)),
            RawEvent::Deleted(old) => (Some(old), None),
        };
        let owners = |entry: Option<&Arc<Entry>>| {
            let labels = entry.map(|entry| &entry.header.labels);
            labels.map(|labels| self.selectors.matching(&header.key.namespace, &[labels]))
        };
        for owner in owners(old).into_iter().flatten() {
            if let Some(all) = known.get_mut(&owner) {
                all.remove(&header.key);
            }
        }
        for owner in owners(new).into_iter().flatten() {
            known.entry(owner).or_default().insert(header.key.clone());
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<ObjectKey, BTreeSet<ObjectKey>>> {
        self.known.lock().expect("no panic while held")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use base::task::Tasks;
    use k8s_openapi::api::core::v1::ConfigMap;
    use tokio::sync::mpsc;

    use super::*;
    use crate::fake::Fake;
    use crate::informer::Informers;

    /// The fake's objects have a label `app`, which is their data, too.
    #[tokio::test(start_paused = true)]
    async fn members_follow_owners_and_objects() {
        let (fake, tasks) = (Fake::default(), Tasks::new("test"));
        for (name, data) in [("a", "x"), ("b", "x"), ("c", "y")] {
            fake.put(name, data);
        }
        let objects = Informers::new(fake.client(), tasks.clone()).of::<ConfigMap>();
        objects.synced().await;
        let owners = Fake::default();
        owners.put("owner", "x");
        let informer = Informers::new(owners.client(), tasks.clone()).of::<ConfigMap>();
        let selector = |owner: &ConfigMap| {
            let data = owner.data.clone().unwrap_or_default();
            Selector::parse_labels(&format!("app={}", data["v"])).expect("a selector")
        };
        let members = Members::of(&informer, selector, &objects);
        let (sender, mut events) = mpsc::unbounded_channel();
        for one in [&informer, &objects] {
            let sender = sender.clone();
            one.subscribe_raw(move |_| sender.send(()).expect("the test listens"));
        }
        let mut heard = async |count: usize| {
            for _ in 0..count {
                let event = tokio::time::timeout(Duration::from_secs(90), events.recv()).await;
                event.expect("an event comes").expect("handlers live");
            }
        };
        let key = ObjectKey::new("default", "owner");
        let check = |expected: &[&str]| {
            let all = members.get(&key);
            let names: Vec<_> = all.iter().map(|entry| &*entry.header.key.name).collect();
            assert_eq!(names, expected);
        };
        heard(4).await;
        check(&["a", "b"]);
        fake.put("c", "x");
        fake.put("a", "y");
        heard(2).await;
        check(&["b", "c"]);
        fake.delete("b");
        heard(1).await;
        check(&["c"]);
        owners.put("owner", "y");
        heard(1).await;
        check(&["a"]);
        owners.delete("owner");
        heard(1).await;
        check(&[]);
        tasks.shutdown(Duration::from_secs(1)).await;
    }
}
