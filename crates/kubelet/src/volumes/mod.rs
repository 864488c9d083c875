//! Volumes of a pod on this node.
//!
//! In: the pod, its resolved claims, the objects that its volumes refer to. Out: a directory, a file or
//! a device per volume that the runtime mounts into containers.
//!
//! [`PLUGINS`] has a row for each type of volume. [`dir`] draws the directories.
//!
//! Invariants: a repeated set-up changes nothing; nothing is deleted through a mount of another owner;
//! a directory whose mount cannot be undone stays.
//! Cost: by the pod's volumes. A pod that runs is set up again only for the plugins that ask for it.

pub mod atomic;
pub mod claims;
pub mod config_map;
pub mod csi;
pub mod dir;
pub mod downward_api;
pub mod empty_dir;
pub mod files;
pub mod host_path;
pub mod image;
pub mod local_volume;
pub mod mounts;
pub mod ownership;
pub mod payload;
pub mod plugin;
pub mod program;
pub mod projected;
pub mod secret;
pub mod turns;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use base::metrics::Timer;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, Volume};

use crate::node::families;
use crate::pod::env::Surroundings;
use crate::pod::input::Inputs;
use crate::reason::Reason;
use claims::Claims;
pub use dir::PodDir;
use plugin::{FAILED_MAP, References, Request, Source, VolumePlugin};
pub use plugin::{Host, Mounted, VolumeError};

/// All types of volumes, in the order of upstream's list. The first row that supports a volume has it.
pub const PLUGINS: &[&dyn VolumePlugin] = &[
    &empty_dir::EmptyDirPlugin,
    &host_path::HostPathPlugin,
    &secret::SecretPlugin,
    &downward_api::DownwardApiPlugin,
    &config_map::ConfigMapPlugin,
    &projected::ProjectedPlugin,
    &local_volume::LocalVolumePlugin,
    &csi::plugin::CsiPlugin,
    &image::ImagePlugin,
];

const LEFTOVER_RETRY: Duration = Duration::from_secs(60);

/// Why volumes are set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occasion {
    /// Before a sandbox is created: all volumes must be complete and up to date.
    Sandbox,
    /// Before containers start in an existing sandbox: files that cannot be updated stay.
    Containers,
    /// The pod runs: files are updated from their sources, other volumes are not touched.
    Running,
}

/// The result. A volume whose update failed but whose older files suffice is in both.
#[derive(Debug, Default)]
pub struct Done {
    pub ready: BTreeMap<String, Mounted>,
    /// By the name of the volume or its PersistentVolume.
    pub failures: Vec<(String, VolumeError)>,
    /// When the first volume must be set up again.
    pub again: Option<Timestamp>,
}

/// A pod whose volumes are to be set up.
pub struct Wanted<'a> {
    pub pod: &'a Pod,
    pub dir: &'a PodDir,
    pub claims: Claims,
    pub around: &'a Surroundings<'a>,
    pub input: &'a Inputs,
}

fn plugin_of(source: &Source<'_>) -> Option<&'static dyn VolumePlugin> {
    PLUGINS.iter().copied().find(|plugin| plugin.supports(source))
}

fn volumes(pod: &Pod) -> impl Iterator<Item = &Volume> {
    pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten())
}

/// The plugins of the pod's own volumes; those of claims are known only where the claims are.
pub fn plugin_names(pod: &Pod) -> impl Iterator<Item = &'static str> {
    let plugin = |volume| plugin_of(&Source { volume, bound: None });
    volumes(pod).filter_map(plugin).map(|plugin| plugin.name())
}

/// The ConfigMaps and Secrets of the pod's volumes.
pub fn references(pod: &Pod) -> References {
    let mut all = References::default();
    for volume in volumes(pod) {
        PLUGINS.iter().for_each(|plugin| all.extend(plugin.references(volume)));
    }
    all
}

/// The directories of the pod's own files, which count as its local storage, by volume.
pub fn local_storage(pod: &Pod, dir: &PodDir) -> BTreeMap<String, PathBuf> {
    let own = volumes(pod).filter_map(|volume| {
        let plugin = plugin_of(&Source { volume, bound: None })?;
        let path = || (volume.name.clone(), dir.volume(plugin.name(), &volume.name));
        plugin.is_local_storage().then(path)
    });
    own.collect()
}

