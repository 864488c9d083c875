//! Writes a set of files into a volume atomically: readers see all old files or all new ones.
//!
//! ```text
//! <dir>/..2026_11_21_14_00_00.123456789/config.yaml     the files
//! <dir>/..data          -> ..2026_11_21_14_00_00.123456789   swapped by rename
//! <dir>/config.yaml     -> ..data/config.yaml           what users open
//! ```
//!
//! In: relative paths with content and mode. Out: whether anything changed.
//! Invariants: an unchanged payload touches nothing; paths never leave the directory.
//! Upstream: `pkg/volume/util/atomic_writer.go`; users rely on the names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Component, Path};

const DATA: &str = "..data";
const DATA_NEXT: &str = "..data_tmp";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    pub bytes: Vec<u8>,
    pub mode: u32,
    /// The owner, if it is not root (tokens of a pod whose containers all run as one user).
    pub owner: Option<u32>,
}

pub type Payload = BTreeMap<String, File>;

/// True for a path that stays inside the volume.
pub fn is_safe(path: &str) -> bool {
    !path.is_empty()
        && path.len() < 4096
        && !path.starts_with("..")
        && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}

/// Makes `dir` contain exactly `payload`; true if it wrote anything.
/// `group` owns the files and may read them.
pub fn write(dir: &Path, payload: &Payload, group: Option<u32>) -> io::Result<bool> {
    if let Some(bad) = payload.keys().find(|path| !is_safe(path)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("invalid path {bad:?}")));
    }
    let old = fs::read_link(dir.join(DATA)).ok();
    if let Some(old) = &old
        && holds(&dir.join(old), payload)
    {
        // The links may be missing after a crash between the swap and their creation.
        link_users(dir, payload)?;
        return Ok(false);
    }
    let fresh = new_directory(dir)?;
    for (path, file) in payload {
        write_file(&dir.join(&fresh).join(path), file, group)?;
    }
    if let Some(group) = group {
        own_directories(&dir.join(&fresh), group)?;
    }
    let next = dir.join(DATA_NEXT);
    let _ = fs::remove_file(&next);
    symlink(&fresh, &next)?;
    fs::rename(&next, dir.join(DATA))?;
    link_users(dir, payload)?;
    remove_stale(dir, payload, &fresh)?;
    Ok(true)
}

/// Whether files were ever written into `dir`.
pub fn is_filled(dir: &Path) -> bool {
    dir.join(DATA).exists()
}

fn new_directory(dir: &Path) -> io::Result<String> {
    let now = base::clock::now();
    let stamp = now.strftime("%Y_%m_%d_%H_%M_%S").to_string();
    for _ in 0..16 {
        let name = format!("..{stamp}.{:010}", base::rng::below(10_000_000_000));
        match fs::create_dir(dir.join(&name)) {
            Ok(()) => {
                fs::set_permissions(dir.join(&name), fs::Permissions::from_mode(0o755))?;
                return Ok(name);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::new(io::ErrorKind::AlreadyExists, "no free name for a data directory"))
}

fn write_file(path: &Path, file: &File, group: Option<u32>) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(path, &file.bytes)?;
    if file.owner.is_some() || group.is_some() {
        chown(path, file.owner, group)?;
    }
    // Upstream: the owning group may read.
    let mode = if group.is_some() { file.mode | 0o440 } else { file.mode };
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

fn own_directories(dir: &Path, group: u32) -> io::Result<()> {
    chown(dir, None, Some(group))?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o2775))?;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            own_directories(&entry.path(), group)?;
        }
    }
    Ok(())
}

/// True if `dir` has exactly these files with these bytes and modes.
fn holds(dir: &Path, payload: &Payload) -> bool {
    let mut found = BTreeSet::new();
    if collect(dir, "", &mut found).is_err() || found.len() != payload.len() {
        return false;
    }
    payload.iter().all(|(path, file)| {
        let path_on_disk = dir.join(path);
        let same_mode = fs::metadata(&path_on_disk).is_ok_and(|meta| {
            meta.permissions().mode() & 0o777 & !0o440 == file.mode & 0o777 & !0o440
        });
        found.contains(path) && same_mode && fs::read(&path_on_disk).is_ok_and(|b| b == file.bytes)
    })
}

fn collect(dir: &Path, prefix: &str, into: &mut BTreeSet<String>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            collect(&entry.path(), &format!("{name}/"), into)?;
        } else {
            into.insert(name);
        }
    }
    Ok(())
}

/// The top-level names of the payload: each becomes a link.
fn tops(payload: &Payload) -> BTreeSet<&str> {
    payload.keys().map(|path| path.split('/').next().unwrap_or(path)).collect()
}

fn link_users(dir: &Path, payload: &Payload) -> io::Result<()> {
    for top in tops(payload) {
        let link = dir.join(top);
        if fs::read_link(&link).is_err() {
            symlink(Path::new(DATA).join(top), &link)?;
        }
    }
    Ok(())
}

fn remove_stale(dir: &Path, payload: &Payload, current: &str) -> io::Result<()> {
    let wanted = tops(payload);
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name == DATA || name == current || wanted.contains(name.as_ref()) {
            continue;
        }
        if entry.file_type()?.is_dir() {
            if name.starts_with("..") {
                fs::remove_dir_all(entry.path())?;
            }
        } else if entry.file_type()?.is_symlink() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload(files: &[(&str, &str)]) -> Payload {
        let file = |text: &str| File { bytes: text.as_bytes().to_vec(), mode: 0o644, owner: None };
        files.iter().map(|(path, text)| (path.to_string(), file(text))).collect()
    }

    fn listing(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .expect("a directory")
            .map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned())
            .filter(|name| !name.starts_with("..2"))
            .collect();
        names.sort();
        names
    }

    #[test]
    fn contents_are_swapped_atomically() {
        let dir = tempfile::tempdir().expect("a directory");
        let dir = dir.path();
        let first = payload(&[("a", "1"), ("sub/b", "2")]);
        assert!(write(dir, &first, None).expect("written"));
        assert_eq!(listing(dir), ["..data", "a", "sub"]);
        assert_eq!(fs::read_to_string(dir.join("sub/b")).expect("a file"), "2");
        assert!(!write(dir, &first, None).expect("unchanged"));

        let held = fs::read_link(dir.join(DATA)).expect("a link");
        assert!(write(dir, &payload(&[("a", "3")]), None).expect("written"));
        assert_eq!(listing(dir), ["..data", "a"]);
        assert_eq!(fs::read_to_string(dir.join("a")).expect("a file"), "3");
        assert!(!dir.join(held).exists(), "the old directory is gone");
    }

    #[test]
    fn paths_stay_inside_the_volume() {
        for bad in ["", "/etc/passwd", "../x", "a/../../b", "..data", "./a"] {
            let dir = tempfile::tempdir().expect("a directory");
            assert!(!is_safe(bad) || bad == "./a", "{bad}");
            if !is_safe(bad) {
                assert!(write(dir.path(), &payload(&[(bad, "x")]), None).is_err(), "{bad}");
            }
        }
    }
}
