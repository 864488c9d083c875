//! The store's contract with a real etcd, one process per case, and with an old etcd; skipped if there is
//! none.

extern crate decapod_etcd as etcd;

use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use bytes::Bytes;
use store::backend::Backend;
use store::{Error, Store};
use testkit::{places, wait};

#[path = "../../../store/tests/it/contract.rs"]
mod contract;
#[path = "../../../store/tests/it/lab.rs"]
mod lab;
#[path = "../../../store/tests/it/linear.rs"]
mod linear;
mod members;
mod sharing;
mod silence;

const ETCD: Backend = Backend { name: "etcd", open: |dir, _| open(dir, program), durable: true };

/// The version in Debian 12.
const OLD_ETCD: Backend =
    Backend { name: "etcd 3.4", open: |dir, _| open(dir, old_program), durable: true };

/// Cases that etcd does not support: it writes each key once per transaction, and drops all before its floor.
const EXCEPT: &[&str] = &[
    "ops_see_the_ops_before_them",
    "a_transaction_arrives_as_one_item",
    "a_watch_from_the_floor_shows_what_was_there_before",
];

/// The program: from `ETCD`, the path, or the cache.
fn program() -> Option<PathBuf> {
    let named = std::env::var_os("ETCD").map(PathBuf::from);
    named.or_else(|| places::program("etcd")).or_else(|| places::cached("ETCD", "etcd-3.6/etcd"))
}

/// An etcd 3.4: its progress answers may overtake the events that they include.
fn old_program() -> Option<PathBuf> {
    places::cached("ETCD_OLD", "etcd-3.4/etcd")
}

/// Our own server with an embedded store, called by our own client.
const SERVED: Backend = Backend { name: "served", open: |dir, _| served(dir, None), durable: true };

/// The same, with all its watches on one stream.
const SHARED: Backend =
    Backend { name: "shared", open: |dir, _| served(dir, Some(Bytes::new())), durable: true };

#[test]
fn a_served_store_keeps_the_contract() {
    contract::run(&SERVED, usize::MAX, EXCEPT_SERVED, |_| {});
}

/// All watches share the client's connection with the writes.
#[tokio::test]
async fn many_watches_on_a_connection_do_not_block_writes() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = served(dir.path(), None).expect("it is served");
    let mut watches = vec![];
    for _ in 0..1100 {
        let range = store::KeyRange::one("key");
        let watch = store.watch(store::WatchRequest { range, start: None });
        watches.push(wait::soon("a watch", watch).await.expect("begun"));
    }
    let op = store::Op::Put { key: "key".into(), value: "1".into(), lease: 0 };
    let txn = store::Txn { success: vec![op], ..Default::default() };
    let written = wait::soon("a write", store.txn(txn)).await;
    let revision = written.expect("written").revision;
    for watch in &mut watches {
        let item = wait::soon("an item", watch.items.recv()).await;
        assert!(matches!(item, Some(store::WatchItem::Events(at, _)) if at == revision));
    }
    store.close().await;
}

#[test]
fn watches_on_one_stream_keep_the_contract() {
    contract::run(&SHARED, usize::MAX, EXCEPT_SERVED, |_| {});
}

/// Like with etcd, a transaction writes a key only once.
const EXCEPT_SERVED: &[&str] =
    &["ops_see_the_ops_before_them", "a_transaction_arrives_as_one_item"];

/// Lives as long as the runtime of its case; later calls find it again.
fn served(dir: &Path, shared_prefix: Option<Bytes>) -> store::Result<Arc<dyn Store>> {
    let socket = dir.join("socket");
    if !socket.exists() {
        let options = store::Options { sync: false, ..store::Options::default() };
        let store = store::Embedded::open(&dir.join("store"), options)?;
        let listener = transport::Listener::unix(&socket).expect("the directory is ours");
        let options = etcd::server::Options { request_limit: 4 << 20, ..Default::default() };
        let tasks = base::task::Tasks::new("served");
        let server = etcd::server::Server::new(store, options, tasks.clone());
        let (limits, stop) = (etcd::server::limits(), tasks.stop_signal());
        tasks.spawn("server", transport::serve(listener, None, server, limits, stop));
    }
    let endpoints = vec![format!("unix://{}", socket.display())];
    etcd::Etcd::open(&etcd::Options { endpoints, shared_prefix, ..Default::default() })
}

