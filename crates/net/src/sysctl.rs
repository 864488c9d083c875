//! The sysctls under `/proc/sys/net` that pod networking needs, per network namespace.
//!
//! `net.ipv4.conf.all.route_localnet` is deliberately not set: as in upstream's nftables mode, node
//! ports do not answer on 127.0.0.1.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::netns;

const ONE_DAY: &str = "86400";
const ONE_HOUR: &str = "3600";
const CONNECTIONS_PER_CORE: usize = 32 << 10;
const FEWEST_CONNECTIONS: usize = 128 << 10;
const MOST_CONNECTIONS: usize = 1 << 20;

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

/// Sets the size and timeouts of connection tracking to upstream's kube-proxy defaults. Call this
/// after connection tracking is loaded. The size applies to the whole machine: it is only raised,
/// and a failure to write it is only logged.
pub async fn prepare_tracking(netns: Option<&Path>) -> Result<(), Error> {
    netns::enter_or_here(netns, || {
        set_if_present("net.netfilter.nf_conntrack_tcp_timeout_established", ONE_DAY)?;
        set_if_present("net.netfilter.nf_conntrack_tcp_timeout_close_wait", ONE_HOUR)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let wanted = (cores * CONNECTIONS_PER_CORE).clamp(FEWEST_CONNECTIONS, MOST_CONNECTIONS);
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
