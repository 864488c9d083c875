//! The sysctls under `/proc/sys/net` that pod networking needs, per network namespace.
//!
//! `net.ipv4.conf.all.route_localnet` is deliberately not set: as in upstream's nftables mode, node
//! ports do not answer on 127.0.0.1.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::Error;
use crate::netns;

/// Enables forwarding for both families, in the namespace `netns` or the caller's. Netfilter for
/// bridged packets is not changed: our pods are routed (see `pods`).
pub async fn prepare_node(netns: Option<&Path>) -> Result<(), Error> {
    netns::enter_or_here(netns, || {
        set("net.ipv4.ip_forward", "1")?;
        // The kernel uses this or the interface's own value; see `pods`.
        set("net.ipv4.conf.all.send_redirects", "0")?;
        set_if_present("net.ipv6.conf.all.forwarding", "1").map(drop)
    })
    .await?
}

/// The size and the timeouts of connection tracking. The default is that of upstream's kube-proxy. A timeout
/// of zero leaves the kernel's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tracking {
    /// Connections for each core; 0 leaves the limit as it is.
    pub max_per_core: usize,
    /// The least limit, whatever the number of cores.
    pub min: usize,
    pub tcp_established: Duration,
    pub tcp_close_wait: Duration,
    pub tcp_be_liberal: bool,
    pub udp: Duration,
    pub udp_stream: Duration,
}

impl Default for Tracking {
    fn default() -> Self {
        Self {
            max_per_core: 32 << 10,
            min: 128 << 10,
            tcp_established: Duration::from_secs(86_400),
            tcp_close_wait: Duration::from_secs(3600),
            tcp_be_liberal: false,
            udp: Duration::ZERO,
            udp_stream: Duration::ZERO,
        }
    }
}

impl Tracking {
    /// The limit for a machine; `None` leaves it as it is.
    fn most(&self, cores: usize) -> Option<usize> {
        let most = cores.saturating_mul(self.max_per_core).max(self.min);
        (self.max_per_core > 0).then_some(most)
    }

    /// The settings of a network namespace, by the name after `nf_conntrack_`.
    fn settings(&self) -> Vec<(&'static str, u64)> {
        let timeouts = [
            ("tcp_timeout_established", self.tcp_established),
            ("tcp_timeout_close_wait", self.tcp_close_wait),
            ("udp_timeout", self.udp),
            ("udp_timeout_stream", self.udp_stream),
        ];
        let given = timeouts.into_iter().filter(|(_, timeout)| !timeout.is_zero());
        let mut out: Vec<_> = given.map(|(name, timeout)| (name, timeout.as_secs())).collect();
        out.extend(self.tcp_be_liberal.then_some(("tcp_be_liberal", 1)));
        out
    }
}

/// Sets the size and timeouts of connection tracking. Call this after connection tracking is loaded. The size
/// applies to the whole machine: it is only raised, and a failure to write it is only logged.
pub async fn prepare_tracking(netns: Option<&Path>, wanted: Tracking) -> Result<(), Error> {
    netns::enter_or_here(netns, move || {
        for (name, value) in wanted.settings() {
            set_if_present(&format!("net.netfilter.nf_conntrack_{name}"), &value.to_string())?;
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let Some(wanted) = wanted.most(cores) else { return Ok(()) };
        let most = "net.netfilter.nf_conntrack_max";
        let now = fs::read_to_string(file_of(most)).ok().and_then(|text| text.trim().parse().ok());
        if now.is_some_and(|now: usize| now < wanted)
            && let Err(error) = set(most, &wanted.to_string())
        {
            tracing::debug!(%error, "failed to raise nf_conntrack_max");
        }
        Ok(())
    })
    .await?
}

/// Writes a sysctl in the calling thread's namespace. Skips the write when the value is already
/// set, so that a read-only `/proc/sys` with the right values is enough.
pub fn set(name: &str, value: &str) -> Result<(), Error> {
    let path = file_of(name);
    if fs::read_to_string(&path).is_ok_and(|now| now.trim() == value) {
        return Ok(());
    }
    fs::write(&path, value).map_err(|source| {
        let needs = match source.kind() {
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
                format!(" (needs a writable {}, or that value set beforehand)", path.display())
            }
            _ => String::new(),
        };
        Error::System { action: format!("set {name}={value}{needs}"), source }
    })
}

/// Like [`set`], but returns `Ok(false)` when this kernel lacks the sysctl.
pub fn set_if_present(name: &str, value: &str) -> Result<bool, Error> {
    match set(name, value) {
        Ok(()) => Ok(true),
        Err(Error::System { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Accepts `a.b.c` or, for names that contain a dot (`eth0.100`), `a/b/c`, like sysctl(8).
fn file_of(name: &str) -> PathBuf {
    let path = if name.contains('/') { name.to_owned() } else { name.replace('.', "/") };
    Path::new("/proc/sys").join(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tracking_is_upstreams() {
        let default = Tracking::default();
        for (cores, expected) in [(1, 131_072), (4, 131_072), (8, 262_144)] {
            assert_eq!(default.most(cores), Some(expected), "{cores} cores");
        }
        assert_eq!(Tracking { max_per_core: 0, ..default.clone() }.most(8), None);
        assert_eq!(
            default.settings(),
            [("tcp_timeout_established", 86_400), ("tcp_timeout_close_wait", 3600)]
        );
        let own = Tracking {
            tcp_established: Duration::ZERO,
            tcp_be_liberal: true,
            udp_stream: Duration::from_secs(90),
            ..default
        };
        let expected =
            [("tcp_timeout_close_wait", 3600), ("udp_timeout_stream", 90), ("tcp_be_liberal", 1)];
        assert_eq!(own.settings(), expected);
    }
}
