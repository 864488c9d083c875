//! Webhook configurations and admission policies, with their expressions.
//! Upstream: `pkg/apis/admissionregistration/validation`.

use std::collections::HashSet;

use cel::Type;
use cel::environments::{self, Offers};
use machinery::names;

use super::at::At;
use super::policy::conditions;

const FAILURE: &[&str] = &["Fail", "Ignore"];
const MATCH: &[&str] = &["Equivalent", "Exact"];
const REINVOCATION: &[&str] = &["IfNeeded", "Never"];

pub(crate) fn validating_webhooks(at: &At<'_>) {
    webhooks(at, false);
}

pub(crate) fn mutating_webhooks(at: &At<'_>) {
    webhooks(at, true);
}

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
    let (scheme, rest) = at.str().split_once("://").unwrap_or(("", at.str()));
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

pub(crate) fn validating_policy(at: &At<'_>) {
    let spec = at.get("spec");
    let composed = policy_head(&spec, false);
    let (rules, notes) = (spec.get("validations"), spec.get("auditAnnotations"));
    if rules.is_empty() && notes.is_empty() {
        for place in [&rules, &notes] {
            place.required("validations or auditAnnotations must contain at least one item");
        }
        return;
    }
    rules.items().for_each(|rule| validation(&rule, &composed));
    if notes.len() > 20 {
        notes.invalid("must not have more than 20 auditAnnotations");
    }
    let policy = at.get("metadata.name").str();
    let mut seen = HashSet::new();
    for note in notes.items() {
        let (key, expression) = (note.get("key"), note.get("valueExpression"));
        if policy.is_empty() {
            key.invalid_text("requires metadata.name be non-empty");
        } else {
            let full = format!("{policy}/{}", key.str());
            for why in names::qualified_name(&full) {
                key.invalid_as(&full, &why);
            }
        }
        if expression.str().trim().is_empty() {
            expression.required("valueExpression is not specified");
        } else if expression.str().trim().len() > 5 << 10 {
            expression.required("must not exceed 5120 bytes in length");
        } else {
            let text = expression.str().trim();
            composed.check(&expression, text, true, false, &[Type::String, Type::Null]);
        }
        if !seen.insert(key.str()) {
            key.duplicate_text();
        }
    }
}

fn validation(at: &At<'_>, composed: &Composed) {
    let [expression, message, by_expression] =
        ["expression", "message", "messageExpression"].map(|field| at.get(field));
    if expression.str().trim().is_empty() {
        expression.required("expression is not specified");
    } else {
        composed.check(&expression, expression.str(), true, false, &[Type::Bool]);
    }
    if !by_expression.is_empty() && by_expression.str().trim().is_empty() {
        by_expression.invalid("must be non-empty if specified");
    } else if !by_expression.is_empty() {
        composed.check(&by_expression, by_expression.str(), false, false, &[Type::String]);
    }
    if !message.is_empty() && message.str().trim().is_empty() {
        message.invalid("must be non-empty if specified");
    } else if message.str().trim().contains(['\n', '\r']) {
        message.invalid("must not contain line breaks");
    }
    at.get("reason").any_of(&["Forbidden", "Invalid", "RequestEntityTooLarge"]);
}

pub(crate) fn policy_status(at: &At<'_>, _old: &At<'_>) {
    let status = at.get("status");
    for warning in status.get("typeChecking.expressionWarnings").items() {
        warning.get("warning").need();
        let place = warning.get("fieldRef");
        if place.str().trim().is_empty() {
            place.required("");
        }
    }
    conditions(&status.get("conditions"));
}

pub(crate) fn mutating_policy(at: &At<'_>) {
    let spec = at.get("spec");
    let composed = policy_head(&spec, true);
    let mutations = spec.get("mutations");
    if mutations.is_empty() {
        mutations.required("mutations must contain at least one item");
    }
    for mutation in mutations.items() {
        let kind = mutation.get("patchType");
        let (config, patch) = (mutation.get("applyConfiguration"), mutation.get("jsonPatch"));
        match kind.str() {
            "" => kind.required(""),
            "ApplyConfiguration" => {
                let wanted = environments::patched();
                one_patch(kind.str(), (&config, wanted), (&patch, "{jsonPatch}"), &composed);
            }
            "JSONPatch" => {
                let wanted = environments::patches();
                one_patch(
                    kind.str(),
                    (&patch, wanted),
                    (&config, "{applyConfiguration}"),
                    &composed,
                );
            }
            _ => kind.unsupported(&["ApplyConfiguration", "JSONPatch"]),
        }
    }
    let policy = spec.get("reinvocationPolicy");
    if policy.is_empty() {
        policy.required("");
    } else {
        policy.one_of(REINVOCATION);
    }
}

/// The patch that the type asks for, and what it must evaluate to; and not the other, which is shown.
fn one_patch(kind: &str, wanted: (&At<'_>, Type), other: (&At<'_>, &str), composed: &Composed) {
    let (patch, wanted) = wanted;
    let expression = patch.get("expression");
    let text = expression.str().trim();
    if !patch.is_set() {
        patch.required(&format!("must be specified when patchType is {kind}"));
    } else if text.is_empty() {
        expression.required("");
    } else {
        composed.check(&expression.with(&text.into()), text, true, true, &[wanted]);
    }
    let (other, shown) = other;
    if other.is_set() {
        other.invalid_as(shown, &format!("must not be specified when patchType is {kind}"));
    }
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

pub(crate) fn validating_binding(at: &At<'_>) {
    binding(at);
    let actions = at.get("spec.validationActions");
    let mut seen = HashSet::new();
    for action in actions.items() {
        action.one_of(&["Audit", "Deny", "Warn"]);
        if !seen.insert(action.str()) {
            action.duplicate();
        }
    }
    if seen.contains(&"Deny") && seen.contains(&"Warn") {
        actions.invalid("must not contain both Deny and Warn (repeating the same validation failure information in the API response and headers serves no purpose)");
    }
    if seen.is_empty() {
        actions.required("at least one validation action is required");
    }
}

pub(crate) fn mutating_binding(at: &At<'_>) {
    binding(at);
    mutable_operations(&at.get("spec.matchResources"));
}
