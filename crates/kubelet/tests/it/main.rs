//! The whole kubelet against a small API server and the fake runtime.

mod api;
mod csi;
mod device_plugin;
mod device_plugins;
mod devices;
mod driver;
mod eviction;
mod paths;
mod pods;
mod shutdown;
mod starts;
