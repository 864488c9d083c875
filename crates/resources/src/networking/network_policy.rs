//! NetworkPolicy: what may talk to which pods.

use k8s_openapi::api::networking::v1::NetworkPolicy;

use crate::kind::{Kind, Rules, age, field, name};
use crate::print::selector;
use crate::validate::networking;

pub(crate) static KIND: Kind<NetworkPolicy> = Kind {
    short: &["netpol"],
    default,
    generation: Some(|new, old| new.spec != old.spec),
    rules: Rules {
        create: networking::network_policy,
        update: Some(networking::network_policy_update),
        ..Rules::NONE
    },
    columns: &[
        name(),
        field(
            "Pod-Selector",
            "string",
            "api.networking.v1.NetworkPolicySpec.podSelector",
            |policy| {
                selector(policy.spec.as_ref().and_then(|spec| spec.pod_selector.as_ref())).into()
            },
        ),
        age(),
    ],
    ..Kind::BASE
};

fn default(policy: &mut NetworkPolicy) {
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::defaults::tests::defaulted;

    #[test]
    fn protocols_and_types_are_filled_in() {
        let policy = json!({"spec": {"podSelector": {}, "egress": [{"ports": [{"port": 1}]}]}});
        let found = defaulted(KIND.default, policy);
        let rule = json!([{"ports": [{"port": 1, "protocol": "TCP"}]}]);
        assert_eq!(found["spec"]["egress"], rule);
        assert_eq!(found["spec"]["policyTypes"], json!(["Ingress", "Egress"]));
    }
}
