//! Three servers, each with a member of a real etcd, and two nodes; and ways to harm them.
//!
//! ```text
//! one, two, three: decapod server, etcd ── switch 192.168.77.0/24 ── node-a, node-b: decapod agent
//! ```
//!
//! In: the binary, an etcd. Out: processes on hosts of their own. Invariant: [`Trio::heal`] undoes every harm but a
//! process that was ended, which [`Trio::start_again`] starts.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::link::Place;
use crate::cluster::Server;
use crate::control_plane::memory_of;
use crate::host::Host;
use crate::http::ApiClient;
use crate::nodes::Agent;
use crate::switch::Switch;
use crate::{images, places, wait};

pub const NAMES: [&str; 3] = ["one", "two", "three"];
const NODES: [&str; 2] = ["node-a", "node-b"];
const API: u16 = 6443;
const ETCD: u16 = 2379;
const PEER: u16 = 2380;
const BALANCER: &str = "127.0.0.1:6444";
const REQUEST: Duration = Duration::from_secs(5);
/// The third server serves on for this long after SIGTERM, while `/readyz` fails.
pub const DELAY: Duration = Duration::from_secs(3);
/// The size of the file system of the third member's data, which a fault fills.
const SMALL: &str = "size=320m";

pub struct One {
    pub server: Server,
    pub address: String,
}

pub struct Trio {
    // Nodes and servers must be dropped before the switch that connects their hosts.
    pub nodes: Vec<Agent>,
    pub servers: Vec<One>,
    pub switch: Switch,
    pub binary: PathBuf,
    /// The time from the start of the second and third server until they were ready.
    pub joins: Vec<Duration>,
}

pub fn etcd() -> Result<PathBuf> {
    let found = places::cached("ETCD", "etcd-3.6/etcd").or_else(|| places::program("etcd"));
    found.context("there is no etcd in the cache (cargo xtask etcd), and ETCD does not name one")
}

/// Prepares a server on a new host; `more` says how it finds its cluster.
pub fn server(switch: &mut Switch, binary: &Path, name: &str, more: &[&str]) -> Result<One> {
    let host = Host::new(name)?;
    let address = switch.connect(&host)?;
    let etcd = etcd()?.display().to_string();
    let own = ["--disable-agent", "--node-name", name, "--node-ip", &address];
    let all = [&own[..], &["--etcd-binary", &etcd], more].concat();
    Ok(One { server: Server::new(host, binary, &all)?, address })
}

impl One {
    fn host(&self) -> &Host {
        self.server.host()
    }

    /// Its etcd's process: the server's child of this name.
    pub fn etcd(&self) -> Result<Pid> {
        let parent = self.server.process_id().context("the server was not started")?;
        let wanted = format!("PPid:\t{parent}");
        for entry in fs::read_dir("/proc")?.flatten() {
            let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            // A process that ends meanwhile is not the one.
            let status = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
            let is_it = status.starts_with("Name:\tetcd\n");
            if is_it && status.lines().any(|line| line == wanted) {
                return Ok(Pid::from_raw(id));
            }
        }
        bail!("{} has no etcd", self.host().name())
    }

    pub fn process(&self) -> Result<Pid> {
        let id = self.server.process_id().context("the server was not started")?;
        Ok(Pid::from_raw(id.cast_signed()))
    }

    /// Sends SIGTERM, as a service manager does.
    pub fn terminate(&self) -> Result<()> {
        Ok(kill(self.process()?, Signal::SIGTERM)?)
    }

    /// Whether its etcd leads, by its own word.
    fn leads(&self) -> bool {
        let pki = self.server.data_directory().join("pki/etcd");
        let read = |name: &str| fs::read_to_string(pki.join(name));
        let asked = || -> Result<bool> {
            let at = format!("{}:{ETCD}", self.address);
            let (ca, cert, key) = (read("ca.crt")?, read("client.crt")?, read("client.key")?);
            let client = ApiClient::new(&at, &ca, &cert, &key)?;
            let page = self.host().in_network(|| client.get("/metrics", REQUEST))??;
            Ok(page.body.contains("\netcd_server_is_leader 1\n"))
        };
        asked().unwrap_or(false)
    }

