//! Matches requests with webhooks and policies: rules, scopes, selectors, equivalent resources.
//!
//! In: criteria of a configuration, the attributes of a request. Out: the row in whose version the
//! request matched; the webhook or policy gets objects in that version.
//! Upstream: `k8s.io/apiserver/pkg/admission/plugin/webhook/{generic,predicates}`.

use std::sync::Arc;

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation};
use apiserver::resource::{Behaviour, Resource};
use k8s_openapi::api::admissionregistration::v1::{
    MatchResources, NamedRuleWithOperations, RuleWithOperations,
};
use k8s_openapi::api::core::v1::Namespace;
use machinery::LabelSelector;
use machinery::Object;
use machinery::object::Unstructured;
use machinery::selector::{ParseError, Selector};
use serde_json::Value;

const GROUP: &str = "admissionregistration.k8s.io";
/// Kinds that could lock themselves out if webhooks and policies applied to them.
const EXEMPT: [&str; 6] = [
    "validatingwebhookconfigurations",
    "mutatingwebhookconfigurations",
    "validatingadmissionpolicies",
    "validatingadmissionpolicybindings",
    "mutatingadmissionpolicies",
    "mutatingadmissionpolicybindings",
];

/// Whether the request is about webhooks or policies themselves.
pub(crate) fn is_exempt(attributes: &Attributes<'_>) -> bool {
    let row = &attributes.ctx.resource;
    row.group == GROUP && EXEMPT.contains(&row.plural.as_str())
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Rule {
    groups: Vec<String>,
    versions: Vec<String>,
    operations: Vec<String>,
    resources: Vec<String>,
    /// Empty: all names.
    names: Vec<String>,
    scope: Option<String>,
}

impl From<&RuleWithOperations> for Rule {
    fn from(rule: &RuleWithOperations) -> Self {
        Self {
            groups: rule.api_groups.clone().unwrap_or_default(),
            versions: rule.api_versions.clone().unwrap_or_default(),
            operations: rule.operations.clone().unwrap_or_default(),
            resources: rule.resources.clone().unwrap_or_default(),
            names: vec![],
            scope: rule.scope.clone(),
        }
    }
}

impl From<&NamedRuleWithOperations> for Rule {
    fn from(rule: &NamedRuleWithOperations) -> Self {
        Self {
            groups: rule.api_groups.clone().unwrap_or_default(),
            versions: rule.api_versions.clone().unwrap_or_default(),
            operations: rule.operations.clone().unwrap_or_default(),
            resources: rule.resources.clone().unwrap_or_default(),
            names: rule.resource_names.clone().unwrap_or_default(),
            scope: rule.scope.clone(),
        }
    }
}

/// The resource of a request, as rules match it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    pub group: &'a str,
    pub version: &'a str,
    pub resource: &'a str,
    pub subresource: &'a str,
    /// For requests about a namespace (except its creation), its own name.
    pub namespace: &'a str,
    pub name: &'a str,
    pub operation: &'a str,
}

impl<'a> Place<'a> {
    pub fn of(attributes: &'a Attributes<'_>) -> Self {
        let row = &attributes.ctx.resource;
        Self {
            group: &row.group,
            version: &row.version,
            resource: &row.plural,
            subresource: &attributes.ctx.subresource,
            namespace: namespace_of(attributes),
            name: &attributes.key.name,
            operation: attributes.operation.as_str(),
        }
    }
}

/// The request's namespace; for a namespace its own name.
pub(crate) fn namespace_of<'a>(attributes: &'a Attributes<'_>) -> &'a str {
    let row = &attributes.ctx.resource;
    let is_namespace = row.group.is_empty() && row.plural == "namespaces";
    match is_namespace && attributes.operation != Operation::Create {
        true => &attributes.key.name,
        false => &attributes.key.namespace,
    }
}

impl Rule {
    pub fn matches(&self, place: &Place<'_>) -> bool {
        let has =
            |items: &[String], wanted: &str| items.iter().any(|item| item == "*" || item == wanted);
        self.in_scope(place)
            && has(&self.operations, place.operation)
            && has(&self.groups, place.group)
            && has(&self.versions, place.version)
            && self.resources.iter().any(|one| covers(one, place))
            && (self.names.is_empty() || self.names.iter().any(|name| name == place.name))
    }

    fn in_scope(&self, place: &Place<'_>) -> bool {
        let is_namespace =
            place.group.is_empty() && place.version == "v1" && place.resource == "namespaces";
        let clustered = is_namespace || place.namespace.is_empty();
        match self.scope.as_deref() {
            None | Some("*" | "") => true,
            Some("Namespaced") => !clustered,
            Some("Cluster") => clustered,
            Some(_) => false,
        }
    }
}

