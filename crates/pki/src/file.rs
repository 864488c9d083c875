//! Files that hold secrets: directories 0700, files 0600 (or as asked), replaced by rename.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use crate::Error;

pub(crate) fn failed(path: &Path) -> impl FnOnce(std::io::Error) -> Error + '_ {
    move |source| Error::File { path: path.display().to_string(), source }
}

/// Makes a directory (and its parents) that only its owner enters.
pub(crate) fn private_dir(path: &Path) -> Result<(), Error> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed(path))
}

/// The file's text, `None` if there is no such file.
pub(crate) fn read(path: &Path) -> Result<Option<String>, Error> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(path)(error)),
    }
}

/// Replaces `path` with `content` and `mode` (0600 for secrets): readers see the old file or the
/// new one, never a part.
pub fn write_private(path: &Path, content: &[u8], mode: u32) -> Result<(), Error> {
    replace(path, content, mode, fs::File::sync_data)
}

/// The same (0600) for what is made anew when it cannot be read: nothing waits for the disk. After a
/// loss of power the file may be empty or full of zeros; a crash of the process alone changes
/// nothing about the above.
pub(crate) fn write_replaceable(path: &Path, content: &[u8]) -> Result<(), Error> {
    replace(path, content, 0o600, |_| Ok(()))
}

/// The text of such a file, `None` also for what is no text.
pub(crate) fn read_replaceable(path: &Path) -> Result<Option<String>, Error> {
    match read(path) {
        Err(Error::File { source, .. }) if source.kind() == std::io::ErrorKind::InvalidData => {
            Ok(None)
        }
        other => other,
    }
}

/// What is there already is not written again: a full disk must not keep a server from starting.
fn is_there(path: &Path, content: &[u8], mode: u32) -> bool {
    let has_mode =
        |meta: fs::Metadata| meta.is_file() && meta.permissions().mode() & 0o7777 == mode;
    fs::symlink_metadata(path).is_ok_and(has_mode) && fs::read(path).is_ok_and(|now| now == content)
}

fn replace(
    path: &Path,
    content: &[u8],
    mode: u32,
    sync: impl FnOnce(&fs::File) -> std::io::Result<()>,
) -> Result<(), Error> {
    if is_there(path, content, mode) {
        return Ok(());
    }
    let suffix = u64::from_ne_bytes(crate::random_bytes());
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.{suffix:016x}"));
    let write = || -> std::io::Result<()> {
        let mut file =
            fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary)?;
        // The process's umask may have taken bits away that were asked for.
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.write_all(content)?;
        sync(&file)?;
        fs::rename(&temporary, path)
    };
    write().map_err(|error| {
        let _ = fs::remove_file(&temporary);
        failed(path)(error)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn what_is_there_is_not_written_again() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("token");
        let inode = || fs::metadata(&path).expect("there").ino();
        write_private(&path, b"secret", 0o600).expect("written");
        let first = inode();
        write_private(&path, b"secret", 0o600).expect("there");
        assert_eq!(inode(), first);
        write_private(&path, b"secret", 0o640).expect("written");
        assert_ne!(inode(), first, "another mode");
        let second = inode();
        write_private(&path, b"other", 0o640).expect("written");
        assert_ne!(inode(), second, "another content");
    }
}
