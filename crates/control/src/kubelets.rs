//! The way from the API server to a kubelet: logs, exec, attach, port-forward.
//!
//! The server looks at the request, finds the node, and passes bytes on; it does not understand
//! what runs over an upgraded connection.

use std::sync::Arc;

use apiserver::Registry;
use apiserver::relay::{Onward, relay};
use apiserver::request::{Key, RequestContext};
use apiserver::resource::{Body, Connect};
use async_trait::async_trait;
use base::percent;
use http::uri::Scheme;
use http::{HeaderMap, Request, Response, Uri};
use http_body_util::{BodyExt, Limited};
use k8s_openapi::api::core::v1::{Node, Pod};
use machinery::status::Reason;
use machinery::{Object, StatusError};
use release::features::{self, Feature};
use transport::{HostPort, HttpClient};

use crate::log_options;
use crate::log_stream::{self, Handshake};

/// The kubelet's port, where a Node does not say.
const DEFAULT_PORT: i32 = 10250;
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// The server's identity towards kubelets.
#[derive(Clone)]
pub struct Kubelets {
    http: HttpClient,
    /// The same, for requests whose users choose the path.
    proxied: HttpClient,
    plain: HttpClient,
    /// Kinds of addresses in order of preference. Upstream's `--kubelet-preferred-address-types`.
    preferred: Vec<String>,
}

impl Kubelets {
    /// `http` trusts the kubelets' authority and presents the server's client certificate; `plain`
    /// presents nothing and trusts anybody, for what pods serve. Requests bring their own address.
    pub fn new(http: HttpClient, plain: HttpClient) -> Self {
        let preferred = ["InternalIP", "Hostname", "InternalDNS", "ExternalDNS", "ExternalIP"];
        let preferred = preferred.map(str::to_owned).to_vec();
        let (proxied, plain) = (http.to_global_unicast(), plain.to_global_unicast());
        Self { http, proxied, plain, preferred }
    }

    /// With upstream's `--kubelet-preferred-address-types`.
    #[must_use]
    pub fn preferring(self, preferred: Vec<String>) -> Self {
        Self { preferred, ..self }
    }

    /// The address of a node's kubelet, from the Node.
    pub(crate) async fn address(
        &self,
        registry: &Registry,
        node: &str,
    ) -> Result<HostPort, StatusError> {
        let found = registry.find::<Node>("", node).await?;
        let node_object = found.ok_or_else(|| StatusError::not_found("", "nodes", node))?;
        let status = node_object.status.unwrap_or_default();
        let addresses = status.addresses.unwrap_or_default();
        let of_kind = |kind: &String| addresses.iter().find(|address| address.type_ == *kind);
        let found = self.preferred.iter().find_map(of_kind).ok_or_else(|| {
            StatusError::internal(format!(
                "no preferred addresses found; known addresses: {addresses:?}"
            ))
        })?;
        let endpoint = status.daemon_endpoints.and_then(|endpoints| endpoints.kubelet_endpoint);
        let port =
            endpoint.map(|endpoint| endpoint.port).filter(|port| *port > 0).unwrap_or(DEFAULT_PORT);
        HostPort::new(&found.address, port).ok_or_else(|| {
            let why = format!("node {node:?} has no valid address: {:?}, {port}", found.address);
            StatusError::internal(why)
        })
    }

    /// The text at `path` of a node's kubelet.
    pub(crate) async fn text(
        &self,
        registry: &Registry,
        node: &str,
        path: &str,
    ) -> Result<String, StatusError> {
        /// What a kubelet with a thousand containers says about them is far below this.
        const LONGEST: usize = 16 << 20;
        let uri = self.uri(registry, node, path).await?;
        let request = Request::get(uri);
        let request = request.body(transport::empty()).map_err(StatusError::internal)?;
        let response = self.http.request(request).await.map_err(StatusError::internal)?;
        if !response.status().is_success() {
            return Err(StatusError::internal(format!("{path} answers {}", response.status())));
        }
        let body = Limited::new(response.into_body(), LONGEST).collect().await;
        let bytes = body.map_err(StatusError::internal)?.to_bytes();
        String::from_utf8(bytes.into()).map_err(StatusError::internal)
    }

