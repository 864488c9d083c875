//! The `proxy` subresource of pods, Services and nodes: HTTP to what they offer.
//!
//! In: `…/pods/NAME/proxy/REST`, where NAME may be `name:port` or `scheme:name:port`. Out: what the
//! server there answers. Pages link to their own root, so links and redirects are rewritten to lead
//! through the proxy again: [`html`].
//! Upstream: `pkg/registry/core/{pod,service,node}/rest`, `k8s.io/apimachinery/pkg/util/proxy`.

mod html;

use std::net::IpAddr;
use std::sync::Arc;

use apiserver::Registry;
use apiserver::relay::{Onward, relay};
use apiserver::request::{Key, RequestContext};
use apiserver::resource::{Behaviour, Body, Connect};
use async_trait::async_trait;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use k8s_openapi::api::core::v1::{EndpointAddress, EndpointSubset, Endpoints, Pod, Service};
use machinery::StatusError;
use machinery::status::Reason;

use crate::kubelets::Kubelets;

/// Verbs of the requests that are passed on: all of them.
pub(crate) const VERBS: &[&str] = &["create", "delete", "get", "patch", "update"];

/// Whose address is asked for.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Of {
    Pod,
    Service,
    Node,
}

pub(crate) fn behaviour(kubelets: &Arc<Kubelets>, of: Of) -> Behaviour {
    Behaviour::Connect(Arc::new(Proxy { kubelets: kubelets.clone(), of }))
}

struct Proxy {
    kubelets: Arc<Kubelets>,
    of: Of,
}

/// A server to pass requests on to.
#[derive(Debug, PartialEq)]
struct Location {
    scheme: String,
    /// With the port, if there is one.
    host: String,
    /// Is it a kubelet, which wants to know who asks?
    is_kubelet: bool,
}

#[async_trait]
impl Connect for Proxy {
    async fn connect(
        &self,
        registry: &Registry,
        _ctx: &RequestContext,
        key: &Key,
        request: Request<Body>,
    ) -> Result<Response<Body>, StatusError> {
        let location = match self.of {
            Of::Pod => pod(registry, key).await?,
            Of::Service => service(registry, key).await?,
            Of::Node => self.node(registry, key).await?,
        };
        let (prefix, rest) = split_path(request.uri().path(), self.of);
        let (prefix, rest) = (prefix.to_owned(), rest.to_owned());
        if rest.is_empty() && matches!(*request.method(), Method::GET | Method::HEAD) {
            return moved(request.uri());
        }
        self.pass_on(registry, &location, &prefix, &rest, request).await
    }
}

impl Proxy {
    async fn pass_on(
        &self,
        registry: &Registry,
        location: &Location,
        prefix: &str,
        rest: &str,
        request: Request<Body>,
    ) -> Result<Response<Body>, StatusError> {
        let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
        let slash = if rest.is_empty() { "/" } else { "" };
        let uri = format!("{}://{}{rest}{slash}{query}", location.scheme, location.host);
        let asked_host = request.headers().get(header::HOST).cloned();
        let mut headers = HeaderMap::new();
        if let Ok(path) = HeaderValue::from_str(&format!("{prefix}{rest}")) {
            headers.insert("x-forwarded-uri", path);
        }
        if let Some(host) = &asked_host {
            headers.insert("x-forwarded-host", host.clone());
        }
        headers.insert("x-forwarded-proto", HeaderValue::from_static("https"));
        let http = match location.is_kubelet {
            true => self.kubelets.http(),
            false => self.kubelets.plain(),
        };
        let onward = Onward { http, uri, headers, failed: unreachable };
        let mut response = relay(registry.tasks(), onward, request).await?;
        drop_cors(response.headers_mut());
        let links = html::Links {
            prefix: prefix.to_owned(),
            hosts: [
                Some(location.host.clone()),
                asked_host.and_then(|host| Some(host.to_str().ok()?.to_owned())),
            ]
            .into_iter()
            .flatten()
            .collect(),
        };
        Ok(rewritten(response, links))
    }

    async fn node(&self, registry: &Registry, key: &Key) -> Result<Location, StatusError> {
        let Some(id) = Id::parse(&key.name) else { return Err(invalid("node", &key.name)) };
        let address = self.kubelets.address(registry, id.name).await?;
        let (host, port) = address.rsplit_once(':').unwrap_or((&address, ""));
        if id.port.is_empty() || id.port == port {
            return Ok(Location { scheme: "https".into(), host: address, is_kubelet: true });
        }
        let host = format!("{host}:{}", id.port);
        Ok(Location { scheme: id.scheme().into(), host, is_kubelet: false })
    }
}

fn unreachable(error: transport::ClientError) -> StatusError {
    let message = format!("error trying to reach service: {error}");
    StatusError::new(Reason::ServiceUnavailable, message).without_details()
}

