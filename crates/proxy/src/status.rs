//! What others may ask: `/healthz`, `/livez` (load balancers, probes), `/metrics`, `/proxyMode`.
//!
//! Healthy: no change has been waiting for its transaction longer than a minute, and (for
//! `/healthz`) the node is not going away.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::clock;
use base::task::Tasks;
use http::{Request, Response, StatusCode, header};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use transport::{Body, Incoming, Limits, Listener, full};

use crate::{Config, Error};

/// Upstream: twice the sync period.
const PATIENCE: Duration = Duration::from_secs(60);
/// Upstream: a node with this taint takes no new connections.
const LEAVING_TAINT: &str = "ToBeDeletedByClusterAutoscaler";

pub struct Status(Mutex<State>);

struct State {
    /// The oldest change that no transaction covers.
    queued: Option<Timestamp>,
    updated: Timestamp,
    eligible: bool,
    syncs: u64,
    failures: u64,
    seconds: f64,
}

impl Status {
    pub fn new() -> Self {
        Self(Mutex::new(State {
            queued: None,
            updated: clock::now(),
            eligible: true,
            syncs: 0,
            failures: 0,
            seconds: 0.0,
        }))
    }

    pub fn queued(&self) {
        self.state().queued.get_or_insert_with(clock::now);
    }

    pub fn node(&self, node: Option<&Node>) {
        let Some(node) = node else { return };
        let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
        let leaving = taints.iter().any(|taint| taint.key == LEAVING_TAINT);
        self.state().eligible = !leaving && node.metadata.deletion_timestamp.is_none();
    }

    /// A round begins; what was queued so far is its business.
    pub fn begin(&self) -> Option<Timestamp> {
        self.state().queued.take()
    }

    pub fn done(&self, seen: Option<Timestamp>, took: Duration, succeeded: bool) {
        let mut state = self.state();
        state.syncs += 1;
        state.seconds += took.as_secs_f64();
        if succeeded {
            state.updated = clock::now();
        } else {
            state.failures += 1;
            state.queued = seen.or_else(|| Some(clock::now()));
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().expect("no panic while held")
    }

    fn health(&self, with_node: bool) -> Response<Body> {
        let state = self.state();
        let now = clock::now();
        let waits = state.queued.map(|since| now.duration_since(since).unsigned_abs());
        let fresh = waits.is_none_or(|waits| waits < PATIENCE);
        let updated = if fresh { now } else { state.updated };
        let eligible = format!(",\"nodeEligible\": {}", state.eligible);
        let body = format!(
            "{{\"lastUpdated\": \"{}\",\"currentTime\": \"{}\"{}}}",
            go_time(updated),
            go_time(now),
            if with_node { &eligible } else { "" }
        );
        let healthy = fresh && (state.eligible || !with_node);
        let code = if healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        answer(code, "application/json", body)
    }

    fn metrics(&self) -> String {
        let state = self.state();
        let name = "kubeproxy_sync_proxy_rules";
        let mut page = format!(
            "# TYPE {name}_duration_seconds summary\n\
             {name}_duration_seconds_sum {}\n\
             {name}_duration_seconds_count {}\n\
             # TYPE {name}_nftables_sync_failures_total counter\n\
             {name}_nftables_sync_failures_total {}\n\
             # TYPE {name}_last_timestamp_seconds gauge\n\
             {name}_last_timestamp_seconds {}\n",
            state.seconds,
            state.syncs,
            state.failures,
            state.updated.as_second(),
        );
        base::features::encode_metrics(&mut page);
        client::encode_requests(&mut page);
        page
    }
}

/// Opens the ports that are configured and serves them as tasks.
pub async fn serve(config: &Config, status: &Arc<Status>, tasks: &Tasks) -> Result<(), Error> {
    for (address, answers) in
        [(config.healthz_bind, healthz as Answers), (config.metrics_bind, metrics as Answers)]
    {
        let Some(address) = address else { continue };
        let listener = listen(config, address).await?;
        let status = status.clone();
        let service = tower::service_fn(move |request: Request<Incoming>| {
            let response = answers(&status, request.uri().path());
            async move { Ok::<_, Infallible>(response) }
        });
        let stop = tasks.stop_signal();
        let limits = Limits { connections: 64, drain: Duration::from_secs(1), ..Limits::default() };
        tasks.spawn_graceful("status", transport::serve(listener, None, service, limits, stop));
    }
    Ok(())
}

type Answers = fn(&Status, &str) -> Response<Body>;

fn healthz(status: &Status, path: &str) -> Response<Body> {
    match path {
        "/healthz" => status.health(true),
        "/livez" => status.health(false),
        _ => answer(StatusCode::NOT_FOUND, "text/plain; charset=utf-8", "404 page not found\n"),
    }
}

fn metrics(status: &Status, path: &str) -> Response<Body> {
    let text = "text/plain; charset=utf-8";
    match path {
        "/metrics" => answer(StatusCode::OK, "text/plain; version=0.0.4", status.metrics()),
        "/healthz" => answer(StatusCode::OK, text, "ok"),
        "/proxyMode" => answer(StatusCode::OK, text, "nftables"),
        _ => answer(StatusCode::NOT_FOUND, text, "404 page not found\n"),
    }
}

async fn listen(config: &Config, address: SocketAddr) -> Result<Listener, Error> {
    match &config.netns {
        Some(path) => Ok(Listener::Tcp(net::netns::listen(path, address).await?)),
        None => Listener::tcp(address).await.map_err(|error| Error::Listen(address, error)),
    }
}

fn answer(code: StatusCode, kind: &'static str, body: impl Into<String>) -> Response<Body> {
    let mut response = Response::new(full(body.into()));
    *response.status_mut() = code;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}

/// As Go prints a time.
fn go_time(time: Timestamp) -> String {
    time.strftime("%Y-%m-%d %H:%M:%S%.f +0000 UTC").to_string()
}
