//! Supervised tasks: the code that starts a task also ends it.
//!
//! A [`Tasks`] is a group with one stop signal. `spawn` adds a named task that ends by itself when
//! it sees [`Stop`]; `shutdown` raises the signal and waits. A panic is logged with the task's
//! name and raises the group's signal: a component that lost a part must not limp on.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle};

/// The listening side of a stop signal. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Stop(watch::Receiver<bool>);

impl Stop {
    /// Resolves when the group stops, or is dropped.
    pub async fn wait(&self) {
        let mut receiver = self.0.clone();
        // An error means that the sender is gone: that is a stop too.
        let _ = receiver.wait_for(|stopped| *stopped).await;
    }

    pub fn is_raised(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }

    /// Runs `work` until it ends (`Some`) or the stop signal comes (`None`).
    pub async fn or<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.wait() => None,
            out = work => Some(out),
        }
    }
}

/// An aborted task ends at its next await. This is the time that it gets for that.
const ABORT: Duration = Duration::from_secs(1);

struct Group {
    name: String,
    signal: watch::Sender<bool>,
    /// Guards the list of handles; held for pushes and the final take only, never across await.
    handles: std::sync::Mutex<Vec<JoinHandle<()>>>,
}

/// A group of tasks with one stop signal. Cheap to clone; all clones are the same group.
#[derive(Clone)]
pub struct Tasks(Arc<Group>);

impl Tasks {
    pub fn new(name: impl Into<String>) -> Self {
        let (signal, _) = watch::channel(false);
        Self(Arc::new(Group { name: name.into(), signal, handles: Default::default() }))
    }

    /// While this is kept the tasks live; they are aborted when it is dropped. For work that may be
    /// dropped before it has stopped its tasks.
    pub fn bound(&self) -> Bound {
        Bound(self.clone())
    }

    pub fn stop_signal(&self) -> Stop {
        Stop(self.0.signal.subscribe())
    }

    /// Runs `work` as a task of this group. It is dropped at its next await when the group stops;
    /// work that must finish something selects on [`Tasks::stop_signal`] itself and uses
    /// [`Tasks::spawn_graceful`].
    pub fn spawn(
        &self,
        name: &'static str,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> AbortHandle {
        self.start(name, Box::pin(work), Some(self.stop_signal()), Arc::downgrade(&self.0))
    }

    /// As [`Tasks::spawn`], for what one client asked for, as a stream of bytes from outside: a panic
    /// ends this work, not the group.
    pub fn spawn_contained(
        &self,
        name: &'static str,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> AbortHandle {
        self.start(name, Box::pin(work), Some(self.stop_signal()), Weak::new())
    }

    /// Runs `work` as a task of this group that watches the stop signal by itself.
    pub fn spawn_graceful(
        &self,
        name: &'static str,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> AbortHandle {
        self.start(name, Box::pin(work), None, Arc::downgrade(&self.0))
    }

    /// `work` is boxed, so that the code that runs a task is compiled once, and its wrappers do not copy
    /// the work's state.
    fn start(
        &self,
        name: &'static str,
        work: Work,
        stop: Option<Stop>,
        stops: Weak<Group>,
    ) -> AbortHandle {
        let watched = Watched { name, stops, done: false };
        #[expect(clippy::disallowed_methods, reason = "the one place that spawns")]
        let handle = tokio::spawn(async move {
            // Moved into the task: a captured value would be dropped only after the unwinding.
            let mut watched = watched;
            match stop {
                Some(stop) => drop(stop.or(work).await),
                None => work.await,
            }
            watched.done = true;
        });
        let abort = handle.abort_handle();
        let mut handles = self.0.handles.lock().expect("no panic while the list is held");
        // Connections come and go: forget the finished ones, so that the list stays short.
        if handles.len() >= 64 && handles.len().is_power_of_two() {
            handles.retain(|handle| !handle.is_finished());
        }
        handles.push(handle);
        abort
    }

    /// Raises the stop signal; returns at once.
    pub fn stop(&self) {
        self.0.signal.send_replace(true);
    }

    /// Raises the stop signal and waits for every task, at most `limit`; the rest is aborted.
    pub async fn shutdown(&self, limit: Duration) {
        self.stop();
        let deadline = tokio::time::Instant::now() + limit;
        let mut aborted = vec![];
        loop {
            let handles = self.take();
            if handles.is_empty() {
                break;
            }
            for mut handle in handles {
                if tokio::time::timeout_at(deadline, &mut handle).await.is_err() {
                    tracing::warn!(group = self.0.name, "a task did not stop in time, aborted");
                    handle.abort();
                    aborted.push(handle);
                }
            }
        }
        let deadline = tokio::time::Instant::now() + ABORT;
        for handle in aborted {
            // Its panic was logged; one that does not wait cannot be stopped.
            let _ = tokio::time::timeout_at(deadline, handle).await;
        }
    }

    fn take(&self) -> Vec<JoinHandle<()>> {
        std::mem::take(&mut *self.0.handles.lock().expect("no panic while the list is held"))
    }
}

/// See [`Tasks::bound`].
pub struct Bound(Tasks);

impl Drop for Bound {
    fn drop(&mut self) {
        self.0.stop();
        self.0.take().iter().for_each(JoinHandle::abort);
    }
}

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Notices a task that ended by panic: its `done` was never set and the thread is unwinding.
struct Watched {
    name: &'static str,
    /// The group that stops then.
    stops: Weak<Group>,
    done: bool,
}

impl Drop for Watched {
    fn drop(&mut self) {
        if !self.done && std::thread::panicking() {
            match self.stops.upgrade() {
                Some(group) => {
                    tracing::error!(task = self.name, "task panicked, stopping its group");
                    group.signal.send_replace(true);
                }
                None => tracing::error!(task = self.name, "task panicked"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn shutdown_waits_for_graceful_work_and_drops_the_rest() {
        let tasks = Tasks::new("test");
        let (sent, mut got) = tokio::sync::mpsc::channel(1);
        let stop = tasks.stop_signal();
        tasks.spawn("endless", std::future::pending());
        tasks.spawn_graceful("tidy", async move {
            stop.wait().await;
            sent.send("tidied").await.expect("the test listens");
        });
        tasks.shutdown(Duration::from_secs(5)).await;
        assert_eq!(got.recv().await, Some("tidied"));
    }

    /// As the work of a leader that does not end in time.
    #[tokio::test(start_paused = true)]
    async fn dropped_work_takes_its_tasks_with_it() {
        let (sent, got) = tokio::sync::oneshot::channel::<()>();
        let work = async move {
            let tasks = Tasks::new("test");
            let _bound = tasks.bound();
            let own = tasks.clone();
            tasks.spawn_graceful("heedless", async move {
                let _lives_with = (sent, own);
                std::future::pending().await
            });
            std::future::pending::<()>().await;
        };
        let ended = tokio::time::timeout(Duration::from_secs(1), work).await;
        assert!(ended.is_err());
        got.await.expect_err("the task ended");
    }

    #[tokio::test]
    async fn a_panic_stops_the_group_unless_it_is_contained() {
        let tasks = Tasks::new("test");
        let (sent, got) = tokio::sync::oneshot::channel::<()>();
        tasks.spawn_contained("a client's", async move {
            let _dropped_last = sent;
            panic!("on purpose");
        });
        got.await.expect_err("the task ended");
        assert!(!tasks.stop_signal().is_raised());
        tasks.spawn("broken", async { panic!("on purpose") });
        tokio::time::timeout(Duration::from_secs(90), tasks.stop_signal().wait())
            .await
            .expect("the group stops");
    }
}
