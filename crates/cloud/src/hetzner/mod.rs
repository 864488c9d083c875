//! The provider `hetzner`: servers, load balancers and network routes of Hetzner Cloud, by its REST API.
//!
//! In: the file of `--cloud-config` or the environment variable `HCLOUD_TOKEN`. Out: the API's answers.
//!
//! Invariants: a server is "gone" only if a complete list of servers is without it. Load balancers have the label
//! `hcloud-ccm/service-uid`, so that this provider and Hetzner's own cloud-controller-manager find each other's.
//! Cost: one list of all servers (50 on a page) answers all questions of [`FRESH`]; the API allows 3600 requests
//! in an hour.
//! API: docs.hetzner.cloud, v1.

mod api;
mod balancers;
mod config;
mod networks;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Node, NodeAddress};
use tokio::sync::{Mutex, OnceCell};
use tokio::time::Instant;

pub use api::ApiError;
use api::{Api, Network, Server};
use config::{Config, Family};

use crate::provider::{
    Error, Instances, LoadBalancers, Metadata, OpenError, Provider, Result, Routes,
};
use crate::target::provider_id;

pub const NAME: &str = "hetzner";
const PREFIX: &str = "hcloud://";
/// How long a list of servers answers questions.
const FRESH: Duration = Duration::from_secs(10);

pub struct Hetzner {
    config: Config,
    api: Api,
    /// The last list. Held while the API is asked, so that many questions cause one request.
    servers: Mutex<Option<(Instant, Arc<Servers>)>>,
    /// The number of the configured network.
    network: OnceCell<u64>,
}

/// A complete list of servers.
#[derive(Default)]
struct Servers {
    by_id: HashMap<u64, Server>,
    by_name: HashMap<String, u64>,
}

impl Servers {
    fn named(&self, name: &str) -> Option<&Server> {
        self.by_name.get(name).and_then(|id| self.by_id.get(id))
    }
}

impl Hetzner {
    pub fn open(path: Option<&Path>) -> std::result::Result<Self, OpenError> {
        let config = Config::read(path)?;
        let api = Api::new(&config)?;
        Ok(Self { config, api, servers: Mutex::default(), network: OnceCell::new() })
    }

    async fn servers(&self) -> Result<Arc<Servers>> {
        let mut known = self.servers.lock().await;
        if let Some((at, servers)) = &*known
            && at.elapsed() < FRESH
        {
            return Ok(servers.clone());
        }
        let mut servers = Servers::default();
        for server in self.api.all::<Server>("/servers", "servers").await? {
            servers.by_name.insert(server.name.clone(), server.id);
            servers.by_id.insert(server.id, server);
        }
        let servers = Arc::new(servers);
        *known = Some((Instant::now(), servers.clone()));
        Ok(servers)
    }

    /// The node's server; `None`: it does not exist.
    async fn server(&self, node: &Node) -> Result<Option<Server>> {
        let name = node.metadata.name.as_deref().unwrap_or_default();
        let servers = self.servers().await?;
        Ok(match id_of(name, provider_id(node))? {
            Some(id) => servers.by_id.get(&id).cloned(),
            None => servers.named(name).cloned(),
        })
    }

    /// The number of the configured network, if there is one.
    async fn network(&self) -> Result<Option<u64>> {
        let Some(name) = &self.config.network else { return Ok(None) };
        let look = async || -> Result<u64> {
            if let Ok(id) = name.parse() {
                return Ok(id);
            }
            let path = format!("/networks?name={}", base::percent::encode(name));
            let found = self.api.all::<Network>(&path, "networks").await?;
            let network = found.first().map(|network| network.id);
            network
                .ok_or_else(|| Error::Unsupported(format!("hetzner: there is no network {name:?}")))
        };
        self.network.get_or_try_init(look).await.copied().map(Some)
    }
}

/// The server's number in a provider ID; `None`: the node has no provider ID.
fn id_of(node: &str, id: &str) -> Result<Option<u64>> {
    if id.is_empty() {
        return Ok(None);
    }
    let number = id.strip_prefix(PREFIX).and_then(|number| number.parse().ok());
    let foreign = || Error::Foreign { node: node.to_owned(), id: id.to_owned(), provider: NAME };
    number.map(Some).ok_or_else(foreign)
}

#[async_trait]
impl Provider for Hetzner {
    fn name(&self) -> &'static str {
        NAME
    }

    fn instances(&self) -> Option<&dyn Instances> {
        Some(self)
    }

    fn load_balancers(&self) -> Option<&dyn LoadBalancers> {
        Some(self)
    }

    fn routes(&self) -> Option<&dyn Routes> {
        self.config.network.is_some().then_some(self)
    }
}

#[async_trait]
impl Instances for Hetzner {
    async fn exists(&self, node: &Node) -> Result<bool> {
        Ok(self.server(node).await?.is_some())
    }

    async fn is_shut_down(&self, node: &Node) -> Result<bool> {
        let server = self.server(node).await?.ok_or(Error::InstanceNotFound)?;
        Ok(server.status == "off")
    }

    async fn metadata(&self, node: &Node) -> Result<Option<Metadata>> {
        let server = self.server(node).await?.ok_or(Error::InstanceNotFound)?;
        let network = self.network().await?;
        Ok(Some(metadata(&server, network, self.config.address_family)))
    }
}

/// As Hetzner's own cloud-controller-manager: the zone is the data center if the API names one.
fn metadata(server: &Server, network: Option<u64>, family: Family) -> Metadata {
    let center = server.datacenter.as_ref();
    let location = center.map(|center| &center.location).or(server.location.as_ref());
    let region = location.map(|location| location.name.clone()).unwrap_or_default();
    let zone = center.map(|center| center.name.clone()).unwrap_or_else(|| region.clone());
    Metadata {
        provider_id: format!("{PREFIX}{}", server.id),
        instance_type: server.server_type.name.clone(),
        addresses: addresses(server, network, family),
        zone,
        region,
        labels: Default::default(),
    }
}

fn addresses(server: &Server, network: Option<u64>, family: Family) -> Vec<NodeAddress> {
    let address = |kind: &str, address: &str| NodeAddress {
        type_: kind.to_owned(),
        address: address.to_owned(),
    };
    let mut addresses = vec![address("Hostname", &server.name)];
    let ipv4 = server.public_net.ipv4.as_ref().filter(|_| family != Family::Ipv6);
    addresses.extend(ipv4.map(|one| address("ExternalIP", &one.ip)));
    // The API has the server's /64; its first address is the server's own by convention.
    let ipv6 = server.public_net.ipv6.as_ref().filter(|_| family != Family::Ipv4);
    let first = ipv6.and_then(|one| one.ip.split_once('/')).map(|(prefix, _)| format!("{prefix}1"));
    addresses.extend(first.map(|ip| address("ExternalIP", &ip)));
    let private = network.and_then(|network| server.private_ip(network));
    addresses.extend(private.map(|ip| address("InternalIP", ip)));
    addresses
}

#[cfg(test)]
mod tests;
