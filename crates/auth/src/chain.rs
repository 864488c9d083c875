//! Combines several authenticators or authorizers.

use std::sync::Arc;

use apiserver::StatusError;
use apiserver::authn::Authenticator;
use apiserver::authz::{Attributes, Authorizer, Decision, PolicyRule};
use apiserver::request::UserInfo;
use async_trait::async_trait;
use http::request::Parts;

use crate::{ALL_AUTHENTICATED, MASTERS};

/// Asks in order; the first that recognizes the user decides. Invalid credentials of one kind do not hide
/// valid ones of another; without valid ones they are an error. Upstream: `union.New`.
pub struct Authenticators(pub Vec<Box<dyn Authenticator>>);

#[async_trait]
impl Authenticator for Authenticators {
    async fn authenticate(&self, request: &Parts) -> Result<Option<UserInfo>, StatusError> {
        let mut failures: Vec<String> = vec![];
        for authenticator in &self.0 {
            match authenticator.authenticate(request).await {
                Ok(Some(user)) => return Ok(Some(authenticated(user))),
                Ok(None) => {}
                Err(error) => failures.push(error.message.clone()),
            }
        }
        if failures.is_empty() {
            return Ok(None);
        }
        // All of them, for the log: the filter does not show them to the client.
        Err(StatusError::unauthorized().with_message(format!("[{}]", failures.join(", "))))
    }
}

/// The user with the group of all authenticated users.
pub(crate) fn authenticated(mut user: UserInfo) -> UserInfo {
    if !user.in_group(ALL_AUTHENTICATED) {
        user.groups.push(ALL_AUTHENTICATED.to_owned());
    }
    user
}

/// Asks in order; the first opinion decides. The reasons of authorizers without an opinion are joined.
#[derive(Clone)]
pub struct Authorizers(pub Vec<Arc<dyn Authorizer>>);

#[async_trait]
impl Authorizer for Authorizers {
    async fn authorize(&self, attributes: &Attributes) -> Decision {
        let mut reasons = vec![];
        for authorizer in &self.0 {
            match authorizer.authorize(attributes).await {
                Decision::NoOpinion { reason } if reason.is_empty() => {}
                Decision::NoOpinion { reason } => reasons.push(reason),
                decided => return decided,
            }
        }
        Decision::NoOpinion { reason: reasons.join("\n") }
    }

    async fn rules(&self, user: &UserInfo, namespace: &str) -> Vec<PolicyRule> {
        let mut rules = vec![];
        for authorizer in &self.0 {
            rules.extend(authorizer.rules(user, namespace).await);
        }
        rules
    }

    async fn unresolved(&self, user: &UserInfo, namespace: &str) -> Option<String> {
        let mut whys = vec![];
        for authorizer in &self.0 {
            whys.extend(authorizer.unresolved(user, namespace).await);
        }
        match &whys[..] {
            [] => None,
            [one] => Some(one.clone()),
            many => Some(format!("[{}]", many.join(", "))),
        }
    }
}

/// `system:masters` may do everything, whatever roles and bindings say, so that administrators cannot lock
/// themselves out. Upstream: SelfSubjectRulesReview does not list its rules.
pub struct Masters;

/// The same decision for every request: upstream's modes AlwaysAllow and AlwaysDeny.
pub struct Always {
    pub allows: bool,
}

#[async_trait]
impl Authorizer for Always {
    async fn authorize(&self, _: &Attributes) -> Decision {
        match self.allows {
            true => Decision::Allow { reason: String::new() },
            false => Decision::NoOpinion { reason: "Everything is forbidden.".into() },
        }
    }

    async fn rules(&self, _user: &UserInfo, _namespace: &str) -> Vec<PolicyRule> {
        if self.allows { everything() } else { vec![] }
    }
}

/// Rules that allow everything.
fn everything() -> Vec<PolicyRule> {
    let all = || vec!["*".to_owned()];
    let resources =
        PolicyRule { verbs: all(), api_groups: all(), resources: all(), ..PolicyRule::default() };
    let urls = PolicyRule { verbs: all(), non_resource_urls: all(), ..PolicyRule::default() };
    vec![resources, urls]
}

#[async_trait]
impl Authorizer for Masters {
    async fn authorize(&self, attributes: &Attributes) -> Decision {
        let reason = String::new();
        if attributes.user.in_group(MASTERS) {
            Decision::Allow { reason }
        } else {
            Decision::NoOpinion { reason }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixed(Result<Option<&'static str>, ()>);

    #[async_trait]
    impl Authenticator for Fixed {
        async fn authenticate(&self, _: &Parts) -> Result<Option<UserInfo>, StatusError> {
            match self.0 {
                Ok(name) => Ok(name.map(|name| UserInfo::new(name, &[]))),
                Err(()) => Err(StatusError::unauthorized()),
            }
        }
    }

    #[tokio::test]
    async fn invalid_credentials_are_not_absent_ones() {
        let (parts, ()) = http::Request::new(()).into_parts();
        let check = async |list: &[Result<Option<&'static str>, ()>], expected| {
            let list = list.iter().map(|one| Box::new(Fixed(*one)) as Box<dyn Authenticator>);
            let got = Authenticators(list.collect()).authenticate(&parts).await;
            let got = got.map(|user| user.map(|user| format!("{} {}", user.name, user.groups[0])));
            let expected: Result<Option<&str>, ()> = expected;
            assert_eq!(got.map_err(|_| ()), expected.map(|user| user.map(str::to_owned)));
        };
        check(&[Ok(None), Ok(Some("a"))], Ok(Some("a system:authenticated"))).await;
        check(&[Err(()), Ok(Some("a"))], Ok(Some("a system:authenticated"))).await;
        check(&[Err(()), Ok(None)], Err(())).await;
        check(&[Ok(None)], Ok(None)).await;
    }
}
