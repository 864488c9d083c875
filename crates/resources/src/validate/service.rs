//! Services. Upstream: `validateService`, `ValidateServiceUpdate`.

use std::collections::HashSet;

use machinery::names;
use release::features::{self, Feature};

use super::at::At;
use super::{container, ip};

fn kind<'a>(at: &At<'a>) -> &'a str {
    at.get("spec.type").str()
}

fn is_headless(spec: &At<'_>) -> bool {
    spec.get("clusterIPs").strings() == ["None"]
        || (spec.get("clusterIPs").is_empty() && spec.get("clusterIP").is("None"))
}

fn needs_health_check(spec: &At<'_>) -> bool {
    spec.get("type").is("LoadBalancer") && spec.get("externalTrafficPolicy").is("Local")
}

/// Services may begin with a digit since the gate opened.
pub(crate) fn name(text: &str) -> Vec<String> {
    match features::enabled(Feature::RelaxedServiceNameValidation) {
        true => names::dns1123_label(text),
        false => names::dns1035_label(text),
    }
}

pub(crate) fn create(at: &At<'_>) {
    judge(at, None);
}

pub(crate) fn update(at: &At<'_>, old: &At<'_>) {
    let (spec, before) = (at.get("spec"), old.get("spec"));
    addresses_stay(&spec, &before);
    families_stay(&spec, &before);
    let class = spec.get("loadBalancerClass");
    if [kind(at), kind(old)] == ["LoadBalancer"; 2]
        && class.value != before.get("loadBalancerClass").value
    {
        class.invalid("may not change once set");
    }
    let port = spec.get("healthCheckNodePort");
    if needs_health_check(&spec)
        && needs_health_check(&before)
        && port.value != before.get("healthCheckNodePort").value
    {
        port.forbidden("field is immutable");
    }
    judge(at, Some(old));
}

fn addresses_stay(spec: &At<'_>, before: &At<'_>) {
    if spec.get("type").is("ExternalName") || before.get("type").is("ExternalName") {
        return;
    }
    if is_headless(spec) && is_headless(before) {
        return;
    }
    let list = spec.get("clusterIPs");
    let (new, old) = (list.strings(), before.get("clusterIPs").strings());
    let at_index = |index: usize| list.called(list.path.index(index));
    if new.len() == old.len() {
        for index in (0..new.len()).filter(|index| new[*index] != old[*index]) {
            at_index(index).invalid("may not change once set");
        }
        return;
    }
    if new.is_empty() {
        at_index(0).invalid("primary clusterIP can not be unset");
    } else if !old.is_empty() && new[0] != old[0] {
        at_index(0).invalid("may not change once set");
    }
    let policy = spec.get("ipFamilyPolicy");
    if new.len() == 1 && old.len() > 1 && !policy.is("SingleStack") {
        policy.invalid("must be set to 'SingleStack' when releasing the secondary clusterIP");
    }
}

fn families_stay(spec: &At<'_>, before: &At<'_>) {
    if spec.get("type").is("ExternalName") || before.get("type").is("ExternalName") {
        return;
    }
    if is_headless(spec) || is_headless(before) {
        return;
    }
    let list = spec.get("ipFamilies");
    let (new, old) = (list.strings(), before.get("ipFamilies").strings());
    let first = list.called(list.path.index(0));
    let policy = spec.get("ipFamilyPolicy");
    if new.len() == old.len() {
        for _ in (0..new.len()).filter(|index| new[*index] != old[*index]) {
            first.invalid("may not change once set");
        }
        return;
    }
    if !new.is_empty() && !old.is_empty() && new[0] != old[0] {
        first.with(spec.get("clusterIPs").value).invalid("may not change once set");
    }
    if new.len() == 1 && old.len() > 1 && !policy.is("SingleStack") {
        policy.invalid("must be set to 'SingleStack' when releasing the secondary ipFamily");
    }
}

fn judge(at: &At<'_>, old: Option<&At<'_>>) {
    topology_mode(at);
    let spec = at.get("spec");
    let kind = kind(at);
    let ports = spec.get("ports");
    let headless = is_headless(&spec);
    if ports.is_empty() && !headless && kind != "ExternalName" {
        ports.required("");
    }
    match kind {
        "LoadBalancer" | "NodePort" if headless => {
            let path = spec.child_path("clusterIPs").index(0);
            let detail = format!("may not be set to 'None' for {kind} services");
            spec.called(path).invalid_as("None", &detail);
        }
        "ExternalName" => external_name(&spec),
        _ => {}
    }
    service_ports(&ports);
    spec.get("selector").labels();
    session_affinity(&spec);
    cluster_ips(&spec, old);
    let before = old.map(|old| old.get("spec.externalIPs").string_set()).unwrap_or_default();
    for address in spec.get("externalIPs").items() {
        let known = address.errors().0.len();
        ip::legacy_unless(&address, &before);
        if address.errors().0.len() == known {
            ip::endpoint(&address);
        }
    }
    let kind_at = spec.get("type");
    if kind_at.need() {
        kind_at.one_of(&["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"]);
    }
    repeated_ports(&ports, kind);
    source_ranges(at, &spec, old);
    load_balancer_fields(&spec, kind);
    traffic(&spec, kind);
}

