//! Clients of a stopping listener see a regular end, which they can tell from a failure.

use std::time::Duration;

use decapod_transport as transport;
use decapod_transport::Limits;
use decapod_transport::tls::ClientCerts;
use hyper_util::rt::{TokioExecutor, TokioIo};
use testkit::wait::{LONG, soon};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};

use crate::hostile::encrypted;
use crate::support::World;

/// Sends a request and returns its answer's headers and body.
async fn ask(io: &mut BufReader<impl AsyncReadExt + AsyncWriteExt + Unpin>) -> String {
    io.write_all(b"GET /whoami HTTP/1.1\r\nHost: x\r\n\r\n").await.expect("it is sent");
    io.flush().await.expect("it is sent");
    let mut text = String::new();
    while !text.ends_with("\r\n\r\n") {
        let read = soon("an answer", io.read_line(&mut text)).await.expect("lines");
        assert!(read > 0, "the connection ended: {text}");
    }
    let mut body = [0; "nobody".len()];
    soon("a body", io.read_exact(&mut body)).await.expect("a body");
    text.to_lowercase()
}

/// The client has sent its next request when the server announces the end.
#[tokio::test]
async fn a_kept_connection_gets_close_in_its_next_answer() {
    let limits = Limits { farewell: LONG, ..Limits::default() };
    let world = World::limited(ClientCerts::Request, limits).await;
    let mut io = BufReader::new(encrypted(&world, "http/1.1").await);
    let usual = ask(&mut io).await;
    assert!(!usual.contains("connection: close"), "{usual}");
    world.tasks.stop();
    let last = ask(&mut io).await;
    assert!(last.contains("connection: close"), "{last}");
    let mut rest = vec![];
    // An end without close_notify is an error.
    soon("the end", io.read_to_end(&mut rest)).await.expect("an end in good order");
    world.shutdown().await;
}

#[tokio::test]
async fn an_idle_connection_ends_regularly() {
    let limits = Limits { farewell: Duration::from_millis(50), ..Limits::default() };
    let world = World::limited(ClientCerts::Request, limits.clone()).await;
    let mut io = BufReader::new(encrypted(&world, "http/1.1").await);
    ask(&mut io).await;
    world.tasks.stop();
    let mut rest = vec![];
    soon("the end", io.read_to_end(&mut rest)).await.expect("an end in good order");
    world.shutdown().await;

    let world = World::limited(ClientCerts::Request, limits).await;
    let io = TokioIo::new(encrypted(&world, "h2").await);
    let begun = hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await;
    let (sender, connection) = begun.expect("HTTP/2");
    let stopping = async {
        // The connection is set up when the settings arrived.
        let mut sender = sender.clone();
        soon("settings", sender.ready()).await.expect("an open connection");
        world.tasks.stop();
    };
    // The kernel may reset a connection if the server did not read the client's acknowledgement of
    // its settings. No request is lost by that.
    let (ended, ()) = tokio::join!(soon("the end", connection), stopping);
    let is_reset = |error: &hyper::Error| {
        let cause = std::error::Error::source(error);
        let io = cause.and_then(|cause| cause.downcast_ref::<std::io::Error>());
        io.is_some_and(|io| io.kind() == std::io::ErrorKind::ConnectionReset)
    };
    assert!(ended.as_ref().err().is_none_or(is_reset), "{ended:?}");
    let sender: hyper::client::conn::http2::SendRequest<transport::Body> = sender;
    assert!(sender.is_closed(), "nothing is sent any more");
    world.shutdown().await;
}

/// `Connection: close` is a GOAWAY on HTTP/2: nothing new is sent, and requests that run go on.
#[tokio::test]
async fn an_answer_may_ask_the_client_to_leave() {
    let world = World::start(ClientCerts::Request).await;
    let io = TokioIo::new(encrypted(&world, "h2").await);
    let begun = hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await;
    let (sender, connection) = begun.expect("HTTP/2");
    let ask = |path: &str| {
        let mut sender = sender.clone();
        let uri = format!("https://localhost{path}");
        let request = http::Request::get(uri).body(transport::empty()).expect("a request");
        async move { sender.send_request(request).await.expect("an answer") }
    };
    let (slow, leave, gate) = (ask("/slow"), ask("/leave"), world.gate.clone());
    let talk = async {
        let left = async {
            world.entered.notified().await;
            let answer = soon("the last answer", leave).await;
            assert!(!answer.headers().contains_key("connection"), "HTTP/2 has no such header");
            gate.notify_one();
        };
        let (slow, ()) = tokio::join!(soon("the slow answer", slow), left);
        assert_eq!(slow.status(), http::StatusCode::OK);
    };
    // As above, the kernel may reset the connection at its end.
    let (_, ()) = tokio::join!(soon("the end", connection), talk);
    assert!(sender.is_closed(), "nothing is sent any more");
    world.shutdown().await;
}
