//! One check of a container: HTTP, TCP, gRPC, or a command in it. Probes and lifecycle hooks share
//! these.
//!
//! In: the handler of the spec, the pod's address, a timeout. Out: [`Outcome`] with the text that
//! events show. Upstream: `pkg/probe/{http,tcp,grpc,exec}`.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderName, HeaderValue, Request, header};
use http_body_util::{BodyExt, Empty, Full, Limited};
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::api::core::v1::{Container, ExecAction, HTTPGetAction};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::Instant;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Success,
    /// The check ran and failed.
    Failure(String),
    /// The check could not run.
    Error(String),
}

/// Why a check has no result.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Problem {
    #[error("dial tcp {address}: {why}")]
    Unreachable { address: String, why: String },
    #[error("context deadline exceeded (Client.Timeout exceeded while awaiting headers)")]
    Late,
    #[error("{0}")]
    Other(String),
}

impl From<String> for Problem {
    fn from(why: String) -> Self {
        Self::Other(why)
    }
}

/// Upstream: how much of a response or output events keep.
const SHOWN_BYTES: usize = 10 << 10;
const BODY_LIMIT: usize = 1 << 20;
/// The header before each gRPC message.
const FRAME_HEADER: usize = 5;

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// Why an action has no port to connect to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PortError {
    #[error("strconv.Atoi: parsing {0:?}: invalid syntax")]
    Name(String),
    #[error("invalid port number: {0}")]
    Number(i64),
}

/// A port by number or by name.
pub fn port_of(port: &IntOrString, container: &Container) -> Result<u16, PortError> {
    let number = match port {
        IntOrString::Int(number) => i64::from(*number),
        IntOrString::String(name) => {
            let ports = container.ports.iter().flatten();
            match ports.clone().find(|p| p.name.as_deref() == Some(name.as_str())) {
                Some(port) => i64::from(port.container_port),
                None => name.parse().map_err(|_| PortError::Name(name.clone()))?,
            }
        }
    };
    let port = u16::try_from(number).ok().filter(|port| *port > 0);
    port.ok_or(PortError::Number(number))
}

pub async fn exec(
    runtime: &dyn cri::Runtime,
    container_id: &str,
    action: &ExecAction,
    limit: Option<Duration>,
) -> Outcome {
    let command = action.command.clone().unwrap_or_default();
    match runtime.exec_sync(container_id, command.clone(), limit).await {
        Ok(done) if done.exit_code == 0 => Outcome::Success,
        Ok(done) => {
            let mut output = done.stdout.to_vec();
            output.extend_from_slice(&done.stderr);
            output.truncate(SHOWN_BYTES);
            Outcome::Failure(String::from_utf8_lossy(&output).into_owned())
        }
        Err(cri::Error::DeadlineExceeded(_)) => {
            let after = base::duration::show(limit.unwrap_or_default());
            Outcome::Failure(format!(
                "command timed out: {:?} timed out after {after}",
                command.join(" ")
            ))
        }
        Err(error) => Outcome::Error(error.to_string()),
    }
}

pub async fn tcp(host: &str, port: u16, limit: Duration) -> Outcome {
    match within(limit, connect(host, port)).await {
        Ok(_) => Outcome::Success,
        Err(Problem::Late) => {
            Outcome::Failure(format!("dial tcp {}: i/o timeout", joined(host, port)))
        }
        Err(problem) => Outcome::Failure(problem.to_string()),
    }
}

async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, Problem>>,
) -> Result<T, Problem> {
    tokio::time::timeout(limit, work).await.unwrap_or(Err(Problem::Late))
}

/// `host:port` in Go's form.
fn joined(host: &str, port: u16) -> String {
    match host.parse::<IpAddr>() {
        Ok(ip) => SocketAddr::new(ip, port).to_string(),
        Err(_) => format!("{host}:{port}"),
    }
}

async fn connect(host: &str, port: u16) -> Result<TcpStream, Problem> {
    let address = joined(host, port);
    TcpStream::connect(&address).await.map_err(|error| {
        let why = match error.kind() {
            io::ErrorKind::ConnectionRefused => "connect: connection refused".into(),
            io::ErrorKind::TimedOut => "i/o timeout".into(),
            io::ErrorKind::HostUnreachable => "connect: no route to host".into(),
            _ => error.to_string(),
        };
        Problem::Unreachable { address, why }
    })
}

