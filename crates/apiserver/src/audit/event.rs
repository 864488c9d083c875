//! `Event` of `audit.k8s.io/v1`, with upstream's fields in upstream's order.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

use super::policy::{Level, Stage};
use crate::request::UserInfo;

/// Longer user agents are truncated.
const USER_AGENT_LIMIT: usize = 1024;
const CUT: &str = "...TRUNCATED";
/// The annotation of an event whose objects were removed because of its size.
const TRUNCATED: &str = "audit.k8s.io/truncated";

/// The known facts of a request so far.
#[derive(Clone, Debug)]
pub struct Event {
    pub level: Level,
    pub id: String,
    pub uri: String,
    pub verb: String,
    pub user: Option<UserInfo>,
    pub impersonated: Option<UserInfo>,
    /// The verb of the constrained impersonation mode that allowed it.
    pub constraint: Option<&'static str>,
    pub source_ips: Vec<String>,
    pub user_agent: String,
    pub object: Option<ObjectReference>,
    pub status: Option<Status>,
    pub request_object: Option<Box<RawValue>>,
    pub response_object: Option<Box<RawValue>>,
    pub received: Timestamp,
    pub annotations: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectReference {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub resource: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uid: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub api_group: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub api_version: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub resource_version: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub subresource: String,
}

/// The fields of a `Status` with bounded size.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Status {
    pub metadata: Empty,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub status: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    #[serde(skip_serializing_if = "Value::is_null")]
    pub details: Value,
    #[serde(skip_serializing_if = "is_zero")]
    pub code: u16,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Empty {}

fn is_zero(code: &u16) -> bool {
    *code == 0
}

impl Status {
    pub fn of_code(code: u16) -> Self {
        Self { code, ..Self::default() }
    }

    /// From the `Status` of an answer.
    pub fn of(tree: &Value) -> Self {
        let text = |name: &str| tree[name].as_str().unwrap_or_default().to_owned();
        Self {
            metadata: Empty {},
            status: text("status"),
            message: text("message"),
            reason: text("reason"),
            details: tree["details"].clone(),
            code: tree["code"].as_u64().and_then(|code| code.try_into().ok()).unwrap_or_default(),
        }
    }
}

#[derive(Serialize)]
struct User<'a> {
    #[serde(skip_serializing_if = "str::is_empty")]
    username: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    uid: &'a str,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    groups: &'a [String],
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    extra: &'a BTreeMap<String, Vec<String>>,
}

impl<'a> From<&'a UserInfo> for User<'a> {
    fn from(user: &'a UserInfo) -> Self {
        Self { username: &user.name, uid: &user.uid, groups: &user.groups, extra: &user.extra }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct AuthenticationMetadata {
    impersonation_constraint: &'static str,
}

/// An event at a stage, in its serialized form.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Written<'a> {
    kind: &'static str,
    api_version: &'static str,
    level: &'static str,
    #[serde(rename = "auditID")]
    audit_id: &'a str,
    stage: &'static str,
    #[serde(rename = "requestURI")]
    request_uri: &'a str,
    verb: &'a str,
    user: User<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    impersonated_user: Option<User<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    authentication_metadata: Option<AuthenticationMetadata>,
    #[serde(rename = "sourceIPs", skip_serializing_if = "<[String]>::is_empty")]
    source_ips: &'a [String],
    #[serde(skip_serializing_if = "str::is_empty")]
    user_agent: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    object_ref: &'a Option<ObjectReference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_status: &'a Option<Status>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_object: &'a Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_object: &'a Option<Box<RawValue>>,
    #[serde(serialize_with = "micro")]
    request_received_timestamp: Timestamp,
    #[serde(serialize_with = "micro")]
    stage_timestamp: Timestamp,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: &'a BTreeMap<String, String>,
}

/// In the format of `metav1.MicroTime`.
fn micro<S: Serializer>(time: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&time.strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string())
}

impl Event {
    /// An event that is too large, without its objects.
    pub fn without_objects(&self) -> Self {
        let mut event = Self { request_object: None, response_object: None, ..self.clone() };
        event.annotations.insert(TRUNCATED.to_owned(), "true".to_owned());
        event
    }

    /// One line of JSON, without the newline.
    pub fn json(&self, stage: Stage, now: Timestamp) -> Vec<u8> {
        let nobody = UserInfo::default();
        let written = Written {
            kind: "Event",
            api_version: "audit.k8s.io/v1",
            level: self.level.name(),
            audit_id: &self.id,
            stage: stage.name(),
            request_uri: &self.uri,
            verb: &self.verb,
            user: self.user.as_ref().unwrap_or(&nobody).into(),
            impersonated_user: self.impersonated.as_ref().map(User::from),
            authentication_metadata: self
                .constraint
                .map(|verb| AuthenticationMetadata { impersonation_constraint: verb }),
            source_ips: &self.source_ips,
            user_agent: &self.user_agent,
            object_ref: &self.object,
            response_status: &self.status,
            request_object: &self.request_object,
            response_object: &self.response_object,
            request_received_timestamp: self.received,
            stage_timestamp: now,
            annotations: &self.annotations,
        };
        serde_json::to_vec(&written).expect("an event has string keys only")
    }

