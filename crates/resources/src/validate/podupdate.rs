//! What a pod may become. Upstream: `ValidatePodUpdate`, `ValidatePodEphemeralContainersUpdate`,
//! `ValidatePodResize`, `ValidatePodStatusUpdate`.

use std::collections::{HashMap, HashSet};

use api::restarts;
use k8s_openapi::api::core::v1::PodSpec;
use machinery::field::Path;
use serde_json::Value;

use super::at::At;
use super::{internal, pod};

const MUTABLE: &str = "`spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";

pub(crate) fn update(at: &At<'_>, old: &At<'_>) {
    pod::whole(at);
    mirror_stays(at, old);
    let (spec, before) = (at.get("spec"), old.get("spec"));
    for list in ["containers", "initContainers"] {
        let (new, was) = (spec.get(list), before.get(list));
        if new.len() != was.len() {
            return new.forbidden("pod updates may not add or remove containers");
        }
        for container in new.items() {
            container.get("image").need();
            super::container::untrimmed_image(&container);
        }
    }
    if !deadline(&spec, &before) {
        return;
    }
    tolerations(&spec, &before);
    gates(&spec, &before);
    if spec.value == before.value {
        return;
    }
    let wanted = munged(&spec, &before);
    if wanted != *before.value {
        let diff = internal::diff("PodSpec", before.value, &wanted);
        spec.forbidden(&format!("pod updates may not change fields other than {MUTABLE}\n{diff}"));
    }
}

/// Says whether to go on.
fn deadline(spec: &At<'_>, before: &At<'_>) -> bool {
    let (new, was) = (spec.get("activeDeadlineSeconds"), before.get("activeDeadlineSeconds"));
    match (new.number(), was.number()) {
        (None, None) => {}
        (None, Some(_)) => new.invalid("must not update from a positive integer to nil value"),
        (Some(seconds), _) if !(0..=i64::from(i32::MAX)).contains(&seconds) => {
            new.invalid("must be between 0 and 2147483647, inclusive");
            return false;
        }
        (Some(seconds), Some(before)) if before < seconds => {
            new.invalid("must be less than or equal to previous value");
            return false;
        }
        _ => {}
    }
    true
}

fn tolerations(spec: &At<'_>, before: &At<'_>) {
    let list = spec.get("tolerations");
    let timeless = |at: &At<'_>| {
        let mut tree = at.value.clone();
        if let Value::Object(fields) = &mut tree {
            fields.remove("tolerationSeconds");
        }
        tree
    };
    let new: HashSet<Value> = list.items().map(|at| timeless(&at)).collect();
    if before.get("tolerations").items().any(|old| !new.contains(&timeless(&old))) {
        list.forbidden("existing toleration can not be modified except its tolerationSeconds");
        return;
    }
    pod::tolerations(&list);
}

fn gates(spec: &At<'_>, before: &At<'_>) {
    let had: HashSet<&str> =
        before.get("schedulingGates").items().map(|gate| gate.get("name").str()).collect();
    for gate in spec.get("schedulingGates").items() {
        let name = gate.get("name");
        if !had.contains(name.str()) {
            let detail =
                format!("only deletion is allowed, but found new scheduling gate '{}'", name.str());
            name.forbidden(&detail);
        }
    }
}

/// The new spec with all that may change set back.
fn munged(spec: &At<'_>, before: &At<'_>) -> Value {
    let mut wanted = spec.value.clone();
    let was = before.value;
    for list in ["containers", "initContainers"] {
        let (Some(Value::Array(mine)), Some(Value::Array(theirs))) =
            (wanted.get_mut(list), was.get(list))
        else {
            continue;
        };
        for (mine, theirs) in mine.iter_mut().zip(theirs) {
            set(mine, "image", theirs.get("image"));
        }
    }
    for field in ["activeDeadlineSeconds", "schedulingGates", "tolerations"] {
        set(&mut wanted, field, was.get(field));
    }
    let grace = "terminationGracePeriodSeconds";
    if before.get(grace).int() < 0 && spec.get(grace).int() == 1 {
        set(&mut wanted, grace, was.get(grace));
    }
    if !before.get("schedulingGates").is_empty() {
        gated(spec, before, &mut wanted);
    }
    wanted
}

