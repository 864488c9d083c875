//! The backends of the audit log: a webhook that stops and returns, files that are rotated.

use std::io::Read;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use base::task::Tasks;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use pki::{Authority, Profile, San};
use serde_json::{Value, json};
use testkit::{places, wait};
use transport::tls::{ClientCerts, Identity, ServerTls, server_tls};
use transport::{Incoming, Limits, Listener};

use crate::support::{LONG, Scratch, Server};

/// Records the administrator's requests for ConfigMaps of one namespace.
const POLICY: &str = "apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: RequestResponse
  users: [kubernetes-admin]
  namespaces: [default]
  resources: [{group: '', resources: [configmaps]}]
";
const BACKOFF: Duration = Duration::from_millis(200);
/// Port of the receiver, which has its own address.
const PORT: u16 = 18_443;

/// The requests that a receiver got.
#[derive(Default)]
struct Received {
    lists: Vec<Value>,
    /// The times of refused requests.
    refused: Vec<Instant>,
}

/// An HTTPS server at its own loopback address that requires client certificates.
struct Receiver {
    runtime: tokio::runtime::Runtime,
    tasks: Tasks,
    address: SocketAddr,
    tls: ServerTls,
    authority: Authority,
    /// Number of requests that it refuses before it accepts one.
    refuses: Arc<AtomicU32>,
    /// Locked for a push or a read.
    received: Arc<Mutex<Received>>,
}

impl Receiver {
    fn start() -> Result<Self> {
        let authority = Authority::generate("audit")?;
        // Its own address stays free while it is stopped.
        let address = places::own_loopback();
        let sans = vec![San::parse(&address.to_string())];
        let issued = authority.issue(&Profile::server("audit", sans))?;
        let identity = Identity::from_pem(&issued.cert_pem, &issued.key_pem)?;
        let clients = ClientCerts::Verify(authority.cert_pem().to_owned());
        let mut receiver = Self {
            runtime: tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()?,
            tasks: Tasks::new("receiver"),
            address: SocketAddr::from((address, PORT)),
            tls: server_tls(&identity, &clients)?,
            authority,
            refuses: Arc::default(),
            received: Arc::default(),
        };
        receiver.come()?;
        Ok(receiver)
    }

    /// Listens, at the same address each time.
    fn come(&mut self) -> Result<()> {
        let listener = self.runtime.block_on(Listener::tcp(self.address))?;
        self.tasks = Tasks::new("receiver");
        let (refuses, received) = (self.refuses.clone(), self.received.clone());
        let service =
            tower::service_fn(move |request| answer(request, refuses.clone(), received.clone()));
        let limits = Limits { drain: Duration::from_millis(100), ..Limits::default() };
        let stop = self.tasks.stop_signal();
        let serving = transport::serve(listener, Some(self.tls.clone()), service, limits, stop);
        let _inside = self.runtime.enter();
        self.tasks.spawn_graceful("receiver", serving);
        Ok(())
    }

    /// Stops listening.
    fn go(&self) {
        self.runtime.block_on(self.tasks.shutdown(LONG));
    }

    fn kubeconfig(&self, path: &Path) -> Result<String> {
        let issued = self.authority.issue(&Profile::client("decapod", &[]))?;
        let server = format!("https://{}/k8s/audit?cluster=1", self.address);
        let authority = self.authority.cert_pem();
        let config = pki::Kubeconfig::with_certificate(&server, authority, "decapod", &issued);
        config.write(path, 0o600)?;
        Ok(path.display().to_string())
    }

    fn lists(&self) -> Vec<Value> {
        self.received.lock().expect("no panic under the lock").lists.clone()
    }

    fn refused(&self) -> Vec<Instant> {
        self.received.lock().expect("no panic under the lock").refused.clone()
    }

    fn events(&self) -> Vec<Value> {
        let items = |list: &Value| list["items"].as_array().cloned().unwrap_or_default();
        self.lists().iter().flat_map(items).collect()
    }

    /// Names of the objects of these verbs, in the order of arrival.
    fn names(&self, verb: &str) -> Vec<String> {
        let events = self.events();
        let wanted = events.iter().filter(|event| event["verb"] == verb);
        wanted
            .map(|event| event["objectRef"]["name"].as_str().unwrap_or_default().to_owned())
            .collect()
    }

