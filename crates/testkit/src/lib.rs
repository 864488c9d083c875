//! Shared code of tests of whole nodes and clusters.
//!
//! In: the built binary and a root shell. Out: separate hosts ([`host`]: namespaces on this machine),
//! joined by a [`switch`], with a running [`cluster`] on them, test [`images`], and the real kubectl.
//! Invariant: a test changes nothing in the real host's network, mounts or cgroups. When its process
//! ends, for whatever reason, its hosts end with it.

pub mod cgroups;
pub mod clients;
pub mod cluster;
pub mod containerd;
pub mod control_plane;
pub mod daemon;
pub mod fuzz;
pub mod host;
pub mod host_files;
pub mod http;
pub mod images;
pub mod kubeadm;
pub mod load;
pub mod measure;
pub mod modules;
pub mod nodes;
pub mod places;
pub mod registry;
pub mod simulator;
pub mod suite;
pub mod switch;
pub mod throughput;
pub mod wait;
