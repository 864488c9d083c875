//! Pod networks by CNI plugins: programs that a configuration file names.
//!
//! ```text
//!  /etc/cni/net.d ─ config ─► Network ─┬─ ADD    a pod's plugins in order, each gets the last one's result
//!        ▲ inotify                     ├─ CHECK  after a restart of this process
//!        └ no file: the node's own     ├─ DEL    in reverse order, with the network and result of the ADD
//!          network, or not ready       ├─ GC     from 1.1.0: at the start, and when the network changes
//!                                      └─ STATUS from 1.1.0: with each status of the runtime; VERSION before
//! ```
//!
//! In: the directory of configuration files, those of plugins, sandboxes. Out: connected pods.
//! Invariants: a pod is disconnected by the plugins that connected it, whatever the directory has meanwhile. GC
//! never runs beside an ADD or DEL, whose pod it would not know. The loopback interface is ours.
//! Cost: a process per plugin for each pod that comes or goes.
//! Upstream: libcni, as containerd uses it. Deviations: CNI 1.1's GC is called; a plugin has a time limit of its
//! own; `portMappings` and others are spelled as in the specification.

mod attachment;
mod config;
mod outcome;
mod plugin;
mod request;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cri::PodSandboxConfig;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::sync::{RwLock, watch};

pub(crate) use attachment::Attachment;
use config::{CURRENT, Network, Plugin};
use outcome::Outcome;
use plugin::{Call, PluginError};

use crate::bandwidth::BandwidthError;

/// The pod's interface.
const INTERFACE: &str = net::pods::POD_INTERFACE;
const NOT_INITIALIZED: &str = "cni plugin not initialized";
/// Limit of STATUS and VERSION: the kubelet waits for the runtime's status.
const STATUS_LIMIT: Duration = Duration::from_secs(5);

/// The settings of CNI.
#[derive(Clone, Debug)]
pub struct CniConfig {
    /// Directory of configuration files; none: no plugin is used.
    pub conf_dir: Option<PathBuf>,
    /// Directories of the plugins' programs.
    pub bin_dirs: Vec<PathBuf>,
    /// The node has no network of its own: without a configuration file it is not ready.
    pub is_required: bool,
    /// The limit of one plugin's ADD, CHECK, DEL or GC.
    pub limit: Duration,
}

impl CniConfig {
    /// CNI's usual directories.
    pub fn usual() -> Self {
        Self {
            conf_dir: Some("/etc/cni/net.d".into()),
            bin_dirs: vec!["/opt/cni/bin".into(), "/usr/lib/cni".into()],
            ..Self::off()
        }
    }

