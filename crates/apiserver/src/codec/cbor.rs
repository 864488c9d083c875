//! CBOR at the door: whether this server speaks it, and under which names.
//!
//! Upstream: the gate `CBORServingAndStorage`, which is closed unless somebody opens it.

use machinery::StatusError;
use release::features::{self, Feature};

pub use machinery::cbor::{Error, MAGIC, array_head, to_json};

/// One data item (RFC 8949).
pub const MEDIA_TYPE: &str = "application/cbor";
/// One item after the other (RFC 8742): what a watch is.
pub const SEQUENCE: &str = "application/cbor-seq";
pub const APPLY_PATCH: &str = "application/apply-patch+cbor";

pub fn is_served() -> bool {
    features::enabled(Feature::CBORServingAndStorage)
}

/// The types of a message to people, with CBOR's where that is served.
pub fn listed(is_served: bool, types: &str, cbor: &str) -> String {
    if is_served { format!("{types}, {cbor}") } else { types.to_owned() }
}

/// An object in CBOR. What the server did not write may be nested too deeply for that.
pub fn object(json: &[u8]) -> Result<Vec<u8>, StatusError> {
    machinery::cbor::object(json).map_err(StatusError::internal)
}

pub fn watch_frame(event: &str, json: &[u8]) -> Result<Vec<u8>, StatusError> {
    machinery::cbor::watch_frame(event, json).map_err(StatusError::internal)
}

/// Appends what stands inside of a list.
pub fn put_item(json: &[u8], out: &mut Vec<u8>) -> Result<(), StatusError> {
    machinery::cbor::from_json(json, out).map_err(StatusError::internal)
}

/// A body of options, as JSON.
pub fn options(body: &[u8]) -> Result<Vec<u8>, StatusError> {
    to_json(body).map_err(|error| StatusError::bad_request(error.to_string()))
}
