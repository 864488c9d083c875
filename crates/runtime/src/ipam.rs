//! Pod addresses: one file per address in use, its content the sandbox that holds it.
//!
//! Addresses are given out in turn, starting after the last one, so that a freed address rests for
//! a while before it is somebody else's. A lock on the directory makes it safe for two processes.
//!
//! ```text
//! ipam/lock   ipam/last.10.42.0.0   ipam/10.42.0.7 → "<sandbox id>"
//! ```

use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use nix::fcntl::{Flock, FlockArg};

/// Beyond this many addresses of an IPv6 network the search wraps around.
const LARGEST: u128 = 1 << 16;

pub(crate) struct Ipam {
    directory: PathBuf,
}

impl Ipam {
    pub(crate) fn open(directory: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&directory)?;
        Ok(Self { directory })
    }

    /// The first address of the network: the bridge's.
    pub(crate) fn gateway(network: &IpNet) -> IpAddr {
        offset(network, 1)
    }

    /// Gives the sandbox an address; the one that it has already, if it has one.
    pub(crate) fn allocate(&self, network: &IpNet, sandbox: &str) -> io::Result<IpAddr> {
        let _alone = self.lock()?;
        let count = size(network);
        if let Some(held) = self.held_by(sandbox)?.into_iter().find(|ip| network.contains(ip)) {
            return Ok(held);
        }
        let last_file = self.directory.join(format!("last.{}", network.network()));
        let last: u128 = fs::read_to_string(&last_file)
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .filter(|last| (1..count).contains(last))
            .unwrap_or(1);
        // 0 is the network, 1 the gateway, the last one the broadcast.
        let usable = count.saturating_sub(3);
        for step in 1..=usable {
            let at = 2 + (last + usable - 2 + step) % usable;
            let address = offset(network, at);
            let path = self.directory.join(address.to_string());
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(_) => {
                    crate::files::write_atomic(&path, sandbox.as_bytes())?;
                    crate::files::write_atomic(&last_file, at.to_string().as_bytes())?;
                    return Ok(address);
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::other(format!("no free address in {network}")))
    }

    pub(crate) fn release(&self, sandbox: &str) -> io::Result<()> {
        let _alone = self.lock()?;
        for address in self.held_by(sandbox)? {
            remove(&self.directory.join(address.to_string()))?;
        }
        Ok(())
    }

    /// Frees what sandboxes hold that are not (any more).
    pub(crate) fn keep_only(&self, is_known: impl Fn(&str) -> bool) -> io::Result<()> {
        let _alone = self.lock()?;
        for (address, holder) in self.all()? {
            if !is_known(&holder) {
                remove(&self.directory.join(address.to_string()))?;
            }
        }
        Ok(())
    }

    fn held_by(&self, sandbox: &str) -> io::Result<Vec<IpAddr>> {
        Ok(self
            .all()?
            .into_iter()
            .filter(|(_, holder)| holder == sandbox)
            .map(|(ip, _)| ip)
            .collect())
    }

    fn all(&self) -> io::Result<Vec<(IpAddr, String)>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            if let Some(address) = entry.file_name().to_str().and_then(|name| name.parse().ok()) {
                all.push((address, fs::read_to_string(entry.path()).unwrap_or_default()));
            }
        }
        Ok(all)
    }

    fn lock(&self) -> io::Result<Flock<File>> {
        let path = self.directory.join("lock");
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
        Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| errno.into())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_go_round_and_come_back() {
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
}
