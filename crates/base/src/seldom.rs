//! Log lines about what others do to us: the first of a kind at once, then one a minute that says how
//! many there were. Otherwise whoever may connect could fill the disk.
//!
//! Invariant: the number of kinds that are remembered is bounded. When strangers bring more, those
//! are silent until a remembered one has been quiet for a minute: an attack by many is known by then.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

const PAUSE: Duration = Duration::from_secs(60);
const KINDS: usize = 64;

/// What was said of each kind.
pub struct Seldom<K> {
    /// Guards a look at one line, or at all of them when there are many.
    lines: Mutex<HashMap<K, Line>>,
}

struct Line {
    said: Instant,
    unsaid: u64,
}

impl<K> Default for Seldom<K> {
    fn default() -> Self {
        Self { lines: Mutex::default() }
    }
}

impl<K: Eq + Hash> Seldom<K> {
    /// Whether to say something of this kind now, and how often it was not said since the last time.
    pub fn ask(&self, kind: K) -> Option<u64> {
        let now = Instant::now();
        let is_old = |line: &Line| now.duration_since(line.said) >= PAUSE;
        let mut lines = self.lines.lock().expect("no panic under the lock");
        if let Some(line) = lines.get_mut(&kind) {
            if !is_old(line) {
                line.unsaid += 1;
                return None;
            }
            line.said = now;
            return Some(std::mem::take(&mut line.unsaid));
        }
        if lines.len() >= KINDS {
            lines.retain(|_, line| !is_old(line));
        }
        if lines.len() >= KINDS {
            return None;
        }
        lines.insert(kind, Line { said: now, unsaid: 0 });
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_first_is_said_and_then_one_a_minute() {
        let seldom = Seldom::default();
        let said: Vec<_> = ["a", "a", "b", "a"].into_iter().map(|kind| seldom.ask(kind)).collect();
        assert_eq!(said, [Some(0), None, Some(0), None]);
        tokio::time::advance(PAUSE).await;
        assert_eq!((seldom.ask("a"), seldom.ask("a"), seldom.ask("b")), (Some(2), None, Some(0)));
    }

    #[tokio::test(start_paused = true)]
    async fn there_is_a_limit_of_kinds() {
        let seldom = Seldom::default();
        let said = (0..10 * KINDS).filter(|kind| seldom.ask(*kind).is_some()).count();
        assert_eq!(said, KINDS);
        tokio::time::advance(PAUSE).await;
        assert_eq!(seldom.ask(10 * KINDS), Some(0));
        assert!(seldom.lines.lock().expect("no panic").len() <= KINDS);
    }
}
