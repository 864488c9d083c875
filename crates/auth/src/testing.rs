//! A server on the loopback interface, for tests that need an issuer or a webhook.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base::task::Tasks;
use http::{Request, Response};
use http_body_util::BodyExt;
use pki::{Authority, Profile};
use serde_json::Value as Json;
use transport::tls::{ClientCerts, Identity, server_tls};
use transport::{Incoming, Limits, Listener};

pub(crate) struct Loopback {
    pub url: String,
    pub ca_pem: String,
    tasks: Tasks,
    directory: tempfile::TempDir,
}

/// Computes the answer from path and body: a status and a body.
type Answer = Arc<dyn Fn(&str, Json) -> (u16, Json) + Send + Sync>;

impl Loopback {
    /// `answer` gets the server's URL first.
    pub async fn start<F>(answer: impl FnOnce(String) -> F) -> Self
    where
        F: Fn(&str, Json) -> (u16, Json) + Send + Sync + 'static,
    {
        let authority = Authority::generate("issuer-ca").expect("keys can be made");
        let profile = Profile::server("issuer", vec![]).with_sans(["127.0.0.1"]);
        let issued = authority.issue(&profile).expect("signs");
        let identity = Identity::from_pem(&issued.cert_pem, &issued.key_pem).expect("parses");
        let tls = server_tls(&identity, &ClientCerts::Ignore).expect("settings");
        let local = "127.0.0.1:0".parse().expect("an address");
        let listener = Listener::tcp(local).await.expect("binds");
        let url = format!("https://{}", listener.local_addr().expect("a TCP listener"));
        let answer: Answer = Arc::new(answer(url.clone()));
        let service = tower::service_fn(move |request| serve(answer.clone(), request));
        let tasks = Tasks::new("loopback");
        let stop = tasks.stop_signal();
        let limits = Limits { drain: Duration::ZERO, ..Limits::default() };
        let served = transport::serve(listener, Some(tls), service, limits, stop);
        tasks.spawn_graceful("serve", served);
        let directory = tempfile::tempdir().expect("a directory");
        Self { url, ca_pem: authority.cert_pem().to_owned(), tasks, directory }
    }

    /// A kubeconfig that names this server.
    pub fn kubeconfig(&self) -> PathBuf {
        let path = self.directory.path().join("kubeconfig");
        let url = format!("{}/review", self.url);
        let config = pki::Kubeconfig::with_token(&url, &self.ca_pem, "me", "secret");
        config.write(&path, 0o600).expect("writes");
        path
    }

    pub fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    pub async fn shutdown(self) {
        self.tasks.shutdown(Duration::from_secs(5)).await;
    }
}

async fn serve(
    answer: Answer,
    request: Request<Incoming>,
) -> Result<Response<transport::Body>, std::convert::Infallible> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let body = serde_json::from_slice(&body).unwrap_or_default();
    let (status, json) = answer(parts.uri.path(), body);
    let response = Response::builder().status(status).body(transport::full(json.to_string()));
    Ok(response.expect("a response"))
}
