//! The interface for authorization: crate `auth` has authorizers, which run in order.

use async_trait::async_trait;
use machinery::StatusError;

use crate::request::{RequestInfo, UserInfo};

/// The facts of a decision. Upstream: `authorizer.Attributes`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attributes {
    pub user: UserInfo,
    pub request: RequestInfo,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    Allow { reason: String },
    Deny { reason: String },
    NoOpinion { reason: String },
}

#[async_trait]
pub trait Authorizer: Send + Sync {
    async fn authorize(&self, attributes: &Attributes) -> Decision;

    /// A user's rules in a namespace, for SelfSubjectRulesReview.
    async fn rules(&self, _user: &UserInfo, _namespace: &str) -> Vec<PolicyRule> {
        vec![]
    }

    /// Why [`rules`](Self::rules) is incomplete for this user, if it is.
    async fn unresolved(&self, _user: &UserInfo, _namespace: &str) -> Option<String> {
        None
    }
}

/// The fields of an RBAC rule that reviews report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyRule {
    pub verbs: Vec<String>,
    pub api_groups: Vec<String>,
    pub resources: Vec<String>,
    pub resource_names: Vec<String>,
    pub non_resource_urls: Vec<String>,
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
