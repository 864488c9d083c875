//! The Retry-After of refused requests, in seconds: doubled while many are refused, one less in every
//! quieter second. Upstream: `dropped_requests_tracker.go`.

use std::collections::VecDeque;

const LONGEST: u64 = 32;

/// State of one priority level. Seconds are from any monotonic clock.
#[derive(Debug)]
pub struct RetryAfter {
    seconds: u64,
    /// The time of the last doubling.
    doubled: Option<u64>,
    current: (u64, u64),
    /// Refusals by second, the oldest first.
    history: VecDeque<(u64, u64)>,
}

impl Default for RetryAfter {
    fn default() -> Self {
        Self { seconds: 1, doubled: None, current: (0, 0), history: VecDeque::new() }
    }
}

impl RetryAfter {
    /// Records a refusal; returns its Retry-After.
    pub fn refuse(&mut self, second: u64) -> u64 {
        if self.current.0 == second {
            self.current.1 += 1;
            return self.seconds;
        }
        let past = std::mem::replace(&mut self.current, (second, 1));
        self.history.push_back(past);
        let kept = (2 * self.seconds).min(LONGEST);
        while self.history.front().is_some_and(|(at, _)| past.0.saturating_sub(*at) > kept) {
            self.history.pop_front();
        }
        self.update(second);
        self.seconds
    }

    fn update(&mut self, now: u64) {
        let recent = |at: &u64| *at < now && now - at <= self.seconds;
        let refused: u64 =
            self.history.iter().filter(|(at, _)| recent(at)).map(|(_, count)| count).sum();
        let may_double = self.doubled.is_none_or(|at| now - at >= self.seconds);
        if may_double && refused >= 3 * self.seconds {
            self.seconds = (self.seconds * 2).min(LONGEST);
            self.doubled = Some(now);
        } else if refused < self.seconds && self.seconds > 1 {
            self.seconds -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_follows_the_refusals() {
        let mut retry = RetryAfter::default();
        let mut refuse = |second, times: u64| (0..times).map(|_| retry.refuse(second)).last();
        assert_eq!(refuse(100, 3), Some(1));
        assert_eq!(refuse(101, 6), Some(2), "three in the second before");
        assert_eq!(refuse(102, 6), Some(2), "not twice within the time");
        assert_eq!(refuse(103, 12), Some(4));
        assert_eq!(refuse(200, 1), Some(3), "quiet since");
        assert_eq!(refuse(300, 1), Some(2));
        assert_eq!(refuse(400, 1), Some(1));
    }
}
