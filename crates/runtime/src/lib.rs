//! The implementations of the `cri` contract, which run containers, and the pod network of one node.
//!
//! ```text
//!  kubelet ─► cri::Runtime ─┬─ backend::embedded ─► images   content store, layers, overlay
//!                           │                    ├─► sandbox  pinned namespaces, pod address
//!                           │                    ├─► network  the node's own, or cni: plugins
//!                           │                    └─► shim     one process per container
//!                           ├─ backend::remote      containerd, CRI-O: over CRI v1
//!                           └─ backend::fake        for the kubelet's tests
//! ```
//!
//! All state of the embedded backend is on disk ([`layout`]), in a shim or in a cgroup. The backend
//! can be killed and restarted at any time without effect on the containers.
//!
//! Invariant: `libcontainer` forks and allocates in the child, so it is called only in a
//! [`shim`]: our own binary executed again, with a single thread. The binary's `main` must call
//! [`shim::shim_main`] first of all when [`shim::is_shim_invocation`] says so.

mod apparmor;
pub mod backend;
mod bandwidth;
mod cdi;
mod cgroups;
mod cni;
mod destroy;
mod files;
mod host_ports;
mod idmap;
pub mod images;
mod ipam;
pub mod layout;
mod machine;
pub mod memory;
mod network;
mod oci;
pub mod parts;
mod program;
mod sandbox;
pub mod shim;
mod users;

pub use backend::embedded::{Config, Embedded};
pub use backend::fake::Fake;
pub use backend::{BACKENDS, Backend};
pub use cni::CniConfig;
pub use destroy::destroy_all;
pub use images::store::ImageStore;
pub use parts::{Line, Lines, Part, WithParts};
