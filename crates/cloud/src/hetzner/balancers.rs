//! Load balancers of Hetzner Cloud for Services.
//!
//! In: a Service with its annotations (`load-balancer.hetzner.cloud/…`, as Hetzner's own manager has them), nodes.
//! Out: one load balancer with a port for each port of the Service, and a target for each node.
//!
//! Invariants: a load balancer is found by its label, the Service's uid, whatever its name. A call changes only what
//! differs, so that a repeated one sends no write.
//! Limits: TCP only; the location of a load balancer never changes.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{LoadBalancerIngress, Service, ServicePort};
use serde_json::{Value, json};

use super::api::{BalancerService, HealthCheck, HttpCheck, LoadBalancer};
use super::{Hetzner, id_of};
use crate::provider::{Error, LoadBalancers, Result, annotation, ingress};
use crate::target::Target;

const LABEL: &str = "hcloud-ccm/service-uid";
const NAME: &str = "load-balancer.hetzner.cloud/name";
const TYPE: &str = "load-balancer.hetzner.cloud/type";
const LOCATION: &str = "load-balancer.hetzner.cloud/location";
const ZONE: &str = "load-balancer.hetzner.cloud/network-zone";
const ALGORITHM: &str = "load-balancer.hetzner.cloud/algorithm-type";
const PRIVATE: &str = "load-balancer.hetzner.cloud/use-private-ip";
const PROXY_PROTOCOL: &str = "load-balancer.hetzner.cloud/uses-proxyprotocol";
const HOSTNAME: &str = "load-balancer.hetzner.cloud/hostname";
const NO_IPV6: &str = "load-balancer.hetzner.cloud/ipv6-disabled";

/// What a Service wants of its load balancer.
struct Wanted {
    kind: String,
    algorithm: String,
    is_private: bool,
    services: Vec<BalancerService>,
}

impl Hetzner {
    async fn find(&self, service: &Service) -> Result<Option<LoadBalancer>> {
        let uid = service.metadata.uid.as_deref().unwrap_or_default();
        let selector = base::percent::encode(&format!("{LABEL}=={uid}"));
        let path = format!("/load_balancers?label_selector={selector}");
        let found = self.api.all::<LoadBalancer>(&path, "load_balancers").await?;
        Ok(found.into_iter().next())
    }

    fn wanted(&self, service: &Service) -> Result<Wanted> {
        let usual = &self.config.load_balancer;
        let kind = annotation(service, TYPE).or(usual.kind.as_deref());
        let is_private = flag(service, PRIVATE)?.unwrap_or(usual.use_private_ip);
        if is_private && self.config.network.is_none() {
            return Err(Error::Unsupported(
                "hetzner: private addresses need a network in --cloud-config".into(),
            ));
        }
        Ok(Wanted {
            kind: kind.unwrap_or("lb11").to_owned(),
            algorithm: annotation(service, ALGORITHM).unwrap_or("round_robin").to_owned(),
            is_private,
            services: ports(service)?,
        })
    }

    async fn make(
        &self,
        cluster: &str,
        service: &Service,
        wanted: &Wanted,
    ) -> Result<LoadBalancer> {
        let usual = &self.config.load_balancer;
        let uid = service.metadata.uid.as_deref().unwrap_or_default();
        let name = annotation(service, NAME).map_or_else(|| default_name(uid), str::to_owned);
        let mut body = json!({
            "name": name,
            "load_balancer_type": wanted.kind,
            "algorithm": {"type": wanted.algorithm},
            "labels": {(LABEL): uid, "hcloud-ccm/cluster": cluster},
        });
        let own = annotation(service, LOCATION).map(|text| ("location", text));
        let own = own.or(annotation(service, ZONE).map(|text| ("network_zone", text)));
        let usual = usual
            .location
            .as_deref()
            .map(|text| ("location", text))
            .or(usual.network_zone.as_deref().map(|text| ("network_zone", text)));
        let Some((field, text)) = own.or(usual) else {
            return Err(Error::Unsupported(format!(
                "hetzner: a load balancer needs a location: set loadBalancer.location in --cloud-config or the annotation {LOCATION}"
            )));
        };
        body[field] = text.into();
        if wanted.is_private {
            body["network"] = self.network().await?.into();
        }
        self.api.create("/load_balancers", "load_balancer", &body).await
    }

    /// Changes the type, the algorithm, the network and the ports.
    async fn adjust(&self, balancer: &LoadBalancer, wanted: &Wanted) -> Result<()> {
        let act = async |action: &str, body: Value| {
            self.api.act(&format!("/load_balancers/{}/actions/{action}", balancer.id), &body).await
        };
        if balancer.load_balancer_type.name != wanted.kind {
            act("change_type", json!({"load_balancer_type": wanted.kind})).await?;
        }
        if balancer.algorithm.kind != wanted.algorithm {
            act("change_algorithm", json!({"type": wanted.algorithm})).await?;
        }
        if wanted.is_private
            && let Some(network) = self.network().await?
            && !balancer.private_net.iter().any(|net| net.network == network)
        {
            act("attach_to_network", json!({"network": network})).await?;
        }
        for old in &balancer.services {
            if !wanted.services.iter().any(|one| one.listen_port == old.listen_port) {
                act("delete_service", json!({"listen_port": old.listen_port})).await?;
            }
        }
        for one in &wanted.services {
            match balancer.services.iter().find(|old| old.listen_port == one.listen_port) {
                Some(old) if old == one => {}
                Some(_) => act("update_service", json!(one)).await?,
                None => act("add_service", json!(one)).await?,
            }
        }
        Ok(())
    }

