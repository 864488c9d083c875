//! The review kinds: questions about identity and permission, answered instead of stored.
//!
//! Each is the `Review` of its kind's row.

use std::sync::Arc;

use apiserver::authz::{Attributes, Authorizer, Decision, PolicyRule};
use apiserver::request::{RequestContext, RequestInfo, UserInfo};
use apiserver::resource::{Created, Review};
use apiserver::{Registry, StatusError};
use async_trait::async_trait;
use k8s_openapi::api::authentication::v1 as authentication;
use k8s_openapi::api::authorization::v1 as authorization;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{
    FieldSelectorRequirement, LabelSelectorRequirement,
};
use machinery::field::{FieldErrors, Path};
use machinery::selector::Selector;
use machinery::{Object, ObjectMeta, names};
use serde_json::{Value, json};

use crate::tokens::{BearerTokens, UNKNOWN};

const AUTHORIZATION: &str = "authorization.k8s.io";

/// May `user` do what the attributes say? `None`: neither kind of attributes is given.
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
    status.evaluation_error = resource.and_then(unparsed);
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

/// As a query would say it: the raw selector, or the requirements that ask for one value.
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

/// What a review asks.
#[derive(Clone, Copy)]
struct Question<'a> {
    metadata: &'a ObjectMeta,
    resource: Option<&'a authorization::ResourceAttributes>,
    path: Option<&'a authorization::NonResourceAttributes>,
}

/// All field errors of a review. `somebody` is the spec of a review that names its user.
/// Upstream: `pkg/apis/authorization/validation`.
fn wrong(
    question: Question<'_>,
    somebody: Option<&authorization::SubjectAccessReviewSpec>,
) -> FieldErrors {
    let mut errors = FieldErrors::default();
    let spec = Path::new("spec");
    match (question.resource, question.path) {
        (Some(_), Some(path)) => errors.invalid(
            &spec.child("nonResourceAttributes"),
            shown_path(path),
            "cannot be specified in combination with resourceAttributes",
        ),
        (None, None) => errors.invalid(
            &spec.child("resourceAttributes"),
            Value::Null,
            "exactly one of nonResourceAttributes or resourceAttributes must be specified",
        ),
        _ => {}
    }
    let is_given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    if let Some(about) = somebody
        && !is_given(&about.user)
        && about.groups.as_ref().is_none_or(Vec::is_empty)
    {
        let detail = "at least one of user or group must be specified";
        errors.invalid(&spec.child("user"), "", detail);
    }
    if let Some(attributes) = question.resource {
        selectors(attributes, &spec.child("resourceAttributes"), &mut errors);
    }
    errors
}

fn shown_path(asked: &authorization::NonResourceAttributes) -> Value {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    json!({ "Path": text(&asked.path), "Verb": text(&asked.verb) })
}

/// A selector is a text or a list of requirements. Operators may be newer than this server.
fn selectors(
    attributes: &authorization::ResourceAttributes,
    path: &Path,
    errors: &mut FieldErrors,
) {
    if let Some(selector) = &attributes.field_selector {
        let path = path.child("fieldSelector");
        let list = selector.requirements.as_deref().unwrap_or_default();
        text_or_list(&path, selector.raw_selector.as_deref(), list.len(), errors);
        for (index, one) in list.iter().enumerate() {
            let path = path.child("requirements").index(index);
            if one.key.is_empty() {
                errors.required(&path.child("key"), "must be specified");
            }
            operator_fits(&one.operator, one.values.as_deref(), &path, errors);
        }
    }
    if let Some(selector) = &attributes.label_selector {
        let path = path.child("labelSelector");
        let list = selector.requirements.as_deref().unwrap_or_default();
        text_or_list(&path, selector.raw_selector.as_deref(), list.len(), errors);
        for (index, one) in list.iter().enumerate() {
            let path = path.child("requirements").index(index);
            operator_fits(&one.operator, one.values.as_deref(), &path, errors);
            for why in names::qualified_name(&one.key) {
                errors.invalid(&path.child("key"), &one.key, &why);
            }
            for (index, value) in one.values.iter().flatten().enumerate() {
                for why in names::label_value(value) {
                    errors.invalid(&path.child("values").index(index), value, &why);
                }
            }
        }
    }
}

