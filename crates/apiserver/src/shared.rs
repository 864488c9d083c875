//! The state that all layers share: made once by the server, used by filters, verbs and pages.

use std::net::IpAddr;
use std::sync::Arc;

use base::log_limit::LogLimit;
use tokio::sync::watch;

use crate::authn::Authenticator;
use crate::authz::Authorizer;
use crate::discovery::Discovery;
use crate::filters::impersonation::modes::Impersonation;
use crate::health::Health;
use crate::limiter::Limiter;
use crate::metrics::Metrics;
use crate::openapi::OpenApi;
use crate::options::Options;
use crate::registry::Registry;

/// See the module.
pub(crate) struct Shared {
    pub registry: Registry,
    pub authenticators: Vec<Box<dyn Authenticator>>,
    pub authorizers: Vec<Box<dyn Authorizer>>,
    pub impersonation: Impersonation,
    pub limiter: Limiter,
    pub metrics: Arc<Metrics>,
    pub health: Health,
    pub discovery: Discovery,
    pub openapi: OpenApi,
    pub options: Options,
    pub started: jiff::Timestamp,
    /// Addresses of clients with wrong credentials.
    pub refusals: LogLimit<Option<IpAddr>>,
    /// True from the beginning of the shutdown: watches end.
    pub is_shutting_down: watch::Sender<bool>,
}

impl Shared {
    /// Resolves when the server begins to shut down.
    pub fn shutdown(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut signal = self.is_shutting_down.subscribe();
        async move {
            // An error means that the server is gone, which is a shutdown, too.
            let _ = signal.wait_for(|is_down| *is_down).await;
        }
    }

    /// The paths that `/` lists.
    pub fn paths(&self) -> Vec<String> {
        let mut paths: Vec<String> = [
            "/healthz",
            "/livez",
            "/readyz",
            "/metrics",
            "/metrics/slis",
            "/openapi/v2",
            "/openapi/v3",
            "/version",
        ]
        .map(str::to_owned)
        .into();
        paths.extend(self.options.pages.iter().map(|page| page.path.clone()));
        paths.extend(self.discovery.paths(&self.registry, &self.options));
        paths.sort_unstable();
        paths.dedup();
        paths
    }
}