fn invalid(what: &str, id: &str) -> StatusError {
    StatusError::bad_request(format!("invalid {what} request {id:?}"))
}

fn unavailable(why: String) -> StatusError {
    StatusError::new(Reason::ServiceUnavailable, why).without_details()
}

async fn pod(registry: &Registry, key: &Key) -> Result<Location, StatusError> {
    let Some(id) = Id::parse(&key.name) else { return Err(invalid("pod", &key.name)) };
    let found = registry.find::<Pod>(&key.namespace, id.name).await?;
    let pod = found.ok_or_else(|| StatusError::not_found("", "pods", id.name))?;
    let containers = pod.spec.as_ref().map(|spec| spec.containers.as_slice()).unwrap_or_default();
    let first_port = || {
        let port = containers.iter().flat_map(|one| one.ports.iter().flatten()).next();
        port.map(|port| port.container_port.to_string()).unwrap_or_default()
    };
    let port = if id.port.is_empty() { first_port() } else { id.port.to_owned() };
    let status = pod.status.as_ref();
    let ips = status.and_then(|status| status.pod_ips.as_ref()).and_then(|ips| ips.first());
    let ip = ips.map(|one| one.ip.clone()).or(status.and_then(|status| status.pod_ip.clone()));
    let ip = ip.unwrap_or_default();
    let address = ip.parse::<IpAddr>().ok().filter(is_unicast);
    let Some(address) = address else {
        return Err(StatusError::bad_request("address not allowed"));
    };
    let host = host(address, &port);
    Ok(Location { scheme: id.scheme().into(), host, is_kubelet: false })
}

/// Upstream: `IP.IsGlobalUnicast`, and pods are nowhere else.
fn is_unicast(ip: &IpAddr) -> bool {
    let is_link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.segments()[0] & 0xffc0 == 0xfe80,
    };
    !(ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || is_link_local)
}

fn host(address: IpAddr, port: &str) -> String {
    let host = match address {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    };
    if port.is_empty() { host } else { format!("{host}:{port}") }
}

async fn service(registry: &Registry, key: &Key) -> Result<Location, StatusError> {
    let Some(id) = Id::parse(&key.name) else { return Err(invalid("service", &key.name)) };
    let mut port_name = id.port.to_owned();
    if let Ok(number) = id.port.parse::<i64>() {
        let found = registry.find::<Service>(&key.namespace, id.name).await?;
        let service = found.ok_or_else(|| StatusError::not_found("", "services", id.name))?;
        let ports = service.spec.into_iter().flat_map(|spec| spec.ports.into_iter().flatten());
        let mut ports = ports.filter(|port| i64::from(port.port) == number);
        let Some(port) = ports.next() else {
            let why = format!("no service port {number} found for service {:?}", id.name);
            return Err(unavailable(why));
        };
        port_name = port.name.unwrap_or_default();
    }
    let none = || unavailable(format!("no endpoints available for service {:?}", key.name));
    let found = registry.find::<Endpoints>(&key.namespace, id.name).await?;
    // Upstream's error for Endpoints that are not there names the Service.
    let endpoints = found.ok_or_else(|| StatusError::not_found("", "services", id.name))?;
    for subset in shuffled(endpoints.subsets.unwrap_or_default()) {
        let host = of_subset(registry, key, subset, &port_name).await?;
        if let Some(host) = host {
            return Ok(Location { scheme: id.scheme().into(), host, is_kubelet: false });
        }
    }
    Err(none())
}

/// Begins anywhere: requests spread over what there is.
fn shuffled<T>(mut all: Vec<T>) -> Vec<T> {
    if !all.is_empty() {
        let start = base::rng::below(all.len() as u64) as usize;
        all.rotate_left(start);
    }
    all
}

/// An address of the subset whose pod is there.
async fn of_subset(
    registry: &Registry,
    key: &Key,
    subset: EndpointSubset,
    port_name: &str,
) -> Result<Option<String>, StatusError> {
    let mut ports = subset.ports.unwrap_or_default().into_iter();
    let port = ports.find(|port| port.name.as_deref().unwrap_or_default() == port_name);
    let Some(port) = port else { return Ok(None) };
    for address in shuffled(subset.addresses.unwrap_or_default()) {
        if let Some(ip) = ip_of_pod(registry, key, &address).await? {
            return Ok(Some(host(ip, &port.port.to_string())));
        }
    }
    Ok(None)
}

/// Only pods are proxied to: whoever writes Endpoints does not choose where the server connects.
async fn ip_of_pod(
    registry: &Registry,
    key: &Key,
    address: &EndpointAddress,
) -> Result<Option<IpAddr>, StatusError> {
    let Some(target) = &address.target_ref else { return Ok(None) };
    if target.namespace.as_deref() != Some(key.namespace.as_str()) {
        return Ok(None);
    }
    let name = target.name.as_deref().unwrap_or_default();
    let Some(pod) = registry.find::<Pod>(&key.namespace, name).await? else { return Ok(None) };
    let ips = pod.status.into_iter().flat_map(|status| status.pod_ips.into_iter().flatten());
    let is_its = ips.into_iter().any(|one| one.ip == address.ip);
    Ok(if is_its { address.ip.parse().ok() } else { None })
}

