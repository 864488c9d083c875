//! The API server put together: store, rows, identities, the listener.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use apiserver::authz::Authorizer;
use apiserver::health::{Health, Hook};
use apiserver::request::UserInfo;
use apiserver::serve::Page;
use auth::service_account::{TokenKeys, TokenRequests};
use auth::{Authorizers, Rbac, tokens};
use base::task::Tasks;
use client::Client;
use extensions::Extensions;
use extensions::aggregation::Aggregation;
use ipnet::IpNet;
use k8s_openapi::api::{authentication::v1 as authentication, authorization::v1 as authorization};
use machinery::StatusError;
use machinery::status::Reason;
use pki::{Component, Issued, Pki, Profile, San};
use resources::Row;
use tokio::sync::oneshot;
use transport::tls::{ClientCerts, Identity, ServerTls};
use transport::{ClientOptions, HttpClient, Limits, Listener};

use crate::access::{self, Authentication, Brought, Credentials};
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
}

/// Requests, watches and commits get this long at the end.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(4);
/// Those of one connection, a little less: it is cut by the listener, and told so.
const DRAIN: Duration = Duration::from_millis(3500);
/// And after them the audit log.
const LAST_LIMIT: Duration = Duration::from_secs(1);
/// Before a store that did not answer is written to again.
const WRITE_AGAIN: Duration = Duration::from_secs(1);
/// A start waits this long for a store that takes no writes.
const PATIENCE: Duration = Duration::from_secs(5);

