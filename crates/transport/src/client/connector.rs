//! Opens connections: resolves, connects, does the TLS handshake, reports the negotiated HTTP version.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use http::uri::Scheme;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

use super::ClientError;
use crate::host_port::is_global_unicast;

/// Upstream: client-go's timeouts, 30 s for connecting and 10 s for the handshake.
const CONNECT: Duration = Duration::from_secs(30);
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Overrides for a URI's host.
#[derive(Clone, Default)]
pub(super) struct Target {
    pub(super) unix: Option<PathBuf>,
    pub(super) server_name: Option<ServerName<'static>>,
}

/// Which addresses may be dialled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    Anywhere,
    GlobalUnicast,
}

#[derive(Clone)]
pub(super) struct Connector {
    tls: Arc<ClientConfig>,
    target: Target,
    reach: Reach,
}

impl Connector {
    pub(super) fn new(tls: Arc<ClientConfig>, target: Target, reach: Reach) -> Self {
        let alpn = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Self { tls: with_alpn(&tls, alpn), target, reach }
    }

    /// A connector for connections that can be upgraded.
    pub(super) fn without_h2(self) -> Self {
        Self { tls: with_alpn(&self.tls, vec![b"http/1.1".to_vec()]), ..self }
    }

    pub(super) async fn open(&self, uri: &Uri) -> Result<Stream, ClientError> {
        let failed = |source| ClientError::Connect { target: place(uri), source };
        let dial = tokio::time::timeout(CONNECT, self.dial(uri));
        let io = dial.await.map_err(|_| failed(io::ErrorKind::TimedOut.into()))?.map_err(failed)?;
        if uri.scheme() != Some(&Scheme::HTTPS) {
            return Ok(Stream { io, is_h2: false });
        }
        let name = match &self.target.server_name {
            Some(name) => name.clone(),
            None => ServerName::try_from(host(uri).to_owned())
                .map_err(|error| ClientError::Server(place(uri), error.to_string()))?,
        };
        let connector = tokio_rustls::TlsConnector::from(self.tls.clone());
        let shake = tokio::time::timeout(HANDSHAKE, connector.connect(name, io));
        let io =
            shake.await.map_err(|_| failed(io::ErrorKind::TimedOut.into()))?.map_err(failed)?;
        let is_h2 = io.get_ref().1.alpn_protocol() == Some(b"h2");
        Ok(Stream { io: Box::new(io), is_h2 })
    }

    async fn dial(&self, uri: &Uri) -> io::Result<BoxIo> {
        if let Some(path) = &self.target.unix {
            return Ok(Box::new(UnixStream::connect(path).await?));
        }
        let found = tokio::net::lookup_host((host(uri), port(uri)?)).await?;
        // Dials the checked addresses: a second look-up might return others.
        let addresses: Vec<SocketAddr> = found.collect();
        let is_refused = |address: &SocketAddr| !is_global_unicast(address.ip());
        if self.reach == Reach::GlobalUnicast && addresses.iter().any(is_refused) {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "address not allowed"));
        }
        let stream = TcpStream::connect(&addresses[..]).await?;
        stream.set_nodelay(true)?;
        Ok(Box::new(stream))
    }
}

fn with_alpn(tls: &ClientConfig, protocols: Vec<Vec<u8>>) -> Arc<ClientConfig> {
    let mut tls = tls.clone();
    tls.alpn_protocols = protocols;
    Arc::new(tls)
}

/// The port, or the scheme's default port.
fn port(uri: &Uri) -> io::Result<u16> {
    let own = if uri.scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 };
    match (uri.port_u16(), uri.authority()) {
        (Some(port), _) => Ok(port),
        (None, Some(authority)) if authority.as_str().trim_end_matches(':') != authority.host() => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "invalid port"))
        }
        (None, _) => Ok(own),
    }
}

/// The host, without the brackets of an IPv6 address.
fn host(uri: &Uri) -> &str {
    uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']')
}

fn place(uri: &Uri) -> String {
    uri.authority().map(ToString::to_string).unwrap_or_default()
}

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<Stream>;
    type Error = ClientError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, ClientError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ClientError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let this = self.clone();
        Box::pin(async move { this.open(&uri).await.map(TokioIo::new) })
    }
}

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}
type BoxIo = Box<dyn Io>;

/// A connection of any kind, with the negotiated HTTP version.
pub(super) struct Stream {
    io: BoxIo,
    is_h2: bool,
}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        if self.is_h2 { Connected::new().negotiated_h2() } else { Connected::new() }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}
