//! A pod sandbox without a process: namespaces pinned to files, `resolv.conf`, the host name, shared memory.
//! Only a shared PID namespace needs a living process, its init. A user namespace and the namespaces that it
//! owns are created by a short-lived process ([`crate::shim::Order`]), all others by a thread.
//!
//! ```text
//! <run>/sandboxes/<id>/net uts ipc    bind mounts of the namespaces
//!                      user           with a user namespace
//!                      pause.pid      init of the shared PID namespace
//! <data>/sandboxes/<id>/shm           tmpfs, mounted at /dev/shm in the containers
//! ```
//!
//! A sandbox in the host's network also has the host's name (no `uts`), as upstream.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cri::{DNSConfig, NamespaceMode, NamespaceOption, PodSandboxConfig};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use serde::{Deserialize, Serialize};

use crate::files;
use crate::layout::Layout;
use crate::users::Mappings;

const SHM_OPTIONS: &str = "mode=1777,size=65536k";

/// The last group that may ping, when the pod has all groups of the node.
const LAST_GROUP: u32 = i32::MAX as u32;

/// The sandbox's state on disk, beside its configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SandboxState {
    /// Nanoseconds since 1970.
    pub created_at: i64,
    pub handler: String,
    pub addresses: Vec<std::net::IpAddr>,
    /// Set if CNI plugins connected the sandbox.
    #[serde(default)]
    pub by_plugins: Option<crate::cni::Connected>,
    /// The setup is complete. A sandbox that is not ready is a failed attempt.
    pub ready: bool,
    pub stopped: bool,
}

/// Which namespaces the pod does not share with the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Modes {
    pub host_network: bool,
    pub host_ipc: bool,
    pub host_pid: bool,
    pub shared_pid: bool,
    pub own_users: bool,
}

impl Modes {
    pub(crate) fn of(config: &PodSandboxConfig) -> Self {
        let options = namespace_options(config);
        Self {
            host_network: options.network() == NamespaceMode::Node,
            host_ipc: options.ipc() == NamespaceMode::Node,
            host_pid: options.pid() == NamespaceMode::Node,
            shared_pid: options.pid() == NamespaceMode::Pod,
            own_users: options.userns_options.is_some_and(|o| o.mode() == NamespaceMode::Pod),
        }
    }
}

/// Settings inside the pod's namespaces.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Settings {
    host_network: bool,
    host_ipc: bool,
    hostname: String,
    sysctls: BTreeMap<String, String>,
    last_group: u32,
}

impl Settings {
    pub(crate) fn of(config: &PodSandboxConfig, mappings: Option<Mappings>) -> Self {
        let modes = Modes::of(config);
        Self {
            host_network: modes.host_network,
            host_ipc: modes.host_ipc,
            hostname: hostname(config),
            sysctls: config.linux.as_ref().map(|linux| linux.sysctls.clone()).unwrap_or_default(),
            last_group: mappings.map_or(LAST_GROUP, |own| own.gids.length - 1),
        }
    }

    /// Call this in the pod's namespaces, as their root.
    pub(crate) fn apply(&self) -> io::Result<()> {
        if !self.host_network {
            nix::unistd::sethostname(&self.hostname)?;
            // Upstream: containerd's defaults: any user may bind low ports and ping inside the pod.
            // Older kernels lack these settings.
            let groups = format!("0 {}", self.last_group);
            let _ = fs::write(sysctl_file("net.ipv4.ip_unprivileged_port_start"), "0");
            let _ = fs::write(sysctl_file("net.ipv4.ping_group_range"), groups);
        }
        for (name, value) in &self.sysctls {
            self.check_sysctl(name)?;
            fs::write(sysctl_file(name), value)
                .map_err(|error| io::Error::new(error.kind(), format!("sysctl {name}: {error}")))?;
        }
        Ok(())
    }

    /// Allows only sysctls of the pod's own namespaces: all others are the host's.
    fn check_sysctl(&self, name: &str) -> io::Result<()> {
        let plain = name.replace('/', ".");
        let network = plain.starts_with("net.");
        let ipc = ["kernel.shm", "kernel.msg", "fs.mqueue."].iter().any(|p| plain.starts_with(p))
            || plain == "kernel.sem";
        // The path must not contain `..` or similar steps that lead to another file.
        let file = sysctl_file(name);
        let is_plain = file.to_str().is_some_and(|path| {
            path.split('/').skip(1).all(|part| !matches!(part, "" | "." | ".."))
        });
        if is_plain && ((network && !self.host_network) || (ipc && !self.host_ipc)) {
            Ok(())
        } else {
            Err(io::Error::other(format!("sysctl {name:?} is not in a namespace of the pod")))
        }
    }
}

