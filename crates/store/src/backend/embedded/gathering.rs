//! How long a commit waits for further writers. Pure; the committer asks.
//!
//! Writers need a moment between an answer and their next write. Without waiting, the first one would
//! get its own sync, and all others would wait for it: sixty-four writers would pay two syncs per round.
//! So if several requests were in flight when the last commit ended, the next one waits for as many, but
//! at most for a quarter of a commit's duration: the gain exceeds that soon, and a single writer never
//! waits.

use std::time::Duration;

/// The limit for slow disks.
const LONGEST: Duration = Duration::from_millis(2);

#[derive(Debug, Default)]
pub(super) struct Gathering {
    /// Unanswered requests when the last commit ended, its own included.
    in_flight: usize,
    /// The approximate duration of a commit.
    commit: Duration,
}

impl Gathering {
    pub fn note(&mut self, in_flight: usize, took: Duration) {
        self.in_flight = in_flight;
        self.commit = match self.commit {
            Duration::ZERO => took,
            commit => (commit * 7 + took) / 8,
        };
    }

    /// How long a commit that has `gathered` requests may wait for more, from its first request on.
    pub fn patience(&self, gathered: usize) -> Option<Duration> {
        (gathered < self.in_flight).then(|| (self.commit / 4).min(LONGEST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_several_writers_wait_and_briefly() {
        let check = |in_flight, commit, gathered, expected: Option<u64>| {
            let mut gathering = Gathering::default();
            gathering.note(in_flight, Duration::from_micros(commit));
            let patience = gathering.patience(gathered);
            assert_eq!(patience, expected.map(Duration::from_micros), "{gathered} of {in_flight}");
        };
        check(1, 400, 1, None);
        check(2, 400, 1, Some(100));
        check(64, 400, 63, Some(100));
        check(64, 400, 64, None);
        check(64, 400, 65, None);
        check(64, 40_000, 1, Some(2000));
        assert_eq!(Gathering::default().patience(1), None, "the first commit does not wait");
    }

    #[test]
    fn one_slow_commit_does_not_dominate() {
        let mut gathering = Gathering::default();
        for took in [400, 400, 8400] {
            gathering.note(2, Duration::from_micros(took));
        }
        assert_eq!(gathering.patience(1), Some(Duration::from_micros(350)));
    }
}
