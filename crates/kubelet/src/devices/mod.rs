//! Devices for containers: dynamic resource allocation ([`dra`]), device plugins, and the service that
//! tells other programs of the node about both.

pub mod device_plugins;
pub mod dra;
pub mod pod_resources;
