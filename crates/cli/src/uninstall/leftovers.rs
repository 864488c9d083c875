//! Removes what remains after processes and containers: rules, addresses, mounts, cgroups.

use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use net::nft::{Family, Nft, Ruleset, diff};
use nix::mount::{MntFlags, umount2};

/// The default address of the cluster DNS.
const DEFAULT_DNS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 43, 0, 10));
/// The tables of Services, of pods' outgoing traffic and of network policies.
pub const TABLES: &[&str] = &["kube-proxy", "decapod-pods", "decapod-network-policies"];
const QOS: &[&str] = &["", "burstable", "besteffort"];

/// The number of entries of a directory.
pub fn entries(directory: &Path) -> usize {
    fs::read_dir(directory).into_iter().flatten().flatten().count()
}

/// Also succeeds if they do not exist.
pub fn remove_tables() -> Result<()> {
    let mut ours = Ruleset::default();
    for family in [Family::Ip, Family::Ip6] {
        for table in TABLES {
            ours.table(family, table);
        }
    }
    let mut nft = Nft::open().context("cannot talk to nftables")?;
    nft.apply(&diff(&ours, &Ruleset::default())).context("cannot remove the nftables tables")
}

/// Removes the pods' bridge, if the runtime did not, and the overlay to other nodes with its routes.
/// Returns the removed ones.
pub async fn remove_links() -> Result<Vec<String>> {
    let links = net::Links::open().context("cannot talk to the kernel's network")?;
    let mut removed = vec![];
    for name in [runtime::Config::new("").bridge, net::vxlan::DEVICE.to_owned()] {
        if links.find(&name).await?.is_some() {
            links.remove(&name).await.with_context(|| format!("cannot remove {name}"))?;
            removed.push(name);
        }
    }
    Ok(removed)
}

/// Removes the addresses of load balancers that the node announced; returns them.
pub async fn remove_announced() -> Result<Vec<IpAddr>> {
    let links = net::Links::open().context("cannot talk to the kernel's network")?;
    links.remove_announced().await.context("cannot remove the addresses of load balancers")
}

/// The first nameserver of each sandbox: the DNS addresses of its pods.
pub fn nameservers(sandboxes: &Path) -> Vec<IpAddr> {
    let first = |entry: fs::DirEntry| -> Option<IpAddr> {
        let text = fs::read_to_string(entry.path().join("resolv.conf")).ok()?;
        text.lines().find_map(|line| line.strip_prefix("nameserver ")?.trim().parse().ok())
    };
    fs::read_dir(sandboxes).into_iter().flatten().flatten().filter_map(first).collect()
}

/// Removes them from the loopback device; returns those that existed. With `with_default` also removes
/// the default one.
pub async fn remove_addresses(wanted: &[IpAddr], with_default: bool) -> Result<Vec<IpAddr>> {
    let mut wanted: BTreeSet<IpAddr> =
        wanted.iter().copied().filter(|one| !one.is_loopback()).collect();
    wanted.extend(with_default.then_some(DEFAULT_DNS));
    if wanted.is_empty() {
        return Ok(vec![]);
    }
    let links = net::Links::open().context("cannot talk to the kernel's network")?;
    let loopback = links.find("lo").await?.map(|link| link.index);
    let mut removed = vec![];
    for address in links.addresses().await? {
        if Some(address.link) == loopback && wanted.contains(&address.net.addr()) {
            links.remove_local_address(address.net.addr()).await?;
            removed.push(address.net.addr());
        }
    }
    Ok(removed)
}

/// Unmounts everything below these directories, the innermost first.
pub fn unmount_below(directories: &[&PathBuf]) -> Result<Vec<PathBuf>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("cannot read the mounts")?;
    let found = mounts_below(&table, directories);
    for mount in &found {
        umount2(mount, MntFlags::MNT_DETACH)
            .with_context(|| format!("cannot unmount {}", mount.display()))?;
    }
    Ok(found)
}

/// The last mounted first. A directory that is a mount point itself belongs to its owner, and stays.
fn mounts_below(mountinfo: &str, directories: &[&PathBuf]) -> Vec<PathBuf> {
    let points = mountinfo.lines().filter_map(|line| line.split(' ').nth(4)).map(unescape);
    let is_inside = |point: &PathBuf| {
        directories.iter().any(|directory| point != *directory && point.starts_with(directory))
    };
    let mut found: Vec<PathBuf> = points.filter(is_inside).collect();
    found.reverse();
    found
}

/// Decodes blanks, which are octal in the table.
fn unescape(text: &str) -> PathBuf {
    let text = text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n");
    text.replace("\\134", "\\").into()
}

/// Removes the cgroups of the kubelet's pods, and with `with_shared` all empty ones.
pub fn remove_cgroups(pods: &Path, with_shared: bool) -> usize {
    let names = fs::read_dir(pods).into_iter().flatten().flatten();
    let uids: Vec<String> =
        names.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut removed = BTreeSet::new();
    for root in cgroup_roots(&table) {
        for class in QOS {
            for uid in &uids {
                let name = Path::new("kubepods").join(class).join(format!("pod{uid}"));
                remove_empty(&root, &name, &mut removed);
            }
        }
        if with_shared {
            for name in ["kubepods", "decapod"] {
                remove_empty(&root, Path::new(name), &mut removed);
            }
        }
    }
    removed.len()
}

/// Mount points of all hierarchies.
fn cgroup_roots(mountinfo: &str) -> Vec<PathBuf> {
    let point = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let is_cgroup = right.starts_with("cgroup ") || right.starts_with("cgroup2 ");
        let mut fields = left.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        (is_cgroup && root == "/").then(|| unescape(point))
    };
    mountinfo.lines().filter_map(point).collect()
}

/// Removes the cgroup and those below it. A cgroup with processes stays, because these are not ours.
fn remove_empty(root: &Path, name: &Path, removed: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(root.join(name)).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_empty(root, &name.join(entry.file_name()), removed);
        }
    }
    if fs::remove_dir(root.join(name)).is_ok() {
        removed.insert(name.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
30 1 8:1 / / rw - ext4 /dev/sda rw
31 30 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
32 30 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
33 30 0:28 /inner /sys/fs/cgroup/part rw - cgroup2 cgroup2 rw
34 30 0:40 / /data/x rw - ext4 /dev/sdb rw
35 30 0:41 / /data/x/kubelet/pods/u/volumes rw - tmpfs tmpfs rw
36 35 0:42 / /data/x/kubelet/pods/u/volumes/a\\040b rw - tmpfs tmpfs rw
37 30 0:43 / /data/xy/m rw - tmpfs tmpfs rw
";

    #[test]
    fn only_mounts_inside_are_ours() {
        let directory = PathBuf::from("/data/x");
        assert_eq!(
            mounts_below(TABLE, &[&directory]),
            [
                Path::new("/data/x/kubelet/pods/u/volumes/a b"),
                Path::new("/data/x/kubelet/pods/u/volumes"),
            ]
        );
        assert_eq!(
            cgroup_roots(TABLE),
            [Path::new("/sys/fs/cgroup/cpu"), Path::new("/sys/fs/cgroup/unified")]
        );
    }

    #[test]
    fn nameservers_are_read_from_sandboxes() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let sandbox = root.path().join("s1");
        fs::create_dir(&sandbox).expect("creates");
        let text = "search default.svc.cluster.local\nnameserver 10.96.0.10\nnameserver 1.1.1.1\n";
        fs::write(sandbox.join("resolv.conf"), text).expect("writes");
        assert_eq!(nameservers(root.path()), [IpAddr::from([10, 96, 0, 10])]);
    }
}
