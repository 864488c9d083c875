//! The HTTP client: pooled, HTTP/2 where the server supports it, over TLS, TCP or a Unix socket.
//!
//! In: requests of any body type, with a path only (then [`ClientOptions::server`] is prepended) or
//! with a whole URI. Out: streaming responses. It is a `tower::Service`, the bottom layer of a
//! `kube::Client`.
//!
//! Invariant: after [`HttpClient::replace_tls`] no new request uses a connection with the old
//! settings. Running requests finish on theirs.
//!
//! Invariant: a client from [`HttpClient::to_global_unicast`] dials only addresses that it has
//! checked, and shares no connection with an unchecked client.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use futures::FutureExt;
use futures::future::FusedFuture;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderValue, Request, Response, Uri, header};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;

use crate::tls::{self, Identity, TlsError, Trust};
use crate::upgrade::Upgrade;
use crate::{Body, BoxError};

mod connector;
use connector::{Connector, Reach, Target};

/// The limit on the body of a refused upgrade, usually a Status: the rest is cut off.
const REFUSAL_BYTES: usize = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("server URL {0:?}: {1}")]
    Server(String, String),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("{target}: {source}")]
    Connect { target: String, source: std::io::Error },
    #[error("{}", chain(.0))]
    Pooled(#[from] legacy::Error),
    #[error("{}", chain(.0))]
    Http(#[from] hyper::Error),
    #[error("{0}")]
    Body(BoxError),
    #[error("request: {0}")]
    Request(#[from] http::Error),
    #[error("{0}")]
    Credentials(BoxError),
}

impl ClientError {
    /// Whether the connection failed: the server has not seen the request.
    pub fn is_connect(&self) -> bool {
        match self {
            Self::Connect { .. } => true,
            Self::Pooled(error) => error.is_connect(),
            _ => false,
        }
    }
}

/// An error with its causes: hyper's own text says only "client error (Connect)".
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

/// The server, the trusted authorities and the credentials. The fields match a resolved kubeconfig.
#[derive(Clone, Default)]
pub struct ClientOptions {
    /// `https://host:port/prefix`, `http://…` or `unix:/path`. Empty: every request has its own URI.
    pub server: String,
    /// PEM. `None`: the machine's certificate authorities.
    pub ca_pem: Option<String>,
    pub cert_pem: Option<String>,
    pub key_pem: Option<String>,
    /// Accept any server certificate.
    pub insecure: bool,
    /// Check the server's certificate against this name instead of the URL's host.
    pub server_name: Option<String>,
    pub token: Option<Token>,
    pub user_agent: Option<String>,
    /// Asked before each request; its credentials override the fields above.
    pub source: Option<Arc<dyn CredentialSource>>,
}

/// Credentials from an external source, like a kubeconfig's plugin.
#[async_trait::async_trait]
pub trait CredentialSource: Send + Sync {
    async fn current(&self) -> Result<Shown, BoxError>;

    /// The server rejected the credentials of this generation.
    async fn refused(&self, generation: u64);
}

/// The credentials of a request. Without `Debug`, so that they stay out of logs.
#[derive(Clone, PartialEq, Eq)]
pub struct Shown {
    /// Grows with every change.
    pub generation: u64,
    pub token: Option<String>,
    /// Certificate and key, PEM.
    pub identity: Option<(String, String)>,
}

/// Yields the current bearer token, so that a rotated token is used at once.
#[derive(Clone)]
pub struct Token(Arc<dyn Fn() -> Option<String> + Send + Sync>);

impl Token {
    pub fn new(source: impl Fn() -> Option<String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(source))
    }

    pub fn fixed(token: impl Into<String>) -> Self {
        let token = token.into();
        Self::new(move || Some(token.clone()))
    }
}

/// The prefix of a request's path.
#[derive(Clone)]
struct Base {
    scheme: Scheme,
    authority: Authority,
    /// Without the trailing slash.
    prefix: String,
}

struct Pool {
    tls: Arc<ClientConfig>,
    anywhere: legacy::Client<Connector, Body>,
    global_unicast: legacy::Client<Connector, Body>,
}

impl Pool {
    fn new(tls: Arc<ClientConfig>, target: &Target) -> Self {
        let anywhere = pooled(Connector::new(tls.clone(), target.clone(), Reach::Anywhere));
        let connector = Connector::new(tls.clone(), target.clone(), Reach::GlobalUnicast);
        Self { tls, anywhere, global_unicast: pooled(connector) }
    }
}

struct Shared {
    base: Option<Base>,
    target: Target,
    /// Replaced as a whole when certificates change; the old pool's connections end with it.
    pool: ArcSwap<Pool>,
    token: Option<Token>,
    user_agent: HeaderValue,
    source: Option<Source>,
}

struct Source {
    credentials: Arc<dyn CredentialSource>,
    /// For connections with another client certificate.
    options: ClientOptions,
    /// The generation of the pool's certificate.
    applied: AtomicU64,
}

/// Cheap to clone; clones share connections.
#[derive(Clone)]
pub struct HttpClient {
    shared: Arc<Shared>,
    reach: Reach,
}

impl HttpClient {
    pub fn new(options: &ClientOptions) -> Result<Self, ClientError> {
        let (base, unix) = parse_server(&options.server)?;
        let server_name = options
            .server_name
            .as_ref()
            .map(|name| {
                ServerName::try_from(name.clone())
                    .map_err(|error| ClientError::Server(name.clone(), error.to_string()))
            })
            .transpose()?;
        let target = Target { unix, server_name };
        let user_agent = options.user_agent.as_deref().unwrap_or("decapod");
        let shared = Shared {
            pool: ArcSwap::from_pointee(Pool::new(tls_of(options)?, &target)),
            base,
            target,
            token: options.token.clone(),
            user_agent: HeaderValue::from_str(user_agent).map_err(http::Error::from)?,
            source: options.source.clone().map(|credentials| Source {
                credentials,
                options: ClientOptions { source: None, ..options.clone() },
                applied: AtomicU64::new(0),
            }),
        };
        Ok(Self { shared: Arc::new(shared), reach: Reach::Anywhere })
    }

    /// The same client for targets that users choose: it refuses names and addresses that are
    /// loopback, link-local or multicast.
    pub fn to_global_unicast(&self) -> Self {
        Self { shared: self.shared.clone(), reach: Reach::GlobalUnicast }
    }

    /// Host and port of the configured server.
    pub fn authority(&self) -> Option<&str> {
        self.shared.base.as_ref().map(|base| base.authority.as_str())
    }

    /// Sets new authorities or a new certificate (ignores `options.server` and the token).
    pub fn replace_tls(&self, options: &ClientOptions) -> Result<(), ClientError> {
        let pool = Pool::new(tls_of(options)?, &self.shared.target);
        self.shared.pool.store(Arc::new(pool));
        Ok(())
    }

    /// Sends a request; the response's body is streamed.
    pub async fn request<B>(&self, request: Request<B>) -> Result<Response<Incoming>, ClientError>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        self.exchange(self.prepare(request)?).await
    }

    async fn exchange(
        &self,
        mut request: Request<Body>,
    ) -> Result<Response<Incoming>, ClientError> {
        let shown = self.show(&mut request).await?;
        let client = {
            let pool = self.shared.pool.load();
            match self.reach {
                Reach::Anywhere => pool.anywhere.clone(),
                Reach::GlobalUnicast => pool.global_unicast.clone(),
            }
        };
        let response = client.request(request).await?;
        if response.status() == http::StatusCode::UNAUTHORIZED
            && let (Some(generation), Some(source)) = (shown, &self.shared.source)
        {
            source.credentials.refused(generation).await;
        }
        Ok(response)
    }

    /// Adds the source's credentials to the request or its connection.
    async fn show(&self, request: &mut Request<Body>) -> Result<Option<u64>, ClientError> {
        let Some(source) = &self.shared.source else { return Ok(None) };
        if request.headers().contains_key(header::AUTHORIZATION) {
            return Ok(None);
        }
        let shown = source.credentials.current().await.map_err(ClientError::Credentials)?;
        if let Some((cert_pem, key_pem)) = shown.identity
            && source.applied.swap(shown.generation, Ordering::Relaxed) != shown.generation
        {
            let mut options = source.options.clone();
            (options.cert_pem, options.key_pem) = (Some(cert_pem), Some(key_pem));
            self.replace_tls(&options)?;
        }
        if let Some(token) = shown.token {
            request.headers_mut().insert(header::AUTHORIZATION, bearer(&token)?);
        }
        Ok(Some(shown.generation))
    }

    /// Sends an upgrade request (the caller sets `Connection: Upgrade` and `Upgrade: …`) on its own
    /// connection, always with HTTP/1.1.
    pub async fn upgrade<B>(&self, request: Request<B>) -> Result<Upgrade, ClientError>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let mut request = self.prepare(request)?;
        self.show(&mut request).await?;
        let tls = self.shared.pool.load().tls.clone();
        let connector = Connector::new(tls, self.shared.target.clone(), self.reach);
        let io = connector.without_h2().open(request.uri()).await?;
        if let Some(authority) = request.uri().authority() {
            let host = HeaderValue::from_str(authority.as_str()).map_err(http::Error::from)?;
            request.headers_mut().entry(header::HOST).or_insert(host);
        }
        let path = request.uri().path_and_query().cloned();
        *request.uri_mut() = Uri::from(path.unwrap_or_else(|| PathAndQuery::from_static("/")));

        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(io)).await?;
        // Polled here, not in a task: the connection ends with the upgrade or the body.
        let mut connection = std::pin::pin!(connection.with_upgrades().fuse());
        let exchange = async move {
            let mut response = sender.send_request(request).await?;
            if response.status() == http::StatusCode::SWITCHING_PROTOCOLS {
                let upgrade = hyper::upgrade::on(&mut response);
                return Ok(Ok((response.into_parts().0, upgrade)));
            }
            let (parts, body) = response.into_parts();
            let body =
                Limited::new(body, REFUSAL_BYTES).collect().await.map_err(ClientError::Body)?;
            Ok::<_, ClientError>(Err(Response::from_parts(parts, body.to_bytes())))
        };
        let mut exchange = std::pin::pin!(exchange);
        let outcome = tokio::select! {
            outcome = exchange.as_mut() => outcome?,
            // The connection ended first: the exchange has its answer or its error.
            _ = connection.as_mut() => exchange.await?,
        };
        match outcome {
            Err(refused) => Ok(Upgrade::Refused(refused)),
            Ok((parts, mut upgrade)) => {
                let io = tokio::select! {
                    io = &mut upgrade => io?,
                    _ = connection.as_mut(), if !connection.is_terminated() => upgrade.await?,
                };
                Ok(Upgrade::Switched(parts, TokioIo::new(io)))
            }
        }
    }

    /// Sets the absolute URI, the credentials and the common body type.
    fn prepare<B>(&self, request: Request<B>) -> Result<Request<Body>, ClientError>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let (mut parts, body) = request.into_parts();
        if parts.uri.authority().is_some_and(has_user) {
            return Err(ClientError::Server(parts.uri.to_string(), USER.to_owned()));
        }
        if parts.uri.authority().is_none() {
            let base = self.shared.base.as_ref().ok_or_else(|| {
                ClientError::Server(parts.uri.to_string(), "no server was configured".to_owned())
            })?;
            let rest = parts.uri.path_and_query().map_or("/", PathAndQuery::as_str);
            parts.uri = Uri::builder()
                .scheme(base.scheme.clone())
                .authority(base.authority.clone())
                .path_and_query(format!("{}{rest}", base.prefix))
                .build()?;
        }
        if let Some(Token(source)) = &self.shared.token
            && !parts.headers.contains_key(header::AUTHORIZATION)
            && let Some(token) = source()
        {
            parts.headers.insert(header::AUTHORIZATION, bearer(&token)?);
        }
        parts.headers.entry(header::USER_AGENT).or_insert_with(|| self.shared.user_agent.clone());
        Ok(Request::from_parts(parts, crate::boxed(body)))
    }
}

