//! Everything about one pod: its worker, the worker's decisions, and the set of all workers.
//!
//! ```text
//!  set ─► worker ─► plan, status, admit (pure)
//!            └────► start, stop, resize (act) ─► sandbox, container, env … (the runtime's messages)
//! ```

pub mod admit;
pub mod allocation;
pub mod amounts;
pub mod api;
pub mod backoff;
pub mod container;
pub mod downward;
pub mod env;
pub mod env_file;
pub mod events;
pub mod expand;
pub mod handler;
pub mod holds;
pub mod hosts;
pub mod images;
pub mod input;
pub mod manifest_url;
pub mod mirrors;
pub mod objects;
pub mod observed;
pub mod phase;
pub mod plan;
pub mod probe;
pub mod probe_counts;
pub mod relist;
pub mod resize;
pub mod runtime;
pub mod sandbox;
pub mod set;
pub mod static_pods;
pub mod status;
pub mod status_writer;
pub mod sysctls;
pub mod users;
pub mod worker;
