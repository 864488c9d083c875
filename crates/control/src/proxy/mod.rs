//! The `proxy` subresource of pods, Services and nodes: HTTP to what they offer.
//!
//! In: `…/pods/NAME/proxy/REST`, where NAME may be `name:port` or `scheme:name:port`. Out: what the
//! server there answers. Pages link to their own root, so links and redirects are rewritten to lead
//! through the proxy again: [`html`].
//!
//! Invariant: a request never reaches this machine, its links or a group of machines by a pod's or a
//! node's address: what users, pods and nodes say is parsed, and the client checks what it dials.
//!
//! Deviation: a port's name is one of the pod's containers. Upstream looks it up among the names that
//! the server's machine gives to ports.
//! Upstream: `pkg/registry/core/{pod,service,node}/rest`, `k8s.io/apimachinery/pkg/util/proxy`.

mod html;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use apiserver::Registry;
use apiserver::relay::{Onward, relay};
use apiserver::request::{Key, RequestContext};
use apiserver::resource::{Body, Connect};
use async_trait::async_trait;
use http::uri::Scheme;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use k8s_openapi::api::core::v1::{
    ContainerPort, EndpointAddress, EndpointSubset, Endpoints, Pod, Service,
};
use machinery::StatusError;
use machinery::status::Reason;
use transport::{Host, HostPort, is_global_unicast};

use crate::kubelets::Kubelets;

/// The object whose address is needed.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Of {
    Pod,
    Service,
    Node,
}

pub(crate) fn to(kubelets: &Arc<Kubelets>, of: Of) -> Arc<dyn Connect> {
    Arc::new(Proxy { kubelets: kubelets.clone(), of })
}

struct Proxy {
    kubelets: Arc<Kubelets>,
    of: Of,
}

/// A server to pass requests on to.
#[derive(Debug, PartialEq)]
struct Location {
    scheme: Scheme,
    place: HostPort,
    /// Is it a kubelet, which wants to know who asks?
    is_kubelet: bool,
}

impl Location {
    /// How pages there name their own server.
    fn names(&self) -> Vec<String> {
        let full = self.place.to_string();
        let port = format!(":{}", default_port(&self.scheme));
        let short = full.strip_suffix(&port).map(str::to_owned);
        [Some(full), short].into_iter().flatten().collect()
    }
}

fn default_port(scheme: &Scheme) -> u16 {
    if *scheme == Scheme::HTTPS { 443 } else { 80 }
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
        let path = format!("{rest}{slash}{query}");
        let uri = location.place.uri(location.scheme.clone(), &path);
        let uri = uri.map_err(|error| StatusError::bad_request(error.to_string()))?;
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
            true => self.kubelets.proxied(),
            false => self.kubelets.plain(),
        };
        let onward = Onward { http, uri, headers, failed: unreachable };
        let mut response = relay(registry.tasks(), onward, request).await?;
        drop_cors(response.headers_mut());
        let links = html::Links {
            prefix: prefix.to_owned(),
            hosts: asked_host
                .and_then(|host| Some(host.to_str().ok()?.to_owned()))
                .into_iter()
                .chain(location.names())
                .collect(),
        };
        Ok(rewritten(response, links))
    }

    async fn node(&self, registry: &Registry, key: &Key) -> Result<Location, StatusError> {
        let Some(id) = Id::parse(&key.name) else { return Err(invalid("node", &key.name)) };
        let kubelet = self.kubelets.address(registry, id.name).await?;
        check_proxyable(kubelet.host()).await?;
        let port = match id.port {
            Port::Unset => kubelet.port(),
            Port::Number(port) => port,
            Port::Name(name) => return Err(unknown_port(name)),
        };
        if port == kubelet.port() {
            return Ok(Location { scheme: Scheme::HTTPS, place: kubelet, is_kubelet: true });
        }
        Ok(Location { scheme: id.scheme(), place: kubelet.with_port(port), is_kubelet: false })
    }
}

/// Whether a node's address may be proxied to. The client checks again what it dials; here the user
/// hears of it as upstream words it. Upstream: `isProxyableHostname`.
async fn check_proxyable(host: &Host) -> Result<(), StatusError> {
    let addresses: Vec<IpAddr> = match host {
        Host::Address(ip) => vec![*ip],
        Host::Name(name) => {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await;
            let found = found
                .map_err(|error| StatusError::bad_request(format!("lookup {name}: {error}")))?;
            found.map(|address| address.ip()).collect()
        }
    };
    match addresses.iter().all(|ip| is_global_unicast(*ip)) {
        true => Ok(()),
        false => Err(not_allowed()),
    }
}

