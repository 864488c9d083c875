//! Hetzner Cloud's REST API: requests, answers, errors, and actions that take time.
//!
//! In: paths and JSON. Out: typed answers. A write answers with an action; [`Api::act`] waits until it is over.
//! Invariants: a request takes at most [`LIMIT`], an action at most [`ACTION_LIMIT`]; an answer has at most
//! [`BYTES`]. The token is in no error and in no log.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use transport::{ClientError, ClientOptions, HttpClient, Token};

use super::config::Config;
use crate::provider::{Error, Result};

const LIMIT: Duration = Duration::from_secs(30);
const ACTION_LIMIT: Duration = Duration::from_secs(120);
/// How often a running action is looked at.
const LOOK: Duration = Duration::from_millis(500);
const BYTES: usize = 16 << 20;
/// The API's own limit of objects on a page.
const PAGE: usize = 50;
/// After too many requests, and while a resource is busy with another action.
const AFTER_TOO_MANY: Duration = Duration::from_secs(60);
const AFTER_LOCKED: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    #[error("hetzner: {request}: {source}")]
    Request { request: String, source: ClientError },
    #[error("hetzner: {request}: no answer within {LIMIT:?}")]
    Slow { request: String },
    #[error("hetzner: {request}: {message} ({code}, status {status})")]
    Refused { request: String, status: StatusCode, code: String, message: String },
    #[error("hetzner: {request}: failed to read the answer: {reason}")]
    Answer { request: String, reason: String },
    #[error("hetzner: action {command} failed: {message} ({code})")]
    Action { command: String, code: String, message: String },
    #[error("hetzner: action {command} is not over after {ACTION_LIMIT:?}")]
    LongAction { command: String },
}

#[derive(Clone, Debug, Deserialize)]
pub struct Server {
    pub id: u64,
    pub name: String,
    pub status: String,
    pub public_net: ServerNet,
    #[serde(default)]
    pub private_net: Vec<PrivateNet>,
    pub server_type: Named,
    pub datacenter: Option<Datacenter>,
    pub location: Option<Named>,
}

impl Server {
    pub fn private_ip(&self, network: u64) -> Option<&str> {
        let net = self.private_net.iter().find(|net| net.network == network)?;
        Some(&net.ip)
    }
}

