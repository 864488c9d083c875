//! `decapod uninstall`: stops and removes one cluster completely.
//!
//! In: a data directory, possibly incomplete. Out: all of the cluster is removed: processes, containers,
//! mounts, network, cgroups, files; one line is printed for each. If `decapod install` made a service of it, the
//! service, its configuration and the program are removed, too.
//!
//! ```text
//!  service ─► processes ─► containers (runtime) ─► network ─► mounts ─► cgroups ─► files ─► what install wrote
//! ```
//!
//! Invariant: only things that belong to the data directory are touched: processes that were started
//! with it, mounts below it, cgroups of its pods. Things that clusters of one host share (the nftables
//! tables of kube-proxy, `kubepods`) stay while a process of another cluster runs here.

mod foreign;
mod leftovers;
mod processes;
mod units;

use std::fs::{File, TryLockError};
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};

use self::processes::Process;
use crate::cluster::DEFAULT_DATA_DIR;
use crate::install::{Installed, Root};
use crate::node_places::NodePlaces;

/// Every data directory of ours contains one of these.
const MARKS: &[&str] =
    &["decapod.pid", "pki", "runtime", "kubelet", "kubeconfig", "dns.pid", "agent"];

#[derive(clap::Args, Clone, Debug, Default)]
pub struct Uninstall {
    /// Do not ask for confirmation
    #[arg(short = 'y', long)]
    yes: bool,
    /// Remove only what `decapod install --root` wrote below this directory
    #[arg(long, value_name = "DIRECTORY")]
    root: Option<PathBuf>,
}

impl Uninstall {
    /// `configured` is the data directory of the installed service, if its configuration names one.
    pub async fn run(self, data_dir: &Path, configured: Option<&Path>) -> Result<ExitCode> {
        let root = Root::new(self.root.as_deref());
        if !root.is_machine() {
            let installed = Installed::find(root)?;
            let installed = installed.context("`decapod install` wrote nothing there")?;
            installed.remove()?.iter().for_each(|line| println!("{line}"));
            return Ok(ExitCode::SUCCESS);
        }
        ensure!(nix::unistd::geteuid().is_root(), "uninstall needs root: sudo decapod uninstall");
        let default = Path::new(DEFAULT_DATA_DIR);
        let of_service = configured.unwrap_or(default);
        // Without a flag, the service's cluster is meant.
        let data_dir = if data_dir == default { of_service } else { data_dir };
        let installed = Installed::find(root)?.filter(|_| data_dir == of_service);
        let place = Place::find(data_dir)?;
        let is_there = place.data_dir.exists() || installed.is_some();
        if !self.yes && is_there && std::io::stdin().is_terminal() {
            ensure!(place.is_meant()?, "nothing was removed");
        }
        if let Some(installed) = &installed {
            installed.stop()?;
            println!("stopped and disabled the service decapod");
        }
        let mut said = place.clean().await?;
        if let Some(installed) = &installed {
            let removed = installed.remove()?;
            removed.iter().for_each(|line| println!("{line}"));
            said += 1 + removed.len();
        }
        if said == 0 {
            println!("no part of a cluster at {} was left", place.data_dir.display());
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Everything that belongs to one data directory.
struct Place {
    data_dir: PathBuf,
    runtime_dir: PathBuf,
    /// Below `/run/decapod`.
    run_dir: PathBuf,
}

impl Place {
    fn find(data_dir: &Path) -> Result<Self> {
        let data_dir = std::path::absolute(data_dir)?;
        let data_dir = data_dir.canonicalize().unwrap_or(data_dir);
        check(&data_dir)?;
        let runtime_dir = data_dir.join("runtime");
        let run_dir = runtime::layout::run_dir(&runtime_dir);
        Ok(Self { data_dir, runtime_dir, run_dir })
    }

    /// Asks the user at the terminal.
    fn is_meant(&self) -> Result<bool> {
        print!(
            "This stops the cluster of {} and removes it with all its data and pods. Go on? [y/N] ",
            self.data_dir.display()
        );
        std::io::stdout().flush()?;
        let mut answer = String::new();
        std::io::stdin().lock().read_line(&mut answer)?;
        Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
    }

    /// Locks the directory, so that no server starts in it during the removal; an error if a process has
    /// the lock.
    fn hold(&self) -> Result<Option<File>> {
        let path = self.data_dir.join("decapod.pid");
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| path.display().to_string()),
        };
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => {
                let pid = std::fs::read_to_string(&path).unwrap_or_default();
                bail!(
                    "{} is in use by a process (pid {}) that was started meanwhile, or that is not visible from here; stop what starts it, and try again: no file was removed",
                    self.data_dir.display(),
                    pid.trim()
                )
            }
            Err(TryLockError::Error(error)) => {
                Err(error).with_context(|| format!("cannot lock {}", path.display()))
            }
        }
    }

