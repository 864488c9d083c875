//! Volumes of a pod on this node.
//!
//! In: the pod, the content of its volumes ([`payload`], gathered before by the worker). Out: a
//! directory (or file) per volume that the runtime bind-mounts into containers.
//!
//! ```text
//! <root>/pods/<uid>/volumes/kubernetes.io~<plugin>/<volume>
//! <root>/pods/<uid>/volumeDevices/kubernetes.io~<plugin>/<volume>       a link to a device
//! <root>/pods/<uid>/volume-subpaths/<volume>/<container>/<index>
//! <root>/pods/<uid>/containers/<container>/<termination log>
//! <root>/pods/<uid>/etc-hosts
//! ```
//!
//! Invariants: a repeated set-up changes nothing; nothing is deleted through a mount of another owner;
//! a directory whose mount cannot be undone stays.
//! Everything here blocks on the disk: callers run it outside of the executor's threads.

pub mod atomic;
pub mod mounts;
pub mod ownership;
pub mod payload;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{EmptyDirVolumeSource, HostPathVolumeSource, Pod, Volume};

use crate::env::{Sources, Surroundings};
use crate::objects::ObjectError;
use crate::resources;
use payload::{PayloadError, Tokens};

/// A mounted volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    pub path: PathBuf,
    /// The volume itself is read-only, independent of the mount.
    pub read_only: bool,
    /// A block device: containers get the device that the path leads to.
    pub is_device: bool,
}

impl Ready {
    pub fn directory(path: PathBuf, read_only: bool) -> Self {
        Self { path, read_only, is_device: false }
    }
}

/// Why a volume cannot be set up. The text follows `MountVolume.SetUp failed for volume "x" : `.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    #[error(transparent)]
    Payload(#[from] PayloadError),
    #[error(transparent)]
    Object(#[from] ObjectError),
    #[error("hostPath type check failed: {0}")]
    HostPath(String),
    #[error("{0}")]
    Unsupported(String),
    #[error("{context}: {source}")]
    Io { context: String, source: io::Error },
}

fn io_error(context: impl Into<String>) -> impl FnOnce(io::Error) -> VolumeError {
    let context = context.into();
    move |source| VolumeError::Io { context, source }
}

/// A pod's directory under the kubelet's root.
#[derive(Clone, Debug)]
pub struct PodDir(pub PathBuf);

impl PodDir {
    pub fn new(root: &Path, uid: &str) -> Self {
        Self(root.join("pods").join(uid))
    }

    pub fn volume(&self, plugin: &str, name: &str) -> PathBuf {
        self.0.join("volumes").join(format!("kubernetes.io~{plugin}")).join(name)
    }

    pub fn container(&self, name: &str) -> PathBuf {
        self.0.join("containers").join(name)
    }

    pub fn hosts(&self) -> PathBuf {
        self.0.join("etc-hosts")
    }

    pub fn subpath(&self, volume: &str, container: &str, index: usize) -> PathBuf {
        self.0.join("volume-subpaths").join(volume).join(container).join(index.to_string())
    }

    pub fn create(&self) -> io::Result<()> {
        for dir in [self.0.clone(), self.0.join("volumes"), self.0.join("containers")] {
            fs::create_dir_all(&dir)?;
            fs::set_permissions(&dir, fs::Permissions::from_mode(0o750))?;
        }
        Ok(())
    }
}

/// The resolved claims, by volume name (read by the caller through the API); `None` for a failure, which
/// the caller has reported.
pub type Claims = BTreeMap<String, Option<Ready>>;

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
    pub ready: BTreeMap<String, Ready>,
    /// By volume name.
    pub failures: Vec<(String, VolumeError)>,
}

/// The inputs of the set-up that come from elsewhere.
pub struct Gathered<'a> {
    pub around: Surroundings<'a>,
    /// By volume name.
    pub tokens: &'a BTreeMap<String, Tokens>,
    pub claims: &'a Claims,
    /// Mount tmpfs where upstream does. False without the privilege to mount.
    pub tmpfs: bool,
}

