//! admissionregistration.k8s.io: webhooks and policies that look at requests, and what these kinds
//! share. Their objects are few and their changes weigh much: a PUT must name the resourceVersion.

use std::collections::HashSet;
use std::fmt::Write as _;

use apiserver::resource::MetadataRules;
use cel::Type;
use cel::environments::{self, Offers};
use k8s_openapi::api::admissionregistration::v1::{MatchResources, ParamKind, ParamRef};
use machinery::{LabelSelector, names};

use crate::kind::Rules;
use crate::validate::at::At;

pub(crate) mod mutating_admission_policy;
pub(crate) mod mutating_admission_policy_binding;
pub(crate) mod mutating_webhook_configuration;
pub(crate) mod validating_admission_policy;
pub(crate) mod validating_admission_policy_binding;
pub(crate) mod validating_webhook_configuration;

const API_EXTENSIONS: &[&str] = &["api-extensions"];

/// What the rules of all kinds of the group have alike.
const RULES: Rules = Rules {
    metadata: MetadataRules { needs_domains: false, ..MetadataRules::WHOLE },
    unconditional_update: false,
    ..Rules::NONE
};

const HTTPS: i32 = 443;
const WEBHOOK_SECONDS: i32 = 10;

/// Webhooks of both kinds, which are types of their own with the same fields.
macro_rules! default_webhook {
    ($hook:expr) => {{
        let hook = $hook;
        hook.failure_policy.get_or_insert_with(|| "Fail".into());
        hook.match_policy.get_or_insert_with(|| "Equivalent".into());
        hook.namespace_selector.get_or_insert_default();
        hook.object_selector.get_or_insert_default();
        hook.timeout_seconds.get_or_insert($crate::admissionregistration::WEBHOOK_SECONDS);
        for rule in hook.rules.iter_mut().flatten() {
            rule.scope.get_or_insert_with(|| "*".into());
        }
        if let Some(service) = &mut hook.client_config.service {
            service.port.get_or_insert($crate::admissionregistration::HTTPS);
        }
    }};
}

use default_webhook;

fn default_match(resources: Option<&mut MatchResources>) {
    let Some(resources) = resources else { return };
    resources.match_policy.get_or_insert_with(|| "Equivalent".into());
    resources.namespace_selector.get_or_insert_default();
    resources.object_selector.get_or_insert_default();
    for list in [&mut resources.resource_rules, &mut resources.exclude_resource_rules] {
        for rule in list.iter_mut().flatten() {
            rule.scope.get_or_insert_with(|| "*".into());
        }
    }
}

fn param_kind_cell(kind: Option<&ParamKind>) -> String {
    let Some(kind) = kind else { return "<unset>".into() };
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    format!("{}/{}", text(&kind.api_version), text(&kind.kind))
}

/// A policy's parameters: a name in a namespace, or what a selector selects.
fn param_ref_cell(params: Option<&ParamRef>) -> String {
    let Some(params) = params else { return "<unset>".into() };
    let given = |part: &Option<String>| part.clone().filter(|text| !text.is_empty());
    match (given(&params.name), given(&params.namespace), &params.selector) {
        (Some(name), Some(namespace), _) => format!("{namespace}/{name}"),
        (Some(name), None, _) => format!("*/{name}"),
        (None, _, Some(selector)) => go_text(selector),
        _ => "<unset>".into(),
    }
}

/// A selector as Go's generated `String` method prints it.
fn go_text(selector: &LabelSelector) -> String {
    let mut labels = String::new();
    for (key, value) in selector.match_labels.iter().flatten() {
        let _ = write!(labels, "{key}: {value},");
    }
    let mut expressions = String::new();
    for one in selector.match_expressions.iter().flatten() {
        let values = one.values.as_deref().unwrap_or_default().join(" ");
        let _ = write!(
            expressions,
            "LabelSelectorRequirement{{Key:{},Operator:{},Values:[{values}],}},",
            one.key, one.operator
        );
    }
    format!(
        "&LabelSelector{{MatchLabels:map[string]string{{{labels}}},MatchExpressions:[]LabelSelectorRequirement{{{expressions}}},}}"
    )
}

const FAILURE: &[&str] = &["Fail", "Ignore"];

const MATCH: &[&str] = &["Equivalent", "Exact"];

const REINVOCATION: &[&str] = &["IfNeeded", "Never"];

