//! The audit trail of one request: its facts are collected on the way, and written at the policy's stages.
//!
//! In: the request's parts after authentication; notes from later filters and verbs. Out: events. A trail
//! that is dropped without an end means that the client closed the connection.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::FutureExt;
use http::header::{AUTHORIZATION, CONTENT_TYPE, USER_AGENT};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Response};
use http_body_util::BodyExt;
use machinery::{Object, StatusError};
use serde_json::Value;
use serde_json::value::RawValue;
use transport::ConnectionInfo;

use super::Audit;
use super::event::{Event, ObjectReference, Status, user_agent, without_managed_fields};
use super::policy::{Level, Stage, Verdict};
use crate::authn::LocalIdentity;
use crate::codec::cbor;
use crate::codec::protobuf::Protobuf;
use crate::request::{RequestInfo, UserInfo};
use crate::resource::Body;

/// See the module. The request's extensions contain clones of the `Arc`.
pub struct Trail {
    audit: Arc<Audit>,
    verdict: Verdict,
    is_long: bool,
    /// Locked for short notes; never held across an await. `None` after the last event.
    event: Mutex<Option<Event>>,
}

impl Trail {
    /// `None` if the policy does not record the request. Writes the first event; an error means that the
    /// request must not continue.
    pub async fn begin(
        audit: Option<&Arc<Audit>>,
        info: &Arc<RequestInfo>,
        parts: &mut Parts,
        user: &UserInfo,
    ) -> Result<Option<Arc<Self>>, StatusError> {
        let Some(audit) = audit else { return Ok(None) };
        let Some(trail) = Self::new(audit, info, parts, Some(user)) else { return Ok(None) };
        let trail = Arc::new(trail);
        if !trail.write(Stage::RequestReceived).await {
            let counter = &audit.rejected;
            counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            return Err(StatusError::internal("failed to store audit event"));
        }
        parts.extensions.insert(trail.clone());
        Ok(Some(trail))
    }

    fn new(
        audit: &Arc<Audit>,
        info: &RequestInfo,
        parts: &Parts,
        user: Option<&UserInfo>,
    ) -> Option<Self> {
        let verdict = audit.policy.evaluate(user, info).clone();
        audit.note_level(verdict.level);
        if verdict.level == Level::None {
            return None;
        }
        let text = |name: &http::HeaderName| {
            let value = parts.headers.get(name).and_then(|value| value.to_str().ok());
            value.unwrap_or_default()
        };
        let id = parts.extensions.get::<AuditId>().and_then(|id| id.0.to_str().ok());
        let id = id.unwrap_or_default().to_owned();
        let uri = parts.uri.path_and_query().map_or(parts.uri.path(), |whole| whole.as_str());
        let event = Event {
            level: verdict.level,
            id,
            uri: uri.to_owned(),
            verb: info.verb.clone(),
            user: user.cloned(),
            impersonated: None,
            constraint: None,
            source_ips: source_ips(parts),
            user_agent: user_agent(text(&USER_AGENT)),
            object: info.is_resource.then(|| object_reference(info)),
            status: None,
            request_object: None,
            response_object: None,
            received: base::clock::now(),
            annotations: BTreeMap::new(),
        };
        let is_long = info.is_long_running();
        Some(Self { audit: audit.clone(), verdict, is_long, event: Mutex::new(Some(event)) })
    }

    /// The trail of a request.
    pub fn of(parts: &Parts) -> Option<&Arc<Self>> {
        parts.extensions.get()
    }

    fn note(&self, work: impl FnOnce(&mut Event)) {
        if let Some(event) = self.event.lock().expect("no panic under the lock").as_mut() {
            work(event);
        }
    }

    /// Sets an annotation; an existing one is kept.
    pub fn annotate(&self, key: &str, value: &str) {
        self.note(|event| {
            event.annotations.entry(key.to_owned()).or_insert_with(|| value.to_owned());
        });
    }