/// Sets up the pod's volumes one by one; repeatable. A failure of one does not stop the others.
pub async fn set_up(host: &Host, mut wanted: Wanted<'_>, occasion: Occasion) -> Done {
    let mut done = Done::default();
    for volume in volumes(wanted.pod) {
        let bound = match wanted.claims.remove(&volume.name).transpose() {
            Ok(bound) => bound,
            Err(error) => {
                done.failures.push((volume.name.clone(), error));
                continue;
            }
        };
        let source = Source { volume, bound: bound.as_ref() };
        let name = source.name().to_string();
        let Some(plugin) = plugin_of(&source) else {
            if occasion != Occasion::Running {
                let error = unsupported(&source);
                done.failures.push((name, error));
            }
            continue;
        };
        if occasion == Occasion::Running && !plugin.refreshes() {
            continue;
        }
        let Wanted { pod, dir, around, input, .. } = wanted;
        let timer = Timer::start();
        let outcome = plugin.set_up(host, &Request { pod, dir, source, around, input }).await;
        if occasion != Occasion::Running {
            let plugin = format!("kubernetes.io/{}", plugin.name());
            families::volume_mounted(&plugin, outcome.is_ok(), timer);
        }
        match outcome {
            Ok(mounted) => {
                done.again = [done.again, mounted.again].into_iter().flatten().min();
                done.ready.insert(volume.name.clone(), mounted);
            }
            Err(error) => {
                let path = dir.volume(plugin.name(), &volume.name);
                if occasion != Occasion::Sandbox && atomic::is_filled(&path) {
                    done.ready.insert(volume.name.clone(), Mounted::directory(path, true));
                }
                done.failures.push((name, error));
            }
        }
    }
    done
}

fn unsupported(source: &Source<'_>) -> VolumeError {
    if source.bound.is_none() {
        return VolumeError::Unsupported;
    }
    if !source.is_block() {
        let step = "MountVolume.NewMounter initialization";
        return VolumeError::step(step, VolumeError::Unsupported);
    }
    // Deviation: upstream only logs this.
    let why = "failed to find BlockVolumeMapper plugin. Volume plugin is nil.";
    let name = source.name();
    let text = format!("MapVolume.FindMapperPluginBySpec {why} for volume {name:?} ");
    Reason::new(FAILED_MAP, text).into()
}

/// Undoes the volumes of a pod that has ended, and removes its directory. After an error, the caller
/// must retry.
pub async fn tear_down(host: &Host, uid: &str, dir: &PodDir) -> Result<(), VolumeError> {
    if host.may_mount {
        // Mounted subpaths would keep their volumes busy.
        let subpaths = dir.subpaths();
        let undone = tokio::task::spawn_blocking(move || mounts::unmount_below_if_there(&subpaths));
        undone.await?.map_err(VolumeError::io("unmount"))?;
    }
    for plugin in PLUGINS {
        plugin.tear_down(host, uid, dir).await?;
    }
    let path = dir.0.clone();
    let removed = tokio::task::spawn_blocking(move || mounts::unmount_and_remove(&path));
    removed.await?.map_err(VolumeError::io("remove"))
}

/// Like [`tear_down`], for an orphaned pod: retried until its drivers are registered.
pub async fn clear_leftover(host: &Host, uid: &str, dir: &PodDir) {
    let mut changed = host.csi.changed.subscribe();
    while let Err(error) = tear_down(host, uid, dir).await {
        tracing::warn!(uid, %error, "failed to remove the volumes of an orphaned pod");
        let _ = tokio::time::timeout(LEFTOVER_RETRY, changed.changed()).await;
    }
}