    fn soon_has(&self, verb: &str, names: &[String]) -> Result<()> {
        wait::until(LONG, "events", || {
            let found = self.names(verb);
            ensure!(found == names, "{found:?}");
            Ok(())
        })
    }
}

async fn answer(
    request: Request<Incoming>,
    refuses: Arc<AtomicU32>,
    received: Arc<Mutex<Received>>,
) -> Result<Response<transport::Body>, std::convert::Infallible> {
    let is_right = request.uri().path() == "/k8s/audit"
        && request.uri().query() == Some("cluster=1")
        && request.method() == "POST";
    let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let list: Value = serde_json::from_slice(&body).unwrap_or_default();
    let mut received = received.lock().expect("no panic under the lock");
    let one_less = |left: u32| left.checked_sub(1);
    let refuses = || refuses.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok();
    let status = match (is_right, is_right && refuses()) {
        (false, _) => StatusCode::NOT_FOUND,
        (true, true) => {
            received.refused.push(wait::now());
            StatusCode::SERVICE_UNAVAILABLE
        }
        (true, false) => {
            received.lists.push(list);
            StatusCode::OK
        }
    };
    let mut response = Response::new(transport::empty());
    *response.status_mut() = status;
    Ok(response)
}

fn create(server: &Server, name: &str, size: usize) -> Result<()> {
    let object = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": name}, "data": {"text": "x".repeat(size)},
    });
    let path = "/api/v1/namespaces/default/configmaps";
    let answer = server.api()?.post(path, &object.to_string(), LONG)?;
    ensure!(answer.status == 201, "{}", answer.body);
    Ok(())
}

fn names(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|index| format!("{prefix}-{index:02}")).collect()
}