    /// Upstream's legacy text format.
    pub fn legacy(&self, stage: Stage) -> String {
        let list = |texts: &[String]| {
            texts.iter().map(|text| format!("{text:?}")).collect::<Vec<_>>().join(",")
        };
        let or = |text: &str, other: &str| match text {
            "" => other.to_owned(),
            text => text.to_owned(),
        };
        let user = self.user.clone().unwrap_or_default();
        let (as_user, as_groups) = match &self.impersonated {
            None => ("<self>".to_owned(), "<lookup>".to_owned()),
            Some(other) => (other.name.clone(), or(&list(&other.groups), "<lookup>")),
        };
        let namespace = self.object.as_ref().map_or("", |object| &object.namespace);
        let response =
            self.status.as_ref().map_or("<deferred>".to_owned(), |status| status.code.to_string());
        format!(
            "{} AUDIT: id={:?} stage={:?} ip={:?} method={:?} user={:?} groups={} as={as_user:?} asgroups={as_groups} user-agent={:?} namespace={:?} uri={:?} response=\"{response}\"",
            self.received,
            self.id,
            stage.name(),
            self.source_ips.first().map_or("<unknown>", String::as_str),
            self.verb,
            or(&user.name, "<none>"),
            or(&list(&user.groups), "<none>"),
            self.user_agent,
            or(namespace, "<none>"),
            self.uri,
        )
    }
}

/// The user agent, truncated.
pub fn user_agent(text: &str) -> String {
    match text.len() {
        0..=USER_AGENT_LIMIT => text.to_owned(),
        _ => format!("{}{CUT}", &text[..text.floor_char_boundary(USER_AGENT_LIMIT)]),
    }
}

/// Removes the managed fields from an object, a list's items or a table's rows.
pub fn without_managed_fields(tree: &mut Value) {
    let strip = |object: &mut Value| {
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
        }
    };
    strip(tree);
    for item in tree.get_mut("items").and_then(Value::as_array_mut).into_iter().flatten() {
        strip(item);
    }
    for row in tree.get_mut("rows").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(object) = row.get_mut("object") {
            strip(object);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> Event {
        Event {
            level: Level::Metadata,
            id: "a-1".into(),
            uri: "/api/v1/namespaces/default/pods?limit=500".into(),
            verb: "list".into(),
            user: Some(UserInfo::new("jane", &["dev", "system:authenticated"])),
            impersonated: None,
            constraint: None,
            source_ips: vec!["192.0.2.1".into()],
            user_agent: "kubectl/v1.36.2".into(),
            object: Some(ObjectReference {
                resource: "pods".into(),
                namespace: "default".into(),
                api_version: "v1".into(),
                ..ObjectReference::default()
            }),
            status: Some(Status::of_code(200)),
            request_object: None,
            response_object: None,
            received: "2026-01-02T03:04:05.123456Z".parse().expect("a time"),
            annotations: [("authorization.k8s.io/decision".to_owned(), "allow".to_owned())].into(),
        }
    }

    #[test]
    fn events_have_upstreams_format() {
        let now = "2026-01-02T03:04:05.2Z".parse().expect("a time");
        let text = String::from_utf8(event().json(Stage::ResponseComplete, now)).expect("UTF-8");
        assert_eq!(
            text,
            r#"{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":"Metadata","auditID":"a-1","stage":"ResponseComplete","requestURI":"/api/v1/namespaces/default/pods?limit=500","verb":"list","user":{"username":"jane","groups":["dev","system:authenticated"]},"sourceIPs":["192.0.2.1"],"userAgent":"kubectl/v1.36.2","objectRef":{"resource":"pods","namespace":"default","apiVersion":"v1"},"responseStatus":{"metadata":{},"code":200},"requestReceivedTimestamp":"2026-01-02T03:04:05.123456Z","stageTimestamp":"2026-01-02T03:04:05.200000Z","annotations":{"authorization.k8s.io/decision":"allow"}}"#
        );
        assert_eq!(
            event().legacy(Stage::ResponseComplete),
            r#"2026-01-02T03:04:05.123456Z AUDIT: id="a-1" stage="ResponseComplete" ip="192.0.2.1" method="list" user="jane" groups="dev","system:authenticated" as="<self>" asgroups=<lookup> user-agent="kubectl/v1.36.2" namespace="default" uri="/api/v1/namespaces/default/pods?limit=500" response="200""#
        );
    }

    #[test]
    fn long_user_agents_are_truncated() {
        assert_eq!(user_agent("curl"), "curl");
        let cut = user_agent(&"é".repeat(1000));
        assert!(cut.len() <= USER_AGENT_LIMIT + CUT.len() && cut.ends_with(CUT));
    }
}
