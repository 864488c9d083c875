//! Small files, written atomically.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Replaces `path` in one step; a reader sees the old or the new content. Does not sync: the
/// content describes processes, which no power failure survives. After a power failure the file may
/// be empty, which readers treat as missing.
pub(crate) fn write_atomic(path: &Path, content: &[u8]) -> io::Result<()> {
    replace(path, content, false)
}

/// Like [`write_atomic`], but synced to the disk.
pub(crate) fn write_durable(path: &Path, content: &[u8]) -> io::Result<()> {
    replace(path, content, true)
}

fn replace(path: &Path, content: &[u8], durable: bool) -> io::Result<()> {
    // Skips the write if nothing changes: a full disk must not prevent a node's start.
    if fs::read(path).is_ok_and(|now| now == content) {
        return Ok(());
    }
    let mut partial = path.as_os_str().to_owned();
    // Concurrent writers use different temporary files.
    partial.push(format!(".{}", base::rng::alphanumeric(8)));
    let written = File::create(&partial).and_then(|mut file| {
        file.write_all(content)?;
        if durable {
            file.sync_data()?;
        }
        fs::rename(&partial, path)
    });
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    written
}

pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    write_atomic(path, &serde_json::to_vec(value)?)
}

/// `None` when the file is missing or empty.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let Some(bytes) = read(path)?.filter(|bytes| !bytes.is_empty()) else { return Ok(None) };
    let parsed = serde_json::from_slice(&bytes);
    parsed.map(Some).map_err(|error| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", path.display()))
    })
}

pub(crate) fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes the directory tree; a missing one is no error.
pub(crate) fn remove_tree(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Resolves `path` below `root`; links that lead out of `root` are an error.
pub(crate) fn below(root: &Path, path: &str) -> io::Result<PathBuf> {
    let root = root.canonicalize()?;
    let place = root.join(path.trim_start_matches('/')).canonicalize()?;
    if !place.starts_with(&root) {
        let text = format!("{path:?} leads out of the volume");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(place)
}

/// Unmounts until nothing is mounted at `path`; a path that is not a mount point is no error.
pub(crate) fn unmount(path: &Path) -> io::Result<()> {
    use nix::errno::Errno;
    use nix::mount::{MntFlags, umount2};
    // Mounts may be stacked. The limit ends the loop if the kernel never returns EINVAL.
    for _ in 0..64 {
        match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::EINVAL | Errno::ENOENT) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}
