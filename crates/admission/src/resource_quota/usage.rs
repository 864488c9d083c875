//! The amounts that objects count against a quota. Upstream: `pkg/quota/v1/evaluator/core`.

use api::quota::{self, DeviceClasses, is_extended};
use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation};
use k8s_openapi::api::core::v1::{
    Container, PersistentVolumeClaim, Pod, PodAffinityTerm, PodSpec, ResourceQuota,
    ScopedResourceSelectorRequirement, Service, ServiceSpec,
};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use machinery::Object;
use machinery::quantity::Amount;

use crate::resources::{Measure, Resources, Which, add, of_pod, resources};

const CLASS_SUFFIX: &str = ".storageclass.storage.k8s.io/";
/// A quota of these requires that every container sets them.
const REQUIRED: [&str; 6] =
    ["cpu", "memory", "requests.cpu", "requests.memory", "limits.cpu", "limits.memory"];

/// How objects of one resource are counted.
pub(super) enum Evaluator {
    Pods,
    Services,
    Claims,
    /// Resource claims, with the objects needed to count them.
    Devices(Box<Around>),
    /// By number of objects: `count/deployments.apps`.
    Number(String),
}

/// The objects needed to count resource claims: classes, and the namespace's objects.
#[derive(Default)]
pub(super) struct Around {
    classes: DeviceClasses,
    pods: Vec<Pod>,
    claims: Vec<ResourceClaim>,
}

impl Evaluator {
    pub fn of(group: &str, resource: &str) -> Self {
        match (group, resource) {
            ("", "pods") => Self::Pods,
            ("", "services") => Self::Services,
            ("", "persistentvolumeclaims") => Self::Claims,
            ("resource.k8s.io", "resourceclaims") => Self::Devices(Box::default()),
            ("", _) => Self::Number(format!("count/{resource}")),
            _ => Self::Number(format!("count/{resource}.{group}")),
        }
    }

    /// Reads the objects that counting needs.
    pub async fn look(&mut self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        if let Self::Devices(around) = self {
            let (registry, namespace) = (attributes.registry, attributes.key.namespace.as_str());
            let classes = registry.cached::<DeviceClass>("").await?;
            **around = Around {
                classes: DeviceClasses::new(&classes),
                pods: registry.cached(namespace).await?,
                claims: registry.cached(namespace).await?,
            };
        }
        Ok(())
    }

    /// Whether the request can change the counted amounts.
    pub fn handles(&self, attributes: &Attributes<'_>) -> bool {
        let (operation, sub) = (attributes.operation, attributes.ctx.subresource.as_str());
        match (self, sub) {
            (Self::Pods, "resize") => operation == Operation::Update,
            (Self::Pods, "") if operation == Operation::Update => {
                let terminating =
                    |pod: Option<&Pod>| pod.is_some_and(|pod| is_terminating(pod.spec.as_ref()));
                terminating(attributes.object_as()) != terminating(attributes.old_as())
            }
            (Self::Services | Self::Claims | Self::Devices(_), "") => true,
            (Self::Claims, "status") => {
                let (new, old) = (attributes.object_as(), attributes.old_as());
                new.zip(old).is_some_and(|(new, old)| needs_more(new, old))
            }
            (_, "") => operation == Operation::Create,
            _ => false,
        }
    }

    /// Whether it counts towards this name of a quota.
    pub fn counts(&self, name: &str) -> bool {
        match self {
            Self::Pods => {
                let extended = name.strip_prefix("requests.").is_some_and(is_extended);
                let huge = name.strip_prefix("requests.").unwrap_or(name).starts_with("hugepages-");
                quota::PODS.contains(&name) || huge || extended
            }
            Self::Services => quota::SERVICES.contains(&name),
            Self::Claims => {
                let name = name.split_once(CLASS_SUFFIX).map_or(name, |(_, rest)| rest);
                matches!(
                    name,
                    "count/persistentvolumeclaims" | "persistentvolumeclaims" | "requests.storage"
                )
            }
            Self::Devices(around) => {
                quota::is_used_by(name, "resource.k8s.io", "resourceclaims")
                    || around.classes.stand_for(name)
            }
            Self::Number(count) => name == count || old_name(count) == Some(name),
        }
    }

    /// The object's usage.
    pub fn usage(&self, object: &dyn Object) -> Resources {
        match self {
            Self::Pods => object.downcast().map(pod_usage).unwrap_or_default(),
            Self::Services => object.downcast().map(service_usage).unwrap_or_default(),
            Self::Claims => object.downcast().map(claim_usage).unwrap_or_default(),
            Self::Devices(around) => {
                object.downcast().map(|claim| around.usage(claim)).unwrap_or_default()
            }
            Self::Number(count) => {
                let names = std::iter::once(count.as_str()).chain(old_name(count));
                names.map(|name| (name.to_owned(), Measure::count(1))).collect()
            }
        }
    }