/// `name`, `name:port` or `scheme:name:port`.
#[derive(Debug, PartialEq)]
struct Id<'a> {
    scheme: &'a str,
    name: &'a str,
    port: &'a str,
}

impl<'a> Id<'a> {
    /// Upstream: `net.SplitSchemeNamePort`.
    fn parse(text: &'a str) -> Option<Self> {
        let parts: Vec<&str> = text.split(':').collect();
        let id = match parts[..] {
            [name] => Self { scheme: "", name, port: "" },
            [name, port] => Self { scheme: "", name, port },
            [scheme, name, port] => Self { scheme, name, port },
            _ => return None,
        };
        let is_known = matches!(id.scheme, "" | "http" | "https");
        (is_known && !id.name.is_empty()).then_some(id)
    }

    fn scheme(&self) -> &'static str {
        if self.scheme == "https" { "https" } else { "http" }
    }
}

/// The path up to and with `/proxy`, and what follows it.
fn split_path(path: &str, of: Of) -> (&str, &str) {
    // /api/v1/namespaces/NS/pods/NAME/proxy, /api/v1/nodes/NAME/proxy
    let slashes = if of == Of::Node { 5 } else { 7 };
    let end = path.match_indices('/').nth(slashes).map_or(path.len(), |(at, _)| at);
    path.split_at(end)
}

/// Relative links of a page are relative to its directory: the root ends with a slash.
fn moved(uri: &Uri) -> Result<Response<Body>, StatusError> {
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    Response::builder()
        .status(StatusCode::MOVED_PERMANENTLY)
        .header(header::LOCATION, format!("{}/{query}", uri.path()))
        .body(transport::empty())
        .map_err(StatusError::internal)
}

fn drop_cors(headers: &mut HeaderMap) {
    for name in [
        header::ACCESS_CONTROL_ALLOW_CREDENTIALS,
        header::ACCESS_CONTROL_ALLOW_HEADERS,
        header::ACCESS_CONTROL_ALLOW_METHODS,
        header::ACCESS_CONTROL_ALLOW_ORIGIN,
    ] {
        headers.remove(name);
    }
}

/// The answer with redirects and links that lead through the proxy.
fn rewritten(response: Response<Body>, links: html::Links) -> Response<Body> {
    let (mut parts, body) = response.into_parts();
    if let Some(target) = parts.headers.get(header::LOCATION).and_then(|one| one.to_str().ok()) {
        if let Some(Ok(value)) = links.rewrite(target).map(|to| HeaderValue::from_str(&to)) {
            parts.headers.insert(header::LOCATION, value);
        }
        return Response::from_parts(parts, body);
    }
    let kind = parts.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let is_html = kind.is_some_and(|kind| kind.split(';').next() == Some("text/html"));
    if !is_html || parts.headers.contains_key(header::CONTENT_ENCODING) {
        return Response::from_parts(parts, body);
    }
    parts.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(parts, html::rewrite(body, links))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_name_scheme_and_port() {
        for (text, expected) in [
            ("web", Some(("", "web", ""))),
            ("web:http", Some(("", "web", "http"))),
            ("https:web:8443", Some(("https", "web", "8443"))),
            ("https:web:", Some(("https", "web", ""))),
            ("ftp:web:21", None),
            ("a:b:c:d", None),
            (":80", None),
        ] {
            let got = Id::parse(text).map(|id| (id.scheme, id.name, id.port));
            assert_eq!(got, expected, "{text}");
        }
    }

    #[test]
    fn paths_split_behind_proxy() {
        let pod = "/api/v1/namespaces/ns/pods/https:x:1/proxy";
        for (path, of, rest) in [
            (pod.to_owned(), Of::Pod, ""),
            (format!("{pod}/"), Of::Pod, "/"),
            (format!("{pod}/a/b//c/"), Of::Service, "/a/b//c/"),
            ("/api/v1/nodes/n/proxy/pods".to_owned(), Of::Node, "/pods"),
        ] {
            assert_eq!(split_path(&path, of).1, rest, "{path}");
        }
    }

    #[test]
    fn addresses_of_this_host_are_refused() {
        for (ip, expected) in [
            ("10.42.0.3", true),
            ("fd00::3", true),
            ("127.0.0.1", false),
            ("169.254.169.254", false),
            ("fe80::1", false),
            ("0.0.0.0", false),
        ] {
            assert_eq!(is_unicast(&ip.parse().expect("an address")), expected, "{ip}");
        }
    }
}