/// Gated pods may narrow where they run.
fn gated(spec: &At<'_>, before: &At<'_>, wanted: &mut Value) {
    let (new, was) = (spec.get("nodeSelector"), before.get("nodeSelector"));
    if new.value != was.value {
        if was.entries().any(|(key, value)| new.key(key).value != value.value) {
            new.invalid(
                "only additions to spec.nodeSelector are allowed (no mutations or deletions)",
            );
        }
        set(wanted, "nodeSelector", before.value.get("nodeSelector"));
    }
    const TERMS: &str = "requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms";
    let (new, was) = (spec.get("affinity.nodeAffinity"), before.get("affinity.nodeAffinity"));
    if new.value == was.value {
        return;
    }
    let (terms, had) = (new.get(TERMS), was.get(TERMS));
    if !had.is_empty() && had.len() != terms.len() {
        terms.invalid("no additions/deletions to non-empty NodeSelectorTerms list are allowed");
    } else {
        for (term, had) in terms.items().zip(had.items()) {
            let keeps = ["matchExpressions", "matchFields"].iter().all(|list| {
                let now: HashSet<&Value> = term.get(list).items().map(|at| at.value).collect();
                had.get(list).items().all(|one| now.contains(one.value))
            });
            if !keeps {
                term.invalid("only additions are allowed (no mutations or deletions)");
            }
        }
    }
    let mut affinity = spec.value.get("affinity").cloned().unwrap_or(Value::Null);
    if affinity.is_null() && was.is_set() {
        affinity = Value::Object(Default::default());
    }
    set(&mut affinity, "nodeAffinity", was.is_set().then_some(was.value));
    let is_empty = affinity.as_object().is_none_or(|fields| fields.is_empty());
    set(wanted, "affinity", Some(&affinity).filter(|_| !is_empty || before.has("affinity")));
}

fn set(tree: &mut Value, field: &str, value: Option<&Value>) {
    let Value::Object(fields) = tree else { return };
    match value {
        Some(value) => fields.insert(field.to_owned(), value.clone()),
        None => fields.remove(field),
    };
}

fn mirror_stays(at: &At<'_>, old: &At<'_>) {
    const MIRROR: &str = "kubernetes.io/config.mirror";
    let path = "metadata.annotations";
    let (new, was) = (at.get(path).key(MIRROR), old.get(path).key(MIRROR));
    if new.value != was.value {
        new.forbidden(match was.is_set() {
            true => "may not remove or update mirror pod annotation",
            false => "may not add mirror pod annotation",
        });
    }
}

pub(crate) fn ephemeral(at: &At<'_>, old: &At<'_>) {
    if old.get("metadata.annotations").key("kubernetes.io/config.mirror").is_set() {
        return at
            .called(Path::new(""))
            .forbidden("static pods do not support ephemeral containers");
    }
    pod::whole(at);
    let list = at.get("spec.ephemeralContainers");
    let named: HashMap<&str, At<'_>> =
        list.items().map(|one| (one.get("name").str(), one)).collect();
    for was in old.get("spec.ephemeralContainers").items() {
        let name = was.get("name").str();
        let Some(now) = named.get(name) else {
            list.forbidden(&format!("existing ephemeral containers {name:?} may not be removed\n"));
            continue;
        };
        if now.value != was.value {
            let diff = internal::diff("EphemeralContainer", was.value, now.value);
            list.forbidden(&format!(
                "existing ephemeral containers {name:?} may not be changed\n{diff}"
            ));
        }
    }
}

pub(crate) fn resize(at: &At<'_>, old: &At<'_>) {
    pod::whole(at);
    let (spec, before) = (at.get("spec"), old.get("spec"));
    let qos = |at: &At<'_>| {
        let spec = serde_json::from_value(at.get("spec").value.clone()).ok();
        api::qos::class(&spec.unwrap_or_default())
    };
    if qos(at) != qos(old) {
        let class = at.get("status.qosClass").str();
        spec.invalid_as(class, "Pod QOS Class may not change as a result of resizing");
    }
    if !keeps_containers(&spec, &before) {
        return;
    }
    for list in ["initContainers", "containers"] {
        for (new, was) in spec.get(list).items().zip(before.get(list).items()) {
            for part in ["limits", "requests"] {
                let (new, was) = (new.get("resources"), was.get("resources"));
                let removed =
                    was.get(part).entries().any(|(name, _)| !new.get(part).key(name).is_set());
                if removed {
                    new.get(part).forbidden(&format!("resource {part} cannot be removed"));
                }
            }
        }
    }
    let (whole, was) = (spec.get("resources"), before.get("resources"));
    if was.is_set() && !whole.is_set() {
        whole.forbidden("pod-level resources cannot be removed");
    }
    for part in ["requests", "limits"].into_iter().filter(|_| whole.is_set()) {
        let removed = was.get(part).entries().any(|(name, _)| !whole.get(part).key(name).is_set());
        if removed {
            whole.get(part).forbidden(&format!("pod-level resource {part} cannot be removed"));
        }
    }
    if without_compute(spec.value) != without_compute(before.value) {
        spec.forbidden("only cpu and memory resources are mutable");
    }
}

