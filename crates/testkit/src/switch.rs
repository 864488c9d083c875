//! The wire between hosts: a bridge in a network of its own.
//!
//! In: hosts. Out: each has `eth0` with an address of 192.168.77.0/24 and a default route to the
//! switch, which answers and leads nowhere: a node finds its address, and no packet leaves.

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
        // A network lives as long as a file that names it; the thread that made it need not stay.
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

    /// Plugs a host in and returns its address.
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

    /// Pulls a host's cable, or puts it back.
    pub fn set_connected(&self, address: &str, connected: bool) -> Result<()> {
        let number = address.rsplit('.').next().unwrap_or_default();
        self.ip(&["link", "set", &format!("port{number}"), if connected { "up" } else { "down" }])
    }

    /// The network itself, for a client that is none of the hosts.
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
