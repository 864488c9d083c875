//! The core group: pods and what they live on.

pub(crate) mod app_armor;
mod families;
mod label_keys;
mod namespace;
pub(crate) mod node;
pub(crate) mod pod;
mod pod_actions;
mod pod_print;
pub(crate) mod podspec;
pub(crate) mod service;
mod simple;

use crate::Row;

pub(crate) use simple::service_account;

pub(crate) const ROWS: &[fn() -> Row] = &[
    pod_actions::bindings,
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
