//! The secure port of a controller manager or a scheduler that runs alone: health, metrics, configz.
//!
//! ```text
//!  TLS ► authentication ─► authorization ─► page
//!        └── delegated: the cluster answers both
//! ```
//!
//! In: upstream's flags, and the component's own pages ([`Page`]). Out: the pages, over HTTPS only.
//! Invariant: only `--authorization-always-allow-paths` are served without authentication.
//! Deviation: both have `/livez`, `/readyz` and `/version`; upstream's controller manager has only
//! `/healthz`, and neither has `/version`.
//! Upstream: `controller-manager/app/serve.go`, `cmd/kube-scheduler/app/server.go`.

mod delegated;

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use apiserver::codec::{self, Accept};
use apiserver::health::Health;
use apiserver::metrics::family;
use apiserver::query::Query;
use base::metrics::process;
use base::task::Tasks;
use base::watch::FileWatch;
use client::election::{Leadership, Timing};
use futures::FutureExt;
use http::request::Parts;
use http::{HeaderValue, Request, Response, StatusCode, header};
use pki::{Authority, Issued, Profile};
use serde_json::Value;
use transport::tls::{ClientCerts, Identity, ServerTls};
use transport::{Limits, Listener};

use delegated::Delegated;

/// Time for a leader to end after its lease has expired. Upstream: both components' watchdogs.
const PATIENCE: Duration = Duration::from_secs(20);
/// Clocks jump and machines sleep: a waiting renewal checks the time this often.
const LOOK: Duration = Duration::from_secs(1800);
const LEADS: &str = "leader_election_master_status";
const LEADS_HELP: &str = "[ALPHA] Gauge of if the reporting system is master of the relevant lease, 0 indicates backup, 1 indicates master. 'name' is the string used to identify the lease. Please make sure to group by name.";

#[derive(clap::Args, Clone, Debug)]
pub struct SecurePort {
    /// Listen address of --secure-port
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED))]
    bind_address: IpAddr,
    /// HTTPS port of health, metrics and configz; 0: none [default: 10257 for
    /// kube-controller-manager, 10258 for cloud-controller-manager, 10259 for kube-scheduler]
    #[arg(long)]
    secure_port: Option<u16>,
    /// Directory of a generated certificate [default: in memory]
    #[arg(long, value_name = "DIRECTORY")]
    cert_dir: Option<PathBuf>,
    /// Certificate, PEM; watched for changes [default: a self-signed one is generated]
    #[arg(long, value_name = "FILE", requires = "tls_private_key_file")]
    tls_cert_file: Option<PathBuf>,
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    tls_private_key_file: Option<PathBuf>,
    #[command(flatten)]
    tls: crate::api_settings::TlsFlags,
    #[command(flatten)]
    delegated: delegated::Delegation,
}

/// The pages of a component.
#[derive(Clone)]
pub struct Page(Arc<Inner>);

