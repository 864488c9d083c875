//! Status for other programs: `/healthz`, `/livez` (load balancers, probes), `/metrics`, `/proxyMode`.
//!
//! Healthy: no change has waited longer than a minute for its transaction, and (for `/healthz`) the
//! node is not about to be deleted.
//! Upstream: `pkg/proxy/healthcheck/proxy_health.go`. Deviation: upstream reports a proxy as
//! healthy even if its first transaction never succeeds.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::clock;
use base::metrics::{Buckets, Family};
use base::task::Tasks;
use http::{Request, Response, StatusCode, header};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use serde_json::json;
use transport::{Body, Incoming, Limits, Listener, full};

use crate::{Config, Error};

/// Upstream: twice the sync period.
const PATIENCE: Duration = Duration::from_secs(60);
/// Upstream: a node with this taint takes no new connections.
const LEAVING_TAINT: &str = "ToBeDeletedByClusterAutoscaler";

/// Go's zero time.
const ZERO_TIME: &str = "0001-01-01T00:00:00Z";

/// A transaction has the rules of both families.
const FAMILY: &[&str] = &["dual"];
const LABELS: &[&str] = &["ip_family"];

static SYNCS: Family = Family::histogram(
    "kubeproxy_sync_proxy_rules_duration_seconds",
    "[ALPHA] SyncProxyRules latency in seconds",
    LABELS,
    Buckets::Exponential(0.001, 2.0, 15),
);
/// Deviation: measured from when the proxy got the change, not from the change of the pod or Service.
static PROGRAMMED: Family = Family::histogram(
    "kubeproxy_network_programming_duration_seconds",
    "[ALPHA] In Cluster Network Programming Latency in seconds",
    LABELS,
    Buckets::Listed(&[
        0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0,
        90.0, 120.0, 180.0, 300.0,
    ]),
);
static FAILURES: Family = Family::counter(
    "kubeproxy_sync_proxy_rules_nftables_sync_failures_total",
    "[ALPHA] Cumulative proxy nftables sync failures",
    LABELS,
);
static LAST_SYNC: Family = Family::gauge(
    "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
    "[ALPHA] The last time proxy rules were successfully synced",
    LABELS,
);
static LAST_QUEUED: Family = Family::gauge(
    "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
    "[ALPHA] The last time a sync of proxy rules was queued",
    LABELS,
);

pub struct Status(Mutex<State>);

struct State {
    /// The time of the oldest change that no transaction covers.
    queued: Option<Timestamp>,
    /// The time of the oldest change that the current round covers.
    under_way: Option<Timestamp>,
    updated: Option<Timestamp>,
    eligible: bool,
}

impl Status {
    pub fn new() -> Self {
        Self(Mutex::new(State { queued: None, under_way: None, updated: None, eligible: true }))
    }

    pub fn queued(&self) {
        self.state().queued.get_or_insert_with(clock::now);
        LAST_QUEUED.set(FAMILY, seconds(clock::now()));
    }

    pub fn node(&self, node: Option<&Node>) {
        let Some(node) = node else { return };
        let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
        let leaving = taints.iter().any(|taint| taint.key == LEAVING_TAINT);
        self.state().eligible = !leaving && node.metadata.deletion_timestamp.is_none();
    }

    /// A round begins; it covers all changes queued so far.
    pub fn begin(&self) {
        let mut state = self.state();
        state.under_way = state.queued.take();
    }

    pub fn done(&self, took: Duration, succeeded: bool) {
        let mut state = self.state();
        let now = clock::now();
        SYNCS.took(FAMILY, took);
        let seen = state.under_way.take();
        if succeeded {
            state.updated = Some(now);
            LAST_SYNC.set(FAMILY, seconds(now));
            if let Some(seen) = seen {
                PROGRAMMED.observe(FAMILY, seconds(now) - seconds(seen));
            }
        } else {
            FAILURES.count(FAMILY);
            state.queued = seen.or(Some(now));
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().expect("no panic while held")
    }

    /// Whether the rules are up to date.
    pub fn is_fresh(&self) -> bool {
        self.state().is_fresh(clock::now())
    }

    fn health(&self, with_node: bool) -> Response<Body> {
        let state = self.state();
        let now = clock::now();
        let fresh = state.is_fresh(now);
        let updated = state.updated.map_or_else(|| ZERO_TIME.to_owned(), |at| at.to_string());
        let family = json!({"lastUpdated": updated, "healthy": fresh});
        let mut body = json!({"currentTime": now.to_string(), "healthy": fresh});
        if state.updated.is_some() {
            body["status"] = json!({"IPv4": family, "IPv6": family});
        }
        if with_node {
            body["nodeEligible"] = json!(state.eligible);
        }
        let healthy = fresh && (state.eligible || !with_node);
        body["lastUpdated"] = json!(if healthy { now.to_string() } else { updated });
        let code = if healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        let mut response = answer(code, "application/json", body.to_string());
        let sniffing = header::HeaderValue::from_static("nosniff");
        response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, sniffing);
        response
    }
}

fn seconds(at: Timestamp) -> f64 {
    at.as_millisecond() as f64 / 1e3
}

fn page() -> String {
    let mut page = String::new();
    base::metrics::encode(&[&PROGRAMMED, &SYNCS, &LAST_QUEUED, &LAST_SYNC, &FAILURES], &mut page);
    base::metrics::process::encode(&mut page);
    release::features::encode_metrics(&mut page);
    client::encode_requests(&mut page);
    base::metrics::encode_registered(&mut page);
    page
}

impl State {
    fn is_fresh(&self, now: Timestamp) -> bool {
        let oldest = self.under_way.or(self.queued);
        let waits = oldest.map(|since| now.duration_since(since).unsigned_abs());
        waits.is_none_or(|waits| waits < PATIENCE)
    }
}

/// Opens the configured ports and serves them in tasks.
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

fn metrics(_: &Status, path: &str) -> Response<Body> {
    let text = "text/plain; charset=utf-8";
    match path {
        "/metrics" => answer(StatusCode::OK, "text/plain; version=0.0.4", page()),
        "/healthz" => answer(StatusCode::OK, text, "ok"),
        "/proxyMode" => answer(StatusCode::OK, text, "nftables"),
        _ => answer(StatusCode::NOT_FOUND, text, "404 page not found\n"),
    }
}

pub async fn listen(config: &Config, address: SocketAddr) -> Result<Listener, Error> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_that_waits_too_long_is_unhealthy() {
        let status = Status::new();
        let code = |with_node| status.health(with_node).status().as_u16();
        assert_eq!((code(true), code(false)), (200, 200));
        status.state().queued = Some(clock::now() - PATIENCE);
        assert_eq!((code(true), code(false)), (503, 503));
        // A round that hangs or fails does not make it healthy.
        status.begin();
        status.queued();
        assert_eq!((code(true), code(false)), (503, 503));
        status.done(Duration::ZERO, false);
        assert_eq!((code(true), code(false)), (503, 503));
        status.begin();
        status.done(Duration::ZERO, true);
        assert_eq!((code(true), code(false)), (200, 200));
        let leaving = json!({"metadata": {"name": "n"},
            "spec": {"taints": [{"key": LEAVING_TAINT, "effect": "NoSchedule"}]}});
        status.node(Some(&serde_json::from_value(leaving).expect("a node")));
        assert_eq!((code(true), code(false)), (503, 200));
    }
}
