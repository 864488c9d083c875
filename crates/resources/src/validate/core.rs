//! The core group's kinds without pods in them. Upstream: `pkg/apis/core/validation`.

use std::collections::HashSet;

use machinery::field::Path;
use machinery::names;
use serde_json::Value;

use super::at::At;
use super::{container, internal, ip, pod, quantity, status};

/// Of all values of a Secret or ConfigMap together.
const MAX_SIZE: usize = 1 << 20;

fn bytes(at: &At<'_>) -> usize {
    let text = at.str();
    let padding = text.bytes().rev().take_while(|byte| *byte == b'=').count();
    (text.len() / 4 * 3).saturating_sub(padding)
}

pub(crate) fn config_map(at: &At<'_>) {
    let binary = at.get("binaryData");
    let mut size = 0;
    for (key, value) in at.get("data").entries() {
        for why in names::config_map_key(key) {
            value.invalid_as(key, &why);
        }
        if binary.has(key) {
            value.invalid_as(key, "duplicate of key present in binaryData");
        }
        size += value.len();
    }
    for (key, value) in binary.entries() {
        for why in names::config_map_key(key) {
            value.invalid_as(key, &why);
        }
        size += bytes(&value);
    }
    if size > MAX_SIZE {
        at.called(Path::new("[]")).too_long(MAX_SIZE);
    }
}

