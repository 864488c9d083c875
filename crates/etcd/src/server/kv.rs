//! KV: range, put, delete, transactions, compaction.
//!
//! The store's requests are simpler than etcd's: sort orders and revision filters are added here, and
//! "keep the value" by compare-and-put.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use store::{
    Compare, Field, KeyRange, KeyValue, Op, OpResult, Relation, Revision, Txn, VALUE_LIMIT,
};
use tonic::Status;

use super::messages as wire;
use super::{Answer, Shared, invalid, status};
use crate::convert;

pub async fn range(
    shared: Arc<Shared>,
    request: wire::RangeRequest,
) -> Answer<wire::RangeResponse> {
    check_key(&request.key)?;
    let plain = is_plain(&request);
    let limit = if plain { request.limit.max(0) } else { 0 };
    let answer = shared
        .store
        .range(store::RangeRequest {
            range: key_range(request.key.clone(), request.range_end.clone()),
            limit: usize::try_from(limit).unwrap_or(usize::MAX),
            revision: at(request.revision),
            count_only: request.count_only && plain,
        })
        .await
        .map_err(status)?;
    let header = shared.header(answer.revision);
    if plain {
        let kvs = answer.kvs.into_iter().map(|kv| key_value(kv, request.keys_only)).collect();
        let count = answer.count as i64;
        return Ok(wire::RangeResponse { header, kvs, more: answer.more, count });
    }
    Ok(wire::RangeResponse { header, ..arranged(&request, answer.kvs) })
}

fn at(revision: i64) -> Option<Revision> {
    (revision > 0).then(|| convert::revision(revision))
}

/// Whether keys come in ascending order and unfiltered, as from the store.
fn is_plain(request: &wire::RangeRequest) -> bool {
    let by_key = request.sort_target() == wire::SortTarget::Key;
    let ascends = matches!(request.sort_order(), wire::SortOrder::None | wire::SortOrder::Ascend);
    let sorted = by_key && ascends;
    let bounds = [
        request.min_mod_revision,
        request.max_mod_revision,
        request.min_create_revision,
        request.max_create_revision,
    ];
    sorted && bounds == [0; 4]
}

/// All keys of a range, filtered, sorted and limited by the request.
fn arranged(request: &wire::RangeRequest, mut kvs: Vec<KeyValue>) -> wire::RangeResponse {
    // Upstream: the count is the one before the filters.
    let count = kvs.len() as i64;
    let within = |revision: Revision, least: i64, most: i64| {
        let number = convert::number(revision);
        number >= least && (most == 0 || number <= most)
    };
    kvs.retain(|kv| {
        within(kv.mod_revision, request.min_mod_revision, request.max_mod_revision)
            && within(kv.create_revision, request.min_create_revision, request.max_create_revision)
    });
    match request.sort_target() {
        wire::SortTarget::Key => {}
        wire::SortTarget::Version => kvs.sort_by_key(|kv| kv.version),
        wire::SortTarget::Create => kvs.sort_by_key(|kv| kv.create_revision),
        wire::SortTarget::Mod => kvs.sort_by_key(|kv| kv.mod_revision),
        wire::SortTarget::Value => kvs.sort_by_cached_key(|kv| kv.value.bytes()),
    }
    if request.sort_order() == wire::SortOrder::Descend {
        kvs.reverse();
    }
    let limit = match usize::try_from(request.limit) {
        Ok(0) | Err(_) => usize::MAX,
        Ok(limit) => limit,
    };
    let more = kvs.len() > limit;
    kvs.truncate(if request.count_only { 0 } else { limit });
    let kvs = kvs.into_iter().map(|kv| key_value(kv, request.keys_only)).collect();
    wire::RangeResponse { header: None, kvs, more, count }
}

