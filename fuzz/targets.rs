//! What is fed with anything: every parser of what strangers may send, and of what an administrator writes.
//!
//! One mechanism for two runners: `cargo fuzz run NAME`, guided by coverage (see `fuzz/Cargo.toml` and
//! `fuzz_targets/program.rs`), and a short run from a fixed seed among the ordinary tests, which any panic
//! fails. Both start from the seeds here; a finding's input becomes one.

mod server;

use std::hint::black_box;

use serde_json::Value;

pub struct Target {
    pub name: &'static str,
    pub run: fn(&[u8]),
    /// Inputs to start from: right ones, so that small changes go deep.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

pub const TARGETS: &[Target] = &[
    Target { name: "token", run: token, seeds: || owned(TOKENS) },
    Target { name: "certificate", run: certificate, seeds: || owned(CERTIFICATES) },
    Target { name: "patch", run: patch, seeds: || owned(PATCHES) },
    Target { name: "selector", run: selector, seeds: || owned(SELECTORS) },
    Target { name: "cel", run: cel, seeds: || owned(EXPRESSIONS) },
    Target { name: "cbor", run: cbor, seeds: || owned(ITEMS) },
    Target { name: "protobuf", run: protobuf, seeds: server::messages },
    Target { name: "manifest", run: manifest, seeds: || owned(MANIFESTS) },
    Target { name: "configuration", run: configuration, seeds: || owned(CONFIGURATIONS) },
    Target { name: "api", run: server::api, seeds: server::requests },
    Target { name: "etcd", run: server::etcd, seeds: server::calls },
];

/// The target of that name, for the programs of `fuzz_targets`.
#[cfg_attr(test, allow(dead_code))]
pub fn target(name: &str) -> &'static Target {
    TARGETS.iter().find(|target| target.name == name).expect("every program has a target")
}

fn owned(seeds: &[&[u8]]) -> Vec<Vec<u8>> {
    seeds.iter().map(|seed| seed.to_vec()).collect()
}

const TOKENS: &[&[u8]] = &[
    b"eyJhbGciOiJFUzI1NiIsImtpZCI6ImEifQ.eyJpc3MiOiJodHRwczovL2EiLCJhdWQiOlsiYiJdfQ.AAAA",
    b"abcdef.0123456789abcdef",
    b"t1,jane,u1,\"dev,ops\"\n\"a\"\"b\",c,d\n",
    br#"{"keys":[{"kty":"EC","crv":"P-256","x":"AAAA","y":"AAAA","kid":"a"}]}"#,
];

const CERTIFICATES: &[&[u8]] = &[
    b"-----BEGIN CERTIFICATE-----\nMIIBAzCBqqADAgECAgEBMAoGCCqGSM49BAMCMA0xCzAJBgNVBAMMAmNhMB4XDTI1\n-----END CERTIFICATE-----\n",
    b"\x30\x82\x01\x03\x30\x81\xaa\xa0\x03\x02\x01\x02\x02\x01\x01\x30\x0a\x06\x08\x2a\x86\x48\xce\x3d\x04\x03\x02",
    b"-----BEGIN CERTIFICATE REQUEST-----\nMIHKMHMCAQAwETEPMA0GA1UEAwwGc3lzdGVt\n-----END CERTIFICATE REQUEST-----\n",
];

const PATCHES: &[&[u8]] = &[
    b"{\"a\":[1,{\"b\":null}]}\0[{\"op\":\"replace\",\"path\":\"/a/1/b\",\"value\":2},{\"op\":\"move\",\"from\":\"/a/0\",\"path\":\"/c\"}]",
    b"{\"spec\":{\"containers\":[{\"name\":\"a\"}]}}\0{\"spec\":{\"containers\":[{\"name\":\"a\",\"image\":\"x\"},{\"name\":\"b\",\"$patch\":\"delete\"}],\"$setElementOrder/containers\":[{\"name\":\"a\"}]}}",
    b"{\"metadata\":{\"labels\":{\"a\":\"b\"}}}\0{\"metadata\":{\"labels\":{\"a\":null}}}",
];

const ITEMS: &[&[u8]] = &[
    b"\xd9\xd9\xf7\xa2\x44kind\x43Pod\x41n\x83\x01\x39\x03\xe7\xfb\x3f\xf1\x99\x99\x99\x99\x99\x9a",
    b"\xbf\x61a\x9f\xf6\xf5\xf9\x3e\x00\xff\xc1\x1a\x51\x4b\x67\xb0\x5f\x41b\x41c\xff\xff",
    b"\x83\xd6\x43\x00\x01\xff\xc0\x74\x32013-03-21T20:04:00Z\x1b\x7f\xff\xff\xff\xff\xff\xff\xff",
];

