//! Access, budgets, autoscaling, priorities: small kinds of many groups.
//! Upstream: `pkg/apis/{rbac,policy,autoscaling,scheduling,node,coordination}/validation`.

use std::collections::HashSet;

use machinery::names;
use release::features::{self, Feature};

use super::at::At;
use super::{internal, pod, quantity, workloads};

const RBAC: &str = "rbac.authorization.k8s.io";

pub(super) fn role(at: &At<'_>) {
    rules(at, true);
}

fn rules(at: &At<'_>, is_namespaced: bool) {
    for rule in at.get("rules").items() {
        if rule.get("verbs").is_empty() {
            rule.get("verbs").required("verbs must contain at least one value");
        }
        let urls = rule.get("nonResourceURLs");
        if urls.is_empty() {
            if rule.get("apiGroups").is_empty() {
                rule.get("apiGroups").required("resource rules must supply at least one api group");
            }
            if rule.get("resources").is_empty() {
                rule.get("resources").required("resource rules must supply at least one resource");
            }
            continue;
        }
        if is_namespaced {
            urls.invalid("namespaced rules cannot apply to non-resource URLs");
        }
        if ["apiGroups", "resources", "resourceNames"].iter().any(|f| !rule.get(f).is_empty()) {
            urls.invalid("rules cannot apply to both regular resources and non-resource URLs");
        }
    }
}

pub(super) fn cluster_role(at: &At<'_>) {
    rules(at, false);
    if !at.has("aggregationRule") {
        return;
    }
    let selectors = at.get("aggregationRule.clusterRoleSelectors");
    if selectors.is_empty() {
        selectors
            .required("at least one clusterRoleSelector required if aggregationRule is non-nil");
    }
    for selector in selectors.items() {
        let known = selector.errors().0.len();
        selector.selector();
        if selector.errors().0.len() > known {
            selector.invalid_as(serde_json::Value::Null, "invalid label selector.");
        }
    }
}

pub(super) fn role_binding(at: &At<'_>) {
    binding(at, &["Role", "ClusterRole"], true);
}

pub(super) fn cluster_role_binding(at: &At<'_>) {
    binding(at, &["ClusterRole"], false);
}

fn binding(at: &At<'_>, kinds: &[&str], is_namespaced: bool) {
    let role = at.get("roleRef");
    role.get("apiGroup").one_of(&[RBAC]);
    role.get("kind").one_of(kinds);
    role.get("name").need_name(names::path_segment);
    for subject in at.get("subjects").items() {
        let (name, group) = (subject.get("name"), subject.get("apiGroup"));
        name.need();
        match subject.get("kind").str() {
            "ServiceAccount" => {
                name.any_name(names::dns1123_subdomain);
                group.one_of(&[""]);
                if !is_namespaced && subject.get("namespace").is_empty() {
                    subject.get("namespace").required("");
                }
            }
            "User" | "Group" => group.one_of(&[RBAC]),
            _ => subject.get("kind").unsupported(&["ServiceAccount", "User", "Group"]),
        }
    }
}

pub(super) fn role_binding_update(at: &At<'_>, old: &At<'_>) {
    role_binding(at);
    role_stays(at, old);
}

pub(super) fn cluster_role_binding_update(at: &At<'_>, old: &At<'_>) {
    cluster_role_binding(at);
    role_stays(at, old);
}

fn role_stays(at: &At<'_>, old: &At<'_>) {
    let role = at.get("roleRef");
    if role.value != old.get("roleRef").value {
        let shown = internal::shown("RoleRef", role.value);
        role.errors().invalid_shown(&role.path, Some(&shown), "cannot change roleRef");
    }
}