fn topology_mode(at: &At<'_>) {
    const MODE: &str = "service.kubernetes.io/topology-mode";
    const HINTS: &str = "service.kubernetes.io/topology-aware-hints";
    let notes = at.get("metadata.annotations");
    let (mode, hints) = (notes.key(MODE), notes.key(HINTS));
    if mode.is_set() && hints.is_set() && mode.str() != hints.str() {
        mode.invalid(&format!("must match annotations[{HINTS}] when both are specified"));
    }
}

fn external_name(spec: &At<'_>) {
    for (field, is_there) in [
        ("clusterIPs", !spec.get("clusterIPs").is_empty()),
        ("ipFamilies", !spec.get("ipFamilies").is_empty()),
        ("ipFamilyPolicy", spec.has("ipFamilyPolicy")),
    ] {
        if is_there {
            spec.get(field).forbidden("may not be set for ExternalName services");
        }
    }
    let at = spec.get("externalName");
    let name = at.str().strip_suffix('.').unwrap_or(at.str());
    if name.is_empty() {
        return at.required("");
    }
    for why in names::dns1123_subdomain(name) {
        at.invalid_as(name, &why);
    }
}

fn service_ports(list: &At<'_>) {
    let needs_names = list.len() > 1;
    let mut seen = HashSet::new();
    for port in list.items() {
        let name = port.get("name");
        if name.is_empty() {
            if needs_names {
                name.required("");
            }
        } else {
            name.name(names::dns1123_label);
            if !seen.insert(name.str()) {
                name.duplicate();
            }
        }
        port.get("port").port();
        container::protocol(&port.get("protocol"));
        container::port_or_name(&port.get("targetPort"));
        if port.has("appProtocol") {
            port.get("appProtocol").name(names::qualified_name);
        }
    }
}

fn repeated_ports(list: &At<'_>, kind: &str) {
    if kind == "ClusterIP" {
        for port in list.items().filter(|port| port.get("nodePort").int() != 0) {
            port.get("nodePort").forbidden("may not be used when `type` is 'ClusterIP'");
        }
    }
    // Where node ports are given out, that tells of two with one number.
    let mut nodes = HashSet::new();
    let are_given_out = matches!(kind, "NodePort" | "LoadBalancer");
    for port in list.items().filter(|port| port.get("nodePort").int() != 0 && !are_given_out) {
        let key = (port.get("protocol").str(), port.get("nodePort").int());
        if !nodes.insert(key) {
            port.get("nodePort").duplicate();
        }
    }
    let mut seen = HashSet::new();
    for port in list.items() {
        let key = (port.get("protocol").str(), port.get("port").int());
        if !seen.insert(key) {
            let shown = format!(
                "{{\"Name\":\"\",\"Protocol\":{:?},\"AppProtocol\":null,\"Port\":{},\"TargetPort\":0,\"NodePort\":0}}",
                key.0, key.1
            );
            port.errors().duplicate_shown(&port.path, &shown, "");
        }
    }
}

fn session_affinity(spec: &At<'_>) {
    let (affinity, config) = (spec.get("sessionAffinity"), spec.get("sessionAffinityConfig"));
    if affinity.need() {
        affinity.one_of(&["ClientIP", "None"]);
    }
    const WHEN: &str = "when session affinity type is ClientIP";
    match affinity.str() {
        "ClientIP" => {
            let timeout = config.get("clientIP.timeoutSeconds");
            if !config.is_set() {
                config.required(WHEN);
            } else if !config.has("clientIP") {
                config.get("clientIP").required(WHEN);
            } else if !timeout.is_set() {
                timeout.required(WHEN);
            } else if !(1..=86400).contains(&timeout.int()) {
                timeout.invalid("must be greater than 0 and less than 86400");
            }
        }
        "None" if config.is_set() => {
            config.forbidden("must not be set when session affinity is None");
        }
        _ => {}
    }
}

/// Only the addresses and families, for the choice of the families.
pub(crate) fn addresses(at: &At<'_>, old: Option<&At<'_>>) {
    cluster_ips(&at.get("spec"), old);
}

