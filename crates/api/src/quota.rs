//! The usage of objects against a ResourceQuota. Pure.
//!
//! In: pods, services, claims for volumes and for devices. Out: amounts by the names that quotas use. The admission plugin and
//! the controller count by these rules, so that they agree.
//! Upstream: `pkg/quota/v1`. Names are aliases: `cpu` counts what `requests.cpu` counts.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{
    Container, PersistentVolumeClaim, Pod, PodAffinityTerm, PodSpec, ResourceQuota,
    ScopedResourceSelectorRequirement, Service,
};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceRequest, ResourceClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::jiff::Timestamp;
use machinery::quantity::{Amount, Format};

pub type Amounts = BTreeMap<String, Quantity>;

const CLASS: &str = ".storageclass.storage.k8s.io/";
/// The suffix of a device class in a quota's name.
const DEVICES: &str = ".deviceclass.resource.k8s.io/devices";
const DEVICE_CLAIMS: &str = "count/resourceclaims.resource.k8s.io";
/// The prefix of a device class: its implicit extended resource.
const IMPLICIT: &str = "deviceclass.resource.kubernetes.io/";
/// A request for all devices counts as this many. Upstream: `AllocationResultsMaxSize`.
const ALL_DEVICES: i64 = 32;
const CLASS_ANNOTATION: &str = "volume.beta.kubernetes.io/storage-class";
/// The names of quotas of pods, except hugepages and extended resources.
pub const PODS: &[&str] = &[
    "count/pods",
    "cpu",
    "memory",
    "ephemeral-storage",
    "requests.cpu",
    "requests.memory",
    "requests.ephemeral-storage",
    "limits.cpu",
    "limits.memory",
    "limits.ephemeral-storage",
    "pods",
];
/// The names of quotas of Services.
pub const SERVICES: &[&str] =
    &["count/services", "services", "services.nodeports", "services.loadbalancers"];
const CLAIMS: &[&str] =
    &["count/persistentvolumeclaims", "persistentvolumeclaims", "requests.storage"];
/// Resources that count under their short names, too, not only under `count/…`.
pub const COUNTED: &[&str] = &["replicationcontrollers", "resourcequotas", "secrets", "configmaps"];

/// `count/deployments.apps`; core resources have no group.
pub fn count_name(group: &str, resource: &str) -> String {
    if group.is_empty() { format!("count/{resource}") } else { format!("count/{resource}.{group}") }
}

/// Reports whether objects of this resource count for the quota's resource `name`.
pub fn is_used_by(name: &str, group: &str, resource: &str) -> bool {
    if name == count_name(group, resource) {
        return true;
    }
    if (group, resource) == ("resource.k8s.io", "resourceclaims") {
        return name.ends_with(DEVICES);
    }
    if !group.is_empty() {
        return false;
    }
    match resource {
        "pods" => {
            let extended = name
                .strip_prefix("requests.")
                .is_some_and(|name| is_extended(name) && !name.ends_with("/requests.storage"));
            PODS.contains(&name)
                || name.starts_with("hugepages-")
                || name.starts_with("requests.hugepages-")
                || extended && !name.contains(CLASS)
        }
        "services" => SERVICES.contains(&name),
        "persistentvolumeclaims" => {
            let by_class = name.split_once(CLASS).map(|(_, rest)| rest);
            CLAIMS.contains(&name)
                || by_class.is_some_and(|rest| {
                    matches!(rest, "persistentvolumeclaims" | "requests.storage")
                })
        }
        resource => COUNTED.contains(&resource) && name == resource,
    }
}

/// The usage of an object of which only the number counts.
pub fn of_any(group: &str, resource: &str) -> Amounts {
    let mut used = Amounts::from([(count_name(group, resource), one())]);
    if group.is_empty() && COUNTED.contains(&resource) {
        used.insert(resource.into(), one());
    }
    used
}

/// Extended resources such as `example.com/gpu`, and those of device classes; not `kubernetes.io/…`.
/// Upstream: `IsDRAExtendedResourceName`.
pub fn is_extended(name: &str) -> bool {
    name.contains('/') && (!name.contains("kubernetes.io/") || name.starts_with(IMPLICIT))
}

