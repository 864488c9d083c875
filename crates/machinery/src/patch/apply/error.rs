//! Why managed fields cannot be read, or a configuration cannot be applied, in upstream's words.

use serde_json::Value;

use super::path::Element;

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum FieldsError {
    #[error("missing colon: {0}")]
    NoColon(String),
    #[error("key must be 2 characters long:")]
    ShortKey,
    /// An element's value is no JSON, or its index no number.
    #[error("{text}: {why}")]
    Element { text: String, why: String },
    #[error("expected an object, got {0}")]
    NotAnObject(Value),
    #[error("operation must be `Apply` or `Update`")]
    Operation,
    #[error("apiVersion must not be empty")]
    NoApiVersion,
    #[error("missing fieldsType in managed fields entry {0}")]
    NoFieldsType(usize),
    #[error("invalid fieldsType {kind:?} in managed fields entry {index}")]
    FieldsType { kind: String, index: usize },
    #[error("error decoding versioned set: {0}")]
    Set(Box<Self>),
    #[error("invalid indexing of non-associative list")]
    AtomicList,
    #[error("associative list without keys has an element that's a map type")]
    MapInSet,
    #[error("not supported: associative list with lists as elements")]
    ListInSet,
    #[error("associative list without keys has an element that's an explicit null")]
    NullInSet,
    #[error("associative list with keys may not have a null element")]
    NullInList,
    #[error("associative list with keys may not have non-map elements")]
    ScalarInList,
    #[error(
        "associative list with keys has an element that omits all key fields [{0}] (and doesn't have default values for any key fields)"
    )]
    NoKeys(String),
    #[error(".{field}{why}")]
    InField { field: String, why: Box<Self> },
    #[error("{element}{why}")]
    InElement { element: Element, why: Box<Self> },
    #[error(": element {at}: {why}")]
    At { at: usize, why: Box<Self> },
    /// The object cannot be shown in another version.
    #[error("{0}")]
    Conversion(String),
    #[error("failed to create typed patch object ({object}): {why}")]
    Misfit { object: String, why: String },
    #[error("failed to decode managed fields: {0}")]
    Decode(Box<Self>),
    #[error("failed to merge config: {0}")]
    Merge(Box<Self>),
    #[error("failed to prune fields: {0}")]
    Prune(Box<Self>),
}

impl FieldsError {
    /// Adds a field to the error's path.
    pub(super) fn in_field(field: &str) -> impl FnOnce(Self) -> Self {
        move |why| Self::InField { field: field.into(), why: Box::new(why) }
    }
}
