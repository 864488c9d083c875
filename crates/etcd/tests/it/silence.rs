//! Members that accept a connection and never answer, like a frozen one, members that stop, and members that are
//! down, each beside a healthy one.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
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

/// The bad member of a pair.
#[derive(Clone, Copy, PartialEq)]
enum Bad {
    Missing,
    Silent,
    /// It answers the first call of each connection with a GOAWAY that excludes it.
    Stopping,
}

struct Pair {
    store: Arc<dyn Store>,
    _tasks: Tasks,
    _silent: Option<TcpListener>,
    _dir: tempfile::TempDir,
}

/// Speaks HTTP/2 until a client has sent a request, and then says that it has processed none.
fn excludes(mut stream: TcpStream) -> std::io::Result<()> {
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    const GOAWAY: [u8; 17] = [0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    const HEADERS: u8 = 1;
    stream.write_all(&SETTINGS)?;
    stream.read_exact(&mut [0; b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len()])?;
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head)?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        stream.read_exact(&mut vec![0; length])?;
        if head[3] == HEADERS {
            stream.write_all(&GOAWAY)?;
            break;
        }
    }
    // To the end: unread bytes would reset the connection before the client has read the GOAWAY.
    stream.read_to_end(&mut vec![]).map(drop)
}

/// One healthy member, and one that is silent, stops, or is down.
async fn pair(bad_is: Bad) -> Pair {
    let (bad, good) = (places::own_loopback(), places::own_loopback());
    let at = |address: Ipv4Addr| SocketAddr::from((address, CLIENT_PORT));
    let silent =
        (bad_is != Bad::Missing).then(|| TcpListener::bind(at(bad)).expect("the address is ours"));
    if let (Bad::Stopping, Some(listener)) = (bad_is, &silent) {
        let listener = listener.try_clone().expect("a listener can be cloned");
        // It ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // An error means that the client has left.
                std::thread::spawn(move || drop(excludes(stream)));
            }
        });
    }
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
async fn failed_writes(bad: Bad) -> Vec<usize> {
    let mut all = vec![];
    for _ in 0..4 {
        let pair = pair(bad).await;
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
    let failed = failed_writes(Bad::Silent).await;
    assert!(failed.iter().all(|failed| *failed <= 1), "{failed:?}");
}

#[tokio::test]
async fn no_write_to_a_missing_member_fails() {
    assert_eq!(failed_writes(Bad::Missing).await, [0; 4]);
}

#[tokio::test]
async fn no_write_to_a_stopping_member_fails() {
    assert_eq!(failed_writes(Bad::Stopping).await, [0; 4]);
}

#[tokio::test]
async fn reads_and_watches_go_to_the_member_that_answers() {
    for _ in 0..4 {
        let pair = pair(Bad::Silent).await;
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
