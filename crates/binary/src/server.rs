//! `decapod server`: every component of a control plane, and of a node, in one process.
//!
//! A component that loses its Lease or fails is restarted alone. If a part that all components share fails
//! (the container runtime), all components are restarted. The process continues.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use base::backoff::Backoff;
use base::task::Tasks;
use client::{Client, Election};
use pki::{Component, Issued, Pki, Profile, San};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::control_plane::{self, ControlPlane};
use crate::flags::{Common, Server};
use crate::node::{self, Announcements, Node, Policies};
use crate::process::{
    give_back_what_the_start_needed, prepare_data_dir, say, termination, wait_for_signal,
};
use crate::{cluster, datastore, preflight, readiness, supervise};

/// Components that `--disable` accepts.
const COMPONENTS: [&str; 7] = [
    "kube-scheduler",
    "kube-controller-manager",
    "kube-proxy",
    "dns",
    "pod-routes",
    "network-policy",
    "service-lb",
];
/// Ports that the programs of nodes use, which Services on nodes' addresses do not get: ssh, etcd, VXLAN,
/// kubelet, kube-proxy, controllers and scheduler.
const NODE_PORTS: [RangeInclusive<u16>; 4] = [22..=22, 2379..=2382, 8472..=8472, 10248..=10260];
/// Time for components to end, before the API server does.
const COMPONENTS_LIMIT: Duration = Duration::from_secs(4);
/// Pause before all components are restarted.
const AGAIN_FIRST: Duration = Duration::from_secs(1);
const AGAIN_CEILING: Duration = Duration::from_secs(60);

pub async fn run(flags: Server, common: Common) -> anyhow::Result<()> {
    let begun = Instant::now();
    let mut flags = preflight::completed(flags)?;
    check(&flags)?;
    if flags.cluster.cluster_reset {
        return cluster::reset(&flags, &common).await;
    }
    preflight::check_node(&flags).await?;
    let data_dir = prepare_data_dir(&common.data_dir)?;
    preflight::check_ports_of(&flags)?;
    let address = advertised(&flags).await?;
    let preparing = cluster::prepare(&mut flags, &data_dir, address);
    let member = tokio::select! {
        member = preparing => member?,
        () = termination() => {
            say("stopped before the datastore was ready");
            return Ok(());
        }
    };
    let outcome = serve(&flags, &data_dir, address, member.as_ref(), begun).await;
    // Last, as the others write their last state to it.
    if let Some(member) = &member {
        member.stop().await;
        if matches!(outcome, Ok(Ended::Removed)) {
            cluster::set_removed(&member.own)?;
            bail!(cluster::removed_text(&member.own));
        }
    }
    outcome.map(drop)
}

/// How a server ends.
enum Ended {
    BySignal,
    /// The cluster has removed its etcd member.
    Removed,
}

/// Serves until the end, with a datastore that answers or will answer.
async fn serve(
    flags: &Server,
    data_dir: &Path,
    address: IpAddr,
    member: Option<&cluster::Member>,
    begun: Instant,
) -> anyhow::Result<Ended> {
    datastore::prepare(&flags.datastore, data_dir)?;
    let pki =
        Pki::open_or_create(&data_dir.join("pki")).context("cannot prepare the certificates")?;
    let tasks = Tasks::new("server");
    let starting = control_plane::start(flags, data_dir, &pki, address, &tasks);
    let control = tokio::select! {
        control = starting => control?,
        () = termination() => {
            say("stopped before the API server was ready");
            return Ok(Ended::BySignal);
        }
    };
    cluster::publish(flags, data_dir, &pki, member.is_some(), control.server.registry(), &tasks)?;
    let kubeconfig = write_kubeconfig(flags, data_dir, &pki, &control)?;
    say(&format!("API server ready at {} after {} ms", control.url(), begun.elapsed().as_millis()));
    say(&format!("kubeconfig: {}", kubeconfig.display()));
    let has_member = member.is_some();
    let start = async || start_components(flags, data_dir, &control, &pki, has_member).await;
    let mut components = start().await?;
    say(&format!("next: export KUBECONFIG={}; kubectl get nodes", kubeconfig.display()));
    let (url, token) = (control.url(), data_dir.join("token"));
    say(&format!("more nodes: decapod agent --server {url} --token-file {}", token.display()));
    say("Ctrl-C stops the control plane; pods keep running");
    give_back_what_the_start_needed(&tasks);
    let node = match flags.disable_agent {
        true => None,
        false => Some(readiness::OfNode {
            name: node::name(&flags.node)?,
            client: control.client(Component::Admin),
        }),
    };
    readiness::of_server(flags, &control, node, &tasks);
    let groups = [&tasks, &control.last];
    let ended = tokio::select! {
        ended = wait_for_signal(&groups) => ended.map(|()| Ended::BySignal)?,
        () = keep_together(&mut components, start) => Ended::BySignal,
        () = removed(member) => Ended::Removed,
    };
    say("stopping");
    // Components first: they can still write to the API server, and none misses it.
    tokio::join!(components.shutdown(COMPONENTS_LIMIT), control.leave());
    control.stop(&tasks).await;
    Ok(ended)
}

