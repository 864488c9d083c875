//! An API server by its flags: store, identities, certificates, the listener. `control` puts the rest
//! together.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use apiserver::health::Hook;
use apiserver::request::UserInfo;
use base::task::Tasks;
use client::Client;
use control::assembly;
use extensions::Extensions;
use extensions::aggregation::Aggregation;
use ipnet::IpNet;
use pki::{Component, Issued, Pki, Profile, San};
use transport::tls::{ClientCerts, Identity, ServerTls};
use transport::{ClientOptions, HttpClient, Limits, Listener};

use crate::access::{self, Authentication, Brought, Credentials};
use crate::api_settings::Settings;
use crate::rotation::Rotation;
use crate::{authority, datastore, flags};

/// A running API server. Clones are the same one.
#[derive(Clone)]
pub struct ControlPlane {
    pub server: apiserver::serve::Server,
    /// Renews certificates; those who need one add it.
    pub rotation: Rotation,
    pub port: u16,
    pub address: IpAddr,
    /// The names of its certificate.
    pub names: Arc<[San]>,
    /// What ends after everything else, as it writes down what the others did last.
    pub last: Tasks,
    /// In the endpoints and Leases that other servers and clients see.
    presence: control::first::Presence,
    /// `--shutdown-delay-duration`
    delay: Duration,
}

/// Requests, watches and commits get this long at the end.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(4);
/// Those of one connection, a little less: it is cut by the listener, and told so.
const DRAIN: Duration = Duration::from_millis(3500);
/// And after them the audit log.
const LAST_LIMIT: Duration = Duration::from_secs(1);

impl ControlPlane {
    /// The first step of an end: clients go to other servers. `/readyz` fails, and the server leaves the
    /// endpoints; requests are answered until the delay is over.
    pub async fn leave(&self) {
        self.server.health().begin_shutdown();
        tokio::join!(self.presence.leave(), tokio::time::sleep(self.delay));
    }

    /// Ends the API server: those who are answered by it, `tasks`, then the store.
    pub async fn stop(&self, tasks: &Tasks) {
        self.server.begin_shutdown();
        tasks.shutdown(SHUTDOWN_LIMIT).await;
        self.last.shutdown(LAST_LIMIT).await;
        self.server.registry().store().close().await;
    }

    /// A client of this process with a component's identity: it enters the server's own filters.
    pub fn client(&self, component: Component) -> Client {
        let identity = component.identity();
        let groups: Vec<&str> = identity.groups.iter().map(String::as_str).collect();
        self.client_of(&identity.user, &groups)
    }

    pub fn client_of(&self, user: &str, groups: &[&str]) -> Client {
        let mut user_info = UserInfo::new(user, groups);
        user_info.groups.push(auth::ALL_AUTHENTICATED.into());
        // Its requests count as those that go to the server's address.
        let host = self.url().trim_start_matches("https://").to_owned();
        Client::to(self.server.local(user_info), agent_of(user), &host)
    }

    pub fn url(&self) -> String {
        url(self.address, self.port)
    }
}

/// The program that upstream's component of this identity is: field managers are called by it.
fn agent_of(user: &str) -> &str {
    match user.strip_prefix("system:") {
        Some(name) if name.starts_with("serviceaccount:") => "kube-controller-manager",
        Some(name) if name.starts_with("node:") => "kubelet",
        Some(name) => name,
        None => user,
    }
}

pub fn url(address: IpAddr, port: u16) -> String {
    format!("https://{}", SocketAddr::new(address, port))
}

/// [`start_with`] what the data directory has.
pub async fn start(
    flags: &flags::Server,
    data_dir: &Path,
    pki: &Pki,
    address: IpAddr,
    tasks: &Tasks,
) -> anyhow::Result<ControlPlane> {
    let credentials = Credentials::of_cluster(pki, &flags.issuers())?;
    start_with(flags, data_dir, pki, &credentials, address, tasks).await
}