pub(super) fn disruption_budget(at: &At<'_>) {
    let spec = at.get("spec");
    if spec.has("minAvailable") && spec.has("maxUnavailable") {
        let shown = internal::shown("PodDisruptionBudgetSpec", spec.value);
        let detail = "minAvailable and maxUnavailable cannot be both set";
        spec.errors().invalid_shown(&spec.path, Some(&shown), detail);
    }
    for field in ["minAvailable", "maxUnavailable"] {
        if spec.has(field) {
            workloads::int_or_percent(&spec.get(field));
            workloads::at_most_100_percent(&spec.get(field));
        }
    }
    spec.get("selector").selector();
    spec.get("unhealthyPodEvictionPolicy").any_of(&["AlwaysAllow", "IfHealthyBudget"]);
}

/// Conditions that a kind has checked. Upstream: `metav1validation.ValidateConditions`.
pub(super) fn conditions(at: &At<'_>) {
    const REASON_FORM: &str = "a condition reason must start with alphabetic character, optionally followed by a string of alphanumeric characters or '_,:', and must end with an alphanumeric character or '_' (e.g. 'my_name',  or 'MY_NAME',  or 'MyName',  or 'ReasonA,ReasonB',  or 'ReasonA:ReasonB', regex used for validation is '[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?')";
    const REASON: usize = 1 << 10;
    const MESSAGE: usize = 32 << 10;
    let mut seen = HashSet::new();
    for one in at.items() {
        let kind = one.get("type");
        if !seen.insert(kind.str()) {
            kind.duplicate();
        }
        kind.name(names::qualified_name);
        one.get("status").one_of(&["False", "True", "Unknown"]);
        let generation = one.get("observedGeneration");
        if generation.int() < 0 {
            generation.invalid("must be greater than or equal to zero");
        }
        let time = one.get("lastTransitionTime");
        if !time.is_set() || time.str().starts_with("0001-01-01T00:00:00") {
            time.required("");
        }
        let reason = one.get("reason");
        if reason.need() && !is_condition_reason(reason.str()) {
            reason.invalid(REASON_FORM);
        }
        for (field, most) in [("reason", REASON), ("message", MESSAGE)] {
            if one.get(field).str().len() > most {
                one.get(field).too_long(most);
            }
        }
    }
}

fn is_condition_reason(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | ',' | ':');
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && text.chars().all(inner)
}

pub(super) fn disruption_budget_status(at: &At<'_>, _old: &At<'_>) {
    conditions(&at.get("status.conditions"));
    for field in ["disruptionsAllowed", "currentHealthy", "desiredHealthy", "expectedPods"] {
        at.get("status").get(field).not_negative();
    }
}

pub(super) fn autoscaler(at: &At<'_>) {
    autoscaler_from(at, i64::from(!features::enabled(Feature::HPAScaleToZero)));
}

/// What might scale to zero may go on to.
pub(super) fn autoscaler_update(at: &At<'_>, old: &At<'_>) {
    match old.get("spec.minReplicas").number() {
        Some(0) => autoscaler_from(at, 0),
        _ => autoscaler(at),
    }
}

fn autoscaler_from(at: &At<'_>, lowest: i64) {
    let spec = at.get("spec");
    let (least, most) = (spec.get("minReplicas"), spec.get("maxReplicas"));
    least.at_least(lowest);
    // Upstream reports what is required behind the rest of a field.
    if least.is_set() && most.int() < least.int() {
        most.invalid_as(most.int(), "must be greater than or equal to `minReplicas`");
    }
    match most.int() {
        0 => most.required("must be set and greater than 0"),
        _ => most.at_least(1),
    }
    object_reference(&spec.get("scaleTargetRef"), false);
    let metrics = spec.get("metrics");
    for metric in metrics.items() {
        metric_spec(&metric);
    }
    let is_outside = |metric: At<'_>| matches!(metric.get("type").str(), "Object" | "External");
    if least.number() == Some(0) && !metrics.items().any(is_outside) {
        metrics.forbidden(
            "must specify at least one Object or External metric to support scaling to zero replicas",
        );
    }
    let behavior = spec.get("behavior");
    for side in ["scaleUp", "scaleDown"] {
        if behavior.has(side) {
            scaling_rules(&behavior.get(side));
        }
    }
}

