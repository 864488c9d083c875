//! Answers that are sent before the request was read, frame by frame: they arrive completely.

use std::process::Stdio;

use decapod_transport::tls::ClientCerts;
use decapod_transport::{self as transport, HttpClient};
use http::{Method, Request};
use testkit::wait::soon;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use crate::hostile::encrypted;
use crate::support::World;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const ACK: u8 = 1;

#[derive(Debug)]
struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
    payload: Vec<u8>,
}

/// An HTTP/2 client that does nothing by itself.
struct Raw(TlsStream<TcpStream>);

impl Raw {
    async fn start(world: &World) -> Self {
        let mut raw = Self(encrypted(world, "h2").await);
        raw.0.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("writes");
        raw.send(SETTINGS, 0, 0, &[]).await;
        raw
    }

    async fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
        let mut frame = vec![length[1], length[2], length[3], kind, flags];
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        self.0.write_all(&frame).await.expect("writes");
    }

    /// Sends a request whose body will follow.
    async fn ask(&mut self, method: &str, flags: u8) {
        let fields =
            [(":method", method), (":scheme", "https"), (":path", "/whoami"), (":authority", "x")];
        let mut block = vec![];
        for (name, value) in fields {
            for text in [name, value] {
                let is_name = text.starts_with(':') && text == name;
                // A literal without an index, with its full name.
                block.extend(is_name.then_some(0));
                block.push(u8::try_from(text.len()).expect("short"));
                block.extend(text.as_bytes());
            }
        }
        self.send(HEADERS, END_HEADERS | flags, 1, &block).await;
    }

    /// The next frame of the stream, or the answer to a PING.
    async fn next(&mut self) -> Frame {
        loop {
            let mut head = [0; 9];
            let read = self.0.read_exact(&mut head);
            soon("a frame", read).await.expect("the connection stays open");
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let mut payload = vec![0; length];
            self.0.read_exact(&mut payload).await.expect("a whole frame");
            let stream = u32::from_be_bytes([head[5] & 0x7f, head[6], head[7], head[8]]);
            let frame = Frame { kind: head[3], flags: head[4], stream, payload };
            let is_ours = (frame.stream == 1 && frame.kind != WINDOW_UPDATE)
                || (frame.kind == PING && frame.flags & ACK != 0);
            if is_ours {
                return frame;
            }
        }
    }

    /// Checks the whole answer of `/whoami` to an anonymous client.
    async fn answer(&mut self) {
        let head = self.next().await;
        assert_eq!((head.kind, head.flags & END_STREAM), (HEADERS, 0), "{head:?}");
        let mut text = vec![];
        loop {
            let frame = self.next().await;
            assert_eq!(frame.kind, DATA, "{frame:?}");
            text.extend(frame.payload);
            if frame.flags & END_STREAM != 0 {
                break;
            }
        }
        assert_eq!(text, b"nobody");
    }

    /// Checks that no frame of the stream arrives before the answer to this PING.
    async fn quiet(&mut self) {
        self.send(PING, 0, 0, &[7; 8]).await;
        let frame = self.next().await;
        assert_eq!((frame.kind, frame.stream), (PING, 0), "{frame:?}");
    }

    async fn reset_without_an_error(&mut self) {
        let frame = self.next().await;
        assert_eq!((frame.kind, frame.payload), (RST_STREAM, vec![0; 4]));
    }
}

#[tokio::test]
async fn a_body_that_comes_after_the_answer_is_read() {
    let world = World::start(ClientCerts::Request).await;
    let mut raw = Raw::start(&world).await;
    raw.ask("POST", 0).await;
    raw.answer().await;
    raw.quiet().await;
    // Fewer bytes than the stream's window.
    for _ in 0..8 {
        raw.send(DATA, 0, 1, &[b'x'; 8192]).await;
    }
    raw.quiet().await;
    raw.send(DATA, END_STREAM, 1, b"x").await;
    raw.quiet().await;
    world.shutdown().await;
}

#[tokio::test]
async fn a_body_without_end_is_given_up_after_the_answer() {
    let world = World::start(ClientCerts::Request).await;
    let mut raw = Raw::start(&world).await;
    raw.ask("POST", 0).await;
    raw.answer().await;
    raw.send(DATA, 0, 1, &[b'x'; 8192]).await;
    raw.reset_without_an_error().await;
    raw.quiet().await;
    world.shutdown().await;
}

#[tokio::test]
async fn an_answer_to_head_has_no_body() {
    let world = World::start(ClientCerts::Request).await;
    let mut raw = Raw::start(&world).await;
    raw.ask("HEAD", END_STREAM).await;
    let head = raw.next().await;
    assert_eq!((head.kind, head.flags & END_STREAM), (HEADERS, END_STREAM), "{head:?}");
    raw.quiet().await;

    let client = HttpClient::new(&world.options("", false)).expect("a client");
    let request = Request::builder().method(Method::HEAD).uri("/whoami");
    let request = request.body(transport::empty()).expect("a request");
    let response = client.request(request).await.expect("answers");
    assert_eq!(response.headers()["content-length"], "6");
    world.shutdown().await;
}

/// curl used to lose early answers. Tests big bodies, small ones, and none.
#[tokio::test]
async fn curl_gets_early_answers() {
    let world = World::start(ClientCerts::Request).await;
    let root = tempfile::tempdir().expect("a temporary directory");
    let url = format!("https://{}/nothing", world.address());
    for size in [1_000, 300_000, 8_000_000] {
        let body = root.path().join("body");
        std::fs::write(&body, vec![b'x'; size]).expect("writes");
        let data = format!("@{}", body.display());
        for _ in 0..4 {
            curl(&["-X", "POST", "-H", "Expect:", "--data-binary", &data, &url], "no such page")
                .await;
        }
    }
    curl(&["-I", &url], "").await;
    world.shutdown().await;
}

async fn curl(words: &[&str], expected: &str) {
    let mut command = tokio::process::Command::new("curl");
    command.args(["-sk", "--http2", "-m", "60", "-w", " %{http_code}"]).args(words);
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await;
    let Ok(output) = output else {
        println!("skipped: curl is not installed");
        return;
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{words:?}: {} {text}", output.status);
    assert!(text.ends_with(&format!("{expected} 404")), "{words:?}: {text}");
}
