//! What each kind demands of its objects. Upstream: `pkg/apis/*/validation` and the strategies.
//!
//! In: an object, and on updates the one before it. Out: all field errors at once, in upstream's order
//! and words. A kind's checks are in its file, and what the kinds of a group share is in the group's;
//! here are the language of rules (`at`: checks are functions over places in the object's tree), and the
//! checks that several groups share. `guard` holds the names that rules ask for against the schema.
//!
//! Invariant: checks see objects after defaulting and `prepare_*`, so they need not repeat those.

pub(crate) mod at;
pub(crate) mod batch;
pub(crate) mod capabilities;
pub(crate) mod container;
pub(crate) mod core;
pub(crate) mod cron;
pub(crate) mod diff;
pub(crate) mod guard;
pub(crate) mod internal;
pub(crate) mod ip;
#[cfg(test)]
mod optional_tests;
pub(crate) mod pod;
pub(crate) mod podupdate;
pub(crate) mod quantity;
pub(crate) mod service;
pub(crate) mod shared;
pub(crate) mod status;
pub(crate) mod storage;
#[cfg(test)]
mod tests;
pub(crate) mod volumes;
pub(crate) mod warnings;
pub(crate) mod workloads;
