//! Hostile clients against the whole server: each is disconnected and logged once, other clients are
//! served meanwhile, and memory does not grow.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use testkit::wait;
use transport::tls::{Trust, client_config};

use crate::support::{LONG, Server};

/// The maximum number of connections of a server.
const CROWD: u64 = 10_000;
/// Limit of memory for an attack, including every connection's buffers.
const MEGABYTES: u64 = 300;

/// A server under attack.
struct Victim {
    server: Server,
    /// Resident memory in kilobytes before the attack.
    before: u64,
}

impl Victim {
    fn start() -> Result<Self> {
        let mut server = Server::start(&[])?;
        // The first requests fill the caches.
        let answer = server.api()?.get("/api/v1/namespaces", LONG)?;
        ensure!(answer.status == 200, "{}", answer.body);
        let before = resident(server.process_id()?)?;
        Ok(Self { server, before })
    }

    fn address(&self) -> Result<SocketAddr> {
        let text = self.server.kubeconfig()?;
        let place = text.split("https://").nth(1).context("a server")?;
        Ok(place.lines().next().unwrap_or_default().trim().trim_end_matches('"').parse()?)
    }

    /// One TLS connection without credentials. A server under load shortens the handshake limit: a
    /// well-behaved client retries.
    fn encrypted(&self) -> Result<rustls::StreamOwned<rustls::ClientConnection, TcpStream>> {
        let mut config = client_config(&Trust::Anyone, None)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let config = Arc::new(config);
        wait::until(LONG, "a handshake", || {
            let socket = TcpStream::connect(self.address()?)?;
            socket.set_read_timeout(Some(LONG))?;
            let name = rustls::pki_types::ServerName::try_from("127.0.0.1")?;
            let connection = rustls::ClientConnection::new(config.clone(), name)?;
            let mut io = rustls::StreamOwned::new(connection, socket);
            io.conn.complete_io(&mut io.sock)?;
            Ok(io)
        })
    }

    /// A well-behaved client is served.
    fn serves(&self, path: &str) -> Result<()> {
        wait::until(LONG, "others are served", || {
            let answer = self.server.api()?.get(path, LONG)?;
            ensure!(answer.status == 200, "{}", answer.body);
            Ok(())
        })
    }

    /// Other clients are served, memory has not grown, and there are few lines of each cause. Causes in
    /// `perhaps` may appear too.
    fn check(&mut self, causes: &[&str], perhaps: &[&str]) -> Result<()> {
        self.serves("/api/v1/namespaces/default")?;
        let grown = resident(self.server.process_id()?)?.saturating_sub(self.before) / 1024;
        ensure!(grown < MEGABYTES, "{grown} MB more");
        wait::until(LONG, "a line for each cause", || {
            for cause in causes {
                ensure!(self.server.lines_about(cause) > 0, "{cause}\n{}", self.server.log());
            }
            Ok(())
        })?;
        let known: Vec<&str> = causes.iter().chain(perhaps).copied().collect();
        for cause in &known {
            self.server.speaks_seldom_of(cause)?;
        }
        self.server.complains_of_nothing_but(&known)
    }
}

/// Memory of a process in kilobytes.
fn resident(process: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("a size")?.parse()?)
}

/// Number of open files of a process.
fn files(process: u32) -> Result<u64> {
    Ok(std::fs::read_dir(format!("/proc/{process}/fd"))?.count() as u64)
}

/// Everything until the other side closes or resets the connection.
fn rest(io: &mut impl Read) -> String {
    let mut all = vec![];
    let _ = io.read_to_end(&mut all);
    String::from_utf8_lossy(&all).into_owned()
}

#[test]
fn ten_thousand_idle_connections_do_not_block_others() -> Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard.max(soft), hard)?;
    let crowd = CROWD.min(hard.saturating_sub(1000));
    if crowd < CROWD {
        println!("only {crowd} connections: this process may not open more files");
    }
    let mut victim = Victim::start()?;
    let address = victim.address()?;
    let mut idle = vec![];
    for _ in 0..crowd {
        idle.push(TcpStream::connect_timeout(&address, LONG)?);
    }
    // Some are further: encrypted, but without a request.
    let mut quiet = vec![];
    for _ in 0..100 {
        quiet.push(victim.encrypted()?);
    }
    victim.serves("/readyz")?;
    // Silent clients are disconnected although they want to stay.
    let process = victim.server.process_id()?;
    wait::until(LONG, "the idle connections are cut", || {
        let open = files(process)?;
        ensure!(open < crowd / 2, "{open} files are open");
        Ok(())
    })?;
    // A slow machine does not accept them all before it disconnects the first.
    victim.check(&["TLS handshake error"], &["idle connections are cut early"])
}

