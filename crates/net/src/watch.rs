//! Notices when another program changes a component's objects in the kernel: `nft flush
//! ruleset`, the restart of a firewall, `ip link del`.
//!
//! In: the kernel's messages, by [`crate::monitor`]. Out: a wait that ends when the objects must be restored.
//! Invariant: two programs that undo each other's changes do so at a falling rate: after a repair
//! the next waits for a second, then two, up to a minute.

use std::time::Duration;

use base::backoff::Backoff;
use tokio::time::Instant;

use crate::error::Error;
use crate::monitor::{Change, Monitor};

const REST: Duration = Duration::from_secs(1);
const REST_CEILING: Duration = Duration::from_secs(60);
/// After this long without a change, the next one is repaired at once again.
const CALM: Duration = Duration::from_secs(60);
/// How long to wait for the other messages of the same change.
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

    /// Resolves when the caller's objects were changed. Dropping the future loses nothing.
    pub async fn changed(&mut self, is_own: impl Fn(Change<'_>) -> bool) -> Result<(), Error> {
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
