//! The operations of a row: one per route, with their OpenAPI properties.

use serde_json::{Value, json};

use crate::resource::{Behaviour, Resource, Subresource};

/// One route.
#[derive(Clone)]
pub struct Operation {
    /// For example `/api/v1/namespaces/{namespace}/pods/{name}`.
    pub path: String,
    /// get, put, post, delete, patch, head, options.
    pub method: &'static str,
    /// `x-kubernetes-action`: list, patch, deletecollection, connect…
    pub action: &'static str,
    pub id: String,
    pub description: String,
    pub tag: String,
    pub group_version_kind: Value,
    /// Names of the query's [`parameter`]s.
    pub query: Vec<&'static str>,
    pub body: Option<Shape>,
    pub answer: Shape,
}

/// The shape of a body.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    Object,
    List,
    Patch,
    DeleteOptions,
    Status,
    WatchEvent,
    Text,
}

const LIST_QUERY: &[&str] = &[
    "allowWatchBookmarks",
    "continue",
    "fieldSelector",
    "labelSelector",
    "limit",
    "resourceVersion",
    "resourceVersionMatch",
    "sendInitialEvents",
    "timeoutSeconds",
    "watch",
];
const WRITE_QUERY: &[&str] = &["dryRun", "fieldManager", "fieldValidation"];
const PATCH_QUERY: &[&str] = &["dryRun", "fieldManager", "fieldValidation", "force"];
const DELETE_QUERY: &[&str] =
    &["dryRun", "gracePeriodSeconds", "orphanDependents", "propagationPolicy"];
const DELETE_COLLECTION_QUERY: &[&str] = &[
    "continue",
    "dryRun",
    "fieldSelector",
    "gracePeriodSeconds",
    "labelSelector",
    "limit",
    "orphanDependents",
    "propagationPolicy",
    "resourceVersion",
    "resourceVersionMatch",
    "sendInitialEvents",
    "timeoutSeconds",
];

/// A verb's route on an object or a collection.
struct Form {
    verb: &'static str,
    method: &'static str,
    action: &'static str,
    /// The first word of the operation id and of the description.
    word: &'static str,
    text: &'static str,
    query: &'static [&'static str],
    body: Option<Shape>,
    answer: Shape,
}

const COLLECTION: &[Form] = &[
    Form {
        verb: "list",
        method: "get",
        action: "list",
        word: "list",
        text: "list or watch objects of kind",
        query: LIST_QUERY,
        body: None,
        answer: Shape::List,
    },
    Form {
        verb: "create",
        method: "post",
        action: "post",
        word: "create",
        text: "create a",
        query: WRITE_QUERY,
        body: Some(Shape::Object),
        answer: Shape::Object,
    },
    Form {
        verb: "deletecollection",
        method: "delete",
        action: "deletecollection",
        word: "delete",
        text: "delete collection of",
        query: DELETE_COLLECTION_QUERY,
        body: Some(Shape::DeleteOptions),
        answer: Shape::Status,
    },
];

const OBJECT: &[Form] = &[
    Form {
        verb: "get",
        method: "get",
        action: "get",
        word: "read",
        text: "read the specified",
        query: &[],
        body: None,
        answer: Shape::Object,
    },
    Form {
        verb: "update",
        method: "put",
        action: "put",
        word: "replace",
        text: "replace the specified",
        query: WRITE_QUERY,
        body: Some(Shape::Object),
        answer: Shape::Object,
    },
    Form {
        verb: "patch",
        method: "patch",
        action: "patch",
        word: "patch",
        text: "partially update the specified",
        query: PATCH_QUERY,
        body: Some(Shape::Patch),
        answer: Shape::Object,
    },
    Form {
        verb: "delete",
        method: "delete",
        action: "delete",
        word: "delete",
        text: "delete a",
        query: DELETE_QUERY,
        body: Some(Shape::DeleteOptions),
        answer: Shape::Status,
    },
];

