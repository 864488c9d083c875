//! Hints of endpoints: which clients should use them, as a Service's `trafficDistribution` asks.
//!
//! In: a Service and one of its endpoints. Out: the hints that the endpoint is to have. Pure.
//! The annotation `service.kubernetes.io/topology-mode: Auto` turns these hints off; `topology.rs` makes its own.
//! Upstream: `k8s.io/endpointslice/trafficdist`.

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointHints, ForNode, ForZone};

/// The annotation's older name, and its present one: `Auto` turns the field's hints off.
const MODES: [&str; 2] =
    ["service.kubernetes.io/topology-aware-hints", "service.kubernetes.io/topology-mode"];

/// Only endpoints that are ready have hints.
pub fn of(service: &Service, endpoint: &Endpoint) -> Option<EndpointHints> {
    let wanted = service.spec.as_ref()?.traffic_distribution.as_deref()?;
    let has_nodes = match wanted {
        "PreferClose" | "PreferSameZone" => false,
        "PreferSameNode" => true,
        _ => return None,
    };
    let is_ready = endpoint.conditions.as_ref().and_then(|conditions| conditions.ready);
    if is_ready != Some(true) || is_automatic(service) {
        return None;
    }
    let zones = endpoint.zone.clone().map(|name| vec![ForZone { name }]);
    let node = endpoint.node_name.clone().filter(|_| has_nodes);
    let nodes = node.map(|name| vec![ForNode { name }]);
    let hints = EndpointHints { for_nodes: nodes, for_zones: zones };
    Some(hints).filter(|hints| hints.for_nodes.is_some() || hints.for_zones.is_some())
}

/// Upstream: `hintsEnabled`; the first of the two that is set counts.
pub fn is_automatic(service: &Service) -> bool {
    let annotations = service.metadata.annotations.as_ref();
    let mode = MODES.iter().find_map(|name| annotations?.get(*name));
    mode.is_some_and(|mode| mode == "Auto" || mode == "auto")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    #[test]
    fn hints_follow_the_field() {
        let check = |field: Value, annotations: Value, endpoint: Value, expected: Value| {
            let service = json!({
                "metadata": {"annotations": annotations}, "spec": {"trafficDistribution": field},
            });
            let service: Service = from_value(service).expect("a Service");
            let endpoint: Endpoint = from_value(endpoint).expect("an endpoint");
            assert_eq!(json!(of(&service, &endpoint)), expected, "{field} {endpoint:?}");
        };
        let ready =
            json!({"addresses": [], "conditions": {"ready": true}, "zone": "z", "nodeName": "n"});
        let zone = json!({"forZones": [{"name": "z"}]});
        check(json!(null), json!({}), ready.clone(), json!(null));
        check(json!("PreferClose"), json!({}), ready.clone(), zone.clone());
        check(json!("PreferSameZone"), json!({}), ready.clone(), zone.clone());
        let both = json!({"forNodes": [{"name": "n"}], "forZones": [{"name": "z"}]});
        check(json!("PreferSameNode"), json!({}), ready.clone(), both);
        let auto = json!({"service.kubernetes.io/topology-mode": "Auto"});
        check(json!("PreferSameZone"), auto, ready.clone(), json!(null));
        let other = json!({"service.kubernetes.io/topology-mode": "Disabled"});
        check(json!("PreferSameZone"), other, ready, zone);
        let unready = json!({"addresses": [], "conditions": {"ready": false}, "zone": "z"});
        check(json!("PreferSameZone"), json!({}), unready, json!(null));
        let nowhere = json!({"addresses": [], "conditions": {"ready": true}});
        check(json!("PreferSameNode"), json!({}), nowhere, json!(null));
    }
}
