//! A real containerd on a host: Debian's packages, unpacked, not installed.
//!
//! In: a host. Out: a CRI socket at the usual path (each host has its own `/run`). runc runs its
//! containers, and the reference CNI plugins connect them, in the node's pod CIDR.
//!
//! ```text
//! <host>/containerd/  config.toml  root/  cni/template  cni/conf  cni/data
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::daemon::Daemon;
use crate::host::Host;
use crate::{images, places, wait};

pub const ENDPOINT: &str = "unix:///run/containerd/containerd.sock";
const SOCKET: &str = "/run/containerd/containerd.sock";
const PACKAGES: &[&str] = &["containerd", "runc", "containernetworking-plugins"];
/// Increase it when the list of packages changes.
const VERSION: u32 = 1;

pub struct Containerd {
    daemon: Daemon,
    programs: PathBuf,
}

impl Containerd {
    /// Starts containerd and waits until it answers. Drop it before its host.
    pub fn start(host: &Host) -> Result<Self> {
        let programs = programs()?;
        // Its pods are on a bridge.
        host.filter_bridges(true)?;
        let home = host.directory().join("containerd");
        fs::create_dir_all(home.join("cni/conf"))?;
        fs::write(home.join("cni/template"), network(&home))?;
        let config = home.join("config.toml");
        fs::write(&config, settings(&home, &programs))?;
        // containerd looks for its shim and for runc on the search path.
        let path = std::env::var("PATH").unwrap_or_default();
        let words = [
            format!("PATH={}:{path}", programs.join("bin").display()),
            programs.join("bin/containerd").display().to_string(),
            "--config".to_owned(),
            config.display().to_string(),
        ];
        let daemon = Daemon::new(host, "containerd", Path::new("/usr/bin/env"), words.into());
        let mut containerd = Self { daemon, programs };
        containerd.launch(host)?;
        containerd.import(host, &images::pause()?)?;
        Ok(containerd)
    }

    /// Starts it (again) and waits until it answers.
    pub fn launch(&mut self, host: &Host) -> Result<()> {
        self.daemon.launch(host)?;
        let answers = wait::until(wait::LONG, "containerd answers", || {
            let output = host.output(self.ctr(host).arg("version"))?;
            ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Ok(())
        });
        answers.with_context(|| self.log())
    }

    /// Kills containerd with SIGKILL. Containers keep running.
    pub fn kill(&mut self) -> Result<()> {
        self.daemon.kill()
    }

    pub fn log(&self) -> String {
        self.daemon.log()
    }

    /// containerd's own command line, in the namespace of Kubernetes' images.
    pub fn ctr(&self, host: &Host) -> Command {
        let mut command = host.command(self.programs.join("bin/ctr"));
        command.args(["--address", SOCKET, "--namespace", "k8s.io"]);
        command
    }

    pub fn import(&self, host: &Host, archive: &Path) -> Result<()> {
        let output = host.output(self.ctr(host).args(["images", "import"]).arg(archive))?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}: {stderr}", archive.display());
        Ok(())
    }

    /// Ids of its containers and the processes in them, sandboxes included.
    pub fn tasks(&self, host: &Host) -> Result<Vec<(String, u32)>> {
        let output = host.output(self.ctr(host).args(["tasks", "ls"]))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let task = |line: &str| {
            let mut fields = line.split_whitespace();
            Some((fields.next()?.to_owned(), fields.next()?.parse().ok()?))
        };
        let mut found: Vec<_> = text.lines().skip(1).filter_map(task).collect();
        found.sort();
        Ok(found)
    }
}

fn settings(home: &Path, programs: &Path) -> String {
    let home = home.display();
    let plugins = programs.join("cni");
    let plugins = plugins.display();
    let pause = images::PAUSE;
    // A test machine may lack a capability (for OOM scores), huge pages and AppArmor.
    format!(
        r#"version = 2
root = "{home}/root"
state = "/run/containerd"
[grpc]
  address = "{SOCKET}"
[ttrpc]
  address = "{SOCKET}.ttrpc"
[plugins."io.containerd.internal.v1.opt"]
  path = "{home}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  disable_hugetlb_controller = true
  tolerate_missing_hugetlb_controller = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{home}/cni/conf"
    conf_template = "{home}/cni/template"
"#
    )
}

/// containerd inserts the node's pod CIDR. kube-proxy masquerades, not the plugin.
fn network(home: &Path) -> String {
    let data = home.join("cni/data");
    let data = data.display();
    format!(
        r#"{{
  "cniVersion": "0.4.0",
  "name": "pods",
  "plugins": [{{
    "type": "bridge",
    "bridge": "cni0",
    "isGateway": true,
    "hairpinMode": true,
    "mtu": 1450,
    "ipam": {{
      "type": "host-local",
      "dataDir": "{data}",
      "ranges": [[{{"subnet": "{{{{.PodCIDR}}}}"}}]],
      "routes": [{{"dst": "0.0.0.0/0"}}]
    }}
  }}]
}}
"#
    )
}

/// The directory of the reference CNI plugins.
pub fn plugins() -> Result<PathBuf> {
    Ok(programs()?.join("cni"))
}

/// `bin/` and `cni/`, downloaded once.
fn programs() -> Result<PathBuf> {
    let home = places::cache()?.join(format!("containerd-{VERSION}"));
    if home.is_dir() {
        return Ok(home);
    }
    let packages = images::unpack_packages(PACKAGES)?;
    let partial = places::cache()?.join(format!("containerd-{VERSION}.{}", std::process::id()));
    let from = packages.path().join("usr");
    for (directory, name) in [("bin", "bin"), ("sbin", "bin"), ("lib/cni", "cni")] {
        copy(&from.join(directory), &partial.join(name))?;
    }
    // If two runs do this at once, the second finds the directory with the same content.
    if fs::rename(&partial, &home).is_err() {
        fs::remove_dir_all(&partial)?;
    }
    Ok(home)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).into_iter().flatten() {
        let entry = entry?;
        // The packages also contain links to these programs; they are skipped.
        if entry.file_type()?.is_file() {
            fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}