/// Takes over what an earlier kubelet left on the node. It blocks.
pub fn recover(host: &Host) {
    PLUGINS.iter().for_each(|plugin| plugin.recover(host));
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::sync::Arc;

    use serde_json::json;
    use tokio::sync::watch;

    use super::plugin::Bound;
    use super::*;
    use crate::pod::downward::Addresses;
    use crate::pod::env::Sources;
    use crate::pod::events::Events;
    use crate::pod::input::Input;
    use crate::pod::objects::{ObjectError, Objects};
    use crate::resources::ResourceList;

    /// The extension table of CONTRIBUTING.md: a plugin is a file with its implementation, and a row.
    #[test]
    fn a_plugin_is_a_file_and_a_row() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/volumes");
        let table = fs::read_to_string(dir.join("mod.rs")).expect("this file");
        let rows = table.split("PLUGINS: &[&dyn VolumePlugin] = &[").nth(1).expect("the table");
        let rows = rows.split("];").next().expect("its end");
        let entries = [&dir, &dir.join("csi")].map(|dir| fs::read_dir(dir).expect("a list"));
        let mut files = 0;
        for entry in entries.into_iter().flatten().flatten() {
            let Ok(text) = fs::read_to_string(entry.path()) else { continue };
            let Some(tail) = text.split("\nimpl VolumePlugin for ").nth(1) else { continue };
            let plugin = tail.split_whitespace().next().expect("a name");
            let path = entry.path();
            let file = path.file_stem().expect("a name").to_string_lossy();
            let row = format!("{file}::{plugin},");
            assert_eq!(rows.matches(&row).count(), 1, "a row for {row}");
            files += 1;
        }
        assert_eq!(files, PLUGINS.len());
        let names: std::collections::BTreeSet<_> = PLUGINS.iter().map(|row| row.name()).collect();
        assert_eq!(names.len(), PLUGINS.len(), "each has directories of its own");
    }

    /// A host without the privilege to mount, whose API does not answer.
    fn host(root: &Path) -> Host {
        type Answer = http::Response<http_body_util::Full<bytes::Bytes>>;
        let refuse =
            |_: http::Request<_>| async { Err::<Answer, _>(std::io::Error::other("no API")) };
        let client = client::Client::new(tower::service_fn(refuse), "test");
        let tasks = base::task::Tasks::new("test");
        let drivers = client::Informers::new(client.clone(), tasks.clone()).of();
        let setting = csi::Setting { node_name: "n".into(), root: root.into() };
        let events = client::EventRecorder::new(client.clone(), &tasks, "test", None);
        Host {
            objects: Arc::new(Objects::new(client.clone())),
            csi: Arc::new(csi::Csi::new(client.clone(), setting, drivers, Arc::default())),
            events: Events::new(events, None),
            client,
            node_name: "n".into(),
            root: root.into(),
            may_mount: false,
            turns: Default::default(),
        }
    }

    async fn set_up_all(
        host: &Host,
        pod: &Pod,
        dir: &PodDir,
        claims: Claims,
        sources: &Sources,
        occasion: Occasion,
    ) -> Done {
        let (addresses, allocatable) = (Addresses::default(), ResourceList::new());
        let around = Surroundings { addresses: &addresses, allocatable: &allocatable, sources };
        let input = watch::channel(Input::new(Arc::new(pod.clone()))).1;
        let wanted = Wanted { pod, dir, claims, around: &around, input: &input };
        set_up(host, wanted, occasion).await
    }

    #[tokio::test]
    async fn files_and_directories_are_set_up_and_removed() {
        let root = tempfile::tempdir().expect("a directory");
        let (dir, host) = (PodDir::new(root.path(), "u1"), host(root.path()));
        dir.create().expect("directories");
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns"},
            "spec": {"containers": [{"name": "c"}], "volumes": [
                {"name": "tmp", "emptyDir": {}},
                {"name": "cfg", "configMap": {"name": "m"}},
                {"name": "host", "hostPath": {"path": root.path().join("h"), "type": "DirectoryOrCreate"}}]}}))
        .expect("a pod");
        let map = serde_json::from_value(json!({"data": {"k": "v"}})).expect("a map");
        let sources = Sources {
            config_maps: [("m".to_string(), Arc::new(map))].into(),
            ..Sources::default()
        };
        for _ in 0..2 {
            let (claims, occasion) = (Claims::new(), Occasion::Sandbox);
            let done = set_up_all(&host, &pod, &dir, claims, &sources, occasion).await;
            let Done { ready, failures, .. } = done;
            assert!(failures.is_empty(), "{failures:?}");
            assert_eq!(fs::read_to_string(ready["cfg"].path.join("k")).expect("a key"), "v");
            assert!(ready["tmp"].path.is_dir() && ready["host"].path.is_dir());
        }
        tear_down(&host, "u1", &dir).await.expect("removed");
        assert!(!dir.0.exists());
        assert!(root.path().join("h").exists(), "the host's path stays");
    }

    /// A pod whose first volumes can be made to fail, with a Secret volume after them.
    struct Bench {
        root: tempfile::TempDir,
        dir: PodDir,
        pod: Pod,
        sources: Sources,
    }

    impl Bench {
        fn new() -> Self {
            let root = tempfile::tempdir().expect("a directory");
            let dir = PodDir::new(root.path(), "u1");
            dir.create().expect("directories");
            let pod = json!({"spec": {"containers": [], "volumes": [
                {"name": "host", "hostPath": {"path": root.path().join("h")}},
                {"name": "claim", "persistentVolumeClaim": {"claimName": "x"}},
                {"name": "maybe", "configMap": {"name": "m", "optional": true}},
                {"name": "cfg", "configMap": {"name": "m"}},
                {"name": "key", "secret": {"secretName": "s"}}]}});
            let pod = serde_json::from_value(pod).expect("a pod");
            Self { root, dir, pod, sources: Sources::default() }
        }

        fn map(&mut self, text: Option<&str>) {
            let map = |text| serde_json::from_value(json!({"data": {"k": text}})).expect("a map");
            let all = text.map(|text| ("m".to_string(), Arc::new(map(text))));
            self.sources.config_maps = all.into_iter().collect();
        }

        fn secret(&mut self, text: &str) {
            let mut secret = k8s_openapi::api::core::v1::Secret::default();
            let bytes = k8s_openapi::ByteString(text.into());
            secret.data = Some([("k".to_string(), bytes)].into());
            self.sources.secrets = [("s".to_string(), Arc::new(secret))].into();
        }

        /// The mounted volumes, and the failures. The claim's volume is a path of the node.
        async fn set_up(&self, occasion: Occasion, claim: bool) -> (String, Vec<String>) {
            let source = json!({"spec": {"hostPath": {"path": self.root.path().join("c")}}});
            let volume = serde_json::from_value(source).expect("a volume");
            let bound = Ok(Bound { claim: Default::default(), volume, read_only: false });
            let claims = claim.then(|| ("claim".to_string(), bound)).into_iter().collect();
            let (host, sources) = (host(self.root.path()), &self.sources);
            let done = set_up_all(&host, &self.pod, &self.dir, claims, sources, occasion).await;
            let ready: Vec<String> = done.ready.into_keys().collect();
            let told = |(name, error): (String, VolumeError)| format!("{name}: {error}");
            (ready.join(" "), done.failures.into_iter().map(told).collect())
        }

        fn file(&self, plugin: &str, volume: &str) -> String {
            let path = self.dir.volume(plugin, volume).join("k");
            fs::read_to_string(path).unwrap_or_default()
        }
    }

    #[tokio::test]
    async fn a_failed_volume_does_not_stop_the_others() {
        let mut bench = Bench::new();
        bench.map(Some("one"));
        bench.secret("one");
        let all = "cfg claim host key maybe";
        assert_eq!(bench.set_up(Occasion::Sandbox, true).await, (all.into(), vec![]));

        // While the pod runs, its ConfigMap, its claim and its directory are deleted.
        bench.map(None);
        bench.secret("two");
        fs::remove_dir(bench.root.path().join("h")).expect("removed");
        let lost = || vec![r#"cfg: configmap "m" not found"#.to_string()];
        assert_eq!(bench.set_up(Occasion::Running, false).await, ("cfg key maybe".into(), lost()));
        assert_eq!(bench.file("secret", "key"), "two");
        assert_eq!(bench.file("configmap", "cfg"), "one");
        assert_eq!(bench.file("configmap", "maybe"), "");
        assert!(!bench.root.path().join("h").exists(), "a running pod does not recreate it");

        // A restarted container keeps the older files; a new sandbox does not.
        assert_eq!(bench.set_up(Occasion::Containers, true).await, (all.into(), lost()));
        let without = "claim host key maybe";
        assert_eq!(bench.set_up(Occasion::Sandbox, true).await, (without.into(), lost()));
    }

    #[tokio::test]
    async fn an_unreadable_object_is_not_absent() {
        let mut bench = Bench::new();
        bench.map(Some("one"));
        bench.secret("one");
        bench.set_up(Occasion::Sandbox, true).await;
        bench.map(None);
        let error = ObjectError::NotYet { kind: "configmap" };
        bench.sources.unknown.config_maps = [("m".to_string(), error)].into();
        let (ready, failures) = bench.set_up(Occasion::Running, true).await;
        assert_eq!(ready, "cfg key maybe");
        let why = "failed to sync configmap cache: timed out waiting for the condition";
        assert_eq!(failures, [format!("maybe: {why}"), format!("cfg: {why}")]);
        assert_eq!(bench.file("configmap", "maybe"), "one");
    }
}
