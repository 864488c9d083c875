//! The cache of other servers' answers.
//!
//! In: checked answers. Out: the same answers until their TTL ends, and for an hour after that if no server
//! answers. Upstream: CoreDNS with `cache 30`, as in the usual Corefile: TTLs between 5 and 30 seconds,
//! 9,984 names each for answers and for denials, SERVFAIL for 5 seconds, all records of an answer with the
//! rest of the smallest TTL. Deviation: stale answers and prefetching are on without configuration; a
//! stale answer goes out only if the servers fail or are slow (CoreDNS' mode `verify`).
//! Invariants: memory is bounded by entries and bytes; the least recently used entry goes first; an answer is
//! either in the answers or in the denials, so that a flood of random names evicts denials only.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lru::LruCache;
use tokio::time::Instant;

use crate::wire::{Answer, Asked, code};

const ENTRIES: NonZeroUsize = NonZeroUsize::new(9984).expect("positive");
/// Of answers; as many for denials.
const BYTES: usize = 8 << 20;
/// What an entry costs beside its answer and name.
const OVERHEAD: usize = 256;
const STALE: Duration = Duration::from_secs(3600);
/// After servers failed, a stale answer is served without asking them for this time.
const PAUSE: Duration = Duration::from_secs(5);
const SERVFAIL: u32 = 5;
/// An entry that so many queries hit is fetched again when a tenth of its TTL is left.
const POPULAR: u32 = 5;
const PREFETCH_SHARE: u32 = 10;

/// Limits of TTLs in seconds, for one zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limits {
    pub least: u32,
    /// 0: answers are not cached.
    pub success: u32,
    pub denial: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { least: 5, success: 30, denial: 30 }
    }
}

impl Limits {
    /// How long the answer counts; 0: it is not cached.
    fn seconds(&self, answer: &Answer) -> u32 {
        let most = match (answer.code, answer.is_denial()) {
            _ if answer.is_truncated() => return 0,
            (code::SERV_FAIL, _) => return SERVFAIL,
            (_, true) => self.denial,
            (code::NO_ERROR, false) => self.success,
            _ => return 0,
        };
        answer.ttl.unwrap_or(self.least).max(self.least).min(most)
    }

    /// What the records of a new answer say; the same as from the cache.
    pub fn ttl(&self, answer: &Answer) -> u32 {
        match self.seconds(answer) {
            0 => answer.ttl.unwrap_or(0),
            seconds => seconds,
        }
    }
}

/// A question to the servers of one zone. Zones with other servers have another `scope`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub scope: u64,
    pub asked: Asked,
}

struct Entry {
    answer: Arc<Answer>,
    since: Instant,
    seconds: u32,
    hits: u32,
    /// The servers failed: they are not asked again before this time.
    pause: Option<Instant>,
    prefetched: bool,
}

#[derive(Debug)]
pub enum Found {
    /// `refresh`: the name is popular and its time is nearly over.
    Fresh {
        answer: Arc<Answer>,
        ttl: u32,
        refresh: bool,
    },
    /// `ask`: the servers have not failed a moment ago.
    Stale {
        answer: Arc<Answer>,
        ask: bool,
    },
    Missing,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counts {
    pub entries: usize,
    pub hits: u64,
    pub evictions: u64,
}

struct Half {
    entries: LruCache<Key, Entry>,
    bytes: usize,
    counts: Counts,
}

impl Half {
    fn new() -> Self {
        Self { entries: LruCache::unbounded(), bytes: 0, counts: Counts::default() }
    }

    fn remove(&mut self, key: &Key) {
        if let Some(old) = self.entries.pop(key) {
            self.bytes -= cost(key, &old.answer);
        }
    }

    fn put(&mut self, key: Key, entry: Entry) {
        self.remove(&key);
        self.bytes += cost(&key, &entry.answer);
        self.entries.put(key, entry);
        while self.entries.len() > ENTRIES.get() || self.bytes > BYTES {
            let Some((key, old)) = self.entries.pop_lru() else { return };
            self.bytes -= cost(&key, &old.answer);
            self.counts.evictions += 1;
        }
    }
}

fn cost(key: &Key, answer: &Answer) -> usize {
    answer.bytes().len() + 2 * key.asked.name.len() + OVERHEAD
}

pub struct Cache {
    /// Guards answers and denials, in this order; held for one look-up or one change.
    halves: Mutex<[Half; 2]>,
}

impl Cache {
    pub fn new() -> Self {
        Self { halves: Mutex::new([Half::new(), Half::new()]) }
    }

