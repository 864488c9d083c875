//! Server and client against each other over real sockets.

mod early;
mod hostile;
mod stopping;
mod support;

use decapod_transport as transport;

use bytes::Bytes;
use decapod_transport::channels::Streams;
use decapod_transport::spdy;
use decapod_transport::tls::ClientCerts;
use decapod_transport::{
    Body, ConnectionInfo, HttpClient, Incoming, Listener, Upgrade, UpgradedIo,
};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
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
async fn without_a_certificate_the_client_is_anonymous() {
    let world = World::start(ClientCerts::Request).await;
    let client = HttpClient::new(&world.options("", false)).expect("a client");
    assert_eq!(get(&client, "/whoami").await, "nobody");
    world.shutdown().await;
}

#[tokio::test]
async fn an_unknown_certificate_is_refused_only_where_chains_are_verified() {
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
        // The second time, the socket file of the first server still exists.
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

/// gRPC's client for Go sends the path as the authority when it has a dialer for the socket.
#[tokio::test]
async fn a_unix_socket_accepts_its_path_as_authority() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let path = root.path().join("s.sock");
    let world = World::plain(Listener::unix(&path).expect("binds")).await;
    let mut stream = tokio::net::UnixStream::connect(&path).await.expect("connects");
    let block = b"\x82\x86\x44\x0b/whoami?x=1\x41\x0f%2Frun%2Fx.sock";
    let head = [0, 0, block.len() as u8, 1, 0x5, 0, 0, 0, 1];
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice();
    let all = [preface, &settings, &head, block].concat();
    stream.write_all(&all).await.expect("sent");
    let kind = loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.expect("a frame");
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; length as usize];
        stream.read_exact(&mut payload).await.expect("its payload");
        if head[8] == 1 {
            break head[3];
        }
    };
    assert_eq!(kind, 1, "an answer, not the stream's end");
    drop(stream);
    world.shutdown().await;
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
    let ((out, status), pumped) = testkit::wait::soon("both ends end", both).await;
    pumped.expect("ends well");
    assert_eq!((out.as_str(), status.as_slice()), ("hello", &b"done"[..]));
    world.shutdown().await;
}

/// All output of a command for one input, and its status.
async fn spdy_cat(io: UpgradedIo, input: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let (session, driver) = spdy::session(io, spdy::Role::Client);
    let talk = async move {
        let open = async |kind: &str| {
            let headers = vec![("streamtype".to_owned(), kind.to_owned())];
            session.open(headers).await.expect("opens").into_inner()
        };
        let (mut error, _) = open("error").await;
        let (_, mut stdin) = open("stdin").await;
        let (mut stdout, _) = open("stdout").await;
        let write = async {
            stdin.write_all(input).await.expect("writes");
            drop(stdin);
        };
        let (mut out, mut status) = (vec![], vec![]);
        let ((), read) = tokio::join!(write, stdout.read_to_end(&mut out));
        read.expect("reads");
        error.read_to_end(&mut status).await.expect("reads");
        (out, status)
    };
    let both = async { tokio::join!(talk, driver) };
    let (got, driven) = testkit::wait::soon("both ends end", both).await;
    driven.expect("ends well");
    got
}

#[tokio::test]
async fn spdy_carries_a_command() {
    let world = World::start(ClientCerts::Request).await;
    let client = HttpClient::new(&world.options("jane", true)).expect("a client");
    let check = async |protocol: &str, status: &[u8]| {
        let request = Request::post("/exec")
            .header("connection", "Upgrade")
            .header("upgrade", "SPDY/3.1")
            .header("x-stream-protocol-version", protocol)
            .body(transport::empty())
            .expect("a request");
        match client.upgrade(request).await.expect("answers") {
            Upgrade::Switched(parts, io) => {
                assert_eq!(parts.headers["x-stream-protocol-version"], protocol);
                let input = b"all that is said".repeat(10_000);
                assert_eq!(spdy_cat(io, &input).await, (input, status.to_vec()));
            }
            Upgrade::Refused(response) => {
                assert_eq!((response.status().as_u16(), status), (403, &b"403"[..]));
            }
        }
    };
    check("v4.channel.k8s.io", b"done").await;
    check("v9.channel.k8s.io", b"403").await;
    world.shutdown().await;
}

