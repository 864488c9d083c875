//! CSI on the node: drivers that register here, and their volumes.
//!
//! ```text
//!  plugins_registry/*.sock ─► registration ─► Drivers ─► node (CSINode, labels, annotation)
//!                                               │
//!  pod worker ─► mount: attached? stage, publish, own ─► pods/<uid>/volumes/kubernetes.io~csi/…/mount
//!  pod worker ─► unmount: unpublish, unstage ───┘
//! ```
//!
//! In: sockets, CSIDriver objects, the node's `status.volumesAttached`. Out: mounts, CSINode,
//! `status.volumesInUse`.
//! Invariants: a mount is recorded on disk (`vol_data.json`) before the driver is called, so that a
//! restarted kubelet can undo it; one worker at a time stages, publishes and unmounts a volume; a
//! volume counts as in use until it is unstaged.
//! Upstream: `pkg/volume/csi`, `pkg/kubelet/pluginmanager`.

pub mod driver;
pub mod error;
pub mod messages;
pub mod mounting;
pub mod node;
pub mod place;
pub mod plugin;
pub mod record;
pub mod registration;
pub mod usage;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use client::{Client, Informer};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::CSIDriver;
use tokio::sync::{Notify, watch};

use super::turns::Turns;
use driver::Driver;
use error::CsiError;

pub const PLUGIN: &str = "kubernetes.io/csi";

/// A volume that a pod of this node uses.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Use {
    /// The volume's name in the pod; empty if an earlier kubelet mounted it.
    name: String,
    /// `kubernetes.io/csi/<driver>^<handle>`, its name in the node's status.
    unique: String,
    /// The volume needs attaching, and belongs to `status.volumesInUse`.
    is_attachable: bool,
    /// When it was published last.
    published: Option<tokio::time::Instant>,
}

/// The pod's uid and the name of the volume's directory.
type UseKey = (String, String);

/// The volumes in the node's status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct NodeVolumes {
    attached: BTreeSet<String>,
    in_use: BTreeSet<String>,
}

pub struct Csi {
    client: Client,
    node_name: String,
    /// The kubelet's directory.
    root: PathBuf,
    /// The cluster's CSIDriver objects.
    objects: Informer<CSIDriver>,
    /// The registered drivers, by name. Held for look-ups, never across await.
    drivers: Mutex<BTreeMap<String, Arc<Driver>>>,
    /// Notified when `drivers` changes.
    pub changed: watch::Sender<()>,
    /// Held for look-ups, never across await.
    uses: Mutex<BTreeMap<UseKey, Use>>,
    /// Volumes that this process has staged, by unique name.
    staged: Mutex<BTreeSet<String>>,
    /// The locks of volumes that are being changed, by unique name.
    turns: Turns,
    seen: watch::Sender<NodeVolumes>,
    /// Notified when the node's status must be updated.
    hurry: Arc<Notify>,
}

pub struct Setting {
    pub node_name: String,
    pub root: PathBuf,
}

impl Csi {
    pub fn new(
        client: Client,
        setting: Setting,
        objects: Informer<CSIDriver>,
        hurry: Arc<Notify>,
    ) -> Self {
        let Setting { node_name, root } = setting;
        Self {
            client,
            node_name,
            objects,
            drivers: Mutex::default(),
            changed: watch::channel(()).0,
            uses: Mutex::default(),
            staged: Mutex::default(),
            turns: Turns::default(),
            seen: watch::channel(NodeVolumes::default()).0,
            hurry,
            root,
        }
    }

    fn drivers(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Driver>>> {
        self.drivers.lock().expect("no panic while held")
    }

    fn uses(&self) -> MutexGuard<'_, BTreeMap<UseKey, Use>> {
        self.uses.lock().expect("no panic while held")
    }

    /// Takes over the volumes that an earlier kubelet mounted.
    fn adopt(&self, uses: BTreeMap<UseKey, Use>) {
        *self.uses() = uses;
    }

    fn driver(&self, name: &str) -> Result<Arc<Driver>, CsiError> {
        let found = self.drivers().get(name).cloned();
        found.ok_or_else(|| CsiError::NotRegistered(name.to_owned()))
    }

    /// The driver's CSIDriver, if there is one.
    async fn object(&self, name: &str) -> Option<Arc<CSIDriver>> {
        self.objects.synced().await;
        self.objects.lister().get("", name)
    }

    /// For `status.volumesInUse`.
    pub fn in_use(&self) -> Vec<String> {
        let uses = self.uses();
        let all: BTreeSet<&String> =
            uses.values().filter(|one| one.is_attachable).map(|one| &one.unique).collect();
        all.into_iter().cloned().collect()
    }

    /// Takes over the status of the API's node.
    pub fn follow(&self, node: &Node) {
        let status = node.status.clone().unwrap_or_default();
        let attached = status.volumes_attached.unwrap_or_default();
        let seen = NodeVolumes {
            attached: attached.into_iter().map(|one| one.name).collect(),
            in_use: status.volumes_in_use.unwrap_or_default().into_iter().collect(),
        };
        self.seen.send_if_modified(|known| {
            let is_new = *known != seen;
            *known = seen;
            is_new
        });
    }

    fn staged(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.staged.lock().expect("no panic while held")
    }
}

/// A volume's name in the node's status.
fn unique_name(driver: &str, handle: &str) -> String {
    format!("{PLUGIN}/{driver}^{handle}")
}