fn webhooks(at: &At<'_>, is_mutating: bool) {
    let mut seen = HashSet::new();
    for hook in at.get("webhooks").items() {
        let name = hook.get("name");
        qualified_name(&name);
        hook.get("rules").items().for_each(|rule| operations_rule(&rule));
        hook.get("failurePolicy").any_of(FAILURE);
        hook.get("matchPolicy").any_of(MATCH);
        let effects = hook.get("sideEffects");
        if !effects.is_empty() {
            effects.one_of(&["None", "NoneOnDryRun"]);
        } else {
            effects.required("must specify one of None, NoneOnDryRun");
        }
        let timeout = hook.get("timeoutSeconds");
        if timeout.number().is_some_and(|seconds| !(1..=30).contains(&seconds)) {
            timeout.invalid("the timeout value must be between 1 and 30 seconds");
        }
        hook.get("namespaceSelector").selector();
        hook.get("objectSelector").selector();
        if is_mutating {
            hook.get("reinvocationPolicy").any_of(REINVOCATION);
        }
        client_config(&hook.get("clientConfig"));
        match_conditions(&hook.get("matchConditions"), false);
        review_versions(&hook.get("admissionReviewVersions"));
        if !seen.insert(name.str()) && !name.is_empty() {
            name.duplicate();
        }
    }
}

/// `a.b.c`
fn qualified_name(at: &At<'_>) {
    if !at.need() {
        return;
    }
    let wrong = names::dns1123_subdomain(at.str());
    if !wrong.is_empty() {
        at.invalid(&wrong.join(","));
    } else if at.str().split('.').count() < 3 {
        at.invalid("should be a domain with at least three segments separated by dots");
    }
}

fn review_versions(at: &At<'_>) {
    if at.is_empty() {
        return at.required("must specify one of v1, v1beta1");
    }
    let mut seen = HashSet::new();
    for version in at.items() {
        if !seen.insert(version.str()) {
            version.invalid("duplicate version");
            continue;
        }
        version.name(names::dns1035_label);
    }
    if !["v1", "v1beta1"].iter().any(|known| seen.contains(known)) {
        at.invalid("must include at least one of v1, v1beta1");
    }
}

fn client_config(at: &At<'_>) {
    match (at.has("url"), at.has("service")) {
        (true, false) => webhook_url(&at.get("url")),
        (false, true) => {
            let service = at.get("service");
            // Upstream asks for each under the other's name.
            for (field, blamed) in [("namespace", "name"), ("name", "namespace")] {
                if service.get(field).is_empty() {
                    service.get(blamed).required("");
                }
            }
            let (port, path) = (service.get("port"), service.get("path"));
            if port.is_set() && names::port_number(port.int()).is_some() {
                port.invalid("port is not valid: must be between 1 and 65535, inclusive");
            }
            if path.is_set() {
                service_path(&path);
            }
        }
        _ => at.required("exactly one of url or service is required"),
    }
}

fn webhook_url(at: &At<'_>) {
    const FORM: &str = "; desired format: https://host[/path]";
    // Without a scheme all of it is a path.
    let (scheme, rest) = at.str().split_once("://").unwrap_or_default();
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if scheme != "https" {
        at.invalid_as(scheme, &format!("'https' is the only allowed URL scheme{FORM}"));
    }
    if host.is_empty() {
        at.invalid_as(host, &format!("host must be specified{FORM}"));
    }
    if let Some((user, _)) = host.rsplit_once('@') {
        at.invalid_as(user, "user information is not permitted in the URL");
    }
    let (before, fragment) = rest.split_once('#').unwrap_or((rest, ""));
    if !fragment.is_empty() {
        at.invalid_as(fragment, "fragments are not permitted in the URL");
    }
    let query = before.split_once('?').map_or("", |(_, query)| query);
    if !query.is_empty() {
        at.invalid_as(query, "query parameters are not permitted in the URL");
    }
}

fn service_path(at: &At<'_>) {
    let path = at.str();
    if path == "/" || path.is_empty() {
        return;
    }
    if path == "//" {
        return at.invalid("segment[0] may not be empty");
    }
    if !path.starts_with('/') {
        at.invalid("must start with a '/'");
    }
    // The first letter goes, whatever it is.
    let inner: String = path.chars().skip(1).collect();
    let inner = inner.strip_suffix('/').unwrap_or(&inner);
    for (index, step) in inner.split('/').enumerate() {
        if step.is_empty() {
            at.invalid(&format!("segment[{index}] may not be empty"));
            continue;
        }
        for why in names::dns1123_subdomain(step) {
            at.invalid(&format!("segment[{index}]: {why}"));
        }
    }
}