/// Sets up the pod's volumes one by one; repeatable. A failure of one does not stop the others.
pub fn set_up(dir: &PodDir, pod: &Pod, gathered: &Gathered<'_>, occasion: Occasion) -> Done {
    let mut done = Done::default();
    for volume in pod.spec.iter().flat_map(|s| s.volumes.iter().flatten()) {
        let plugin = filled_by(volume);
        let set_up = match (plugin, gathered.claims.get(&volume.name)) {
            (Some(plugin), _) => files(&dir.volume(plugin, &volume.name), pod, volume, gathered),
            (None, Some(None)) => continue,
            (None, Some(Some(claimed))) => Ok(claimed.clone()),
            (None, None) if occasion == Occasion::Running => continue,
            (None, None) => one(dir, pod, volume, gathered),
        };
        match (set_up, plugin) {
            (Ok(ready), _) => {
                done.ready.insert(volume.name.clone(), ready);
            }
            (Err(error), plugin) => {
                let path = plugin.map(|plugin| dir.volume(plugin, &volume.name));
                if let Some(path) = path.filter(|path| atomic::is_filled(path))
                    && occasion != Occasion::Sandbox
                {
                    done.ready.insert(volume.name.clone(), Ready::directory(path, true));
                }
                done.failures.push((volume.name.clone(), error));
            }
        }
    }
    done
}

fn one(
    dir: &PodDir,
    pod: &Pod,
    volume: &Volume,
    gathered: &Gathered<'_>,
) -> Result<Ready, VolumeError> {
    let name = &volume.name;
    if let Some(source) = &volume.empty_dir {
        return empty_dir(&dir.volume("empty-dir", name), pod, source, gathered.tmpfs);
    }
    if let Some(source) = &volume.host_path {
        return host_path(source);
    }
    if volume.image.is_some() {
        // The runtime mounts it into each container; the directory exists for upstream's layout.
        let path = dir.volume("image", name);
        fs::create_dir_all(&path).map_err(io_error("mkdir"))?;
        return Ok(Ready::directory(path, true));
    }
    Err(VolumeError::Unsupported("no volume plugin matched".into()))
}

/// The plugin of a volume with content from API objects.
fn filled_by(volume: &Volume) -> Option<&'static str> {
    let plugins = [
        (volume.config_map.is_some(), "configmap"),
        (volume.secret.is_some(), "secret"),
        (volume.downward_api.is_some(), "downward-api"),
        (volume.projected.is_some(), "projected"),
    ];
    plugins.into_iter().find(|(is_it, _)| *is_it).map(|(_, plugin)| plugin)
}

/// Writes the content from API objects into a volume's directory.
fn files(
    path: &Path,
    pod: &Pod,
    volume: &Volume,
    gathered: &Gathered<'_>,
) -> Result<Ready, VolumeError> {
    check_known(volume, gathered.around.sources)?;
    let files = contents(pod, volume, gathered)?;
    fs::create_dir_all(path).map_err(io_error("mkdir"))?;
    if volume.config_map.is_none() && gathered.tmpfs {
        mounts::tmpfs(path, None, 0o777, None).map_err(io_error("mount tmpfs"))?;
    }
    let group = fs_group(pod);
    if let Some(group) = group {
        chown(path, None, Some(group)).map_err(io_error("chown"))?;
    }
    let bits = if group.is_some() { 0o2777 } else { 0o777 };
    fs::set_permissions(path, fs::Permissions::from_mode(bits)).map_err(io_error("chmod"))?;
    atomic::write(path, &files, group).map_err(io_error("write"))?;
    Ok(Ready::directory(path.to_path_buf(), true))
}

/// Fails if an object could not be read, which is not the same as absent.
fn check_known(volume: &Volume, sources: &Sources) -> Result<(), ObjectError> {
    let (maps, secrets) = payload::references(volume);
    let unknown = &sources.unknown;
    let map = maps.iter().find_map(|name| unknown.config_maps.get(*name));
    let found = map.or_else(|| secrets.iter().find_map(|name| unknown.secrets.get(*name)));
    found.map_or(Ok(()), |error| Err(error.clone()))
}

