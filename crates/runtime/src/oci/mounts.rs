//! What is mounted into a container, and the devices in its `/dev`.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use cri::{ContainerConfig, Error, LinuxContainerSecurityContext, MountPropagation, Result};
use serde_json::{Value, json};

use super::{Request, Users};
use crate::users::Mappings;

/// The kernel's file systems, then the sandbox's files, then what the kubelet says, outer before
/// inner. What the kubelet mounts at a place replaces ours there.
pub(super) fn all(
    request: &Request<'_>,
    security: &LinuxContainerSecurityContext,
) -> Result<Vec<Value>> {
    let mut out = kernel_mounts(security.privileged);
    let pod = request.pod;
    let bind = |source: &Path, target: &str, read_only: bool| {
        let access = if read_only { "ro" } else { "rw" };
        let mount = json!({"destination": target, "type": "bind", "source": source,
               "options": ["rbind", "rprivate", access]});
        mapped(mount, pod.users.as_ref())
    };
    out.push(bind(&pod.shm, "/dev/shm", false));
    if pod.uts.is_some() {
        out.push(bind(&pod.hostname_file, "/etc/hostname", security.readonly_rootfs));
    }
    out.push(bind(&pod.resolv_conf, "/etc/resolv.conf", security.readonly_rootfs));
    let wanted: Vec<&cri::Mount> = request.config.mounts.iter().collect();
    out.retain(|mount| {
        let here = mount["destination"].as_str().unwrap_or_default();
        !wanted.iter().any(|m| clean(&m.container_path) == here)
    });
    let mappings = pod.users.as_ref().map(|users| users.mappings);
    let theirs = wanted.into_iter().map(|mount| {
        let is_mapped = Mappings::of_mount(mount, mappings)?;
        Ok(mapped(kubelet_mount(mount)?, pod.users.as_ref().filter(|_| is_mapped)))
    });
    let mut theirs = theirs.collect::<Result<Vec<_>>>()?;
    out.append(&mut theirs);
    // Stable: equal depths keep their order.
    out.sort_by_key(|m| {
        m["destination"].as_str().map_or(0, |path| Path::new(path).components().count())
    });
    Ok(out)
}

fn kernel_mounts(privileged: bool) -> Vec<Value> {
    let mount = |kind: &str, at: &str, source: &str, options: &[&str]| json!({"destination": at, "type": kind, "source": source, "options": options});
    let access = if privileged { "rw" } else { "ro" };
    vec![
        mount("proc", "/proc", "proc", &["nosuid", "noexec", "nodev"]),
        mount("tmpfs", "/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        mount(
            "devpts",
            "/dev/pts",
            "devpts",
            &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        ),
        mount("mqueue", "/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        mount("sysfs", "/sys", "sysfs", &["nosuid", "noexec", "nodev", access]),
        mount(
            "cgroup",
            "/sys/fs/cgroup",
            "cgroup",
            &["nosuid", "noexec", "nodev", "relatime", access],
        ),
    ]
}

/// The files of the mount are to belong to these users.
fn mapped(mut mount: Value, users: Option<&Users>) -> Value {
    if let Some(users) = users {
        mount["uidMappings"] = users.mappings.uids.section();
        mount["gidMappings"] = users.mappings.gids.section();
    }
    mount
}

fn kubelet_mount(mount: &cri::Mount) -> Result<Value> {
    if !mount.container_path.starts_with('/') {
        return Err(Error::InvalidArgument(format!(
            "mount path {:?} is not absolute",
            mount.container_path
        )));
    }
    // Upstream: a missing source is made, as a directory.
    if !Path::new(&mount.host_path).exists() {
        fs::create_dir_all(&mount.host_path).map_err(|error| {
            Error::Internal(format!("failed to mkdir {:?}: {error}", mount.host_path))
        })?;
    }
    let propagation = match mount.propagation() {
        MountPropagation::Private => "rprivate",
        MountPropagation::HostToContainer => "rslave",
        MountPropagation::Bidirectional => "rshared",
    };
    let access = match (mount.readonly, mount.recursive_read_only) {
        (true, true) => "rro",
        (true, false) => "ro",
        (false, true) => {
            return Err(Error::InvalidArgument("recursive_read_only requires readonly".into()));
        }
        (false, false) => "rw",
    };
    Ok(json!({
        "destination": clean(&mount.container_path),
        "type": "bind",
        "source": mount.host_path,
        "options": ["rbind", propagation, access],
    }))
}

/// `/a//b/` → `/a/b`.
fn clean(path: &str) -> String {
    let parts: Vec<&str> =
        path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    format!("/{}", parts.join("/"))
}

/// How mounts travel between the container's tree and ours: as far as any of its mounts needs.
pub(super) fn root_propagation(config: &ContainerConfig) -> &'static str {
    let wanted = |kind| config.mounts.iter().any(|mount| mount.propagation() == kind);
    if wanted(MountPropagation::Bidirectional) { "shared" } else { "slave" }
}

/// The device at `host`, to be made at `inside`.
pub(super) fn device(host: &Path, inside: &Path) -> io::Result<Value> {
    let about = fs::metadata(host)?;
    let kind = match about.file_type() {
        kind if kind.is_block_device() => "b",
        kind if kind.is_char_device() => "c",
        _ => return Err(io::Error::other("not a device")),
    };
    Ok(json!({
        "path": inside,
        "type": kind,
        "major": libc::major(about.rdev()),
        "minor": libc::minor(about.rdev()),
        "fileMode": about.mode() & 0o777,
        "uid": about.uid(),
        "gid": about.gid(),
    }))
}

/// For privileged containers: the host's devices, but for those that are each container's own.
pub(super) fn host_devices() -> Vec<PathBuf> {
    let own =
        ["pts", "shm", "mqueue", "fd", "console", "ptmx", "stdin", "stdout", "stderr", "core"];
    let made = ["null", "zero", "full", "tty", "urandom", "random"];
    let mut found = Vec::new();
    let mut left = vec![PathBuf::from("/dev")];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if own.contains(&name.as_ref()) || made.contains(&name.as_ref()) {
                continue;
            }
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_dir() && left.len() < 64 {
                left.push(entry.path());
            } else if kind.is_char_device() || kind.is_block_device() {
                found.push(entry.path());
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_have_the_options_that_libcontainer_knows() {
        let check = |mount: cri::Mount, expected: Option<&[&str]>| {
            let mount =
                cri::Mount { container_path: "/data/".into(), host_path: "/tmp".into(), ..mount };
            let got = kubelet_mount(&mount).ok();
            assert_eq!(got.as_ref().map(|m| m["options"].clone()), expected.map(|o| json!(o)));
            assert!(got.is_none_or(|m| m["destination"] == "/data"));
        };
        let with = |propagation: MountPropagation, readonly, recursive_read_only| cri::Mount {
            propagation: propagation as i32,
            readonly,
            recursive_read_only,
            ..Default::default()
        };
        use MountPropagation::*;
        check(with(Private, false, false), Some(&["rbind", "rprivate", "rw"]));
        check(with(HostToContainer, true, false), Some(&["rbind", "rslave", "ro"]));
        check(with(Bidirectional, true, true), Some(&["rbind", "rshared", "rro"]));
        check(with(Private, false, true), None);
    }
}