/// `apiserver_audit_error_total` of a plugin.
fn lost(server: &Server, plugin: &str) -> Result<u64> {
    let text = server.api()?.get("/metrics", LONG)?.body;
    let start = format!("apiserver_audit_error_total{{plugin=\"{plugin}\"}} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&start));
    Ok(line.context("no such figure")?.trim().parse()?)
}

#[test]
fn a_webhook_gets_batches_and_what_it_missed() -> Result<()> {
    let mut receiver = Receiver::start()?;
    let scratch = Scratch::new()?;
    let policy = scratch.file("policy.yaml", POLICY)?;
    let webhook = receiver.kubeconfig(&scratch.path().join("webhook.kubeconfig"))?;
    let mut server = Server::start_in(
        scratch,
        &[
            "--audit-policy-file",
            &policy,
            "--audit-webhook-config-file",
            &webhook,
            "--audit-webhook-batch-max-size=5",
            "--audit-webhook-batch-max-wait=2s",
            "--audit-webhook-initial-backoff=200ms",
            "--audit-webhook-truncate-enabled",
            "--audit-webhook-truncate-max-event-size=20000",
        ],
    )?;
    let mut expected = gathers(&receiver, &server)?;
    for list in receiver.lists() {
        ensure!(list["kind"] == "EventList" && list["apiVersion"] == "audit.k8s.io/v1", "{list}");
        ensure!(list["items"].as_array().is_some_and(|items| items.len() <= 5), "{list}");
    }

    misses(&receiver, &server, &mut expected)?;

    // The receiver is away for longer than the retries: events are lost, counted, and rarely logged.
    receiver.go();
    create(&server, "unheard", 10)?;
    wait::until(LONG, "the event is given up", || {
        ensure!(lost(&server, "webhook")? == 1, "not yet");
        Ok(())
    })?;
    create(&server, "unheard-too", 10)?;
    wait::until(LONG, "the next one is given up", || {
        ensure!(lost(&server, "webhook")? == 2, "not yet");
        Ok(())
    })?;
    ensure!(server.lines_about("audit events are lost") > 0, "not said:\n{}", server.log());
    server.speaks_seldom_of("audit events are lost")?;
    receiver.come()?;

    // An event above the limit loses its objects. A stop of the server loses no events, nor the end of a
    // watch, which ends with the server.
    let api = server.api()?;
    let (seen, first) = std::sync::mpsc::channel();
    let watcher = std::thread::spawn(move || {
        let path = "/api/v1/namespaces/default/configmaps?watch=1";
        let _ = api.stream(path, LONG, |_| seen.send(()).is_ok());
    });
    first.recv_timeout(LONG).context("a watched object")?;
    create(&server, "large", 30_000)?;
    expected.push("large".to_owned());
    server.stop()?;
    ensure!(watcher.join().is_ok(), "the watcher panicked");
    receiver.soon_has("create", &expected)?;
    let events = receiver.events();
    let is_end = |event: &Value| event["verb"] == "watch" && event["stage"] == "ResponseComplete";
    ensure!(events.iter().any(is_end), "the watch has no end");
    let large = events.iter().find(|event| event["objectRef"]["name"] == "large");
    let large = large.context("the large one")?;
    ensure!(large["annotations"]["audit.k8s.io/truncated"] == "true", "{large}");
    ensure!(large["requestObject"].is_null() && large["responseObject"].is_null(), "{large}");
    Ok(())
}

/// Sends more events than fit into one batch, and then others until some arrived within the time of one
/// batch, however slow the machine is. Returns their names.
fn gathers(receiver: &Receiver, server: &Server) -> Result<Vec<String>> {
    let mut expected = names("first", 12);
    for name in &expected {
        create(server, name, 10)?;
    }
    receiver.soon_has("create", &expected)?;
    let is_shared = |list: &Value| list["items"].as_array().is_some_and(|items| items.len() > 1);
    wait::until(LONG, "events that share a post", || {
        if receiver.lists().iter().any(is_shared) {
            return Ok(());
        }
        let more: Vec<String> = [1, 2].map(|at| format!("more-{}", expected.len() + at)).into();
        for name in &more {
            create(server, name, 10)?;
        }
        expected.extend(more);
        receiver.soon_has("create", &expected)?;
        anyhow::bail!("each came alone")
    })?;
    Ok(expected)
}

/// A receiver that refuses gets retries, each after a longer pause, and finally everything.
fn misses(receiver: &Receiver, server: &Server, expected: &mut Vec<String>) -> Result<()> {
    // Fewer than the maximum number of retries.
    receiver.refuses.store(3, Ordering::Relaxed);
    let second = names("second", 3);
    for name in &second {
        create(server, name, 10)?;
    }
    expected.extend(second);
    receiver.soon_has("create", expected)?;
    let tries = receiver.refused();
    ensure!(tries.len() == 3, "{} were refused", tries.len());
    for (step, pair) in tries.windows(2).enumerate() {
        let pause = pair[1].duration_since(pair[0]);
        let least = BACKOFF.mul_f64(1.5_f64.powi(i32::try_from(step)?));
        ensure!(pause >= least, "try {step}: {pause:?} is less than {least:?}");
    }
    ensure!(lost(server, "webhook")? == 0, "some are lost");
    Ok(())
}

#[test]
fn log_files_are_rotated_and_compressed() -> Result<()> {
    let scratch = Scratch::new()?;
    let policy = scratch.file("policy.yaml", POLICY)?;
    let directory = scratch.path().join("logs");
    let log = directory.join("audit.log").display().to_string();
    let server = Server::start_in(
        scratch,
        &[
            "--audit-policy-file",
            &policy,
            "--audit-log-path",
            &log,
            "--audit-log-maxsize=1",
            "--audit-log-maxbackup=2",
            "--audit-log-compress",
        ],
    )?;
    // Request and response: 600 KB each.
    for name in names("big", 6) {
        create(&server, &name, 300_000)?;
    }
    // An event is written when its answer is sent.
    wait::until(LONG, "the files", || check_files(&directory, &log))
}

fn check_files(directory: &Path, log: &str) -> Result<()> {
    let (mut old, mut lines) = (0, 0);
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let mut text = String::new();
        if path.extension().is_some_and(|end| end == "gz") {
            old += 1;
            flate2::read::GzDecoder::new(std::fs::File::open(&path)?).read_to_string(&mut text)?;
        } else {
            ensure!(path.display().to_string() == log, "{} is not compressed", path.display());
            text = std::fs::read_to_string(&path)?;
        }
        ensure!(text.len() <= 1 << 20, "{} is too long", path.display());
        for line in text.lines() {
            let event: Value = serde_json::from_str(line)?;
            ensure!(event["responseObject"]["data"]["text"].is_string(), "no objects");
            lines += 1;
        }
    }
    ensure!(old == 2 && lines == 3, "{old} old files, {lines} events");
    Ok(())
}