impl<B> tower::Service<Request<B>> for HttpClient
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<Incoming>;
    type Error = ClientError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, ClientError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ClientError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (client, request) = (self.clone(), self.prepare(request));
        Box::pin(async move { client.exchange(request?).await })
    }
}

fn bearer(token: &str) -> Result<HeaderValue, ClientError> {
    let value = HeaderValue::from_str(&format!("Bearer {token}"));
    let mut value = value.map_err(http::Error::from)?;
    value.set_sensitive(true);
    Ok(value)
}

fn tls_of(options: &ClientOptions) -> Result<Arc<ClientConfig>, ClientError> {
    let identity = match (&options.cert_pem, &options.key_pem) {
        (Some(cert), Some(key)) => Some(Identity::from_pem(cert, key)?),
        _ => None,
    };
    let trust = match &options.ca_pem {
        _ if options.insecure => Trust::Anyone,
        Some(pem) => Trust::Authorities(pem.clone()),
        None => Trust::System,
    };
    Ok(Arc::new(tls::client_config(&trust, identity.as_ref())?))
}

fn pooled(connector: Connector) -> legacy::Client<Connector, Body> {
    legacy::Client::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(Duration::from_secs(80))
        // Notices a server that vanished silently, like Go's client.
        .http2_keep_alive_interval(Duration::from_secs(30))
        .http2_keep_alive_timeout(Duration::from_secs(15))
        .http2_initial_stream_window_size(4 << 20)
        .http2_initial_connection_window_size(16 << 20)
        .build(connector)
}