/// What was made immutable stays.
fn stays(at: &At<'_>, old: &At<'_>, fields: &[&'static str]) {
    if !old.get("immutable").bool() {
        return;
    }
    const DETAIL: &str = "field is immutable when `immutable` is set";
    if !at.get("immutable").bool() {
        at.get("immutable").forbidden(DETAIL);
    }
    for field in fields {
        if at.get(field).value != old.get(field).value {
            at.get(field).forbidden(DETAIL);
        }
    }
}

pub(crate) fn config_map_update(at: &At<'_>, old: &At<'_>) {
    stays(at, old, &["data", "binaryData"]);
    config_map(at);
}

pub(crate) fn secret(at: &At<'_>) {
    let data = at.get("data");
    let mut size = 0;
    for (key, value) in data.entries() {
        for why in names::config_map_key(key) {
            value.invalid_as(key, &why);
        }
        size += bytes(&value);
    }
    if size > MAX_SIZE {
        data.too_long(MAX_SIZE);
    }
    let need = |key: &str| {
        if !data.has(key) {
            data.key(key).required("");
        }
    };
    match at.get("type").str() {
        "kubernetes.io/service-account-token" => {
            let note = at.get("metadata.annotations").key("kubernetes.io/service-account.name");
            note.need();
        }
        "kubernetes.io/dockercfg" => docker_config(&data.key(".dockercfg")),
        "kubernetes.io/dockerconfigjson" => docker_config(&data.key(".dockerconfigjson")),
        "kubernetes.io/basic-auth" if !data.has("username") && !data.has("password") => {
            need("username");
            need("password");
        }
        "kubernetes.io/ssh-auth" => {
            data.key("ssh-privatekey").need();
        }
        "kubernetes.io/tls" => {
            need("tls.crt");
            need("tls.key");
        }
        _ => {}
    }
}

fn docker_config(at: &At<'_>) {
    use base64::Engine as _;
    if !at.is_set() {
        return at.required("");
    }
    let decoded = base64::engine::general_purpose::STANDARD.decode(at.str()).unwrap_or_default();
    let why = match (decoded.first(), serde_json::from_slice::<Value>(&decoded)) {
        (_, Ok(Value::Object(_) | Value::Null)) => return,
        (None, _) => "unexpected end of JSON input".into(),
        (Some(first), Err(_)) if !b"{[\"0123456789-tfn".contains(first) => {
            format!("invalid character {:?} looking for beginning of value", char::from(*first))
        }
        (_, Err(error)) => error.to_string(),
        (_, Ok(value)) => {
            let kind = match value {
                Value::Array(_) => "array",
                Value::String(_) => "string",
                Value::Bool(_) => "bool",
                _ => "number",
            };
            format!("json: cannot unmarshal {kind} into Go value of type map[string]interface {{}}")
        }
    };
    at.invalid_as("<secret contents redacted>", &why);
}

pub(crate) fn secret_update(at: &At<'_>, old: &At<'_>) {
    at.get("type").unchanged(&old.get("type"));
    stays(at, old, &["data"]);
    secret(at);
}

pub(crate) fn limit_range(at: &At<'_>) {
    let mut seen = HashSet::new();
    for limit in at.get("spec.limits").items() {
        let kind = limit.get("type");
        let wrong = names::qualified_name(kind.str());
        for why in &wrong {
            kind.invalid_text(why);
        }
        let is_standard = ["Pod", "Container", "PersistentVolumeClaim"].contains(&kind.str());
        if wrong.is_empty() && !kind.str().contains('/') && !is_standard {
            kind.invalid("must be a standard limit type or fully qualified");
        }
        if !seen.insert(kind.str()) {
            kind.duplicate_text();
        }
        limit_names(&limit);
        let has_size = ["min", "max"].iter().any(|field| limit.get(field).has("storage"));
        if kind.is("PersistentVolumeClaim") && !has_size {
            limit.get("limits").required(
                "either minimum or maximum storage value is required, but neither was provided",
            );
        }
        limit_values(&limit);
    }
}

const LIMIT_FIELDS: &[&str] = &["max", "min", "default", "defaultRequest", "maxLimitRequestRatio"];

fn limit_names(limit: &At<'_>) {
    let kind = limit.get("type").str();
    for field in LIMIT_FIELDS {
        let list = limit.get(field);
        if kind == "Pod" && field.starts_with("default") {
            if !list.is_empty() {
                list.forbidden("may not be specified when `type` is 'Pod'");
            }
            continue;
        }
        for (name, amount) in list.entries() {
            if ["Pod", "Container"].contains(&kind) {
                quantity::container_resource_name(name, &amount);
            } else {
                quantity::resource_name(name, &amount);
            }
        }
    }
}

/// Smallest, default request, default and largest must be in that order.
fn limit_values(limit: &At<'_>) {
    let is_pod = limit.get("type").is("Pod");
    let mut all: Vec<&str> = LIMIT_FIELDS
        .iter()
        .filter(|field| !(is_pod && field.starts_with("default")))
        .flat_map(|field| limit.get(field).entries())
        .map(|(name, _)| name)
        .collect();
    all.sort_unstable();
    all.dedup();
    for name in all {
        let of = |field: &'static str| limit.get(field).key(name);
        let exceeds = |a: &At<'_>, b: &At<'_>| {
            a.is_set() && b.is_set() && quantity::amount(a) > quantity::amount(b)
        };
        let (min, max, ratio) = (of("min"), of("max"), of("maxLimitRequestRatio"));
        let (request, default) = (of("defaultRequest"), of("default"));
        if exceeds(&min, &max) {
            min.invalid(&format!(
                "min value {} is greater than max value {}",
                min.str(),
                max.str()
            ));
        }
        for (low, high, shown, words) in [
            (&min, &request, &request, ("min value", "default request value")),
            (&request, &max, &request, ("default request value", "max value")),
            (&request, &default, &request, ("default request value", "default limit value")),
        ] {
            if !is_pod && exceeds(low, high) {
                shown.invalid(&format!(
                    "{} {} is greater than {} {}",
                    words.0,
                    low.str(),
                    words.1,
                    high.str()
                ));
            }
        }
        if !is_pod && exceeds(&min, &default) {
            let detail =
                format!("min value {} is greater than default value {}", min.str(), default.str());
            default.invalid_as(min.str(), &detail);
        }
        if !is_pod && exceeds(&default, &max) {
            let detail =
                format!("default value {} is greater than max value {}", default.str(), max.str());
            default.invalid_as(max.str(), &detail);
        }
        limit_ratio(&ratio, &min, &max);
    }
}

fn limit_ratio(ratio: &At<'_>, min: &At<'_>, max: &At<'_>) {
    if !ratio.is_set() {
        return;
    }
    let milli = |at: &At<'_>| quantity::amount(at).milli() as f64;
    if milli(ratio) < 1000.0 {
        ratio.invalid(&format!("ratio {} is less than 1", ratio.str()));
    }
    if min.is_set() && max.is_set() {
        let limit = milli(max) / milli(min);
        if milli(ratio) / 1000.0 > limit {
            ratio.invalid(&format!("ratio {} is greater than max/min = {limit:.6}", ratio.str()));
        }
    }
}

const NO_QUOTA: &str = "must be a standard resource for quota";

fn quota_amounts(at: &At<'_>) {
    for (name, amount) in at.entries() {
        quantity::resource_name(name, &amount);
        if !name.contains('/') && !quantity::is_standard_quota(name) {
            amount.invalid_as(name, NO_QUOTA);
        }
        quantity::value(name, &amount);
    }
}

pub(crate) fn resource_quota(at: &At<'_>) {
    let spec = at.get("spec");
    quota_amounts(&spec.get("hard"));
    let scopes = spec.get("scopes");
    let hard: Vec<&str> = spec.get("hard").entries().map(|(name, _)| name).collect();
    for scope in scopes.strings() {
        if !SCOPES.contains(&scope) {
            scopes.invalid("unsupported scope");
        }
        for _ in hard.iter().filter(|name| !fits_scope(scope, name)) {
            scopes.invalid("unsupported scope applied to resource");
        }
    }
    conflicting(&scopes, &scopes.strings());
    let terms = spec.get("scopeSelector.matchExpressions");
    let terms = terms.called(spec.child_path("scopeSelector").child("matchExpressions"));
    let mut named = vec![];
    for term in terms.items() {
        let term = term.called(terms.path.clone());
        scope_term(&term, &hard, &spec);
        named.push(term.get("scopeName").str());
    }
    conflicting(&scopes.called(terms.path), &named);
}

const SCOPES: &[&str] = &[
    "Terminating",
    "NotTerminating",
    "BestEffort",
    "NotBestEffort",
    "PriorityClass",
    "VolumeAttributesClass",
    "CrossNamespacePodAffinity",
];

fn fits_scope(scope: &str, name: &str) -> bool {
    if !quantity::is_standard_quota(name) {
        return true;
    }
    let compute = name == "cpu"
        || name == "memory"
        || ["limits.", "requests."]
            .iter()
            .any(|part| matches!(name.strip_prefix(part), Some("cpu" | "memory")));
    match scope {
        "BestEffort" => name == "pods",
        "VolumeAttributesClass" => name == "persistentvolumeclaims" || name == "requests.storage",
        _ if SCOPES.contains(&scope) => name == "pods" || compute,
        _ => true,
    }
}

fn conflicting(at: &At<'_>, scopes: &[&str]) {
    for pair in [["BestEffort", "NotBestEffort"], ["Terminating", "NotTerminating"]] {
        if pair.iter().all(|scope| scopes.contains(scope)) {
            at.invalid("conflicting scopes");
        }
    }
}

fn scope_term(term: &At<'_>, hard: &[&str], spec: &At<'_>) {
    let (scope, operator, values) =
        (term.get("scopeName"), term.get("operator"), term.get("values"));
    if !SCOPES.contains(&scope.str()) {
        scope.invalid_text("unsupported scope");
    }
    for _ in hard.iter().filter(|name| !fits_scope(scope.str(), name)) {
        let selector = spec.get("scopeSelector");
        term.invalid_as(selector.value, "unsupported scope applied to resource");
    }
    let wants_exists = SCOPES[..4].contains(&scope.str()) || scope.is("CrossNamespacePodAffinity");
    if wants_exists && !operator.is("Exists") {
        operator.invalid_text("must be 'Exists' when scope is any of ResourceQuotaScopeTerminating, ResourceQuotaScopeNotTerminating, ResourceQuotaScopeBestEffort, ResourceQuotaScopeNotBestEffort or ResourceQuotaScopeCrossNamespacePodAffinity");
    }
    match operator.str() {
        "In" | "NotIn" if values.is_empty() => values.required(
            "must be at least one value when `operator` is 'In' or 'NotIn' for scope selector",
        ),
        "Exists" | "DoesNotExist" if !values.is_empty() => values.invalid(
            "must be no value when `operator` is 'Exist' or 'DoesNotExist' for scope selector",
        ),
        "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
        _ => operator.invalid_text("not a valid selector operator"),
    }
}

pub(crate) fn resource_quota_update(at: &At<'_>, old: &At<'_>) {
    resource_quota(at);
    let scopes = at.get("spec.scopes");
    let sorted = |at: &At<'_>| {
        let mut all: Vec<String> = at.strings().iter().map(|text| (*text).to_owned()).collect();
        all.sort_unstable();
        all.dedup();
        all
    };
    if sorted(&scopes) != sorted(&old.get("spec.scopes")) {
        scopes.invalid("field is immutable");
    }
}