    /// Drops packets: `chain` is a chain of nftables with its rules.
    fn firewall(&self, chains: &[(&str, Vec<String>)]) -> Result<()> {
        let mut text = String::from("table inet fault {\n");
        for (hook, rules) in chains {
            text.push_str(&format!(
                "chain {hook} {{ type filter hook {hook} priority -200; policy accept;\n{}\n}}\n",
                rules.join("\n")
            ));
        }
        text.push('}');
        let file = self.host().directory().join("fault.nft");
        fs::write(&file, text)?;
        self.host().run("nft", &["-f", &file.display().to_string()]).map(drop)
    }

    fn open(&self) {
        // An error means that there is no such table.
        let _ = self.host().run("nft", &["delete", "table", "inet", "fault"]);
    }
}

impl Trio {
    pub fn start(binary: &Path) -> Result<Self> {
        images::all()?;
        let mut switch = Switch::new()?;
        let mut first = server(&mut switch, binary, NAMES[0], &["--cluster-init"])?;
        first.server.start().with_context(|| first.server.log())?;
        let (url, token) = (format!("https://{}:{API}", first.address), token(&first)?);
        let mut trio = Self {
            nodes: vec![],
            servers: vec![first],
            switch,
            binary: binary.to_owned(),
            joins: vec![],
        };
        let delay = format!("--shutdown-delay-duration={}s", DELAY.as_secs());
        let joins = ["--server", &url, "--token-file", &token];
        for (name, more) in [(NAMES[1], &[][..]), (NAMES[2], &[delay.as_str()])] {
            let mut next = server(&mut trio.switch, binary, name, &[&joins, more].concat())?;
            if name == NAMES[2] {
                small_disk(&next)?;
            }
            let begun = wait::now();
            next.server.start().with_context(|| next.server.log())?;
            trio.joins.push(begun.elapsed());
            trio.servers.push(next);
        }
        for name in NODES {
            let node = Agent::new(&mut trio.switch, &trio.servers[0].server, name, binary, &[])?;
            trio.nodes.push(node);
            let node = trio.nodes.last_mut().context("it was just added")?;
            node.launch()?;
            node.ready(&trio.servers[0].server)?;
            node.decapod(&["images", "import", &images::all()?[0].display().to_string()])?;
        }
        trio.settled()?;
        Ok(trio)
    }

    /// Waits until all servers are ready, etcd has three voters and a leader, and the nodes know all servers.
    pub fn settled(&self) -> Result<()> {
        wait::until(wait::LONG, "the cluster is whole", || {
            for one in &self.servers {
                let client = one.server.api()?;
                let answer = one.host().in_network(|| client.get("/readyz", REQUEST))??;
                ensure!(answer.status == 200, "{}: {}", one.host().name(), answer.body);
            }
            let list = self.servers[0].server.decapod(&["member", "list"])?;
            let voters = list.lines().filter(|line| line.contains(" yes ")).count();
            ensure!(voters == 3 && !list.contains("<silent>"), "{list}");
            self.leader()?;
            for node in &self.nodes {
                let known = fs::read_to_string(node.data_directory().join("agent/servers"))?;
                ensure!(known.lines().count() == 3, "{} knows {known}", node.name());
            }
            Ok(())
        })
    }

    /// The server whose etcd leads.
    pub fn leader(&self) -> Result<usize> {
        let leaders: Vec<usize> = (0..3).filter(|at| self.servers[*at].leads()).collect();
        match leaders[..] {
            [one] => Ok(one),
            _ => bail!("{} members of etcd lead", leaders.len()),
        }
    }

