//! Helpers of the cases: a store in its own directory, and short forms of its calls.

use std::sync::Arc;

use bytes::Bytes;
use store::backend::Backend;
use store::{
    Compare, Event, EventKind, KeyRange, KeyValue, Op, Options, RangeRequest, RangeResponse,
    Result, Revision, Store, Txn, TxnResponse, Watch, WatchItem, WatchRequest,
};
use tempfile::TempDir;
use testkit::wait;

pub struct Lab {
    pub backend: &'static Backend,
    pub options: Options,
    dir: TempDir,
}

impl Lab {
    pub fn new(backend: &'static Backend) -> Self {
        let dir = tempfile::tempdir().expect("a directory for the test");
        let options = Options { sync: false, ..Options::default() };
        Self { backend, options, dir }
    }

    pub fn open(&self) -> Arc<dyn Store> {
        // A child that another case is starting holds a copy of the lock for a moment.
        let opened = wait::until(wait::LONG, "the store opens", || {
            Ok((self.backend.open)(self.dir.path(), self.options.clone())?)
        });
        opened.expect("it opens")
    }
}

pub fn put(key: &str, value: impl AsRef<[u8]>) -> Op {
    leased(key, value, 0)
}

pub fn leased(key: &str, value: impl AsRef<[u8]>, lease: i64) -> Op {
    Op::Put { key: bytes(key), value: Bytes::copy_from_slice(value.as_ref()), lease }
}

pub fn delete(key: &str) -> Op {
    Op::DeleteRange { range: KeyRange::one(bytes(key)) }
}

pub fn fetch(key: &str) -> Op {
    Op::Get { range: KeyRange::one(bytes(key)) }
}

pub fn bytes(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

pub fn prefix(text: &str) -> KeyRange {
    KeyRange::prefix(bytes(text))
}

pub fn unchanged(key: &str, revision: Revision) -> Compare {
    Compare::ModRevision(bytes(key), revision)
}

pub fn absent(key: &str) -> Compare {
    unchanged(key, Revision(0))
}

/// Short forms of `store`'s calls; they expect success.
pub struct Short<'a>(pub &'a dyn Store);

impl Short<'_> {
    pub async fn txn(
        &self,
        compare: Vec<Compare>,
        success: Vec<Op>,
        failure: Vec<Op>,
    ) -> TxnResponse {
        self.0.txn(Txn { compare, success, failure }).await.expect("the transaction runs")
    }

    pub async fn try_run(&self, ops: Vec<Op>) -> Result<Revision> {
        let txn = Txn { compare: vec![], success: ops, failure: vec![] };
        self.0.txn(txn).await.map(|response| response.revision)
    }

    pub async fn run(&self, ops: Vec<Op>) -> Revision {
        self.txn(vec![], ops, vec![]).await.revision
    }

    pub async fn put(&self, key: &str, value: impl AsRef<[u8]>) -> Revision {
        self.run(vec![put(key, value)]).await
    }

    pub async fn delete(&self, key: &str) -> Revision {
        self.run(vec![delete(key)]).await
    }

    pub async fn get(&self, key: &str) -> Option<KeyValue> {
        self.range(RangeRequest::new(KeyRange::one(bytes(key)))).await.kvs.pop()
    }

    pub async fn range(&self, request: RangeRequest) -> RangeResponse {
        self.0.range(request).await.expect("the range is readable")
    }

    /// `key=value` for each key with the prefix, at a revision.
    pub async fn at(&self, revision: u64, start: &str) -> Vec<String> {
        let response = self.try_at(revision, start).await.expect("the revision is readable");
        response.kvs.iter().map(show).collect()
    }

    pub async fn try_at(&self, revision: u64, start: &str) -> Result<RangeResponse> {
        let request =
            RangeRequest { revision: Some(Revision(revision)), ..RangeRequest::new(prefix(start)) };
        self.0.range(request).await
    }

    pub async fn watch(&self, start_key: &str, start: Option<u64>) -> Watch {
        let request = WatchRequest { range: prefix(start_key), start: start.map(Revision) };
        self.0.watch(request).await.expect("the watch starts")
    }

    pub async fn revision(&self) -> Revision {
        self.0.revision().await.expect("the store has a revision")
    }
}

pub fn show(kv: &KeyValue) -> String {
    format!("{}={}", String::from_utf8_lossy(&kv.key), String::from_utf8_lossy(&kv.value.bytes()))
}

/// `3 +a=1<0`: at revision 3, a became 1 and was 0 before; `-` is a delete.
pub fn show_event(event: &Event) -> String {
    let before = event
        .previous
        .as_ref()
        .map_or(String::new(), |kv| format!("<{}", String::from_utf8_lossy(&kv.value.bytes())));
    let sign = if event.kind == EventKind::Put { '+' } else { '-' };
    format!("{} {sign}{}{before}", event.kv.mod_revision, show(&event.kv))
}

pub async fn next(watch: &mut Watch) -> Option<WatchItem> {
    wait::soon("the watch says something", watch.items.recv()).await
}

/// The next item as text: events, `progress 5`, `compacted 5`, `end`.
pub async fn item(watch: &mut Watch) -> String {
    match next(watch).await {
        Some(WatchItem::Events(revision, events)) => {
            assert!(events.iter().all(|event| event.kv.mod_revision == revision));
            events.iter().map(show_event).collect::<Vec<_>>().join(", ")
        }
        Some(WatchItem::Progress(revision)) => format!("progress {revision}"),
        Some(WatchItem::Compacted(floor)) => format!("compacted {floor}"),
        None => "end".into(),
    }
}

pub async fn items(watch: &mut Watch, count: usize) -> Vec<String> {
    let mut seen = vec![];
    for _ in 0..count {
        seen.push(item(watch).await);
    }
    seen
}