fn cluster_ips(spec: &At<'_>, old: Option<&At<'_>>) {
    if spec.get("type").is("ExternalName") {
        return;
    }
    let (list, first) = (spec.get("clusterIPs"), spec.get("clusterIP"));
    let all = list.strings();
    match (first.str(), all.first()) {
        ("", Some(_)) => list.invalid("must be empty when `clusterIP` is not specified"),
        ("", None) => {}
        (_, None) => list.required(""),
        (one, Some(other)) if one != *other => list.invalid("first value must match `clusterIP`"),
        _ => {}
    }
    let mut families = HashSet::new();
    for family in spec.get("ipFamilies").items() {
        family.one_of(&["IPv4", "IPv6"]);
        if !families.insert(family.str()) {
            family.duplicate();
        }
    }
    spec.get("ipFamilyPolicy").any_of(&["PreferDualStack", "RequireDualStack", "SingleStack"]);
    let before = old.map(|old| old.get("spec.clusterIPs").string_set()).unwrap_or_default();
    let known = list.errors().0.len();
    for (index, address) in list.items().enumerate() {
        if index == 0 && address.is("None") {
            if all.len() > 1 {
                list.invalid("'None' must be the first and only value");
            }
            continue;
        }
        ip::legacy_unless(&address, &before);
    }
    let is_sound = list.errors().0.len() == known;
    if all.len() > 2 {
        list.invalid("may only hold up to 2 values");
    }
    if !is_sound {
        return;
    }
    let is_v6 = |text: &str| text.contains(':');
    if all.len() > 1 && !ip::is_dual_stack(all.iter().map(|one| is_v6(one)).take(2)) {
        list.invalid("may specify no more than one IP for each IP family");
    }
    if is_headless(spec) {
        return;
    }
    let families = spec.get("ipFamilies").strings();
    for (index, (address, family)) in list.items().zip(families).enumerate() {
        if (family == "IPv6") != is_v6(address.str()) {
            let detail =
                format!("expected an {family} value as indicated by `ipFamilies[{index}]`");
            address.invalid(&detail);
        }
    }
}

fn source_ranges(at: &At<'_>, spec: &At<'_>, old: Option<&At<'_>>) {
    const ONLY: &str = "may only be used when `type` is 'LoadBalancer'";
    const NOTE: &str = "service.beta.kubernetes.io/load-balancer-source-ranges";
    let is_balanced = spec.get("type").is("LoadBalancer");
    let path = spec.child_path("LoadBalancerSourceRanges");
    let list = spec.get("loadBalancerSourceRanges").called(path);
    let note = at.get("metadata.annotations").key(NOTE);
    if !list.is_empty() {
        if !is_balanced {
            list.forbidden(ONLY);
        }
        let before = old
            .map(|old| old.get("spec.loadBalancerSourceRanges").string_set())
            .unwrap_or_default();
        for range in list.items().filter(|range| !before.contains(range.str())) {
            let trimmed = range.str().trim().into();
            ip::legacy_cidr(&range.with(&trimmed));
        }
    } else if note.is_set() {
        if !is_balanced {
            note.forbidden(ONLY);
        }
        let was = old.map(|old| old.get("metadata.annotations").key(NOTE).value.clone());
        if was.as_ref() != Some(note.value) && !note.str().trim().is_empty() {
            for range in note.str().split(',') {
                let trimmed = range.trim().into();
                ip::legacy_cidr(&note.with(&trimmed));
            }
        }
    }
}

fn load_balancer_fields(spec: &At<'_>, kind: &str) {
    const ONLY: &str = "may only be used when `type` is 'LoadBalancer'";
    let (ports, class) = (spec.get("allocateLoadBalancerNodePorts"), spec.get("loadBalancerClass"));
    if kind == "LoadBalancer" {
        if !ports.is_set() {
            ports.called(machinery::field::Path::new("allocateLoadBalancerNodePorts")).required("");
        }
        if class.is_set() {
            class.name(names::qualified_name);
        }
        return;
    }
    if ports.is_set() {
        ports.forbidden(ONLY);
    }
    if class.is_set() {
        class.forbidden(ONLY);
    }
}

fn traffic(spec: &At<'_>, kind: &str) {
    let external = spec.get("externalTrafficPolicy");
    let is_reachable = matches!(kind, "LoadBalancer" | "NodePort")
        || (kind == "ClusterIP" && !spec.get("externalIPs").is_empty());
    if is_reachable {
        if external.need() {
            external.one_of(&["Cluster", "Local"]);
        }
    } else if !external.is_empty() {
        external.invalid("may only be set for externally-accessible services");
    }
    let port = spec.get("healthCheckNodePort");
    if port.int() != 0 && !needs_health_check(spec) {
        port.invalid(
            "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'",
        );
    } else if port.int() != 0 {
        port.port();
    }
    let internal = spec.get("internalTrafficPolicy");
    if !internal.is_set() && matches!(kind, "NodePort" | "LoadBalancer" | "ClusterIP") {
        internal.required("");
    }
    internal.any_of(&["Cluster", "Local"]);
    spec.get("trafficDistribution").any_of(&["PreferClose", "PreferSameZone", "PreferSameNode"]);
}
