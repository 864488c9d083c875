//! NetworkPolicies of one node's pods, in nftables.
//!
//! In: policies, the labels and addresses of all pods, the labels of namespaces, from informers; new pods of
//! this node from the kubelet ([`Gate`]). Out: the kernel's rules ([`rules`]). This crate knows only the API and the kernel.
//!
//! Cost: nothing while there is no policy: pods and namespaces are read from the first policy on. A change
//! costs what [`model`] says, and becomes one transaction. Changes that arrive together share one.
//!
//! Invariants: rules stay at exit, so that pods are protected while the process is down; a new process replaces
//! them in one transaction, when it knows everything. The first transaction after another program changed
//! the tables replaces them, too. Other tables are never touched.
//!
//! Upstream: the API says what policies mean; enforcement is a network plugin's. The node's own traffic to its
//! pods is always allowed, and so is a pod's to itself. Pods on the host's network are the node: no policy
//! selects them. The cluster's DNS, a service of each node, counts as a pod `k8s-app=kube-dns` of `kube-system`.

mod gate;
mod inbox;
mod index;
mod kernel;
mod live;
pub mod model;
pub mod objects;
pub mod rules;
mod started;

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use base::backoff::Backoff;
use base::task::{Stop, Tasks};
use client::{Client, Event, Gvr, Informer, Informers, ObjectKey};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use net::nft::{self, Nft, Proto};
use net::watch::Watch;
use tokio::sync::oneshot;

pub use gate::{Gate, NotReady};
use inbox::{Changes, Inbox, PodChange};
use kernel::Kernel;
use model::Model;
use objects::{PodFacts, PolicyFacts};
use started::Started;