async fn removed(member: Option<&cluster::Member>) {
    match member {
        Some(member) => member.removed().await,
        None => std::future::pending().await,
    }
}

/// Everything except the API, as one group.
async fn start_components(
    flags: &Server,
    data_dir: &Path,
    control: &ControlPlane,
    pki: &Pki,
    has_member: bool,
) -> anyhow::Result<Tasks> {
    let components = Tasks::new("components");
    let started = async {
        start_controllers(flags, data_dir, control, pki, &components)?;
        start_scheduler(flags, control, &components)?;
        crate::simulate::start(flags, control, &components)?;
        crate::addons::start(flags, data_dir, control, &components)?;
        match flags.disable_agent {
            true => Ok(()),
            false => start_node(flags, data_dir, pki, control, has_member, &components).await,
        }
    };
    match started.await {
        Ok(()) => Ok(components),
        Err(error) => {
            components.shutdown(COMPONENTS_LIMIT).await;
            Err(error)
        }
    }
}

/// Restarts the group when it has failed as a whole. Does not return.
async fn keep_together(components: &mut Tasks, start: impl AsyncFn() -> anyhow::Result<Tasks>) {
    let mut pause = Backoff::new(AGAIN_FIRST, AGAIN_CEILING).with_jitter(0.5);
    loop {
        components.stop_signal().wait().await;
        let pause = pause.step();
        tracing::error!(?pause, "all components failed, restarting them");
        components.shutdown(COMPONENTS_LIMIT).await;
        tokio::time::sleep(pause).await;
        match start().await {
            Ok(started) => *components = started,
            Err(error) => {
                tracing::error!(error = format!("{error:#}"), "failed to start the components");
            }
        }
    }
}

fn check(flags: &Server) -> anyhow::Result<()> {
    flags.serving.check()?;
    flags.access.check()?;
    flags.simulated.config()?;
    let known = [&COMPONENTS[..], &crate::addons::ALL].concat();
    if let Some(unknown) = flags.disable.iter().find(|name| !known.contains(&name.as_str())) {
        bail!("--disable {unknown}: expected one of {}", known.join(", "));
    }
    preflight::check_ranges(flags)?;
    if !flags.disable_agent && !nix::unistd::geteuid().is_root() {
        bail!(
            "running a node needs root; start as root, or with --disable-agent for the control plane alone"
        );
    }
    Ok(())
}

/// The address at which others reach this server.
pub async fn advertised(flags: &Server) -> anyhow::Result<IpAddr> {
    if let Some(address) = flags.advertise_address.or(flags.node.node_ip.first().copied()) {
        return Ok(address);
    }
    if !flags.bind_address.is_unspecified() {
        return Ok(flags.bind_address);
    }
    Ok(crate::node::primary_address().await.unwrap_or(IpAddr::from([127, 0, 0, 1])))
}

pub fn write_kubeconfig(
    flags: &Server,
    data_dir: &Path,
    pki: &Pki,
    control: &ControlPlane,
) -> anyhow::Result<PathBuf> {
    let admin = pki.component(Component::Admin)?;
    let local = match flags.bind_address {
        address if address.is_unspecified() => IpAddr::from([127, 0, 0, 1]),
        address => address,
    };
    let server = control_plane::url(local, control.port);
    let identity = Component::Admin.identity();
    // Other commands find the cluster by the kubeconfig in the data directory.
    let own = data_dir.join("kubeconfig");
    let wanted = flags.write_kubeconfig.clone().unwrap_or_else(|| own.clone());
    let (authority, mode) = (pki.cluster_ca.cert_pem().to_owned(), flags.write_kubeconfig_mode);
    let target = wanted.clone();
    let write = move |issued: &Issued| -> anyhow::Result<()> {
        let config = pki::Kubeconfig::with_certificate(&server, &authority, &identity.user, issued);
        config.write(&own, 0o600).context("cannot write the kubeconfig")?;
        if target != own {
            crate::kubeconfig::write_beside_others(&config, &target, mode)?;
        }
        Ok(())
    };
    write(&admin)?;
    control.rotation.component(Component::Admin, &admin, write);
    Ok(wanted)
}

