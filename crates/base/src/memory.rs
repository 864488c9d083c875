//! Answers that count for a while, kept by a hash of what was asked.
//!
//! In: answers of others that cost something (webhooks, chains of authorizers). Out: the same answer
//! to the same question, as long as its time lasts. Used by authentication, authorization, impersonation
//! and the kubelet's server. Upstream: `k8s.io/apimachinery/pkg/util/cache.Expiring` and `LRUExpireCache`.
//!
//! Invariants: bounded, the one unused for longest forgotten first; keys are hashes, so that no
//! secret stays in memory, and that clients' names do not decide how much memory is used.

use std::sync::Mutex;
use std::time::Duration;

use lru::LruCache;
use sha2::{Digest, Sha256};
use tokio::time::Instant;

/// See the module. Grows with its entries, up to its size.
pub struct Memory<T> {
    size: usize,
    /// Guards a few instructions at a time; never held across an await.
    answers: Mutex<LruCache<[u8; 32], (Instant, T)>>,
}

impl<T: Clone> Memory<T> {
    pub fn new(size: usize) -> Self {
        Self { size: size.max(1), answers: Mutex::new(LruCache::unbounded()) }
    }

    pub fn get(&self, key: &[u8; 32]) -> Option<T> {
        let mut answers = self.answers.lock().expect("no panic under the lock");
        let (until, answer) = answers.get(key)?;
        if *until > Instant::now() {
            return Some(answer.clone());
        }
        answers.pop(key);
        None
    }

    /// The number of kept answers, expired ones included.
    pub fn len(&self) -> usize {
        self.answers.lock().expect("as above").len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn put(&self, key: [u8; 32], answer: T, lasts: Duration) {
        if lasts.is_zero() {
            return;
        }
        let mut answers = self.answers.lock().expect("as above");
        answers.put(key, (Instant::now() + lasts, answer));
        if answers.len() > self.size {
            answers.pop_lru();
        }
    }
}

/// The key of a question. The parts stay distinct: `ab` and an empty part differ from `a` and `b`.
pub fn key_of<'a>(parts: impl IntoIterator<Item = &'a str>) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn answers_are_forgotten_in_time_and_in_number() {
        let memory = Memory::new(2);
        let key = |text: &str| key_of([text]);
        memory.put(key("a"), 1, Duration::from_secs(10));
        memory.put(key("b"), 2, Duration::from_secs(20));
        assert_eq!((memory.get(&key("a")), memory.get(&key("b"))), (Some(1), Some(2)));
        tokio::time::advance(Duration::from_secs(11)).await;
        assert_eq!((memory.get(&key("a")), memory.get(&key("b"))), (None, Some(2)));
        memory.put(key("c"), 3, Duration::from_secs(10));
        memory.put(key("d"), 4, Duration::from_secs(10));
        assert_eq!((memory.get(&key("b")), memory.get(&key("d"))), (None, Some(4)));
        memory.put(key("e"), 5, Duration::ZERO);
        assert_eq!(memory.get(&key("e")), None);
        assert_ne!(key_of(["ab", ""]), key_of(["a", "b"]));
    }
}
