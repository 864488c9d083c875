//! Tests with an issuer on the loopback interface, over TLS.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;

use super::keys::tests::Signer;
use super::*;
use crate::testing::Loopback;

/// The issuer's published keys, and the number of requests.
#[derive(Default)]
struct Published {
    keys: Mutex<Vec<Json>>,
    asked: AtomicUsize,
}

struct World {
    issuer: Loopback,
    published: Arc<Published>,
}

impl World {
    async fn start(signers: &[&Signer]) -> Self {
        let published = Arc::<Published>::default();
        published.publish(signers);
        let shared = published.clone();
        let issuer = Loopback::start(|url| {
            move |path: &str, _| match path {
                "/.well-known/openid-configuration" | "/elsewhere" => {
                    (200, json!({"issuer": url, "jwks_uri": format!("{url}/keys")}))
                }
                "/keys" => {
                    shared.asked.fetch_add(1, Ordering::Relaxed);
                    let keys = shared.keys.lock().expect("no panic").clone();
                    (200, json!({"keys": keys}))
                }
                _ => (404, json!({})),
            }
        })
        .await;
        Self { issuer, published }
    }

    fn configuration(&self, rest: &str) -> AuthenticationConfiguration {
        let config = json!({
            "apiVersion": "apiserver.config.k8s.io/v1",
            "kind": "AuthenticationConfiguration",
            "jwt": [{
                "issuer": {"url": self.issuer.url, "audiences": ["kube", "other"],
                           "audienceMatchPolicy": "MatchAny",
                           "certificateAuthority": self.issuer.ca_pem},
                "claimMappings": {"username": {"claim": "sub", "prefix": rest}},
            }],
        });
        AuthenticationConfiguration::parse(&config.to_string()).expect("parses")
    }

    fn issuers(&self, configuration: &AuthenticationConfiguration) -> Issuers {
        let options = Options { algorithms: keys::algorithms(), own_issuers: vec![] };
        Issuers::new(configuration, options, self.issuer.tasks()).expect("is right")
    }

    /// Claims that are valid now; `change` replaces some.
    fn claims(&self, change: Json) -> Json {
        let now = base::clock::now().as_second();
        let mut claims =
            json!({"iss": self.issuer.url, "aud": "kube", "sub": "jane", "exp": now + 600});
        for (name, value) in change.as_object().into_iter().flatten() {
            claims[name] = value.clone();
        }
        claims
    }
}

impl Published {
    fn publish(&self, signers: &[&Signer]) {
        *self.keys.lock().expect("no panic") = signers.iter().map(|one| one.jwk()).collect();
    }
}

/// The user's name, or the error; `None` for tokens of other issuers.
async fn name(issuers: &Issuers, token: &str) -> Option<String> {
    match issuers.recognize(token, &["api".into()]).await {
        Ok(found) => found.map(|found| found.user.name),
        Err(error) => Some(error.message.clone()),
    }
}

#[tokio::test]
async fn only_valid_tokens_of_the_issuer_are_users() {
    let (signer, stranger) = (Signer::new("one"), Signer::new("one"));
    let world = World::start(&[&signer]).await;
    let issuers = world.issuers(&world.configuration("o:"));
    let early = name(&issuers, &signer.sign(&world.claims(json!({})))).await;
    assert!(matches!(early.as_deref(), Some("o:jane" | "oidc: authenticator not initialized")));
    issuers.ready().await;
    let check = async |token: String, expected: Option<&str>| {
        assert_eq!(name(&issuers, &token).await.as_deref(), expected);
    };
    let good = world.claims(json!({}));
    check(signer.sign(&good), Some("o:jane")).await;
    check(signer.sign(&world.claims(json!({"aud": ["x", "other"]}))), Some("o:jane")).await;
    let wrong_audience =
        r#"oidc: verify token: oidc: expected audience in ["kube" "other"] got ["x"]"#;
    check(signer.sign(&world.claims(json!({"aud": "x"}))), Some(wrong_audience)).await;
    let expired =
        "oidc: verify token: oidc: token is expired (Token Expiry: 1970-01-01 00:00:01 +0000 UTC)";
    check(signer.sign(&world.claims(json!({"exp": 1}))), Some(expired)).await;
    let forged =
        "oidc: verify token: failed to verify signature: failed to verify id token signature";
    check(stranger.sign(&good), Some(forged)).await;
    let none = signer.sign_as(&json!({"alg": "none"}), &good);
    let error = name(&issuers, &none).await.expect("refused");
    assert!(error.contains("id token signed with unsupported algorithm"), "{error}");
    check(signer.sign(&world.claims(json!({"iss": "https://else"}))), None).await;
    check("not.a.token".into(), None).await;
    let nobody = "oidc: parse username claims \"sub\": json: cannot unmarshal number into Go value of type string";
    check(signer.sign(&world.claims(json!({"sub": 1}))), Some(nobody)).await;
    world.issuer.shutdown().await;
}

