//! What runs pods from templates: the apps group and ReplicationControllers.
//! Upstream: `pkg/apis/apps/validation`.

use std::collections::BTreeSet;

use machinery::names;
use serde_json::Value;

use super::at::{At, judge};
use super::{internal, pod, storage};

/// A whole number, or a percentage.
pub(crate) fn int_or_percent(at: &At<'_>) {
    match at.value {
        Value::String(_) => at.name(names::percent),
        _ => at.not_negative(),
    }
}

pub(crate) fn at_most_100_percent(at: &At<'_>) {
    let digits = at.str().strip_suffix('%').and_then(|digits| digits.parse::<u64>().ok());
    if digits.is_some_and(|percent| percent > 100) {
        at.invalid("must not be greater than 100%");
    }
}

fn count(at: &At<'_>) -> i64 {
    at.number()
        .or_else(|| at.str().strip_suffix('%').unwrap_or(at.str()).parse().ok())
        .unwrap_or_default()
}

/// A selector that must be there and select something. Says whether it can be used.
fn own_selector(spec: &At<'_>, kind: &str, detail: &str) -> bool {
    let at = spec.get("selector");
    if is_absent(&at) {
        at.required("");
        return true;
    }
    at.selector();
    not_empty(&at, kind);
    let is_usable = parsed(&at).is_some();
    if !is_usable {
        at.invalid(detail);
    }
    is_usable
}

/// The structs of these kinds have no room for an absent selector; one that was sent empty has an
/// empty `matchLabels` (see `api::kinds`).
fn is_absent(at: &At<'_>) -> bool {
    at.value.as_object().is_none_or(|fields| fields.is_empty())
}

fn not_empty(at: &At<'_>, kind: &str) {
    if at.is_empty_selector() {
        let nothing = serde_json::json!({});
        at.invalid_as(nothing, &format!("empty selector is invalid for {kind}"));
    }
}

/// `None`: there is something wrong with it.
pub(crate) fn parsed(at: &At<'_>) -> Option<machinery::selector::Selector> {
    if !judge(at.value, |at| at.selector()).is_empty() {
        return None;
    }
    let selector: machinery::LabelSelector = serde_json::from_value(at.value.clone()).ok()?;
    machinery::selector::Selector::from_api(Some(&selector)).ok()
}

/// The selector must match the template's labels. One that is not there selects nothing, an empty
/// one everything; one that cannot be read has been complained about.
pub(crate) fn selects_template(selector: Option<&At<'_>>, template: &At<'_>) {
    let labels = template.get("metadata.labels");
    let matches = selector.is_some_and(|selector| {
        parsed(selector).is_none_or(|parsed| {
            let map = serde_json::from_value(labels.value.clone()).unwrap_or_default();
            parsed.matches(Some(&map))
        })
    });
    if !matches {
        labels.invalid("`selector` does not match template `labels`");
    }
}

fn always_restarts(template: &At<'_>, kind: &str) {
    let policy = template.get("spec.restartPolicy");
    // A template without a spec is told of its containers.
    if !policy.is("Always") {
        policy.one_of(&["Always"]);
    }
    let deadline = template.get("spec.activeDeadlineSeconds");
    if deadline.is_set() {
        deadline.forbidden(&format!("activeDeadlineSeconds in {kind} is not Supported"));
    }
}

pub(crate) fn deployment(at: &At<'_>) {
    let spec = at.get("spec");
    spec.get("replicas").not_negative();
    replica_template(&spec);
    let strategy = spec.get("strategy");
    let rolling = strategy.get("rollingUpdate");
    match strategy.get("type").str() {
        "Recreate" => {
            if rolling.is_set() {
                rolling.forbidden("may not be specified when strategy `type` is 'Recreate'");
            }
        }
        "RollingUpdate" if !rolling.is_set() => {
            rolling.required("this should be defaulted and never be nil");
        }
        "RollingUpdate" => {
            let (unavailable, surge) = (rolling.get("maxUnavailable"), rolling.get("maxSurge"));
            int_or_percent(&unavailable);
            int_or_percent(&surge);
            if count(&unavailable) == 0 && count(&surge) == 0 {
                unavailable.invalid("may not be 0 when `maxSurge` is 0");
            }
            at_most_100_percent(&unavailable);
        }
        _ => {
            let shown = internal::shown("DeploymentStrategy", strategy.value);
            internal::unsupported(&strategy, &shown, &["Recreate", "RollingUpdate"]);
        }
    }
    spec.get("minReadySeconds").not_negative();
    spec.get("revisionHistoryLimit").not_negative();
    let deadline = spec.get("progressDeadlineSeconds");
    deadline.not_negative();
    if deadline.number().is_some_and(|seconds| seconds <= spec.get("minReadySeconds").int()) {
        deadline.invalid("must be greater than minReadySeconds");
    }
}

