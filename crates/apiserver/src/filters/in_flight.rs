//! How many requests run at one time: reads and writes apart, so that a flood of one leaves room
//! for the other. Those above the limit wait a moment, then are sent away.

use std::sync::Arc;
use std::time::Duration;

use machinery::StatusError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::request::RequestInfo;
use crate::serve::Shared;

/// How long a request waits for its place.
const PATIENCE: Duration = Duration::from_secs(15);

pub struct InFlight {
    reads: Arc<Semaphore>,
    writes: Arc<Semaphore>,
}

impl InFlight {
    pub fn new(reads: usize, writes: usize) -> Self {
        Self { reads: Arc::new(Semaphore::new(reads)), writes: Arc::new(Semaphore::new(writes)) }
    }
}

pub fn is_read(info: &RequestInfo) -> bool {
    matches!(info.verb.as_str(), "get" | "list" | "watch" | "head" | "options")
}

/// Watches, and byte streams through the server.
pub fn is_long_running(info: &RequestInfo) -> bool {
    const STREAMS: &[&str] = &["attach", "exec", "proxy", "log", "portforward"];
    let is_stream = info.is_resource && STREAMS.contains(&info.subresource.as_str());
    info.verb == "watch"
        || info.verb == "proxy"
        || is_stream
        || info.path.starts_with("/debug/pprof/")
}

/// A place, kept until the answer is there. Long-running requests and health checks need none.
pub async fn enter(
    shared: &Shared,
    info: &RequestInfo,
) -> Result<Option<OwnedSemaphorePermit>, StatusError> {
    let is_health = !info.is_resource && is_read(info);
    if is_long_running(info) || is_health {
        return Ok(None);
    }
    let places = if is_read(info) { &shared.in_flight.reads } else { &shared.in_flight.writes };
    match tokio::time::timeout(PATIENCE, places.clone().acquire_owned()).await {
        Ok(place) => Ok(Some(place.expect("the semaphore is never closed"))),
        Err(_) => {
            Err(StatusError::too_many_requests("Too many requests, please try again later.", 1))
        }
    }
}
