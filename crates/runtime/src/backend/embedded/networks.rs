//! The networks of sandboxes: the node's own, or that of CNI plugins.
//!
//! In: sandboxes that come and go, the directory of CNI configurations. Out: connected sandboxes, host ports, the
//! condition NetworkReady.
//! Invariant: a sandbox keeps the network with which it was made. `cni.json` in its directory says that plugins
//! have connected it, and they disconnect it.
//! Cost: a change of the directory costs a few kernel calls; host ports are computed from all sandboxes.

use std::sync::Arc;
use std::time::Duration;

use base::task::Stop;
use base::watch::FileWatch;
use cri::*;
use ipnet::IpNet;

use super::Embedded;
use super::sandboxes::SandboxEntry;
use crate::bandwidth::Bandwidth;
use crate::cni::{self, Attachment, Choice, CniError, Connected};
use crate::host_ports;
use crate::network::NetworkState;

/// A file that is being written gets this time to be complete.
const SETTLE: Duration = Duration::from_millis(100);
const WATCH_RETRY: Duration = Duration::from_secs(5);

/// The result of connecting a sandbox.
#[derive(Default)]
pub(super) struct Connection {
    pub addresses: Vec<std::net::IpAddr>,
    /// Set if plugins connected it.
    pub by_plugins: Option<Connected>,
}

impl Embedded {
    /// Connects a new sandbox with the network that new pods get now.
    pub(super) async fn connect(&self, entry: &SandboxEntry) -> Result<Connection> {
        if entry.modes().host_network {
            return Ok(Connection::default());
        }
        let failed = |error: &dyn std::fmt::Display| {
            Error::Internal(format!("failed to setup network for sandbox {:?}: {error}", entry.id))
        };
        let state = self.0.network.borrow().clone();
        match self.0.cni.choice() {
            Choice::Own => {}
            Choice::Missing(why) => return Err(failed(&CniError::NotInitialized(why))),
            Choice::Plugins(network) => {
                let places = self.places(&entry.id);
                let (data, netns) = (places.data.as_path(), places.net());
                let sandbox = cni::Sandbox { id: &entry.id, data, netns: &netns };
                // The loopback interface is ours; configurations do not name its plugin.
                let loopback = async { net::Links::open_in(&netns).await?.set_loopback_up().await };
                loopback.await.map_err(|error| {
                    failed(&format!("error setting loopback interface up: {error}"))
                })?;
                let adding = self.0.cni.add(&network, &sandbox, &entry.config, &state.cidrs);
                let connected = adding.await.map_err(|error| failed(&error))?;
                if !entry.config.port_mappings.is_empty() && !connected.has_ports {
                    open_to_loopback(&connected.links).await;
                }
                let addresses = connected.addresses.iter().map(IpNet::addr).collect();
                return Ok(Connection { addresses, by_plugins: Some(connected) });
            }
        }
        if state.cidrs.is_empty() {
            let text = "network is not ready: the node has no pod CIDR yet";
            return Err(Error::Unavailable(text.into()));
        }
        let ports = !entry.config.port_mappings.is_empty();
        let netns = self.places(&entry.id).net();
        let bandwidth = Bandwidth::of(&entry.config.annotations).map_err(|error| failed(&error))?;
        let attaching = state.attach(&self.0.ipam, &entry.id, &netns, ports, bandwidth);
        let addresses = attaching.await?;
        Ok(Connection { addresses, by_plugins: None })
    }

    pub(super) async fn release_network(&self, entry: &SandboxEntry) -> Result<()> {
        if entry.modes().host_network {
            return Ok(());
        }
        let places = self.places(&entry.id);
        let (data, netns) = (places.data.as_path(), places.net());
        let sandbox = cni::Sandbox { id: &entry.id, data, netns: &netns };
        self.0.cni.del(&sandbox).await.map_err(|error| {
            let id = &entry.id;
            Error::Internal(format!("failed to destroy network for sandbox {id:?}: {error}"))
        })?;
        if entry.state().by_plugins.is_some() {
            return Ok(());
        }
        let network = self.0.network.borrow().clone();
        network.detach(&self.0.ipam, &entry.id).await
    }

    /// At start: repairs the pods' links to match this version. Those of plugins are checked later.
    pub(super) async fn adopt_links(&self) {
        let network = self.0.network.borrow().clone();
        for entry in self.networked() {
            if entry.state().by_plugins.is_some() {
                continue;
            }
            let (net, addresses) = (self.places(&entry.id).net(), entry.state().addresses);
            let ports = !entry.config.port_mappings.is_empty();
            match network.adopt(&entry.id, &net, &addresses, ports).await {
                Ok(true) => {}
                Ok(false) => {
                    tracing::warn!(sandbox = entry.id, "the sandbox's network link does not exist")
                }
                Err(error) => {
                    tracing::warn!(sandbox = entry.id, %error, "failed to repair the sandbox's network link");
                }
            }
        }
    }

