//! Compares the embedded store with the naive one: the same random calls on both, all answers compared,
//! the embedded one closed or crashed and reopened in between.
//!
//! `STORE_SEED` repeats a failure, `STORE_ROUNDS` sets the number of rounds, e.g. for a nightly run.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use fastrand::Rng;
use store::{
    Compare, Embedded, Error, Event, KeyRange, KeyValue, Op, OpResult, Options, RangeRequest,
    Result, Revision, Sim, Store, Txn, TxnResponse, WatchItem, WatchRequest,
};
use tempfile::TempDir;

use crate::lab::bytes;

const STEPS: usize = 150;

#[test]
fn the_embedded_store_equals_the_naive_one() {
    let first = number("STORE_SEED", 1);
    for seed in first..first + number("STORE_ROUNDS", 300) {
        println!("STORE_SEED={seed} STORE_ROUNDS=1 repeats this one");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(Pair::new(seed).run());
    }
}

pub fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

struct Pair {
    random: Rng,
    dir: TempDir,
    options: Options,
    store: Arc<dyn Store>,
    oracle: Arc<dyn Store>,
    /// The ids of the same leases in both stores.
    leases: Vec<(i64, i64)>,
    /// The oracle's ids of all leases ever granted, by the store's ids.
    names: BTreeMap<i64, i64>,
    floor: Revision,
}

impl Pair {
    fn new(seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let options = Options {
            sync: false,
            history_revisions: u64::MAX / 2,
            ring_bytes: *random.choice(&[0, 2_000, 1 << 20]).expect("not empty"),
            watch_queue: *random.choice(&[1, 8, 1000]).expect("not empty"),
            ..Options::default()
        };
        let dir = tempfile::tempdir().expect("a directory");
        let store = Embedded::open(dir.path(), options.clone()).expect("it opens");
        let names = BTreeMap::from([(0, 0)]);
        Self {
            random,
            dir,
            options,
            store,
            oracle: Sim::open(),
            leases: vec![],
            names,
            floor: Revision(1),
        }
    }

    async fn run(mut self) {
        for _ in 0..STEPS {
            match self.random.u8(0..100) {
                0..50 => self.txns().await,
                50..70 => self.range().await,
                70..80 => self.watch().await,
                80..88 => self.lease().await,
                88..94 => self.compact().await,
                94..97 => self.reopen(false).await,
                _ => self.reopen(true).await,
            }
        }
        self.reopen(true).await;
        self.range().await;
        self.watch().await;
    }

    fn key(&mut self) -> String {
        format!("/{}/{}", self.random.u8(0..2), self.random.u8(0..6))
    }

    /// Mostly a readable revision; often exactly the floor.
    fn revision(&mut self, current: Revision) -> Revision {
        match self.random.u8(0..4) {
            0 => Revision(self.random.u64(1..current.0 + 2)),
            1 => self.floor,
            _ => Revision(self.random.u64(self.floor.0..current.0 + 2)),
        }
    }

    fn key_range(&mut self) -> KeyRange {
        match self.random.u8(0..4) {
            0 => KeyRange::one(bytes(&self.key())),
            1 => KeyRange::prefix(bytes(&self.key()[..3])),
            2 => KeyRange { start: bytes(&self.key()), end: bytes(&self.key()) },
            _ => KeyRange { start: bytes(&self.key()), end: bytes("\0") },
        }
    }

    /// Several concurrent transactions: they share a commit, in the order in which they are sent.
    async fn txns(&mut self) {
        let revision = self.oracle.revision().await.expect("open").0;
        let txns: Vec<(Txn, Txn)> =
            (0..self.random.usize(1..6)).map(|_| self.txn(revision)).collect();
        let mut sent = tokio::task::JoinSet::new();
        for (i, (txn, _)) in txns.iter().enumerate() {
            let (store, txn) = (self.store.clone(), txn.clone());
            sent.spawn(async move { (i, store.txn(txn).await) });
        }
        let mut answers = sent.join_all().await;
        answers.sort_by_key(|(i, _)| *i);
        for ((i, answer), (_, txn)) in answers.into_iter().zip(txns) {
            let expected = self.oracle.txn(txn.clone()).await;
            assert_eq!(self.show_txn(answer, true), self.show_txn(expected, false), "{i}: {txn:?}");
        }
    }

