//! Small blocking HTTP/1.1 requests, plain or over TLS.
//!
//! In: an address and a path. Out: status and body, or the lines of a stream as they arrive. Unlike a
//! real client it shows every failure, retries nothing and keeps no connection.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base64::Engine as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::host::enter_network;

/// A status and a body.
#[derive(Clone, Debug, PartialEq)]
pub struct Response {
    pub status: u16,
    pub body: String,
    /// The `Location` header.
    pub location: Option<String>,
}

/// One plain GET on a new connection, from inside a network.
pub fn get_from(network: &File, address: &str, path: &str, limit: Duration) -> Result<Response> {
    let work = || {
        enter_network(network)?;
        get(address, path, limit)
    };
    std::thread::scope(|scope| scope.spawn(work).join().expect("requests do not panic"))
}

/// One plain GET from the calling thread's network.
pub fn get(address: &str, path: &str, limit: Duration) -> Result<Response> {
    let mut reader = BufReader::new(connect(address, limit)?);
    request(reader.get_mut(), "GET", path, address, JSON, b"")?;
    response(&mut reader)
}

/// One plain request with a body, from the calling thread's network.
pub fn send(
    verb: &str,
    address: &str,
    path: &str,
    kind: &str,
    body: &[u8],
    limit: Duration,
) -> Result<Response> {
    let mut reader = BufReader::new(connect(address, limit)?);
    request(reader.get_mut(), verb, path, address, kind, body)?;
    response(&mut reader)
}

const JSON: &str = "application/json";

