//! The kernel's network over netlink: namespaces, links, routes, pod attachments, nftables.
//!
//! This crate needs no C library, and runs no program except `modprobe` ([`modules`]). In: plain
//! data (names, addresses, a ruleset model). Out: kernel state, or the kernel's answers. Every
//! `ensure_*` is idempotent and repairs differences, and every removal accepts a missing object:
//! callers re-run them after a crash without a check.
//!
//! Invariant: network namespaces are per thread. Work in a namespace runs on a thread of its own ([`netns`])
//! or on a socket that was opened there. The caller's threads never change their namespace.

pub mod conntrack;
mod error;
pub mod host_ports;
pub mod links;
pub mod modules;
pub mod monitor;
pub mod neighbours;
pub mod netns;
pub mod nft;
pub mod pods;
pub mod shaping;
pub mod sysctl;
pub mod vxlan;
pub mod watch;

pub use error::Error;
pub use links::Links;
