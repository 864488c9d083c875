//! Kinds of which no version is served by default: candidates for leases, storage versions, device
//! taints, pools, workloads. Upstream: the `validation` packages of coordination, apiserverinternal,
//! resource and scheduling, and the declarative rules of the types.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};

use machinery::names;
use serde_json::Value;

use super::at::{At, NameCheck};
use super::devices::{is_version, label, pool_name, taint};
use super::policy::conditions;
use super::volumes::csi_driver_name;

pub(crate) fn lease_candidate(at: &At<'_>) {
    const OLDEST: &str = "OldestEmulationVersion";
    const NO_VERSION: &str = "must be a valid semantic version";
    let spec = at.get("spec");
    spec.get("leaseName").need();
    let [emulation, binary, strategy] =
        ["emulationVersion", "binaryVersion", "strategy"].map(|field| spec.get(field));
    if !emulation.is_empty() && !is_version(emulation.str()) {
        emulation.invalid(NO_VERSION);
    }
    if binary.need() && !is_version(binary.str()) {
        binary.invalid(NO_VERSION);
    }
    let is_lower = compare(binary.str(), emulation.str()) == Ordering::Less;
    if !binary.is_empty() && !emulation.is_empty() && is_lower {
        binary.invalid("must be greater than or equal to `emulationVersion`");
    }
    if !strategy.need() {
        return;
    }
    if strategy.is(OLDEST) && compare(emulation.str(), "0.0.0") == Ordering::Equal {
        emulation.required("must be specified when `strategy` is 'OldestEmulationVersion'");
    }
    // Upstream names the field twice.
    let again = strategy.called(strategy.child_path("strategy"));
    match strategy.str().contains('/') {
        false => again.one_of(&[OLDEST]),
        true => again.name(names::qualified_name),
    }
}

pub(crate) fn lease_candidate_update(at: &At<'_>, old: &At<'_>) {
    lease_candidate(at);
    at.get("spec.leaseName").unchanged(&old.get("spec.leaseName"));
}

/// Semantic versions by their precedence; what is none counts as `0.0.0`.
fn compare(one: &str, other: &str) -> Ordering {
    fn parts(text: &str) -> (Vec<u64>, Vec<&str>) {
        let text = if is_version(text) { text } else { "0.0.0" };
        let text = text.split('+').next().unwrap_or_default();
        let (core, pre) = text.split_once('-').unwrap_or((text, ""));
        let numbers = core.split('.').map(|number| number.parse().unwrap_or(u64::MAX));
        (numbers.collect(), pre.split('.').filter(|part| !part.is_empty()).collect())
    }
    fn word((one, other): (&&str, &&str)) -> Ordering {
        match (one.parse::<u64>(), other.parse::<u64>()) {
            (Ok(one), Ok(other)) => one.cmp(&other),
            (Ok(_), Err(_)) => Ordering::Less,
            (Err(_), Ok(_)) => Ordering::Greater,
            (Err(_), Err(_)) => one.cmp(other),
        }
    }
    let ((core, pre), (other_core, other_pre)) = (parts(one), parts(other));
    // A release comes after its candidates.
    let by_kind = pre.is_empty().cmp(&other_pre.is_empty());
    let words = pre.iter().zip(&other_pre).map(word).find(|order| order.is_ne());
    core.cmp(&other_core)
        .then(by_kind)
        .then(words.unwrap_or(Ordering::Equal))
        .then(pre.len().cmp(&other_pre.len()))
}

/// `GROUP.RESOURCE`
pub(crate) fn storage_version_name(name: &str) -> Vec<String> {
    let Some((group, resource)) = name.rsplit_once('.') else {
        return vec!["name must be in the form of <group>.<resource>".into()];
    };
    let of = |part: &str, wrong: Vec<String>| -> Vec<String> {
        wrong.into_iter().map(|why| format!("the {part} segment {why}")).collect()
    };
    let mut wrong = of("group", names::dns1123_subdomain(group));
    wrong.extend(of("resource", names::dns1035_label(resource)));
    wrong
}

