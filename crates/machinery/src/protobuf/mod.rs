//! Kubernetes' protobuf: JSON trees to messages and back, by a table of field numbers.
//!
//! In: messages from clients, trees of objects. Out: the other of the two. No kind is known here: a
//! [`Descriptors`] tells what a kind's message looks like, and comes from the crate that has the facts.
//! JSON stays the native form of everything behind: what a Go client sends in protobuf becomes the
//! JSON that the same client would have sent, and answers are made from the JSON that they are.
//!
//! ```text
//! "k8s\0" Unknown { 1: TypeMeta { 1: apiVersion, 2: kind }, 2: raw, 3: encoding, 4: content type }
//! ```
//!
//! `raw` is the kind's own message. Go writes fields that are no pointers always, empty ones too, so
//! messages made here are upstream's byte by byte, and on the way in an empty value means what
//! absence means wherever Go's JSON leaves it out.
//!
//! Invariants: no input panics; nesting is bounded; fields that the table does not know are skipped
//! in both directions.

mod decode;
mod descriptors;
mod encode;
mod envelope;
mod scalar;
mod settle;
mod wire;

pub use descriptors::{Descriptors, MessageId};
pub use encode::ListWriter;
pub use envelope::{Envelope, MAGIC, watch_frame};
pub use settle::{Telling, Unsettled};

/// Messages nest no deeper than this: about where `serde_json` stops too.
const MAX_DEPTH: usize = 120;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    #[error("empty data")]
    Empty,
    #[error(
        "provided data does not appear to be a protobuf message, expected prefix [107 56 115 0]"
    )]
    NoPrefix,
    #[error("empty body")]
    EmptyBody,
    #[error("unexpected EOF")]
    Truncated,
    #[error("proto: integer overflow")]
    Overflow,
    #[error("proto: illegal wireType {0}")]
    IllegalWireType(u8),
    #[error("proto: illegal tag {0} (wire type {1})")]
    IllegalTag(u64, u8),
    #[error("proto: wrong wireType = {found} for field {field}")]
    WrongWireType { field: &'static str, found: u8 },
    #[error("the message is nested too deeply")]
    TooDeep,
    /// An embedded object is no JSON, a time is out of range, …
    #[error("field {field}: {why}")]
    Value { field: &'static str, why: String },
    /// The object is of a kind that has no message.
    #[error("no protobuf message is known for {0}")]
    NoMessage(String),
}

#[cfg(test)]
mod tests;