/// The rest of a resize's validation compares containers by their places.
fn keeps_containers(spec: &At<'_>, before: &At<'_>) -> bool {
    let mut keeps = true;
    for list in ["containers", "initContainers"] {
        let (new, was) = (spec.get(list), before.get(list));
        if new.len() != was.len() {
            new.forbidden(&format!("{list} may not be added or removed on resize"));
            keeps = false;
            continue;
        }
        for (new, was) in new.items().zip(was.items()) {
            if new.get("name").value != was.get("name").value {
                new.get("name")
                    .forbidden(&format!("{list} may not be renamed or reordered on resize"));
                keeps = false;
            }
        }
    }
    keeps
}

/// The spec without what a resize is about.
fn without_compute(spec: &Value) -> Value {
    let mut spec = spec.clone();
    if let Some(Value::Object(whole)) = spec.get_mut("resources") {
        for part in ["limits", "requests"] {
            if let Some(Value::Object(fields)) = whole.get_mut(part) {
                fields.retain(|name, _| name != "cpu" && name != "memory");
            }
        }
        whole.retain(|_, value| value.as_object().is_none_or(|map| !map.is_empty()));
        if whole.is_empty() {
            spec.as_object_mut().map(|fields| fields.remove("resources"));
        }
    }
    for list in ["initContainers", "containers"] {
        for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            for part in ["limits", "requests"] {
                let place = container.get_mut("resources").and_then(|all| all.get_mut(part));
                if let Some(Value::Object(fields)) = place {
                    fields.retain(|name, _| name != "cpu" && name != "memory");
                }
            }
            if let Some(Value::Object(fields)) = container.get_mut("resources") {
                fields.retain(|_, value| value.as_object().is_none_or(|map| !map.is_empty()));
            }
        }
    }
    spec
}

pub(crate) fn status(at: &At<'_>, old: &At<'_>) {
    mirror_stays(at, old);
    conditions_and_nominee(at, old);
    let status = at.get("status");
    let class = status.get("qosClass");
    let was = old.get("status.qosClass");
    if class.value != was.value {
        class.invalid_as(class.str(), "field is immutable");
    }
    ended_stay_ended(at, old);
    claim_statuses(&status.get("resourceClaimStatuses"), &at.get("spec.resourceClaims"));
    if status.has("extendedResourceClaimStatus") {
        extended_claim(&status.get("extendedResourceClaimStatus"), &at.get("spec"));
    }
    addresses(&status.get("podIPs"), &old.get("status.podIPs"), "PodIP");
    let hosts = status.get("hostIPs");
    if let Some(first) = hosts.items().next() {
        let first = first.get("ip");
        if !status.get("hostIP").is(first.str()) {
            first.invalid_text("must be equal to `hostIP`");
        }
    }
    addresses(&hosts, &old.get("status.hostIPs"), "HostIP");
}

/// Upstream: `validatePodConditions`, and the rules about the node that preemption chose.
fn conditions_and_nominee(at: &At<'_>, old: &At<'_>) {
    let status = at.get("status");
    for condition in status.get("conditions").items() {
        // Upstream's paths have the names of internal fields.
        let kind = condition.get("type");
        let shown = kind.called(condition.path.named("Type"));
        for why in machinery::names::qualified_name(kind.str()) {
            shown.invalid_text(&why);
        }
        let generation = condition.get("observedGeneration");
        if generation.int() < 0 {
            generation.invalid("must be a non-negative integer");
        }
    }
    let nominated = status.get("nominatedNodeName");
    if !nominated.is_empty() && nominated.value != old.get("status.nominatedNodeName").value {
        nominated.name(machinery::names::dns1123_subdomain);
        if !old.get("spec.nodeName").is_empty() {
            nominated.forbidden("may not be set on pods that are already bound to a node");
        }
    }
    let generation = status.get("observedGeneration");
    if generation.int() < 0 {
        generation.invalid("must be a non-negative integer");
    }
}

