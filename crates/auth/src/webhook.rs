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

use crate::{ConfigError, WebhookError};

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

impl Webhook {
    /// The server and user of the file's current context.
    pub fn from_kubeconfig(path: &Path) -> Result<Self, ConfigError> {
        let config = pki::Kubeconfig::read(path)?;
        let directory = path.parent().unwrap_or(Path::new("."));
        let found = config.resolve(None, directory)?;
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
        let shown = path.display().to_string();
        if found.server.is_empty() {
            return Err(ConfigError::NoServer(shown));
        }
        let http = http.map_err(|error| ConfigError::Client { path: shown, error })?;
        Ok(Self { http, url: found.server })
    }

    /// A server at an absolute URL, called with an existing client.
    pub fn at(http: HttpClient, url: String) -> Self {
        Self { http, url }
    }

    /// Asks with retries until there is an answer, for at most `limit`.
    pub async fn ask(&self, review: &Json, limit: Duration) -> Result<Json, WebhookError> {
        let work = async {
            let mut backoff = Backoff::new(FIRST_WAIT, LONGEST_WAIT).with_jitter(0.2);
            for _ in 1..TRIES {
                match self.post(review).await {
                    Err(error) if error.is_passing() => {}
                    done => return done,
                }
                tokio::time::sleep(backoff.step()).await;
            }
            self.post(review).await
        };
        let late = |_| Err(self.posting("context deadline exceeded", false));
        tokio::time::timeout(limit, work).await.unwrap_or_else(late)
    }

    fn posting(&self, why: impl ToString, passing: bool) -> WebhookError {
        WebhookError::Post { url: self.url.clone(), why: why.to_string(), passing }
    }

    async fn post(&self, review: &Json) -> Result<Json, WebhookError> {
        let request = Request::post(&self.url)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json, */*")
            .body(transport::full(review.to_string()))
            .map_err(|error| self.posting(error, false))?;
        let response = self.http.request(request).await.map_err(|error| {
            use ClientError::{Body, Http, Pooled};
            // Upstream does not retry if the connection fails.
            let passing = !error.is_connect() && matches!(error, Pooled(_) | Http(_) | Body(_));
            self.posting(error, passing)
        })?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_BYTES).collect().await;
        let body = body.map_err(|error| self.posting(error, true))?.to_bytes();
        if !status.is_success() {
            return Err(refused(status, &body));
        }
        serde_json::from_slice(&body).map_err(|error| WebhookError::Answer(error.to_string()))
    }
}

fn refused(status: StatusCode, body: &Bytes) -> WebhookError {
    let parsed: Json = serde_json::from_slice(body).unwrap_or_default();
    let text = match parsed["message"].as_str() {
        Some(message) => message.to_owned(),
        None => format!("the server answered {status}"),
    };
    let passing = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
    WebhookError::Refused { text, passing }
}
