//! Load in the background: requests, look-ups and writes while a test does something else.
//!
//! In: a network and a request. Out, at [`Hammer::stop`]: the number of requests, and every failure with
//! its time. Each worker is one thread; between requests it waits for the stop signal.

use std::fs::File;
use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Result, bail, ensure};

use crate::host::enter_network;
use crate::http::{self, ApiClient};
use crate::wait;

/// Pause between two requests of one worker.
const PACE: Duration = Duration::from_millis(10);
/// A write that takes longer counts as not acknowledged: the server may be dead.
const WRITE: Duration = Duration::from_secs(2);
/// Failures beyond this are counted, not kept.
const KEPT: usize = 5;

/// One request, repeated.
pub struct Hammer {
    worker: Worker<Report>,
    failed: Arc<AtomicUsize>,
}

#[derive(Debug, Default)]
pub struct Report {
    pub count: usize,
    /// The first failures, each with the time since the start.
    pub failures: Vec<String>,
}

impl Hammer {
    /// GET over plain HTTP; anything but 200 is a failure.
    pub fn get(network: File, address: &str, path: &str) -> Self {
        let (address, path) = (address.to_owned(), path.to_owned());
        Self::start(network, move || {
            let response = http::get(&address, &path, wait::LONG)?;
            ensure!(response.status == 200, "status {}", response.status);
            Ok(())
        })
    }

    /// An address look-up over UDP; no answer or an empty one is a failure.
    pub fn resolve(network: File, server: &str, name: &str) -> Self {
        let (server, name) = (server.to_owned(), name.to_owned());
        Self::start(network, move || resolve(&server, &name))
    }

    fn start(network: File, mut ask: impl FnMut() -> Result<()> + Send + 'static) -> Self {
        let mut report = Report::default();
        let failed = Arc::<AtomicUsize>::default();
        let failures = failed.clone();
        let worker = Worker::start(network, move |pause| {
            let started = wait::now();
            while pause() {
                report.count += 1;
                let Err(error) = ask() else { continue };
                if report.failures.len() < KEPT {
                    report.failures.push(format!("{:?}: {error:#}", started.elapsed()));
                }
                failures.fetch_add(1, Ordering::Relaxed);
            }
            report
        });
        Self { worker, failed }
    }

    /// Number of failures so far.
    pub fn failed(&self) -> usize {
        self.failed.load(Ordering::Relaxed)
    }

    pub fn stop(self) -> Report {
        self.worker.stop()
    }
}

/// Clients that create ConfigMaps and remember which were acknowledged.
pub struct Writers {
    workers: Vec<Worker<Vec<String>>>,
}

impl Writers {
    pub fn start(network: File, client: ApiClient, count: usize) -> Self {
        let workers = (0..count).map(|worker| {
            let client = client.clone();
            let network = network.try_clone().expect("a file can be cloned");
            Worker::start(network, move |pause| write_until(worker, &client, pause))
        });
        Self { workers: workers.collect() }
    }

    /// Names of all objects whose creation was acknowledged.
    pub fn stop(self) -> Vec<String> {
        self.workers.into_iter().flat_map(Worker::stop).collect()
    }
}

fn write_until(worker: usize, client: &ApiClient, pause: &dyn Fn() -> bool) -> Vec<String> {
    let mut acknowledged = Vec::new();
    let mut number = 0_u32;
    while pause() {
        number += 1;
        let name = format!("load-{worker}-{number}");
        let body = format!(
            r#"{{"apiVersion":"v1","kind":"ConfigMap","metadata":{{"name":"{name}","labels":{{"load":"yes"}}}}}}"#
        );
        // A server that is down acknowledges nothing; the test expects that.
        let answer = client.post("/api/v1/namespaces/default/configmaps", &body, WRITE);
        if answer.is_ok_and(|response| response.status == 201) {
            acknowledged.push(name);
        }
    }
    acknowledged
}

/// A thread inside a network that works until it is stopped.
struct Worker<T> {
    stop: SyncSender<()>,
    thread: JoinHandle<T>,
}

impl<T: Send + 'static> Worker<T> {
    /// `work` gets a function that waits a little and returns whether to continue.
    fn start(network: File, work: impl FnOnce(&dyn Fn() -> bool) -> T + Send + 'static) -> Self {
        let (stop, stopped) = sync_channel(0);
        let thread = std::thread::spawn(move || {
            enter_network(&network).expect("the network is there as long as its file");
            work(&|| matches!(stopped.recv_timeout(PACE), Err(RecvTimeoutError::Timeout)))
        });
        Self { stop, thread }
    }

    fn stop(self) -> T {
        drop(self.stop);
        self.thread.join().expect("a worker does not panic")
    }
}

/// The same as [`resolve`], from inside a network.
pub fn resolve_from(network: &File, server: &str, name: &str) -> Result<()> {
    let work = || {
        enter_network(network)?;
        resolve(server, name)
    };
    std::thread::scope(|scope| scope.spawn(work).join().expect("look-ups do not panic"))
}

/// Asks a name server for addresses; fails unless there is at least one.
pub fn resolve(server: &str, name: &str) -> Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.set_read_timeout(Some(wait::LONG))?;
    socket.connect(server)?;
    socket.send(&question(name))?;
    let mut answer = [0; 512];
    let length = socket.recv(&mut answer)?;
    if length < 12 {
        bail!("{length} bytes are not a DNS answer");
    }
    let code = answer[3] & 0x0f;
    let count = u16::from_be_bytes([answer[6], answer[7]]);
    ensure!(code == 0 && count > 0, "code {code}, {count} answers");
    Ok(())
}

/// A question for A records: header, then the name as counted labels, then type and class.
fn question(name: &str) -> Vec<u8> {
    let mut packet = vec![0x4d, 0x2a, 0x01, 0x00, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.trim_end_matches('.').split('.') {
        packet.push(u8::try_from(label.len()).expect("a label is short"));
        packet.extend(label.bytes());
    }
    packet.extend([0, 0, 1, 0, 1]);
    packet
}
