//! `decapod simulate`, and `decapod server --simulated-nodes`: nodes without machines.
//!
//! In: flags, a file that describes the fleet, a kubeconfig. Out: hollow kubelets in this process, until a
//! signal. See docs/simulate.md.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use base::task::Tasks;
use client::{Client, ErrorExt};
use simulate::{Config, Flags};

use crate::control_plane::ControlPlane;
use crate::process::{say, termination};
use crate::supervise;

/// Field managers are called by it.
const AGENT: &str = "decapod-simulate";

#[derive(clap::Args, Clone, Debug)]
pub struct Simulate {
    /// How many nodes; 0 runs only those that others make, as an autoscaler does
    #[arg(long, value_name = "N")]
    nodes: Option<usize>,
    /// What nodes and pods are like: groups, rules, failures (docs/simulate.md)
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Kubeconfig of the cluster [default: <data-dir>/kubeconfig, or $KUBECONFIG if it is set and no
    /// data directory is named]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Name of the fleet: the value of its Nodes' label decapod.io/fleet [default: default]
    #[arg(long, value_name = "NAME")]
    fleet: Option<String>,
    /// How often each node renews its Lease [default: 10s, with more than 1,000 nodes 20s]
    #[arg(long, value_parser = cli::duration::parse, value_name = "DURATION")]
    lease_interval: Option<Duration>,
    /// How often each node reports a status that did not change [default: 5m]
    #[arg(long, value_parser = cli::duration::parse, value_name = "DURATION")]
    status_interval: Option<Duration>,
    /// Delete the Nodes that runs of this fleet left behind, and end
    #[arg(long, conflicts_with = "nodes")]
    cleanup: bool,
}

impl Simulate {
    fn config(&self) -> anyhow::Result<Config> {
        let flags = Flags {
            fleet: self.fleet.clone(),
            nodes: self.nodes,
            lease_interval: self.lease_interval,
            status_interval: self.status_interval,
        };
        read(self.config.as_deref(), &flags)
    }

    fn client(&self, data_dir: &Path) -> anyhow::Result<Client> {
        let connection =
            cli::cluster::Connection { kubeconfig: self.kubeconfig.clone(), ..Default::default() };
        let path = connection.path(data_dir, std::env::var_os("KUBECONFIG"));
        if !path.exists() {
            bail!(
                "no cluster found: {} does not exist (start one with `decapod server`, or name it with --data-dir or --kubeconfig)",
                path.display()
            );
        }
        crate::kubeconfig::client(&path, AGENT)
    }
}

fn read(file: Option<&Path>, flags: &Flags) -> anyhow::Result<Config> {
    let Some(path) = file else { return Ok(Config::new(None, flags)?) };
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
    Config::new(Some(&text), flags).context(name)
}

pub async fn run(flags: Simulate, data_dir: &Path) -> anyhow::Result<()> {
    if flags.nodes.is_none() && flags.config.is_none() && !flags.cleanup {
        bail!("how many nodes? say it with --nodes N, or describe them in a file: --config FILE");
    }
    let config = flags.config()?;
    let client = flags.client(data_dir)?;
    // A mistake in the kubeconfig shows at once; a server that goes away later is waited for.
    if let Err(error) = client.get_raw("/api/v1/nodes?limit=1", "application/json").await {
        bail!("cannot list the nodes of the cluster: {}", error.text());
    }
    if flags.cleanup {
        let count = simulate::clean_up(&client, &config.fleet).await?;
        say(&format!("deleted {count} Nodes of the fleet {}", config.fleet));
        return Ok(());
    }
    let fleet = config.fleet.clone();
    say(&format!("simulating {} nodes of the fleet {fleet}; Ctrl-C stops it", config.count()));
    let tasks = Tasks::new("simulate");
    let running = simulate::run(client, config, tasks.stop_signal());
    tokio::pin!(running);
    tokio::select! {
        ended = &mut running => return Ok(ended?),
        () = termination() => tasks.stop(),
    }
    running.await?;
    say(&format!(
        "stopped; its Nodes stay and become NotReady. To delete them: decapod simulate --cleanup --fleet {fleet}"
    ));
    Ok(())
}

/// What a server says of simulated nodes.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct OfServer {
    /// Run so many nodes without machines in this process (docs/simulate.md)
    #[arg(long, value_name = "N")]
    simulated_nodes: Option<usize>,
    /// What they and their pods are like
    #[arg(long, value_name = "FILE")]
    simulation_config: Option<PathBuf>,
}

impl OfServer {
    /// `None` if there are none.
    pub fn config(&self) -> anyhow::Result<Option<Config>> {
        if self.simulated_nodes.is_none() && self.simulation_config.is_none() {
            return Ok(None);
        }
        let flags = Flags { nodes: self.simulated_nodes, ..Flags::default() };
        let config = read(self.simulation_config.as_deref(), &flags);
        config.context("simulated nodes").map(Some)
    }
}

/// Starts them as a component of the server.
pub fn start(
    flags: &crate::flags::Server,
    control: &ControlPlane,
    tasks: &Tasks,
) -> anyhow::Result<()> {
    let Some(config) = flags.simulated.config()? else { return Ok(()) };
    if let Some(range) = flags.cluster_cidr.iter().find(|range| {
        let bits = flags.node_cidr_mask_size.saturating_sub(range.prefix_len());
        range.addr().is_ipv4() && (1_usize << bits.min(31)) < config.count()
    }) {
        tracing::warn!(
            %range,
            nodes = config.count(),
            "the pods' addresses do not suffice for all nodes: use a wider --cluster-cidr, as 10.128.0.0/9"
        );
    }
    say(&format!("simulated nodes: {}", config.count()));
    let client = control.client_of(AGENT, &["system:masters"]);
    let part = Arc::new((client, config));
    supervise::keep(tasks, AGENT, move |stop| {
        let part = part.clone();
        async move { simulate::run(part.0.clone(), part.1.clone(), stop).await }
    });
    Ok(())
}
