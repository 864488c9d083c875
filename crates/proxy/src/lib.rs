//! kube-proxy: makes services work on one node.
//!
//! In: services, endpoint slices and the own node, from informers. Out: the kernel's ruleset. A
//! pure function ([`model::ruleset`]) computes it, and one transaction applies the difference to
//! the last applied one. This crate knows only the API and the kernel.
//!
//! Cost: a change decodes one object. A round reads all Services and slices, which are kept decoded, and
//! changes the elements of the kernel's rules that differ. Changes that arrive together share a round.
//!
//! Invariants: nothing is removed at exit, so traffic continues while the process is down. The first
//! transaction of a process replaces all existing rules atomically; so does the first one after another
//! program changed the tables. Rules are changed only after all three informers have synced.

pub mod announce;
mod endpoints;
mod health_checks;
pub mod model;
mod names;
pub mod routes;
mod services;
mod status;
mod sync;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base::backoff::Backoff;
use base::task::{Stop, Tasks};
use client::{Client, Informer, Informers, View, Whole};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use net::watch::Watch;
use net::{Links, nft};
use tokio::sync::Notify;

use crate::health_checks::{HealthChecks, wanted};
use crate::model::{Facts, NodePorts};
use crate::status::Status;
use crate::sync::{Seen, Syncer};

/// Upstream: headless Services need no proxy, and others may name another proxy.
const SELECTOR: &str = "!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name";
const ZONE_LABEL: &str = "topology.kubernetes.io/zone";
/// The first delay before a failed transaction is retried.
const RETRY: Duration = Duration::from_secs(1);
const RETRY_CEILING: Duration = Duration::from_secs(30);
/// The minimum time between two transactions, so that a burst of changes becomes one.
const PAUSE: Duration = Duration::from_millis(10);
/// The maximum pause, even after a long round.
const PAUSE_CEILING: Duration = Duration::from_secs(1);
/// Slower rounds are logged.
const SLOW: Duration = Duration::from_secs(1);
/// The delay before a failed health check port is retried.
const HEALTH_CHECK_RETRY: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub struct Config {
    pub node_name: String,
    pub cluster_cidrs: Vec<IpNet>,
    pub service_cidrs: Vec<IpNet>,
    pub nodeport_addresses: NodePortAddresses,
    pub masquerade_all: bool,
    /// Pods use the node's address outside of the cluster; false: a CNI plugin cares for that.
    pub masquerade_pods: bool,
    /// The kernel's connection tracking.
    pub tracking: net::sysctl::Tracking,
    /// The address of `/healthz` and `/livez`; none: not served.
    pub healthz_bind: Option<SocketAddr>,
    /// The address of `/metrics` and `/proxyMode`; none: not served.
    pub metrics_bind: Option<SocketAddr>,
    /// The node's network namespace; none: the process's own.
    pub netns: Option<PathBuf>,
}

/// `--nodeport-addresses`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// The node's internal IPs. Upstream's default in nftables mode.
    #[default]
    Primary,
    /// The node's addresses in these networks.
    Within(Vec<IpNet>),
}

