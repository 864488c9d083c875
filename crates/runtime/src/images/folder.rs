//! The directory of archives: images for a machine without a registry.
//!
//! ```text
//!  images/*.tar, *.tar.gz, *.tgz, *.tar.zst ─► import ─► pinned images, and a line in <images>/imported.json
//! ```
//!
//! In: a directory, watched. Out: imported images, which garbage collection leaves alone while their archive is there.
//! Invariants: an archive is imported once: again only if its size or time changes, or an image of it is gone. One that
//! is still being written is left alone until it has the same size and time for [`SETTLE`].
//! Cost: a change lists the directory; an archive is read once.
//! Upstream: k3s' `agent/images`.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base::task::Stop;
use base::watch::FileWatch;
use serde::{Deserialize, Serialize};

use super::import::import;
use super::store::ImageStore;
use super::{During, Result};
use crate::files;

const NAMES: [&str; 4] = [".tar", ".tar.gz", ".tgz", ".tar.zst"];
/// In the image store's directory.
const NOTES: &str = "imported.json";
/// An archive that has not changed for this time is complete.
const SETTLE: Duration = Duration::from_secs(1);
/// How often to look without an event: network file systems send none.
const LOOK: Duration = Duration::from_secs(300);

/// What tells that an archive is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    size: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
}

/// An archive that was imported, or could not be.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Note {
    mark: Option<Mark>,
    /// Ids of its images. None: the import has failed.
    images: Vec<String>,
}

type Found = BTreeMap<String, Mark>;
type Notes = BTreeMap<String, Note>;

/// Imports what is there and what comes, until the stop. The directory is made if it is missing.
pub async fn keep(store: ImageStore, directory: PathBuf, stop: Stop) -> Result<()> {
    let failed = || format!("watch {}", directory.display());
    std::fs::create_dir_all(&directory).during(failed)?;
    let watch = FileWatch::directory(&directory).during(failed)?;
    let mut before = Found::new();
    loop {
        let now = look(&directory).during(failed)?;
        // Nothing is written to an archive that is older than the pause, as at the start.
        let is_whole = |name: &String, mark: &Mark| {
            before.get(name) == Some(mark) || mark.is_older_than(SETTLE)
        };
        let whole: Found = now
            .iter()
            .filter(|(name, mark)| is_whole(name, mark))
            .map(|(n, m)| (n.clone(), *m))
            .collect();
        let is_settled = whole.len() == now.len();
        let (at, all) = (directory.clone(), now.keys().cloned().collect());
        let of = store.clone();
        let work = tokio::task::spawn_blocking(move || bring_in(&of, &at, &whole, &all));
        let Some(done) = stop.or(work).await else { return Ok(()) };
        done.map_err(io::Error::from).during(|| "import images".into())??;
        before = now;
        let pause = if is_settled { LOOK } else { SETTLE };
        let change = async {
            tokio::select! {
                () = watch.changed(), if is_settled => {}
                () = tokio::time::sleep(pause) => {}
            }
        };
        if stop.or(change).await.is_none() {
            return Ok(());
        }
    }
}

impl Mark {
    fn is_older_than(&self, time: Duration) -> bool {
        let age = base::clock::now().as_second().saturating_sub(self.modified.0);
        u64::try_from(age).is_ok_and(|age| age > time.as_secs())
    }
}

fn look(directory: &Path) -> io::Result<Found> {
    use std::os::unix::fs::MetadataExt;
    let mut found = Found::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let is_archive = !name.starts_with('.') && NAMES.iter().any(|end| name.ends_with(end));
        // It may be gone by now.
        let Ok(about) = std::fs::metadata(&path) else { continue };
        if is_archive && about.is_file() {
            let modified = (about.mtime(), about.mtime_nsec());
            found.insert(name.to_owned(), Mark { size: about.len(), modified });
        }
    }
    Ok(found)
}

