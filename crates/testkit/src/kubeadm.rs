//! Machines that an unmodified kubeadm manages: test hosts with a service that runs our kubelet.
//!
//! In: a host, the binary, kubeadm and kubectl from the cache, image archives. Out: kubeadm's commands on the
//! host. Invariant: kubeadm writes to /etc/kubernetes, /var/lib/kubelet and /var/lib/etcd; the host has its
//! own of these, in memory, and the real machine's stay as they are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::daemon::Daemon;
use crate::host::Host;
use crate::places;
use crate::switch::Switch;

const SCRIPT: &str = include_str!("kubeadm.sh");

pub struct Machine {
    // Must be dropped before the host, which waits for its processes.
    service: Daemon,
    host: Host,
    address: String,
}

impl Machine {
    /// Connects a new host to the switch and starts its services; the kubelet waits for kubeadm.
    pub fn start(switch: &mut Switch, name: &str, binary: &Path, kubeadm: &Path) -> Result<Self> {
        let host = Host::new(name)?;
        let address = switch.connect(&host)?;
        let script = host.directory().join("machine.sh");
        fs::write(&script, SCRIPT)?;
        let variables = [
            format!("DIRECTORY={}", host.directory().display()),
            format!("DECAPOD={}", binary.display()),
            format!("KUBEADM={}", kubeadm.display()),
            format!("KUBECTL={}", places::kubectl()?.display()),
        ];
        let script = script.display().to_string();
        let words = |what: &str| -> Vec<String> {
            let program = ["bash", &script, what].map(str::to_owned);
            variables.iter().cloned().chain(program).collect()
        };
        let prepare = words("prepare");
        host.run("env", &prepare.iter().map(String::as_str).collect::<Vec<_>>())?;
        let mut service = Daemon::new(&host, "kubelet", Path::new("env"), words("serve"));
        service.launch(&host)?;
        Ok(Self { service, host, address })
    }

    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Its address on the switch.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The kubelet's log.
    pub fn log(&self) -> String {
        self.service.log()
    }

    /// Imports an archive into the embedded runtime, as `decapod images import` of a user does.
    pub fn import(&self, binary: &Path, archive: &Path) -> Result<()> {
        let data = self.host.directory().join("data").display().to_string();
        let archive = archive.display().to_string();
        let words = ["--data-dir", &data, "images", "import", &archive];
        self.host.run(&binary.display().to_string(), &words).map(drop)
    }

    /// Runs a program, with the machine's kubeadm, kubectl and systemctl in its path, and returns what it
    /// printed, also to standard error.
    pub fn run(&self, program: &str, words: &[&str]) -> Result<String> {
        let own = self.host.directory().join("bin");
        let path = std::env::var("PATH").unwrap_or_default();
        // The search for the program uses this process' path.
        let place = Some(own.join(program)).filter(|path| path.exists());
        let mut command = self.host.command(place.unwrap_or_else(|| program.into()));
        command.args(words).env("PATH", format!("{}:{path}", own.display()));
        command.env("KUBECONFIG", "/etc/kubernetes/admin.conf");
        self.finish(&mut command, &format!("{program} {}", words.join(" ")))
    }

    pub fn kubeadm(&self, words: &[&str]) -> Result<String> {
        self.run("kubeadm", words)
    }

    /// A line of words for kubectl.
    pub fn kubectl(&self, line: &str) -> Result<String> {
        self.run("kubectl", &line.split(' ').collect::<Vec<_>>())
    }

    fn finish(&self, command: &mut Command, shown: &str) -> Result<String> {
        let output = self.host.output(command).with_context(|| shown.to_owned())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
        ensure!(output.status.success(), "{shown}: {}\n{said}", output.status);
        Ok(said)
    }
}

/// kubeadm, if `cargo xtask kubeadm` has built it, and etcd, if `cargo xtask etcd` has.
pub fn programs() -> Option<(PathBuf, PathBuf)> {
    let kubeadm = places::newest("kubeadm").ok().flatten()?;
    Some((kubeadm, places::cached("ETCD", "etcd-3.6/etcd")?))
}
