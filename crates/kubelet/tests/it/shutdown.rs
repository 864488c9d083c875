//! The node's shutdown, announced by a logind in this process that speaks the necessary part of D-Bus.

use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};

use base::task::Tasks;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

use crate::pods::{Bench, condition, one};

const NODE: &str = "/api/v1/nodes/n1";

struct Logind {
    signals: mpsc::Sender<bool>,
    /// The other ends of the acquired locks, in order.
    locks: Arc<Mutex<Vec<std::io::PipeReader>>>,
    tasks: Tasks,
}

impl Drop for Logind {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

impl Logind {
    fn start(socket: &Path) -> Self {
        let listener = UnixListener::bind(socket).expect("a socket");
        let (signals, mut asked) = mpsc::channel(4);
        let locks = Arc::<Mutex<Vec<std::io::PipeReader>>>::default();
        let (tasks, given) = (Tasks::new("logind"), locks.clone());
        tasks.spawn("bus", async move {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            greet(&mut stream).await;
            let mut buffer = vec![];
            loop {
                tokio::select! {
                    starts = asked.recv() => {
                        let Some(starts) = starts else { return };
                        stream.write_all(&signal(starts)).await.expect("written");
                    }
                    length = stream.read_buf(&mut buffer) => {
                        if length.expect("read") == 0 {
                            return;
                        }
                        while let Some(length) = whole(&buffer) {
                            let call: Vec<u8> = buffer.drain(..length).collect();
                            answer(&stream, &call, &given).await;
                        }
                    }
                }
            }
        });
        Self { signals, locks, tasks }
    }

    /// Whether the lock of that number was released.
    fn is_released(&self, number: usize) -> bool {
        let mut locks = self.locks.lock().expect("no panic");
        let Some(lock) = locks.get_mut(number) else { return false };
        // The pipe is never written: it is at its end, or has nothing to read.
        let ready = {
            let mut ends = [PollFd::new(lock.as_fd(), PollFlags::POLLIN)];
            nix::poll::poll(&mut ends, PollTimeout::ZERO).expect("polled")
        };
        ready > 0 && lock.read(&mut [0]).expect("read") == 0
    }

    fn given(&self) -> usize {
        self.locks.lock().expect("no panic").len()
    }
}

async fn greet(stream: &mut UnixStream) {
    let mut text = vec![];
    for (line, reply) in [
        ("AUTH EXTERNAL", "OK 1234\r\n"),
        ("NEGOTIATE_UNIX_FD", "AGREE_UNIX_FD\r\n"),
        ("BEGIN", ""),
    ] {
        while !text.ends_with(b"\r\n") {
            // Byte by byte, because no line follows BEGIN.
            text.push(stream.read_u8().await.expect("a line"));
        }
        let said = String::from_utf8_lossy(&text).into_owned();
        assert!(said.trim_start_matches('\0').starts_with(line), "{said}");
        text.clear();
        stream.write_all(reply.as_bytes()).await.expect("written");
    }
}

fn number(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as usize
}

/// The length of the first message, if it is complete.
fn whole(bytes: &[u8]) -> Option<usize> {
    let length = (16 + number(bytes.get(..16)?, 12)).next_multiple_of(8) + number(bytes, 4);
    (bytes.len() >= length).then_some(length)
}

fn message(kind: u8, fields: &[u8], body: &[u8]) -> Vec<u8> {
    let mut out = vec![b'l', kind, 0, 1];
    for number in [body.len(), 1, fields.len()] {
        out.extend_from_slice(&(number as u32).to_le_bytes());
    }
    out.extend_from_slice(fields);
    out.resize(out.len().next_multiple_of(8), 0);
    out.extend_from_slice(body);
    out
}

fn signal(starts: bool) -> Vec<u8> {
    let mut fields = vec![3, 1, b's', 0];
    let member = "PrepareForShutdown";
    fields.extend_from_slice(&(member.len() as u32).to_le_bytes());
    fields.extend_from_slice(member.as_bytes());
    fields.push(0);
    message(4, &fields, &u32::from(starts).to_le_bytes())
}

async fn answer(stream: &UnixStream, call: &[u8], locks: &Mutex<Vec<std::io::PipeReader>>) {
    let asks = |text: &str| call.windows(text.len()).any(|part| part == text.as_bytes());
    let mut fields = vec![5, 1, b'u', 0];
    fields.extend_from_slice(&call[8..12]);
    let (mut body, mut lock) = (vec![], None);
    if asks("InhibitDelayMaxUSec") {
        body.extend_from_slice(&[1, b't', 0, 0, 0, 0, 0, 0]);
        body.extend_from_slice(&60_000_000u64.to_le_bytes());
    } else if asks("Inhibit") {
        assert!(asks("shutdown") && asks("delay"));
        let (ours, theirs) = std::io::pipe().expect("a pipe");
        locks.lock().expect("no panic").push(ours);
        lock = Some(OwnedFd::from(theirs));
        body.extend_from_slice(&0u32.to_le_bytes());
    }
    let bytes = message(2, &fields, &body);
    let raw: Vec<i32> = lock.iter().map(AsRawFd::as_raw_fd).collect();
    let control = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &control[..0] } else { &control[..] };
    let parts = [std::io::IoSlice::new(&bytes)];
    let send = || {
        let flags = MsgFlags::empty();
        Ok(sendmsg::<()>(stream.as_raw_fd(), &parts, control, flags, None)?)
    };
    stream.async_io(Interest::WRITABLE, send).await.expect("sent");
}