/// One address of each family; those that were there are not looked at again.
fn addresses(list: &At<'_>, old: &At<'_>, kind: &str) {
    let known: HashSet<&Value> = old.items().map(|ip| ip.value).collect();
    for ip in list.items() {
        if !known.contains(ip.value) {
            super::ip::legacy(&ip.get("ip").called(ip.path.clone()));
        }
    }
    if list.len() < 2 {
        return;
    }
    let parsed: Option<Vec<bool>> = list
        .items()
        .map(|ip| super::ip::sloppy(ip.get("ip").str()).map(|address| address.is_ipv6()))
        .collect();
    let is_pair = parsed.is_some_and(|families| families.len() == 2 && families[0] != families[1]);
    if !is_pair {
        let shown: Vec<String> =
            list.items().map(|ip| super::internal::shown(kind, ip.value)).collect();
        let shown = format!("[{}]", shown.join(","));
        let detail = "may specify no more than one IP for each IP family";
        list.errors().invalid_shown(&list.path, Some(&shown), detail);
    }
}

/// Upstream: `validatePodResourceClaimStatuses`.
fn claim_statuses(list: &At<'_>, claims: &At<'_>) {
    let mut seen = HashSet::new();
    for one in list.items() {
        let name = one.get("name");
        let is_known = claims.items().any(|claim| claim.get("name").is(name.str()));
        if !is_known {
            name.invalid_text("must match the name of an entry in `spec.resourceClaims`");
        }
        if !seen.insert(name.str()) {
            name.duplicate_text();
        }
        one.get("resourceClaimName").any_name(machinery::names::dns1123_subdomain);
    }
}

/// What ended runs again only if its policies and rules say so. Upstream:
/// `ValidateContainerStateTransition` and its like for init and ephemeral containers.
fn ended_stay_ended(at: &At<'_>, old: &At<'_>) {
    let lists = [
        ("containerStatuses", "containers"),
        ("initContainerStatuses", "initContainers"),
        ("ephemeralContainerStatuses", ""),
    ];
    // Both are known once something left its end, which is seldom.
    let mut spec: Option<PodSpec> = None;
    let mut any_may = None;
    for (statuses, containers) in lists {
        let (place, known) = (at.get("status").get(statuses), old.get("status").get(statuses));
        let is_over = |status: &At<'_>| status.get("state").has("terminated");
        let run: HashSet<&str> =
            place.items().filter(|now| !is_over(now)).map(|now| now.get("name").str()).collect();
        for was in known.items().filter(is_over) {
            let name = was.get("name");
            if !run.contains(name.str()) {
                continue;
            }
            let spec = spec.get_or_insert_with(|| {
                serde_json::from_value(old.get("spec").value.clone()).unwrap_or_default()
            });
            let of_kind = match containers {
                "containers" => Some(spec.containers.as_slice()),
                "initContainers" => spec.init_containers.as_deref(),
                _ => None,
            };
            let container = of_kind.into_iter().flatten().find(|one| one.name == name.str());
            let code = was.get("state.terminated.exitCode").int() as i32;
            let any_may =
                !containers.is_empty() && *any_may.get_or_insert_with(|| restarts::all_may(spec));
            if !any_may && !container.is_some_and(|one| restarts::after(spec, one, code)) {
                // The index is that of the old status.
                was.get("state").forbidden("may not be transitioned to non-terminated state");
            }
        }
    }
}

