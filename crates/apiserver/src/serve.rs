//! The server as a service: what the listener hands connections to, and what components in the same
//! process call directly.
//!
//! In: a registry, authenticators and authorizers in their order, options. Out: one
//! `tower::Service` for requests from the network ([`Server::service`]), and one per in-process
//! identity ([`Server::local`]); both enter the same stack (see [`crate::filters`]).

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use base::seldom::Seldom;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::BodyExt;
use machinery::protobuf::Descriptors;
use tokio::sync::watch;
use tower::Service;
use transport::ConnectionInfo;

use crate::aggregate::Aggregator;
use crate::audit::Audit;
use crate::authn::{Authenticator, LocalIdentity, PeerCertificates};
use crate::authz::{Attributes, Authorizer, Decision};
use crate::discovery::Discovery;
use crate::fairness::Fairness;
use crate::filters::authorization;
use crate::filters::in_flight::{InFlight, Limiter};
use crate::health::Health;
use crate::metrics::{Metrics, family, labels, samples};
use crate::openapi::{OpenApi, SchemaSource};
use crate::registry::Registry;
use crate::request::UserInfo;
use crate::resource::{Body, Resource};

/// Upstream: `--etcd-readycheck-timeout`.
const STORE_CHECK: Duration = Duration::from_secs(2);

/// What `/version` says.
#[derive(Clone, Debug)]
pub struct Version {
    pub major: &'static str,
    pub minor: &'static str,
    pub git_version: &'static str,
    pub git_commit: String,
    pub build_date: String,
}

impl Default for Version {
    fn default() -> Self {
        Self {
            major: "1",
            minor: "36",
            git_version: concat!("v1.36.2+decapod-", env!("CARGO_PKG_VERSION")),
            git_commit: String::new(),
            build_date: "1970-01-01T00:00:00Z".into(),
        }
    }
}

impl Version {
    /// What `/version` answers.
    pub fn json(&self) -> serde_json::Value {
        let older =
            self.minor.parse::<u32>().map_or(String::new(), |minor| (minor - 1).to_string());
        serde_json::json!({
            "major": self.major,
            "minor": self.minor,
            "emulationMajor": self.major,
            "emulationMinor": self.minor,
            "minCompatibilityMajor": self.major,
            "minCompatibilityMinor": older,
            "gitVersion": self.git_version,
            "gitCommit": self.git_commit,
            "gitTreeState": "clean",
            "buildDate": self.build_date,
            "goVersion": "none",
            "compiler": "rustc",
            "platform": base::platform::platform(),
        })
    }

    /// The figure `kubernetes_build_info`.
    pub fn encode(&self, out: &mut String) {
        let labels = labels([
            ("build_date", &self.build_date),
            ("compiler", "rustc"),
            ("git_commit", &self.git_commit),
            ("git_tree_state", "clean"),
            ("git_version", self.git_version),
            ("go_version", "none"),
            ("major", self.major),
            ("minor", self.minor),
            ("platform", &base::platform::platform()),
        ]);
        let help = "[BETA] A metric with a constant '1' value labeled by major, minor, git version, git commit, git tree state, build date, Go version, and compiler from which Kubernetes was built, and platform on which it is running.";
        family(out, "kubernetes_build_info", "gauge", help);
        samples(out, "kubernetes_build_info", [(&labels, 1)]);
    }
}

/// Number and size of what is stored, of the resources that somebody reads.
fn encode_objects(registry: &Registry, out: &mut String) {
    let sizes = registry.stored_sizes();
    let named = |row: &Resource| labels([("group", &row.group), ("resource", &row.plural)]);
    let name = "apiserver_resource_objects";
    let help = "[ALPHA] Number of stored objects at the time of last check split by kind. In case of a fetching error, the value will be -1.";
    family(out, name, "gauge", help);
    for (row, objects, _) in &sizes {
        samples(out, name, [(&named(row), objects)]);
    }
    let name = "apiserver_resource_size_estimate_bytes";
    let help = "[ALPHA] Estimated size of stored objects in database. Estimate is based on sum of last observed sizes of serialized objects. In case of a fetching error, the value will be -1.";
    family(out, name, "gauge", help);
    for (row, _, bytes) in &sizes {
        samples(out, name, [(&named(row), bytes)]);
    }
    let name = "apiserver_storage_objects";
    let help = "[STABLE] [DEPRECATED, consider using apiserver_resource_objects instead] Number of stored objects at the time of last check split by kind. In case of a fetching error, the value will be -1.";
    family(out, name, "gauge", help);
    for (row, objects, _) in &sizes {
        let resource = machinery::status::qualified(&row.plural, &row.group);
        samples(out, name, [(&labels([("resource", &resource)]), objects)]);
    }
}

