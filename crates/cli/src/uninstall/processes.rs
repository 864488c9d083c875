//! Finds and stops the processes of a data directory.
//!
//! A process is ours if it runs one of our commands, is in our mount namespace (in another one the same
//! path is another directory), and its command line refers to the data directory. The pid file alone
//! proves nothing, because pids are reused.

use std::fs;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::cluster::DEFAULT_DATA_DIR;

/// Commands of the binary that run until they are stopped.
const COMMANDS: &[&str] = &[
    "server",
    "agent",
    "dns",
    "kubelet",
    "runtime",
    "kube-proxy",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
];
/// Commands with pods, or with rules in the kernel.
const NODE_COMMANDS: &[&str] = &["server", "agent", "kubelet", "runtime", "kube-proxy"];
/// Node processes of other distributions.
const FOREIGN_NODES: &[&str] = &["kubelet", "kube-proxy", "k3s", "rke2", "k0s"];
/// A server commits and drains first.
const GRACE: Duration = Duration::from_secs(20);
const KILLED: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    pub pid: i32,
    pub words: Vec<String>,
    /// The working directory, to resolve relative paths.
    pub directory: PathBuf,
    /// Whether it shares our mount and network namespaces.
    pub same_mounts: bool,
    pub same_network: bool,
}

/// All processes that belong to any cluster, except this one.
pub fn all() -> Vec<Process> {
    let namespace = |pid: &str, kind: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok();
    let (mounts, network) = (namespace("self", "mnt"), namespace("self", "net"));
    let read = |entry: fs::DirEntry| -> Option<Process> {
        let name = entry.file_name().into_string().ok()?;
        let pid: i32 = name.parse().ok()?;
        let line = fs::read(entry.path().join("cmdline")).ok()?;
        let words =
            line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
        let process = Process {
            pid,
            words: words.filter(|word| !word.is_empty()).collect(),
            directory: fs::read_link(entry.path().join("cwd")).unwrap_or_default(),
            same_mounts: namespace(&name, "mnt") == mounts,
            same_network: namespace(&name, "net") == network,
        };
        let is_self = u32::try_from(pid).is_ok_and(|pid| pid == std::process::id());
        (!is_self && (process.command().is_some() || process.is_foreign_node())).then_some(process)
    };
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(read).collect()
}

/// Supervisors first, so that they restart nothing.
pub fn of_data_dir(all: &[Process], data_dir: &Path) -> Vec<Process> {
    let mut ours: Vec<Process> =
        all.iter().filter(|process| process.belongs_to(data_dir)).cloned().collect();
    ours.sort_by_key(|process| COMMANDS.iter().position(|one| process.command() == Some(one)));
    ours
}

/// Node processes of other clusters.
pub fn other_nodes<'a>(
    all: &'a [Process],
    ours: &'a [Process],
) -> impl Iterator<Item = &'a Process> {
    let is_node = |process: &&Process| {
        let own = process.command().is_some_and(|one| NODE_COMMANDS.contains(&one));
        own || process.is_foreign_node()
    };
    all.iter().filter(is_node).filter(|process| !ours.contains(process))
}

impl Process {
    /// The name for messages.
    pub fn name(&self) -> &str {
        self.command().unwrap_or("a process")
    }

    fn is_foreign_node(&self) -> bool {
        let program = self.words.first().and_then(|word| Path::new(word).file_name()?.to_str());
        program.is_some_and(|program| FOREIGN_NODES.contains(&program))
    }

    /// `decapod [flags] server …`: the first word that is a command of ours.
    fn command(&self) -> Option<&str> {
        let program = Path::new(self.words.first()?).file_name()?;
        if program != "decapod" {
            return None;
        }
        let found = self.words[1..].iter().find(|word| COMMANDS.contains(&word.as_str()))?;
        Some(found)
    }