    pub fn annotate_all(&self, notes: BTreeMap<String, String>) {
        notes.iter().for_each(|(key, value)| self.annotate(key, value));
    }

    /// The impersonated user, and the verb of the constrained mode that allowed it, if any.
    pub fn impersonated(&self, user: &UserInfo, constraint: Option<&'static str>) {
        self.note(|event| {
            event.impersonated = Some(user.clone());
            event.constraint = constraint;
        });
    }

    pub fn wants_request(&self) -> bool {
        self.verdict.level >= Level::Request
    }

    /// The decoded object of a create or an update; also completes the object's name.
    pub fn request_object(&self, object: &dyn Object, json: impl FnOnce() -> Vec<u8>) {
        let meta = object.meta();
        self.note(|event| {
            let reference = event.object.get_or_insert_default();
            let fill = |field: &mut String, value: &Option<String>| {
                if field.is_empty() {
                    field.clone_from(&value.clone().unwrap_or_default());
                }
            };
            fill(&mut reference.namespace, &meta.namespace);
            fill(&mut reference.name, &meta.name);
            fill(&mut reference.uid, &meta.uid);
            fill(&mut reference.resource_version, &meta.resource_version);
        });
        if self.wants_request() {
            self.request_json(&json());
        }
    }

    /// A patch or options, as received.
    pub fn request_json(&self, json: &[u8]) {
        if self.wants_request() {
            let object = self.raw(json);
            self.note(|event| event.request_object = object);
        }
    }

    fn raw(&self, json: &[u8]) -> Option<Box<RawValue>> {
        if self.verdict.omits_managed_fields {
            let mut tree: Value = serde_json::from_slice(json).ok()?;
            without_managed_fields(&mut tree);
            return serde_json::value::to_raw_value(&tree).ok();
        }
        let text = std::str::from_utf8(json).ok()?.trim();
        RawValue::from_string(text.to_owned()).ok()
    }

    fn is_of_resource(&self) -> bool {
        let event = self.event.lock().expect("no panic under the lock");
        event.as_ref().is_some_and(|event| event.object.is_some())
    }

    fn snapshot(&self, last: bool) -> Option<Event> {
        let mut event = self.event.lock().expect("no panic under the lock");
        if last { event.take() } else { event.clone() }
    }

    fn wants(&self, stage: Stage) -> bool {
        !self.verdict.omit_stages.contains(&stage)
    }

    async fn write(&self, stage: Stage) -> bool {
        let last = matches!(stage, Stage::ResponseComplete | Stage::Panic);
        let Some(event) = self.snapshot(last) else { return true };
        if !self.wants(stage) {
            return true;
        }
        let now = match stage {
            Stage::RequestReceived => event.received,
            _ => base::clock::now(),
        };
        self.audit.emit(&event, stage, now).await
    }

    fn set_status(&self, status: Status) {
        self.note(|event| event.status = Some(status));
    }

    fn respond_with(&self, status: &Value, code: u16) {
        let mut bounded = Status::of(status);
        bounded.code = code;
        self.set_status(bounded);
    }

    /// An error that becomes the answer.
    fn refused(&self, error: &StatusError) {
        let json = error.to_json();
        self.respond_with(&json, error.code);
        if self.verdict.level >= Level::RequestResponse {
            let object = self.raw(json.to_string().as_bytes());
            self.note(|event| event.response_object = object);
        }
    }

