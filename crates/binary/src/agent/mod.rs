//! `decapod agent`: the node part of a cluster whose control plane runs elsewhere.
//!
//! In: the servers' URLs, a join token, a data directory. Out: a node.
//!
//! ```text
//!  token ──► authority (checked by its hash) ──► kubelet's client certificate (by CSR)
//!    ├► the cluster's settings    ├► certificates of the proxy and the DNS (by CSR)
//!    └► kubelet, proxy, routes, DNS start ──► Node registered ──► kubelet's serving certificate
//! ```
//!
//! Invariants: the token is sent only to a server whose authority matches its hash. The results of joining
//! are in `<data-dir>/agent`, so that a joined node starts without the server and without the token. A
//! start or stop never affects containers.

mod balancer;
pub mod certificates;
mod join;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use base::task::Tasks;
use client::{Client, Informers};
use k8s_openapi::api::core::v1::Node as NodeObject;
use pki::{Authority, Issued, Profile};
use tokio::sync::Notify;
use transport::HttpClient;
use transport::tls::{ClientCerts, Identity, ServerTls};

use crate::flags;
use crate::node::{self, Announcements, Node, Policies};
use crate::process::{prepare_data_dir, say, termination, wait_for_signal};
use balancer::Balancer;
use certificates::{Home, Order};
use join::{Joined, Member};

const SHUTDOWN_LIMIT: Duration = Duration::from_secs(8);

pub use balancer::host_port;
pub use join::{Settings, authority_of};

/// The machine's properties as the cluster sees them.
struct Machine {
    name: String,
    addresses: Vec<IpAddr>,
}

pub async fn run(flags: flags::Agent, common: flags::Common) -> anyhow::Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("running a node needs root");
    }
    let given =
        flags.server.iter().map(|url| balancer::host_port(url)).collect::<Result<_, _>>()?;
    if common.data_dir.join("store").exists() {
        let place = common.data_dir.display();
        bail!("{place} is a server's data directory; choose another one with --data-dir");
    }
    let machine = Machine::of(&flags.node).await?;
    crate::preflight::check_machine(&flags.node).await?;
    let data_dir = prepare_data_dir(&common.data_dir)?;
    // After the lock, whose error names the process that uses this directory.
    // Only the cluster's settings say whether kube-proxy runs here.
    crate::preflight::check_ports(false)?;
    let home = Arc::new(Home::open(&data_dir.join("agent"))?);
    let tasks = Tasks::new("agent");
    let balancer =
        Balancer::start(given, &machine.name, &home, flags.lb_server_port, &tasks).await?;
    let joining = async {
        let server = balancer.reachable().await;
        join::join(&flags, &server, balancer.url(), &home, &machine).await
    };
    let joined = tokio::select! {
        joined = joining => joined?,
        () = termination() => return Ok(()),
    };
    start(&flags, &data_dir, home, machine, joined, &balancer, &tasks).await?;
    say("Ctrl-C stops the node's services; pods keep running");
    wait_for_signal(&[&tasks]).await?;
    say("stopping");
    tasks.shutdown(SHUTDOWN_LIMIT).await;
    Ok(())
}

impl Machine {
    async fn of(flags: &flags::Node) -> anyhow::Result<Self> {
        let addresses = match flags.node_ip.as_slice() {
            [] => node::primary_address().await.into_iter().collect(),
            given => given.to_vec(),
        };
        if addresses.is_empty() {
            bail!(
                "this machine has no address that other machines can reach; set one with --node-ip"
            );
        }
        Ok(Self { name: node::name(flags)?, addresses })
    }
}

async fn start(
    flags: &flags::Agent,
    data_dir: &Path,
    home: Arc<Home>,
    machine: Machine,
    joined: Joined,
    balancer: &Arc<Balancer>,
    tasks: &Tasks,
) -> anyhow::Result<()> {
    let Joined { ca_pem, settings, kubelet, proxy, dns } = joined;
    let server = balancer.url();
    let order = Order::kubelet_server(&machine.name, &machine.addresses);
    let stored = home.stored(&order, &ca_pem);
    let serving = serving_tls(stored.as_ref(), &order.profile)?;
    let of_kubelet = Client::over(kubelet.http.clone(), "kubelet");
    let of_proxy = Client::over(proxy.http.clone(), "kube-proxy");
    let renewed = Arc::new(Notify::new());
    let dns_kubeconfig = match &dns {
        Some(dns) => {
            let user = dns.order.user();
            Some(write_dns_kubeconfig(server, data_dir, &ca_pem, user, &dns.issued)?)
        }
        None => None,
    };
    // Nodes may read the endpoints with the proxy's identity.
    balancer.follow(of_proxy.clone(), &ca_pem, tasks);
    let (client, name) = (of_kubelet.clone(), machine.name.clone());
    let keeper = Keeper { home, client, name, ca_pem, tasks: tasks.clone() };
    keeper.keep_serving(order, stored, serving.clone());
    keeper.keep_client(server, kubelet);
    keeper.keep_client(server, proxy);
    if let (Some(dns), Some(path)) = (dns, &dns_kubeconfig) {
        keeper.keep_dns(server, dns, path.clone(), renewed.clone());
    }
    say(&format!("node: {}", machine.name));
    let reported =
        crate::readiness::OfNode { name: machine.name.clone(), client: of_kubelet.clone() };
    crate::readiness::of_agent(reported, tasks);
    let described = Node {
        name: machine.name,
        backend: settings.backend,
        addresses: machine.addresses,
        data_dir: data_dir.to_owned(),
        kubelet: of_kubelet,
        routes: settings.runs("pod-routes").then(|| of_proxy.clone()),
        policies: Policies::new(settings.runs("network-policy"), || of_proxy.clone()),
        announcements: Announcements::new(&settings.load_balancer_pools, || of_proxy.clone()),
        proxy: settings.runs("kube-proxy").then_some(of_proxy),
        dns_kubeconfig,
        dns_renewed: renewed,
        serving: Some(serving),
        bind: None,
        client_ca_pem: Some(keeper.ca_pem.clone()),
        cluster_cidrs: settings.cluster_cidrs,
        service_cidrs: settings.service_cidrs,
        cluster_dns: settings.cluster_dns,
        cluster_domain: settings.cluster_domain,
        free_ports: false,
        own: crate::own_pods::OwnPods::default(),
    };
    node::start(described, &flags.node, tasks).await
}

