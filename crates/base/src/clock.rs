//! The wall clock. Durations and deadlines use `tokio::time`, which simulation can pause.

use jiff::Timestamp;

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
