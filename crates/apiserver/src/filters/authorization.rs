//! Authorization: the authorizers run in order; the first opinion counts, no opinion means no.

use std::sync::Arc;

use machinery::StatusError;

use crate::audit::Trail;
use crate::authz::{Attributes, Decision, decide, forbidden};
use crate::request::{RequestInfo, UserInfo};
use crate::resource::Behaviour;
use crate::shared::Shared;

pub async fn authorize(
    shared: &Shared,
    info: &Arc<RequestInfo>,
    user: &UserInfo,
    trail: Option<&Trail>,
) -> Result<(), StatusError> {
    let attributes = Attributes { user: user.clone(), request: (**info).clone() };
    let note = |decision: &str, reason: &str| {
        if let Some(trail) = trail {
            trail.annotate("authorization.k8s.io/decision", decision);
            trail.annotate("authorization.k8s.io/reason", reason);
        }
    };
    let reason = match decide(&shared.authorizers, &attributes).await {
        Decision::Allow { reason } => {
            note("allow", &reason);
            return also(shared, info, attributes).await;
        }
        Decision::Deny { reason } | Decision::NoOpinion { reason } => reason,
    };
    note("forbid", &reason);
    tracing::debug!(user = user.name, verb = info.verb, path = info.path, reason, "forbidden");
    Err(forbidden(&attributes, &reason))
}

/// A stream may need another verb than its method implies: a WebSocket is a GET, but a user with read access
/// must not execute commands in pods. Upstream: `ensureAuthorizedForVerb`.
async fn also(
    shared: &Shared,
    info: &RequestInfo,
    mut attributes: Attributes,
) -> Result<(), StatusError> {
    let table = shared.registry.resources();
    let row = table.get(&info.group, &info.version, &info.resource);
    let behaviour = row.and_then(|row| Some(&row.subresource(&info.subresource)?.behaviour));
    let Some(Behaviour::Connect(handler)) = behaviour else { return Ok(()) };
    let Some(verb) = handler.demands().filter(|verb| *verb != info.verb) else { return Ok(()) };
    attributes.request.verb = verb.into();
    match decide(&shared.authorizers, &attributes).await {
        Decision::Allow { .. } => Ok(()),
        Decision::Deny { reason } | Decision::NoOpinion { reason } => {
            Err(StatusError::forbidden(&info.group, &info.resource, &info.name, reason))
        }
    }
}
