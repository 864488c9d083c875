//! The review kinds: requests about identity and permission that are answered, not stored.
//!
//! Each kind is a `Strategy` whose `review` answers.

use std::sync::Arc;

use apiserver::authz::{Attributes, Authorizer, Decision, PolicyRule};
use apiserver::request::{RequestContext, RequestInfo, UserInfo};
use apiserver::resource::{Created, Strategy};
use apiserver::{Registry, StatusError};
use async_trait::async_trait;
use k8s_openapi::api::authentication::v1 as authentication;
use k8s_openapi::api::authorization::v1 as authorization;
use machinery::Object;

use crate::tokens::{BearerTokens, UNKNOWN};

const AUTHORIZATION: &str = "authorization.k8s.io";

/// Decides whether `user` may do what the attributes say. `None`: there are no attributes.
pub async fn evaluate(
    authorizer: &dyn Authorizer,
    user: UserInfo,
    resource: Option<&authorization::ResourceAttributes>,
    path: Option<&authorization::NonResourceAttributes>,
) -> Option<authorization::SubjectAccessReviewStatus> {
    let request = match (resource, path) {
        (Some(resource), _) => resource_question(resource),
        (None, Some(path)) => path_question(path),
        (None, None) => return None,
    };
    let decision = authorizer.authorize(&Attributes { user, request }).await;
    let reason = |reason: String| (!reason.is_empty()).then_some(reason);
    let mut status = authorization::SubjectAccessReviewStatus::default();
    match decision {
        Decision::Allow { reason: why } => (status.allowed, status.reason) = (true, reason(why)),
        Decision::Deny { reason: why } => {
            (status.denied, status.reason) = (Some(true), reason(why))
        }
        Decision::NoOpinion { reason: why } => status.reason = reason(why),
    }
    Some(status)
}

fn resource_question(attributes: &authorization::ResourceAttributes) -> RequestInfo {
    let text = |field: &Option<String>| field.clone().unwrap_or_default();
    RequestInfo {
        is_resource: true,
        verb: text(&attributes.verb),
        group: text(&attributes.group),
        version: text(&attributes.version),
        namespace: text(&attributes.namespace),
        resource: text(&attributes.resource),
        subresource: text(&attributes.subresource),
        name: text(&attributes.name),
        field_selector: field_selector(attributes),
        ..RequestInfo::default()
    }
}

/// The selector in query form: the raw one, or the requirements for a single value.
fn field_selector(attributes: &authorization::ResourceAttributes) -> String {
    let Some(selector) = &attributes.field_selector else { return String::new() };
    if let Some(raw) = &selector.raw_selector {
        return raw.clone();
    }
    let single = selector.requirements.iter().flatten().filter_map(|one| {
        match (one.operator.as_str(), one.values.as_deref()) {
            ("In", Some([value])) => Some(format!("{}={value}", one.key)),
            _ => None,
        }
    });
    single.collect::<Vec<_>>().join(",")
}

fn path_question(attributes: &authorization::NonResourceAttributes) -> RequestInfo {
    RequestInfo {
        verb: attributes.verb.clone().unwrap_or_default(),
        path: attributes.path.clone().unwrap_or_default(),
        ..RequestInfo::default()
    }
}

fn user_of(spec: &authorization::SubjectAccessReviewSpec) -> UserInfo {
    UserInfo {
        name: spec.user.clone().unwrap_or_default(),
        uid: spec.uid.clone().unwrap_or_default(),
        groups: spec.groups.clone().unwrap_or_default(),
        extra: spec.extra.clone().unwrap_or_default(),
    }
}

/// Upstream's error has no kind, because the review in question has lost it.
fn invalid(errors: machinery::field::FieldErrors) -> StatusError {
    StatusError::invalid(AUTHORIZATION, "", "", errors)
}

