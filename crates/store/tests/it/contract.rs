//! The contract: the meaning of each call, for every backend.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use store::backend::Backend;
use store::{
    Compare, Error, KeyRange, KeyValue, Op, OpResult, RangeRequest, Revision, Txn, VALUE_LIMIT,
    WatchItem,
};
use tokio::time::Instant;

use crate::lab::{
    Lab, Short, absent, bytes, delete, fetch, item, items, leased, next, prefix, put, show,
    unchanged,
};

type Running = Pin<Box<dyn Future<Output = ()>>>;
type Case = (&'static str, fn(Lab) -> Running);

/// The async functions below, by name.
macro_rules! cases {
    ($($name:ident),* $(,)?) => { &[$((stringify!($name), |lab| Box::pin($name(lab)))),*] };
}

const CASES: &[Case] = cases![
    an_empty_store_is_at_revision_1_and_the_first_write_at_2,
    headers_count_from_the_creation,
    one_creator_wins,
    compare_and_put_loses_no_update,
    comparisons_see_absence_revision_and_version,
    the_failure_branch_reads_what_stands_there,
    what_changes_nothing_takes_no_revision,
    a_range_delete_returns_what_it_took,
    a_transaction_has_one_revision,
    ops_see_the_ops_before_them,
    a_refused_transaction_changes_nothing,
    ranges_have_edges,
    limits_count_and_more,
    pages_at_a_revision_ignore_later_writes,
    the_past_is_readable,
    the_future_is_not,
    writers_get_distinct_revisions_without_gaps,
    a_watch_starts_at_the_present,
    a_watch_starts_in_the_past,
    a_watch_starts_in_the_future,
    a_watch_from_the_next_revision_is_caught_up,
    a_watch_hands_over_without_gap_or_repeat,
    a_watch_sees_its_range_only,
    a_watch_shows_what_was_there_before,
    a_transaction_arrives_as_one_item,
    a_slow_watcher_misses_nothing_and_delays_nobody,
    progress_on_request_is_behind_its_events,
    progress_needs_no_events,
    compaction_forgets_the_past_and_keeps_the_floor,
    compaction_refuses_the_past_and_the_future,
    compaction_ends_watches_of_the_past,
    a_watch_from_the_floor_shows_what_was_there_before,
    compaction_keeps_old_values_that_live,
    a_lease_must_exist,
    revoking_a_lease_deletes_its_keys_together,
    a_lease_ends_at_its_time,
    a_kept_lease_outlives_another,
    a_key_follows_its_last_lease,
    a_lease_has_the_id_that_was_asked_for,
    leases_are_listed_with_their_keys,
    comparisons_are_over_all_keys_of_a_range,
    a_snapshot_holds_what_lives_and_its_leases,
    status_counts_keys_and_names_the_floor,
    big_values_have_a_limit,
    values_are_what_was_put_however_they_are_kept,
    bytes_are_bytes,
    reopening_keeps_everything,
    a_closed_store_refuses,
];

/// Runs every case except the named ones, each on its own thread and store, some concurrently, and names
/// the failed ones.
pub fn run(backend: &'static Backend, at_once: usize, except: &[&str], adapt: fn(&mut Lab)) {
    let run_one = |case: fn(Lab) -> Running| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let mut lab = Lab::new(backend);
        adapt(&mut lab);
        runtime.expect("a runtime").block_on(case(lab));
    };
    let cases: Vec<_> = CASES.iter().filter(|(name, _)| !except.contains(name)).collect();
    assert_eq!(cases.len(), CASES.len() - except.len(), "{except:?} are cases");
    let mut failed: Vec<&str> = vec![];
    for some in cases.chunks(at_once) {
        std::thread::scope(|scope| {
            let run_one = &run_one;
            let running =
                some.iter().map(|(name, case)| (name, scope.spawn(move || run_one(*case))));
            let running: Vec<_> = running.collect();
            failed.extend(
                running
                    .into_iter()
                    .filter_map(|(name, thread)| thread.join().err().and(Some(name))),
            );
        });
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
}

async fn an_empty_store_is_at_revision_1_and_the_first_write_at_2(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    assert_eq!(s.revision().await, Revision(1));
    let empty = s.range(RangeRequest::new(prefix(""))).await;
    assert_eq!((empty.count, empty.more, empty.revision), (0, false, Revision(1)));
    assert_eq!(s.put("a", "1").await, Revision(2));
    assert_eq!(s.at(1, "").await, Vec::<String>::new());
}

async fn headers_count_from_the_creation(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    let check = async |create: u64, modified: u64, version: u64| {
        let kv = s.get("a").await.expect("a is there");
        let header = (kv.create_revision.0, kv.mod_revision.0, kv.version);
        assert_eq!(header, (create, modified, version));
    };
    s.put("a", "1").await;
    check(2, 2, 1).await;
    s.put("other", "1").await;
    s.put("a", "2").await;
    check(2, 4, 2).await;
    s.delete("a").await;
    assert_eq!(s.get("a").await, None);
    s.put("a", "3").await;
    check(6, 6, 1).await;
}

async fn one_creator_wins(lab: Lab) {
    let store = lab.open();
    let create = |i: u32| {
        let store = store.clone();
        async move {
            let ops = vec![put("a", i.to_string())];
            Short(&*store).txn(vec![absent("a")], ops, vec![]).await.succeeded
        }
    };
    let won = together((0..50).map(create)).await.into_iter().filter(|won| *won).count();
    assert_eq!(won, 1);
    assert_eq!(store.revision().await.expect("open"), Revision(2));
}

async fn compare_and_put_loses_no_update(lab: Lab) {
    let store = lab.open();
    Short(&*store).put("n", "0").await;
    let add = |_| {
        let store = store.clone();
        async move {
            let s = Short(&*store);
            loop {
                let kv = s.get("n").await.expect("n is there");
                let n: u32 = String::from_utf8_lossy(&kv.value.bytes()).parse().expect("a number");
                let ops = vec![put("n", (n + 1).to_string())];
                if s.txn(vec![unchanged("n", kv.mod_revision)], ops, vec![]).await.succeeded {
                    return;
                }
            }
        }
    };
    together((0..20).map(add)).await;
    let kv = Short(&*store).get("n").await.expect("n is there");
    assert_eq!((show(&kv), kv.version), ("n=20".into(), 21));
}

async fn comparisons_see_absence_revision_and_version(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    s.put("a", "1").await;
    s.put("a", "2").await;
    let version = |key: &str, version| Compare::Version(bytes(key), version);
    let check = async |compare: Vec<Compare>, expected: bool| {
        let response = s.txn(compare.clone(), vec![], vec![]).await;
        assert_eq!(response.succeeded, expected, "{compare:?}");
    };
    check(vec![], true).await;
    check(vec![absent("a")], false).await;
    check(vec![absent("b")], true).await;
    check(vec![unchanged("a", Revision(3))], true).await;
    check(vec![unchanged("a", Revision(2))], false).await;
    check(vec![version("a", 2)], true).await;
    check(vec![version("a", 1)], false).await;
    check(vec![version("b", 0)], true).await;
    check(vec![unchanged("a", Revision(3)), absent("b")], true).await;
    check(vec![unchanged("a", Revision(3)), version("b", 1)], false).await;
}

async fn the_failure_branch_reads_what_stands_there(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    s.put("a", "1").await;
    let response = s.txn(vec![absent("a")], vec![put("a", "2")], vec![fetch("a")]).await;
    assert!(!response.succeeded);
    let [OpResult::Got { kvs }] = &response.results[..] else { panic!("{response:?}") };
    assert_eq!(kvs.iter().map(show).collect::<Vec<_>>(), ["a=1"]);
}

async fn what_changes_nothing_takes_no_revision(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    s.put("a", "1").await;
    assert_eq!(s.run(vec![]).await, Revision(2));
    assert_eq!(s.run(vec![fetch("a")]).await, Revision(2));
    assert_eq!(s.delete("b").await, Revision(2));
    assert_eq!(s.txn(vec![absent("a")], vec![put("a", "2")], vec![]).await.revision, Revision(2));
    // Writing the same value again is a change.
    assert_eq!(s.put("a", "1").await, Revision(3));
}

async fn a_range_delete_returns_what_it_took(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    s.run(vec![put("/p/b", "2"), put("/p/a", "1"), put("/q", "3")]).await;
    let response = s.txn(vec![], vec![Op::DeleteRange { range: prefix("/p/") }], vec![]).await;
    let [OpResult::Deleted { previous }] = &response.results[..] else { panic!("{response:?}") };
    assert_eq!(previous.iter().map(show).collect::<Vec<_>>(), ["/p/a=1", "/p/b=2"]);
    assert_eq!(s.at(0, "").await, ["/q=3"]);
}

async fn a_transaction_has_one_revision(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    s.put("old", "0").await;
    assert_eq!(s.run(vec![put("a", "1"), put("b", "2"), delete("old")]).await, Revision(3));
    for key in ["a", "b"] {
        assert_eq!(s.get(key).await.map(|kv| kv.mod_revision), Some(Revision(3)));
    }
    assert_eq!(s.at(2, "").await, ["old=0"]);
    assert_eq!(s.revision().await, Revision(3));
}

async fn ops_see_the_ops_before_them(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    let ops = vec![
        put("a", "1"),
        Op::Get { range: prefix("") },
        put("a", "2"),
        delete("a"),
        Op::Get { range: prefix("") },
        put("a", "3"),
    ];
    let response = s.txn(vec![], ops, vec![]).await;
    let shown: Vec<String> = response.results.iter().map(show_result).collect();
    assert_eq!(shown, ["put", "got a=1", "put over a=1", "deleted a=2", "got ", "put"]);
    let kv = s.get("a").await.expect("a is there");
    assert_eq!((show(&kv), kv.version, kv.create_revision), ("a=3".into(), 1, Revision(2)));
}

fn show_result(result: &OpResult) -> String {
    let join = |kvs: &[store::KeyValue]| kvs.iter().map(show).collect::<Vec<_>>().join(" ");
    match result {
        OpResult::Put { previous: None } => "put".into(),
        OpResult::Put { previous: Some(kv) } => format!("put over {}", show(kv)),
        OpResult::Deleted { previous } => format!("deleted {}", join(previous)),
        OpResult::Got { kvs } => format!("got {}", join(kvs)),
    }
}

async fn a_refused_transaction_changes_nothing(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    s.put("a", "1").await;
    let success = vec![put("c", "2"), delete("a"), leased("b", "1", 77)];
    let refused = store.txn(Txn { success, ..Txn::default() }).await;
    assert!(matches!(refused, Err(Error::LeaseNotFound(77))), "{refused:?}");
    assert_eq!(s.at(0, "").await, ["a=1"]);
    assert_eq!(s.revision().await, Revision(2));
}

async fn ranges_have_edges(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    s.run(["a", "a/1", "a/2", "a0", "b"].map(|key| put(key, "")).into()).await;
    let check = async |start: &str, end: &str, expected: &[&str]| {
        let range = KeyRange { start: bytes(start), end: bytes(end) };
        let response = s.range(RangeRequest::new(range)).await;
        let keys: Vec<_> = response.kvs.iter().map(|kv| &kv.key[..]).collect();
        let expected: Vec<_> = expected.iter().map(|key| key.as_bytes()).collect();
        assert_eq!((keys, response.count), (expected.clone(), expected.len()), "{start}..{end}");
    };
    check("a", "", &["a"]).await;
    check("c", "", &[]).await;
    check("a/", "a0", &["a/1", "a/2"]).await;
    check("a/1", "b", &["a/1", "a/2", "a0"]).await;
    check("a0", "\0", &["a0", "b"]).await;
    check("\0", "\0", &["a", "a/1", "a/2", "a0", "b"]).await;
    check("b", "a", &[]).await;
    check("a", "a", &[]).await;
}

async fn limits_count_and_more(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    s.run((0..5).map(|i| put(&format!("k{i}"), "")).collect()).await;
    let check = async |limit: usize, count_only: bool, expected: (usize, usize, bool)| {
        let request = RangeRequest { limit, count_only, ..RangeRequest::new(prefix("k")) };
        let response = s.range(request).await;
        let seen = (response.kvs.len(), response.count, response.more);
        assert_eq!(seen, expected, "limit {limit}, count only {count_only}");
    };
    check(0, false, (5, 5, false)).await;
    check(3, false, (3, 5, true)).await;
    check(5, false, (5, 5, false)).await;
    check(9, false, (5, 5, false)).await;
    check(0, true, (0, 5, false)).await;
    check(2, true, (0, 5, false)).await;
}

async fn pages_at_a_revision_ignore_later_writes(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    let listed = s.run((0..10).map(|i| put(&format!("k{i}"), "old")).collect()).await;
    let mut seen = vec![];
    let mut start = bytes("k");
    loop {
        let range = KeyRange { start: start.clone(), end: prefix("k").end };
        let request = RangeRequest { limit: 3, revision: Some(listed), ..RangeRequest::new(range) };
        let page = s.range(request).await;
        assert_eq!(page.count, 10 - seen.len(), "the count is that of the revision");
        seen.extend(page.kvs.iter().map(show));
        if !page.more {
            break;
        }
        start =
            [&page.kvs.last().expect("a page with more has keys").key[..], b"\0"].concat().into();
        let i = seen.len();
        s.run(vec![put(&format!("k{i}"), "new"), put(&format!("k{i}x"), "new"), delete("k8")])
            .await;
    }
    let expected: Vec<String> = (0..10).map(|i| format!("k{i}=old")).collect();
    assert_eq!(seen, expected);
}

async fn the_past_is_readable(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    s.put("a", "1").await;
    s.put("b", "1").await;
    s.put("a", "2").await;
    s.delete("b").await;
    s.delete("a").await;
    s.put("b", "2").await;
    let check = async |revision: u64, expected: &[&str]| {
        assert_eq!(s.at(revision, "").await, expected, "at {revision}");
    };
    check(1, &[]).await;
    check(2, &["a=1"]).await;
    check(3, &["a=1", "b=1"]).await;
    check(4, &["a=2", "b=1"]).await;
    check(5, &["a=2"]).await;
    check(6, &[]).await;
    check(7, &["b=2"]).await;
    check(0, &["b=2"]).await;
    let past = s.try_at(4, "a").await.expect("readable");
    assert_eq!(past.revision, Revision(7), "the store's revision, not the one asked for");
    let kv = &past.kvs[0];
    assert_eq!((kv.create_revision.0, kv.mod_revision.0, kv.version), (2, 4, 2));
}

async fn the_future_is_not(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    s.put("a", "1").await;
    let error = s.try_at(3, "").await.expect_err("3 is not yet");
    let Error::Future { requested, current } = error else { panic!("{error}") };
    assert_eq!((requested, current), (Revision(3), Revision(2)));
}

async fn writers_get_distinct_revisions_without_gaps(lab: Lab) {
    let store = lab.open();
    let write = |i: u64| {
        let store = store.clone();
        async move {
            let revision = Short(&*store).put(&format!("k{i}"), i.to_string()).await;
            let kv = Short(&*store).get(&format!("k{i}")).await.expect("writers read their writes");
            assert_eq!(kv.mod_revision, revision);
            revision.0
        }
    };
    let mut revisions = together((0..200).map(write)).await;
    revisions.sort_unstable();
    assert_eq!(revisions, (2..202).collect::<Vec<_>>());
}

async fn a_watch_starts_at_the_present(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    s.put("a", "1").await;
    for start in [None, Some(0)] {
        let mut watch = s.watch("a", start).await;
        let revision = s.put("a", "2").await;
        assert!(item(&mut watch).await.starts_with(&format!("{revision} +a=2")));
    }
}

async fn a_watch_starts_in_the_past(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    s.put("a", "1").await;
    s.put("b", "1").await;
    s.put("a", "2").await;
    s.delete("a").await;
    let mut watch = s.watch("", Some(3)).await;
    let expected = ["3 +b=1", "4 +a=2<1", "5 -a=<2", "progress 5"];
    assert_eq!(items(&mut watch, 4).await, expected);
    s.put("b", "2").await;
    assert_eq!(item(&mut watch).await, "6 +b=2<1");
    let mut from_first = s.watch("a", Some(1)).await;
    assert_eq!(items(&mut from_first, 3).await, ["2 +a=1", "4 +a=2<1", "5 -a=<2"]);
}

async fn a_watch_starts_in_the_future(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    let mut watch = s.watch("", Some(4)).await;
    for value in ["2", "3", "4"] {
        s.put("a", value).await;
    }
    assert_eq!(item(&mut watch).await, "4 +a=4<3");
}

async fn a_watch_from_the_next_revision_is_caught_up(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    let revision = s.put("a", "1").await;
    let mut watch = s.watch("", Some(revision.0 + 1)).await;
    assert_eq!(item(&mut watch).await, "progress 2");
    s.put("a", "2").await;
    assert_eq!(item(&mut watch).await, "3 +a=2<1");
}

async fn a_watch_hands_over_without_gap_or_repeat(lab: Lab) {
    let store = lab.open();
    const WRITES: u64 = 300;
    let writer = async {
        for i in 0..WRITES {
            Short(&*store).put("a", i.to_string()).await;
        }
    };
    let reader = |start: u64| {
        let store = store.clone();
        async move {
            let mut watch = Short(&*store).watch("", Some(start)).await;
            let mut expected = start;
            while expected < WRITES + 2 {
                match next(&mut watch).await {
                    Some(WatchItem::Events(revision, _)) => {
                        assert_eq!(revision, Revision(expected));
                        expected += 1;
                    }
                    Some(WatchItem::Progress(revision)) => {
                        assert_eq!(revision, Revision(expected - 1), "all before has been seen");
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    };
    let readers = async {
        for start in [2, 2, 50, 100, 290] {
            reader(start).await;
        }
    };
    tokio::join!(writer, readers, reader(2), reader(7));
}

async fn a_watch_sees_its_range_only(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    let mut watch = s.watch("/pods/", None).await;
    s.run(vec![put("/pods/a", "1"), put("/nodes/a", "1"), put("/pods/b", "1")]).await;
    s.put("/nodes/b", "1").await;
    s.run(vec![Op::DeleteRange { range: prefix("/") }]).await;
    assert_eq!(
        items(&mut watch, 2).await,
        ["2 +/pods/a=1, 2 +/pods/b=1", "4 -/pods/a=<1, 4 -/pods/b=<1"]
    );
}

async fn a_watch_shows_what_was_there_before(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    let mut watch = s.watch("", None).await;
    s.put("a", "1").await;
    let before = s.get("a").await;
    s.put("a", "2").await;
    let changed = s.get("a").await;
    s.delete("a").await;
    let mut seen = vec![];
    for _ in 0..3 {
        match next(&mut watch).await {
            Some(WatchItem::Events(_, events)) => seen.extend(events.iter().cloned()),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(seen[0].previous, None);
    assert_eq!((seen[1].previous.clone(), Some(seen[1].kv.clone())), (before, changed.clone()));
    assert_eq!(seen[2].previous, changed);
    let gone = &seen[2].kv;
    let header = (gone.create_revision.0, gone.mod_revision.0, gone.version, gone.lease);
    assert_eq!((gone.value.len(), header), (0, (0, 4, 0, 0)));
}

async fn a_transaction_arrives_as_one_item(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    let mut live = s.watch("", None).await;
    let ops = vec![put("a", "1"), put("b", "1"), put("a", "2"), delete("b")];
    s.run(ops).await;
    let expected = "2 +a=1, 2 +b=1, 2 +a=2<1, 2 -b=<1";
    assert_eq!(item(&mut live).await, expected);
    let mut replayed = s.watch("", Some(2)).await;
    assert_eq!(item(&mut replayed).await, expected);
}

async fn a_slow_watcher_misses_nothing_and_delays_nobody(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    let mut slow = s.watch("", None).await;
    let mut quick = s.watch("", None).await;
    const WRITES: u64 = 3000;
    // A server gives each of them a limited time, and a busy machine cannot do all of them at once.
    const AT_ONCE: u64 = 100;
    let write = |i: u64| {
        let store = store.clone();
        async move { Short(&*store).put("a", i.to_string()).await }
    };
    let writes = async {
        for some in 0..WRITES / AT_ONCE {
            together((0..AT_ONCE).map(|i| write(some * AT_ONCE + i))).await;
        }
    };
    let check = async |watch: &mut store::Watch| {
        let mut expected = 2;
        while expected < WRITES + 2 {
            if let Some(WatchItem::Events(revision, _)) = next(watch).await {
                assert_eq!(revision, Revision(expected));
                expected += 1;
            }
        }
    };
    tokio::join!(writes, check(&mut quick));
    check(&mut slow).await;
}

async fn progress_on_request_is_behind_its_events(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    let mut watch = s.watch("a", None).await;
    s.put("a", "1").await;
    s.put("b", "1").await;
    watch.request_progress();
    assert_eq!(items(&mut watch, 2).await, ["2 +a=1", "progress 3"]);
}

async fn progress_needs_no_events(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    let mut watch = s.watch("a", None).await;
    for _ in 0..3 {
        let revision = s.put("b", "1").await;
        watch.request_progress();
        assert_eq!(item(&mut watch).await, format!("progress {revision}"));
    }
}

async fn compaction_forgets_the_past_and_keeps_the_floor(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    for value in ["2", "3", "4", "5"] {
        s.put("a", value).await;
    }
    s.delete("a").await;
    store.compact(Revision(4)).await.expect("4 is there");
    for revision in [1, 2, 3] {
        let error = s.try_at(revision, "").await.expect_err("it is compacted");
        let Error::Compacted { requested, floor } = error else { panic!("{error}") };
        assert_eq!((requested, floor), (Revision(revision), Revision(4)));
    }
    assert_eq!(s.at(4, "").await, ["a=4"]);
    assert_eq!(s.at(5, "").await, ["a=5"]);
    assert_eq!(s.at(6, "").await, Vec::<String>::new());
}

async fn compaction_refuses_the_past_and_the_future(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    for value in ["2", "3", "4"] {
        s.put("a", value).await;
    }
    let future = store.compact(Revision(5)).await;
    assert!(matches!(future, Err(Error::Future { .. })), "{future:?}");
    store.compact(Revision(4)).await.expect("4 is the present");
    for revision in [3, 4] {
        let past = store.compact(Revision(revision)).await;
        assert!(matches!(past, Err(Error::Compacted { .. })), "{past:?}");
    }
    assert_eq!(s.at(4, "").await, ["a=4"]);
}

async fn compaction_ends_watches_of_the_past(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    for value in ["2", "3", "4", "5"] {
        s.put("a", value).await;
    }
    store.compact(Revision(4)).await.expect("4 is there");
    let mut below = s.watch("", Some(3)).await;
    assert_eq!(items(&mut below, 2).await, ["compacted 4", "end"]);
    let mut above = s.watch("", Some(5)).await;
    assert_eq!(items(&mut above, 2).await, ["5 +a=5<4", "progress 5"]);
}

async fn a_watch_from_the_floor_shows_what_was_there_before(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    for value in ["2", "3", "4", "5"] {
        s.put("a", value).await;
    }
    store.compact(Revision(4)).await.expect("4 is there");
    let mut at_floor = s.watch("", Some(4)).await;
    assert_eq!(items(&mut at_floor, 3).await, ["4 +a=4<3", "5 +a=5<4", "progress 5"]);
}

async fn compaction_keeps_old_values_that_live(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    s.put("old", "1").await;
    for i in 0..100 {
        s.put("busy", i.to_string()).await;
    }
    let before = s.get("old").await;
    store.compact(Revision(90)).await.expect("90 is there");
    s.put("busy", "again").await;
    assert_eq!(s.get("old").await, before);
    assert_eq!(s.at(90, "").await, ["busy=87", "old=1"]);
    let mut watch = s.watch("old", Some(95)).await;
    s.put("old", "2").await;
    let seen = items(&mut watch, 2).await;
    assert!(seen.contains(&"104 +old=2<1".to_string()), "{seen:?}");
}

async fn a_lease_must_exist(lab: Lab) {
    let store = lab.open();
    for lease in [-1, 5] {
        let success = vec![leased("a", "1", lease)];
        let put = store.txn(Txn { success, ..Txn::default() }).await.map(|_| ());
        let alive = store.lease_keep_alive(lease).await.map(|_| ());
        let revoked = store.lease_revoke(lease).await;
        for result in [put, alive, revoked] {
            assert!(matches!(result, Err(Error::LeaseNotFound(id)) if id == lease), "{result:?}");
        }
    }
}

async fn revoking_a_lease_deletes_its_keys_together(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    let lease = store.lease_grant(600).await.expect("granted");
    assert_ne!(lease, store.lease_grant(600).await.expect("granted"));
    let mut watch = s.watch("", None).await;
    s.run(vec![leased("b", "1", lease), leased("a", "1", lease), put("c", "1")]).await;
    assert_eq!(s.get("a").await.map(|kv| kv.lease), Some(lease));
    store.lease_revoke(lease).await.expect("it is there");
    assert_eq!(s.at(0, "").await, ["c=1"]);
    assert_eq!(items(&mut watch, 2).await[1], "3 -a=<1, 3 -b=<1");
    let again = store.lease_revoke(lease).await;
    assert!(matches!(again, Err(Error::LeaseNotFound(_))), "{again:?}");
    // Without keys, revoking changes nothing.
    let empty = store.lease_grant(600).await.expect("granted");
    store.lease_revoke(empty).await.expect("it is there");
    assert_eq!(s.revision().await, Revision(3));
}

async fn a_lease_ends_at_its_time(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    let mut watch = s.watch("", None).await;
    let lease = in_time(async || {
        let lease = store.lease_grant(1).await?;
        s.try_run(vec![leased("a", "1", lease), put("b", "1")]).await.map(|_| lease)
    })
    .await;
    assert_eq!(items(&mut watch, 2).await[1], "3 -a=<1");
    let late = store.lease_keep_alive(lease).await;
    assert!(matches!(late, Err(Error::LeaseNotFound(_))), "{late:?}");
}

/// Retries if a stalled machine let a short lease expire before its use: then nothing is written.
async fn in_time<T>(attempt: impl AsyncFn() -> Result<T, Error>) -> T {
    loop {
        match attempt().await {
            Err(Error::LeaseNotFound(_)) => {}
            outcome => return outcome.expect("it is done"),
        }
    }
}

async fn a_kept_lease_outlives_another(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    let mut watch = s.watch("", None).await;
    for _ in 0..10 {
        if is_outlived(&s, &mut watch).await {
            return;
        }
        // The machine stalled until the kept lease expired: that proves nothing.
        while s.range(RangeRequest::new(prefix(""))).await.count > 0 {
            item(&mut watch).await;
        }
        watch = s.watch("", None).await;
    }
    panic!("each time the machine stalled for seconds");
}

/// Tries once to keep one lease alive while others expire; false if the machine stalled.
async fn is_outlived(s: &Short<'_>, watch: &mut store::Watch) -> bool {
    const SECONDS: i64 = 6;
    let lasts = |since: Instant| since.elapsed() < Duration::from_secs(SECONDS.unsigned_abs());
    let begun = Instant::now();
    let (kept, mut next) = in_time(async || {
        let kept = s.0.lease_grant(SECONDS).await?;
        let first = s.0.lease_grant(SECONDS / 2).await?;
        let second = s.0.lease_grant(SECONDS).await?;
        let put = |key, lease| leased(key, "1", lease);
        let ops = vec![put("kept", kept), put("first", first), put("second", second)];
        s.try_run(ops).await.map(|revision| (kept, revision.0))
    })
    .await;
    let mut gone = |key: &str| {
        next += 1;
        format!("{next} -{key}=<1")
    };
    item(watch).await;
    let first = item(watch).await;
    let kept_at = Instant::now();
    let alive = s.0.lease_keep_alive(kept).await;
    if !lasts(begun) {
        return false;
    }
    assert_eq!(first, gone("first"));
    alive.expect("it lives");
    let second = item(watch).await;
    let there = s.get("kept").await;
    if !lasts(kept_at) {
        return false;
    }
    assert_eq!(second, gone("second"));
    assert!(there.is_some());
    assert_eq!(item(watch).await, gone("kept"));
    true
}

async fn a_key_follows_its_last_lease(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    let first = store.lease_grant(600).await.expect("granted");
    let second = store.lease_grant(600).await.expect("granted");
    s.run(vec![leased("a", "1", first), leased("b", "1", first), leased("c", "1", first)]).await;
    s.run(vec![leased("a", "2", second), put("b", "2")]).await;
    s.delete("c").await;
    s.put("c", "2").await;
    store.lease_revoke(first).await.expect("it is there");
    assert_eq!(s.at(0, "").await, ["a=2", "b=2", "c=2"]);
    store.lease_revoke(second).await.expect("it is there");
    assert_eq!(s.at(0, "").await, ["b=2", "c=2"]);
}

async fn a_lease_has_the_id_that_was_asked_for(lab: Lab) {
    let store = lab.open();
    store.lease_grant_as(77, 600).await.expect("granted");
    let again = store.lease_grant_as(77, 5).await;
    assert!(matches!(again, Err(Error::LeaseExists(77))), "{again:?}");
    assert_eq!(store.lease_keep_alive(77).await.expect("it lives"), 600);
    Short(&*store).run(vec![leased("a", "1", 77)]).await;
    store.lease_revoke(77).await.expect("it is there");
    store.lease_grant_as(77, 5).await.expect("it is free again");
}

async fn leases_are_listed_with_their_keys(lab: Lab) {
    let store = lab.open();
    store.lease_grant_as(9, 600).await.expect("granted");
    store.lease_grant_as(5, 60).await.expect("granted");
    Short(&*store).run(vec![leased("b", "1", 5), leased("a", "1", 5)]).await;
    let leases = store.leases().await.expect("listed");
    let mut seen = vec![];
    for mut lease in leases {
        assert!((1..=lease.ttl_seconds).contains(&lease.left_seconds), "{lease:?}");
        lease.keys.sort();
        seen.push((lease.id, lease.ttl_seconds, lease.keys));
    }
    assert_eq!(seen, [(5, 60, vec![bytes("a"), bytes("b")]), (9, 600, vec![])]);
}

async fn comparisons_are_over_all_keys_of_a_range(lab: Lab) {
    use store::{Field, Relation};
    let store = lab.open();
    let s = Short(&*store);
    s.put("/a", "1").await;
    s.put("/b", "2").await;
    s.put("/b", "3").await;
    let holds = async |range: KeyRange, relation, field| {
        let compare = vec![Compare::Every { range, relation, field }];
        s.txn(compare, vec![], vec![]).await.succeeded
    };
    let one = |key: &str| KeyRange::one(bytes(key));
    let all = || prefix("/");
    assert!(holds(all(), Relation::Greater, Field::Version(0)).await);
    assert!(!holds(all(), Relation::Equal, Field::Version(1)).await);
    assert!(holds(all(), Relation::Less, Field::CreateRevision(Revision(4))).await);
    assert!(!holds(all(), Relation::Less, Field::ModRevision(Revision(4))).await);
    assert!(holds(one("/b"), Relation::Equal, Field::Value(bytes("3"))).await);
    assert!(holds(one("/b"), Relation::NotEqual, Field::Value(bytes("2"))).await);
    assert!(holds(one("/b"), Relation::Equal, Field::Lease(0)).await);
    // A missing key has no value, and its numbers are 0.
    assert!(!holds(one("/c"), Relation::NotEqual, Field::Value(bytes("2"))).await);
    assert!(holds(one("/c"), Relation::Equal, Field::ModRevision(Revision(0))).await);
}

async fn a_snapshot_holds_what_lives_and_its_leases(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    store.lease_grant_as(7, 600).await.expect("granted");
    s.run(vec![put("/a", "1"), leased("/b", vec![b'x'; 9000], 7), put("/c", "1")]).await;
    s.put("/a", "2").await;
    let last = s.delete("/c").await;
    let file = tempfile::NamedTempFile::new().expect("a file");
    let mut snapshot = store.snapshot().await.expect("taken");
    let mut content = vec![];
    while let Some(chunk) = snapshot.chunks.recv().await {
        content.extend_from_slice(&chunk.expect("it does not break off"));
    }
    assert!(snapshot.size.is_none_or(|size| size == content.len() as u64));
    std::fs::write(file.path(), content).expect("written");
    let content = store::snapshot::read(file.path(), true).expect("readable");
    let there = s.range(RangeRequest::new(prefix("/"))).await.kvs;
    assert_eq!(content.kvs, there);
    assert_eq!((content.revision, content.leases), (last, vec![(7, 600)]));
}

async fn status_counts_keys_and_names_the_floor(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    for value in 0..5 {
        s.put("/a", value.to_string()).await;
    }
    s.put("/b", "1").await;
    store.compact(Revision(4)).await.expect("compacted");
    let status = store.status().await.expect("told");
    let told = (status.keys, status.revision, status.floor);
    assert_eq!(told, (2, Revision(7), Some(Revision(4))));
}

async fn big_values_have_a_limit(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    let value = vec![b'x'; VALUE_LIMIT];
    s.put("big", &value).await;
    s.put("big2", &value).await;
    assert_eq!(s.get("big").await.expect("it is there").value, value);
    let mut watch = s.watch("big", Some(2)).await;
    for revision in [2, 3] {
        let Some(WatchItem::Events(at, events)) = next(&mut watch).await else { panic!("events") };
        assert_eq!((at.0, events[0].kv.value.len()), (revision, VALUE_LIMIT));
    }
    let failure = vec![put("bigger", vec![b'x'; VALUE_LIMIT + 1])];
    let refused = store.txn(Txn { failure, ..Txn::default() }).await.expect_err("too large");
    let text = refused.to_string();
    assert_eq!(text, "the value under bigger has 1572865 bytes, the limit is 1572864");
    assert_eq!(s.revision().await, Revision(3));
}

async fn values_are_what_was_put_however_they_are_kept(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    let names = |n: u64| format!(r#"{{"name":"a-{n}","path":"/dev/termination-log"}},"#);
    let noise = (0..3000_u64).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8);
    let values: [Vec<u8>; 5] = [
        (0..2000).flat_map(|n| names(n).into_bytes()).collect(),
        noise.collect(),
        names(0).into(),
        vec![b'x'; 256],
        vec![0; 100_000],
    ];
    let mut watch = s.watch("a", Some(2)).await;
    for (n, value) in values.iter().enumerate() {
        s.put(&format!("a{n}"), value).await;
        assert_eq!(s.get(&format!("a{n}")).await.expect("it is there").value, *value);
    }
    // Each value replaces another one.
    for (n, value) in values.iter().rev().enumerate() {
        let put = s.txn(vec![], vec![put(&format!("a{n}"), value)], vec![]).await;
        let OpResult::Put { previous: Some(before) } = &put.results[0] else { panic!("a value") };
        assert_eq!(before.value, values[n]);
    }
    let is = |kvs: &[KeyValue], expected: &mut dyn Iterator<Item = &Vec<u8>>| {
        let seen = kvs.iter().map(|kv| kv.value.bytes().to_vec());
        assert!(seen.eq(expected.cloned()));
    };
    is(&s.range(RangeRequest::new(prefix("a"))).await.kvs, &mut values.iter().rev());
    is(&s.try_at(6, "a").await.expect("the past").kvs, &mut values.iter());
    for n in 0..10 {
        let (at, events) = loop {
            match next(&mut watch).await.expect("an item") {
                WatchItem::Events(at, events) => break (at, events),
                other => assert!(matches!(other, WatchItem::Progress(_)), "{other:?}"),
            }
        };
        let (value, before) = if n < 5 { (n, None) } else { (9 - n, Some(n - 5)) };
        assert_eq!(at, Revision(n as u64 + 2));
        assert_eq!(events[0].kv.value, values[value]);
        let previous = events[0].previous.as_ref().map(|kv| kv.value.clone());
        assert_eq!(previous, before.map(|n| values[n].clone().into()));
    }
    if lab.backend.durable {
        store.close().await;
        drop(store);
        let all = lab.open().range(RangeRequest::new(prefix("a"))).await.expect("readable");
        is(&all.kvs, &mut values.iter().rev());
    }
}

async fn bytes_are_bytes(lab: Lab) {
    let store = lab.open();
    let keys: [&[u8]; 4] = [b"\0", b"a\0b", b"\xff", b"\xff\xff\x01"];
    for key in keys {
        let success = vec![Op::Put { key: key.into(), value: key.repeat(2).into(), lease: 0 }];
        store.txn(Txn { success, ..Txn::default() }).await.expect("any bytes are a key");
    }
    let all = store.range(RangeRequest::new(KeyRange::prefix(&b""[..]))).await.expect("readable");
    let seen: Vec<_> =
        all.kvs.iter().map(|kv| (kv.key.to_vec(), kv.value.bytes().to_vec())).collect();
    assert_eq!(seen, keys.map(|key| (key.to_vec(), key.repeat(2))));
    let ff = store.range(RangeRequest::new(KeyRange::prefix(&b"\xff"[..]))).await;
    assert_eq!(ff.expect("readable").count, 2);
    Short(&*store).put("empty", "").await;
    assert_eq!(Short(&*store).get("empty").await.map(|kv| kv.value.len()), Some(0));
}

async fn reopening_keeps_everything(lab: Lab) {
    if !lab.backend.durable {
        return;
    }
    let store = lab.open();
    let s = Short(&*store);
    let lease = store.lease_grant(600).await.expect("granted");
    for value in ["1", "2", "3"] {
        s.put("a", value).await;
    }
    s.run(vec![put("gone", "1"), leased("b", "1", lease)]).await;
    s.delete("gone").await;
    store.compact(Revision(3)).await.expect("3 is there");
    let before = s.range(RangeRequest::new(prefix(""))).await;
    store.close().await;

    let store = lab.open();
    let s = Short(&*store);
    let after = s.range(RangeRequest::new(prefix(""))).await;
    assert_eq!((after.kvs, after.revision), (before.kvs, before.revision));
    assert_eq!(s.at(3, "").await, ["a=2"]);
    assert_eq!(s.at(5, "").await, ["a=3", "b=1", "gone=1"]);
    let floor = s.try_at(2, "").await.expect_err("compacted before");
    assert!(matches!(floor, Error::Compacted { .. }), "{floor}");
    let mut watch = s.watch("", Some(4)).await;
    let expected = ["4 +a=3<2", "5 +gone=1, 5 +b=1", "6 -gone=<1", "progress 6"];
    assert_eq!(items(&mut watch, 4).await, expected);
    store.lease_revoke(lease).await.expect("leases are kept");
    assert_eq!(item(&mut watch).await, "7 -b=<1");
    assert_eq!(s.put("a", "4").await, Revision(8));
}

async fn a_closed_store_refuses(lab: Lab) {
    let store = lab.open();
    let s = Short(&*store);
    s.put("a", "1").await;
    let mut watch = s.watch("", None).await;
    store.close().await;
    assert_eq!(item(&mut watch).await, "end");
    let results = [
        store.range(RangeRequest::new(prefix(""))).await.map(|_| ()),
        store.txn(Txn { success: vec![put("a", "2")], ..Txn::default() }).await.map(|_| ()),
        store.revision().await.map(|_| ()),
        store.compact(Revision(2)).await,
        store.lease_grant(5).await.map(|_| ()),
    ];
    for result in results {
        assert!(matches!(result, Err(Error::Closed)), "{result:?}");
    }
    store.close().await;
}

/// Runs futures concurrently and waits for all.
async fn together<T: Send + 'static>(
    work: impl IntoIterator<Item = impl Future<Output = T> + Send + 'static>,
) -> Vec<T> {
    let mut set = tokio::task::JoinSet::new();
    for one in work {
        set.spawn(one);
    }
    set.join_all().await
}
