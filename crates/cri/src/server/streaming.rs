//! exec, attach and port-forward for other programs: a URL for one use, and an HTTP server on a loopback
//! address that connects its caller to the container.
//!
//! ```text
//! Exec ─► check, remember under a token ─► http://127.0.0.1:PORT/exec/TOKEN
//! GET of that URL ─► forget the token ─► 101, SPDY or WebSocket ─► sessions.rs
//! ```
//!
//! Invariants: a token is secret (128 random bits), works once, and for a minute; at most
//! [`WAITING`] are remembered. Nothing listens before the first of these calls.
//!
//! Upstream: `k8s.io/cri-streaming`.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::task::Tasks;
use http::{Request, Response, StatusCode};
use tokio::sync::OnceCell;
use tokio::time::Instant;
use transport::channels::{ServerSession, Streams};
use transport::{Body, Incoming, Limits, Listener, remote};

use crate::sessions::{self, InputEnd};
use crate::{
    AttachRequest, ContainerState, Error, ExecRequest, PodSandboxState, PortForwardRequest, Result,
    Runtime,
};

/// Upstream: `maxInFlight`.
const WAITING: usize = 1000;
/// Upstream: `cacheTTL`.
const LIFETIME: Duration = Duration::from_secs(60);

enum Ask {
    Exec(ExecRequest),
    Attach(AttachRequest),
    Forward(PortForwardRequest),
}

pub(super) struct Streaming {
    runtime: Arc<dyn Runtime>,
    tasks: Tasks,
    /// Set by the first call.
    address: OnceCell<SocketAddr>,
    /// By token. The lock is held briefly.
    waiting: Arc<Mutex<HashMap<String, (Instant, Ask)>>>,
}

type Refusal = (StatusCode, String);
type Answer = std::result::Result<Response<Body>, Refusal>;

impl Streaming {
    pub fn new(runtime: Arc<dyn Runtime>, tasks: Tasks) -> Self {
        Self { runtime, tasks, address: OnceCell::new(), waiting: Arc::default() }
    }

    pub async fn exec(&self, ask: ExecRequest) -> Result<String> {
        check(ask.tty, ask.stdin, ask.stdout, ask.stderr)?;
        self.must_run(&ask.container_id).await?;
        self.url("exec", Ask::Exec(ask)).await
    }

    pub async fn attach(&self, ask: AttachRequest) -> Result<String> {
        check(ask.tty, ask.stdin, ask.stdout, ask.stderr)?;
        self.must_run(&ask.container_id).await?;
        self.url("attach", Ask::Attach(ask)).await
    }

    pub async fn forward(&self, ask: PortForwardRequest) -> Result<String> {
        let status = self.runtime.pod_sandbox_status(&ask.pod_sandbox_id).await?;
        if status.state() != PodSandboxState::Ready {
            let text = format!("sandbox {:?} is not running", status.id);
            return Err(Error::FailedPrecondition(text));
        }
        self.url("portforward", Ask::Forward(ask)).await
    }

    async fn must_run(&self, container: &str) -> Result<()> {
        let status = self.runtime.container_status(container).await?;
        if status.state() == ContainerState::Running {
            return Ok(());
        }
        Err(Error::FailedPrecondition(format!("container {:?} is not running", status.id)))
    }

    async fn url(&self, kind: &str, ask: Ask) -> Result<String> {
        let address = *self.address.get_or_try_init(|| self.listen()).await?;
        let token = token()?;
        let mut waiting = self.waiting.lock().expect("no panic while held");
        waiting.retain(|_, (since, _)| since.elapsed() < LIFETIME);
        if waiting.len() >= WAITING {
            let text = "maximum number of in-flight requests exceeded";
            return Err(Error::ResourceExhausted(text.into()));
        }
        let url = format!("http://{address}/{kind}/{token}");
        waiting.insert(token, (Instant::now(), ask));
        Ok(url)
    }

    async fn listen(&self) -> Result<SocketAddr> {
        let loopback = Ipv4Addr::LOCALHOST;
        let listener = Listener::tcp((loopback, 0).into()).await.map_err(|error| {
            Error::Unavailable(format!("cannot listen on {loopback} for streams: {error}"))
        })?;
        let address = listener.local_addr();
        let address =
            address.ok_or_else(|| Error::Internal("a TCP socket has an address".into()))?;
        let connect = Connect {
            runtime: self.runtime.clone(),
            tasks: self.tasks.clone(),
            waiting: self.waiting.clone(),
        };
        let service = tower::service_fn(move |request: Request<Incoming>| {
            let answer = connect.answer(request);
            async move { Ok::<_, Infallible>(answer.unwrap_or_else(refusal)) }
        });
        let stop = self.tasks.stop_signal();
        let serving = transport::serve(listener, None, service, Limits::default(), stop);
        self.tasks.spawn_graceful("cri-streaming", serving);
        Ok(address)
    }
}

