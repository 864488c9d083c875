//! The provider `metal`: machines from a file, power and load balancers by commands of the administrator.
//!
//! In: the file of `--cloud-config` ([`inventory`]), watched for changes. Out: what the file and the commands say.
//!
//! Invariants: a file that cannot be read or is wrong changes nothing, and the log says why; the last good one
//! counts. A Node with the provider ID of another cloud is an error, never "gone". Commands run with a timeout,
//! get JSON on stdin ([`command`]), and one Service has one command at a time, because its controller has.
//! Routes: none. Decapod's nodes route to each other's pods themselves.

mod command;
mod inventory;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use base::task::Tasks;
use base::watch::FileWatch;
use k8s_openapi::api::core::v1::{LoadBalancerIngress, Node, Service};
use serde_json::json;
use tokio::sync::Notify;

pub use command::CommandError;
use inventory::{Inventory, Machine};

use crate::provider::{
    Error, Instances, LoadBalancers, Metadata, OpenError, Provider, Result, ingress,
};
use crate::service::has_finalizer;
use crate::target::{Target, provider_id};

pub const NAME: &str = "metal";
/// The start of provider IDs that this provider makes up.
const PREFIX: &str = "metal://";

pub struct Metal {
    path: PathBuf,
    /// Guards the last good inventory; held for a clone or a replacement.
    inventory: Arc<Mutex<Arc<Inventory>>>,
    /// Notified when another inventory is there.
    changed: Arc<Notify>,
    /// Whether load balancers are this provider's: as at the start.
    has_balancers: bool,
}

impl Metal {
    pub fn open(path: &Path) -> std::result::Result<Self, OpenError> {
        let inventory = Inventory::read(path)?;
        let has_balancers = inventory.load_balancers.is_some();
        let inventory = Arc::new(Mutex::new(Arc::new(inventory)));
        Ok(Self { path: path.to_owned(), inventory, changed: Arc::default(), has_balancers })
    }

    fn inventory(&self) -> Arc<Inventory> {
        self.inventory.lock().expect("no panic while held").clone()
    }
}

#[async_trait]
impl Provider for Metal {
    fn name(&self) -> &'static str {
        NAME
    }

    fn instances(&self) -> Option<&dyn Instances> {
        Some(self)
    }

    fn load_balancers(&self) -> Option<&dyn LoadBalancers> {
        self.has_balancers.then_some(self)
    }

    async fn changed(&self) {
        self.changed.notified().await;
    }

    fn start(&self, tasks: &Tasks) {
        let follow = follow(self.path.clone(), self.inventory.clone(), self.changed.clone());
        tasks.spawn("metal inventory", follow);
    }
}

/// Reads the file again after each change in its directory.
async fn follow(path: PathBuf, inventory: Arc<Mutex<Arc<Inventory>>>, changed: Arc<Notify>) {
    let watch = match FileWatch::open(&path) {
        Ok(watch) => watch,
        Err(error) => {
            tracing::error!(path = %path.display(), %error, "failed to watch the inventory: changes need a restart");
            return;
        }
    };
    loop {
        // The first look catches what changed before the watch.
        match Inventory::read(&path) {
            Ok(new) => {
                let mut current = inventory.lock().expect("no panic while held");
                if **current != new {
                    tracing::info!(path = %path.display(), machines = new.machines.len(), "read the inventory");
                    *current = Arc::new(new);
                    changed.notify_one();
                }
            }
            Err(error) => tracing::error!(%error, "kept the previous inventory"),
        }
        watch.changed().await;
    }
}

/// The Node's machine; `None`: it is not in the inventory.
fn machine<'a>(inventory: &'a Inventory, node: &Node) -> Result<Option<&'a Machine>> {
    let (name, id) = (node.metadata.name.as_deref().unwrap_or_default(), provider_id(node));
    let found = inventory.machine(name, id);
    if found.is_none() && !id.is_empty() && !id.starts_with(PREFIX) {
        return Err(Error::Foreign { node: name.to_owned(), id: id.to_owned(), provider: NAME });
    }
    Ok(found)
}

#[async_trait]
impl Instances for Metal {
    async fn exists(&self, node: &Node) -> Result<bool> {
        Ok(machine(&self.inventory(), node)?.is_some())
    }

    async fn is_shut_down(&self, node: &Node) -> Result<bool> {
        let inventory = self.inventory();
        let Some(power) = &inventory.power else { return Ok(false) };
        let machine = machine(&inventory, node)?.ok_or(Error::InstanceNotFound)?;
        let question = json!({
            "node": node.metadata.name,
            "machine": machine.name,
            "providerID": machine.id(),
        });
        let answer = power.run(&question).await?;
        match answer.trim().to_ascii_lowercase().as_str() {
            "on" => Ok(false),
            "off" => Ok(true),
            _ => Err(power.wrong(&answer, "on or off").into()),
        }
    }

    async fn metadata(&self, node: &Node) -> Result<Option<Metadata>> {
        let inventory = self.inventory();
        let machine = machine(&inventory, node)?.ok_or(Error::InstanceNotFound)?;
        let id = Some(provider_id(node)).filter(|id| !id.is_empty());
        let metadata = inventory.metadata(machine);
        Ok(Some(match id {
            Some(id) => Metadata { provider_id: id.to_owned(), ..metadata },
            None => metadata,
        }))
    }
}

#[async_trait]
impl LoadBalancers for Metal {
    /// No command is asked: a Service with the finalizer or with addresses has a load balancer. The command that
    /// deletes it then succeeds as well if there is none.
    async fn get(&self, _: &str, service: &Service) -> Result<Option<Vec<LoadBalancerIngress>>> {
        let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
        let ingress = status.and_then(|status| status.ingress.clone()).unwrap_or_default();
        Ok((has_finalizer(service) || !ingress.is_empty()).then_some(ingress))
    }

    async fn ensure(
        &self,
        cluster: &str,
        service: &Service,
        nodes: &[Arc<Target>],
    ) -> Result<Vec<LoadBalancerIngress>> {
        let inventory = self.inventory();
        let Some(balancers) = &inventory.load_balancers else {
            return Err(Error::ImplementedElsewhere);
        };
        let answer = balancers.run(&command::question("ensure", cluster, service, nodes)).await?;
        let addresses = command::addresses(&answer).ok_or_else(|| {
            balancers.wrong(&answer, "an IP address or a host name on each line, at most 16")
        })?;
        Ok(addresses.into_iter().map(ingress).collect())
    }

    async fn update(&self, cluster: &str, service: &Service, nodes: &[Arc<Target>]) -> Result<()> {
        self.ensure(cluster, service, nodes).await.map(drop)
    }

    async fn delete(&self, cluster: &str, service: &Service) -> Result<()> {
        let inventory = self.inventory();
        let Some(balancers) = &inventory.load_balancers else {
            return Err(Error::ImplementedElsewhere);
        };
        balancers.run(&command::question("delete", cluster, service, &[])).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
