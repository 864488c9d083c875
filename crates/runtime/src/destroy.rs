//! Removes everything that a data directory's runtime ever created: processes, mounts, namespaces,
//! cgroups, the bridge. For `uninstall`, after the node's server has stopped.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use crate::cgroups::Hierarchies;
use crate::cni::{Cni, CniConfig};
use crate::files;
use crate::layout::Layout;
use crate::network::{NetworkState, detour, veth};
use crate::sandbox::{Places, tear_down};
use crate::shim::{self, ShimConfig};

const KILL_TIMEOUT: Duration = Duration::from_secs(20);
/// The limit of one CNI plugin.
const CNI_LIMIT: Duration = Duration::from_secs(20);

/// Idempotent; parts may be gone already. `data_dir` and `run_dir` are the runtime's `Config`
/// values. Both directories are removed.
pub async fn destroy_all(data_dir: &Path, run_dir: &Path) -> io::Result<()> {
    let layout = Layout { data: data_dir.to_owned(), run: run_dir.to_owned() };
    let hierarchies = Hierarchies::discover()?;
    for entry in list(&layout.run.join("containers")) {
        let config: Option<ShimConfig> = files::read_json(&entry.join("shim.json")).ok().flatten();
        let Some(config) = config else { continue };
        if let Some(pid) = shim::find(&config.run) {
            // SAFETY: a plain system call.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        hierarchies.clear(&config.cgroup, KILL_TIMEOUT).await?;
        // All shims share this cgroup; it cannot be removed while one is left.
        let _ = hierarchies.remove(&config.shim_cgroup);
    }
    let network = NetworkState::read(&layout)?;
    // It finds the plugins where they were when they connected a sandbox.
    let cni = Cni::new(CniConfig { limit: CNI_LIMIT, ..CniConfig::off() });
    for entry in list(&layout.sandboxes()) {
        let Some(id) = entry.file_name().and_then(|name| name.to_str()) else { continue };
        let places = Places::of(&layout, id);
        let (data, netns) = (places.data.as_path(), places.net());
        let sandbox = crate::cni::Sandbox { id, data, netns: &netns };
        // Everything else is removed all the same: the plugins may be gone.
        if let Err(error) = cni.del(&sandbox).await {
            tracing::warn!(sandbox = id, %error, "failed to disconnect a sandbox from its CNI network");
        }
        tear_down(&places)?;
        if network.is_some()
            && let Ok(links) = net::Links::open()
        {
            // The kernel removes the veth pair some time after its namespace.
            let _ = links.remove(&veth(id)).await;
            let _ = links.remove(&detour(id)).await;
        }
    }
    for entry in list(&layout.containers()) {
        crate::images::overlay::unmount_root(&entry).map_err(io::Error::other)?;
    }
    if let Some(network) = network.filter(|network| !network.bridge.is_empty()) {
        let bridge = network.bridge.clone();
        crate::host_ports::HostPorts::new(&bridge)
            .replace(vec![])
            .await
            .map_err(io::Error::other)?;
        network.remove_bridge().await.map_err(io::Error::other)?;
    }
    files::remove_tree(&layout.run)?;
    files::remove_tree(&layout.data)
}

fn list(directory: &Path) -> Vec<std::path::PathBuf> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}
