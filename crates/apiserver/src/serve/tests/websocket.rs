//! Watches in a WebSocket's messages, over real connections.

use std::net::SocketAddr;

use futures::StreamExt;
use http::HeaderValue;
use transport::Incoming;
use transport::ws::{self, Message, WebSocket};
use transport::{ClientOptions, HttpClient, Limits, Listener};

use super::*;

/// Serves the bench on loopback, as the admin; the query sets the Accept header (`accept=…`).
async fn listen(bench: &Bench) -> SocketAddr {
    let listener = Listener::tcp(([127, 0, 0, 1], 0).into()).await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let server = bench.server.service();
    let service = tower::service_fn(move |mut request: Request<Incoming>| {
        let query = request.uri().query().unwrap_or_default().to_owned();
        let accept = query.split('&').find_map(|pair| pair.strip_prefix("accept="));
        let headers = request.headers_mut();
        headers.insert("user", HeaderValue::from_static("admin"));
        if let Some(accept) = accept {
            headers.insert("accept", accept.parse().expect("a value"));
        }
        server.clone().oneshot(request)
    });
    let stop = bench.tasks.stop_signal();
    let serving = transport::serve(listener, None, service, Limits::default(), stop);
    bench.tasks.spawn("listener", serving);
    address
}

async fn connect(address: SocketAddr, query: &str, protocols: &[&str]) -> WebSocket {
    let server = format!("http://{address}");
    let options = ClientOptions { server, ..ClientOptions::default() };
    let client = HttpClient::new(&options).expect("a client");
    let path = format!("{MAPS}?watch=true&{query}");
    let connected = ws::connect(&client, &path, protocols).await;
    let (socket, chosen) = connected.unwrap_or_else(|error| panic!("{path}: {error}"));
    assert_eq!(chosen, protocols.first().copied().unwrap_or_default());
    socket
}

async fn next(socket: &mut WebSocket) -> Message {
    let message = testkit::wait::soon("a message", socket.next()).await;
    message.expect("a message").expect("no error")
}

#[tokio::test]
async fn watches_are_sent_in_messages() {
    let bench = Bench::new();
    let address = listen(&bench).await;
    bench.create_config_map("x").await;
    for protocols in [&[][..], &["any"]] {
        let mut socket = connect(address, "", protocols).await;
        let Message::Text(text) = next(&mut socket).await else { panic!("JSON is text") };
        let event: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((&event["type"], &event["object"]["data"]["a"]), (&json!("ADDED"), &json!("b")));
        bench.ask(&format!("PATCH {MAPS}/x"), json!({ "data": { "a": "c" } })).await;
        let Message::Text(text) = next(&mut socket).await else { panic!("JSON is text") };
        let event: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(event["type"], "MODIFIED");
        bench.ask(&format!("PATCH {MAPS}/x"), json!({ "data": { "a": "b" } })).await;
    }
    // The length prefix of a frame is for HTTP only.
    let mut socket = connect(address, &format!("accept={PROTOBUF};stream=watch"), &[]).await;
    let Message::Binary(frame) = next(&mut socket).await else { panic!("protobuf is binary") };
    assert_eq!(&frame[..7], b"\n\x05ADDED");
    // A watch whose time is up ends with a close frame, like one that ends with the server.
    let mut timed = connect(address, "timeoutSeconds=1", &[]).await;
    next(&mut timed).await;
    assert!(matches!(next(&mut timed).await, Message::Close(Some(_))));
    bench.server.begin_shutdown();
    assert!(matches!(next(&mut socket).await, Message::Close(Some(_))));
    drop((socket, timed));
    bench.end().await;
}

#[tokio::test]
async fn several_subprotocols_are_refused() {
    let bench = Bench::new();
    let address = listen(&bench).await;
    let options = ClientOptions { server: format!("http://{address}"), ..Default::default() };
    let client = HttpClient::new(&options).expect("a client");
    let refused = ws::connect(&client, &format!("{MAPS}?watch=true"), &["a", "b"]).await;
    let Err(ws::HandshakeError::Refused(answer)) = refused else { panic!("it is refused") };
    assert_eq!(answer.status(), 400);
    bench.end().await;
}
