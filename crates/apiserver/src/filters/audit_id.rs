//! Every request has an id, in `Audit-Id`: the client's, or a new one.

use http::{HeaderName, HeaderValue, Request, Response};

const AUDIT_ID: HeaderName = HeaderName::from_static("audit-id");
/// Longer ids are ignored. Upstream truncates at 64.
const LONGEST: usize = 64;

pub fn of<B>(request: &Request<B>) -> HeaderValue {
    let given = request.headers().get(AUDIT_ID).filter(|id| !id.is_empty() && id.len() <= LONGEST);
    given.cloned().unwrap_or_else(|| {
        HeaderValue::from_str(&base::rng::uuid()).expect("a UUID is a header value")
    })
}

pub fn stamp<B>(response: &mut Response<B>, id: HeaderValue) {
    response.headers_mut().insert(AUDIT_ID, id);
}