/// Opens the store and serves the API. Returns as soon as requests are answered; the objects that
/// every cluster has are there by then.
pub async fn start_with(
    flags: &flags::Server,
    data_dir: &Path,
    pki: &Pki,
    credentials: &Credentials,
    address: IpAddr,
    tasks: &Tasks,
) -> anyhow::Result<ControlPlane> {
    let wanted = SocketAddr::new(flags.bind_address, flags.https_listen_port);
    let listener = Listener::tcp(wanted).await.with_context(|| {
        format!("cannot listen on {wanted}; is another server running? --https-listen-port 0 picks a free port")
    })?;
    let port = listener.local_addr().context("a TCP listener has an address")?.port();
    let encryption = flags.encryption.start(data_dir, tasks).await?;
    let store = datastore::open(&flags.datastore, data_dir, encryption.clone(), tasks).await?;
    agree_on_authority(flags, credentials, &*store, pki).await?;
    flags.snapshots.start(store.clone(), data_dir, tasks)?;
    let rotation = Rotation::new(pki);
    let registry = registry(flags, store, credentials, &rotation, tasks)?;

    let (authorizers, rbac) = access::authorizers(&flags.access, &registry, tasks).await?;
    let plugins = plugins(flags)?;
    assembly::set_admission(&registry, plugins, rbac, &authorizers)?;
    let who = Authentication::start(&flags.access, &registry, pki, credentials, tasks).await?;
    assembly::add_reviews(&registry, &authorizers, &who.bearer);
    let extensions = Extensions::new(assembly::conversion_webhooks(&registry));
    extensions.start(&registry, tasks).await;
    let aggregation = aggregation(&flags.settings, pki, &rotation)?;
    assembly::hide_versions(&flags.serving.runtime_config(), &registry)?;
    let last = Tasks::new("last");
    let audit = flags.audit.open(tasks, &last)?;
    let options = apiserver::serve::Options {
        advertised: SocketAddr::new(address, port).to_string(),
        anonymous: who.anonymous,
        anonymous_paths: who.anonymous_paths,
        pages: assembly::pages(&credentials.keys, &flags.settings.jwks_uri(&url(address, port))),
        schemas: Some(extensions.schemas(Arc::new(resources::schemas::BuiltIn))),
        aggregator: Some(Arc::new(aggregation.clone())),
        audit: audit.clone(),
        browsers: flags.settings.browsers()?,
        goaway_chance: flags.settings.goaway_chance(),
        delete_workers: flags.settings.delete_workers(),
        ..server_options(&flags.serving)
    };
    let server = apiserver::serve::Server::new(
        registry.clone(),
        vec![Box::new(who.authenticators)],
        vec![Box::new(authorizers)],
        options,
    );
    show_figures(flags, &server, encryption, audit);
    server.metrics().register(Box::new(move |out| who.sightings.encode(out)));
    let hooks = assembly::hooks(flags.serving.enable_priority_and_fairness, server.health());

    let (tls, names) = server_tls(flags, pki, credentials, address, &rotation)?;
    let (service, stop) = (server.service(), tasks.stop_signal());
    tasks.spawn_graceful("https", async move {
        transport::serve(listener, Some(tls), service, limits(), stop).await;
    });
    let mut cluster = cluster_facts(flags, data_dir, pki, credentials, address, port)?;
    cluster.front_proxy_ca_pem = who.front_proxy_ca_pem;
    let presence = control::first::start(&registry, server.fairness(), cluster, tasks).await;
    aggregation.start(&registry, tasks);
    hooks.iter().for_each(Hook::done);
    rotation.start(tasks);
    let delay = flags.serving.presence.shutdown_delay_duration;
    crate::signals::extend(delay);
    Ok(ControlPlane { server, rotation, port, address, names, last, presence, delay })
}

/// Servers share a datastore only if they share an authority: see [`authority`]. One that was brought
/// along by flags is its bringer's business.
async fn agree_on_authority(
    flags: &flags::Server,
    credentials: &Credentials,
    store: &dyn store::Store,
    pki: &Pki,
) -> anyhow::Result<()> {
    if flags.datastore.endpoints.is_empty() || !credentials.is_of_cluster {
        return Ok(());
    }
    authority::agree(store, pki).await
}

/// As many connections as the process may have files for, half of which stay for everything else. The
/// limit is raised as far as may be, within reason, as Go does for upstream's programs.
fn limits() -> Limits {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    const FILES: u64 = 1 << 16;
    let mut limits = Limits { drain: DRAIN, ..Limits::default() };
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return limits };
    let wanted = hard.min(FILES).max(soft);
    let files =
        if setrlimit(Resource::RLIMIT_NOFILE, wanted, hard).is_ok() { wanted } else { soft };
    limits.connections = limits.connections.min(usize::try_from(files / 2).unwrap_or(usize::MAX));
    limits
}

