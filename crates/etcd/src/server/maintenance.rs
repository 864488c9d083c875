//! Maintenance, the cluster (of one), health.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use store::{KeyRange, RangeRequest, Revision};
use tokio::sync::mpsc;
use tonic::Status;

use super::messages as wire;
use super::{Answer, Answers, CLUSTER_VERSION, Shared, TERM, VERSION, status};
use crate::convert;

/// Chunks that may wait for a slow reader.
const AHEAD: usize = 4;

pub async fn status_of(shared: Arc<Shared>, _: wire::Empty) -> Answer<wire::StatusResponse> {
    let now = shared.store.status().await.map_err(status)?;
    let size = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    let mut alarms: BTreeSet<String> = now.alarms.into_iter().collect();
    if shared.no_space.load(Ordering::Relaxed) {
        alarms.insert(store::NO_SPACE.to_owned());
    }
    let named = |alarm: String| format!("memberID:{} alarm:{alarm} ", shared.member_id);
    let errors = alarms.into_iter().map(named).collect();
    Ok(wire::StatusResponse {
        header: shared.header(now.revision),
        version: VERSION.into(),
        db_size: size(now.disk_bytes),
        leader: shared.member_id,
        raft_index: now.revision.0,
        raft_term: TERM,
        raft_applied_index: now.revision.0,
        errors,
        db_size_in_use: size(now.used_bytes),
        is_learner: false,
        storage_version: CLUSTER_VERSION.into(),
        db_size_quota: shared.options.quota_bytes.map_or(0, size),
        backend: now.backend,
        commits: now.commits.counts.to_vec(),
        commit_seconds: now.commits.sum_seconds,
    })
}

pub async fn alarm(
    shared: Arc<Shared>,
    request: wire::AlarmRequest,
) -> Answer<wire::AlarmResponse> {
    let names_space = [wire::AlarmType::None, wire::AlarmType::NoSpace].contains(&request.alarm());
    let member =
        wire::AlarmMember { member_id: shared.member_id, alarm: wire::AlarmType::NoSpace.into() };
    let alarms = match request.action() {
        wire::AlarmAction::Get => {
            let store = shared.store.status().await.map_err(status)?;
            let is_full = store.alarms.iter().any(|alarm| alarm == store::NO_SPACE);
            let raised = is_full || shared.no_space.load(Ordering::Relaxed);
            if raised && names_space { vec![member] } else { vec![] }
        }
        wire::AlarmAction::Activate if request.alarm() == wire::AlarmType::NoSpace => {
            shared.no_space.store(true, Ordering::Relaxed);
            vec![member]
        }
        wire::AlarmAction::Activate => vec![],
        wire::AlarmAction::Deactivate => {
            let was = names_space && shared.no_space.swap(false, Ordering::Relaxed);
            if was { vec![member] } else { vec![] }
        }
    };
    Ok(wire::AlarmResponse { header: shared.present().await?, alarms })
}

/// Does nothing, because free pages are reused.
pub async fn defragment(shared: Arc<Shared>, _: wire::Empty) -> Answer<wire::HeaderResponse> {
    tracing::info!("ignoring a defragmentation request: this store needs none");
    Ok(wire::HeaderResponse { header: shared.present().await? })
}

pub async fn hash(shared: Arc<Shared>, _: wire::Empty) -> Answer<wire::HashKvResponse> {
    hash_kv(shared, wire::HashKvRequest { revision: 0 }).await
}

/// A hash of all live keys at a revision. It can only be compared with another hash of this store: etcd's
/// own hash is over the bytes of its file.
pub async fn hash_kv(
    shared: Arc<Shared>,
    request: wire::HashKvRequest,
) -> Answer<wire::HashKvResponse> {
    let wanted = convert::revision(request.revision);
    let all = RangeRequest {
        revision: (wanted.0 != 0).then_some(wanted),
        ..RangeRequest::new(KeyRange::prefix(Bytes::new()))
    };
    let answer = shared.store.range(all).await.map_err(status)?;
    let floor = shared.store.status().await.map_err(status)?.floor.unwrap_or_default();
    let mut hash = 0x811c_9dc5_u32;
    let mut add = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        }
    };
    for kv in &answer.kvs {
        for number in [kv.create_revision.0, kv.mod_revision.0, kv.version, kv.lease as u64] {
            add(&number.to_be_bytes());
        }
        add(&kv.key);
        add(&kv.value.bytes());
    }
    let at = if wanted.0 == 0 { answer.revision } else { wanted };
    Ok(wire::HashKvResponse {
        header: shared.header(answer.revision),
        hash,
        compact_revision: convert::number(floor),
        hash_revision: convert::number(at),
    })
}

pub async fn snapshot(
    shared: Arc<Shared>,
    _: wire::Empty,
) -> Answer<Answers<wire::SnapshotResponse>> {
    let mut snapshot = shared.store.snapshot().await.map_err(status)?;
    let revision = match snapshot.revision {
        Some(revision) => revision,
        None => shared.store.revision().await.map_err(status)?,
    };
    let header = shared.header(revision);
    let mut left = snapshot.size.unwrap_or_default();
    let (sender, receiver) = mpsc::channel(AHEAD);
    shared.tasks.spawn("snapshot", async move {
        while let Some(chunk) = snapshot.chunks.recv().await {
            let answer = chunk.map_err(status).map(|blob| {
                left = left.saturating_sub(blob.len() as u64);
                let (header, version) = (header.clone(), CLUSTER_VERSION.into());
                wire::SnapshotResponse { header, remaining_bytes: left, blob, version }
            });
            let is_last = answer.is_err();
            if sender.send(answer).await.is_err() || is_last {
                return;
            }
        }
    });
    Ok(receiver.into())
}

pub async fn members(shared: Arc<Shared>, _: wire::Empty) -> Answer<wire::MemberListResponse> {
    let member = wire::Member {
        id: shared.member_id,
        name: shared.options.name.clone(),
        peer_urls: shared.options.peer_urls.clone(),
        client_urls: shared.options.client_urls.clone(),
    };
    Ok(wire::MemberListResponse { header: shared.present().await?, members: vec![member] })
}

pub async fn one_member(_: Arc<Shared>, _: wire::Empty) -> Answer<wire::HeaderResponse> {
    Err(Status::failed_precondition(format!("etcdserver: {}", super::ONE_MEMBER)))
}

pub async fn auth_status(shared: Arc<Shared>, _: wire::Empty) -> Answer<wire::AuthStatusResponse> {
    Ok(wire::AuthStatusResponse { header: shared.present().await?, enabled: false })
}

pub async fn health(shared: Arc<Shared>, _: wire::Empty) -> Answer<wire::HealthCheckResponse> {
    const SERVING: i32 = 1;
    const NOT_SERVING: i32 = 2;
    let is_well = shared.store.revision().await.is_ok();
    Ok(wire::HealthCheckResponse { status: if is_well { SERVING } else { NOT_SERVING } })
}

pub async fn revision_at(
    shared: Arc<Shared>,
    request: wire::RevisionAtRequest,
) -> Answer<wire::RevisionAtResponse> {
    let Revision(revision) = shared.store.revision_at(request.millis).await.map_err(status)?;
    let revision = i64::try_from(revision).unwrap_or(i64::MAX);
    Ok(wire::RevisionAtResponse { header: shared.present().await?, revision })
}