    /// The values of a flag, in both forms.
    pub fn flag<'p>(&'p self, name: &str) -> Vec<&'p str> {
        let mut found = vec![];
        for (index, word) in self.words.iter().enumerate() {
            match word.strip_prefix(name) {
                Some("") => found.extend(self.words.get(index + 1).map(String::as_str)),
                Some(rest) => found.extend(rest.strip_prefix('=')),
                None => {}
            }
        }
        found
    }

    fn belongs_to(&self, data_dir: &Path) -> bool {
        if !self.same_mounts || self.command().is_none() {
            return false;
        }
        let resolved = |text: &str| {
            let path = self.directory.join(text);
            path.canonicalize().unwrap_or(path)
        };
        let mut given = self.flag("--data-dir");
        given.extend(self.flag("-d"));
        // `-d/path` is a single word.
        given.extend(
            self.words
                .iter()
                .filter_map(|word| word.strip_prefix("-d").filter(|rest| rest.starts_with('/'))),
        );
        let kubeconfigs = self.flag("--kubeconfig");
        if kubeconfigs.iter().any(|text| resolved(text).starts_with(data_dir)) {
            return true;
        }
        match given.last() {
            Some(text) => resolved(text) == data_dir,
            None if !kubeconfigs.is_empty() => false,
            None => self.is_owner(data_dir),
        }
    }

    /// Without a flag, a configuration file or a variable may name another directory; then the pid file decides.
    fn is_owner(&self, data_dir: &Path) -> bool {
        let has_settings = self.command().is_some_and(|one| ["server", "agent"].contains(&one));
        if has_settings && let Ok(noted) = fs::read_to_string(data_dir.join("decapod.pid")) {
            return noted.trim() == self.pid.to_string();
        }
        self.flag("--config").is_empty() && data_dir == Path::new(DEFAULT_DATA_DIR)
    }

    /// Stops it with SIGTERM, then SIGKILL.
    pub async fn stop(&self) -> Result<()> {
        let Ok(descriptor) = open(self.pid) else { return Ok(()) };
        // The pid may have been reused since the look-up.
        let line = self.words.iter().map(|word| format!("{word}\0")).collect::<String>();
        let now = fs::read(format!("/proc/{}/cmdline", self.pid)).unwrap_or_default();
        if std::ffi::OsStr::from_bytes(&now) != line.as_str() {
            return Ok(());
        }
        // SAFETY: the descriptor is owned by the registration, which alone closes it.
        let ended = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }
            .map_err(|error| error.into_parts().1)?;
        for (signal, patience) in [(Signal::SIGTERM, GRACE), (Signal::SIGKILL, KILLED)] {
            if kill(Pid::from_raw(self.pid), signal).is_err() {
                return Ok(());
            }
            if let Ok(outcome) = tokio::time::timeout(patience, ended.readable()).await {
                outcome
                    .with_context(|| format!("cannot wait for the end of {}", self.pid))?
                    .retain_ready();
                return Ok(());
            }
        }
        bail!("{} (pid {}) did not stop", self.name(), self.pid)
    }
}

/// A descriptor that becomes readable when the process has exited.
fn open(pid: i32) -> std::io::Result<OwnedFd> {
    // SAFETY: the call takes two integers and returns a new descriptor or -1.
    let descriptor = unsafe { nix::libc::syscall(nix::libc::SYS_pidfd_open, pid, 0) };
    if descriptor < 0 {
        return Err(std::io::Error::last_os_error());
    }
    let descriptor = i32::try_from(descriptor).map_err(std::io::Error::other)?;
    // SAFETY: the descriptor was just created, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(line: &str) -> Process {
        let words = line.split(' ').map(Into::into).collect();
        let directory = "/somewhere".into();
        Process { pid: 1, words, directory, same_mounts: true, same_network: true }
    }

    #[test]
    fn command_lines_name_data_directories() {
        let check = |line: &str, data_dir: &str, expected: bool| {
            let got = !of_data_dir(&[process(line)], Path::new(data_dir)).is_empty();
            assert_eq!(got, expected, "{line}");
        };
        // A server of this machine would have the directory.
        if !Path::new(DEFAULT_DATA_DIR).join("decapod.pid").exists() {
            check("decapod server", DEFAULT_DATA_DIR, true);
        }
        check("decapod server", "/data/x", false);
        check("/usr/bin/decapod server --data-dir /data/x", "/data/x", true);
        check("decapod --data-dir=/data/x agent", "/data/x", true);
        check("decapod server -d /data/x", "/data/x", true);
        check("decapod server -d/data/x", "/data/x", true);
        check("decapod server --data-dir relative", "/somewhere/relative", true);
        check(
            "decapod dns --kubeconfig=/data/x/dns.kubeconfig --address=10.43.0.10",
            "/data/x",
            true,
        );
        check("decapod dns --kubeconfig=/data/xy/dns.kubeconfig", "/data/x", false);
        check("decapod server --data-dir=/data/xy", "/data/x", false);
        check("nginx server --data-dir=/data/x", "/data/x", false);
        check("decapod uninstall --data-dir=/data/x", "/data/x", false);
    }

    #[test]
    fn without_a_flag_the_pid_file_decides() {
        let directory = tempfile::tempdir().expect("a directory");
        let ours = |line: &str| !of_data_dir(&[process(line)], directory.path()).is_empty();
        assert!(!ours("decapod server"));
        std::fs::write(directory.path().join("decapod.pid"), "1").expect("written");
        assert!(ours("decapod server") && ours("decapod agent"));
        assert!(!ours("decapod server --data-dir /data/x"));
        std::fs::write(directory.path().join("decapod.pid"), "2").expect("written");
        assert!(!ours("decapod server"));
    }

    #[test]
    fn flags_have_two_forms() {
        let dns = process("decapod dns --address=10.43.0.10,::1 --address 1.2.3.4");
        assert_eq!(dns.flag("--address"), ["10.43.0.10,::1", "1.2.3.4"]);
        assert_eq!(dns.name(), "dns");
    }

    #[test]
    fn other_clusters_are_seen() {
        let all = [
            process("decapod server"),
            process("decapod agent -d /data/x"),
            process("decapod dns"),
            Process { same_network: false, ..process("/usr/bin/kubelet --x") },
        ];
        let ours = of_data_dir(&all, Path::new("/data/x"));
        assert_eq!(ours.len(), 1);
        // A DNS process has nothing in the kernel.
        assert_eq!(other_nodes(&all, &ours).count(), 2);
        assert_eq!(other_nodes(&all[1..3], &ours).count(), 0);
        let elsewhere = Process { same_mounts: false, ..process("decapod server") };
        assert!(of_data_dir(&[elsewhere], Path::new(DEFAULT_DATA_DIR)).is_empty());
    }
}
