//! Waiting for a condition, with a deadline.
//!
//! In: a question about the outside world. Out: its answer, or the last "no" with its reason. The
//! question is asked again and again, because processes, sockets and files of other programs send
//! no event; within our own programs an event serves.
//!
//! Limits here say when something hangs, never how fast it ought to be: a machine that does much else
//! takes its time. Each condition has the whole limit, however long others before it took.

use std::future::Future;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// What is not there by then hangs. It costs nothing where tests pass.
pub const LONG: Duration = Duration::from_secs(90);

const PAUSE: Duration = Duration::from_millis(50);

/// What comes of work that must not hang. `what` names it in the panic.
pub async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    let outcome = tokio::time::timeout(LONG, work).await;
    outcome.unwrap_or_else(|_| panic!("{what}: not within {LONG:?}"))
}

/// Asks until something is there, as `until` does, within an executor.
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

/// Asks until the answer is `Ok`, at most `limit`. `what` names the condition in the error.
pub fn until<T>(limit: Duration, what: &str, ask: impl FnMut() -> Result<T>) -> Result<T> {
    until_every(PAUSE, limit, what, ask)
}

/// The same, with a shorter or longer pause between two questions.
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