impl ControlPlane {
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
    set_admission(flags, &registry, rbac, &authorizers)?;
    let who = Authentication::start(&flags.access, &registry, pki, credentials, tasks).await?;
    add_reviews(&registry, &authorizers, &who.bearer);
    let extensions = Extensions::new(conversion_webhooks(&registry));
    extensions.start(&registry, tasks).await;
    let aggregation = aggregation(pki, &rotation)?;
    hide_versions(&flags.serving, &registry)?;
    let last = Tasks::new("last");
    let audit = flags.audit.open(tasks, &last)?;
    let options = apiserver::serve::Options {
        advertised: SocketAddr::new(address, port).to_string(),
        anonymous: who.anonymous,
        anonymous_paths: who.anonymous_paths,
        pages: pages(&credentials.keys, address, port),
        schemas: Some(extensions.schemas(Arc::new(resources::schemas::BuiltIn))),
        aggregator: Some(Arc::new(aggregation.clone())),
        audit: audit.clone(),
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
    let hooks = hooks(&flags.serving, server.health());

    let (tls, names) = server_tls(flags, pki, credentials, address, &rotation)?;
    let (service, stop) = (server.service(), tasks.stop_signal());
    tasks.spawn_graceful("https", async move {
        transport::serve(listener, Some(tls), service, limits(), stop).await;
    });
    let mut cluster = cluster_facts(flags, data_dir, pki, credentials, address, port)?;
    cluster.front_proxy_ca_pem = who.front_proxy_ca_pem;
    write_first_objects(&registry, cluster, &server, tasks).await;
    aggregation.start(&registry, tasks);
    hooks.iter().for_each(Hook::done);
    rotation.start(tasks);
    Ok(ControlPlane { server, rotation, port, address, names, last })
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

/// Writes what every cluster has, and starts what keeps it. The roles come last: most requests wait for
/// the objects, none for the keepers.
async fn write_first_objects(
    registry: &apiserver::Registry,
    cluster: resources::bootstrap::Cluster,
    server: &apiserver::serve::Server,
    tasks: &Tasks,
) {
    let (objects, known) = (registry.clone(), cluster.clone());
    in_time(tasks, async move {
        tokio::join!(
            written("the first objects", || resources::bootstrap::ensure(&objects, &known)),
            written("the first objects of fairness", || resources::fairness::ensure(&objects)),
        );
    })
    .await;
    resources::fairness::start(registry, server.fairness(), tasks);
    resources::addresses::start(registry, tasks);
    resources::upkeep::start(registry, cluster, tasks);
    let roles = registry.clone();
    in_time(tasks, async move {
        written("the bootstrap roles", || auth::rbac::bootstrap::reconcile(&roles)).await;
    })
    .await;
}

/// Waits for the work of a start, but not longer than [`PATIENCE`]: then the work goes on in the
/// background. A full disk takes no writes, and the server must answer reads.
async fn in_time(tasks: &Tasks, work: impl Future<Output = ()> + Send + 'static) {
    let (tell, is_done) = oneshot::channel();
    tasks.spawn("first writes", async move {
        work.await;
        let _ = tell.send(());
    });
    if tokio::time::timeout(PATIENCE, is_done).await.is_err() {
        tracing::warn!("the store takes no writes; the server starts and goes on trying");
    }
}

/// Writes objects that every cluster has, again while the store does not answer. An object that is
/// refused for another reason stays missing, and the log says so.
async fn written<F: Future<Output = Result<(), StatusError>>>(what: &str, write: impl Fn() -> F) {
    while let Err(error) = write().await {
        tracing::warn!(what, %error, "failed to write objects that every cluster has");
        if !error.is(Reason::ServiceUnavailable) {
            return;
        }
        tokio::time::sleep(WRITE_AGAIN).await;
    }
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
    server.metrics().register(Box::new(scheduler::encode_metrics));
    server.metrics().register(Box::new(client::encode_requests));
    server.metrics().register(Box::new(move |out| encryption.metrics(out)));
    if let Some(audit) = audit {
        server.metrics().register(Box::new(move |out| audit.metrics(out)));
    }
}

/// The servers of other groups, who know this one by the front proxy's certificate.
fn aggregation(pki: &Pki, rotation: &Rotation) -> anyhow::Result<Aggregation> {
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

/// Takes out of sight what `--runtime-config` turns off; complains about what there is not.
fn hide_versions(serving: &flags::Serving, registry: &apiserver::Registry) -> anyhow::Result<()> {
    let (config, table) = (serving.runtime_config(), registry.resources());
    let mut known = resources::versions::known();
    known.extend(table.iter().map(|row| (row.group.clone(), row.version.clone())));
    config.check(&known).map_err(anyhow::Error::msg)?;
    let hidden = config.hidden(&table);
    registry.change_resources(|table| table.hide(hidden));
    Ok(())
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

/// What clients look for in `/readyz?verbose`, by upstream's names. Each stands for work that is done
/// here, too; all of it is begun in one step, when the first objects are there.
const HOOKS: &[&str] = &[
    INFORMERS,
    "start-apiserver-admission-initializer",
    "generic-apiserver-start-informers",
    "priority-and-fairness-config-consumer",
    "priority-and-fairness-filter",
    "max-in-flight-filter",
    "start-apiextensions-informers",
    "start-apiextensions-controllers",
    "crd-informer-synced",
    "start-system-namespaces-controller",
    "start-cluster-authentication-info-controller",
    "storage-readiness",
    "start-legacy-token-tracking-controller",
    "start-service-ip-repair-controllers",
    "rbac/bootstrap-roles",
    "scheduling/bootstrap-system-priority-classes",
    "priority-and-fairness-config-producer",
    "bootstrap-controller",
    "start-kubernetes-service-cidr-controller",
    "aggregator-reload-proxy-client-cert",
    "start-kube-aggregator-informers",
    "apiservice-status-local-available-controller",
    "apiservice-status-remote-available-controller",
    "apiservice-registration-controller",
    "apiservice-wait-for-first-sync",
    "apiservice-discovery-controller",
    "kube-apiserver-autoregistration",
    AUTOREGISTRATION,
    "apiservice-openapi-controller",
    "apiservice-openapiv3-controller",
];

/// Checks that upstream does not call hooks; the first is of `/readyz` alone.
const INFORMERS: &str = "informer-sync";
const AUTOREGISTRATION: &str = "autoregister-completion";

fn hooks(serving: &flags::Serving, health: &Health) -> Vec<Hook> {
    let is_fair = serving.enable_priority_and_fairness;
    let is_done = |name: &&&str| match **name {
        "priority-and-fairness-config-consumer" | "priority-and-fairness-filter" => is_fair,
        "max-in-flight-filter" => !is_fair,
        _ => true,
    };
    let hook = |name: &&str| match *name {
        INFORMERS => health.once(name, true),
        AUTOREGISTRATION => health.once(name, false),
        name => health.hook(name),
    };
    HOOKS.iter().filter(is_done).map(hook).collect()
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
    let facts: Option<Arc<dyn machinery::patch::Schema>> = Some(Arc::new(api::facts::Facts));
    let config = flags.serving.runtime_config();
    let mut table = resources::table(resources::Options {
        schema: facts.clone(),
        node_ports: flags.service_node_port_range.clone(),
        kubelets: Arc::new(resources::Kubelets::new(http, plain)),
        tokens: Arc::new(TokenRequests::new(credentials.keys.clone())),
        is_on: Box::new(move |row| config.serves(row.resource(), false) && row.is_open()),
        allow_privileged: flags.allow_privileged,
    });
    table.insert(Arc::new(extensions::definition::row(facts)));
    // The admission plugins come when the authorizers are there, before anything is served.
    Ok(apiserver::Registry::new(store, table, Default::default(), tasks.clone()))
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

/// The admission plugins. That nobody grants what they do not hold is no plugin that can be left
/// out.
fn set_admission(
    flags: &flags::Server,
    registry: &apiserver::Registry,
    rbac: Rbac,
    authorizers: &Authorizers,
) -> anyhow::Result<()> {
    let authorizer: Arc<dyn Authorizer> = Arc::new(authorizers.clone());
    let options = admission::Options {
        enable: flags.enable_admission_plugins.clone(),
        disable: flags.disable_admission_plugins.clone(),
        configuration: match &flags.admission_control_config_file {
            Some(file) => admission::Configuration::read(file).map_err(anyhow::Error::msg)?,
            None => admission::Configuration::default(),
        },
        authorizer: Some(authorizer.clone()),
    };
    let mut chain = admission::chain(&options).map_err(anyhow::Error::msg)?;
    chain.0.insert(0, Box::new(auth::rbac::NoEscalation::new(rbac, authorizer.clone())));
    chain.0.insert(0, Box::new(admission::PodCertificateSigning(authorizer)));
    registry.set_admission(chain);
    Ok(())
}

/// Rows that ask the authorizers, which in turn read the registry: they come last.
fn add_reviews(
    registry: &apiserver::Registry,
    authorizers: &Authorizers,
    tokens: &Arc<tokens::BearerTokens>,
) {
    use auth::reviews;
    let ask: Arc<dyn Authorizer> = Arc::new(authorizers.clone());
    let rows = [
        Row::new::<authorization::SubjectAccessReview>(reviews::SubjectAccess(ask.clone())),
        Row::new::<authorization::LocalSubjectAccessReview>(reviews::LocalSubjectAccess(
            ask.clone(),
        )),
        Row::new::<authorization::SelfSubjectAccessReview>(reviews::SelfSubjectAccess(ask.clone())),
        Row::new::<authorization::SelfSubjectRulesReview>(reviews::SelfSubjectRules(ask)),
        Row::new::<authentication::SelfSubjectReview>(reviews::SelfSubject),
        Row::new::<authentication::TokenReview>(reviews::TokenReviews(tokens.clone())),
    ];
    let mut table = (*registry.resources()).clone();
    for row in rows {
        table.insert(Arc::new(row.review().build(Some(Arc::new(api::facts::Facts)))));
    }
    registry.set_resources(table);
}

/// Calls webhooks that convert custom resources, by the client that admission uses.
fn conversion_webhooks(registry: &apiserver::Registry) -> extensions::Post {
    let (registry, clients) = (registry.clone(), Arc::new(admission::Clients::default()));
    Arc::new(move |config, body, timeout| {
        let (registry, clients) = (registry.clone(), clients.clone());
        let address = match (config.url, config.service) {
            (Some(url), _) => admission::Address::Url(url),
            (None, Some(service)) => admission::Address::Service {
                namespace: service.namespace,
                name: service.name,
                path: service.path.unwrap_or_default(),
                port: service.port.and_then(|port| u16::try_from(port).ok()).unwrap_or(443),
            },
            (None, None) => admission::Address::Nowhere,
        };
        let ca_pem = config.ca_bundle.and_then(|bundle| String::from_utf8(bundle.0).ok());
        let endpoint = admission::Endpoint { address, ca_pem };
        Box::pin(async move { clients.post(&registry, &endpoint, body, timeout).await })
    })
}

/// What others need to check service account tokens by themselves.
fn pages(keys: &TokenKeys, address: IpAddr, port: u16) -> Vec<Page> {
    let jwks_uri = format!("{}/openid/v1/jwks", url(address, port));
    let page = |path: &str, content_type, body: serde_json::Value, about, tag| Page {
        path: path.into(),
        content_type,
        body: body.to_string().into(),
        about,
        tag,
    };
    vec![
        page(
            "/.well-known/openid-configuration",
            "application/json",
            keys.openid_configuration(&jwks_uri),
            "get service account issuer OpenID configuration, also known as the 'OIDC discovery doc'",
            "WellKnown",
        ),
        page(
            "/openid/v1/jwks",
            "application/jwk-set+json",
            keys.jwks(),
            "get service account issuer OpenID JSON Web Key Set (contains public token verification keys)",
            "openid",
        ),
    ]
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
        let tls = listening(issued)?;
        rotation.files(cert, key, issued, renews(&tls));
        return Ok((tls, names_of(issued)?));
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
    let tls = listening(&issued)?;
    rotation.own("apiserver", profile, &issued, renews(&tls));
    Ok((tls, names_of(&issued)?))
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
) -> anyhow::Result<resources::bootstrap::Cluster> {
    let token = crate::token::of_server(flags.token.as_deref(), data_dir, pki)?.bootstrap();
    Ok(resources::bootstrap::Cluster {
        service_cidrs: flags.service_cidr.clone(),
        node_settings: crate::agent::Settings::of_server(flags),
        // Others cannot use a loopback address, and the API takes none.
        addresses: Some(address).into_iter().filter(|address| !address.is_loopback()).collect(),
        port,
        cluster_dns: flags.cluster_dns.clone(),
        ca_pem: credentials.client_ca_pem.clone(),
        front_proxy_ca_pem: pki.front_proxy_ca.cert_pem().to_owned(),
        bootstrap_token: Some((token.id, token.secret)),
        server_url: url(address, port),
        has_local_path: !flags.disable_agent,
    })
}
