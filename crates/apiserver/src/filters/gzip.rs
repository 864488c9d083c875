//! Large answers are compressed for clients that accept it.

use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, HeaderValue, VARY};
use http::{Request, Response};
use http_body::Body as _;

use crate::codec::list::Large;
use crate::resource::Body;

/// Upstream: `defaultGzipThresholdBytes`.
const THRESHOLD: u64 = 128 << 10;

/// Only the plain token: one with a weight is ignored, as upstream.
pub fn is_accepted<B>(request: &Request<B>) -> bool {
    let values = request.headers().get_all(ACCEPT_ENCODING).iter().filter_map(|v| v.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|token| token.trim() == "gzip")
}

pub fn compress(response: Response<Body>) -> Response<Body> {
    let size = response.body().size_hint().exact();
    let is_large = match size {
        Some(size) => size > THRESHOLD,
        None => response.extensions().get::<Large>().is_some(),
    };
    if !is_large || response.headers().contains_key(CONTENT_ENCODING) {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    parts.headers.remove(CONTENT_LENGTH);
    parts.headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    parts.headers.append(VARY, HeaderValue::from_static("Accept-Encoding"));
    Response::from_parts(parts, crate::codec::gzip::compress(body))
}