fn contents(
    pod: &Pod,
    volume: &Volume,
    gathered: &Gathered<'_>,
) -> Result<atomic::Payload, PayloadError> {
    let around = &gathered.around;
    let default = |mode: Option<i32>| mode.map_or(payload::DEFAULT_MODE, |m| m as u32 & 0o777);
    if let Some(source) = &volume.config_map {
        let map = around.sources.config_maps.get(&source.name).map(AsRef::as_ref);
        let optional = source.optional == Some(true);
        let mode = default(source.default_mode);
        return payload::config_map(&source.name, map, source.items.as_ref(), optional, mode);
    }
    if let Some(source) = &volume.secret {
        let name = source.secret_name.clone().unwrap_or_default();
        let object = around.sources.secrets.get(&name).map(AsRef::as_ref);
        let optional = source.optional == Some(true);
        let mode = default(source.default_mode);
        return payload::secret(&name, object, source.items.as_ref(), optional, mode);
    }
    if let Some(source) = &volume.downward_api {
        let items = source.items.as_deref().unwrap_or_default();
        return payload::downward_api(pod, items, around, default(source.default_mode));
    }
    if let Some(source) = &volume.projected {
        let none = Tokens::new();
        let tokens = gathered.tokens.get(&volume.name).unwrap_or(&none);
        let has_group = fs_group(pod).is_some();
        return payload::projected(pod, source, around, tokens, one_user(pod), has_group);
    }
    Ok(atomic::Payload::new())
}

fn fs_group(pod: &Pod) -> Option<u32> {
    let context = pod.spec.as_ref()?.security_context.as_ref()?;
    context.fs_group.and_then(|group| u32::try_from(group).ok())
}

/// The user of every container, if the spec sets one for all.
fn one_user(pod: &Pod) -> Option<u32> {
    let spec = pod.spec.as_ref()?;
    let default = spec.security_context.as_ref().and_then(|c| c.run_as_user);
    let all = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let mut users = all.map(|container| {
        container.security_context.as_ref().and_then(|c| c.run_as_user).or(default)
    });
    let first = users.next()??;
    users.all(|user| user == Some(first)).then(|| u32::try_from(first).ok()).flatten()
}

fn empty_dir(
    path: &Path,
    pod: &Pod,
    source: &EmptyDirVolumeSource,
    tmpfs: bool,
) -> Result<Ready, VolumeError> {
    let group = fs_group(pod);
    let bits = if group.is_some() { 0o2777 } else { 0o777 };
    if !path.is_dir() {
        make_open(path, bits, group)?;
    }
    if source.medium.as_deref() == Some("Memory") && tmpfs {
        let size = source.size_limit.as_ref().map(resources::units).filter(|size| *size > 0);
        let size = size.map(|size| size as u64);
        mounts::tmpfs(path, size, bits, group).map_err(io_error("mount tmpfs"))?;
    }
    Ok(Ready::directory(path.to_path_buf(), false))
}

/// Creates a directory with its final mode and owner. Containers may change both afterwards, because the
/// directory is the root of their mount; such changes must stay.
fn make_open(path: &Path, bits: u32, group: Option<u32>) -> Result<(), VolumeError> {
    // No volume has this name: volume names are DNS labels.
    let mut name = std::ffi::OsString::from(".new-");
    name.push(path.file_name().unwrap_or_default());
    let fresh = path.with_file_name(name);
    fs::create_dir_all(&fresh).map_err(io_error("mkdir"))?;
    if group.is_some() {
        chown(&fresh, None, group).map_err(io_error("chown"))?;
    }
    fs::set_permissions(&fresh, fs::Permissions::from_mode(bits)).map_err(io_error("chmod"))?;
    fs::rename(&fresh, path).map_err(io_error("rename"))
}

