//! The later pages of a list, read from the watch cache.
//!
//! In: the state of the cache, the key of the last object of the page before, the revision of the list. Out: the next
//! objects as they were at that revision, or nothing if the cache no longer knows that state.
//!
//! ```text
//!   entries now           a3  b9  d4        page after "a" at revision 5
//!   events above 5        b9 (before: b2), c7 deleted (before: c1)
//!   entries at 5          a3  b2  c1  d4    ──►  b2, c1, d4
//! ```
//!
//! Invariant: a page has the objects that the store's history has at the revision.
//! Cost: the objects of the page, those between that the selectors exclude, and the events above the revision, of
//! which the ring holds a limited number. The store's history would read and unpack all of it again.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;

use store::Revision;

use super::{Cacher, Entry, Placed, Scope, State};
use crate::request::Key;

/// A part of a list.
pub struct Page {
    pub entries: Vec<Arc<Entry>>,
    /// There are more objects in the scope.
    pub more: bool,
}

impl Cacher {
    /// The objects after a key at a revision, at most `limit` (0: all). `None`: the cache does not know that state.
    pub fn page(&self, scope: &Scope, limit: usize, after: &Key, at: Revision) -> Option<Page> {
        let state = self.state.read().expect("no panic under the lock");
        if at < state.floor || state.revision < at {
            return None;
        }
        let changed = state.changed_since(at);
        let is_kept = |entry: &&Arc<Entry>| !changed.contains_key(&entry.key);
        let start = || (Excluded(after), Unbounded::<&Key>);
        let kept = state.entries.range::<Key, _>(start()).map(|Placed(entry)| entry);
        let mut kept = kept.filter(is_kept).peekable();
        let before = changed.range::<Key, _>(start());
        let mut before = before.filter_map(|(_, before)| *before).peekable();
        let merged = std::iter::from_fn(|| match (kept.peek(), before.peek()) {
            (Some(one), Some(other)) if other.key < one.key => before.next(),
            (Some(_), _) => kept.next(),
            (None, _) => before.next(),
        });
        let in_scope = |entry: &&Arc<Entry>| {
            scope.namespace.is_empty() || entry.key.namespace == scope.namespace
        };
        let mut page = Page { entries: vec![], more: false };
        for entry in merged.take_while(in_scope).filter(|entry| scope.matches(entry)) {
            if limit > 0 && page.entries.len() == limit {
                page.more = true;
                break;
            }
            page.entries.push(entry.clone());
        }
        Some(page)
    }
}

impl State {
    /// The objects that changed above a revision, as they were at it. `None` for one that did not exist.
    fn changed_since(&self, at: Revision) -> BTreeMap<&Key, Option<&Arc<Entry>>> {
        let first = self.ring.partition_point(|event| event.revision <= at);
        let mut changed = BTreeMap::new();
        for event in self.ring.range(first..) {
            if let Some(entry) = event.entry.as_ref().or(event.previous.as_ref()) {
                // The first change above the revision knows the state at it.
                changed.entry(&entry.key).or_insert(event.previous.as_ref());
            }
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use k8s_openapi::api::core::v1::ConfigMap;
    use store::{KeyRange, Op, RangeRequest, Sim, Store, Txn};

    use super::*;
    use crate::cacher::parse_key;

    const PREFIX: &str = "/registry/configmaps/";
    /// In the order of lists: "-" is before "/".
    const NAMESPACES: [&str; 3] = ["a-b", "a", "b"];

    async fn change(store: &dyn Store, step: usize) -> Revision {
        let (namespace, name) =
            (NAMESPACES[(step * 5 + step / 3) % 3], (step * 7 + step / 12) % 12);
        let key = Bytes::from(format!("{PREFIX}{namespace}/m{name}"));
        let op = if step % 5 > 2 {
            Op::DeleteRange { range: KeyRange::one(key) }
        } else {
            let labels = format!(r#"{{"odd":"{}"}}"#, name % 2);
            let value = format!(
                r#"{{"metadata":{{"namespace":"{namespace}","name":"m{name}","labels":{labels}}}}}"#
            );
            Op::Put { key, value: value.into(), lease: 0 }
        };
        let txn = Txn { success: vec![op], ..Txn::default() };
        store.txn(txn).await.expect("it is written").revision
    }

    /// The keys and revisions that the store has at a revision.
    async fn history(store: &dyn Store, at: Revision) -> Vec<(Key, Revision)> {
        let range = KeyRange::prefix(PREFIX);
        let request = RangeRequest { revision: Some(at), ..RangeRequest::new(range) };
        let listed = store.range(request).await.expect("it is readable").kvs;
        let key = |key: &[u8]| parse_key(PREFIX, true, key).expect("a key of an object");
        listed.iter().map(|kv| (key(&kv.key), kv.mod_revision)).collect()
    }

    fn all_pages(
        cacher: &Cacher,
        scope: &Scope,
        at: Revision,
        limit: usize,
    ) -> Vec<(Key, Revision)> {
        let (mut all, mut after) = (vec![], Key::new(scope.namespace.clone(), ""));
        loop {
            let page = cacher.page(scope, limit, &after, at).expect("the ring reaches back");
            assert!(page.entries.len() <= limit);
            all.extend(page.entries.iter().map(|entry| (entry.key.clone(), entry.revision)));
            match page.entries.last() {
                Some(last) if page.more => after = last.key.clone(),
                _ => return all,
            }
        }
    }

    #[tokio::test]
    async fn pages_of_a_revision_are_those_of_the_stores_history() {
        let store = Sim::open();
        let row = Arc::new(crate::testing::row::<ConfigMap>("configmaps", &[], true));
        let cacher = Cacher::new(row, store.clone());
        let feed = cacher.clone().feed();
        let checks = async {
            cacher.filled().await;
            let mut revisions = vec![];
            for step in 0..200 {
                revisions.push(change(&*store, step).await);
            }
            let last = *revisions.last().expect("many");
            cacher.wait_for(last).await.expect("it comes");
            for at in revisions {
                let expected = history(&*store, at).await;
                assert!(expected.is_sorted_by_key(|(key, _)| key), "storage order: {expected:?}");
                assert_eq!(all_pages(&cacher, &Scope::default(), at, 4), expected, "at {at}");
                let namespace = "a".to_owned();
                let scope = Scope { namespace, ..Scope::default() };
                let of_a = |(key, _): &&(Key, Revision)| key.namespace == "a";
                let expected: Vec<_> = expected.iter().filter(of_a).cloned().collect();
                assert_eq!(all_pages(&cacher, &scope, at, 3), expected, "at {at}");
            }
            let unknown = Revision(last.0 + 1);
            assert!(cacher.page(&Scope::default(), 1, &Key::default(), unknown).is_none());
            store.close().await;
        };
        tokio::join!(feed, checks);
    }
}
