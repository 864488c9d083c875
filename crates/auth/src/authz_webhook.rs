//! The authorization mode Webhook: an external server decides.
//!
//! ```text
//!  request ► match conditions hold? no ► no opinion
//!               └ yes ► cached? ► POST SubjectAccessReview ► allowed, denied, no opinion
//!                                   └ no answer ► the failure policy
//! ```
//!
//! Upstream: `k8s.io/apiserver/plugin/pkg/authorizer/webhook`.

use std::time::Duration;

use apiserver::authz::{Attributes, Authorizer, Decision};
use apiserver::request::UserInfo;
use async_trait::async_trait;
use base::memory::{Memory, key_of};
use cel::{Budget, CompileError, Object, Program, Type, Value};
use machinery::selector::Selector;
use serde_json::{Map, Value as Json, json};

use crate::WebhookError;
use crate::webhook::Webhook;

/// The cost limit of one condition.
const COST: u64 = 1_000_000;
const REMEMBERED: usize = 8192;
/// The decisions of longer requests are not cached. Upstream: `maxControlledAttrCacheSize`.
const LONGEST: usize = 10_000;

/// A match condition.
#[derive(Debug)]
pub struct Condition {
    text: String,
    pub program: Program,
}

impl Condition {
    pub fn new(text: &str) -> Result<Self, CompileError> {
        let program = cel::compile(text, &[("request", Type::Object(spec_type().into()))])?;
        Ok(Self { text: text.to_owned(), program })
    }
}

fn object(name: &str, fields: Vec<(&str, Type)>) -> Object {
    let fields = fields.into_iter().map(|(name, kind)| (name.to_owned(), kind)).collect();
    Object { name: name.into(), fields, is_open: false }
}

fn spec_type() -> Object {
    let texts = || Type::list(Type::String);
    let of = |one: Object| Type::Object(one.into());
    let requirement = |name: &str| {
        let fields = vec![("key", Type::String), ("operator", Type::String), ("values", texts())];
        of(object(name, fields))
    };
    let selector = |name: &str, requirement: Type| {
        let fields = vec![("rawSelector", Type::String), ("requirements", Type::list(requirement))];
        of(object(name, fields))
    };
    let text = ["namespace", "verb", "group", "version", "resource", "subresource", "name"];
    let mut fields: Vec<(&str, Type)> = text.map(|name| (name, Type::String)).into();
    let name = "kubernetes.SelectorRequirement";
    fields
        .push(("fieldSelector", selector("kubernetes.FieldSelectorAttributes", requirement(name))));
    fields
        .push(("labelSelector", selector("kubernetes.LabelSelectorAttributes", requirement(name))));
    let resource = object("kubernetes.ResourceAttributes", fields);
    let fields = vec![("path", Type::String), ("verb", Type::String)];
    let path = object("kubernetes.NonResourceAttributes", fields);
    let fields = vec![
        ("resourceAttributes", of(resource)),
        ("nonResourceAttributes", of(path)),
        ("user", Type::String),
        ("groups", texts()),
        ("extra", Type::Map(texts().into())),
        ("uid", Type::String),
    ];
    object("kubernetes.SubjectAccessReviewSpec", fields)
}

#[derive(Debug)]
pub struct Settings {
    pub name: String,
    /// `v1` or `v1beta1`.
    pub version: String,
    pub timeout: Duration,
    /// Zero disables the cache.
    pub authorized_lasts: Duration,
    pub unauthorized_lasts: Duration,
    /// Whether a failure means denied, or no opinion.
    pub denies_on_failure: bool,
    pub conditions: Vec<Condition>,
}

pub struct AuthorizationWebhook {
    webhook: Webhook,
    settings: Settings,
    memory: Memory<Decision>,
}

impl AuthorizationWebhook {
    pub fn new(webhook: Webhook, settings: Settings) -> Self {
        Self { webhook, settings, memory: Memory::new(REMEMBERED) }
    }

