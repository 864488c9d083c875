//! A cluster for upstream's end-to-end suite, and a program that runs beside it.
//!
//! In: the built binary, a registry's data directory, a program. Out: how the program ended. Every node
//! has a registry on its loopback address that serves the same directory, and a `registries.yaml` that
//! names it. The program runs on the first node's host with `KUBECONFIG` set, so that it reaches nodes
//! and pods.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::cluster::Server;
use crate::host::Host;
use crate::nodes::Agent;
use crate::registry::{self, Registry};
use crate::switch::Switch;

/// The registry in the names of the suite's images.
const MIRRORED: &str = "registry.k8s.io";

pub fn run(
    binary: &Path,
    nodes: usize,
    images: &Path,
    program: &str,
    arguments: &[&str],
) -> Result<()> {
    ensure!(nodes > 0, "a cluster has at least one node");
    let binary = std::path::absolute(binary)?;
    let mut switch = Switch::new()?;
    let host = Host::new("node1")?;
    let address = switch.connect(&host)?;
    let mut server = Server::new(host, &binary, &["--node-name", "node1", "--node-ip", &address])?;
    let _registry = provide(server.host(), &server.data_directory(), images)?;
    server.start().with_context(|| server.report())?;
    let mut agents = Vec::new();
    for number in 2..=nodes {
        let mut agent = Agent::new(&mut switch, &server, &format!("node{number}"), &binary, &[])?;
        let registry = provide(agent.host(), &agent.data_directory(), images)?;
        agent.launch()?;
        agent.ready(&server)?;
        // This order: a registry's process must end before its host.
        agents.push((registry, agent));
    }
    server
        .kubectl(&["wait", "--for=condition=Ready", "node/node1", "--timeout=60s"])
        .with_context(|| server.report())?;
    let mut command = server.host().command(program);
    command.args(arguments).env("KUBECONFIG", server.kubeconfig());
    let status = server.host().spawn(&mut command)?.wait()?;
    ensure!(status.success(), "{program}: {status}");
    Ok(())
}

/// A registry on a host's loopback address, and a node that pulls the suite's images from it.
fn provide(host: &Host, data_directory: &Path, images: &Path) -> Result<Registry> {
    fs::create_dir_all(data_directory)?;
    let text =
        format!("mirrors:\n  {MIRRORED}:\n    endpoint: [\"http://{}\"]\n", registry::ADDRESS);
    fs::write(data_directory.join("registries.yaml"), text)?;
    Registry::start_at(host, images)
}