pub(super) fn autoscaler_status(at: &At<'_>, _old: &At<'_>) {
    at.get("status.currentReplicas").not_negative();
    at.get("status.desiredReplicas").not_negative();
}

fn object_reference(at: &At<'_>, may_be_core: bool) {
    at.get("kind").need_name(names::path_segment);
    at.get("name").need_name(names::path_segment);
    let version = at.get("apiVersion");
    match version.str().matches('/').count() {
        0 if !may_be_core => version.invalid_text("apiVersion must specify API group"),
        0 | 1 => {}
        _ => {
            version.invalid(&format!("unexpected GroupVersion string: {}", version.str()));
        }
    }
}

const SOURCES: &[(&str, &str)] = &[
    ("Object", "object"),
    ("External", "external"),
    ("Pods", "pods"),
    ("Resource", "resource"),
    ("ContainerResource", "containerResource"),
];

fn metric_spec(at: &At<'_>) {
    const KINDS: &[&str] = &["ContainerResource", "External", "Object", "Pods", "Resource"];
    let kind = at.get("type");
    if kind.is_empty() {
        kind.required("must specify a metric source type");
    }
    kind.one_of(KINDS);
    let present: Vec<&str> =
        SOURCES.iter().map(|(_, field)| *field).filter(|field| at.has(field)).collect();
    if let Some(first) = present.first() {
        metric_source(&at.get(first), first);
    }
    let expected = SOURCES.iter().find(|(name, _)| kind.is(name)).map(|(_, field)| *field);
    match expected {
        None => kind.one_of(KINDS),
        Some(field) if !at.has(field) => {
            at.get(field).required("must populate information for the given metric source");
        }
        Some(_) => {}
    }
    if present.len() != 1 {
        for field in present.into_iter().filter(|field| Some(*field) != expected) {
            at.get(field).forbidden("must populate the given metric source only");
        }
    }
}

fn metric_source(at: &At<'_>, field: &str) {
    let target = at.get("target");
    let [value, average, utilization] =
        ["value", "averageValue", "averageUtilization"].map(|field| target.get(field));
    match field {
        "object" => {
            object_reference(&at.get("describedObject"), true);
            metric_name(&at.get("metric.name"));
            metric_target(&target);
            if !value.is_set() && !average.is_set() {
                average.required("must set either a target value or averageValue");
            }
        }
        "external" => {
            metric_name(&at.get("metric.name"));
            metric_target(&target);
            if !value.is_set() && !average.is_set() {
                average.required("must set either a target value for metric or a per-pod target");
            }
            if value.is_set() && average.is_set() {
                value.forbidden("may not set both a target value for metric and a per-pod target");
            }
        }
        "pods" => {
            metric_name(&at.get("metric.name"));
            metric_target(&target);
            if !average.is_set() {
                average.required("must specify a positive target averageValue");
            }
        }
        _ => {
            let name = at.get("name");
            if name.is_empty() {
                name.required("must specify a resource name");
            }
            if field == "containerResource" {
                if !name.is_empty() {
                    quantity::container_resource_name(name.str(), &name);
                }
                let container = at.get("container");
                if container.is_empty() {
                    container.required("must specify a container");
                } else {
                    container.name(names::dns1123_label);
                }
            }
            metric_target(&target);
            if !utilization.is_set() && !average.is_set() {
                utilization.required("must set either a target raw value or a target utilization");
            }
            if utilization.is_set() && average.is_set() {
                average.forbidden("may not set both a target raw value and a target utilization");
            }
        }
    }
}

fn metric_name(at: &At<'_>) {
    if at.is_empty() {
        at.required("must specify a metric name");
    } else {
        at.name(names::path_segment);
    }
}

fn metric_target(at: &At<'_>) {
    let kind = at.get("type");
    if kind.is_empty() {
        kind.required("must specify a metric target type");
    }
    if !["Utilization", "Value", "AverageValue"].contains(&kind.str()) {
        kind.invalid_text("must be either Utilization, Value, or AverageValue");
    }
    for field in ["value", "averageValue"] {
        let place = at.get(field);
        if place.is_set() && quantity::amount(&place) <= Default::default() {
            place.invalid("must be positive");
        }
    }
    let utilization = at.get("averageUtilization");
    if utilization.number().is_some_and(|percent| percent < 1) {
        utilization.invalid("must be greater than 0");
    }
}

