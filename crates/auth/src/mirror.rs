//! Keeps an index in step with the objects of one kind: the present state first, then every change,
//! in order, from the server's own watch cache.

use std::time::Duration;

use apiserver::cacher::Entry;
use apiserver::registry::Stored;
use apiserver::request::Key;
use apiserver::{Registry, StatusError};
use base::backoff::Backoff;
use base::task::Tasks;

pub(crate) enum Change<T> {
    /// This is all there is: forget the rest.
    Reset(Vec<T>),
    Put(T),
    Remove(Key),
}

/// Applies the present state before it returns; a task of `tasks` applies what follows.
pub(crate) async fn mirror<T>(
    registry: &Registry,
    tasks: &Tasks,
    apply: impl Fn(Change<T>) + Send + Sync + 'static,
) where
    T: k8s_openapi::Resource + Send + Sync + 'static,
{
    mirror_if(registry, tasks, |_| true, apply).await;
}

/// As [`mirror`], but an object that comes to be such that it does not count is gone, undecoded.
pub(crate) async fn mirror_if<T>(
    registry: &Registry,
    tasks: &Tasks,
    counts: fn(&Entry) -> bool,
    apply: impl Fn(Change<T>) + Send + Sync + 'static,
) where
    T: k8s_openapi::Resource + Send + Sync + 'static,
{
    let (present, mut cursor) = registry.follow::<T>().await;
    apply(Change::Reset(decode_all(&present)));
    drop(present);
    let registry = registry.clone();
    tasks.spawn("authorization index", async move {
        let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(5));
        loop {
            match cursor.next().await {
                Ok(events) => {
                    backoff.reset();
                    for event in events {
                        match (&event.entry, &event.previous) {
                            (Some(entry), _) if !counts(entry) => {
                                apply(Change::Remove(entry.key.clone()));
                            }
                            (Some(entry), _) => {
                                let stored = registry.stored_of::<T>(&event);
                                // What cannot be read counts as absent, whatever it was before.
                                apply(match stored.as_ref().and_then(decode) {
                                    Some(object) => Change::Put(object),
                                    None => Change::Remove(entry.key.clone()),
                                });
                            }
                            (None, Some(gone)) => apply(Change::Remove(gone.key.clone())),
                            (None, None) => {}
                        }
                    }
                }
                Err(error) => {
                    // Too slow for history, or the cache restarted: begin anew.
                    tracing::debug!(kind = T::KIND, %error, "index lost its place");
                    tokio::time::sleep(backoff.step()).await;
                    let (present, fresh) = registry.follow::<T>().await;
                    apply(Change::Reset(decode_all(&present)));
                    cursor = fresh;
                }
            }
        }
    });
}

fn decode_all<T: 'static>(stored: &[Stored]) -> Vec<T> {
    stored.iter().filter_map(decode).collect()
}

fn decode<T: 'static>(stored: &Stored) -> Option<T> {
    let object = stored.object().inspect_err(|error: &StatusError| {
        tracing::error!(%error, "an object cannot be read, it counts as absent");
    });
    object.ok()?.into_typed()
}