    async fn uri(&self, registry: &Registry, node: &str, path: &str) -> Result<Uri, StatusError> {
        let address = self.address(registry, node).await?;
        address.uri(Scheme::HTTPS, path).map_err(StatusError::internal)
    }

    /// The client that kubelets know, for requests whose users choose the path. As the next, it dials
    /// no address of this machine or its links, whatever a Node or a pod says of itself.
    pub(crate) fn proxied(&self) -> &HttpClient {
        &self.proxied
    }

    /// The client without identity, for what pods serve.
    pub(crate) fn plain(&self) -> &HttpClient {
        &self.plain
    }

    /// Sends the request on to `path` of a node's kubelet and streams the answer back.
    async fn forward(
        &self,
        registry: &Registry,
        node: &str,
        path: &str,
        request: Request<Body>,
    ) -> Result<Response<Body>, StatusError> {
        let uri = self.uri(registry, node, path).await?;
        let failed = |error: transport::ClientError| {
            StatusError::new(Reason::InternalError, format!("error dialing backend: {error}"))
        };
        let onward = Onward { http: &self.http, uri, headers: HeaderMap::new(), failed };
        relay(registry.tasks(), onward, request).await
    }
}

/// The requested part of a pod.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    Log,
    Exec,
    Attach,
    PortForward,
}

/// The way to a part of a pod.
pub(crate) fn stream(kubelets: &Arc<Kubelets>, what: What) -> Arc<dyn Connect> {
    Arc::new(PodStream { kubelets: kubelets.clone(), what })
}

struct PodStream {
    kubelets: Arc<Kubelets>,
    what: What,
}

#[async_trait]
impl Connect for PodStream {
    fn demands(&self) -> Option<&'static str> {
        let is_act = self.what != What::Log
            && features::enabled(Feature::AuthorizePodWebsocketUpgradeCreatePermission);
        is_act.then_some("create")
    }

    async fn connect(
        &self,
        registry: &Registry,
        _ctx: &RequestContext,
        key: &Key,
        mut request: Request<Body>,
    ) -> Result<Response<Body>, StatusError> {
        let query = request.uri().query().unwrap_or_default().to_owned();
        let pairs = parse_query(&query);
        if self.what == What::Log {
            log_options::check(key, &pairs)?;
        }
        let found = registry.find::<Pod>(&key.namespace, &key.name).await?;
        let pod = found.ok_or_else(|| StatusError::not_found("", "pods", &key.name))?;
        let container = match self.what {
            What::PortForward => String::new(),
            _ => container_of(&pod, &pairs)?,
        };
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
        if node.is_empty() {
            return self.unscheduled(key);
        }
        // Upstream's error names the node as if it were a pod.
        if registry.find::<Node>("", &node).await?.is_none() {
            return Err(StatusError::not_found("", "pods", &node));
        }
        let path = self.path(key, &container, &pairs);
        if self.what != What::Log {
            return self.kubelets.forward(registry, &node, &path, request).await;
        }
        let handshake = Handshake::of(request.headers())?;
        let mut plain = Request::new(transport::empty());
        *plain.headers_mut() = request.headers().clone();
        *plain.extensions_mut() = request.extensions().clone();
        log_stream::without_handshake(plain.headers_mut());
        let answer = self.kubelets.forward(registry, &node, &path, plain).await?;
        let answer = log_stream::checked(answer, &key.name).await?;
        Ok(match handshake {
            Some(handshake) => handshake.carry(registry.tasks(), &mut request, answer),
            None => answer,
        })
    }
}

impl PodStream {
    /// A pod that is on no node yet has no log, and nothing that could be reached.
    fn unscheduled(&self, key: &Key) -> Result<Response<Body>, StatusError> {
        match self.what {
            What::Log => {
                let answer = Response::builder().status(http::StatusCode::NO_CONTENT);
                answer.body(transport::empty()).map_err(StatusError::internal)
            }
            _ => Err(StatusError::bad_request(format!(
                "pod {} does not have a host assigned",
                key.name
            ))),
        }
    }

