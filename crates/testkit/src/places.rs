//! Where things are: the cache, the foreign kubectl, addresses of one's own.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};

use anyhow::{Context, Result, bail};

/// Where things that are dear to make survive between runs.
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

/// The last, by the name of its directory, of the cached programs with this name.
fn newest(name: &str) -> Result<Option<PathBuf>> {
    let cache = cache()?;
    let found = std::fs::read_dir(&cache)
        .with_context(|| format!("{}", cache.display()))?
        .filter_map(|entry| Some(entry.ok()?.path().join(name)))
        .filter(|path| path.is_file());
    Ok(found.max())
}

/// The program that a variable names, or the one of that place in the cache, as `etcd-3.6/etcd`.
pub fn cached(variable: &str, place: &str) -> Option<PathBuf> {
    let named = std::env::var_os(variable).map(PathBuf::from);
    named.or_else(|| cache().ok().map(|cache| cache.join(place)).filter(|path| path.is_file()))
}

/// A loopback address that no other call and no other process of now is given: programs that must be
/// told their ports have all of them there. A port that was free a moment ago may be taken.
pub fn own_loopback() -> Ipv4Addr {
    static GIVEN: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, high, low, GIVEN.fetch_add(1, Ordering::Relaxed))
}

/// A program on the search path.
pub fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(|file| file.is_file())
}

/// Whether this process may make namespaces and containers; says so when not.
pub fn is_root_or_says_skipped() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("skipped: needs root");
    }
    root
}
