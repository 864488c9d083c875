//! The store's contract on a real etcd, one process a case, and on an old one; skipped where there is
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

/// As Debian 12 has it.
const OLD_ETCD: Backend =
    Backend { name: "etcd 3.4", open: |dir, _| open(dir, old_program), durable: true };

/// What etcd does not do: it takes each key once a transaction, and forgets what was before its floor.
const EXCEPT: &[&str] = &[
    "ops_see_the_ops_before_them",
    "a_transaction_arrives_as_one_item",
    "a_watch_from_the_floor_shows_what_was_there_before",
];

/// The program: `ETCD`, what is found on the path, or in the cache.
fn program() -> Option<PathBuf> {
    let named = std::env::var_os("ETCD").map(PathBuf::from);
    named.or_else(|| places::program("etcd")).or_else(|| places::cached("ETCD", "etcd-3.6/etcd"))
}

/// An etcd 3.4: its answers about progress may overtake the events that they speak of.
fn old_program() -> Option<PathBuf> {
    places::cached("ETCD_OLD", "etcd-3.4/etcd")
}

/// Our own server in front of an embedded store, asked by our own client.
const SERVED: Backend = Backend { name: "served", open: |dir, _| served(dir, None), durable: true };

/// The same, all of its watches on one stream.
const SHARED: Backend =
    Backend { name: "shared", open: |dir, _| served(dir, Some(Bytes::new())), durable: true };

#[test]
fn a_served_store_keeps_the_contract() {
    contract::run(&SERVED, usize::MAX, EXCEPT_SERVED, |_| {});
}

/// All of them share the client's connection with the writes.
#[tokio::test]
async fn more_watches_than_a_connection_usually_has_streams_hold_nothing_up() {
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

/// A transaction writes a key once there, as with etcd.
const EXCEPT_SERVED: &[&str] =
    &["ops_see_the_ops_before_them", "a_transaction_arrives_as_one_item"];

/// It lives as long as the runtime of its case, and is found again.
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

/// Starts an etcd with its data in `dir`, or finds the one that a case started there before.
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

/// Where members of etcd listen for clients, each at an address of its own.
const CLIENT_PORT: u16 = 2379;
/// And for each other.
const PEER_PORT: u16 = 2380;

/// Runs until the thread of its case ends. Leases may be as short as the contract's.
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
    // SAFETY: prctl is async-signal-safe and touches nothing of this process.
    unsafe {
        command.pre_exec(|| {
            nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).map_err(Into::into)
        });
    }
    #[expect(clippy::zombie_processes, reason = "it is killed with the thread of its case")]
    let _etcd = command.spawn().expect("etcd starts");
    let connect = || Ok(TcpStream::connect((address, CLIENT_PORT))?);
    wait::until(wait::LONG, "etcd answers", connect).expect("a started etcd");
    address
}

#[tokio::test]
async fn a_missing_etcd_is_named() {
    let endpoints = vec![format!("http://{}:{CLIENT_PORT}", places::own_loopback())];
    let store =
        etcd::Etcd::open(&etcd::Options { endpoints, ..Default::default() }).expect("a URL");
    let Err(Error::Unavailable(why)) = store.revision().await else { panic!("nobody is there") };
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
