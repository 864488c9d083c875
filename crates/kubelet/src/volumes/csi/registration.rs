//! Plugins that register with a socket in `<root>/plugins_registry`.
//!
//! ```text
//! socket appears ─► GetInfo ─► versions? ─► NodeGetInfo ─► CSINode ─► NotifyRegistrationStatus
//!       │ on failure: report it to the plugin, retry after 500 ms … 2 min
//! socket is removed or replaced ─► the driver leaves CSINode
//! ```
//!
//! `GetInfo` tells whether a plugin is a CSI driver, a DRA driver or a device plugin.
//!
//! In: inotify. Out: drivers in [`Csi`], [`Devices`] and [`DevicePlugins`], and their objects in the
//! API.
//! Invariants: one task per socket; a socket that replaces another waits until that one is
//! unregistered; a kubelet that stops unregisters no plugin.
//! Upstream: `pkg/kubelet/pluginmanager`. Deviation: subdirectories are ignored.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base::backoff::Backoff;
use base::task::Tasks;
use base::watch::FileWatch;
use tokio::sync::{oneshot, watch};

use super::driver::Driver;
use super::error::CsiError;
use super::messages::{Nothing, PluginInfo, RegistrationStatus};
use super::{Csi, record};
use crate::devices::device_plugins::{self, DevicePluginError, DevicePlugins};
use crate::devices::dra::{self, Devices, DraError};
use crate::plugins::rpc::{Rpc, RpcError};

const INFO_LIMIT: Duration = Duration::from_secs(1);
const NOTIFY_LIMIT: Duration = Duration::from_secs(5);
const RETRY: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(120)];
const RESCAN: Duration = Duration::from_secs(60);

/// Tells sockets of the same name apart: inode and creation time.
type Identity = (u64, i64, i64);

struct Known {
    identity: Identity,
    gone: watch::Sender<bool>,
    /// Resolves when the plugin is unregistered.
    undone: oneshot::Receiver<()>,
}

/// The managers of the three types of plugins.
#[derive(Clone)]
pub struct Plugins {
    pub csi: Arc<Csi>,
    pub devices: Arc<Devices>,
    pub device_plugins: Arc<DevicePlugins>,
}

