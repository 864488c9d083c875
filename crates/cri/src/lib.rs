//! The runtime contract: what the kubelet asks of whatever runs containers, shaped like CRI v1.
//!
//! [`messages`] are CRI's messages with upstream's field numbers, so that a gRPC backend can send
//! the very structs that the embedded backend takes. [`RuntimeService`] and [`ImageService`] are
//! the calls. They differ from the wire in two places, both in favour of a backend in the same
//! process: exec, attach and port-forward hand out byte streams ([`streams`]) where CRI hands out
//! URLs, and answers that wrap a single value are that value.
//!
//! Invariant: nothing here knows a backend, and no call holds state for the caller: whoever
//! restarts asks again.
//!
//! Upstream: `k8s.io/cri-api` v1 of Kubernetes v1.36.

mod error;
pub mod messages;
mod service;
pub mod streams;

pub use error::{Error, Result};
pub use messages::*;
pub use service::{ImageService, Runtime, RuntimeService};
pub use streams::{AttachStreams, Events, ExecStreams, Input, Io, Output, TerminalSize};
