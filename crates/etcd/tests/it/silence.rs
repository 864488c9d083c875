//! Members that accept a connection and never answer, like a frozen one, and members that are down, each
//! beside a healthy one.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use base::task::Tasks;
use store::{KeyRange, Op, Store, Txn, WatchItem, WatchRequest};
use testkit::places;
use testkit::wait::soon;

use crate::CLIENT_PORT;

const PATIENCE: etcd::Patience = etcd::Patience {
    connect: Duration::from_millis(300),
    call: Duration::from_secs(2),
    list: Duration::from_secs(4),
    silence: Duration::from_millis(200),
};

struct Pair {
    store: Arc<dyn Store>,
    _tasks: Tasks,
    _silent: Option<TcpListener>,
    _dir: tempfile::TempDir,
}

/// One healthy member, and one that is silent or down.
async fn pair(is_there: bool) -> Pair {
    let (bad, good) = (places::own_loopback(), places::own_loopback());
    let at = |address: Ipv4Addr| SocketAddr::from((address, CLIENT_PORT));
    let silent = is_there.then(|| TcpListener::bind(at(bad)).expect("the address is ours"));
    let dir = tempfile::tempdir().expect("a directory");
    let options = store::Options { sync: false, ..store::Options::default() };
    let backend = store::Embedded::open(dir.path(), options).expect("a store");
    let tasks = Tasks::new("served");
    let server = etcd::server::Server::new(backend, Default::default(), tasks.clone());
    let listener = transport::Listener::tcp(at(good)).await.expect("the address is ours");
    let (limits, stop) = (etcd::server::limits(), tasks.stop_signal());
    tasks.spawn("server", transport::serve(listener, None, server, limits, stop));
    let endpoints = [bad, good].map(|address| format!("http://{}", at(address))).to_vec();
    let patience = Some(PATIENCE);
    let store = etcd::Etcd::open(&etcd::Options { endpoints, patience, ..Default::default() });
    Pair { store: store.expect("endpoints"), _tasks: tasks, _silent: silent, _dir: dir }
}

async fn put(store: &dyn Store, value: usize) -> bool {
    let op = Op::Put { key: "key".into(), value: value.to_string().into(), lease: 0 };
    store.txn(Txn { success: vec![op], ..Txn::default() }).await.is_ok()
}

/// The first call goes to either of them by chance: so try several times.
async fn failed_writes(is_there: bool) -> Vec<usize> {
    let mut all = vec![];
    for _ in 0..4 {
        let pair = pair(is_there).await;
        let mut failed = 0;
        for value in 0..20 {
            failed += usize::from(!soon("a write", put(&*pair.store, value)).await);
        }
        pair.store.close().await;
        all.push(failed);
    }
    all
}

#[tokio::test]
async fn a_write_to_a_silent_member_fails_once() {
    let failed = failed_writes(true).await;
    assert!(failed.iter().all(|failed| *failed <= 1), "{failed:?}");
}

#[tokio::test]
async fn no_write_to_a_missing_member_fails() {
    assert_eq!(failed_writes(false).await, [0; 4]);
}

#[tokio::test]
async fn reads_and_watches_go_to_the_member_that_answers() {
    for _ in 0..4 {
        let pair = pair(true).await;
        let begun = soon("a read", pair.store.revision()).await.expect("the other answers");
        let range = KeyRange::one("key");
        let request = WatchRequest { range, start: Some(store::Revision(begun.0 + 1)) };
        let mut watch = loop {
            // The first watch may go to the silent member.
            if let Ok(watch) = soon("a watch", pair.store.watch(request.clone())).await {
                break watch;
            }
        };
        while !soon("a write", put(&*pair.store, 1)).await {}
        loop {
            match soon("an event", watch.items.recv()).await {
                Some(WatchItem::Events(..)) => break,
                Some(WatchItem::Progress(_)) => {}
                other => panic!("{other:?}"),
            }
        }
        for _ in 0..5 {
            let range = store::RangeRequest::new(KeyRange::prefix("k"));
            let read = soon("a list", pair.store.range(range)).await.expect("the other answers");
            assert_eq!(read.kvs.len(), 1);
        }
        pair.store.close().await;
    }
}
