//! Admission policies: CEL expressions of administrators that reject or change requests, without a
//! webhook.
//!
//! ```text
//! policy ─► matches? ─► each binding ─► matches? ─► each parameter ─► conditions ─► expressions
//! ```
//!
//! Upstream: `k8s.io/apiserver/pkg/admission/plugin/policy`.

mod authorizer;
mod environment;
pub(crate) mod mutating;
pub(crate) mod validating;

use apiserver::StatusError;
use apiserver::admission::Attributes;
use apiserver::registry::ListOptions;
use apiserver::request::Key;
use k8s_openapi::api::admissionregistration::v1::{MatchResources, ParamKind, ParamRef};
use machinery::selector::Selector;
use serde_json::Value as Json;

pub(crate) use environment::{Conditions, Environment};

use crate::matching::{Criteria, namespace_of};

/// The common fields of both kinds of bindings.
struct Binding {
    name: String,
    policy: String,
    criteria: Result<Criteria, String>,
    params: Option<ParamRef>,
    /// Deny, Warn, Audit.
    actions: Vec<String>,
}

impl Binding {
    fn new(
        name: &str,
        policy: &str,
        resources: Option<&MatchResources>,
        params: Option<&ParamRef>,
        actions: &[String],
    ) -> Self {
        Self {
            name: name.into(),
            policy: policy.into(),
            criteria: Criteria::of_policy(resources).map_err(|error| error.to_string()),
            params: params.cloned(),
            actions: actions.to_vec(),
        }
    }

    async fn matches(&self, attributes: &Attributes<'_>) -> Result<bool, String> {
        let criteria = self.criteria.as_ref().map_err(Clone::clone)?;
        let matched = criteria.matched(attributes).await.map_err(|error| error.to_string())?;
        Ok(matched.is_some())
    }
}

/// The parameters of a policy for a binding: null if it has none, several for a selector, an empty list if
/// they are missing and that is allowed.
async fn params(
    attributes: &Attributes<'_>,
    kind: Option<&ParamKind>,
    binding: &Binding,
) -> Result<Vec<Json>, String> {
    let (Some(kind), Some(params)) = (kind, &binding.params) else { return Ok(vec![Json::Null]) };
    let api_version = kind.api_version.as_deref().unwrap_or_default();
    let name = kind.kind.as_deref().unwrap_or_default();
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let table = attributes.registry.resources();
    let row = table.by_kind(group, version, name).cloned();
    let row = row.ok_or_else(|| {
        format!("paramKind kind `&ParamKind{{APIVersion:{api_version},Kind:{name},}}` not known")
    })?;
    let named = params.namespace.as_deref().filter(|namespace| !namespace.is_empty());
    let namespace = match (row.namespaced, named) {
        (false, Some(_)) => {
            return Err(
                "paramRef.namespace must not be provided for a cluster-scoped `paramKind`".into()
            );
        }
        (false, None) => "",
        (true, Some(namespace)) => namespace,
        (true, None) => namespace_of(attributes),
    };
    if row.namespaced && namespace.is_empty() {
        return Err(
            "cannot use namespaced paramRef in policy binding that matches cluster-scoped resources".into(),
        );
    }
    let found = match (params.name.as_deref(), &params.selector) {
        (Some(name), _) if !name.is_empty() => {
            let key = Key::new(namespace, name);
            match attributes.registry.get(&row, &key, None).await {
                Ok(stored) => vec![stored],
                Err(error) if error.is(machinery::status::Reason::NotFound) => vec![],
                Err(error) => return Err(error.to_string()),
            }
        }
        (_, selector) => {
            let labels =
                Selector::from_api(selector.as_ref()).map_err(|error| error.to_string())?;
            let options = ListOptions { labels, ..ListOptions::default() };
            let listed = attributes.registry.list(&row, namespace, &options).await;
            listed.map_err(|error| error.to_string())?.items
        }
    };
    if found.is_empty() && params.parameter_not_found_action.as_deref() == Some("Deny") {
        return Err("no params found for policy binding with `Deny` parameterNotFoundAction".into());
    }
    let tree =
        |stored: apiserver::registry::Stored| stored.object().map(|object| object.to_value());
    let trees: Result<Vec<Json>, StatusError> = found.into_iter().map(tree).collect();
    trees.map_err(|error| error.to_string())
}