impl Default for Config {
    fn default() -> Self {
        Self {
            node_name: String::new(),
            cluster_cidrs: Vec::new(),
            service_cidrs: Vec::new(),
            nodeport_addresses: NodePortAddresses::default(),
            masquerade_all: false,
            masquerade_pods: true,
            tracking: net::sysctl::Tracking::default(),
            healthz_bind: Some(SocketAddr::from(([0, 0, 0, 0], 10256))),
            metrics_bind: Some(SocketAddr::from(([127, 0, 0, 1], 10249))),
            netns: None,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Network(#[from] net::Error),
    #[error(transparent)]
    Nftables(#[from] net::nft::Error),
    #[error("no interface has the node's address {0}, and no interface has a global address")]
    NoUplink(IpAddr),
    #[error("no interface has a network with {0}, and there is no default route")]
    NoLinkFor(IpAddr),
    #[error("cannot listen on {0}: {1}")]
    Listen(SocketAddr, std::io::Error),
    #[error("a worker thread panicked")]
    Worker,
}

/// Removes the rules of earlier processes; `--cleanup`. Also succeeds if there are none.
pub fn remove() -> Result<(), Error> {
    remove_tables(&[model::TABLE, model::POD_TABLE])
}

fn remove_tables(names: &[&str]) -> Result<(), Error> {
    let mut ours = nft::Ruleset::default();
    for family in [nft::Family::Ip, nft::Family::Ip6] {
        for table in names {
            ours.table(family, table);
        }
    }
    Ok(nft::Nft::open()?.apply(&nft::diff(&ours, &nft::Ruleset::default()))?)
}

/// Runs until `stop`. The rules stay.
pub async fn run(client: Client, config: Config, stop: Stop) -> Result<(), Error> {
    let tasks = Tasks::new("kube-proxy");
    let _bound = tasks.bound();
    if !config.masquerade_pods && config.netns.is_none() {
        // An earlier run has masqueraded; this one does not touch the table.
        remove_tables(&[model::POD_TABLE])?;
    }
    let outcome = run_with(client, config, &tasks, &stop).await;
    tasks.shutdown(Duration::from_secs(3)).await;
    outcome
}

async fn run_with(client: Client, config: Config, tasks: &Tasks, stop: &Stop) -> Result<(), Error> {
    let status = Arc::new(Status::new());
    status::serve(&config, &status, tasks).await?;
    let syncer = Syncer::open(config.netns.as_deref())?;
    let watch = syncer.watch(config.netns.as_deref())?;
    net::sysctl::prepare_node(config.netns.as_deref()).await?;
    let links = match &config.netns {
        Some(path) => Links::open_in(path).await?,
        None => Links::open()?,
    };
    let informers = Informers::new(client, tasks.clone());
    let sources = Sources::new(&informers, &config.node_name);
    let changed = Arc::new(Notify::new());
    sources.subscribe(&changed, &status);
    let waiting = async {
        // Before the first round, in which the kernel would load them one by one.
        let (loaded, ()) = tokio::join!(syncer.load_modules(), informers.synced());
        tracing::info!("the informers for Services, EndpointSlices and the Node have synced");
        loaded
    };
    let Some(loaded) = stop.or(waiting).await else { return Ok(()) };
    let (syncer, missing) = loaded?;
    if !missing.is_empty() {
        let modules = missing.join(" ");
        tracing::error!(
            modules,
            "kernel modules for Services are missing; load them with modprobe"
        );
    }
    net::sysctl::prepare_tracking(config.netns.as_deref(), config.tracking.clone()).await?;
    let engine = Engine { config, sources, links, status };
    tokio::select! {
        () = stop.wait() => Ok(()),
        // A task of the group failed.
        () = async { tasks.stop_signal().wait().await } => Err(Error::Worker),
        outcome = engine.follow(syncer, watch, &changed) => outcome,
    }
}

struct Sources {
    services: Informer<Service>,
    slices: Informer<EndpointSlice>,
    nodes: Informer<Node>,
    /// Each round goes through all of both: they are decoded once for each change.
    all_services: View<Whole<Service>>,
    all_slices: View<Whole<EndpointSlice>>,
}

impl Sources {
    fn new(informers: &Informers, node: &str) -> Self {
        let services: Informer<Service> = informers.scoped(None, "", SELECTOR);
        let slices: Informer<EndpointSlice> = informers.scoped(None, "", SELECTOR);
        let own = format!("metadata.name={node}");
        Self {
            all_services: services.view(),
            all_slices: slices.view(),
            services,
            slices,
            nodes: informers.scoped(None, &own, ""),
        }
    }

    /// Events only wake the engine, which reads the caches.
    fn subscribe(&self, changed: &Arc<Notify>, status: &Arc<Status>) {
        let wake = || {
            let (changed, status) = (changed.clone(), status.clone());
            move |_: &client::RawEvent| {
                status.queued();
                changed.notify_one();
            }
        };
        self.services.subscribe_raw(wake());
        self.slices.subscribe_raw(wake());
        // The kubelet updates the node's status often; only fields that affect the rules count.
        let (changed, status) = (changed.clone(), status.clone());
        self.nodes.subscribe(move |event| {
            let now = (!event.is_deleted()).then(|| &**event.object());
            status.node(now);
            let before = event.old().filter(|_| !event.is_deleted());
            if before.is_none_or(|before| node_facts(&before) != node_facts(event.object())) {
                status.queued();
                changed.notify_one();
            }
        });
    }
}

struct Engine {
    config: Config,
    sources: Sources,
    links: Links,
    status: Arc<Status>,
}

impl Engine {
    /// Applies one transaction now, then one for every burst of changes.
    async fn follow(
        &self,
        mut syncer: Syncer,
        mut watch: Watch,
        changed: &Notify,
    ) -> Result<(), Error> {
        let mut retry = Backoff::new(RETRY, RETRY_CEILING);
        let mut checks = HealthChecks::new(self.config.clone(), self.status.clone());
        loop {
            let began = tokio::time::Instant::now();
            let seen = Arc::new(self.look().await?);
            self.status.begin();
            let (back, outcome) = syncer.sync(seen.clone()).await?;
            syncer = back;
            let took = began.elapsed();
            self.status.done(took, outcome.is_ok());
            match outcome {
                Ok(requests) if requests > 0 => {
                    say(&seen, requests, took);
                    tokio::time::sleep(pause_after(took)).await;
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(%error, "failed to update the nftables rules, will try again");
                    tokio::time::sleep(retry.step()).await;
                    continue;
                }
            }
            retry.reset();
            let wanted = wanted(&seen.services, &seen.slices, &seen.facts.node);
            let is_served = checks.follow(&wanted, &seen.facts.node_ports).await;
            tokio::select! {
                () = changed.notified() => {}
                () = tokio::time::sleep(HEALTH_CHECK_RETRY), if !is_served => {}
                told = watch.changed(|change| syncer.is_own(change)) => {
                    told?;
                    tracing::warn!("another program changed the nftables rules of Services; restoring them");
                    self.status.queued();
                    syncer.forget();
                }
            }
        }
    }

    async fn look(&self) -> Result<Seen, Error> {
        let services = self.sources.all_services.objects(None);
        let slices = self.sources.all_slices.objects(None);
        Ok(Seen { services, slices, facts: self.facts().await? })
    }

    async fn facts(&self) -> Result<Facts, Error> {
        let config = &self.config;
        let node = self.sources.nodes.lister().get("", &config.node_name);
        let NodeFacts { zone, pod_cidrs, addresses } =
            node.map(|node| node_facts(&node)).unwrap_or_default();
        let node_ports = match &config.nodeport_addresses {
            NodePortAddresses::Primary => NodePorts::Only(addresses),
            NodePortAddresses::Within(nets) if nets.iter().any(|net| net.prefix_len() == 0) => {
                NodePorts::All
            }
            NodePortAddresses::Within(nets) => {
                let held = self.links.addresses().await?.into_iter().map(|held| held.net.addr());
                NodePorts::Only(held.filter(|ip| nets.iter().any(|n| n.contains(ip))).collect())
            }
        };
        Ok(Facts {
            node: config.node_name.clone(),
            zone,
            pod_cidrs: if config.masquerade_pods { pod_cidrs } else { vec![] },
            cluster_cidrs: config.cluster_cidrs.clone(),
            service_cidrs: config.service_cidrs.clone(),
            node_ports,
            masquerade_all: config.masquerade_all,
        })
    }
}

/// Large rulesets take longer. The pause leaves most of the time to other work, up to a limit,
/// because Services are stale meanwhile.
fn pause_after(took: Duration) -> Duration {
    (took * 4).clamp(PAUSE, PAUSE_CEILING)
}

fn say(seen: &Seen, requests: usize, took: Duration) {
    if took < SLOW {
        tracing::debug!(requests, ?took, "updated the nftables rules");
        return;
    }
    let (services, slices) = (seen.services.len(), seen.slices.len());
    tracing::warn!(
        requests,
        services,
        slices,
        ?took,
        "updating the nftables rules of Services took long; Services were stale meanwhile"
    );
}

/// The Node's fields that affect the rules.
#[derive(Debug, Default, PartialEq, Eq)]
struct NodeFacts {
    zone: Option<String>,
    pod_cidrs: Vec<IpNet>,
    addresses: Vec<IpAddr>,
}

fn node_facts(node: &Node) -> NodeFacts {
    let spec = node.spec.as_ref();
    let listed = spec.and_then(|spec| spec.pod_cidrs.as_deref()).unwrap_or_default();
    let single = spec.and_then(|spec| spec.pod_cidr.as_ref()).filter(|_| listed.is_empty());
    let addresses = node.status.as_ref().and_then(|s| s.addresses.as_deref()).unwrap_or_default();
    let internal = addresses.iter().filter(|address| address.type_ == "InternalIP");
    NodeFacts {
        zone: node.metadata.labels.as_ref().and_then(|labels| labels.get(ZONE_LABEL)).cloned(),
        pod_cidrs: listed.iter().chain(single).filter_map(|text| text.parse().ok()).collect(),
        addresses: internal.filter_map(|address| address.address.parse().ok()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_after_a_round_is_limited() {
        let check = |took: u64, pause: u64| {
            let got = pause_after(Duration::from_millis(took));
            assert_eq!(got, Duration::from_millis(pause), "after {took} ms");
        };
        check(1, 10);
        check(100, 400);
        check(300, 1_000);
        check(80_000, 1_000);
    }
}