fn text_or_list(path: &Path, text: Option<&str>, count: usize, errors: &mut FieldErrors) {
    match (text.filter(|text| !text.is_empty()), count) {
        (Some(text), 1..) => errors.invalid(
            &path.child("rawSelector"),
            text,
            "may not specified at the same time as requirements",
        ),
        (None, 0) => errors.required(
            &path.child("requirements"),
            &format!("when {path} is specified, requirements or rawSelector is required"),
        ),
        _ => {}
    }
}

fn operator_fits(operator: &str, values: Option<&[String]>, path: &Path, errors: &mut FieldErrors) {
    let path = path.child("values");
    let has_values = values.is_some_and(|values| !values.is_empty());
    match operator {
        "In" | "NotIn" if !has_values => {
            errors.required(&path, "must be specified when `operator` is 'In' or 'NotIn'");
        }
        "Exists" | "DoesNotExist" if has_values => errors
            .forbidden(&path, "may not be specified when `operator` is 'Exists' or 'DoesNotExist'"),
        _ => {}
    }
}

/// Reviews are not kept: they have no names, and no other metadata.
fn no_metadata(metadata: &ObjectMeta, keeps_namespace: bool, errors: &mut FieldErrors) {
    // What the server sets is cleared first.
    let metadata = &ObjectMeta {
        uid: None,
        creation_timestamp: None,
        deletion_timestamp: None,
        deletion_grace_period_seconds: None,
        self_link: None,
        ..metadata.clone()
    };
    let bare = ObjectMeta {
        managed_fields: metadata.managed_fields.clone(),
        namespace: metadata.namespace.clone().filter(|_| keeps_namespace),
        ..ObjectMeta::default()
    };
    if bare != *metadata {
        let detail =
            if keeps_namespace { "must be empty except for namespace" } else { "must be empty" };
        let shown = shown_metadata(metadata);
        errors.invalid_shown(&Path::new("metadata"), Some(&shown), detail);
    }
}

/// The fields of metadata, and of its lists, in Go's order.
const IN_ORDER: &[&str] = &[
    "manager",
    "operation",
    "apiVersion",
    "kind",
    "name",
    "generateName",
    "namespace",
    "selfLink",
    "uid",
    "controller",
    "blockOwnerDeletion",
    "time",
    "resourceVersion",
    "generation",
    "labels",
    "annotations",
    "ownerReferences",
    "finalizers",
    "managedFields",
    "fieldsType",
    "fieldsV1",
    "subresource",
];

fn shown_metadata(metadata: &ObjectMeta) -> String {
    fn write(value: &Value, is_struct: bool, out: &mut String) {
        match value {
            Value::Object(fields) => {
                let mut all: Vec<(&String, &Value)> = fields.iter().collect();
                all.sort_unstable_by_key(|(name, _)| *name);
                if is_struct {
                    all.sort_by_key(|(name, _)| IN_ORDER.iter().position(|one| one == name));
                }
                let members = all.into_iter().map(|(name, value)| {
                    let mut text = format!("{}:", Value::from(name.as_str()));
                    let is_map = matches!(name.as_str(), "labels" | "annotations" | "fieldsV1");
                    write(value, is_struct && !is_map, &mut text);
                    text
                });
                out.push_str(&format!("{{{}}}", members.collect::<Vec<_>>().join(",")));
            }
            Value::Array(items) => {
                let items = items.iter().map(|item| {
                    let mut text = String::new();
                    write(item, is_struct, &mut text);
                    text
                });
                out.push_str(&format!("[{}]", items.collect::<Vec<_>>().join(",")));
            }
            other => out.push_str(&other.to_string()),
        }
    }
    let mut out = String::new();
    write(&json!(metadata), true, &mut out);
    out
}

/// Upstream names no kind, for the review that it judges has lost it.
fn refused(errors: FieldErrors) -> Result<(), StatusError> {
    match errors.is_empty() {
        true => Ok(()),
        false => Err(StatusError::invalid(AUTHORIZATION, "", "", errors)),
    }
}

