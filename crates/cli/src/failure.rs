//! Errors in kubectl's words.
//!
//! In: answers of the server, invalid arguments, broken connections. Out: the lines for standard error,
//! and the exit code. One line each, never a backtrace.

use http::StatusCode;
use machinery::status::Reason;
use serde_json::Value;

pub type Result<T> = std::result::Result<T, Failure>;

#[derive(Debug)]
pub enum Failure {
    /// The server's `Status`.
    Status(Box<ApiStatus>),
    /// kubectl's own error: printed after `error: `.
    Own(String),
    /// Printed unchanged.
    Plain(String),
    /// Several failures, of commands that go on after one.
    Many(Vec<Failure>),
    /// A command in a container exited with this code; its own output is printed already.
    Exit(u8, String),
    /// Our output cannot be written.
    Output(std::io::Error),
}

#[derive(Clone, Debug, Default)]
pub struct ApiStatus {
    pub code: u16,
    pub reason: String,
    pub message: String,
    pub kind: String,
    pub name: String,
    /// Field and message.
    pub causes: Vec<(String, String)>,
    pub has_details: bool,
}

pub fn own(text: impl Into<String>) -> Failure {
    Failure::Own(text.into())
}

impl ApiStatus {
    /// From the body of an unsuccessful answer.
    pub fn of(code: StatusCode, body: &[u8]) -> Self {
        let status: Value = serde_json::from_slice(body).unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let details = &status["details"];
        if status["kind"] != "Status" {
            return Self::generic(code, &String::from_utf8_lossy(body));
        }
        let causes = details["causes"].as_array().into_iter().flatten();
        Self {
            code: status["code"].as_u64().and_then(|n| n.try_into().ok()).unwrap_or(code.as_u16()),
            reason: text(&status["reason"]),
            message: text(&status["message"]),
            kind: text(&details["kind"]),
            name: text(&details["name"]),
            causes: causes.map(|cause| (text(&cause["field"]), text(&cause["message"]))).collect(),
            has_details: details.is_object(),
        }
    }

    /// The error of an answer without a Status. Upstream: `apierrors.NewGenericServerResponse`.
    fn generic(code: StatusCode, body: &str) -> Self {
        let (reason, message) = match code.as_u16() {
            // Upstream omits the body's text, but it helps users.
            400 => ("BadRequest", body.trim().to_owned()),
            401 => (
                "Unauthorized",
                "the server has asked for the client to provide credentials".into(),
            ),
            403 => ("Forbidden", body.trim().to_owned()),
            404 => ("NotFound", "the server could not find the requested resource".into()),
            405 => (
                "MethodNotAllowed",
                "the server does not allow this method on the requested resource".into(),
            ),
            429 => (
                "TooManyRequests",
                "the server has received too many requests and has asked us to try again later"
                    .into(),
            ),
            503 => (
                "ServiceUnavailable",
                "the server is currently unable to handle the request".into(),
            ),
            500.. => (
                "InternalError",
                format!(
                    "an error on the server ({:?}) has prevented the request from succeeding",
                    body.trim()
                ),
            ),
            _ => (
                "",
                format!(
                    "the server responded with the status code {} but did not return more information",
                    code.as_u16()
                ),
            ),
        };
        Self { code: code.as_u16(), reason: reason.into(), message, ..Self::default() }
    }

    /// Upstream: `cmdutil.checkErr`.
    fn line(&self) -> String {
        if self.reason == format!("{:?}", Reason::Invalid) {
            return self.invalid();
        }
        match self.reason.as_str() {
            "Unauthorized" => {
                format!("error: You must be logged in to the server ({})", self.message)
            }
            "" => format!("Error from server: {}", self.message),
            reason => format!("Error from server ({reason}): {}", self.message),
        }
    }

