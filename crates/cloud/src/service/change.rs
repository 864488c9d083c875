//! Which Services want a load balancer of the cloud, and which changes of a Service concern it. Pure.
//!
//! Deviation: a Service with a `loadBalancerClass` keeps its finalizer until the class's own controller removes it;
//! upstream's controller removes the finalizer of such a Service when it is deleted.
//! Upstream: `needsUpdate` and `needsCleanup` of `cloud-provider/controllers/service`.

use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};

pub const FINALIZER: &str = "service.kubernetes.io/load-balancer-cleanup";

/// Services with a class belong to the controller of that class.
pub fn wants(service: &Service) -> bool {
    let Some(spec) = &service.spec else { return false };
    spec.type_.as_deref() == Some("LoadBalancer") && spec.load_balancer_class.is_none()
}

/// Whether the finalizer asks for the removal of the load balancer.
pub fn needs_cleanup(service: &Service) -> bool {
    let spec = service.spec.as_ref();
    let is_balancer = spec.is_some_and(|spec| spec.type_.as_deref() == Some("LoadBalancer"));
    let has_class = spec.is_some_and(|spec| spec.load_balancer_class.is_some());
    let is_deleted = service.metadata.deletion_timestamp.is_some();
    has_finalizer(service) && !has_class && (is_deleted || !is_balancer)
}

pub fn has_finalizer(service: &Service) -> bool {
    let finalizers = service.metadata.finalizers.as_ref();
    finalizers.is_some_and(|all| all.iter().any(|one| one == FINALIZER))
}

/// Whether a change concerns the load balancer. `new` wants one.
pub fn concerns(old: &Service, new: &Service) -> bool {
    if !wants(old) || old.metadata.uid != new.metadata.uid {
        return true;
    }
    let (Some(before), Some(after)) = (&old.spec, &new.spec) else { return true };
    let annotations = |service: &Service| service.metadata.annotations.clone().unwrap_or_default();
    annotations(old) != annotations(new) || specs_differ(before, after)
}

fn specs_differ(old: &ServiceSpec, new: &ServiceSpec) -> bool {
    let families = |spec: &ServiceSpec| spec.ip_families.as_ref().map_or(0, Vec::len);
    old.load_balancer_source_ranges != new.load_balancer_source_ranges
        || ports(old) != ports(new)
        || old.session_affinity != new.session_affinity
        || old.session_affinity_config != new.session_affinity_config
        || old.load_balancer_ip != new.load_balancer_ip
        || old.external_ips != new.external_ips
        || old.external_traffic_policy != new.external_traffic_policy
        || old.health_check_node_port != new.health_check_node_port
        || families(old) != families(new)
}

fn ports(spec: &ServiceSpec) -> &[ServicePort] {
    spec.ports.as_deref().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn service(patch: Value) -> Service {
        let mut service = json!({"metadata": {"name": "s", "uid": "1"}, "spec": {"type": "LoadBalancer",
            "ports": [{"port": 80, "nodePort": 30000}]}});
        json_merge(&mut service, &patch);
        serde_json::from_value(service).expect("a Service")
    }

    fn json_merge(into: &mut Value, patch: &Value) {
        crate::testing::merge(into, patch);
    }

    #[test]
    fn only_some_changes_concern_the_load_balancer() {
        let old = service(json!({}));
        let check = |patch: Value, expected: bool| {
            assert_eq!(concerns(&old, &service(patch.clone())), expected, "{patch}");
        };
        check(json!({}), false);
        check(json!({"metadata": {"labels": {"a": "b"}}}), false);
        check(json!({"metadata": {"finalizers": [FINALIZER]}}), false);
        check(json!({"status": {"loadBalancer": {"ingress": [{"ip": "10.0.0.1"}]}}}), false);
        check(json!({"spec": {"selector": {"a": "b"}}}), false);
        check(json!({"metadata": {"annotations": {"a": "b"}}}), true);
        check(json!({"metadata": {"uid": "2"}}), true);
        check(json!({"spec": {"ports": [{"port": 80, "nodePort": 30001}]}}), true);
        check(json!({"spec": {"loadBalancerSourceRanges": ["10.0.0.0/8"]}}), true);
        check(
            json!({"spec": {"externalTrafficPolicy": "Local", "healthCheckNodePort": 30002}}),
            true,
        );
        check(json!({"spec": {"sessionAffinity": "ClientIP"}}), true);
        check(json!({"spec": {"ipFamilies": ["IPv4"]}}), true);
        check(json!({"spec": {"ipFamilies": ["IPv6"], "externalIPs": ["10.0.0.9"]}}), true);
    }

    #[test]
    fn classes_and_types_decide() {
        let check = |patch: Value, expected: (bool, bool)| {
            let service = service(patch.clone());
            assert_eq!((wants(&service), needs_cleanup(&service)), expected, "{patch}");
        };
        let finalizers = json!([FINALIZER]);
        check(json!({}), (true, false));
        check(json!({"metadata": {"finalizers": finalizers}}), (true, false));
        check(json!({"spec": {"type": "ClusterIP"}}), (false, false));
        check(
            json!({"metadata": {"finalizers": finalizers}, "spec": {"type": "ClusterIP"}}),
            (false, true),
        );
        let gone = "2026-01-01T00:00:00Z";
        check(
            json!({"metadata": {"finalizers": finalizers, "deletionTimestamp": gone}}),
            (true, true),
        );
        check(json!({"spec": {"loadBalancerClass": "a/b"}}), (false, false));
        let deleted = json!({"metadata": {"finalizers": finalizers, "deletionTimestamp": gone}, "spec": {"loadBalancerClass": "a/b"}});
        check(deleted, (false, false));
    }
}
