//! The whole kubelet against a small API server and the fake runtime.

mod api;
mod csi;
mod devices;
mod driver;
mod eviction;
mod paths;
mod pods;
mod shutdown;
