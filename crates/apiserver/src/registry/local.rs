//! Lists and watches for readers in this process: the watch cache's own entries.
//!
//! In: a row, and options as any list or watch has them. Out: entries that are shared, not encoded.
//!
//! Invariant: a reader that falls behind misses nothing that matters to it: it gets the newest state of each
//! object that changed, and every deletion. States between may be left out, so that catching up costs the
//! objects that changed, not the changes.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use store::Revision;
use tokio::time::Instant;
use transport::local::{Change, Changes, List, Object};

use super::{ListOptions, Registry, Stored};
use crate::StatusError;
use crate::cacher::{CacheEvent, Cacher, Cursor, Entry, Scope};
use crate::request::Key;
use crate::resource::Resource;

impl Object for Entry {
    fn revision(&self) -> u64 {
        self.revision.0
    }

    fn json(&self) -> Bytes {
        Stored::new(self.row().clone(), self.value.clone(), self.revision).json()
    }

    fn note(&self) -> &OnceLock<Arc<dyn Any + Send + Sync>> {
        Entry::note(self)
    }
}

/// Whether the entries are what the row serves: a row of another version converts them.
pub fn is_shared(row: &Resource) -> bool {
    row.is_stored() && row.conversion.is_none()
}

impl Registry {
    /// All objects of a scope, at the newest revision.
    pub async fn list_shared(
        &self,
        row: &Arc<Resource>,
        namespace: &str,
        options: &ListOptions,
    ) -> Result<List, StatusError> {
        let scope = self.scope(row, namespace, options)?;
        let cacher = self.cacher(row);
        cacher.wait_for(self.revision().await?).await?;
        let (entries, revision, _) = cacher.list(&scope, 0);
        let objects = entries.into_iter().map(|entry| entry as Arc<dyn Object>).collect();
        Ok(List { objects, revision: revision.0 })
    }

    /// What follows the options' revision, until their time is up.
    pub async fn watch_shared(
        &self,
        row: &Arc<Resource>,
        namespace: &str,
        options: &ListOptions,
        after: Revision,
    ) -> Result<Changes, StatusError> {
        let scope = self.scope(row, namespace, options)?;
        let cacher = self.cacher(row);
        cacher.ready().await?;
        let follower = Follower {
            scope,
            cursor: cacher.cursor(after),
            cacher,
            deadline: options.timeout.map(|timeout| Instant::now() + timeout),
            is_over: false,
        };
        Ok(Box::pin(futures::stream::unfold(follower, Follower::step)))
    }
}

struct Follower {
    scope: Scope,
    cacher: Arc<Cacher>,
    cursor: Cursor,
    deadline: Option<Instant>,
    is_over: bool,
}

impl Follower {
    async fn step(mut self) -> Option<(Vec<Change>, Self)> {
        if self.is_over {
            return None;
        }
        let cursor = &mut self.cursor;
        let next = match self.deadline {
            // Also where there is always something to tell: rights are asked for again.
            Some(deadline) if deadline <= Instant::now() => None,
            Some(deadline) => tokio::time::timeout_at(deadline, cursor.next_newest()).await.ok(),
            None => Some(cursor.next_newest().await),
        };
        let mut changes: Vec<Change> = match next {
            Some(Ok(events)) => self.translate_all(&events),
            Some(Err(_)) if self.cacher.is_retired() => return None,
            Some(Err(error)) => {
                self.is_over = true;
                return Some((vec![Change::Expired(error.message.clone())], self));
            }
            None => {
                self.is_over = true;
                vec![]
            }
        };
        changes.push(Change::Reached(self.cursor.revision().0));
        Some((changes, self))
    }

    /// Of several events of one object the last counts.
    fn translate_all(&self, events: &[CacheEvent]) -> Vec<Change> {
        let key = |event: &CacheEvent| {
            let shown = event.entry.as_ref().or(event.previous.as_ref());
            shown.map(|shown| shown.key.clone())
        };
        let mut counts: HashMap<Option<Key>, usize> = HashMap::new();
        for event in events {
            *counts.entry(key(event)).or_default() += 1;
        }
        let mut seen: HashMap<Option<Key>, usize> = HashMap::new();
        let latest = events.iter().filter_map(|event| {
            let key = key(event);
            let total = counts.get(&key).copied().unwrap_or_default();
            let place = seen.entry(key).or_default();
            *place += 1;
            let in_part = total > 1 || self.cursor.is_told_in_part(event);
            (*place == total).then_some((event, in_part))
        });
        latest.filter_map(|(event, in_part)| self.translate(event, in_part)).collect()
    }

    /// An object that ceases to match is deleted for this reader. `in_part`: events before this one were left out.
    fn translate(&self, event: &CacheEvent, in_part: bool) -> Option<Change> {
        let matching = |entry: &&Arc<Entry>| self.scope.matches(entry);
        if let Some(now) = event.entry.as_ref().filter(matching) {
            return Some(Change::Applied(now.clone()));
        }
        // A reader that was behind may have seen another state. A deletion of what it never saw costs nothing.
        let was_seen = |before: &&Arc<Entry>| in_part || self.scope.matches(before);
        let before = event.previous.as_ref().filter(was_seen)?;
        Some(Change::Deleted(before.clone()))
    }
}
