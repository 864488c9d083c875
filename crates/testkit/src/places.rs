//! Paths of the cache and of upstream's programs, and unique loopback addresses.

use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::PathBuf;
use std::sync::Mutex;

use anyhow::{Context, Result, bail};

/// The directory of expensive build results, which survives between runs.
pub fn cache() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("DECAPOD_CACHE") {
        return Ok(path.into());
    }
    let home = std::env::var_os("HOME").context("neither DECAPOD_CACHE nor HOME is set")?;
    Ok(PathBuf::from(home).join(".cache/decapod"))
}

/// The newest kubectl that `cargo xtask kubectl` has built.
pub fn kubectl() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("DECAPOD_KUBECTL") {
        return Ok(path.into());
    }
    match newest("kubectl")? {
        Some(path) => Ok(path),
        None => bail!("no kubectl in {}: run `cargo xtask kubectl`", cache()?.display()),
    }
}

/// The newest helm that `cargo xtask helm` has built.
pub fn helm() -> Option<PathBuf> {
    let named = std::env::var_os("DECAPOD_HELM").map(PathBuf::from);
    named.or_else(|| newest("helm").ok().flatten())
}

/// The mock driver that `cargo xtask csi-driver` has built.
pub fn csi_driver() -> Option<PathBuf> {
    newest("csi-driver").ok().flatten()
}

/// The stub of a device plugin that `cargo xtask device-plugin` has built.
pub fn device_plugin() -> Option<PathBuf> {
    newest("device-plugin").ok().flatten()
}

/// The clients that `cargo xtask cbor-client` has built.
pub fn cbor_client() -> Option<PathBuf> {
    newest("cbor-client").ok().flatten()
}

/// The API server of upstream that `cargo xtask kube-apiserver` has built.
pub fn kube_apiserver() -> Option<PathBuf> {
    let named = std::env::var_os("DECAPOD_KUBE_APISERVER").map(PathBuf::from);
    named.or_else(|| newest("kube-apiserver").ok().flatten())
}

/// The newest, by the name of its directory, of the cached programs with this name.
pub(crate) fn newest(name: &str) -> Result<Option<PathBuf>> {
    let cache = cache()?;
    let found = std::fs::read_dir(&cache)
        .with_context(|| format!("{}", cache.display()))?
        .filter_map(|entry| Some(entry.ok()?.path().join(name)))
        .filter(|path| path.is_file());
    Ok(found.max())
}

/// The program that a variable names, or the one at this path in the cache, for example `etcd-3.6/etcd`.
pub fn cached(variable: &str, place: &str) -> Option<PathBuf> {
    let named = std::env::var_os(variable).map(PathBuf::from);
    named.or_else(|| cache().ok().map(|cache| cache.join(place)).filter(|path| path.is_file()))
}

/// A loopback address that no other process gets while this one lives. Programs that need fixed ports
/// have all ports of that address. On another address a free port may be taken a moment later, also as
/// the local end of another connection; that never happens at these addresses.
pub fn own_loopback() -> Ipv4Addr {
    /// The claimed addresses; they last as long as the process.
    static CLAIMS: Mutex<Vec<UnixListener>> = Mutex::new(vec![]);
    let mut claims = CLAIMS.lock().expect("no panic under the lock");
    // Processes with neighbouring ids start far from each other.
    let begin = std::process::id().wrapping_mul(40_503);
    for step in 0..=LOOPBACKS {
        let address = Ipv4Addr::from(FIRST_LOOPBACK | (begin.wrapping_add(step) & LOOPBACKS));
        match claim(address) {
            Ok(held) => {
                claims.push(held);
                return address;
            }
            Err(error) if error.kind() == ErrorKind::AddrInUse => {}
            Err(error) => panic!("{address} cannot be claimed: {error}"),
        }
    }
    panic!("all loopback addresses are taken");
}

/// 127.64.0.0/10: other programs hardly use it.
const FIRST_LOOPBACK: u32 = u32::from_be_bytes([127, 64, 0, 0]);
const LOOPBACKS: u32 = (1 << 22) - 1;

/// Binds an abstract socket name, which one process at a time can have and which is free when the process
/// ends. Such names belong to a network namespace, as loopback addresses do.
fn claim(address: Ipv4Addr) -> std::io::Result<UnixListener> {
    let name = format!("decapod-own-loopback-{address}");
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

/// The path of a program in `PATH`.
pub fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(|file| file.is_file())
}

/// Whether this process may create namespaces and containers; prints a line if not.
pub fn is_root_or_says_skipped() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("skipped: needs root");
    }
    root
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::wait;

    #[test]
    fn an_address_is_claimed_once() {
        // More addresses than fit into a byte.
        let given: BTreeSet<Ipv4Addr> = (0..300).map(|_| own_loopback()).collect();
        assert_eq!(given.len(), 300);
        assert!(given.iter().all(|address| address.is_loopback() && address.octets()[1] >= 64));
        // The view of another process.
        let kinds = given.iter().map(|address| claim(*address).map_err(|error| error.kind()).err());
        assert!(kinds.into_iter().all(|kind| kind == Some(ErrorKind::AddrInUse)));
    }

    #[test]
    fn a_claim_ends_with_its_holder() {
        // No other process has this number, and `own_loopback` never gives this address.
        let address = Ipv4Addr::from(u32::from_be_bytes([127, 0, 0, 0]) | std::process::id());
        let held = claim(address).expect("nobody has it");
        claim(address).expect_err("it is taken");
        drop(held);
        // A child that is just starting holds a copy of the socket until it executes another program.
        wait::until(wait::LONG, "it is free again", || Ok(claim(address)?)).expect("in time");
    }
}