    /// Makes the nodes' servers the targets. Targets of other kinds stay.
    async fn retarget(
        &self,
        balancer: &LoadBalancer,
        nodes: &[Arc<Target>],
        is_private: bool,
    ) -> Result<()> {
        let mut wanted = BTreeMap::new();
        for node in nodes {
            // Nodes of another provider, and nodes that are not initialized yet, get no traffic.
            if let Ok(Some(id)) = id_of(&node.name, &node.provider_id) {
                wanted.insert(id, ());
            }
        }
        let path = format!("/load_balancers/{}/actions", balancer.id);
        let target = |id: u64| json!({"type": "server", "server": {"id": id}});
        for old in &balancer.targets {
            let Some(server) = old.server else { continue };
            let is_right = old.use_private_ip == is_private && wanted.contains_key(&server.id);
            match is_right {
                true => drop(wanted.remove(&server.id)),
                false => {
                    self.api.act(&format!("{path}/remove_target"), &target(server.id)).await?;
                }
            }
        }
        for id in wanted.into_keys() {
            let mut body = target(id);
            body["use_private_ip"] = is_private.into();
            self.api.act(&format!("{path}/add_target"), &body).await?;
        }
        Ok(())
    }
}

#[async_trait]
impl LoadBalancers for Hetzner {
    async fn get(&self, _: &str, service: &Service) -> Result<Option<Vec<LoadBalancerIngress>>> {
        let found = self.find(service).await?;
        found.map(|balancer| addresses(&balancer, service)).transpose()
    }

    async fn ensure(
        &self,
        cluster: &str,
        service: &Service,
        nodes: &[Arc<Target>],
    ) -> Result<Vec<LoadBalancerIngress>> {
        let wanted = self.wanted(service)?;
        let balancer = match self.find(service).await? {
            Some(balancer) => balancer,
            None => self.make(cluster, service, &wanted).await?,
        };
        self.adjust(&balancer, &wanted).await?;
        self.retarget(&balancer, nodes, wanted.is_private).await?;
        addresses(&balancer, service)
    }

    async fn update(&self, _: &str, service: &Service, nodes: &[Arc<Target>]) -> Result<()> {
        let wanted = self.wanted(service)?;
        let missing = || Error::Unsupported("hetzner: the load balancer does not exist".into());
        let balancer = self.find(service).await?.ok_or_else(missing)?;
        self.retarget(&balancer, nodes, wanted.is_private).await
    }

    async fn delete(&self, _: &str, service: &Service) -> Result<()> {
        match self.find(service).await? {
            Some(balancer) => self.api.delete(&format!("/load_balancers/{}", balancer.id)).await,
            None => Ok(()),
        }
    }
}

/// A host name instead of addresses keeps traffic of the cluster's own pods on the way through the load balancer.
fn addresses(balancer: &LoadBalancer, service: &Service) -> Result<Vec<LoadBalancerIngress>> {
    if let Some(name) = annotation(service, HOSTNAME) {
        return Ok(vec![ingress(name)]);
    }
    let without_ipv6 = flag(service, NO_IPV6)?.unwrap_or(false);
    let ipv6 = balancer.public_net.ipv6.ip.as_ref().filter(|_| !without_ipv6);
    Ok(balancer.public_net.ipv4.ip.iter().chain(ipv6).map(|ip| ingress(ip)).collect())
}

/// Upstream's `DefaultLoadBalancerName`.
fn default_name(uid: &str) -> String {
    let name: String = format!("a{uid}").replace('-', "");
    name.chars().take(32).collect()
}

fn flag(service: &Service, key: &str) -> Result<Option<bool>> {
    match annotation(service, key) {
        None => Ok(None),
        Some("true" | "1" | "t" | "T" | "TRUE" | "True") => Ok(Some(true)),
        Some("false" | "0" | "f" | "F" | "FALSE" | "False") => Ok(Some(false)),
        Some(other) => Err(Error::Unsupported(format!(
            "hetzner: annotation {key}: {other:?} is neither true nor false"
        ))),
    }
}

fn ports(service: &Service) -> Result<Vec<BalancerService>> {
    let proxyprotocol = flag(service, PROXY_PROTOCOL)?.unwrap_or(false);
    let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
    ports.map(|port| of_port(service, port, proxyprotocol)).collect()
}

fn of_port(service: &Service, port: &ServicePort, proxyprotocol: bool) -> Result<BalancerService> {
    let protocol = port.protocol.as_deref().unwrap_or("TCP");
    if protocol != "TCP" {
        let number = port.port;
        return Err(Error::Unsupported(format!(
            "hetzner: port {number} has protocol {protocol}, load balancers have TCP only"
        )));
    }
    let Some(node_port) = port.node_port.filter(|number| *number > 0) else {
        let number = port.port;
        return Err(Error::Unsupported(format!(
            "hetzner: port {number} has no node port; set allocateLoadBalancerNodePorts"
        )));
    };
    let spec = service.spec.as_ref();
    let is_local =
        spec.is_some_and(|spec| spec.external_traffic_policy.as_deref() == Some("Local"));
    let health_port = spec.and_then(|spec| spec.health_check_node_port).filter(|_| is_local);
    let check = |protocol: &str, port, http| HealthCheck {
        protocol: protocol.to_owned(),
        port,
        interval: 15,
        timeout: 10,
        retries: 3,
        http,
    };
    let health_check = match health_port.filter(|port| *port > 0) {
        Some(port) => check("http", port, Some(HttpCheck { path: "/healthz".into() })),
        None => check("tcp", node_port, None),
    };
    Ok(BalancerService {
        protocol: "tcp".into(),
        listen_port: port.port,
        destination_port: node_port,
        proxyprotocol,
        health_check,
    })
}