    /// Costs one look-up in a table, or two, whatever the number of entries.
    pub fn find(&self, key: &Key) -> Found {
        let now = Instant::now();
        let mut halves = self.lock();
        for half in halves.iter_mut() {
            let Some(entry) = half.entries.get_mut(key) else { continue };
            let age = now.saturating_duration_since(entry.since);
            let life = Duration::from_secs(entry.seconds.into());
            if age < life {
                half.counts.hits += 1;
                entry.hits += 1;
                let ttl = entry.seconds - age.as_secs() as u32;
                let refresh = entry.hits >= POPULAR
                    && !entry.prefetched
                    && age >= life - (life / PREFETCH_SHARE).max(Duration::from_secs(1)).min(life);
                entry.prefetched |= refresh;
                return Found::Fresh { answer: entry.answer.clone(), ttl, refresh };
            }
            if age < life + STALE && entry.answer.is_useful() {
                let ask = entry.pause.is_none_or(|pause| pause <= now);
                return Found::Stale { answer: entry.answer.clone(), ask };
            }
            half.remove(key);
        }
        Found::Missing
    }

    /// Keeps a new answer. Returns the TTL for its records.
    pub fn put(&self, key: &Key, answer: &Arc<Answer>, limits: Limits) -> u32 {
        let seconds = limits.seconds(answer);
        let mut halves = self.lock();
        if !answer.is_useful() && halves.iter_mut().any(|half| half.pause(key)) {
            // The stale answer is better than this one.
            return SERVFAIL;
        }
        let [success, denial] = &mut *halves;
        success.remove(key);
        denial.remove(key);
        if seconds > 0 {
            let entry = Entry {
                answer: answer.clone(),
                since: Instant::now(),
                seconds,
                hits: 0,
                pause: None,
                prefetched: false,
            };
            let half = if answer.is_denial() || !answer.is_useful() { denial } else { success };
            half.put(key.clone(), entry);
        }
        limits.ttl(answer)
    }

    /// No server answered.
    pub fn failed(&self, key: &Key) {
        for half in self.lock().iter_mut() {
            half.pause(key);
        }
    }