fn runs(flags: &Server, component: &str) -> bool {
    !flags.disable.iter().any(|name| name == component)
}

fn start_controllers(
    flags: &Server,
    data_dir: &Path,
    control: &ControlPlane,
    pki: &Pki,
    tasks: &Tasks,
) -> anyhow::Result<()> {
    if !runs(flags, "kube-controller-manager") {
        return Ok(());
    }
    let node = (!flags.disable_agent).then(|| crate::node::name(&flags.node)).transpose()?;
    let options = controllers::Options {
        cluster_cidr: flags.cluster_cidr.first().map(ToString::to_string),
        allocate_node_cidrs: flags.allocate_node_cidrs,
        node_cidr_mask_size: flags.node_cidr_mask_size,
        root_ca: Some(pki.cluster_ca.cert_pem().to_owned()),
        token_signer: Some(crate::token_signer::of_key(pki.service_account_key_pem())?),
        signing_cert: Some(pki.cluster_ca.cert_pem().to_owned()),
        signing_key: Some(pki.cluster_ca.key_pem().to_owned()),
        local_path_directory: Some(data_dir.join("storage")),
        local_node: node,
        reserved: Some(controllers::Reserved {
            names: control.names.to_vec(),
            ranges: flags.service_cidr.iter().chain(&flags.cluster_cidr).copied().collect(),
            domain: flags.cluster_domain.clone(),
        }),
        load_balancer: flags.serves_load_balancers().then(|| load_balancer(flags, control)),
        ..flags.controllers.options.clone()
    };
    let selection = flags.controllers.selection.clone();
    let own = control.client(Component::ControllerManager);
    let control = control.clone();
    // As upstream with --use-service-account-credentials: each controller has its own role.
    let client_for = move |component: &str| match component {
        "kube-controller-manager" => own.clone(),
        other => control.client_of(
            &format!("system:serviceaccount:kube-system:{other}"),
            &["system:serviceaccounts", "system:serviceaccounts:kube-system"],
        ),
    };
    let election =
        candidate(flags, client_for("kube-controller-manager"), "kube-controller-manager");
    let part = Arc::new((election, client_for, selection, options));
    supervise::keep(tasks, "kube-controller-manager", move |stop| {
        let part = part.clone();
        async move {
            let (election, client_for, selection, options) = &*part;
            let work = |stop| controllers::run(client_for, selection, options.clone(), stop);
            election.stand(stop, work).await;
            STANDS
        }
    });
    Ok(())
}

fn load_balancer(flags: &Server, control: &ControlPlane) -> controllers::LoadBalancer {
    let own = [control.port..=control.port, flags.service_node_port_range.clone()];
    controllers::LoadBalancer {
        pools: flags.load_balancer_pool.clone(),
        reserved_ports: NODE_PORTS.into_iter().chain(own).collect(),
    }
}

fn start_scheduler(flags: &Server, control: &ControlPlane, tasks: &Tasks) -> anyhow::Result<()> {
    if !runs(flags, "kube-scheduler") {
        return Ok(());
    }
    let client = control.client(Component::Scheduler);
    let config = crate::components::scheduler_config(flags.scheduler_config.as_deref(), &client)?;
    let election = candidate(flags, client.clone(), "kube-scheduler");
    let part = Arc::new((election, client, config));
    supervise::keep(tasks, "kube-scheduler", move |stop| {
        let part = part.clone();
        async move {
            let (election, client, config) = &*part;
            let work = |stop| scheduler::run(client.clone(), config.clone(), stop);
            election.stand(stop, work).await;
            STANDS
        }
    });
    Ok(())
}

/// Running for a Lease cannot fail.
const STANDS: Result<(), std::convert::Infallible> = Ok(());

