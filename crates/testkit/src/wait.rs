//! Waiting for a condition, with a deadline.
//!
//! In: a check of the outside world. Out: its result, or the last failure with its reason. The check is
//! repeated, because processes, sockets and files of other programs send no events; within our own
//! programs use an event.
//!
//! Limits here only detect a hang: a machine under load takes its time. Each condition has the whole
//! limit, however long earlier ones took.

use std::future::Future;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// A condition that takes longer counts as a hang. Passing tests do not wait this long.
pub const LONG: Duration = Duration::from_secs(90);

const PAUSE: Duration = Duration::from_millis(50);

/// The result of work that must not hang. `what` names it in the panic.
pub async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    let outcome = tokio::time::timeout(LONG, work).await;
    outcome.unwrap_or_else(|_| panic!("{what}: not within {LONG:?}"))
}

/// Repeats a check until it returns a value, as `until` does, within an executor.
pub async fn found<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    soon(what, async {
        loop {
            if let Some(found) = ask().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
}

/// Repeats a check until it returns `Ok`, at most for `limit`. `what` names the condition in the error.
pub fn until<T>(limit: Duration, what: &str, ask: impl FnMut() -> Result<T>) -> Result<T> {
    until_every(PAUSE, limit, what, ask)
}

/// The same, with a given pause between two checks.
pub fn until_every<T>(
    pause_span: Duration,
    limit: Duration,
    what: &str,
    mut ask: impl FnMut() -> Result<T>,
) -> Result<T> {
    let started = now();
    loop {
        let answer = ask();
        match answer {
            Ok(value) => return Ok(value),
            Err(error) if started.elapsed() >= limit => {
                bail!("{what}: not within {limit:?}: {error:#}")
            }
            Err(_) => pause(pause_span),
        }
    }
}

/// Asserts that something stays true for a while.
pub fn throughout(span: Duration, what: &str, mut ask: impl FnMut() -> Result<()>) -> Result<()> {
    let started = now();
    while started.elapsed() < span {
        if let Err(error) = ask() {
            bail!("{what}: no longer after {:?}: {error:#}", started.elapsed());
        }
        pause(PAUSE);
    }
    Ok(())
}

pub fn now() -> Instant {
    #[expect(clippy::disallowed_methods, reason = "watches other processes, whose time is real")]
    Instant::now()
}

fn pause(span: Duration) {
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place that waits between two questions"
    )]
    std::thread::sleep(span);
}
