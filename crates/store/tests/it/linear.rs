//! A linearizability checker: is there one order of the clients' calls, in which each call takes effect
//! between its start and end, that explains all results? It uses the search of Wing and Gong with
//! memorized dead ends (as in Porcupine), key by key, because orders per key suffice.
//!
//! In: a store, a seed, and a source of failures. Out: a panic with the history that no order explains. A
//! call of unknown outcome (the store was unavailable) may have taken effect at any time after its
//! start, or never.

#![allow(dead_code, reason = "included by the tests of several crates")]

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use fastrand::Rng;
use store::{Compare, Error, Field, KeyRange, Op, OpResult, RangeRequest, Relation, Store, Txn};

/// The value of a key: a number that is written once.
type State = Option<u64>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Read,
    Write(u64),
    Delete,
    /// Writes the second number if the key has the first.
    Swap(u64, u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Saw {
    Value(State),
    Done,
    Swapped(bool),
    /// It is unknown whether it took effect.
    Unknown,
}

#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub act: Act,
    pub saw: Saw,
    pub begin: u64,
    /// `u64::MAX` if its outcome is unknown.
    pub end: u64,
}

/// The state after the call, if its result is possible.
fn step(call: &Call, state: State) -> Option<State> {
    match (call.act, call.saw) {
        (Act::Read, Saw::Value(value)) => (value == state).then_some(state),
        (Act::Read, _) => Some(state),
        (Act::Write(value), _) => Some(Some(value)),
        (Act::Delete, _) => Some(None),
        (Act::Swap(old, new), saw) => {
            let fits = state == Some(old);
            let possible = match saw {
                Saw::Swapped(swapped) => swapped == fits,
                _ => true,
            };
            possible.then_some(if fits { Some(new) } else { state })
        }
    }
}

/// Whether these calls on one key, which does not exist at first, have an order.
pub fn is_linearizable(calls: &[Call]) -> bool {
    let mut search = Search { calls, dead: HashSet::new() };
    search.go(vec![0; calls.len().div_ceil(64)], None)
}

struct Search<'a> {
    calls: &'a [Call],
    /// Dead ends: the calls done, and the state they left.
    dead: HashSet<(Vec<u64>, State)>,
}

impl Search<'_> {
    fn go(&mut self, done: Vec<u64>, state: State) -> bool {
        let is_done = |at: usize| (done[at / 64] >> (at % 64)) & 1 == 1;
        let open = || (0..self.calls.len()).filter(|at| !is_done(*at));
        // A call that has ended comes before calls that start later.
        let limit = open().map(|at| self.calls[at].end).min();
        let Some(limit) = limit.filter(|limit| *limit != u64::MAX) else { return true };
        if !self.dead.insert((done.clone(), state)) {
            return false;
        }
        let next: Vec<usize> = open().filter(|at| self.calls[*at].begin <= limit).collect();
        next.into_iter().any(|at| {
            step(&self.calls[at], state).is_some_and(|after| {
                let mut done = done.clone();
                done[at / 64] |= 1 << (at % 64);
                self.go(done, after)
            })
        })
    }
}

/// The number of concurrent clients, keys and calls.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub clients: usize,
    pub keys: usize,
    pub calls: usize,
}

/// Runs clients until each has made its calls, and checks their results. Returns the number of calls, and
/// of those with unknown outcome.
pub async fn check(store: &Arc<dyn Store>, load: Load, seed: u64) -> (usize, usize) {
    println!("LINEAR_SEED={seed}");
    let clock = Arc::new(AtomicU64::new(1));
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..load.clients {
        let (store, clock) = (store.clone(), clock.clone());
        let random = Rng::with_seed(seed.wrapping_mul(1000) + client as u64);
        clients.spawn(run(store, clock, random, load, (seed, client as u64)));
    }
    let mut histories: BTreeMap<usize, Vec<Call>> = BTreeMap::new();
    for (key, call) in clients.join_all().await.into_iter().flatten() {
        histories.entry(key).or_default().push(call);
    }
    let all = histories.values().flatten();
    let unknown = all.clone().filter(|call| call.end == u64::MAX).count();
    let count = all.count();
    for (key, mut history) in histories {
        history.sort_by_key(|call| call.begin);
        assert!(is_linearizable(&history), "nothing explains key {key}: {history:#?}");
    }
    (count, unknown)
}

