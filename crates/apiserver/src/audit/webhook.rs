//! The webhook backend: posts events as an `EventList`, with retries.

use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{Method, Request};
use http_body_util::BodyExt;
use transport::HttpClient;

/// Upstream: `webhook.DefaultRetryBackoffWithInitialDelay`.
const FACTOR: f64 = 1.5;
const JITTER: f64 = 0.2;
const STEPS: u32 = 5;
/// Limit of an answer.
const PATIENCE: Duration = Duration::from_secs(30);

pub struct Webhook {
    pub http: HttpClient,
    /// A path on the server of `http`.
    pub path: String,
    pub initial_backoff: Duration,
}

impl Webhook {
    /// Events are JSON objects.
    pub async fn send(&self, events: &[Bytes]) -> Result<(), String> {
        let body = list_of(events);
        let mut pause = self.initial_backoff;
        let mut step = 1;
        loop {
            match self.post(body.clone()).await {
                Ok(()) => return Ok(()),
                Err(error) if step >= STEPS => return Err(error),
                Err(error) => {
                    tracing::debug!(error, step, "failed to post to the audit webhook, will retry")
                }
            }
            tokio::time::sleep(pause.mul_f64(1.0 + JITTER * base::rng::unit())).await;
            pause = pause.mul_f64(FACTOR);
            step += 1;
        }
    }

    async fn post(&self, body: Bytes) -> Result<(), String> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(&self.path)
            .header(CONTENT_TYPE, "application/json")
            .header(ACCEPT, "application/json, */*")
            .body(transport::full(body))
            .map_err(|error| error.to_string())?;
        let work = async {
            let response = self.http.request(request).await.map_err(|error| error.to_string())?;
            let code = response.status();
            // Read to the end, so that the connection can be reused.
            let _ = response.into_body().collect().await;
            code.is_success().then_some(()).ok_or_else(|| format!("the server answered {code}"))
        };
        match tokio::time::timeout(PATIENCE, work).await {
            Ok(outcome) => outcome,
            Err(_) => Err(format!("no answer within {} seconds", PATIENCE.as_secs())),
        }
    }
}

fn list_of(events: &[Bytes]) -> Bytes {
    let size: usize = events.iter().map(|event| event.len() + 1).sum();
    let mut list = Vec::with_capacity(size + 80);
    list.extend_from_slice(
        br#"{"kind":"EventList","apiVersion":"audit.k8s.io/v1","metadata":{},"items":["#,
    );
    for (index, event) in events.iter().enumerate() {
        if index > 0 {
            list.push(b',');
        }
        list.extend_from_slice(event);
    }
    list.extend_from_slice(b"]}");
    list.into()
}