    pub fn off() -> Self {
        Self {
            conf_dir: None,
            bin_dirs: vec![],
            is_required: false,
            limit: Duration::from_secs(120),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum CniError {
    #[error("{NOT_INITIALIZED}{}", if .0.is_empty() { String::new() } else { format!(": {}", .0) })]
    NotInitialized(String),
    #[error("plugin type={kind:?} failed ({command}): {error}")]
    Plugin { kind: String, command: &'static str, error: PluginError },
    #[error("plugin type={0:?} failed (add): {1}")]
    Outcome(String, outcome::OutcomeError),
    #[error("plugin {0} does not support config version {1:?}")]
    Version(String, String),
    #[error("{0}")]
    Status(PluginError),
    #[error(transparent)]
    Bandwidth(#[from] BandwidthError),
    #[error("failed to find network info for sandbox {0:?}")]
    NoAddress(String),
    #[error("failed to keep the network's state: {0}")]
    Disk(#[from] io::Error),
}

/// The parts of a pod's connection that the runtime needs while the pod exists.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Connected {
    /// The pod's addresses with their networks.
    pub addresses: Vec<IpNet>,
    /// The plugins' interfaces on the node.
    pub links: Vec<String>,
    /// A plugin leads host ports into the pod.
    pub has_ports: bool,
}

/// The sandbox of a call.
pub(crate) struct Sandbox<'a> {
    pub id: &'a str,
    /// Its directory on disk.
    pub data: &'a Path,
    /// Its network namespace, which may be gone.
    pub netns: &'a Path,
}

impl Sandbox<'_> {
    fn has_netns(&self) -> bool {
        net::netns::is_pinned(self.netns)
    }
}

/// What the directory says.
#[derive(Clone, Debug, Default)]
enum Loaded {
    /// No file.
    #[default]
    Nothing,
    /// The first file cannot be used, and why.
    Broken(String),
    Network(Arc<Network>),
}

/// Which network new pods get.
#[derive(Clone, Debug)]
pub(crate) enum Choice {
    /// The node's own.
    Own,
    Plugins(Arc<Network>),
    /// There is no usable configuration, and why.
    Missing(String),
}

pub(crate) struct Cni {
    config: CniConfig,
    /// The lock is held for a look or a change, never across await.
    loaded: Mutex<Loaded>,
    /// The network whose plugins have said that they know its version. The lock is held briefly.
    checked: Mutex<Option<Arc<Network>>>,
    /// Whether plugins connect new pods.
    in_use: watch::Sender<bool>,
    /// Read: an ADD or DEL runs. Written: a GC runs.
    turns: RwLock<()>,
}

impl Cni {
    pub(crate) fn new(config: CniConfig) -> Self {
        let (in_use, _) = watch::channel(config.is_required);
        let cni = Self {
            config,
            loaded: Mutex::default(),
            checked: Mutex::default(),
            in_use,
            turns: RwLock::default(),
        };
        cni.load();
        cni
    }

    pub(crate) fn in_use(&self) -> watch::Receiver<bool> {
        self.in_use.subscribe()
    }

    pub(crate) fn choice(&self) -> Choice {
        match self.loaded.lock().expect("no panic while it is held").clone() {
            Loaded::Network(network) => Choice::Plugins(network),
            Loaded::Broken(why) => Choice::Missing(why),
            Loaded::Nothing if self.config.is_required => Choice::Missing(String::new()),
            Loaded::Nothing => Choice::Own,
        }
    }

    /// The directory to watch for changes: that of the files, or the nearest one above it that exists.
    pub(crate) fn watched(&self) -> Option<&Path> {
        let directory = self.config.conf_dir.as_deref()?;
        directory.ancestors().find(|above| above.is_dir())
    }

    /// Reads the directory again. True when new pods get another network from now on.
    pub(crate) fn load(&self) -> bool {
        let Some(directory) = &self.config.conf_dir else { return false };
        let now = match config::load(directory) {
            Ok(None) => Loaded::Nothing,
            Ok(Some((file, network))) => {
                let same =
                    |known: &Loaded| matches!(known, Loaded::Network(old) if **old == network);
                let mut known = self.loaded.lock().expect("no panic while it is held");
                if same(&known) {
                    return false;
                }
                let (name, version) = (&network.name, &network.version);
                tracing::info!(file = %file.display(), network = name, version,
                    "CNI plugins set up the network of new pods");
                *known = Loaded::Network(Arc::new(network));
                drop(known);
                self.in_use.send_replace(true);
                return true;
            }
            Err(error) => Loaded::Broken(error.to_string()),
        };
        let mut known = self.loaded.lock().expect("no panic while it is held");
        match (&*known, &now) {
            (Loaded::Nothing, Loaded::Nothing) => return false,
            (Loaded::Broken(old), Loaded::Broken(new)) if old == new => return false,
            (_, Loaded::Broken(why)) => {
                tracing::error!(
                    error = why,
                    "failed to load the CNI configuration; no pod can start"
                );
            }
            _ if self.config.is_required => {
                let directory = directory.display();
                tracing::warn!(%directory, "no CNI configuration is left; no pod can start");
            }
            _ => {
                tracing::info!("no CNI configuration is left; new pods get the node's own network")
            }
        }
        let is_own = matches!(now, Loaded::Nothing) && !self.config.is_required;
        *known = now;
        drop(known);
        self.in_use.send_replace(!is_own);
        true
    }

    /// Why plugins cannot set up pods' networks now.
    pub(crate) async fn trouble(&self) -> Option<CniError> {
        match self.choice() {
            Choice::Own => None,
            Choice::Missing(why) => Some(CniError::NotInitialized(why)),
            Choice::Plugins(network) => self.status(&network).await.err(),
        }
    }

    /// VERSION, once for a network: each plugin is there and knows the network's version. STATUS: it can work.
    async fn status(&self, network: &Arc<Network>) -> Result<(), CniError> {
        let checked = || self.checked.lock().expect("no panic while it is held");
        if !checked().as_ref().is_some_and(|known| Arc::ptr_eq(known, network)) {
            for plugin in &network.plugins {
                self.check_version(plugin, &network.version).await?;
            }
            *checked() = Some(network.clone());
        }
        if !network.is_at_least("1.1.0") {
            return Ok(());
        }
        for plugin in &network.plugins {
            let conf = request::conf(plugin, &injected(network, None), &Map::new());
            let call = Call { command: "STATUS", ..Call::default() };
            let limit = self.config.limit.min(STATUS_LIMIT);
            plugin::run(&plugin.kind, &self.config.bin_dirs, &call, &conf, limit)
                .await
                .map_err(CniError::Status)?;
        }
        Ok(())
    }

    async fn check_version(&self, plugin: &Plugin, version: &str) -> Result<(), CniError> {
        #[derive(Deserialize)]
        struct Supported {
            #[serde(default, rename = "supportedVersions")]
            versions: Vec<String>,
        }
        // The values are placeholders that old plugins ask for.
        let call =
            Call { command: "VERSION", netns: "dummy", interface: "dummy", ..Call::default() };
        let conf = json!({"cniVersion": CURRENT}).to_string();
        let limit = self.config.limit.min(STATUS_LIMIT);
        let run = plugin::run(&plugin.kind, &self.config.bin_dirs, &call, conf.as_bytes(), limit);
        let printed = run.await.map_err(CniError::Status)?;
        let supported = serde_json::from_slice::<Supported>(&printed);
        let known = supported.is_ok_and(|all| all.versions.iter().any(|known| known == version));
        let refused = || CniError::Version(plugin.kind.clone(), version.to_owned());
        known.then_some(()).ok_or_else(refused)
    }

    /// Connects a sandbox. After a failure the caller disconnects it.
    pub(crate) async fn add(
        &self,
        network: &Network,
        sandbox: &Sandbox<'_>,
        config: &PodSandboxConfig,
        cidrs: &[IpNet],
    ) -> Result<Connected, CniError> {
        let _turn = self.turns.read().await;
        let mut attachment = Attachment {
            network: network.clone(),
            bin_dirs: self.config.bin_dirs.clone(),
            args: request::args(sandbox.id, config),
            capabilities: request::capabilities(config, cidrs)?,
            result: None,
        };
        attachment.write(sandbox.data)?;
        let mut result = None;
        for plugin in &network.plugins {
            let printed = self.call(&attachment, "ADD", plugin, sandbox, result.as_ref()).await?;
            let refused = |error| CniError::Outcome(plugin.kind.clone(), error);
            let parsed = outcome::parse(&printed, &network.version).map_err(refused)?;
            // A later plugin may not print what an earlier one got wrong.
            Outcome::of(&parsed, INTERFACE).map_err(refused)?;
            result = Some(parsed);
        }
        let last = network.plugins.last().map(|plugin| plugin.kind.clone()).unwrap_or_default();
        let outcome = Outcome::of(result.as_ref().unwrap_or(&Value::Null), INTERFACE);
        let outcome = outcome.map_err(|error| CniError::Outcome(last, error))?;
        attachment.result = result;
        attachment.write(sandbox.data)?;
        if outcome.addresses.is_empty() {
            return Err(CniError::NoAddress(sandbox.id.to_owned()));
        }
        let has_ports = network.has_capability("portMappings");
        Ok(Connected { addresses: outcome.addresses, links: outcome.links, has_ports })
    }

    /// Whether the plugins still find the sandbox's network as they made it.
    pub(crate) async fn check(&self, sandbox: &Sandbox<'_>) -> Result<(), CniError> {
        let Some(attachment) = Attachment::read(sandbox.data)? else { return Ok(()) };
        if !attachment.network.is_at_least("0.4.0") || attachment.network.disable_check {
            return Ok(());
        }
        let _turn = self.turns.read().await;
        for plugin in &attachment.network.plugins {
            let result = attachment.result.as_ref();
            self.call(&attachment, "CHECK", plugin, sandbox, result).await?;
        }
        Ok(())
    }

    /// Disconnects a sandbox. Does nothing if plugins did not connect it, or have disconnected it.
    pub(crate) async fn del(&self, sandbox: &Sandbox<'_>) -> Result<(), CniError> {
        let Some(attachment) = Attachment::read(sandbox.data)? else { return Ok(()) };
        let _turn = self.turns.read().await;
        let result = attachment.result.as_ref();
        let result = result.filter(|_| attachment.network.is_at_least("0.4.0"));
        for plugin in attachment.network.plugins.iter().rev() {
            match self.call(&attachment, "DEL", plugin, sandbox, result).await {
                Ok(_) => {}
                Err(error) if is_gone(&error, sandbox) => {
                    tracing::debug!(sandbox = sandbox.id, %error, "a plugin found nothing to delete");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Attachment::forget(sandbox.data)?)
    }

    async fn call(
        &self,
        attachment: &Attachment,
        command: &'static str,
        plugin: &Plugin,
        sandbox: &Sandbox<'_>,
        result: Option<&Value>,
    ) -> Result<Vec<u8>, CniError> {
        // A plugin of a pod without its namespace, after a restart of the machine, frees what it can.
        let is_gone = command == "DEL" && !sandbox.has_netns();
        let netns = if is_gone { String::new() } else { sandbox.netns.display().to_string() };
        let call = Call {
            command,
            container: sandbox.id,
            netns: &netns,
            interface: INTERFACE,
            args: &attachment.args,
        };
        let injected = injected(&attachment.network, result);
        let conf = request::conf(plugin, &injected, &attachment.capabilities);
        let dirs = match self.config.bin_dirs.as_slice() {
            [] => &attachment.bin_dirs,
            dirs => dirs,
        };
        let begun = tokio::time::Instant::now();
        let done = plugin::run(&plugin.kind, dirs, &call, &conf, self.config.limit).await;
        let took = begun.elapsed();
        tracing::debug!(
            sandbox = sandbox.id,
            plugin = plugin.kind,
            command,
            ?took,
            "ran a CNI plugin"
        );
        done.map_err(|error| {
            if let PluginError::Told { code, .. } = &error {
                tracing::debug!(
                    sandbox = sandbox.id,
                    plugin = plugin.kind,
                    command,
                    code,
                    "a CNI plugin failed"
                );
            }
            let command = match command {
                "ADD" => "add",
                "DEL" => "delete",
                _ => "check",
            };
            CniError::Plugin { kind: plugin.kind.clone(), command, error }
        })
    }

    /// Lets the plugins remove what they keep for sandboxes that no longer exist. `existing` is asked when no
    /// sandbox is being connected.
    pub(crate) async fn gc(&self, existing: impl FnOnce() -> Vec<String>) -> Result<(), CniError> {
        let Choice::Plugins(network) = self.choice() else { return Ok(()) };
        if network.disable_gc || !network.is_at_least("1.1.0") {
            return Ok(());
        }
        let _turn = self.turns.write().await;
        let all = existing().into_iter();
        let all: Value = all.map(|id| json!({"containerID": id, "ifname": INTERFACE})).collect();
        let mut injected = injected(&network, None);
        // The first versions of the specification and of libcni had different names.
        injected.push(("cni.dev/valid-attachments", all.clone()));
        injected.push(("cni.dev/attachments", all));
        let mut first = Ok(());
        for plugin in &network.plugins {
            let conf = request::conf(plugin, &injected, &Map::new());
            let call = Call { command: "GC", ..Call::default() };
            let limit = self.config.limit;
            let done = plugin::run(&plugin.kind, &self.config.bin_dirs, &call, &conf, limit).await;
            let kind = plugin.kind.clone();
            let done = done.map_err(|error| CniError::Plugin { kind, command: "gc", error });
            first = first.and(done.map(drop));
        }
        first
    }
}

fn injected(network: &Network, result: Option<&Value>) -> Vec<(&'static str, Value)> {
    let mut all = vec![
        ("name", network.name.as_str().into()),
        ("cniVersion", network.version.as_str().into()),
    ];
    all.extend(result.map(|result| ("prevResult", result.clone())));
    all
}

/// Whether a failed DEL means that there is nothing to delete. Upstream: `Remove` of `containerd/go-cni`, which
/// knows only texts.
fn is_gone(error: &CniError, sandbox: &Sandbox<'_>) -> bool {
    let CniError::Plugin { error: PluginError::Told { msg, details, .. }, .. } = error else {
        return false;
    };
    let says = |text: &str| msg.contains(text) || details.contains(text);
    (!sandbox.has_netns() && says("no such file or directory")) || says("not found")
}

#[cfg(test)]
mod tests;
