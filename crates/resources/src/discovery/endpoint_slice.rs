//! EndpointSlice: some of the addresses behind a Service.

use std::collections::HashSet;

use apiserver::resource::MetadataRules;
use k8s_openapi::api::discovery::v1::{EndpointPort, EndpointSlice};
use machinery::names;

use crate::defaults::fill;
use crate::kind::{Kind, Rules, Updates, age, field, name};
use crate::print::first_three;
use crate::validate::at::At;
use crate::validate::{ip, warnings};

pub(crate) static KIND: Kind<EndpointSlice> = Kind {
    default: |slice| {
        for port in slice.ports.iter_mut().flatten() {
            fill(&mut port.protocol, "TCP");
            port.name.get_or_insert_default();
        }
    },
    generation: Some(|new, old| {
        (&new.endpoints, &new.ports, &new.metadata.labels)
            != (&old.endpoints, &old.ports, &old.metadata.labels)
    }),
    // A client that sends an empty list owns the field, though the list is not shown.
    gated: |new, _| {
        new.endpoints.take_if(|endpoints| endpoints.is_empty());
    },
    rules: Rules {
        create: endpoint_slice,
        update: Some(endpoint_slice_update),
        metadata: MetadataRules::WHOLE,
        ..Rules::NONE
    },
    warnings: Some(warnings::addresses::endpoint_slice),
    warns_on_update: Updates::All,
    columns: &[
        name(),
        field("AddressType", "string", "api.discovery.v1.EndpointSlice.addressType", |slice| {
            slice.address_type.clone().into()
        }),
        field("Ports", "string", "api.discovery.v1.EndpointSlice.ports", |slice| {
            ports(slice).into()
        }),
        field("Endpoints", "string", "api.discovery.v1.EndpointSlice.endpoints", |slice| {
            addresses(slice).into()
        }),
        age(),
    ],
    ..Kind::BASE
};

fn ports(slice: &EndpointSlice) -> String {
    let Some(ports) = &slice.ports else { return "<unset>".into() };
    let number =
        |port: &EndpointPort| port.port.map_or("*".to_owned(), |number| number.to_string());
    first_three(ports.iter().map(number).collect())
}

fn addresses(slice: &EndpointSlice) -> String {
    let endpoints = slice.endpoints.iter().flatten();
    let all: Vec<String> = endpoints.flat_map(|one| one.addresses.clone()).collect();
    if all.is_empty() { "<unset>".into() } else { first_three(all) }
}

fn endpoint_slice(at: &At<'_>) {
    kind_and_ports(at);
    slice_endpoints(at);
}

fn kind_and_ports(at: &At<'_>) {
    let kind = at.get("addressType");
    if kind.need() {
        kind.one_of(&["FQDN", "IPv4", "IPv6"]);
    }
    slice_ports(&at.get("ports"));
}

fn slice_endpoints(at: &At<'_>) {
    const MOST: usize = 1000;
    const MOST_ADDRESSES: usize = 100;
    const MOST_HINTS: usize = 8;
    let (list, kind) = (at.get("endpoints"), at.get("addressType").str());
    if list.len() > MOST {
        return list.too_many(MOST);
    }
    for endpoint in list.items() {
        let addresses = endpoint.get("addresses");
        if addresses.is_empty() {
            addresses.required("must contain at least 1 address");
        } else if addresses.len() > MOST_ADDRESSES {
            addresses.too_many(MOST_ADDRESSES);
        }
        for address in addresses.items() {
            slice_address(&address, &addresses, kind);
        }
        if endpoint.has("nodeName") {
            endpoint.get("nodeName").name(names::dns1123_subdomain);
        }
        let topology = endpoint.get("deprecatedTopology");
        if topology.len() > 16 {
            topology.too_many(16);
        }
        topology.labels();
        if endpoint.has("hostname") {
            endpoint.get("hostname").name(names::dns1123_label);
        }
        for hints in ["forZones", "forNodes"] {
            let list = endpoint.get("hints").get(hints);
            if list.len() > MOST_HINTS {
                list.too_many(MOST_HINTS);
                continue;
            }
            let mut seen = HashSet::new();
            for hint in list.items() {
                let name = hint.get("name");
                if !seen.insert(name.str()) {
                    name.duplicate_text();
                } else {
                    match hints {
                        "forZones" => name.name(names::label_value),
                        _ => name.name(names::dns1123_subdomain),
                    }
                }
            }
        }
    }
}

fn slice_address(at: &At<'_>, list: &At<'_>, kind: &str) {
    match kind {
        "IPv4" | "IPv6" => {
            let known = at.errors().0.len();
            ip::legacy(at);
            if at.errors().0.len() > known {
                return;
            }
            let is_v6 = at.str().contains(':');
            if is_v6 != (kind == "IPv6") {
                let article = "an";
                let detail = format!("must be {article} {kind} address");
                list.invalid_as(at.str(), &detail);
            }
            ip::endpoint(at);
        }
        "FQDN" => {
            let name = at.str().strip_suffix('.').unwrap_or(at.str());
            if name.is_empty() {
                at.required("");
            } else if let Some(why) = names::dns1123_subdomain(name).first() {
                at.invalid_as(name, why);
            } else if !name.contains('.') {
                at.invalid("should be a domain with at least two segments separated by dots");
            }
        }
        _ => {}
    }
}

fn slice_ports(list: &At<'_>) {
    const MOST: usize = 20000;
    if list.len() > MOST {
        return list.too_many(MOST);
    }
    let mut seen = HashSet::new();
    for port in list.items() {
        let (name, protocol) = (port.get("name"), port.get("protocol"));
        name.any_name(names::dns1123_label);
        if !seen.insert(name.str()) {
            name.duplicate_text();
        }
        if !protocol.is_set() {
            protocol.required("");
        } else {
            protocol.one_of(&["SCTP", "TCP", "UDP"]);
        }
        if port.has("appProtocol") {
            port.get("appProtocol").name(names::qualified_name);
        }
    }
}

fn endpoint_slice_update(at: &At<'_>, old: &At<'_>) {
    kind_and_ports(at);
    // What an older release stored stays.
    if at.get("endpoints").value != old.get("endpoints").value {
        slice_endpoints(at);
    }
    at.get("addressType").unchanged(&old.get("addressType"));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::validate::at::{judge, judge_both};

    #[test]
    fn ports_come_first_and_old_endpoints_stay() {
        let slice = |port: &str| json!({"addressType": "IPv4", "endpoints": [{"addresses": []}], "ports": [{"name": port, "protocol": "TCP"}]});
        let fields = |errors: machinery::field::FieldErrors| -> Vec<String> {
            errors.0.iter().map(|error| error.field.clone()).collect()
        };
        let (bad, good) = (slice("A"), slice("a"));
        let created = fields(judge(&bad, endpoint_slice));
        assert_eq!(created.first().map(String::as_str), Some("ports[0].name"));
        assert_eq!(created.last().map(String::as_str), Some("endpoints[0].addresses"));
        assert!(fields(judge_both(&good, &good, endpoint_slice_update)).is_empty());
        let emptied = json!({"addressType": "IPv4", "ports": good["ports"]});
        assert_eq!(
            fields(judge_both(&good, &emptied, endpoint_slice_update)),
            ["endpoints[0].addresses"]
        );
    }
}
