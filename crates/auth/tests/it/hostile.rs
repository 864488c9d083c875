//! Clients with false credentials, and paths with misleading spellings, through the whole stack with the
//! authenticators and authorizers of a cluster.

use std::sync::Arc;

use apiserver::serve::{Options, Server};
use auth::request_header::RequestHeader;
use auth::service_account::{Claims, ServiceAccounts, TokenKeys};
use auth::tokens::{AnyAudience, BearerTokens, StaticTokens, TokenAuthenticator};
use auth::x509::X509;
use auth::{Authenticators, Authorizers, Masters, UserInfo};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::Request;
use http_body_util::BodyExt;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use pki::{Authority, Component, Profile, Usage};
use tower::ServiceExt;

use super::*;

const ISSUER: &str = "https://kubernetes.default.svc";

struct Cluster {
    world: World,
    server: Server,
    clients: Authority,
    keys: TokenKeys,
    _root: tempfile::TempDir,
}

impl Cluster {
    async fn start() -> Self {
        let world = World::start();
        let root = tempfile::tempdir().expect("a directory");
        let pki = pki::Pki::open_or_create(root.path()).expect("creates");
        let keys = TokenKeys::of_cluster(&pki, ISSUER).expect("keys");
        let clients = Authority::generate("kubernetes").expect("keys can be made");
        let jane = StaticTokens::new([("jane-token".to_owned(), UserInfo::new("jane", &["dev"]))]);
        let own = vec![ISSUER.to_owned()];
        let kinds: Vec<Box<dyn TokenAuthenticator>> = vec![
            Box::new(AnyAudience { inner: jane, own: own.clone() }),
            Box::new(ServiceAccounts::new(world.registry.clone(), keys.clone())),
        ];
        let proxies = vec!["front-proxy-client".to_owned()];
        let front = RequestHeader::new(pki.front_proxy_ca.cert_pem(), proxies);
        let authenticators = Authenticators(vec![
            Box::new(front.expect("an authority")),
            Box::new(X509::new(clients.cert_pem()).expect("an authority")),
            Box::new(BearerTokens::new(kinds, own)),
        ]);
        let rbac = auth::Rbac::start(&world.registry, &world.tasks).await;
        let rules =
            json!({"rules": [{"verbs": ["get"], "apiGroups": [""], "resources": ["secrets"]}]});
        world.create::<Role>("mine", "reader", rules).await;
        let binding = json!({
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
            "subjects": [{"kind": "User", "name": "jane"}],
        });
        world.create::<RoleBinding>("mine", "jane", binding).await;
        for namespace in ["mine", "theirs"] {
            world.create::<Secret>(namespace, "password", json!({})).await;
        }
        let jane = UserInfo::new("jane", &[]);
        until(&rbac, &question(&jane, "get", "secrets", "mine", "password"), true).await;
        let authorizers = Authorizers(vec![Arc::new(Masters), Arc::new(rbac)]);
        let server = Server::new(
            world.registry.clone(),
            vec![Box::new(authenticators)],
            vec![Box::new(authorizers)],
            Options::default(),
        );
        Self { world, server, clients, keys, _root: root }
    }