pub(crate) fn resource_quota_status(at: &At<'_>, _old: &At<'_>) {
    quota_amounts(&at.get("status.hard"));
    quota_amounts(&at.get("status.used"));
}

fn node_notes(at: &At<'_>) {
    let notes = at.get("metadata.annotations");
    pod::json_annotation(&notes, "scheduler.alpha.kubernetes.io/taints");
    let avoided = notes.called(notes.named("AvoidPods").path);
    pod::json_annotation(&avoided, "scheduler.alpha.kubernetes.io/preferAvoidPods");
}

pub(crate) fn node(at: &At<'_>) {
    node_notes(at);
    taints(at);
    node_amounts(at);
    status::declared_features(at);
    let cidrs = at.get("spec.podCIDRs");
    cidrs.items().for_each(|cidr| ip::legacy_cidr(&cidr));
    let families: Vec<bool> = cidrs
        .strings()
        .iter()
        .filter_map(|text| ip::cidr_of(text))
        .map(|net| net.addr().is_ipv6())
        .collect();
    if cidrs.len() > 1 && families.len() == cidrs.len() && !ip::is_dual_stack(families.into_iter())
    {
        cidrs.invalid("may specify no more than one CIDR for each IP family");
    }
}

fn node_amounts(at: &At<'_>) {
    for field in ["capacity", "allocatable"] {
        for (name, amount) in at.get("status").get(field).entries() {
            let path = at.child_path("status").child(field).named(name);
            quantity::value(name, &amount.called(path));
        }
    }
}

