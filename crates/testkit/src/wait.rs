//! Waiting for a condition, with a deadline.
//!
//! In: a question about the outside world. Out: its answer, or the last "no" with its reason. The
//! question is asked again and again, because processes, sockets and files of other programs send
//! no event; within our own programs an event serves.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

const PAUSE: Duration = Duration::from_millis(50);

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
