//! What a cloud does for a cluster: the contract between the controllers and a provider.
//!
//! In: Nodes, Services, routes. Out: the cloud's answers. A provider answers from the cloud's current state and
//! may be called by several controllers at once.
//!
//! Invariants: `ensure`, `update` and `delete` may be repeated; they end in the same state. An answer "does not
//! exist" is certain: an error of the cloud's API is an error, because a Node without a machine is deleted.
//! Upstream: `cloud-provider/cloud.go`, the interfaces Interface, InstancesV2, LoadBalancer, Routes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{LoadBalancerIngress, Node, NodeAddress, Service};

use crate::target::Target;
use crate::{hetzner, metal};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("instance not found")]
    InstanceNotFound,
    /// The controllers leave the load balancer to another controller.
    #[error("implemented by alternate to cloud provider")]
    ImplementedElsewhere,
    /// The cloud tells when to try again.
    #[error("{message}")]
    RetryAfter { message: String, after: Duration },
    /// The Node belongs to another provider: nothing is known about its machine.
    #[error(
        "node {node} has the provider ID {id:?}, which is not of the cloud provider {provider:?}"
    )]
    Foreign { node: String, id: String, provider: &'static str },
    /// The cloud cannot do what the object asks for.
    #[error("{0}")]
    Unsupported(String),
    #[error(transparent)]
    Command(#[from] metal::CommandError),
    #[error(transparent)]
    Api(#[from] hetzner::ApiError),
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A cloud. A part that it does not have is `None`; the controller of that part does not start.
#[async_trait]
pub trait Provider: Send + Sync {
    /// The name in `--cloud-provider`.
    fn name(&self) -> &'static str;

    fn instances(&self) -> Option<&dyn Instances> {
        None
    }

    fn load_balancers(&self) -> Option<&dyn LoadBalancers> {
        None
    }

    fn routes(&self) -> Option<&dyn Routes> {
        None
    }

    /// Resolves when machines may have come or changed, for providers that notice it. One task waits for it.
    async fn changed(&self) {
        std::future::pending().await
    }

    /// Work of the provider beside the calls, for example watching its configuration.
    fn start(&self, _: &base::task::Tasks) {}
}

/// The machines.
#[async_trait]
pub trait Instances: Send + Sync {
    async fn exists(&self, node: &Node) -> Result<bool>;

    async fn is_shut_down(&self, node: &Node) -> Result<bool>;

    /// `None`: the provider does not know this Node. The controllers do not change it.
    async fn metadata(&self, node: &Node) -> Result<Option<Metadata>>;
}

/// What the cloud knows about a machine. Empty texts are unknown.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    pub provider_id: String,
    pub instance_type: String,
    pub addresses: Vec<NodeAddress>,
    pub zone: String,
    pub region: String,
    pub labels: BTreeMap<String, String>,
}

/// Load balancers of Services. `cluster` is `--cluster-name`.
#[async_trait]
pub trait LoadBalancers: Send + Sync {
    /// The addresses of the Service's load balancer; `None`: there is no load balancer.
    async fn get(
        &self,
        cluster: &str,
        service: &Service,
    ) -> Result<Option<Vec<LoadBalancerIngress>>>;

    /// Creates the load balancer, or changes it to what the Service says.
    async fn ensure(
        &self,
        cluster: &str,
        service: &Service,
        nodes: &[Arc<Target>],
    ) -> Result<Vec<LoadBalancerIngress>>;

    /// Changes the nodes behind an existing load balancer.
    async fn update(&self, cluster: &str, service: &Service, nodes: &[Arc<Target>]) -> Result<()>;

    /// Succeeds as well if there is no load balancer.
    async fn delete(&self, cluster: &str, service: &Service) -> Result<()>;
}

/// A route of the cloud's network to the pods of a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Route {
    /// The cloud's name for it; empty if the cloud has no names.
    pub name: String,
    /// The Node's name; empty if the target is no node of the cluster.
    pub node: String,
    /// For providers that make routes for the addresses of a node: the route is replaced when they change.
    pub addresses: Option<Vec<NodeAddress>>,
    pub destination: String,
    /// The target is gone.
    pub is_blackhole: bool,
}

#[async_trait]
pub trait Routes: Send + Sync {
    async fn list(&self, cluster: &str) -> Result<Vec<Route>>;

    /// `hint` is unique to the node, for clouds whose routes need a name.
    async fn create(&self, cluster: &str, hint: &str, route: &Route) -> Result<()>;

    async fn delete(&self, cluster: &str, route: &Route) -> Result<()>;
}

/// Why a provider cannot start.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Upstream's text, with the names.
    #[error(
        "unknown cloud provider {0:?}: expected hetzner or metal; another cloud has its own cloud-controller-manager"
    )]
    Unknown(String),
    #[error("the cloud provider {0} needs --cloud-config FILE")]
    NoConfig(&'static str),
    #[error("failed to read --cloud-config {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("--cloud-config {}: {reason}", path.display())]
    Invalid { path: PathBuf, reason: String },
    #[error(
        "hetzner: no token: set it in --cloud-config (token or tokenFile), or in the environment variable HCLOUD_TOKEN"
    )]
    NoToken,
    #[error("hetzner: {0}")]
    Client(#[from] transport::ClientError),
}

/// The provider of this name with its configuration file.
pub fn open(name: &str, config: Option<&Path>) -> Result<Arc<dyn Provider>, OpenError> {
    match name {
        metal::NAME => {
            Ok(Arc::new(metal::Metal::open(config.ok_or(OpenError::NoConfig(metal::NAME))?)?))
        }
        hetzner::NAME | "hcloud" => Ok(Arc::new(hetzner::Hetzner::open(config)?)),
        other => Err(OpenError::Unknown(other.to_owned())),
    }
}

/// The text of a Service's annotation.
pub fn annotation<'a>(service: &'a Service, key: &str) -> Option<&'a str> {
    let value = service.metadata.annotations.as_ref()?.get(key)?;
    Some(value.as_str())
}

/// An address of a load balancer: an IP address, or a host name.
pub fn ingress(address: &str) -> LoadBalancerIngress {
    let text = Some(address.to_owned());
    match address.parse::<std::net::IpAddr>() {
        // The API server's default, so that a repeated sync writes nothing.
        Ok(_) => LoadBalancerIngress {
            ip: text,
            ip_mode: Some("VIP".into()),
            ..LoadBalancerIngress::default()
        },
        Err(_) => LoadBalancerIngress { hostname: text, ..LoadBalancerIngress::default() },
    }
}
