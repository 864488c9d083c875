//! Follows the directory: one step for each change, and for each object that could not be applied yet.
//!
//! ```text
//!  new or changed file ─► parse ─► list in the ConfigMap ─► apply, in rounds ─► prune ─► list again
//!                           │                                  │
//!                           └─ error: an Event, objects stay   └─ left over: again after a pause (its kind or its
//!                                                                 namespace may come)
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use base::backoff::Backoff;
use base::task::{Bound, Stop, Tasks};
use client::{ErrorExt, EventRecorder, EventType};
use serde_json::Value;
use tokio::time::Instant;

use crate::apply::{Failure, Round};
use crate::documents::{Unreadable, documents, flatten};
use crate::folder::{Entry, Folder, Mark};
use crate::inventory::{APPLIED, Inventories, Inventory};
use crate::object::{Identity, Incomplete, pruned};
use crate::{Config, Error, MANAGER};

/// A user writes several files in one go: wait until the changes settle.
const SETTLE: Duration = Duration::from_millis(50);
/// Between two tries of what could not be applied.
const AGAIN_FIRST: Duration = Duration::from_millis(500);
const AGAIN_CEILING: Duration = Duration::from_secs(60);
/// How often to look without an event: network file systems send none.
const LOOK: Duration = Duration::from_secs(300);
/// Errors of an Event and of a status, in characters.
const TOLD: usize = 1000;

pub struct Keeper {
    config: Config,
    folder: Folder,
    inventories: Inventories,
    events: EventRecorder,
    /// What the ConfigMaps list.
    known: BTreeMap<String, Inventory>,
    files: BTreeMap<String, File>,
    _tasks: Bound,
}

/// One file's work.
struct File {
    /// The content that was worked on last.
    mark: Option<Mark>,
    /// When the rest is tried again.
    due: Option<Instant>,
    pause: Backoff,
}

impl Default for File {
    fn default() -> Self {
        let pause = Backoff::new(AGAIN_FIRST, AGAIN_CEILING).with_jitter(0.2);
        Self { mark: None, due: None, pause }
    }
}

type Objects = Vec<(Identity, Value)>;

/// The outcome of deletions.
#[derive(Default)]
struct Pruned {
    deleted: usize,
    /// What could not be deleted, with the errors.
    stayed: Vec<Identity>,
    errors: Vec<String>,
}

impl Keeper {
    pub async fn open(config: Config) -> Result<Self, Error> {
        let path = config.directory.clone();
        let folder = Folder::open(&path).map_err(|source| Error::Directory { path, source })?;
        let inventories = Inventories::new(config.client.clone(), &config.server);
        let known = inventories.read().await.map_err(|error| Error::Inventory(error.text()))?;
        let tasks = Tasks::new("manifests");
        let events =
            EventRecorder::new(config.client.clone(), &tasks, MANAGER, Some(&config.server));
        let (files, _tasks) = (BTreeMap::new(), tasks.bound());
        Ok(Self { config, folder, inventories, events, known, files, _tasks })
    }

    pub async fn keep(mut self, stop: Stop) -> Result<(), Error> {
        loop {
            match stop.or(self.step()).await {
                None => return Ok(()),
                Some(outcome) => outcome?,
            }
        }
    }

    /// Does what is to be done, then waits for the next change.
    async fn step(&mut self) -> Result<(), Error> {
        let found = self
            .folder
            .look()
            .map_err(|source| Error::Watch { path: self.config.directory.clone(), source })?;
        for (name, entry) in &found {
            match entry {
                Entry::Skipped => drop(self.files.remove(name)),
                Entry::File(mark) if self.is_to_do(name, Some(*mark)) => {
                    self.apply_file(name, *mark).await;
                }
                Entry::File(_) => {}
            }
        }
        let known = self.known.keys().filter(|name| !found.contains_key(*name));
        for name in known.cloned().collect::<Vec<_>>() {
            if self.is_to_do(&name, None) {
                self.remove_file(&name).await;
            }
        }
        self.files.retain(|name, _| found.contains_key(name) || self.known.contains_key(name));
        let due = self.files.values().filter_map(|file| file.due).min();
        let due = due.unwrap_or_else(|| Instant::now() + LOOK);
        tokio::select! {
            () = self.folder.changed() => tokio::time::sleep(SETTLE).await,
            () = tokio::time::sleep_until(due) => {}
        }
        Ok(())
    }