/// A finished pod, or one far beyond its grace period, counts as an object only.
pub fn of_pod(pod: &Pod, now: Timestamp) -> Amounts {
    let mut used = Amounts::from([("count/pods".into(), one())]);
    if !is_counted(pod, now) {
        return used;
    }
    used.insert("pods".into(), one());
    let (requests, limits) = (pod_total(pod, requests_of), pod_total(pod, limits_of));
    for (name, amount) in requests {
        let basic = matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage");
        if basic || name.starts_with("hugepages-") {
            used.insert(name.clone(), amount.clone());
            used.insert(format!("requests.{name}"), amount);
        } else if is_extended(&name) {
            used.insert(format!("requests.{name}"), amount);
        }
    }
    for (name, amount) in limits {
        if matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage") {
            used.insert(format!("limits.{name}"), amount);
        }
    }
    used
}

fn is_counted(pod: &Pod, now: Timestamp) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return false;
    }
    let meta = &pod.metadata;
    match (&meta.deletion_timestamp, meta.deletion_grace_period_seconds) {
        (Some(deletion), Some(grace)) => now.as_second() <= deletion.0.as_second() + grace,
        _ => true,
    }
}

fn requests_of(container: &Container) -> Option<&Amounts> {
    container.resources.as_ref()?.requests.as_ref()
}

fn limits_of(container: &Container) -> Option<&Amounts> {
    container.resources.as_ref()?.limits.as_ref()
}

/// The largest sum of requests of a pod's containers at any time.
pub fn container_requests(spec: &PodSpec) -> Amounts {
    at_peak(spec, requests_of)
}

/// The same for limits.
pub fn container_limits(spec: &PodSpec) -> Amounts {
    at_peak(spec, limits_of)
}

/// The larger of: all containers and sidecars, or an init container with the sidecars that start
/// before it.
fn at_peak(spec: &PodSpec, of: fn(&Container) -> Option<&Amounts>) -> Amounts {
    let mut total = Amounts::new();
    for container in &spec.containers {
        add(&mut total, of(container).into_iter().flatten());
    }
    let (mut sidecars, mut peak) = (Amounts::new(), Amounts::new());
    for container in spec.init_containers.iter().flatten() {
        let mut need = sidecars.clone();
        add(&mut need, of(container).into_iter().flatten());
        if container.restart_policy.as_deref() == Some("Always") {
            sidecars = need.clone();
            add(&mut total, of(container).into_iter().flatten());
        }
        raise(&mut peak, &need);
    }
    raise(&mut total, &peak);
    total
}

/// A pod's requests, with pod-level resources and overhead.
pub fn pod_requests(pod: &Pod) -> Amounts {
    pod_total(pod, requests_of)
}

/// The same for limits.
pub fn pod_limits(pod: &Pod) -> Amounts {
    pod_total(pod, limits_of)
}

/// A pod's largest need at any time, with pod-level resources and overhead.
fn pod_total(pod: &Pod, of: fn(&Container) -> Option<&Amounts>) -> Amounts {
    let Some(spec) = &pod.spec else { return Amounts::new() };
    let mut total = at_peak(spec, of);
    if let Some(whole) = &spec.resources {
        let is_limits = std::ptr::fn_addr_eq(of, limits_of as fn(&Container) -> Option<&Amounts>);
        let stated = if is_limits { &whole.limits } else { &whole.requests };
        total.extend(stated.clone().unwrap_or_default());
    }
    let overhead = spec.overhead.clone().unwrap_or_default();
    if !total.is_empty() {
        add(&mut total, &overhead);
    }
    total
}

fn raise(total: &mut Amounts, other: &Amounts) {
    for (name, amount) in other {
        let known = total.entry(name.clone()).or_insert_with(|| amount.clone());
        if value(amount) > value(known) {
            *known = amount.clone();
        }
    }
}