fn scaling_rules(at: &At<'_>) {
    let window = at.get("stabilizationWindowSeconds");
    if window.int() < 0 {
        window.invalid("must be greater than or equal to zero");
    }
    if window.int() > 3600 {
        window.invalid("must be less than or equal to 3600");
    }
    at.get("selectPolicy").any_of(&["Disabled", "Max", "Min"]);
    let policies = at.get("policies");
    if policies.is_empty() {
        policies.required("must specify at least one Policy");
    }
    for policy in policies.items() {
        policy.get("type").one_of(&["Percent", "Pods"]);
        for field in ["value", "periodSeconds"] {
            if policy.get(field).int() <= 0 {
                policy.get(field).invalid_as(policy.get(field).int(), quantity::NOT_POSITIVE);
            }
        }
        if policy.get("periodSeconds").int() > 1800 {
            policy.get("periodSeconds").invalid("must be less than or equal to 1800");
        }
    }
    if at.has("tolerance") {
        quantity::not_negative(&at.get("tolerance"));
    }
}

const SYSTEM_CLASSES: &[(&str, i64)] =
    &[("system-node-critical", 2_000_001_000), ("system-cluster-critical", 2_000_000_000)];

pub(super) fn priority_class(at: &At<'_>) {
    let (name, value) = (at.get("metadata.name"), at.get("value"));
    if name.str().starts_with("system-") {
        let known = SYSTEM_CLASSES.iter().find(|(known, _)| name.is(known));
        let why = match known {
            None => format!("{} is not a known system priority class", name.str()),
            Some((known, wanted)) if value.int() != *wanted => {
                format!("value of {known} PriorityClass must be {wanted}")
            }
            Some((known, _)) if at.get("globalDefault").bool() => {
                format!("globalDefault of {known} PriorityClass must be false")
            }
            Some(_) => String::new(),
        };
        if !why.is_empty() {
            name.forbidden(&format!("priority class names with 'system-' prefix are reserved for system use only. error: {why}"));
        }
    } else if value.int() > 1_000_000_000 {
        value.forbidden("maximum allowed value of a user defined priority is 1000000000");
    }
    pod::preemption_policy(&at.get("preemptionPolicy"));
}

pub(super) fn priority_class_update(at: &At<'_>, old: &At<'_>) {
    if at.get("value").int() != old.get("value").int() {
        at.get("value").forbidden("may not be changed in an update.");
    }
    at.get("preemptionPolicy").unchanged(&old.get("preemptionPolicy"));
}

pub(super) fn runtime_class(at: &At<'_>) {
    at.get("handler").need_name(names::dns1123_label);
    let fixed = at.get("overhead.podFixed").called(at.child_path("overhead"));
    pod::overhead(&fixed);
    let scheduling = at.get("scheduling");
    scheduling.get("nodeSelector").labels();
    let tolerations = scheduling.get("tolerations");
    pod::tolerations_of_old(&tolerations);
    let mut seen = HashSet::new();
    for one in tolerations.items() {
        let key = ["key", "operator", "value", "effect"].map(|field| one.get(field).str());
        if !seen.insert(key) {
            let shown = internal::shown("Toleration", one.value);
            one.errors().duplicate_shown(&one.path, &shown, "");
        }
    }
}

pub(super) fn runtime_class_update(at: &At<'_>, old: &At<'_>) {
    runtime_class(at);
    at.get("handler").unchanged(&old.get("handler"));
}

pub(super) fn lease(at: &At<'_>) {
    let spec = at.get("spec");
    let duration = spec.get("leaseDurationSeconds");
    if duration.number().is_some_and(|seconds| seconds <= 0) {
        duration.invalid("must be greater than 0");
    }
    spec.get("leaseTransitions").not_negative();
}
