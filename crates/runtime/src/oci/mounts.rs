//! The mounts of a container, and the devices in its `/dev`.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use cri::{ContainerConfig, Error, LinuxContainerSecurityContext, MountPropagation, Result};
use serde_json::{Value, json};

use super::{Request, Users};
use crate::users::Mappings;

/// The cgroup mount point in a container.
pub(super) const CGROUPS: &str = "/sys/fs/cgroup";

/// The kernel's file systems, then the sandbox's files, then the kubelet's mounts, outer before
/// inner. A kubelet mount replaces the default one at the same destination.
pub(super) fn all(
    request: &Request<'_>,
    security: &LinuxContainerSecurityContext,
) -> Result<Vec<Value>> {
    let mut out = kernel_mounts(request, security.privileged);
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
    // The sort is stable: equal depths keep their order.
    out.sort_by_key(|m| {
        m["destination"].as_str().map_or(0, |path| Path::new(path).components().count())
    });
    Ok(out)
}

fn kernel_mounts(request: &Request<'_>, privileged: bool) -> Vec<Value> {
    let mount = |kind: &str, at: &str, source: &str, options: &[&str]| json!({"destination": at, "type": kind, "source": source, "options": options});
    let access = if privileged { "rw" } else { "ro" };
    let mut all = vec![
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
    ];
    if request.cgroup_mounts.is_empty() {
        let options = ["nosuid", "noexec", "nodev", "relatime", access];
        all.push(mount("cgroup", CGROUPS, "cgroup", &options));
    } else if shows_hierarchies(request) {
        // Bind mounts of our own, because libcontainer always mounts version 1 writable.
        all.push(mount("tmpfs", CGROUPS, "tmpfs", &["nosuid", "noexec", "nodev", "mode=755"]));
        for (source, names) in &request.cgroup_mounts {
            all.extend(names.iter().map(|name| {
                json!({"destination": format!("{CGROUPS}/{name}"), "type": "bind", "source": source,
                    "options": ["bind", "rprivate", "nosuid", "noexec", "nodev", access]})
            }));
        }
    }
    all
}

/// Whether to mount version 1 hierarchies: there are some, and the pod mounts nothing else there.
pub(super) fn shows_hierarchies(request: &Request<'_>) -> bool {
    let wanted = request.config.mounts.iter().any(|mount| clean(&mount.container_path) == CGROUPS);
    !request.cgroup_mounts.is_empty() && !wanted
}

/// A file of `/proc` that a pod may replace. Upstream: runc's `checkProcMount`.
pub(crate) fn is_shown_file(path: &str) -> bool {
    const FILES: [&str; 11] = [
        "cpuinfo",
        "diskstats",
        "loadavg",
        "meminfo",
        "net/dev",
        "slabinfo",
        "stat",
        "swaps",
        "sys/crypto/fips_enabled",
        "sys/kernel/ns_last_pid",
        "uptime",
    ];
    path.strip_prefix("/proc/").is_some_and(|file| FILES.contains(&file))
}

/// Checks the destination by its name only; the shim checks the real location of the mount.
fn check_destination(destination: &str, source: &str) -> Result<()> {
    let refused = match destination.strip_prefix("/proc") {
        Some("") => !is_proc(Path::new(source)),
        Some(below) => below.starts_with('/') && !is_shown_file(destination),
        None => false,
    };
    match refused {
        true => Err(Error::InvalidArgument(format!(
            "{destination:?} cannot be mounted because it is inside /proc"
        ))),
        false => Ok(()),
    }
}

fn is_proc(source: &Path) -> bool {
    nix::sys::statfs::statfs(source)
        .is_ok_and(|stat| stat.filesystem_type() == nix::sys::statfs::PROC_SUPER_MAGIC)
}

/// Adds the pod's id mapping to a mount.
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
    check_destination(&clean(&mount.container_path), &mount.host_path)?;
    // Upstream: a missing source is created as a directory.
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
        // Mounts that appear later would be writable.
        (true, true) if mount.propagation() != MountPropagation::Private => {
            return Err(Error::InvalidArgument(
                "recursive_read_only requires private propagation".into(),
            ));
        }
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

/// Normalizes a path: `/a//b/` and `/a/x/../b` → `/a/b`.
fn clean(path: &str) -> String {
    let mut parts: Vec<&str> = vec![];
    for part in path.split('/').filter(|part| !part.is_empty() && *part != ".") {
        match part {
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    format!("/{}", parts.join("/"))
}

/// The propagation of the container's root: the widest that one of its mounts needs.
pub(super) fn root_propagation(config: &ContainerConfig) -> &'static str {
    let wanted = |kind| config.mounts.iter().any(|mount| mount.propagation() == kind);
    if wanted(MountPropagation::Bidirectional) { "shared" } else { "slave" }
}

/// The device at `host`, to be created at `inside`.
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

/// For privileged containers: the host's devices, except those that each container has by itself.
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
        check(with(Bidirectional, true, false), Some(&["rbind", "rshared", "ro"]));
        check(with(Private, true, true), Some(&["rbind", "rprivate", "rro"]));
        check(with(HostToContainer, true, true), None);
        check(with(Bidirectional, true, true), None);
        check(with(Private, false, true), None);
    }

    #[test]
    fn mounts_cannot_cover_the_kernels_sysctls() {
        let check = |at: &str, source: &str, fine: bool| {
            let mount = cri::Mount {
                container_path: at.into(),
                host_path: source.into(),
                ..Default::default()
            };
            assert_eq!(kubelet_mount(&mount).is_ok(), fine, "{at} {source}");
        };
        check("/proc/sys/kernel", "/tmp", false);
        check("/proc/../proc//sys/./kernel/", "/tmp", false);
        check("/proc/self/attr/exec", "/tmp", false);
        check("/proc", "/tmp", false);
        check("/proc", "/proc", true);
        check("/host/proc", "/proc", true);
        check("/processes", "/tmp", true);
        check("/proc/meminfo", "/tmp", true);
        check("/proc/net/dev", "/tmp", true);
        check("/proc/meminfo/x", "/tmp", false);
    }
}