    /// Of answers and of denials.
    pub fn counts(&self) -> [Counts; 2] {
        let halves = self.lock();
        [&halves[0], &halves[1]].map(|half| Counts { entries: half.entries.len(), ..half.counts })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, [Half; 2]> {
        self.halves.lock().expect("no panic while held")
    }
}

impl Half {
    /// Whether there is an answer to serve meanwhile.
    fn pause(&mut self, key: &Key) -> bool {
        let Some(entry) = self.entries.get_mut(key).filter(|e| e.answer.is_useful()) else {
            return false;
        };
        entry.pause = Some(Instant::now() + PAUSE);
        true
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::wire::{from_text, kind};

    pub(crate) fn asked(name: &str) -> Asked {
        let name = from_text(name).expect("a name");
        Asked { name, kind: kind::A, class: 1, dnssec: false, unchecked: false }
    }

    /// An answer with `records` addresses and this TTL, or without records.
    pub(crate) fn answer(asked: &Asked, code: u16, records: u8, ttl: u32) -> Answer {
        let mut bytes = vec![0, 0, 0x80, code as u8, 0, 1, 0, records, 0, 0, 0, 0];
        bytes.extend_from_slice(&asked.name);
        bytes.extend_from_slice(&[0, 1, 0, 1]);
        for index in 0..records {
            bytes.extend_from_slice(&[0xc0, 12, 0, 1, 0, 1]);
            bytes.extend_from_slice(&ttl.to_be_bytes());
            bytes.extend_from_slice(&[0, 4, 192, 0, 2, index]);
        }
        Answer::check(bytes, asked).expect("an answer")
    }

    fn key(name: &str) -> Key {
        Key { scope: 0, asked: asked(name) }
    }

    fn put(cache: &Cache, name: &str, code: u16, records: u8, ttl: u32) -> u32 {
        let key = key(name);
        cache.put(&key, &Arc::new(answer(&key.asked, code, records, ttl)), Limits::default())
    }

    fn show(cache: &Cache, name: &str) -> String {
        match cache.find(&key(name)) {
            Found::Fresh { answer, ttl, refresh } => {
                format!("{} for {ttl}{}", answer.code, if refresh { ", refresh" } else { "" })
            }
            Found::Stale { ask, .. } => format!("stale{}", if ask { ", ask" } else { "" }),
            Found::Missing => "missing".into(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn answers_live_by_their_ttl_within_limits() {
        let cache = Cache::new();
        assert_eq!(put(&cache, "long", 0, 1, 3600), 30);
        assert_eq!(put(&cache, "short", 0, 1, 0), 5);
        assert_eq!(put(&cache, "middle", 0, 1, 12), 12);
        assert_eq!(put(&cache, "none", 3, 0, 0), 5);
        assert_eq!(put(&cache, "refused", 5, 0, 0), 0);
        assert_eq!(put(&cache, "broken", 2, 0, 0), 5);
        tokio::time::advance(Duration::from_secs(4)).await;
        let check = |expected: [&str; 6]| {
            let names = ["long", "short", "middle", "none", "refused", "broken"];
            assert_eq!(names.map(|name| show(&cache, name)), expected);
        };
        check(["0 for 26", "0 for 1", "0 for 8", "3 for 1", "missing", "2 for 1"]);
        tokio::time::advance(Duration::from_secs(10)).await;
        check(["0 for 16", "stale, ask", "stale, ask", "stale, ask", "missing", "missing"]);
        tokio::time::advance(STALE + Duration::from_secs(30)).await;
        check(["missing"; 6]);
        assert_eq!(cache.counts().map(|counts| counts.entries), [0, 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stale_answer_outlives_failures() {
        let cache = Cache::new();
        put(&cache, "a", 0, 1, 5);
        tokio::time::advance(Duration::from_secs(6)).await;
        cache.failed(&key("a"));
        assert_eq!(show(&cache, "a"), "stale");
        tokio::time::advance(PAUSE).await;
        assert_eq!(show(&cache, "a"), "stale, ask");
        put(&cache, "a", 2, 0, 0);
        assert_eq!(show(&cache, "a"), "stale");
        put(&cache, "a", 3, 0, 0);
        assert_eq!(show(&cache, "a"), "3 for 5");
    }

    #[tokio::test(start_paused = true)]
    async fn popular_names_are_refreshed_once_before_they_end() {
        let cache = Cache::new();
        put(&cache, "seldom", 0, 1, 30);
        put(&cache, "often", 0, 1, 30);
        for _ in 0..POPULAR {
            assert_eq!(show(&cache, "often"), "0 for 30");
        }
        tokio::time::advance(Duration::from_secs(28)).await;
        assert_eq!(show(&cache, "seldom"), "0 for 2");
        assert_eq!(show(&cache, "often"), "0 for 2, refresh");
        assert_eq!(show(&cache, "often"), "0 for 2");
        put(&cache, "often", 0, 1, 30);
        assert_eq!(show(&cache, "often"), "0 for 30");
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_bounded_and_denials_do_not_evict_answers() {
        let cache = Cache::new();
        put(&cache, "kept", 0, 1, 30);
        for index in 0..ENTRIES.get() + 10 {
            put(&cache, &format!("n{index}"), 3, 0, 30);
        }
        assert_eq!(show(&cache, "kept"), "0 for 30");
        assert_eq!(show(&cache, "n0"), "missing");
        let [success, denial] = cache.counts();
        assert_eq!((success.entries, denial.entries, denial.evictions), (1, ENTRIES.get(), 10));
        for index in 0..3000 {
            put(&cache, &format!("large{index}"), 0, 255, 30);
        }
        assert!(cache.lock()[0].bytes <= BYTES && cache.counts()[0].evictions > 0);
        for half in cache.lock().iter_mut() {
            let sum: usize = half.entries.iter().map(|(key, e)| cost(key, &e.answer)).sum();
            assert_eq!(half.bytes, sum);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn other_questions_have_other_answers() {
        let cache = Cache::new();
        put(&cache, "a", 0, 1, 30);
        let one = key("a");
        let others = [
            Key { scope: 1, ..one.clone() },
            Key { asked: Asked { kind: 28, ..one.asked.clone() }, ..one.clone() },
            Key { asked: Asked { class: 3, ..one.asked.clone() }, ..one.clone() },
            Key { asked: Asked { dnssec: true, ..one.asked.clone() }, ..one.clone() },
            Key { asked: Asked { unchecked: true, ..one.asked.clone() }, ..one.clone() },
        ];
        assert!(matches!(cache.find(&one), Found::Fresh { .. }));
        for other in others {
            assert!(matches!(cache.find(&other), Found::Missing), "{other:?}");
        }
    }
}