pub fn of_service(service: &Service) -> Amounts {
    let spec = service.spec.as_ref();
    let ports = spec.and_then(|spec| spec.ports.as_deref()).unwrap_or_default();
    let all = ports.len();
    let assigned = ports.iter().filter(|port| port.node_port.unwrap_or(0) != 0).count();
    let (node_ports, balancers) = match spec.and_then(|spec| spec.type_.as_deref()) {
        Some("NodePort") => (all, 0),
        Some("LoadBalancer") => {
            let without = spec.and_then(|spec| spec.allocate_load_balancer_node_ports);
            (if without == Some(false) { assigned } else { all }, 1)
        }
        _ => (0, 0),
    };
    Amounts::from([
        ("count/services".into(), one()),
        ("services".into(), one()),
        ("services.nodeports".into(), Quantity(node_ports.to_string())),
        ("services.loadbalancers".into(), Quantity(balancers.to_string())),
    ])
}

pub fn of_claim(claim: &PersistentVolumeClaim) -> Amounts {
    let mut used = Amounts::from([
        ("count/persistentvolumeclaims".into(), one()),
        ("persistentvolumeclaims".into(), one()),
    ]);
    let spec = claim.spec.as_ref();
    let annotated = claim.metadata.annotations.as_ref().and_then(|all| all.get(CLASS_ANNOTATION));
    let class = annotated.or_else(|| spec.and_then(|spec| spec.storage_class_name.as_ref()));
    let class = class.filter(|class| !class.is_empty());
    if let Some(class) = class {
        used.insert(format!("{class}{CLASS}persistentvolumeclaims"), one());
    }
    let requests = spec.and_then(|spec| spec.resources.as_ref()?.requests.as_ref());
    let allocated = claim.status.as_ref().and_then(|status| status.allocated_resources.as_ref());
    let sizes = [requests, allocated].into_iter().flatten().filter_map(|all| all.get("storage"));
    if let Some(size) = sizes.max_by_key(|size| value(size)) {
        used.insert("requests.storage".into(), size.clone());
        if let Some(class) = class {
            used.insert(format!("{class}{CLASS}requests.storage"), size.clone());
        }
    }
    used
}

/// Classes of devices, and the extended resource that each names.
#[derive(Clone, Debug, Default)]
pub struct DeviceClasses(BTreeMap<String, Option<String>>);

impl DeviceClasses {
    pub fn new<'a>(classes: impl IntoIterator<Item = &'a DeviceClass>) -> Self {
        let entry = |class: &DeviceClass| {
            let resource = class.spec.extended_resource_name.clone();
            (class.metadata.name.clone().unwrap_or_default(), resource)
        };
        Self(classes.into_iter().map(entry).collect())
    }

    /// Reports whether ResourceClaims count for the quota's resource `name` by a device class.
    pub fn stand_for(&self, name: &str) -> bool {
        let Some(resource) = name.strip_prefix("requests.") else { return false };
        match resource.strip_prefix(IMPLICIT) {
            Some(class) => self.0.contains_key(class),
            None => self.0.values().any(|known| known.as_deref() == Some(resource)),
        }
    }
}

/// The pod for which the scheduler created a claim, for its extended resources.
pub fn extended_owner(claim: &ResourceClaim) -> Option<(&str, &str)> {
    const EXTENDED: &str = "resource.kubernetes.io/extended-resource-claim";
    let annotations = claim.metadata.annotations.as_ref()?;
    annotations.get(EXTENDED).filter(|value| *value == "true")?;
    let mut owners = claim.metadata.owner_references.iter().flatten();
    let owner = owners.find(|owner| owner.controller == Some(true))?;
    (owner.kind == "Pod" && owner.api_version == "v1").then_some((&*owner.name, &*owner.uid))
}