    /// Whether the quota applies to this object.
    pub fn matches(&self, quota: &ResourceQuota, object: &dyn Object) -> bool {
        let hard = quota.status.as_ref().and_then(|status| status.hard.as_ref());
        let relevant = hard.into_iter().flatten().any(|(name, _)| self.counts(name));
        relevant && scopes(quota).iter().all(|scope| self.in_scope(scope, object))
    }

    fn in_scope(&self, scope: &ScopedResourceSelectorRequirement, object: &dyn Object) -> bool {
        match self {
            Self::Pods => object
                .downcast::<Pod>()
                .and_then(|pod| pod.spec.as_ref())
                .is_some_and(|spec| pod_in_scope(scope, spec)),
            Self::Claims => object
                .downcast::<PersistentVolumeClaim>()
                .is_some_and(|claim| quota::claim_is_in_scope(claim, scope)),
            _ => false,
        }
    }

    /// The fields that a quota on these names requires and the object does not set.
    pub fn constraint(&self, names: &[&str], object: &dyn Object) -> Option<String> {
        let (Self::Pods, Some(pod)) = (self, object.downcast::<Pod>()) else { return None };
        let spec = pod.spec.as_ref()?;
        let whole = spec.resources.as_ref();
        if whole.is_some_and(|whole| whole.requests.is_some() || whole.limits.is_some()) {
            return None;
        }
        let mut required: Vec<&str> =
            names.iter().copied().filter(|name| REQUIRED.contains(name)).collect();
        required.sort_unstable();
        let mut missing = vec![];
        for name in required {
            let all = spec.containers.iter().chain(spec.init_containers.iter().flatten());
            let mut lacking: Vec<&str> = all
                .filter(|container| !says(container, name))
                .map(|container| container.name.as_str())
                .collect();
            lacking.sort_unstable();
            if !lacking.is_empty() {
                missing.push(format!("{name} for: {}", lacking.join(",")));
            }
        }
        (!missing.is_empty()).then(|| format!("must specify {}", missing.join("; ")))
    }
}

fn old_name(count: &str) -> Option<&'static str> {
    let name = count.strip_prefix("count/")?;
    quota::COUNTED.iter().find(|old| **old == name).copied()
}

/// The scopes of a quota, from both of its fields.
pub(super) fn scopes(quota: &ResourceQuota) -> Vec<ScopedResourceSelectorRequirement> {
    let Some(spec) = &quota.spec else { return vec![] };
    let plain = spec.scopes.iter().flatten().map(|scope| ScopedResourceSelectorRequirement {
        scope_name: scope.clone(),
        operator: "Exists".into(),
        values: None,
    });
    let selected = spec.scope_selector.iter().flat_map(|one| one.match_expressions.clone());
    plain.chain(selected.flatten()).collect()
}

fn says(container: &Container, name: &str) -> bool {
    let asked = container.resources.as_ref();
    let has = |list: Option<&std::collections::BTreeMap<String, _>>, name: &str| {
        list.is_some_and(|list| list.contains_key(name))
    };
    match name.strip_prefix("limits.") {
        Some(name) => has(asked.and_then(|asked| asked.limits.as_ref()), name),
        None => {
            let name = name.strip_prefix("requests.").unwrap_or(name);
            has(asked.and_then(|asked| asked.requests.as_ref()), name)
        }
    }
}

impl Around {
    fn usage(&self, claim: &ResourceClaim) -> Resources {
        let counted = quota::of_owner(claim, &self.pods, &self.claims, base::clock::now());
        resources(Some(&quota::of_device_claim(claim, &self.classes, &counted)))
    }
}