const SELECTORS: &[&[u8]] = &[
    b"1.5Gi",
    b"*/5 1-3 * jan mon-fri",
    b"1h30m5.5s",
    b"app=web,tier in (front, back),!old,version notin (1,2),x!=y,a>1",
    b"metadata.name=a\\,b,spec.nodeName!=,status.phase==Running",
];

const EXPRESSIONS: &[&[u8]] = &[
    b"object.spec.replicas <= 5 && object.metadata.labels.all(k, k.matches('^[a-z]+$'))",
    b"has(object.a) ? object.?b[?0].orValue(1) : [1, 2].map(x, x * 2).sum()",
    b"quantity('1.5Gi').isGreaterThan(quantity('1M')) || duration('1h') > duration('5m')",
    b"[((([((([((([((([((([((([((([((([((([((([((([((([((([((([((([((([(((1",
    b"'a,b'.split(',').exists(x, url('https://' + x).getHost() == 'a') ? 1u : 2.0e3",
];

const MANIFESTS: &[&[u8]] = &[
    b"apiVersion: v1\nkind: Pod\nmetadata: {name: a, labels: &x {b: \"c\"}}\nspec:\n  containers:\n  - name: c\n    args: [*x, |\n      d]\n",
    b"{\"apiVersion\":\"v1\",\"kind\":\"Config\",\"users\":[{\"name\":\"a\",\"user\":{\"exec\":{}}}],\"clusters\":[]}",
    b"apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\njwt:\n- issuer: {url: https://a, audiences: [b]}\n  claimMappings: {username: {expression: claims.sub}}\n",
    b"apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\nauthorizers:\n- {type: Webhook, name: a, webhook: {timeout: 1s}}\n",
];

const CONFIGURATIONS: &[&[u8]] = &[
    b"apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins:\n- name: PodSecurity\n  configuration: {apiVersion: pod-security.admission.config.k8s.io/v1, kind: PodSecurityConfiguration, defaults: {enforce: baseline}}\n- {name: EventRateLimit, path: other}\n",
    b"apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\njwt:\n- issuer: {url: https://a, audiences: [b], audienceMatchPolicy: MatchAny}\n  claimValidationRules: [{expression: 'claims.hd == \"a\"', message: no}]\n  claimMappings: {username: {expression: claims.sub}, groups: {claim: g, prefix: p}, extra: [{key: a.b/c, valueExpression: claims.x}]}\n  userValidationRules: [{expression: '!user.username.startsWith(\"s\")'}]\nanonymous: {enabled: true, conditions: [{path: /livez}]}\n",
    b"apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\nauthorizers:\n- {type: RBAC, name: r}\n- type: Webhook\n  name: a\n  webhook: {timeout: 1s, authorizedTTL: 5m, unauthorizedTTL: 30s, subjectAccessReviewVersion: v1, matchConditionSubjectAccessReviewVersion: v1, failurePolicy: Deny, connectionInfo: {type: InClusterConfig}, matchConditions: [{expression: 'request.user != \"a\"'}]}\n",
    b"apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n- resources: [secrets, '*.apps']\n  providers:\n  - aescbc: {keys: [{name: k, secret: MDEyMzQ1Njc4OWFiY2RlZg==}]}\n  - kms: {apiVersion: v2, name: n, endpoint: 'unix:///k', timeout: 3s}\n  - identity: {}\n",
    b"apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n- level: None\n  users: [a]\n  verbs: [get]\n  resources: [{group: '', resources: [pods/log, '*'], resourceNames: [x]}]\n- {level: RequestResponse, nonResourceURLs: ['/api*'], omitManagedFields: true}\n",
    b"apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\npodInitialBackoffSeconds: 1\nprofiles:\n- schedulerName: s\n  plugins: {score: {enabled: [{name: NodeResourcesFit, weight: 3}], disabled: [{name: '*'}]}}\n  pluginConfig: [{name: NodeResourcesFit, args: {scoringStrategy: {type: MostAllocated, resources: [{name: cpu, weight: 1}]}}}]\nextenders: [{urlPrefix: 'http://a', filterVerb: f, weight: 1, managedResources: [{name: a/b}]}]\n",
    b"apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: k, user: u}}]\nclusters: [{name: k, cluster: {server: 'https://a:1', certificate-authority-data: AAAA, tls-server-name: b}}]\nusers: [{name: u, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: d, args: [e], env: [{name: f, value: g}], interactiveMode: Never}}}]\n",
    b"name: default\ndata-dir: /d\nlisten-client-urls: http://127.0.0.1:2379\nclient-transport-security: {cert-file: c, key-file: k, client-cert-auth: true}\nquota-backend-bytes: 8589934592\n",
    b"mirrors: {docker.io: {endpoint: ['https://a'], rewrite: {'^b/(.*)': 'c/$1'}}}\nconfigs: {a: {auth: {username: u, password: p}, tls: {insecure_skip_verify: true}}}\n",
    b"apiVersion: v1\nkind: Pod\nmetadata: {name: a, namespace: b, annotations: {c: d}}\nspec: {hostNetwork: true, containers: [{name: e, image: f, livenessProbe: {httpGet: {path: /, port: 1}}}]}\n",
];