/// Checks and figures: encryption at rest, the audit log, the controllers' queues.
fn show_figures(
    flags: &flags::Server,
    server: &apiserver::serve::Server,
    encryption: Arc<encryption::Encryption>,
    audit: Option<Arc<apiserver::audit::Audit>>,
) {
    flags.encryption.add_health(server.health(), &encryption);
    server.metrics().register(Box::new(release::features::encode_metrics));
    server.metrics().register(Box::new(client::encode_queues));
    for encode in [
        scheduler::encode_metrics,
        client::encode_requests,
        controllers::encode_metrics,
        admission::encode_metrics,
        auth::reload::encode_metrics,
    ] {
        server.metrics().register(Box::new(encode));
    }
    server.metrics().register_resources(Box::new(scheduler::encode_pod_resources));
    server.metrics().register(Box::new(move |out| encryption.metrics(out)));
    if let Some(audit) = audit {
        server.metrics().register(Box::new(move |out| audit.metrics(out)));
    }
}

/// The servers of other groups, who know this one by the front proxy's certificate.
fn aggregation(settings: &Settings, pki: &Pki, rotation: &Rotation) -> anyhow::Result<Aggregation> {
    if let Some(issued) = settings.proxy_client()? {
        let aggregation = Aggregation::new(proxy_identity(&issued));
        let files =
            settings.proxy_client_cert_file.as_ref().zip(settings.proxy_client_key_file.as_ref());
        if let Some((cert, key)) = files {
            let renewed = aggregation.clone();
            rotation.files(cert, key, &issued, move |issued| {
                Ok(renewed.replace_identity(proxy_identity(issued))?)
            });
        }
        return Ok(aggregation);
    }
    let issued = pki.component(Component::FrontProxyClient)?;
    let aggregation = Aggregation::new(proxy_identity(&issued));
    let renewed = aggregation.clone();
    rotation.component(Component::FrontProxyClient, &issued, move |issued| {
        Ok(renewed.replace_identity(proxy_identity(issued))?)
    });
    Ok(aggregation)
}

fn proxy_identity(issued: &Issued) -> extensions::aggregation::Identity {
    let Issued { cert_pem, key_pem } = issued.clone();
    extensions::aggregation::Identity { cert_pem, key_pem }
}

/// What does not depend on who else is there.
fn server_options(serving: &flags::Serving) -> apiserver::serve::Options {
    apiserver::serve::Options {
        reads_in_flight: serving.max_requests_inflight as usize,
        writes_in_flight: serving.max_mutating_requests_inflight as usize,
        fairness: serving.enable_priority_and_fairness,
        request_timeout: serving.request_timeout,
        min_watch: serving.min_request_timeout(),
        group_order: api::GROUP_ORDER,
        protobuf: Some(api::protobuf::descriptors),
        ..apiserver::serve::Options::default()
    }
}

fn registry(
    flags: &flags::Server,
    store: Arc<dyn store::Store>,
    credentials: &Credentials,
    rotation: &Rotation,
    tasks: &Tasks,
) -> anyhow::Result<apiserver::Registry> {
    let http = kubelet_client(credentials, rotation)?;
    // What pods serve has certificates of their own making, and must not learn who we are.
    let plain = HttpClient::new(&ClientOptions { insecure: true, ..ClientOptions::default() })?;
    let options = assembly::Options {
        kubelets: flags.settings.kubelets(control::Kubelets::new(http, plain)),
        keys: credentials.keys.clone(),
        node_ports: flags.service_node_port_range.clone(),
        runtime_config: flags.serving.runtime_config(),
        allow_privileged: flags.allow_privileged,
        event_ttl: flags.settings.event_ttl(),
        lifetimes: flags.settings.lifetimes(),
    };
    Ok(assembly::registry(store, options, tasks))
}

/// The client to kubelets, which follows its certificate.
fn kubelet_client(credentials: &Credentials, rotation: &Rotation) -> anyhow::Result<HttpClient> {
    let ca_pem = credentials.kubelet_ca_pem.clone();
    let options = move |client: &Issued| ClientOptions {
        insecure: ca_pem.is_none(),
        ca_pem: ca_pem.clone(),
        cert_pem: Some(client.cert_pem.clone()),
        key_pem: Some(client.key_pem.clone()),
        ..ClientOptions::default()
    };
    let present = &credentials.kubelet_client;
    let http = HttpClient::new(&options(present))?;
    let renewed = http.clone();
    let apply =
        move |issued: &Issued| -> anyhow::Result<()> { Ok(renewed.replace_tls(&options(issued))?) };
    match &credentials.kubelet_client_files {
        Some((cert, key)) => rotation.files(cert, key, present, apply),
        None => rotation.component(Component::KubeletClient, present, apply),
    }
    Ok(http)
}

