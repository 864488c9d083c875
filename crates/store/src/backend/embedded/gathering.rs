//! How long a commit waits for those who are about to write, too. Pure; the committer asks.
//!
//! Answered writers need a moment to come back with the next write. Whoever comes first would have
//! a sync of their own, and all others wait for it: sixty-four writers would pay two syncs a round.
//! So when several were in flight as the last commit ended, the next one waits for as many, and at
//! most for a quarter of what a commit takes: that much is soon won back, and a writer who is alone
//! never waits.

use std::time::Duration;

/// However slow the disk is.
const LONGEST: Duration = Duration::from_millis(2);

#[derive(Debug, Default)]
pub(super) struct Gathering {
    /// Requests that had not been answered when the last commit ended, its own among them.
    in_flight: usize,
    /// What a commit takes, about.
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

    /// For a commit that has so many requests: how long it may wait for more, from its first on.
    pub fn patience(&self, gathered: usize) -> Option<Duration> {
        (gathered < self.in_flight).then(|| (self.commit / 4).min(LONGEST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_company_is_waited_for_and_not_for_long() {
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
        assert_eq!(Gathering::default().patience(1), None, "of the first nothing is known");
    }

    #[test]
    fn one_slow_commit_is_not_the_rule() {
        let mut gathering = Gathering::default();
        for took in [400, 400, 8400] {
            gathering.note(2, Duration::from_micros(took));
        }
        assert_eq!(gathering.patience(1), Some(Duration::from_micros(350)));
    }
}
