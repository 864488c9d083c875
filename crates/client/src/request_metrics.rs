//! The metrics of this process' client requests, in Prometheus' text format.
//! Upstream: `component-base/metrics/prometheus/restclient`.
//!
//! In: every request of a [`crate::Client`], by the service around its transport. Out: the families that
//! client-go has. Invariant: labels are the method, the code and the server's address, never a path, so
//! that their number is bounded. A watch is counted when its answer begins.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use http::{Request, Response};
use http_body::Body as _;
use kube::client::Body;
use tower::Service;

use crate::histogram::Histogram;

const SECONDS: [f64; 12] = [0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0];
const BYTES: [f64; 11] = [
    64.0,
    256.0,
    512.0,
    1024.0,
    4096.0,
    16384.0,
    65536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
];

/// The figures of one server and method.
struct Numbers {
    seconds: Histogram<12>,
    request_bytes: Histogram<11>,
    response_bytes: Histogram<11>,
    /// By status; 0 means no answer.
    codes: BTreeMap<u16, u64>,
}

impl Numbers {
    const fn new() -> Self {
        Self {
            seconds: Histogram::new(&SECONDS),
            request_bytes: Histogram::new(&BYTES),
            response_bytes: Histogram::new(&BYTES),
            codes: BTreeMap::new(),
        }
    }
}

type Key = (Arc<str>, &'static str);

/// Held for a few additions, and for scrapes.
static NUMBERS: Mutex<BTreeMap<Key, Numbers>> = Mutex::new(BTreeMap::new());

/// Counts what goes through a service.
#[derive(Clone)]
pub(crate) struct Counting<S> {
    inner: S,
    host: Arc<str>,
}

impl<S> Counting<S> {
    /// `host` is the server's address, as in a URL.
    pub fn new(inner: S, host: &str) -> Self {
        Self { inner, host: host.into() }
    }
}

type Answer<S> =
    Result<<S as Service<Request<Body>>>::Response, <S as Service<Request<Body>>>::Error>;

impl<S, B> Service<Request<Body>> for Counting<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
    B: http_body::Body,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Answer<S>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let key = (Arc::clone(&self.host), method(request.method()));
        let sent = request.body().size_hint().exact().filter(|bytes| *bytes > 0);
        let started = tokio::time::Instant::now();
        let answered = self.inner.call(request);
        Box::pin(async move {
            let answer = answered.await;
            let code = answer.as_ref().map_or(0, |response| response.status().as_u16());
            let received = answer.as_ref().ok().and_then(|it| it.body().size_hint().exact());
            let mut all = NUMBERS.lock().expect("no panic while held");
            let numbers = all.entry(key).or_insert_with(Numbers::new);
            numbers.seconds.observe(started.elapsed().as_secs_f64());
            *numbers.codes.entry(code).or_default() += 1;
            if let Some(bytes) = sent {
                numbers.request_bytes.observe(bytes as f64);
            }
            if let Some(bytes) = received {
                numbers.response_bytes.observe(bytes as f64);
            }
            drop(all);
            answer
        })
    }
}

fn method(method: &http::Method) -> &'static str {
    const KNOWN: &[&str] = &["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"];
    KNOWN.iter().find(|known| **known == method.as_str()).copied().unwrap_or("other")
}

/// Writes the families of all clients.
pub fn encode(out: &mut String) {
    let all = NUMBERS.lock().expect("no panic while held");
    if all.is_empty() {
        return;
    }
    let head = |out: &mut String, name: &str, kind: &str, help: &str| {
        let _ = writeln!(out, "# HELP {name} [ALPHA] {help}\n# TYPE {name} {kind}");
    };
    let labels = |(host, verb): &Key| format!("host=\"{host}\",verb=\"{verb}\"");
    let name = "rest_client_request_duration_seconds";
    head(out, name, "histogram", "Request latency in seconds. Broken down by verb, and host.");
    for (key, numbers) in &*all {
        numbers.seconds.write(out, name, &labels(key));
    }
    let name = "rest_client_request_size_bytes";
    head(out, name, "histogram", "Request size in bytes. Broken down by verb and host.");
    for (key, numbers) in &*all {
        numbers.request_bytes.write(out, name, &labels(key));
    }
    let name = "rest_client_requests_total";
    let help = "Number of HTTP requests, partitioned by status code, method, and host.";
    head(out, name, "counter", help);
    for ((host, verb), numbers) in &*all {
        for (code, count) in &numbers.codes {
            let code = if *code == 0 { "<error>".to_owned() } else { code.to_string() };
            let _ = writeln!(
                out,
                "{name}{{code=\"{code}\",host=\"{host}\",method=\"{verb}\"}} {count}"
            );
        }
    }
    let name = "rest_client_response_size_bytes";
    head(out, name, "histogram", "Response size in bytes. Broken down by verb and host.");
    for (key, numbers) in &*all {
        numbers.response_bytes.write(out, name, &labels(key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn requests_are_counted_by_method_code_and_server() {
        let answers = tower::service_fn(|request: Request<Body>| async move {
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
            match request.uri().path() {
                "/lost" => Err("lost"),
                path => {
                    let mut response = Response::new(Body::from(b"1234".to_vec()));
                    if path == "/missing" {
                        *response.status_mut() = http::StatusCode::NOT_FOUND;
                    }
                    Ok(response)
                }
            }
        });
        let mut client = Counting::new(answers, "metrics.test:1");
        for path in ["/", "/missing", "/lost", "/"] {
            let request = Request::get(path).body(Body::empty()).expect("a path");
            let _ = client.call(request).await;
        }
        let mut page = String::new();
        encode(&mut page);
        let host = "host=\"metrics.test:1\"";
        for line in [
            format!("rest_client_requests_total{{code=\"200\",{host},method=\"GET\"}} 2"),
            format!("rest_client_requests_total{{code=\"404\",{host},method=\"GET\"}} 1"),
            format!("rest_client_requests_total{{code=\"<error>\",{host},method=\"GET\"}} 1"),
            format!(
                "rest_client_request_duration_seconds_bucket{{{host},verb=\"GET\",le=\"0.1\"}} 0"
            ),
            format!(
                "rest_client_request_duration_seconds_bucket{{{host},verb=\"GET\",le=\"0.25\"}} 4"
            ),
            format!("rest_client_response_size_bytes_sum{{{host},verb=\"GET\"}} 12"),
            format!("rest_client_request_size_bytes_count{{{host},verb=\"GET\"}} 0"),
        ] {
            assert!(page.contains(&line), "{line} in {page}");
        }
    }
}