struct Inner {
    name: &'static str,
    /// By path. Upstream's controller manager adds its controllers to `/healthz`, its scheduler adds its
    /// readiness checks to `/readyz`.
    health: [(&'static str, Health); 3],
    leadership: Leadership,
    configz: Value,
    figures: Vec<fn(&mut String)>,
    /// The scheduler's page `/metrics/resources`.
    resources: Option<fn(&mut String)>,
}

impl Page {
    /// `elects`: whether there is a lease. `configz` is the answer to that path.
    pub fn new(
        name: &'static str,
        elects: bool,
        leadership: &Leadership,
        configz: Value,
        figures: &[fn(&mut String)],
    ) -> Self {
        let health = ["healthz", "livez", "readyz"].map(|path| (path, Health::bare()));
        for (path, health) in &health {
            match elects && *path != "livez" {
                true => {
                    let leadership = leadership.clone();
                    health.add("leaderElection", move || {
                        leadership.check(name, Timing::default(), PATIENCE)
                    });
                }
                false => health.add("ping", || Ok(())),
            }
        }
        let (leadership, figures) = (leadership.clone(), figures.to_vec());
        // Only the scheduler knows all pods.
        let resources: fn(&mut String) = scheduler::encode_pod_resources;
        let resources = (name == "kube-scheduler").then_some(resources);
        Self(Arc::new(Inner { name, health, leadership, configz, figures, resources }))
    }

    pub fn healthz(&self) -> &Health {
        &self.0.health[0].1
    }

    pub fn readyz(&self) -> &Health {
        &self.0.health[2].1
    }

    async fn answer(&self, parts: &Parts) -> Response<apiserver::resource::Body> {
        let path = parts.uri.path();
        let query = Query::parse(parts.uri.query().unwrap_or_default());
        for (name, health) in &self.0.health {
            let below = path.trim_matches('/').split('/').next();
            if below == Some(name)
                && let Some(response) = health.serve(path, &query).await
            {
                return response;
            }
        }
        let json =
            |value: &Value| codec::json(&Accept::JSON, StatusCode::OK, value.to_string().into());
        let figures = |text: String| {
            let content_type = "text/plain; version=0.0.4; charset=utf-8";
            codec::respond(StatusCode::OK, content_type, codec::full(text))
        };
        match path {
            "/metrics" => figures(self.metrics()),
            "/metrics/resources" if self.0.resources.is_some() => {
                let mut page = String::new();
                self.0.resources.into_iter().for_each(|encode| encode(&mut page));
                figures(page)
            }
            "/metrics/slis" => {
                figures(Health::slis(self.0.health.iter().map(|(_, health)| health)))
            }
            "/configz" => json(&self.0.configz),
            "/version" => json(&apiserver::serve::Version::default().json()),
            _ => codec::page_not_found(),
        }
    }

    fn metrics(&self) -> String {
        let mut out = String::new();
        apiserver::serve::Version::default().encode(&mut out);
        process::encode(&mut out);
        release::features::encode_metrics(&mut out);
        family(&mut out, LEADS, "gauge", LEADS_HELP);
        let leads = u8::from(self.0.leadership.leads());
        out.push_str(&format!("{LEADS}{{name=\"{}\"}} {leads}\n", self.0.name));
        for figures in &self.0.figures {
            figures(&mut out);
        }
        base::metrics::encode_registered(&mut out);
        out
    }
}

impl SecurePort {
    /// The listen address, from `--secure-port` or with the component's default; `None` for port 0.
    pub fn address(&self, usual: u16) -> Option<SocketAddr> {
        let port = self.secure_port.unwrap_or(usual);
        (port != 0).then_some(SocketAddr::new(self.bind_address, port))
    }

    /// Sets TLS for the process; before anything listens.
    pub fn install_tls(&self) -> anyhow::Result<()> {
        self.tls.install()
    }

    /// Serves the page until the tasks end; returns when the port is open.
    pub async fn serve(&self, usual: u16, page: &Page, tasks: &Tasks) -> anyhow::Result<()> {
        let Some(address) = self.address(usual) else { return Ok(()) };
        let pair = Pair::new(self, page.0.name);
        let issued = pair.next(None)?;
        let tls = transport::tls::server_tls(&identity(&issued)?, &ClientCerts::Request)?;
        let listener = Listener::tcp(address).await.with_context(|| {
            format!(
                "cannot listen on {address}; choose another port with --secure-port, or 0 for none"
            )
        })?;
        let delegated = Arc::new(Delegated::start(&self.delegated, page.0.name, tasks)?);
        let page = page.clone();
        let service = tower::service_fn(move |request: Request<_>| {
            let (page, delegated) = (page.clone(), delegated.clone());
            async move {
                let (parts, _) = request.into_parts();
                Ok::<_, Infallible>(guarded(&page, &delegated, &parts).await)
            }
        });
        let (stop, served) = (tasks.stop_signal(), tls.clone());
        let limits =
            Limits { connections: 256, drain: Duration::from_secs(1), ..Limits::default() };
        tasks.spawn_graceful("secure port", async move {
            transport::serve(listener, Some(served), service, limits, stop).await;
        });
        tasks.spawn("secure port certificate", async move { pair.keep(issued, tls).await });
        tracing::info!(%address, "Serving securely");
        Ok(())
    }
}

async fn guarded(
    page: &Page,
    delegated: &Delegated,
    parts: &Parts,
) -> Response<apiserver::resource::Body> {
    let answer = async {
        match delegated.admit(parts).await {
            Ok(()) => page.answer(parts).await,
            Err(refusal) => codec::refused(&refusal),
        }
    };
    // A panic in a page must not stop the scheduler.
    let answered = std::panic::AssertUnwindSafe(answer).catch_unwind().await;
    let mut response = answered.unwrap_or_else(|_| {
        codec::text(StatusCode::INTERNAL_SERVER_ERROR, "This request caused the server to panic\n")
    });
    let private = HeaderValue::from_static("no-cache, private");
    response.headers_mut().insert(header::CACHE_CONTROL, private);
    response
}

/// The port's certificate: from flags, kept in a directory, or in memory only.
pub struct Pair {
    files: Option<(PathBuf, PathBuf)>,
    /// Whether this process may generate it.
    is_own: bool,
    /// Common name of a generated certificate.
    subject: String,
    /// Host names and addresses of a generated certificate.
    names: Vec<String>,
}

impl Pair {
    fn new(flags: &SecurePort, name: &str) -> Self {
        let (files, is_own) = match (&flags.tls_cert_file, &flags.tls_private_key_file) {
            (Some(cert), Some(key)) => (Some((cert.clone(), key.clone())), false),
            _ => {
                let named = |end: &str| {
                    flags.cert_dir.as_ref().map(|dir| dir.join(format!("{name}.{end}")))
                };
                (named("crt").zip(named("key")), true)
            }
        };
        let mut names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let address = flags.bind_address.to_string();
        if !flags.bind_address.is_unspecified() && !names.contains(&address) {
            names.push(address);
        }
        Self { files, is_own, subject: "localhost".into(), names }
    }

    /// The certificate of a kubelet: the files of the flags, or one that is generated for `names` and kept in
    /// `directory`. Upstream: InitializeTLS.
    pub fn of_kubelet(
        brought: Option<(PathBuf, PathBuf)>,
        directory: &Path,
        subject: &str,
        names: Vec<String>,
    ) -> Self {
        let is_own = brought.is_none();
        let own = || (directory.join("kubelet.crt"), directory.join("kubelet.key"));
        let files = Some(brought.unwrap_or_else(own));
        Self { files, is_own, subject: subject.to_owned(), names }
    }

    /// TLS with this certificate; a task of `tasks` renews it.
    pub fn serve(self, tasks: &Tasks) -> anyhow::Result<ServerTls> {
        let issued = self.next(None)?;
        let tls = transport::tls::server_tls(&identity(&issued)?, &ClientCerts::Request)?;
        let kept = tls.clone();
        tasks.spawn("serving certificate", async move { self.keep(issued, kept).await });
        Ok(tls)
    }

    /// The certificate to use now: `present` as long as it is valid.
    fn next(&self, present: Option<&Issued>) -> anyhow::Result<Issued> {
        let now = base::clock::now();
        let stored = match &self.files {
            Some((cert, key)) if !self.is_own || (cert.exists() && key.exists()) => {
                Some(Issued { cert_pem: read(cert)?, key_pem: read(key)? })
            }
            _ => present.cloned(),
        };
        match stored {
            Some(stored) if !self.is_own || !pki::needs_renewal(&stored.cert_pem, now) => {
                Ok(stored)
            }
            _ => self.make(),
        }
    }

    /// As upstream: a leaf of an authority whose key is not kept.
    fn make(&self) -> anyhow::Result<Issued> {
        let stamp = base::clock::now().as_second();
        let subject = &self.subject;
        let authority = Authority::generate(&format!("{subject}-ca@{stamp}"))?;
        let profile = Profile::server(format!("{subject}@{stamp}"), vec![]).with_sans(&self.names);
        let mut issued = authority.issue(&profile)?;
        issued.cert_pem.push_str(authority.cert_pem());
        if let Some((cert, key)) = &self.files {
            if let Some(directory) = cert.parent() {
                std::fs::create_dir_all(directory)
                    .with_context(|| format!("cannot make {}", directory.display()))?;
            }
            pki::write_private(key, issued.key_pem.as_bytes(), 0o600)?;
            pki::write_private(cert, issued.cert_pem.as_bytes(), 0o644)?;
        }
        Ok(issued)
    }

    /// Renews the certificate: when files change, or when a generated one gets old.
    async fn keep(&self, mut present: Issued, tls: ServerTls) {
        let watches: Vec<FileWatch> = match &self.files {
            Some((cert, key)) => {
                [cert, key].into_iter().filter_map(|path| FileWatch::open(path).ok()).collect()
            }
            None => vec![],
        };
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK) => {}
                () = crate::rotation::any_change(&watches) => {}
            }
            match self.next(Some(&present)).and_then(|next| apply(&present, next, &tls)) {
                Ok(next) => present = next,
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::warn!(error, "failed to replace the certificate of the secure port");
                }
            }
        }
    }
}