fn connect(address: &str, limit: Duration) -> Result<TcpStream> {
    let socket: SocketAddr = address.parse().with_context(|| address.to_owned())?;
    let stream = TcpStream::connect_timeout(&socket, limit).with_context(|| address.to_owned())?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn request(
    stream: &mut impl Write,
    verb: &str,
    path: &str,
    host: &str,
    kind: &str,
    body: &[u8],
) -> io::Result<()> {
    let text = format!(
        "{verb} {path} HTTP/1.1\r\nHost: {host}\r\nAccept: application/json\r\n\
         Content-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(text.as_bytes())?;
    stream.write_all(body)?;
    stream.flush()
}

fn response(reader: &mut impl BufRead) -> Result<Response> {
    Head::read(reader)?.body(reader)
}

struct Head {
    status: u16,
    length: Option<usize>,
    chunked: bool,
    /// The server closes the connection after this answer.
    closes: bool,
    location: Option<String>,
}

impl Head {
    fn body(self, reader: &mut impl BufRead) -> Result<Response> {
        let mut body = Vec::new();
        if self.chunked {
            while let Some(chunk) = chunk(reader)? {
                body.extend(chunk);
            }
        } else if let Some(length) = self.length {
            body.resize(length, 0);
            reader.read_exact(&mut body).context("body")?;
        } else {
            reader.read_to_end(&mut body)?;
        }
        Ok(self.answer(body))
    }

    fn answer(self, body: Vec<u8>) -> Response {
        let body = String::from_utf8_lossy(&body).into_owned();
        Response { status: self.status, body, location: self.location }
    }

    fn read(reader: &mut impl BufRead) -> Result<Self> {
        let first = line(reader)?;
        let status = first.split(' ').nth(1).and_then(|word| word.parse().ok());
        let mut head = Self {
            status: status.with_context(|| first.clone())?,
            length: None,
            chunked: false,
            closes: false,
            location: None,
        };
        loop {
            let text = line(reader)?;
            let Some((name, value)) = text.split_once(':') else { return Ok(head) };
            let value = value.trim();
            match name.to_ascii_lowercase().as_str() {
                "content-length" => head.length = value.parse().ok(),
                "transfer-encoding" => head.chunked = value == "chunked",
                "connection" => head.closes = value.eq_ignore_ascii_case("close"),
                "location" => head.location = Some(value.to_owned()),
                _ => {}
            }
        }
    }
}

fn line(reader: &mut impl BufRead) -> Result<String> {
    let mut text = String::new();
    if reader.read_line(&mut text)? == 0 {
        bail!("the connection ended early");
    }
    Ok(text.trim_end().to_owned())
}

fn chunk(reader: &mut impl BufRead) -> Result<Option<Vec<u8>>> {
    let size = line(reader)?;
    let size = usize::from_str_radix(&size, 16).with_context(|| format!("chunk size {size:?}"))?;
    let mut bytes = vec![0; size];
    reader.read_exact(&mut bytes)?;
    line(reader)?;
    Ok((size > 0).then_some(bytes))
}

type Builder = rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>;

fn builder(roots: &Arc<RootCertStore>) -> Result<Builder> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(builder.with_root_certificates(Arc::clone(roots)))
}

/// Calls an API server with the identity of a kubeconfig.
#[derive(Clone)]
pub struct ApiClient {
    address: String,
    roots: Arc<RootCertStore>,
    config: Arc<ClientConfig>,
}

impl ApiClient {
    /// The first cluster and the first user of a kubeconfig.
    pub fn from_kubeconfig(text: &str) -> Result<Self> {
        let config: serde_json::Value = serde_saphyr::from_str(text)?;
        let cluster = &config["clusters"][0]["cluster"];
        let user = &config["users"][0]["user"];
        let pem = |section: &serde_json::Value, key: &str| -> Result<String> {
            let value =
                section[key].as_str().with_context(|| format!("no {key} in the kubeconfig"))?;
            let bytes = base64::engine::general_purpose::STANDARD.decode(value.trim())?;
            Ok(String::from_utf8(bytes)?)
        };
        let server = cluster["server"].as_str().context("no server in the kubeconfig")?;
        let address = server.trim_start_matches("https://").trim_end_matches('/');
        let authority = pem(cluster, "certificate-authority-data")?;
        Self::new(
            address,
            &authority,
            &pem(user, "client-certificate-data")?,
            &pem(user, "client-key-data")?,
        )
    }

    /// `authority`, `certificate` and `key` are PEM texts; `address` is an IP address and a port.
    pub fn new(address: &str, authority: &str, certificate: &str, key: &str) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        for root in CertificateDer::pem_slice_iter(authority.as_bytes()) {
            roots.add(root?)?;
        }
        let chain = CertificateDer::pem_slice_iter(certificate.as_bytes());
        let chain = chain.collect::<Result<Vec<_>, _>>()?;
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes())?;
        let roots = Arc::new(roots);
        let config = builder(&roots)?.with_client_auth_cert(chain, key)?;
        Ok(Self { address: address.to_owned(), roots, config: Arc::new(config) })
    }

    /// The same server, without credentials.
    pub fn without_identity(&self) -> Result<Self> {
        let config = builder(&self.roots)?.with_no_client_auth();
        Ok(Self { config: Arc::new(config), ..self.clone() })
    }

    /// The server's address and TLS configuration, for another kind of client.
    pub fn tls(&self) -> (&str, ClientConfig) {
        (&self.address, ClientConfig::clone(&self.config))
    }

    pub fn get(&self, path: &str, limit: Duration) -> Result<Response> {
        response(&mut self.send("GET", path, "", limit)?)
    }

    pub fn post(&self, path: &str, body: &str, limit: Duration) -> Result<Response> {
        response(&mut self.send("POST", path, body, limit)?)
    }

    pub fn delete(&self, path: &str, limit: Duration) -> Result<Response> {
        response(&mut self.send("DELETE", path, "", limit)?)
    }

    /// Calls `each` with every line of a streamed answer, until it returns that it wants no more.
    pub fn stream(
        &self,
        path: &str,
        limit: Duration,
        mut each: impl FnMut(&str) -> bool,
    ) -> Result<()> {
        let mut reader = self.send("GET", path, "", limit)?;
        let head = Head::read(&mut reader)?;
        if head.status != 200 || !head.chunked {
            bail!("{path}: status {}, chunked: {}", head.status, head.chunked);
        }
        let mut rest = Vec::new();
        while let Some(bytes) = chunk(&mut reader)? {
            rest.extend(bytes);
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let text: Vec<u8> = rest.drain(..=end).collect();
                if !each(String::from_utf8_lossy(&text).trim_end()) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn send(&self, verb: &str, path: &str, body: &str, limit: Duration) -> Result<TlsReader> {
        let mut reader = self.connect(limit)?;
        request(reader.get_mut(), verb, path, &self.address, JSON, body.as_bytes())?;
        Ok(reader)
    }

    fn connect(&self, limit: Duration) -> Result<TlsReader> {
        let socket = connect(&self.address, limit)?;
        let name = ServerName::IpAddress(socket.peer_addr()?.ip().into());
        let connection = ClientConnection::new(Arc::clone(&self.config), name)?;
        Ok(BufReader::new(StreamOwned::new(connection, socket)))
    }
}

type TlsReader = BufReader<StreamOwned<ClientConnection, TcpStream>>;

/// A connection that is kept for many requests, with any headers and bytes.
pub struct Connection {
    client: ApiClient,
    limit: Duration,
    stream: Option<TlsReader>,
}

impl Connection {
    pub fn new(client: ApiClient, limit: Duration) -> Self {
        Self { client, limit, stream: None }
    }

    pub fn send(
        &mut self,
        verb: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Result<Response> {
        let is_old = self.stream.is_some();
        match self.try_send(verb, path, headers, body) {
            // The server may have closed an idle connection.
            Err(error) if is_old && error.to_string().contains("ended early") => {
                self.try_send(verb, path, headers, body)
            }
            answer => answer,
        }
    }

    fn try_send(
        &mut self,
        verb: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Result<Response> {
        let mut reader = match self.stream.take() {
            Some(reader) => reader,
            None => self.client.connect(self.limit)?,
        };
        let mut text = format!("{verb} {path} HTTP/1.1\r\nHost: {}\r\n", self.client.address);
        for (name, value) in headers {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
        text.push_str(&format!("Content-Length: {}\r\n\r\n", body.len()));
        let mut bytes = text.into_bytes();
        bytes.extend_from_slice(body);
        // A server that refuses a body need not read it: the answer counts, not the write.
        let stream = reader.get_mut();
        if stream.write_all(&bytes).and_then(|()| stream.flush()).is_err() {
            return response(&mut arrived(stream).as_slice());
        }
        let head = Head::read(&mut reader)?;
        let has_body = verb != "HEAD" && !matches!(head.status, 204 | 304);
        let is_kept = !head.closes && (head.chunked || head.length.is_some() || !has_body);
        let answer = if has_body { head.body(&mut reader)? } else { head.answer(Vec::new()) };
        self.stream = is_kept.then_some(reader);
        Ok(answer)
    }
}

/// Bytes that arrived from a peer that no longer reads. (Reading the stream would first write the rest.)
fn arrived(stream: &mut StreamOwned<ClientConnection, TcpStream>) -> Vec<u8> {
    let (connection, socket) = (&mut stream.conn, &mut stream.sock);
    let mut plain = Vec::new();
    // The end of the stream and `WouldBlock` are errors; the bytes before them count.
    while connection.reader().read_to_end(&mut plain).is_err()
        && connection.read_tls(socket).is_ok_and(|count| count > 0)
        && connection.process_new_packets().is_ok()
    {}
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Result<(u16, &str), ()>) {
        let found = response(&mut text.as_bytes());
        let found = found.map(|response| (response.status, response.body)).map_err(|_| ());
        assert_eq!(found, expected.map(|(status, body)| (status, body.to_owned())), "{text}");
    }

    #[test]
    fn reads_responses() {
        check("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokay", Ok((200, "ok")));
        check("HTTP/1.1 503 No\r\n\r\nuntil the end", Ok((503, "until the end")));
        let chunked =
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n";
        check(chunked, Ok((200, "abc")));
        check("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut", Err(()));
        check("", Err(()));
    }
}