    /// The ready sandboxes with a network of their own.
    fn networked(&self) -> Vec<Arc<SandboxEntry>> {
        let mut all: Vec<_> = self.table().sandboxes.values().cloned().collect();
        all.retain(|entry| !entry.modes().host_network && self.sandbox_is_ready(entry));
        all
    }

    /// The host ports of all ready sandboxes, except those that a plugin leads into its pods.
    pub(super) fn host_ports(&self) -> Vec<net::host_ports::HostPort> {
        let cidrs = self.0.network.borrow().cidrs.clone();
        let of = |entry: Arc<SandboxEntry>| {
            let (state, mappings) = (entry.state(), &entry.config.port_mappings);
            match &state.by_plugins {
                Some(connected) if connected.has_ports => vec![],
                Some(connected) => host_ports::of(mappings, &state.addresses, &connected.addresses),
                None => host_ports::of(mappings, &state.addresses, &cidrs),
            }
        };
        self.networked().into_iter().flat_map(of).collect()
    }

    pub(super) async fn network_condition(&self) -> RuntimeCondition {
        let not_ready = |message: String| RuntimeCondition {
            r#type: NETWORK_READY.into(),
            status: false,
            reason: "NetworkPluginNotReady".into(),
            message,
        };
        if let Some(error) = self.0.cni.trouble().await {
            return not_ready(format!("Network plugin returns error: {error}"));
        }
        let is_own = matches!(self.0.cni.choice(), Choice::Own);
        if is_own && self.0.network.borrow().cidrs.is_empty() {
            let text = "the node has no pod network yet: it is given with the node's podCIDR";
            return not_ready(text.into());
        }
        RuntimeCondition { r#type: NETWORK_READY.into(), status: true, ..Default::default() }
    }

    /// Prepares the node for the network that new pods get now.
    pub(super) async fn prepare_network(&self, state: &NetworkState) -> Result<()> {
        let services = &self.0.config.service_cidrs;
        match self.0.cni.choice() {
            Choice::Own if state.cidrs.is_empty() => Ok(()),
            Choice::Own => state.prepare(services).await,
            _ => state.make_way(services).await,
        }
    }

    /// Follows the directory of CNI configurations until `stop`.
    pub(super) async fn follow_cni(self, stop: Stop) {
        let mut is_first = true;
        while let Some(directory) = self.0.cni.watched() {
            // The watch begins before the directory is read: no change is lost.
            let watch = FileWatch::directory(directory);
            let is_own = matches!(self.0.cni.choice(), Choice::Own);
            if self.0.cni.load() || (is_first && !is_own) {
                self.network_changed().await;
            }
            is_first = false;
            let changed = async {
                match &watch {
                    Ok(watch) => {
                        watch.changed().await;
                        tokio::time::sleep(SETTLE).await;
                    }
                    Err(error) => {
                        let shown = directory.display();
                        tracing::warn!(directory = %shown, %error, "failed to watch the directory of CNI configurations");
                        tokio::time::sleep(WATCH_RETRY).await;
                    }
                }
            };
            if stop.or(changed).await.is_none() {
                return;
            }
        }
    }

    async fn network_changed(&self) {
        let state = self.0.network.borrow().clone();
        if let Err(error) = self.prepare_network(&state).await {
            tracing::warn!(%error, "failed to prepare the node for its pod network");
        }
        // A pod that is being connected has its file, but is not in the table.
        let existing = || {
            let all = super::adopt::names(&self.0.layout.sandboxes()).unwrap_or_default();
            let has_file = |id: &String| {
                Attachment::read(&self.0.layout.sandbox(id)).is_ok_and(|found| found.is_some())
            };
            all.into_iter().filter(has_file).collect()
        };
        if let Err(error) = self.0.cni.gc(existing).await {
            tracing::warn!(%error, "failed to let the CNI plugins remove what they keep for deleted pods");
        }
    }

    /// After a start: asks the plugins whether the pods' networks are as they made them.
    pub(super) async fn check_attachments(self) {
        let all = self.networked().into_iter();
        for entry in all.filter(|entry| entry.state().by_plugins.is_some()) {
            let places = self.places(&entry.id);
            let (data, netns) = (places.data.as_path(), places.net());
            let sandbox = cni::Sandbox { id: &entry.id, data, netns: &netns };
            if let Err(error) = self.0.cni.check(&sandbox).await {
                tracing::warn!(sandbox = entry.id, %error, "the sandbox's network is not as the CNI plugins made it");
            }
        }
    }
}

/// Host ports on 127.0.0.1 lead through these links of the node. Upstream: the plugin `portmap`.
async fn open_to_loopback(links: &[String]) {
    let is_plain =
        |name: &&String| !name.contains('/') && !matches!(name.as_str(), "." | ".." | "");
    let switch = |name: &String| (format!("net/ipv4/conf/{name}/route_localnet"), "1".to_owned());
    let switches = links.iter().filter(is_plain).map(switch).collect();
    let done = async { net::Links::open()?.sysctls(switches).await };
    if let Err(error) = done.await {
        tracing::warn!(%error, "failed to let host ports of 127.0.0.1 lead into a pod");
    }
}