fn replica_template(spec: &At<'_>) {
    if own_selector(spec, "deployment", "invalid label selector") {
        let (selector, template) = (spec.get("selector"), spec.get("template"));
        selects_template((!is_absent(&selector)).then_some(&selector), &template);
        pod::template(&template);
        always_restarts(&template, "ReplicaSet");
    }
}

pub(crate) fn replica_set(at: &At<'_>) {
    let spec = at.get("spec");
    spec.get("replicas").not_negative();
    spec.get("minReadySeconds").not_negative();
    replica_template(&spec);
}

/// The spec's rules, and a selector that stays.
pub(crate) fn deployment_update(at: &At<'_>, old: &At<'_>) {
    deployment(at);
    selector_unchanged(at, old);
}

pub(crate) fn replica_set_update(at: &At<'_>, old: &At<'_>) {
    replica_set(at);
    selector_unchanged(at, old);
}

pub(crate) fn daemon_set(at: &At<'_>) {
    let spec = at.get("spec");
    let (selector, template) = (spec.get("selector"), spec.get("template"));
    selector.selector();
    let is_there = !is_absent(&selector);
    selects_template(is_there.then_some(&selector), &template);
    if is_there {
        not_empty(&selector, "daemonset");
    }
    pod::template(&template);
    always_restarts(&template, "DaemonSet");
    spec.get("minReadySeconds").not_negative();
    let strategy = spec.get("updateStrategy");
    let rolling = strategy.get("rollingUpdate");
    match strategy.get("type").str() {
        "OnDelete" => {}
        "RollingUpdate" if !rolling.is_set() => rolling.required(""),
        "RollingUpdate" => daemon_rolling(&rolling),
        _ => {
            let shown = internal::shown("DaemonSetUpdateStrategy", strategy.value);
            internal::unsupported(&strategy, &shown, &["RollingUpdate", "OnDelete"]);
        }
    }
    spec.get("revisionHistoryLimit").not_negative();
}

fn daemon_rolling(at: &At<'_>) {
    let (unavailable, surge) = (at.get("maxUnavailable"), at.get("maxSurge"));
    for place in [&unavailable, &surge] {
        int_or_percent(place);
        at_most_100_percent(place);
    }
    match (count(&unavailable) != 0, count(&surge) != 0) {
        (true, true) => surge.invalid("may not be set when maxUnavailable is non-zero"),
        (false, false) => unavailable.required("cannot be 0 when maxSurge is 0"),
        _ => {}
    }
}

pub(crate) fn daemon_set_update(at: &At<'_>, old: &At<'_>) {
    selector_unchanged(at, old);
    daemon_set(at);
}

pub(crate) fn stateful_set(at: &At<'_>) {
    stateful_spec(&at.get("spec"), true);
}

fn stateful_spec(spec: &At<'_>, is_new: bool) {
    let policy = spec.get("podManagementPolicy");
    if policy.need() && !["OrderedReady", "Parallel"].contains(&policy.str()) {
        policy.invalid("must be 'OrderedReady' or 'Parallel'");
    }
    stateful_strategy(&spec.get("updateStrategy"));
    let retention = spec.get("persistentVolumeClaimRetentionPolicy");
    for field in ["whenDeleted", "whenScaled"] {
        if retention.is_set() {
            retention.get(field).one_of(&["Retain", "Delete"]);
        }
    }
    if is_new {
        for claim in spec.get("volumeClaimTemplates").items() {
            storage::claim_spec(&claim.get("spec"));
        }
    }
    spec.get("replicas").not_negative();
    spec.get("minReadySeconds").not_negative();
    spec.get("ordinals.start").not_negative();
    if is_new {
        spec.get("serviceName").any_name(names::dns1123_label);
    }
    if own_selector(spec, "statefulset", "") {
        stateful_template(spec);
    }
    always_restarts(&spec.get("template"), "StatefulSet");
}

