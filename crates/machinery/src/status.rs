//! The one error of the API: what a `Status` object says.
//!
//! From the registry up everything fails with [`StatusError`]; [`StatusError::to_json`] is the one
//! place that renders it. Reasons, codes and message forms are upstream's
//! (`k8s.io/apimachinery/pkg/api/errors`).

use std::fmt;

use serde_json::{Value, json};

use crate::field::FieldErrors;

/// Why a request failed, for machines. The spelling on the wire is the variant's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// No reason is given on the wire.
    Unknown,
    Unauthorized,
    Forbidden,
    NotFound,
    AlreadyExists,
    Conflict,
    Gone,
    Invalid,
    ServerTimeout,
    Timeout,
    TooManyRequests,
    BadRequest,
    MethodNotAllowed,
    NotAcceptable,
    RequestEntityTooLarge,
    UnsupportedMediaType,
    InternalError,
    Expired,
    ServiceUnavailable,
}

impl Reason {
    pub fn code(self) -> u16 {
        match self {
            Self::Unknown | Self::InternalError => 500,
            Self::Unauthorized => 401,
            Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::AlreadyExists | Self::Conflict => 409,
            Self::Gone | Self::Expired => 410,
            Self::Invalid => 422,
            Self::ServerTimeout => 500,
            Self::Timeout => 504,
            Self::TooManyRequests => 429,
            Self::BadRequest => 400,
            Self::MethodNotAllowed => 405,
            Self::NotAcceptable => 406,
            Self::RequestEntityTooLarge => 413,
            Self::UnsupportedMediaType => 415,
            Self::ServiceUnavailable => 503,
        }
    }
}

/// One entry of `details.causes`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    pub reason: String,
    pub message: String,
    pub field: String,
}

/// A failed request. Boxed inside, so that results stay small.
#[derive(Clone, Debug)]
pub struct StatusError(Box<Inner>);

#[derive(Clone, Debug)]
pub struct Inner {
    pub reason: Reason,
    pub code: u16,
    pub message: String,
    pub group: String,
    /// A resource (plural) or a kind, as upstream puts it for this error.
    pub kind: String,
    pub name: String,
    pub uid: String,
    pub causes: Vec<Cause>,
    pub retry_after_seconds: Option<u32>,
    /// The token with which an expired list can go on, in `metadata.continue`.
    pub continue_token: Option<String>,
    /// A reason that is none of [`Reason`]'s: a webhook may give any.
    pub reason_text: Option<String>,
    /// Some errors have no `details` at all, though others of their reason have empty ones.
    pub hides_details: bool,
}