    /// Returns the number of printed lines.
    async fn clean(&self) -> Result<usize> {
        let mut said = 0;
        let mut say = |text: String| {
            println!("{text}");
            said += 1;
        };
        let all = processes::all();
        let ours = processes::of_data_dir(&all, &self.data_dir);
        let dns = self.dns_addresses(&ours);
        for unit in units::of(&ours).await? {
            unit.stop().await?;
            say(format!(
                "stopped the systemd unit {name}; it would start a new cluster at the next boot: systemctl disable {name}",
                name = unit.name
            ));
        }
        for process in &ours {
            process.stop().await?;
            say(format!("stopped {} (pid {})", process.name(), process.pid));
        }
        let _held = self.hold()?;
        let is_alone = processes::other_nodes(&all, &ours).next().is_none();
        let owns_network = processes::other_nodes(&all, &ours).all(|other| !other.same_network);
        let had_runtime = self.runtime_dir.exists() || self.run_dir.exists();
        if had_runtime {
            say(self.remove_containers().await?);
        }
        let foreign = foreign::remove_pods(&self.data_dir).await?;
        let had_node = had_runtime || foreign.is_some();
        if let Some(text) = foreign {
            say(text);
        }
        if had_node && owns_network {
            for link in leftovers::remove_links().await? {
                say(format!("removed the network device {link}"));
            }
            for address in leftovers::remove_announced().await? {
                say(format!("removed the load balancer's address {address}"));
            }
            leftovers::remove_tables()?;
            say(format!("removed the nftables tables {}", leftovers::TABLES.join(", ")));
        }
        for address in leftovers::remove_addresses(&dns, had_node && owns_network).await? {
            say(format!("removed the DNS address {address}"));
        }
        for text in self.remove_directories(had_node && is_alone)? {
            say(text);
        }
        // Shared with other clusters, so the last one removes it.
        let _ = std::fs::remove_dir("/run/decapod");
        Ok(said)
    }

    /// Mounts, cgroups and files. `with_shared` also removes the cgroups that all nodes share.
    fn remove_directories(&self, with_shared: bool) -> Result<Vec<String>> {
        let mut said = vec![];
        let outside = NodePlaces::outside(&self.data_dir);
        let directories: Vec<&PathBuf> =
            [&self.run_dir, &self.data_dir].into_iter().chain(&outside).collect();
        for mount in leftovers::unmount_below(&directories)? {
            said.push(format!("unmounted {}", mount.display()));
        }
        let own = self.data_dir.join("kubelet");
        let roots = outside.iter().chain([&own]);
        let cgroups: usize =
            roots.map(|root| leftovers::remove_cgroups(&root.join("pods"), with_shared)).sum();
        if cgroups > 0 {
            said.push(format!("removed {cgroups} cgroups"));
        }
        NodePlaces::remove_links(&outside)
            .context("cannot remove the links to containers' logs")?;
        // The next start replaces it otherwise.
        let _ = std::fs::remove_file(runtime::layout::cri_socket(&self.data_dir));
        // The data directory last: until then, a second run knows what belongs to it.
        for directory in outside.iter().chain([&self.run_dir, &self.data_dir]) {
            if remove_tree(directory)? {
                said.push(format!("removed {}", directory.display()));
            }
        }
        Ok(said)
    }

    async fn remove_containers(&self) -> Result<String> {
        let shims = leftovers::entries(&self.run_dir.join("containers"));
        let pods = leftovers::entries(&self.run_dir.join("sandboxes"));
        let first = runtime::destroy_all(&self.runtime_dir, &self.run_dir).await;
        if first.is_err() {
            // If directories are missing, the runtime does not know every mount.
            leftovers::unmount_below(&[&self.runtime_dir, &self.run_dir])?;
            let second = runtime::destroy_all(&self.runtime_dir, &self.run_dir).await;
            second.context("cannot remove the containers")?;
        }
        Ok(format!("removed {shims} containers, {pods} pod sandboxes, images and the pod network"))
    }

    /// The node's DNS addresses: from the flags of the DNS process, or from pods.
    fn dns_addresses(&self, ours: &[Process]) -> Vec<std::net::IpAddr> {
        let told = ours.iter().flat_map(|process| process.flag("--address"));
        let mut found: Vec<_> =
            told.flat_map(|list| list.split(',')).filter_map(|text| text.parse().ok()).collect();
        found.extend(leftovers::nameservers(&self.runtime_dir.join("sandboxes")));
        found.sort_unstable();
        found.dedup();
        found
    }
}

/// Checks that it is a data directory, because the removal cannot be undone.
fn check(data_dir: &Path) -> Result<()> {
    if !data_dir.exists() {
        return Ok(());
    }
    if data_dir.parent().is_none() || data_dir.components().count() < 3 {
        bail!("{} is no data directory; nothing was removed", data_dir.display());
    }
    let is_empty = leftovers::entries(data_dir) == 0;
    if !is_empty && !MARKS.iter().any(|mark| data_dir.join(mark).exists()) {
        bail!(
            "{} does not look like a data directory of decapod; nothing was removed",
            data_dir.display()
        );
    }
    Ok(())
}

/// False if it did not exist. A mount point stays, empty: it belongs to its owner.
fn remove_tree(directory: &Path) -> Result<bool> {
    match std::fs::remove_dir_all(directory) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error)
            if error.kind() == std::io::ErrorKind::ResourceBusy
                && leftovers::entries(directory) == 0 =>
        {
            Ok(true)
        }
        Err(error) => Err(error).with_context(|| format!("cannot remove {}", directory.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_directories_are_left_alone() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let foreign = root.path().join("home");
        std::fs::create_dir(&foreign).expect("creates");
        assert!(check(&foreign).is_ok(), "an empty one may be removed");
        std::fs::write(foreign.join("letter"), "dear").expect("writes");
        assert!(check(&foreign).is_err());
        std::fs::create_dir(foreign.join("pki")).expect("creates");
        assert!(check(&foreign).is_ok());
        assert!(check(Path::new("/")).is_err());
        assert!(check(Path::new("/usr")).is_err());
        assert!(check(Path::new("/nowhere/at/all")).is_ok());
    }
}