const USER: &str = "user information is not permitted";

/// Whether the authority has the form `user@host`: a reader may take the user for the host.
fn has_user(authority: &Authority) -> bool {
    authority.as_str().contains('@')
}

fn parse_server(server: &str) -> Result<(Option<Base>, Option<std::path::PathBuf>), ClientError> {
    let bad = |why: &str| ClientError::Server(server.to_owned(), why.to_owned());
    if server.is_empty() {
        return Ok((None, None));
    }
    if let Some(path) = server.strip_prefix("unix:") {
        let path = path.strip_prefix("//").unwrap_or(path);
        let base = Base {
            scheme: Scheme::HTTP,
            authority: Authority::from_static("localhost"),
            prefix: String::new(),
        };
        return Ok((Some(base), Some(path.into())));
    }
    // Upstream: a server without a scheme is plain HTTP.
    let uri: Uri =
        if server.contains("://") { server.parse() } else { format!("http://{server}").parse() }
            .map_err(|_| bad("not a URL"))?;
    let scheme = uri.scheme().cloned().ok_or_else(|| bad("no scheme"))?;
    if scheme != Scheme::HTTP && scheme != Scheme::HTTPS {
        return Err(bad("the scheme must be http, https or unix"));
    }
    let authority = uri.authority().cloned().ok_or_else(|| bad("no host"))?;
    if has_user(&authority) {
        return Err(bad(USER));
    }
    let prefix = uri.path().trim_end_matches('/').to_owned();
    Ok((Some(Base { scheme, authority, prefix }), None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_parsed() {
        let check = |server: &str, expected: Option<(&str, &str, &str)>| {
            let got = parse_server(server).ok().and_then(|(base, _)| base);
            let got = got
                .as_ref()
                .map(|base| (base.scheme.as_str(), base.authority.as_str(), base.prefix.as_str()));
            assert_eq!(got, expected, "{server}");
        };
        check("https://[::1]:6443", Some(("https", "[::1]:6443", "")));
        check("https://host/clusters/a/", Some(("https", "host", "/clusters/a")));
        check("localhost:8080", Some(("http", "localhost:8080", "")));
        check("unix:///run/x.sock", Some(("http", "localhost", "")));
        check("ftp://host", None);
        check("https://10.0.0.1:80@169.254.169.254", None);
        check("https://user@host", None);
        check("", None);
    }

    #[test]
    fn addresses_with_a_user_are_refused() {
        let options = ClientOptions { insecure: true, ..ClientOptions::default() };
        let client = HttpClient::new(&options).expect("a client");
        for (uri, is_taken) in [
            ("http://10.0.0.1:80/x", true),
            ("http://10.0.0.1:80@127.0.0.1/x", false),
            ("http://@127.0.0.1/x", false),
            ("http://10.0.0.1/@127.0.0.1", true),
        ] {
            let request = Request::get(uri).body(crate::empty()).expect("a request");
            assert_eq!(client.prepare(request).is_ok(), is_taken, "{uri}");
        }
    }

    /// Refused targets are never dialled: the listener gets no connection.
    #[tokio::test]
    async fn a_global_unicast_client_does_not_reach_this_machine() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let port = listener.local_addr().expect("an address").port();
        let options = ClientOptions { insecure: true, ..ClientOptions::default() };
        let anywhere = HttpClient::new(&options).expect("a client");
        let client = anywhere.to_global_unicast();
        for host in ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0", "2130706433"] {
            let get = || {
                let request = Request::get(format!("http://{host}:{port}/"));
                request.body(crate::empty()).expect("a request")
            };
            for error in [client.request(get()).await.err(), client.upgrade(get()).await.err()] {
                let error = error.map(|error| error.to_string()).unwrap_or_default();
                assert!(error.contains("address not allowed"), "{host}: {error:?}");
            }
        }
        assert!(listener.accept().now_or_never().is_none());
        let request = Request::get(format!("http://127.0.0.1:{port}/"));
        let request = request.body(crate::empty()).expect("a request");
        let asked = anywhere.request(request);
        tokio::select! {
            _ = asked => panic!("the listener answers nothing"),
            accepted = listener.accept() => drop(accepted.expect("a connection")),
        }
    }

    #[tokio::test]
    async fn a_port_out_of_range_is_not_another_port() {
        let options = ClientOptions { insecure: true, ..ClientOptions::default() };
        let client = HttpClient::new(&options).expect("a client");
        for uri in ["http://127.0.0.1:99999/", "http://127.0.0.1:65536/"] {
            let request = Request::get(uri).body(crate::empty()).expect("a request");
            let error = client.request(request).await.err().map(|error| error.to_string());
            let error = error.unwrap_or_default();
            assert!(error.contains("invalid port"), "{uri}: {error}");
        }
    }
}
