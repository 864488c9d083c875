//! Volumes of type `local` that are block devices: formatted if they have no file system, and mounted.
//!
//! ```text
//! device ─► blkid: is there a file system? ─► mkfs, or fsck ─► mount
//!   <root>/plugins/kubernetes.io/local-volume/mounts/<volume>        once, for all pods of the node
//!   <root>/pods/<uid>/volumes/kubernetes.io~local-volume/<volume>    bound, for each
//! ```
//!
//! In: a volume, a pod's directory. Out: mounts, which are removed when no pod uses the volume any more.
//! Invariants: a device is formatted only if `blkid` finds nothing on it and it may be written; a
//! volume's users are read back from the pods' directories; one caller at a time works on a volume.
//! Everything here blocks. Upstream: `pkg/volume/local`, `SafeFormatAndMount`.

use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{LocalVolumeSource, PersistentVolume, Pod};
use nix::mount::{MsFlags, mount};

use super::csi::place;
use super::dir::PodDir;
use super::files::fs_group;
use super::plugin::{Host, Mounted, Request, Source, VolumeError, VolumePlugin};
use super::program::{Ended, Run, run};
use super::{mounts, ownership};

const PLUGIN: &str = "local-volume";

pub struct LocalVolumePlugin;

#[async_trait]
impl VolumePlugin for LocalVolumePlugin {
    fn name(&self) -> &'static str {
        PLUGIN
    }

    fn supports(&self, source: &Source<'_>) -> bool {
        source.persistent().is_some_and(|spec| spec.local.is_some())
    }

    async fn set_up(&self, host: &Host, request: &Request<'_>) -> Result<Mounted, VolumeError> {
        let source = &request.source;
        let local = source.persistent().and_then(|spec| spec.local.clone());
        let local = local.ok_or(VolumeError::Unsupported)?;
        match source.is_block() {
            true => map(host, request, &local),
            false => file_system(host, request, local).await,
        }
    }

    async fn tear_down(&self, host: &Host, _uid: &str, dir: &PodDir) -> Result<(), VolumeError> {
        let own = dir.plugin(PLUGIN);
        let undo = move || mounts::unmount_and_remove(&own).map_err(VolumeError::io("unmount"));
        tokio::task::spawn_blocking(undo).await??;
        for name in mounted(&host.root) {
            let _turn = host.turns.take(&turn(&name)).await;
            let root = host.root.clone();
            let done = tokio::task::spawn_blocking(move || release(&root, &name)).await?;
            done.map_err(VolumeError::io("unmount"))?;
        }
        Ok(())
    }

    fn recover(&self, host: &Host) {
        for name in mounted(&host.root) {
            if let Err(error) = release(&host.root, &name) {
                tracing::warn!(volume = name, %error, "failed to unmount a volume that no pod uses");
            }
        }
    }
}

fn turn(volume: &str) -> String {
    format!("kubernetes.io/{PLUGIN}/{volume}")
}

/// Links a block device into the pod's directory.
fn map(
    host: &Host,
    request: &Request<'_>,
    local: &LocalVolumeSource,
) -> Result<Mounted, VolumeError> {
    let failed = |why: String| VolumeError::step("MapVolume.MapBlockVolume", why);
    let path = std::fs::canonicalize(&local.path).map_err(|error| {
        VolumeError::step("MapVolume.EvalHostSymlinks", format!("{}: {error}", local.path))
    })?;
    if !place::is_device(&path) {
        return Err(failed(format!("{} is not a block device", path.display())));
    }
    let link = place::links(&request.dir.0, PLUGIN).join(request.source.name());
    if place::make_link(&link, &path).map_err(|error| failed(error.to_string()))? {
        host.tell_mapped(request.pod, &link);
    }
    let read_only = request.source.is_read_only();
    Ok(Mounted { is_device: true, ..Mounted::directory(link, read_only) })
}

