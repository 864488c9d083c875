//! Leases.

use std::sync::Arc;

use futures::StreamExt;
use store::Error;
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use super::messages as wire;
use super::{Answer, Answers, Shared, status};

/// Upstream: the maximum TTL, in seconds.
const LONGEST: i64 = 9_000_000_000;

pub async fn grant(
    shared: Arc<Shared>,
    request: wire::LeaseGrantRequest,
) -> Answer<wire::LeaseGrantResponse> {
    if request.ttl > LONGEST {
        return Err(Status::out_of_range("etcdserver: too large lease TTL"));
    }
    shared.check_space().await?;
    let ttl = request.ttl.max(1);
    let id = match request.id {
        0 => shared.store.lease_grant(ttl).await.map_err(status)?,
        id => shared.store.lease_grant_as(id, ttl).await.map(|()| id).map_err(status)?,
    };
    Ok(wire::LeaseGrantResponse { header: shared.present().await?, id, ttl })
}

pub async fn revoke(
    shared: Arc<Shared>,
    request: wire::LeaseRequest,
) -> Answer<wire::LeaseRevokeResponse> {
    shared.store.lease_revoke(request.id).await.map_err(status)?;
    Ok(wire::LeaseRevokeResponse { header: shared.present().await? })
}

/// One answer per request, until the client ends the stream.
pub async fn keep_alive(
    shared: Arc<Shared>,
    mut requests: Streaming<wire::LeaseRequest>,
) -> Answer<Answers<wire::LeaseKeepAliveResponse>> {
    let (answers, receiver) = mpsc::channel(1);
    let tasks = shared.tasks.clone();
    tasks.spawn("lease keep-alive", async move {
        while let Some(Ok(request)) = requests.next().await {
            let answer = keep_one(&shared, request.id).await;
            if answers.send(answer).await.is_err() {
                return;
            }
        }
    });
    Ok(receiver.into())
}

async fn keep_one(shared: &Shared, id: i64) -> Answer<wire::LeaseKeepAliveResponse> {
    let ttl = match shared.store.lease_keep_alive(id).await {
        Ok(ttl) => ttl,
        // Upstream: a TTL of zero means that there is no such lease.
        Err(Error::LeaseNotFound(_)) => 0,
        Err(error) => return Err(status(error)),
    };
    Ok(wire::LeaseKeepAliveResponse { header: shared.present().await?, id, ttl })
}

pub async fn time_to_live(
    shared: Arc<Shared>,
    request: wire::LeaseTimeToLiveRequest,
) -> Answer<wire::LeaseTimeToLiveResponse> {
    let leases = shared.store.leases().await.map_err(status)?;
    let header = shared.present().await?;
    let answer = wire::LeaseTimeToLiveResponse {
        header,
        id: request.id,
        ttl: -1,
        ..wire::LeaseTimeToLiveResponse::default()
    };
    Ok(match leases.into_iter().find(|lease| lease.id == request.id) {
        None => answer,
        Some(lease) => wire::LeaseTimeToLiveResponse {
            ttl: lease.left_seconds,
            granted_ttl: lease.ttl_seconds,
            keys: if request.keys { lease.keys } else { vec![] },
            ..answer
        },
    })
}

pub async fn list(shared: Arc<Shared>, _: wire::Empty) -> Answer<wire::LeaseLeasesResponse> {
    let leases = shared.store.leases().await.map_err(status)?;
    let leases = leases.iter().map(|lease| wire::LeaseRequest { id: lease.id }).collect();
    Ok(wire::LeaseLeasesResponse { header: shared.present().await?, leases })
}
