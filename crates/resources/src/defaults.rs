//! Defaults of kinds that have no file of their own. Upstream: `pkg/apis/*/v1/defaults.go`.
//!
//! Invariant: defaulting twice changes nothing.

use k8s_openapi::api::admissionregistration::v1 as admission;
use k8s_openapi::api::core::v1::LimitRange;
use k8s_openapi::api::flowcontrol::v1 as flow;
use k8s_openapi::api::networking::v1 as networking;
use k8s_openapi::api::resource::v1 as resource;
use k8s_openapi::api::storage::v1::CSIDriver;
use release::features::{self, Feature};

const HTTPS: i32 = 443;
const WEBHOOK_SECONDS: i32 = 10;

/// Sets a text that is absent or empty: in Go they are one.
pub(crate) fn fill(text: &mut Option<String>, default: &str) {
    if text.as_deref().is_none_or(str::is_empty) {
        *text = Some(default.into());
    }
}

/// As [`fill`], of numbers and 0.
fn fill_number(number: &mut Option<i32>, default: i32) {
    if number.is_none_or(|number| number == 0) {
        *number = Some(default);
    }
}

/// Webhooks of both kinds, which are types of their own with the same fields.
macro_rules! webhook {
    ($hook:expr) => {{
        let hook = $hook;
        hook.failure_policy.get_or_insert_with(|| "Fail".into());
        hook.match_policy.get_or_insert_with(|| "Equivalent".into());
        hook.namespace_selector.get_or_insert_default();
        hook.object_selector.get_or_insert_default();
        hook.timeout_seconds.get_or_insert(WEBHOOK_SECONDS);
        for rule in hook.rules.iter_mut().flatten() {
            rule.scope.get_or_insert_with(|| "*".into());
        }
        if let Some(service) = &mut hook.client_config.service {
            service.port.get_or_insert(HTTPS);
        }
    }};
}

pub(crate) fn validating_webhooks(all: &mut admission::ValidatingWebhookConfiguration) {
    all.webhooks.iter_mut().flatten().for_each(|hook| webhook!(hook));
}

pub(crate) fn mutating_webhooks(all: &mut admission::MutatingWebhookConfiguration) {
    for hook in all.webhooks.iter_mut().flatten() {
        webhook!(&mut *hook);
        hook.reinvocation_policy.get_or_insert_with(|| "Never".into());
    }
}

fn match_resources(resources: Option<&mut admission::MatchResources>) {
    let Some(resources) = resources else { return };
    resources.match_policy.get_or_insert_with(|| "Equivalent".into());
    resources.namespace_selector.get_or_insert_default();
    resources.object_selector.get_or_insert_default();
    for list in [&mut resources.resource_rules, &mut resources.exclude_resource_rules] {
        for rule in list.iter_mut().flatten() {
            rule.scope.get_or_insert_with(|| "*".into());
        }
    }
}

pub(crate) fn validating_policy(policy: &mut admission::ValidatingAdmissionPolicy) {
    let spec = policy.spec.get_or_insert_default();
    spec.failure_policy.get_or_insert_with(|| "Fail".into());
    match_resources(spec.match_constraints.as_mut());
}

pub(crate) fn mutating_policy(policy: &mut admission::MutatingAdmissionPolicy) {
    let spec = policy.spec.get_or_insert_default();
    spec.failure_policy.get_or_insert_with(|| "Fail".into());
    match_resources(spec.match_constraints.as_mut());
}

pub(crate) fn validating_binding(binding: &mut admission::ValidatingAdmissionPolicyBinding) {
    match_resources(binding.spec.match_resources.as_mut());
}

pub(crate) fn mutating_binding(binding: &mut admission::MutatingAdmissionPolicyBinding) {
    let spec = binding.spec.get_or_insert_default();
    match_resources(spec.match_resources.as_mut());
}

pub(crate) fn network_policy(policy: &mut networking::NetworkPolicy) {
    let spec = policy.spec.get_or_insert_default();
    let ingress = spec.ingress.iter_mut().flatten().flat_map(|rule| rule.ports.iter_mut());
    let egress = spec.egress.iter_mut().flatten().flat_map(|rule| rule.ports.iter_mut());
    for port in ingress.chain(egress).flatten() {
        port.protocol.get_or_insert_with(|| "TCP".into());
    }
    let types = spec.policy_types.get_or_insert_default();
    if types.is_empty() {
        types.push("Ingress".into());
        if spec.egress.as_ref().is_some_and(|rules| !rules.is_empty()) {
            types.push("Egress".into());
        }
    }
}

pub(crate) fn ingress_class(class: &mut networking::IngressClass) {
    if let Some(parameters) = class.spec.as_mut().and_then(|spec| spec.parameters.as_mut()) {
        parameters.scope.get_or_insert_with(|| "Cluster".into());
    }
}

pub(crate) fn flow_schema(schema: &mut flow::FlowSchema) {
    const PRECEDENCE: i32 = 1000;
    fill_number(&mut schema.spec.get_or_insert_default().matching_precedence, PRECEDENCE);
}