fn apply(present: &Issued, next: Issued, tls: &ServerTls) -> anyhow::Result<Issued> {
    if (&present.cert_pem, &present.key_pem) != (&next.cert_pem, &next.key_pem) {
        let config = transport::tls::server_config(&identity(&next)?, &ClientCerts::Request)?;
        tls.store(Arc::new(config));
        tracing::info!("replaced the certificate of the secure port");
    }
    Ok(next)
}

fn identity(issued: &Issued) -> anyhow::Result<Identity> {
    Ok(Identity::from_pem(&issued.cert_pem, &issued.key_pem)?)
}

fn read(path: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(path);
    let text = text.with_context(|| format!("cannot read {}", path.display()))?;
    match text.trim() {
        "" => bail!("{} is empty", path.display()),
        _ => Ok(text),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: SecurePort,
    }

    fn flags(words: &[&str]) -> SecurePort {
        Line::try_parse_from(["x"].iter().chain(words)).expect("flags").flags
    }

    #[test]
    fn the_port_is_a_flag_or_the_components() {
        let check = |words: &[&str], expected: Option<&str>| {
            let address = flags(words).address(10259).map(|address| address.to_string());
            assert_eq!(address.as_deref(), expected, "{words:?}");
        };
        check(&[], Some("0.0.0.0:10259"));
        check(&["--secure-port=1234", "--bind-address=::1"], Some("[::1]:1234"));
        check(&["--secure-port=0"], None);
        assert!(Line::try_parse_from(["x", "--tls-cert-file=a"]).is_err());
    }

    #[test]
    fn a_certificate_names_its_addresses() {
        let check = |address: &str, expected: &[&str]| {
            let pair = Pair::new(&flags(&["--bind-address", address]), "kube-scheduler");
            assert_eq!(pair.names, expected);
        };
        check("0.0.0.0", &["localhost", "127.0.0.1"]);
        check("127.0.0.1", &["localhost", "127.0.0.1"]);
        check("127.0.0.2", &["localhost", "127.0.0.1", "127.0.0.2"]);
        check("192.0.2.1", &["localhost", "127.0.0.1", "192.0.2.1"]);
    }

    #[test]
    fn a_certificate_is_generated_kept_and_renewed() {
        let root = tempfile::tempdir().expect("a directory");
        let directory = root.path().join("certs");
        let flags = flags(&["--cert-dir", &directory.display().to_string()]);
        let pair = Pair::new(&flags, "kube-scheduler");
        let first = pair.next(None).expect("made");
        let chain = pki::certificates(first.cert_pem.as_bytes()).expect("PEM");
        assert_eq!(chain.len(), 2);
        assert!(chain[0].is_issued_by(&chain[1]), "the chain is whole");
        assert!(directory.join("kube-scheduler.key").exists(), "it is kept");
        let again = pair.next(None).expect("read");
        assert_eq!(again.cert_pem, first.cert_pem, "a second start has the same");
        // Without a directory each process has its own certificate, for as long as it runs.
        let names = vec!["localhost".into()];
        let pair = Pair { files: None, is_own: true, subject: "localhost".into(), names };
        let first = pair.next(None).expect("made");
        let again = pair.next(Some(&first)).expect("the same");
        assert_eq!(again.cert_pem, first.cert_pem);
    }

    #[test]
    fn a_kubelet_reads_or_generates_its_certificate() {
        let root = tempfile::tempdir().expect("a directory");
        let directory = root.path().join("pki");
        let names = || vec!["n1".to_owned(), "192.0.2.1".to_owned()];
        let made = Pair::of_kubelet(None, &directory, "n1", names()).next(None).expect("made");
        let chain = pki::certificates(made.cert_pem.as_bytes()).expect("PEM");
        assert!(chain[0].common_name.starts_with("n1@"), "{}", chain[0].common_name);
        let again = Pair::of_kubelet(None, &directory, "n1", names()).next(None).expect("read");
        assert_eq!(again.cert_pem, made.cert_pem, "a second start has the same");
        let brought = (directory.join("kubelet.crt"), directory.join("kubelet.key"));
        let pair = Pair::of_kubelet(Some(brought), root.path(), "n1", names());
        assert_eq!(pair.next(None).expect("read").cert_pem, made.cert_pem);
        let missing = (root.path().join("none.crt"), root.path().join("none.key"));
        let pair = Pair::of_kubelet(Some(missing), root.path(), "n1", names());
        assert!(pair.next(None).is_err(), "a certificate of the flags is never generated");
    }

    #[tokio::test]
    async fn checks_are_upstreams() {
        let leadership = Leadership::default();
        let page = Page::new("kube-scheduler", true, &leadership, Value::Null, &[]);
        page.readyz().add("sched-handler-sync", || Err("not yet".into()));
        let check = async |uri: &str, expected: (u16, &str)| {
            let (parts, ()) = Request::builder().uri(uri).body(()).expect("a request").into_parts();
            let response = page.answer(&parts).await;
            let status = response.status().as_u16();
            let body = http_body_util::BodyExt::collect(response.into_body()).await;
            let body = body.expect("no errors").to_bytes();
            let body = String::from_utf8_lossy(&body);
            assert_eq!((status, body.as_ref()), expected, "{uri}");
        };
        check("/healthz", (200, "ok")).await;
        check("/healthz?verbose", (200, "[+]leaderElection ok\nhealthz check passed\n")).await;
        check("/livez?verbose", (200, "[+]ping ok\nlivez check passed\n")).await;
        let failing = "[+]leaderElection ok\n[-]sched-handler-sync failed: reason withheld\n[+]shutdown ok\nreadyz check failed\n";
        check("/readyz", (500, failing)).await;
        check("/healthz/leaderElection", (200, "ok")).await;
        check("/nothing", (404, "404 page not found\n")).await;
        assert!(
            page.metrics().contains("leader_election_master_status{name=\"kube-scheduler\"} 0")
        );
    }
}