fn not_allowed() -> StatusError {
    StatusError::bad_request("address not allowed")
}

fn unknown_port(name: &str) -> StatusError {
    unavailable(format!("error trying to reach service: lookup tcp/{name}: unknown port"))
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
    let ports = containers.iter().flat_map(|one| one.ports.iter().flatten());
    let scheme = id.scheme();
    let port = port_of(&id, &key.name, ports)?.unwrap_or(default_port(&scheme));
    let status = pod.status.as_ref();
    let ips = status.and_then(|status| status.pod_ips.as_ref()).and_then(|ips| ips.first());
    let ip = ips.map(|one| one.ip.clone()).or(status.and_then(|status| status.pod_ip.clone()));
    let ip = ip.unwrap_or_default().parse::<IpAddr>().ok().filter(|ip| is_global_unicast(*ip));
    let place = SocketAddr::new(ip.ok_or_else(not_allowed)?, port).into();
    Ok(Location { scheme, place, is_kubelet: false })
}

/// The port that is asked for, or the first of the containers', if there is one.
fn port_of<'a>(
    id: &Id<'_>,
    asked: &str,
    mut ports: impl Iterator<Item = &'a ContainerPort>,
) -> Result<Option<u16>, StatusError> {
    let found = match id.port {
        Port::Number(port) => return Ok(Some(port)),
        Port::Unset => match ports.next() {
            Some(port) => port,
            None => return Ok(None),
        },
        Port::Name(name) => ports
            .find(|port| port.name.as_deref() == Some(name))
            .ok_or_else(|| unknown_port(name))?,
    };
    let port = u16::try_from(found.container_port).ok().filter(|port| *port > 0);
    port.map(Some).ok_or_else(|| invalid("pod", asked))
}

async fn service(registry: &Registry, key: &Key) -> Result<Location, StatusError> {
    let Some(id) = Id::parse(&key.name) else { return Err(invalid("service", &key.name)) };
    let mut port_name = match id.port {
        Port::Name(name) => name.to_owned(),
        Port::Unset | Port::Number(_) => String::new(),
    };
    if let Port::Number(number) = id.port {
        let found = registry.find::<Service>(&key.namespace, id.name).await?;
        let service = found.ok_or_else(|| StatusError::not_found("", "services", id.name))?;
        let ports = service.spec.into_iter().flat_map(|spec| spec.ports.into_iter().flatten());
        let mut ports = ports.filter(|port| port.port == i32::from(number));
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
        let place = of_subset(registry, key, subset, &port_name).await?;
        if let Some(place) = place {
            return Ok(Location { scheme: id.scheme(), place, is_kubelet: false });
        }
    }
    Err(none())
}

/// Starts at a random endpoint, so that requests spread over all.
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
) -> Result<Option<HostPort>, StatusError> {
    let mut ports = subset.ports.unwrap_or_default().into_iter();
    let port = ports.find(|port| port.name.as_deref().unwrap_or_default() == port_name);
    let port = port.and_then(|port| u16::try_from(port.port).ok()).filter(|port| *port > 0);
    let Some(port) = port else { return Ok(None) };
    for address in shuffled(subset.addresses.unwrap_or_default()) {
        if let Some(ip) = ip_of_pod(registry, key, &address).await? {
            return Ok(Some(SocketAddr::new(ip, port).into()));
        }
    }
    Ok(None)
}

/// The server only connects to pods: a writer of Endpoints cannot choose another address.
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
    let ip = address.ip.parse().ok().filter(|ip| is_its && is_global_unicast(*ip));
    Ok(ip)
}

/// `name`, `name:port` or `scheme:name:port`.
#[derive(Debug, PartialEq)]
struct Id<'a> {
    scheme: &'a str,
    name: &'a str,
    port: Port<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Port<'a> {
    Unset,
    /// Never 0.
    Number(u16),
    Name(&'a str),
}

impl<'a> Port<'a> {
    /// `None`: neither a number of a port nor a name that a port can have.
    fn parse(text: &'a str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self::Unset);
        }
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            return text.parse().ok().filter(|port| *port > 0).map(Self::Number);
        }
        machinery::names::dns1123_label(text).is_empty().then_some(Self::Name(text))
    }
}

