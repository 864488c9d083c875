//! Somebody else changed what this component made in the kernel: `nft flush ruleset`, the restart of
//! a firewall, `ip link del`.
//!
//! In: the kernel's word, by [`net::monitor`]. Out: a wait that ends when things have to be made anew.
//! Invariant: two that undo each other's work do so at a falling rate: after a repair the next waits
//! for a second, then two, up to a minute.

use std::time::Duration;

use base::backoff::Backoff;
use net::monitor::{Change, Monitor};
use tokio::time::Instant;

const REST: Duration = Duration::from_secs(1);
const REST_CEILING: Duration = Duration::from_secs(60);
/// After so long without a change the next one is repaired at once again.
const CALM: Duration = Duration::from_secs(60);
/// One change to the kernel is many messages: the rest of them is waited for so long.
const SETTLE: Duration = Duration::from_millis(10);

pub struct Watch {
    monitor: Monitor,
    rest: Backoff,
    rests_until: Instant,
}

impl Watch {
    pub fn new(monitor: Monitor) -> Self {
        let rest = Backoff::new(REST, REST_CEILING);
        Self { monitor, rest, rests_until: Instant::now() }
    }

    /// Resolves when what the caller made was changed. May be dropped and called again.
    pub async fn changed(&mut self, is_own: impl Fn(Change<'_>) -> bool) -> Result<(), net::Error> {
        self.monitor.told(is_own).await?;
        let now = Instant::now();
        tokio::time::sleep_until(self.rests_until.max(now + SETTLE)).await;
        self.monitor.forget()?;
        if now.duration_since(self.rests_until) > CALM {
            self.rest.reset();
        }
        self.rests_until = Instant::now() + self.rest.step();
        Ok(())
    }
}
