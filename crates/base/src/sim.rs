//! The switch between the real world and a seeded one, per thread.
//!
//! A simulation runs on one current-thread runtime with tokio's clock paused, so a thread-local is
//! the whole context: no handle has to travel through every constructor.

use std::cell::RefCell;

use jiff::Timestamp;
use tokio::time::Instant;

/// 2026-01-01T00:00:00Z, where every simulation begins.
const EPOCH_SECONDS: i64 = 1_767_225_600;

pub(crate) struct World {
    pub(crate) rng: fastrand::Rng,
    epoch: Timestamp,
    start: Instant,
}

impl World {
    pub(crate) fn now(&self) -> Timestamp {
        self.epoch + self.start.elapsed()
    }
}

thread_local! {
    pub(crate) static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
}

/// Ends the simulation of this thread when dropped.
#[must_use]
pub struct Guard(());

impl Drop for Guard {
    fn drop(&mut self) {
        WORLD.with_borrow_mut(|world| *world = None);
    }
}

/// From here to the guard's end, this thread's clock and randomness derive from `seed` and from
/// tokio's (paused) clock. Call it inside the runtime.
pub fn enter(seed: u64) -> Guard {
    let epoch = Timestamp::from_second(EPOCH_SECONDS).expect("a constant in range");
    let world = World { rng: fastrand::Rng::with_seed(seed), epoch, start: Instant::now() };
    WORLD.with_borrow_mut(|slot| {
        assert!(slot.is_none(), "a thread simulates one world at a time");
        *slot = Some(world);
    });
    Guard(())
}

/// Moves this thread's clock without its timers, as if the clock was set or the machine slept.
pub fn jump(by: std::time::Duration) {
    WORLD.with_borrow_mut(|slot| {
        let world = slot.as_mut().expect("only a simulated clock can be set");
        world.epoch += by;
    });
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    async fn run(seed: u64) -> Vec<String> {
        let _world = super::enter(seed);
        let mut trace = vec![];
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(crate::rng::below(1000))).await;
            trace.push(format!("{} {}", crate::clock::now(), crate::rng::alphanumeric(5)));
        }
        trace
    }

    #[tokio::test(start_paused = true)]
    async fn a_seed_gives_the_same_world_twice() {
        let first = run(7).await;
        assert_eq!(first, run(7).await);
        assert_ne!(first, run(8).await);
    }
}
