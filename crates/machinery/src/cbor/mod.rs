//! CBOR (RFC 8949), as upstream's clients and servers speak it: JSON to data items and back.
//!
//! In: the server's own JSON, or what a client sent. Out: the other of the two. JSON stays the native
//! form of everything behind, as with protobuf. Upstream: `runtime/serializer/cbor`, whose options for
//! the library `fxamacker/cbor` are mirrored here, with that library's messages.
//!
//! ```text
//! {"a":"b","n":1}  ⇄  d9d9f7 a2 41 61 41 62 41 6e 01
//!                     │      │  └ texts are byte strings: Go does not check that its strings are UTF-8
//!                     │      └ a map of two pairs
//!                     └ the self-described tag, in front of each whole object
//! ```
//!
//! Bytes (`Secret.data`) are base64 in a byte string, which upstream's decoders take for bytes too.
//! Deviation: upstream writes those of typed objects raw, under the tag that says "show as base64".
//!
//! Invariants: no input panics; nesting is bounded; nothing is allocated by what an item says of its
//! own length.

mod read;
mod write;

pub use read::to_json;
pub use write::{array_head, from_json, object, watch_frame};

/// The head of the tag "self-described CBOR", by which data items are known.
pub const MAGIC: &[u8] = &[0xd9, 0xd9, 0xf7];

/// The three bits that an item begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Major {
    Positive,
    Negative,
    Bytes,
    Text,
    Array,
    Map,
    Tag,
    Simple,
}

impl Major {
    fn of(byte: u8) -> Self {
        match byte >> 5 {
            0 => Self::Positive,
            1 => Self::Negative,
            2 => Self::Bytes,
            3 => Self::Text,
            4 => Self::Array,
            5 => Self::Map,
            6 => Self::Tag,
            _ => Self::Simple,
        }
    }

    /// As upstream's library calls it.
    fn name(self) -> &'static str {
        match self {
            Self::Positive => "positive integer",
            Self::Negative => "negative integer",
            Self::Bytes => "byte string",
            Self::Text => "UTF-8 text string",
            Self::Array => "array",
            Self::Map => "map",
            Self::Tag => "tag",
            Self::Simple => "primitives",
        }
    }
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// It is no CBOR, or no object: its kind is unknown.
    #[error("{0}")]
    Malformed(String),
    /// Inside of it is what no object may hold: a key twice, a number that is none.
    #[error("{0}")]
    Inadmissible(String),
}

#[cfg(test)]
mod tests;
