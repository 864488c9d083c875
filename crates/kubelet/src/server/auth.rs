//! Authentication and authorization of the kubelet's callers, by the cluster: certificates of its CA,
//! TokenReview, SubjectAccessReview.
//!
//! In: a connection's certificates, headers, method and path. Out: go on, or 401/403.
//! Invariants: only the API server's answers allow a request; they are cached for a short time only
//! (allowed 5 min, denied 30 s, tokens 2 min), in bounded tables, by hashes: no token stays in memory.
//! Upstream: `pkg/kubelet/server/auth.go`, delegating authentication and authorization.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::memory::{Memory, key_of};
use client::{Client, ErrorExt};
use http::{HeaderMap, Method, StatusCode, header};
use serde_json::{Value, json};
use transport::ConnectionInfo;
use transport::tls::ChainVerifier;

use crate::config::ServerAuth;

const ALLOWED: Duration = Duration::from_secs(300);
const DENIED: Duration = Duration::from_secs(30);
const TOKENS: Duration = Duration::from_secs(120);
const REMEMBERED: usize = 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
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
    tokens: Memory<Option<User>>,
    decisions: Memory<bool>,
    /// The CA as last read, and its verifier. Guards plain values, held for single reads and writes.
    verifier: Mutex<Option<(String, Arc<ChainVerifier>)>>,
}