async fn run(
    store: Arc<dyn Store>,
    clock: Arc<AtomicU64>,
    mut random: Rng,
    load: Load,
    (seed, client): (u64, u64),
) -> Vec<(usize, Call)> {
    let mut seen = vec![];
    let mut last: BTreeMap<usize, u64> = BTreeMap::new();
    for number in 0..load.calls {
        let key = random.usize(0..load.keys);
        let value = (client << 32) | (number as u64 + 1);
        let known = last.get(&key).copied().unwrap_or_default();
        let act = match random.u8(0..10) {
            0..4 => Act::Read,
            4..7 => Act::Swap(known, value),
            7..9 => Act::Write(value),
            _ => Act::Delete,
        };
        let begin = clock.fetch_add(1, Ordering::SeqCst);
        // Each seed has its own keys, which do not exist at first.
        let saw = call(&*store, &format!("/linear/{seed}/{key}"), act).await;
        let end = match saw {
            Saw::Unknown => u64::MAX,
            _ => clock.fetch_add(1, Ordering::SeqCst),
        };
        match (act, saw) {
            (_, Saw::Value(Some(value))) => drop(last.insert(key, value)),
            (Act::Swap(_, new), Saw::Swapped(true)) => drop(last.insert(key, new)),
            (Act::Write(new), Saw::Done) => drop(last.insert(key, new)),
            _ => {}
        }
        seen.push((key, Call { act, saw, begin, end }));
        if saw == Saw::Unknown {
            works_again(&*store).await;
        }
    }
    seen
}

/// Calls of unknown outcome explain too much, so wait instead of making more of them.
async fn works_again(store: &dyn Store) {
    let probe = || Op::Put { key: "/probe".into(), value: Bytes::new(), lease: 0 };
    let works = async {
        while store.txn(Txn { success: vec![probe()], ..Txn::default() }).await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    testkit::wait::soon("it works again", works).await;
}

async fn call(store: &dyn Store, key: &str, act: Act) -> Saw {
    let key = Bytes::copy_from_slice(key.as_bytes());
    let one = KeyRange::one(key.clone());
    let text = |value: u64| Bytes::from(value.to_string());
    let put = |value: u64| Op::Put { key: key.clone(), value: text(value), lease: 0 };
    let (compare, op) = match act {
        Act::Read => {
            let answer = store.range(RangeRequest::new(one)).await;
            return answer.map_or(Saw::Unknown, |answer| {
                let value = answer.kvs.first().map(|kv| kv.value.bytes());
                let value = value.as_deref().map(String::from_utf8_lossy);
                Saw::Value(value.map(|text| text.parse().expect("a number")))
            });
        }
        Act::Write(value) => (vec![], put(value)),
        Act::Delete => (vec![], Op::DeleteRange { range: one }),
        Act::Swap(old, new) => {
            let field = Field::Value(text(old));
            (vec![Compare::Every { range: one, relation: Relation::Equal, field }], put(new))
        }
    };
    match store.txn(Txn { compare, success: vec![op], failure: vec![] }).await {
        Ok(answer) if matches!(act, Act::Swap(..)) => Saw::Swapped(answer.succeeded),
        Ok(answer) => {
            assert!(!matches!(answer.results[..], [OpResult::Got { .. }]));
            Saw::Done
        }
        Err(Error::Unavailable(_) | Error::NoSpace(_) | Error::Closed) => Saw::Unknown,
        Err(error) => panic!("{error}"),
    }
}

/// Tests the checker: valid and invalid histories.
#[test]
fn the_search_accepts_only_valid_histories() {
    let call = |begin, end, act, saw| Call { act, saw, begin, end };
    let read = |begin, end, value| call(begin, end, Act::Read, Saw::Value(value));
    let write = |begin, end, value| call(begin, end, Act::Write(value), Saw::Done);
    let lost = |begin, value| call(begin, u64::MAX, Act::Write(value), Saw::Unknown);
    let swap = |begin, end, old, new, did| call(begin, end, Act::Swap(old, new), Saw::Swapped(did));
    let check = |expected: bool, calls: &[Call]| {
        assert_eq!(is_linearizable(calls), expected, "{calls:?}");
    };
    check(true, &[]);
    check(true, &[write(1, 2, 7), read(3, 4, Some(7))]);
    check(false, &[write(1, 2, 7), read(3, 4, None)]);
    // During a write, both values may be seen, but not the new one and then the old one.
    check(true, &[write(1, 9, 7), read(2, 3, None), read(4, 5, Some(7))]);
    check(false, &[write(1, 9, 7), read(2, 3, Some(7)), read(4, 5, None)]);
    // Of unknown outcome: late, or never.
    check(true, &[lost(1, 7), read(2, 3, None), read(4, 5, Some(7))]);
    check(true, &[lost(1, 7), read(2, 3, None)]);
    check(false, &[lost(1, 7), read(2, 3, Some(7)), read(4, 5, None)]);
    // Of two swaps of one value, one wins.
    check(true, &[write(1, 2, 1), swap(3, 6, 1, 2, true), swap(4, 5, 1, 3, false)]);
    check(false, &[write(1, 2, 1), swap(3, 6, 1, 2, true), swap(4, 5, 1, 3, true)]);
}
