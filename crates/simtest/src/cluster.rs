//! The cluster of a round: an API server over the recorded store, and parts that start and are killed.
//!
//! In: a plan's seed and faults. Out: a served API, its parts, clients.
//! Invariant: a part that is killed is dropped at its next await, with all its tasks; requests on their way are
//! carried out or not, and nobody hears of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context;
use apiserver::serve::Server;
use auth::service_account::{Lifetimes, TokenKeys};
use auth::{Authorizer, Authorizers, Masters, Rbac};
use base::task::Tasks;
use bytes::Bytes;
use client::{Client, Election};
use control::assembly;
use store::{KeyRange, Op, RangeRequest, Store, Txn};
use transport::{ClientOptions, HttpClient};

use crate::faults::Fault;
use crate::history::{History, Recorded};
use crate::network::Network;

/// Fleets of hollow kubelets, and how many nodes each has.
pub const FLEETS: [&str; 2] = ["a", "b"];
pub const NODES_OF_FLEET: usize = 2;
/// What pods can ask for on each node.
const NODE_CPU: &str = "4";
const NODE_PODS: &str = "30";

/// What is made once for all rounds, because it takes long and no round depends on it.
struct Prepared {
    keys: TokenKeys,
    http: HttpClient,
}

static PREPARED: OnceLock<Prepared> = OnceLock::new();
/// What a server writes at its first start.
static FIRST: OnceLock<Vec<(Bytes, Bytes)>> = OnceLock::new();

/// Makes keys, and the objects that every cluster has. Call it before rounds are forked off.
pub fn prepare() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let pki = pki::Pki::open_or_create(directory.path())?;
    let issuer = vec!["https://kubernetes.default.svc".to_owned()];
    let (private, public) = (pki.service_account_key_pem(), pki.service_account_public_pem());
    let keys = TokenKeys::new(private, public, issuer, vec![])?;
    let http = HttpClient::new(&ClientOptions { insecure: true, ..ClientOptions::default() })?;
    PREPARED.get_or_init(|| Prepared { keys, http });
    let objects = crate::world::alone(0, || Box::pin(first_objects()))?;
    FIRST.get_or_init(|| objects);
    Ok(())
}

async fn first_objects() -> anyhow::Result<Vec<(Bytes, Bytes)>> {
    let (tasks, store) = (Tasks::new("kube-apiserver"), store::Sim::open());
    serve(store.clone(), &tasks).await?;
    let found = store.range(RangeRequest::new(KeyRange::prefix("/registry/"))).await?;
    let lasting = found.kvs.into_iter().filter(|kv| kv.lease == 0);
    Ok(lasting.map(|kv| (kv.key, kv.value.bytes())).collect())
}

pub struct Cluster {
    pub network: Network,
    pub history: History,
    on: BTreeSet<Fault>,
    parts: BTreeMap<String, Tasks>,
    /// The API server's.
    _tasks: Tasks,
}

impl Cluster {
    /// An API server that answers, and has the objects that every cluster has.
    pub async fn start(seed: u64, on: &BTreeSet<Fault>, history: History) -> anyhow::Result<Self> {
        let tasks = Tasks::new("kube-apiserver");
        let store = Recorded { inner: store::Sim::open(), history: history.clone() };
        for (key, value) in FIRST.get().into_iter().flatten().cloned() {
            let success = vec![Op::Put { key, value, lease: 0 }];
            store.txn(Txn { success, ..Txn::default() }).await?;
        }
        let server = serve(Arc::new(store), &tasks).await?;
        let network = Network::new(server, history.clone(), seed, on.clone());
        Ok(Self { network, history, on: on.clone(), parts: BTreeMap::new(), _tasks: tasks })
    }

    pub fn user(&self) -> Client {
        self.network.client("user", "admin", &["system:masters"], "kubectl")
    }

    /// The names of all parts of this round.
    pub fn names(&self) -> Vec<String> {
        let each = if self.on.contains(&Fault::Leaders) { 2 } else { 1 };
        let mut names: Vec<String> =
            FLEETS.iter().map(|fleet| format!("kubelets-{fleet}")).collect();
        for index in 0..each {
            names.push(format!("controllers-{index}"));
            names.push(format!("scheduler-{index}"));
        }
        names
    }

    pub fn start_part(&mut self, name: &str) -> anyhow::Result<()> {
        if self.parts.contains_key(name) {
            return Ok(());
        }
        let tasks = Tasks::new(name);
        let stop = tasks.stop_signal();
        match name.split_once('-') {
            Some(("controllers", _)) => {
                let network = self.network.clone();
                let part = name.to_owned();
                let client_for = move |account: &str| of_controller(&network, &part, account);
                let election = self.election(
                    client_for("kube-controller-manager"),
                    "kube-controller-manager",
                    name,
                );
                tasks.spawn_graceful("controllers", async move {
                    let work = |stop| controllers::run(&client_for, &[], options(), stop);
                    election.stand(stop, work).await;
                });
            }
            Some(("scheduler", _)) => {
                let user = "system:kube-scheduler";
                let client = self.network.client(name, user, &[], "kube-scheduler");
                let election = self.election(client.clone(), "kube-scheduler", name);
                tasks.spawn_graceful("scheduler", async move {
                    let config = scheduler::Config::default();
                    let work = |stop| scheduler::run(client.clone(), config.clone(), stop);
                    election.stand(stop, work).await;
                });
            }
            Some(("kubelets", fleet)) => {
                let client = self.network.client(name, "simulate", &["system:masters"], "kubelet");
                let config = fleet_of(fleet)?;
                let history = self.history.clone();
                tasks.spawn_graceful("kubelets", async move {
                    if let Err(error) = simulate::run(client, config, stop).await {
                        history.violate("hollow kubelets run", error.to_string());
                    }
                });
            }
            _ => anyhow::bail!("no part is called {name}"),
        }
        self.parts.insert(name.to_owned(), tasks);
        Ok(())
    }

