//! Encodings: bytes of clients to objects and back.
//!
//! In: bodies, `Accept` headers, stored objects. Out: objects, responses, watch frames. JSON is the native
//! form: a stored object is copied, not encoded. YAML, CBOR, indented JSON, Tables and
//! PartialObjectMetadata are made from it.

pub mod at_rest;
pub mod cbor;
pub mod decode;
pub mod explain;
pub mod frames;
pub mod gojson;
pub mod gzip;
pub mod indent;
pub mod list;
mod media_type;
pub mod negotiate;
pub mod partial;
pub mod protobuf;
pub mod table;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use http::{Response, StatusCode};
use http_body_util::{BodyExt, Empty, Full};
use machinery::StatusError;
use machinery::status::Reason;
use serde_json::Value;

pub use negotiate::{Accept, As, Media};

use crate::resource::Body;
use crate::stored::Stored;
use table::TableOptions;

pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

pub fn empty() -> Body {
    Empty::new().map_err(|never| match never {}).boxed_unsync()
}

pub fn respond(status: StatusCode, content_type: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

pub fn text(status: StatusCode, text: impl Into<String>) -> Response<Body> {
    respond(status, "text/plain; charset=utf-8", full(text.into()))
}

/// Plain text that a browser must not take for something else. Go's `http.Error` answers so.
pub fn plain(status: StatusCode, text: impl Into<String>) -> Response<Body> {
    unsniffed(self::text(status, text))
}

fn unsniffed(mut response: Response<Body>) -> Response<Body> {
    let nosniff = HeaderValue::from_static("nosniff");
    response.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, nosniff);
    response
}

/// The error for a path without a resource.
pub(crate) fn no_route() -> StatusError {
    StatusError::new(Reason::NotFound, "the server could not find the requested resource")
}

/// Go's answer to a path without a handler.
pub fn page_not_found() -> Response<Body> {
    plain(StatusCode::NOT_FOUND, "404 page not found\n")
}

/// The answer to a request that the user may not make. Upstream: `responsewriters.RespondWithError`.
pub fn refused(error: &StatusError) -> Response<Body> {
    unsniffed(self::error(&Accept::JSON, error))
}

/// JSON in the requested form: kinds without a protobuf message are refused.
pub fn json(accept: &Accept, status: StatusCode, json: Bytes) -> Response<Body> {
    let body = match (accept.media, accept.pretty) {
        (Media::Json, false) => full(json),
        (Media::Json, true) => full(indent::indent(&json)),
        (Media::Yaml, _) => full(to_yaml(&json)),
        (Media::Cbor, _) => match cbor::object(&json) {
            Ok(bytes) => full(bytes),
            Err(refusal) => return error(&Accept::JSON, &refusal),
        },
        (Media::Protobuf(protobuf), _) => match protobuf.object(&json) {
            Ok(bytes) => full(bytes),
            Err(refusal) => return error(&Accept::JSON, &refusal),
        },
    };
    respond(status, accept.media.content_type(), body)
}

fn to_yaml(json: &[u8]) -> String {
    let tree: Value = serde_json::from_slice(json).expect("the server's own JSON is JSON");
    serde_saphyr::to_string(&tree).expect("every JSON tree is a YAML tree")
}

/// A stored object in the requested form.
pub fn object(
    accept: &Accept,
    status: StatusCode,
    stored: &Stored,
    options: &TableOptions,
) -> Result<Response<Body>, StatusError> {
    let bytes = match accept.shown_as {
        As::Itself => stored.json(),
        As::Table(version) => table::one(version, stored, options)?.into(),
        As::PartialObjectMetadata(version) => partial::object(version, stored).into(),
        As::PartialObjectMetadataList(_) => {
            let row = stored.row();
            return Err(not_acceptable(format!(
                "you requested PartialObjectMetadataList, but the requested object is not a list (*{}.{})",
                decode::package(&row.group),
                row.kind
            )));
        }
    };
    Ok(json(accept, status, bytes))
}

fn not_acceptable(message: impl Into<String>) -> StatusError {
    StatusError::new(Reason::NotAcceptable, message).without_details()
}

/// An error in the client's encoding, never as a Table.
pub fn error(accept: &Accept, error: &StatusError) -> Response<Body> {
    let accept = &Accept { media: accept.of_errors, ..*accept };
    let status = StatusCode::from_u16(error.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json(accept, status, error.to_json().to_string().into());
    if let Some(seconds) = error.retry_after_seconds {
        response.headers_mut().insert(http::header::RETRY_AFTER, seconds.into());
    }
    response
}
