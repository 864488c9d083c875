//! Which history may go: what is both older than an age and further back than a number of
//! revisions. Pure; the committer asks when to look and how far the floor may rise.
//!
//! The floor rises in steps, so that an idle cluster (a lease renewed now and then) does not pay
//! for trimming at every write.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::Revision;

pub(super) struct Retention {
    revisions: u64,
    age: Duration,
    /// "At this time the store was at that revision", a few dozen per age.
    samples: VecDeque<(Instant, Revision)>,
}

/// As many samples as an age is divided into, about.
const RESOLUTION: u32 = 64;

impl Retention {
    pub fn new(revisions: u64, age: Duration) -> Self {
        Self { revisions, age, samples: VecDeque::new() }
    }

    pub fn note(&mut self, now: Instant, revision: Revision) {
        let recent = |at: Instant| now.saturating_duration_since(at) < self.age / RESOLUTION;
        if !self.samples.back().is_some_and(|(at, _)| recent(*at)) {
            self.samples.push_back((now, revision));
        }
    }

    /// The step in which the floor rises.
    fn step(&self) -> u64 {
        (self.revisions / 10).clamp(1, 1000)
    }

    /// The floor to rise to now, if a step is due.
    pub fn due(&mut self, now: Instant, current: Revision, floor: Revision) -> Option<Revision> {
        let is_old = |at: Instant| now.saturating_duration_since(at) >= self.age;
        // Of the samples that are old enough, only the newest matters.
        while self.samples.get(1).is_some_and(|(at, _)| is_old(*at)) {
            self.samples.pop_front();
        }
        let (_, aged) = self.samples.front().filter(|(at, _)| is_old(*at))?;
        let target = aged.0.min(current.0.saturating_sub(self.revisions));
        (target >= floor.0 + self.step()).then_some(Revision(target))
    }

    /// When a step will be due if nothing more is written.
    pub fn next_look(&self, current: Revision, floor: Revision) -> Option<Instant> {
        let least = floor.0 + self.step();
        if current.0.saturating_sub(self.revisions) < least {
            return None;
        }
        let (at, _) = self.samples.iter().find(|(_, revision)| revision.0 >= least)?;
        Some(*at + self.age)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten revisions per second from revision 2 on; what is due `seconds` after the last.
    fn check(kept: u64, written: u64, seconds: u64, floor: u64, expected: Option<u64>) {
        let start = Instant::now();
        let mut retention = Retention::new(kept, Duration::from_secs(300));
        let at = |revision: u64| start + Duration::from_millis(100) * (revision - 2) as u32;
        for revision in 2..2 + written {
            retention.note(at(revision), Revision(revision));
        }
        let current = Revision(1 + written);
        let now = at(current.0) + Duration::from_secs(seconds);
        let due = retention.due(now, current, Revision(floor)).map(|revision| revision.0);
        assert_eq!(due, expected, "kept {kept}, written {written}, after {seconds} s");
    }

    #[test]
    fn history_goes_when_it_is_old_and_long() {
        check(100, 50, 1000, 1, None);
        check(100, 1000, 0, 1, None);
        check(100, 1000, 1000, 1, Some(901));
        check(100, 1000, 1000, 895, None);
        check(100, 5000, 0, 1, Some(1976));
        check(0, 1000, 1000, 1, Some(989));
    }

    #[test]
    fn it_looks_again_only_when_something_can_be_due() {
        let start = Instant::now();
        let mut retention = Retention::new(100, Duration::from_secs(300));
        retention.note(start, Revision(50));
        assert_eq!(retention.next_look(Revision(50), Revision(1)), None);
        let due = start + Duration::from_secs(300);
        assert_eq!(retention.next_look(Revision(150), Revision(1)), Some(due));
        assert_eq!(retention.next_look(Revision(150), Revision(45)), None);
    }
}