/// Uses the stored certificate. Without one it uses a temporary, untrusted one until the cluster signs.
fn serving_tls(stored: Option<&Issued>, profile: &Profile) -> anyhow::Result<ServerTls> {
    let temporary = || Authority::generate("not yet signed")?.issue(profile);
    let issued = stored.cloned().map_or_else(temporary, Ok)?;
    let identity = Identity::from_pem(&issued.cert_pem, &issued.key_pem)?;
    Ok(transport::tls::server_tls(&identity, &ClientCerts::Request)?)
}

fn write_dns_kubeconfig(
    server: &str,
    data_dir: &Path,
    ca_pem: &str,
    user: &str,
    issued: &Issued,
) -> anyhow::Result<PathBuf> {
    let config = pki::Kubeconfig::with_certificate(server, ca_pem, user, issued);
    let path = data_dir.join("dns.kubeconfig");
    config.write(&path, 0o600)?;
    Ok(path)
}

/// Renews all certificates of this node in time.
struct Keeper {
    home: Arc<Home>,
    /// The kubelet's client: nodes request certificates, their components do not.
    client: Client,
    /// The node's name.
    name: String,
    ca_pem: String,
    tasks: Tasks,
}

impl Keeper {
    fn keep(
        &self,
        order: Order,
        first: Option<Issued>,
        apply: impl Fn(&Issued) -> anyhow::Result<()> + Send + Sync + 'static,
    ) {
        let (home, client, name) = (self.home.clone(), self.client.clone(), self.name.clone());
        self.tasks.spawn("certificate", async move {
            // A certificate without the Node's UID (from joining or an earlier version) is replaced at once.
            let mut first = first;
            if first.as_ref().is_some_and(|issued| !certificates::is_bound(issued)) {
                registered(&client, &name).await;
                first = None;
            }
            certificates::keep(&home, &client, &order, first, apply).await;
        });
    }

    fn keep_client(&self, server: &str, member: Member) {
        let (server, ca_pem, http) = (server.to_owned(), self.ca_pem.clone(), member.http);
        self.keep(member.order, Some(member.issued), move |issued| {
            Ok(http.replace_tls(&join::options(&server, &ca_pem, issued))?)
        });
    }

    /// The DNS process reads its kubeconfig only at its start: a new kubeconfig needs a new process.
    fn keep_dns(&self, server: &str, dns: Member, path: PathBuf, renewed: Arc<Notify>) {
        let (server, ca_pem) = (server.to_owned(), self.ca_pem.clone());
        let user = dns.order.user().to_owned();
        self.keep(dns.order, Some(dns.issued), move |issued| {
            let directory = path.parent().context("the kubeconfig lies in the data directory")?;
            write_dns_kubeconfig(&server, directory, &ca_pem, &user, issued)?;
            renewed.notify_one();
            Ok(())
        });
    }

    /// The approver reads the Node object, so the first request waits until it exists.
    fn keep_serving(&self, order: Order, first: Option<Issued>, tls: ServerTls) {
        let apply = move |issued: &Issued| -> anyhow::Result<()> {
            let identity = Identity::from_pem(&issued.cert_pem, &issued.key_pem)?;
            let config = transport::tls::server_config(&identity, &ClientCerts::Request)?;
            tls.store(Arc::new(config));
            Ok(())
        };
        let (home, client, name) = (self.home.clone(), self.client.clone(), self.name.clone());
        self.tasks.spawn("serving certificate", async move {
            if first.is_none() {
                registered(&client, &name).await;
            }
            certificates::keep(&home, &client, &order, first, apply).await;
        });
    }
}

/// Waits until the Node exists in the API.
async fn registered(client: &Client, name: &str) {
    let tasks = Tasks::new("registration");
    let informers = Informers::new(client.clone(), tasks.clone());
    let own = informers.scoped::<NodeObject>(None, &format!("metadata.name={name}"), "");
    let seen = Arc::new(Notify::new());
    let tell = seen.clone();
    own.subscribe_raw(move |_| tell.notify_one());
    seen.notified().await;
    tasks.shutdown(Duration::from_secs(1)).await;
}

/// A TLS client with this identity.
fn connect(server: &str, ca_pem: &str, issued: &Issued) -> anyhow::Result<HttpClient> {
    Ok(HttpClient::new(&join::options(server, ca_pem, issued))?)
}