pub(crate) fn priority_level(level: &mut flow::PriorityLevelConfiguration) {
    const SHARES: i32 = 30;
    let spec = level.spec.get_or_insert_default();
    if let Some(exempt) = &mut spec.exempt {
        exempt.nominal_concurrency_shares.get_or_insert(0);
        exempt.lendable_percent.get_or_insert(0);
    }
    let Some(limited) = &mut spec.limited else { return };
    limited.nominal_concurrency_shares.get_or_insert(SHARES);
    limited.lendable_percent.get_or_insert(0);
    let response = limited.limit_response.as_mut();
    if let Some(queuing) = response.and_then(|response| response.queuing.as_mut()) {
        for (number, default) in [
            (&mut queuing.hand_size, 8),
            (&mut queuing.queues, 64),
            (&mut queuing.queue_length_limit, 50),
        ] {
            fill_number(number, default);
        }
    }
}

pub(crate) fn csi_driver(driver: &mut CSIDriver) {
    let spec = &mut driver.spec;
    spec.attach_required.get_or_insert(true);
    for switch in [
        &mut spec.pod_info_on_mount,
        &mut spec.storage_capacity,
        &mut spec.requires_republish,
        &mut spec.se_linux_mount,
    ] {
        switch.get_or_insert(false);
    }
    spec.fs_group_policy.get_or_insert_with(|| "ReadWriteOnceWithFSType".into());
    if features::enabled(Feature::VolumeLimitScaling) {
        spec.prevent_pod_scheduling_if_missing.get_or_insert(false);
    }
    let modes = spec.volume_lifecycle_modes.get_or_insert_default();
    if modes.is_empty() {
        modes.push("Persistent".into());
    }
}

/// What containers may have at most is what they get, and what they must have is what they ask for,
/// where nothing else is said.
pub(crate) fn limit_range(range: &mut LimitRange) {
    // One that has no name gets one; no other kind does.
    if range.metadata.name.is_none() && range.metadata.generate_name.is_none() {
        range.metadata.name = Some(base::rng::uuid());
    }
    let spec = range.spec.get_or_insert_default();
    for item in spec.limits.iter_mut().filter(|item| item.type_ == "Container") {
        let default = item.default.get_or_insert_default();
        for (name, size) in item.max.iter().flatten() {
            default.entry(name.clone()).or_insert_with(|| size.clone());
        }
        let request = item.default_request.get_or_insert_default();
        for (name, size) in default.iter().chain(item.min.iter().flatten()) {
            request.entry(name.clone()).or_insert_with(|| size.clone());
        }
        item.default.take_if(|map| map.is_empty());
        item.default_request.take_if(|map| map.is_empty());
    }
}

/// Requests for devices, and their alternatives: types of their own with the same fields.
macro_rules! device_request {
    ($request:expr) => {{
        let request = $request;
        fill(&mut request.allocation_mode, "ExactCount");
        if request.allocation_mode.as_deref() == Some("ExactCount")
            && request.count.is_none_or(|count| count == 0)
        {
            request.count = Some(1);
        }
    }};
}

fn claim_spec(spec: &mut resource::ResourceClaimSpec) {
    let devices = spec.devices.iter_mut();
    for request in devices.flat_map(|devices| devices.requests.iter_mut().flatten()) {
        request.exactly.iter_mut().for_each(|exact| device_request!(exact));
        request.first_available.iter_mut().flatten().for_each(|sub| device_request!(sub));
    }
}

pub(crate) fn resource_claim(claim: &mut resource::ResourceClaim) {
    claim_spec(&mut claim.spec);
}

pub(crate) fn claim_template(template: &mut resource::ResourceClaimTemplate) {
    claim_spec(&mut template.spec.spec);
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn defaulted<T>(default: fn(&mut T), object: Value) -> Value
    where
        T: serde::de::DeserializeOwned + serde::Serialize + Clone + PartialEq,
    {
        let mut object: T = serde_json::from_value(object).expect("an object of the kind");
        default(&mut object);
        let once = object.clone();
        default(&mut object);
        assert!(object == once, "defaulting twice changes nothing");
        serde_json::to_value(object).expect("objects encode")
    }

    #[test]
    fn what_is_left_out_is_filled_in() {
        let policy = json!({"spec": {"podSelector": {}, "egress": [{"ports": [{"port": 1}]}]}});
        let rule = json!([{"ports": [{"port": 1, "protocol": "TCP"}]}]);
        let range = json!({"spec": {"limits": [
            {"type": "Container", "max": {"cpu": "2"}, "min": {"memory": "1"}},
        ]}});
        let level = json!({"spec": {"type": "Limited", "limited": {
            "limitResponse": {"type": "Queue", "queuing": {"queues": 0}},
        }}});
        for (found, pointer, expected) in [
            (defaulted(network_policy, policy.clone()), "/spec/egress", rule),
            (defaulted(network_policy, policy), "/spec/policyTypes", json!(["Ingress", "Egress"])),
            (
                defaulted(limit_range, range),
                "/spec/limits/0/defaultRequest",
                json!({"cpu": "2", "memory": "1"}),
            ),
            (
                defaulted(priority_level, level),
                "/spec/limited/limitResponse/queuing",
                json!({"handSize": 8, "queues": 64, "queueLengthLimit": 50}),
            ),
        ] {
            assert_eq!(found.pointer(pointer), Some(&expected), "{pointer}");
        }
    }
}
