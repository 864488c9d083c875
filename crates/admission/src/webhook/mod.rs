//! Admission webhooks: external servers that change or reject requests.
//!
//! ```text
//! configurations ─► hooks ─► matched? ─► review ─► call ─► verdict ─► patch, refusal, warnings
//! ```
//!
//! Invariants: no webhook is called for webhooks or policies; after a failed call the failure policy
//! decides, a refusal goes to the client; webhooks get only data that the client could see.
//! Upstream: `k8s.io/apiserver/pkg/admission/plugin/webhook`.

pub(crate) mod call;
mod hooks;
pub(crate) mod mutating;
mod review;
pub(crate) mod validating;

use std::time::Duration;

use apiserver::StatusError;
use apiserver::admission::Attributes;
use apiserver::metrics::ADMISSION_WEBHOOK;
use apiserver::resource::Resource;
use base::metrics::Timer;
use machinery::status::Reason;
use serde_json::Value;

use crate::matching::shown;
use call::Clients;
pub(crate) use hooks::Hook;
pub(crate) use review::request_of;
use review::{Review, Verdict};

/// Why a webhook did not allow a request.
enum Failure {
    /// The call failed: the failure policy decides.
    Calling(String),
    /// The webhook refused, or the request must not be sent to it.
    Refused(StatusError),
}

/// Calls one webhook; returns its answer if it allowed the request. Measures the call.
async fn ask(
    clients: &Clients,
    attributes: &Attributes<'_>,
    hook: &Hook,
    row: &Resource,
    is_mutating: bool,
) -> Result<Verdict, Failure> {
    let timer = Timer::start();
    let outcome = consult(clients, attributes, hook, row, is_mutating).await;
    let rejected = match &outcome {
        Ok(_) => "false",
        Err(Failure::Calling(_)) if hook.fails_open => "false",
        Err(_) => "true",
    };
    let step = if is_mutating { "admit" } else { "validating" };
    let labels = [&*hook.name, attributes.operation.as_str(), rejected, step];
    ADMISSION_WEBHOOK.took(&labels, timer.elapsed());
    outcome
}

async fn consult(
    clients: &Clients,
    attributes: &Attributes<'_>,
    hook: &Hook,
    row: &Resource,
    is_mutating: bool,
) -> Result<Verdict, Failure> {
    if attributes.ctx.dry_run && !matches!(&*hook.side_effects, "None" | "NoneOnDryRun") {
        let why = format!("admission webhook {:?} does not support dry run", hook.name);
        return Err(Failure::Refused(StatusError::bad_request(why)));
    }
    let tree = |object: Option<&dyn machinery::Object>| -> Result<Value, StatusError> {
        object.map_or(Ok(Value::Null), |object| shown(row, &attributes.ctx.subresource, object))
    };
    let object = attributes.object.as_deref().map(|object| &**object);
    let (object, old) = (tree(object), tree(attributes.old));
    let (object, old) = (object.map_err(Failure::Refused)?, old.map_err(Failure::Refused)?);
    let review = Review::new(attributes, &hook.review_versions, row, object, old);
    let review = review
        .map_err(|why| Failure::Calling(format!("could not create admission objects: {why}")))?;
    let timeout = Duration::from_secs(hook.timeout_seconds);
    let answer = clients
        .post(attributes.registry, &hook.endpoint, review.body.clone(), timeout)
        .await
        .map_err(|error| Failure::Calling(error.to_string()))?;
    let verdict = review.verdict(is_mutating, &answer).map_err(Failure::Calling)?;
    for warning in &verdict.warnings {
        attributes.ctx.warn(warning.as_str());
    }
    for (key, value) in &verdict.annotations {
        attributes.ctx.annotate(format!("{}/{key}", hook.name), value.as_str());
    }
    if verdict.allowed {
        return Ok(verdict);
    }
    Err(Failure::Refused(refusal(&hook.name, verdict.result.as_ref())))
}

/// The error of a failed call with failurePolicy Fail.
fn failed(hook: &Hook, why: &str) -> StatusError {
    StatusError::internal(format!("failed calling webhook {:?}: {why}", hook.name))
}

/// The Status of a webhook's refusal, completed for the client.
/// Upstream: `webhookerrors.ToStatusErr`.
fn refusal(webhook: &str, result: Option<&Value>) -> StatusError {
    const BAD_REQUEST: u16 = 400;
    let text = |value: &Value, key: &str| value[key].as_str().unwrap_or_default().to_owned();
    let absent = Value::Null;
    let result = result.unwrap_or(&absent);
    let (message, reason) = (text(result, "message"), text(result, "reason"));
    let denied = format!("admission webhook {webhook:?} denied the request");
    let message = match (message.as_str(), reason.as_str()) {
        ("", "") => format!("{denied} without explanation"),
        ("", reason) => format!("{denied}: {reason}"),
        (message, _) => format!("{denied}: {message}"),
    };
    let code = result["code"].as_u64().and_then(|code| u16::try_from(code).ok()).unwrap_or(0);
    let mut error = StatusError::new(Reason::Unknown, message).with_code(code.max(BAD_REQUEST));
    if !reason.is_empty() {
        error = error.with_reason_text(reason);
    }
    let details = &result["details"];
    error = error
        .about(&text(details, "group"), &text(details, "kind"), &text(details, "name"))
        .uid(&text(details, "uid"));
    for cause in details["causes"].as_array().into_iter().flatten() {
        error = error.cause(&text(cause, "reason"), &text(cause, "field"), text(cause, "message"));
    }
    if let Some(seconds) = details["retryAfterSeconds"].as_u64().filter(|seconds| *seconds > 0) {
        error = error.retry_after(u32::try_from(seconds).unwrap_or(u32::MAX));
    }
    error
}
