//! One address on one node: hold it, watch its holder, or leave it alone. Pure; time comes in.
//!
//! ```text
//!            rank 0: at once                 nobody answers for `patience`
//!  (nothing) ──────────────► holds ◄──────────────────────────────────── watches (rank 1 to 3)
//!                              │      another machine answers, rank > 0      ▲
//!                              └─────────────────────────────────────────────┘
//! ```
//!
//! The API tells that a node is gone after 50 s. A watcher asks the address itself, by ARP or NDP, twice a second;
//! no answer means that no machine has it. So a takeover needs no API server. When the first of the order is
//! back, it takes the address, and the node that held it meanwhile hears that and lets go.
//!
//! Invariants: the first of the order never lets go while it is the first. Another holder keeps asking whether
//! another host has the address, so two holders last for a second.

use std::time::Duration;

use net::neighbours::Mac;
use tokio::time::Instant;

/// The ranks below it watch the holder.
const WATCHERS: usize = 4;
const ASK_EVERY: Duration = Duration::from_millis(500);
/// After this long without an answer, all machines are asked, not only the one that answered last.
const DOUBT: Duration = Duration::from_millis(700);
const PATIENCE: Duration = Duration::from_millis(1500);
/// How much longer each further rank waits.
const PATIENCE_STEP: Duration = Duration::from_millis(700);
/// How often a holder that is not the first asks for another holder.
const DOUBT_EVERY: Duration = Duration::from_secs(1);
/// A new holder tells so this often: frames get lost.
const ANNOUNCEMENTS: u8 = 5;
const ANNOUNCE_EVERY: Duration = Duration::from_secs(1);
/// After the kernel refused an address.
const AGAIN: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Put the address on the link.
    Take,
    /// Remove the address from the link.
    LetGo,
    Announce,
    /// Ask for the holder: the machine that answered last, or all.
    Ask(Option<Mac>),
}

#[derive(Debug)]
pub struct Seat {
    /// The node's place in the address's order.
    rank: usize,
    holds: bool,
    /// When another machine last answered, or this node began to watch.
    heard: Instant,
    holder: Option<Mac>,
    next_ask: Instant,
    announcements: u8,
    next_announcement: Instant,
    /// Not before, after a failure.
    not_before: Instant,
}

impl Seat {
    pub fn new(rank: usize, holds: bool, now: Instant) -> Self {
        Self {
            rank,
            holds,
            heard: now,
            holder: None,
            next_ask: now,
            // A process that restarts tells its neighbours again.
            announcements: if holds { 1 } else { 0 },
            next_announcement: now,
            not_before: now,
        }
    }

    pub fn holds(&self) -> bool {
        self.holds
    }

    pub fn set_rank(&mut self, rank: usize, now: Instant) {
        if self.rank != rank {
            self.rank = rank;
            (self.heard, self.next_ask) = (now, now);
        }
    }

    /// The address was removed from the link, or the kernel refused it.
    pub fn lost(&mut self, now: Instant) {
        self.holds = false;
        (self.heard, self.not_before) = (now, now + AGAIN);
    }

    /// Another machine has the address.
    pub fn hears(&mut self, mac: Mac, now: Instant) -> Option<Action> {
        (self.heard, self.holder) = (now, Some(mac));
        if !self.holds {
            return None;
        }
        if self.rank == 0 {
            self.announcements = self.announcements.max(1);
            return None;
        }
        self.holds = false;
        Some(Action::LetGo)
    }

    /// Another machine asks all machines: it does not know the holder, or holds the address too.
    pub fn is_asked(&mut self) {
        if self.holds && self.rank == 0 {
            self.announcements = self.announcements.max(1);
        }
    }

    /// When [`Seat::step`] has the next thing to do.
    pub fn due(&self) -> Option<Instant> {
        let announcement = (self.holds && self.announcements > 0).then_some(self.next_announcement);
        let watches = match self.holds {
            true => self.rank > 0,
            false => self.rank < WATCHERS,
        };
        let other = match self.rank {
            0 => (!self.holds).then_some(self.not_before),
            _ => watches.then(|| match self.holds {
                true => self.next_ask,
                false => self.next_ask.min(self.takeover()),
            }),
        };
        announcement.into_iter().chain(other).min()
    }

