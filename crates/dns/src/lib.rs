//! Cluster DNS: answers for Services and pods from informer caches, forwards everything else.
//!
//! ```text
//! UDP, TCP ─► serve ─► settings (which block?) ─┬─ hosts, the cluster's zone ◄─ directory ◄─ informers
//!                         ▲                     └─ resolve: cache ─► forward ─► other servers
//!                      custom ◄─ ConfigMap coredns-custom, resolv.conf
//! ```
//!
//! In: DNS queries; Services, EndpointSlices, Namespaces, one ConfigMap. Out: answers of the Kubernetes DNS
//! specification (1.1.0), TTL 5 s; answers of other servers, cached.
//! Invariants: names of the zone never leave the node. While the API is down, the last known state answers.
//! Before the first list the zone answers SERVFAIL, so that resolvers ask again, and never NXDOMAIN, which
//! they would cache. Slow servers never delay names of the zone: the task of a socket waits for nothing.
//! Upstream: CoreDNS with its `kubernetes` plugin, pods `insecure`, `cache 30`, as k3s configures it.

mod answers;
mod cache;
mod corefile;
mod custom;
mod directory;
mod forward;
mod hosts;
mod limits;
mod metrics;
mod resolve;
mod rewrite;
mod serve;
mod settings;
mod status;
mod wire;
mod zone;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base::task::{Stop, Tasks};
use client::{Client, Informers};

pub use serve::Bound;

/// CoreDNS' port for metrics.
pub const METRICS_PORT: u16 = 9153;
/// Answers a second for one client: far above what programs ask for.
const PER_CLIENT: u32 = 20_000;

#[derive(Clone, Debug)]
pub struct Config {
    /// Every address is served by UDP and TCP. It need not exist yet. Port 0 selects a free port.
    pub bind: Vec<SocketAddr>,
    /// Addresses of `/metrics`, `/ready` and `/health`. One that is taken is a log line, and DNS works.
    pub status: Vec<SocketAddr>,
    /// `cluster.local`
    pub domain: String,
    /// The resolvers for other names, in order; `None` reads `resolv_conf` and follows its changes.
    pub upstreams: Option<Vec<SocketAddr>>,
    pub resolv_conf: PathBuf,
    /// Answers a second for one client's address; more are dropped.
    pub per_client: u32,
}

impl Config {
    pub fn new(bind: Vec<SocketAddr>, domain: &str) -> Self {
        Self {
            bind,
            status: vec![],
            domain: domain.trim_matches('.').to_lowercase(),
            upstreams: None,
            resolv_conf: "/etc/resolv.conf".into(),
            per_client: PER_CLIENT,
        }
    }
}

/// Why the server failed to start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot listen on {address}: {source}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("{0:?} is not a domain name")]
    Domain(String),
}

/// Runs until `stop`.
pub async fn run(client: Client, config: Config, stop: Stop) -> Result<(), Error> {
    run_bound(client, Bound::new(config)?, stop).await
}

/// Like [`run`], with sockets that are bound already: a test asks [`Bound`] for its addresses.
pub async fn run_bound(client: Client, bound: Bound, stop: Stop) -> Result<(), Error> {
    let tasks = Tasks::new("dns");
    let informers = Informers::new(client.clone(), tasks.clone());
    let directory = Arc::new(directory::Cluster::new(&informers));
    let follower = bound.serve(directory, &tasks);
    follower.start(client, &informers, &tasks);
    stop.wait().await;
    tasks.shutdown(Duration::from_secs(1)).await;
    Ok(())
}