#[test]
fn etcd_keeps_the_contract() {
    if program().is_none() {
        println!("skipped: no etcd on the path or in the cache, and ETCD does not name one");
        return;
    }
    contract::run(&ETCD, 4, EXCEPT, |_| {});
}

#[test]
fn an_old_etcd_keeps_the_contract() {
    if old_program().is_none() {
        println!("skipped: no etcd 3.4 in the cache, and ETCD_OLD does not name one");
        return;
    }
    contract::run(&OLD_ETCD, 4, EXCEPT, |_| {});
}

/// Starts an etcd with its data in `dir`, or finds the one that the case started there.
fn open(dir: &Path, program: fn() -> Option<PathBuf>) -> store::Result<Arc<dyn Store>> {
    let file = dir.join("address");
    let address = match std::fs::read_to_string(&file) {
        Ok(address) => address,
        Err(_) => {
            let address = start(dir, &program().expect("asked before")).to_string();
            std::fs::write(&file, &address).expect("the directory is ours");
            address
        }
    };
    let endpoints = vec![format!("http://{address}:{CLIENT_PORT}")];
    etcd::Etcd::open(&etcd::Options { endpoints, ..Default::default() })
}

/// The client port of members, each at an address of its own.
const CLIENT_PORT: u16 = 2379;
/// Their peer port.
const PEER_PORT: u16 = 2380;

/// Runs until the thread of its case ends. Allows the short leases of the contract.
fn start(dir: &Path, program: &Path) -> Ipv4Addr {
    let address = places::own_loopback();
    let (client_url, peer_url) =
        (format!("http://{address}:{CLIENT_PORT}"), format!("http://{address}:{PEER_PORT}"));
    let mut command = Command::new(program);
    command
        .arg("--data-dir")
        .arg(dir.join("etcd"))
        .args(["--name", "one", "--unsafe-no-fsync", "--heartbeat-interval", "30"])
        .args(["--election-timeout", "300", "--max-request-bytes", "4000000"])
        .args(["--listen-client-urls", &client_url, "--advertise-client-urls", &client_url])
        .args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url])
        .args(["--initial-cluster", &format!("one={peer_url}")])
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    // SAFETY: prctl is async-signal-safe and changes only the child process.
    unsafe {
        command.pre_exec(|| {
            nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).map_err(Into::into)
        });
    }
    #[expect(clippy::zombie_processes, reason = "the child is killed with the thread of its case")]
    let _etcd = command.spawn().expect("etcd starts");
    let connect = || Ok(TcpStream::connect((address, CLIENT_PORT))?);
    wait::until(wait::LONG, "etcd answers", connect).expect("a started etcd");
    address
}

/// Each member is the first choice in turn.
#[tokio::test]
async fn a_snapshot_is_taken_from_a_member_that_answers() {
    let dir = tempfile::tempdir().expect("a directory");
    served(dir.path(), None).expect("it is served").close().await;
    for _ in 0..4 {
        let missing = format!("http://{}:{CLIENT_PORT}", places::own_loopback());
        let endpoints = vec![missing, format!("unix://{}", dir.path().join("socket").display())];
        let options = etcd::Options { endpoints, ..Default::default() };
        let store = etcd::Etcd::open(&options).expect("endpoints");
        let mut snapshot = wait::soon("a snapshot", store.snapshot()).await.expect("begun");
        let chunk = wait::soon("a chunk", snapshot.chunks.recv()).await;
        assert!(matches!(chunk, Some(Ok(_))), "{chunk:?}");
        store.close().await;
    }
}

#[tokio::test]
async fn a_missing_etcd_is_named() {
    let endpoints = vec![format!("http://{}:{CLIENT_PORT}", places::own_loopback())];
    let store =
        etcd::Etcd::open(&etcd::Options { endpoints, ..Default::default() }).expect("a URL");
    let Err(Error::Unavailable(why)) = store.revision().await else { panic!("no etcd listens") };
    assert!(why.contains("onnection refused"), "{why}");
}

#[tokio::test]
async fn a_bad_endpoint_is_named() {
    let check = |endpoints: &[&str], expected: &str| {
        let endpoints = endpoints.iter().map(|url| (*url).to_owned()).collect();
        let opened = etcd::Etcd::open(&etcd::Options { endpoints, ..Default::default() });
        let error = opened.err().expect("not an endpoint").to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(&[], "no etcd endpoint is given");
    check(&["http://:::"], "etcd endpoint \"http://:::\": ");
}
