//! Makes the addresses of load balancers known to the node's network: one node answers ARP and NDP for each.
//!
//! In: Services (their status), EndpointSlices (for the policy Local), Nodes, the pools of the cluster's settings.
//! Out: addresses on the node's link, announcements at a takeover, events.
//!
//! ```text
//!  Services, Nodes ─► plan: the node's rank by address ─► Seat ─► take, let go, announce, ask ─► Ground
//!                                     other machines' ARP and NDP ──►┘                            (kernel)
//! ```
//!
//! Upstream: MetalLB's layer 2 mode. Deviation: MetalLB notices a lost node by a gossip protocol between its
//! nodes; here the next node asks the address itself ([`seat`]).
//!
//! Invariants: only addresses of pools are announced. Nothing is removed at exit, so traffic continues while the
//! process is down; the next process keeps what it may keep and removes the rest.
//! Cost: nothing without pools. A change of a Service, a slice or a node's readiness compares the nodes for each
//! address. A watcher sends two frames a second for each address.

mod ground;
mod plan;
mod seat;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::load_balancers::{self, Member};
use base::task::{Stop, Tasks};
use client::{
    Client, EventRecorder, EventType, Informer, Informers, Lister, ObjectKey, Projection, View,
};
use k8s_openapi::api::core::v1::{Node, ObjectReference, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use machinery::address_range::AddressRange;
use net::Links;
use net::monitor::Monitor;
use net::neighbours::Heard;
use net::watch::Watch;
use tokio::sync::Notify;
use tokio::time::Instant;

use self::ground::Ground;
use self::plan::{Balanced, Users};
use self::seat::{Action, Seat};
use crate::{Error, SELECTOR};

const SERVICE_LABEL: &str = "kubernetes.io/service-name";
const BY_SERVICE: &str = "service";
/// When no seat has anything to do.
const IDLE: Duration = Duration::from_secs(3600);

#[derive(Clone, Debug, Default)]
pub struct AnnounceConfig {
    pub node_name: String,
    /// Only these addresses are announced.
    pub pools: Vec<AddressRange>,
    /// The node's network namespace; none: the process's own.
    pub netns: Option<PathBuf>,
}

/// Runs until `stop`. The addresses stay.
pub async fn run(client: Client, config: AnnounceConfig, stop: Stop) -> Result<(), Error> {
    let tasks = Tasks::new("service-lb");
    let _bound = tasks.bound();
    let outcome = stop.or(run_with(client, config, &tasks)).await.unwrap_or(Ok(()));
    tasks.shutdown(Duration::from_secs(3)).await;
    outcome
}

/// Removes all addresses that this node announces: another program does that, or nobody.
pub async fn remove(netns: Option<PathBuf>) -> Result<(), Error> {
    let links = match &netns {
        Some(path) => Links::open_in(path).await?,
        None => Links::open()?,
    };
    for address in links.remove_announced().await? {
        tracing::info!(%address, "no longer announcing a load balancer's address");
    }
    Ok(())
}

async fn run_with(client: Client, config: AnnounceConfig, tasks: &Tasks) -> Result<(), Error> {
    let links = match &config.netns {
        Some(path) => Links::open_in(path).await?,
        None => Links::open()?,
    };
    let watch = Watch::new(Monitor::of_links(config.netns.as_deref())?);
    let events =
        EventRecorder::new(client.clone(), tasks, "service-lb", Some(config.node_name.as_str()));
    let changed = Arc::new(Notify::new());
    let informers = Informers::new(client, tasks.clone());
    let sources = Sources::new(&informers, &changed);
    informers.synced().await;
    let (mut ground, heard) = Ground::new(links, config.netns.clone(), &config.pools, tasks);
    ground.look().await?;
    let mut announcer = Announcer { config, sources, ground, events, seats: BTreeMap::new() };
    announcer.follow(&changed, watch, heard).await
}

/// What is known of the cluster.
struct Sources {
    services: View<Balanced>,
    members: View<Known>,
    slices: Lister<EndpointSlice>,
    places: View<Places>,
}

/// The fields of a Node that matter here.
struct Known(Member);

impl Projection<Node> for Known {
    fn of(node: &Node) -> Self {
        Self(Member::of(node))
    }
}

/// The nodes with ready endpoints of a slice.
struct Places(BTreeSet<Box<str>>);

impl Projection<EndpointSlice> for Places {
    fn of(slice: &EndpointSlice) -> Self {
        Self(load_balancers::ready_nodes(slice))
    }
}

impl Sources {
    fn new(informers: &Informers, changed: &Arc<Notify>) -> Self {
        let services: Informer<Service> = informers.scoped(None, "", SELECTOR);
        let slices: Informer<EndpointSlice> = informers.scoped(None, "", SELECTOR);
        let nodes: Informer<Node> = informers.of();
        slices.index_headers(BY_SERVICE, |header| {
            let service = header.labels.get(SERVICE_LABEL);
            let key = service.map(|service| ObjectKey::new(&header.key.namespace, service));
            key.map(|key| key.to_string()).into_iter().collect()
        });
        let sources = Self {
            services: services.view(),
            members: nodes.view(),
            places: slices.view(),
            slices: slices.lister(),
        };
        let wake = || {
            let changed = changed.clone();
            move || changed.notify_one()
        };
        let tell = wake();
        services.subscribe(move |event| {
            let of = |service: &Service| Balanced::concerns(service).then(|| Balanced::of(service));
            let now = of(event.object()).filter(|_| !event.is_deleted());
            if event.old().map(|old| of(&old)) != Some(now) {
                tell();
            }
        });
        // Kubelets update their nodes' status often.
        let tell = wake();
        nodes.subscribe(move |event| {
            let now = (!event.is_deleted()).then(|| Member::of(event.object()));
            if event.is_deleted() || event.old().map(|old| Member::of(&old)) != now {
                tell();
            }
        });
        let (tell, balanced) = (wake(), sources.services.clone());
        slices.subscribe_raw(move |event| {
            let header = &event.entry().header;
            let Some(service) = header.labels.get(SERVICE_LABEL) else { return };
            let service = balanced.get(&ObjectKey::new(&header.key.namespace, service));
            if service.is_some_and(|service| service.is_local) {
                tell();
            }
        });
        sources
    }

    /// The nodes with ready endpoints of a Service.
    fn places(&self, key: &ObjectKey) -> BTreeSet<Box<str>> {
        let slices = self.slices.entries_by_index(BY_SERVICE, &key.to_string());
        let places = slices.iter().filter_map(|entry| self.places.get(&entry.header.key));
        places.flat_map(|places| places.0.clone()).collect()
    }
}

struct Announcer {
    config: AnnounceConfig,
    sources: Sources,
    ground: Ground,
    events: EventRecorder,
    seats: BTreeMap<IpAddr, (Seat, Users)>,
}

impl Announcer {
    async fn follow(
        &mut self,
        changed: &Notify,
        mut watch: Watch,
        mut heard: tokio::sync::mpsc::Receiver<Heard>,
    ) -> Result<(), Error> {
        self.replan().await;
        loop {
            let due = self.seats.values().filter_map(|(seat, _)| seat.due()).min();
            let due = due.unwrap_or_else(|| Instant::now() + IDLE);
            tokio::select! {
                () = changed.notified() => self.replan().await,
                () = tokio::time::sleep_until(due) => self.step().await,
                Some(heard) = heard.recv() => self.hear(heard).await,
                told = watch.changed(|change| self.ground.is_own(change)) => {
                    told?;
                    self.restore().await?;
                }
            }
        }
    }

    /// Computes the node's rank of each address again, and lets go of those that it may not announce.
    async fn replan(&mut self) {
        let now = Instant::now();
        let services = self.sources.services.all();
        let services = services.iter().map(|(key, balanced)| (key, &**balanced));
        let members = self.sources.members.all();
        let names = members.iter().map(|(key, known)| (&*key.name, &known.0));
        let chosen = plan::chosen(names);
        let mut wanted = BTreeMap::new();
        for (address, users) in plan::users(services, &self.config.pools) {
            let places: Vec<_> = users.local.iter().map(|key| self.sources.places(key)).collect();
            let has_endpoints = |node: &str| places.iter().all(|places| places.contains(node));
            let own = self.config.node_name.as_str();
            if let Some(rank) = plan::rank(address, own, &chosen, has_endpoints) {
                wanted.insert(address, (rank, users));
            }
        }
        let held = self.ground.announced();
        let all: BTreeSet<IpAddr> = self.seats.keys().chain(&held).copied().collect();
        for address in all.into_iter().filter(|address| !wanted.contains_key(address)) {
            let seat = self.seats.remove(&address);
            if seat.is_none_or(|(seat, _)| seat.holds()) || held.contains(&address) {
                self.let_go(address, "the node may not announce it any more").await;
            }
        }
        for (address, (rank, users)) in wanted {
            let holds = held.contains(&address);
            let new = || (Seat::new(rank, holds, now), Users::default());
            let (seat, known) = self.seats.entry(address).or_insert_with(new);
            seat.set_rank(rank, now);
            *known = users;
        }
        self.step().await;
    }

    async fn step(&mut self) {
        let now = Instant::now();
        let mut todo = vec![];
        for (address, (seat, _)) in &mut self.seats {
            if seat.due().is_some_and(|due| due <= now) {
                todo.extend(seat.step(now).into_iter().map(|action| (*address, action)));
            }
        }
        let mut failed = BTreeSet::new();
        for (address, action) in todo {
            if !failed.contains(&address) && !self.act(address, action).await {
                failed.insert(address);
            }
        }
    }

    /// Returns whether the kernel did it.
    async fn act(&mut self, address: IpAddr, action: Action) -> bool {
        let done = match action {
            Action::Take => {
                let taken = self.ground.take(address).await;
                if taken.is_ok() {
                    tracing::info!(%address, "announcing a load balancer's address");
                    self.tell(address);
                }
                taken
            }
            Action::LetGo => {
                self.let_go(address, "another node announces it").await;
                Ok(())
            }
            Action::Announce => self.ground.announce(address).await,
            Action::Ask(at) => self.ground.ask(address, at).await,
        };
        let Err(error) = done else { return true };
        tracing::warn!(%address, ?action, %error, "failed to announce a load balancer's address, will try again");
        if action == Action::Take
            && let Some((seat, _)) = self.seats.get_mut(&address)
        {
            seat.lost(Instant::now());
        }
        // The link may be another one by now.
        self.look().await;
        false
    }

    async fn look(&mut self) {
        if let Err(error) = self.ground.look().await {
            tracing::warn!(%error, "failed to list the node's addresses");
        }
    }

    async fn let_go(&mut self, address: IpAddr, why: &str) {
        tracing::info!(%address, why, "no longer announcing a load balancer's address");
        if let Err(error) = self.ground.let_go(address).await {
            tracing::warn!(%address, %error, "failed to remove a load balancer's address");
        }
        // Otherwise the next plan would remove it again.
        self.look().await;
    }

    /// An event about each Service of the address. Reason and text are MetalLB's.
    fn tell(&self, address: IpAddr) {
        let Some((_, users)) = self.seats.get(&address) else { return };
        let node = &self.config.node_name;
        for key in &users.services {
            let Some(service) = self.sources.services.get(key) else { continue };
            let about = ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("Service".into()),
                namespace: Some(key.namespace.to_string()),
                name: Some(key.name.to_string()),
                uid: Some(service.uid.clone()),
                ..ObjectReference::default()
            };
            let text =
                format!("announcing {address} from node \"{node}\" with protocol \"layer2\"");
            self.events.event_about(about, EventType::Normal, "nodeAssigned", text);
        }
    }

    async fn hear(&mut self, heard: Heard) {
        match heard {
            Heard::Holder(address, mac) => {
                let Some((seat, _)) = self.seats.get_mut(&address) else { return };
                if let Some(action) = seat.hears(mac, Instant::now()) {
                    self.act(address, action).await;
                }
            }
            Heard::Question(address, _) => {
                if let Some((seat, _)) = self.seats.get_mut(&address) {
                    seat.is_asked();
                }
            }
        }
    }

    /// Another program removed addresses, or a link went down.
    async fn restore(&mut self) -> Result<(), Error> {
        self.ground.look().await?;
        let held = self.ground.announced();
        let now = Instant::now();
        for (address, (seat, _)) in &mut self.seats {
            if seat.holds() && !held.contains(address) {
                tracing::warn!(%address, "a load balancer's address was removed; restoring it");
                seat.lost(now);
            }
        }
        Ok(())
    }
}