pub async fn put(shared: Arc<Shared>, request: wire::PutRequest) -> Answer<wire::PutResponse> {
    check_put(&request)?;
    shared.check_space().await?;
    let wants_previous = request.prev_kv;
    let answer = if request.ignore_value || request.ignore_lease {
        put_part(&shared, request).await?
    } else {
        check_size(&shared, request.key.len() + request.value.len())?;
        let op = Op::Put { key: request.key, value: request.value, lease: request.lease };
        shared.store.txn(Txn { success: vec![op], ..Txn::default() }).await.map_err(status)?
    };
    let previous = match answer.results.into_iter().next() {
        Some(OpResult::Put { previous }) if wants_previous => previous,
        _ => None,
    };
    let prev_kv = previous.map(|kv| key_value(kv, false));
    Ok(wire::PutResponse { header: shared.header(answer.revision), prev_kv })
}

/// Keeps the existing value or lease, also if others write at the same time.
async fn put_part(shared: &Shared, request: wire::PutRequest) -> Answer<store::TxnResponse> {
    loop {
        let there = store::RangeRequest::new(KeyRange::one(request.key.clone()));
        let there = shared.store.range(there).await.map_err(status)?.kvs.pop();
        let there = there.ok_or_else(|| invalid("key not found"))?;
        let value = if request.ignore_value { there.value.bytes() } else { request.value.clone() };
        let lease = if request.ignore_lease { there.lease } else { request.lease };
        let txn = Txn {
            compare: vec![Compare::ModRevision(request.key.clone(), there.mod_revision)],
            success: vec![Op::Put { key: request.key.clone(), value, lease }],
            failure: vec![],
        };
        let answer = shared.store.txn(txn).await.map_err(status)?;
        if answer.succeeded {
            return Ok(answer);
        }
    }
}

pub async fn delete_range(
    shared: Arc<Shared>,
    request: wire::DeleteRangeRequest,
) -> Answer<wire::DeleteRangeResponse> {
    check_key(&request.key)?;
    let range = key_range(request.key, request.range_end);
    let txn = Txn { success: vec![Op::DeleteRange { range }], ..Txn::default() };
    let answer = shared.store.txn(txn).await.map_err(status)?;
    let header = shared.header(answer.revision);
    let Some(OpResult::Deleted { previous }) = answer.results.into_iter().next() else {
        return Err(Status::internal("etcdserver: a delete without an answer"));
    };
    Ok(wire::DeleteRangeResponse { header, ..deleted(previous, request.prev_kv) })
}

fn deleted(previous: Vec<KeyValue>, wanted: bool) -> wire::DeleteRangeResponse {
    let deleted = previous.len() as i64;
    let previous = if wanted { previous } else { vec![] };
    let prev_kvs = previous.into_iter().map(|kv| key_value(kv, false)).collect();
    wire::DeleteRangeResponse { header: None, deleted, prev_kvs }
}

pub async fn txn(shared: Arc<Shared>, request: wire::TxnRequest) -> Answer<wire::TxnResponse> {
    let most = shared.options.max_ops;
    if [request.compare.len(), request.success.len(), request.failure.len()]
        .iter()
        .any(|count| *count > most)
    {
        return Err(invalid("too many operations in txn request"));
    }
    check_branch(&request.success)?;
    check_branch(&request.failure)?;
    let writes = |op: &wire::RequestOp| matches!(op.request, Some(wire::Request::Put(_)));
    if request.success.iter().chain(&request.failure).any(writes) {
        shared.check_space().await?;
    }
    check_size(&shared, prost::Message::encoded_len(&request).saturating_sub(SLACK))?;
    let ops = |ops: &[wire::RequestOp]| ops.iter().map(op).collect::<Answer<Vec<Op>>>();
    let compare = request.compare.iter().map(compare).collect::<Answer<_>>()?;
    let (success, failure) = (ops(&request.success)?, ops(&request.failure)?);
    let answer = shared.store.txn(Txn { compare, success, failure }).await.map_err(status)?;
    let asked = if answer.succeeded { request.success } else { request.failure };
    let header = shared.header(answer.revision);
    let mut responses = vec![];
    for (asked, result) in asked.into_iter().zip(answer.results) {
        let response = respond(&shared, asked, result, &header).await?;
        responses.push(wire::ResponseOp { response: Some(response) });
    }
    Ok(wire::TxnResponse { header, succeeded: answer.succeeded, responses })
}