    /// The same transaction for both stores, each with its lease ids.
    fn txn(&mut self, revision: u64) -> (Txn, Txn) {
        let mut compare = vec![];
        while self.random.u8(0..3) == 0 {
            let key = bytes(&self.key());
            compare.push(match self.random.u8(0..3) {
                0 => Compare::Version(key, self.random.u64(0..4)),
                1 => Compare::ModRevision(key, Revision(0)),
                _ => Compare::ModRevision(key, Revision(self.random.u64(0..=revision))),
            });
        }
        let mut branch =
            || (0..self.random_ops()).map(|_| self.op()).unzip::<_, _, Vec<_>, Vec<_>>();
        let (success, theirs) = branch();
        let (failure, their_failure) = branch();
        let ours = Txn { compare: compare.clone(), success, failure };
        (ours, Txn { compare, success: theirs, failure: their_failure })
    }

    fn random_ops(&mut self) -> usize {
        self.random.usize(0..4)
    }

    fn op(&mut self) -> (Op, Op) {
        if self.random.u8(0..10) < 7 {
            let key = bytes(&self.key());
            let value: bytes::Bytes = self.value().into();
            let lease = match self.random.u8(0..10) {
                0 => (99, 99),
                1..4 => self.random.choice(&self.leases).copied().unwrap_or((0, 0)),
                _ => (0, 0),
            };
            let op = |lease| Op::Put { key: key.clone(), value: value.clone(), lease };
            return (op(lease.0), op(lease.1));
        }
        let range = self.key_range();
        let op = if self.random.bool() { Op::DeleteRange { range } } else { Op::Get { range } };
        (op.clone(), op)
    }

    /// A value that is kept unpacked, or packed; short or long.
    fn value(&mut self) -> Vec<u8> {
        let length = self.random.usize(0..600);
        match self.random.u8(0..6) {
            0 => (0..length).map(|_| self.random.u8(..)).collect(),
            1 => "{\"name\":".repeat(length).into(),
            _ => vec![self.random.u8(..); length],
        }
    }

    async fn range(&mut self) {
        let current = self.oracle.revision().await.expect("open");
        let past = self.revision(current);
        let request = RangeRequest {
            range: self.key_range(),
            limit: self.random.usize(0..5),
            revision: self.random.bool().then_some(past),
            count_only: self.random.u8(0..5) == 0,
        };
        let show = |pair: &Self, answer: Result<store::RangeResponse>, ours| match answer {
            Err(error) => error.to_string(),
            Ok(r) => {
                format!("{} {} {} {:?}", r.count, r.more, r.revision, pair.show_kvs(&r.kvs, ours))
            }
        };
        let answer = show(self, self.store.range(request.clone()).await, true);
        let expected = show(self, self.oracle.range(request.clone()).await, false);
        assert_eq!(answer, expected, "{request:?}");
    }

    /// All events from some start to the current revision.
    async fn watch(&mut self) {
        let current = self.oracle.revision().await.expect("open");
        let start = Some(self.revision(current));
        let request = WatchRequest { range: self.key_range(), start };
        let answer = self.follow(&*self.store, request.clone(), current, true).await;
        let expected = self.follow(&*self.oracle, request.clone(), current, false).await;
        assert_eq!(answer, expected, "{request:?}");
    }

