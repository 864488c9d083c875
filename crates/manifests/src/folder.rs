//! The files of the directory.
//!
//! ```text
//!  a.yaml            applied
//!  sub/b.json        applied
//!  c.yaml, c.yaml.skip   left alone: neither applied nor pruned
//!  .hidden.yaml, d.txt   ignored
//! ```
//!
//! Invariant: a file is read again only if its size, time or inode has changed. Cost of a look: one `stat` for each file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use base::watch::FileWatch;

const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];
const SKIP: &str = ".skip";
/// The maximum depth of directories; it also ends loops of links.
const DEPTH: usize = 8;
/// A larger file is an error.
const LIMIT: u64 = 32 << 20;

/// What tells that a file is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    size: u64,
    modified: (i64, i64),
    inode: u64,
}

/// A file by its path below the directory.
pub type Found = BTreeMap<String, Entry>;

#[derive(Clone, Debug, PartialEq)]
pub enum Entry {
    File(Mark),
    Skipped,
}

pub struct Folder {
    directory: PathBuf,
    /// One for each directory.
    watches: BTreeMap<PathBuf, FileWatch>,
}

impl Folder {
    /// Creates the directory if it is missing.
    pub fn open(directory: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        Ok(Self { directory: directory.to_owned(), watches: BTreeMap::new() })
    }

    /// All files, and watches of all their directories: a change after this look ends [`Folder::changed`].
    pub fn look(&mut self) -> io::Result<Found> {
        loop {
            let (found, directories) = scan(&self.directory)?;
            let known: BTreeSet<&PathBuf> = self.watches.keys().collect();
            if known == directories.iter().collect() {
                return Ok(found);
            }
            // Watched first, read afterwards: nothing is missed in between.
            let mut watches = BTreeMap::new();
            for path in directories {
                let watch = match self.watches.remove(&path) {
                    Some(watch) => watch,
                    None => FileWatch::directory(&path)?,
                };
                watches.insert(path, watch);
            }
            self.watches = watches;
        }
    }

    /// Resolves after a change.
    pub async fn changed(&self) {
        let all = self.watches.values().map(|watch| Box::pin(watch.changed()));
        futures::future::select_all(all).await;
    }

    pub fn read(&self, name: &str) -> io::Result<String> {
        let path = self.directory.join(name);
        let size = std::fs::metadata(&path)?.len();
        if size > LIMIT {
            let text = format!("the file has {size} bytes, the limit is {LIMIT}");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
        }
        std::fs::read_to_string(path)
    }
}

fn scan(top: &Path) -> io::Result<(Found, BTreeSet<PathBuf>)> {
    let (mut found, mut directories) = (Found::new(), BTreeSet::new());
    let mut skips = BTreeSet::new();
    let mut todo = vec![(top.to_owned(), 0)];
    while let Some((directory, depth)) = todo.pop() {
        let entries = match std::fs::read_dir(&directory) {
            Ok(entries) => entries,
            // A directory below may go at any time, but without the top nothing is known.
            Err(error) if depth > 0 && error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        for entry in entries {
            let path = entry?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            let Ok(about) = std::fs::metadata(&path) else { continue };
            if name.starts_with('.') {
                continue;
            }
            if about.is_dir() {
                if depth < DEPTH {
                    todo.push((path, depth + 1));
                }
                continue;
            }
            let Some(key) = path.strip_prefix(top).ok().and_then(Path::to_str) else { continue };
            if let Some(skipped) = key.strip_suffix(SKIP) {
                skips.insert(skipped.to_owned());
            } else if is_manifest(&path) {
                found.insert(key.to_owned(), Entry::File(Mark::of(&about)));
            }
        }
        directories.insert(directory);
    }
    for skipped in skips {
        found.insert(skipped, Entry::Skipped);
    }
    Ok((found, directories))
}

fn is_manifest(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|extension| EXTENSIONS.contains(&extension))
}

impl Mark {
    fn of(about: &Metadata) -> Self {
        let modified = (about.mtime(), about.mtime_nsec());
        Self { size: about.len(), modified, inode: about.ino() }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn manifests_are_found_and_changes_noticed() {
        let root = tempfile::tempdir().expect("a directory");
        let top = root.path().join("manifests");
        let mut folder = Folder::open(&top).expect("made");
        let names = |found: &Found| -> Vec<String> {
            let name = |(name, entry): (&String, &Entry)| match entry {
                Entry::File(_) => name.clone(),
                Entry::Skipped => format!("{name} skipped"),
            };
            found.iter().map(name).collect()
        };
        assert!(folder.look().expect("read").is_empty());
        std::fs::create_dir(top.join("sub")).expect("made");
        for name in ["a.yaml", "sub/b.json", "c.yml", "c.yml.skip", ".d.yaml", "e.txt"] {
            std::fs::write(top.join(name), "x").expect("written");
        }
        let soon = async |folder: &Folder| {
            let changed = tokio::time::timeout(Duration::from_secs(30), folder.changed()).await;
            changed.expect("noticed in time");
        };
        soon(&folder).await;
        let first = folder.look().expect("read");
        assert_eq!(names(&first), ["a.yaml", "c.yml skipped", "sub/b.json"]);
        assert_eq!(folder.look().expect("read"), first);
        // Also in a directory that came later.
        std::fs::write(top.join("sub/b.json"), "longer").expect("written");
        soon(&folder).await;
        let second = folder.look().expect("read");
        assert_ne!(second["sub/b.json"], first["sub/b.json"]);
        assert_eq!(second["a.yaml"], first["a.yaml"]);
        std::fs::remove_dir_all(top.join("sub")).expect("removed");
        soon(&folder).await;
        assert_eq!(names(&folder.look().expect("read")), ["a.yaml", "c.yml skipped"]);
        std::fs::remove_dir_all(&top).expect("removed");
        assert!(folder.look().is_err(), "an absent directory is not an empty one");
    }
}