/// `pods`, `pods/*`, `*/status`, `*`: a pattern without a slash matches no subresources.
fn covers(pattern: &str, place: &Place<'_>) -> bool {
    let (resource, subresource) = pattern.split_once('/').unwrap_or((pattern, ""));
    (resource == "*" || resource == place.resource)
        && (subresource == "*" || subresource == place.subresource)
}

/// All criteria of a configuration.
#[derive(Clone, Debug, Default)]
pub(crate) struct Criteria {
    pub rules: Vec<Rule>,
    pub excluded: Vec<Rule>,
    /// Whether a rule for one version of a resource applies to its other versions.
    pub equivalent: bool,
    /// Without rules, a policy applies to all resources, a webhook to none.
    pub all_without_rules: bool,
    pub namespaces: Selector,
    pub objects: Selector,
}

impl Criteria {
    pub fn of_policy(resources: Option<&MatchResources>) -> Result<Self, ParseError> {
        let Some(resources) = resources else {
            return Ok(Self { equivalent: true, all_without_rules: true, ..Self::default() });
        };
        Ok(Self {
            rules: resources.resource_rules.iter().flatten().map(Rule::from).collect(),
            excluded: resources.exclude_resource_rules.iter().flatten().map(Rule::from).collect(),
            equivalent: resources.match_policy.as_deref() != Some("Exact"),
            all_without_rules: true,
            namespaces: selector(resources.namespace_selector.as_ref())?,
            objects: selector(resources.object_selector.as_ref())?,
        })
    }

    /// The row in whose version the request matches, if any. Rules are the cheapest check, so they come
    /// first; a missing namespace matters only if they match.
    pub async fn matched(
        &self,
        attributes: &Attributes<'_>,
    ) -> Result<Option<Arc<Resource>>, StatusError> {
        let Some(row) = self.matched_row(attributes) else { return Ok(None) };
        let selected =
            self.selects_object(attributes) && self.selects_namespace(attributes).await?;
        Ok(selected.then_some(row))
    }

    pub(crate) fn matched_row(&self, attributes: &Attributes<'_>) -> Option<Arc<Resource>> {
        let place = Place::of(attributes);
        let row = &attributes.ctx.resource;
        if self.excluded.iter().any(|rule| self.finds(rule, attributes, &place).is_some()) {
            return None;
        }
        let all = self.all_without_rules && self.rules.is_empty();
        if all || self.rules.iter().any(|rule| rule.matches(&place)) {
            return Some(row.clone());
        }
        self.rules.iter().find_map(|rule| self.finds(rule, attributes, &place))
    }

    /// The row that a rule matches: the request's own, or an equivalent one.
    fn finds(
        &self,
        rule: &Rule,
        attributes: &Attributes<'_>,
        place: &Place<'_>,
    ) -> Option<Arc<Resource>> {
        let row = &attributes.ctx.resource;
        if rule.matches(place) {
            return Some(row.clone());
        }
        if !self.equivalent || !row.is_stored() {
            return None;
        }
        let table = attributes.registry.resources();
        let mut others = table.iter().filter(|other| {
            other.prefix() == row.prefix()
                && (place.subresource.is_empty() || other.subresource(place.subresource).is_some())
        });
        let fits = |other: &&Arc<Resource>| {
            let (group, version, resource) = (&*other.group, &*other.version, &*other.plural);
            rule.matches(&Place { group, version, resource, ..*place })
        };
        others.find(fits).cloned()
    }

    fn selects_object(&self, attributes: &Attributes<'_>) -> bool {
        if self.objects.is_everything() {
            return true;
        }
        // Options of connect requests have no labels.
        if attributes.operation == Operation::Connect {
            return false;
        }
        let fits = |object: &dyn Object| self.objects.matches(object.meta().labels.as_ref());
        attributes.object.as_deref().is_some_and(|object| fits(&**object))
            || attributes.old.is_some_and(fits)
    }

    async fn selects_namespace(&self, attributes: &Attributes<'_>) -> Result<bool, StatusError> {
        let namespace = namespace_of(attributes);
        let is_namespaces = attributes.ctx.resource.plural == "namespaces";
        if self.namespaces.is_everything() || (namespace.is_empty() && !is_namespaces) {
            return Ok(true);
        }
        let changes = matches!(attributes.operation, Operation::Create | Operation::Update);
        if is_namespaces && attributes.ctx.subresource.is_empty() && changes {
            let labels = attributes.object.as_deref().and_then(|one| one.meta().labels.as_ref());
            return Ok(self.namespaces.matches(labels));
        }
        let found = attributes.registry.known::<Namespace>("", namespace).await?;
        let missing = || StatusError::not_found("", "namespaces", namespace);
        Ok(self.namespaces.matches(found.ok_or_else(missing)?.metadata.labels.as_ref()))
    }
}

