//! Tests of the member's answers, without a connection. The contract of the store behind it runs in
//! `tests/it`, over a socket.

use std::sync::Arc;

use bytes::Bytes;
use http_body_util::BodyExt;
use store::{Sim, Store};
use tonic::{Code, Status};

use super::messages as wire;
use super::{Options, Server, Shared, kv, lease, maintenance, pages, status};
use crate::messages::{Request, Response};

fn member(options: Options) -> Arc<Shared> {
    over(Sim::open(), options)
}

fn over(store: Arc<dyn Store>, options: Options) -> Arc<Shared> {
    Server::new(store, options, base::task::Tasks::new("test")).0
}

fn put(key: &str, value: &str) -> wire::PutRequest {
    wire::PutRequest {
        key: key.to_owned().into(),
        value: value.to_owned().into(),
        ..Default::default()
    }
}

async fn written(shared: &Arc<Shared>, key: &str, value: &str) {
    kv::put(shared.clone(), put(key, value)).await.expect("written");
}

fn op(request: Request) -> wire::RequestOp {
    wire::RequestOp { request: Some(request) }
}

fn all() -> wire::RangeRequest {
    let nul = Bytes::from_static(b"\0");
    wire::RangeRequest { key: nul.clone(), range_end: nul, ..Default::default() }
}

fn keys(answer: &wire::RangeResponse) -> String {
    let text = |kv: &wire::KeyValue| String::from_utf8_lossy(&kv.key).into_owned();
    answer.kvs.iter().map(text).collect::<Vec<_>>().join(" ")
}

fn refused<T>(answer: Result<T, Status>, code: Code, part: &str) {
    let error = answer.err().expect("it is refused");
    assert!(error.code() == code && error.message().contains(part), "{error}");
}

#[tokio::test]
async fn ranges_are_sorted_filtered_and_limited() {
    let shared = member(Options::default());
    for (key, value) in [("a", "9"), ("b", "5"), ("c", "7"), ("a", "8")] {
        written(&shared, key, value).await;
    }
    let check = async |request: wire::RangeRequest, expected: &str, more: bool, count: i64| {
        let answer = kv::range(shared.clone(), request.clone()).await.expect("read");
        let seen = (keys(&answer), answer.more, answer.count);
        assert_eq!(seen, (expected.to_owned(), more, count), "{request:?}");
    };
    let descending = wire::SortOrder::Descend.into();
    let by = |target: wire::SortTarget| wire::RangeRequest { sort_target: target.into(), ..all() };
    check(all(), "a b c", false, 3).await;
    check(wire::RangeRequest { limit: 2, ..all() }, "a b", true, 3).await;
    check(wire::RangeRequest { limit: 2, sort_order: descending, ..all() }, "c b", true, 3).await;
    check(by(wire::SortTarget::Mod), "b c a", false, 3).await;
    check(by(wire::SortTarget::Value), "b c a", false, 3).await;
    check(by(wire::SortTarget::Version), "b c a", false, 3).await;
    check(wire::RangeRequest { min_mod_revision: 4, ..all() }, "a c", false, 3).await;
    check(wire::RangeRequest { max_create_revision: 3, ..all() }, "a b", false, 3).await;
    check(wire::RangeRequest { count_only: true, ..all() }, "", false, 3).await;
    check(wire::RangeRequest { revision: 3, ..all() }, "a b", false, 2).await;
    let bare = wire::RangeRequest { keys_only: true, ..all() };
    let bare = kv::range(shared.clone(), bare).await.expect("read");
    assert!(bare.kvs.iter().all(|kv| kv.value.is_empty() && kv.version > 0));
    let nothing = wire::RangeRequest::default();
    refused(kv::range(shared.clone(), nothing).await, Code::InvalidArgument, "key is not provided");
    let future = wire::RangeRequest { revision: 99, ..all() };
    refused(kv::range(shared.clone(), future).await, Code::OutOfRange, "is a future revision");
}