    /// One condition that is false decides; errors count only if none is false.
    fn is_concerned(&self, spec: &Json) -> Result<bool, String> {
        if self.settings.conditions.is_empty() {
            return Ok(true);
        }
        let value = Value::from_json(&evaluated(spec), &Type::Dyn);
        let mut errors = vec![];
        for Condition { text, program } in &self.settings.conditions {
            let outcome = program.evaluate(&|_| Some(value.clone()), &mut Budget::new(COST));
            match outcome.map(|value| value.as_bool()) {
                Ok(Some(false)) => return Ok(false),
                Ok(_) => {}
                Err(why) => errors.push(format!(
                    "cel evaluation error: expression '{text}' resulted in error: {why}"
                )),
            }
        }
        match &errors[..] {
            [] => Ok(true),
            [one] => Err(one.clone()),
            many => Err(format!("[{}]", many.join(", "))),
        }
    }

    async fn ask(&self, spec: &Json) -> Result<Decision, WebhookError> {
        let mut sent = spec.clone();
        if self.settings.version == "v1beta1"
            && let Some(groups) = sent.as_object_mut().and_then(|spec| spec.remove("groups"))
        {
            // The only field that has another name in the older version.
            sent["group"] = groups;
        }
        let review = json!({
            "apiVersion": format!("authorization.k8s.io/{}", self.settings.version),
            "kind": "SubjectAccessReview",
            "metadata": {},
            "spec": sent,
        });
        let answer = self.webhook.ask(&review, self.settings.timeout).await?;
        let status = &answer["status"];
        let is = |name: &str| status[name].as_bool().unwrap_or_default();
        let reason = status["reason"].as_str().unwrap_or_default().to_owned();
        Ok(match (is("denied"), is("allowed")) {
            (true, true) => {
                tracing::error!(
                    "webhook subject access review returned both allow and deny response"
                );
                Decision::Deny { reason }
            }
            (true, false) => Decision::Deny { reason },
            (false, true) => Decision::Allow { reason },
            (false, false) => Decision::NoOpinion { reason },
        })
    }

    fn failed(&self, why: &str) -> Decision {
        let webhook = &self.settings.name;
        tracing::error!(webhook, why, "Failed to make webhook authorizer request");
        match self.settings.denies_on_failure {
            true => Decision::Deny { reason: String::new() },
            false => Decision::NoOpinion { reason: String::new() },
        }
    }
}

#[async_trait]
impl Authorizer for AuthorizationWebhook {
    async fn authorize(&self, attributes: &Attributes) -> Decision {
        let spec = spec_of(attributes);
        match self.is_concerned(&spec) {
            Ok(true) => {}
            Ok(false) => return Decision::NoOpinion { reason: String::new() },
            Err(why) => return self.failed(&why),
        }
        let key = key_of([spec.to_string().as_str()]);
        if let Some(known) = self.memory.get(&key) {
            return known;
        }
        let decision = match self.ask(&spec).await {
            Ok(decision) => decision,
            Err(why) => return self.failed(&why.to_string()),
        };
        if is_short(attributes) {
            let lasts = match &decision {
                Decision::Allow { .. } => self.settings.authorized_lasts,
                _ => self.settings.unauthorized_lasts,
            };
            self.memory.put(key, decision.clone(), lasts);
        }
        decision
    }

    async fn unresolved(&self, _: &UserInfo, _: &str) -> Option<String> {
        Some("webhook authorizer does not support user rule resolution".into())
    }
}

/// Whether the fields that a client can make long are short.
fn is_short(attributes: &Attributes) -> bool {
    let asked = &attributes.request;
    let parts = [
        &asked.namespace,
        &asked.verb,
        &asked.group,
        &asked.version,
        &asked.resource,
        &asked.subresource,
        &asked.name,
        &asked.path,
    ];
    parts.iter().map(|part| part.len()).sum::<usize>() < LONGEST
}

