//! Reads request bodies with a limit; all verbs use it. Byte streams after an upgrade are not bodies.

use bytes::{Bytes, BytesMut};
use http_body::Body as _;
use http_body_util::BodyExt;
use machinery::StatusError;
use machinery::status::Reason;

use crate::resource::Body;

/// Upstream: `MaxRequestBodyBytes`.
pub const LIMIT: usize = 3 << 20;
/// How much of a body above the limit is read, so that its client can read the answer.
const DRAINED: usize = 64 << 20;

/// Reads the whole body, frame by frame: the compiler cannot prove that the futures of
/// `http_body_util::Limited` are `Send`.
pub async fn read(mut body: Body) -> Result<Bytes, StatusError> {
    if body.size_hint().lower() > LIMIT as u64 {
        return Err(refuse(body, 0).await);
    }
    let mut whole = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| StatusError::bad_request(error.to_string()))?;
        let Ok(data) = frame.into_data() else { continue };
        if whole.len() + data.len() > LIMIT {
            return Err(refuse(body, whole.len()).await);
        }
        // Usually the first frame is the whole body: no copy then.
        if whole.is_empty() && body.is_end_stream() {
            return Ok(data);
        }
        whole.extend_from_slice(&data);
    }
    Ok(whole.freeze())
}

/// Clients write the whole body before they read: if the connection were closed in the middle, they would
/// not see the answer.
async fn refuse(mut body: Body, mut read: usize) -> StatusError {
    while read < DRAINED {
        let Some(Ok(frame)) = body.frame().await else { break };
        read += frame.data_ref().map_or(0, Bytes::len);
    }
    StatusError::new(
        Reason::RequestEntityTooLarge,
        format!("Request entity too large: limit is {LIMIT}"),
    )
    .without_details()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec;

    #[tokio::test]
    async fn large_bodies_are_refused() {
        let check = async |length: usize, is_fine: bool| {
            let read = read(codec::full(vec![b'x'; length])).await;
            assert_eq!(read.is_ok(), is_fine, "{length}");
            if let Err(error) = read {
                assert_eq!(error.code, 413);
                assert_eq!(error.message, "Request entity too large: limit is 3145728");
            }
        };
        check(0, true).await;
        check(LIMIT, true).await;
        check(LIMIT + 1, false).await;
        check(10 << 20, false).await;
    }
}