pub(crate) fn namespace_options(config: &PodSandboxConfig) -> NamespaceOption {
    config
        .linux
        .as_ref()
        .and_then(|linux| linux.security_context.as_ref())
        .and_then(|security| security.namespace_options.clone())
        // CRI's zero value would mean a shared PID namespace; without options each container has its own.
        .unwrap_or_else(|| NamespaceOption {
            pid: NamespaceMode::Container as i32,
            ..Default::default()
        })
}

/// The paths of one sandbox.
pub(crate) struct Places {
    pub data: PathBuf,
    pub run: PathBuf,
}

impl Places {
    pub(crate) fn of(layout: &Layout, id: &str) -> Self {
        Self { data: layout.sandbox(id), run: layout.run_sandbox(id) }
    }

    pub(crate) fn net(&self) -> PathBuf {
        self.run.join("net")
    }

    pub(crate) fn uts(&self) -> PathBuf {
        self.run.join("uts")
    }

    pub(crate) fn ipc(&self) -> PathBuf {
        self.run.join("ipc")
    }

    pub(crate) fn user(&self) -> PathBuf {
        self.run.join("user")
    }

    pub(crate) fn pause_pid(&self) -> PathBuf {
        self.run.join("pause.pid")
    }

    pub(crate) fn shm(&self) -> PathBuf {
        self.data.join("shm")
    }

    pub(crate) fn resolv_conf(&self) -> PathBuf {
        self.data.join("resolv.conf")
    }

    pub(crate) fn hostname(&self) -> PathBuf {
        self.data.join("hostname")
    }

    /// The pid of the shared PID namespace's init, if it is alive.
    pub(crate) fn pause(&self) -> Option<i32> {
        let pid = fs::read_to_string(self.pause_pid()).ok()?.trim().parse().ok()?;
        crate::shim::pause_alive(pid).then_some(pid)
    }

    /// Whether everything that containers need exists (a reboot removes it).
    pub(crate) fn usable(&self, modes: Modes) -> bool {
        let network = modes.host_network || net::netns::is_pinned(&self.net());
        let pid = !modes.shared_pid || self.pause().is_some();
        let users = !modes.own_users || net::netns::is_pinned(&self.user());
        network && pid && users
    }
}