fn operations_rule(at: &At<'_>) {
    let operations = at.get("operations");
    operations.need();
    if operations.len() > 1 && operations.strings().contains(&"*") {
        operations.invalid("if '*' is present, must not specify other operations");
    }
    const OPERATIONS: &[&str] = &["*", "CONNECT", "CREATE", "DELETE", "UPDATE"];
    operations.items().for_each(|operation| operation.one_of(OPERATIONS));
    for (field, what) in [("apiGroups", "API groups"), ("apiVersions", "API versions")] {
        let list = at.get(field);
        list.need();
        if list.len() > 1 && list.strings().contains(&"*") {
            list.invalid(&format!("if '*' is present, must not specify other {what}"));
        }
        if field == "apiVersions" {
            for version in list.items() {
                version.need();
            }
        }
    }
    rule_resources(&at.get("resources"));
    at.get("scope").any_of(&["*", "Cluster", "Namespaced"]);
}

fn rule_resources(at: &At<'_>) {
    at.need();
    let (mut all_subresources, mut of_all) = (HashSet::new(), HashSet::new());
    let mut is_plain = false;
    for one in at.items() {
        if !one.need() {
            continue;
        }
        let Some((resource, sub)) = one.str().split_once('/') else {
            is_plain = !one.is("*");
            continue;
        };
        if all_subresources.contains(resource) {
            let detail = format!("if '{resource}/*' is present, must not specify {}", one.str());
            one.invalid(&detail);
        }
        if of_all.contains(sub) {
            one.invalid(&format!("if '*/{sub}' is present, must not specify {}", one.str()));
        }
        if sub == "*" {
            all_subresources.insert(resource);
        }
        if resource == "*" {
            of_all.insert(sub);
        }
    }
    if at.len() > 1 && at.strings().contains(&"*/*") {
        at.invalid("if '*/*' is present, must not specify other resources");
    }
    if at.strings().contains(&"*") && is_plain {
        at.invalid("if '*' is present, must not specify other resources without subresources");
    }
}

fn match_conditions(at: &At<'_>, params: bool) {
    let known = environments::admission(Offers { params, authorizer: true, patches: false }, None);
    if at.len() > 64 {
        at.too_many(64);
    }
    let mut seen = HashSet::new();
    for condition in at.items() {
        let (name, expression) = (condition.get("name"), condition.get("expression"));
        let text = expression.str().trim();
        if text.is_empty() {
            expression.required("");
        } else if let Err(why) = environments::checked(text, &known, &[Type::Bool]) {
            expression.invalid_as(text, &why);
        }
        name.need_name(names::qualified_name);
        if !seen.insert(name.str()) && !name.is_empty() {
            name.duplicate();
        }
    }
}

/// The kind of a policy's parameters.
fn param_kind(at: &At<'_>) {
    if !at.is_set() {
        return;
    }
    let version = at.get("apiVersion");
    if version.need() {
        let (group, number) = version.str().split_once('/').unwrap_or(("", version.str()));
        if number.contains('/') {
            let detail = format!("unexpected GroupVersion string: {}", version.str());
            version.invalid(&detail);
        } else {
            let wrong = names::dns1123_subdomain(group);
            if !group.is_empty() && !wrong.is_empty() {
                version.invalid_as(group, &wrong.join(","));
            }
            let wrong = names::dns1035_label(number);
            if number.is_empty() {
                version.invalid("version must be specified");
            } else if !wrong.is_empty() {
                version.invalid_as(number, &wrong.join(","));
            }
        }
    }
    let kind = at.get("kind");
    let wrong = names::dns1035_label(&kind.str().to_lowercase());
    if kind.need() && !wrong.is_empty() {
        let detail =
            format!("may have mixed case, but should otherwise match: {}", wrong.join(","));
        kind.invalid(&detail);
    }
}

fn match_resources(at: &At<'_>) {
    if !at.is_set() {
        return;
    }
    let policy = at.get("matchPolicy");
    if policy.is_set() {
        policy.one_of(MATCH);
    } else {
        policy.required("");
    }
    for field in ["namespaceSelector", "objectSelector"] {
        if at.has(field) {
            at.get(field).selector();
        } else {
            at.get(field).required("");
        }
    }
    for field in ["resourceRules", "excludeResourceRules"] {
        for rule in at.get(field).items() {
            let mut seen = HashSet::new();
            for name in rule.get("resourceNames").items() {
                name.name(names::path_segment);
                if !seen.insert(name.str()) {
                    name.duplicate();
                }
            }
            operations_rule(&rule);
        }
    }
}

/// What the expressions of a policy may name, besides what all may.
struct Composed {
    params: bool,
    /// With their types; `None` where there are none at all.
    variables: Option<Vec<(String, Type)>>,
}

