//! Who calls the kubelet, and may they? Both answers come from the cluster: certificates of its CA,
//! TokenReview, SubjectAccessReview.
//!
//! In: a connection's certificates, headers, method and path. Out: go on, or 401/403.
//! Invariants: nothing is allowed that the API server did not allow; its answers are remembered for
//! a short time only (allowed 5 min, denied 30 s, tokens 2 min), in a bounded table.
//! Upstream: `pkg/kubelet/server/auth.go`, delegating authentication and authorization.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use client::{Client, ErrorExt};
use http::{HeaderMap, Method, StatusCode, header};
use serde_json::{Value, json};
use tokio::time::Instant;
use transport::ConnectionInfo;
use transport::tls::ChainVerifier;

use crate::config::ServerAuth;

const ALLOWED: Duration = Duration::from_secs(300);
const DENIED: Duration = Duration::from_secs(30);
const TOKENS: Duration = Duration::from_secs(120);
const REMEMBERED: usize = 1024;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct User {
    pub name: String,
    pub groups: Vec<String>,
    pub uid: String,
}

/// A refusal: status and text.
pub type Refusal = (StatusCode, String);

pub struct Auth {
    client: Client,
    settings: ServerAuth,
    node_name: String,
    /// Guards the remembered answers; held for single reads and writes.
    tokens: Mutex<Remembered<String, Option<User>>>,
    decisions: Mutex<Remembered<(User, &'static str, &'static str), bool>>,
}

struct Remembered<K, V>(HashMap<K, (Instant, V)>);

impl<K: std::hash::Hash + Eq + Clone, V: Clone> Remembered<K, V> {
    fn get(&self, key: &K) -> Option<V> {
        self.0.get(key).filter(|(until, _)| *until > Instant::now()).map(|(_, value)| value.clone())
    }

    fn put(&mut self, key: K, value: V, life: Duration) {
        let now = Instant::now();
        if self.0.len() >= REMEMBERED {
            self.0.retain(|_, (until, _)| *until > now);
            if self.0.len() >= REMEMBERED {
                self.0.clear();
            }
        }
        self.0.insert(key, (now + life, value));
    }
}

impl Auth {
    pub fn new(client: Client, settings: ServerAuth, node_name: &str) -> Self {
        Self {
            client,
            settings,
            node_name: node_name.into(),
            tokens: Mutex::new(Remembered(HashMap::new())),
            decisions: Mutex::new(Remembered(HashMap::new())),
        }
    }

    pub async fn check(
        &self,
        info: &ConnectionInfo,
        headers: &HeaderMap,
        method: &Method,
        path: &str,
    ) -> Result<User, Refusal> {
        let unauthorized = || (StatusCode::UNAUTHORIZED, "Unauthorized".to_string());
        let user = self.user(info, headers).await.ok_or_else(unauthorized)?;
        if !self.settings.webhook_authorization {
            return Ok(user);
        }
        let verb = verb(method);
        let resources = subresources(path);
        for subresource in resources {
            if self.may(&user, verb, subresource).await? {
                return Ok(user);
            }
        }
        let text = format!(
            "Forbidden (user={}, verb={verb}, resource=nodes, subresource(s)=[{}])\n",
            user.name,
            resources.join(" ")
        );
        Err((StatusCode::FORBIDDEN, text))
    }

    async fn user(&self, info: &ConnectionInfo, headers: &HeaderMap) -> Option<User> {
        if let Some(user) = self.by_certificate(info) {
            return Some(user);
        }
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let token = bearer.and_then(|value| {
            let (scheme, token) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
        });
        if let Some(token) = token.filter(|token| !token.is_empty() && self.settings.webhook_tokens)
        {
            return self.by_token(token).await;
        }
        let anonymous = User {
            name: "system:anonymous".into(),
            groups: vec!["system:unauthenticated".into()],
            uid: String::new(),
        };
        (self.settings.anonymous && token.is_none()).then_some(anonymous)
    }

