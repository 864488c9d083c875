//! Estimates the seats of a request: lists by the objects that they read, writes by their watchers.
//!
//! In: a request, and the server's statistics of the resource. Out: [`Work`].
//! Upstream: `list_work_estimator.go`, `mutating_work_estimator.go`, `watch_tracker.go`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::queues::Work;
use crate::query::Query;
use crate::request::RequestInfo;

const BYTES_PER_SEAT: u64 = 100_000;
/// Bytes in memory of a streamed list from the watch cache.
const MOST_STREAMED: u64 = 1_000_000;
const MOST_LIST_SEATS: u32 = 100;
const MOST_WRITE_SEATS: u32 = 10;
const WATCHES_PER_SEAT: u32 = 10;
/// Time of an event per seat.
const EVENT: Duration = Duration::from_millis(5);

/// Statistics of the stored objects of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    pub objects: u64,
    pub bytes: u64,
}

/// `most` is the maximum of the level; 0 for no maximum. `stored` is called for lists only, `watchers` for
/// writes only.
pub fn work(
    info: &RequestInfo,
    query: &Query,
    most: u32,
    stored: impl FnOnce() -> Option<Stored>,
    watchers: impl FnOnce() -> u32,
) -> Work {
    match info.verb.as_str() {
        "list" | "watch" => {
            Work::seats(list_seats(info, query, bounded(most, MOST_LIST_SEATS), stored))
        }
        "create" | "update" | "patch" | "delete" => {
            if info.resource == "serviceaccounts" && info.subresource == "token" {
                return Work::seats(1);
            }
            write_work(watchers(), bounded(most, MOST_WRITE_SEATS))
        }
        _ => Work::seats(1),
    }
}

fn bounded(most: u32, limit: u32) -> u32 {
    if most == 0 { limit } else { most.min(limit) }
}

fn list_seats(
    info: &RequestInfo,
    query: &Query,
    most: u32,
    stored: impl FnOnce() -> Option<Stored>,
) -> u32 {
    let given = |name: &str| query.first(name).filter(|value| !value.is_empty());
    let version = given("resourceVersion");
    let from_start = matches!(version, None | Some("0"));
    if info.verb == "watch" && given("sendInitialEvents") != Some("true") && !from_start {
        return 1;
    }
    // Resources that no client has read, and those of other servers, have no statistics.
    let Some(stored) = stored().filter(|stored| stored.objects > 0) else { return 1 };
    let limit = given("limit").and_then(|limit| limit.parse().ok()).filter(|limit| *limit > 0);
    let is_exact = match given("resourceVersionMatch") {
        Some(how) => how == "Exact",
        None => limit.is_some() && !from_start,
    };
    let is_streamed = info.verb == "watch" || !(is_exact || given("continue").is_some());
    let limited = limit.map_or(stored.objects, |limit: u64| limit.min(stored.objects));
    let selects = given("labelSelector").or(given("fieldSelector")).is_some();
    let loaded = match () {
        () if !info.name.is_empty() => 1,
        () if !is_streamed && selects => limited.max(stored.objects / 2),
        () => limited,
    };
    let bytes = loaded.saturating_mul(stored.bytes / stored.objects);
    let bytes = if is_streamed { bytes.min(MOST_STREAMED) } else { bytes };
    u32::try_from(bytes.div_ceil(BYTES_PER_SEAT)).unwrap_or(u32::MAX).clamp(1, most.max(1))
}

fn write_work(watchers: u32, most: u32) -> Work {
    if watchers < WATCHES_PER_SEAT {
        return Work::seats(1);
    }
    let wanted = watchers.div_ceil(WATCHES_PER_SEAT);
    let lasting = wanted.min(most.max(1));
    Work { initial: 1, lasting, lingers: EVENT * wanted / lasting }
}

/// The key of equal watches: group, resource, namespace, name.
type Watched = (String, String, String, String);

/// Counts the open watches.
#[derive(Clone, Default)]
pub struct Watches(Arc<Mutex<HashMap<Watched, u32>>>);

impl Watches {
    /// Counts a watch until the guard is dropped. Watches of one node's pods are not counted: an event
    /// concerns only one of them.
    pub fn enter(&self, info: &RequestInfo) -> Option<WatchGuard> {
        let is_indexed = info.resource == "pods" && info.field_selector.contains("spec.nodeName=");
        let is_counted = info.verb == "watch" && info.is_resource && !is_indexed;
        if !is_counted {
            return None;
        }
        let watched = watched(info, &info.namespace, &info.name);
        *self.0.lock().expect("no panic under the lock").entry(watched.clone()).or_default() += 1;
        Some(WatchGuard { watches: self.clone(), watched })
    }

