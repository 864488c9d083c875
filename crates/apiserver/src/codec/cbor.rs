//! CBOR: whether this server serves it, and its media types.
//!
//! Upstream: the gate `CBORServingAndStorage`, which is off by default.

use machinery::StatusError;
use release::features::{self, Feature};

pub use machinery::cbor::{Error, MAGIC, array_head, to_json};

/// One data item (RFC 8949).
pub const MEDIA_TYPE: &str = "application/cbor";
/// A sequence of items (RFC 8742), for watches.
pub const SEQUENCE: &str = "application/cbor-seq";
pub const APPLY_PATCH: &str = "application/apply-patch+cbor";

pub fn is_served() -> bool {
    features::enabled(Feature::CBORServingAndStorage)
}

/// A list of media types for messages, with CBOR's if it is served.
pub fn listed(is_served: bool, types: &str, cbor: &str) -> String {
    if is_served { format!("{types}, {cbor}") } else { types.to_owned() }
}

/// An object in CBOR. Fails for an object of another source that is nested too deeply.
pub fn object(json: &[u8]) -> Result<Vec<u8>, StatusError> {
    machinery::cbor::object(json).map_err(StatusError::internal)
}

pub fn watch_frame(event: &str, json: &[u8]) -> Result<Vec<u8>, StatusError> {
    machinery::cbor::watch_frame(event, json).map_err(StatusError::internal)
}

/// Appends a list item.
pub fn put_item(json: &[u8], out: &mut Vec<u8>) -> Result<(), StatusError> {
    machinery::cbor::from_json(json, out).map_err(StatusError::internal)
}

/// A body with options, as JSON.
pub fn options(body: &[u8]) -> Result<Vec<u8>, StatusError> {
    to_json(body).map_err(|error| StatusError::bad_request(error.to_string()))
}