/// A configuration's selector: absent and empty select everything.
pub(crate) fn selector(selector: Option<&LabelSelector>) -> Result<Selector, ParseError> {
    selector.map_or(Ok(Selector::everything()), |selector| Selector::from_api(Some(selector)))
}

/// Group, version and kind of a request's object, in the version of `row`.
pub(crate) fn kind_of<'a>(row: &'a Resource, subresource: &str) -> (&'a str, &'a str, &'a str) {
    match row.subresource(subresource).and_then(|sub| sub.kind.as_ref()) {
        Some(kind) => (kind.group, kind.version, kind.kind),
        None => (&row.group, &row.version, &row.kind),
    }
}

/// The stored object in the version of `row`, for webhooks and policies.
pub(crate) fn shown(
    row: &Resource,
    subresource: &str,
    object: &dyn Object,
) -> Result<Value, StatusError> {
    match row.subresource(subresource).map(|sub| &sub.behaviour) {
        Some(Behaviour::View(view)) => Ok(view.view(object)?.to_value()),
        Some(Behaviour::Create(_) | Behaviour::Connect(_)) => Ok(object.to_value()),
        Some(Behaviour::Part) | None => match &row.conversion {
            Some(conversion) => Ok(conversion.to_served(object.boxed_clone())?.to_value()),
            None => Ok(object.to_value()),
        },
    }
}

/// Converts a changed tree of [`shown`] back into the object.
pub(crate) fn take_back(
    row: &Resource,
    subresource: &str,
    tree: Value,
    object: &mut Box<dyn Object>,
) -> Result<(), StatusError> {
    let bad = StatusError::internal;
    match row.subresource(subresource).map(|sub| &sub.behaviour) {
        Some(Behaviour::View(view)) => {
            let changed = view.codec().decode_value(tree).map_err(bad)?.object;
            view.merge(&*changed, &mut **object)
        }
        Some(Behaviour::Create(handler)) => {
            *object = handler.codec().decode_value(tree).map_err(bad)?.object;
            Ok(())
        }
        Some(Behaviour::Connect(_)) => {
            *object = Box::new(Unstructured::from_value(tree).map_err(bad)?);
            Ok(())
        }
        Some(Behaviour::Part) | None => {
            let changed = row.codec.decode_value(tree).map_err(bad)?.object;
            *object = match &row.conversion {
                Some(conversion) => conversion.to_stored(changed)?,
                None => changed,
            };
            row.strategy.default(&mut **object);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_match_resources() {
        let place = Place {
            group: "apps",
            version: "v1",
            resource: "deployments",
            subresource: "",
            namespace: "web",
            name: "x",
            operation: "CREATE",
        };
        let check = |rule: [&str; 5], place: Place<'_>, expected: bool| {
            let list = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<String>>();
            let [groups, versions, operations, resources, scope] = rule;
            let built = Rule {
                groups: list(groups).iter().map(|g| g.replace("core", "")).collect(),
                versions: list(versions),
                operations: list(operations),
                resources: list(resources),
                names: vec![],
                scope: Some(scope.into()),
            };
            assert_eq!(built.matches(&place), expected, "{rule:?} {place:?}");
        };
        check(["*", "*", "*", "*", "*"], place, true);
        check(["apps", "v1", "CREATE UPDATE", "deployments", "Namespaced"], place, true);
        check(["apps", "v1", "CREATE", "deployments", "Cluster"], place, false);
        check(["apps", "v1beta1", "CREATE", "deployments", "*"], place, false);
        check(["apps", "v1", "DELETE", "deployments", "*"], place, false);
        check(["core", "v1", "CREATE", "deployments", "*"], place, false);
        let status = Place { subresource: "status", ..place };
        check(["apps", "v1", "*", "deployments", "*"], status, false);
        check(["apps", "v1", "*", "deployments/status", "*"], status, true);
        check(["apps", "v1", "*", "deployments/*", "*"], status, true);
        check(["apps", "v1", "*", "*/status", "*"], status, true);
        check(["*", "*", "*", "*", "*"], status, false);
        check(["*", "*", "*", "*/*", "*"], status, true);
        check(["*", "*", "*", "*/*", "*"], place, true);
        let namespace = Place {
            group: "",
            resource: "namespaces",
            namespace: "web",
            operation: "UPDATE",
            ..place
        };
        check(["core", "v1", "*", "namespaces", "Cluster"], namespace, true);
        check(["core", "v1", "*", "namespaces", "Namespaced"], namespace, false);
    }
}