    /// Records an answer; the details depend on the level, and on whether it is a `Status`.
    async fn answered(
        &self,
        protobuf: Option<Protobuf>,
        response: Response<Body>,
    ) -> Response<Body> {
        let code = response.status().as_u16();
        let is_resource = self.is_of_resource();
        self.set_status(Status::of_code(code));
        if self.is_long && code < 400 {
            return response;
        }
        let wants_object = is_resource && self.verdict.level >= Level::RequestResponse;
        let may_matter = wants_object || (is_resource && may_be_status(&response));
        if !may_matter {
            return response;
        }
        let (head, body) = response.into_parts();
        let Ok(whole) = body.collect().await else {
            return Response::from_parts(head, crate::codec::full(Bytes::new()));
        };
        let bytes = whole.to_bytes();
        if let Some(json) = as_json(protobuf, &head.headers, &bytes) {
            if let Ok(tree) = serde_json::from_slice::<Value>(&json)
                && tree["kind"] == "Status"
                && tree["apiVersion"] == "v1"
            {
                self.respond_with(&tree, code);
            }
            if wants_object {
                let object = self.raw(&json);
                self.note(|event| event.response_object = object);
            }
        }
        Response::from_parts(head, crate::codec::full(bytes))
    }
}

/// The request's id in logs and answers, as an extension.
#[derive(Clone)]
pub struct AuditId(pub HeaderValue);

/// Handles a request, and records its result.
pub(crate) async fn follow(
    protobuf: Option<Protobuf>,
    trail: Option<Arc<Trail>>,
    work: impl Future<Output = Result<Response<Body>, StatusError>>,
) -> Result<Response<Body>, StatusError> {
    let Some(trail) = trail else { return work.await };
    let left = Left(trail.clone());
    // Unwind safety: the panic continues; this code only records it.
    let outcome = match AssertUnwindSafe(work).catch_unwind().await {
        Ok(outcome) => outcome,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default();
            let status = serde_json::json!({
                "status": "Failure", "reason": "InternalError",
                "message": format!("APIServer panic'd: {text}"),
            });
            trail.respond_with(&status, 500);
            trail.write(Stage::Panic).await;
            resume_unwind(panic);
        }
    };
    let response = match outcome {
        Err(error) => {
            trail.refused(&error);
            if trail.is_long {
                trail.write(Stage::ResponseStarted).await;
            }
            trail.write(Stage::ResponseComplete).await;
            return Err(error);
        }
        Ok(response) => trail.answered(protobuf, response).await,
    };
    if !trail.is_long {
        trail.write(Stage::ResponseComplete).await;
        return Ok(response);
    }
    trail.write(Stage::ResponseStarted).await;
    // The last event is written with the last frame, or when the client has closed the connection.
    Ok(response.map(|body| {
        body.map_frame(move |frame| {
            let _until_the_end = &left;
            frame
        })
        .boxed_unsync()
    }))
}

/// Writes the last event if no other code has.
struct Left(Arc<Trail>);

impl Drop for Left {
    fn drop(&mut self) {
        let trail = &self.0;
        let Some(mut event) = trail.snapshot(true) else { return };
        if event.status.is_none() {
            event.status = Some(Status {
                status: "Success".into(),
                message: "Connection closed early".into(),
                code: 200,
                ..Status::default()
            });
        }
        if trail.wants(Stage::ResponseComplete) {
            trail.audit.emit_later(event, Stage::ResponseComplete);
        }
    }
}

/// A request with wrong credentials has one event, without a user.
pub(crate) async fn failed_authentication(
    audit: Option<&Arc<Audit>>,
    info: &RequestInfo,
    parts: &Parts,
    error: &StatusError,
) {
    let Some(audit) = audit else { return };
    let Some(trail) = Trail::new(audit, info, parts, None) else { return };
    trail.refused(error);
    let tried = tried(parts);
    trail.note(|event| {
        if let Some(status) = &mut event.status {
            status.message = tried;
        }
    });
    trail.write(Stage::ResponseStarted).await;
}

fn tried(parts: &Parts) -> String {
    let mut methods = vec![];
    let header = parts.headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    match header.and_then(|value| value.trim().split_once(' ')) {
        Some((scheme, _)) if scheme.eq_ignore_ascii_case("basic") => methods.push("basic"),
        Some((scheme, _)) if scheme.eq_ignore_ascii_case("bearer") => methods.push("bearer"),
        _ => {}
    }
    let connection = parts.extensions.get::<ConnectionInfo>();
    if connection.is_some_and(|info| info.peer_certificates.is_some()) {
        methods.push("x509");
    }
    match methods.is_empty() {
        true => "Authentication failed, no credentials provided".into(),
        false => format!("Authentication failed, attempted: {}", methods.join(", ")),
    }
}

