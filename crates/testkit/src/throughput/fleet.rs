//! HTTP/2 over TLS: a few connections, many requests on each.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use base::task::Tasks;
use bytes::Bytes;
use http::{Method, Request, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::ServerName;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio_rustls::TlsConnector;

use crate::http::ApiClient;
use crate::wait;

/// Large enough that flow control does not stop a list.
const WINDOW: u32 = 16 << 20;

type Sender = SendRequest<Full<Bytes>>;

pub struct Fleet {
    /// Each guards a connection, which is opened again when the server has ended it, as it does with idle ones.
    connections: Vec<Mutex<Sender>>,
    address: String,
    connector: TlsConnector,
    tasks: Tasks,
}

pub struct Question {
    method: Method,
    path: String,
    kind: &'static str,
    body: Bytes,
}

impl Question {
    pub fn get(path: &str) -> Self {
        Self { method: Method::GET, path: path.to_owned(), kind: "", body: Bytes::new() }
    }

    pub fn post(path: &str, body: &Value) -> Self {
        let body = body.to_string().into();
        Self { method: Method::POST, path: path.to_owned(), kind: "application/json", body }
    }

    pub fn patch(path: &str, body: &Value) -> Self {
        let body = body.to_string().into();
        Self {
            method: Method::PATCH,
            path: path.to_owned(),
            kind: "application/merge-patch+json",
            body,
        }
    }
}

impl Fleet {
    pub async fn connect(client: &ApiClient, count: usize) -> Result<Self> {
        let (address, mut config) = client.tls();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let connector = TlsConnector::from(Arc::new(config));
        let tasks = Tasks::new("load");
        let mut fleet =
            Self { connections: Vec::new(), address: address.to_owned(), connector, tasks };
        for _ in 0..count {
            let opened = fleet.dial().await?;
            fleet.connections.push(Mutex::new(opened));
        }
        Ok(fleet)
    }

    async fn dial(&self) -> Result<Sender> {
        let socket =
            TcpStream::connect(&self.address).await.with_context(|| self.address.clone())?;
        socket.set_nodelay(true)?;
        let name = ServerName::IpAddress(socket.peer_addr()?.ip().into());
        let stream = TokioIo::new(self.connector.connect(name, socket).await?);
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .handshake(stream)
            .await?;
        self.tasks.spawn("connection", async {
            if let Err(why) = connection.await {
                eprintln!("a connection ended: {why}");
            }
        });
        Ok(sender)
    }

    /// A connection that is open.
    async fn sender(&self, index: usize) -> Result<Sender> {
        let mut sender = self.connections[index % self.connections.len()].lock().await;
        if sender.is_closed() {
            *sender = self.dial().await?;
        }
        Ok(sender.clone())
    }

    /// The answer's status and whole body; `index` picks a connection.
    pub async fn ask(&self, index: usize, question: Question) -> Result<(u16, Bytes)> {
        let (status, body) = self.send(index, question).await?;
        Ok((status, body.collect().await?.to_bytes()))
    }

    /// The body of a stream.
    pub async fn open(&self, index: usize, question: Question) -> Result<Incoming> {
        let (status, body) = self.send(index, question).await?;
        anyhow::ensure!(status == 200, "status {status}");
        Ok(body)
    }

    async fn send(&self, index: usize, question: Question) -> Result<(u16, Incoming)> {
        let mut sender = self.sender(index).await?;
        let mut request = Request::builder()
            .method(question.method)
            .uri(format!("https://{}{}", self.address, question.path))
            .header(header::ACCEPT, "application/json");
        if !question.kind.is_empty() {
            request = request.header(header::CONTENT_TYPE, question.kind);
        }
        let request = request.body(Full::new(question.body))?;
        sender.ready().await?;
        let (head, body) = sender.send_request(request).await?.into_parts();
        Ok((head.status.as_u16(), body))
    }

    pub async fn close(self) {
        drop(self.connections);
        self.tasks.shutdown(Duration::from_secs(5)).await;
    }
}

/// The arrival times of the next lines.
pub async fn arrivals(mut body: Incoming, count: usize) -> Result<Vec<Instant>> {
    let mut times = Vec::with_capacity(count);
    while times.len() < count {
        let frame = body.frame().await.context("the stream ended early")??;
        let Some(data) = frame.data_ref() else { continue };
        let lines = data.iter().filter(|byte| **byte == b'\n').count();
        let now = wait::now();
        times.extend(std::iter::repeat_n(now, lines));
    }
    Ok(times)
}