/// Why a plugin is not registered, in upstream's words: the plugin gets them.
#[derive(Debug, thiserror::Error)]
enum RegistrationError {
    #[error(transparent)]
    Rpc(#[from] RpcError),
    #[error(
        "RegisterPlugin error -- failed to get plugin info using RPC GetInfo at socket {socket}, err: {error}"
    )]
    Info { socket: String, error: RpcError },
    #[error("RegisterPlugin error -- {0}")]
    Failed(Box<Self>),
    #[error("no handler registered for plugin type: {kind} at socket {socket}")]
    NoHandler { kind: String, socket: String },
    #[error(
        "RegisterPlugin error -- failed to send registration status at socket {socket}, err: {error}"
    )]
    Notify { socket: String, error: RpcError },
    #[error(transparent)]
    Csi(#[from] CsiError),
    #[error(transparent)]
    Devices(#[from] DraError),
    #[error(transparent)]
    DevicePlugin(#[from] DevicePluginError),
}

/// A registration that must be undone.
enum Claimed {
    /// A CSI driver's name.
    Storage(String),
    Devices(dra::Registered),
    DevicePlugin(device_plugins::Registered),
}

/// Watches the directory; never returns.
pub async fn watch(plugins: Plugins, tasks: Tasks) {
    let dir = plugins.csi.root.join("plugins_registry");
    if let Err(error) = record::make_dir(&dir) {
        tracing::error!(dir = %dir.display(), %error, "failed to create the directory for plugin registration");
        return;
    }
    let watcher = FileWatch::directory(&dir).ok();
    let mut known: BTreeMap<PathBuf, Known> = BTreeMap::new();
    loop {
        let mut now = sockets(&dir);
        let mut leaving: BTreeMap<PathBuf, oneshot::Receiver<()>> = BTreeMap::new();
        let stays = |path: &PathBuf, one: &Known| now.get(path) == Some(&one.identity);
        for (path, one) in known.extract_if(.., |path, one| !stays(path, one)) {
            one.gone.send_replace(true);
            leaving.insert(path, one.undone);
        }
        now.retain(|path, _| !known.contains_key(path));
        for (path, identity) in now {
            let (gone, gone_out) = watch::channel(false);
            let (done, undone) = oneshot::channel();
            let after = leaving.remove(&path);
            let work = follow(plugins.clone(), path.clone(), gone_out, after, done);
            tasks.spawn("plugin-registration", work);
            known.insert(path, Known { identity, gone, undone });
        }
        match &watcher {
            Some(watcher) => watcher.changed().await,
            None => tokio::time::sleep(RESCAN).await,
        }
    }
}

fn sockets(dir: &Path) -> BTreeMap<PathBuf, Identity> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let socket = |entry: std::fs::DirEntry| {
        let about = entry.metadata().ok()?;
        let is_hidden = entry.file_name().to_string_lossy().starts_with('.');
        let identity = (about.ino(), about.ctime(), about.ctime_nsec());
        (about.file_type().is_socket() && !is_hidden).then(|| (entry.path(), identity))
    };
    entries.filter_map(socket).collect()
}

/// Follows one socket, from its creation to its removal.
async fn follow(
    plugins: Plugins,
    socket: PathBuf,
    mut gone: watch::Receiver<bool>,
    after: Option<oneshot::Receiver<()>>,
    done: oneshot::Sender<()>,
) {
    if let Some(after) = after {
        // An error also means that the earlier socket's task has ended.
        let _ = after.await;
    }
    let mut claimed = None;
    tokio::select! {
        () = told(&mut gone) => {}
        () = keep_registered(&plugins, &socket, &mut claimed) => {}
    }
    let left = match claimed {
        Some(claimed) => plugins.unregister(claimed).await,
        None => None,
    };
    drop(done);
    if let Some(plugin) = left {
        plugins.devices.take_down(&plugin).await;
    }
}

/// Resolves when the socket is removed. It ignores the end of the kubelet.
async fn told(gone: &mut watch::Receiver<bool>) {
    if gone.wait_for(|gone| *gone).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Never returns. The caller drops it, and then undoes the registration in `claimed`.
async fn keep_registered(plugins: &Plugins, socket: &Path, claimed: &mut Option<Claimed>) {
    let mut backoff = Backoff::new(RETRY[0], RETRY[1]);
    loop {
        match register(plugins, socket, claimed).await {
            Ok(()) => std::future::pending::<()>().await,
            Err(error) => {
                tracing::warn!(socket = %socket.display(), %error, "failed to register the plugin");
                if let Some(claimed) = claimed.take() {
                    plugins.unregister(claimed).await;
                }
            }
        }
        tokio::time::sleep(backoff.step()).await;
    }
}

async fn register(
    plugins: &Plugins,
    socket: &Path,
    claimed: &mut Option<Claimed>,
) -> Result<(), RegistrationError> {
    let shown = || socket.display().to_string();
    let rpc = Rpc::new(socket)?;
    let call = rpc.call("/pluginregistration.Registration/GetInfo", Nothing {}, INFO_LIMIT);
    let info: PluginInfo =
        call.await.map_err(|error| RegistrationError::Info { socket: shown(), error })?;
    let tried: Result<(), RegistrationError> = match info.kind.as_str() {
        "CSIPlugin" => plugins.csi.register(&info, socket, claimed).await.map_err(Into::into),
        "DRAPlugin" => plugins.devices.register(&info, socket).map_err(Into::into).map(|done| {
            *claimed = Some(Claimed::Devices(done));
            // Pods may wait for this plugin.
            plugins.csi.changed.send_replace(());
        }),
        "DevicePlugin" => {
            let done = plugins.device_plugins.register(&info, socket).await;
            done.map_err(Into::into).map(|done| *claimed = Some(Claimed::DevicePlugin(done)))
        }
        other => Err(RegistrationError::NoHandler { kind: other.to_owned(), socket: shown() }),
    };
    let error = tried.err().map(|error| RegistrationError::Failed(Box::new(error)));
    let status = RegistrationStatus {
        plugin_registered: error.is_none(),
        error: error.as_ref().map(ToString::to_string).unwrap_or_default(),
    };
    let path = "/pluginregistration.Registration/NotifyRegistrationStatus";
    let told: Result<Nothing, RpcError> = rpc.call(path, status, NOTIFY_LIMIT).await;
    match (error, told) {
        (Some(error), _) => Err(error),
        (None, Ok(_)) => Ok(()),
        (None, Err(error)) => Err(RegistrationError::Notify { socket: shown(), error }),
    }
}

impl Plugins {
    /// Returns the plugin if a DRA driver has lost its last plugin.
    async fn unregister(&self, claimed: Claimed) -> Option<dra::Registered> {
        match claimed {
            Claimed::Storage(name) => {
                self.csi.unregister(&name).await;
                None
            }
            Claimed::DevicePlugin(plugin) => {
                self.device_plugins.unregister(&plugin);
                None
            }
            Claimed::Devices(plugin) => self.devices.unregister(&plugin).then_some(plugin),
        }
    }
}

/// The highest version that is CSI v1, the only version that is supported.
fn highest(versions: &[String]) -> Option<(u64, u64, u64)> {
    let parse = |text: &String| {
        let mut parts = text.trim().trim_start_matches('v').split('.').map(str::parse::<u64>);
        let (major, minor) = (parts.next()?.ok()?, parts.next()?.ok()?);
        Some((major, minor, parts.next().and_then(Result::ok).unwrap_or(0)))
    };
    versions.iter().filter_map(parse).filter(|version| version.0 == 1).max()
}

impl Csi {
    /// Sets `claimed` as soon as there is something to undo.
    async fn register(
        &self,
        info: &PluginInfo,
        socket: &Path,
        claimed: &mut Option<Claimed>,
    ) -> Result<(), CsiError> {
        let (name, versions) = (&info.name, info.supported_versions.join(","));
        let endpoint = match info.endpoint.as_str() {
            "" => socket,
            endpoint => Path::new(endpoint),
        };
        let invalid = |why| CsiError::Validation {
            driver: name.clone(),
            endpoint: endpoint.display().to_string(),
            why: Box::new(why),
        };
        let version = highest(&info.supported_versions);
        let version = version.ok_or_else(|| invalid(CsiError::NoVersion(versions)))?;
        if let Some(known) = self.drivers().get(name).filter(|known| known.version >= version) {
            let (major, minor, patch) = known.version;
            return Err(invalid(CsiError::NewerDriver(format!("{major}.{minor}.{patch}"))));
        }
        let failed = |why: CsiError| CsiError::Registration(Box::new(why));
        let driver = Driver::new(name, endpoint, version).map_err(|error| failed(error.into()))?;
        let driver = Arc::new(driver);
        *claimed = Some(Claimed::Storage(name.clone()));
        self.drivers().insert(name.clone(), driver.clone());
        let about = driver.info().await.map_err(|error| failed(error.into()))?;
        self.install(name, &about).await.map_err(failed)?;
        tracing::info!(driver = name, endpoint = %endpoint.display(), "registered the CSI driver");
        self.reclaim(&driver).await;
        self.changed.send_replace(());
        Ok(())
    }

    async fn unregister(&self, name: &str) {
        self.drivers().remove(name);
        match self.uninstall(name).await {
            Ok(()) => tracing::info!(driver = name, "unregistered the CSI driver"),
            Err(error) => {
                tracing::warn!(driver = name, %error, "failed to unregister the CSI driver")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_version_counts() {
        let check = |versions: &[&str], expected: Option<(u64, u64, u64)>| {
            let all: Vec<String> = versions.iter().map(|text| text.to_string()).collect();
            assert_eq!(highest(&all), expected, "{versions:?}");
        };
        check(&["1.0.0"], Some((1, 0, 0)));
        check(&["1.2.0", "1.10.0", "0.3.0"], Some((1, 10, 0)));
        check(&["v1.5"], Some((1, 5, 0)));
        check(&["0.3.0", "2.0.0"], None);
        check(&["1", "x"], None);
        check(&[], None);
    }
}
