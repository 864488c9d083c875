//! Restarts components of the server's process that fail.
//!
//! In: a component, as a function that runs it once. Out: nothing, until the group stops.
//! Invariants: a component runs once at a time: all tasks of a run have ended before the next run begins.
//! A failure is logged with the component's name, and each pause is longer than the last.
//! Upstream: each component is a process with its own supervisor.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use base::backoff::Backoff;
use base::task::{Stop, Tasks};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

const AGAIN_FIRST: Duration = Duration::from_secs(1);
const AGAIN_CEILING: Duration = Duration::from_secs(60);
/// A run of this length resets the pause.
const WELL: Duration = Duration::from_secs(300);
/// Time for a run to end.
const ENDING: Duration = Duration::from_secs(4);

/// Runs a component until the group stops.
pub fn keep<F, E>(
    tasks: &Tasks,
    name: &'static str,
    run: impl Fn(Stop) -> F + Send + Sync + 'static,
) where
    F: Future<Output = Result<(), E>> + Send + 'static,
    E: Display,
{
    let (stop, run) = (tasks.stop_signal(), Arc::new(run));
    tasks.spawn_graceful(name, async move {
        let mut pause = Backoff::new(AGAIN_FIRST, AGAIN_CEILING).with_jitter(0.5);
        loop {
            let begun = Instant::now();
            let Some(why) = live(name, run.clone(), &stop).await else { return };
            if begun.elapsed() > WELL {
                pause.reset();
            }
            let pause = pause.step();
            tracing::error!(component = name, why, ?pause, "a component failed, restarting it");
            if stop.or(tokio::time::sleep(pause)).await.is_none() {
                return;
            }
        }
    });
}

/// One run of a component that depends on a value: when the value changes, the component is stopped and runs
/// again.
pub async fn with_value<T, F, E>(
    name: &'static str,
    mut value: watch::Receiver<T>,
    stop: Stop,
    run: impl Fn(T, Stop) -> F,
) -> Result<(), E>
where
    T: Clone + PartialEq,
    F: Future<Output = Result<(), E>>,
{
    loop {
        let now = value.borrow_and_update().clone();
        let group = Tasks::new(name);
        let mut running = std::pin::pin!(run(now.clone(), group.stop_signal()));
        let changed = async {
            // Without a sender the value stays.
            if value.wait_for(|new| *new != now).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            done = &mut running => return done,
            () = stop.wait() => {}
            () = changed => {}
        }
        group.stop();
        running.await?;
        if stop.is_raised() {
            return Ok(());
        }
    }
}

/// One run; returns why it failed, or `None` if it was stopped.
async fn live<F, E>(
    name: &'static str,
    run: Arc<impl Fn(Stop) -> F + Send + Sync + 'static>,
    stop: &Stop,
) -> Option<String>
where
    F: Future<Output = Result<(), E>> + Send + 'static,
    E: Display,
{
    let life = Tasks::new(name);
    let _bound = life.bound();
    let (tell, ended) = oneshot::channel();
    let told = life.stop_signal();
    // In its own task: a panic ends only this run.
    life.spawn_graceful(name, async move {
        let why = run(told).await.err().map(|error| error.to_string());
        // An error means that the receiver is gone.
        let _ = tell.send(why);
    });
    let why = match stop.or(ended).await {
        None => None,
        Some(Ok(Some(error))) => Some(error),
        Some(Ok(None)) => Some("it ended by itself".to_owned()),
        Some(Err(_)) => Some("it panicked".to_owned()),
    };
    life.shutdown(ENDING).await;
    why
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Fails twice, with an error and with a panic, then runs.
    #[tokio::test(start_paused = true)]
    async fn a_failed_component_is_restarted_until_the_group_stops() {
        let (tasks, lives) = (Tasks::new("test"), Arc::new(Mutex::new(vec![])));
        let seen = lives.clone();
        keep(&tasks, "part", move |stop| {
            let seen = seen.clone();
            async move {
                let number = {
                    let mut seen = seen.lock().expect("no panic");
                    seen.push(Instant::now());
                    seen.len()
                };
                match number {
                    1 => return Err("its port is taken"),
                    2 => panic!("on purpose"),
                    _ => stop.wait().await,
                }
                Ok(())
            }
        });
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(!tasks.stop_signal().is_raised(), "the rest goes on");
        tasks.shutdown(Duration::from_secs(5)).await;
        let lives = lives.lock().expect("no panic");
        let pauses: Vec<u64> = lives.windows(2).map(|two| (two[1] - two[0]).as_secs()).collect();
        assert!(matches!(pauses[..], [1, 2..=3]), "{pauses:?}");
    }
}
