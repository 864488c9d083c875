//! Requests that are not meant to be long end after a minute.

use std::sync::Arc;

use machinery::StatusError;
use machinery::status::Reason;

use super::in_flight::is_long_running;
use crate::request::RequestInfo;
use crate::serve::Shared;

pub async fn limit<T>(
    shared: &Arc<Shared>,
    info: &RequestInfo,
    work: impl Future<Output = Result<T, StatusError>>,
) -> Result<T, StatusError> {
    if is_long_running(info) {
        return work.await;
    }
    match tokio::time::timeout(shared.options.request_timeout, work).await {
        Ok(outcome) => outcome,
        Err(_) => Err(StatusError::new(
            Reason::Timeout,
            "Timeout: request did not complete within the allotted timeout",
        )),
    }
}
