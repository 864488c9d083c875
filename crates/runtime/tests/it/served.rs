//! Backends behind the CRI socket, asked by the remote backend: both halves of the protocol at once.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base::task::Tasks;
use cri::*;
use decapod_runtime::Fake;
use decapod_runtime::backend::remote::{Endpoints, Remote};
use testkit::wait::{LONG, found, soon};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::world::{container, in_world, sh};

/// A served backend, and a client of its socket.
struct Served {
    socket: PathBuf,
    remote: Remote,
    server: Tasks,
    client: Tasks,
}

impl Served {
    async fn start(runtime: Arc<dyn Runtime>, directory: &Path) -> Self {
        let socket = directory.join("cri.sock");
        let (server, client) = (Tasks::new("server"), Tasks::new("client"));
        let serving = cri::server::serve(runtime, socket.clone(), server.stop_signal());
        server.spawn_graceful("cri", async { serving.await.expect("serves") });
        let runtime = socket.display().to_string();
        let endpoints = Endpoints { runtime, images: None, timeout: LONG };
        let remote =
            found("it answers", async || Remote::open(&endpoints, client.clone()).await.ok()).await;
        Self { socket, remote, server, client }
    }

    async fn end(self) {
        self.client.shutdown(LONG).await;
        self.server.shutdown(LONG).await;
        assert!(!self.socket.exists(), "the socket goes with its server");
    }
}

fn pod(name: &str) -> PodSandboxConfig {
    let metadata = PodSandboxMetadata { name: name.into(), uid: "u".into(), ..Default::default() };
    PodSandboxConfig { metadata: Some(metadata), ..Default::default() }
}