impl<'a> Id<'a> {
    /// Upstream: `net.SplitSchemeNamePort`.
    fn parse(text: &'a str) -> Option<Self> {
        let parts: Vec<&str> = text.split(':').collect();
        let (scheme, name, port) = match parts[..] {
            [name] => ("", name, ""),
            [name, port] => ("", name, port),
            [scheme, name, port] => (scheme, name, port),
            _ => return None,
        };
        let is_known = matches!(scheme, "" | "http" | "https");
        let port = Port::parse(port)?;
        (is_known && !name.is_empty()).then_some(Self { scheme, name, port })
    }

    fn scheme(&self) -> Scheme {
        if self.scheme == "https" { Scheme::HTTPS } else { Scheme::HTTP }
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
            ("web", Some(("", "web", Port::Unset))),
            ("web:http", Some(("", "web", Port::Name("http")))),
            ("https:web:8443", Some(("https", "web", Port::Number(8443)))),
            ("https:web:", Some(("https", "web", Port::Unset))),
            ("web:080", Some(("", "web", Port::Number(80)))),
            ("web:65535", Some(("", "web", Port::Number(65_535)))),
            ("ftp:web:21", None),
            ("a:b:c:d", None),
            (":80", None),
            ("web:0", None),
            ("web:65536", None),
            ("web:99999999999999999999", None),
            ("web:+80", None),
            ("web:-80", None),
            // What would be user information, another host, a path or a query.
            ("p:80@169.254.169.254", None),
            ("p:@localhost", None),
            ("p:@127.0.0.1", None),
            ("p:0@127.0.0.1?", None),
            ("p:80/x", None),
            ("p:80?x", None),
            ("p:80#x", None),
            ("p:[::1]", None),
            ("p:80 ", None),
            ("p:80\r\nx", None),
            ("https:p:443@10.43.0.1", None),
        ] {
            let got = Id::parse(text).map(|id| (id.scheme, id.name, id.port));
            assert_eq!(got, expected, "{text:?}");
        }
    }

    #[test]
    fn a_pods_port_is_asked_for_by_number_or_name() {
        let ports: Vec<ContainerPort> = [("web", 8080), ("", 9090), ("broken", 0)]
            .map(|(name, port)| ContainerPort {
                name: Some(name.into()),
                container_port: port,
                ..ContainerPort::default()
            })
            .into();
        for (text, expected) in [
            ("p", Ok(Some(8080))),
            ("p:1", Ok(Some(1))),
            ("p:web", Ok(Some(8080))),
            ("p:broken", Err("invalid pod request \"p:broken\"")),
            ("p:http", Err("error trying to reach service: lookup tcp/http: unknown port")),
        ] {
            let id = Id::parse(text).expect("an id");
            let got = port_of(&id, text, ports.iter()).map_err(|error| error.message.clone());
            assert_eq!(got, expected.map_err(str::to_owned), "{text}");
        }
        let id = Id::parse("p").expect("an id");
        assert_eq!(port_of(&id, "p", [].iter()).ok(), Some(None));
    }

    #[tokio::test]
    async fn a_node_on_this_machine_is_not_proxied_to() {
        for (host, expected) in [
            ("10.0.0.5", None),
            ("fd00::5", None),
            ("127.0.0.1", Some("address not allowed")),
            ("::ffff:127.0.0.1", Some("address not allowed")),
            ("169.254.169.254", Some("address not allowed")),
            ("0.0.0.0", Some("address not allowed")),
            ("224.0.0.1", Some("address not allowed")),
            ("localhost", Some("address not allowed")),
        ] {
            let host = Host::parse(host).expect("a host");
            let got = check_proxyable(&host).await.err().map(|error| error.message.clone());
            assert_eq!(got.as_deref(), expected, "{host:?}");
        }
    }

    #[test]
    fn a_page_names_its_server_with_and_without_the_usual_port() {
        let names = |scheme: Scheme, port: i32| {
            let place = HostPort::new("10.0.0.1", port).expect("a place");
            Location { scheme, place, is_kubelet: false }.names()
        };
        assert_eq!(names(Scheme::HTTP, 80), ["10.0.0.1:80", "10.0.0.1"]);
        assert_eq!(names(Scheme::HTTPS, 443), ["10.0.0.1:443", "10.0.0.1"]);
        assert_eq!(names(Scheme::HTTPS, 8443), ["10.0.0.1:8443"]);
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
}
