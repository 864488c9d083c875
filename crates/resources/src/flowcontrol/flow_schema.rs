//! FlowSchema: which requests belong to a priority level.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::flowcontrol::v1::FlowSchema;
use machinery::names;
use serde_json::{Value, json};

use crate::defaults::fill_number;
use crate::kind::{Kind, Rules, STATUS, age, field, name, spec_and_bare_status, text};
use crate::validate::at::At;
use crate::validate::{internal, status};

const PRECEDENCE: i32 = 1000;

pub(crate) static KIND: Kind<FlowSchema> = Kind {
    subresources: &[STATUS],
    default: |schema| {
        let spec = schema.spec.get_or_insert_default();
        fill_number(&mut spec.matching_precedence, PRECEDENCE);
    },
    parts: Some(spec_and_bare_status!()),
    generation: Some(|new, old| new.spec != old.spec),
    rules: Rules {
        create: schema,
        parts: &[("status", status::conditions_of_flows)],
        metadata: MetadataRules::WHOLE,
        ..Rules::NONE
    },
    columns: &[
        name(),
        field(
            "PriorityLevel",
            "string",
            "api.flowcontrol.v1.PriorityLevelConfigurationReference.name",
            |schema| {
                let spec = schema.spec.as_ref();
                spec.map_or("", |spec| spec.priority_level_configuration.name.as_str()).into()
            },
        ),
        field(
            "MatchingPrecedence",
            "string",
            "api.flowcontrol.v1.FlowSchemaSpec.matchingPrecedence",
            |schema| {
                let spec = schema.spec.as_ref();
                spec.and_then(|spec| spec.matching_precedence).unwrap_or_default().into()
            },
        ),
        field(
            "DistinguisherMethod",
            "string",
            "api.flowcontrol.v1.FlowSchemaSpec.distinguisherMethod",
            |schema| {
                let spec = schema.spec.as_ref();
                let method = spec.and_then(|spec| spec.distinguisher_method.as_ref());
                method.map_or("<none>", |method| method.type_.as_str()).into()
            },
        ),
        age(),
        text(
            "MissingPL",
            "string",
            "references a broken or non-existent PriorityLevelConfiguration",
            |schema| dangling(schema).into(),
        ),
    ],
    ..Kind::BASE
};

fn dangling(schema: &FlowSchema) -> String {
    let mut conditions = schema.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let dangling = conditions.find(|condition| condition.type_.as_deref() == Some("Dangling"));
    dangling.and_then(|condition| condition.status.clone()).unwrap_or_else(|| "?".into())
}

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

fn schema(at: &At<'_>) {
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
