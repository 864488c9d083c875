//! Simulated nodes: hollow kubelets, thousands in one process, for people who test schedulers, operators
//! and autoscalers without machines.
//!
//! In: a client, a [`Config`]. Out: Nodes that register, renew their Leases and report; pods on them that
//! start, become ready, end, restart and go away, as annotations and rules say; nothing runs anywhere.
//! Invariants: a process runs exactly the Nodes with its fleet's label, also if another client created them; it writes
//! Nodes' and pods' status, node Leases and deletions of pods on its Nodes, and nothing else.
//!
//! Upstream has hollow nodes in kubemark, a process each; KWOK, a project beside it, has Stages with
//! templates. Deviation: rules name delays and ends, not templates of a status.

mod addresses;
mod config;
mod fleet;
mod lifecycle;
mod node;
mod pod;
mod settings;
mod state;
mod status;
#[cfg(test)]
mod testing;

use std::time::Duration;

use base::task::{Stop, Tasks};
use client::{Client, ErrorExt};
use futures::StreamExt;
use http::Method;
use k8s_openapi::List;
use k8s_openapi::api::core::v1::Node;
use tokio::time::Instant;

pub use config::{Config, ConfigError, Flags};

/// How long workers get at the end.
const ENDING: Duration = Duration::from_secs(2);
/// Between two looks whether all nodes are registered.
const LOOK: Duration = Duration::from_millis(100);
/// Deletions at one time, and how many Nodes are listed at once.
const DELETIONS: usize = 16;
const PAGE: usize = 500;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no address is in the ranges of nodes and pods")]
    NoAddresses,
    #[error("a part of the simulation broke; see the log above")]
    Broke,
    #[error("{}", .0.text())]
    Api(#[from] client::Error),
}

/// Runs the nodes until it is stopped. Their Nodes stay in the API, without heartbeats.
pub async fn run(client: Client, config: Config, stop: Stop) -> Result<(), Error> {
    let state = state::State::new(config.addresses, config.pod_addresses);
    let state = state.ok_or(Error::NoAddresses)?;
    let tasks = Tasks::new("simulate");
    let _bound = tasks.bound();
    let (begun, broken) = (Instant::now(), tasks.stop_signal());
    let count = config.count();
    let started = stop.or(broken.or(fleet::Fleet::start(client, config, state, &tasks))).await;
    let Some(started) = started else { return Ok(()) };
    let fleet = started.ok_or(Error::Broke)?;
    let registering = async {
        while fleet.left() > 0 {
            tokio::time::sleep(LOOK).await;
        }
    };
    if stop.or(broken.or(registering)).await.is_some_and(|done| done.is_some()) {
        let millis = begun.elapsed().as_millis();
        tracing::info!(nodes = count, millis, "simulated nodes are registered");
    }
    let ended = stop.or(broken.wait()).await;
    tasks.shutdown(ENDING).await;
    if ended.is_some() { Err(Error::Broke) } else { Ok(()) }
}

/// Deletes the Nodes of a fleet; how many there were. Their Leases go with them, their pods when the pod
/// garbage collector finds them without a node.
pub async fn clean_up(client: &Client, fleet: &str) -> Result<usize, Error> {
    let mut deleted = 0;
    loop {
        let path = format!("/api/v1/nodes?labelSelector={}%3D{fleet}&limit={PAGE}", node::LABEL);
        let page: List<Node> = client.get(&path).await?;
        let names: Vec<String> =
            page.items.into_iter().filter_map(|one| one.metadata.name).collect();
        if names.is_empty() {
            return Ok(deleted);
        }
        deleted += names.len();
        let deletions = names.into_iter().map(|name| delete(client, name));
        let mut deletions = futures::stream::iter(deletions).buffer_unordered(DELETIONS);
        while let Some(done) = deletions.next().await {
            done?;
        }
    }
}

async fn delete(client: &Client, name: String) -> Result<(), Error> {
    let path = format!("/api/v1/nodes/{name}");
    match client.call(Method::DELETE, &path, "application/json", "{}").await {
        Err(error) if !error.is_not_found() => Err(error.into()),
        _ => Ok(()),
    }
}
