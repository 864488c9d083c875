//! NetworkPolicy: what may talk to which pods.

use std::collections::HashSet;

use k8s_openapi::api::networking::v1::NetworkPolicy;
use machinery::names;
use serde_json::Value;

use crate::kind::{Kind, Rules, Updates, age, field, name};
use crate::print::selector;
use crate::validate::at::At;
use crate::validate::{ip, warnings};

pub(crate) static KIND: Kind<NetworkPolicy> = Kind {
    short: &["netpol"],
    default,
    generation: Some(|new, old| new.spec != old.spec),
    rules: Rules { create: network_policy, update: Some(network_policy_update), ..Rules::NONE },
    warnings: Some(warnings::addresses::network_policy),
    warns_on_update: Updates::All,
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

fn network_policy(at: &At<'_>) {
    policy(at, &HashSet::new());
}

fn network_policy_update(at: &At<'_>, old: &At<'_>) {
    let peers = [("ingress", "from"), ("egress", "to")].into_iter().flat_map(|(list, peers)| {
        old.get("spec").get(list).items().flat_map(move |rule| rule.get(peers).items())
    });
    let before: HashSet<&str> = peers
        .flat_map(|peer| {
            let block = peer.get("ipBlock");
            let mut all = block.get("except").strings();
            all.push(block.get("cidr").str());
            all
        })
        .collect();
    policy(at, &before);
}

fn policy(at: &At<'_>, before: &HashSet<&str>) {
    let spec = at.get("spec");
    spec.get("podSelector").selector();
    for (list, peers) in [("ingress", "from"), ("egress", "to")] {
        for rule in spec.get(list).items() {
            rule.get("ports").items().for_each(|port| policy_port(&port));
            rule.get(peers).items().for_each(|peer| policy_peer(&peer, before));
        }
    }
    let types = spec.get("policyTypes");
    if types.len() > 2 {
        return types.invalid("may not specify more than two policyTypes");
    }
    types.items().for_each(|kind| kind.one_of(&["Ingress", "Egress"]));
}

fn policy_port(at: &At<'_>) {
    at.get("protocol").any_of(&["TCP", "UDP", "SCTP"]);
    let (port, end) = (at.get("port"), at.get("endPort"));
    match port.value {
        Value::Null => {
            if end.is_set() {
                end.invalid("may not be specified when `port` is not specified");
            }
        }
        Value::String(_) => {
            if end.is_set() {
                end.invalid("may not be specified when `port` is non-numeric");
            }
            port.name(names::port_name);
        }
        _ => {
            port.port();
            if end.is_set() {
                if end.int() < port.int() {
                    end.invalid_as(port.int(), "must be greater than or equal to `port`");
                }
                end.port();
            }
        }
    }
}

fn policy_peer(at: &At<'_>, before: &HashSet<&str>) {
    let fields = ["podSelector", "namespaceSelector", "ipBlock"];
    let count = fields.iter().filter(|field| at.has(field)).count();
    at.get("podSelector").selector();
    at.get("namespaceSelector").selector();
    if at.has("ipBlock") {
        ip_block(&at.get("ipBlock"), before);
    }
    if count == 0 {
        at.required("must specify a peer");
    } else if count > 1 && at.has("ipBlock") {
        at.forbidden("may not specify both ipBlock and another peer");
    }
}

fn ip_block(at: &At<'_>, before: &HashSet<&str>) {
    let judge = |at: &At<'_>| {
        if !before.contains(at.str()) {
            ip::legacy_cidr(at);
        }
        ip::cidr_of(at.str())
    };
    if !at.get("cidr").need() {
        return;
    }
    let Some(whole) = judge(&at.get("cidr")) else { return };
    for except in at.get("except").items() {
        let Some(part) = judge(&except) else { continue };
        let is_part = whole.contains(&part.network()) && whole.prefix_len() < part.prefix_len();
        if !is_part {
            except.invalid("must be a strict subset of `cidr`");
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