impl Auth {
    pub fn new(client: Client, settings: ServerAuth, node_name: &str) -> Self {
        Self {
            client,
            settings,
            node_name: node_name.into(),
            tokens: Memory::new(REMEMBERED),
            decisions: Memory::new(REMEMBERED),
            verifier: Mutex::default(),
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
        let now = u64::try_from(base::clock::now().as_second()).ok()?;
        let verifier = self.verifier()?;
        if let Err(error) = verifier.verify(chain, now) {
            tracing::debug!(%error, "rejected a client certificate");
            return None;
        }
        let leaf = pki::Certificate::parse(chain.first()?).ok()?;
        let mut groups = leaf.organizations.clone();
        groups.push("system:authenticated".into());
        Some(User { name: leaf.common_name.clone(), groups, uid: String::new() })
    }

    /// The verifier of the current CA, which is parsed again only when it changes.
    fn verifier(&self) -> Option<Arc<ChainVerifier>> {
        let authority = self.settings.client_ca.as_ref()?()?;
        let mut last = self.verifier.lock().expect("no panic while held");
        if let Some((_, verifier)) = last.as_ref().filter(|(text, _)| *text == authority) {
            return Some(verifier.clone());
        }
        let verifier = Arc::new(ChainVerifier::new(&authority).ok()?);
        *last = Some((authority, verifier.clone()));
        Some(verifier)
    }

    async fn by_token(&self, token: &str) -> Option<User> {
        let key = key_of([token]);
        if let Some(known) = self.tokens.get(&key) {
            return known;
        }
        let review = json!({"kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1",
            "metadata": {}, "spec": {"token": token}});
        let path = "/apis/authentication.k8s.io/v1/tokenreviews";
        let sent = self.client.call(Method::POST, path, "application/json", review.to_string());
        let answer = match sent.await {
            Ok(bytes) => serde_json::from_slice::<Value>(&bytes).ok()?,
            Err(error) => {
                tracing::warn!(error = error.text(), "failed to create a TokenReview");
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
        self.tokens.put(key, user.clone(), TOKENS);
        user
    }

    async fn may(
        &self,
        user: &User,
        verb: &'static str,
        subresource: &'static str,
    ) -> Result<bool, Refusal> {
        let who = [user.name.as_str(), &user.uid, verb, subresource];
        let key = key_of(who.into_iter().chain(user.groups.iter().map(String::as_str)));
        if let Some(known) = self.decisions.get(&key) {
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
        self.decisions.put(key, allowed, life);
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

/// The subresources of the node that authorize a path, the narrowest first.
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
    use std::sync::atomic::{AtomicUsize, Ordering};

    use bytes::Bytes;
    use http_body_util::{BodyExt, Full};

    use super::*;

    #[test]
    fn paths_are_subresources_of_the_node() {
        let check =
            |path: &str, expected: &[&str]| assert_eq!(subresources(path), expected, "{path}");
        check("/stats/summary", &["stats"]);
        check("/metrics/resource", &["metrics"]);
        check("/pods", &["pods", "proxy"]);
        check("/exec/ns/p/c", &["proxy"]);
        check("/containerLogs/ns/p/c", &["proxy"]);
        assert_eq!((verb(&Method::POST), verb(&Method::GET)), ("create", "get"));
    }

    /// Accepts the token `good`.
    async fn review<B>(request: http::Request<B>) -> http::Response<Full<Bytes>>
    where
        B: http_body::Body<Data = Bytes, Error: std::fmt::Debug>,
    {
        let body = request.into_body().collect().await.expect("a body").to_bytes();
        let review: Value = serde_json::from_slice(&body).expect("a review");
        let known = review["spec"]["token"] == "good";
        let status = json!({"authenticated": known, "user": {"username": "jane"}});
        http::Response::new(Full::new(Bytes::from(json!({ "status": status }).to_string())))
    }

    /// An authenticator, and the number of calls to its API server.
    fn asked(settings: ServerAuth) -> (Auth, Arc<AtomicUsize>) {
        let times = Arc::new(AtomicUsize::new(0));
        let counted = times.clone();
        let service = tower::service_fn(move |request: http::Request<_>| {
            counted.fetch_add(1, Ordering::Relaxed);
            async move { Ok::<_, std::convert::Infallible>(review(request).await) }
        });
        (Auth::new(Client::new(service, "kubelet"), settings, "n1"), times)
    }

    #[tokio::test(start_paused = true)]
    async fn token_reviews_are_cached_by_hashes_for_two_minutes() {
        let (auth, times) = asked(ServerAuth::default());
        let name = async |token: &str| auth.by_token(token).await.map(|user| user.name);
        for _ in 0..2 {
            assert_eq!(name("good").await.as_deref(), Some("jane"));
            assert_eq!(name("bad").await, None);
        }
        assert_eq!(times.load(Ordering::Relaxed), 2, "one review per token");
        assert!(auth.tokens.get(&key_of(["good"])).is_some());
        tokio::time::advance(TOKENS).await;
        assert_eq!(name("good").await.as_deref(), Some("jane"));
        assert_eq!(times.load(Ordering::Relaxed), 3);
    }

    #[tokio::test]
    async fn a_ca_is_parsed_again_only_when_it_changes() {
        let one = pki::Authority::generate("one").expect("keys can be made");
        let two = pki::Authority::generate("two").expect("keys can be made");
        let text = Arc::new(Mutex::new(one.cert_pem().to_owned()));
        let now = text.clone();
        let client_ca: Arc<dyn Fn() -> Option<String> + Send + Sync> =
            Arc::new(move || Some(now.lock().expect("no panic").clone()));
        let (auth, _) = asked(ServerAuth { client_ca: Some(client_ca), ..ServerAuth::default() });
        let name = |authority: &pki::Authority| {
            let issued = authority.issue(&pki::Profile::client("jane", &["dev"])).expect("signs");
            let chain = pki::certificates(issued.cert_pem.as_bytes()).expect("parses");
            let chain = chain.iter().map(|one| one.der().to_vec().into()).collect();
            let info = ConnectionInfo {
                remote: None,
                local: None,
                is_tls: true,
                peer_certificates: Some(chain),
            };
            auth.by_certificate(&info).map(|user| user.name)
        };
        let verifier = || Arc::as_ptr(&auth.verifier().expect("an authority"));
        assert_eq!((name(&one).as_deref(), name(&two)), (Some("jane"), None));
        let first = verifier();
        assert_eq!(verifier(), first);
        *text.lock().expect("no panic") = two.cert_pem().to_owned();
        assert_eq!((name(&one), name(&two).as_deref()), (None, Some("jane")));
    }
}