#[tokio::test]
async fn streaming_clients_work_with_spdy_servers() {
    use transport::channels::Streams;
    use transport::streaming;
    let world = World::start(ClientCerts::Request).await;
    let client = HttpClient::new(&world.options("jane", true)).expect("a client");
    let (session, driver) = streaming::connect_command(&client, "/exec").await.expect("connects");
    let talk = async move {
        let streams = Streams { stdin: true, stdout: true, ..Streams::default() };
        let command = streaming::open_command(&session, streams).await.expect("opens");
        let streaming::Command { stdin, stdout, stderr, resize, mut error } = command;
        assert!(stderr.is_none() && resize.is_none());
        let (mut stdin, mut stdout) = (stdin.expect("asked for"), stdout.expect("asked for"));
        let write = async {
            stdin.write_all(b"hello").await.expect("writes");
            stdin.shutdown().await.expect("ends");
        };
        let (mut out, mut status) = (String::new(), String::new());
        let ((), read) = tokio::join!(write, stdout.read_to_string(&mut out));
        read.expect("reads");
        error.read_to_string(&mut status).await.expect("reads");
        (out, status)
    };
    let both = async { tokio::join!(talk, driver) };
    let (said, driven) = testkit::wait::soon("both ends end", both).await;
    driven.expect("ends well");
    assert_eq!(said, ("hello".to_owned(), "done".to_owned()));
    match streaming::connect_command(&client, "/nowhere").await {
        Err(streaming::Error::Refused(_)) => {}
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("there is no such path"),
    }
    world.shutdown().await;
}

#[tokio::test]
async fn ports_are_forwarded_over_spdy_in_a_websocket() {
    let world = World::start(ClientCerts::Request).await;
    let client = HttpClient::new(&world.options("jane", true)).expect("a client");
    let protocol = transport::remote::FORWARD_PROTOCOL;
    let (socket, chosen) =
        transport::ws::connect(&client, "/portforward", &[protocol]).await.expect("a WebSocket");
    assert_eq!(chosen, protocol);
    let tunnel = transport::ws::Tunnel::new(socket);
    let (session, driver) = spdy::session(tunnel, spdy::Role::Client);
    let talk = async move {
        for request in 0..20 {
            let port = if request == 7 { 1 } else { 8080 };
            let (data, mut error) =
                transport::remote::open_forward(&session, port, request).await.expect("opens");
            let (mut reader, mut writer) = data.into_inner();
            let said = format!("connection {request}").repeat(1000);
            let (mut heard, mut text) = (String::new(), String::new());
            if port != 1 {
                writer.write_all(said.as_bytes()).await.expect("writes");
                drop(writer);
                reader.read_to_string(&mut heard).await.expect("reads");
                assert_eq!(heard, said);
            }
            error.read_to_string(&mut text).await.expect("reads");
            assert_eq!(text, if port == 1 { "refused" } else { "" });
        }
        drop(session);
    };
    let both = async { tokio::join!(talk, driver) };
    let ((), driven) = testkit::wait::soon("both ends end", both).await;
    driven.expect("ends well");
    world.shutdown().await;
}

/// Messages of both subprotocols, and of no subprotocol, which means binary.
#[tokio::test]
async fn ports_are_forwarded_over_websocket_channels() {
    use futures::{SinkExt, StreamExt};
    use transport::ws::Message;
    let world = World::start(ClientCerts::Request).await;
    let client = HttpClient::new(&world.options("jane", true)).expect("a client");
    let check = async |protocols: &[&str], ports: [Message; 2], said: [Message; 2]| {
        let path = "/portforward?port=80";
        let (mut socket, chosen) =
            transport::ws::connect(&client, path, protocols).await.expect("a WebSocket");
        assert_eq!(chosen, protocols.first().copied().unwrap_or_default());
        let mut next = async || socket.next().await.expect("a message").expect("no error");
        assert_eq!([next().await, next().await], ports, "{protocols:?}");
        let [hello, echo] = said;
        socket.send(hello).await.expect("sends");
        assert_eq!(socket.next().await.expect("a message").expect("no error"), echo);
    };
    let binary = |text: &'static [u8]| Message::Binary(Bytes::from_static(text));
    for protocols in [&["v4.channel.k8s.io"][..], &[]] {
        let ports = [binary(&[0, 80, 0]), binary(&[1, 80, 0])];
        check(protocols, ports, [binary(b"\0hello"), binary(b"\0hello")]).await;
    }
    let ports = [Message::text("0UAA="), Message::text("1UAA=")];
    let hello = || Message::text("0aGVsbG8=");
    check(&["v4.base64.channel.k8s.io"], ports, [hello(), hello()]).await;
    world.shutdown().await;
}

