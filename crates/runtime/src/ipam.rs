//! Pod addresses: one file per allocated address, with the id of its sandbox.
//!
//! The search for a free address starts after the last allocated one, so that a freed address is
//! not reused soon. After a restart, the newest file marks the last allocated address.
//!
//! ```text
//! ipam/10.42.0.7 → "<sandbox id>"
//! ```
//!
//! Invariant: memory equals the files. They are read once: only one runtime uses the directory, and
//! reading all files for each pod would cost the square of the pods' number.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::SystemTime;

use ipnet::IpNet;

/// Beyond this many addresses of an IPv6 network the search wraps around.
const LARGEST: u128 = 1 << 16;

pub(crate) struct Ipam {
    directory: PathBuf,
    /// Also guards the files. The lock is held while a file is written.
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    by: BTreeMap<IpAddr, String>,
    /// The last allocated address of each network; after a restart all addresses, newest first.
    last: Vec<IpAddr>,
}

impl Ipam {
    pub(crate) fn open(directory: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&directory)?;
        let mut found = Vec::new();
        for entry in fs::read_dir(&directory)? {
            let entry = entry?;
            let Some(address) = entry.file_name().to_str().and_then(|name| name.parse().ok())
            else {
                continue;
            };
            let written = entry.metadata()?.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            found.push((written, address, fs::read_to_string(entry.path()).unwrap_or_default()));
        }
        found.sort_unstable();
        let last = found.iter().rev().map(|(_, address, _)| *address).collect();
        let by = found.into_iter().map(|(_, address, holder)| (address, holder)).collect();
        Ok(Self { directory, held: Mutex::new(Held { by, last }) })
    }

    /// The first address of the network: the bridge's.
    pub(crate) fn gateway(network: &IpNet) -> IpAddr {
        offset(network, 1)
    }

    /// Allocates an address for the sandbox, or returns the one that it has.
    pub(crate) fn allocate(&self, network: &IpNet, sandbox: &str) -> io::Result<IpAddr> {
        let mut held = self.held();
        let own = |(ip, holder): &(&IpAddr, &String)| *holder == sandbox && network.contains(*ip);
        if let Some((address, _)) = held.by.iter().find(own) {
            return Ok(*address);
        }
        let count = size(network);
        // 0 is the network, 1 the gateway, and the last address is the broadcast.
        let usable = count.saturating_sub(3);
        let last = held.last.iter().position(|ip| network.contains(ip));
        let before = last.map_or(1, |at| place(network, held.last[at]));
        let before = if (1..count).contains(&before) { before } else { 1 };
        for step in 1..=usable {
            let address = offset(network, 2 + (before + usable - 2 + step) % usable);
            if held.by.contains_key(&address) {
                continue;
            }
            crate::files::write_atomic(&self.file(address), sandbox.as_bytes())?;
            held.by.insert(address, sandbox.to_owned());
            match last {
                Some(at) => held.last[at] = address,
                None => held.last.push(address),
            }
            return Ok(address);
        }
        Err(io::Error::other(format!("no free address in {network}")))
    }

    pub(crate) fn release(&self, sandbox: &str) -> io::Result<()> {
        self.free(|holder| holder == sandbox)
    }

    /// Frees the addresses of sandboxes that no longer exist.
    pub(crate) fn keep_only(&self, is_known: impl Fn(&str) -> bool) -> io::Result<()> {
        self.free(|holder| !is_known(holder))
    }

    fn free(&self, is_free: impl Fn(&str) -> bool) -> io::Result<()> {
        let mut held = self.held();
        let gone = held.by.iter().filter(|(_, holder)| is_free(holder)).map(|(ip, _)| *ip);
        for address in gone.collect::<Vec<_>>() {
            remove(&self.file(address))?;
            held.by.remove(&address);
        }
        Ok(())
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().expect("no panic while addresses are held")
    }

    fn file(&self, address: IpAddr) -> PathBuf {
        self.directory.join(address.to_string())
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn size(network: &IpNet) -> u128 {
    let bits = u32::from(network.max_prefix_len() - network.prefix_len());
    if bits >= 16 { LARGEST } else { 1 << bits }
}

fn offset(network: &IpNet, by: u128) -> IpAddr {
    match network.network() {
        IpAddr::V4(base) => IpAddr::V4((u32::from(base).wrapping_add(by as u32)).into()),
        IpAddr::V6(base) => IpAddr::V6((u128::from(base).wrapping_add(by)).into()),
    }
}

/// The index of an address in the network: the inverse of [`offset`].
fn place(network: &IpNet, address: IpAddr) -> u128 {
    match (network.network(), address) {
        (IpAddr::V4(base), IpAddr::V4(at)) => u32::from(at).wrapping_sub(base.into()).into(),
        (IpAddr::V6(base), IpAddr::V6(at)) => u128::from(at).wrapping_sub(base.into()),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_allocated_in_turn_and_reused() {
        let directory = tempfile::tempdir().expect("a directory");
        let ipam = Ipam::open(directory.path().into()).expect("opened");
        let network: IpNet = "10.42.0.0/29".parse().expect("a network");
        let take = |who: &str| ipam.allocate(&network, who).ok().map(|ip| ip.to_string());
        let at = |n: u8| Some(format!("10.42.0.{n}"));
        assert_eq!(Ipam::gateway(&network).to_string(), "10.42.0.1");
        for (n, who) in (2..=6).zip(["a", "b", "c", "d", "e"]) {
            assert_eq!(take(who), at(n));
        }
        assert_eq!(take("b"), at(3), "what it has already");
        assert_eq!(take("f"), None);
        ipam.release("c").expect("released");
        ipam.release("a").expect("released");
        ipam.release("a").expect("twice is fine");
        assert_eq!(take("g"), at(2));
        assert_eq!(take("h"), at(4));
        ipam.keep_only(|who| who == "h").expect("kept");
        assert_eq!(take("i"), at(5));
    }

    #[test]
    fn allocations_survive_a_restart() {
        let directory = tempfile::tempdir().expect("a directory");
        let open = || Ipam::open(directory.path().into()).expect("opened");
        let check = |network: &str, who: &str, expected: &str| {
            let given = open().allocate(&network.parse().expect("a network"), who);
            assert_eq!(given.expect("an address").to_string(), expected);
        };
        check("10.42.0.0/24", "a", "10.42.0.2");
        check("10.42.0.0/24", "b", "10.42.0.3");
        check("fd00::/64", "b", "fd00::2");
        check("10.42.0.0/24", "a", "10.42.0.2");
        open().release("a").expect("released");
        // A freed address is not reused while others are free.
        check("10.42.0.0/24", "c", "10.42.0.4");
        check("fd00::/64", "c", "fd00::3");
        open().keep_only(|who| who == "b").expect("kept");
        let names = |entry: fs::DirEntry| entry.file_name().into_string().expect("text");
        let mut left: Vec<String> =
            fs::read_dir(directory.path()).expect("listed").flatten().map(names).collect();
        left.sort_unstable();
        assert_eq!(left, ["10.42.0.3", "fd00::2"]);
    }
}