/// The host name inside the pod.
pub(crate) fn hostname(config: &PodSandboxConfig) -> String {
    if !config.hostname.is_empty() {
        return config.hostname.clone();
    }
    nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Creates files and, except for a pod with a user namespace, the namespaces; blocks. The network
/// namespace is empty after this.
pub(crate) fn set_up(places: &Places, config: &PodSandboxConfig) -> io::Result<()> {
    let modes = Modes::of(config);
    fs::create_dir_all(&places.run)?;
    let name = hostname(config);
    fs::write(places.hostname(), format!("{name}\n"))?;
    fs::write(places.resolv_conf(), resolv_conf(config.dns_config.as_ref()))?;
    if !modes.host_ipc {
        fs::create_dir_all(places.shm())?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        mount(Some("shm"), &places.shm(), Some("tmpfs"), flags, Some(SHM_OPTIONS))?;
    }
    if modes.own_users {
        return Ok(());
    }
    if !modes.host_network {
        net::netns::create(&places.net()).map_err(io::Error::other)?;
    }
    let settings = Settings::of(config, None);
    std::thread::scope(|scope| {
        let work = scope.spawn(|| make_and_pin(places, modes, &settings));
        work.join().unwrap_or_else(|_| {
            Err(io::Error::other("the thread that creates the namespaces panicked"))
        })
    })
}

/// Runs on a thread that ends after its namespaces are pinned.
fn make_and_pin(places: &Places, modes: Modes, settings: &Settings) -> io::Result<()> {
    let mut wanted = CloneFlags::empty();
    if !modes.host_network {
        wanted |= CloneFlags::CLONE_NEWUTS;
        setns(fs::File::open(places.net())?, CloneFlags::CLONE_NEWNET)?;
    }
    if !modes.host_ipc {
        wanted |= CloneFlags::CLONE_NEWIPC;
    }
    unshare(wanted)?;
    let own = Path::new("/proc/thread-self/ns");
    if !modes.host_network {
        pin(&own.join("uts"), &places.uts())?;
    }
    if !modes.host_ipc {
        pin(&own.join("ipc"), &places.ipc())?;
    }
    settings.apply()
}

/// Pins the namespaces that another process created for a pod with a user namespace.
pub(crate) fn pin_all(places: &Places, pid: u32) -> io::Result<()> {
    let theirs = PathBuf::from(format!("/proc/{pid}/ns"));
    let all = [
        ("user", places.user()),
        ("net", places.net()),
        ("uts", places.uts()),
        ("ipc", places.ipc()),
    ];
    all.into_iter().try_for_each(|(kind, path)| pin(&theirs.join(kind), &path))
}

fn pin(namespace: &Path, path: &Path) -> io::Result<()> {
    fs::write(path, "")?;
    mount(Some(namespace), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    Ok(())
}

/// The first separator decides the meaning of the other: `net.ipv4.conf.eth0/1.x` is about `eth0.1`.
fn sysctl_file(name: &str) -> PathBuf {
    let has_dots = name.find(['.', '/']).is_some_and(|at| name[at..].starts_with('.'));
    let swap = |c| match c {
        '.' => '/',
        '/' => '.',
        other => other,
    };
    let path = if has_dots { name.chars().map(swap).collect() } else { name.to_owned() };
    Path::new("/proc/sys").join(path)
}

/// Upstream: containerd's `parseDNSOptions`; without options, the host's file.
fn resolv_conf(dns: Option<&DNSConfig>) -> String {
    let Some(dns) = dns else {
        return fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    };
    let mut text = String::new();
    if !dns.searches.is_empty() {
        text += &format!("search {}\n", dns.searches.join(" "));
    }
    for server in &dns.servers {
        text += &format!("nameserver {server}\n");
    }
    if !dns.options.is_empty() {
        text += &format!("options {}\n", dns.options.join(" "));
    }
    text
}

/// Undoes [`set_up`] except for the files; parts may be gone already. Blocks.
pub(crate) fn tear_down(places: &Places) -> io::Result<()> {
    if let Some(pid) = places.pause() {
        // SAFETY: a plain system call.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
    files::unmount(&places.shm())?;
    files::unmount(&places.uts())?;
    files::unmount(&places.ipc())?;
    files::unmount(&places.user())?;
    net::netns::remove(&places.net()).map_err(io::Error::other)?;
    files::remove_tree(&places.run)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolv_conf_follows_the_pods_dns_config() {
        let dns = DNSConfig {
            servers: vec!["10.43.0.10".into()],
            searches: vec!["default.svc.cluster.local".into(), "svc.cluster.local".into()],
            options: vec!["ndots:5".into()],
        };
        let expected = "search default.svc.cluster.local svc.cluster.local\n\
                        nameserver 10.43.0.10\noptions ndots:5\n";
        assert_eq!(resolv_conf(Some(&dns)), expected);
        assert_eq!(resolv_conf(Some(&DNSConfig::default())), "");
    }

    #[test]
    fn sysctl_names_map_to_files() {
        for (name, path) in [
            ("net.core.somaxconn", "net/core/somaxconn"),
            ("net/core/somaxconn", "net/core/somaxconn"),
            ("net.ipv4.conf.eth0/1.x", "net/ipv4/conf/eth0.1/x"),
            ("net/ipv4/conf/eth0.1/x", "net/ipv4/conf/eth0.1/x"),
        ] {
            assert_eq!(sysctl_file(name), Path::new("/proc/sys").join(path), "{name}");
        }
    }

    #[test]
    fn sysctls_of_the_host_are_refused() {
        let own = Settings::default();
        let check = |name: &str, settings: &Settings, fine| {
            assert_eq!(settings.check_sysctl(name).is_ok(), fine, "{name}");
        };
        check("net.core.somaxconn", &own, true);
        check("net/core/somaxconn", &own, true);
        check("kernel.shm_rmid_forced", &own, true);
        check("kernel.msgmax", &own, true);
        check("net/../kernel/panic", &own, false);
        check("net/./core", &own, false);
        check("net//core", &own, false);
        check("vm.swappiness", &own, false);
        check("net.//.kernel.panic", &own, false);
        check("kernel.panic", &own, false);
        check("net.core.somaxconn", &Settings { host_network: true, ..own.clone() }, false);
        check("kernel.shmmax", &Settings { host_ipc: true, ..own.clone() }, false);
    }
}
