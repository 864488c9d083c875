//! CBOR at the door: whether this server speaks it, and under which names.
//!
//! Upstream: the gate `CBORServingAndStorage`, which is closed unless somebody opens it.

use base::features::{self, Feature};
use machinery::StatusError;

pub use machinery::cbor::watch_frame;
pub use machinery::cbor::{Error, MAGIC, array_head, from_json, map_head, object, to_json};

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

/// A body of options or of a patch, as JSON.
pub fn options(body: &[u8]) -> Result<Vec<u8>, StatusError> {
    to_json(body).map_err(|error| StatusError::bad_request(error.to_string()))
}
