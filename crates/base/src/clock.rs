//! The wall clock, and what a thread has worked. Durations and deadlines use `tokio::time`, which
//! simulation can pause.

use std::time::Duration;

use jiff::Timestamp;
use nix::time::{ClockId, clock_gettime};

use crate::sim::WORLD;

/// Now, in nanoseconds of precision.
pub fn now() -> Timestamp {
    WORLD.with_borrow(|world| match world {
        Some(world) => world.now(),
        #[expect(clippy::disallowed_methods, reason = "the one place that reads the wall clock")]
        None => Timestamp::now(),
    })
}

/// Now, cut to whole seconds, as `metav1.Time` is written.
pub fn now_seconds() -> Timestamp {
    Timestamp::from_second(now().as_second()).expect("a second of a valid timestamp is valid")
}

/// The processor's time that this thread has had: what others do on the machine does not count in it.
/// Nothing where the system does not say.
pub fn busy() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}