#[test]
fn old_tls_and_no_tls_are_refused() -> Result<()> {
    let mut victim = Victim::start()?;
    for _ in 0..50 {
        let mut io = TcpStream::connect(victim.address()?)?;
        io.write_all(b"GET /api HTTP/1.1\r\nHost: x\r\n\r\n")?;
        ensure!(!rest(&mut io).contains("HTTP/1.1 200"), "served in the clear");
    }
    for minor in [1_u8, 2] {
        // A ClientHello of TLS 1.0 and 1.1: two suites, no compression, no extensions.
        let mut hello = vec![3, minor];
        hello.extend([7; 32]);
        hello.extend([0, 0, 4, 0xc0, 0x13, 0x00, 0x2f, 1, 0]);
        let length = u8::try_from(hello.len())?;
        let mut record = vec![22, 3, 1, 0, length + 4, 1, 0, 0, length];
        record.extend(hello);
        let mut io = TcpStream::connect(victim.address()?)?;
        io.write_all(&record)?;
        let mut answer = vec![];
        let _ = io.read_to_end(&mut answer);
        // A fatal alert.
        ensure!(answer.starts_with(&[21]) && answer.get(5) == Some(&2), "{answer:?}");
    }
    victim.check(&["TLS handshake error"], &[])
}

#[test]
fn huge_headers_are_refused() -> Result<()> {
    let mut victim = Victim::start()?;
    let line = format!("X-Huge: {}\r\n", "x".repeat(60_000));
    for _ in 0..20 {
        let mut io = victim.encrypted()?;
        io.write_all(b"GET /api HTTP/1.1\r\nHost: x\r\n")?;
        for _ in 0..40 {
            // The server may have closed the connection already.
            if io.write_all(line.as_bytes()).is_err() {
                break;
            }
        }
        let answer = rest(&mut io);
        ensure!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
    }
    victim.check(&["HTTP error"], &[])
}

#[test]
fn wrong_credentials_do_not_fill_the_log() -> Result<()> {
    let mut victim = Victim::start()?;
    for _ in 0..50 {
        let mut io = victim.encrypted()?;
        io.write_all(
            b"GET /api HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\
            Authorization: Bearer a.b.c\r\n\r\n",
        )?;
        let answer = rest(&mut io);
        ensure!(answer.starts_with("HTTP/1.1 401"), "{answer}");
    }
    victim.check(&["Unable to authenticate the request"], &[])
}

/// Schemas nested to the maximum depth of objects: one once overflowed a worker's stack.
fn definition(depth: usize) -> String {
    let schema = r#"{"type":"object","properties":{"a":"#.repeat(depth)
        + r#"{"type":"string"}"#
        + &"}}".repeat(depth);
    format!(
        r#"{{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{{"name":"deeps.a.test"}},"spec":{{"group":"a.test","scope":"Namespaced","names":{{"plural":"deeps","kind":"Deep"}},"versions":[{{"name":"v1","served":true,"storage":true,"schema":{{"openAPIV3Schema":{schema}}}}}]}}}}"#
    )
}

#[test]
fn bodies_too_deep_and_numbers_too_long_are_refused() -> Result<()> {
    const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions?dryRun=All";
    const MAPS: &str = "/api/v1/namespaces/default/configmaps?dryRun=All";
    const PODS: &str = "/api/v1/namespaces/default/pods?dryRun=All";
    let map = |rest: &str| {
        format!(r#"{{"apiVersion":"v1","kind":"ConfigMap","metadata":{{"name":"x"}},"zz":{rest}}}"#)
    };
    let pod = |cpu: &str| {
        format!(
            r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"x"}},"spec":{{"containers":[{{"name":"c","image":"i","resources":{{"requests":{{"cpu":"{cpu}"}}}}}}]}}}}"#
        )
    };
    let list = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
    let mut victim = Victim::start()?;
    for (path, body, allowed) in [
        (DEFINITIONS, definition(55), &[201][..]),
        (DEFINITIONS, definition(1000), &[400]),
        (MAPS, map(&list(9_000)), &[201]),
        (MAPS, map(&list(100_000)), &[400]),
        (PODS, pod(&"9".repeat(100_000)), &[201, 400, 422]),
        (PODS, pod(&format!("{}E", "1".repeat(35))), &[201, 400, 422]),
        (PODS, pod("1e100000"), &[400]),
    ] {
        let answer = victim.server.api()?.post(path, &body, LONG)?;
        let body = &body[..body.len().min(200)];
        ensure!(allowed.contains(&answer.status), "{} {}: {body}", answer.status, answer.body);
    }
    victim.check(&[], &[])
}
