//! What one client may take: answers a second, and a share of what is bounded.
//!
//! In: clients' addresses. Out: yes or no. Deviation: CoreDNS has no such limits without its plugin `acl` or a
//! foreign one; here one server answers for all pods of a node, so one pod must not take it from the others.
//! Invariants: both tables are bounded; a client that was forgotten starts with a full budget. One look-up per
//! packet, whatever the number of clients.

use std::collections::HashMap;
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lru::LruCache;
use tokio::time::Instant;

const CLIENTS: NonZeroUsize = NonZeroUsize::new(4096).expect("positive");

/// Token buckets by address: `rate` a second, and at most as many at once.
pub struct Rate {
    rate: u32,
    /// Guards the buckets; held for one look-up.
    buckets: Mutex<LruCache<IpAddr, Bucket>>,
}

struct Bucket {
    left: f64,
    at: Instant,
}

impl Rate {
    pub fn new(rate: u32) -> Self {
        Self { rate, buckets: Mutex::new(LruCache::new(CLIENTS)) }
    }

    pub fn allows(&self, client: IpAddr) -> bool {
        let now = Instant::now();
        let full = f64::from(self.rate);
        let mut buckets = self.buckets.lock().expect("no panic while held");
        let bucket = buckets.get_or_insert_mut(client, || Bucket { left: full, at: now });
        let passed = now.saturating_duration_since(bucket.at);
        if passed > Duration::ZERO {
            bucket.left = (bucket.left + passed.as_secs_f64() * full).min(full);
            bucket.at = now;
        }
        let allowed = bucket.left >= 1.0;
        if allowed {
            bucket.left -= 1.0;
        }
        allowed
    }
}

/// The number of connections, or of waiting queries, by address.
pub struct Peers {
    most: usize,
    /// Guards the counts; held for one change.
    counts: Mutex<HashMap<IpAddr, usize>>,
}

/// Counts one connection or query of an address until dropped.
pub struct Share {
    peers: Arc<Peers>,
    address: IpAddr,
}

impl Peers {
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, counts: Mutex::default() })
    }

    /// `None`: the address has reached its limit.
    pub fn share(self: &Arc<Self>, address: IpAddr) -> Option<Share> {
        let mut counts = self.counts.lock().expect("no panic while held");
        let count = counts.entry(address).or_default();
        if *count >= self.most {
            return None;
        }
        *count += 1;
        Some(Share { peers: self.clone(), address })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut counts = self.peers.counts.lock().expect("no panic while held");
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clients() -> [IpAddr; 2] {
        ["10.42.0.7", "10.42.0.8"].map(|ip| ip.parse().expect("an address"))
    }

    #[test]
    fn one_address_cannot_hold_all() {
        let peers = Peers::new(64);
        let [one, other] = clients();
        let mut held: Vec<Share> = (0..64).filter_map(|_| peers.share(one)).collect();
        assert_eq!(held.len(), 64);
        assert!(peers.share(one).is_none());
        assert!(peers.share(other).is_some());
        held.pop();
        assert!(peers.share(one).is_some());
        held.clear();
        assert!(peers.counts.lock().expect("no panic").is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_one_client_does_not_slow_others() {
        let rate = Rate::new(100);
        let [one, other] = clients();
        let allowed = |client| (0..1000).filter(|_| rate.allows(client)).count();
        assert_eq!((allowed(one), allowed(other)), (100, 100));
        tokio::time::advance(Duration::from_millis(500)).await;
        assert_eq!(allowed(one), 50);
        for index in 0..10_000_u32 {
            rate.allows(std::net::Ipv4Addr::from(index).into());
        }
        assert_eq!(rate.buckets.lock().expect("no panic").len(), CLIENTS.get());
    }
}
