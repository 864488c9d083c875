//! Locks by name: one caller at a time works on a volume that pods share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Guards the table of locks; held for look-ups, never across await.
#[derive(Default)]
pub struct Turns(Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>);

impl Turns {
    /// Waits for the lock of that name.
    pub async fn take(&self, name: &str) -> tokio::sync::OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock().expect("no panic while held");
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            locks.entry(name.to_string()).or_default().clone()
        };
        lock.lock_owned().await
    }
}