/// The usage that already counts for the pod of a claim. Empty if the claim is not the pod's.
/// `claims`: the claims of the namespace.
pub fn of_owner<'a>(
    claim: &ResourceClaim,
    pods: impl IntoIterator<Item = &'a Pod>,
    claims: impl IntoIterator<Item = &'a ResourceClaim>,
    now: Timestamp,
) -> Amounts {
    let Some((name, uid)) = extended_owner(claim) else { return Amounts::new() };
    let is_owner = |pod: &&Pod| {
        pod.metadata.name.as_deref() == Some(name) && pod.metadata.uid.as_deref() == Some(uid)
    };
    let Some(pod) = pods.into_iter().find(is_owner) else { return Amounts::new() };
    let status = pod.status.as_ref();
    let told = status.and_then(|status| status.extended_resource_claim_status.as_ref());
    let is_its_own = match told {
        Some(told) => Some(&told.resource_claim_name) == claim.metadata.name.as_ref(),
        None => {
            let age = |claim: &ResourceClaim| {
                (claim.metadata.creation_timestamp.clone(), claim.metadata.name.clone())
            };
            let siblings =
                claims.into_iter().filter(|one| extended_owner(one) == extended_owner(claim));
            !siblings.into_iter().any(|one| age(one) < age(claim))
        }
    };
    if is_its_own { of_pod(pod, now) } else { Amounts::new() }
}

/// `counted`: the usage of the claim's pod, see [`of_owner`].
pub fn of_device_claim(
    claim: &ResourceClaim,
    classes: &DeviceClasses,
    counted: &Amounts,
) -> Amounts {
    let mut used = Amounts::from([(DEVICE_CLAIMS.to_owned(), one())]);
    let mut devices: BTreeMap<&str, i64> = BTreeMap::new();
    for request in claim.spec.devices.iter().flat_map(|one| one.requests.iter().flatten()) {
        for (class, count) in most(request) {
            *devices.entry(class).or_default() += count;
        }
    }
    for (class, count) in devices {
        let all = Quantity(count.to_string());
        used.insert(format!("{class}{DEVICES}"), all.clone());
        let named = classes.0.get(class).and_then(Option::as_ref);
        let implicit = format!("{IMPLICIT}{class}");
        for resource in named.into_iter().chain([&implicit]) {
            let name = format!("requests.{resource}");
            let known = counted.get(&name).map(value).unwrap_or_default();
            let more = value(&all) - known;
            if !more.is_zero() && !more.is_negative() {
                used.insert(name, Quantity(more.canonical(Format::Decimal)));
            }
        }
    }
    used
}

/// The largest number of devices of each class that a request may get.
fn most(request: &DeviceRequest) -> BTreeMap<&str, i64> {
    let number = |mode: Option<&str>, count: Option<i64>| match mode {
        None | Some("" | "ExactCount") => count.unwrap_or(1),
        Some("All") => ALL_DEVICES,
        Some(_) => 0,
    };
    let mut classes: BTreeMap<&str, i64> = BTreeMap::new();
    if let Some(one) = &request.exactly {
        let count = number(one.allocation_mode.as_deref(), one.count);
        classes.insert(&one.device_class_name, count);
    }
    for one in request.first_available.iter().flatten() {
        let most = classes.entry(&one.device_class_name).or_default();
        *most = (*most).max(number(one.allocation_mode.as_deref(), one.count));
    }
    classes
}

/// The scopes of a quota as selectors: those of `scopes` are satisfied by existence.
pub fn scopes(quota: &ResourceQuota) -> Vec<ScopedResourceSelectorRequirement> {
    let Some(spec) = &quota.spec else { return vec![] };
    let plain = spec.scopes.iter().flatten().map(|scope| ScopedResourceSelectorRequirement {
        scope_name: scope.clone(),
        operator: "Exists".into(),
        values: None,
    });
    let selector = spec.scope_selector.as_ref().and_then(|one| one.match_expressions.as_ref());
    plain.chain(selector.into_iter().flatten().cloned()).collect()
}

pub fn pod_is_in_scope(pod: &Pod, scope: &ScopedResourceSelectorRequirement) -> bool {
    let Some(spec) = &pod.spec else { return false };
    match scope.scope_name.as_str() {
        "Terminating" => spec.active_deadline_seconds.is_some_and(|seconds| seconds >= 0),
        "NotTerminating" => spec.active_deadline_seconds.is_none_or(|seconds| seconds < 0),
        "BestEffort" => is_best_effort(pod),
        "NotBestEffort" => !is_best_effort(pod),
        "PriorityClass" => matches(scope, spec.priority_class_name.as_deref().unwrap_or_default()),
        "CrossNamespacePodAffinity" => reaches_other_namespaces(pod),
        _ => false,
    }
}