/// The component as a candidate for its Lease. With an embedded store there is one server: it takes the
/// Lease, as clients expect, and does not renew it, because there is no other candidate. Its identity is
/// the same after a restart, so the next process does not wait until the Lease expires. With a real etcd
/// there may be other servers.
fn candidate(flags: &Server, client: Client, name: &str) -> Election {
    let host = nix::unistd::gethostname().unwrap_or_default();
    let election = Election::new(client, "kube-system", name, &host.to_string_lossy());
    if !flags.datastore.endpoints.is_empty() {
        return election;
    }
    let identity = format!("{}_embedded", host.to_string_lossy());
    Election { renews: false, identity, ..election }
}

/// The node in this process: its components call the API server without a socket.
async fn start_node(
    flags: &Server,
    data_dir: &Path,
    pki: &Pki,
    control: &ControlPlane,
    has_member: bool,
    tasks: &Tasks,
) -> anyhow::Result<()> {
    let name = node::name(&flags.node)?;
    let marking = control.client_of("system:apiserver", &["system:masters"]);
    crate::control_plane_node::start(marking, &name, flags.taint_control_plane, tasks);
    let own = crate::own_pods::of_server(flags, control, has_member, &name)?;
    let addresses = match flags.node.node_ip.as_slice() {
        [] => vec![control.address],
        given => given.to_vec(),
    };
    let mut sans = vec![San::parse(&name)];
    sans.extend(addresses.iter().map(|address| San::parse(&address.to_string())));
    let profile = Profile::server(format!("system:node:{name}"), sans);
    let issued = pki.ensure("kubelet-server", &profile)?;
    let serving = control_plane::listening(&issued)?;
    control.rotation.own("kubelet-server", profile, &issued, control_plane::renews(&serving));
    let of_node = pki::Identity::node(&name);
    let groups: Vec<&str> = of_node.groups.iter().map(String::as_str).collect();
    let dns_renewed = Arc::new(Notify::new());
    let dns_kubeconfig = match runs(flags, "dns") && !flags.cluster_dns.is_empty() {
        true => Some(dns_kubeconfig(data_dir, pki, control, &dns_renewed)?),
        false => None,
    };
    let described = Node {
        kubelet: control.client_of(&of_node.user, &groups),
        proxy: runs(flags, "kube-proxy").then(|| control.client(Component::Proxy)),
        routes: runs(flags, "pod-routes").then(|| control.client(Component::Proxy)),
        policies: Policies::new(runs(flags, "network-policy"), || control.client(Component::Proxy)),
        announcements: Announcements::new(flags.announced_pools(), || {
            control.client(Component::Proxy)
        }),
        backend: flags.backend,
        name,
        addresses,
        data_dir: data_dir.to_owned(),
        dns_kubeconfig,
        dns_renewed,
        serving: Some(serving),
        bind: None,
        client_ca_pem: Some(pki.cluster_ca.cert_pem().to_owned()),
        cluster_cidrs: flags.cluster_cidr.clone(),
        service_cidrs: flags.service_cidr.clone(),
        cluster_dns: flags.cluster_dns.clone(),
        cluster_domain: flags.cluster_domain.clone(),
        free_ports: flags.https_listen_port == 0,
        own,
    };
    say(&format!("node: {}", described.name));
    node::start(described, &flags.node, tasks).await
}

/// The DNS process reads its kubeconfig only at its start: a new kubeconfig needs a new process.
fn dns_kubeconfig(
    data_dir: &Path,
    pki: &Pki,
    control: &ControlPlane,
    renewed: &Arc<Notify>,
) -> anyhow::Result<PathBuf> {
    let issued = pki.component(Component::Dns)?;
    let path = data_dir.join("dns.kubeconfig");
    let (server, authority) = (control.url(), pki.cluster_ca.cert_pem().to_owned());
    let target = path.clone();
    let write = move |issued: &Issued| -> anyhow::Result<()> {
        let user = Component::Dns.identity().user;
        let config = pki::Kubeconfig::with_certificate(&server, &authority, &user, issued);
        Ok(config.write(&target, 0o600)?)
    };
    write(&issued)?;
    let renewed = renewed.clone();
    control.rotation.component(Component::Dns, &issued, move |issued| {
        write(issued)?;
        renewed.notify_one();
        Ok(())
    });
    Ok(path)
}
