//! Authorization: the authorizers run in order; the first opinion counts, no opinion means no.

use std::sync::Arc;

use machinery::StatusError;

use crate::audit::Trail;
use crate::authz::{Attributes, Authorizer, Decision};
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

/// The union of authorizers. Upstream: `union.New`.
pub async fn decide(authorizers: &[Box<dyn Authorizer>], attributes: &Attributes) -> Decision {
    let mut reasons = vec![];
    for authorizer in authorizers {
        match authorizer.authorize(attributes).await {
            Decision::NoOpinion { reason } if reason.is_empty() => {}
            Decision::NoOpinion { reason } => reasons.push(reason),
            decision => return decision,
        }
    }
    Decision::NoOpinion { reason: reasons.join("\n") }
}

/// `pods "x" is forbidden: User "jane" cannot get resource "pods" in API group "" in the namespace "a"`
pub fn forbidden(attributes: &Attributes, reason: &str) -> StatusError {
    let Attributes { user, request } = attributes;
    let mut why = if !request.is_resource {
        format!("User {:?} cannot {} path {:?}", user.name, request.verb, request.path)
    } else {
        let resource = match request.subresource.as_str() {
            "" => request.resource.clone(),
            subresource => format!("{}/{subresource}", request.resource),
        };
        let scope = match request.namespace.as_str() {
            "" => "at the cluster scope".to_owned(),
            namespace => format!("in the namespace {namespace:?}"),
        };
        format!(
            "User {:?} cannot {} resource {resource:?} in API group {:?} {scope}",
            user.name, request.verb, request.group
        )
    };
    if !reason.is_empty() {
        why = format!("{why}: {reason}");
    }
    StatusError::forbidden(&request.group, &request.resource, &request.name, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_read_as_upstreams() {
        let info = RequestInfo {
            is_resource: true,
            verb: "list".into(),
            resource: "pods".into(),
            namespace: "default".into(),
            ..RequestInfo::default()
        };
        let attributes = Attributes { user: UserInfo::new("x", &[]), request: info };
        assert_eq!(
            forbidden(&attributes, "").message,
            r#"pods is forbidden: User "x" cannot list resource "pods" in API group "" in the namespace "default""#
        );
        let info =
            RequestInfo { verb: "get".into(), path: "/metrics".into(), ..RequestInfo::default() };
        let attributes = Attributes { user: UserInfo::new("x", &[]), request: info };
        assert_eq!(
            forbidden(&attributes, "").message,
            r#"forbidden: User "x" cannot get path "/metrics""#
        );
    }
}