    fn is_to_do(&self, name: &str, mark: Option<Mark>) -> bool {
        match self.files.get(name) {
            None => true,
            Some(file) => file.mark != mark || file.due.is_some_and(|due| due <= Instant::now()),
        }
    }

    /// Notes the outcome: with errors that may pass, the rest is tried again later.
    fn done(&mut self, name: &str, mark: Option<Mark>, is_complete: bool) {
        let file = self.files.entry(name.to_owned()).or_default();
        if file.mark != mark {
            file.pause.reset();
        }
        file.mark = mark;
        file.due = (!is_complete).then(|| Instant::now() + file.pause.step());
    }

    async fn apply_file(&mut self, name: &str, mark: Mark) {
        let old = self.known.get(name).cloned().unwrap_or_default();
        let text = self.folder.read(name).map_err(Unusable::File);
        let objects = match text.and_then(|text| parse(&text)) {
            Ok(objects) => objects,
            Err(error) => {
                let status = format!("the file cannot be used, its objects stay: {error}");
                tracing::warn!(file = name, %error, "failed to parse a manifest; its objects stay");
                let inventory = Inventory { file: name.to_owned(), status, ..old };
                let is_written = self.note(inventory, "ParseManifestFailed", true).await;
                self.done(name, Some(mark), is_written);
                return;
            }
        };
        let is_new = self.files.get(name).is_some_and(|file| file.mark != Some(mark));
        let complete = self.bring_about(name, &old, &objects, is_new).await;
        self.done(name, Some(mark), complete);
    }

    /// Applies and prunes; returns whether everything is as the file says.
    async fn bring_about(
        &mut self,
        name: &str,
        old: &Inventory,
        objects: &Objects,
        is_new: bool,
    ) -> bool {
        let wanted: Vec<Identity> = objects.iter().map(|(identity, _)| identity.clone()).collect();
        let mut all = wanted.clone();
        all.extend(old.objects.iter().filter(|one| !wanted.iter().any(|it| it.is(one))).cloned());
        if all != old.objects {
            // Listed first: nothing is forgotten if the process ends now.
            let listed = Inventory { file: name.to_owned(), objects: all, ..old.clone() };
            if !self.write(listed).await {
                return false;
            }
        }
        let failures = apply_all(&self.config.client, name, objects).await;
        let gone: Vec<Identity> = self.pruned(name, old, &wanted);
        let outcome = self.delete_all(&gone).await;
        let mut told: Vec<String> = failures;
        told.extend(outcome.errors);
        let mut objects = wanted;
        objects.extend(outcome.stayed);
        let (status, reason) = match told.is_empty() {
            true => (APPLIED.to_owned(), "AppliedManifest"),
            false => (shortened(&told.join("; ")), "ApplyManifestFailed"),
        };
        let count = objects.len();
        let inventory = Inventory { file: name.to_owned(), objects, status: status.clone() };
        let is_change = is_new || *old != inventory;
        if is_change && told.is_empty() {
            tracing::info!(
                file = name,
                objects = count,
                pruned = outcome.deleted,
                "applied a manifest"
            );
        } else if is_change {
            tracing::warn!(file = name, error = status, "failed to apply a manifest, trying again");
        }
        let is_written = self.note(inventory, reason, is_change).await;
        is_written && told.is_empty()
    }

    fn pruned(&self, name: &str, old: &Inventory, wanted: &[Identity]) -> Vec<Identity> {
        let others = || self.known.iter().filter(|(other, _)| *other != name);
        let is_elsewhere =
            |one: &Identity| others().any(|(_, list)| list.objects.iter().any(|it| it.is(one)));
        pruned(&old.objects, wanted, is_elsewhere).into_iter().cloned().collect()
    }

    async fn delete_all(&self, objects: &[Identity]) -> Pruned {
        let mut pruned = Pruned::default();
        let mut round = Round::new(&self.config.client);
        for one in objects {
            match round.delete(one).await {
                Ok(true) => {
                    pruned.deleted += 1;
                    tracing::info!(object = %one, "pruned an object that its file no longer has");
                }
                Ok(false) => {}
                Err(error) => {
                    pruned.errors.push(format!("{one} was not deleted: {error}"));
                    pruned.stayed.push(one.clone());
                }
            }
        }
        pruned.stayed.reverse();
        pruned
    }

