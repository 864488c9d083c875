//! Cluster DNS: answers for Services and pods from informer caches, forwards everything else.
//!
//! ```text
//! UDP, TCP ─► serve ─┬─ in the cluster's zone ─► zone (pure) ◄─ directory ◄─ informers
//!                    └─ any other name ────────► forward ─► the node's resolvers
//! ```
//!
//! In: DNS queries; Services and EndpointSlices. Out: answers as the Kubernetes DNS specification
//! (1.1.0) wants them, TTL 5 s.
//! Invariants: names of the zone never leave the node; while the API is away the last known state
//! answers; before the first list the zone answers SERVFAIL, which resolvers ask again, and never
//! NXDOMAIN, which they believe. Upstream: CoreDNS with its `kubernetes` plugin, pods `insecure`.

mod directory;
mod forward;
mod serve;
mod zone;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base::task::{Stop, Tasks};
use client::{Client, Informers};

pub use serve::Bound;

#[derive(Clone, Debug)]
pub struct Config {
    /// Each is served by UDP and TCP. An address need not exist yet. Port 0 picks one.
    pub bind: Vec<SocketAddr>,
    /// `cluster.local`
    pub domain: String,
    /// Where other names are asked for, in this order; `None` reads `resolv_conf`.
    pub upstreams: Option<Vec<SocketAddr>>,
    pub resolv_conf: PathBuf,
}

impl Config {
    pub fn new(bind: Vec<SocketAddr>, domain: &str) -> Self {
        Self {
            bind,
            domain: domain.trim_matches('.').to_lowercase(),
            upstreams: None,
            resolv_conf: "/etc/resolv.conf".into(),
        }
    }
}

/// Why the server does not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot listen on {address}: {source}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("{0:?} is no domain name")]
    Domain(String),
}

/// Runs until `stop`.
pub async fn run(client: Client, config: Config, stop: Stop) -> Result<(), Error> {
    run_bound(client, Bound::new(config)?, stop).await
}

/// As [`run`], on addresses bound before: a test asks [`Bound`] for them.
pub async fn run_bound(client: Client, bound: Bound, stop: Stop) -> Result<(), Error> {
    let tasks = Tasks::new("dns");
    let informers = Informers::new(client, tasks.clone());
    let directory = Arc::new(directory::Cluster::new(&informers));
    bound.serve(directory, &tasks);
    stop.wait().await;
    tasks.shutdown(Duration::from_secs(1)).await;
    Ok(())
}
