//! The kernel's network, by netlink: namespaces, links, routes, pod attachments, nftables.
//!
//! Nothing here needs a C library, or runs a program but `modprobe` ([`modules`]). In: plain data (names, addresses, a ruleset
//! model); out: kernel state, or what the kernel says. Every `ensure_*` is idempotent and repairs
//! what differs, every removal accepts that the thing is gone already: callers re-run them after a
//! crash without looking.
//!
//! Invariant: network namespaces are per thread, so whatever needs one runs on a thread of its own
//! ([`netns`]) or on a socket that was opened there; the caller's threads never change theirs.

pub mod conntrack;
mod error;
pub mod host_ports;
pub mod links;
pub mod modules;
pub mod monitor;
pub mod netns;
pub mod nft;
pub mod pods;
pub mod sysctl;
pub mod vxlan;

pub use error::Error;
pub use links::Links;
