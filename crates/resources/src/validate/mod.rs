//! What each kind demands of its objects. Upstream: `pkg/apis/*/validation` and the strategies.
//!
//! In: an object, and on updates the one before it. Out: all field errors at once, in upstream's order
//! and words. A kind's file names its checks; they are functions over places in the object's tree
//! (`at`), in a file per topic.
//!
//! Invariant: checks see objects after defaulting and `prepare_*`, so they need not repeat those.

pub(crate) mod admission;
pub(crate) mod at;
pub(crate) mod batch;
pub(crate) mod capabilities;
pub(crate) mod certificates;
pub(crate) mod container;
pub(crate) mod core;
pub(crate) mod cron;
pub(crate) mod devices;
pub(crate) mod diff;
pub(crate) mod flow;
pub(crate) mod internal;
pub(crate) mod ip;
pub(crate) mod migration;
pub(crate) mod networking;
pub(crate) mod optional;
pub(crate) mod pod;
pub(crate) mod podupdate;
pub(crate) mod policy;
pub(crate) mod quantity;
pub(crate) mod service;
pub(crate) mod storage;
#[cfg(test)]
mod tests;
pub(crate) mod trust;
pub(crate) mod volumes;
pub(crate) mod warnings;
pub(crate) mod workloads;
