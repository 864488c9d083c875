//! What a watcher sees is the list, and then the events.
//!
//! In: informers like the components', on connections with the round's faults: one that takes the server's own
//! objects, one that reads bytes. Out: violations. An informer never shows a state that is older than one that it
//! showed before, and nothing again that it showed as gone; at rest its cache equals the store.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use base::task::Tasks;
use client::{Informers, Kind, RawEvent, RawInformer};
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::{Node, Pod};

use crate::history::{History, Key};
use crate::network::Network;

const LAW: &str = "a watch shows the list and then each change, never an older state";
/// The part that reads bytes has a name that ends in 0.
const PARTS: [&str; 2] = ["observer-0", "observer-1"];

/// The informers of a round.
pub struct Observers(Vec<(&'static str, &'static str, RawInformer)>);

/// What was shown of an object.
#[derive(Default)]
struct Shown {
    uid: String,
    revision: u64,
    is_gone: bool,
}

impl Observers {
    pub fn start(network: &Network, history: &History, tasks: &Tasks) -> Self {
        let mut all = vec![];
        for part in PARTS {
            let client = network.client(part, "observer", &["system:masters"], "observer");
            let informers = Informers::new(client, tasks.clone());
            let raw = [
                ("pods", raw::<Pod>(&informers)),
                ("replicasets", raw::<ReplicaSet>(&informers)),
                ("minions", raw::<Node>(&informers)),
            ];
            for (resource, informer) in raw {
                follow(&informer, part, resource, history);
                all.push((part, resource, informer));
            }
        }
        Self(all)
    }

    /// Whether the caches are the state. Call it at rest.
    pub fn compare(&self, history: &History) {
        for (part, resource, informer) in &self.0 {
            let state = history.state().revisions(resource);
            let entries = informer.entries();
            let shown: BTreeMap<Key, u64> = entries
                .iter()
                .map(|entry| {
                    let key = &entry.header.key;
                    let version = entry.header.resource_version.parse().unwrap_or_default();
                    (Key::new(resource, &key.namespace, &key.name), version)
                })
                .collect();
            if shown != state {
                let missing = state.iter().find(|(key, version)| shown.get(key) != Some(version));
                let extra = shown.iter().find(|(key, _)| !state.contains_key(key));
                history.violate(
                    LAW,
                    format!("the cache of {part} is not the store's state at rest: {missing:?} {extra:?}"),
                );
            }
        }
    }
}

fn raw<T: Kind>(informers: &Informers) -> RawInformer {
    informers.metadata(&client::Gvr::of::<T>())
}

fn follow(informer: &RawInformer, part: &'static str, resource: &'static str, history: &History) {
    // Held for one event.
    let shown: Arc<Mutex<BTreeMap<Key, Shown>>> = Arc::default();
    let history = history.clone();
    informer.subscribe(move |event| {
        let header = &event.entry().header;
        let key = Key::new(resource, &header.key.namespace, &header.key.name);
        let revision: u64 = header.resource_version.parse().unwrap_or_default();
        let is_gone = matches!(event, RawEvent::Deleted(_));
        let mut shown = shown.lock().expect("no panic while held");
        let before = shown.entry(key.clone()).or_default();
        let is_same = before.uid == *header.uid;
        if is_same && (before.is_gone || revision < before.revision) {
            let what = if before.is_gone { "as gone" } else { "newer" };
            history.violate(
                LAW,
                format!(
                    "{part}: {key} at {revision} after it was shown {what} at {}",
                    before.revision
                ),
            );
        }
        *before = Shown { uid: header.uid.to_string(), revision, is_gone };
    });
}
