//! Status for other programs by HTTP: `/metrics`, `/ready`, `/health`.
//!
//! Upstream: CoreDNS' plugins `prometheus` (9153), `ready` (8181), `health` (8080). Deviation: one port has all three,
//! because the process runs in the node's network, where pods of the host network want 8080 and 8181.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use base::task::Tasks;
use http::{HeaderValue, Request, Response, StatusCode, header};
use tokio::net::TcpListener;
use transport::{Body, Incoming, Limits, Listener, full};

/// What the pages say.
pub trait Report: Send + Sync + 'static {
    fn is_ready(&self) -> bool;
    fn metrics(&self) -> String;
}

/// Serves the listener in a task.
pub fn serve(listener: TcpListener, report: Arc<dyn Report>, tasks: &Tasks) {
    let service = tower::service_fn(move |request: Request<Incoming>| {
        let response = answer(&*report, request.uri().path());
        async move { Ok::<_, Infallible>(response) }
    });
    let stop = tasks.stop_signal();
    let limits = Limits { connections: 64, drain: Duration::from_secs(1), ..Limits::default() };
    let listener = Listener::Tcp(listener);
    tasks.spawn_graceful("status", transport::serve(listener, None, service, limits, stop));
}

fn answer(report: &dyn Report, path: &str) -> Response<Body> {
    match path {
        "/metrics" => page(StatusCode::OK, "text/plain; version=0.0.4", report.metrics()),
        "/health" => text(StatusCode::OK, "OK"),
        "/ready" if report.is_ready() => text(StatusCode::OK, "OK"),
        // The plugins that are not ready, as upstream.
        "/ready" => text(StatusCode::SERVICE_UNAVAILABLE, "kubernetes"),
        _ => text(StatusCode::NOT_FOUND, "404 page not found\n"),
    }
}

fn text(code: StatusCode, body: &str) -> Response<Body> {
    page(code, "text/plain; charset=utf-8", body.to_owned())
}

fn page(code: StatusCode, kind: &'static str, body: String) -> Response<Body> {
    let mut response = Response::new(full(body));
    *response.status_mut() = code;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// For messages of errors and logs.
pub fn shown(addresses: &[SocketAddr]) -> String {
    addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(",")
}