/// A directory, or a device that is mounted.
async fn file_system(
    host: &Host,
    request: &Request<'_>,
    local: LocalVolumeSource,
) -> Result<Mounted, VolumeError> {
    let source = &request.source;
    let (path, read_only) = (PathBuf::from(&local.path), source.is_read_only());
    if source.bound.is_some_and(|bound| is_ours(&bound.volume)) {
        make_open(&path).map_err(|error| VolumeError::step("MountVolume.SetUp", error))?;
    }
    match kind(&path)? {
        Kind::Directory => return Ok(Mounted::directory(path, read_only)),
        Kind::Device => {}
    }
    let options = source.persistent().and_then(|spec| spec.mount_options.clone());
    let order = MountRequest {
        name: source.name().into(),
        device: path,
        fs_type: local.fs_type.unwrap_or_else(|| "ext4".into()),
        read_only,
        options: options.unwrap_or_default(),
        group: fs_group(request.pod).map(|group| (group, only_on_mismatch(request.pod))),
    };
    let _turn = host.turns.take(&turn(&order.name)).await;
    let (root, pod) = (host.root.clone(), request.dir.0.clone());
    let place = tokio::task::spawn_blocking(move || set_up(&root, &pod, &order)).await??;
    Ok(Mounted::directory(place, read_only))
}

/// Whether the volume's files get the pod's group only if its root differs.
pub fn only_on_mismatch(pod: &Pod) -> bool {
    let security = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    let change = security.and_then(|security| security.fs_group_change_policy.as_deref());
    change == Some("OnRootMismatch")
}

/// A pod's mount request for a device.
#[derive(Clone, Debug)]
struct MountRequest {
    /// The volume's name.
    name: String,
    device: PathBuf,
    fs_type: String,
    read_only: bool,
    /// The volume's mount options.
    options: Vec<String>,
    /// The fsGroup of its files, and whether to change them only if the volume's root differs.
    group: Option<(u32, bool)>,
}

/// The type of a local volume's path.
#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Directory,
    Device,
}

fn kind(path: &Path) -> Result<Kind, VolumeError> {
    let why = match std::fs::metadata(path) {
        Ok(about) if about.is_dir() => return Ok(Kind::Directory),
        Ok(about) if about.file_type().is_block_device() => return Ok(Kind::Device),
        Ok(_) => "only directory and block device are supported".into(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            format!("path {:?} does not exist", path.display().to_string())
        }
        Err(error) => error.to_string(),
    };
    Err(VolumeError::step("MountVolume.NewMounter initialization", why))
}

/// Whether the built-in provisioner made the volume. It leaves its directory to the node.
fn is_ours(volume: &PersistentVolume) -> bool {
    let annotations = volume.metadata.annotations.as_ref();
    let by = annotations.and_then(|all| all.get("pv.kubernetes.io/provisioned-by"));
    by.is_some_and(|by| by == "decapod.io/local-path")
}

/// Creates the directory at its first use: containers of any user may write to it.
fn make_open(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    if path.exists() {
        return Ok(());
    }
    std::fs::create_dir_all(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777))
}

fn all_mounts(root: &Path) -> PathBuf {
    root.join("plugins/kubernetes.io").join(PLUGIN).join("mounts")
}

fn of_pod(pod: &Path, name: &str) -> PathBuf {
    PodDir(pod.into()).volume(PLUGIN, name)
}

fn has_users(root: &Path, name: &str) -> bool {
    let pods = std::fs::read_dir(root.join("pods")).into_iter().flatten().flatten();
    pods.into_iter().any(|pod| of_pod(&pod.path(), name).exists())
}

/// Mounts the volume for the pod, and returns its path there.
fn set_up(root: &Path, pod: &Path, order: &MountRequest) -> Result<PathBuf, VolumeError> {
    const DEVICE: &str = "MountVolume.MountDevice";
    const SET_UP: &str = "MountVolume.SetUp";
    let failed = |step| move |error: io::Error| VolumeError::step(step, error);
    let (shared, own) = (all_mounts(root).join(&order.name), of_pod(pod, &order.name));
    if !mounts::is_mounted(&shared).map_err(failed(DEVICE))? {
        make_dir(&shared).map_err(failed(DEVICE))?;
        let fs_type = &order.fs_type;
        if let Err(why) = format_and_mount(&run, order, &shared) {
            // Removes the directory only if it is empty.
            let _ = std::fs::remove_dir(&shared);
            let (device, target) = (order.device.display(), shared.display());
            let why = format!(
                "local: failed to mount device {device} at {target} (fstype: {fs_type}), error {why}"
            );
            return Err(VolumeError::step(DEVICE, why));
        }
    }
    if mounts::is_mounted(&own).map_err(failed(SET_UP))? {
        return Ok(own);
    }
    let is_first = !has_users(root, &order.name);
    make_dir(&own).map_err(failed(SET_UP))?;
    if let Some((group, only_on_mismatch)) = order.group.filter(|_| is_first && !order.read_only) {
        ownership::give(&shared, group, only_on_mismatch).map_err(failed(SET_UP))?;
    }
    bind(&shared, &own, order.read_only).map_err(failed(SET_UP))?;
    Ok(own)
}