/// A key that is written when a new revision is needed.
const ROOM: &[u8] = b"/decapod/room";

/// The size of a transaction besides its values.
const SLACK: usize = 4096;

async fn respond(
    shared: &Shared,
    asked: wire::RequestOp,
    result: OpResult,
    header: &Option<wire::ResponseHeader>,
) -> Answer<wire::Response> {
    let header = header.clone();
    Ok(match (asked.request, result) {
        (Some(wire::Request::Put(put)), OpResult::Put { previous }) => {
            let previous = previous.filter(|_| put.prev_kv);
            let prev_kv = previous.map(|kv| key_value(kv, false));
            wire::Response::Put(wire::PutResponse { header, prev_kv })
        }
        (Some(wire::Request::DeleteRange(delete)), OpResult::Deleted { previous }) => {
            let answer = deleted(previous, delete.prev_kv);
            wire::Response::DeleteRange(wire::DeleteRangeResponse { header, ..answer })
        }
        (Some(wire::Request::Range(range)), OpResult::Got { mut kvs }) => {
            if let Some(past) = at(range.revision) {
                // History does not change, so it can be read after the transaction.
                let key_range = key_range(range.key.clone(), range.range_end.clone());
                let request = store::RangeRequest {
                    revision: Some(past),
                    ..store::RangeRequest::new(key_range)
                };
                kvs = shared.store.range(request).await.map_err(status)?.kvs;
            }
            wire::Response::Range(wire::RangeResponse { header, ..arranged(&range, kvs) })
        }
        _ => return Err(Status::internal("etcdserver: an answer of another kind")),
    })
}

pub async fn compact(
    shared: Arc<Shared>,
    request: wire::CompactionRequest,
) -> Answer<wire::CompactionResponse> {
    let revision = convert::revision(request.revision);
    let is_present = shared.store.revision().await.map_err(status)? == revision;
    shared.store.compact(revision).await.map_err(status)?;
    if is_present && shared.no_space.load(Ordering::Relaxed) {
        // The store keeps, for watches, what the floor's own revision replaced. To free that space, too, the
        // floor moves by one. Upstream keeps nothing there.
        let key = Bytes::from_static(ROOM);
        let room = Op::Put { key, value: Bytes::new(), lease: 0 };
        let txn = Txn { success: vec![room], ..Txn::default() };
        let next = shared.store.txn(txn).await.map_err(status)?.revision;
        shared.store.compact(next).await.map_err(status)?;
    }
    Ok(wire::CompactionResponse { header: shared.present().await? })
}

fn check_key(key: &[u8]) -> Answer<()> {
    if key.is_empty() { Err(invalid("key is not provided")) } else { Ok(()) }
}

fn check_put(put: &wire::PutRequest) -> Answer<()> {
    check_key(&put.key)?;
    if put.ignore_value && !put.value.is_empty() {
        return Err(invalid("value is provided"));
    }
    if put.ignore_lease && put.lease != 0 {
        return Err(invalid("lease is provided"));
    }
    Ok(())
}

fn check_size(shared: &Shared, size: usize) -> Answer<()> {
    if size > shared.options.request_limit.min(VALUE_LIMIT + SLACK) {
        return Err(invalid("request is too large"));
    }
    Ok(())
}

/// Upstream: a transaction may write a key only once.
fn check_branch(ops: &[wire::RequestOp]) -> Answer<()> {
    let mut puts = BTreeSet::new();
    let mut deletes = vec![];
    for op in ops {
        match &op.request {
            Some(wire::Request::Put(put)) => {
                check_put(put)?;
                if !puts.insert(put.key.clone()) {
                    return Err(invalid("duplicate key given in txn request"));
                }
            }
            Some(wire::Request::DeleteRange(delete)) => {
                check_key(&delete.key)?;
                deletes.push(key_range(delete.key.clone(), delete.range_end.clone()));
            }
            Some(wire::Request::Range(range)) => check_key(&range.key)?,
            Some(wire::Request::Txn(_)) => {
                return Err(Status::unimplemented(
                    "etcdserver: a transaction inside of a transaction is not supported",
                ));
            }
            None => return Err(invalid("key not found")),
        }
    }
    if puts.iter().any(|key| deletes.iter().any(|range| range.contains(key))) {
        return Err(invalid("duplicate key given in txn request"));
    }
    Ok(())
}

