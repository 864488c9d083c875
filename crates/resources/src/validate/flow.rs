//! Priority and fairness. Upstream: `pkg/apis/flowcontrol/validation`.

use machinery::names;
use serde_json::{Value, json};

use super::at::At;
use super::internal;

const VERBS: &[&str] =
    &["create", "delete", "deletecollection", "get", "list", "patch", "proxy", "update", "watch"];

/// Specs of the objects that must exist as they are.
fn mandatory_schema(name: &str) -> Option<Value> {
    let everybody = |groups: &[&str]| {
        let subjects: Vec<Value> =
            groups.iter().map(|name| json!({"kind": "Group", "group": {"name": name}})).collect();
        json!([{
            "subjects": subjects,
            "resourceRules": [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"],
                "clusterScope": true, "namespaces": ["*"]}],
            "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
        }])
    };
    match name {
        "exempt" => Some(json!({
            "priorityLevelConfiguration": {"name": "exempt"},
            "matchingPrecedence": 1,
            "rules": everybody(&["system:masters"]),
        })),
        "catch-all" => Some(json!({
            "priorityLevelConfiguration": {"name": "catch-all"},
            "matchingPrecedence": 10000,
            "distinguisherMethod": {"type": "ByUser"},
            "rules": everybody(&["system:unauthenticated", "system:authenticated"]),
        })),
        _ => None,
    }
}

pub(crate) fn schema(at: &At<'_>) {
    let (spec, name) = (at.get("spec"), at.get("metadata.name").str());
    let precedence = spec.get("matchingPrecedence");
    if precedence.int() <= 0 {
        precedence.invalid_as(precedence.int(), "must be a positive value");
    }
    if precedence.int() > 10000 {
        precedence.invalid("must not be greater than 10000");
    }
    if precedence.int() == 1 && name != "exempt" {
        precedence.invalid("only the schema named 'exempt' may have matchingPrecedence 1");
    }
    let method = spec.get("distinguisherMethod");
    if method.is_set() && !["ByNamespace", "ByUser"].contains(&method.get("type").str()) {
        let shown = format!("{{\"Type\":{:?}}}", method.get("type").str());
        internal::unsupported(&method.get("type"), &shown, &["ByNamespace", "ByUser"]);
    }
    let level = spec.get("priorityLevelConfiguration.name");
    if level.is_empty() {
        level.required("must reference a priority level");
    } else {
        level.name(names::dns1123_subdomain);
    }
    spec.get("rules").items().for_each(|rule| schema_rule(&rule));
    if mandatory_schema(name).is_some_and(|wanted| wanted != *spec.value) {
        let shown = internal::shown("FlowSchemaSpec", spec.value);
        let detail = format!("spec of '{name}' must equal the fixed value");
        spec.errors().invalid_shown(&spec.path, Some(&shown), &detail);
    }
}

fn schema_rule(at: &At<'_>) {
    let subjects = at.get("subjects");
    if subjects.is_empty() {
        subjects.required("subjects must contain at least one value");
    }
    subjects.items().for_each(|subject| schema_subject(&subject));
    let (resources, others) = (at.get("resourceRules"), at.get("nonResourceRules"));
    if resources.is_empty() && others.is_empty() {
        at.required("at least one of resourceRules and nonResourceRules has to be non-empty");
    }
    for rule in resources.items() {
        verbs(&rule.get("verbs"));
        for (field, one, what) in
            [("apiGroups", "api group", "api groups"), ("resources", "resource", "resources")]
        {
            let list = rule.get(field);
            if list.is_empty() {
                list.required(&format!("resource rules must supply at least one {one}"));
            } else {
                alone(&list, what);
            }
        }
        schema_namespaces(&rule);
    }
    for rule in others.items() {
        verbs(&rule.get("verbs"));
        let urls = rule.get("nonResourceURLs");
        if urls.is_empty() {
            urls.required("nonResourceURLs must contain at least one value");
        } else if !alone(&urls, "non-resource URLs") {
            urls.items().for_each(|url| url_path(&url));
        }
    }
}

fn schema_namespaces(rule: &At<'_>) {
    let list = rule.get("namespaces");
    if list.is_empty() && !rule.get("clusterScope").bool() {
        list.required(
            "resource rules that are not cluster scoped must supply at least one namespace",
        );
    } else if !alone(&list, "namespaces") {
        for namespace in list.items() {
            for why in names::dns1123_label(namespace.str()) {
                namespace.invalid(&format!(
                    "each member of this list must be '*' or a DNS-1123 label; {why}"
                ));
            }
        }
    }
}

/// `*` means all, and stands alone. Says whether it is there.
fn alone(at: &At<'_>, what: &str) -> bool {
    let is_there = at.strings().contains(&"*");
    if is_there && at.len() > 1 {
        at.invalid(&format!("if '*' is present, must not specify other {what}"));
    }
    is_there
}

fn verbs(at: &At<'_>) {
    if at.is_empty() {
        at.required("verbs must contain at least one value");
    } else if !alone(at, "verbs") && at.strings().iter().any(|verb| !VERBS.contains(verb)) {
        at.errors().not_supported_value(&at.path, at.value, VERBS);
    }
}

fn url_path(at: &At<'_>) {
    let path = at.str();
    let detail = match path {
        "" => "must not be empty",
        "/" => return,
        _ if !path.starts_with('/') => "must start with slash",
        _ if path.contains(' ') => "must not contain white-space",
        _ if path.contains("//") => "must not contain double slash",
        _ if path.contains('*') && (path.matches('*').count() > 1 || !path.ends_with("/*")) => {
            "wildcard can only do suffix matching"
        }
        _ => return,
    };
    at.invalid(detail);
}