pub(crate) fn storage_version(at: &At<'_>) {
    let status = at.get("status");
    let servers = status.get("storageVersions");
    servers.unique(|one| one.get("apiServerID").str().to_owned(), |one| one.get("apiServerID"));
    servers.items().for_each(|one| server_version(&one));
    let mut encodings = servers.items().map(|one| one.get("encodingVersion").str());
    let first = encodings.next();
    let common = first.filter(|first| encodings.all(|one| one == *first));
    let told = status.get("commonEncodingVersion");
    match (common, told.value.as_str()) {
        (None, Some(_)) => told.invalid("should be nil if servers do not agree on the same encoding version, or if there is no server reporting the supported versions yet"),
        (Some(common), None) => {
            told.invalid(&format!("the common encoding version is {common}"));
        }
        (Some(common), Some(told_version)) if common != told_version => {
            told.invalid(&format!("the actual common encoding version is {common}"));
        }
        _ => {}
    }
    let mut seen = HashMap::new();
    for (index, one) in status.get("conditions").items().enumerate() {
        // Upstream's paths leave the list's name out.
        let one = one.called(status.path.index(index));
        let kind = one.get("type");
        let first = *seen.entry(kind.str()).or_insert(index);
        if first < index {
            kind.invalid(&format!(
                "the type of the condition is not unique, it also appears in conditions[{first}]"
            ));
        }
        kind.name(names::qualified_name);
        one.get("status").name(names::qualified_name);
        one.get("reason").need();
        one.get("message").need();
    }
}

pub(crate) fn storage_version_status(at: &At<'_>, _old: &At<'_>) {
    storage_version(at);
}

fn server_version(at: &At<'_>) {
    at.get("apiServerID").name(names::dns1123_subdomain);
    let encoding = at.get("encodingVersion");
    let wrong = api_version(encoding.str());
    if !wrong.is_empty() {
        encoding.invalid_text(&wrong.join(","));
    }
    let [decodable, served] = ["decodableVersions", "servedVersions"].map(|field| at.get(field));
    let known: HashSet<&str> = decodable.strings().into_iter().collect();
    for one in decodable.items().chain(served.items()) {
        let wrong = api_version(one.str());
        if !wrong.is_empty() {
            one.invalid(&wrong.join(","));
        }
    }
    if !known.contains(encoding.str()) {
        let why = format!("decodableVersions must include encodingVersion {}", encoding.str());
        decodable.invalid(&why);
    }
    for one in served.items().filter(|one| !known.contains(one.str())) {
        let listed = decodable.strings().join(" ");
        one.invalid(&format!(
            "individual served version : {} must be included in decodableVersions : [{listed}]",
            one.str()
        ));
    }
}

/// `v1`, `apps/v1`
fn api_version(text: &str) -> Vec<String> {
    const FORM: &str = "an apiVersion is a DNS-1035 label, which must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?') with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyVersion')";
    let part = |name: &str, text: &str, check: NameCheck| -> Vec<String> {
        let wrong = if text.is_empty() { vec!["must be non-empty".into()] } else { check(text) };
        wrong.into_iter().map(|why| format!("{name} part: {why}")).collect()
    };
    match text.split('/').collect::<Vec<_>>()[..] {
        [version] => part("version", version, names::dns1035_label),
        [group, version] => {
            let mut wrong = part("group", group, names::dns1123_subdomain);
            wrong.extend(part("version", version, names::dns1035_label));
            wrong
        }
        _ => vec![FORM.into()],
    }
}

pub(crate) fn device_taint_rule(at: &At<'_>) {
    let spec = at.get("spec");
    let [driver, pool, device] =
        ["driver", "pool", "device"].map(|field| spec.get("deviceSelector").get(field));
    if driver.is_set() {
        csi_driver_name(&driver);
    }
    if pool.is_set() {
        pool_name(&pool);
    }
    if device.is_set() {
        label(&device);
    }
    taint(&spec.get("taint"));
}

pub(crate) fn device_taint_status(at: &At<'_>, _old: &At<'_>) {
    const CONDITIONS: usize = 8;
    let list = at.get("status.conditions");
    conditions(&list);
    if list.len() > CONDITIONS {
        list.too_many(CONDITIONS);
    }
}

pub(crate) fn pool_request(at: &At<'_>) {
    const MOST: i64 = 1000;
    let spec = at.get("spec");
    let [driver, pool, limit] = ["driver", "poolName", "limit"].map(|field| spec.get(field));
    driver.need_name(|text| names::dns1123_subdomain(&text.to_lowercase()));
    if pool.is_set() {
        pool_name(&pool);
    }
    limit.at_least(1);
    at_most(&limit, MOST);
}

fn at_most(at: &At<'_>, most: i64) {
    if at.number().is_some_and(|number| number > most) {
        at.invalid(&format!("must be less than or equal to {most}"));
    }
}

pub(crate) fn pool_request_update(at: &At<'_>, old: &At<'_>) {
    immutable(&at.get("spec"), &old.get("spec"));
}