    fn path(&self, key: &Key, container: &str, pairs: &[(String, String)]) -> String {
        let place = format!("{}/{}", key.namespace, key.name);
        let pass = |names: &[(&str, &str)]| -> String {
            let mut query = vec![];
            for (name, value) in pairs {
                if let Some((_, kubelet)) = names.iter().find(|(client, _)| client == name) {
                    // The kubelet knows switches as 1 and 0.
                    let value = match (value.as_str(), *name == *kubelet) {
                        ("true", false) => "1",
                        ("false", false) => "0",
                        (other, _) => other,
                    };
                    query.push(format!("{kubelet}={}", percent::encode(value)));
                }
            }
            if query.is_empty() { String::new() } else { format!("?{}", query.join("&")) }
        };
        const STREAMS: &[(&str, &str)] = &[
            ("stdin", "input"),
            ("stdout", "output"),
            ("stderr", "error"),
            ("tty", "tty"),
            ("command", "command"),
        ];
        const LOG: &[(&str, &str)] = &[
            ("follow", "follow"),
            ("previous", "previous"),
            ("sinceSeconds", "sinceSeconds"),
            ("sinceTime", "sinceTime"),
            ("timestamps", "timestamps"),
            ("tailLines", "tailLines"),
            ("limitBytes", "limitBytes"),
            ("stream", "stream"),
        ];
        match self.what {
            What::Log => format!("/containerLogs/{place}/{container}{}", pass(LOG)),
            What::Exec => format!("/exec/{place}/{container}{}", pass(STREAMS)),
            What::Attach => format!("/attach/{place}/{container}{}", pass(STREAMS)),
            What::PortForward => format!("/portForward/{place}{}", pass(&[("ports", "port")])),
        }
    }
}

/// The container that is named, or the only one, or the one an annotation prefers.
fn container_of(pod: &Pod, pairs: &[(String, String)]) -> Result<String, StatusError> {
    let spec = pod.spec.clone().unwrap_or_default();
    let inits: Vec<String> =
        spec.init_containers.into_iter().flatten().map(|one| one.name).collect();
    let ephemeral: Vec<String> =
        spec.ephemeral_containers.into_iter().flatten().map(|one| one.name).collect();
    let main: Vec<String> = spec.containers.into_iter().map(|one| one.name).collect();
    let asked = pairs.iter().find(|(name, value)| name == "container" && !value.is_empty());
    let known =
        |name: &String| main.contains(name) || inits.contains(name) || ephemeral.contains(name);
    if let Some((_, name)) = asked {
        return if known(name) {
            Ok(name.clone())
        } else {
            Err(StatusError::bad_request(format!(
                "container {name} is not valid for pod {}",
                pod.name()
            )))
        };
    }
    let preferred = pod.metadata.annotations.as_ref().and_then(|map| map.get(DEFAULT_CONTAINER));
    if let Some(name) = preferred.filter(|name| known(name)) {
        return Ok(name.clone());
    }
    match main.as_slice() {
        [only] => Ok(only.clone()),
        [] => Err(StatusError::bad_request(format!(
            "a container name must be specified for pod {}",
            pod.name()
        ))),
        several => {
            let mut message = format!(
                "a container name must be specified for pod {}, choose one of: [{}]",
                pod.name(),
                several.join(" ")
            );
            if !inits.is_empty() {
                message.push_str(&format!(" or one of the init containers: [{}]", inits.join(" ")));
            }
            Err(StatusError::bad_request(message))
        }
    }
}

pub(crate) fn parse_query(query: &str) -> Vec<(String, String)> {
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (percent::decode_query(name), percent::decode_query(value))
    };
    query.split('&').filter(|pair| !pair.is_empty()).map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_survive_the_way_to_the_kubelet() {
        let pairs = parse_query(
            "command=sh&command=-c&command=echo%20a%2Bb&stdin=true&tty=false&stdout=true",
        );
        let http =
            HttpClient::new(&transport::ClientOptions { insecure: true, ..Default::default() });
        let Ok(http) = http else { panic!("a client without server is valid") };
        let stream =
            PodStream { kubelets: Arc::new(Kubelets::new(http.clone(), http)), what: What::Exec };
        assert_eq!(
            stream.path(&Key::new("ns", "pod"), "c", &pairs),
            "/exec/ns/pod/c?command=sh&command=-c&command=echo%20a%2Bb&input=1&tty=false&output=1"
        );
    }
}
