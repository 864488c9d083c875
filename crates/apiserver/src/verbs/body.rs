//! The limit of request bodies: whoever reads one, reads it here. Byte streams behind an upgrade are
//! no bodies.

use bytes::{Bytes, BytesMut};
use http_body::Body as _;
use http_body_util::BodyExt;
use machinery::StatusError;
use machinery::status::Reason;

use crate::resource::Body;

/// Upstream: `MaxRequestBodyBytes`.
pub const LIMIT: usize = 3 << 20;
/// What is read of a larger one, so that its sender gets to read the answer.
const DRAINED: usize = 64 << 20;

/// The whole body. Frame by frame, because `http_body_util::Limited` makes futures that the compiler
/// cannot prove to be `Send`.
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
        // Nearly always all of it: no copy then.
        if whole.is_empty() && body.is_end_stream() {
            return Ok(data);
        }
        whole.extend_from_slice(&data);
    }
    Ok(whole.freeze())
}

/// Clients write all of a body before they listen: a connection closed in the middle of it would be
/// all that they see.
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
