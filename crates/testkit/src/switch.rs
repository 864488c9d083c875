//! The network between hosts: a bridge in its own network namespace.
//!
//! In: hosts. Out: each gets `eth0` with an address of 192.168.77.0/24 and a default route to the switch.
//! The route lets a node find its address; the switch forwards no packets to other networks.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::host::{Host, enter_network};

pub struct Switch {
    network: File,
    ports: u8,
}

impl Switch {
    pub fn new() -> Result<Self> {
        // A file that refers to the namespace keeps it alive; the thread that created it may end.
        let make = || -> Result<File> {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)?;
            Ok(File::open("/proc/thread-self/ns/net")?)
        };
        let network = std::thread::spawn(make).join().expect("opening does not panic")?;
        let switch = Self { network, ports: 0 };
        switch.ip(&["link", "set", "lo", "up"])?;
        switch.ip(&["link", "add", "br0", "type", "bridge"])?;
        switch.ip(&["addr", "add", "192.168.77.254/24", "dev", "br0"])?;
        switch.ip(&["link", "set", "br0", "up"])?;
        Ok(switch)
    }

    /// Connects a host and returns its address.
    pub fn connect(&mut self, host: &Host) -> Result<String> {
        self.ports += 1;
        let port = format!("port{}", self.ports);
        let address = format!("192.168.77.{}", self.ports);
        let init = host.init().to_string();
        self.ip(&["link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", &init])?;
        self.ip(&["link", "set", &port, "master", "br0", "up"])?;
        host.run("ip", &["addr", "add", &format!("{address}/24"), "dev", "eth0"])?;
        host.run("ip", &["link", "set", "eth0", "up"])?;
        host.run("ip", &["route", "add", "default", "via", "192.168.77.254"])?;
        Ok(address)
    }

    /// Disconnects a host, or connects it again.
    pub fn set_connected(&self, address: &str, connected: bool) -> Result<()> {
        let number = address.rsplit('.').next().unwrap_or_default();
        self.ip(&["link", "set", &format!("port{number}"), if connected { "up" } else { "down" }])
    }

    /// The network itself, for a client that is not on a host.
    pub fn network(&self) -> Result<File> {
        Ok(self.network.try_clone()?)
    }

    fn ip(&self, arguments: &[&str]) -> Result<()> {
        let network = self.network.try_clone()?;
        let mut command = Command::new("ip");
        // SAFETY: one system call on an open file.
        unsafe { command.pre_exec(move || enter_network(&network)) };
        let output = command.args(arguments).output().context("starting ip")?;
        if !output.status.success() {
            bail!("ip {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr));
        }
        Ok(())
    }
}