/// Rejects a review with both kinds of attributes.
fn check_one(
    resource: Option<&authorization::ResourceAttributes>,
    path: Option<&authorization::NonResourceAttributes>,
) -> Result<(), StatusError> {
    use machinery::field::{FieldErrors, Path};
    let (Some(_), Some(asked)) = (resource, path) else { return Ok(()) };
    let mut errors = FieldErrors::default();
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let shown = serde_json::json!({ "Path": text(&asked.path), "Verb": text(&asked.verb) });
    let place = Path::new("spec").child("nonResourceAttributes");
    errors.invalid(&place, &shown, "cannot be specified in combination with resourceAttributes");
    Err(invalid(errors))
}

/// The error of a review without attributes.
fn no_question() -> StatusError {
    use machinery::field::{FieldErrors, Path};
    let mut errors = FieldErrors::default();
    let path = Path::new("spec").child("resourceAttributes");
    let both = "exactly one of nonResourceAttributes or resourceAttributes must be specified";
    errors.invalid(&path, &serde_json::Value::Null, both);
    invalid(errors)
}

/// SubjectAccessReview.
pub struct SubjectAccess(pub Arc<dyn Authorizer>);

#[async_trait]
impl Strategy for SubjectAccess {
    async fn review(
        &self,
        _registry: &Registry,
        _ctx: &RequestContext,
        mut object: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        let review = object.expect_mut::<authorization::SubjectAccessReview>();
        let spec = &review.spec;
        let (resource, path) =
            (spec.resource_attributes.as_ref(), spec.non_resource_attributes.as_ref());
        check_one(resource, path)?;
        let status = evaluate(&*self.0, user_of(spec), resource, path).await;
        review.status = Some(status.ok_or_else(no_question)?);
        Ok(Created::Object(object))
    }
}

/// LocalSubjectAccessReview.
pub struct LocalSubjectAccess(pub Arc<dyn Authorizer>);

#[async_trait]
impl Strategy for LocalSubjectAccess {
    async fn review(
        &self,
        _registry: &Registry,
        _ctx: &RequestContext,
        mut object: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        let namespace = object.namespace().to_owned();
        let review = object.expect_mut::<authorization::LocalSubjectAccessReview>();
        let spec = &review.spec;
        let asked = spec.resource_attributes.as_ref().and_then(|one| one.namespace.as_deref());
        if asked != Some(namespace.as_str()) {
            let why = format!(
                "spec.resourceAttributes.namespace must match namespace: {}",
                asked.unwrap_or_default()
            );
            return Err(StatusError::bad_request(why));
        }
        let resource = spec.resource_attributes.as_ref();
        let status = evaluate(&*self.0, user_of(spec), resource, None).await;
        review.status = Some(status.ok_or_else(no_question)?);
        Ok(Created::Object(object))
    }
}

/// SelfSubjectAccessReview.
pub struct SelfSubjectAccess(pub Arc<dyn Authorizer>);

#[async_trait]
impl Strategy for SelfSubjectAccess {
    async fn review(
        &self,
        _registry: &Registry,
        ctx: &RequestContext,
        mut object: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        let review = object.expect_mut::<authorization::SelfSubjectAccessReview>();
        let spec = &review.spec;
        let (resource, path) =
            (spec.resource_attributes.as_ref(), spec.non_resource_attributes.as_ref());
        check_one(resource, path)?;
        let status = evaluate(&*self.0, ctx.user.clone(), resource, path).await;
        review.status = Some(status.ok_or_else(no_question)?);
        Ok(Created::Object(object))
    }
}

/// SelfSubjectRulesReview.
pub struct SelfSubjectRules(pub Arc<dyn Authorizer>);

#[async_trait]
impl Strategy for SelfSubjectRules {
    async fn review(
        &self,
        _registry: &Registry,
        ctx: &RequestContext,
        mut object: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        let review = object.expect_mut::<authorization::SelfSubjectRulesReview>();
        let namespace = review.spec.namespace.clone().unwrap_or_default();
        if namespace.is_empty() {
            return Err(StatusError::bad_request("no namespace on request"));
        }
        let mut status = rules_status(self.0.rules(&ctx.user, &namespace).await);
        status.evaluation_error = self.0.unresolved(&ctx.user, &namespace).await;
        status.incomplete = status.evaluation_error.is_some();
        // The answer does not repeat the spec.
        *review = authorization::SelfSubjectRulesReview {
            status: Some(status),
            ..authorization::SelfSubjectRulesReview::default()
        };
        Ok(Created::Object(object))
    }
}

