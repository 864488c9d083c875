//! Limits the requests in flight: by priority and fairness, or, if that is off, by separate limits for reads
//! and writes. Others are refused, with a Retry-After.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use http::header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use http::request::Parts;
use http::{Response, StatusCode};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use crate::codec;
use crate::fairness::{Class, Fairness, Place, Refused, Stored, WatchGuard, work};
use crate::limiter::Limiter;
use crate::query::Query;
use crate::request::{RequestInfo, UserInfo};
use crate::resource::Body;
use crate::shared::Shared;

const SCHEMA_UID: HeaderName = HeaderName::from_static("x-kubernetes-pf-flowschema-uid");
const LEVEL_UID: HeaderName = HeaderName::from_static("x-kubernetes-pf-prioritylevel-uid");
/// The limits of reads and writes do not apply to this group.
const MASTERS: &str = "system:masters";
/// A request may wait for a quarter of its timeout, but not longer than [`LONGEST_WAIT`].
const WAITING_PART: u32 = 4;
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The right to be served. It is held until the answer's headers are ready; for a watch, until it begins.
pub enum Held {
    /// No limit applies.
    Free,
    InFlight {
        _place: OwnedSemaphorePermit,
    },
    Fair(Box<Fair>),
}

/// A place in a priority level.
pub struct Fair {
    class: Class,
    _place: Place,
    watch: Option<WatchGuard>,
    waited: Duration,
}

/// Kept with the body of a long answer until its end.
#[derive(Clone)]
pub struct UntilTheEnd(
    #[expect(dead_code, reason = "held for its drop")] Arc<dyn Any + Send + Sync>,
);

/// How long a request waited for its place; an extension of the answer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Waited(pub Duration);

impl Held {
    /// Returns the place, and adds its headers to the answer.
    pub fn release(self, mut response: Response<Body>) -> Response<Body> {
        if let Self::Fair(fair) = self {
            let Fair { class, watch, waited, .. } = *fair;
            tell(response.headers_mut(), &class);
            if !waited.is_zero() {
                response.extensions_mut().insert(Waited(waited));
            }
            if let Some(watch) = watch {
                response.extensions_mut().insert(UntilTheEnd(Arc::new(watch)));
            }
        }
        response
    }
}

fn tell(headers: &mut HeaderMap, class: &Class) {
    for (name, uid) in [(SCHEMA_UID, class.schema_uid()), (LEVEL_UID, class.level_uid())] {
        let value = HeaderValue::from_str(uid);
        headers.insert(name, value.unwrap_or_else(|_| HeaderValue::from_static("")));
    }
}

/// Waits for a place. Streams through the server need none; watches need one to begin.
pub async fn enter(
    shared: &Shared,
    info: &RequestInfo,
    user: &UserInfo,
    parts: &Parts,
    time: Duration,
) -> Result<Held, Response<Body>> {
    match &shared.limiter {
        Limiter::Fair(fairness) if !info.is_long_running() || info.verb == "watch" => {
            enter_fairly(shared, fairness, info, user, parts, time).await
        }
        Limiter::InFlight(limits) if !info.is_long_running() => {
            let places = if info.is_read() { &limits.reads } else { &limits.writes };
            let Some(places) = places else { return Ok(Held::Free) };
            match places.clone().try_acquire_owned() {
                Ok(_place) => Ok(Held::InFlight { _place }),
                Err(_) if user.in_group(MASTERS) => Ok(Held::Free),
                Err(_) => Err(refusal(1)),
            }
        }
        Limiter::Fair(_) | Limiter::InFlight(_) => Ok(Held::Free),
    }
}

async fn enter_fairly(
    shared: &Shared,
    fairness: &Fairness,
    info: &RequestInfo,
    user: &UserInfo,
    parts: &Parts,
    time: Duration,
) -> Result<Held, Response<Body>> {
    let class = fairness.classify(info, user);
    let work = work(
        info,
        &Query::of(&parts.uri),
        class.widest(),
        || stored(shared, info),
        || fairness.watches().interested(info),
    );
    let patience = (time / WAITING_PART).min(LONGEST_WAIT);
    let start = Instant::now();
    match fairness.enter(&class, info, user, work, patience).await {
        Ok(place) => {
            let (watch, waited) = (fairness.watches().enter(info), start.elapsed());
            Ok(Held::Fair(Box::new(Fair { class, _place: place, watch, waited })))
        }
        Err(Refused { retry_after }) => {
            let mut response = refusal(retry_after);
            tell(response.headers_mut(), &class);
            Err(response)
        }
    }
}

/// The known size of the resource that a request names.
fn stored(shared: &Shared, info: &RequestInfo) -> Option<Stored> {
    let table = shared.registry.resources();
    let row = table.get(&info.group, &info.version, &info.resource)?;
    let (objects, bytes) = shared.registry.stored_size(row)?;
    Some(Stored { objects, bytes })
}

/// Upstream's plain text, with its newline.
fn refusal(retry_after: u64) -> Response<Body> {
    let text = "Too many requests, please try again later.\n";
    let mut response = codec::plain(StatusCode::TOO_MANY_REQUESTS, text);
    response.headers_mut().insert(RETRY_AFTER, retry_after.into());
    response
}
