//! The common parts of all API objects: identity, metadata, selectors, quantities, patches, errors.
//!
//! Invariants: no kind is known here; nothing here does I/O; all text (messages, reasons, field
//! paths) is upstream's, because clients compare it.

pub mod address_range;
pub mod cbor;
pub mod cron;
pub mod field;
pub mod gotime;
pub mod names;
pub mod object;
pub mod pairs;
pub mod patch;
pub mod protobuf;
pub mod quantity;
pub mod selector;
pub mod status;
pub mod tree;

pub use k8s_openapi::apimachinery::pkg::apis::meta::v1::{
    Condition, LabelSelector, LabelSelectorRequirement, ListMeta, MicroTime, ObjectMeta,
    OwnerReference, Time,
};
pub use object::Object;
pub use pairs::Pairs;
pub use status::StatusError;
