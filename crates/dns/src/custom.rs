//! Follows the ConfigMap `kube-system/coredns-custom` and the node's resolv.conf.
//!
//! In: a watch of this one object, changes of the file. Out: a new plan for the server; for lines that are not
//! understood one log line and one Event about the ConfigMap. Upstream: k3s mounts the ConfigMap, and CoreDNS'
//! `reload` reads it again within half a minute; here a change counts at once.
//! Invariants: while the API is away, the last settings stay. The Event has the same name on all nodes, so a cluster
//! has one for a state of the ConfigMap, whatever the number of nodes.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::Arc;

use base::task::Tasks;
use base::watch::FileWatch;
use client::{Client, Event, Informers, PostParams};
use k8s_openapi::api::core::v1::{ConfigMap, Event as Record};
use serde_json::json;
use tokio::sync::watch;

use crate::forward::read_resolvers;
use crate::settings::{Base, Plan};

const NAMESPACE: &str = "kube-system";
const NAME: &str = "coredns-custom";
/// The length limit of an Event's message.
const LONGEST_MESSAGE: usize = 1024;

/// The ConfigMap as the watch last had it; `None` without one.
type Current = Option<Arc<ConfigMap>>;

/// The user of the plan.
pub trait User: Send + Sync + 'static {
    fn use_plan(&self, plan: Plan, had_complaints: bool);
}

pub struct Follower {
    pub base: Base,
    /// `None`: the servers for other names are given and do not change.
    pub resolv_conf: Option<PathBuf>,
    pub user: Arc<dyn User>,
}

impl Follower {
    /// Runs in tasks until they stop.
    pub fn start(self, client: Client, informers: &Informers, tasks: &Tasks) {
        let (sender, receiver) = watch::channel(Current::None);
        let only = format!("metadata.name={NAME}");
        let maps = informers.scoped::<ConfigMap>(Some(NAMESPACE), &only, "");
        maps.subscribe(move |event| {
            sender.send_replace(match event {
                Event::Applied { new, .. } => Some(new.clone()),
                Event::Deleted(_) => None,
            });
        });
        tasks.spawn("dns-settings", async move {
            // Keeps the watch alive.
            let _maps = maps;
            self.follow(client, receiver).await;
        });
    }

    async fn follow(mut self, client: Client, mut current: watch::Receiver<Current>) {
        let file = self.resolv_conf.as_ref().map(|path| {
            // The directory of the file itself: resolv.conf is often a link.
            let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.clone());
            FileWatch::open(&real).inspect_err(|error| {
                tracing::warn!(%error, path = %path.display(), "failed to watch the resolv.conf");
            })
        });
        let file = file.and_then(Result::ok);
        loop {
            let file_changed = async {
                match &file {
                    Some(file) => file.changed().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = current.changed() => if changed.is_err() { return },
                () = file_changed => if !self.resolvers_changed() { continue },
            }
            let map = current.borrow_and_update().clone();
            self.apply(&client, map).await;
        }
    }

    fn resolvers_changed(&mut self) -> bool {
        let Some(path) = &self.resolv_conf else { return false };
        let servers = read_resolvers(path);
        // An empty file is one that is being written.
        if servers.is_empty() || servers == self.base.servers {
            return false;
        }
        tracing::info!(servers = crate::status::shown(&servers), "the node's DNS servers changed");
        self.base.servers = servers;
        true
    }

    async fn apply(&self, client: &Client, map: Current) {
        let data = map.as_ref().and_then(|map| map.data.as_ref());
        let (plan, complaints) = Plan::new(data.unwrap_or(&BTreeMap::new()), &self.base);
        if data.is_some() {
            let zones = plan.zones().join(" ");
            tracing::info!(zones, "using the DNS settings of ConfigMap {NAMESPACE}/{NAME}");
        }
        self.user.use_plan(plan, !complaints.is_empty());
        if let Some(map) = map.filter(|_| !complaints.is_empty()) {
            let message = complaints.join("; ");
            tracing::warn!(
                message,
                "some DNS settings of ConfigMap {NAMESPACE}/{NAME} are not supported, the others count"
            );
            record(client, &map, &message).await;
        }
    }
}

async fn record(client: &Client, map: &ConfigMap, message: &str) {
    let mut hasher = DefaultHasher::new();
    let version = &map.metadata.resource_version;
    (&map.metadata.uid, version, message).hash(&mut hasher);
    let name = format!("{NAME}.{:016x}", hasher.finish());
    let cut = message.char_indices().nth(LONGEST_MESSAGE).map_or(message.len(), |(at, _)| at);
    let now = base::clock::now_seconds().to_string();
    let event: Result<Record, _> = serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": NAMESPACE},
        "involvedObject": {"apiVersion": "v1", "kind": "ConfigMap", "name": NAME,
            "namespace": NAMESPACE, "uid": map.metadata.uid, "resourceVersion": version},
        "type": "Warning", "reason": "UnsupportedSettings", "message": message[..cut],
        "source": {"component": "coredns"}, "reportingComponent": "coredns",
        "reportingInstance": "", "firstTimestamp": now, "lastTimestamp": now, "count": 1,
    }));
    let event = event.expect("an Event of known fields");
    let api = client.api::<Record>(Some(NAMESPACE));
    if let Err(error) = api.create(&PostParams::default(), &event).await
        && !client::ErrorExt::is_already_exists(&error)
    {
        // For example a server of an earlier version, which has no permission for it.
        tracing::debug!(%error, "failed to write the Event about ConfigMap {NAMESPACE}/{NAME}");
    }
}
