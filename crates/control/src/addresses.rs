//! The repair of cluster IPs: an IPAddress that no Service has goes, one that a Service lacks comes.
//!
//! A Service's address is taken before the Service is written and released after it is deleted: who
//! dies in between leaves an IPAddress behind, or, by a restored backup or a hand that deletes too
//! much, a Service whose address anybody might be given.
//!
//! In: changes of Services and IPAddresses. Out: creates and deletes of IPAddresses. All are looked at
//! a minute after a change, when writes that were under way are over, and at most once a minute;
//! nothing happens while nothing changes.
//! Upstream: `ipallocator/controller/repairip.go`, which looks every three minutes.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use apiserver::cacher::Cursor;
use apiserver::{Registry, StatusError};
use base::task::Tasks;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::networking::v1::IPAddress;
use machinery::Object;
use resources::cluster_ips::{
    ALLOCATOR, MANAGED_BY, SETTLED, addresses_of, create_address, delete_address, has_addresses,
    is_abandoned, service_cidrs,
};
use tokio::time::Instant;

/// From a change to the look at what has become of it. Ages of objects are in whole seconds.
const WAIT: Duration = Duration::from_secs(SETTLED as u64 + 5);
/// The pause before it starts again after it lost its position in the changes.
const RETRY: Duration = Duration::from_secs(1);

/// Repairs until the tasks end.
pub fn start(registry: &Registry, tasks: &Tasks) {
    tasks.spawn("service IP repair", run(registry.clone()));
}

async fn run(registry: Registry) {
    loop {
        let mut services = registry.follow::<Service>().await.1;
        let mut addresses = registry.follow::<IPAddress>().await.1;
        // Existing objects count as changed.
        let mut round = Round::default();
        round.note();
        while round.step(&registry, &mut services, &mut addresses).await.is_ok() {}
        tokio::time::sleep(RETRY).await;
    }
}

/// When to look.
#[derive(Default)]
struct Round {
    at: Option<Instant>,
    /// Something changed since `at` was set: it will be too young then.
    is_followed: bool,
}

impl Round {
    fn note(&mut self) {
        match self.at {
            Some(_) => self.is_followed = true,
            None => self.at = Some(Instant::now() + WAIT),
        }
    }

    async fn step(
        &mut self,
        registry: &Registry,
        services: &mut Cursor,
        addresses: &mut Cursor,
    ) -> Result<(), StatusError> {
        let timer = async {
            match self.at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let seen = tokio::select! {
            () = timer => None,
            seen = services.next() => Some(seen?),
            seen = addresses.next() => Some(seen?),
        };
        match seen {
            Some(events) if events.is_empty() => {}
            Some(_) => self.note(),
            None => {
                self.at = None;
                if let Err(error) = mend(registry).await {
                    tracing::warn!(%error, "failed to check the cluster IPs");
                    self.is_followed = true;
                }
                if std::mem::take(&mut self.is_followed) {
                    self.note();
                }
            }
        }
        Ok(())
    }
}

/// Looks at all, once.
async fn mend(registry: &Registry) -> Result<(), StatusError> {
    // In this order: an address that is taken now has its Service later.
    let addresses = registry.cached::<IPAddress>("").await?;
    let services = registry.cached::<Service>("").await?;
    release_abandoned(registry, &addresses, &services).await?;
    let ranges = service_cidrs(registry).await?;
    let there: BTreeSet<&str> = addresses.iter().map(|address| address.name()).collect();
    for service in services.iter().filter(|service| has_addresses(service)) {
        let (namespace, name) = (service.namespace(), service.name());
        for ip in addresses_of(service).filter(|ip| !there.contains(ip)) {
            let parsed = ip.parse::<IpAddr>();
            let is_ours = |ip: &IpAddr| ranges.iter().any(|range| range.contains(ip));
            if !parsed.as_ref().is_ok_and(is_ours) {
                continue;
            }
            let now = registry.find::<Service>(namespace, name).await?;
            if now.is_some_and(|now| addresses_of(&now).any(|one| one == ip))
                && create_address(registry, ip, (namespace, name)).await?
            {
                tracing::warn!(
                    namespace,
                    name,
                    ip,
                    "a Service's cluster IP was not taken; it is now"
                );
            }
        }
    }
    Ok(())
}

/// Whether the server created it for a Service, and not a user.
fn is_ours(address: &IPAddress) -> bool {
    let labels = address.metadata.labels.as_ref();
    labels.and_then(|labels| labels.get(MANAGED_BY)).is_some_and(|by| by == ALLOCATOR)
}

/// Deletes addresses that were taken for nothing.
async fn release_abandoned(
    registry: &Registry,
    addresses: &[IPAddress],
    services: &[Service],
) -> Result<(), StatusError> {
    let used: BTreeSet<&str> = services.iter().flat_map(addresses_of).collect();
    let unused = |address: &&IPAddress| is_ours(address) && !used.contains(address.name());
    for address in addresses.iter().filter(unused) {
        if is_abandoned(registry, address).await? {
            tracing::warn!(ip = address.name(), "no Service has this cluster IP; it is free now");
            delete_address(registry, address).await;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use apiserver::registry::{DeleteOptions, Intent};
    use apiserver::request::Key;
    use serde_json::json;

    use super::*;
    use crate::testing::{self, service, write};

    async fn taken(registry: &Registry) -> Vec<String> {
        let all = registry.cached::<IPAddress>("").await.expect("readable");
        all.iter().map(|address| address.name().to_owned()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_and_services_come_to_agree() {
        let _world = base::sim::enter(1);
        let registry = testing::with_range().await;
        let tasks = Tasks::new("test");
        start(&registry, &tasks);
        let spec = |ip: &str| json!({"clusterIP": ip, "ports": [{"port": 80}]});
        let create = |name, ip| Intent::Create { object: service(name, spec(ip)) };
        write(&registry, create("a", "10.96.0.7")).await.expect("written");
        write(&registry, create("b", "10.96.0.8")).await.expect("written");
        tokio::time::sleep(Duration::from_secs(300)).await;
        assert_eq!(taken(&registry).await, ["10.96.0.7", "10.96.0.8"]);
        // One address was taken for a Service that never came; b's address was deleted.
        assert!(create_address(&registry, "10.96.0.9", ("ns", "gone")).await.expect("written"));
        let ctx = registry.own_context::<IPAddress>();
        let intent = Intent::Delete { options: DeleteOptions::default() };
        registry.write(&ctx, &Key::new("", "10.96.0.8"), intent).await.expect("deleted");
        tokio::time::sleep(Duration::from_secs(30)).await;
        // While the look at those is due, another is left: that one is found, too.
        assert!(create_address(&registry, "10.96.0.10", ("ns", "a")).await.expect("written"));
        tokio::time::sleep(Duration::from_secs(20)).await;
        let present = ["10.96.0.10", "10.96.0.7", "10.96.0.9"];
        assert_eq!(taken(&registry).await, present, "their Services may be on their way");
        tokio::time::sleep(Duration::from_secs(200)).await;
        assert_eq!(taken(&registry).await, ["10.96.0.7", "10.96.0.8"]);
        let mended = registry.find::<IPAddress>("", "10.96.0.8").await.expect("readable");
        assert_eq!(mended.expect("it is taken again").spec.parent_ref.name, "b");
        // Then it is quiet.
        let before = registry.revision().await.expect("readable");
        tokio::time::sleep(Duration::from_secs(3600)).await;
        assert_eq!(registry.revision().await.expect("readable"), before);
        tasks.shutdown(Duration::from_secs(5)).await;
    }
}
