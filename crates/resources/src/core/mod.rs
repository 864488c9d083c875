//! The core group: pods and what they live on.

pub(crate) mod node;
mod pod_actions;
pub(crate) mod service;
pub(crate) mod pod;
pub(crate) mod podspec;
mod pod_print;
mod namespace;
mod simple;

use crate::Row;

pub(crate) use simple::service_account;

pub(crate) const ROWS: &[fn() -> Row] = &[
    simple::config_map,
    simple::endpoints,
    simple::limit_range,
    namespace::row,
    simple::persistent_volume_claim,
    simple::persistent_volume,
    simple::pod_template,
    simple::replication_controller,
    simple::resource_quota,
    simple::secret,
];
