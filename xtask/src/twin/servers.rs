//! The servers of a comparison: upstream's kube-apiserver on etcd, and ours, side by side.
//!
//! In: the binary, upstream's programs in the cache. Out: two kubeconfigs of one administrator. Both servers have
//! the same authority, the same keys of service accounts and the same flags; neither has controllers.
//! Invariant: all processes end, and the directory is removed, when the value is dropped.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::foreign;
use crate::sh::{self, Outcome};

/// The flags of both servers. The address is unused: only discovery of the `kubernetes` Service shows it.
const BOTH: &[&str] = &[
    "--bind-address=127.0.0.1",
    "--advertise-address=10.1.2.9",
    "--service-cluster-ip-range=10.43.0.0/16",
    "--authorization-mode=Node,RBAC",
    "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
    "--allow-privileged=true",
];

pub struct Servers {
    directory: PathBuf,
    processes: Vec<Child>,
}

impl Servers {
    pub fn start(binary: &Path) -> Outcome<Self> {
        let directory = sh::temporary_directory("twin")?;
        let mut servers = Self { directory, processes: Vec::new() };
        let etcd = servers.etcd()?;
        servers.ours_starts(binary)?;
        let port = servers.theirs_starts(&etcd)?;
        let own = read(&servers.ours())?;
        let server = own.lines().find_map(|line| line.trim().strip_prefix("server: "));
        let server = server.ok_or("the kubeconfig names no server")?;
        let text = own.replace(server, &format!("https://127.0.0.1:{port}"));
        fs::write(servers.theirs(), text).map_err(|error| error.to_string())?;
        servers.wait("theirs", port, &servers.theirs())?;
        Ok(servers)
    }

    pub fn theirs(&self) -> PathBuf {
        self.directory.join("theirs.kubeconfig")
    }

    pub fn ours(&self) -> PathBuf {
        self.directory.join("ours/kubeconfig")
    }

    fn etcd(&mut self) -> Outcome<String> {
        let program = foreign::cached_etcd().ok_or("no etcd in the cache")?;
        let (client, peer) = (free_port()?, free_port()?);
        let (client, peer) =
            (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
        let mut command = Command::new(program);
        command.arg("--data-dir").arg(self.directory.join("etcd"));
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.arg(format!("--initial-cluster=default={peer}"));
        command.args(["--unsafe-no-fsync", "--log-level=warn"]);
        self.spawn("etcd", command)?;
        Ok(client)
    }

    fn ours_starts(&mut self, binary: &Path) -> Outcome {
        let port = free_port()?;
        let mut command = Command::new(binary);
        command.arg("kube-apiserver").arg(format!("--secure-port={port}")).args(BOTH);
        // Upstream has the first group only with another server, and lacks the second.
        command.arg("--runtime-config=metrics.k8s.io/v1beta1=false,network.decapod.io/v1=false");
        command.arg("--data-dir").arg(self.directory.join("ours"));
        self.spawn("ours", command)?;
        self.wait("ours", port, &self.ours())
    }

    fn theirs_starts(&mut self, etcd: &str) -> Outcome<u16> {
        let port = free_port()?;
        let pki = self.directory.join("ours/pki");
        let mut command = Command::new(foreign::api_server()?);
        command.args(BOTH).arg(format!("--secure-port={port}"));
        command.arg(format!("--etcd-servers={etcd}"));
        for (flag, file) in [
            ("client-ca-file", "ca.crt"),
            ("tls-cert-file", "apiserver.crt"),
            ("tls-private-key-file", "apiserver.key"),
            ("service-account-key-file", "sa.pub"),
            ("service-account-signing-key-file", "sa.key"),
        ] {
            command.arg(format!("--{flag}={}", pki.join(file).display()));
        }
        self.spawn("theirs", command)?;
        Ok(port)
    }

    fn spawn(&mut self, name: &str, mut command: Command) -> Outcome {
        let log = self.directory.join(format!("{name}.log"));
        let log = File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        let errors = log.try_clone().map_err(|error| error.to_string())?;
        command.current_dir(&self.directory).stdin(Stdio::null()).stdout(log).stderr(errors);
        let process = command.spawn().map_err(|error| format!("{name}: {error}"))?;
        self.processes.push(process);
        Ok(())
    }

    /// Waits until a server answers, and has written a file.
    fn wait(&self, name: &str, port: u16, file: &Path) -> Outcome {
        let mut command = Command::new("python3");
        command.args(["-c", READY, &format!("https://127.0.0.1:{port}/readyz")]).arg(file);
        if sh::capture(&mut command).is_ok() {
            return Ok(());
        }
        let log = fs::read_to_string(self.directory.join(format!("{name}.log")));
        Err(format!("the API server `{name}` is not ready\n{}", log.unwrap_or_default()))
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        for process in self.processes.iter_mut().rev() {
            let _ = process.kill();
            let _ = process.wait();
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Readiness needs no credentials; the certificate is not compared.
const READY: &str = "
import os, ssl, sys, time, urllib.request as r
end = time.time() + 120
while time.time() < end:
    try:
        r.urlopen(sys.argv[1], context=ssl._create_unverified_context(), timeout=5).read()
        if os.path.exists(sys.argv[2]):
            sys.exit(0)
    except OSError:
        pass
    time.sleep(0.2)
sys.exit(1)
";

fn free_port() -> Outcome<u16> {
    let socket = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
    Ok(socket.local_addr().map_err(|error| error.to_string())?.port())
}

fn read(path: &Path) -> Outcome<String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}