#[tokio::test]
async fn a_put_may_keep_the_value_or_the_lease() {
    let shared = member(Options::default());
    let wanted = wire::LeaseGrantRequest { ttl: 60, id: 7 };
    let lease = lease::grant(shared.clone(), wanted).await.expect("granted").id;
    let leased = wire::PutRequest { lease, ..put("a", "1") };
    kv::put(shared.clone(), leased).await.expect("written");
    let kept = wire::PutRequest { ignore_lease: true, prev_kv: true, ..put("a", "2") };
    let answer = kv::put(shared.clone(), kept).await.expect("written");
    assert_eq!(answer.prev_kv.map(|kv| kv.value), Some(Bytes::from_static(b"1")));
    let kept = wire::PutRequest { ignore_value: true, ..put("a", "") };
    kv::put(shared.clone(), kept).await.expect("written");
    let now = kv::range(shared.clone(), all()).await.expect("read").kvs.remove(0);
    assert_eq!((&now.value[..], now.lease, now.version), (&b"2"[..], 0, 3));
    let missing = wire::PutRequest { ignore_value: true, ..put("z", "") };
    refused(kv::put(shared.clone(), missing).await, Code::InvalidArgument, "key not found");
    let both = wire::PutRequest { ignore_value: true, ..put("a", "3") };
    refused(kv::put(shared.clone(), both).await, Code::InvalidArgument, "value is provided");
}

#[tokio::test]
async fn transactions_compare_and_answer_each_op() {
    let shared = member(Options { max_ops: 4, ..Options::default() });
    written(&shared, "a", "1").await;
    let compare = wire::Compare {
        result: wire::CompareResult::Greater.into(),
        target: wire::CompareTarget::Version.into(),
        key: "a".into(),
        with: Some(wire::CompareWith::Version(0)),
        range_end: Bytes::new(),
    };
    let range = wire::RangeRequest { key: "a".into(), ..Default::default() };
    let delete = wire::DeleteRangeRequest { key: "a".into(), ..Default::default() };
    let request = wire::TxnRequest {
        compare: vec![compare],
        success: vec![
            op(Request::Range(range)),
            op(Request::DeleteRange(delete.clone())),
            op(Request::Put(put("b", "2"))),
        ],
        failure: vec![],
    };
    let answer = kv::txn(shared.clone(), request.clone()).await.expect("it runs");
    let kinds: Vec<_> = answer.responses.iter().map(|one| one.response.as_ref()).collect();
    let [Some(Response::Range(read)), Some(Response::DeleteRange(gone)), Some(Response::Put(_))] =
        kinds[..]
    else {
        panic!("{kinds:?}");
    };
    assert_eq!((keys(read).as_str(), gone.deleted, answer.succeeded), ("a", 1, true));
    let again = kv::txn(shared.clone(), request).await.expect("it runs");
    assert!(!again.succeeded && again.responses.is_empty());
    let twice = vec![op(Request::Put(put("a", "1"))), op(Request::Put(put("a", "2")))];
    let over = vec![op(Request::Put(put("a", "1"))), op(Request::DeleteRange(delete))];
    for success in [twice, over] {
        let request = wire::TxnRequest { success, ..Default::default() };
        refused(kv::txn(shared.clone(), request).await, Code::InvalidArgument, "duplicate key");
    }
    let success = vec![op(Request::Range(all())); 5];
    let many = wire::TxnRequest { success, ..Default::default() };
    refused(kv::txn(shared.clone(), many).await, Code::InvalidArgument, "too many operations");
    let large = put("a", &"x".repeat(2 << 20));
    refused(kv::put(shared.clone(), large).await, Code::InvalidArgument, "request is too large");
}

