//! Quantities and lists of resources: `{cpu: 1, memory: 1Gi}`.
//! Upstream: `pkg/apis/core/helper`, `validateResourceRequirements`.

use std::collections::{BTreeSet, HashSet};

use machinery::names;
use machinery::quantity::Amount;

use super::at::At;

pub(crate) const NEGATIVE: &str = "must be greater than or equal to 0";
pub(crate) const NOT_POSITIVE: &str = "must be greater than zero";
const NO_INTEGER: &str = "must be an integer";

pub(crate) fn amount(at: &At<'_>) -> Amount {
    match at.value.as_i64() {
        Some(number) => Amount::parse(&number.to_string()),
        None => Amount::parse(at.str()),
    }
    .unwrap_or_default()
}

pub(crate) fn is_negative(at: &At<'_>) -> bool {
    amount(at) < Amount::default()
}

pub(crate) fn positive(at: &At<'_>) {
    if amount(at) <= Amount::default() {
        at.invalid_text(NOT_POSITIVE);
    }
}

pub(crate) fn not_negative(at: &At<'_>) {
    if is_negative(at) {
        at.invalid_text(NEGATIVE);
    }
}

/// A quantity of a resource: never negative, whole where things are counted.
pub(crate) fn value(name: &str, at: &At<'_>) {
    not_negative(at);
    if is_counted(name) && amount(at).milli() % 1000 != 0 {
        at.invalid_text(NO_INTEGER);
    }
}

const COUNTED: &[&str] = &[
    "pods",
    "resourcequotas",
    "services",
    "replicationcontrollers",
    "secrets",
    "configmaps",
    "persistentvolumeclaims",
    "services.nodeports",
    "services.loadbalancers",
];

const COMPUTE: &[&str] = &[
    "cpu",
    "memory",
    "ephemeral-storage",
    "requests.cpu",
    "requests.memory",
    "requests.ephemeral-storage",
    "limits.cpu",
    "limits.memory",
    "limits.ephemeral-storage",
    "requests.storage",
];

pub(crate) fn is_huge_pages(name: &str) -> bool {
    name.starts_with("hugepages-")
}

/// In the kubernetes.io namespace, where names without a domain are.
pub(crate) fn is_native(name: &str) -> bool {
    !name.contains('/') || name.contains("kubernetes.io/")
}

pub(crate) fn is_extended(name: &str) -> bool {
    !is_native(name)
        && !name.starts_with("requests.")
        && names::qualified_name(&format!("requests.{name}")).is_empty()
}

pub(crate) fn is_counted(name: &str) -> bool {
    COUNTED.contains(&name) || is_extended(name)
}

fn allows_overcommit(name: &str) -> bool {
    is_native(name) && !is_huge_pages(name)
}

/// Is it known to quotas?
pub(crate) fn is_standard_quota(name: &str) -> bool {
    COUNTED.contains(&name)
        || COMPUTE.contains(&name)
        || is_huge_pages(name)
        || name.starts_with("requests.hugepages-")
}

fn is_standard(name: &str) -> bool {
    is_standard_quota(name) || name == "storage"
}

/// The name of any resource. Says whether it is one.
pub(crate) fn resource_name(name: &str, at: &At<'_>) -> bool {
    let wrong = names::qualified_name(name);
    for why in &wrong {
        at.invalid_as(name, why);
    }
    if !wrong.is_empty() {
        return false;
    }
    if !name.contains('/') && !is_standard(name) {
        at.invalid_as(name, "must be a standard resource type or fully qualified");
        return false;
    }
    true
}

pub(crate) fn container_resource_name(name: &str, at: &At<'_>) {
    resource_name(name, at);
    if !name.contains('/') {
        let is_known =
            ["cpu", "memory", "ephemeral-storage"].contains(&name) || is_huge_pages(name);
        if !is_known {
            at.invalid_as(name, "must be a standard resource for containers");
        }
    } else if !is_native(name) && !is_extended(name) {
        at.invalid_as(name, "doesn't follow extended resource name standard");
    }
}

fn pod_resource_name(name: &str, at: &At<'_>) {
    if resource_name(name, at) && !["cpu", "memory"].contains(&name) && !is_huge_pages(name) {
        at.errors().not_supported(&at.path, name, &["cpu", "hugepages-", "memory"]);
    }
}

/// `limits` and `requests` of a container.
pub(crate) fn requirements(at: &At<'_>, claims: &BTreeSet<&str>) {
    judge(at, claims, container_resource_name);
}

/// The same of a whole pod.
pub(crate) fn pod_requirements(at: &At<'_>) {
    judge(at, &BTreeSet::new(), pod_resource_name);
}

fn judge(at: &At<'_>, claims: &BTreeSet<&str>, check_name: fn(&str, &At<'_>)) {
    let (limits, requests) = (at.get("limits"), at.get("requests"));
    let (mut has_basics, mut has_huge_pages) = (false, false);
    let mut one = |name: &str, quantity: &At<'_>| {
        has_basics |= name == "cpu" || name == "memory";
        has_huge_pages |= is_huge_pages(name);
        check_name(name, quantity);
        value(name, quantity);
    };
    for (name, limit) in limits.entries() {
        one(name, &limit);
        huge_pages(name, &limit);
    }
    for (name, request) in requests.entries() {
        one(name, &request);
        let limit = limits.key(name);
        let (asked, limited) = (amount(&request), amount(&limit));
        let shown = |word: &str| format!("must be {word} {name} limit of {}", limit.str());
        if !limit.is_set() {
            if !allows_overcommit(name) {
                limits.required("Limit must be set for non overcommitable resources");
            }
        } else if asked != limited && !allows_overcommit(name) {
            requests.invalid_as(request.str(), &shown("equal to"));
        } else if asked > limited {
            requests.invalid_as(request.str(), &shown("less than or equal to"));
        }
        huge_pages(name, &request);
    }
    if has_huge_pages && !has_basics {
        at.forbidden("HugePages require cpu or memory");
    }
    claim_names(&at.get("claims"), claims);
}

fn huge_pages(name: &str, at: &At<'_>) {
    let Some(size) = name.strip_prefix("hugepages-") else { return };
    let size = Amount::parse(size).unwrap_or_default().units();
    if size <= 0 || amount(at).units() % size != 0 {
        at.invalid_text(&format!("{} is not positive integer multiple of {name}", at.str()));
    }
}

fn claim_names(at: &At<'_>, claims: &BTreeSet<&str>) {
    let mut seen: HashSet<String> = HashSet::new();
    for item in at.items() {
        let (name, request) = (item.get("name").str(), item.get("request"));
        if name.is_empty() {
            item.required("");
            continue;
        }
        request.called(item.child_path("request")).any_name(names::dns1123_label);
        let key =
            if request.is_empty() { name.into() } else { format!("{name}/{}", request.str()) };
        if seen.contains(&key) || seen.contains(name) {
            item.with(item.get("name").value).duplicate();
        }
        seen.insert(key);
        if !claims.contains(name) {
            let known = if claims.is_empty() {
                " which is empty".to_owned()
            } else {
                let all: Vec<&str> = claims.iter().copied().collect();
                format!(": {}", all.join(", "))
            };
            let detail = format!("must be one of the names in pod.spec.resourceClaims{known}");
            item.errors().not_found_because(&item.path, name, &detail);
        }
    }
}