/// The review's spec; like Go's encoder, it omits empty fields.
fn spec_of(attributes: &Attributes) -> Json {
    let Attributes { user, request } = attributes;
    let mut spec = Map::new();
    if request.is_resource {
        let fields = [
            ("namespace", &request.namespace),
            ("verb", &request.verb),
            ("group", &request.group),
            ("version", &request.version),
            ("resource", &request.resource),
            ("subresource", &request.subresource),
            ("name", &request.name),
        ];
        let mut resource = texts(&fields);
        let requirements = requirements(&request.field_selector);
        if !requirements.is_empty() {
            resource.insert("fieldSelector".into(), json!({"requirements": requirements}));
        }
        spec.insert("resourceAttributes".into(), resource.into());
    } else {
        let fields = texts(&[("path", &request.path), ("verb", &request.verb)]);
        spec.insert("nonResourceAttributes".into(), fields.into());
    }
    spec.extend(texts(&[("user", &user.name), ("uid", &user.uid)]));
    if !user.groups.is_empty() {
        spec.insert("groups".into(), json!(user.groups));
    }
    if !user.extra.is_empty() {
        spec.insert("extra".into(), json!(user.extra));
    }
    spec.into()
}

fn texts(fields: &[(&str, &String)]) -> Map<String, Json> {
    let there = fields.iter().filter(|(_, text)| !text.is_empty());
    there.map(|(name, text)| ((*name).to_owned(), Json::from(text.as_str()))).collect()
}

/// A field selector's requirements. An invalid selector has none.
fn requirements(selector: &str) -> Vec<Json> {
    if selector.is_empty() || Selector::parse_fields(selector).is_err() {
        return vec![];
    }
    let one = |part: &str| {
        let (key, operator, value) = match part.split_once("!=") {
            Some((key, value)) => (key, "NotIn", value),
            None => {
                let (key, value) = part.split_once('=')?;
                (key, "In", value.strip_prefix('=').unwrap_or(value))
            }
        };
        Some(json!({"key": key, "operator": operator, "values": [value]}))
    };
    selector.split(',').filter_map(one).collect()
}

