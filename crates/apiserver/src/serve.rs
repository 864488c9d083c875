//! The server as a service, for connections of the listener and for direct calls of components in the same
//! process.
//!
//! In: a registry, authenticators and authorizers in order, options. Out: one `tower::Service` for requests
//! from the network ([`Server::service`]), and one per in-process identity ([`Server::local`]); both use the
//! same stack (see [`crate::filters`]).

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use base::log_limit::LogLimit;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::BodyExt;
use tokio::sync::watch;
use tower::Service;
use transport::ConnectionInfo;

use crate::authn::{Authenticator, LocalIdentity, PeerCertificates};
use crate::authz::{Attributes, Authorizer, Decision, decide};
use crate::discovery::Discovery;
use crate::fairness::Fairness;
use crate::filters::impersonation::modes::Impersonation;
use crate::health::Health;
use crate::limiter::{InFlight, Limiter};
use crate::metrics::{Metrics, family, labels, samples};
use crate::openapi::OpenApi;
pub use crate::options::{Browsers, Options, Page, Version};
use crate::registry::Registry;
use crate::request::UserInfo;
use crate::resource::{Body, Resource};
use crate::shared::Shared;

/// Upstream: `--etcd-readycheck-timeout`.
const STORE_CHECK: Duration = Duration::from_secs(2);

/// Number and size of stored objects, for the resources that a client has read.
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

/// The API server without its listener. Clones share the server.
#[derive(Clone)]
pub struct Server(Arc<Shared>);

impl Server {
    pub fn new(
        registry: Registry,
        authenticators: Vec<Box<dyn Authenticator>>,
        authorizers: Vec<Box<dyn Authorizer>>,
        options: Options,
    ) -> Self {
        if let Some(schemas) = &options.schemas {
            registry.set_schemas(schemas.clone());
        }
        let health = Health::default();
        // Components of this process use no connection, so there is no certificate that could expire.
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
            impersonation: Impersonation::new(&metrics),
            limiter,
            metrics,
            health,
            discovery: Discovery::new(options.group_order),
            openapi: OpenApi::new(options.schemas.clone(), options.pages.clone()),
            options,
            started: base::clock::now_seconds(),
            refusals: LogLimit::default(),
            is_shutting_down: watch::Sender::new(false),
        }))
    }

    /// For the network: identities come from certificates and tokens.
    pub fn service(&self) -> ServerService {
        ServerService { shared: self.0.clone(), identity: None }
    }

    /// For a component of this process: every request has the identity `user`, and is authorized as usual.
    pub fn local(&self, user: UserInfo) -> ServerService {
        ServerService { shared: self.0.clone(), identity: Some(LocalIdentity(user)) }
    }

    pub fn registry(&self) -> &Registry {
        &self.0.registry
    }

    /// `/readyz` fails from now on, and watches end, so that the listener can drain.
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

    /// Priority and fairness, for the code that reads its objects; `None` if it is off.
    pub fn fairness(&self) -> Option<&Fairness> {
        match &self.0.limiter {
            Limiter::Fair(fairness) => Some(fairness),
            Limiter::InFlight(_) => None,
        }
    }

    /// The decision of the authorizers, for reviews about other users.
    pub async fn authorize(&self, attributes: &Attributes) -> Decision {
        decide(&self.0.authorizers, attributes).await
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
        // Whatever the request contains: only this service sets the local identity.
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