fn pod_usage(pod: &Pod) -> Resources {
    let mut used = Resources::from([("count/pods".into(), Measure::count(1))]);
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let Some(spec) = pod.spec.as_ref().filter(|_| !matches!(phase, Some("Failed" | "Succeeded")))
    else {
        return used;
    };
    if is_stuck(pod) {
        return used;
    }
    used.insert("pods".into(), Measure::count(1));
    let overhead = resources(spec.overhead.as_ref());
    let mut requests = of_pod(spec, Which::Requests);
    add(&mut requests, &overhead);
    let mut limits = of_pod(spec, Which::Limits);
    for (name, measure) in &overhead {
        if let Some(limit) = limits.get_mut(name) {
            *limit = limit.plus(*measure);
        }
    }
    for (name, measure) in requests {
        let plain = matches!(&*name, "cpu" | "memory" | "ephemeral-storage");
        if plain || name.starts_with("hugepages-") {
            used.insert(name.clone(), measure);
        }
        if plain || name.starts_with("hugepages-") || is_extended(&name) {
            used.insert(format!("requests.{name}"), measure);
        }
    }
    for (name, measure) in limits {
        if matches!(&*name, "cpu" | "memory" | "ephemeral-storage") {
            used.insert(format!("limits.{name}"), measure);
        }
    }
    used
}

/// Deleted, with its grace period over, on a node that does not respond.
fn is_stuck(pod: &Pod) -> bool {
    let meta = &pod.metadata;
    let (Some(at), Some(grace)) = (&meta.deletion_timestamp, meta.deletion_grace_period_seconds)
    else {
        return false;
    };
    let grace = std::time::Duration::from_secs(u64::try_from(grace).unwrap_or_default());
    base::clock::now() > at.0 + grace
}

fn service_usage(service: &Service) -> Resources {
    let nothing = ServiceSpec::default();
    let spec = service.spec.as_ref().unwrap_or(&nothing);
    let ports = spec.ports.as_deref().unwrap_or_default();
    let kind = spec.type_.as_deref().unwrap_or_default();
    let balanced = kind == "LoadBalancer";
    let node_ports = match kind {
        "LoadBalancer" if spec.allocate_load_balancer_node_ports == Some(false) => {
            ports.iter().filter(|port| port.node_port.unwrap_or_default() != 0).count()
        }
        "NodePort" | "LoadBalancer" => ports.len(),
        _ => 0,
    };
    let counts = [
        ("count/services", 1),
        ("services", 1),
        ("services.nodeports", node_ports),
        ("services.loadbalancers", usize::from(balanced)),
    ];
    counts.map(|(name, count)| (name.to_owned(), Measure::count(count))).into()
}

fn claim_usage(claim: &PersistentVolumeClaim) -> Resources {
    const CLASS_ANNOTATION: &str = "volume.beta.kubernetes.io/storage-class";
    let spec = claim.spec.as_ref();
    let annotated = claim.metadata.annotations.as_ref().and_then(|map| map.get(CLASS_ANNOTATION));
    let class = annotated.or(spec.and_then(|spec| spec.storage_class_name.as_ref()));
    let class = class.filter(|class| !class.is_empty());
    let mut used = Resources::new();
    let mut charge = |name: &str, measure: Measure| {
        used.insert(name.to_owned(), measure);
        if let Some(class) = class.filter(|_| !name.starts_with("count/")) {
            used.insert(format!("{class}{CLASS_SUFFIX}{name}"), measure);
        }
    };
    charge("persistentvolumeclaims", Measure::count(1));
    charge("count/persistentvolumeclaims", Measure::count(1));
    let asked = spec.and_then(|spec| spec.resources.as_ref());
    let asked = resources(asked.and_then(|asked| asked.requests.as_ref()));
    let given = claim.status.as_ref().and_then(|status| status.allocated_resources.as_ref());
    let given = resources(given);
    if let Some(asked) = asked.get("storage") {
        let given = given.get("storage").filter(|given| given.amount > asked.amount);
        charge("requests.storage", *given.unwrap_or(asked));
    }
    used
}

/// Whether a claim's new status may count towards another quota, or more. Upstream:
/// `RequiresQuotaReplenish`.
fn needs_more(new: &PersistentVolumeClaim, old: &PersistentVolumeClaim) -> bool {
    let allocated = |claim: &PersistentVolumeClaim| {
        let status = claim.status.as_ref();
        status.and_then(|status| status.allocated_resources.clone())
    };
    allocated(new) != allocated(old)
        || quota::attributes_classes(new) != quota::attributes_classes(old)
}

fn is_terminating(spec: Option<&PodSpec>) -> bool {
    spec.and_then(|spec| spec.active_deadline_seconds).is_some_and(|seconds| seconds >= 0)
}

fn pod_in_scope(scope: &ScopedResourceSelectorRequirement, spec: &PodSpec) -> bool {
    match scope.scope_name.as_str() {
        "Terminating" => is_terminating(Some(spec)),
        "NotTerminating" => !is_terminating(Some(spec)),
        "BestEffort" => is_best_effort(spec),
        "NotBestEffort" => !is_best_effort(spec),
        "PriorityClass" => selected(scope, spec.priority_class_name.as_deref()),
        "CrossNamespacePodAffinity" => looks_abroad(spec),
        _ => false,
    }
}