/// The collection of pods reduced to what policies need.
const PODS: (&str, &str, &str) = ("network.decapod.io", "v1", "podaddresses");
const RETRY: Duration = Duration::from_secs(1);
const RETRY_CEILING: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, Default)]
pub struct Config {
    pub node_name: String,
    /// The addresses of the cluster's DNS, if this node serves it.
    pub cluster_dns: Vec<IpAddr>,
    /// The node's network namespace; none: the process's own.
    pub netns: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Network(#[from] net::Error),
    #[error(transparent)]
    Nftables(#[from] nft::Error),
    #[error("a worker thread panicked")]
    Worker,
}

/// Removes the rules of earlier processes, for a node that no longer enforces policies.
pub fn remove() -> Result<(), Error> {
    Ok(Nft::open()?.apply(&kernel::none())?)
}

/// Runs until `stop`. The rules stay.
pub async fn run(client: Client, config: Config, gate: Gate, stop: Stop) -> Result<(), Error> {
    let tasks = Tasks::new("network-policy");
    let _bound = tasks.bound();
    let informers = Informers::new(client, tasks.clone());
    let outcome = async {
        let kernel = Kernel::open(config.netns.as_deref())?;
        let watch = kernel.watch(config.netns.as_deref())?;
        gate.0.restart();
        let node = format!("metadata.name={}", config.node_name);
        let sources = Sources {
            policies: informers.of(),
            nodes: informers.scoped(None, &node, ""),
            is_active: false,
        };
        sources.subscribe(&gate.0);
        let Some(()) = stop.or(informers.synced()).await else { return Ok(()) };
        let started = Started::default();
        let engine = Engine { config, inbox: gate.0, informers, sources, started };
        tokio::select! {
            () = stop.wait() => Ok(()),
            // A task of the group failed.
            () = async { tasks.stop_signal().wait().await } => Err(Error::Worker),
            outcome = engine.follow(kernel, watch) => outcome,
        }
    };
    let outcome = outcome.await;
    tasks.shutdown(Duration::from_secs(3)).await;
    outcome
}

struct Sources {
    policies: Informer<NetworkPolicy>,
    nodes: Informer<Node>,
    /// Pods and namespaces are followed, too.
    is_active: bool,
}

impl Sources {
    fn subscribe(&self, inbox: &Inbox) {
        let to = inbox.clone();
        self.policies.subscribe(move |event| {
            let policy = (!event.is_deleted()).then(|| PolicyFacts::of(event.object()));
            to.put(|changes| drop(changes.policies.insert(event.key(), policy)));
        });
        let to = inbox.clone();
        self.nodes.subscribe(move |event| {
            let spec = event.object().spec.clone().unwrap_or_default();
            let listed = spec.pod_cidrs.unwrap_or_default();
            let single = spec.pod_cidr.filter(|_| listed.is_empty());
            let cidrs = listed.iter().chain(&single).filter_map(|text| text.parse().ok()).collect();
            to.put(|changes| changes.cidrs = Some(cidrs));
        });
    }

    /// Follows all pods and namespaces from the first policy on, and waits until they are known.
    async fn activate(&mut self, informers: &Informers, inbox: &Inbox, config: &Config) {
        let namespaces: Informer<Namespace> = informers.of();
        let to = inbox.clone();
        namespaces.subscribe(move |event| {
            let labels = event.object().metadata.labels.iter().flatten().collect();
            let labels = (!event.is_deleted()).then_some(labels);
            let name = event.key().name.to_string();
            to.put(|changes| drop(changes.namespaces.insert(name, labels)));
        });
        let (group, version, resource) = PODS;
        let pods: Informer<Pod> = informers.of_resource(&Gvr::new(group, version, resource));
        let (to, node) = (inbox.clone(), config.node_name.clone());
        pods.subscribe(move |event| {
            let change = match event {
                Event::Applied { new, .. } => PodChange::Seen(PodFacts::of(new, &node)),
                Event::Deleted(old) => {
                    PodChange::Deleted(old.metadata.uid.clone().unwrap_or_default())
                }
            };
            to.put(|changes| drop(changes.pods.insert(event.key(), change)));
        });
        informers.synced().await;
        self.is_active = true;
    }
}

struct Engine {
    config: Config,
    inbox: Inbox,
    informers: Informers,
    sources: Sources,
    started: Started,
}

impl Engine {
    /// Applies one transaction now, then one for every burst of changes.
    async fn follow(mut self, mut kernel: Kernel, mut watch: Watch) -> Result<(), Error> {
        let mut retry = Backoff::new(RETRY, RETRY_CEILING);
        let mut model = Box::<Model>::default();
        model.put_pod(&dns_key(), dns(&self.config.cluster_dns));
        let mut waiting: Vec<oneshot::Sender<()>> = Vec::new();
        loop {
            let changes = self.inbox.take();
            waiting.extend(self.read(&mut model, changes));
            if model.has_policies() && !self.sources.is_active {
                tracing::info!(
                    "the first NetworkPolicy: pods and namespaces are followed from now on"
                );
                self.sources.activate(&self.informers, &self.inbox, &self.config).await;
                continue;
            }
            let work = move || {
                let outcome = kernel.apply(&mut model);
                (kernel, model, outcome)
            };
            let done = tokio::task::spawn_blocking(work).await.map_err(|_| Error::Worker)?;
            let outcome;
            (kernel, model, outcome) = done;
            match outcome {
                Ok(requests) => {
                    retry.reset();
                    tell(&mut waiting);
                    if requests > 0 {
                        tracing::debug!(requests, "updated the rules of network policies");
                    }
                }
                Err(error) => {
                    if !model.has_policies() {
                        // Nothing is to be enforced: pods need not wait for the removal of old rules.
                        tell(&mut waiting);
                    }
                    tracing::error!(%error, "failed to update the rules of network policies, will try again");
                    tokio::time::sleep(retry.step()).await;
                    continue;
                }
            }
            tokio::select! {
                () = self.inbox.changed() => {}
                told = watch.changed(|change| kernel.is_own(change)) => {
                    told?;
                    tracing::warn!("another program changed the rules of network policies; restoring them");
                    kernel.forget();
                }
            }
        }
    }

    /// Brings the changes into the model. Returns who waits for the rules of a new pod.
    fn read(&mut self, model: &mut Model, changes: Changes) -> Vec<oneshot::Sender<()>> {
        if let Some(cidrs) = &changes.cidrs {
            model.put_cidrs(cidrs);
        }
        for (name, labels) in changes.namespaces {
            model.put_namespace(&name, labels);
        }
        for (key, change) in changes.pods {
            let pod = self.started.effective(&key, change);
            model.put_pod(&key, pod);
        }
        for (key, policy) in changes.policies {
            model.put_policy(&key, policy);
        }
        let mut waiting = Vec::new();
        for new in changes.announced {
            waiting.push(new.done);
            // Without policies, no event tells when the pod is gone; with the first one, all pods are read.
            if model.has_policies() {
                model.put_pod(&new.key, Some(new.pod.clone()));
                self.started.put(new.key, new.pod);
            }
        }
        waiting
    }
}

fn tell(waiting: &mut Vec<oneshot::Sender<()>>) {
    for done in waiting.drain(..) {
        // The kubelet waits for a second only.
        let _ = done.send(());
    }
}

fn dns_key() -> ObjectKey {
    // No pod can have this name.
    ObjectKey::new("kube-system", "kube-dns (of each node)")
}

/// The cluster's DNS as upstream's policies know it: a pod with its usual label and port names.
fn dns(addresses: &[IpAddr]) -> Option<PodFacts> {
    let ports =
        [("dns", Proto::Udp, 53), ("dns-tcp", Proto::Tcp, 53), ("metrics", Proto::Tcp, 9153)];
    (!addresses.is_empty()).then(|| PodFacts {
        labels: [("k8s-app", "kube-dns")].into_iter().collect(),
        addresses: addresses.to_vec(),
        ports: ports.map(|(name, proto, port)| (name.to_owned(), proto, port)).into(),
        ..PodFacts::default()
    })
}