    /// How many watches a write may concern.
    pub fn interested(&self, info: &RequestInfo) -> u32 {
        let counts = self.0.lock().expect("no panic under the lock");
        if counts.is_empty() {
            return 0;
        }
        let count =
            |namespace, name| counts.get(&watched(info, namespace, name)).copied().unwrap_or(0);
        let mut sum = count("", "");
        if !info.namespace.is_empty() {
            sum += count(&info.namespace, "");
        }
        if !info.name.is_empty() {
            sum += count(&info.namespace, &info.name);
        }
        sum
    }
}

fn watched(info: &RequestInfo, namespace: &str, name: &str) -> Watched {
    (info.group.clone(), info.resource.clone(), namespace.to_owned(), name.to_owned())
}

/// One open watch.
pub struct WatchGuard {
    watches: Watches,
    watched: Watched,
}

impl Drop for WatchGuard {
    fn drop(&mut self) {
        let mut counts = self.watches.0.lock().expect("no panic under the lock");
        if let Some(count) = counts.get_mut(&self.watched) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.watched);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(verb: &str, name: &str) -> RequestInfo {
        RequestInfo {
            is_resource: true,
            verb: verb.into(),
            resource: "pods".into(),
            namespace: "a".into(),
            name: name.into(),
            ..RequestInfo::default()
        }
    }

    #[test]
    fn lists_are_estimated_by_the_objects_they_read() {
        let check = |verb: &str, query: &str, most, expected: u32| {
            let uri = format!("/x?{query}").parse().expect("a path");
            // 2000 objects of 5000 bytes.
            let stored = || Some(Stored { objects: 2000, bytes: 10_000_000 });
            let work = work(&info(verb, ""), &Query::of(&uri), most, stored, || 0);
            assert_eq!(work, Work::seats(expected), "{verb} {query}");
        };
        check("get", "", 10, 1);
        check("list", "", 0, 10);
        check("list", "", 4, 4);
        check("list", "limit=100", 0, 5);
        check("list", "limit=1", 0, 1);
        check("list", "resourceVersion=7&resourceVersionMatch=Exact", 0, 100);
        check("list", "resourceVersion=7&limit=500", 0, 25);
        check("list", "limit=500&continue=x&labelSelector=a", 0, 50);
        check("watch", "", 0, 10);
        check("watch", "resourceVersion=9", 0, 1);
        check("watch", "resourceVersion=9&sendInitialEvents=true", 0, 10);
        let uri = "/x".parse().expect("a path");
        let unknown = work(&info("list", ""), &Query::of(&uri), 0, || None, || 0);
        assert_eq!(unknown, Work::seats(1));
    }

    #[test]
    fn writes_are_estimated_by_their_watchers() {
        let check = |watchers, most, expected: (u32, u32, u64)| {
            let uri = "/x".parse().expect("a path");
            let work = work(&info("update", "x"), &Query::of(&uri), most, || None, || watchers);
            let got = (work.initial, work.lasting, work.lingers.as_millis() as u64);
            assert_eq!(got, expected, "{watchers}");
        };
        check(0, 0, (1, 0, 0));
        check(9, 0, (1, 0, 0));
        check(10, 0, (1, 1, 5));
        check(25, 0, (1, 3, 5));
        check(1000, 0, (1, 10, 50));
        check(100, 2, (1, 2, 25));
    }

    #[test]
    fn watches_count_while_they_are_open() {
        let watches = Watches::default();
        let mut everywhere = info("watch", "");
        everywhere.namespace.clear();
        let guards = [
            watches.enter(&everywhere),
            watches.enter(&info("watch", "")),
            watches.enter(&info("watch", "x")),
        ];
        assert!(watches.enter(&info("list", "")).is_none());
        let mut of_node = everywhere.clone();
        of_node.field_selector = "spec.nodeName=n".into();
        assert!(watches.enter(&of_node).is_none());
        assert_eq!(watches.interested(&info("update", "x")), 3);
        assert_eq!(watches.interested(&info("update", "y")), 2);
        assert_eq!(watches.interested(&info("create", "")), 2);
        drop(guards);
        assert_eq!(watches.interested(&info("update", "x")), 0);
        assert!(watches.0.lock().expect("no panic").is_empty());
    }
}
