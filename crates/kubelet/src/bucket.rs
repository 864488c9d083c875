//! A limit of so many a second, with a burst.
//!
//! Upstream: `client-go/util/flowcontrol` token bucket.

use std::sync::Mutex;

use tokio::time::Instant;

pub struct Bucket {
    per_second: f64,
    burst: f64,
    /// The remaining tokens of the burst, and the time at which it was computed.
    left: Mutex<(f64, Instant)>,
}

impl Bucket {
    pub fn new(per_second: f64, burst: f64, now: Instant) -> Self {
        Self { per_second, burst, left: Mutex::new((burst, now)) }
    }

    pub fn allows(&self, now: Instant) -> bool {
        let mut left = self.left.lock().expect("no panic while held");
        let earned = now.duration_since(left.1).as_secs_f64() * self.per_second;
        *left = ((left.0 + earned).min(self.burst), now);
        let allowed = left.0 >= 1.0;
        left.0 -= f64::from(u8::from(allowed));
        allowed
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_burst_and_then_so_many_a_second() {
        let start = Instant::now();
        let bucket = Bucket::new(100.0, 10.0, start);
        let allowed = |after: Duration| (0..20).filter(|_| bucket.allows(start + after)).count();
        assert_eq!(allowed(Duration::ZERO), 10);
        assert_eq!(allowed(Duration::from_millis(50)), 5);
        assert_eq!(allowed(Duration::from_secs(60)), 10);
    }
}