#[tokio::test]
async fn an_exceeded_quota_allows_deletes() {
    let dir = tempfile::tempdir().expect("a directory");
    let options = store::Options { sync: false, ..store::Options::default() };
    let store = store::Embedded::open(dir.path(), options).expect("it opens");
    let shared = over(store, Options { quota_bytes: Some(10_000), ..Options::default() });
    for i in 0..12 {
        let key = format!("k{i}");
        if kv::put(shared.clone(), put(&key, &"x".repeat(1000))).await.is_err() {
            break;
        }
    }
    let no_space = "etcdserver: mvcc: database space exceeded";
    let late = kv::put(shared.clone(), put("late", "x")).await;
    refused(late, Code::ResourceExhausted, no_space);
    let alarms = maintenance::alarm(shared.clone(), Default::default()).await.expect("told");
    assert_eq!(alarms.alarms.len(), 1);
    assert_eq!(pages::serve(&shared, "/health").await.status(), 503);
    let delete =
        wire::DeleteRangeRequest { key: "k".into(), range_end: "l".into(), ..Default::default() };
    let gone = kv::delete_range(shared.clone(), delete).await.expect("deletes are accepted");
    assert!(gone.deleted >= 9);
    let revision = gone.header.map_or(0, |header| header.revision);
    let compact = wire::CompactionRequest { revision };
    kv::compact(shared.clone(), compact).await.expect("compacted");
    let late = kv::put(shared.clone(), put("late", "x")).await;
    refused(late, Code::ResourceExhausted, no_space);
    let disarm =
        wire::AlarmRequest { action: wire::AlarmAction::Deactivate.into(), ..Default::default() };
    // Compacted data is removed from the disk soon, not at once.
    testkit::wait::found("free space again", async || {
        maintenance::alarm(shared.clone(), disarm.clone()).await.expect("disarmed");
        kv::put(shared.clone(), put("late", "x")).await.ok()
    })
    .await;
}

#[tokio::test]
async fn pages_and_the_cluster_of_one() {
    let shared = member(Options { name: "n1".into(), ..Options::default() });
    let page = async |path: &str| {
        let response = pages::serve(&shared, path).await;
        let body = response.into_body().collect().await.expect("memory").to_bytes();
        String::from_utf8_lossy(&body).into_owned()
    };
    assert_eq!(page("/health").await, r#"{"health":"true","reason":""}"#);
    assert_eq!(page("/version").await, r#"{"etcdserver":"3.6.5","etcdcluster":"3.6.0"}"#);
    let metrics = page("/metrics").await;
    for part in [
        "\netcd_server_has_leader 1\n",
        "etcd_disk_wal_fsync_duration_seconds_bucket{le=\"0.001\"} 0\n",
        "etcd_disk_wal_fsync_duration_seconds_bucket{le=\"+Inf\"} 0\n",
    ] {
        assert!(metrics.contains(part), "{part} in {metrics}");
    }
    assert!(page("/nothing").await.contains("404"));
    let members = maintenance::members(shared.clone(), wire::Empty {}).await.expect("told");
    assert_eq!(members.members[0].name, "n1");
    let more = maintenance::one_member(shared.clone(), wire::Empty {}).await;
    refused(more, Code::FailedPrecondition, "use etcd itself");
    let status = maintenance::status_of(shared.clone(), wire::Empty {}).await.expect("told");
    assert_eq!((status.leader, status.raft_term), (shared.member_id, 1));
}

#[tokio::test]
async fn errors_have_etcds_words() {
    let check = |error: store::Error, code: Code, text: &str| {
        let status = status(error);
        assert_eq!((status.code(), status.message()), (code, text));
    };
    use store::Error;
    check(Error::LeaseNotFound(1), Code::NotFound, "etcdserver: requested lease not found");
    check(Error::LeaseExists(1), Code::FailedPrecondition, "etcdserver: lease already exists");
    let floor = store::Revision(9);
    check(
        Error::Compacted { requested: store::Revision(1), floor },
        Code::OutOfRange,
        "etcdserver: mvcc: required revision has been compacted",
    );
}