/// An answer is given once.
pub(crate) fn pool_request_status(at: &At<'_>, old: &At<'_>) {
    const POOLS: usize = 1000;
    const CONDITIONS: usize = 10;
    const FIGURES: &[&str] = &[
        "generation",
        "totalDevices",
        "allocatedDevices",
        "availableDevices",
        "unavailableDevices",
    ];
    let status = at.get("status");
    if old.has("status") {
        return status.unchanged(&old.get("status"));
    }
    if !status.is_set() {
        return;
    }
    conditions(&status.get("conditions"));
    status.get("poolCount").not_negative();
    for (field, most) in [("pools", POOLS), ("conditions", CONDITIONS)] {
        if status.get(field).len() > most {
            status.get(field).too_many(most);
        }
    }
    for pool in status.get("pools").items() {
        pool.get("driver").need_name(|text| names::dns1123_subdomain(&text.to_lowercase()));
        pool_name(&pool.get("poolName"));
        FIGURES.iter().for_each(|field| pool.get(field).not_negative());
        pool.get("resourceSliceCount").at_least(1);
        pool.get("nodeName").any_name(names::dns1123_subdomain);
    }
}

/// Declared, not programmed, upstream: what is shown is nothing.
fn immutable(at: &At<'_>, old: &At<'_>) {
    if at.value != old.value {
        at.invalid_as(Value::Null, "field is immutable");
    }
}

pub(crate) fn workload(at: &At<'_>) {
    const TEMPLATES: usize = 8;
    let spec = at.get("spec");
    let controller = spec.get("controllerRef");
    if controller.is_set() {
        controller.get("apiGroup").any_name(names::dns1123_subdomain);
        controller.get("kind").need_name(names::path_segment);
        controller.get("name").need_name(names::path_segment);
    }
    let templates = spec.get("podGroupTemplates");
    if templates.len() > TEMPLATES {
        return templates.too_many(TEMPLATES);
    }
    if templates.need() {
        templates.unique(|one| one.get("name").str().to_owned(), Clone::clone);
    }
    for template in templates.items() {
        template.get("name").need_name(names::dns1123_label);
        scheduling_policy(&template.get("schedulingPolicy"));
    }
}

pub(crate) fn workload_update(at: &At<'_>, old: &At<'_>) {
    for field in ["spec.controllerRef", "spec.podGroupTemplates"] {
        immutable(&at.get(field), &old.get(field));
    }
}

fn scheduling_policy(at: &At<'_>) {
    const ONE: &str = "`basic`, `gang`";
    let (basic, gang) = (at.get("basic"), at.get("gang"));
    match (basic.is_set(), gang.is_set()) {
        (false, false) => at.invalid_as("", &format!("must specify one of: {ONE}")),
        (true, true) => {
            at.invalid_as("{basic, gang}", &format!("must specify exactly one of: {ONE}"));
        }
        _ => {}
    }
    let count = gang.get("minCount");
    match gang.is_set() {
        true if count.int() == 0 => count.required(""),
        true => count.at_least(1),
        false => {}
    }
}

pub(crate) fn pod_group(at: &At<'_>) {
    let spec = at.get("spec");
    let template = spec.get("podGroupTemplateRef");
    let workload = template.get("workload");
    if template.is_set() && !workload.is_set() {
        template.invalid_as("", "must specify one of: `workload`");
    }
    if workload.is_set() {
        workload.get("workloadName").need_name(names::dns1123_subdomain);
        workload.get("podGroupTemplateName").need_name(names::dns1123_label);
    }
    scheduling_policy(&spec.get("schedulingPolicy"));
}

pub(crate) fn pod_group_update(at: &At<'_>, old: &At<'_>) {
    for field in ["spec.podGroupTemplateRef", "spec.schedulingPolicy", "spec.resourceClaims"] {
        immutable(&at.get(field), &old.get(field));
    }
}

