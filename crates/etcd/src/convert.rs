//! Converts between the store's types and etcd's messages.

use bytes::Bytes;
use store::{
    Compare, Error, Event, EventKind, Field, KeyRange, KeyValue, LeaseId, Op, OpResult, Relation,
    Result, Revision, Txn,
};

use crate::messages as wire;

/// Revisions are positive and far below 2^63; larger numbers become the maximum.
pub fn number(revision: Revision) -> i64 {
    revision.0.try_into().unwrap_or(i64::MAX)
}

pub fn revision(number: i64) -> Revision {
    Revision(number.try_into().unwrap_or_default())
}

pub fn at(header: Option<&wire::ResponseHeader>) -> Revision {
    revision(header.map_or(0, |header| header.revision))
}

/// etcd has no empty key: a range from "" starts at the first possible key.
pub fn start(range: &KeyRange) -> Bytes {
    if range.start.is_empty() { Bytes::from_static(b"\0") } else { range.start.clone() }
}

pub fn end(range: &KeyRange) -> Bytes {
    range.end.clone()
}

pub fn key_value(kv: wire::KeyValue) -> KeyValue {
    KeyValue {
        key: kv.key,
        value: kv.value.into(),
        create_revision: revision(kv.create_revision),
        mod_revision: revision(kv.mod_revision),
        version: kv.version.try_into().unwrap_or_default(),
        lease: kv.lease,
    }
}

pub fn txn(txn: Txn) -> wire::TxnRequest {
    let ops = |ops: Vec<Op>| ops.into_iter().map(op).collect();
    wire::TxnRequest {
        compare: txn.compare.into_iter().map(compare).collect(),
        success: ops(txn.success),
        failure: ops(txn.failure),
    }
}

/// The lease that an error may refer to.
pub fn first_lease(txn: &Txn) -> LeaseId {
    let lease = |op: &Op| match op {
        Op::Put { lease, .. } if *lease != 0 => Some(*lease),
        _ => None,
    };
    txn.success.iter().chain(&txn.failure).find_map(lease).unwrap_or_default()
}

fn compare(compare: Compare) -> wire::Compare {
    let (range, relation, field) = match compare {
        Compare::ModRevision(key, revision) => {
            (KeyRange::one(key), Relation::Equal, Field::ModRevision(revision))
        }
        Compare::Version(key, version) => {
            (KeyRange::one(key), Relation::Equal, Field::Version(version))
        }
        Compare::Every { range, relation, field } => (range, relation, field),
    };
    let (target, with) = match field {
        Field::Version(version) => {
            let version = version.try_into().unwrap_or(i64::MAX);
            (wire::CompareTarget::Version, wire::CompareWith::Version(version))
        }
        Field::CreateRevision(revision) => {
            (wire::CompareTarget::Create, wire::CompareWith::CreateRevision(number(revision)))
        }
        Field::ModRevision(revision) => {
            (wire::CompareTarget::Mod, wire::CompareWith::ModRevision(number(revision)))
        }
        Field::Lease(lease) => (wire::CompareTarget::Lease, wire::CompareWith::Lease(lease)),
        Field::Value(value) => (wire::CompareTarget::Value, wire::CompareWith::Value(value)),
    };
    let result = match relation {
        Relation::Equal => wire::CompareResult::Equal,
        Relation::Greater => wire::CompareResult::Greater,
        Relation::Less => wire::CompareResult::Less,
        Relation::NotEqual => wire::CompareResult::NotEqual,
    };
    wire::Compare {
        result: result.into(),
        target: target.into(),
        key: start(&range),
        with: Some(with),
        range_end: end(&range),
    }
}

fn op(op: Op) -> wire::RequestOp {
    let request = match op {
        Op::Put { key, value, lease } => {
            let put = wire::PutRequest { key, value, lease, prev_kv: true, ..Default::default() };
            wire::Request::Put(put)
        }
        Op::DeleteRange { range } => wire::Request::DeleteRange(wire::DeleteRangeRequest {
            key: start(&range),
            range_end: end(&range),
            prev_kv: true,
        }),
        Op::Get { range } => wire::Request::Range(wire::RangeRequest {
            key: start(&range),
            range_end: end(&range),
            ..Default::default()
        }),
    };
    wire::RequestOp { request: Some(request) }
}

pub fn result(op: wire::ResponseOp) -> Result<OpResult> {
    let all = |kvs: Vec<wire::KeyValue>| kvs.into_iter().map(key_value).collect();
    Ok(match op.response {
        Some(wire::Response::Put(put)) => OpResult::Put { previous: put.prev_kv.map(key_value) },
        Some(wire::Response::DeleteRange(deleted)) => {
            OpResult::Deleted { previous: all(deleted.prev_kvs) }
        }
        Some(wire::Response::Range(range)) => OpResult::Got { kvs: all(range.kvs) },
        None => return Err(Error::Unavailable("etcd: an answer without content".into())),
    })
}

/// Whether the error says that a revision is compacted.
pub fn says_compacted(status: &tonic::Status) -> bool {
    status.message().ends_with("required revision has been compacted")
}

pub fn event(event: wire::Event) -> Event {
    let kind = match event.r#type() {
        wire::EventType::Put => EventKind::Put,
        wire::EventType::Delete => EventKind::Delete,
    };
    Event {
        kind,
        kv: key_value(event.kv.unwrap_or_default()),
        previous: event.prev_kv.map(key_value),
    }
}