fn stateful_strategy(at: &At<'_>) {
    let rolling = at.get("rollingUpdate");
    match at.get("type").str() {
        "" => at.required(""),
        "OnDelete" => {
            if rolling.is_set() {
                let shown = internal::shown("RollingUpdateStatefulSetStrategy", rolling.value);
                let detail = "only allowed for updateStrategy 'RollingUpdate'";
                at.errors().invalid_shown(&rolling.path, Some(&shown), detail);
            }
        }
        "RollingUpdate" => {
            rolling.get("partition").not_negative();
            let unavailable = rolling.get("maxUnavailable");
            if unavailable.is_set() {
                int_or_percent(&unavailable);
                if count(&unavailable) == 0 {
                    unavailable.invalid("cannot be 0");
                }
                at_most_100_percent(&unavailable);
            }
        }
        _ => {
            let shown = internal::shown("StatefulSetUpdateStrategy", at.value);
            let detail = "must be 'RollingUpdate' or 'OnDelete'";
            at.errors().invalid_shown(&at.path, Some(&shown), detail);
        }
    }
}

/// The template as its pods will have it: with a volume for every claim.
fn stateful_template(spec: &At<'_>) {
    let template = spec.get("template");
    let selector = spec.get("selector");
    selects_template((!is_absent(&selector)).then_some(&selector), &template);
    let claims: BTreeSet<&str> = spec
        .get("volumeClaimTemplates")
        .items()
        .map(|claim| claim.get("metadata.name").str())
        .collect();
    let mut tree = template.value.clone();
    if let Some(Value::Object(inner)) = tree.get_mut("spec") {
        inner.remove("hostname");
        inner.remove("subdomain");
        if !claims.is_empty() {
            let own = inner.remove("volumes");
            let own = own.as_ref().and_then(Value::as_array).cloned().unwrap_or_default();
            let claimed = claims.iter().map(
                |name| serde_json::json!({"name": name, "persistentVolumeClaim": {"claimName": name}}),
            );
            let kept = own.into_iter().filter(|volume| {
                !volume["name"].as_str().is_some_and(|name| claims.contains(name))
            });
            inner.insert("volumes".into(), claimed.chain(kept).collect());
        }
    }
    pod::template(&template.with(&tree));
}

pub(crate) fn stateful_set_update(at: &At<'_>, old: &At<'_>) {
    let (spec, before) = (at.get("spec"), old.get("spec"));
    stateful_spec(&spec, false);
    const MUTABLE: &[&str] = &[
        "replicas",
        "template",
        "updateStrategy",
        "minReadySeconds",
        "ordinals",
        "revisionHistoryLimit",
        "persistentVolumeClaimRetentionPolicy",
    ];
    let fixed = |at: &At<'_>| {
        let mut tree = at.value.clone();
        if let Value::Object(fields) = &mut tree {
            fields.retain(|name, _| !MUTABLE.contains(&name.as_str()));
        }
        tree
    };
    if fixed(&spec) != fixed(&before) {
        spec.forbidden("updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', 'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds' are forbidden");
    }
}

pub(crate) fn controller_revision(at: &At<'_>) {
    at.get("revision").not_negative();
    let data = at.get("data");
    if !data.is_set() {
        data.required("data is mandatory");
    } else if !data.value.is_object() {
        data.required("data must be a valid JSON object");
    }
}

pub(crate) fn controller_revision_update(at: &At<'_>, old: &At<'_>) {
    at.get("revision").not_negative();
    at.get("data").unchanged(&old.get("data"));
}