/// The spec for the conditions, which always has the fields of the user.
fn evaluated(spec: &Json) -> Json {
    let mut spec = spec.clone();
    let empty =
        [("user", json!("")), ("uid", json!("")), ("groups", json!([])), ("extra", json!({}))];
    let Some(fields) = spec.as_object_mut() else { return spec };
    for (name, value) in empty {
        fields.entry(name).or_insert(value);
    }
    for (part, names) in [
        (
            "resourceAttributes",
            &["namespace", "verb", "group", "version", "resource", "subresource", "name"][..],
        ),
        ("nonResourceAttributes", &["path", "verb"][..]),
    ] {
        if let Some(Json::Object(fields)) = fields.get_mut(part) {
            for name in names {
                fields.entry(*name).or_insert(json!(""));
            }
        }
    }
    spec
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use apiserver::request::RequestInfo;

    use super::*;
    use crate::testing::Loopback;

    #[tokio::test]
    async fn the_webhook_decides() {
        let asked = Arc::<AtomicUsize>::default();
        let counter = asked.clone();
        let server = Loopback::start(|_| {
            move |_: &str, review: Json| {
                counter.fetch_add(1, Ordering::Relaxed);
                assert_eq!(review["apiVersion"], "authorization.k8s.io/v1beta1");
                assert_eq!(review["spec"]["group"], json!(["dev"]));
                match review["spec"]["user"].as_str() {
                    Some("yes") => (200, json!({"status": {"allowed": true, "reason": "because"}})),
                    Some("no") => (200, json!({"status": {"allowed": false, "denied": true}})),
                    Some("broken") => (400, json!({})),
                    _ => (200, json!({"status": {"allowed": false}})),
                }
            }
        })
        .await;
        let settings = Settings {
            name: "w".into(),
            version: "v1beta1".into(),
            timeout: testkit::wait::LONG,
            authorized_lasts: Duration::from_secs(3600),
            unauthorized_lasts: Duration::ZERO,
            denies_on_failure: true,
            conditions: vec![Condition::new("request.user != 'skipped'").expect("compiles")],
        };
        let webhook = Webhook::from_kubeconfig(&server.kubeconfig()).expect("a kubeconfig");
        let webhook = AuthorizationWebhook::new(webhook, settings);
        let reason = String::new;
        let check = async |user: &str, expected: Decision, questions: usize| {
            let mut attributes = question();
            attributes.user.name = user.into();
            assert_eq!(webhook.authorize(&attributes).await, expected, "{user}");
            assert_eq!(asked.load(Ordering::Relaxed), questions, "{user}");
        };
        check("yes", Decision::Allow { reason: "because".into() }, 1).await;
        check("yes", Decision::Allow { reason: "because".into() }, 1).await;
        check("no", Decision::Deny { reason: reason() }, 2).await;
        check("no", Decision::Deny { reason: reason() }, 3).await;
        check("else", Decision::NoOpinion { reason: reason() }, 4).await;
        check("broken", Decision::Deny { reason: reason() }, 5).await;
        check("skipped", Decision::NoOpinion { reason: reason() }, 5).await;
        server.shutdown().await;
    }

    fn question() -> Attributes {
        let request = RequestInfo {
            is_resource: true,
            verb: "list".into(),
            version: "v1".into(),
            resource: "pods".into(),
            field_selector: "spec.nodeName=a,status.phase!=Failed".into(),
            ..RequestInfo::default()
        };
        Attributes { user: UserInfo::new("jane", &["dev"]), request }
    }

    #[test]
    fn requests_become_reviews() {
        let requirements = json!([
            {"key": "spec.nodeName", "operator": "In", "values": ["a"]},
            {"key": "status.phase", "operator": "NotIn", "values": ["Failed"]},
        ]);
        let expected = json!({
            "resourceAttributes": {"verb": "list", "version": "v1", "resource": "pods",
                                   "fieldSelector": {"requirements": requirements}},
            "user": "jane", "groups": ["dev"],
        });
        assert_eq!(spec_of(&question()), expected);
        let request =
            RequestInfo { verb: "get".into(), path: "/metrics".into(), ..RequestInfo::default() };
        let attributes = Attributes { user: UserInfo::default(), request };
        let expected = json!({"nonResourceAttributes": {"verb": "get", "path": "/metrics"}});
        assert_eq!(spec_of(&attributes), expected);
    }

    #[test]
    fn conditions_see_the_request() {
        let check = |text: &str, expected: Result<bool, &str>| {
            let condition = Condition::new(text).expect("compiles");
            let value = Value::from_json(&evaluated(&spec_of(&question())), &Type::Dyn);
            let outcome =
                condition.program.evaluate(&|_| Some(value.clone()), &mut Budget::new(COST));
            let outcome = outcome.map(|value| value.as_bool() == Some(true));
            assert_eq!(
                outcome.map_err(|why| why.to_string()),
                expected.map_err(str::to_owned),
                "{text}"
            );
        };
        check("has(request.resourceAttributes)", Ok(true));
        check("has(request.nonResourceAttributes)", Ok(false));
        check("request.resourceAttributes.namespace == ''", Ok(true));
        check("'dev' in request.groups && !('x' in request.extra)", Ok(true));
        check("request.user == 'bob'", Ok(false));
        check(
            "request.nonResourceAttributes.path == '/x'",
            Err("no such key: nonResourceAttributes"),
        );
        for wrong in ["request.other", "request.", "1 +", "object"] {
            assert!(Condition::new(wrong).is_err(), "{wrong}");
        }
    }
}