/// What the flags say of admission plugins.
fn plugins(flags: &flags::Server) -> anyhow::Result<admission::Options> {
    Ok(admission::Options {
        enable: flags.enable_admission_plugins.clone(),
        disable: flags.disable_admission_plugins.clone(),
        configuration: match &flags.admission_control_config_file {
            Some(file) => admission::Configuration::read(file)?,
            None => admission::Configuration::default(),
        },
        authorizer: None,
    })
}

/// The server's certificate: every name that clients in and around the cluster use. With the names.
fn server_tls(
    flags: &flags::Server,
    pki: &Pki,
    credentials: &Credentials,
    address: IpAddr,
    rotation: &Rotation,
) -> anyhow::Result<(ServerTls, Arc<[San]>)> {
    if let Some(Brought { issued, cert, key }) = &credentials.serving {
        let listener = flags.settings.listener(issued)?;
        listener.follow(rotation)?;
        let renewed = listener.clone();
        rotation.files(cert, key, issued, move |issued| renewed.replace(issued));
        return Ok((listener.tls.clone(), names_of(issued)?));
    }
    let domain = &flags.cluster_domain;
    let mut names = vec![
        "kubernetes".to_owned(),
        "kubernetes.default".into(),
        "kubernetes.default.svc".into(),
        format!("kubernetes.default.svc.{domain}"),
        "localhost".into(),
        "127.0.0.1".into(),
        "::1".into(),
        address.to_string(),
    ];
    let first = |cidr: &IpNet| cidr.hosts().next().map(|ip| ip.to_string());
    names.extend(flags.service_cidr.iter().filter_map(first));
    if !flags.bind_address.is_unspecified() {
        names.push(flags.bind_address.to_string());
    }
    names.extend(flags.tls_san.iter().cloned());
    let sans: Vec<San> = names.iter().map(|name| San::parse(name)).collect();
    let profile = Profile::server("kube-apiserver", sans);
    let issued = pki.ensure("apiserver", &profile)?;
    let listener = flags.settings.listener(&issued)?;
    listener.follow(rotation)?;
    let renewed = listener.clone();
    rotation.own("apiserver", profile, &issued, move |issued| renewed.replace(issued));
    Ok((listener.tls.clone(), names_of(&issued)?))
}

fn names_of(issued: &Issued) -> anyhow::Result<Arc<[San]>> {
    let leaf = pki::certificates(issued.cert_pem.as_bytes())?.into_iter().next();
    Ok(leaf.map(|leaf| leaf.sans).unwrap_or_default().into())
}

/// The settings of a listener that asks for clients' certificates.
pub fn listening(issued: &Issued) -> anyhow::Result<ServerTls> {
    let identity = Identity::from_pem(&issued.cert_pem, &issued.key_pem)?;
    Ok(transport::tls::server_tls(&identity, &ClientCerts::Request)?)
}

/// Has a listener use another certificate from now on.
pub fn renews(tls: &ServerTls) -> impl Fn(&Issued) -> anyhow::Result<()> + Send + Sync + 'static {
    let tls = tls.clone();
    move |issued: &Issued| {
        let identity = Identity::from_pem(&issued.cert_pem, &issued.key_pem)?;
        tls.store(Arc::new(transport::tls::server_config(&identity, &ClientCerts::Request)?));
        Ok(())
    }
}

fn cluster_facts(
    flags: &flags::Server,
    data_dir: &Path,
    pki: &Pki,
    credentials: &Credentials,
    address: IpAddr,
    port: u16,
) -> anyhow::Result<control::bootstrap::Cluster> {
    // With an authority of kubeadm or of an administrator, they publish how nodes join.
    let token = match credentials.is_of_cluster {
        true => Some(crate::token::of_server(flags.secret()?.as_deref(), data_dir, pki)?),
        false => None,
    };
    Ok(control::bootstrap::Cluster {
        service_cidrs: flags.service_cidr.clone(),
        node_settings: crate::agent::Settings::of_server(flags),
        own: control::endpoints::Own {
            mode: flags.serving.presence.mode(),
            is_shared: !flags.datastore.endpoints.is_empty(),
            // Others cannot use a loopback address, and the API takes none.
            address: Some(address).filter(|address| !address.is_loopback()),
            port,
        },
        host: nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned(),
        cluster_dns: flags.cluster_dns.clone(),
        ca_pem: credentials.client_ca_pem.clone(),
        front_proxy_ca_pem: pki.front_proxy_ca.cert_pem().to_owned(),
        bootstrap_token: token.map(|token| token.bootstrap()).map(|token| (token.id, token.secret)),
        server_url: url(address, port),
        has_local_path: !flags.disable_agent
            && !flags.disable.iter().any(|name| name == crate::addons::LOCAL_PATH),
    })
}
