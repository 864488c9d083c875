//! Calls an external server with one POST of a review.
//!
//! In: a kubeconfig that names the server, a review. Out: the review with its status, or an error.
//! Used by token reviews and by authorization. Upstream: `k8s.io/apiserver/pkg/util/webhook`.

use std::path::Path;
use std::time::Duration;

use base::backoff::Backoff;
use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use serde_json::Value as Json;
use transport::{ClientError, ClientOptions, HttpClient, Token};

/// Upstream: `DefaultAuthWebhookRetryBackoff`.
const TRIES: usize = 5;
const FIRST_WAIT: Duration = Duration::from_millis(500);
const LONGEST_WAIT: Duration = Duration::from_secs(3);
const ANSWER_BYTES: usize = 3 << 20;

/// A server that answers reviews. Clones share connections.
#[derive(Clone)]
pub struct Webhook {
    http: HttpClient,
    url: String,
}

#[derive(Debug, thiserror::Error)]
enum Failure {
    /// A retry may succeed.
    #[error("{0}")]
    Passing(String),
    #[error("{0}")]
    Lasting(String),
}

impl Webhook {
    /// The server and user of the file's current context.
    pub fn from_kubeconfig(path: &Path) -> Result<Self, String> {
        let config = pki::Kubeconfig::read(path).map_err(|error| error.to_string())?;
        let directory = path.parent().unwrap_or(Path::new("."));
        let found = config.resolve(None, directory).map_err(|error| error.to_string())?;
        let http = HttpClient::new(&ClientOptions {
            ca_pem: found.ca_pem,
            cert_pem: found.client_cert_pem,
            key_pem: found.client_key_pem,
            insecure: found.insecure_skip_tls_verify,
            server_name: found.tls_server_name,
            token: found.token.map(Token::fixed),
            user_agent: Some("kube-apiserver".into()),
            ..ClientOptions::default()
        });
        let http = http.map_err(|error| format!("{}: {error}", path.display()))?;
        if found.server.is_empty() {
            return Err(format!("{}: the kubeconfig names no server", path.display()));
        }
        Ok(Self { http, url: found.server })
    }

    /// A server at an absolute URL, called with an existing client.
    pub fn at(http: HttpClient, url: String) -> Self {
        Self { http, url }
    }

    /// Asks with retries until there is an answer, for at most `limit`.
    pub async fn ask(&self, review: &Json, limit: Duration) -> Result<Json, String> {
        let work = async {
            let mut backoff = Backoff::new(FIRST_WAIT, LONGEST_WAIT).with_jitter(0.2);
            let mut last = String::new();
            for attempt in 0..TRIES {
                if attempt > 0 {
                    tokio::time::sleep(backoff.step()).await;
                }
                match self.post(review).await {
                    Ok(answer) => return Ok(answer),
                    Err(Failure::Passing(why)) => last = why,
                    Err(Failure::Lasting(why)) => return Err(why),
                }
            }
            Err(last)
        };
        let late = || Err(format!("Post {:?}: context deadline exceeded", self.url));
        tokio::time::timeout(limit, work).await.unwrap_or_else(|_| late())
    }

    async fn post(&self, review: &Json) -> Result<Json, Failure> {
        let posting = |why: String| format!("Post {:?}: {why}", self.url);
        let request = Request::post(&self.url)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json, */*")
            .body(transport::full(review.to_string()))
            .map_err(|error| Failure::Lasting(posting(error.to_string())))?;
        let response = self.http.request(request).await.map_err(|error| match error {
            // Upstream does not retry if the connection fails.
            error if error.is_connect() => Failure::Lasting(posting(error.to_string())),
            error @ (ClientError::Pooled(_) | ClientError::Http(_) | ClientError::Body(_)) => {
                Failure::Passing(posting(error.to_string()))
            }
            error => Failure::Lasting(posting(error.to_string())),
        })?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_BYTES).collect().await;
        let body = body.map_err(|error| Failure::Passing(posting(error.to_string())))?.to_bytes();
        if !status.is_success() {
            return Err(refused(status, &body));
        }
        serde_json::from_slice(&body)
            .map_err(|error| Failure::Lasting(format!("couldn't decode the answer: {error}")))
    }
}

fn refused(status: StatusCode, body: &Bytes) -> Failure {
    let parsed: Json = serde_json::from_slice(body).unwrap_or_default();
    let text = match parsed["message"].as_str() {
        Some(message) => message.to_owned(),
        None => format!("the server answered {status}"),
    };
    let is_passing = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
    if is_passing { Failure::Passing(text) } else { Failure::Lasting(text) }
}
