//! `--goaway-chance`: some answers on HTTP/2 tell the client to open another connection, so that clients
//! behind a load balancer spread over all servers. Requests that run go on.
//! Upstream: `apiserver/pkg/server/filters/goaway.go`.

use http::header::{CONNECTION, HeaderValue};
use http::{Request, Response, Version};

use crate::resource::Body;

pub fn is_due<B>(chance: f64, request: &Request<B>) -> bool {
    chance > 0.0 && request.version() == Version::HTTP_2 && base::rng::unit() < chance
}

/// The server of the connection turns the header into a GOAWAY.
pub fn mark(response: &mut Response<Body>) {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
}