#[tokio::test]
async fn new_keys_are_fetched_and_forgeries_cost_little() {
    let (old, new) = (Signer::new("old"), Signer::new("new"));
    let world = World::start(&[&old]).await;
    let issuers = world.issuers(&world.configuration(""));
    issuers.ready().await;
    let claims = world.claims(json!({}));
    assert_eq!(name(&issuers, &old.sign(&claims)).await.as_deref(), Some("jane"));
    world.published.publish(&[&new]);
    assert_eq!(name(&issuers, &new.sign(&claims)).await.as_deref(), Some("jane"), "rotated");
    let refused = name(&issuers, &old.sign(&claims)).await.expect("refused");
    assert!(refused.contains("failed to verify"), "withdrawn: {refused}");

    let (before, begun) =
        (world.published.asked.load(Ordering::Relaxed), tokio::time::Instant::now());
    let forger = Signer::new("new");
    let forgeries = (0..50).map(|_| forger.sign(&claims));
    for forged in forgeries {
        assert!(name(&issuers, &forged).await.expect("refused").contains("failed to verify"));
    }
    let fetched = world.published.asked.load(Ordering::Relaxed) - before;
    // At most once a second, for any number of forgeries and any duration.
    let most = 2 + begun.elapsed().as_secs();
    assert!(fetched as u64 <= most, "{fetched} fetches, {most} at most");
    world.issuer.shutdown().await;
}

#[tokio::test]
async fn a_valid_new_configuration_replaces_the_old_one() {
    let signer = Signer::new("one");
    let world = World::start(&[&signer]).await;
    let issuers = world.issuers(&world.configuration("a:"));
    issuers.ready().await;
    let token = signer.sign(&world.claims(json!({})));
    assert_eq!(name(&issuers, &token).await.as_deref(), Some("a:jane"));
    issuers.replace(&world.configuration("b:")).await.expect("is right");
    assert_eq!(name(&issuers, &token).await.as_deref(), Some("b:jane"));
    let mut wrong = world.configuration("c:");
    wrong.jwt[0].issuer.audiences.clear();
    let error = issuers.replace(&wrong).await.expect_err("no audiences");
    assert!(error.contains("audiences: Required value"), "{error}");
    assert_eq!(name(&issuers, &token).await.as_deref(), Some("b:jane"));
    let mut moved = world.configuration("d:");
    moved.jwt[0].issuer.discovery_url = format!("{}/elsewhere", world.issuer.url);
    issuers.replace(&moved).await.expect("is right");
    assert_eq!(name(&issuers, &token).await.as_deref(), Some("d:jane"));
    issuers
        .replace(&AuthenticationConfiguration::default())
        .await
        .expect("no issuer is valid, too");
    assert_eq!(name(&issuers, &token).await, None);
    world.issuer.shutdown().await;
}

#[test]
fn tokens_are_valid_for_a_time() {
    let check = |claims: Json, expected: &str| {
        let Json::Object(claims) = claims else { panic!("an object") };
        let got = check_times(&claims, 1_000_000).err().unwrap_or_default();
        assert_eq!(got, expected);
    };
    check(json!({"exp": 1_000_000}), "");
    check(json!({"exp": 1e6, "nbf": 1_000_300}), "");
    let expired = "oidc: token is expired (Token Expiry: 1970-01-12 13:46:39 +0000 UTC)";
    check(json!({"exp": 999_999}), expired);
    let never = "oidc: token is expired (Token Expiry: 0001-01-01 00:00:00 +0000 UTC)";
    check(json!({}), never);
    check(json!({"exp": "tomorrow"}), never);
    check(
        json!({"exp": 2_000_000, "nbf": 1_000_301}),
        "oidc: current time 1970-01-12 13:46:40 +0000 UTC before the nbf (not before) time: 1970-01-12 13:51:41 +0000 UTC",
    );
}

#[test]
fn malformed_tokens_are_refused() {
    for odd in ["", "...", "a.b.c", "e30.e30.e30", "e30.W10.e30", "e30.bnVsbA.e30"] {
        assert_eq!(untrusted_issuer(odd), None, "{odd}");
    }
    let google = URL_SAFE_NO_PAD.encode(r#"{"iss":"accounts.google.com"}"#);
    let got = untrusted_issuer(&format!("e30.{google}.x"));
    assert_eq!(got.as_deref(), Some("https://accounts.google.com"));
}