fn taints(at: &At<'_>) {
    // Upstream has them below `metadata`.
    let list = at.get("spec.taints").called(at.child_path("metadata.taints"));
    let mut seen = HashSet::new();
    for taint in list.items() {
        let (key, value, effect) = (taint.get("key"), taint.get("value"), taint.get("effect"));
        key.name(names::qualified_name);
        let wrong = names::label_value(value.str());
        if !wrong.is_empty() {
            value.invalid_text(&wrong.join(";"));
        }
        pod::taint_effect(&effect);
        if !seen.insert((key.str(), effect.str())) {
            let shown = internal::shown("Taint", taint.value);
            let detail = "taints must be unique by key and effect pair";
            taint.errors().duplicate_shown(&taint.path, &shown, detail);
        }
    }
}

pub(crate) fn node_update(at: &At<'_>, old: &At<'_>) {
    // Upstream looks at the node as at a new one first, and repeats some of it.
    node(at);
    node_status(at, old);
}

/// What an update of the status is checked for, the spec included. Upstream: `ValidateNodeUpdate`.
pub(crate) fn node_status(at: &At<'_>, old: &At<'_>) {
    node_notes(at);
    node_amounts(at);
    status::declared_features(at);
    let addresses = at.get("status.addresses");
    let mut seen = HashSet::new();
    for address in addresses.items() {
        if !seen.insert(address.value) {
            let shown = format!(
                "{{\"Type\":{:?},\"Address\":{:?}}}",
                address.get("type").str(),
                address.get("address").str()
            );
            address.errors().duplicate_shown(&address.path, &shown, "");
        }
    }
    let (cidrs, had) = (at.get("spec.podCIDRs"), old.get("spec.podCIDRs"));
    // Upstream says it for each range that differs.
    let differing = match had.len() {
        0 => 0,
        count if count != cidrs.len() => 1,
        _ => had.items().zip(cidrs.items()).filter(|(had, now)| had.value != now.value).count(),
    };
    for _ in 0..differing {
        cidrs.forbidden("node updates may not change podCIDR except from \"\" to valid");
    }
    let (provider, had) = (at.get("spec.providerID"), old.get("spec.providerID"));
    if !had.is_empty() && provider.value != had.value {
        provider.forbidden("node updates may not change providerID except from \"\" to valid");
    }
    taints(at);
    let external = at.get("spec.externalID");
    if external.value != old.get("spec.externalID").value {
        external.forbidden("may not be updated");
    }
}

pub(crate) fn namespace(at: &At<'_>) {
    let list = at.get("spec.finalizers");
    for finalizer in list.items() {
        namespace_finalizer(&finalizer.called(list.path.clone()));
    }
}

