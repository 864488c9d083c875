//! Cluster DNS: answers for Services and pods from informer caches, forwards everything else.
//!
//! ```text
//! UDP, TCP ─► serve ─┬─ in the cluster's zone ─► zone (pure) ◄─ directory ◄─ informers
//!                    └─ any other name ────────► forward ─► the node's resolvers
//! ```
//!
//! In: DNS queries; Services and EndpointSlices. Out: answers of the Kubernetes DNS specification
//! (1.1.0), TTL 5 s.
//! Invariants: names of the zone never leave the node. While the API is down, the last known state answers.
//! Before the first list the zone answers SERVFAIL, so that resolvers ask again, and never NXDOMAIN, which
//! they would cache. Upstream: CoreDNS with its `kubernetes` plugin, pods `insecure`.

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
    /// Every address is served by UDP and TCP. It need not exist yet. Port 0 selects a free port.
    pub bind: Vec<SocketAddr>,
    /// `cluster.local`
    pub domain: String,
    /// The resolvers for other names, in order; `None` reads `resolv_conf`.
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
    let informers = Informers::new(client, tasks.clone());
    let directory = Arc::new(directory::Cluster::new(&informers));
    bound.serve(directory, &tasks);
    stop.wait().await;
    tasks.shutdown(Duration::from_secs(1)).await;
    Ok(())
}