pub(crate) fn replication_controller(at: &At<'_>) {
    let spec = at.get("spec");
    spec.get("minReadySeconds").not_negative();
    spec.get("selector").need();
    spec.get("replicas").not_negative();
    let template = spec.get("template");
    if !template.is_set() {
        return template.required("");
    }
    let (selector, labels) = (spec.get("selector"), template.get("metadata.labels"));
    let matches = selector.entries().all(|(key, value)| labels.key(key).value == value.value);
    if !selector.is_empty() && !matches {
        labels.invalid("`selector` does not match template `labels`");
    }
    pod::template(&template);
    always_restarts(&template, "ReplicationController");
}

pub(crate) fn pod_template(at: &At<'_>) {
    pod::template(&at.get("template"));
}

/// What the counts of a kind's status must be.
struct Counts {
    kind: &'static str,
    not_negative: &'static [&'static str],
    /// None above `replicas`.
    parts: &'static [&'static str],
    /// What the text about ready and available replicas calls the former.
    ready: &'static str,
}

const COUNTS: &[Counts] = &[
    Counts {
        kind: "DaemonSet",
        not_negative: &[
            "currentNumberScheduled",
            "numberMisscheduled",
            "desiredNumberScheduled",
            "numberReady",
            "observedGeneration",
            "updatedNumberScheduled",
            "numberAvailable",
            "numberUnavailable",
            "collisionCount",
        ],
        parts: &[],
        ready: "",
    },
    Counts {
        kind: "Deployment",
        not_negative: &[
            "observedGeneration",
            "replicas",
            "updatedReplicas",
            "readyReplicas",
            "availableReplicas",
            "unavailableReplicas",
            "terminatingReplicas",
            "collisionCount",
        ],
        parts: &["updatedReplicas", "readyReplicas", "availableReplicas"],
        ready: "readyReplicas",
    },
    Counts {
        kind: "StatefulSet",
        not_negative: &[
            "replicas",
            "readyReplicas",
            "currentReplicas",
            "updatedReplicas",
            "availableReplicas",
            "observedGeneration",
            "collisionCount",
        ],
        parts: &["readyReplicas", "currentReplicas", "updatedReplicas", "availableReplicas"],
        ready: "status.readyReplicas",
    },
    // ReplicaSets and ReplicationControllers.
    Counts {
        kind: "",
        not_negative: &[
            "replicas",
            "fullyLabeledReplicas",
            "readyReplicas",
            "availableReplicas",
            "observedGeneration",
            "terminatingReplicas",
        ],
        parts: &["fullyLabeledReplicas", "readyReplicas", "availableReplicas"],
        ready: "readyReplicas",
    },
];

/// A selector that is missing and one that is empty are the same tree; the first is what people send.
fn selector_unchanged(at: &At<'_>, old: &At<'_>) {
    let (now, was) = (at.get("spec.selector"), old.get("spec.selector"));
    if now.value != was.value && now.is_empty() {
        now.invalid_as((), "field is immutable");
    } else {
        now.unchanged(&was);
    }
}

/// Counts of a status: none negative, none above the number of replicas.
pub(crate) fn counts(at: &At<'_>, old: &At<'_>) {
    let status = at.get("status");
    let of_kind = |row: &&Counts| row.kind.is_empty() || at.get("kind").is(row.kind);
    let Some(rules) = COUNTS.iter().find(of_kind) else { return };
    for field in rules.not_negative {
        status.get(field).not_negative();
    }
    let all = status.get("replicas").int();
    for field in rules.parts {
        if status.get(field).int() > all {
            let count = status.get(field);
            count.invalid_as(count.int(), "cannot be greater than status.replicas");
        }
    }
    let available = status.get("availableReplicas");
    if !rules.ready.is_empty() && available.int() > status.get("readyReplicas").int() {
        available.invalid_as(available.int(), &format!("cannot be greater than {}", rules.ready));
    }
    let collisions = status.get("collisionCount");
    let had = old.get("status.collisionCount").number();
    let counts_them = rules.not_negative.contains(&"collisionCount");
    if counts_them && had.is_some_and(|had| collisions.number().is_none_or(|now| now < had)) {
        collisions.invalid_as(collisions.int(), "cannot be decremented");
    }
}
