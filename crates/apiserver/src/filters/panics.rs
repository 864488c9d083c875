//! A panic in a handler is a bug: it is logged and answered with 500; the process continues.

use std::panic::AssertUnwindSafe;

use futures::FutureExt;
use http::Response;
use machinery::StatusError;
use machinery::status::Reason;

use crate::codec;
use crate::resource::Body;

pub async fn catch(work: impl Future<Output = Response<Body>>) -> Response<Body> {
    // Unwind safety: the work is dropped, and its shared data are behind locks that poison.
    match AssertUnwindSafe(work).catch_unwind().await {
        Ok(response) => response,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
            tracing::error!(panic = text, "a request handler panicked");
            let error = StatusError::new(
                Reason::InternalError,
                "This request caused apiserver to panic. Look in the logs for details.",
            );
            codec::error(&codec::Accept::JSON, &error)
        }
    }
}

#[cfg(test)]
mod tests {
    #[tokio::test]
    async fn a_panic_becomes_a_500() {
        let response = super::catch(async { panic!("on purpose") }).await;
        assert_eq!(response.status(), 500);
    }
}