fn make_dir(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o750).create(path)
}

fn bind(from: &Path, to: &Path, read_only: bool) -> io::Result<()> {
    let none = None::<&str>;
    mount(Some(from), to, none, MsFlags::MS_BIND, none)?;
    if read_only {
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(none, to, none, flags, none)?;
    }
    Ok(())
}

/// The volumes that are mounted on this node.
fn mounted(root: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(all_mounts(root)).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Unmounts a volume that no pod uses any more.
fn release(root: &Path, name: &str) -> io::Result<()> {
    if has_users(root, name) {
        return Ok(());
    }
    let shared = all_mounts(root).join(name);
    mounts::unmount_below_if_there(&shared)?;
    match std::fs::remove_dir(&shared) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Upstream: formatAndMountSensitive.
fn format_and_mount(run: Run<'_>, order: &MountRequest, target: &Path) -> Result<(), String> {
    let device = order.device.display().to_string();
    let fs_type = if order.fs_type.is_empty() { "ext4" } else { &order.fs_type };
    let mut options: Vec<&str> = order.options.iter().map(String::as_str).collect();
    options.extend(order.read_only.then_some("ro"));
    options.sort_unstable();
    options.dedup();
    let read_only = options.contains(&"ro");
    options.push("defaults");
    let options = options.join(",");
    let target = target.display().to_string();
    let found = disk_format(run, &device)
        .map_err(|why| format!("failed to get disk format of disk {device}: {why}"))?;
    if found.is_empty() {
        if read_only {
            return Err(format!(
                "cannot mount unformatted disk {device} as we are manipulating it in read-only mode"
            ));
        }
        let mut arguments = match fs_type {
            "ext3" | "ext4" => vec!["-F", "-m0"],
            "xfs" => vec!["-f"],
            _ => vec![],
        };
        arguments.push(&device);
        run(&format!("mkfs.{fs_type}"), &arguments).map_err(|ended| {
            let Ended { why, output, .. } = ended;
            format!(
                "format of disk {device:?} failed: type:({fs_type:?}) target:({target:?}) options:({options:?}) errcode:({why}) output:({output}) "
            )
        })?;
        tracing::info!(device, fs_type, "formatted the device");
    } else if !read_only {
        check(run, &device)?;
    }
    let arguments = ["-t", fs_type, "-o", &options, &device, &target];
    run("mount", &arguments).map(drop).map_err(|Ended { why, output, .. }| {
        let shown = arguments.join(" ");
        format!(
            "mount failed: {why}\nMounting command: mount\nMounting arguments: {shown}\nOutput: {output}\n"
        )
    })
}

/// The name of the file system on a device; empty if there is none. Upstream: getDiskFormat.
fn disk_format(run: Run<'_>, device: &str) -> Result<String, String> {
    let text = match run("blkid", &["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", device]) {
        Ok(text) => text,
        Err(Ended { status: Some(2), .. }) => return Ok(String::new()),
        Err(Ended { why, .. }) => return Err(why),
    };
    let mut found = String::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        match line.split_once('=').filter(|(_, value)| !value.contains('=')) {
            Some(("PTTYPE", kind)) if !kind.is_empty() => {
                return Ok("unknown data, probably partitions".into());
            }
            Some(("TYPE", kind)) => found = kind.to_owned(),
            Some(_) => {}
            None => return Err(format!("blkid returns invalid output: {text}")),
        }
    }
    Ok(found)
}

/// Upstream: checkAndRepairFilesystem: only uncorrected errors fail.
fn check(run: Run<'_>, device: &str) -> Result<(), String> {
    match run("fsck", &["-a", device]) {
        Ok(_) => Ok(()),
        Err(Ended { status: Some(4), output, .. }) => Err(format!(
            "'fsck' found errors on device {device} but could not correct them: {output}"
        )),
        Err(Ended { why, output, .. }) => {
            tracing::info!(device, why, output, "fsck");
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    fn order(fs_type: &str, read_only: bool, options: &[&str]) -> MountRequest {
        let options = options.iter().map(|text| text.to_string()).collect();
        let (name, device, fs_type) = ("pv".into(), "/dev/x".into(), fs_type.into());
        MountRequest { name, device, fs_type, read_only, options, group: None }
    }

    /// The programs that run for a device where `blkid` prints `found`, and the result. `fails`: the
    /// program that fails, and its exit code.
    fn tried(
        order: &MountRequest,
        found: &str,
        fails: (&str, Option<i32>),
    ) -> (Vec<String>, Result<(), String>) {
        let calls = RefCell::new(vec![]);
        let run = |program: &str, arguments: &[&str]| {
            let shown = format!("{program} {}", arguments.join(" "));
            calls.borrow_mut().push(shown);
            if program == fails.0 {
                let why = fails.1.map_or("executable file not found in $PATH".to_owned(), |code| {
                    format!("exit status {code}")
                });
                return Err(Ended { status: fails.1, why, output: "oh".into() });
            }
            match (program, found) {
                ("blkid", "") => Err(Ended { status: Some(2), ..Ended::default() }),
                ("blkid", found) => Ok(format!("{found}\n")),
                _ => Ok(String::new()),
            }
        };
        let done = format_and_mount(&run, order, Path::new("/mnt"));
        let mut calls = calls.into_inner();
        assert!(calls.remove(0).starts_with("blkid -p -s TYPE -s PTTYPE -o export /dev/x"));
        (calls, done)
    }

    #[test]
    fn only_empty_devices_are_formatted() {
        let check = |order: &MountRequest, found: &str, expected: &[&str]| {
            let (calls, done) = tried(order, found, ("", None));
            assert_eq!(calls, expected);
            assert_eq!(done, Ok(()));
        };
        let plain = order("ext4", false, &[]);
        let mount = "mount -t ext4 -o defaults /dev/x /mnt";
        check(&plain, "", &["mkfs.ext4 -F -m0 /dev/x", mount]);
        check(&plain, "TYPE=ext4", &["fsck -a /dev/x", mount]);
        check(&plain, "PTTYPE=dos", &["fsck -a /dev/x", mount]);
        check(&order("", false, &[]), "", &["mkfs.ext4 -F -m0 /dev/x", mount]);
        check(
            &order("xfs", false, &["noatime"]),
            "",
            &["mkfs.xfs -f /dev/x", "mount -t xfs -o noatime,defaults /dev/x /mnt"],
        );
        check(
            &order("ext4", true, &["noatime"]),
            "TYPE=ext4",
            &["mount -t ext4 -o noatime,ro,defaults /dev/x /mnt"],
        );
        check(
            &order("btrfs", false, &[]),
            "",
            &["mkfs.btrfs /dev/x", "mount -t btrfs -o defaults /dev/x /mnt"],
        );
    }

    #[test]
    fn errors_have_upstreams_texts() {
        let check =
            |order: &MountRequest, found: &str, fails: (&str, Option<i32>), expected: &str| {
                assert_eq!(tried(order, found, fails).1, Err(expected.to_owned()));
            };
        let plain = order("ext4", false, &[]);
        check(
            &order("ext4", true, &[]),
            "",
            ("", None),
            "cannot mount unformatted disk /dev/x as we are manipulating it in read-only mode",
        );
        let not_found = "executable file not found in $PATH";
        check(
            &plain,
            "",
            ("blkid", None),
            &format!("failed to get disk format of disk /dev/x: {not_found}"),
        );
        check(
            &plain,
            "",
            ("mkfs.ext4", None),
            &format!(
                "format of disk \"/dev/x\" failed: type:(\"ext4\") target:(\"/mnt\") options:(\"defaults\") errcode:({not_found}) output:(oh) "
            ),
        );
        check(
            &plain,
            "TYPE=ext4",
            ("fsck", Some(4)),
            "'fsck' found errors on device /dev/x but could not correct them: oh",
        );
        check(
            &plain,
            "TYPE=xfs",
            ("mount", Some(32)),
            "mount failed: exit status 32\nMounting command: mount\nMounting arguments: -t ext4 -o defaults /dev/x /mnt\nOutput: oh\n",
        );
        assert_eq!(tried(&plain, "TYPE=ext4", ("fsck", Some(1))).1, Ok(()));
        assert_eq!(tried(&plain, "TYPE=ext4", ("fsck", None)).1, Ok(()));
    }

    #[test]
    fn paths_are_directories_or_devices() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("file"), "x").expect("written");
        let check = |path: &Path, expected: Result<Kind, String>| {
            assert_eq!(kind(path).map_err(|error| error.to_string()), expected)
        };
        check(dir.path(), Ok(Kind::Directory));
        let file = "only directory and block device are supported";
        check(&dir.path().join("file"), Err(file.into()));
        check(Path::new("/dev/null"), Err(file.into()));
        let none = dir.path().join("none");
        check(&none, Err(format!("path \"{}\" does not exist", none.display())));
    }

    /// A loop device, which is detached when dropped.
    struct Loop(String);

    impl Loop {
        fn of(file: &Path) -> Result<Self, String> {
            let file = file.display().to_string();
            let done = run("losetup", &["--find", "--show", &file]);
            done.map(|text| Self(text.trim().to_owned())).map_err(|ended| ended.output + &ended.why)
        }
    }

    impl Drop for Loop {
        fn drop(&mut self) {
            let _ = run("losetup", &["--detach", &self.0]);
        }
    }

    #[test]
    fn a_device_is_formatted_mounted_and_released() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let disk = dir.path().join("disk");
        std::fs::File::create(&disk).and_then(|file| file.set_len(16 << 20)).expect("a file");
        let device = match Loop::of(&disk) {
            Ok(device) => device,
            Err(why) => return println!("skipped: no loop device: {why}"),
        };
        let root = std::fs::canonicalize(dir.path()).expect("a path");
        let order = |read_only| MountRequest {
            device: device.0.clone().into(),
            ..order("ext4", read_only, &[])
        };
        let pods = ["a", "b"].map(|uid| root.join("pods").join(uid));
        let work = || {
            let text = |failed: VolumeError| match failed {
                VolumeError::Step { step, why } => {
                    format!("{}: {why}", step.trim_start_matches("MountVolume."))
                }
                other => other.to_string(),
            };
            let unformatted = set_up(&root, &pods[0], &order(true)).expect_err("it is empty");
            let first = set_up(&root, &pods[0], &order(false)).map_err(text)?;
            std::fs::write(first.join("x"), "y").map_err(|error| error.to_string())?;
            let second = set_up(&root, &pods[1], &order(true)).map_err(text)?;
            let read = std::fs::read_to_string(second.join("x"));
            let written = std::fs::write(second.join("z"), "").map_err(|error| error.kind());
            Ok::<_, String>((unformatted, read.ok(), written))
        };
        let done = work();
        let mut left = vec![];
        for pod in &pods {
            let undone = mounts::unmount_below_if_there(pod);
            let removed = std::fs::remove_dir_all(pod);
            left.push((undone.is_ok(), removed.is_ok(), mounted(&root).len()));
            release(&root, "pv").expect("released");
        }
        let (unformatted, read, written) = done.expect("it can be mounted");
        assert!(
            unformatted.to_string().contains("error cannot mount unformatted disk /dev/loop"),
            "{unformatted:?}"
        );
        assert_eq!(read.as_deref(), Some("y"));
        assert_eq!(written, Err(io::ErrorKind::ReadOnlyFilesystem));
        // After the first pod has gone, the second one still has it.
        assert_eq!(left, [(true, true, 1), (true, true, 1)]);
        assert!(mounted(&root).is_empty());
    }
}
