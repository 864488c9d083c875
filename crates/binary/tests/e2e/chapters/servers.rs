//! Three servers, each with an etcd member beside it, and a node: the node goes on when servers die, are cut
//! off, or are replaced. On hosts of their own; skipped without an etcd in the cache.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testkit::cluster::Server;
use testkit::host::Host;
use testkit::http::ApiClient;
use testkit::nodes::Agent;
use testkit::switch::Switch;
use testkit::{places, wait};

use crate::story::{LONG, Story};

const REQUEST: Duration = Duration::from_secs(5);
const NAMES: [&str; 3] = ["one", "two", "three"];

struct Cluster {
    // Must be dropped before the hosts' switch.
    node: Agent,
    servers: Vec<(Server, String)>,
    switch: Switch,
}

/// Starts a server that others can join, or one that joins.
fn server(
    story: &Story,
    switch: &mut Switch,
    name: &str,
    more: &[&str],
) -> Result<(Server, String)> {
    let host = Host::new(name)?;
    let address = switch.connect(&host)?;
    let etcd = places::cached("ETCD", "etcd-3.6/etcd").context("it was there")?;
    let etcd = etcd.display().to_string();
    let own = ["--disable-agent", "--node-name", name, "--node-ip", &address];
    let all = [&own[..], &["--etcd-binary", &etcd], more].concat();
    let mut server = Server::new(host, &story.binary, &all)?;
    server.start().with_context(|| server.log())?;
    Ok((server, address))
}

impl Cluster {
    fn start(story: &Story) -> Result<Self> {
        let mut switch = Switch::new()?;
        let first = server(story, &mut switch, NAMES[0], &["--cluster-init"])?;
        let url = format!("https://{}:6443", first.1);
        let path = first.0.data_directory().join("server-token");
        wait::until(LONG, "the servers' token is there", || {
            ensure!(path.exists(), "it is not");
            Ok(())
        })?;
        let token = path.display().to_string();
        let mut servers = vec![first];
        for name in &NAMES[1..] {
            let joins = ["--server", &url, "--token-file", &token];
            servers.push(server(story, &mut switch, name, &joins)?);
        }
        let mut node = Agent::new(&mut switch, &servers[0].0, "node", &story.binary, &[])?;
        node.launch()?;
        node.ready(&servers[0].0)?;
        Ok(Self { node, servers, switch })
    }

    /// A client of the administrator, by way of the node's balancer.
    fn through_the_node(&self) -> Result<ApiClient> {
        let config = std::fs::read_to_string(self.servers[0].0.kubeconfig())?;
        let line = config.lines().find_map(|line| line.trim().strip_prefix("server: "));
        let server = line.context("the kubeconfig names the server")?.trim_matches('"');
        ApiClient::from_kubeconfig(&config.replace(server, "https://127.0.0.1:6444"))
    }

    /// The time until the node's balancer leads to a server that is ready.
    fn answers_again(&self, client: &ApiClient) -> Result<Duration> {
        let begun = wait::now();
        wait::until(LONG, "a server answers through the node's balancer", || {
            let answer = self.node.host().in_network(|| client.get("/readyz", REQUEST))??;
            ensure!(answer.status == 200, "{}", answer.body);
            Ok(())
        })?;
        Ok(begun.elapsed())
    }

    fn learned(&self, count: usize) -> Result<()> {
        let file = self.node.data_directory().join("agent/servers");
        wait::until(LONG, &format!("the node knows {count} servers"), || {
            let text = std::fs::read_to_string(&file)?;
            ensure!(text.lines().count() == count, "{text}");
            Ok(())
        })
    }

    /// The node's Lease is renewed after `since`.
    fn node_lives(&self, by: usize, since: Instant) -> Result<()> {
        let server = &self.servers[by].0;
        let renewed = || {
            let path = "jsonpath={.spec.renewTime}";
            server.kubectl(&["get", "lease", "node", "-n", "kube-node-lease", "-o", path])
        };
        let before = renewed()?;
        wait::until(LONG, "the node's Lease is renewed", || {
            ensure!(renewed()? != before, "it is not");
            Ok(())
        })?;
        println!("the node's Lease was renewed {:?} after the fault", since.elapsed());
        Ok(())
    }
}

pub fn nodes_follow(story: &mut Story) -> Result<()> {
    if places::cached("ETCD", "etcd-3.6/etcd").is_none() {
        println!("skipped: no etcd in the cache (cargo xtask etcd), and ETCD does not name one");
        return Ok(());
    }
    let mut cluster = Cluster::start(story)?;
    cluster.learned(3)?;
    let client = cluster.through_the_node()?;
    cluster.answers_again(&client)?;

    // A process dies, its etcd with it.
    let begun = wait::now();
    cluster.servers[0].0.kill()?;
    let took = cluster.answers_again(&client)?;
    println!("a killed server: {took:?} until another answered");
    cluster.node_lives(1, begun)?;
    cluster.learned(2)?;
    cluster.servers[0].0.start()?;
    cluster.learned(3)?;

    // A machine is gone without a word.
    let (_, address) = &cluster.servers[1];
    cluster.switch.set_connected(address, false)?;
    let begun = wait::now();
    let took = cluster.answers_again(&client)?;
    println!("a server cut off: {took:?} until another answered");
    cluster.node_lives(0, begun)?;
    cluster.switch.set_connected(address, true)?;

    // A restart of the node's agent needs none of the servers that it was told.
    cluster.servers[0].0.stop(LONG)?;
    cluster.node.stop(LONG)?;
    cluster.node.launch()?;
    let (last, _) = &cluster.servers[2];
    cluster.node.ready(last)
}