fn rules_status(rules: Vec<PolicyRule>) -> authorization::SubjectRulesReviewStatus {
    let some = |list: Vec<String>| (!list.is_empty()).then_some(list);
    let mut status = authorization::SubjectRulesReviewStatus::default();
    for rule in rules {
        if !rule.non_resource_urls.is_empty() {
            let non_resource_urls = some(rule.non_resource_urls);
            let one =
                authorization::NonResourceRule { verbs: rule.verbs.clone(), non_resource_urls };
            status.non_resource_rules.push(one);
        }
        if !rule.resources.is_empty() {
            status.resource_rules.push(authorization::ResourceRule {
                verbs: rule.verbs,
                api_groups: some(rule.api_groups),
                resources: some(rule.resources),
                resource_names: some(rule.resource_names),
            });
        }
    }
    status
}

/// TokenReview.
pub struct TokenReviews(pub Arc<BearerTokens>);

#[async_trait]
impl Strategy for TokenReviews {
    async fn review(
        &self,
        _registry: &Registry,
        _ctx: &RequestContext,
        mut object: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        let review = object.expect_mut::<authentication::TokenReview>();
        let token = review.spec.token.clone();
        if token.is_empty() {
            return Err(StatusError::bad_request(
                "token is required for TokenReview in authentication",
            ));
        }
        let audiences = review.spec.audiences.clone().unwrap_or_default();
        let mut status = authentication::TokenReviewStatus::default();
        match self.0.recognize(&token, &audiences).await {
            Ok(Some(found)) => {
                status.authenticated = Some(true);
                status.user = Some(shown(&found.user));
                status.audiences = (!found.audiences.is_empty()).then_some(found.audiences);
            }
            Ok(None) => status.error = Some(UNKNOWN.into()),
            Err(error) => status.error = Some(error.message.clone()),
        }
        review.status = Some(status);
        Ok(Created::Object(object))
    }
}

/// SelfSubjectReview.
pub struct SelfSubject;

#[async_trait]
impl Strategy for SelfSubject {
    async fn review(
        &self,
        _registry: &Registry,
        ctx: &RequestContext,
        mut object: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        let review = object.expect_mut::<authentication::SelfSubjectReview>();
        let user_info = Some(shown(&ctx.user));
        review.status = Some(authentication::SelfSubjectReviewStatus { user_info });
        review.metadata.creation_timestamp = Some(machinery::Time(base::clock::now_seconds()));
        Ok(Created::Object(object))
    }
}

fn shown(user: &UserInfo) -> authentication::UserInfo {
    authentication::UserInfo {
        username: Some(user.name.clone()),
        uid: (!user.uid.is_empty()).then(|| user.uid.clone()),
        groups: (!user.groups.is_empty()).then(|| user.groups.clone()),
        extra: (!user.extra.is_empty()).then(|| user.extra.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Masters;

    #[tokio::test]
    async fn decisions_become_a_status() {
        let check = async |groups: &[&str], expected: bool| {
            let attributes = authorization::ResourceAttributes {
                verb: Some("get".into()),
                resource: Some("pods".into()),
                ..Default::default()
            };
            let user = UserInfo::new("a", groups);
            let status = evaluate(&Masters, user, Some(&attributes), None).await;
            let status = status.expect("a question");
            assert_eq!((status.allowed, status.denied, status.reason), (expected, None, None));
        };
        check(&["system:masters"], true).await;
        check(&[], false).await;
        assert!(evaluate(&Masters, UserInfo::default(), None, None).await.is_none());
    }
}
