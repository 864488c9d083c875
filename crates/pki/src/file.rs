//! Files with secrets: directories 0700, files 0600 (or as requested), replaced by rename.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use crate::Error;

pub(crate) fn failed(path: &Path) -> impl FnOnce(std::io::Error) -> Error + '_ {
    move |source| Error::File { path: path.display().to_string(), source }
}

/// Creates a directory (and its parents) that only its owner may enter.
pub(crate) fn private_dir(path: &Path) -> Result<(), Error> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed(path))
}

/// The file's text, `None` if the file does not exist.
pub(crate) fn read(path: &Path) -> Result<Option<String>, Error> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(path)(error)),
    }
}

/// Replaces `path` with `content` and `mode` (0600 for secrets). Readers see the old file or the
/// new one, never a part.
pub fn write_private(path: &Path, content: &[u8], mode: u32) -> Result<(), Error> {
    replace(path, content, mode, fs::File::sync_data)
}

/// Like `write_private` with mode 0600, but without a sync, for files that are regenerated when unreadable.
/// After a power failure the file may be empty or full of zeros. A crash of the process alone does no harm.
pub(crate) fn write_replaceable(path: &Path, content: &[u8]) -> Result<(), Error> {
    replace(path, content, 0o600, |_| Ok(()))
}

/// The text of such a file; `None` also if it is not text.
pub(crate) fn read_replaceable(path: &Path) -> Result<Option<String>, Error> {
    match read(path) {
        Err(Error::File { source, .. }) if source.kind() == std::io::ErrorKind::InvalidData => {
            Ok(None)
        }
        other => other,
    }
}

/// Whether the file already has this content. Then no write is needed: a full disk must not prevent
/// a server's start.
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
        // The process's umask may have removed requested bits.
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
    fn an_unchanged_file_is_not_written_again() {
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