impl Composed {
    /// Compiles the expression at a place, which must evaluate to one of `wanted`.
    fn check(&self, at: &At<'_>, text: &str, authorizer: bool, patches: bool, wanted: &[Type]) {
        let offers = Offers { params: self.params, authorizer, patches };
        let known = environments::admission(offers, self.variables.as_deref());
        if let Err(why) = environments::checked(text, &known, wanted) {
            at.invalid(&why);
        }
    }

    /// Compiles a variable, which later expressions may name whatever is wrong with it.
    fn add(&mut self, name: &str, at: &At<'_>) {
        let offers = Offers { params: self.params, authorizer: true, patches: false };
        let known = environments::admission(offers, self.variables.as_deref());
        let kind = match environments::checked(at.str(), &known, &[]) {
            Ok(program) => program.kind().clone(),
            Err(why) => {
                at.invalid(&why);
                Type::Dyn
            }
        };
        self.variables.get_or_insert_default().push((name.to_owned(), kind));
    }
}

/// What policies of both kinds begin with.
fn policy_head(spec: &At<'_>, is_mutating: bool) -> Composed {
    let failure = spec.get("failurePolicy");
    if failure.is_set() {
        failure.one_of(FAILURE);
    } else {
        failure.required("");
    }
    param_kind(&spec.get("paramKind"));
    let constraints = spec.get("matchConstraints");
    if !constraints.is_set() {
        constraints.required("");
    } else {
        match_resources(&constraints);
        constraints.get("resourceRules").need();
        if is_mutating {
            mutable_operations(&constraints);
        }
    }
    let params = spec.has("paramKind");
    match_conditions(&spec.get("matchConditions"), params);
    // Mutations may always name `variables`.
    let mut composed = Composed { params, variables: is_mutating.then(Vec::new) };
    for variable in spec.get("variables").items() {
        let (name, expression) = (variable.get("name"), variable.get("expression"));
        if name.str().trim().is_empty() {
            name.required("name is not specified");
        } else if !is_cel_identifier(name.str()) {
            name.invalid("must be a valid CEL identifier");
        }
        if expression.str().trim().is_empty() {
            expression.required("expression is not specified");
        } else {
            composed.add(name.str(), &expression);
        }
    }
    composed
}

fn is_cel_identifier(text: &str) -> bool {
    const RESERVED: &[&str] = &[
        "true",
        "false",
        "null",
        "in",
        "as",
        "break",
        "const",
        "continue",
        "else",
        "for",
        "function",
        "if",
        "import",
        "let",
        "loop",
        "package",
        "namespace",
        "return",
        "var",
        "void",
        "while",
    ];
    names::c_identifier(text).is_empty() && !RESERVED.contains(&text)
}

/// Only what writes can be mutated.
fn mutable_operations(resources: &At<'_>) {
    let rules = resources.get("resourceRules");
    for rule in rules.items() {
        for operation in rule.get("operations").items() {
            operation
                .called(rules.child_path("operations"))
                .one_of(&["*", "CONNECT", "CREATE", "UPDATE"]);
        }
    }
}

fn binding(at: &At<'_>) {
    let spec = at.get("spec");
    spec.get("policyName").need_name(names::dns1123_subdomain);
    param_ref(&spec.get("paramRef"));
    match_resources(&spec.get("matchResources"));
}

fn param_ref(at: &At<'_>) {
    if !at.is_set() {
        return;
    }
    const EXCLUSIVE: &str = "name and selector are mutually exclusive";
    let (name, selector) = (at.get("name"), at.get("selector"));
    name.any_name(names::path_segment);
    selector.selector();
    match (name.is_empty(), selector.is_set()) {
        (false, true) => {
            name.forbidden(EXCLUSIVE);
            selector.forbidden(EXCLUSIVE);
        }
        (true, false) => at.required("one of name or selector must be specified"),
        _ => {}
    }
    let action = at.get("parameterNotFoundAction");
    if action.need() {
        action.one_of(&["Deny", "Allow"]);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::validate::at::judge;

    #[test]
    fn an_address_without_a_scheme_has_no_host() {
        let check = |url: &str, expected: &[&str]| {
            let errors = judge(&json!(url), webhook_url);
            let texts: Vec<String> = errors.0.iter().map(ToString::to_string).collect();
            assert_eq!(texts.len(), expected.len(), "{texts:?}");
            assert!(
                texts.iter().zip(expected).all(|(text, part)| text.contains(part)),
                "{texts:?}"
            );
        };
        check("https://a/b", &[]);
        check("http://a", &["the only allowed URL scheme"]);
        check("x", &["the only allowed URL scheme", "host must be specified"]);
    }
}