/// Upstream: `validatePodExtendedResourceClaimStatus`.
fn extended_claim(status: &At<'_>, spec: &At<'_>) {
    let mappings = status.get("requestMappings");
    if mappings.is_empty() {
        mappings.required("at least one request mapping is required");
    }
    // The last of a name counts.
    let (init, main) = (spec.get("initContainers"), spec.get("containers"));
    let named: HashMap<&str, At<'_>> =
        init.items().chain(main.items()).map(|one| (one.get("name").str(), one)).collect();
    let mut seen = HashSet::new();
    for one in mappings.items() {
        let fields = ["containerName", "resourceName", "requestName"].map(|name| one.get(name));
        let [container, resource, request] = &fields;
        let asks =
            |known: &At<'_>| known.get("resources.requests").value.get(resource.str()).is_some();
        match named.get(container.str()) {
            Some(known) if asks(known) => {}
            Some(_) => resource.invalid_text(
                "must match the extended resource name of an entry in spec.initContainers.resources.requests or spec.containers.resources.requests",
            ),
            None => container.invalid_text(
                "must match the name of an entry in spec.initContainers.name or spec.containers.name",
            ),
        }
        request.called(status.child_path("requestName")).name(machinery::names::dns1123_label);
        let key = fields.each_ref().map(|field| field.str());
        if !seen.insert(key) {
            fields.iter().for_each(At::duplicate);
        }
    }
    status.get("resourceClaimName").need_name(machinery::names::dns1123_subdomain);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::at::judge_both;
    use super::*;

    #[test]
    fn a_new_status_is_checked() {
        let pod = |status: Value| json!({"spec": {"nodeName": "n", "containers": [], "resourceClaims": [{"name": "r"}]}, "status": status});
        let check = |new: Value, expected: &[&str]| {
            let errors = judge_both(&pod(new), &pod(json!({})), status);
            let texts: Vec<String> = errors.0.iter().map(ToString::to_string).collect();
            assert_eq!(texts, expected);
        };
        check(json!({"podIPs": [{"ip": "1.2.3.4"}, {"ip": "::1"}]}), &[]);
        check(
            json!({"podIPs": [{"ip": "1.2.3.4"}, {"ip": "1.2.3.5"}], "hostIPs": [{"ip": "1.1.1.1"}]}),
            &[
                "status.podIPs: Invalid value: [{\"IP\":\"1.2.3.4\"},{\"IP\":\"1.2.3.5\"}]: may specify no more than one IP for each IP family",
                "status.hostIPs[0].ip: Invalid value: \"1.1.1.1\": must be equal to `hostIP`",
            ],
        );
        check(
            json!({"nominatedNodeName": "m", "observedGeneration": -1, "resourceClaimStatuses": [{"name": "x"}]}),
            &[
                "status.nominatedNodeName: Forbidden: may not be set on pods that are already bound to a node",
                "status.observedGeneration: Invalid value: -1: must be a non-negative integer",
                "status.resourceClaimStatuses[0].name: Invalid value: \"x\": must match the name of an entry in `spec.resourceClaims`",
            ],
        );
        let errors = judge_both(
            &pod(json!({"conditions": [{"type": "a b", "status": "True"}]})),
            &pod(json!({})),
            status,
        );
        assert_eq!(errors.0.first().map(|error| &*error.field), Some("status.conditions[0].Type"));
    }

    #[test]
    fn only_what_restarts_leaves_its_end() {
        let check = |policy: &str, container: Value, code: i32, expected: &[&str]| {
            let mut container = container;
            container["name"] = "a".into();
            let spec = json!({"restartPolicy": policy, "containers": [container],
                "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}]});
            let pod = |state: Value| {
                let one = |name: &str| json!([{"name": name, "state": state}]);
                let sidecar = json!({"name": "s", "state": state});
                let inits = [one("i")[0].clone(), sidecar];
                json!({"spec": spec, "status": {"containerStatuses": one("a"),
                    "initContainerStatuses": inits, "ephemeralContainerStatuses": one("e")}})
            };
            let (ended, runs) = (json!({"terminated": {"exitCode": code}}), json!({"running": {}}));
            let errors = judge_both(&pod(runs), &pod(ended.clone()), status);
            let got: Vec<String> = errors.0.iter().map(ToString::to_string).collect();
            let text = "Forbidden: may not be transitioned to non-terminated state";
            let expected: Vec<String> =
                expected.iter().map(|path| format!("status.{path}[0].state: {text}")).collect();
            assert_eq!(got, expected, "{policy} {code}");
            assert!(judge_both(&pod(ended.clone()), &pod(ended), status).0.is_empty());
        };
        const MAIN: &str = "containerStatuses";
        const INIT: &str = "initContainerStatuses";
        const EPHEMERAL: &str = "ephemeralContainerStatuses";
        let rules = |action: &str| {
            json!({"restartPolicy": "Never", "restartPolicyRules":
                [{"action": action, "exitCodes": {"operator": "In", "values": [42]}}]})
        };
        check("Always", json!({}), 0, &[EPHEMERAL]);
        check("OnFailure", json!({}), 1, &[EPHEMERAL]);
        check("OnFailure", json!({}), 0, &[MAIN, INIT, EPHEMERAL]);
        check("Never", json!({}), 1, &[MAIN, INIT, EPHEMERAL]);
        check("Never", rules("Restart"), 42, &[INIT, EPHEMERAL]);
        check("Never", rules("Restart"), 1, &[MAIN, INIT, EPHEMERAL]);
        check("Never", rules("RestartAllContainers"), 1, &[EPHEMERAL]);
        check("Always", rules("Restart"), 1, &[MAIN, EPHEMERAL]);
    }
}
