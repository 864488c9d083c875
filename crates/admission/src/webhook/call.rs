//! One POST to a webhook, on connections that stay open.
//!
//! In: a webhook's address, a body, a timeout. Out: the answer's body, or an error in the words of
//! upstream's client, which users and tests know.
//!
//! This code resolves a Service to a ready endpoint, because the server may run where cluster IPs do not
//! work; the certificate is still checked against `<name>.<namespace>.svc`.

use std::collections::HashMap;
use std::error::Error;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;
use std::time::Duration;

use apiserver::Registry;
use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE};
use http::uri::{InvalidUri, Scheme};
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt, Limited};
use k8s_openapi::api::core::v1::{Service, ServicePort};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use machinery::selector::Selector;
use transport::{ClientError, ClientOptions, HostPort, HttpClient};

use crate::WebhookError;

/// An answer contains at most one object, as a patch in base64.
const ANSWER_BYTES: usize = 8 << 20;
/// The maximum number of clients; a cluster with more different CAs opens new connections.
const CLIENTS: usize = 256;
const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// The address of a webhook.
#[derive(Clone, Debug)]
pub enum Address {
    Url(String),
    Service { namespace: String, name: String, path: String, port: u16 },
    Nowhere,
}

/// An address, with the CA of its certificate; `None`: the machine's CAs.
#[derive(Clone, Debug)]
pub struct Endpoint {
    pub address: Address,
    pub ca_pem: Option<String>,
}

/// The CAs, and the required name of the certificate.
type ClientKey = (Option<String>, Option<String>);

/// The connections to all webhooks.
#[derive(Default)]
pub struct Clients(Mutex<HashMap<ClientKey, HttpClient>>);

/// The configured URL, and the one that is connected to.
struct Target {
    shown: String,
    actual: Uri,
    server_name: Option<String>,
}

impl Clients {
    pub async fn post(
        &self,
        registry: &Registry,
        endpoint: &Endpoint,
        body: Bytes,
        timeout: Duration,
    ) -> Result<Bytes, WebhookError> {
        let work = self.exchange(registry, endpoint, body, timeout);
        match tokio::time::timeout(timeout, work).await {
            Ok(outcome) => outcome,
            Err(_) => Err(posting(&shown_url(endpoint, timeout), "context deadline exceeded")),
        }
    }

    async fn exchange(
        &self,
        registry: &Registry,
        endpoint: &Endpoint,
        body: Bytes,
        timeout: Duration,
    ) -> Result<Bytes, WebhookError> {
        let target = resolve(registry, endpoint, timeout).await?;
        let client = self
            .client((endpoint.ca_pem.clone(), target.server_name.clone()))
            .map_err(WebhookError::Client)?;
        let request = Request::post(target.actual)
            .header(CONTENT_TYPE, "application/json")
            .header(ACCEPT, "application/json, */*")
            .body(transport::full(body))
            .map_err(|error| posting(&target.shown, &error.to_string()))?;
        let response = client
            .request(request)
            .await
            .map_err(|error| posting(&target.shown, &explain(&error)))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_BYTES)
            .collect()
            .await
            .map_err(|error| posting(&target.shown, &error.to_string()))?
            .to_bytes();
        if status.is_success() { Ok(body) } else { Err(refused(status, &body)) }
    }

    fn client(&self, key: ClientKey) -> Result<HttpClient, ClientError> {
        let mut clients = self.0.lock().expect("no panic under the lock");
        if let Some(client) = clients.get(&key) {
            return Ok(client.clone());
        }
        let client = HttpClient::new(&ClientOptions {
            ca_pem: key.0.clone(),
            server_name: key.1.clone(),
            user_agent: Some("kube-apiserver-admission".into()),
            ..ClientOptions::default()
        })?;
        if clients.len() >= CLIENTS {
            clients.clear();
        }
        clients.insert(key, client.clone());
        Ok(client)
    }
}

fn posting(url: &str, why: &str) -> WebhookError {
    WebhookError::Post { url: url.to_owned(), why: why.to_owned() }
}

fn shown_url(endpoint: &Endpoint, timeout: Duration) -> String {
    match &endpoint.address {
        Address::Url(url) => format!("{}?timeout={}s", with_path(url), timeout.as_secs()),
        Address::Service { namespace, name, path, port } => {
            format!("https://{name}.{namespace}.svc:{port}{}", target_of(path, timeout))
        }
        Address::Nowhere => String::new(),
    }
}

/// The path and query of a webhook behind a Service.
fn target_of(path: &str, timeout: Duration) -> String {
    format!("/{}?timeout={}s", path.trim_start_matches('/'), timeout.as_secs())
}

/// Adds the path `/` to a URL without a path.
fn with_path(url: &str) -> String {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    if rest.contains('/') { url.to_owned() } else { format!("{url}/") }
}

async fn resolve(
    registry: &Registry,
    endpoint: &Endpoint,
    timeout: Duration,
) -> Result<Target, WebhookError> {
    let shown = shown_url(endpoint, timeout);
    match &endpoint.address {
        Address::Url(_) => {
            let actual = shown.parse().map_err(|why: InvalidUri| posting(&shown, &why.to_string()));
            Ok(Target { actual: actual?, shown, server_name: None })
        }
        Address::Service { namespace, name, port, path } => {
            let server_name = format!("{name}.{namespace}.svc");
            let place = resolve_service(registry, namespace, name, *port)
                .await
                .map_err(|why| posting(&shown, &why))?;
            let actual = place
                .uri(Scheme::HTTPS, &target_of(path, timeout))
                .map_err(|why| posting(&shown, &why.to_string()))?;
            Ok(Target { shown, actual, server_name: Some(server_name) })
        }
        Address::Nowhere => Err(WebhookError::NoAddress),
    }
}

