//! Rate-limited log lines about clients: the first line of a kind at once, then one a minute with the number
//! of omitted ones. Otherwise any client could fill the disk.
//!
//! Invariant: the number of remembered kinds is bounded. If clients bring more kinds, further ones are not
//! logged until a remembered kind has been quiet for a minute: such an attack already shows in the log.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

const PAUSE: Duration = Duration::from_secs(60);
const KINDS: usize = 64;

/// Limits the log lines of each kind.
pub struct LogLimit<K> {
    /// Held for a look-up, or for a scan if there are many kinds.
    lines: Mutex<HashMap<K, Line>>,
}

struct Line {
    logged: Instant,
    /// Lines since then.
    omitted: u64,
}

impl<K> Default for LogLimit<K> {
    fn default() -> Self {
        Self { lines: Mutex::default() }
    }
}

impl<K: Eq + Hash> LogLimit<K> {
    /// `Some` if a line of this kind is to be logged now, with the number of omitted lines since the last.
    pub fn ask(&self, kind: K) -> Option<u64> {
        let now = Instant::now();
        let is_old = |line: &Line| now.duration_since(line.logged) >= PAUSE;
        let mut lines = self.lines.lock().expect("no panic under the lock");
        if let Some(line) = lines.get_mut(&kind) {
            if !is_old(line) {
                line.omitted += 1;
                return None;
            }
            line.logged = now;
            return Some(std::mem::take(&mut line.omitted));
        }
        if lines.len() >= KINDS {
            lines.retain(|_, line| !is_old(line));
        }
        if lines.len() >= KINDS {
            return None;
        }
        lines.insert(kind, Line { logged: now, omitted: 0 });
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_first_is_said_and_then_one_a_minute() {
        let limit = LogLimit::default();
        let said: Vec<_> = ["a", "a", "b", "a"].into_iter().map(|kind| limit.ask(kind)).collect();
        assert_eq!(said, [Some(0), None, Some(0), None]);
        tokio::time::advance(PAUSE).await;
        assert_eq!((limit.ask("a"), limit.ask("a"), limit.ask("b")), (Some(2), None, Some(0)));
    }

    #[tokio::test(start_paused = true)]
    async fn there_is_a_limit_of_kinds() {
        let limit = LogLimit::default();
        let said = (0..10 * KINDS).filter(|kind| limit.ask(*kind).is_some()).count();
        assert_eq!(said, KINDS);
        tokio::time::advance(PAUSE).await;
        assert_eq!(limit.ask(10 * KINDS), Some(0));
        assert!(limit.lines.lock().expect("no panic").len() <= KINDS);
    }
}