fn schema_subject(at: &At<'_>) {
    const KINDS: &[(&str, &str)] =
        &[("ServiceAccount", "serviceAccount"), ("User", "user"), ("Group", "group")];
    let kind = at.get("kind");
    let Some((name, field)) = KINDS.iter().find(|(name, _)| kind.is(name)) else {
        return kind.unsupported(&["Group", "ServiceAccount", "User"]);
    };
    let subject = at.get(field);
    if !subject.is_set() {
        subject.required(&format!("{field} is required when subject kind is '{name}'"));
    } else {
        let place = subject.get("name");
        if place.need() && *name == "ServiceAccount" && !place.is("*") {
            place.name(names::dns1123_subdomain);
        }
        let namespace = subject.get("namespace");
        if *name == "ServiceAccount" && namespace.is_empty() {
            namespace.required("must specify namespace for service account");
        } else if *name == "ServiceAccount" {
            namespace.name(names::dns1123_label);
        }
    }
    for (other, field) in KINDS.iter().filter(|(other, _)| other != name) {
        if at.has(field) {
            let detail = format!("{field} is forbidden when subject kind is not '{other}'");
            at.get(field).forbidden(&detail);
        }
    }
}

pub(crate) fn level(at: &At<'_>) {
    let (spec, name) = (at.get("spec"), at.get("metadata.name").str());
    let kind = spec.get("type");
    if (name == "exempt") != kind.is("Exempt") {
        kind.invalid_text("must be 'Exempt' if and only if `name` is 'exempt'");
    }
    let (limited, exempt) = (spec.get("limited"), spec.get("exempt"));
    match kind.str() {
        "Exempt" => {
            if limited.is_set() {
                limited.forbidden("must be nil if the type is not Limited");
            }
            if exempt.get("nominalConcurrencyShares").int() < 0 {
                exempt.get("nominalConcurrencyShares").invalid("must be a non-negative integer");
            }
            percent(&exempt.get("lendablePercent"));
        }
        "Limited" => {
            if exempt.is_set() {
                exempt.forbidden("must be nil if the type is Limited");
            }
            if limited.is_set() {
                limited_level(&limited);
            } else {
                limited.required("must not be empty when type is Limited");
            }
        }
        _ => kind.unsupported(&["Exempt", "Limited"]),
    }
    mandatory_level(&spec, name);
}

fn mandatory_level(spec: &At<'_>, name: &str) {
    let show = |detail: &str| {
        let shown = internal::shown("PriorityLevelConfigurationSpec", spec.value);
        spec.errors().invalid_shown(&spec.path, Some(&shown), detail);
    };
    let is_fixed = match name {
        "exempt" => spec.get("type").is("Exempt") && !spec.has("limited"),
        "catch-all" => {
            *spec.value
                == json!({"type": "Limited", "limited": {
                    "nominalConcurrencyShares": 5, "lendablePercent": 0,
                    "limitResponse": {"type": "Reject"}}})
        }
        _ => true,
    };
    match name {
        _ if is_fixed => {}
        "exempt" => {
            show("spec of 'exempt' except the 'spec.exempt' field must equal the fixed value")
        }
        _ => show(&format!("spec of '{name}' must equal the fixed value")),
    }
}

fn percent(at: &At<'_>) {
    if at.number().is_some_and(|percent| !(0..=100).contains(&percent)) {
        at.invalid("must be between 0 and 100, inclusive");
    }
}

fn limited_level(at: &At<'_>) {
    if at.get("nominalConcurrencyShares").int() < 0 {
        at.get("nominalConcurrencyShares").invalid("must be a non-negative integer");
    }
    let response = at.get("limitResponse");
    let queuing = response.get("queuing");
    match response.get("type").str() {
        "Reject" => {
            if queuing.is_set() {
                queuing.forbidden("must be nil if limited.limitResponse.type is not Limited");
            }
        }
        "Queue" if !queuing.is_set() => {
            queuing.required("must not be empty if limited.limitResponse.type is Limited");
        }
        "Queue" => queues(&queuing),
        _ => response.get("type").unsupported(&["Queue", "Reject"]),
    }
    percent(&at.get("lendablePercent"));
    if at.get("borrowingLimitPercent").int() < 0 {
        at.get("borrowingLimitPercent").invalid("if specified, must be a non-negative integer");
    }
}

fn queues(at: &At<'_>) {
    const MOST: i64 = 10_000_000;
    let [length, queues, hand] =
        ["queueLengthLimit", "queues", "handSize"].map(|field| at.get(field));
    for place in [&length, &queues, &hand].into_iter().filter(|place| place.int() <= 0) {
        place.invalid_as(place.int(), "must be positive");
    }
    if queues.int() > MOST {
        queues.invalid(&format!("must not be greater than {MOST}"));
    }
    if hand.int() <= 0 {
        return;
    }
    // How many bits it takes to deal a hand: log2 of the number of hands in order.
    let bits: f64 = (0..hand.int()).map(|dealt| ((queues.int() - dealt) as f64).log2()).sum();
    if hand.int() > queues.int() {
        hand.invalid(&format!("should not be greater than queues ({})", queues.int()));
    } else if bits.ceil() > 60.0 {
        let detail = format!(
            "required entropy bits of deckSize {} and handSize {} should not be greater than 60",
            queues.int(),
            hand.int()
        );
        hand.invalid(&detail);
    }
}