    pub fn kill(&mut self, name: &str) {
        if let Some(tasks) = self.parts.remove(name) {
            drop(tasks.bound());
            self.history.upset(name, "killed");
        }
    }

    /// Without a second candidate the Lease is not renewed, as in one process.
    fn election(&self, client: Client, lease: &str, host: &str) -> Election {
        let election = Election::new(client, "kube-system", lease, host);
        match self.on.contains(&Fault::Leaders) {
            true => election,
            false => Election { renews: false, identity: format!("{lease}_embedded"), ..election },
        }
    }
}

/// As in one process: the caches' client, and one for each controller's own account.
fn of_controller(network: &Network, part: &str, account: &str) -> Client {
    const AGENT: &str = "kube-controller-manager";
    match account {
        AGENT => network.client(part, "system:kube-controller-manager", &[], AGENT),
        other => {
            let user = format!("system:serviceaccount:kube-system:{other}");
            let groups = ["system:serviceaccounts", "system:serviceaccounts:kube-system"];
            network.client(part, &user, &groups, AGENT)
        }
    }
}

fn options() -> controllers::Options {
    controllers::Options {
        cluster_cidr: Some("10.42.0.0/16".into()),
        service_cidr: Some("10.43.0.0/24".into()),
        allocate_node_cidrs: true,
        root_ca: Some("the authority of the simulation".into()),
        ..controllers::Options::default()
    }
}

fn fleet_of(name: &str) -> anyhow::Result<simulate::Config> {
    let room = format!("{{cpu: \"{NODE_CPU}\", memory: 8Gi, pods: \"{NODE_PODS}\"}}");
    // Fleets share no addresses.
    let index = FLEETS.iter().position(|fleet| *fleet == name).unwrap_or_default();
    let file = format!(
        "fleet: {name}\naddresses: 198.18.{index}.0/24\npodAddresses: 100.64.{index}.0/24\n\
         leaseInterval: 15s\nnodes: [{{name: {name}, \
         count: {NODES_OF_FLEET}, capacity: {room}, allocatable: {room}}}]"
    );
    Ok(simulate::Config::new(Some(&file), &simulate::Flags::default())?)
}

async fn serve(store: Arc<dyn store::Store>, tasks: &Tasks) -> anyhow::Result<Server> {
    let prepared = PREPARED.get().context("rounds are prepared first")?;
    let kubelets = control::Kubelets::new(prepared.http.clone(), prepared.http.clone());
    let runtime_config = apiserver::runtime_config::RuntimeConfig::default();
    let options = assembly::Options {
        kubelets,
        keys: prepared.keys.clone(),
        node_ports: 30_000..=30_100,
        runtime_config: runtime_config.clone(),
        allow_privileged: true,
        event_ttl: Duration::from_secs(3600),
        lifetimes: Lifetimes::default(),
    };
    let registry = assembly::registry(store, options, tasks);
    let rbac = Rbac::start(&registry, tasks).await;
    let all: Vec<Arc<dyn Authorizer>> = vec![Arc::new(Masters), Arc::new(rbac.clone())];
    let authorizers = Authorizers(all);
    assembly::set_admission(&registry, admission::Options::default(), rbac, &authorizers)?;
    let extensions = extensions::Extensions::new(assembly::conversion_webhooks(&registry));
    extensions.start(&registry, tasks).await;
    assembly::hide_versions(&runtime_config, &registry)?;
    let options = apiserver::serve::Options {
        advertised: "192.0.2.1:6443".into(),
        schemas: Some(extensions.schemas(Arc::new(resources::schemas::BuiltIn))),
        protobuf: Some(api::protobuf::descriptors),
        group_order: api::GROUP_ORDER,
        fairness: false,
        // Nothing is limited: refusals are the network's.
        reads_in_flight: 0,
        writes_in_flight: 0,
        ..apiserver::serve::Options::default()
    };
    let server = Server::new(registry.clone(), vec![], vec![Box::new(authorizers)], options);
    let cluster = control::bootstrap::Cluster {
        service_cidrs: vec!["10.43.0.0/24".parse()?],
        own: control::endpoints::Own {
            address: Some("192.0.2.1".parse()?),
            port: 6443,
            ..control::endpoints::Own::default()
        },
        host: "simulation".into(),
        ca_pem: "the authority of the simulation".into(),
        front_proxy_ca_pem: "the front proxy's".into(),
        server_url: "https://192.0.2.1:6443".into(),
        ..control::bootstrap::Cluster::default()
    };
    control::first::start(&registry, server.fairness(), cluster, tasks).await;
    Ok(server)
}