    /// The answer's status; checks that its body repeats no credential.
    async fn ask(&self, path: &str, headers: &[(&str, &str)], cert_pem: Option<&str>) -> u16 {
        let mut request = Request::get(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut request = request.body(transport::empty()).expect("a request");
        let certificates = cert_pem.map(|pem| pki::certificates(pem.as_bytes()).expect("parses"));
        let chain = certificates.map(|all| {
            all.iter()
                .map(|one| rustls_pki_types::CertificateDer::from(one.der().to_vec()))
                .collect()
        });
        let info = transport::ConnectionInfo {
            peer_certificates: chain,
            is_tls: true,
            ..transport::ConnectionInfo::default()
        };
        request.extensions_mut().insert(info);
        let response = self.server.service().oneshot(request).await.expect("infallible");
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.expect("a body").to_bytes();
        let leaked = String::from_utf8_lossy(&body).contains("jane-token");
        assert!(!leaked, "the answer repeats a credential");
        status
    }
}

const MINE: &str = "/api/v1/namespaces/mine/secrets/password";
const THEIRS: &str = "/api/v1/namespaces/theirs/secrets/password";

#[tokio::test]
async fn false_tokens_are_refused() {
    let cluster = Cluster::start().await;
    let now = base::clock::now().as_second();
    let account = cluster.world.create::<ServiceAccount>("mine", "bot", json!({})).await;
    let claims = |change: serde_json::Value| -> Claims {
        let mut claims = json!({
            "iss": ISSUER, "aud": [ISSUER], "exp": now + 600, "nbf": now - 10,
            "sub": "system:serviceaccount:mine:bot",
            "kubernetes.io": {"namespace": "mine",
                "serviceaccount": {"name": "bot", "uid": account.metadata.uid}},
        });
        for (name, value) in change.as_object().into_iter().flatten() {
            claims[name] = value.clone();
        }
        serde_json::from_value(claims).expect("claims")
    };
    let sign = |change: serde_json::Value| cluster.keys.sign(&claims(change)).expect("signs");
    let check = async |token: &str, expected: u16| {
        let value = format!("Bearer {token}");
        let got = cluster.ask("/version", &[("authorization", &value)], None).await;
        assert_eq!(got, expected, "{token}");
        let got = cluster.ask(MINE, &[("authorization", &value)], None).await;
        assert!(got == expected || (expected == 200 && got == 403), "{token}: {got}");
    };
    // Authenticated, but without rights: 403 on everything that is not public. `/version` needs a rule too.
    let good = sign(json!({}));
    let value = format!("Bearer {good}");
    assert_eq!(cluster.ask(MINE, &[("authorization", &value)], None).await, 403);
    check(&sign(json!({"exp": now - 1})), 401).await;
    check(&sign(json!({"nbf": now + 600})), 401).await;
    check(&sign(json!({"aud": ["vault"]})), 401).await;
    check(&sign(json!({"iss": "https://else"})), 401).await;
    let other = json!({"namespace": "mine", "serviceaccount": {"name": "bot", "uid": "another"}});
    check(&sign(json!({ "kubernetes.io": other })), 401).await;
    let payload = good.split('.').nth(1).expect("three parts");
    for header in [r#"{"alg":"none"}"#, r#"{"alg":"None","typ":"JWT"}"#, r#"{"alg":"HS256"}"#] {
        let header = URL_SAFE_NO_PAD.encode(header);
        check(&format!("{header}.{payload}."), 401).await;
        check(&format!("{header}.{payload}.AAAA"), 401).await;
    }
    let mut forged = good.clone().into_bytes();
    let last = forged.len() - 5;
    forged[last] = if forged[last] == b'A' { b'B' } else { b'A' };
    check(std::str::from_utf8(&forged).expect("ASCII"), 401).await;
    for garbage in ["x", "..", "a.b.c", "jane-tokem", "jane-token2", &"x".repeat(100_000)] {
        check(garbage, 401).await;
    }
    cluster.world.shutdown().await;
}

#[tokio::test]
async fn false_certificates_are_refused() {
    let cluster = Cluster::start().await;
    let stranger = Authority::generate("kubernetes").expect("keys can be made");
    let admin = Profile::client("admin", &["system:masters"]);
    let issue = |authority: &Authority, profile: &Profile| {
        authority.issue(profile).expect("signs").cert_pem
    };
    let check = async |pem: &str, expected: u16| {
        assert_eq!(cluster.ask(THEIRS, &[], Some(pem)).await, expected);
    };
    check(&issue(&cluster.clients, &admin), 200).await;
    check(&issue(&stranger, &admin), 401).await;
    let server = Profile { usages: vec![Usage::Server], ..admin.clone() };
    check(&issue(&cluster.clients, &server), 401).await;
    // A leaf is no CA: certificates that it signs are refused.
    let leaf = cluster.clients.issue(&Profile::client("jane", &[])).expect("signs");
    let own = Authority::from_pem(&leaf.cert_pem, &leaf.key_pem);
    if let Ok(own) = own {
        let chain = format!("{}{}", issue(&own, &admin), leaf.cert_pem);
        check(&chain, 401).await;
    }
    // A valid certificate of another user after one's own.
    let chain = format!("{}{}", issue(&stranger, &admin), issue(&cluster.clients, &admin));
    check(&chain, 401).await;
    cluster.world.shutdown().await;
}

#[tokio::test]
async fn false_headers_are_ignored() {
    let cluster = Cluster::start().await;
    let jane = ("authorization", "Bearer jane-token");
    assert_eq!(cluster.ask(MINE, &[jane], None).await, 200);
    assert_eq!(cluster.ask(THEIRS, &[jane], None).await, 403);
    let proxied = [jane, ("x-remote-user", "admin"), ("x-remote-group", "system:masters")];
    assert_eq!(cluster.ask(THEIRS, &proxied, None).await, 403, "no front proxy");
    // A client certificate with the front proxy's name, but not from its CA.
    let name = Component::FrontProxyClient.identity().user;
    let called = cluster.clients.issue(&Profile::client(name, &[])).expect("signs").cert_pem;
    assert_eq!(cluster.ask(THEIRS, &proxied, Some(&called)).await, 403);
    assert_eq!(cluster.ask(THEIRS, &proxied[1..], None).await, 403, "anonymous");
    for impersonated in [
        &[jane, ("impersonate-user", "admin")][..],
        &[jane, ("impersonate-user", "jane"), ("impersonate-group", "system:masters")],
        &[jane, ("impersonate-user", "system:serviceaccount:kube-system:admin")],
        &[jane, ("impersonate-user", "system:node:n1"), ("impersonate-uid", "1")],
        &[jane, ("impersonate-user", "jane"), ("impersonate-extra-a", "b")],
        &[("impersonate-user", "admin")],
    ] {
        assert_eq!(cluster.ask(THEIRS, impersonated, None).await, 403, "{impersonated:?}");
    }
    let half = [jane, ("impersonate-group", "system:masters")];
    assert_eq!(cluster.ask(THEIRS, &half, None).await, 400, "a group without a user");
    cluster.world.shutdown().await;
}

/// KEP-5284: impersonating a user is one right, acting as them for a verb another; both are RBAC's.
#[tokio::test]
async fn constrained_impersonation_allows_only_its_verbs() {
    let cluster = Cluster::start().await;
    let world = &cluster.world;
    let rule = |verb: &str, group: &str, resource: &str| json!({"rules": [{"verbs": [verb], "apiGroups": [group], "resources": [resource]}]});
    let bound = |kind: &str, name: &str, user: &str| {
        json!({"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
            "subjects": [{"kind": "User", "name": user}]})
    };
    let mut joe = rule("impersonate:user-info", "authentication.k8s.io", "users");
    joe["rules"][0]["resourceNames"] = json!(["joe"]);
    world.create::<ClusterRole>("", "be-joe", joe).await;
    world.create::<ClusterRoleBinding>("", "be-joe", bound("ClusterRole", "be-joe", "jane")).await;
    world.create::<Role>("theirs", "reader", rule("get", "", "secrets")).await;
    world.create::<RoleBinding>("theirs", "joe", bound("Role", "reader", "joe")).await;
    world.create::<RoleBinding>("mine", "joe", bound("Role", "reader", "joe")).await;
    let as_joe = [("authorization", "Bearer jane-token"), ("impersonate-user", "joe")];
    // The right to impersonate joe alone is not enough.
    assert_eq!(cluster.ask(THEIRS, &as_joe, None).await, 403);
    let on = rule("impersonate-on:user-info:get", "", "secrets");
    world.create::<Role>("theirs", "as-joe", on).await;
    world.create::<RoleBinding>("theirs", "as-joe", bound("Role", "as-joe", "jane")).await;
    testkit::wait::found("jane reads as joe", async || {
        (cluster.ask(THEIRS, &as_joe, None).await == 200).then_some(())
    })
    .await;
    let list = THEIRS.strip_suffix("/password").expect("a name");
    for (path, header) in [
        (MINE, ("impersonate-user", "joe")),
        (list, ("impersonate-user", "joe")),
        (THEIRS, ("impersonate-user", "jim")),
        (THEIRS, ("impersonate-group", "system:masters")),
        (THEIRS, ("impersonate-uid", "1")),
        (THEIRS, ("impersonate-extra-acme.io%2fx", "1")),
    ] {
        let headers = match header.0 {
            "impersonate-user" => vec![as_joe[0], header],
            _ => vec![as_joe[0], as_joe[1], header],
        };
        assert_eq!(cluster.ask(path, &headers, None).await, 403, "{path} {header:?}");
    }
    cluster.world.shutdown().await;
}

#[tokio::test]
async fn paths_mean_what_was_authorized() {
    let cluster = Cluster::start().await;
    let jane = ("authorization", "Bearer jane-token");
    for path in [
        "/api/v1/namespaces/mine/../theirs/secrets/password",
        "/api/v1/namespaces/mine/%2e%2e/theirs/secrets/password",
        "/api/v1/namespaces/mine/secrets/../../theirs/secrets/password",
        "/api/v1/namespaces/mine/secrets/..%2f..%2ftheirs%2fsecrets%2fpassword",
        "/api/v1/namespaces/mine%2f..%2ftheirs/secrets/password",
        "/api/v1/namespaces/mine%2ftheirs/secrets/password",
        "/api/v1/namespaces//theirs/secrets/password",
        "//api/v1/namespaces/theirs/secrets/password",
        "/api//v1/namespaces/theirs/secrets/password",
        "/api/v1/namespaces/theirs//secrets/password",
        "/api/v1/namespaces/%74heirs/secrets/password",
        "/api/v1/secrets/theirs%2fpassword",
        "/api/v1/secrets?fieldSelector=metadata.name%3Dpassword,metadata.namespace%3Dtheirs",
        "/api/v1/watch/namespaces/theirs/secrets/password",
        "/api/v1/proxy/namespaces/theirs/secrets/password",
        "/API/v1/namespaces/theirs/secrets/password",
        "/api/v1/namespaces/mine/secrets/password%00/../../theirs/secrets/password",
    ] {
        let got = cluster.ask(path, &[jane], None).await;
        assert!(matches!(got, 400 | 403 | 404 | 405), "{path}: {got}");
    }
    cluster.world.shutdown().await;
}
