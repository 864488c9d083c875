//! More nodes: `decapod agent` on other hosts, and a cluster of two nodes.
//!
//! ```text
//!  node1: decapod server ── switch 192.168.77.0/24 ── node2: decapod agent
//! ```

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::cluster::Server;
use crate::daemon::Daemon;
use crate::host::Host;
use crate::switch::Switch;
use crate::{images, wait};

/// `decapod agent` on a host.
pub struct Agent {
    // Must be dropped before the host, which waits for its processes.
    daemon: Daemon,
    host: Host,
    binary: PathBuf,
    name: String,
    address: String,
}

impl Agent {
    /// Connects a new host to the switch and prepares an agent on it, which joins with the server's token.
    pub fn new(
        switch: &mut Switch,
        server: &Server,
        name: &str,
        binary: &Path,
        arguments: &[&str],
    ) -> Result<Self> {
        let host = Host::new(name)?;
        let address = switch.connect(&host)?;
        let data = host.directory().join("data").display().to_string();
        let url = server.url()?;
        // All test hosts see the server's files; a real node gets a copy of the token.
        let token = server.data_directory().join("token").display().to_string();
        let own = ["agent", "--server", &url, "--token-file", &token, "--data-dir", &data];
        let names = ["--node-name", name, "--node-ip", &address];
        let all = own.iter().chain(&names).chain(arguments).map(|word| (*word).to_owned());
        let daemon = Daemon::new(&host, "agent", binary, all.collect());
        Ok(Self { daemon, host, binary: binary.to_owned(), name: name.to_owned(), address })
    }

    pub fn host(&self) -> &Host {
        &self.host
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its address on the switch.
    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn data_directory(&self) -> PathBuf {
        self.host.directory().join("data")
    }

    pub fn daemon(&mut self) -> &mut Daemon {
        &mut self.daemon
    }

    /// Starts the process and returns at once.
    pub fn launch(&mut self) -> Result<()> {
        self.daemon.launch(&self.host)
    }

    pub fn kill(&mut self) -> Result<()> {
        self.daemon.kill()
    }

    pub fn stop(&mut self, limit: Duration) -> Result<ExitStatus> {
        self.daemon.stop(limit)
    }

    pub fn log(&self) -> String {
        self.daemon.log()
    }

    /// Runs one of the binary's offline commands against this node's data.
    pub fn decapod(&self, arguments: &[&str]) -> Result<String> {
        let data = self.data_directory().display().to_string();
        let all = [arguments, &["--data-dir", &data]].concat();
        self.host.run(&self.binary.display().to_string(), &all)
    }

    /// Imports the test images.
    pub fn import_images(&self) -> Result<()> {
        for archive in images::all()? {
            self.decapod(&["images", "import", &archive.display().to_string()])?;
        }
        Ok(())
    }

    /// Waits until the node is Ready in the API.
    pub fn ready(&mut self, server: &Server) -> Result<()> {
        let name = format!("node/{}", self.name);
        let ended = wait::until(wait::LONG, &format!("{name} is Ready"), || {
            if let Some(status) = self.daemon.exit_status()? {
                return Ok(Some(status));
            }
            server.kubectl(&["wait", "--for=condition=Ready", &name, "--timeout=10s"])?;
            Ok(None)
        });
        match ended.with_context(|| self.log())? {
            Some(status) => bail!("the agent ended: {status}\n{}", self.log()),
            None => Ok(()),
        }
    }
}

/// A server that is a node too, and a second node on the same switch, both Ready.
pub struct TwoNodes {
    // Must be dropped before the hosts, which are connected to it.
    pub switch: Switch,
    pub agent: Agent,
    pub server: Server,
    /// The first node's address.
    pub address: String,
}

/// Starts a cluster of `node1` (with the server) and `node2`; `arguments` are added to the server's.
pub fn two_nodes(binary: &Path, arguments: &[&str]) -> Result<TwoNodes> {
    let mut switch = Switch::new()?;
    let host = Host::new("node1")?;
    let address = switch.connect(&host)?;
    let named = ["--node-name", "node1", "--node-ip", &address];
    let mut server = Server::new(host, binary, &[&named, arguments].concat())?;
    server.start().with_context(|| server.report())?;
    let mut agent = Agent::new(&mut switch, &server, "node2", binary, &[])?;
    agent.launch()?;
    agent.ready(&server)?;
    server
        .kubectl(&["wait", "--for=condition=Ready", "node/node1", "--timeout=60s"])
        .with_context(|| server.report())?;
    Ok(TwoNodes { switch, agent, server, address })
}
