//! Which history may be removed: revisions beyond both an age and a number of revisions; and those beyond
//! a number of bytes, at any age, so that a burst cannot fill the disk. Pure; the committer asks for the
//! time of the next check and for the new floor.
//!
//! The floor rises in steps, so that an idle cluster (with a lease renewed now and then) does not trim
//! at every write.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::Revision;

#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// At least this many revisions are kept.
    pub revisions: u64,
    /// Beyond those, revisions younger than this…
    pub age: Duration,
    /// …that fit in this many bytes.
    pub bytes: u64,
}

pub(super) struct Retention {
    limits: Limits,
    /// All bytes ever noted.
    bytes: u64,
    /// A few dozen per age and per bytes.
    samples: VecDeque<Sample>,
}

/// The revision at a time, and the bytes written until then.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    revision: Revision,
    bytes: u64,
}

/// The approximate number of samples per age.
const RESOLUTION: u32 = 64;

impl Retention {
    pub fn new(limits: Limits) -> Self {
        Self { limits, bytes: 0, samples: VecDeque::new() }
    }

    /// Notes that the store has reached this revision by writing this many bytes.
    pub fn note(&mut self, now: Instant, revision: Revision, bytes: u64) {
        self.bytes += bytes;
        // After opening, the times come from a wall clock that may have been set back.
        let now = self.samples.back().map_or(now, |last| now.max(last.at));
        let near = |last: &Sample| {
            let age = now.saturating_duration_since(last.at);
            let bytes = self.bytes - last.bytes;
            age < self.limits.age / RESOLUTION && bytes < self.limits.bytes / u64::from(RESOLUTION)
        };
        if !self.samples.back().is_some_and(near) {
            self.samples.push_back(Sample { at: now, revision, bytes: self.bytes });
        }
    }

    /// The step in which the floor rises.
    fn step(&self) -> u64 {
        (self.limits.revisions / 10).clamp(1, 1000)
    }

    fn may_go(&self, sample: &Sample, now: Instant) -> bool {
        let is_old = now.saturating_duration_since(sample.at) >= self.limits.age;
        is_old || self.bytes - sample.bytes > self.limits.bytes
    }

    /// The new floor, if a step is due.
    pub fn due(&mut self, now: Instant, current: Revision, floor: Revision) -> Option<Revision> {
        // Of the samples that may be removed, only the newest matters.
        while self.samples.get(1).is_some_and(|sample| self.may_go(sample, now)) {
            self.samples.pop_front();
        }
        let newest = self.samples.front().filter(|sample| self.may_go(sample, now))?;
        let target = newest.revision.0.min(current.0.saturating_sub(self.limits.revisions));
        (target >= floor.0 + self.step()).then_some(Revision(target))
    }

    /// When the next step is due without further writes.
    pub fn next_look(&self, current: Revision, floor: Revision) -> Option<Instant> {
        let least = floor.0 + self.step();
        if current.0.saturating_sub(self.limits.revisions) < least {
            return None;
        }
        let sample = self.samples.iter().find(|sample| sample.revision.0 >= least)?;
        Some(sample.at + self.limits.age)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keep(revisions: u64) -> Retention {
        Retention::new(Limits { revisions, age: Duration::from_secs(300), bytes: 64_000 })
    }

    /// Ten revisions of 10 bytes per second from revision 2 on; the floor due `seconds` after the last.
    fn check(kept: u64, written: u64, seconds: u64, floor: u64, expected: Option<u64>) {
        let start = Instant::now();
        let mut retention = keep(kept);
        let at = |revision: u64| start + Duration::from_millis(100) * (revision - 2) as u32;
        for revision in 2..2 + written {
            retention.note(at(revision), Revision(revision), 10);
        }
        let current = Revision(1 + written);
        let now = at(current.0) + Duration::from_secs(seconds);
        let due = retention.due(now, current, Revision(floor)).map(|revision| revision.0);
        assert_eq!(due, expected, "kept {kept}, written {written}, after {seconds} s");
    }

    #[test]
    fn history_is_removed_when_it_is_old_and_long() {
        check(100, 50, 1000, 1, None);
        check(100, 1000, 0, 1, None);
        check(100, 1000, 1000, 1, Some(901));
        check(100, 1000, 1000, 895, None);
        check(100, 5000, 0, 1, Some(1976));
        check(0, 1000, 1000, 1, Some(989));
    }

    /// Otherwise the committer would wake, find nothing to do, and wake again.
    #[test]
    fn a_step_is_due_at_the_announced_time() {
        let mut random = 1_u64;
        let mut below = |limit: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % limit
        };
        let start = Instant::now() + Duration::from_secs(1000);
        for _ in 0..200 {
            let mut retention = keep(below(60));
            let (mut current, mut floor) = (Revision(1), Revision(1));
            for _ in 0..100 {
                current.0 += 1 + below(20);
                // The clock may also go back.
                let now = start + Duration::from_secs(below(600));
                retention.note(now, current, below(9000));
                let Some(look) = retention.next_look(current, floor) else { continue };
                if below(3) == 0 {
                    let due = retention.due(look, current, floor);
                    assert!(due.is_some_and(|due| due > floor && due <= current), "{due:?}");
                    floor = due.unwrap_or(floor);
                }
            }
        }
    }

    #[test]
    fn a_burst_is_removed_early() {
        let now = Instant::now();
        let mut retention = keep(10);
        for revision in 2..102 {
            retention.note(now, Revision(revision), 1000);
        }
        // 64 of the 100 may stay.
        assert_eq!(retention.due(now, Revision(101), Revision(1)), Some(Revision(36)));
        assert_eq!(retention.due(now, Revision(101), Revision(36)), None);
    }

    #[test]
    fn it_checks_again_only_when_a_step_can_be_due() {
        let start = Instant::now();
        let mut retention = keep(100);
        retention.note(start, Revision(50), 10);
        assert_eq!(retention.next_look(Revision(50), Revision(1)), None);
        let due = start + Duration::from_secs(300);
        assert_eq!(retention.next_look(Revision(150), Revision(1)), Some(due));
        assert_eq!(retention.next_look(Revision(150), Revision(45)), None);
    }
}