/// A document that is served as it is.
#[derive(Clone, Debug)]
pub struct Page {
    pub path: String,
    pub content_type: &'static str,
    pub body: Bytes,
    /// What OpenAPI says that it is, and under which heading.
    pub about: &'static str,
    pub tag: &'static str,
}

pub struct Options {
    /// Requests without credentials count for `system:anonymous`.
    pub anonymous: bool,
    /// Only on these paths, if there are any.
    pub anonymous_paths: Vec<String>,
    pub request_timeout: Duration,
    /// How many requests run at one time, watches aside. With priority and fairness their sum is
    /// shared by all; without, 0 stands for no limit.
    pub reads_in_flight: usize,
    pub writes_in_flight: usize,
    pub fairness: bool,
    /// Watches that name no timeout end within once and twice this time.
    pub min_watch: Duration,
    /// What `/api` tells as the server's address, as `192.0.2.1:6443`.
    pub advertised: String,
    pub version: Version,
    /// Groups in the order of discovery; unknown ones follow by name.
    pub group_order: &'static [&'static str],
    /// Documents at fixed paths: the OpenID configuration and keys.
    pub pages: Vec<Page>,
    /// Where the schemas of kinds come from; without it OpenAPI has paths only.
    pub schemas: Option<Arc<dyn SchemaSource>>,
    /// Messages of the built-in kinds, asked for when the first client speaks protobuf.
    pub protobuf: Option<fn() -> &'static Descriptors>,
    /// Knows the servers that answer for other groups.
    pub aggregator: Option<Arc<dyn Aggregator>>,
    /// Notes what is asked and done.
    pub audit: Option<Arc<Audit>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            anonymous: true,
            anonymous_paths: vec![],
            request_timeout: Duration::from_secs(60),
            reads_in_flight: 400,
            writes_in_flight: 200,
            fairness: true,
            min_watch: Duration::from_secs(1800),
            advertised: String::new(),
            version: Version::default(),
            group_order: &[],
            pages: vec![],
            schemas: None,
            protobuf: None,
            aggregator: None,
            audit: None,
        }
    }
}

/// What all layers share.
pub(crate) struct Shared {
    pub registry: Registry,
    pub authenticators: Vec<Box<dyn Authenticator>>,
    pub authorizers: Vec<Box<dyn Authorizer>>,
    pub limiter: Limiter,
    pub metrics: Arc<Metrics>,
    pub health: Health,
    pub discovery: Discovery,
    pub openapi: OpenApi,
    pub options: Options,
    pub started: jiff::Timestamp,
    /// Who showed wrong credentials.
    pub refusals: Seldom<Option<IpAddr>>,
    /// True from the beginning of the shutdown on: watches end.
    is_shutting_down: watch::Sender<bool>,
}

impl Shared {
    /// Resolves when the server begins to shut down.
    pub fn shutdown(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut signal = self.is_shutting_down.subscribe();
        async move {
            // An error means that the server is gone: that is a shutdown too.
            let _ = signal.wait_for(|is_down| *is_down).await;
        }
    }
}

/// The API server without its listener. Clones are the same server.
#[derive(Clone)]
pub struct Server(Arc<Shared>);