/// The evaluation error for selectors that cannot be parsed. Such a selector is ignored.
/// Upstream: `BuildEvaluationError`.
fn unparsed(attributes: &authorization::ResourceAttributes) -> Option<String> {
    let raw = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let fields = attributes.field_selector.as_ref().and_then(|selector| {
        let list = selector.requirements.as_deref().unwrap_or_default();
        let is_known = |one: &FieldSelectorRequirement| {
            matches!(one.operator.as_str(), "In" | "NotIn")
                && one.values.as_ref().is_some_and(|values| values.len() == 1)
        };
        match raw(&selector.raw_selector) {
            Some(text) => Selector::parse_fields(&text).is_err().then_some(false),
            None => some_of(list.iter().map(is_known)),
        }
    });
    let labels = attributes.label_selector.as_ref().and_then(|selector| {
        let list = selector.requirements.as_deref().unwrap_or_default();
        let is_known = |one: &LabelSelectorRequirement| {
            matches!(one.operator.as_str(), "In" | "NotIn" | "Exists" | "DoesNotExist")
        };
        match raw(&selector.raw_selector) {
            Some(text) => Selector::parse_labels(&text).is_err().then_some(false),
            None => some_of(list.iter().map(is_known)),
        }
    });
    let said = [("field", fields), ("label", labels)].map(|(kind, partly)| {
        let how = if partly? { "partially ignored" } else { "ignored" };
        Some(format!("spec.resourceAttributes.{kind}Selector {how} due to parse error"))
    });
    let said: Vec<String> = said.into_iter().flatten().collect();
    (!said.is_empty()).then(|| said.join("; "))
}

/// Nothing where all are known; else, whether some are.
fn some_of(known: impl Iterator<Item = bool>) -> Option<bool> {
    let known: Vec<bool> = known.collect();
    (!known.iter().all(|one| *one)).then(|| known.contains(&true))
}

/// SubjectAccessReview.
pub struct SubjectAccess(pub Arc<dyn Authorizer>);

#[async_trait]
impl Review for SubjectAccess {
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
        let question = Question { metadata: &review.metadata, resource, path };
        let mut errors = wrong(question, Some(spec));
        no_metadata(question.metadata, false, &mut errors);
        refused(errors)?;
        review.status = evaluate(&*self.0, user_of(spec), resource, path).await;
        Ok(Created::Object(object))
    }
}

/// LocalSubjectAccessReview.
pub struct LocalSubjectAccess(pub Arc<dyn Authorizer>);

#[async_trait]
impl Review for LocalSubjectAccess {
    async fn review(
        &self,
        _registry: &Registry,
        _ctx: &RequestContext,
        mut object: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        let namespace = object.namespace().to_owned();
        let review = object.expect_mut::<authorization::LocalSubjectAccessReview>();
        let spec = &review.spec;
        let (resource, path) =
            (spec.resource_attributes.as_ref(), spec.non_resource_attributes.as_ref());
        let question = Question { metadata: &review.metadata, resource, path };
        let mut errors = wrong(question, Some(spec));
        no_metadata(question.metadata, true, &mut errors);
        let place = Path::new("spec");
        let asked = resource.map(|one| one.namespace.as_deref().unwrap_or_default());
        if let Some(asked) = asked.filter(|asked| *asked != namespace) {
            let place = place.child("resourceAttributes").child("namespace");
            errors.invalid(&place, asked, "must match metadata.namespace");
        }
        if let Some(path) = path {
            let detail = "disallowed on this kind of request";
            errors.invalid(&place.child("nonResourceAttributes"), shown_path(path), detail);
        }
        refused(errors)?;
        review.status = evaluate(&*self.0, user_of(spec), resource, None).await;
        Ok(Created::Object(object))
    }
}

/// SelfSubjectAccessReview.
pub struct SelfSubjectAccess(pub Arc<dyn Authorizer>);

#[async_trait]
impl Review for SelfSubjectAccess {
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
        let question = Question { metadata: &review.metadata, resource, path };
        let mut errors = wrong(question, None);
        no_metadata(question.metadata, false, &mut errors);
        refused(errors)?;
        review.status = evaluate(&*self.0, ctx.user.clone(), resource, path).await;
        Ok(Created::Object(object))
    }
}

/// SelfSubjectRulesReview.
pub struct SelfSubjectRules(pub Arc<dyn Authorizer>);

