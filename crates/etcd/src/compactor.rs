//! Compacts old revisions like upstream's API servers: in every interval, up to the revision that was
//! current one interval ago.
//!
//! Several servers share one etcd: a key counts the rounds (by its version), and only the server that
//! increments it compacts. Upstream's servers use the same key, so both kinds can run side by side.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use store::{Compare, Error, KeyRange, Op, OpResult, Result, Revision, Store, Txn};

const KEY: &[u8] = b"compact_rev_key";

/// Never returns. Upstream: `--etcd-compaction-interval`.
pub async fn run(store: Arc<dyn Store>, interval: Duration) {
    let mut round = Round::default();
    loop {
        tokio::time::sleep(interval).await;
        match round.step(&*store).await {
            Ok(next) => round = next,
            Err(error) => tracing::warn!(%error, "failed to compact etcd; the next round retries"),
        }
    }
}

/// A server's state between two rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Round {
    /// The version of the key.
    number: u64,
    /// The current revision at that time; 0 before the first round.
    present: Revision,
}

impl Round {
    async fn step(self, store: &dyn Store) -> Result<Self> {
        let key = Bytes::from_static(KEY);
        let value = Bytes::from(self.present.to_string());
        let txn = Txn {
            compare: vec![Compare::Version(key.clone(), self.number)],
            success: vec![Op::Put { key: key.clone(), value, lease: 0 }],
            failure: vec![Op::Get { range: KeyRange::one(key) }],
        };
        let answer = store.txn(txn).await?;
        if !answer.succeeded {
            let number = match answer.results.first() {
                Some(OpResult::Got { kvs }) => kvs.first().map_or(0, |kv| kv.version),
                _ => 0,
            };
            return Ok(Self { number, present: answer.revision });
        }
        if self.present != Revision(0) {
            match store.compact(self.present).await {
                Ok(()) | Err(Error::Compacted { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Self { number: self.number + 1, present: answer.revision })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use store::{RangeRequest, Sim};

    async fn put(store: &dyn Store, value: &'static str) -> Revision {
        let key = Bytes::from_static(b"a");
        let op = Op::Put { key, value: Bytes::from_static(value.as_bytes()), lease: 0 };
        store.txn(Txn { success: vec![op], ..Txn::default() }).await.expect("written").revision
    }

    async fn readable(store: &dyn Store, at: Revision) -> bool {
        let range = KeyRange::one(Bytes::from_static(b"a"));
        let request = RangeRequest { revision: Some(at), ..RangeRequest::new(range) };
        store.range(request).await.is_ok()
    }

    #[tokio::test]
    async fn one_of_two_servers_compacts_revisions_of_an_interval_ago() {
        let store = Sim::open();
        let old = put(&*store, "1").await;
        let (mut one, mut two) = (Round::default(), Round::default());
        one = one.step(&*store).await.expect("a round");
        two = two.step(&*store).await.expect("a round");
        assert_eq!((one.number, two.number), (1, 1), "the second sees the first's round");
        assert!(readable(&*store, old).await, "no revision is an interval old");
        let young = put(&*store, "2").await;
        one = one.step(&*store).await.expect("a round");
        assert_eq!(one.number, 2);
        assert!(!readable(&*store, old).await && readable(&*store, young).await);
        two = two.step(&*store).await.expect("a round");
        assert_eq!(two.number, 2, "it was too late and compacts nothing");
        assert!(readable(&*store, young).await);
    }
}
