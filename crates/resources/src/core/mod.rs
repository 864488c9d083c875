//! The core group: pods and what they live on.

pub(crate) mod app_armor;
pub(crate) mod binding;
pub(crate) mod component_status;
pub(crate) mod config_map;
pub(crate) mod endpoints;
mod families;
pub(crate) mod limit_range;
pub(crate) mod namespace;
pub(crate) mod node;
pub(crate) mod persistent_volume;
pub(crate) mod persistent_volume_claim;
pub(crate) mod pod;
pub(crate) mod pod_template;
pub(crate) mod podspec;
pub(crate) mod replication_controller;
pub(crate) mod resource_quota;
pub(crate) mod secret;
pub(crate) mod service;
pub(crate) mod service_account;

/// Access modes of volumes, as Tables show them.
fn access_modes_cell(modes: Option<&[String]>) -> String {
    let short = |mode: &String| match mode.as_str() {
        "ReadWriteOnce" => "RWO",
        "ReadOnlyMany" => "ROX",
        "ReadWriteMany" => "RWX",
        "ReadWriteOncePod" => "RWOP",
        _ => "",
    };
    modes.unwrap_or_default().iter().map(short).collect::<Vec<_>>().join(",")
}