/// Resolves a Service to a ready endpoint. Upstream: `k8s.io/apiserver/pkg/util/proxy`.
async fn resolve_service(
    registry: &Registry,
    namespace: &str,
    name: &str,
    port: u16,
) -> Result<HostPort, String> {
    let found = registry.find::<Service>(namespace, name).await.map_err(|e| e.to_string())?;
    let service = found.ok_or_else(|| format!("service {name:?} not found"))?;
    let spec = service.spec.unwrap_or_default();
    if spec.type_.as_deref() == Some("ExternalName") {
        let host = spec.external_name.unwrap_or_default();
        let place = HostPort::new(&host, port);
        return place.ok_or_else(|| format!("service {name:?} has no valid external name"));
    }
    let ports = spec.ports.unwrap_or_default();
    let wanted = ports.iter().find(|one| one.port == i32::from(port));
    let wanted =
        wanted.ok_or_else(|| format!("no service port {port} found for service {name:?}"))?;
    let labels = [(SERVICE_NAME.to_owned(), name.to_owned())].into();
    let slices = registry
        .cached_with::<EndpointSlice>(namespace, Selector::from_map(&labels))
        .await
        .map_err(|error| error.to_string())?;
    let ready = ready_endpoints(&slices, wanted);
    if ready.is_empty() {
        return Err(format!("no endpoints available for service {name:?}"));
    }
    let chosen = base::rng::below(ready.len() as u64) as usize;
    Ok(ready[chosen].into())
}

fn ready_endpoints(slices: &[EndpointSlice], wanted: &ServicePort) -> Vec<SocketAddr> {
    let name = wanted.name.as_deref().unwrap_or_default();
    let mut found = vec![];
    for slice in slices {
        let mut ports = slice.ports.iter().flatten();
        let port = ports.find(|port| port.name.as_deref().unwrap_or_default() == name);
        let Some(port) = port.and_then(|port| u16::try_from(port.port?).ok()) else { continue };
        for endpoint in slice.endpoints.iter().flatten() {
            let conditions = endpoint.conditions.as_ref();
            if conditions.and_then(|conditions| conditions.ready) == Some(false) {
                continue;
            }
            let addresses = endpoint.addresses.iter().filter_map(|text| text.parse().ok());
            found.extend(addresses.map(|address: IpAddr| SocketAddr::new(address, port)));
        }
    }
    found
}

/// A transport error in the words of Go's client.
fn explain(error: &ClientError) -> String {
    let mut link: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(one) = link {
        if let Some(ClientError::Connect { target, source }) = one.downcast_ref() {
            return dialing(target, source);
        }
        link = one.source();
    }
    match error {
        ClientError::Connect { target, source } => dialing(target, source),
        other => other.to_string(),
    }
}

fn dialing(target: &str, error: &io::Error) -> String {
    let why = match error.kind() {
        io::ErrorKind::ConnectionRefused => "connect: connection refused",
        io::ErrorKind::HostUnreachable => "connect: no route to host",
        io::ErrorKind::NetworkUnreachable => "connect: network is unreachable",
        io::ErrorKind::TimedOut => "i/o timeout",
        io::ErrorKind::ConnectionReset => return "read: connection reset by peer".into(),
        io::ErrorKind::UnexpectedEof => return "EOF".into(),
        // rustls wraps its own errors this way.
        io::ErrorKind::InvalidData => return tls_failure(error),
        _ => {
            let host = target.rsplit_once(':').map_or(target, |(host, _)| host);
            return format!("dial tcp: lookup {host}: {error}");
        }
    };
    format!("dial tcp {target}: {why}")
}

fn tls_failure(error: &io::Error) -> String {
    use rustls::{CertificateError, Error as Tls};
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Tls>());
    let Some(Tls::InvalidCertificate(why)) = inner else {
        return format!("tls: {error}");
    };
    let why = match why {
        CertificateError::UnknownIssuer => "certificate signed by unknown authority".to_owned(),
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "certificate has expired or is not yet valid".to_owned()
        }
        other => other.to_string(),
    };
    format!("tls: failed to verify certificate: x509: {why}")
}

/// The error of upstream's client for an answer that is no success.
fn refused(status: StatusCode, body: &[u8]) -> WebhookError {
    let parsed: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    if parsed["kind"] == "Status"
        && let Some(message) = parsed["message"].as_str()
    {
        return WebhookError::Refused(message.to_owned());
    }
    let text = String::from_utf8_lossy(&body[..body.len().min(2048)]).trim().to_owned();
    let text = if text.is_empty() { "unknown".to_owned() } else { text };
    let message = match status.as_u16() {
        400 => "the server rejected our request for an unknown reason".to_owned(),
        401 => "the server has asked for the client to provide credentials".to_owned(),
        403 => text,
        404 => "the server could not find the requested resource".to_owned(),
        405 => "the server does not allow this method on the requested resource".to_owned(),
        429 => "the server has received too many requests and has asked us to try again later".to_owned(),
        503 => "the server is currently unable to handle the request".to_owned(),
        504 => "the server was unable to return a response in the time allotted, but may still be processing the request".to_owned(),
        500.. => format!("an error on the server ({text:?}) has prevented the request from succeeding"),
        code => format!("the server responded with the status code {code} but did not return more information"),
    };
    WebhookError::Refused(message)
}