/// The operations of a row and its subresources.
pub fn operations(row: &Resource) -> Vec<Operation> {
    let base = format!("/{}", super::version_path(row));
    let scoped = match row.namespaced {
        true => format!("{base}/namespaces/{{namespace}}/{}", row.plural),
        false => format!("{base}/{}", row.plural),
    };
    let scope = if row.namespaced { "Namespaced" } else { "" };
    let mut all = vec![];
    for form in COLLECTION.iter().filter(|form| row.allows(form.verb)) {
        let collection = if form.verb == "deletecollection" { "Collection" } else { "" };
        all.push(operation(row, form, scoped.clone(), &format!("{collection}{scope}{}", row.kind)));
        if form.verb == "list" && row.namespaced {
            let path = format!("{base}/{}", row.plural);
            all.push(operation(row, form, path, &format!("{}ForAllNamespaces", row.kind)));
        }
    }
    let named = format!("{scoped}/{{name}}");
    for form in OBJECT.iter().filter(|form| row.allows(form.verb)) {
        all.push(operation(row, form, named.clone(), &format!("{scope}{}", row.kind)));
    }
    if row.allows("watch") {
        all.extend(watches(row, &base, &scoped, scope));
    }
    for subresource in &row.subresources {
        all.extend(subresource_operations(row, subresource, &named, scope));
    }
    all
}

fn operation(row: &Resource, form: &Form, path: String, subject: &str) -> Operation {
    Operation {
        path,
        method: form.method,
        action: form.action,
        id: format!("{}{}{subject}", form.word, prefix(row)),
        description: format!("{} {}", form.text, row.kind),
        tag: tag(row),
        group_version_kind: kind(&row.group, &row.version, &row.kind),
        query: form.query.to_vec(),
        body: form.body,
        answer: form.answer,
    }
}

fn kind(group: &str, version: &str, kind: &str) -> Value {
    json!({ "group": group, "version": version, "kind": kind })
}

/// The deprecated watch paths.
fn watches(row: &Resource, base: &str, scoped: &str, scope: &str) -> Vec<Operation> {
    let below = |path: &str| path.replacen(base, &format!("{base}/watch"), 1);
    let mut places = vec![
        (below(scoped), "watchlist", format!("{scope}{}List", row.kind)),
        (below(&format!("{scoped}/{{name}}")), "watch", format!("{scope}{}", row.kind)),
    ];
    if row.namespaced {
        let path = below(&format!("{base}/{}", row.plural));
        places.push((path, "watchlist", format!("{}ListForAllNamespaces", row.kind)));
    }
    let one = |(path, action, subject): (String, &'static str, String)| Operation {
        path,
        method: "get",
        action,
        id: format!("watch{}{subject}", prefix(row)),
        description: format!(
            "watch changes to an object of kind {}. deprecated: use the 'watch' parameter with a list operation instead.",
            row.kind
        ),
        tag: tag(row),
        group_version_kind: kind(&row.group, &row.version, &row.kind),
        query: LIST_QUERY.to_vec(),
        body: None,
        answer: Shape::WatchEvent,
    };
    places.into_iter().map(one).collect()
}

fn subresource_operations(
    row: &Resource,
    subresource: &Subresource,
    named: &str,
    scope: &str,
) -> Vec<Operation> {
    let path = format!("{named}/{}", subresource.name);
    let shown = match subresource.kind {
        Some(own) => kind(own.group, own.version, own.kind),
        None => kind(&row.group, &row.version, &row.kind),
    };
    let subject = format!("{scope}{}{}", row.kind, capital(subresource.name));
    let is_stream = matches!(subresource.behaviour, Behaviour::Connect(_));
    let mut all = vec![];
    for form in OBJECT.iter().chain(COLLECTION) {
        if !subresource.verbs.contains(&form.verb)
            || matches!(form.verb, "list" | "deletecollection")
        {
            continue;
        }
        let mut one = operation(row, form, path.clone(), &subject);
        one.description = format!(
            "{} {} of the specified {}",
            form.text.trim_end_matches(" the specified"),
            subresource.name,
            row.kind
        );
        one.group_version_kind = shown.clone();
        if is_stream && subresource.name == "log" {
            one.answer = Shape::Text;
        } else if is_stream {
            one.action = "connect";
            one.id = format!("connect{}{}{subject}", prefix(row), capital(form.method));
            (one.body, one.answer, one.query) = (None, Shape::Text, vec![]);
        }
        all.push(one);
    }
    if subresource.name == "proxy" {
        all = with_paths(row, &subject, all);
    }
    all
}

