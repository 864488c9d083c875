//! Server and client against each other over real sockets.

mod support;

use decapod_transport as transport;

use std::time::Duration;

use bytes::Bytes;
use decapod_transport::tls::ClientCerts;
use decapod_transport::{Body, ConnectionInfo, HttpClient, Listener, Upgrade};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use support::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::test]
async fn a_client_certificate_reaches_the_service_over_h2() {
    let world = World::start(ClientCerts::Request).await;
    let client = HttpClient::new(&world.options("jane", true)).expect("a client");
    let request = Request::get("/whoami").body(transport::empty()).expect("a request");
    let response = client.request(request).await.expect("answers");
    assert_eq!(response.version(), http::Version::HTTP_2);
    assert_eq!(text(response).await, "jane");
    world.shutdown().await;
}

#[tokio::test]
async fn without_a_certificate_the_client_is_nobody() {
    let world = World::start(ClientCerts::Request).await;
    let client = HttpClient::new(&world.options("", false)).expect("a client");
    assert_eq!(get(&client, "/whoami").await, "nobody");
    world.shutdown().await;
}

#[tokio::test]
async fn a_strangers_certificate_is_refused_only_where_chains_are_verified() {
    let other = World::start(ClientCerts::Ignore).await;
    let asking = World::start(ClientCerts::Request).await;
    let mut options = asking.options("mallory", true);
    let strange = other.options("mallory", true);
    (options.cert_pem, options.key_pem) = (strange.cert_pem.clone(), strange.key_pem.clone());
    let client = HttpClient::new(&options).expect("a client");
    assert_eq!(get(&client, "/whoami").await, "mallory");

    let strict = World::start_strict().await;
    let good = HttpClient::new(&strict.options("jane", true)).expect("a client");
    assert_eq!(get(&good, "/whoami").await, "jane");
    let mut options = strict.options("mallory", true);
    (options.cert_pem, options.key_pem) = (strange.cert_pem, strange.key_pem);
    let client = HttpClient::new(&options).expect("a client");
    let request = Request::get("/whoami").body(transport::empty()).expect("a request");
    assert!(client.request(request).await.is_err());
    for world in [other, asking, strict] {
        world.shutdown().await;
    }
}

#[tokio::test]
async fn an_unknown_authority_is_not_trusted() {
    let world = World::start(ClientCerts::Ignore).await;
    let other = World::start(ClientCerts::Ignore).await;
    let mut options = world.options("", false);
    options.ca_pem = other.options("", false).ca_pem;
    let client = HttpClient::new(&options).expect("a client");
    let request = Request::get("/whoami").body(transport::empty()).expect("a request");
    let error = client.request(request).await.expect_err("refused");
    assert!(error.is_connect() && error.to_string().contains("certificate"), "{error}");
    options.insecure = true;
    let client = HttpClient::new(&options).expect("a client");
    assert_eq!(get(&client, "/whoami").await, "nobody");
    world.shutdown().await;
    other.shutdown().await;
}

#[tokio::test]
async fn certificates_rotate_without_a_restart() {
    let world = World::start(ClientCerts::Request).await;
    let client = HttpClient::new(&world.options("jane", true)).expect("a client");
    assert_eq!(get(&client, "/whoami").await, "jane");
    client.replace_tls(&world.options("june", true)).expect("new settings");
    assert_eq!(get(&client, "/whoami").await, "june");
    world.replace_authority();
    assert_eq!(get(&client, "/whoami").await, "june", "the open connection goes on");
    let fresh = HttpClient::new(&world.options("jane", true)).expect("a client");
    let request = Request::get("/whoami").body(transport::empty()).expect("a request");
    assert!(fresh.request(request).await.is_err(), "the old authority is gone");
    world.shutdown().await;
}

#[tokio::test]
async fn a_drain_lets_requests_finish() {
    let world = World::start(ClientCerts::Ignore).await;
    let client = HttpClient::new(&world.options("", false)).expect("a client");
    let gate = world.gate.clone();
    let slow = {
        let client = client.clone();
        async move { get(&client, "/slow").await }
    };
    let stop = async {
        world.entered.notified().await;
        world.tasks.stop();
        gate.notify_one();
    };
    let (answer, ()) = tokio::join!(slow, stop);
    assert_eq!(answer, "slow");
    world.shutdown().await;
}

#[tokio::test]
async fn a_unix_socket_serves_plain_http() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let path = root.path().join("s.sock");
    for _ in 0..2 {
        // The second time the first one's file lies there.
        let listener = Listener::unix(&path).expect("binds");
        let world = World::plain(listener).await;
        let options = transport::ClientOptions {
            server: format!("unix://{}", path.display()),
            ..Default::default()
        };
        let client = HttpClient::new(&options).expect("a client");
        assert_eq!(get(&client, "/whoami?x=1").await, "nobody");
        world.shutdown().await;
    }
}