/// Upstream: `validateExecRequest`.
fn check(tty: bool, stdin: bool, stdout: bool, stderr: bool) -> Result<()> {
    let text = match (tty && stderr, stdin || stdout || stderr) {
        (true, _) => "tty and stderr cannot both be true",
        (_, false) => "one of stdin, stdout, or stderr must be set",
        _ => return Ok(()),
    };
    Err(Error::InvalidArgument(text.into()))
}

fn token() -> Result<String> {
    let mut bytes = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn refusal((code, text): Refusal) -> Response<Body> {
    let mut response = Response::new(transport::full(text));
    *response.status_mut() = code;
    response
}

/// The HTTP side.
#[derive(Clone)]
struct Connect {
    runtime: Arc<dyn Runtime>,
    tasks: Tasks,
    waiting: Arc<Mutex<HashMap<String, (Instant, Ask)>>>,
}

impl Connect {
    fn answer(&self, request: Request<Incoming>) -> Answer {
        let path = request.uri().path().trim_start_matches('/');
        let (kind, token) = path.split_once('/').unwrap_or_default();
        let found = self.waiting.lock().expect("no panic while held").remove(token);
        match (kind, found.filter(|(since, _)| since.elapsed() < LIFETIME)) {
            ("exec", Some((_, Ask::Exec(ask)))) => self.exec(request, ask),
            ("attach", Some((_, Ask::Attach(ask)))) => self.attach(request, ask),
            ("portforward", Some((_, Ask::Forward(ask)))) => self.forward(request, ask),
            _ => Err((StatusCode::NOT_FOUND, "404 page not found\n".into())),
        }
    }

    fn exec(&self, request: Request<Incoming>, ask: ExecRequest) -> Answer {
        let streams =
            Streams { stdin: ask.stdin, stdout: ask.stdout, stderr: ask.stderr, tty: ask.tty };
        let (session, pump, response) = upgrade(request, streams)?;
        let runtime = self.runtime.clone();
        self.tasks.spawn_contained("exec", async move {
            let work = async { sessions::exec(session, runtime.exec(ask).await).await };
            let _ = tokio::join!(pump, work);
        });
        Ok(response)
    }

    fn attach(&self, request: Request<Incoming>, ask: AttachRequest) -> Answer {
        let streams =
            Streams { stdin: ask.stdin, stdout: ask.stdout, stderr: ask.stderr, tty: ask.tty };
        let (session, pump, response) = upgrade(request, streams)?;
        let runtime = self.runtime.clone();
        self.tasks.spawn_contained("attach", async move {
            let work = async {
                // A backend without details keeps the input open for the next client.
                let details = runtime.container_details(&ask.container_id).await;
                let details = details.unwrap_or_default();
                let end = InputEnd::of(details.stdin_once, details.tty);
                sessions::attach(session, runtime.attach(ask).await, end).await;
            };
            let _ = tokio::join!(pump, work);
        });
        Ok(response)
    }

    fn forward(&self, mut request: Request<Incoming>, ask: PortForwardRequest) -> Answer {
        let ports = ask.port.iter().filter_map(|port| u16::try_from(*port).ok()).collect();
        let (response, accepted) = remote::accept_forward(request.headers()).map_err(handshake)?;
        let accepted = accepted.ok_or_else(no_protocol)?;
        let io = transport::server_io(&mut request);
        let (forwards, pump) = remote::forwards(accepted, io, ports);
        let (runtime, tasks) = (self.runtime.clone(), self.tasks.clone());
        let work = sessions::forward_all(runtime, ask.pod_sandbox_id, forwards, pump, tasks);
        self.tasks.spawn_contained("port-forward", work);
        Ok(response.map(|()| transport::empty()))
    }
}

type Upgraded<P> = (ServerSession, P, Response<Body>);

fn upgrade(
    mut request: Request<Incoming>,
    streams: Streams,
) -> std::result::Result<Upgraded<impl Future<Output = std::io::Result<()>> + Send + use<>>, Refusal>
{
    let (response, accepted) = remote::accept_command(request.headers()).map_err(handshake)?;
    let accepted = accepted.ok_or_else(no_protocol)?;
    let io = transport::server_io(&mut request);
    let (session, pump) = remote::command(accepted, io, streams);
    Ok((session, pump, response.map(|()| transport::empty())))
}

fn handshake(error: transport::ws::HandshakeError) -> Refusal {
    (StatusCode::BAD_REQUEST, error.to_string())
}

fn no_protocol() -> Refusal {
    (StatusCode::FORBIDDEN, "no common subprotocol".into())
}
