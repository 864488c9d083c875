//! A directory that lives as long as its pod, on disk or in memory.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{EmptyDirVolumeSource, Pod};

use super::files::{fs_group, mode_of_root};
use super::mounts;
use super::plugin::{Host, Mounted, Request, Source, VolumeError, VolumePlugin};
use crate::resources;

pub struct EmptyDirPlugin;

#[async_trait]
impl VolumePlugin for EmptyDirPlugin {
    fn name(&self) -> &'static str {
        "empty-dir"
    }

    fn supports(&self, source: &Source<'_>) -> bool {
        source.volume.empty_dir.is_some()
    }

    fn is_local_storage(&self) -> bool {
        true
    }

    async fn set_up(&self, host: &Host, request: &Request<'_>) -> Result<Mounted, VolumeError> {
        let volume = request.source.volume;
        let path = request.dir.volume(self.name(), &volume.name);
        let source = volume.empty_dir.clone().unwrap_or_default();
        let (group, tmpfs) = (fs_group(request.pod), host.may_mount);
        let huge = huge_pages(request.pod, source.medium.as_deref().unwrap_or_default())?;
        tokio::task::spawn_blocking(move || empty_dir(&path, group, &source, tmpfs, huge)).await?
    }
}

/// The size of the pages of a medium `HugePages` or `HugePages-2Mi`, as hugetlbfs expects it.
/// Upstream: getPageSizeMountOption.
fn huge_pages(pod: &Pod, medium: &str) -> Result<Option<String>, VolumeError> {
    let Some(rest) = medium.strip_prefix("HugePages") else { return Ok(None) };
    let containers = pod
        .spec
        .iter()
        .flat_map(|spec| spec.containers.iter().chain(spec.init_containers.iter().flatten()));
    let requests = containers.flat_map(|one| {
        let all = one.resources.clone().unwrap_or_default();
        let both = all.requests.into_iter().flatten().chain(all.limits.into_iter().flatten());
        both.filter_map(|(name, _)| Some(name.strip_prefix("hugepages-")?.to_owned()))
    });
    let sizes: std::collections::BTreeSet<String> = requests.collect();
    let wrong = |text: &str| VolumeError::io("get the page size")(std::io::Error::other(text));
    match (rest.strip_prefix('-'), sizes.iter().collect::<Vec<_>>().as_slice()) {
        (_, []) => Err(wrong("hugePages storage requires huge pages in the containers' requests")),
        (None, [size]) => Ok(Some(trimmed(size))),
        (None, _) => Err(wrong(
            "medium HugePages can only be used if container requests use only one huge page size",
        )),
        (Some(size), _) if sizes.contains(size) => Ok(Some(trimmed(size))),
        (Some(_), _) => Err(wrong("medium's page size is not among the containers' requests")),
    }
}

/// `2Mi` in the form of mount options: `2M`.
fn trimmed(size: &str) -> String {
    size.trim_end_matches('i').to_owned()
}

fn empty_dir(
    path: &Path,
    group: Option<u32>,
    source: &EmptyDirVolumeSource,
    tmpfs: bool,
    huge: Option<String>,
) -> Result<Mounted, VolumeError> {
    let bits = mode_of_root(group);
    if !path.is_dir() {
        make_open(path, bits, group)?;
    }
    if source.medium.as_deref() == Some("Memory") && tmpfs {
        let size = source.size_limit.as_ref().map(resources::units).filter(|size| *size > 0);
        let size = size.map(|size| size as u64);
        mounts::tmpfs(path, size, bits, group).map_err(VolumeError::io("mount tmpfs"))?;
    }
    if let Some(page_size) = huge.filter(|_| tmpfs) {
        mounts::hugetlbfs(path, &page_size, bits, group)
            .map_err(VolumeError::io("mount hugetlbfs"))?;
    }
    Ok(Mounted::directory(path.to_path_buf(), false))
}

/// Creates a directory with its final mode and owner. Containers may change both afterwards, because the
/// directory is the root of their mount; such changes must stay.
fn make_open(path: &Path, bits: u32, group: Option<u32>) -> Result<(), VolumeError> {
    // No volume has this name: volume names are DNS labels.
    let mut name = std::ffi::OsString::from(".new-");
    name.push(path.file_name().unwrap_or_default());
    let fresh = path.with_file_name(name);
    fs::create_dir_all(&fresh).map_err(VolumeError::io("mkdir"))?;
    if group.is_some() {
        chown(&fresh, None, group).map_err(VolumeError::io("chown"))?;
    }
    fs::set_permissions(&fresh, fs::Permissions::from_mode(bits))
        .map_err(VolumeError::io("chmod"))?;
    fs::rename(&fresh, path).map_err(VolumeError::io("rename"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::os::unix::fs::MetadataExt;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("it is there").permissions().mode() & 0o7777
    }

    #[test]
    fn huge_pages_have_the_size_of_the_requests() {
        let pod = |sizes: &[&str]| -> Pod {
            let limits: serde_json::Map<_, _> =
                sizes.iter().map(|size| (format!("hugepages-{size}"), json!("64Mi"))).collect();
            let one = json!({"name": "a", "resources": {"limits": limits}});
            serde_json::from_value(json!({"spec": {"containers": [one]}})).expect("a pod")
        };
        let check = |sizes: &[&str], medium: &str, expected: Option<Option<&str>>| {
            let got = huge_pages(&pod(sizes), medium).ok();
            assert_eq!(got, expected.map(|size| size.map(str::to_owned)), "{sizes:?} {medium}");
        };
        check(&[], "Memory", Some(None));
        check(&["2Mi"], "HugePages", Some(Some("2M")));
        check(&["2Mi", "1Gi"], "HugePages", None);
        check(&["2Mi", "1Gi"], "HugePages-1Gi", Some(Some("1G")));
        check(&["2Mi"], "HugePages-1Gi", None);
        check(&[], "HugePages", None);
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
            let source = EmptyDirVolumeSource::default();
            let ready = empty_dir(&path, fs_group(pod), &source, false, None);
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
            empty_dir(&path, fs_group(&pod), &source, true, None)
                .map_err(|error| error.to_string())?;
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
}