    pub fn signal_etcd(&self, at: usize, signal: Signal) -> Result<()> {
        Ok(kill(self.servers[at].etcd()?, signal)?)
    }

    /// Freezes a server and its etcd, or lets them go on.
    pub fn signal_both(&self, at: usize, signal: Signal) -> Result<()> {
        let etcd = self.servers[at].etcd()?;
        kill(self.servers[at].process()?, signal)?;
        Ok(kill(etcd, signal)?)
    }

    /// Kills a server; its etcd ends with it.
    pub fn kill(&mut self, at: usize) -> Result<()> {
        self.servers[at].server.kill()
    }

    /// Stops a server by SIGTERM; returns the time that it took.
    pub fn stop(&mut self, at: usize) -> Result<Duration> {
        let begun = wait::now();
        self.servers[at].terminate()?;
        let status = self.servers[at].server.reap(wait::LONG)?;
        ensure!(status.success(), "{} ended: {status}", NAMES[at]);
        Ok(begun.elapsed())
    }

    /// Starts a server that was ended; returns the time until it was ready.
    pub fn start_again(&mut self, at: usize) -> Result<Duration> {
        let begun = wait::now();
        let one = &mut self.servers[at];
        one.server.start().with_context(|| one.server.log())?;
        Ok(begun.elapsed())
    }

    pub fn cut(&self, at: usize, is_cut: bool) -> Result<()> {
        self.switch.set_connected(&self.servers[at].address, !is_cut)
    }

    /// The member gets nothing from its peers, and still sends.
    pub fn deafen(&self, at: usize) -> Result<()> {
        let rules = vec![
            format!("ip saddr {{ {} }} tcp dport {PEER} drop", self.others(at)),
            format!("ip saddr {{ {} }} tcp sport {PEER} drop", self.others(at)),
        ];
        self.servers[at].firewall(&[("input", rules)])
    }

    /// The server reaches neither etcd's other members nor their clients it; nodes reach it.
    pub fn cut_from_etcd(&self, at: usize) -> Result<()> {
        let peers = self.others(at);
        let rules = |direction: &str| {
            ["sport", "dport"]
                .map(|port| {
                    format!("ip {direction} {{ {peers} }} tcp {port} {{ {ETCD}, {PEER} }} drop")
                })
                .to_vec()
        };
        self.servers[at].firewall(&[("input", rules("saddr")), ("output", rules("daddr"))])
    }

    /// The server reaches the other servers and no node.
    pub fn cut_from_nodes(&self, at: usize) -> Result<()> {
        let nodes: Vec<&str> = self.nodes.iter().map(Agent::address).collect();
        let nodes = nodes.join(", ");
        self.servers[at].firewall(&[
            ("input", vec![format!("ip saddr {{ {nodes} }} drop")]),
            ("output", vec![format!("ip daddr {{ {nodes} }} drop")]),
        ])
    }

    fn others(&self, at: usize) -> String {
        let others = self.servers.iter().enumerate().filter(|(other, _)| *other != at);
        let others: Vec<&str> = others.map(|(_, one)| one.address.as_str()).collect();
        others.join(", ")
    }

    /// The file that fills the third member's disk.
    pub fn filler(&self) -> PathBuf {
        self.servers[2].server.data_directory().join("etcd/filler")
    }

    /// Fills the disk of the third member's data, from inside its host.
    pub fn fill_disk(&self) -> Result<()> {
        let script = format!("dd if=/dev/zero of={} bs=1M; true", self.filler().display());
        self.servers[2].host().run("sh", &["-c", &script]).map(drop)
    }

    /// Undoes what other functions did, except ended processes.
    pub fn heal(&self) -> Result<()> {
        for (at, one) in self.servers.iter().enumerate() {
            one.open();
            self.cut(at, false)?;
            for process in [one.process(), one.etcd()].into_iter().flatten() {
                // An error means that it has ended.
                let _ = kill(process, Signal::SIGCONT);
            }
        }
        let filler = self.filler().display().to_string();
        self.servers[2].host().run("rm", &["-f", &filler]).map(drop)
    }

