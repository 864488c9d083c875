//! The networking and discovery groups. Upstream: `pkg/apis/networking/validation`,
//! `pkg/apis/discovery/validation`.

use std::collections::HashSet;

use machinery::field::Path;
use machinery::names;
use serde_json::Value;

use super::at::At;
use super::{batch, ip};

pub(crate) fn network_policy(at: &At<'_>) {
    policy(at, &HashSet::new());
}

pub(crate) fn network_policy_update(at: &At<'_>, old: &At<'_>) {
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

pub(crate) fn ingress(at: &At<'_>) {
    ingress_rules(at);
    let note = at.get("metadata.annotations").key("kubernetes.io/ingress.class");
    let class = at.get("spec.ingressClassName");
    if note.is_set() && class.is_set() && note.str() != class.str() {
        // Upstream's path leaves `metadata` out.
        let path = Path::new("annotations").child("kubernetes.io/ingress.class");
        note.called(path).invalid("must match `ingressClassName` when both are specified");
    }
}

pub(crate) fn ingress_update(at: &At<'_>, _old: &At<'_>) {
    ingress_rules(at);
}

fn ingress_rules(at: &At<'_>) {
    let spec = at.get("spec");
    let (rules, backend) = (spec.get("rules"), spec.get("defaultBackend"));
    if rules.is_empty() && !backend.is_set() {
        spec.invalid_as(Value::Null, "either `defaultBackend` or `rules` must be specified");
    }
    if backend.is_set() {
        ingress_backend(&backend);
    }
    for rule in rules.items() {
        let host = rule.get("host");
        if !host.is_empty() {
            if ip::sloppy(host.str()).is_some() {
                host.invalid("must be a DNS name, not an IP address");
            }
            host_name(&host);
        }
        if rule.has("http") {
            let paths = rule.get("http.paths");
            paths.need();
            paths.items().for_each(|path| ingress_path(&path));
        }
    }
    for tls in spec.get("tls").items() {
        tls.get("hosts").items().for_each(|host| host_name(&host));
        tls.get("secretName").any_name(names::dns1123_subdomain);
    }
    if spec.has("ingressClassName") {
        spec.get("ingressClassName").name(names::dns1123_subdomain);
    }
}

fn host_name(at: &At<'_>) {
    match at.str().contains('*') {
        true => at.name(names::wildcard_subdomain),
        false => at.name(names::dns1123_subdomain),
    }
}

fn ingress_path(at: &At<'_>) {
    let (path, kind) = (at.get("path"), at.get("pathType"));
    const ABSOLUTE: &str = "must be an absolute path";
    match kind.str() {
        "" => kind.required("pathType must be specified"),
        "Exact" | "Prefix" => {
            if !path.str().starts_with('/') {
                path.invalid_text(ABSOLUTE);
            }
            for part in ["//", "/./", "/../", "%2f", "%2F"] {
                if path.str().contains(part) {
                    path.invalid(&format!("must not contain '{part}'"));
                }
            }
            for end in ["/..", "/."] {
                if path.str().ends_with(end) {
                    path.invalid(&format!("cannot end with '{end}'"));
                }
            }
        }
        "ImplementationSpecific" => {
            if !path.is_empty() && !path.str().starts_with('/') {
                path.invalid(ABSOLUTE);
            }
        }
        _ => kind.unsupported(&["Exact", "ImplementationSpecific", "Prefix"]),
    }
    ingress_backend(&at.get("backend"));
}

fn ingress_backend(at: &At<'_>) {
    match (at.has("resource"), at.has("service")) {
        (true, true) => at.invalid_as("", "cannot set both resource and service backends"),
        (false, false) => at.invalid_as("", "resource or service backend is required"),
        (true, false) => typed_reference(&at.get("resource")),
        (false, true) => {
            at.get("service.name").need_name(super::service::name);
            let (name, number) = (at.get("service.port.name"), at.get("service.port.number"));
            match (name.is_empty(), number.int() == 0) {
                (false, false) => at.invalid_as("", "cannot set both port name & port number"),
                (false, true) => name.name(names::port_name),
                (true, false) => number.port(),
                (true, true) => at.required("port name or number is required"),
            }
        }
    }
}

fn typed_reference(at: &At<'_>) {
    if at.has("apiGroup") {
        at.get("apiGroup").name(names::dns1123_subdomain);
    }
    at.get("kind").need_name(names::path_segment);
    at.get("name").need_name(names::path_segment);
}

pub(crate) fn ingress_class(at: &At<'_>) {
    let spec = at.get("spec");
    let controller = spec.get("controller");
    if controller.len() > 250 {
        controller.too_long(250);
    }
    batch::domain_prefixed_path(&controller);
    let parameters = spec.get("parameters");
    if !parameters.is_set() {
        return;
    }
    typed_reference(&parameters);
    let (scope, namespace) = (parameters.get("scope"), parameters.get("namespace"));
    match scope.str() {
        _ if !scope.is_set() => scope.required(""),
        "Namespace" if !namespace.is_set() => {
            namespace.required("`parameters.scope` is set to 'Namespace'");
        }
        "Namespace" => namespace.name(names::dns1123_label),
        "Cluster" if namespace.is_set() => {
            namespace.forbidden("`parameters.scope` is set to 'Cluster'");
        }
        "Cluster" => {}
        _ => scope.unsupported(&["Cluster", "Namespace"]),
    }
}

pub(crate) fn ingress_class_update(at: &At<'_>, old: &At<'_>) {
    at.get("spec.controller").unchanged(&old.get("spec.controller"));
    ingress_class(at);
}

pub(crate) fn ip_address(at: &At<'_>) {
    let parent = at.get("spec.parentRef");
    if ["group", "resource", "name", "namespace"].iter().all(|field| parent.get(field).is_empty()) {
        return parent.required("");
    }
    parent.get("group").any_name(names::dns1123_subdomain);
    parent.get("resource").need_name(names::path_segment);
    parent.get("name").need_name(names::path_segment);
    parent.get("namespace").any_name(names::path_segment);
}

pub(crate) fn ip_address_update(at: &At<'_>, old: &At<'_>) {
    at.get("spec.parentRef").unchanged(&old.get("spec.parentRef"));
}

/// The name of an IPAddress is the address.
pub(crate) fn ip_address_name(name: &str) -> Vec<String> {
    let tree = Value::Null;
    let errors = super::at::judge(&tree, |at| ip::canonical(&Path::new("name"), name, at));
    let prefix = format!("Invalid value: {name:?}: ");
    let details = errors.0.into_iter().map(|error| error.message);
    details.map(|text| text.strip_prefix(&prefix).unwrap_or(&text).to_owned()).collect()
}

pub(crate) fn service_cidr(at: &At<'_>) {
    let list = at.get("spec.cidrs");
    if list.is_empty() {
        return list.required("at least one CIDR required");
    }
    if list.len() > 2 {
        return list.invalid("may only hold up to 2 values");
    }
    list.items().for_each(|cidr| ip::canonical_cidr(&cidr));
    let families: Vec<bool> = list
        .strings()
        .iter()
        .filter_map(|text| ip::cidr_of(text))
        .map(|net| net.addr().is_ipv6())
        .collect();
    if families.len() == 2 && families[0] == families[1] {
        list.invalid("may specify no more than one IP for each IP family, i.e 192.168.0.0/24 and 2001:db8::/64");
    }
}

pub(crate) fn service_cidr_update(at: &At<'_>, old: &At<'_>) {
    let (list, before) = (at.get("spec.cidrs"), old.get("spec.cidrs").strings());
    match (before.len(), list.len()) {
        (1, 2) => {
            if let Some(first) = list.items().next().filter(|first| !first.is(before[0])) {
                first.invalid("field is immutable");
            }
            service_cidr(at);
        }
        (was, now) if was == now => {
            for (new, old) in list.items().zip(before) {
                if !new.is(old) {
                    new.invalid("field is immutable");
                }
            }
        }
        _ => list.invalid("field is immutable"),
    }
}

pub(crate) fn endpoint_slice(at: &At<'_>) {
    let kind = at.get("addressType");
    if kind.need() {
        kind.one_of(&["FQDN", "IPv4", "IPv6"]);
    }
    slice_endpoints(at);
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

pub(crate) fn endpoint_slice_update(at: &At<'_>, old: &At<'_>) {
    endpoint_slice(at);
    at.get("addressType").unchanged(&old.get("addressType"));
}
