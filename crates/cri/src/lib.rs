//! The runtime contract: the kubelet's calls to a container runtime, shaped like CRI v1.
//!
//! [`messages`] are CRI's messages with upstream's field numbers, so that a gRPC backend can send
//! the same structs that the embedded backend takes. [`RuntimeService`] and [`ImageService`] are
//! the calls. They differ from the wire in two places, in favour of a backend in the same process:
//! exec, attach and port-forward return byte streams ([`streams`]) instead of URLs, and answers
//! that wrap a single value are that value.
//!
//! [`server`] serves a backend to other programs on the machine; [`sessions`] connects the byte streams
//! to clients.
//!
//! Invariant: this crate knows no backend, and no call holds state for its caller: after a restart
//! the caller simply asks again.
//!
//! Upstream: `k8s.io/cri-api` v1 of Kubernetes v1.36.

mod error;
pub mod messages;
pub mod server;
mod service;
pub mod sessions;
pub mod streams;

pub use error::{Error, Result};
pub use messages::*;
pub use service::{ContainerDetails, ImageService, Runtime, RuntimeService};
pub use streams::{AttachStreams, Events, ExecStreams, Input, Io, Output, TerminalSize};