fn namespace_finalizer(at: &At<'_>) {
    at.name(names::qualified_name);
    let is_standard = ["kubernetes", "orphan", "foregroundDeletion"].contains(&at.str());
    if !at.str().contains('/') && !is_standard {
        at.invalid("name is neither a standard finalizer name nor is it fully qualified");
    }
}

pub(crate) fn namespace_finalize(at: &At<'_>, _old: &At<'_>) {
    at.get("spec.finalizers").items().for_each(|finalizer| namespace_finalizer(&finalizer));
}

pub(crate) fn unchecked(_at: &At<'_>, _old: &At<'_>) {}

pub(crate) fn endpoints(at: &At<'_>) {
    for subset in at.get("subsets").items() {
        let lists = ["addresses", "notReadyAddresses"].map(|field| subset.get(field));
        if lists.iter().all(At::is_empty) {
            subset.required("must specify `addresses` or `notReadyAddresses`");
        }
        for address in lists.iter().flat_map(At::items) {
            ip::legacy(&address.get("ip"));
            address.get("hostname").any_name(names::dns1123_label);
            if address.has("nodeName") {
                address.get("nodeName").name(names::dns1123_subdomain);
            }
            ip::endpoint(&address.get("ip"));
        }
        let ports = subset.get("ports");
        for port in ports.items() {
            let name = port.get("name");
            if ports.len() > 1 && name.is_empty() {
                name.required("");
            }
            name.any_name(names::dns1123_label);
            port.get("port").port();
            container::protocol(&port.get("protocol"));
            if port.has("appProtocol") {
                port.get("appProtocol").name(names::qualified_name);
            }
        }
    }
}

pub(crate) fn endpoints_update(at: &At<'_>, old: &At<'_>) {
    if at.get("subsets").value != old.get("subsets").value {
        endpoints(at);
    }
}

/// What events of both forms must be. The stored form cannot tell which one was asked for: rules
/// of the newer form alone apply where its time is set.
pub(crate) fn event(at: &At<'_>) {
    old_event(at, "reportingComponent");
}

/// An event that came in the newer form.
pub(crate) fn new_event(at: &At<'_>) {
    const UNSET: &str = "needs to be unset";
    old_event(at, "reportingController");
    let metadata = at.get("metadata");
    if metadata.get("name").is_empty() && metadata.get("generateName").is_empty() {
        metadata.get("name").required("name or generateName is required");
    }
    let kind = at.get("type");
    at.get("eventTime").need();
    if !matches!(kind.str(), "Normal" | "Warning") {
        kind.invalid_as("", &format!("has invalid value: {}", kind.str()));
    }
    for field in ["firstTimestamp", "lastTimestamp"] {
        if at.has(field) {
            at.get(field).invalid_as("", UNSET);
        }
    }
    if at.get("count").int() != 0 {
        at.get("count").invalid_as("", UNSET);
    }
    if !at.get("source.component").is_empty() || !at.get("source.host").is_empty() {
        at.get("source").invalid_as("", UNSET);
    }
}

/// What both forms demand; the newer one has another name for who reports.
fn old_event(at: &At<'_>, reporter: &'static str) {
    let about = at.get("involvedObject.namespace");
    let namespace = at.get("metadata.namespace").str();
    let is_new = at.has("eventTime");
    let matches = match (about.str(), is_new) {
        ("", false) => ["", "default"].contains(&namespace),
        ("", true) => ["default", "kube-system"].contains(&namespace),
        (other, false) => other == namespace,
        (_, true) => true,
    };
    if !matches {
        about.invalid_text("does not match event.namespace");
    }
    if !is_new {
        return;
    }
    let reporting = at.get("reportingComponent").called(at.child_path(reporter));
    if reporting.is_empty() {
        reporting.required("");
    }
    reporting.name(names::qualified_name);
    for (field, label, limit, needed) in [
        ("reportingInstance", "reportingInstance", 128, true),
        ("action", "action", 128, true),
        ("reason", "reason", 128, true),
        ("message", "message", 1024, false),
    ] {
        let place = at.get(field).called(at.child_path(label));
        if needed {
            place.need();
        }
        if place.len() > limit {
            place.invalid_as("", &format!("can have at most {limit} characters"));
        }
    }
}
