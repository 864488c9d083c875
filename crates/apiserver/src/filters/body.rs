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

/// The whole body. Frame by frame, because `http_body_util::Limited` makes futures that the compiler
/// cannot prove to be `Send`.
pub async fn read(mut body: Body) -> Result<Bytes, StatusError> {
    if body.size_hint().lower() > LIMIT as u64 {
        return Err(too_large());
    }
    let mut whole = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| StatusError::bad_request(error.to_string()))?;
        let Ok(data) = frame.into_data() else { continue };
        if whole.len() + data.len() > LIMIT {
            return Err(too_large());
        }
        // Nearly always all of it: no copy then.
        if whole.is_empty() && body.is_end_stream() {
            return Ok(data);
        }
        whole.extend_from_slice(&data);
    }
    Ok(whole.freeze())
}

fn too_large() -> StatusError {
    StatusError::new(
        Reason::RequestEntityTooLarge,
        format!("Request entity too large: limit is {LIMIT}"),
    )
}
