//! What has changed and is not in the rules yet.
//!
//! In: informers' events, on their tasks, and new pods of the kubelet. Out: all of it at once, for one
//! transaction. Bounded by the number of objects: a key has only its latest state.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use client::ObjectKey;
use ipnet::IpNet;
use machinery::Pairs;
use tokio::sync::{Notify, oneshot};

use crate::objects::{PodFacts, PolicyFacts};

/// Cheap to clone; clones are the same.
#[derive(Clone, Default)]
pub struct Inbox(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// Held only to add or take something.
    waiting: Mutex<Changes>,
    changed: Notify,
}

#[derive(Default)]
pub struct Changes {
    pub pods: BTreeMap<ObjectKey, PodChange>,
    pub namespaces: BTreeMap<String, Option<Pairs>>,
    pub policies: BTreeMap<ObjectKey, Option<PolicyFacts>>,
    pub cidrs: Option<Vec<IpNet>>,
    pub announced: Vec<Announced>,
}

pub enum PodChange {
    /// `None`: not on the pod network.
    Seen(Option<PodFacts>),
    /// With its UID.
    Deleted(String),
}

/// A pod that the kubelet has made a sandbox for.
pub struct Announced {
    pub key: ObjectKey,
    pub pod: PodFacts,
    /// Notified when its rules are in the kernel.
    pub done: oneshot::Sender<()>,
}

impl Inbox {
    pub fn put(&self, change: impl FnOnce(&mut Changes)) {
        change(&mut self.waiting());
        self.0.changed.notify_one();
    }

    pub fn take(&self) -> Changes {
        std::mem::take(&mut *self.waiting())
    }

    /// Forgets what the informers of an earlier run said.
    pub fn restart(&self) {
        let announced = std::mem::take(&mut self.waiting().announced);
        *self.waiting() = Changes { announced, ..Changes::default() };
    }

    pub async fn changed(&self) {
        self.0.changed.notified().await;
    }

    fn waiting(&self) -> MutexGuard<'_, Changes> {
        self.0.waiting.lock().expect("no panic while held")
    }
}