    pub fn step(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = vec![];
        let is_free = self.rank == 0 || self.rank < WATCHERS && now >= self.takeover();
        if !self.holds && is_free && now >= self.not_before {
            self.holds = true;
            (self.announcements, self.next_announcement) = (ANNOUNCEMENTS, now);
            self.next_ask = now + DOUBT_EVERY;
            actions.push(Action::Take);
        }
        if self.holds && self.announcements > 0 && now >= self.next_announcement {
            self.announcements -= 1;
            self.next_announcement = now + ANNOUNCE_EVERY;
            actions.push(Action::Announce);
        }
        if self.rank == 0 || now < self.next_ask {
            return actions;
        }
        if self.holds {
            self.next_ask = now + DOUBT_EVERY;
            actions.push(Action::Ask(None));
        } else if self.rank < WATCHERS {
            self.next_ask = now + ASK_EVERY;
            let is_sure = now.duration_since(self.heard) < DOUBT;
            actions.push(Action::Ask(self.holder.filter(|_| is_sure)));
        }
        actions
    }

    /// When a silent address is taken.
    fn takeover(&self) -> Instant {
        let further = self.rank.saturating_sub(1) as u32;
        (self.heard + PATIENCE + PATIENCE_STEP * further).max(self.not_before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OTHER: Mac = [2, 0, 0, 0, 0, 9];

    /// Steps whenever something is due, until `limit` has passed; what was done, and after how many ms.
    fn run(seat: &mut Seat, from: Instant, limit: u64) -> Vec<(u64, Action)> {
        let end = from + Duration::from_millis(limit);
        let (mut done, mut steps) = (vec![], 0);
        while let Some(at) = seat.due().filter(|at| *at < end) {
            let at = at.max(from);
            let ms = at.duration_since(from).as_millis() as u64;
            done.extend(seat.step(at).into_iter().map(|action| (ms, action)));
            steps += 1;
            assert!(steps < 100, "it spins: {seat:?}");
        }
        done
    }

    fn taken_at(done: &[(u64, Action)]) -> Option<u64> {
        done.iter().find(|(_, action)| *action == Action::Take).map(|(ms, _)| *ms)
    }

    #[test]
    fn the_first_takes_and_announces() {
        let now = Instant::now();
        let mut seat = Seat::new(0, false, now);
        let done = run(&mut seat, now, 60_000);
        assert_eq!(done[..2], [(0, Action::Take), (0, Action::Announce)]);
        let announced: Vec<u64> = done
            .iter()
            .filter(|(_, action)| *action == Action::Announce)
            .map(|(ms, _)| *ms)
            .collect();
        assert_eq!(announced, [0, 1000, 2000, 3000, 4000]);
        // It stays, whatever others say, and tells them.
        let later = now + Duration::from_secs(90);
        assert_eq!(seat.hears(OTHER, later), None);
        assert_eq!(run(&mut seat, later, 5000), [(0, Action::Announce)]);
        seat.is_asked();
        assert_eq!(run(&mut seat, later, 5000).len(), 1);
        seat.lost(later);
        assert_eq!(taken_at(&run(&mut seat, later, 5000)), Some(1000));
    }

    #[test]
    fn a_silent_holder_is_replaced_within_three_seconds() {
        for (rank, expected) in [(1, Some(1500)), (2, Some(2200)), (3, Some(2900)), (4, None)] {
            let now = Instant::now();
            let mut seat = Seat::new(rank, false, now);
            let done = run(&mut seat, now, 10_000);
            assert_eq!(taken_at(&done), expected, "rank {rank}");
        }
        let now = Instant::now();
        let mut seat = Seat::new(1, false, now);
        assert_eq!(seat.step(now), [Action::Ask(None)]);
        let mut at = now;
        for _ in 0..20 {
            at += Duration::from_millis(100);
            assert_eq!(seat.hears(OTHER, at), None);
            let steps = seat.step(at);
            assert!(steps.is_empty() || steps == [Action::Ask(Some(OTHER))], "{steps:?}");
        }
        let done = run(&mut seat, at, 3000);
        assert_eq!(taken_at(&done), Some(1500), "after the last answer");
        assert!(
            done.contains(&(1000, Action::Ask(None))) || done.contains(&(900, Action::Ask(None)))
        );
    }

    #[test]
    fn a_substitute_lets_go_when_another_holder_answers() {
        let now = Instant::now();
        let mut seat = Seat::new(1, false, now);
        run(&mut seat, now, 2000);
        assert!(seat.holds());
        let later = now + Duration::from_secs(10);
        assert!(run(&mut seat, later, 1500).contains(&(0, Action::Ask(None))), "it keeps asking");
        assert_eq!(seat.hears(OTHER, later), Some(Action::LetGo));
        assert!(!seat.holds());
        // It becomes the first: it takes the address at once.
        seat.set_rank(0, later);
        assert_eq!(taken_at(&run(&mut seat, later, 100)), Some(0));
        // And the last: it holds until another one answers.
        seat.set_rank(7, later);
        run(&mut seat, later, 3000);
        assert!(seat.holds());
        assert_eq!(seat.hears(OTHER, later), Some(Action::LetGo));
        assert_eq!(seat.due(), None, "too far behind to watch");
    }
}