#[tokio::test]
async fn a_served_backend_answers_as_itself() {
    let directory = tempfile::tempdir().expect("a directory");
    let fake = Fake::new();
    let served = Served::start(Arc::new(fake.clone()), directory.path()).await;
    let (there, here) = (&served.remote, &fake);
    assert_eq!(there.version().await, here.version().await);
    assert_eq!(there.status(true).await, here.status(true).await);
    assert_eq!(there.runtime_config().await, here.runtime_config().await);

    let mut events = there.events().await.expect("events");
    let sandbox = there.run_pod_sandbox(pod("p"), "").await.expect("runs");
    assert_eq!(there.list_pod_sandbox(None).await, here.list_pod_sandbox(None).await);
    assert_eq!(there.pod_sandbox_status(&sandbox).await, here.pod_sandbox_status(&sandbox).await);
    let config = ContainerConfig {
        metadata: Some(ContainerMetadata { name: "c".into(), attempt: 0 }),
        image: Some(ImageSpec::named("busybox")),
        ..Default::default()
    };
    let id = there.create_container(&sandbox, config, &pod("p")).await.expect("created");
    there.start_container(&id).await.expect("started");
    let status = there.container_status(&id).await;
    assert_eq!(status, here.container_status(&id).await);
    assert_eq!(status.expect("there").state(), ContainerState::Running);
    let started = async {
        while let Ok(event) = events.recv().await {
            let kind = event.container_event_type();
            if event.container_id == id && kind == ContainerEventType::Started {
                return;
            }
        }
        panic!("the events ended");
    };
    soon("the event comes", started).await;
    fake.set_exec(7, "out");
    let done = there.exec_sync(&id, vec!["x".into()], None).await.expect("runs");
    assert_eq!((done.exit_code, &done.stdout[..]), (7, &b"out"[..]));
    assert_eq!(there.list_images(None).await, here.list_images(None).await);

    let group =
        LinuxContainerSecurityContext { run_as_group: Some(7.into()), ..Default::default() };
    let linux = LinuxContainerConfig { security_context: Some(group), ..Default::default() };
    let config = ContainerConfig { linux: Some(linux), ..Default::default() };
    let refused = there.create_container(&sandbox, config, &pod("p")).await;
    let text = refused.expect_err("refused").to_string();
    assert_eq!(text, "user group 7 is specified without user");

    let missing = there.container_status("none").await;
    assert_eq!(missing, here.container_status("none").await);
    assert!(missing.expect_err("it is missing").is_not_found());
    there.remove_pod_sandbox(&sandbox).await.expect("removed");
    assert_eq!(here.list_pod_sandbox(None).await, Ok(vec![]));

    let mode = std::fs::metadata(&served.socket).expect("a socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let stop = served.server.stop_signal();
    let second = cri::server::serve(Arc::new(fake.clone()), served.socket.clone(), stop).await;
    let error = second.expect_err("the first one lives").to_string();
    assert!(error.contains("another process serves"), "{error}");
    served.end().await;
}

#[test]
fn exec_attach_and_forward_pass_through_the_streaming_server() {
    in_world(|world| async move {
        let links = net::Links::open().expect("netlink");
        links.set_loopback_up().await.expect("the loopback device");
        let served = Served::start(Arc::new(world.runtime.clone()), &world.directory).await;
        let script = "while read line; do echo got $line; done";
        let config = ContainerConfig { stdin: true, ..container("c", script) };
        let (sandbox, id) = world.run("streams", config).await;
        let ask = ExecRequest {
            container_id: id.clone(),
            cmd: sh("cat; echo err >&2; exit 9"),
            stdin: true,
            stdout: true,
            stderr: true,
            tty: false,
        };
        let streams = served.remote.exec(ask.clone()).await.expect("exec");
        let mut stdin = streams.stdin.expect("stdin");
        stdin.write_all(b"hello").await.expect("written");
        stdin.shutdown().await.expect("closed");
        let (mut out, mut err) = (String::new(), String::new());
        let mut stdout = streams.stdout.expect("stdout");
        let mut stderr = streams.stderr.expect("stderr");
        soon("stdout ends", stdout.read_to_string(&mut out)).await.expect("read");
        soon("stderr ends", stderr.read_to_string(&mut err)).await.expect("read");
        assert_eq!((out.as_str(), err.as_str()), ("hello", "err\n"));
        assert_eq!(streams.exit.await.expect("told"), Ok(9));

        let terminal = ExecRequest { tty: true, ..ask.clone() };
        let refused = served.remote.exec(terminal).await.err().expect("refused");
        assert_eq!(refused.to_string(), "tty and stderr cannot both be true");

        let ask = AttachRequest {
            container_id: id.clone(),
            stdin: true,
            stdout: true,
            ..Default::default()
        };
        let attached = served.remote.attach(ask).await.expect("attached");
        let mut stdin = attached.stdin.expect("stdin");
        let mut stdout = attached.stdout.expect("stdout");
        stdin.write_all(b"line\n").await.expect("written");
        let mut heard = [0; 9];
        soon("the container answers", stdout.read_exact(&mut heard)).await.expect("read");
        assert_eq!(&heard, b"got line\n");

        let listen = "while true; do echo hello | nc -l -p 8000; done &";
        world.exec(&id, listen).await;
        let text = found("the port answers", async || {
            let mut io = served.remote.port_forward(&sandbox, 8000).await.ok()?;
            let mut text = String::new();
            io.read_to_string(&mut text).await.ok()?;
            (!text.is_empty()).then_some(text)
        });
        assert_eq!(text.await, "hello\n");
        served.end().await;
        world.runtime.remove_pod_sandbox(&sandbox).await.expect("removed");
        world.tasks.shutdown(LONG).await;
    });
}

/// A URL of the streaming server works once.
#[tokio::test]
async fn a_url_works_once() {
    let directory = tempfile::tempdir().expect("a directory");
    let fake = Fake::new();
    let served = Served::start(Arc::new(fake.clone()), directory.path()).await;
    let sandbox = fake.run_pod_sandbox(pod("p"), "").await.expect("runs");
    let ask = PortForwardRequest { pod_sandbox_id: sandbox, port: vec![80] };
    let url = url(&served.socket, ask).await;
    let (address, path) = url.trim_start_matches("http://").split_once('/').expect("a path");
    let get = async |path: &str| {
        let mut stream = tokio::net::TcpStream::connect(address).await.expect("listens");
        let request = format!(
            "GET /{path} HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
             X-Stream-Protocol-Version: portforward.k8s.io\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut head = [0; 12];
        stream.read_exact(&mut head).await.expect("an answer");
        String::from_utf8_lossy(&head).into_owned()
    };
    assert_eq!(get("portforward/0123").await, "HTTP/1.1 404");
    assert_eq!(get(path).await, "HTTP/1.1 101");
    assert_eq!(get(path).await, "HTTP/1.1 404");
    served.end().await;
}

/// Asks for a port-forward by gRPC, without following the URL.
async fn url(socket: &Path, ask: PortForwardRequest) -> String {
    let endpoint = format!("unix://{}", socket.display());
    let channel = tonic::transport::Endpoint::from_shared(endpoint).expect("an endpoint");
    let channel = channel.origin(http::Uri::from_static("http://localhost")).connect_lazy();
    let mut grpc = tonic::client::Grpc::new(channel);
    grpc.ready().await.expect("connected");
    let path = http::uri::PathAndQuery::from_static("/runtime.v1.RuntimeService/PortForward");
    let codec = tonic_prost::ProstCodec::<PortForwardRequest, PortForwardResponse>::default();
    let answer = grpc.unary(tonic::Request::new(ask), path, codec).await.expect("an answer");
    answer.into_inner().url
}
