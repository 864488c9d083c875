//! Keeps an index up to date with the objects of one kind: the current objects first, then every change,
//! in order, from the server's own watch cache.

use std::time::Duration;

use apiserver::cacher::Entry;
use apiserver::registry::Stored;
use apiserver::request::Key;
use apiserver::{Registry, StatusError};
use base::backoff::Backoff;
use base::task::Tasks;

pub(crate) enum Change<T> {
    /// The complete list: drop all others.
    Reset(Vec<T>),
    Put(T),
    Remove(Key),
}

/// Applies the current objects before it returns; a task of `tasks` applies later changes.
pub(crate) async fn mirror<T>(
    registry: &Registry,
    tasks: &Tasks,
    apply: impl Fn(Change<T>) + Send + Sync + 'static,
) where
    T: k8s_openapi::Resource + Send + Sync + 'static,
{
    mirror_if(registry, tasks, |_| true, apply).await;
}

/// Like [`mirror`], but objects without `counts` are treated as removed, and are not decoded.
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
                                // An undecodable object counts as removed, also if it was readable before.
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
                    // Too slow for the history, or the cache restarted: start over.
                    tracing::debug!(kind = T::KIND, %error, "the index has to list the objects again");
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
        tracing::error!(%error, "failed to decode an object; it counts as absent");
    });
    object.ok()?.into_typed()
}