/// Sends the GET request; status 200 to 399 is success. Deviation: redirects count as success and are not
/// followed.
pub async fn http_get(
    action: &HTTPGetAction,
    container: &Container,
    pod_ip: Option<IpAddr>,
    limit: Duration,
) -> Outcome {
    let port = match port_of(&action.port, container) {
        Ok(port) => port,
        Err(error) => return Outcome::Error(error.to_string()),
    };
    let own = pod_ip.map(|ip| ip.to_string());
    let Some(host) = action.host.clone().filter(|h| !h.is_empty()).or(own) else {
        return Outcome::Error("the pod has no address yet".into());
    };
    let is_https = action.scheme.as_deref().is_some_and(|s| s.eq_ignore_ascii_case("https"));
    let path = action.path.as_deref().filter(|path| !path.is_empty()).unwrap_or("/");
    let path = if path.starts_with('/') { path.to_string() } else { format!("/{path}") };
    let scheme = if is_https { "https" } else { "http" };
    let url = format!("{scheme}://{}{path}", joined(&host, port));
    let request = match get_request(action, &path, &joined(&host, port)) {
        Ok(request) => request,
        Err(error) => return Outcome::Error(error),
    };
    match within(limit, http_status(&host, port, is_https, request)).await {
        Ok((200..400, _)) => Outcome::Success,
        Ok((status, _)) => Outcome::Failure(format!("HTTP probe failed with statuscode: {status}")),
        Err(error) => Outcome::Failure(format!("Get {url:?}: {error}")),
    }
}