fn host_path(source: &HostPathVolumeSource) -> Result<Ready, VolumeError> {
    let path = PathBuf::from(&source.path);
    let shown = path.display();
    let failed = |what: &str| Err(VolumeError::HostPath(format!("{shown} is not {what}")));
    let kind = fs::metadata(&path).map(|meta| meta.file_type());
    match source.type_.as_deref().unwrap_or_default() {
        // Upstream leaves this to the runtime, which creates a directory if nothing exists.
        "" if kind.is_err() => fs::create_dir_all(&path).map_err(io_error("mkdir"))?,
        "DirectoryOrCreate" => match kind {
            Ok(kind) if kind.is_dir() => {}
            Ok(_) => return failed("a directory"),
            Err(_) => {
                fs::create_dir_all(&path).map_err(io_error("mkdir"))?;
                let mode = fs::Permissions::from_mode(0o755);
                fs::set_permissions(&path, mode).map_err(io_error("chmod"))?;
            }
        },
        "Directory" if !kind.as_ref().is_ok_and(|k| k.is_dir()) => return failed("a directory"),
        "FileOrCreate" => match kind {
            Ok(kind) if kind.is_file() => {}
            Ok(_) => return failed("a file"),
            Err(_) => {
                fs::write(&path, b"").map_err(io_error("create"))?;
                let mode = fs::Permissions::from_mode(0o644);
                fs::set_permissions(&path, mode).map_err(io_error("chmod"))?;
            }
        },
        "File" if !kind.as_ref().is_ok_and(|k| k.is_file()) => return failed("a file"),
        "Socket" if !kind.as_ref().is_ok_and(|k| k.is_socket()) => return failed("a socket file"),
        "CharDevice" if !kind.as_ref().is_ok_and(|k| k.is_char_device()) => {
            return failed("a character device");
        }
        "BlockDevice" if !kind.as_ref().is_ok_and(|k| k.is_block_device()) => {
            return failed("a block device");
        }
        _ => {}
    }
    Ok(Ready::directory(path, false))
}

/// A path of the node that a PersistentVolume names.
pub fn of_host(source: &HostPathVolumeSource) -> Result<Ready, VolumeError> {
    host_path(source)
}