#[async_trait]
impl Review for SelfSubjectRules {
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
        // The question is not repeated.
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
impl Review for TokenReviews {
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
impl Review for SelfSubject {
    async fn review(
        &self,
        _registry: &Registry,
        ctx: &RequestContext,
        mut object: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        let review = object.expect_mut::<authentication::SelfSubjectReview>();
        *review = own_review(&ctx.user);
        Ok(Created::Object(object))
    }
}

/// Makes a new review. Like upstream, it ignores what the client sent.
fn own_review(user: &UserInfo) -> authentication::SelfSubjectReview {
    let now = machinery::Time(base::clock::now_seconds());
    authentication::SelfSubjectReview {
        metadata: ObjectMeta { creation_timestamp: Some(now), ..ObjectMeta::default() },
        status: Some(authentication::SelfSubjectReviewStatus { user_info: Some(shown(user)) }),
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

    fn review(spec: Value) -> authorization::SubjectAccessReviewSpec {
        k8s_openapi::serde_json::from_value(spec).expect("a spec")
    }

    #[test]
    fn questions_are_refused_in_upstreams_words() {
        let resource = json!({"verb": "get", "resource": "pods"});
        let with = |field: &str, value: Value| {
            let mut attributes = resource.clone();
            attributes[field] = value;
            json!({"user": "u", "resourceAttributes": attributes})
        };
        let both =
            json!({"rawSelector": "a=b", "requirements": [{"key": "a", "operator": "Exists"}]});
        let bad_list = json!({"requirements": [{"key": "", "operator": "In"},
            {"key": "a", "operator": "Exists", "values": ["b"]}, {"key": "a", "operator": "New"}]});
        const SPEC: &str = "spec.resourceAttributes";
        for (spec, expected) in [
            (json!({"user": "u", "resourceAttributes": resource}), vec![]),
            (json!({"groups": ["g"], "resourceAttributes": resource}), vec![]),
            (json!({"resourceAttributes": resource}), vec!["spec.user".to_owned()]),
            (json!({}), vec![SPEC.to_owned(), "spec.user".to_owned()]),
            (with("fieldSelector", json!({})), vec![format!("{SPEC}.fieldSelector.requirements")]),
            (
                with("labelSelector", both.clone()),
                vec![format!("{SPEC}.labelSelector.rawSelector")],
            ),
            (with("fieldSelector", both), vec![format!("{SPEC}.fieldSelector.rawSelector")]),
            (
                with("fieldSelector", bad_list),
                ["[0].key", "[0].values", "[1].values"]
                    .map(|at| format!("{SPEC}.fieldSelector.requirements{at}"))
                    .to_vec(),
            ),
        ] {
            let spec = review(spec);
            let question = Question {
                metadata: &ObjectMeta::default(),
                resource: spec.resource_attributes.as_ref(),
                path: spec.non_resource_attributes.as_ref(),
            };
            let errors = wrong(question, Some(&spec));
            let fields: Vec<&str> = errors.0.iter().map(|error| error.field.as_str()).collect();
            assert_eq!(fields, expected, "{errors:?}");
        }
        let named = ObjectMeta { name: Some("n".into()), ..ObjectMeta::default() };
        let placed = ObjectMeta { namespace: Some("n".into()), ..ObjectMeta::default() };
        for (metadata, keeps_namespace, expected) in
            [(&named, true, 1), (&placed, true, 0), (&placed, false, 1)]
        {
            let mut errors = FieldErrors::default();
            no_metadata(metadata, keeps_namespace, &mut errors);
            assert_eq!(errors.0.len(), expected);
        }
    }

    #[test]
    fn metadata_is_shown_as_go_shows_it() {
        let metadata: ObjectMeta = k8s_openapi::serde_json::from_value(json!({
            "name": "n", "uid": "u", "creationTimestamp": "2026-01-02T03:04:05Z", "labels": {"name": "1", "manager": "2"},
            "managedFields": [{"apiVersion": "v1", "manager": "m", "operation": "Update"}],
        }))
        .expect("metadata");
        let mut errors = FieldErrors::default();
        no_metadata(&metadata, false, &mut errors);
        assert_eq!(
            errors.0[0].message,
            r#"Invalid value: {"name":"n","labels":{"manager":"2","name":"1"},"managedFields":[{"manager":"m","operation":"Update","apiVersion":"v1"}]}: must be empty"#
        );
    }

    #[test]
    fn selectors_that_cannot_be_read_are_told() {
        for (field, value, expected) in [
            ("fieldSelector", json!({"rawSelector": "a=b"}), None),
            ("fieldSelector", json!({"rawSelector": "a"}), Some("fieldSelector ignored")),
            ("labelSelector", json!({"rawSelector": "a in"}), Some("labelSelector ignored")),
            (
                "fieldSelector",
                json!({"requirements": [{"key": "a", "operator": "In", "values": ["b"]}, {"key": "a", "operator": "New"}]}),
                Some("fieldSelector partially ignored"),
            ),
        ] {
            let spec = review(json!({"resourceAttributes": {field: value}}));
            let told = spec.resource_attributes.as_ref().and_then(unparsed);
            let expected =
                expected.map(|how| format!("spec.resourceAttributes.{how} due to parse error"));
            assert_eq!(told, expected);
        }
    }
}