fn text(data: &[u8]) -> Option<&str> {
    std::str::from_utf8(data).ok()
}

fn token(data: &[u8]) {
    let _ = black_box(auth::oidc::keys::parse(data));
    let Some(text) = text(data) else { return };
    if let Ok(jws) = auth::oidc::keys::Jws::parse(text) {
        black_box(jws.is_signed_by(&[]));
    }
    let _ = black_box(pki::BootstrapToken::parse(text));
    let _ = black_box(pki::JoinToken::parse(text));
    let _ = black_box(auth::token_file::parse(text, "fuzz"));
    let _ = black_box(auth::abac::Abac::parse(text, "fuzz"));
    let request = http::Request::builder().header("authorization", data);
    if let Ok(request) = request.header("sec-websocket-protocol", data).body(()) {
        black_box(auth::tokens::bearer(&request.into_parts().0));
    }
}

fn certificate(data: &[u8]) {
    let _ = black_box(pki::Certificate::parse(data));
    let _ = black_box(pki::certificates(data));
    let _ = black_box(pki::Csr::parse(data));
    let Some(text) = text(data) else { return };
    if let Ok(verifier) = transport::tls::ChainVerifier::new(text) {
        for certificate in pki::certificates(data).unwrap_or_default() {
            let _ = verifier.verify(&[certificate.der().to_vec().into()], 1_800_000_000);
        }
    }
}

/// The document and the patch are parted by a zero byte.
fn patch(data: &[u8]) {
    let at = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    let (document, patch) = (&data[..at], data.get(at + 1..).unwrap_or_default());
    let Ok(document) = serde_json::from_slice::<Value>(document) else { return };
    let _ = black_box(machinery::patch::json(&document, patch));
    let _ = black_box(machinery::patch::merge(&document, patch));
    let facts: &dyn machinery::patch::Schema = &api::facts::Facts;
    let pod = "io.k8s.api.core.v1.Pod";
    let _ = black_box(machinery::patch::strategic(&document, patch, Some(facts), pod));
}

fn selector(data: &[u8]) {
    let Some(text) = text(data) else { return };
    use machinery::selector::Selector;
    let parsed = [Selector::parse_labels(text), Selector::parse_fields(text)];
    for selector in parsed.into_iter().flatten() {
        black_box(selector.matches_with(|_| Some("1")));
    }
    // Other short texts in objects and queries.
    if let Ok(canonical) = machinery::quantity::canonical(text) {
        let again = machinery::quantity::canonical(&canonical);
        assert_eq!(again.as_ref(), Ok(&canonical), "of {text:?}");
    }
    let quantity = k8s_openapi::apimachinery::pkg::api::resource::Quantity(text.to_owned());
    let _ = black_box(machinery::quantity::rounded_to_milli(&quantity));
    let _ =
        black_box((machinery::quantity::milli(&quantity), machinery::quantity::units(&quantity)));
    let _ = black_box(machinery::cron::Schedule::parse(text));
    let _ = black_box(base::duration::parse(text));
    let _ = black_box(apiserver::query::Query::parse(text));
}

fn cel(data: &[u8]) {
    let Some(text) = text(data) else { return };
    let Ok(program) = ::cel::compile(text, &[("object", ::cel::Type::Dyn)]) else { return };
    let object = serde_json::json!({"a": 1, "b": ["x", 2.5, null], "spec": {"replicas": 3},
                                    "metadata": {"labels": {"app": "web"}}});
    let object = ::cel::Value::from_json(&object, &::cel::Type::Dyn);
    let mut budget = ::cel::Budget::new(10_000);
    let _ = black_box(program.evaluate(&|_| Some(object.clone()), &mut budget));
}

fn cbor(data: &[u8]) {
    use machinery::cbor::{object, to_json};
    if let Ok(json) = to_json(data) {
        // What JSON's reader takes can be written, and read again.
        if let Ok(item) = object(&json) {
            let again = to_json(&item).expect("its own");
            assert_eq!(json_of(&again), json_of(&json));
        }
    }
}

fn json_of(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).expect("JSON")
}