/// A proxy accepts any method, on any path.
fn with_paths(row: &Resource, subject: &str, mut all: Vec<Operation>) -> Vec<Operation> {
    let get = all.iter().find(|one| one.method == "get").cloned();
    for method in ["head", "options"] {
        all.extend(get.iter().map(|get| Operation {
            method,
            id: format!("connect{}{}{subject}", prefix(row), capital(method)),
            description: get.description.replacen("get", method, 1),
            ..get.clone()
        }));
    }
    let below: Vec<Operation> = all
        .iter()
        .map(|one| Operation {
            path: format!("{}/{{path}}", one.path),
            id: format!("{}WithPath", one.id),
            ..one.clone()
        })
        .collect();
    all.extend(below);
    all
}

/// `core_v1`, `rbacAuthorization_v1`.
pub fn tag(row: &Resource) -> String {
    format!("{}_{}", group_word(&row.group), row.version)
}

/// `CoreV1`, `RbacAuthorizationV1`.
fn prefix(row: &Resource) -> String {
    format!("{}{}", capital(&group_word(&row.group)), capital(&row.version))
}

pub fn group_word(group: &str) -> String {
    let group = group.strip_suffix(".k8s.io").unwrap_or(group);
    let mut words = group.split(['.', '-']);
    let first = words.next().filter(|word| !word.is_empty()).unwrap_or("core");
    words.fold(first.to_owned(), |all, word| all + &capital(word))
}

fn capital(word: &str) -> String {
    let mut chars = word.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
}

/// Type and description of a parameter.
pub fn parameter(name: &str) -> (&'static str, &'static str) {
    match name {
        "allowWatchBookmarks" => (
            "boolean",
            "Whether the server may send events of type BOOKMARK, which tell how far the watch is.",
        ),
        "continue" => ("string", "The token of the previous page of this list."),
        "dryRun" => ("string", "`All`: do everything but keep the change."),
        "fieldManager" => ("string", "The name of who changes fields."),
        "fieldSelector" => ("string", "Restricts the list to objects whose fields match."),
        "fieldValidation" => (
            "string",
            "What to do about unknown and duplicate fields: `Ignore`, `Warn` or `Strict`.",
        ),
        "force" => ("boolean", "Take fields from other managers; for apply only."),
        "gracePeriodSeconds" => ("integer", "How long the object may take to go; 0 means now."),
        "labelSelector" => ("string", "Restricts the list to objects whose labels match."),
        "limit" => ("integer", "The most items to return; the answer tells how to go on."),
        "name" => ("string", "The object's name."),
        "namespace" => ("string", "The namespace that the object is in."),
        "path" => ("string", "The path below the proxied resource."),
        "orphanDependents" => ("boolean", "Superseded by propagationPolicy."),
        "pretty" => ("string", "`true`: indent the answer."),
        "propagationPolicy" => {
            ("string", "What happens to dependents: `Orphan`, `Background` or `Foreground`.")
        }
        "resourceVersion" => ("string", "The state to read or to watch from."),
        "resourceVersionMatch" => {
            ("string", "How resourceVersion counts: `Exact` or `NotOlderThan`.")
        }
        "sendInitialEvents" => ("boolean", "Begin the watch with the present state."),
        "timeoutSeconds" => ("integer", "The longest that the call takes."),
        "watch" => ("boolean", "Answer with a stream of changes."),
        _ => ("string", ""),
    }
}