    async fn follow(
        &self,
        store: &dyn Store,
        request: WatchRequest,
        until: Revision,
        ours: bool,
    ) -> Vec<String> {
        let mut watch = store.watch(request).await.expect("it starts");
        let mut seen = vec![];
        loop {
            let item = testkit::wait::soon("an item", watch.items.recv()).await;
            match item {
                Some(WatchItem::Events(revision, events)) => {
                    let events: Vec<_> = events.iter().map(|e| self.show_event(e, ours)).collect();
                    seen.push(format!("{revision} {events:?}"));
                }
                Some(WatchItem::Progress(revision)) if revision >= until => return seen,
                Some(WatchItem::Progress(_)) => {}
                Some(WatchItem::Compacted(floor)) => {
                    seen.push(format!("compacted {floor}"));
                    return seen;
                }
                None => panic!("the watch ended"),
            }
        }
    }

    async fn lease(&mut self) {
        if self.leases.len() < 3 || self.random.bool() {
            let ours = self.store.lease_grant(3600).await.expect("granted");
            let theirs = self.oracle.lease_grant(3600).await.expect("granted");
            self.leases.push((ours, theirs));
            self.names.insert(ours, theirs);
            return;
        }
        let picked = self.random.usize(0..self.leases.len());
        let (ours, theirs) = self.leases.swap_remove(picked);
        self.store.lease_revoke(ours).await.expect("it is there");
        self.oracle.lease_revoke(theirs).await.expect("it is there");
        let again = self.store.lease_revoke(ours).await;
        assert!(matches!(again, Err(Error::LeaseNotFound(_))), "{again:?}");
    }

    async fn compact(&mut self) {
        let current = self.oracle.revision().await.expect("open").0;
        let revision = Revision(self.random.u64(current.saturating_sub(30)..current + 2));
        let answer = self.store.compact(revision).await.map_err(|e| e.to_string());
        let expected = self.oracle.compact(revision).await.map_err(|e| e.to_string());
        assert_eq!(answer, expected, "compact({revision})");
        if answer.is_ok() {
            self.floor = revision;
        }
    }

    /// Closes and reopens; or copies the files as after a kill, and opens the copy.
    async fn reopen(&mut self, crash: bool) {
        let dir = tempfile::tempdir().expect("a directory");
        let name = "store.redb";
        let copy = |to: &Path| std::fs::copy(self.dir.path().join(name), to.join(name));
        if crash {
            copy(dir.path()).expect("copied");
        }
        self.store.close().await;
        if crash {
            self.dir = dir;
        }
        self.store = Embedded::open(self.dir.path(), self.options.clone()).expect("it opens");
    }

    fn show_txn(&self, answer: Result<TxnResponse>, ours: bool) -> String {
        let response = match answer {
            // Only the lease ids in errors differ.
            Err(Error::LeaseNotFound(_)) => return "lease not found".into(),
            Err(error) => return error.to_string(),
            Ok(response) => response,
        };
        let results = response.results.iter().map(|result| match result {
            OpResult::Put { previous } => {
                format!("put {:?}", self.show_kvs(previous.as_slice(), ours))
            }
            OpResult::Deleted { previous } => format!("del {:?}", self.show_kvs(previous, ours)),
            OpResult::Got { kvs } => format!("got {:?}", self.show_kvs(kvs, ours)),
        });
        let results: Vec<_> = results.collect();
        format!("{} {} {results:?}", response.succeeded, response.revision)
    }

    fn show_event(&self, event: &Event, ours: bool) -> String {
        let previous = self.show_kvs(event.previous.as_slice(), ours);
        format!(
            "{:?} {:?} <{previous:?}",
            event.kind,
            self.show_kvs(std::slice::from_ref(&event.kv), ours)
        )
    }

    /// With the oracle's lease ids.
    fn show_kvs(&self, kvs: &[KeyValue], ours: bool) -> Vec<KeyValue> {
        let name = |lease: i64| if ours { self.names[&lease] } else { lease };
        kvs.iter().map(|kv| KeyValue { lease: name(kv.lease), ..kv.clone() }).collect()
    }
}
