//! `healthCheckNodePort`: tells an external load balancer which nodes have endpoints of a Service
//! whose external traffic policy is Local.
//!
//! In: services, slices, the node's addresses for node ports. Out: a listener for each such Service
//! on each of these addresses. It answers 200 while the node has ready endpoints and the rules are
//! up to date, otherwise 503.
//! Invariant: a port that fails to open does not delay others; the next round tries it again.
//! Upstream: `pkg/proxy/healthcheck/service_health.go`.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base::task::Tasks;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Request, Response, StatusCode};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use net::nft::Ip;
use transport::{Body, Limits, full};

use crate::endpoints;
use crate::model::NodePorts;
use crate::services::PROXY_NAME_LABEL;
use crate::status::Status;
use crate::{Config, Error};

const WEIGHT: &str = "x-load-balancing-endpoint-weight";
/// How long running requests may take after a close.
const DRAIN: Duration = Duration::from_millis(200);

type Name = (String, String);

/// The health check of one Service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Check {
    port: u16,
    /// Ready endpoints on this node, by address.
    v4: usize,
    v6: usize,
}

pub struct HealthChecks {
    status: Arc<Status>,
    config: Config,
    open: BTreeMap<Name, Open>,
}

struct Open {
    port: u16,
    addresses: BTreeSet<IpAddr>,
    counts: Arc<Counts>,
    /// Dropping it closes the ports.
    tasks: Tasks,
}

/// The numbers of [`Check`], shared with the listeners.
#[derive(Default)]
struct Counts {
    v4: AtomicUsize,
    v6: AtomicUsize,
}

/// The health checks of all Services that have one, with the endpoints on `node`.
pub fn wanted<S, E>(services: &[S], slices: &[E], node: &str) -> BTreeMap<Name, Check>
where
    S: Borrow<Service>,
    E: Borrow<EndpointSlice>,
{
    let asked = services.iter().filter_map(|service| check_of(service.borrow()));
    let mut checks: BTreeMap<Name, Check> = asked.collect();
    if checks.is_empty() {
        return checks;
    }
    let of_one = |slice: &&EndpointSlice| {
        let namespace = slice.metadata.namespace.clone().unwrap_or_default();
        let service = endpoints::service_name(slice).unwrap_or_default();
        checks.contains_key(&(namespace, service.to_owned()))
    };
    let slices: Vec<&EndpointSlice> = slices.iter().map(Borrow::borrow).filter(of_one).collect();
    for ip in [Ip::V4, Ip::V6] {
        // A Service with two ports lists an endpoint twice.
        let mut ready: BTreeMap<Name, BTreeSet<IpAddr>> = BTreeMap::new();
        for (port, all) in endpoints::collect(&slices, ip, node) {
            let own = ready.entry((port.namespace, port.service)).or_default();
            let counted = all.iter().filter(|endpoint| endpoint.ready && endpoint.local);
            own.extend(counted.map(|endpoint| endpoint.address.ip()));
        }
        for (name, addresses) in ready {
            let Some(check) = checks.get_mut(&name) else { continue };
            *(if ip == Ip::V4 { &mut check.v4 } else { &mut check.v6 }) = addresses.len();
        }
    }
    checks
}

fn check_of(service: &Service) -> Option<(Name, Check)> {
    let spec = service.spec.as_ref()?;
    let labels = service.metadata.labels.as_ref();
    let is_foreign = labels.is_some_and(|labels| labels.contains_key(PROXY_NAME_LABEL));
    let is_local = spec.external_traffic_policy.as_deref() == Some("Local");
    if is_foreign || !is_local || spec.type_.as_deref() != Some("LoadBalancer") {
        return None;
    }
    let port = u16::try_from(spec.health_check_node_port?).ok().filter(|port| *port > 0)?;
    let name = (service.metadata.namespace.clone()?, service.metadata.name.clone()?);
    Some((name, Check { port, ..Check::default() }))
}

impl HealthChecks {
    pub fn new(config: Config, status: Arc<Status>) -> Self {
        Self { status, config, open: BTreeMap::new() }
    }