impl std::ops::Deref for StatusError {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

impl fmt::Display for StatusError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for StatusError {}

impl StatusError {
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            reason,
            code: reason.code(),
            message: message.into(),
            group: String::new(),
            kind: String::new(),
            name: String::new(),
            uid: String::new(),
            causes: vec![],
            retry_after_seconds: None,
            hides_details: false,
            continue_token: None,
            reason_text: None,
        }))
    }

    /// `pods "web" not found`
    pub fn not_found(group: &str, resource: &str, name: &str) -> Self {
        Self::new(Reason::NotFound, format!("{} {name:?} not found", qualified(resource, group)))
            .about(group, resource, name)
    }

    /// `pods "web" already exists`
    pub fn already_exists(group: &str, resource: &str, name: &str) -> Self {
        Self::new(
            Reason::AlreadyExists,
            format!("{} {name:?} already exists", qualified(resource, group)),
        )
        .about(group, resource, name)
    }

    /// `Operation cannot be fulfilled on pods "web": …`
    pub fn conflict(group: &str, resource: &str, name: &str, why: impl fmt::Display) -> Self {
        let message = format!(
            "Operation cannot be fulfilled on {} {name:?}: {why}",
            qualified(resource, group)
        );
        Self::new(Reason::Conflict, message).about(group, resource, name)
    }

    /// `pods "web" is forbidden: …`
    pub fn forbidden(group: &str, resource: &str, name: &str, why: impl fmt::Display) -> Self {
        let subject = qualified(resource, group);
        let message = match (resource, name) {
            ("", _) => format!("forbidden: {why}"),
            (_, "") => format!("{subject} is forbidden: {why}"),
            _ => format!("{subject} {name:?} is forbidden: {why}"),
        };
        Self::new(Reason::Forbidden, message).about(group, resource, name)
    }

    /// `Deployment.apps "web" is invalid: …`, with a cause per error.
    pub fn invalid(group: &str, kind: &str, name: &str, errors: FieldErrors) -> Self {
        let summary = errors.summary();
        let mut error = Self::new(
            Reason::Invalid,
            format!("{} {name:?} is invalid: {summary}", qualified(kind, group)),
        )
        .about(group, kind, name);
        error.0.causes = errors.causes();
        error
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(Reason::BadRequest, message)
    }

    pub fn unauthorized() -> Self {
        Self::new(Reason::Unauthorized, "Unauthorized")
    }

    pub fn internal(why: impl fmt::Display) -> Self {
        let message = why.to_string();
        let mut error =
            Self::new(Reason::InternalError, format!("Internal error occurred: {message}"));
        error.0.causes.push(Cause { reason: String::new(), message, field: String::new() });
        error
    }

    /// The requested revision is compacted away.
    pub fn expired(message: impl Into<String>) -> Self {
        Self::new(Reason::Expired, message)
    }

    pub fn too_many_requests(message: impl Into<String>, retry_after_seconds: u32) -> Self {
        Self::new(Reason::TooManyRequests, message).retry_after(retry_after_seconds)
    }

    pub fn method_not_allowed(group: &str, resource: &str, verb: &str) -> Self {
        let message = format!(
            "{verb} is not supported on resources of kind {:?}",
            qualified(resource, group)
        );
        Self::new(Reason::MethodNotAllowed, message).about(group, resource, "")
    }

    pub fn about(mut self, group: &str, kind: &str, name: &str) -> Self {
        self.0.group = group.into();
        self.0.kind = kind.into();
        self.0.name = name.into();
        self
    }

    pub fn uid(mut self, uid: &str) -> Self {
        self.0.uid = uid.into();
        self
    }

    pub fn cause(mut self, reason: &str, field: &str, message: impl Into<String>) -> Self {
        self.0.causes.push(Cause {
            reason: reason.into(),
            message: message.into(),
            field: field.into(),
        });
        self
    }

    pub fn retry_after(mut self, seconds: u32) -> Self {
        self.0.retry_after_seconds = Some(seconds);
        self
    }

    pub fn continue_with(mut self, token: String) -> Self {
        self.0.continue_token = Some(token);
        self
    }

    pub fn without_details(mut self) -> Self {
        self.0.hides_details = true;
        self
    }

    /// With the reason of another server; known reasons should be a [`Reason`].
    pub fn with_reason_text(mut self, text: impl Into<String>) -> Self {
        self.0.reason_text = Some(text.into());
        self
    }

    /// With another text than the reason's own.
    pub fn with_message(mut self, message: impl Into<String>) -> Self {
        self.0.message = message.into();
        self
    }

    /// With another HTTP code than the reason's own.
    pub fn with_code(mut self, code: u16) -> Self {
        self.0.code = code;
        self
    }

    pub fn is(&self, reason: Reason) -> bool {
        self.0.reason == reason
    }

    /// The `Status` object. Invariant: the only renderer of errors.
    pub fn to_json(&self) -> Value {
        let inner = &*self.0;
        let mut details = serde_json::Map::new();
        let mut put = |key: &str, value: Value| {
            details.insert(key.into(), value);
        };
        for (key, text) in [
            ("name", &inner.name),
            ("group", &inner.group),
            ("kind", &inner.kind),
            ("uid", &inner.uid),
        ] {
            if !text.is_empty() {
                put(key, text.clone().into());
            }
        }
        if !inner.causes.is_empty() {
            put("causes", inner.causes.iter().map(Cause::to_json).collect());
        }
        if let Some(seconds) = inner.retry_after_seconds {
            put("retryAfterSeconds", seconds.into());
        }
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": inner.message,
        });
        if let Some(token) = &inner.continue_token {
            status["metadata"]["continue"] = token.clone().into();
        }
        if let Some(text) = &inner.reason_text {
            status["reason"] = text.clone().into();
        } else if inner.reason != Reason::Unknown {
            status["reason"] = format!("{:?}", inner.reason).into();
        }
        let has_subject = !matches!(
            inner.reason,
            Reason::BadRequest | Reason::Unauthorized | Reason::Unknown | Reason::Expired
        );
        if !details.is_empty() || (has_subject && !inner.hides_details) {
            status["details"] = details.into();
        }
        status["code"] = inner.code.into();
        status
    }
}

impl Cause {
    fn to_json(&self) -> Value {
        let mut cause = serde_json::Map::new();
        for (key, text) in
            [("reason", &self.reason), ("message", &self.message), ("field", &self.field)]
        {
            if !text.is_empty() {
                cause.insert(key.into(), text.clone().into());
            }
        }
        cause.into()
    }
}

/// `deployments.apps`, or `pods` in the core group.
pub fn qualified(resource: &str, group: &str) -> String {
    if group.is_empty() { resource.into() } else { format!("{resource}.{group}") }
}