pub(crate) fn pod_group_status(at: &At<'_>, _old: &At<'_>) {
    let status = at.get("status");
    conditions(&status.get("conditions"));
    let claims = at.get("spec.resourceClaims");
    let known: Vec<&str> = claims.items().map(|claim| claim.get("name").str()).collect();
    for one in status.get("resourceClaimStatuses").items() {
        let name = one.get("name");
        if !known.contains(&name.str()) {
            name.invalid_text("must match the name of an entry in `spec.resourceClaims`");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kind::Rules;
    use crate::validate::at::{judge, judge_both};

    fn rule(kind: &str) -> &'static Rules {
        crate::tests::kind_of(kind).rules()
    }

    #[test]
    fn new_objects_are_judged() {
        let check = |kind: &str, object: Value, expected: &[&str]| {
            let errors = judge(&object, rule(kind).create);
            let fields: Vec<&str> = errors.0.iter().map(|error| error.field.as_str()).collect();
            assert_eq!(fields, expected, "{kind}");
        };
        let candidate = |emulation: &str, binary: &str, strategy: &str| {
            json!({"spec": {"leaseName": "l", "emulationVersion": emulation,
                "binaryVersion": binary, "strategy": strategy}})
        };
        const OLDEST: &str = "OldestEmulationVersion";
        check("LeaseCandidate", candidate("1.36.0", "1.36.0", OLDEST), &[]);
        check("LeaseCandidate", candidate("1.36.0", "1.36.0", "a.example/b"), &[]);
        check(
            "LeaseCandidate",
            json!({"spec": {}}),
            &["spec.leaseName", "spec.binaryVersion", "spec.strategy"],
        );
        check("LeaseCandidate", candidate("1.36.0", "1.35.9", OLDEST), &["spec.binaryVersion"]);
        check("LeaseCandidate", candidate("", "1.36.0", OLDEST), &["spec.emulationVersion"]);
        check(
            "LeaseCandidate",
            candidate("1.36", "1.36.0", "x"),
            &["spec.emulationVersion", "spec.strategy.strategy"],
        );
        let server = json!({"apiServerID": "a", "encodingVersion": "v1",
            "decodableVersions": ["v1", "apps/v1"], "servedVersions": ["v1", "V2"]});
        check(
            "StorageVersion",
            json!({"status": {"storageVersions": [server.clone(), server]}}),
            &[
                "status.storageVersions[1].apiServerID",
                "status.storageVersions[0].servedVersions[1]",
                "status.storageVersions[0].servedVersions[1]",
                "status.storageVersions[1].servedVersions[1]",
                "status.storageVersions[1].servedVersions[1]",
                "status.commonEncodingVersion",
            ],
        );
        check(
            "DeviceTaintRule",
            json!({"spec": {"deviceSelector": {"device": "A"}, "taint": {"effect": "Evil"}}}),
            &["spec.deviceSelector.device", "spec.taint.key", "spec.taint.effect"],
        );
        check(
            "ResourcePoolStatusRequest",
            json!({"spec": {"limit": 1001, "poolName": "a"}}),
            &["spec.driver", "spec.limit"],
        );
        let both = json!({"basic": {}, "gang": {"minCount": 0}});
        check(
            "Workload",
            json!({"spec": {"podGroupTemplates": [{"name": "a", "schedulingPolicy": both},
                {"name": "a", "schedulingPolicy": {"basic": {}}}]}}),
            &[
                "spec.podGroupTemplates[1]",
                "spec.podGroupTemplates[0].schedulingPolicy",
                "spec.podGroupTemplates[0].schedulingPolicy.gang.minCount",
            ],
        );
        check("PodGroup", json!({"spec": {}}), &["spec.schedulingPolicy"]);
    }

    #[test]
    fn what_is_said_once_stays() {
        let check = |kind: &str, old: Value, new: Value, part: &str, expected: &[&str]| {
            let rules = rule(kind);
            let parts = rules.parts.iter().find(|(name, _)| *name == part);
            let update = parts.map_or(rules.update, |(_, check)| Some(*check));
            let errors = judge_both(&new, &old, update.expect("rules for updates"));
            let fields: Vec<&str> = errors.0.iter().map(|error| error.field.as_str()).collect();
            assert_eq!(fields, expected, "{kind}");
        };
        let of = |policy: &str| json!({"spec": {"schedulingPolicy": {policy: {}}}});
        check("PodGroup", of("basic"), of("gang"), "", &["spec.schedulingPolicy"]);
        let answer = |count: i64| json!({"status": {"poolCount": count}});
        check("ResourcePoolStatusRequest", answer(1), answer(2), "status", &["status"]);
        check("ResourcePoolStatusRequest", json!({}), answer(2), "status", &[]);
    }

    #[test]
    fn versions_have_an_order() {
        for (one, other, expected) in [
            ("1.36.0", "1.36.0+k3s1", Ordering::Equal),
            ("1.36.0", "1.36.0-rc.1", Ordering::Greater),
            ("1.36.0-rc.2", "1.36.0-rc.11", Ordering::Less),
            ("1.9.0", "1.36.0", Ordering::Less),
            ("x", "0.0.0", Ordering::Equal),
        ] {
            assert_eq!(compare(one, other), expected, "{one} {other}");
        }
    }

    #[test]
    fn storage_versions_have_names() {
        assert!(storage_version_name("apps.deployments").is_empty());
        assert_eq!(storage_version_name("pods").len(), 1);
        assert_eq!(storage_version_name("Apps.Pods").len(), 2);
    }
}