    fn invalid(&self) -> String {
        let mut text = "The request is invalid".to_owned();
        if !self.kind.is_empty() || !self.name.is_empty() {
            text = format!("The {} {:?} is invalid", self.kind, self.name);
        } else if !self.message.is_empty() && (!self.has_details || self.causes.is_empty()) {
            text = format!("{text}: {}", self.message);
        }
        let cause = |(field, message): &(String, String)| format!("{field}: {message}");
        match self.causes.as_slice() {
            [] => text,
            [one] => format!("{text}: {}", cause(one)),
            many => many
                .iter()
                .fold(format!("{text}: "), |text, one| format!("{text}\n* {}", cause(one))),
        }
    }
}

impl Failure {
    pub fn status(&self) -> Option<&ApiStatus> {
        match self {
            Self::Status(status) => Some(status),
            _ => None,
        }
    }

    pub fn is_not_found(&self) -> bool {
        self.status().is_some_and(|status| status.code == 404)
    }

    pub fn is_conflict(&self) -> bool {
        self.status().is_some_and(|status| status.reason == "Conflict")
    }

    /// Whether a watch must start again with a new list.
    pub fn is_expired(&self) -> bool {
        self.status().is_some_and(|status| status.code == 410)
    }

    /// Upstream: `AddSourceToErr`: adds the source to the message; a Status keeps its reason.
    pub fn during(mut self, doing: &str, source: &str) -> Self {
        match &mut self {
            Self::Status(status) => {
                status.message = format!("error when {doing} {source:?}: {}", status.message);
            }
            Self::Own(text) => *text = format!("error when {doing} {source:?}: {text}"),
            _ => {}
        }
        self
    }

    /// The lines for standard error.
    pub fn lines(&self) -> Vec<String> {
        match self {
            Self::Status(status) => vec![status.line()],
            Self::Own(text) => vec![format!("error: {text}")],
            Self::Plain(text) => vec![text.clone()],
            Self::Many(all) => all.iter().flat_map(Self::lines).collect(),
            Self::Exit(_, text) if text.is_empty() => vec![],
            Self::Exit(_, text) => vec![text.clone()],
            Self::Output(error) if error.kind() == std::io::ErrorKind::BrokenPipe => vec![],
            Self::Output(error) => vec![format!("error: {error}")],
        }
    }

    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Exit(code, _) => *code,
            _ => 1,
        }
    }

    /// `Ok`, one failure, or several.
    pub fn collect(mut all: Vec<Failure>) -> Result<()> {
        match all.len() {
            0 => Ok(()),
            1 => Err(all.remove(0)),
            _ => Err(Self::Many(all)),
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.lines().join("; "))
    }
}

impl std::error::Error for Failure {}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::Output(error)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn failures_have_kubectls_texts() {
        for (code, body, expected) in [
            (
                404,
                json!({"kind":"Status","reason":"NotFound","message":"pods \"x\" not found","code":404}),
                "Error from server (NotFound): pods \"x\" not found",
            ),
            (
                401,
                json!({"kind":"Status","reason":"Unauthorized","message":"Unauthorized"}),
                "error: You must be logged in to the server (Unauthorized)",
            ),
            (
                422,
                json!({"kind":"Status","reason":"Invalid","message":"long","details":{"kind":"Pod","name":"x",
                    "causes":[{"field":"spec.a","message":"Required value"}]}}),
                "The Pod \"x\" is invalid: spec.a: Required value",
            ),
            (
                422,
                json!({"kind":"Status","reason":"Invalid","message":"long","details":{"kind":"Pod","name":"x",
                    "causes":[{"field":"a","message":"b"},{"field":"c","message":"d"}]}}),
                "The Pod \"x\" is invalid: \n* a: b\n* c: d",
            ),
            (
                500,
                json!({"boom":1}),
                "Error from server (InternalError): an error on the server (\"{\\\"boom\\\":1}\") has prevented the request from succeeding",
            ),
            (
                404,
                json!("x"),
                "Error from server (NotFound): the server could not find the requested resource",
            ),
        ] {
            let code = StatusCode::from_u16(code).expect("a code");
            let status = ApiStatus::of(code, body.to_string().as_bytes());
            assert_eq!(Failure::Status(Box::new(status)).lines(), [expected]);
        }
    }
}
