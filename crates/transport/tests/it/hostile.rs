//! Hostile clients: each is refused or cut off, and others are served meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use decapod_transport as transport;
use decapod_transport::tls::{ClientCerts, Trust, client_config};
use decapod_transport::{HttpClient, Limits};
use http::Request;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::ServerName;
use testkit::wait::{LONG, found, soon};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use crate::support::World;

/// Timeouts short enough for a test. A well-behaved client may miss them on a busy machine, and retries.
fn short() -> Limits {
    let short = Duration::from_millis(300);
    Limits { handshake: short, header_read: short, idle: LONG, ..Limits::default() }
}

async fn connect(world: &World) -> TcpStream {
    TcpStream::connect(world.address()).await.expect("connects")
}

pub async fn encrypted(world: &World, protocol: &str) -> TlsStream<TcpStream> {
    let ca_pem = world.options("", false).ca_pem.expect("an authority");
    let mut config = client_config(&Trust::Authorities(ca_pem), None).expect("settings");
    config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let name = ServerName::try_from("127.0.0.1").expect("a name");
    found("a handshake", async || connector.connect(name.clone(), connect(world).await).await.ok())
        .await
}

/// Reads until the other side ends.
async fn rest(io: &mut (impl AsyncRead + Unpin)) -> Vec<u8> {
    let mut all = vec![];
    // A reset counts as the end.
    let _ = soon("the server ends the connection", io.read_to_end(&mut all)).await;
    all
}

/// Checks that a well-behaved client is served.
async fn check_alive(world: &World) {
    let options = world.options("jane", true);
    let got = found("an answer", async || {
        let client = HttpClient::new(&options).expect("a client");
        crate::try_get(&client, "/whoami").await.ok()
    });
    assert_eq!(got.await, "jane");
}

#[tokio::test]
async fn old_tls_is_refused() {
    let world = World::limited(ClientCerts::Request, short()).await;
    for minor in [1_u8, 2] {
        // A ClientHello of TLS 1.0 and 1.1: two suites, no compression, no extensions.
        let mut hello = vec![3, minor];
        hello.extend([7; 32]);
        hello.extend([0, 0, 4, 0xc0, 0x13, 0x00, 0x2f, 1, 0]);
        let length = u8::try_from(hello.len()).expect("short");
        let mut record = vec![22, 3, 1, 0, length + 4, 1, 0, 0, length];
        record.extend(hello);
        let mut io = connect(&world).await;
        io.write_all(&record).await.expect("writes");
        let answer = rest(&mut io).await;
        // A fatal alert about the protocol or a missing extension.
        assert_eq!((answer[0], answer[5]), (21, 2), "TLS 1.{}: {answer:?}", minor - 1);
    }
    check_alive(&world).await;
    world.shutdown().await;
}

#[tokio::test]
async fn slow_clients_are_cut_off() {
    let world = World::limited(ClientCerts::Request, short()).await;
    let mut silent = connect(&world).await;
    assert!(rest(&mut silent).await.is_empty(), "no handshake");
    let mut slow = encrypted(&world, "http/1.1").await;
    slow.write_all(b"GET /whoami HTTP/1.1\r\nHost: x\r\nX-Slow: ").await.expect("writes");
    let answer = String::from_utf8_lossy(&rest(&mut slow).await).into_owned();
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{answer}");
    check_alive(&world).await;
    world.shutdown().await;
}

#[tokio::test]
async fn idle_connections_do_not_keep_others_out() {
    let limits = Limits { connections: 50, ..short() };
    let world = World::limited(ClientCerts::Request, limits).await;
    let mut idle = vec![];
    for _ in 0..400 {
        idle.push(connect(&world).await);
    }
    check_alive(&world).await;
    drop(idle);
    world.shutdown().await;
}

#[tokio::test]
async fn idle_connections_end_and_busy_ones_do_not() {
    let idle = Duration::from_millis(300);
    let limits = Limits { idle, drain: LONG, ..Limits::default() };
    let world = World::limited(ClientCerts::Request, limits).await;
    // A connection that is alive but idle. A busy machine may be slow at its setup.
    found("an end in good order", async || {
        let io = TokioIo::new(encrypted(&world, "h2").await);
        let begun = hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await;
        let (sender, connection) = begun.ok()?;
        let outcome = soon("it ends", connection).await;
        drop::<hyper::client::conn::http2::SendRequest<transport::Body>>(sender);
        outcome.ok()
    })
    .await;

    let client = HttpClient::new(&world.options("jane", true)).expect("a client");
    let has_entered = AtomicBool::new(false);
    let slow = found("an answer", async || match crate::try_get(&client, "/slow").await {
        Ok(answer) => Some(answer),
        Err(error) => {
            // On a busy machine the connection may have become idle before the request came.
            assert!(!has_entered.load(Ordering::Relaxed), "a busy one ended: {error}");
            None
        }
    });
    let later = async {
        world.entered.notified().await;
        has_entered.store(true, Ordering::Relaxed);
        // Much longer than a connection may be idle.
        let _ = tokio::time::timeout(idle * 5, std::future::pending::<()>()).await;
        world.gate.notify_one();
    };
    let (answer, ()) = tokio::join!(slow, later);
    assert_eq!(answer, "slow");
    world.shutdown().await;
}

#[tokio::test]
async fn huge_headers_are_refused() {
    let world = World::limited(ClientCerts::Request, Limits::default()).await;
    let mut io = encrypted(&world, "http/1.1").await;
    let line = format!("X-Huge: {}\r\n", "x".repeat(60_000));
    io.write_all(b"GET /whoami HTTP/1.1\r\nHost: x\r\n").await.expect("writes");
    for _ in 0..40 {
        // The server may have closed the connection already.
        if io.write_all(line.as_bytes()).await.is_err() {
            break;
        }
    }
    let answer = String::from_utf8_lossy(&rest(&mut io).await).into_owned();
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");

    let io = encrypted(&world, "h2").await;
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(io))
            .await
            .expect("HTTP/2");
    let request = Request::get("https://x/whoami").header("x-huge", "x".repeat(2 << 20));
    let request = request.body(transport::empty()).expect("a request");
    let exchange = sender.send_request(request);
    let answered = tokio::select! {
        answer = exchange => answer.is_ok_and(|answer| answer.status() == 200),
        _ = connection => false,
    };
    assert!(!answered, "it was taken");
    check_alive(&world).await;
    world.shutdown().await;
}

/// Requests that are cancelled before their answer: raw frames, because no library sends them.
#[tokio::test]
async fn rapid_resets_are_cut_off() {
    let world = World::limited(ClientCerts::Request, Limits::default()).await;
    let mut io = encrypted(&world, "h2").await;
    io.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.expect("writes");
    let mut is_cut = false;
    for stream in (1..40_000_u32).step_by(2) {
        // `GET https://x/slow` with END_STREAM and END_HEADERS, then CANCEL.
        let mut pair = b"\0\0\x0c\x01\x05".to_vec();
        pair.extend(stream.to_be_bytes());
        pair.extend(b"\x82\x87\x04\x05/slow\x01\x01x");
        pair.extend(b"\0\0\x04\x03\0");
        pair.extend(stream.to_be_bytes());
        pair.extend(8_u32.to_be_bytes());
        if io.write_all(&pair).await.is_err() {
            is_cut = true;
            break;
        }
    }
    assert!(is_cut, "20000 requests were taken back");
    check_alive(&world).await;
    world.shutdown().await;
}
