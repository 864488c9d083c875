//! Cells of kinds whose strategy is one that many share, as upstream's printers write them.
//! Upstream: `pkg/printers/internalversion`.
//!
//! Invariant: as many cells, in the same order, as [`crate::columns`] has columns for the kind.

use k8s_openapi::api::{
    admissionregistration::v1 as admission, autoscaling::v2 as autoscaling,
    flowcontrol::v1 as flowcontrol, networking::v1 as networking, node::v1 as node,
    policy::v1 as policy, resource::v1 as resource, storage::v1 as storage,
    storagemigration::v1beta1 as storagemigration,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use machinery::{LabelSelector, Object};
use serde_json::Value;

use crate::print::{age, or_none};

pub(crate) fn validating_policy(policy: &admission::ValidatingAdmissionPolicy) -> Vec<Value> {
    let spec = policy.spec.as_ref();
    let count = spec.and_then(|spec| spec.validations.as_ref()).map_or(0, Vec::len);
    let params = param_kind(spec.and_then(|spec| spec.param_kind.as_ref()));
    vec![policy.name().into(), count.into(), params.into(), age(policy)]
}

pub(crate) fn mutating_policy(policy: &admission::MutatingAdmissionPolicy) -> Vec<Value> {
    let spec = policy.spec.as_ref();
    let count = spec.and_then(|spec| spec.mutations.as_ref()).map_or(0, Vec::len);
    let params = param_kind(spec.and_then(|spec| spec.param_kind.as_ref()));
    vec![policy.name().into(), count.into(), params.into(), age(policy)]
}

fn param_kind(kind: Option<&admission::ParamKind>) -> String {
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    kind.map_or("<unset>".into(), |kind| {
        format!("{}/{}", text(&kind.api_version), text(&kind.kind))
    })
}

pub(crate) fn validating_binding(
    binding: &admission::ValidatingAdmissionPolicyBinding,
) -> Vec<Value> {
    let spec = &binding.spec;
    let policy = spec.policy_name.clone();
    let params = param_ref(spec.param_ref.as_ref());
    vec![binding.name().into(), policy.into(), params.into(), age(binding)]
}

pub(crate) fn mutating_binding(binding: &admission::MutatingAdmissionPolicyBinding) -> Vec<Value> {
    let spec = binding.spec.as_ref();
    let policy = spec.and_then(|spec| spec.policy_name.clone()).unwrap_or_default();
    let params = param_ref(spec.and_then(|spec| spec.param_ref.as_ref()));
    vec![binding.name().into(), policy.into(), params.into(), age(binding)]
}

/// What a policy's parameters are: a name in a namespace, or whatever a selector selects.
fn param_ref(params: Option<&admission::ParamRef>) -> String {
    let Some(params) = params else { return "<unset>".into() };
    let given = |part: &Option<String>| part.clone().filter(|text| !text.is_empty());
    match (given(&params.name), given(&params.namespace), &params.selector) {
        (Some(name), Some(namespace), _) => format!("{namespace}/{name}"),
        (Some(name), None, _) => format!("*/{name}"),
        (None, _, Some(selector)) => go_text(selector),
        _ => "<unset>".into(),
    }
}

/// A selector as Go's generated `String` method prints it.
fn go_text(selector: &LabelSelector) -> String {
    let pairs = selector.match_labels.iter().flatten();
    let labels: String = pairs.map(|(key, value)| format!("{key}: {value},")).collect();
    let expressions: String = selector
        .match_expressions
        .iter()
        .flatten()
        .map(|one| {
            let values = one.values.clone().unwrap_or_default().join(" ");
            format!(
                "LabelSelectorRequirement{{Key:{},Operator:{},Values:[{values}],}},",
                one.key, one.operator
            )
        })
        .collect();
    format!(
        "&LabelSelector{{MatchLabels:map[string]string{{{labels}}},MatchExpressions:[]LabelSelectorRequirement{{{expressions}}},}}"
    )
}

pub(crate) fn validating_webhooks(
    configuration: &admission::ValidatingWebhookConfiguration,
) -> Vec<Value> {
    let count = configuration.webhooks.as_ref().map_or(0, Vec::len);
    vec![configuration.name().into(), count.into(), age(configuration)]
}

pub(crate) fn mutating_webhooks(
    configuration: &admission::MutatingWebhookConfiguration,
) -> Vec<Value> {
    let count = configuration.webhooks.as_ref().map_or(0, Vec::len);
    vec![configuration.name().into(), count.into(), age(configuration)]
}

pub(crate) fn autoscaler(autoscaler: &autoscaling::HorizontalPodAutoscaler) -> Vec<Value> {
    let spec = &autoscaler.spec;
    let status = autoscaler.status.clone().unwrap_or_default();
    let current = status.current_metrics.unwrap_or_default();
    let target = &spec.scale_target_ref;
    let fewest = spec.min_replicas.map_or("<unset>".to_owned(), |count| count.to_string());
    vec![
        autoscaler.name().into(),
        format!("{}/{}", target.kind, target.name).into(),
        metrics(spec.metrics.as_deref().unwrap_or_default(), &current).into(),
        fewest.into(),
        spec.max_replicas.into(),
        status.current_replicas.unwrap_or_default().into(),
        age(autoscaler),
    ]
}

fn metrics(specs: &[autoscaling::MetricSpec], current: &[autoscaling::MetricStatus]) -> String {
    const SHOWN: usize = 2;
    if specs.is_empty() {
        return "<none>".into();
    }
    let all = specs.iter().enumerate().map(|(index, spec)| metric(spec, current.get(index)));
    let text = all.take(SHOWN).collect::<Vec<_>>().join(", ");
    match specs.len().saturating_sub(SHOWN) {
        0 => text,
        more => format!("{text} + {more} more..."),
    }
}

/// Which number of a metric stands against its target.
#[derive(Clone, Copy, PartialEq)]
enum Reading {
    /// The value, or its average where that is the target.
    Value,
    /// The average only.
    Average,
    /// A resource's average, or its share of what is requested.
    Utilization,
}

fn metric(spec: &autoscaling::MetricSpec, current: Option<&autoscaling::MetricStatus>) -> String {
    let (name, target, now, reading) = match spec.type_.as_str() {
        "External" => (
            None,
            spec.external.as_ref().map(|one| &one.target),
            current.and_then(|now| now.external.as_ref()).map(|one| &one.current),
            Reading::Value,
        ),
        "Object" => (
            None,
            spec.object.as_ref().map(|one| &one.target),
            current.and_then(|now| now.object.as_ref()).map(|one| &one.current),
            Reading::Value,
        ),
        "Pods" => (
            None,
            spec.pods.as_ref().map(|one| &one.target),
            current.and_then(|now| now.pods.as_ref()).map(|one| &one.current),
            Reading::Average,
        ),
        "Resource" => (
            spec.resource.as_ref().map(|one| one.name.as_str()),
            spec.resource.as_ref().map(|one| &one.target),
            current.and_then(|now| now.resource.as_ref()).map(|one| &one.current),
            Reading::Utilization,
        ),
        "ContainerResource" => (
            spec.container_resource.as_ref().map(|one| one.name.as_str()),
            spec.container_resource.as_ref().map(|one| &one.target),
            current.and_then(|now| now.container_resource.as_ref()).map(|one| &one.current),
            Reading::Utilization,
        ),
        _ => return "<unknown type>".into(),
    };
    let Some(target) = target else { return "<unknown type>".into() };
    let text = ratio(target, now, reading);
    name.map_or(text.clone(), |name| format!("{name}: {text}"))
}

fn ratio(
    target: &autoscaling::MetricTarget,
    now: Option<&autoscaling::MetricValueStatus>,
    reading: Reading,
) -> String {
    let unknown = || "<unknown>".to_owned();
    let average = || {
        let now = now.and_then(|now| now.average_value.as_ref());
        now.map_or_else(unknown, |quantity| quantity.0.clone())
    };
    let percent = |share: i32| format!("{share}%");
    match (&target.average_value, reading) {
        (Some(wanted), Reading::Value) => format!("{}/{} (avg)", average(), wanted.0),
        (Some(wanted), _) => format!("{}/{}", average(), wanted.0),
        (None, Reading::Average) => format!("{}/0", average()),
        (None, Reading::Value) => {
            let now = now.map(|now| now.value.as_ref().map_or("0".into(), |one| one.0.clone()));
            let wanted = target.value.as_ref().map_or("0".to_owned(), |one| one.0.clone());
            format!("{}/{wanted}", now.unwrap_or_else(unknown))
        }
        (None, Reading::Utilization) => {
            let now = now.and_then(|now| now.average_utilization).map_or_else(unknown, percent);
            let wanted = target.average_utilization.map_or("<auto>".into(), percent);
            format!("{now}/{wanted}")
        }
    }
}

pub(crate) fn flow_schema(schema: &flowcontrol::FlowSchema) -> Vec<Value> {
    let spec = schema.spec.clone().unwrap_or_default();
    let conditions = schema.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let dangling =
        conditions.into_iter().find(|condition| condition.type_.as_deref() == Some("Dangling"));
    let dangling = dangling.and_then(|condition| condition.status.clone());
    vec![
        schema.name().into(),
        spec.priority_level_configuration.name.into(),
        spec.matching_precedence.unwrap_or_default().into(),
        spec.distinguisher_method.map_or("<none>".into(), |method| method.type_).into(),
        age(schema),
        dangling.unwrap_or_else(|| "?".into()).into(),
    ]
}

pub(crate) fn priority_level(level: &flowcontrol::PriorityLevelConfiguration) -> Vec<Value> {
    let spec = level.spec.clone().unwrap_or_default();
    let none = || Value::from("<none>");
    let limited = spec.limited.as_ref();
    let shares = limited
        .map_or_else(none, |limited| limited.nominal_concurrency_shares.unwrap_or_default().into());
    let queuing = limited.and_then(|limited| limited.limit_response.as_ref()?.queuing.as_ref());
    vec![
        level.name().into(),
        spec.type_.clone().into(),
        shares,
        queuing.map_or_else(none, |queuing| queuing.queues.unwrap_or_default().into()),
        queuing.map_or_else(none, |queuing| queuing.hand_size.unwrap_or_default().into()),
        queuing.map_or_else(none, |queuing| queuing.queue_length_limit.unwrap_or_default().into()),
        age(level),
    ]
}

pub(crate) fn ip_address(address: &networking::IPAddress) -> Vec<Value> {
    let parent = &address.spec.parent_ref;
    let given = |part: &Option<String>| part.clone().filter(|text| !text.is_empty());
    let resource = match given(&parent.group) {
        Some(group) => format!("{}.{group}", parent.resource),
        None => parent.resource.clone(),
    };
    let namespace = given(&parent.namespace).map(|name| format!("/{name}")).unwrap_or_default();
    let parent = format!("{}{namespace}/{}", resource.to_lowercase(), parent.name);
    // Upstream's printer has an age that its header lacks.
    vec![address.name().into(), parent.into(), age(address)]
}

pub(crate) fn ingress(ingress: &networking::Ingress) -> Vec<Value> {
    let spec = ingress.spec.clone().unwrap_or_default();
    let has_tls = spec.tls.as_ref().is_some_and(|tls| !tls.is_empty());
    vec![
        ingress.name().into(),
        spec.ingress_class_name.unwrap_or_else(|| "<none>".into()).into(),
        hosts(spec.rules.as_deref().unwrap_or_default()).into(),
        addresses(ingress).into(),
        if has_tls { "80, 443" } else { "80" }.into(),
        age(ingress),
    ]
}

fn hosts(rules: &[networking::IngressRule]) -> String {
    const SHOWN: usize = 3;
    let mut shown: Vec<&str> = vec![];
    let mut is_full = false;
    for rule in rules {
        is_full |= shown.len() == SHOWN;
        if let Some(host) = rule.host.as_deref().filter(|host| !is_full && !host.is_empty()) {
            shown.push(host);
        }
    }
    match (shown.is_empty(), is_full) {
        (true, _) => "*".into(),
        (false, false) => shown.join(","),
        (false, true) => format!("{} + {} more...", shown.join(","), rules.len() - SHOWN),
    }
}

/// Where a load balancer answers, sorted.
fn addresses(ingress: &networking::Ingress) -> String {
    let balancer = ingress.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let points = balancer.into_iter().flat_map(|balancer| balancer.ingress.iter().flatten());
    let all: std::collections::BTreeSet<&str> = points
        .filter_map(|point| {
            let given = |part: &'_ Option<String>| part.as_ref().is_some_and(|one| !one.is_empty());
            if given(&point.ip) { point.ip.as_deref() } else { point.hostname.as_deref() }
        })
        .filter(|address| !address.is_empty())
        .collect();
    all.into_iter().collect::<Vec<_>>().join(",")
}

pub(crate) fn ingress_class(class: &networking::IngressClass) -> Vec<Value> {
    const DEFAULT: &str = "ingressclass.kubernetes.io/is-default-class";
    let annotations = class.metadata.annotations.as_ref();
    let is_default =
        annotations.and_then(|map| map.get(DEFAULT)).is_some_and(|value| value == "true");
    let spec = class.spec.clone().unwrap_or_default();
    let parameters = spec.parameters.map_or("<none>".into(), |parameters| {
        let group = parameters.api_group.map(|group| format!(".{group}")).unwrap_or_default();
        format!("{}{group}/{}", parameters.kind, parameters.name)
    });
    vec![
        format!("{}{}", class.name(), if is_default { " (default)" } else { "" }).into(),
        spec.controller.unwrap_or_default().into(),
        parameters.into(),
        age(class),
    ]
}

pub(crate) fn network_policy(policy: &networking::NetworkPolicy) -> Vec<Value> {
    let selector = policy.spec.as_ref().and_then(|spec| spec.pod_selector.as_ref());
    vec![policy.name().into(), crate::print::selector(selector).into(), age(policy)]
}

pub(crate) fn service_cidr(cidr: &networking::ServiceCIDR) -> Vec<Value> {
    let ranges = cidr.spec.as_ref().and_then(|spec| spec.cidrs.clone()).unwrap_or_default();
    vec![cidr.name().into(), ranges.join(",").into(), age(cidr)]
}

pub(crate) fn runtime_class(class: &node::RuntimeClass) -> Vec<Value> {
    vec![class.name().into(), class.handler.clone().into(), age(class)]
}

pub(crate) fn disruption_budget(budget: &policy::PodDisruptionBudget) -> Vec<Value> {
    let spec = budget.spec.clone().unwrap_or_default();
    let shown = |bound: Option<IntOrString>| match bound {
        None => "N/A".to_owned(),
        Some(IntOrString::Int(count)) => count.to_string(),
        Some(IntOrString::String(share)) => share,
    };
    let allowed = budget.status.as_ref().and_then(|status| status.disruptions_allowed);
    vec![
        budget.name().into(),
        shown(spec.min_available).into(),
        shown(spec.max_unavailable).into(),
        allowed.unwrap_or_default().into(),
        age(budget),
    ]
}

pub(crate) fn csi_driver(driver: &storage::CSIDriver) -> Vec<Value> {
    let spec = &driver.spec;
    let audiences = spec.token_requests.as_ref().map(|requests| {
        requests.iter().map(|one| one.audience.as_str()).collect::<Vec<_>>().join(",")
    });
    vec![
        driver.name().into(),
        spec.attach_required.unwrap_or(true).into(),
        spec.pod_info_on_mount.unwrap_or_default().into(),
        spec.storage_capacity.unwrap_or_default().into(),
        audiences.unwrap_or_else(|| "<unset>".into()).into(),
        spec.requires_republish.unwrap_or_default().into(),
        or_none(spec.volume_lifecycle_modes.clone().unwrap_or_default().join(",")).into(),
        age(driver),
    ]
}

pub(crate) fn csi_node(node: &storage::CSINode) -> Vec<Value> {
    vec![node.name().into(), node.spec.drivers.len().into(), age(node)]
}

pub(crate) fn volume_attachment(attachment: &storage::VolumeAttachment) -> Vec<Value> {
    let spec = &attachment.spec;
    vec![
        attachment.name().into(),
        spec.attacher.clone().into(),
        spec.source.persistent_volume_name.clone().unwrap_or_default().into(),
        spec.node_name.clone().into(),
        attachment.status.as_ref().is_some_and(|status| status.attached).into(),
        age(attachment),
    ]
}

pub(crate) fn attributes_class(class: &storage::VolumeAttributesClass) -> Vec<Value> {
    vec![class.name().into(), class.driver_name.clone().into(), age(class)]
}

pub(crate) fn resource_claim(claim: &resource::ResourceClaim) -> Vec<Value> {
    let status = claim.status.clone().unwrap_or_default();
    let is_deleted = claim.metadata.deletion_timestamp.is_some();
    let is_reserved = status.reserved_for.is_some_and(|users| !users.is_empty());
    let state = match (is_deleted, status.allocation.is_some(), is_reserved) {
        (true, false, _) => "deleted",
        (false, false, _) => "pending",
        (true, true, false) => "deleted,allocated",
        (true, true, true) => "deleted,allocated,reserved",
        (false, true, false) => "allocated",
        (false, true, true) => "allocated,reserved",
    };
    vec![claim.name().into(), state.into(), age(claim)]
}

pub(crate) fn storage_version_migration(
    migration: &storagemigration::StorageVersionMigration,
) -> Vec<Value> {
    let resource = migration.spec.as_ref().map(|spec| &spec.resource);
    let resource = resource
        .map_or(String::new(), |one| machinery::status::qualified(&one.resource, &one.group));
    let conditions = migration.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let mut known = conditions.into_iter().filter(|one| {
        one.status == "True" && matches!(one.type_.as_str(), "Running" | "Failed" | "Succeeded")
    });
    let status = known.next_back().map_or("Unknown", |one| one.type_.as_str());
    vec![migration.name().into(), resource.into(), status.into()]
}

pub(crate) fn resource_slice(slice: &resource::ResourceSlice) -> Vec<Value> {
    let spec = &slice.spec;
    vec![
        slice.name().into(),
        spec.node_name.clone().unwrap_or_default().into(),
        spec.driver.clone().into(),
        spec.pool.name.clone().into(),
        age(slice),
    ]
}
