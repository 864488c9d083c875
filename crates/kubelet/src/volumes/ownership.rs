//! Applies `fsGroup` to a volume: the group owns its files and may read and write them.
//!
//! In: a directory, a group. Out: everything in it belongs to the group.
//! Invariants: links are never followed; the root is changed last, so that an interrupted walk leaves a
//! mismatch.
//! Upstream: `pkg/volume/volume_linux.go`.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown};
use std::path::Path;

const READ_WRITE: u32 = 0o660;
const SEARCH: u32 = 0o110;
const SET_GID: u32 = 0o2000;

/// Gives the volume to the group; with `only_on_mismatch`, only if its root does not match already.
pub fn give(root: &Path, group: u32, only_on_mismatch: bool) -> io::Result<()> {
    if only_on_mismatch && is_given(root, group) {
        return Ok(());
    }
    walk(root, group)
}

fn is_given(root: &Path, group: u32) -> bool {
    const WANTED: u32 = READ_WRITE | SEARCH | SET_GID;
    fs::metadata(root).is_ok_and(|about| {
        about.is_dir() && about.gid() == group && about.mode() & WANTED == WANTED
    })
}

fn walk(path: &Path, group: u32) -> io::Result<()> {
    let about = fs::symlink_metadata(path)?;
    if about.is_dir() {
        for entry in fs::read_dir(path)? {
            match walk(&entry?.path(), group) {
                // Other writers may remove files meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                done => done?,
            }
        }
    }
    // Some file systems have no owners: like upstream, continue.
    if let Err(error) = lchown(path, None, Some(group)) {
        tracing::warn!(path = %path.display(), %error, "failed to change the file's group");
    }
    if about.is_symlink() {
        return Ok(());
    }
    let more = if about.is_dir() { READ_WRITE | SEARCH | SET_GID } else { READ_WRITE };
    let mode = Permissions::from_mode((about.mode() & 0o7777) | more);
    if let Err(error) = fs::set_permissions(path, mode) {
        tracing::warn!(path = %path.display(), %error, "failed to change the file's mode");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_files_become_the_groups() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().join("volume");
        fs::create_dir_all(root.join("sub")).expect("made");
        fs::write(root.join("sub/file"), "x").expect("written");
        fs::write(dir.path().join("outside"), "x").expect("written");
        std::os::unix::fs::symlink("../outside", root.join("link")).expect("a link");
        for path in ["outside", "volume/sub/file"] {
            let mode = Permissions::from_mode(0o600);
            fs::set_permissions(dir.path().join(path), mode).expect("set");
        }
        let group = fs::metadata(&root).expect("a directory").gid();
        assert!(!is_given(&root, group));
        give(&root, group, true).expect("given");
        assert!(is_given(&root, group));
        let mode = |path: &str| fs::metadata(dir.path().join(path)).expect(path).mode() & 0o7777;
        assert_eq!(mode("volume/sub/file"), 0o660);
        assert_eq!(mode("volume/sub") & 0o2770, 0o2770);
        assert_eq!(mode("outside"), 0o600, "links are not followed");

        // If the root matches, the files inside are skipped when the policy says so.
        let file = root.join("sub/file");
        fs::set_permissions(&file, Permissions::from_mode(0o600)).expect("set");
        give(&root, group, true).expect("given");
        assert_eq!(mode("volume/sub/file"), 0o600);
        give(&root, group, false).expect("given");
        assert_eq!(mode("volume/sub/file"), 0o660);
    }
}