    /// Fails if a server's process has ended.
    pub fn all_live(&mut self) -> Result<()> {
        for one in &mut self.servers {
            if let Some(status) = one.server.exit_status()? {
                bail!("{} ended: {status}\n{}", one.server.host().name(), one.server.log());
            }
        }
        Ok(())
    }

    /// The administrator's kubeconfig, for a server at another address.
    pub fn kubeconfig(&self, address: &str) -> Result<String> {
        let config = fs::read_to_string(self.servers[0].server.kubeconfig())?;
        let line = config.lines().find_map(|line| line.trim().strip_prefix("server: "));
        let server = line.context("the kubeconfig names the server")?.trim_matches('"');
        Ok(config.replace(server, &format!("https://{address}")))
    }

    /// A client with the administrator's certificate.
    pub fn api(&self) -> Result<ApiClient> {
        ApiClient::from_kubeconfig(&self.kubeconfig(BALANCER)?)
    }

    /// The balancer of a node, called from that node.
    pub fn balanced(&self, node: usize) -> Result<Place> {
        let network = Arc::new(self.nodes[node].host().network()?);
        Ok(Place { network, address: BALANCER.parse()? })
    }

    /// A server, called from the switch.
    pub fn direct(&self, at: usize) -> Result<Place> {
        let network: Arc<File> = Arc::new(self.switch.network()?);
        let address: SocketAddr = format!("{}:{API}", self.servers[at].address).parse()?;
        Ok(Place { network, address })
    }

    /// Megabytes that a server and its etcd have in memory.
    pub fn memory(&self, at: usize) -> Result<(u64, u64)> {
        let one = &self.servers[at];
        let of = |process: Pid| memory_of(process.as_raw().cast_unsigned(), "VmRSS:");
        Ok((of(one.process()?)? >> 20, of(one.etcd()?)? >> 20))
    }
}

/// The file with the token that servers join with. All test hosts see the first server's files.
pub fn token(first: &One) -> Result<String> {
    let path = first.server.data_directory().join("server-token");
    wait::until(wait::LONG, "the servers' token is there", || {
        ensure!(path.exists(), "it is not");
        Ok(())
    })?;
    Ok(path.display().to_string())
}

/// A small file system for the member's data, mounted on its host only.
fn small_disk(one: &One) -> Result<()> {
    let data = one.server.data_directory().join("etcd");
    fs::create_dir_all(&data)?;
    let data = data.display().to_string();
    let run = |program: &str, words: &[&str]| one.host().run(program, words).map(drop);
    run("chmod", &["0700", &data])?;
    run("mount", &["-t", "tmpfs", "-o", SMALL, "tmpfs", &data])
}

impl Trio {
    /// Runs `decapod server` with more flags, which must end by itself; returns its output.
    pub fn offline(&self, at: usize, more: &[&str]) -> Result<String> {
        let one = &self.servers[at];
        let mut command = one.host().command(&self.binary);
        let (data, etcd) = (one.server.data_directory(), etcd()?);
        command.arg("server").arg("--data-dir").arg(data).arg("--etcd-binary").arg(etcd);
        command.args(["--disable-agent", "--node-name", NAMES[at], "--node-ip", &one.address]);
        let output = one.host().output(command.args(more))?;
        ensure!(!output.status.success(), "it succeeded");
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    pub fn has_ended(&mut self, at: usize) -> Result<bool> {
        // A killed server is no longer known.
        Ok(self.servers[at].server.exit_status().map_or(true, |status| status.is_some()))
    }

    pub fn live_without(&mut self, ended: usize) -> Result<()> {
        for at in (0..3).filter(|at| *at != ended) {
            ensure!(!self.has_ended(at)?, "{} ended", NAMES[at]);
        }
        Ok(())
    }
}