fn selected(scope: &ScopedResourceSelectorRequirement, value: Option<&str>) -> bool {
    let value = value.filter(|value| !value.is_empty());
    let listed = || scope.values.iter().flatten().any(|one| Some(one.as_str()) == value);
    match scope.operator.as_str() {
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "In" => listed(),
        "NotIn" => !listed(),
        _ => false,
    }
}

/// Upstream: QoS class BestEffort.
fn is_best_effort(spec: &PodSpec) -> bool {
    let asks = |list: crate::resources::Resources| {
        list.iter().any(|(name, one)| {
            matches!(&**name, "cpu" | "memory") && one.amount > Amount::default()
        })
    };
    !asks(of_pod(spec, Which::Requests)) && !asks(of_pod(spec, Which::Limits))
}

fn looks_abroad(spec: &PodSpec) -> bool {
    let Some(affinity) = &spec.affinity else { return false };
    let abroad = |term: &PodAffinityTerm| {
        term.namespaces.as_ref().is_some_and(|all| !all.is_empty())
            || term.namespace_selector.is_some()
    };
    let near = affinity.pod_affinity.iter().any(|one| {
        one.required_during_scheduling_ignored_during_execution.iter().flatten().any(abroad)
            || one
                .preferred_during_scheduling_ignored_during_execution
                .iter()
                .flatten()
                .any(|term| abroad(&term.pod_affinity_term))
    });
    let apart = affinity.pod_anti_affinity.iter().any(|one| {
        one.required_during_scheduling_ignored_during_execution.iter().flatten().any(abroad)
            || one
                .preferred_during_scheduling_ignored_during_execution
                .iter()
                .flatten()
                .any(|term| abroad(&term.pod_affinity_term))
    });
    near || apart
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn shown(used: &Resources) -> String {
        let all = used.iter().map(|(name, one)| format!("{name}={one}"));
        all.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn usage_equals_upstreams() {
        let check = |evaluator: Evaluator, object: Box<dyn Object>, expected: &str| {
            assert_eq!(shown(&evaluator.usage(&*object)), expected);
        };
        let pod = |spec: Value| -> Box<dyn Object> {
            let pod: Pod = serde_json::from_value(json!({"spec": spec})).expect("a pod");
            Box::new(pod)
        };
        check(
            Evaluator::Pods,
            pod(json!({"overhead": {"cpu": "10m"}, "containers": [
                {"name": "a", "resources": {"requests": {"cpu": "100m", "example.com/gpu": "1"},
                    "limits": {"memory": "1Gi"}}},
                {"name": "b", "resources": {"requests": {"cpu": "200m"}}}],
                "initContainers": [{"name": "i", "resources": {"requests": {"cpu": "1"}}}]})),
            "count/pods=1 cpu=1010m limits.memory=1Gi pods=1 requests.cpu=1010m requests.example.com/gpu=1",
        );
        let service: Service = serde_json::from_value(json!({"spec": {"type": "LoadBalancer",
            "ports": [{"port": 1}, {"port": 2}]}}))
        .expect("a service");
        check(
            Evaluator::Services,
            Box::new(service),
            "count/services=1 services=1 services.loadbalancers=1 services.nodeports=2",
        );
        let claim: PersistentVolumeClaim = serde_json::from_value(json!({"spec": {
            "storageClassName": "gold", "resources": {"requests": {"storage": "5Gi"}}}}))
        .expect("a claim");
        check(
            Evaluator::Claims,
            Box::new(claim),
            "count/persistentvolumeclaims=1 gold.storageclass.storage.k8s.io/persistentvolumeclaims=1 gold.storageclass.storage.k8s.io/requests.storage=5Gi persistentvolumeclaims=1 requests.storage=5Gi",
        );
        let secrets = Evaluator::of("", "secrets");
        assert!(secrets.counts("secrets") && secrets.counts("count/secrets"));
        assert!(Evaluator::of("apps", "deployments").counts("count/deployments.apps"));
    }

    #[test]
    fn containers_must_set_limited_resources() {
        let pod: Pod = serde_json::from_value(json!({"spec": {"containers": [
            {"name": "b"}, {"name": "a", "resources": {"limits": {"memory": "1"}}}]}}))
        .expect("a pod");
        assert_eq!(
            Evaluator::Pods.constraint(&["limits.memory", "cpu", "pods"], &pod).as_deref(),
            Some("must specify cpu for: a,b; limits.memory for: b")
        );
    }
}