/// Imports the new archives among `whole`; `all` names every archive that is there. Blocks.
fn bring_in(
    store: &ImageStore,
    directory: &Path,
    whole: &Found,
    all: &BTreeSet<String>,
) -> Result<()> {
    let path = store.root().join(NOTES);
    let noted = |path: &Path| files::read_json(path).during(|| format!("read {}", path.display()));
    let mut notes: Notes = noted(&path)?.unwrap_or_default();
    let before = notes.clone();
    let there: BTreeSet<String> = store.list()?.into_iter().map(|image| image.id).collect();
    for name in to_import(whole, &notes, &there) {
        let archive = directory.join(&name);
        let images = match import(store, &archive, None) {
            Ok(images) => images,
            Err(error) => {
                tracing::warn!(archive = %archive.display(), %error, "failed to import an archive of images");
                vec![]
            }
        };
        let ids: Vec<String> = images.iter().map(|image| image.id.clone()).collect();
        store.pin(&ids, true)?;
        for image in &images {
            let names = image.tags.join(", ");
            tracing::info!(archive = %archive.display(), image = names, "imported an image");
        }
        notes.insert(name.clone(), Note { mark: whole.get(&name).copied(), images: ids });
    }
    store.pin(&forget(&mut notes, all), false)?;
    if notes != before {
        let bytes = serde_json::to_vec(&notes).map_err(io::Error::from);
        let written = bytes.and_then(|bytes| files::write_durable(&path, &bytes));
        written.during(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

/// Archives that are new or changed, or have an image that the store lost.
fn to_import(whole: &Found, notes: &Notes, there: &BTreeSet<String>) -> Vec<String> {
    let is_done = |name: &String, mark: &Mark| {
        notes.get(name).is_some_and(|note| {
            note.mark == Some(*mark) && note.images.iter().all(|id| there.contains(id))
        })
    };
    let new = whole.iter().filter(|(name, mark)| !is_done(name, mark));
    new.map(|(name, _)| name.clone()).collect()
}

/// Removes the notes of archives that are gone. Returns the images that no other archive has.
fn forget(notes: &mut Notes, all: &BTreeSet<String>) -> Vec<String> {
    let (kept, gone): (Notes, Notes) =
        std::mem::take(notes).into_iter().partition(|(name, _)| all.contains(name));
    let used: BTreeSet<&String> = kept.values().flat_map(|note| &note.images).collect();
    let ids = gone.into_values().flat_map(|note| note.images);
    let free = ids.filter(|id| !used.contains(id)).collect();
    *notes = kept;
    free
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(size: u64) -> Mark {
        Mark { size, modified: (1, 2) }
    }

    fn note(size: u64, images: &[&str]) -> Note {
        Note { mark: Some(mark(size)), images: images.iter().map(|id| (*id).to_owned()).collect() }
    }

    #[test]
    fn an_archive_is_imported_once() {
        let there = ["i".to_owned()].into();
        let check = |note: Option<Note>, expected: bool| {
            let whole = [("a.tar".to_owned(), mark(1))].into();
            let notes = note.clone().map(|note| ("a.tar".to_owned(), note)).into_iter().collect();
            assert_eq!(!to_import(&whole, &notes, &there).is_empty(), expected, "{note:?}");
        };
        check(None, true);
        check(Some(note(1, &["i"])), false);
        check(Some(note(2, &["i"])), true);
        check(Some(note(1, &["i", "lost"])), true);
        // One that failed is tried again when it changes.
        check(Some(note(1, &[])), false);
    }

    #[test]
    fn images_are_free_without_their_archives() {
        let mut notes: Notes =
            [("a.tar".to_owned(), note(1, &["i", "j"])), ("b.tar".to_owned(), note(1, &["j"]))]
                .into();
        assert_eq!(forget(&mut notes, &["b.tar".to_owned()].into()), ["i"]);
        assert_eq!(notes.len(), 1);
        assert!(forget(&mut notes, &["b.tar".to_owned()].into()).is_empty());
    }

    /// Waits until the store has the image, pinned or not.
    async fn is_pinned(store: &ImageStore, expected: bool) {
        let ask = async || {
            let found = store.list().expect("a list");
            (found.len() == 1 && found[0].pinned == expected).then_some(())
        };
        testkit::wait::found("the image with the expected pin", ask).await;
    }

    #[tokio::test]
    async fn an_archive_that_appears_is_imported_and_pinned_until_it_goes() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: layers are unpacked by root");
            return;
        }
        let root = tempfile::tempdir().expect("a directory");
        let store = ImageStore::open(root.path().join("store")).expect("a store");
        let directory = root.path().join("images");
        let tasks = base::task::Tasks::new("test");
        let work = keep(store.clone(), directory.clone(), tasks.stop_signal());
        tasks.spawn_graceful("images", async { work.await.expect("it goes on") });
        // The directory comes with the start.
        testkit::wait::found("the directory", async || directory.is_dir().then_some(())).await;
        let mut layer = testkit::images::Layer::new();
        layer.file("file", 0o644, b"content").expect("added");
        let image = testkit::images::Image::new("docker.io/library/a:1").layer(layer);
        let archive = directory.join("a.tar");
        testkit::images::write_docker_archive(&archive, &image).expect("written");
        is_pinned(&store, true).await;
        std::fs::remove_file(&archive).expect("removed");
        is_pinned(&store, false).await;
        tasks.shutdown(Duration::from_secs(10)).await;
    }

    #[test]
    fn only_archives_are_found() {
        let root = tempfile::tempdir().expect("a directory");
        for name in ["a.tar", "b.tar.gz", "c.tgz", "d.tar.zst", "e.txt", ".f.tar"] {
            std::fs::write(root.path().join(name), "x").expect("written");
        }
        std::fs::create_dir(root.path().join("g.tar")).expect("made");
        let found = look(root.path()).expect("read");
        let names: Vec<&String> = found.keys().collect();
        assert_eq!(names, ["a.tar", "b.tar.gz", "c.tgz", "d.tar.zst"]);
        assert!(!found["a.tar"].is_older_than(Duration::from_secs(3600)));
        assert!(mark(1).is_older_than(SETTLE));
    }
}