fn protobuf(data: &[u8]) {
    let descriptors = api::protobuf::descriptors();
    if let Ok(json) = descriptors.to_json(data) {
        // What was read can be written.
        if let Ok(tree) = serde_json::from_slice::<Value>(&json) {
            let _ = black_box(descriptors.seal(&tree));
        }
    }
}

fn manifest(data: &[u8]) {
    let _ = black_box(apiserver::codec::decode::yaml(data));
    let Some(text) = text(data) else { return };
    let _ = black_box(pki::Kubeconfig::parse(text));
    if let Ok(configuration) = auth::oidc::AuthenticationConfiguration::parse(text) {
        let _ = black_box(configuration.check(&[]));
    }
    let _ = black_box(auth::modes::AuthorizationConfiguration::parse(text));
}

/// What is said to a component in files.
fn configuration(data: &[u8]) {
    let Some(text) = text(data) else { return };
    // A plugin's own file holds the same text.
    let _ = black_box(admission::Configuration::parse(text, |_| Ok(text.to_owned())));
    if let Ok(configuration) = auth::oidc::AuthenticationConfiguration::parse(text) {
        let _ = black_box(configuration.check(&["https://own".to_owned()]));
    }
    let _ = black_box(auth::modes::AuthorizationConfiguration::parse(text));
    let _ = black_box(encryption::Configuration::parse(text));
    let _ = black_box(apiserver::audit::Policy::parse(text));
    let _ = black_box(scheduler::Config::parse(text));
    let _ = black_box(pki::Kubeconfig::parse(text));
    // etcd's, and those of flags, are maps; what is in them goes to the parser of flags.
    let _ = black_box(serde_saphyr::from_str::<serde_json::Map<String, Value>>(text));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a target, over all its seeds. `FUZZ_ROUNDS` asks for more, `FUZZ_SEED` for others.
    const ROUNDS: u64 = 2000;
    const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

    fn given(name: &str, otherwise: u64) -> u64 {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
    }

    /// A small generator of its own, so that a failure comes again.
    struct Dice(u64);

    impl Dice {
        fn roll(&mut self, sides: usize) -> usize {
            // xorshift
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            usize::try_from(self.0 >> 33).unwrap_or_default() % sides.max(1)
        }
    }

    /// One of the changes that find most: cut, double, swap, flip, strange bytes.
    fn change(input: &mut Vec<u8>, dice: &mut Dice) {
        const STRANGE: &[&[u8]] = &[
            b"\0",
            b"\xff",
            b"\"",
            b"{",
            b"[",
            b"-1",
            b"1e999",
            b"\\u0000",
            b"\xc3\x28",
            b"(((((",
        ];
        let at = dice.roll(input.len());
        match dice.roll(6) {
            0 => input.truncate(at),
            1 => {
                let piece = input[at..(at + dice.roll(20)).min(input.len())].to_vec();
                input.splice(at..at, piece);
            }
            2 if !input.is_empty() => {
                let other = dice.roll(input.len());
                input.swap(at, other);
            }
            3 if !input.is_empty() => input[at] ^= 1 << dice.roll(8),
            4 if !input.is_empty() => drop(input.remove(at)),
            _ => {
                let piece = STRANGE[dice.roll(STRANGE.len())];
                input.splice(at..at, piece.iter().copied());
            }
        }
    }

    /// Targets that are a whole server.
    const SERVERS: [&str; 2] = ["api", "etcd"];

    #[test]
    fn nothing_panics() {
        run(|target| !SERVERS.contains(&target.name));
    }

    #[test]
    #[ignore = "minutes: for the night, or where servers changed"]
    fn no_server_panics() {
        run(|target| SERVERS.contains(&target.name));
    }

    fn run(is_wanted: fn(&Target) -> bool) {
        let (rounds, first) = (given("FUZZ_ROUNDS", ROUNDS), given("FUZZ_SEED", SEED));
        for target in TARGETS.iter().filter(|target| is_wanted(target)) {
            let mut dice = Dice(first.max(1));
            let seeds = (target.seeds)();
            let each = rounds.div_ceil(seeds.len().max(1) as u64);
            for seed in &seeds {
                (target.run)(seed);
                for _ in 0..each {
                    let mut input = seed.clone();
                    for _ in 0..=dice.roll(6) {
                        change(&mut input, &mut dice);
                    }
                    let shown = String::from_utf8_lossy(&input).into_owned();
                    let outcome = std::panic::catch_unwind(|| (target.run)(&input));
                    assert!(outcome.is_ok(), "{}: {shown:?}", target.name);
                }
            }
        }
    }

    #[test]
    fn every_target_has_its_program() {
        let manifest = include_str!("Cargo.toml");
        for target in TARGETS {
            let name = target.name;
            assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
        }
    }
}