fn op(op: &wire::RequestOp) -> Answer<Op> {
    Ok(match op.request.clone() {
        Some(wire::Request::Put(put)) if put.ignore_value || put.ignore_lease => {
            return Err(Status::unimplemented(
                "etcdserver: keeping a value or a lease in a transaction is not supported",
            ));
        }
        Some(wire::Request::Put(put)) => {
            Op::Put { key: put.key, value: put.value, lease: put.lease }
        }
        Some(wire::Request::DeleteRange(delete)) => {
            Op::DeleteRange { range: key_range(delete.key, delete.range_end) }
        }
        Some(wire::Request::Range(range)) => {
            Op::Get { range: key_range(range.key, range.range_end) }
        }
        Some(wire::Request::Txn(_)) | None => return Err(invalid("key not found")),
    })
}

fn compare(compare: &wire::Compare) -> Answer<Compare> {
    check_key(&compare.key)?;
    let unsigned = |number: i64| u64::try_from(number).unwrap_or_default();
    let field = match (compare.target(), compare.with.clone()) {
        (wire::CompareTarget::Version, Some(wire::CompareWith::Version(n))) => {
            Field::Version(unsigned(n))
        }
        (wire::CompareTarget::Create, Some(wire::CompareWith::CreateRevision(n))) => {
            Field::CreateRevision(Revision(unsigned(n)))
        }
        (wire::CompareTarget::Mod, Some(wire::CompareWith::ModRevision(n))) => {
            Field::ModRevision(Revision(unsigned(n)))
        }
        (wire::CompareTarget::Lease, Some(wire::CompareWith::Lease(n))) => Field::Lease(n),
        (wire::CompareTarget::Value, Some(wire::CompareWith::Value(bytes))) => Field::Value(bytes),
        // Upstream: a missing value counts as zero.
        (wire::CompareTarget::Version, _) => Field::Version(0),
        (wire::CompareTarget::Create, _) => Field::CreateRevision(Revision(0)),
        (wire::CompareTarget::Mod, _) => Field::ModRevision(Revision(0)),
        (wire::CompareTarget::Lease, _) => Field::Lease(0),
        (wire::CompareTarget::Value, _) => Field::Value(Bytes::new()),
    };
    let relation = match compare.result() {
        wire::CompareResult::Equal => Relation::Equal,
        wire::CompareResult::Greater => Relation::Greater,
        wire::CompareResult::Less => Relation::Less,
        wire::CompareResult::NotEqual => Relation::NotEqual,
    };
    let range = key_range(compare.key.clone(), compare.range_end.clone());
    // The comparison that API servers use needs no scan.
    Ok(match (range.end.is_empty(), relation, field) {
        (true, Relation::Equal, Field::ModRevision(n)) => Compare::ModRevision(range.start, n),
        (true, Relation::Equal, Field::Version(n)) => Compare::Version(range.start, n),
        (_, relation, field) => Compare::Every { range, relation, field },
    })
}

/// etcd's key and end equal the store's; the first possible key means "from the start".
pub fn key_range(start: Bytes, end: Bytes) -> KeyRange {
    KeyRange { start, end }
}

pub fn key_value(kv: KeyValue, keys_only: bool) -> wire::KeyValue {
    wire::KeyValue {
        key: kv.key,
        create_revision: convert::number(kv.create_revision),
        mod_revision: convert::number(kv.mod_revision),
        version: kv.version.try_into().unwrap_or(i64::MAX),
        value: if keys_only { Bytes::new() } else { kv.value.bytes() },
        lease: kv.lease,
    }
}