/// Upstream: `SourceIPs`. Only the last is certain; the client sends the others.
fn source_ips(parts: &Parts) -> Vec<String> {
    let ip = |text: &str| text.trim().parse::<std::net::IpAddr>().ok();
    let header = |headers: &HeaderMap, name: &str| {
        headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
    };
    let mut all: Vec<_> =
        header(&parts.headers, "x-forwarded-for").split(',').filter_map(ip).collect();
    if let Some(real) = ip(&header(&parts.headers, "x-real-ip"))
        && !all.contains(&real)
    {
        all.push(real);
    }
    let connection = parts.extensions.get::<ConnectionInfo>();
    let remote = connection.and_then(|info| info.remote).map(|remote| remote.ip().to_canonical());
    // Components of this process have no socket.
    let local = || parts.extensions.get::<LocalIdentity>().map(|_| [127, 0, 0, 1].into());
    if let Some(remote) = remote.or_else(local)
        && all.last() != Some(&remote)
    {
        all.push(remote);
    }
    all.iter().map(ToString::to_string).collect()
}

fn object_reference(info: &RequestInfo) -> ObjectReference {
    ObjectReference {
        resource: info.resource.clone(),
        namespace: info.namespace.clone(),
        name: info.name.clone(),
        api_group: info.group.clone(),
        api_version: info.version.clone(),
        subresource: info.subresource.clone(),
        ..ObjectReference::default()
    }
}

/// Errors are; answers to deletes and bindings may be.
fn may_be_status(response: &Response<Body>) -> bool {
    use http_body::Body as _;
    const SMALL: u64 = 4096;
    let is_small = response.body().size_hint().exact().is_some_and(|size| size < SMALL);
    response.status().as_u16() >= 400 || is_small
}

/// The answer as JSON, whatever its media type.
fn as_json(protobuf: Option<Protobuf>, headers: &HeaderMap, bytes: &Bytes) -> Option<Bytes> {
    let kind = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    if kind.starts_with("application/json") {
        return Some(bytes.clone());
    }
    if kind == cbor::MEDIA_TYPE {
        return cbor::to_json(bytes).ok().map(Bytes::from);
    }
    if kind.starts_with("application/vnd.kubernetes.protobuf") {
        return (protobuf?.0)().to_json(bytes).ok().map(Bytes::from);
    }
    None
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn parts(headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().uri("/api/v1/pods?watch=1");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).expect("a request").into_parts().0
    }

    #[test]
    fn sources_are_listed_as_upstream_does() {
        for (headers, expected) in [
            (vec![], vec![]),
            (
                vec![("x-forwarded-for", "192.0.2.1, bad, 2001:db8::1")],
                vec!["192.0.2.1", "2001:db8::1"],
            ),
            (vec![("x-forwarded-for", "192.0.2.1"), ("x-real-ip", "192.0.2.1")], vec!["192.0.2.1"]),
            (vec![("x-real-ip", "192.0.2.7")], vec!["192.0.2.7"]),
        ] {
            assert_eq!(source_ips(&parts(&headers)), expected, "{headers:?}");
        }
        let mut local = parts(&[]);
        local.extensions.insert(LocalIdentity(UserInfo::default()));
        assert_eq!(source_ips(&local), ["127.0.0.1"]);
    }

    #[test]
    fn failed_authentication_names_the_credentials() {
        for (headers, expected) in [
            (vec![], "Authentication failed, no credentials provided"),
            (vec![("authorization", "Bearer x")], "Authentication failed, attempted: bearer"),
            (vec![("authorization", "Basic x")], "Authentication failed, attempted: basic"),
        ] {
            assert_eq!(tried(&parts(&headers)), expected);
        }
    }
}