#[derive(Clone, Debug, Deserialize)]
pub struct ServerNet {
    pub ipv4: Option<Ip>,
    pub ipv6: Option<Ip>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Ip {
    pub ip: String,
}

#[derive(Clone, Debug, Deserialize)]
pub struct PrivateNet {
    pub network: u64,
    pub ip: String,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Named {
    pub name: String,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Datacenter {
    pub name: String,
    pub location: Named,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Network {
    pub id: u64,
    #[serde(default)]
    pub routes: Vec<NetworkRoute>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct NetworkRoute {
    pub destination: String,
    pub gateway: String,
}

#[derive(Clone, Debug, Deserialize)]
pub struct LoadBalancer {
    pub id: u64,
    pub public_net: BalancerNet,
    #[serde(default)]
    pub private_net: Vec<PrivateNet>,
    pub load_balancer_type: Named,
    pub algorithm: Algorithm,
    #[serde(default)]
    pub services: Vec<BalancerService>,
    #[serde(default)]
    pub targets: Vec<BalancerTarget>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct BalancerNet {
    pub ipv4: AnyIp,
    pub ipv6: AnyIp,
}

#[derive(Clone, Debug, Deserialize)]
pub struct AnyIp {
    pub ip: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Algorithm {
    #[serde(rename = "type")]
    pub kind: String,
}

/// A port of a load balancer.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct BalancerService {
    pub protocol: String,
    pub listen_port: i32,
    pub destination_port: i32,
    pub proxyprotocol: bool,
    pub health_check: HealthCheck,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct HealthCheck {
    pub protocol: String,
    pub port: i32,
    pub interval: u32,
    pub timeout: u32,
    pub retries: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpCheck>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct HttpCheck {
    pub path: String,
}

#[derive(Clone, Debug, Deserialize)]
pub struct BalancerTarget {
    /// Servers only; a load balancer may have targets that are not ours.
    pub server: Option<TargetServer>,
    #[serde(default)]
    pub use_private_ip: bool,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub struct TargetServer {
    pub id: u64,
}

#[derive(Clone, Debug, Deserialize)]
struct Action {
    id: u64,
    command: String,
    status: String,
    error: Option<Problem>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Problem {
    code: String,
    message: String,
}

pub struct Api {
    http: HttpClient,
}

impl Api {
    pub fn new(config: &Config) -> std::result::Result<Self, ClientError> {
        let token = match (&config.token, config.token_file.clone()) {
            (Some(token), _) => Some(Token::fixed(token.trim())),
            (None, Some(path)) => Some(Token::new(move || {
                let token = std::fs::read_to_string(&path);
                match token {
                    Ok(token) => Some(token.trim().to_owned()),
                    Err(error) => {
                        tracing::error!(path = %path.display(), %error, "failed to read the token");
                        None
                    }
                }
            })),
            (None, None) => None,
        };
        let options = ClientOptions {
            server: config.endpoint.clone(),
            token,
            user_agent: Some("decapod-cloud-controller-manager".into()),
            ..ClientOptions::default()
        };
        Ok(Self { http: HttpClient::new(&options)? })
    }

    pub async fn get<T: DeserializeOwned>(&self, path: &str, field: &str) -> Result<T> {
        let answer = self.send(&Method::GET, path, None).await?;
        Ok(read(answer, field, &format!("GET {path}"))?)
    }

    /// All objects of a collection, page by page. `field` has them in the answer.
    pub async fn all<T: DeserializeOwned>(&self, path: &str, field: &str) -> Result<Vec<T>> {
        let mut all = vec![];
        let mut page = Some(1);
        let mark = if path.contains('?') { '&' } else { '?' };
        while let Some(number) = page {
            let path = format!("{path}{mark}per_page={PAGE}&page={number}");
            let answer = self.send(&Method::GET, &path, None).await?;
            let next = answer["meta"]["pagination"]["next_page"].as_u64();
            // A page that points backwards would never end.
            page = next.filter(|next| *next > number);
            all.extend(read::<Vec<T>>(answer, field, &format!("GET {path}"))?);
        }
        Ok(all)
    }

    /// Creates an object; waits until it is ready.
    pub async fn create<T: DeserializeOwned>(
        &self,
        path: &str,
        field: &str,
        body: &Value,
    ) -> Result<T> {
        let mut answer = self.send(&Method::POST, path, Some(body)).await?;
        let action = answer["action"].take();
        let created = read(answer, field, &format!("POST {path}"))?;
        self.settle(action, path).await?;
        Ok(created)
    }

    /// Starts an action; waits until it is over.
    pub async fn act(&self, path: &str, body: &Value) -> Result<()> {
        let mut answer = self.send(&Method::POST, path, Some(body)).await?;
        self.settle(answer["action"].take(), path).await
    }

    /// Succeeds as well if the object does not exist.
    pub async fn delete(&self, path: &str) -> Result<()> {
        match self.send(&Method::DELETE, path, None).await {
            Err(Error::Api(ApiError::Refused { status: StatusCode::NOT_FOUND, .. })) => Ok(()),
            done => done.map(drop),
        }
    }

    async fn settle(&self, action: Value, path: &str) -> Result<()> {
        if action.is_null() {
            return Ok(());
        }
        let answer = |error: serde_json::Error| ApiError::Answer {
            request: format!("POST {path}"),
            reason: error.to_string(),
        };
        let mut action: Action = serde_json::from_value(action).map_err(answer)?;
        let command = action.command.clone();
        let over = async {
            while action.status == "running" {
                tokio::time::sleep(LOOK).await;
                action = self.get(&format!("/actions/{}", action.id), "action").await?;
            }
            match action.status.as_str() {
                "success" => Ok(()),
                _ => {
                    let Problem { code, message } = action.error.take().unwrap_or_default();
                    Err(ApiError::Action { command: action.command.clone(), code, message }.into())
                }
            }
        };
        let limit = tokio::time::timeout(ACTION_LIMIT, over).await;
        limit.unwrap_or_else(|_| Err(ApiError::LongAction { command }.into()))
    }

    async fn send(&self, method: &Method, path: &str, body: Option<&Value>) -> Result<Value> {
        let name = format!("{method} {path}");
        let bytes = body.map(|body| Bytes::from(body.to_string())).unwrap_or_default();
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(bytes));
        let failed = |source| ApiError::Request { request: name.clone(), source };
        let request = request.map_err(|error| failed(error.into()))?;
        let exchange = async {
            let response = self.http.request(request).await.map_err(failed)?;
            let status = response.status();
            let body = Limited::new(response.into_body(), BYTES).collect().await;
            let wrong = |reason| ApiError::Answer { request: name.clone(), reason };
            let body = body.map_err(|error| wrong(error.to_string()))?.to_bytes();
            Ok::<_, ApiError>((status, body))
        };
        let exchanged = tokio::time::timeout(LIMIT, exchange).await;
        let slow = |_| ApiError::Slow { request: name.clone() };
        let (status, body) = exchanged.map_err(slow)??;
        if !status.is_success() {
            return Err(refused(name, status, &body));
        }
        if body.is_empty() {
            return Ok(Value::Null);
        }
        let wrong = |error: serde_json::Error| ApiError::Answer {
            request: name.clone(),
            reason: error.to_string(),
        };
        Ok(serde_json::from_slice(&body).map_err(wrong)?)
    }
}

fn read<T: DeserializeOwned>(mut answer: Value, field: &str, request: &str) -> Result<T, ApiError> {
    let value = answer[field].take();
    serde_json::from_value(value).map_err(|error| ApiError::Answer {
        request: request.to_owned(),
        reason: format!("{field}: {error}"),
    })
}

/// The API's error, or how long to wait.
fn refused(request: String, status: StatusCode, body: &[u8]) -> Error {
    #[derive(Default, Deserialize)]
    struct Answer {
        error: Problem,
    }
    let Problem { code, message } =
        serde_json::from_slice::<Answer>(body).unwrap_or_default().error;
    let after = match code.as_str() {
        "rate_limit_exceeded" => Some(AFTER_TOO_MANY),
        "locked" | "conflict" => Some(AFTER_LOCKED),
        _ => None,
    };
    let error = ApiError::Refused { request, status, code, message };
    match after {
        Some(after) => Error::RetryAfter { message: error.to_string(), after },
        None => error.into(),
    }
}