impl Server {
    pub fn new(
        registry: Registry,
        authenticators: Vec<Box<dyn Authenticator>>,
        authorizers: Vec<Box<dyn Authorizer>>,
        options: Options,
    ) -> Self {
        let health = Health::default();
        // Components of this process come in without a connection: nothing that could expire.
        health.add("loopback-serving-certificate", || Ok(()));
        let store = registry.clone();
        health.add_async("etcd", move || {
            let store = store.clone();
            Box::pin(async move {
                match tokio::time::timeout(STORE_CHECK, store.revision()).await {
                    Ok(answer) => answer.map(|_| ()).map_err(|error| error.to_string()),
                    Err(_) => Err("the store does not answer".into()),
                }
            })
        });
        let (reads, writes) = (options.reads_in_flight, options.writes_in_flight);
        let metrics = Arc::<Metrics>::default();
        let limiter = match options.fairness {
            true => {
                let seats = u32::try_from(reads + writes).unwrap_or(u32::MAX);
                let fairness = Fairness::new(seats, registry.tasks().clone());
                let source = fairness.clone();
                metrics.register(Box::new(move |out| source.encode(out)));
                Limiter::Fair(fairness)
            }
            false => Limiter::InFlight(InFlight::new(reads, writes)),
        };
        metrics.register(Box::new(crate::metrics::process::encode));
        let (objects, version) = (registry.clone(), options.version.clone());
        metrics.register(Box::new(move |out| {
            encode_objects(&objects, out);
            objects.encode_storage(out);
            version.encode(out);
        }));
        Self(Arc::new(Shared {
            registry,
            authenticators,
            authorizers,
            limiter,
            metrics,
            health,
            discovery: Discovery::new(options.group_order),
            openapi: OpenApi::new(options.schemas.clone(), options.pages.clone()),
            options,
            started: base::clock::now_seconds(),
            refusals: Seldom::default(),
            is_shutting_down: watch::Sender::new(false),
        }))
    }

    /// For the network: identities come from certificates and tokens.
    pub fn service(&self) -> ServerService {
        ServerService { shared: self.0.clone(), identity: None }
    }

    /// For a component of this process: every request counts for `user`, and is authorized as any.
    pub fn local(&self, user: UserInfo) -> ServerService {
        ServerService { shared: self.0.clone(), identity: Some(LocalIdentity(user)) }
    }

    pub fn registry(&self) -> &Registry {
        &self.0.registry
    }

    /// `/readyz` says no, and watches end, so that the listener can drain.
    pub fn begin_shutdown(&self) {
        self.0.health.begin_shutdown();
        self.0.is_shutting_down.send_replace(true);
    }

    pub fn health(&self) -> &Health {
        &self.0.health
    }

    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.0.metrics
    }

    /// Priority and fairness, for whoever reads their objects; nothing where it is turned off.
    pub fn fairness(&self) -> Option<&Fairness> {
        match &self.0.limiter {
            Limiter::Fair(fairness) => Some(fairness),
            Limiter::InFlight(_) => None,
        }
    }

    /// What the authorizers say, for reviews that ask on behalf of others.
    pub async fn authorize(&self, attributes: &Attributes) -> Decision {
        authorization::decide(&self.0.authorizers, attributes).await
    }
}

/// A way into a [`Server`].
#[derive(Clone)]
pub struct ServerService {
    shared: Arc<Shared>,
    identity: Option<LocalIdentity>,
}

impl<B> Service<Request<B>> for ServerService
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let mut request = request.map(|body| body.map_err(Into::into).boxed_unsync());
        // Whatever the message came with: only this service says who speaks locally.
        request.extensions_mut().remove::<LocalIdentity>();
        if let Some(identity) = &self.identity {
            request.extensions_mut().insert(identity.clone());
        }
        let chain = request.extensions().get::<ConnectionInfo>();
        if let Some(chain) = chain.and_then(|info| info.peer_certificates.clone()) {
            let certificates = chain.iter().map(|one| one.to_vec()).collect();
            request.extensions_mut().insert(PeerCertificates(certificates));
        }
        Box::pin(run(self.shared.clone(), request))
    }
}

async fn run(shared: Arc<Shared>, request: Request<Body>) -> Result<Response<Body>, Infallible> {
    Ok(crate::filters::handle(shared, request).await)
}

#[cfg(test)]
mod tests;