    /// The file is gone: so are its objects, then its list.
    async fn remove_file(&mut self, name: &str) {
        let old = self.known.get(name).cloned().unwrap_or_default();
        let gone = self.pruned(name, &old, &[]);
        let outcome = self.delete_all(&gone).await;
        if !outcome.errors.is_empty() {
            let status = shortened(&outcome.errors.join("; "));
            tracing::warn!(
                file = name,
                error = status,
                "failed to prune the objects of a removed file"
            );
            let inventory = Inventory { objects: outcome.stayed, status, ..old };
            self.note(inventory, "DeleteManifestFailed", true).await;
            self.done(name, None, false);
            return;
        }
        match self.inventories.remove(name).await {
            Ok(()) => {
                tracing::info!(
                    file = name,
                    pruned = outcome.deleted,
                    "pruned the objects of a removed file"
                );
                self.known.remove(name);
                self.done(name, None, true);
            }
            Err(error) => {
                tracing::warn!(
                    file = name,
                    error = error.text(),
                    "failed to delete the ConfigMap of a removed file"
                );
                self.done(name, None, false);
            }
        }
    }

    /// Writes the list and, if something has changed, an Event about it.
    async fn note(&mut self, inventory: Inventory, reason: &str, is_change: bool) -> bool {
        let written = self.inventories.write(&inventory).await;
        match written {
            Ok(map) => {
                if is_change {
                    let (kind, message) = match inventory.status.as_str() {
                        APPLIED => {
                            let count = inventory.objects.len();
                            (
                                EventType::Normal,
                                format!("Applied {count} objects of {}", inventory.file),
                            )
                        }
                        error => (EventType::Warning, format!("{}: {error}", inventory.file)),
                    };
                    self.events.event(&map, kind, reason, message);
                }
                self.known.insert(inventory.file.clone(), inventory);
                true
            }
            Err(error) => {
                tracing::warn!(
                    file = inventory.file,
                    error = error.text(),
                    "failed to write the ConfigMap of a manifest"
                );
                false
            }
        }
    }

    async fn write(&mut self, inventory: Inventory) -> bool {
        self.note(inventory, "", false).await
    }
}

/// Applies in the file's order, in rounds, while a round gets further. Returns the errors of the rest.
async fn apply_all(client: &client::Client, file: &str, objects: &Objects) -> Vec<String> {
    let mut left: Vec<&(Identity, Value)> = objects.iter().collect();
    loop {
        let mut round = Round::new(client);
        let mut failed: Vec<(&(Identity, Value), Failure)> = vec![];
        for one in &left {
            if let Err(error) = round.apply(&one.0, &one.1, file).await {
                failed.push((one, error));
            }
        }
        if failed.is_empty() || failed.len() == left.len() {
            return failed.iter().map(|((one, _), error)| format!("{one}: {error}")).collect();
        }
        left = failed.into_iter().map(|(one, _)| one).collect();
    }
}

/// Why a file's objects are not known.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error("{0}")]
    File(std::io::Error),
    #[error(transparent)]
    Text(#[from] Unreadable),
    #[error(transparent)]
    Object(#[from] Incomplete),
    #[error("{0} is there twice")]
    Twice(Identity),
}

fn parse(text: &str) -> Result<Objects, Unusable> {
    let mut objects: Objects = vec![];
    for object in documents(text)?.into_iter().flat_map(flatten) {
        let identity = Identity::of(&object)?;
        if objects.iter().any(|(other, _)| other.is(&identity)) {
            return Err(Unusable::Twice(identity));
        }
        objects.push((identity, object));
    }
    Ok(objects)
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(TOLD) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_each_object_once() {
        let map =
            |name: &str| format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\n");
        let two = format!("{}---\n{}", map("a"), map("b"));
        assert_eq!(parse(&two).expect("two objects").len(), 2);
        let wrong = |text: &str| parse(text).expect_err("it is wrong").to_string();
        let same = format!("{}---\n{}", map("a"), map("a"));
        assert_eq!(wrong(&same), "v1 ConfigMap a is there twice");
        assert_eq!(wrong("kind: Pod\n"), "an object of kind Pod has no apiVersion");
        assert!(parse("# nothing\n").expect("no objects").is_empty());
        assert_eq!(shortened(&"é".repeat(TOLD + 1)).chars().count(), TOLD + 1);
    }
}