    /// Opens and closes ports. False when a port failed to open.
    pub async fn follow(&mut self, wanted: &BTreeMap<Name, Check>, on: &NodePorts) -> bool {
        let addresses: BTreeSet<IpAddr> = match on {
            // Accepts both families.
            NodePorts::All => [Ipv6Addr::UNSPECIFIED.into()].into(),
            NodePorts::Only(addresses) => addresses.iter().copied().collect(),
        };
        let stays = |name: &Name, open: &Open| {
            let check = wanted.get(name);
            check.is_some_and(|check| check.port == open.port) && open.addresses == addresses
        };
        let gone: Vec<Name> =
            self.open.iter().filter(|(n, o)| !stays(n, o)).map(|(n, _)| n.clone()).collect();
        for name in gone {
            if let Some(open) = self.open.remove(&name) {
                open.tasks.shutdown(DRAIN * 2).await;
            }
        }
        let mut all = true;
        for (name, check) in wanted {
            if !self.open.contains_key(name) {
                match self.open_one(name, check.port, &addresses).await {
                    Ok(open) => drop(self.open.insert(name.clone(), open)),
                    Err(error) => {
                        let (namespace, service) = name;
                        tracing::warn!(namespace, service, %error, "failed to serve the Service's health check");
                        all = false;
                    }
                }
            }
            if let Some(open) = self.open.get(name) {
                open.counts.v4.store(check.v4, Ordering::Relaxed);
                open.counts.v6.store(check.v6, Ordering::Relaxed);
            }
        }
        all
    }

    async fn open_one(
        &self,
        name: &Name,
        port: u16,
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<Open, Error> {
        let tasks = Tasks::new("health check of a service");
        let counts = Arc::new(Counts::default());
        for address in addresses {
            let listener =
                crate::status::listen(&self.config, SocketAddr::new(*address, port)).await?;
            let (status, counts, name) = (self.status.clone(), counts.clone(), name.clone());
            let of = *address;
            let service = tower::service_fn(move |_: Request<transport::Incoming>| {
                let response = answer(&name, counts.of(of), status.is_fresh());
                async move { Ok::<_, Infallible>(response) }
            });
            let limits = Limits { connections: 64, drain: DRAIN, ..Limits::default() };
            let stop = tasks.stop_signal();
            tasks.spawn_graceful("serve", transport::serve(listener, None, service, limits, stop));
        }
        Ok(Open { port, addresses: addresses.clone(), counts, tasks })
    }
}

impl Counts {
    /// The number of endpoints in the address's family.
    fn of(&self, address: IpAddr) -> usize {
        let (v4, v6) = (self.v4.load(Ordering::Relaxed), self.v6.load(Ordering::Relaxed));
        match address {
            IpAddr::V4(_) => v4,
            IpAddr::V6(address) if address.is_unspecified() => v4.max(v6),
            IpAddr::V6(_) => v6,
        }
    }
}

fn answer((namespace, name): &Name, count: usize, healthy: bool) -> Response<Body> {
    let body = format!(
        "{{\n\t\"service\": {{\n\t\t\"namespace\": \"{namespace}\",\n\t\t\"name\": \"{name}\"\n\t}},\n\
         \t\"localEndpoints\": {count},\n\t\"serviceProxyHealthy\": {healthy}\n}}"
    );
    let mut response = Response::new(full(body));
    if count == 0 || !healthy {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    headers.insert(WEIGHT, HeaderValue::from(count));
    response
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn service(name: &str, spec: Value) -> Service {
        let object = json!({"metadata": {"name": name, "namespace": "ns"}, "spec": spec});
        serde_json::from_value(object).expect("a service")
    }

    fn slice(service: &str, endpoints: Value) -> EndpointSlice {
        let object = json!({
            "metadata": {"name": "s", "namespace": "ns",
                "labels": {"kubernetes.io/service-name": service}},
            "addressType": "IPv4",
            "ports": [{"name": "a", "port": 80}, {"name": "b", "port": 443}],
            "endpoints": endpoints,
        });
        serde_json::from_value(object).expect("a slice")
    }

    #[test]
    fn only_ready_endpoints_of_the_node_count_and_each_once() {
        let balanced = |policy: &str, port: i32| {
            json!({"type": "LoadBalancer", "externalTrafficPolicy": policy,
                "healthCheckNodePort": port})
        };
        let services = [
            service("local", balanced("Local", 30001)),
            service("none", balanced("Local", 30002)),
            service("cluster", balanced("Cluster", 30003)),
            service("other", balanced("Local", 70000)),
            service(
                "node-port",
                json!({"type": "NodePort", "externalTrafficPolicy": "Local",
                "healthCheckNodePort": 30004}),
            ),
        ];
        let at = |last: u8, node: &str, conditions: Value| {
            json!({"addresses": [format!("10.42.0.{last}")], "nodeName": node,
                "conditions": conditions})
        };
        let leaving = json!({"ready": false, "serving": true, "terminating": true});
        let slices = [
            slice(
                "local",
                json!([
                    at(1, "here", json!({"ready": true})),
                    at(2, "here", leaving.clone()),
                    at(3, "there", json!({"ready": true})),
                ]),
            ),
            slice("none", json!([at(4, "here", leaving)])),
        ];
        let found: Vec<(String, u16, usize)> = wanted(&services, &slices, "here")
            .into_iter()
            .map(|((_, name), check)| (name, check.port, check.v4))
            .collect();
        assert_eq!(found, [("local".into(), 30001, 1), ("none".into(), 30002, 0)]);
    }
}
