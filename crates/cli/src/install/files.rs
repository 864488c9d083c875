//! Files of a machine, or of a directory that becomes one.
//!
//! Invariant: a file has its old or its new content at any time, after a crash too: it is written beside, synced and
//! renamed.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Where `/` is.
#[derive(Clone, Debug)]
pub struct Root(PathBuf);

impl Root {
    /// `None` and `/`: this machine.
    pub fn new(directory: Option<&Path>) -> Self {
        Self(directory.unwrap_or(Path::new("/")).to_owned())
    }

    pub fn is_machine(&self) -> bool {
        self.0 == Path::new("/")
    }

    pub fn display(&self) -> std::path::Display<'_> {
        self.0.display()
    }

    /// The place of an absolute path.
    pub fn at(&self, path: &Path) -> PathBuf {
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    pub fn exists(&self, path: &str) -> bool {
        self.at(Path::new(path)).exists()
    }

    pub fn read(&self, path: &str) -> Result<Option<String>> {
        let path = self.at(Path::new(path));
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// False if it has this content and mode already.
    pub fn write(&self, path: &Path, content: &[u8], mode: u32) -> Result<bool> {
        let path = self.at(path);
        if fs::read(&path).is_ok_and(|old| old == content) && mode_of(&path) == Some(mode) {
            return Ok(false);
        }
        replace(&path, mode, |file| file.write_all(content))
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(true)
    }

    /// Copies a program; false if the copy is there already.
    pub fn copy(&self, from: &Path, to: &Path) -> Result<bool> {
        const MODE: u32 = 0o755;
        let to = self.at(to);
        if is_same(from, &to).unwrap_or(false) && mode_of(&to) == Some(MODE) {
            return Ok(false);
        }
        let mut source =
            File::open(from).with_context(|| format!("cannot read {}", from.display()))?;
        replace(&to, MODE, |file| std::io::copy(&mut source, file).map(drop))
            .with_context(|| to.display().to_string())?;
        Ok(true)
    }

    /// Makes a link; false if it is there already. Something else with its name stays, as an error.
    pub fn link(&self, link: &Path, target: &Path) -> Result<bool> {
        if self.is_link_to(link, target) {
            return Ok(false);
        }
        let at = self.at(link);
        if let Some(parent) = at.parent() {
            make(parent)?;
        }
        std::os::unix::fs::symlink(target, &at).with_context(|| {
            format!("cannot make {} a link to {}", at.display(), target.display())
        })?;
        Ok(true)
    }

    pub fn is_link_to(&self, link: &Path, target: &Path) -> bool {
        fs::read_link(self.at(link)).is_ok_and(|to| to == target)
    }

    /// Returns a line if it existed.
    pub fn remove(&self, path: &Path) -> Result<Option<String>> {
        self.removed(path, false)
    }

    pub fn remove_tree(&self, path: &Path) -> Result<Option<String>> {
        self.removed(path, true)
    }

    fn removed(&self, path: &Path, is_tree: bool) -> Result<Option<String>> {
        let path = self.at(path);
        let removed = if is_tree { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        match removed {
            Ok(()) => Ok(Some(format!("removed {}", path.display()))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot remove {}", path.display())),
        }
    }
}

fn mode_of(path: &Path) -> Option<u32> {
    fs::metadata(path).ok().map(|about| about.permissions().mode() & 0o7777)
}

fn make(directory: &Path) -> Result<()> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(directory);
    made.with_context(|| format!("cannot make the directory {}", directory.display()))
}

/// Writes beside the file, then renames: a running program keeps its own file.
fn replace(
    path: &Path,
    mode: u32,
    write: impl FnOnce(&mut File) -> std::io::Result<()>,
) -> Result<()> {
    let parent = path.parent().context("a file is in a directory")?;
    make(parent)?;
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    let written = || -> std::io::Result<()> {
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(mode).open(&beside)?;
        // The file may be left from a run that was killed.
        file.set_permissions(Permissions::from_mode(mode))?;
        write(&mut file)?;
        file.sync_all()?;
        fs::rename(&beside, path)?;
        File::open(parent)?.sync_all()
    };
    written().inspect_err(|_| {
        let _ = fs::remove_file(&beside);
    })?;
    Ok(())
}

fn is_same(one: &Path, other: &Path) -> std::io::Result<bool> {
    if fs::metadata(one)?.len() != fs::metadata(other)?.len() {
        return Ok(false);
    }
    let (mut one, mut other) = (File::open(one)?, File::open(other)?);
    let (mut left, mut right) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    loop {
        let read = one.read(&mut left)?;
        if read == 0 {
            return Ok(true);
        }
        other.read_exact(&mut right[..read])?;
        if left[..read] != right[..read] {
            return Ok(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_replaced_only_by_others() {
        let directory = tempfile::tempdir().expect("a directory");
        let root = Root::new(Some(directory.path()));
        assert!(!root.is_machine() && Root::new(None).is_machine());
        let path = Path::new("/etc/x/file");
        assert!(root.write(path, b"one", 0o600).expect("written"));
        assert!(!root.write(path, b"one", 0o600).expect("the same"));
        assert!(root.write(path, b"one", 0o644).expect("another mode"));
        assert!(root.write(path, b"two", 0o644).expect("another content"));
        assert_eq!(root.read("/etc/x/file").expect("read").as_deref(), Some("two"));
        assert_eq!(fs::read_dir(root.at(Path::new("/etc/x"))).expect("there").count(), 1);

        let program = directory.path().join("program");
        fs::write(&program, "code").expect("written");
        assert!(root.copy(&program, Path::new("/bin/p")).expect("copied"));
        assert!(!root.copy(&program, Path::new("/bin/p")).expect("the same"));
        fs::write(&program, "tode").expect("written");
        assert!(root.copy(&program, Path::new("/bin/p")).expect("an upgrade"));
        assert_eq!(mode_of(&root.at(Path::new("/bin/p"))), Some(0o755));

        let link = Path::new("/bin/l");
        assert!(root.link(link, Path::new("p")).expect("made"));
        assert!(!root.link(link, Path::new("p")).expect("it is there"));
        assert!(root.link(Path::new("/bin/p"), Path::new("q")).is_err(), "a program stays");
        assert!(root.remove(link).expect("removed").is_some());
        assert_eq!(root.remove(link).expect("gone"), None);
    }
}