/// Removes the pod's files from the disk, after their mounts.
pub fn tear_down(dir: &PodDir) -> io::Result<()> {
    if !dir.0.exists() {
        return Ok(());
    }
    mounts::unmount_below(&dir.0)?;
    fs::remove_dir_all(&dir.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::downward::Addresses;
    use crate::resources::ResourceList;
    use serde_json::json;
    use std::os::unix::fs::MetadataExt;
    use std::sync::Arc;

    #[test]
    fn files_and_directories_are_set_up_and_removed() {
        let root = tempfile::tempdir().expect("a directory");
        let dir = PodDir::new(root.path(), "u1");
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
        let (addresses, allocatable) = (Addresses::default(), ResourceList::new());
        let gathered = Gathered {
            around: Surroundings {
                addresses: &addresses,
                allocatable: &allocatable,
                sources: &sources,
            },
            tokens: &BTreeMap::new(),
            claims: &Claims::new(),
            tmpfs: false,
        };
        for _ in 0..2 {
            let Done { ready, failures } = set_up(&dir, &pod, &gathered, Occasion::Sandbox);
            assert!(failures.is_empty(), "{failures:?}");
            assert_eq!(fs::read_to_string(ready["cfg"].path.join("k")).expect("a key"), "v");
            assert!(ready["tmp"].path.is_dir() && ready["host"].path.is_dir());
        }
        tear_down(&dir).expect("removed");
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

        /// The mounted volumes, and the failures.
        fn set_up(&self, occasion: Occasion, claim: bool) -> (String, Vec<String>) {
            let (addresses, allocatable) = (Addresses::default(), ResourceList::new());
            let claim = claim.then(|| Ready::directory(self.root.path().join("c"), false));
            let gathered = Gathered {
                around: Surroundings {
                    addresses: &addresses,
                    allocatable: &allocatable,
                    sources: &self.sources,
                },
                tokens: &BTreeMap::new(),
                claims: &[("claim".to_string(), claim)].into(),
                tmpfs: false,
            };
            let done = set_up(&self.dir, &self.pod, &gathered, occasion);
            let ready: Vec<String> = done.ready.into_keys().collect();
            let told = |(name, error): (String, VolumeError)| format!("{name}: {error}");
            (ready.join(" "), done.failures.into_iter().map(told).collect())
        }

        fn file(&self, plugin: &str, volume: &str) -> String {
            let path = self.dir.volume(plugin, volume).join("k");
            fs::read_to_string(path).unwrap_or_default()
        }
    }

    #[test]
    fn a_failed_volume_does_not_stop_the_others() {
        let mut bench = Bench::new();
        bench.map(Some("one"));
        bench.secret("one");
        let all = "cfg claim host key maybe";
        assert_eq!(bench.set_up(Occasion::Sandbox, true), (all.into(), vec![]));

        // While the pod runs, its ConfigMap, its claim and its directory are deleted.
        bench.map(None);
        bench.secret("two");
        fs::remove_dir(bench.root.path().join("h")).expect("removed");
        let lost = || vec![r#"cfg: configmap "m" not found"#.to_string()];
        assert_eq!(bench.set_up(Occasion::Running, false), ("cfg key maybe".into(), lost()));
        assert_eq!(bench.file("secret", "key"), "two");
        assert_eq!(bench.file("configmap", "cfg"), "one");
        assert_eq!(bench.file("configmap", "maybe"), "");
        assert!(!bench.root.path().join("h").exists(), "a running pod does not recreate it");

        // A restarted container keeps the older files; a new sandbox does not.
        assert_eq!(bench.set_up(Occasion::Containers, true), (all.into(), lost()));
        let without = "claim host key maybe";
        assert_eq!(bench.set_up(Occasion::Sandbox, true), (without.into(), lost()));
    }

    #[test]
    fn an_unreadable_object_is_not_absent() {
        let mut bench = Bench::new();
        bench.map(Some("one"));
        bench.secret("one");
        bench.set_up(Occasion::Sandbox, true);
        bench.map(None);
        let error = ObjectError::NotYet { kind: "configmap" };
        bench.sources.unknown.config_maps = [("m".to_string(), error)].into();
        let (ready, failures) = bench.set_up(Occasion::Running, true);
        assert_eq!(ready, "cfg claim key maybe");
        let why = "failed to sync configmap cache: timed out waiting for the condition";
        assert_eq!(failures, [format!("maybe: {why}"), format!("cfg: {why}")]);
        assert_eq!(bench.file("configmap", "maybe"), "one");
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("it is there").permissions().mode() & 0o7777
    }

    #[test]
    fn a_mode_that_a_container_set_stays() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("kubernetes.io~empty-dir").join("data");
        // An earlier kubelet stopped in the middle.
        fs::create_dir_all(path.with_file_name(".new-data")).expect("a directory");
        let own = nix::unistd::getegid().as_raw();
        let pod = serde_json::from_value(json!({"spec": {"containers": [],
            "securityContext": {"fsGroup": own}}}));
        let (plain, grouped) = (Pod::default(), pod.expect("a pod"));
        let set_up = |pod: &Pod| {
            let ready = empty_dir(&path, pod, &EmptyDirVolumeSource::default(), false);
            ready.expect("set up").path
        };
        assert_eq!(mode(&set_up(&plain)), 0o777);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).expect("closed");
        assert_eq!(mode(&set_up(&plain)), 0o700);
        assert_eq!(mode(&set_up(&grouped)), 0o700);
        fs::remove_dir(&path).expect("removed");
        assert_eq!(mode(&set_up(&grouped)), 0o2777);
        let names = fs::read_dir(root.path().join("kubernetes.io~empty-dir")).expect("a list");
        assert_eq!(names.count(), 1, "no other file is left");
    }

    #[test]
    fn a_tmpfs_mode_that_a_container_set_stays() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("data");
        let pod = json!({"spec": {"containers": [], "securityContext": {"fsGroup": 1234}}});
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        let source = EmptyDirVolumeSource { medium: Some("Memory".into()), size_limit: None };
        let set_up = || {
            empty_dir(&path, &pod, &source, true).map_err(|error| error.to_string())?;
            let about = fs::metadata(&path).map_err(|error| error.to_string())?;
            Ok::<_, String>((about.permissions().mode() & 0o7777, about.gid()))
        };
        let first = set_up();
        let closed = fs::set_permissions(&path, fs::Permissions::from_mode(0o700));
        let second = set_up();
        mounts::unmount_below(root.path()).expect("unmounted");
        assert_eq!(first, Ok((0o2777, 1234)));
        closed.expect("closed");
        assert_eq!(second, Ok((0o700, 1234)));
    }

    #[test]
    fn host_path_types() {
        let root = tempfile::tempdir().expect("a directory");
        let check = |name: &str, kind: &str, ok: bool| {
            let path = root.path().join(name).display().to_string();
            let source = HostPathVolumeSource { path, type_: Some(kind.into()) };
            assert_eq!(host_path(&source).is_ok(), ok, "{name} {kind}");
        };
        check("d", "Directory", false);
        check("d", "DirectoryOrCreate", true);
        check("d", "Directory", true);
        check("d", "File", false);
        check("f", "File", false);
        check("f", "FileOrCreate", true);
        check("f", "File", true);
        check("f", "Socket", false);
        check("f", "Directory", false);
    }
}