    fn by_certificate(&self, info: &ConnectionInfo) -> Option<User> {
        let chain = info.peer_certificates.as_ref()?;
        let authority = self.settings.client_ca.as_ref()?()?;
        let now = u64::try_from(base::clock::now().as_second()).ok()?;
        let verifier = ChainVerifier::new(&authority).ok()?;
        if let Err(error) = verifier.verify(chain, now) {
            tracing::debug!(%error, "a client's certificate is not accepted");
            return None;
        }
        let leaf = pki::Certificate::parse(chain.first()?).ok()?;
        let mut groups = leaf.organizations.clone();
        groups.push("system:authenticated".into());
        Some(User { name: leaf.common_name.clone(), groups, uid: String::new() })
    }

    async fn by_token(&self, token: &str) -> Option<User> {
        let key = token.to_string();
        if let Some(known) = self.tokens.lock().expect("no panic while held").get(&key) {
            return known;
        }
        let review = json!({"kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1",
            "metadata": {}, "spec": {"token": token}});
        let path = "/apis/authentication.k8s.io/v1/tokenreviews";
        let sent = self.client.call(Method::POST, path, "application/json", review.to_string());
        let answer = match sent.await {
            Ok(bytes) => serde_json::from_slice::<Value>(&bytes).ok()?,
            Err(error) => {
                tracing::warn!(error = error.text(), "a token cannot be reviewed");
                return None;
            }
        };
        let user = (answer["status"]["authenticated"] == true).then(|| {
            let user = &answer["status"]["user"];
            let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
            let groups = user["groups"].as_array().map(|all| all.iter().map(text).collect());
            User {
                name: text(&user["username"]),
                uid: text(&user["uid"]),
                groups: groups.unwrap_or_default(),
            }
        });
        self.tokens.lock().expect("no panic while held").put(key, user.clone(), TOKENS);
        user
    }

    async fn may(
        &self,
        user: &User,
        verb: &'static str,
        subresource: &'static str,
    ) -> Result<bool, Refusal> {
        let key = (user.clone(), verb, subresource);
        if let Some(known) = self.decisions.lock().expect("no panic while held").get(&key) {
            return Ok(known);
        }
        let review = json!({"kind": "SubjectAccessReview", "apiVersion": "authorization.k8s.io/v1",
            "metadata": {}, "spec": {
                "user": user.name, "groups": user.groups, "uid": user.uid,
                "resourceAttributes": {"verb": verb, "version": "v1", "resource": "nodes",
                    "subresource": subresource, "name": self.node_name}}});
        let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
        let sent = self.client.call(Method::POST, path, "application/json", review.to_string());
        let bytes = sent.await.map_err(|error| {
            let text = format!("Authorization error (user={}): {}", user.name, error.text());
            (StatusCode::INTERNAL_SERVER_ERROR, text)
        })?;
        let answer: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let allowed = answer["status"]["allowed"] == true;
        let life = if allowed { ALLOWED } else { DENIED };
        self.decisions.lock().expect("no panic while held").put(key, allowed, life);
        Ok(allowed)
    }
}

fn verb(method: &Method) -> &'static str {
    match method.as_str() {
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" => "delete",
        _ => "get",
    }
}

/// Which subresources of the node allow a path, the narrow one first.
fn subresources(path: &str) -> &'static [&'static str] {
    let first = path.trim_start_matches('/').split('/').next().unwrap_or_default();
    match first {
        "stats" => &["stats"],
        "metrics" => &["metrics"],
        "logs" => &["log"],
        "checkpoint" => &["checkpoint"],
        "statusz" => &["statusz"],
        "pods" | "runningpods" => &["pods", "proxy"],
        "healthz" => &["healthz", "proxy"],
        "configz" => &["configz", "proxy"],
        _ => &["proxy"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_parts_of_the_node() {
        let check =
            |path: &str, expected: &[&str]| assert_eq!(subresources(path), expected, "{path}");
        check("/stats/summary", &["stats"]);
        check("/metrics/resource", &["metrics"]);
        check("/pods", &["pods", "proxy"]);
        check("/exec/ns/p/c", &["proxy"]);
        check("/containerLogs/ns/p/c", &["proxy"]);
        assert_eq!((verb(&Method::POST), verb(&Method::GET)), ("create", "get"));
    }
}
