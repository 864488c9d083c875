//! Routes of a Hetzner network: the pods of a node are behind the private address of its server.
//!
//! Invariant: a route whose gateway is no server's address is a black hole; the controller deletes it if its
//! destination is in the cluster's range.

use async_trait::async_trait;
use serde_json::json;

use super::api::{Network, NetworkRoute};
use super::{Hetzner, Servers};
use crate::provider::{Error, Result, Route, Routes};

impl Hetzner {
    async fn routed(&self) -> Result<Network> {
        let missing = || Error::Unsupported("hetzner: no network in --cloud-config".into());
        let id = self.network().await?.ok_or_else(missing)?;
        self.api.get(&format!("/networks/{id}"), "network").await
    }
}

#[async_trait]
impl Routes for Hetzner {
    async fn list(&self, _: &str) -> Result<Vec<Route>> {
        let network = self.routed().await?;
        let servers = self.servers().await?;
        Ok(network.routes.iter().map(|route| found(route, &servers, network.id)).collect())
    }

    async fn create(&self, _: &str, _: &str, route: &Route) -> Result<()> {
        let network = self.routed().await?;
        let servers = self.servers().await?;
        let server = servers.named(&route.node).ok_or(Error::InstanceNotFound)?;
        let gateway = server.private_ip(network.id).ok_or_else(|| {
            let id = network.id;
            Error::Unsupported(format!("hetzner: server {:?} is not in network {id}", server.name))
        })?;
        let path = format!("/networks/{}/actions", network.id);
        let same = network.routes.iter().find(|one| one.destination == route.destination);
        if let Some(same) = same {
            if same.gateway == gateway {
                return Ok(());
            }
            self.api.act(&format!("{path}/delete_route"), &json!(same)).await?;
        }
        let wanted = json!({"destination": route.destination, "gateway": gateway});
        self.api.act(&format!("{path}/add_route"), &wanted).await
    }

    async fn delete(&self, _: &str, route: &Route) -> Result<()> {
        let network = self.routed().await?;
        // The name is the gateway: see `found`.
        let same =
            |one: &&NetworkRoute| one.destination == route.destination && one.gateway == route.name;
        match network.routes.iter().find(same) {
            Some(one) => {
                let path = format!("/networks/{}/actions/delete_route", network.id);
                self.api.act(&path, &json!(one)).await
            }
            None => Ok(()),
        }
    }
}

fn found(route: &NetworkRoute, servers: &Servers, network: u64) -> Route {
    let behind = |server: &&super::Server| server.private_ip(network) == Some(&route.gateway);
    let server = servers.by_id.values().find(behind);
    Route {
        name: route.gateway.clone(),
        node: server.map(|server| server.name.clone()).unwrap_or_default(),
        addresses: None,
        destination: route.destination.clone(),
        is_blackhole: server.is_none(),
    }
}
