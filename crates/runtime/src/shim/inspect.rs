//! Checks and corrects the mounts of a container that is created and not yet started.
//!
//! libcontainer and the kernel resolve links in destinations, so only the finished mount table
//! shows where a mount really is. libcontainer also ignores the propagation of single mounts, so
//! that a private mount would see mounts of others.
//!
//! In: the configuration, and the pid of the container's init, which waits for its start. Out:
//! mounts with the right propagation, or an error.
//! Invariant: no mount covers a part of the container's `/proc`, except the few files that programs
//! like lxcfs replace. Writes to the other files, by this program or by others, reach the kernel.
//! Upstream: runc's `checkProcMount` and `mountPropagate`.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use libcontainer::oci_spec::runtime::Spec;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns};

use crate::oci::is_shown_file;

/// Checks the paths that libcontainer follows in the node's file system, before it changes the root.
pub(super) fn check_root(spec: &Spec) -> io::Result<()> {
    let Some(root) = spec.root().as_ref() else { return Ok(()) };
    match fs::symlink_metadata(root.path().join("dev")) {
        Ok(about) if !about.is_dir() => {
            Err(io::Error::other("the image's /dev is not a directory"))
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// `travels`: the propagation of the mounts is not set yet.
pub(super) fn settle(spec: &Spec, init: i32, travels: bool) -> io::Result<()> {
    let table = fs::read_to_string(format!("/proc/{init}/mountinfo"))?;
    check_proc(spec, &table)?;
    let changes = if travels { changes(spec) } else { vec![] };
    if changes.is_empty() {
        return Ok(());
    }
    let ours = File::open("/proc/self/ns/mnt")?;
    setns(File::open(format!("/proc/{init}/ns/mnt"))?, CloneFlags::CLONE_NEWNS)?;
    for (target, flags) in changes {
        let none = None::<&str>;
        if let Err(errno) = mount(none, target, none, flags, none) {
            // For example, a link led the mount to another place.
            eprintln!("{}: {}: {errno}", super::SHIM_NAME, target.display());
        }
    }
    Ok(setns(ours, CloneFlags::CLONE_NEWNS)?)
}

/// `table`: the container's mountinfo.
fn check_proc(spec: &Spec, table: &str) -> io::Result<()> {
    let linux = spec.linux().as_ref();
    let masked = linux.and_then(|linux| linux.masked_paths().clone()).unwrap_or_default();
    let read_only = linux.and_then(|linux| linux.readonly_paths().clone()).unwrap_or_default();
    let mounts: Vec<(&str, &str, &str)> = table.lines().filter_map(of_line).collect();
    // The devices of the file systems mounted at /proc itself.
    let devices: Vec<&str> =
        mounts.iter().filter(|(_, point, _)| *point == "/proc").map(|(id, ..)| *id).collect();
    for (device, point, kind) in &mounts {
        let here = |paths: &[String]| paths.iter().any(|path| path == point);
        let fine = match point.strip_prefix("/proc") {
            Some("") => *kind == "proc",
            Some(below) if below.starts_with('/') => {
                is_shown_file(point)
                    || here(&masked)
                    || (here(&read_only) && devices.contains(device))
            }
            _ => true,
        };
        if !fine {
            let text = format!("{point:?} cannot be mounted because it is inside /proc");
            return Err(io::Error::other(text));
        }
    }
    Ok(())
}

/// Device, mount point, file system type.
fn of_line(line: &str) -> Option<(&str, &str, &str)> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(2);
    let (device, point) = (left.next()?, left.nth(1)?);
    Some((device, point, right.split(' ').next()?))
}

/// The mounts whose propagation differs from the root's.
fn changes(spec: &Spec) -> Vec<(&Path, MsFlags)> {
    let shared = spec.linux().as_ref().and_then(|linux| linux.rootfs_propagation().as_deref())
        == Some("shared");
    let mounts = spec.mounts().iter().flatten();
    mounts
        .filter_map(|mount| {
            let has = |name: &str| mount.options().iter().flatten().any(|option| option == name);
            let flags = match (has("rprivate"), has("rslave")) {
                (true, _) => MsFlags::MS_PRIVATE,
                (_, true) if shared => MsFlags::MS_SLAVE,
                _ => return None,
            };
            Some((mount.destination().as_path(), flags | MsFlags::MS_REC))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(mounts: serde_json::Value, propagation: &str) -> Spec {
        serde_json::from_value(serde_json::json!({
            "ociVersion": "1.2.0", "root": {"path": "/r"}, "mounts": mounts,
            "linux": {"rootfsPropagation": propagation,
                "maskedPaths": ["/proc/kcore", "/proc/scsi"], "readonlyPaths": ["/proc/sys"]},
        }))
        .expect("a spec")
    }

    #[test]
    fn mounts_cannot_cover_proc() {
        let usual = "\
            10 1 0:50 / / rw - overlay overlay rw\n\
            11 10 0:51 / /proc rw,nosuid - proc proc rw\n\
            12 11 0:51 /sys /proc/sys ro - proc proc rw\n\
            13 11 0:5 /null /proc/kcore rw - devtmpfs devtmpfs rw\n\
            14 11 0:60 / /proc/scsi ro - tmpfs tmpfs ro\n\
            15 10 0:61 / /processes rw - tmpfs tmpfs rw\n";
        let check = |more: &str, fine: bool| {
            let table = format!("{usual}{more}");
            let got = check_proc(&spec(serde_json::json!([]), "slave"), &table);
            assert_eq!(got.is_ok(), fine, "{more} {got:?}");
        };
        check("", true);
        check("20 11 8:1 /lxcfs/cpuinfo /proc/cpuinfo rw - ext4 /dev/sda rw\n", true);
        check("20 11 8:1 /d /proc/sys/kernel rw - ext4 /dev/sda rw\n", false);
        check("20 11 8:1 /d /proc/sys rw - ext4 /dev/sda rw\n", false);
        check("20 11 8:1 /d /proc/self/attr rw - ext4 /dev/sda rw\n", false);
        // The node's own procfs, mounted through a volume.
        check("20 11 0:20 /sys /proc/sys rw - proc proc rw\n", false);
        check("20 11 8:1 /d /proc rw - ext4 /dev/sda rw\n", false);
    }

    #[test]
    fn mounts_have_their_own_propagation() {
        let mounts = serde_json::json!([
            {"destination": "/a", "type": "bind", "source": "/x", "options": ["rbind", "rprivate"]},
            {"destination": "/b", "type": "bind", "source": "/x", "options": ["rbind", "rslave"]},
            {"destination": "/c", "type": "bind", "source": "/x", "options": ["rbind", "rshared"]},
            {"destination": "/d", "type": "tmpfs", "source": "tmpfs"},
        ]);
        let (private, slave) = (MsFlags::MS_PRIVATE, MsFlags::MS_SLAVE);
        let check = |propagation: &str, expected: &[(&str, MsFlags)]| {
            let expected: Vec<_> =
                expected.iter().map(|(at, f)| (Path::new(*at), *f | MsFlags::MS_REC)).collect();
            assert_eq!(changes(&spec(mounts.clone(), propagation)), expected);
        };
        check("slave", &[("/a", private)]);
        check("shared", &[("/a", private), ("/b", slave)]);
    }

    #[test]
    fn dev_must_not_be_a_link() {
        let root = tempfile::tempdir().expect("a directory");
        let text = serde_json::json!({"ociVersion": "1.2.0", "root": {"path": root.path()}});
        let spec: Spec = serde_json::from_value(text).expect("a spec");
        check_root(&spec).expect("none is fine");
        let dev = root.path().join("dev");
        fs::create_dir(&dev).expect("made");
        check_root(&spec).expect("a directory is fine");
        fs::remove_dir(&dev).expect("removed");
        std::os::unix::fs::symlink("/etc", &dev).expect("linked");
        assert!(check_root(&spec).is_err());
    }
}