/// The pod's side closes: the client reads the remaining data, then a Close.
#[tokio::test]
async fn a_websocket_ends_with_the_forwarded_connection() {
    use futures::StreamExt;
    use transport::ws::Message;
    let world = World::start(ClientCerts::Request).await;
    let client = HttpClient::new(&world.options("jane", true)).expect("a client");
    let (mut socket, _) =
        transport::ws::connect(&client, "/portforward?port=2", &[]).await.expect("a WebSocket");
    let all = async {
        let mut heard = vec![];
        let mut is_well = false;
        while let Some(Ok(message)) = socket.next().await {
            match message {
                Message::Close(_) => is_well = true,
                message => heard.push(message.into_data().to_vec()),
            }
        }
        (heard, is_well)
    };
    let (heard, is_well) = testkit::wait::soon("the farewell", all).await;
    assert!(is_well);
    assert_eq!(heard[..2], [[0, 2, 0], [1, 2, 0]]);
    assert_eq!(heard[2..].concat(), b"\0farewell");
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
        "/leave" => {
            let mut response = Response::new(transport::full("bye"));
            let close = http::HeaderValue::from_static("close");
            response.headers_mut().insert(http::header::CONNECTION, close);
            response
        }
        "/slow" => {
            world.entered.notify_one();
            world.gate.notified().await;
            Response::new(transport::full("slow"))
        }
        "/upgrade" => {
            let io = transport::server_io(&mut request);
            world.tasks.spawn_graceful("echo", async move {
                let (mut reader, mut writer) = tokio::io::split(io.await.expect("switches"));
                // An error means that the client is gone, which ends the stream.
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
        "/portforward" => forward(request, &world),
        _ => Response::builder()
            .status(StatusCode::NOT_FOUND)
            .body(transport::full("no such page"))
            .expect("a response"),
    })
}

/// A `cat` over the remote command protocol.
fn exec(mut request: Request<Incoming>, world: &Shared) -> Response<Body> {
    let (response, accepted) =
        transport::remote::accept_command(request.headers()).expect("a handshake");
    let Some(accepted) = accepted else { return response.map(|()| transport::empty()) };
    let io = transport::server_io(&mut request);
    world.tasks.spawn_graceful("exec", async move {
        let streams = Streams { stdin: true, stdout: true, ..Default::default() };
        let (mut session, pump) = transport::remote::command(accepted, io, streams);
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

/// A pod whose ports echo, except port 1, which refuses, and port 2, which sends a text and closes.
fn forward(mut request: Request<Incoming>, world: &Shared) -> Response<Body> {
    let (response, accepted) =
        transport::remote::accept_forward(request.headers()).expect("a handshake");
    let Some(accepted) = accepted else { return response.map(|()| transport::empty()) };
    let io = transport::server_io(&mut request);
    let tasks = world.tasks.clone();
    let query = request.uri().query().unwrap_or_default();
    let ports = query.strip_prefix("port=").and_then(|port| port.parse().ok());
    let ports: Vec<u16> = ports.into_iter().collect();
    world.tasks.spawn_graceful("forward", async move {
        let (mut forwards, pump) = transport::remote::forwards(accepted, io, ports);
        let serve = async move {
            while let Some(mut forward) = forwards.recv().await {
                tasks.spawn_graceful("connection", async move {
                    if forward.port == 1 {
                        forward.error.write_all(b"refused").await.expect("writes");
                        return;
                    }
                    if forward.port == 2 {
                        forward.data.write_all(b"farewell").await.expect("writes");
                        return;
                    }
                    let (mut reader, mut writer) = forward.data.into_inner();
                    tokio::io::copy(&mut reader, &mut writer).await.expect("echoes");
                });
            }
        };
        // The client may leave in the middle: that is how port-forwards end.
        let _ = tokio::join!(serve, pump);
    });
    response.map(|()| transport::empty())
}

async fn text(response: Response<hyper::body::Incoming>) -> String {
    let bytes = response.into_body().collect().await.expect("a body").to_bytes();
    String::from_utf8(bytes.to_vec()).expect("text")
}

async fn get(client: &HttpClient, path: &str) -> String {
    try_get(client, path).await.unwrap_or_else(|error| panic!("{path}: {error}"))
}

async fn try_get(client: &HttpClient, path: &str) -> Result<String, transport::BoxError> {
    let request = Request::get(path).body(transport::empty()).expect("a request");
    let body = client.request(request).await?.into_body().collect().await?.to_bytes();
    Ok(String::from_utf8(body.to_vec())?)
}