pub fn claim_is_in_scope(
    claim: &PersistentVolumeClaim,
    scope: &ScopedResourceSelectorRequirement,
) -> bool {
    let names = attributes_classes(claim);
    scope.scope_name == "VolumeAttributesClass"
        && (names.iter().any(|name| matches(scope, name)) || names.is_empty() && matches(scope, ""))
}

/// The VolumeAttributesClasses of a claim: the wanted one, the volume's present one, and the one that
/// the volume is changing to.
pub fn attributes_classes(claim: &PersistentVolumeClaim) -> BTreeSet<&str> {
    let wanted = claim.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.as_deref());
    let status = claim.status.as_ref();
    let current = status.and_then(|status| status.current_volume_attributes_class_name.as_deref());
    let target = status
        .and_then(|status| status.modify_volume_status.as_ref())
        .and_then(|change| change.target_volume_attributes_class_name.as_deref());
    [wanted, current, target].into_iter().flatten().filter(|name| !name.is_empty()).collect()
}

fn matches(scope: &ScopedResourceSelectorRequirement, name: &str) -> bool {
    let listed = || scope.values.iter().flatten().any(|value| value == name);
    match scope.operator.as_str() {
        "Exists" => !name.is_empty(),
        "DoesNotExist" => name.is_empty(),
        "In" => !name.is_empty() && listed(),
        "NotIn" => !listed(),
        _ => false,
    }
}

fn is_best_effort(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return true };
    let counts = |all: Option<&Amounts>| {
        all.into_iter().flatten().any(|(name, amount)| {
            matches!(name.as_str(), "cpu" | "memory") && value(amount) > Amount::default()
        })
    };
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let mut stated = containers.flat_map(|one| [requests_of(one), limits_of(one)]);
    let whole = spec.resources.as_ref();
    !stated.any(counts)
        && !counts(whole.and_then(|whole| whole.requests.as_ref()))
        && !counts(whole.and_then(|whole| whole.limits.as_ref()))
}

fn reaches_other_namespaces(pod: &Pod) -> bool {
    let Some(affinity) = pod.spec.as_ref().and_then(|spec| spec.affinity.as_ref()) else {
        return false;
    };
    let reaches = |term: &PodAffinityTerm| {
        term.namespaces.as_ref().is_some_and(|all| !all.is_empty())
            || term.namespace_selector.is_some()
    };
    let with = affinity.pod_affinity.as_ref();
    let without = affinity.pod_anti_affinity.as_ref();
    let required = |terms: Option<&Vec<PodAffinityTerm>>| terms.into_iter().flatten().any(reaches);
    let preferred = with
        .and_then(|one| one.preferred_during_scheduling_ignored_during_execution.as_ref())
        .into_iter()
        .chain(
            without
                .and_then(|one| one.preferred_during_scheduling_ignored_during_execution.as_ref()),
        )
        .flatten();
    required(with.and_then(|one| one.required_during_scheduling_ignored_during_execution.as_ref()))
        || required(
            without
                .and_then(|one| one.required_during_scheduling_ignored_during_execution.as_ref()),
        )
        || preferred.map(|one| &one.pod_affinity_term).any(reaches)
}

fn one() -> Quantity {
    Quantity("1".into())
}

pub fn value(quantity: &Quantity) -> Amount {
    Amount::parse(&quantity.0).unwrap_or_default()
}