#[tokio::test]
async fn pods_end_before_the_shutdown() {
    let mut bench = Bench::new();
    bench.stop().await;
    let logind = Logind::start(&bench.dir.path().join("bus"));
    bench.start();
    let mut critical = one("Always");
    critical["priority"] = 2_000_000_000.into();
    bench.api.put_pod("critical", critical);
    bench.api.put_pod("plain", one("Always"));
    bench.until_ready("critical").await;
    bench.until_ready("plain").await;
    bench.api.until("a lock", |_| logind.given() == 1).await;
    assert!(!logind.is_released(0));

    logind.signals.send(true).await.expect("it listens");
    let ended = |name: &'static str| {
        move |api: &crate::api::Api| {
            let status = api.pod(name)["status"].clone();
            status["phase"] == "Failed"
                && status["reason"] == "Terminated"
                && status["message"] == "Pod was terminated in response to imminent node shutdown."
        }
    };
    bench.api.until("plain ends", ended("plain")).await;
    bench.api.until("critical ends", ended("critical")).await;
    let stops: Vec<String> = bench.runtime.calls();
    let stops: Vec<&String> = stops.iter().filter(|c| c.starts_with("stop_container")).collect();
    let id = |name: &str| crate::pods::container_id(&bench.api.pod(name));
    assert_eq!(stops.len(), 2, "{stops:?}");
    for (stop, name) in stops.into_iter().zip(["plain", "critical"]) {
        let rest = stop.strip_prefix(&format!("stop_container {} ", id(name))).expect(name);
        // The 20 s of its group, minus the time passed; its own 30 s do not apply.
        assert!(rest.parse::<u64>().is_ok_and(|seconds| seconds <= 20), "{stop}");
    }
    assert_eq!(condition(&bench.api.pod("plain"), "DisruptionTarget"), "True");
    bench.api.until("the lock is released", |_| logind.is_released(0)).await;
    bench
        .api
        .until("the node says so", |api| {
            let node = api.get(NODE).unwrap_or_default();
            condition(&node, "Ready") == "False"
                && node.to_string().contains("node is shutting down")
        })
        .await;
    bench.api.put_pod("late", one("Always"));
    bench
        .api
        .until("no new pods", |api| api.pod("late")["status"]["reason"] == "NodeShutdown")
        .await;

    // The shutdown is cancelled.
    logind.signals.send(false).await.expect("it listens");
    bench
        .api
        .until("Ready again", |api| {
            condition(&api.get(NODE).unwrap_or_default(), "Ready") == "True"
        })
        .await;
    bench.api.until("a new lock", |_| logind.given() == 2).await;
    bench.api.put_pod("later", one("Always"));
    bench.until_ready("later").await;
    assert!(!logind.is_released(1));
    bench.stop().await;
}
