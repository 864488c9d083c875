//! Exponential backoff with a ceiling and optional jitter, as data: the caller sleeps.

use std::time::Duration;

#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    ceiling: Duration,
    /// Added at most, as a share of the delay: 0.0 for none.
    jitter: f64,
    next: Duration,
}

impl Backoff {
    /// Doubles from `first` to `ceiling`.
    pub fn new(first: Duration, ceiling: Duration) -> Self {
        Self { first, ceiling, jitter: 0.0, next: first }
    }

    /// Adds up to `share` of each delay at random, so that peers do not come back together.
    pub fn with_jitter(mut self, share: f64) -> Self {
        self.jitter = share;
        self
    }

    /// The delay to wait now; the one after is twice as long.
    pub fn step(&mut self) -> Duration {
        let delay = self.next;
        self.next = (self.next * 2).min(self.ceiling);
        delay.mul_f64(1.0 + self.jitter * crate::rng::unit())
    }

    /// Back to the first delay, after a success.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_to_the_ceiling_and_resets() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(5));
        let seen: Vec<u64> = (0..4).map(|_| backoff.step().as_secs()).collect();
        assert_eq!(seen, [1, 2, 4, 5]);
        backoff.reset();
        assert_eq!(backoff.step().as_secs(), 1);
    }
}