/// Sums keep the form (decimal or binary) of the first that is not zero.
pub fn add<'a>(total: &mut Amounts, more: impl IntoIterator<Item = (&'a String, &'a Quantity)>) {
    for (name, amount) in more {
        match total.get_mut(name) {
            None => {
                let format = Format::of(&amount.0);
                total.insert(name.clone(), Quantity(value(amount).canonical(format)));
            }
            Some(known) => {
                let format = Format::of(if value(known).is_zero() { &amount.0 } else { &known.0 });
                *known = Quantity((value(known) + value(amount)).canonical(format));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{Value, from_value, json, to_value};

    use super::*;

    #[test]
    fn pods_use_what_they_ask_for() {
        let check = |spec: Value, expected: Value| {
            let pod: Pod = from_value(json!({"metadata": {}, "spec": spec})).unwrap();
            assert_eq!(to_value(of_pod(&pod, Timestamp::UNIX_EPOCH)).unwrap(), expected, "{spec}");
        };
        check(json!({"containers": [{"name": "a"}]}), json!({"count/pods": "1", "pods": "1"}));
        let two = json!({"containers": [
            {"name": "a", "resources": {"requests": {"cpu": "500m", "memory": "32Mi"},
                                        "limits": {"cpu": "1"}}},
            {"name": "b", "resources": {"requests": {"cpu": "0.6", "example.com/x": "2"}}}]});
        let used = json!({"count/pods": "1", "pods": "1", "cpu": "1100m", "requests.cpu": "1100m",
            "memory": "32Mi", "requests.memory": "32Mi", "limits.cpu": "1",
            "requests.example.com/x": "2"});
        check(two, used);
        let init = json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}],
            "initContainers": [
                {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}},
                {"name": "i", "resources": {"requests": {"cpu": "3"}}}]});
        let used = json!({"count/pods": "1", "pods": "1", "cpu": "4", "requests.cpu": "4"});
        check(init, used);
    }

    #[test]
    fn claims_are_in_the_scopes_of_all_their_classes() {
        let claim: PersistentVolumeClaim = from_value(json!({"metadata": {},
            "spec": {"volumeAttributesClassName": "silver"},
            "status": {"currentVolumeAttributesClassName": "gold",
                "modifyVolumeStatus": {"status": "Pending", "targetVolumeAttributesClassName": "bronze"}}}))
        .unwrap();
        let bare: PersistentVolumeClaim =
            from_value(json!({"metadata": {}, "spec": {"volumeAttributesClassName": ""}})).unwrap();
        for (operator, values, expected) in [
            ("In", json!(["gold"]), (true, false)),
            ("In", json!(["silver"]), (true, false)),
            ("In", json!(["bronze", "other"]), (true, false)),
            ("In", json!(["other"]), (false, false)),
            ("Exists", json!(null), (true, false)),
            ("DoesNotExist", json!(null), (false, true)),
            ("NotIn", json!(["gold", "silver", "bronze"]), (false, true)),
        ] {
            let scope: ScopedResourceSelectorRequirement = from_value(
                json!({"scopeName": "VolumeAttributesClass", "operator": operator, "values": values}),
            )
            .unwrap();
            let got = (claim_is_in_scope(&claim, &scope), claim_is_in_scope(&bare, &scope));
            assert_eq!(got, expected, "{operator} {values}");
        }
    }

    #[test]
    fn names_belong_to_resources() {
        let check = |name: &str, group: &str, resource: &str, expected: bool| {
            assert_eq!(is_used_by(name, group, resource), expected, "{name} {resource}");
        };
        check("cpu", "", "pods", true);
        check("requests.example.com/x", "", "pods", true);
        check("requests.storage", "", "pods", false);
        check("gold.storageclass.storage.k8s.io/requests.storage", "", "pods", false);
        check(
            "gold.storageclass.storage.k8s.io/requests.storage",
            "",
            "persistentvolumeclaims",
            true,
        );
        check("count/deployments.apps", "apps", "deployments", true);
        check("secrets", "", "secrets", true);
        check("services.nodeports", "", "services", true);
        check("deployments", "apps", "deployments", false);
        let (group, resource) = ("resource.k8s.io", "resourceclaims");
        check("gpu.deviceclass.resource.k8s.io/devices", group, resource, true);
        check("count/resourceclaims.resource.k8s.io", group, resource, true);
        check("requests.deviceclass.resource.kubernetes.io/gpu", "", "pods", true);
        check("requests.kubernetes.io/batch-cpu", "", "pods", false);
    }

    #[test]
    fn claims_for_devices_count_what_their_pods_do_not() {
        let class: DeviceClass = from_value(json!({"metadata": {"name": "gpu"},
            "spec": {"extendedResourceName": "example.com/gpu"}}))
        .unwrap();
        let classes = DeviceClasses::new([&class]);
        assert!(classes.stand_for("requests.example.com/gpu"));
        assert!(classes.stand_for("requests.deviceclass.resource.kubernetes.io/gpu"));
        assert!(!classes.stand_for("requests.example.com/other"));
        let pod = |count: &str, status: Value| -> Pod {
            from_value(json!({"metadata": {"name": "p", "uid": "u"}, "status": status,
                "spec": {"containers": [{"name": "c",
                    "resources": {"requests": {"example.com/gpu": count}}}]}}))
            .unwrap()
        };
        let owner = json!([{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u",
            "controller": true}]);
        let claim = |name: &str, requests: Value| -> ResourceClaim {
            from_value(json!({"metadata": {"name": name, "ownerReferences": owner, "annotations":
                {"resource.kubernetes.io/extended-resource-claim": "true"}},
                "spec": {"devices": {"requests": requests}}}))
            .unwrap()
        };
        let gpus = |count: i64| {
            json!([{"name": "r", "exactly": {"deviceClassName": "gpu",
                "allocationMode": "ExactCount", "count": count}}])
        };
        let check =
            |claim: &ResourceClaim, pod: &Pod, others: &[&ResourceClaim], expected: &str| {
                let others = others.iter().copied();
                let counted = of_owner(claim, [pod], others, Timestamp::UNIX_EPOCH);
                let used = of_device_claim(claim, &classes, &counted);
                let shown: Vec<String> =
                    used.into_iter().map(|(name, amount)| format!("{name}={}", amount.0)).collect();
                assert_eq!(shown.join(" "), expected);
            };
        let of_class =
            "count/resourceclaims.resource.k8s.io=1 gpu.deviceclass.resource.k8s.io/devices=2";
        let implicit = "requests.deviceclass.resource.kubernetes.io/gpu=2";
        let two = claim("c", gpus(2));
        // The pod has its two already, by the name that it asks by.
        check(&two, &pod("2", json!({})), &[&two], &format!("{of_class} {implicit}"));
        check(
            &two,
            &pod("1", json!({})),
            &[],
            &format!("{of_class} {implicit} requests.example.com/gpu=1"),
        );
        let all = format!("{of_class} {implicit} requests.example.com/gpu=2");
        // The pod has another claim.
        let told = json!({"extendedResourceClaimStatus":
            {"requestMappings": [], "resourceClaimName": "other"}});
        check(&two, &pod("2", told), &[], &all);
        let older = claim("b", gpus(2));
        check(&two, &pod("2", json!({})), &[&two, &older], &all);
        let either = json!([{"name": "r", "firstAvailable": [
            {"name": "a", "deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 1},
            {"name": "b", "deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 2},
            {"name": "c", "deviceClassName": "nic", "allocationMode": "All"}]}]);
        check(
            &claim("d", either),
            &pod("2", json!({})),
            &[],
            &format!(
                "{of_class} nic.deviceclass.resource.k8s.io/devices=32 {implicit} requests.deviceclass.resource.kubernetes.io/nic=32"
            ),
        );
    }

    #[test]
    fn scopes_divide_pods() {
        let check = |spec: Value, scope: Value, expected: bool| {
            let pod: Pod = from_value(json!({"metadata": {}, "spec": spec})).unwrap();
            let scope = from_value(scope.clone()).unwrap();
            assert_eq!(pod_is_in_scope(&pod, &scope), expected, "{spec} {scope:?}");
        };
        let exists = |name: &str| json!({"scopeName": name, "operator": "Exists"});
        let plain = || json!({"containers": []});
        check(plain(), exists("BestEffort"), true);
        check(plain(), exists("NotTerminating"), true);
        check(json!({"containers": [], "activeDeadlineSeconds": 5}), exists("Terminating"), true);
        let busy = json!({"containers": [{"name": "a", "resources": {"limits": {"cpu": "1"}}}]});
        check(busy, exists("NotBestEffort"), true);
        let high = json!({"containers": [], "priorityClassName": "high"});
        let within = json!({"scopeName": "PriorityClass", "operator": "In", "values": ["high"]});
        check(high, within.clone(), true);
        check(plain(), within, false);
    }
}
