//! Short requests end after a minute, or after the time in their query.
//! Upstream: `WithRequestDeadline`, `WithTimeoutForNonLongRunningRequests`.

use std::time::Duration;

use http::Uri;
use machinery::StatusError;
use machinery::status::Reason;

use crate::query::Query;
use crate::request::RequestInfo;
use crate::shared::Shared;

/// The limit of a request. `timeout` in the query can only shorten it.
pub fn of(shared: &Shared, info: &RequestInfo, uri: &Uri) -> Result<Duration, StatusError> {
    let most = shared.options.request_timeout;
    if info.is_long_running() || uri.query().is_none() {
        return Ok(most);
    }
    let query = Query::of(uri);
    let Some(text) = query.first("timeout").filter(|text| !text.is_empty()) else {
        return Ok(most);
    };
    let wanted = base::duration::nanos(text).map_err(|why| {
        let message = format!("invalid timeout specified in the request URL - {why}");
        StatusError::bad_request(message).without_details()
    })?;
    // A missing or negative timeout means the default.
    Ok(match wanted {
        1.. => Duration::from_nanos(wanted.unsigned_abs()).min(most),
        _ => most,
    })
}

pub async fn limit<T>(
    time: Duration,
    info: &RequestInfo,
    work: impl Future<Output = Result<T, StatusError>>,
) -> Result<T, StatusError> {
    if info.is_long_running() {
        return work.await;
    }
    match tokio::time::timeout(time, work).await {
        Ok(outcome) => outcome,
        Err(_) => Err(StatusError::new(
            Reason::Timeout,
            "Timeout: request did not complete within the allotted timeout",
        )),
    }
}
