//! What everything stands on: time, durations, randomness, supervised tasks, backoff, telemetry,
//! the platform's names, and small things that many rooms need: answers that count for a while, PEM,
//! percent-encoding, watches of directories, protobuf messages.
//!
//! These are the seams for simulation. In production [`clock`] and [`rng`] read the system; inside
//! [`sim::enter`] (one thread, tokio's paused clock) both derive from a seed, so that a whole
//! cluster runs twice the same way. No other crate calls `Instant::now`, `SystemTime::now`,
//! `tokio::spawn` or a global random source; clippy's `disallowed-methods` enforces it.

pub mod backoff;
pub mod clock;
pub mod duration;
pub mod log_limit;
pub mod memory;
pub mod messages;
pub mod metrics;
pub mod pem;
pub mod percent;
pub mod platform;
pub mod rng;

pub mod sim;
pub mod task;
pub mod telemetry;
pub mod watch;