fn get_request(
    action: &HTTPGetAction,
    path: &str,
    authority: &str,
) -> Result<Request<Empty<Bytes>>, String> {
    let mut request = Request::get(path).body(Empty::new()).map_err(|error| error.to_string())?;
    let headers = request.headers_mut();
    headers.insert(header::HOST, HeaderValue::from_str(authority).map_err(|e| e.to_string())?);
    let agent = HeaderValue::from_str(&agent()).map_err(|error| error.to_string())?;
    headers.insert(header::USER_AGENT, agent);
    headers.insert(header::ACCEPT, HeaderValue::from_static("*/*"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    let mut own: Vec<HeaderName> = vec![];
    for pair in action.http_headers.iter().flatten() {
        let name = HeaderName::try_from(pair.name.as_str()).map_err(|e| e.to_string())?;
        let value = HeaderValue::from_str(&pair.value).map_err(|e| e.to_string())?;
        // The first header of a name replaces our default, later ones are added.
        if own.contains(&name) {
            headers.append(name, value);
        } else {
            headers.insert(name.clone(), value);
            own.push(name);
        }
    }
    Ok(request)
}

async fn http_status(
    host: &str,
    port: u16,
    is_https: bool,
    request: Request<Empty<Bytes>>,
) -> Result<(u16, Bytes), Problem> {
    let tcp = connect(host, port).await?;
    let stream: Box<dyn Stream> =
        if is_https { Box::new(tls(tcp, host).await?) } else { Box::new(tcp) };
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.map_err(|error| error.to_string())?;
    let exchange = async {
        let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
        let status = response.status().as_u16();
        let body = Limited::new(response.into_body(), BODY_LIMIT).collect().await;
        Ok((status, body.map(|b| b.to_bytes()).unwrap_or_default()))
    };
    drive(connection, exchange).await
}

/// Polls the connection together with the exchange that it carries.
async fn drive<T, E: std::fmt::Display>(
    connection: impl Future<Output = Result<(), E>>,
    exchange: impl Future<Output = Result<T, Problem>>,
) -> Result<T, Problem> {
    let mut exchange = std::pin::pin!(exchange);
    tokio::select! {
        biased;
        done = &mut exchange => done,
        ended = connection => match ended {
            Ok(()) => exchange.await,
            Err(error) => Err(error.to_string().into()),
        },
    }
}

/// Certificates are not verified: probes never do.
async fn tls(tcp: TcpStream, host: &str) -> Result<impl Stream + use<>, String> {
    let config = transport::tls::client_config(&transport::tls::Trust::Anyone, None)
        .map_err(|error| error.to_string())?;
    let name =
        rustls_pki_types::ServerName::try_from(host.to_string()).map_err(|e| e.to_string())?;
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    connector.connect(name, tcp).await.map_err(|error| error.to_string())
}

/// The gRPC health protocol. `service` may be empty.
pub async fn grpc(host: &str, port: u16, service: &str, limit: Duration) -> Outcome {
    let address = joined(host, port);
    let shown = base::duration::show(limit);
    let end = Instant::now() + limit;
    let tcp = match within(limit, connect(host, port)).await {
        Ok(tcp) => tcp,
        // Upstream retries until the timeout; the answer is the same.
        Err(_) => {
            return Outcome::Failure(format!(
                "timeout: failed to connect service {address:?} within {shown}: context deadline exceeded"
            ));
        }
    };
    let left = end.saturating_duration_since(Instant::now());
    match within(left, grpc_status(tcp, &address, service)).await {
        Ok(1) => Outcome::Success,
        Ok(status) => {
            let name = ["UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"];
            let name = usize::try_from(status).ok().and_then(|status| name.get(status));
            let name = name.copied().unwrap_or("UNKNOWN");
            Outcome::Failure(format!("service unhealthy (responded with {name:?})"))
        }
        Err(Problem::Late) => {
            Outcome::Failure(format!("timeout: health rpc did not complete within {shown}"))
        }
        Err(problem) => Outcome::Failure(problem.to_string()),
    }
}

/// Upstream: `UserAgent` of probes.
fn agent() -> String {
    format!("kube-probe/{}", release::KUBERNETES.short)
}

async fn grpc_status(tcp: TcpStream, address: &str, service: &str) -> Result<i32, Problem> {
    let executor = TokioExecutor::new();
    let handshake = hyper::client::conn::http2::handshake(executor, TokioIo::new(tcp));
    let (mut sender, connection) = handshake.await.map_err(|error| error.to_string())?;
    let frame = health_request(service);
    let request = Request::post(format!("http://{address}/grpc.health.v1.Health/Check"))
        .header(header::CONTENT_TYPE, "application/grpc")
        .header(header::USER_AGENT, agent())
        .header(header::TE, "trailers")
        .body(Full::new(frame))
        .map_err(|error| error.to_string())?;
    let exchange = async {
        let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
        let early = response.headers().get("grpc-status").cloned();
        let body = Limited::new(response.into_body(), BODY_LIMIT).collect().await;
        let body = body.map_err(|error| error.to_string())?;
        let code = early.or_else(|| body.trailers().and_then(|t| t.get("grpc-status")).cloned());
        match code.as_ref().and_then(|c| c.to_str().ok()).unwrap_or("0") {
            "0" => Ok(serving_status(&body.to_bytes())),
            "12" => Err(Problem::Other(
                "error: this server does not implement the grpc health protocol \
                 (grpc.health.v1.Health)"
                    .into(),
            )),
            code => {
                Err(Problem::Other(format!("error: health rpc failed: rpc error: code = {code}")))
            }
        }
    };
    drive(connection, exchange).await
}

/// `grpc.health.v1.HealthCheckRequest`.
#[derive(Clone, PartialEq, Message)]
struct HealthRequest {
    #[prost(string, tag = "1")]
    service: String,
}

/// `grpc.health.v1.HealthCheckResponse`, whose status is an enumeration.
#[derive(Clone, PartialEq, Message)]
struct HealthResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// A gRPC frame: not compressed, length, message.
fn health_request(service: &str) -> Bytes {
    let message = HealthRequest { service: service.to_owned() }.encode_to_vec();
    let mut frame = BytesMut::with_capacity(FRAME_HEADER + message.len());
    frame.put_u8(0);
    frame.put_u32(message.len() as u32);
    frame.put_slice(&message);
    frame.freeze()
}

/// An unreadable answer counts as `UNKNOWN`.
fn serving_status(frame: &[u8]) -> i32 {
    let message =
        frame.get(FRAME_HEADER..).and_then(|message| HealthResponse::decode(message).ok());
    message.unwrap_or_default().status
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use testkit::wait::LONG;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[test]
    fn ports() {
        let container: Container = serde_json::from_value(
            json!({"name": "c", "ports": [{"name": "http", "containerPort": 8080}]}),
        )
        .expect("a container");
        let check = |port: IntOrString, expected: Result<u16, &str>| {
            let found = port_of(&port, &container).map_err(|why| why.to_string());
            assert_eq!(found, expected.map_err(String::from));
        };
        check(IntOrString::Int(80), Ok(80));
        check(IntOrString::String("http".into()), Ok(8080));
        check(IntOrString::String("81".into()), Ok(81));
        check(IntOrString::Int(0), Err("invalid port number: 0"));
        check(
            IntOrString::String("no".into()),
            Err("strconv.Atoi: parsing \"no\": invalid syntax"),
        );
    }

    #[test]
    fn health_messages_have_the_protocols_bytes() {
        let check = |service: &str, expected: &[u8]| {
            let frame = health_request(service);
            let length = u32::from_be_bytes(frame[1..5].try_into().expect("four bytes"));
            assert_eq!((frame[0], length as usize), (0, frame.len() - 5), "{service}");
            assert_eq!(&frame[5..], [expected, service.as_bytes()].concat(), "{service}");
        };
        check("", &[]);
        check("liveness", &[0x0a, 8]);
        check(&"n".repeat(127), &[0x0a, 127]);
        // A length of more than seven bits takes another byte.
        check(&"n".repeat(128), &[0x0a, 0x80, 1]);
        check(&"n".repeat(300), &[0x0a, 0xac, 2]);
        let answers = |bytes: &[u8], expected: i32| assert_eq!(serving_status(bytes), expected);
        answers(&[0, 0, 0, 0, 2, 0x08, 1], 1);
        answers(&[0, 0, 0, 0, 0], 0);
        answers(&[0, 0], 0);
        // An unknown field before it.
        answers(&[0, 0, 0, 0, 4, 0x10, 7, 0x08, 2], 2);
    }

    #[tokio::test]
    async fn the_http_status_decides() {
        // A loopback address of its own: after the listener closes, no other test listens there.
        let (host, port) = (testkit::places::own_loopback(), 18_080);
        let listener = tokio::net::TcpListener::bind((host, port)).await.expect("a port");
        let server = async {
            for status in ["200 OK", "302 Found", "500 Oops"] {
                let (mut stream, _) = listener.accept().await.expect("a client");
                let mut request = [0; 1024];
                let read = stream.read(&mut request).await.expect("a request");
                let text = String::from_utf8_lossy(&request[..read]);
                assert!(
                    text.contains(&format!("user-agent: {}", agent())) && text.contains("x-a: b"),
                    "{text}"
                );
                let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\nhi");
                stream.write_all(answer.as_bytes()).await.expect("written");
            }
        };
        let action: HTTPGetAction = serde_json::from_value(
            json!({"path": "/health", "port": port, "httpHeaders": [{"name": "X-A", "value": "b"}]}),
        )
        .expect("an action");
        let client = async {
            let (container, ip) = (Container::default(), Some(host.into()));
            let mut seen = vec![];
            for _ in 0..3 {
                seen.push(http_get(&action, &container, ip, LONG).await);
            }
            seen
        };
        let (_, seen) = tokio::join!(server, client);
        let failed = Outcome::Failure("HTTP probe failed with statuscode: 500".into());
        assert_eq!(seen, [Outcome::Success, Outcome::Success, failed]);
        drop(listener);
        assert_eq!(
            tcp(&host.to_string(), port, LONG).await,
            Outcome::Failure(format!("dial tcp {host}:{port}: connect: connection refused"))
        );
        let refused = Outcome::Failure(format!(
            "timeout: failed to connect service \"{host}:{port}\" within 1s: context deadline exceeded"
        ));
        let second = Duration::from_secs(1);
        assert_eq!(grpc(&host.to_string(), port, "", second).await, refused);
    }

    #[tokio::test]
    async fn timeouts_name_the_step() {
        let (host, port) = (testkit::places::own_loopback(), 18_081);
        // Accepts connections and never answers.
        let _listener = tokio::net::TcpListener::bind((host, port)).await.expect("a port");
        let limit = Duration::from_millis(50);
        let silent = Outcome::Failure("timeout: health rpc did not complete within 50ms".into());
        assert_eq!(grpc(&host.to_string(), port, "", limit).await, silent);
        let action: HTTPGetAction =
            serde_json::from_value(json!({"path": "/", "port": port})).expect("an action");
        let late = http_get(&action, &Container::default(), Some(host.into()), limit).await;
        let text = "context deadline exceeded (Client.Timeout exceeded while awaiting headers)";
        assert_eq!(late, Outcome::Failure(format!("Get \"http://{host}:{port}/\": {text}")));
        let nobody = within(Duration::ZERO, std::future::pending::<Result<(), Problem>>()).await;
        assert_eq!(nobody, Err(Problem::Late));
    }
}
