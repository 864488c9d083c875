//! The switches under `/proc/sys/net` that pod networking needs, per network namespace.
//!
//! `net.ipv4.conf.all.route_localnet` is left alone on purpose: node ports do not answer on
//! 127.0.0.1, as with upstream's nftables mode.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{During, Error};
use crate::netns;

/// Turns on what a node needs: forwarding for both families, and netfilter for bridged packets
/// where the bridge filter exists. Our own pods are routed and do not need it; another runtime's
/// network plugin may have them on a bridge, where the replies of a service's endpoint on the same
/// node would be switched past the address translation. The namespace is `netns`, or the caller's.
pub async fn prepare_node(netns: Option<&Path>) -> Result<(), Error> {
    netns::enter_or_here(netns, || {
        set("net.ipv4.ip_forward", "1")?;
        // The kernel takes this or the interface's own switch; see `pods`.
        set("net.ipv4.conf.all.send_redirects", "0")?;
        for (name, value) in [
            ("net.ipv6.conf.all.forwarding", "1"),
            ("net.bridge.bridge-nf-call-iptables", "1"),
            ("net.bridge.bridge-nf-call-ip6tables", "1"),
        ] {
            set_if_present(name, value)?;
        }
        Ok(())
    })
    .await?
}

/// Writes one switch in the calling thread's namespace. The write is skipped when the value is
/// there already, so that a read-only `/proc/sys` with the right values is good enough.
pub fn set(name: &str, value: &str) -> Result<(), Error> {
    let path = file_of(name);
    if fs::read_to_string(&path).is_ok_and(|now| now.trim() == value) {
        return Ok(());
    }
    fs::write(&path, value).during(|| format!("set {name}={value}"))
}

/// As [`set`], and `Ok(false)` when this kernel does not have the switch.
pub fn set_if_present(name: &str, value: &str) -> Result<bool, Error> {
    match set(name, value) {
        Ok(()) => Ok(true),
        Err(Error::System { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// `a.b.c` or, where a name itself holds a dot (`eth0.100`), `a/b/c`, as sysctl(8) has it.
fn file_of(name: &str) -> PathBuf {
    let path = if name.contains('/') { name.to_owned() } else { name.replace('.', "/") };
    Path::new("/proc/sys").join(path)
}