#[tokio::test]
async fn an_upgrade_becomes_a_raw_stream_and_a_refusal_has_a_body() {
    let world = World::start(ClientCerts::Request).await;
    let client = HttpClient::new(&world.options("jane", true)).expect("a client");
    let ask = |path: &str| {
        Request::post(path)
            .header("connection", "Upgrade")
            .header("upgrade", "echo")
            .body(transport::empty())
            .expect("a request")
    };
    let Upgrade::Switched(parts, mut io) = client.upgrade(ask("/upgrade")).await.expect("answers")
    else {
        panic!("it was refused");
    };
    assert_eq!(parts.headers["upgrade"], "echo");
    io.write_all(b"over and out").await.expect("writes");
    let mut buffer = [0; 12];
    io.read_exact(&mut buffer).await.expect("reads");
    assert_eq!(&buffer, b"over and out");
    drop(io);

    let Upgrade::Refused(response) = client.upgrade(ask("/no")).await.expect("answers") else {
        panic!("it was accepted");
    };
    assert_eq!(response.status(), StatusCode::NOT_FOUND);
    assert_eq!(response.body(), &Bytes::from_static(b"no such page"));
    world.shutdown().await;
}

#[tokio::test]
async fn a_websocket_carries_a_command() {
    let world = World::start(ClientCerts::Request).await;
    let client = HttpClient::new(&world.options("jane", true)).expect("a client");
    let (socket, protocol) =
        transport::ws::connect(&client, "/exec", transport::channels::CLIENT_PROTOCOLS)
            .await
            .expect("a WebSocket");
    assert_eq!(protocol, "v5.channel.k8s.io");
    let streams = transport::channels::Streams { stdin: true, stdout: true, ..Default::default() };
    let (mut session, pump) = transport::channels::client(socket, &protocol, streams);
    let talk = async move {
        let mut stdin = session.stdin.take().expect("wanted");
        stdin.write_all(b"hello").await.expect("writes");
        drop(stdin);
        let mut out = String::new();
        let mut stdout = session.stdout.take().expect("wanted");
        stdout.read_to_string(&mut out).await.expect("reads");
        (out, session.status.await.expect("a status"))
    };
    let both = async { tokio::join!(talk, pump) };
    let ((out, status), pumped) =
        tokio::time::timeout(Duration::from_secs(20), both).await.expect("ends in time");
    pumped.expect("ends well");
    assert_eq!((out.as_str(), status.as_slice()), ("hello", &b"done"[..]));
    world.shutdown().await;
}

/// The service of the tests.
async fn answer(
    mut request: Request<Incoming>,
    world: Shared,
) -> Result<Response<Body>, std::convert::Infallible> {
    let info = request.extensions().get::<ConnectionInfo>().cloned().expect("always there");
    let path = request.uri().path().to_owned();
    Ok(match path.as_str() {
        "/whoami" => Response::new(transport::full(user(&info))),
        "/slow" => {
            world.entered.notify_one();
            world.gate.notified().await;
            Response::new(transport::full("slow"))
        }
        "/upgrade" => {
            let io = transport::server_io(&mut request);
            world.tasks.spawn_graceful("echo", async move {
                let (mut reader, mut writer) = tokio::io::split(io.await.expect("switches"));
                // An error means that the client is gone, which ends the test's stream.
                let _ = tokio::io::copy(&mut reader, &mut writer).await;
            });
            Response::builder()
                .status(StatusCode::SWITCHING_PROTOCOLS)
                .header("connection", "Upgrade")
                .header("upgrade", "echo")
                .body(transport::empty())
                .expect("a response")
        }
        "/exec" => exec(request, &world),
        _ => Response::builder()
            .status(StatusCode::NOT_FOUND)
            .body(transport::full("no such page"))
            .expect("a response"),
    })
}

/// A `cat` over the remote command protocol.
fn exec(mut request: Request<Incoming>, world: &Shared) -> Response<Body> {
    let protocols = transport::channels::PROTOCOLS;
    let (response, protocol) =
        transport::ws::accept(request.headers(), protocols).expect("a handshake");
    let io = transport::server_io(&mut request);
    world.tasks.spawn_graceful("exec", async move {
        let socket = transport::ws::server(io.await.expect("switches")).await;
        let streams =
            transport::channels::Streams { stdin: true, stdout: true, ..Default::default() };
        let (mut session, pump) = transport::channels::server(socket, protocol, streams);
        let cat = async move {
            let mut stdin = session.stdin.take().expect("wanted");
            let mut stdout = session.stdout.take().expect("wanted");
            tokio::io::copy(&mut stdin, &mut stdout).await.expect("copies");
            drop(stdout);
            session.status.send(b"done".to_vec()).expect("the pump listens");
        };
        let ((), pumped) = tokio::join!(cat, pump);
        pumped.expect("ends well");
    });
    response.map(|()| transport::empty())
}

async fn text(response: Response<Incoming>) -> String {
    let bytes = response.into_body().collect().await.expect("a body").to_bytes();
    String::from_utf8(bytes.to_vec()).expect("text")
}

async fn get(client: &HttpClient, path: &str) -> String {
    let request = Request::get(path).body(transport::empty()).expect("a request");
    let response = client.request(request).await.unwrap_or_else(|error| panic!("{path}: {error}"));
    text(response).await
}
