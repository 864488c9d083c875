//! A cluster for a foreign test suite, and the suite beside it.
//!
//! In: the built binary, a registry's data directory, a program. Out: how the program ended. Every
//! node has a registry on its loopback that serves the same directory, and `registries.yaml` says so;
//! the program runs on the first node's host with `KUBECONFIG` set, so that it reaches nodes and pods.

use std::fs;
use std::path::Path;

use anyhow::{Result, bail, ensure};

use crate::cluster::Server;
use crate::host::Host;
use crate::nodes::Agent;
use crate::registry::{self, Registry};
use crate::switch::Switch;

/// Where the suite's images come from.
const MIRRORED: &str = "registry.k8s.io";

/// As many as a suite on one machine can use.
const MOST: usize = 5;

pub fn run(
    binary: &Path,
    nodes: usize,
    images: &Path,
    program: &str,
    arguments: &[&str],
) -> Result<()> {
    ensure!((1..=MOST).contains(&nodes), "a cluster has 1 to {MOST} nodes, not {nodes}");
    let mut switch = Switch::new()?;
    let host = Host::new("node1")?;
    let address = switch.connect(&host)?;
    let mut server = Server::new(host, binary, &["--node-name", "node1", "--node-ip", &address])?;
    let registry = Registry::start_at(server.host(), images)?;
    mirror(&server.data_directory())?;
    if let Err(error) = server.start() {
        bail!("{error:#}\n{}", server.report());
    }
    let mut others = vec![];
    for number in 2..=nodes {
        let name = format!("node{number}");
        let mut agent = Agent::new(&mut switch, &server, &name, binary, &[])?;
        let registry = Registry::start_at(agent.host(), images)?;
        mirror(&agent.data_directory())?;
        agent.launch()?;
        agent.ready(&server)?;
        others.push((registry, agent));
    }
    let mut command = server.host().command(program);
    command.args(arguments).env("KUBECONFIG", server.kubeconfig());
    let status = server.host().spawn(&mut command)?.wait()?;
    drop((others, registry));
    ensure!(status.success(), "{program}: {status}");
    Ok(())
}

/// Makes a node pull the suite's images from its loopback.
fn mirror(data_directory: &Path) -> Result<()> {
    fs::create_dir_all(data_directory)?;
    let text =
        format!("mirrors:\n  {MIRRORED}:\n    endpoint: [\"http://{}\"]\n", registry::ADDRESS);
    Ok(fs::write(data_directory.join("registries.yaml"), text)?)
}
