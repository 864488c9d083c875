//! Decides which names a kubelet's serving certificate may carry without an administrator's word.
//!
//! In: the names of a request; the address that the request came from, by the API server's word; what
//! belongs to others. Out: why not, if not.
//!
//! Invariants: nothing that the node says of itself counts. A DNS name is the node's own name. An
//! address is the one that the request came from, or one that an administrator noted on the Node. An
//! address or a name of the API server, of a Service, of a pod or of another node is refused even so,
//! unless an administrator noted it: several machines may leave by one address.

use std::net::IpAddr;

use api::nodes::SERVING_ADDRESSES;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use pki::San;

use crate::context::Reserved;

/// The facts that a verdict depends on.
pub(super) struct Facts<'a> {
    pub reserved: &'a Reserved,
    pub node: &'a Node,
    /// Where the request came from.
    pub source: Option<IpAddr>,
    /// Addresses of Services, as far as objects say so.
    pub ranges: Vec<IpNet>,
    /// Addresses of API servers, as far as objects say so.
    pub servers: Vec<IpAddr>,
    /// Another node that has an address.
    pub other: &'a dyn Fn(IpAddr) -> Option<String>,
}

/// Why the request is not approved; nothing if it is.
pub(super) fn refusal(sans: &[San], facts: &Facts<'_>) -> Option<String> {
    sans.iter().find_map(|san| match san {
        San::Dns(name) => dns_refusal(name, facts),
        San::Ip(address) => address_refusal(*address, facts),
        San::Email(_) | San::Uri(_) => Some("it names more than hosts and addresses".into()),
    })
}

fn dns_refusal(name: &str, facts: &Facts<'_>) -> Option<String> {
    let own = facts.node.metadata.name.as_deref().unwrap_or_default();
    if name != own {
        return Some(format!("the DNS name {name} is not the name of the node"));
    }
    let lower = name.to_ascii_lowercase();
    let is_reserved = |san: &San| matches!(san, San::Dns(one) if one.eq_ignore_ascii_case(name));
    if facts.reserved.names.iter().any(is_reserved) {
        return Some(format!("{name} is a name of the API server"));
    }
    let domain = facts.reserved.domain.to_ascii_lowercase();
    let within = |parent: &str| {
        lower == parent || lower.strip_suffix(parent).is_some_and(|rest| rest.ends_with('.'))
    };
    if within("svc") || within("localhost") || (!domain.is_empty() && within(&domain)) {
        return Some(format!("{name} is a name of a Service or of the machine itself"));
    }
    let is_address = name.parse::<IpAddr>().is_ok();
    is_address.then(|| format!("the node's name {name} is an address"))
}

fn address_refusal(address: IpAddr, facts: &Facts<'_>) -> Option<String> {
    if address != address.to_canonical() || !is_host(address) {
        return Some(format!("{address} is no address of one machine"));
    }
    if approved(facts.node).any(|one| one == address) {
        return None;
    }
    let is_in = |ranges: &[IpNet]| ranges.iter().any(|range| range.contains(&address));
    if is_in(&facts.reserved.ranges) || is_in(&facts.ranges) {
        return Some(format!("{address} is in a range of Services or pods"));
    }
    let is_servers = |san: &San| matches!(san, San::Ip(one) if *one == address);
    if facts.reserved.names.iter().any(is_servers) || facts.servers.contains(&address) {
        return Some(format!("{address} is an address of the API server"));
    }
    if let Some(other) = (facts.other)(address) {
        return Some(format!("{address} is an address of node {other}"));
    }
    match facts.source {
        Some(source) if source == address => None,
        Some(source) => Some(format!("the request for {address} came from {source}")),
        None => Some(format!("it is not known whether the request came from {address}")),
    }
}

fn is_host(address: IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast() || v4.octets()[0] == 0,
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !(is_link_local || address.is_loopback() || address.is_unspecified() || address.is_multicast())
}

/// The addresses that an administrator noted.
fn approved(node: &Node) -> impl Iterator<Item = IpAddr> + '_ {
    let annotations = node.metadata.annotations.as_ref();
    let text = annotations.and_then(|all| all.get(SERVING_ADDRESSES)).map_or("", String::as_str);
    text.split(',').filter_map(|part| part.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(node: &str, noted: &str, source: Option<&str>, sans: &[&str], expected: &str) {
        let reserved = Reserved {
            names: [
                "kubernetes",
                "kubernetes.default.svc",
                "api.example",
                "10.0.0.1",
                "10.0.0.100",
            ]
            .map(San::parse)
            .to_vec(),
            ranges: vec!["10.42.0.0/16".parse().expect("a net")],
            domain: "cluster.local".into(),
        };
        let mut object = Node::default();
        object.metadata.name = Some(node.into());
        let noted = [(SERVING_ADDRESSES.to_owned(), noted.to_owned())];
        object.metadata.annotations = Some(noted.into());
        let taken: IpAddr = "10.0.0.8".parse().expect("an address");
        let facts = Facts {
            reserved: &reserved,
            node: &object,
            source: source.map(|text| text.parse().expect("an address")),
            ranges: vec!["10.43.0.0/16".parse().expect("a net")],
            servers: vec!["10.0.0.2".parse().expect("an address")],
            other: &|address| (address == taken).then(|| "n2".to_owned()),
        };
        // A name in a request is a DNS name even if it looks like an address.
        let san = |text: &&str| match text.strip_prefix("dns:") {
            Some(name) => San::Dns(name.to_owned()),
            None => San::parse(text),
        };
        let sans: Vec<San> = sans.iter().map(san).collect();
        let told = refusal(&sans, &facts).unwrap_or_default();
        assert_eq!(told, expected, "{node} {source:?} {sans:?}");
    }

    #[test]
    fn a_node_gets_its_name_and_the_address_it_comes_from() {
        let source = Some("10.0.0.7");
        check("n1", "", source, &["n1", "10.0.0.7"], "");
        check("n1", "", source, &["n1"], "");
        check("n1", "", source, &["10.0.0.9"], "the request for 10.0.0.9 came from 10.0.0.7");
        check(
            "n1",
            "",
            None,
            &["10.0.0.7"],
            "it is not known whether the request came from 10.0.0.7",
        );
        check("n1", "", source, &["n1", "n2"], "the DNS name n2 is not the name of the node");
        check("n1", "", Some("fd01::7"), &["n1", "fd01::7"], "");
    }

    /// Each of these was once signed: the report of an attack.
    #[test]
    fn what_belongs_to_others_is_refused_whatever_the_source() {
        for (address, why) in [
            ("10.43.0.1", "is in a range of Services or pods"),
            ("10.42.3.4", "is in a range of Services or pods"),
            ("10.0.0.1", "is an address of the API server"),
            ("10.0.0.100", "is an address of the API server"),
            ("10.0.0.2", "is an address of the API server"),
            ("10.0.0.8", "is an address of node n2"),
            ("127.0.0.1", "is no address of one machine"),
            ("::1", "is no address of one machine"),
            ("0.0.0.0", "is no address of one machine"),
            ("0.1.2.3", "is no address of one machine"),
            ("::", "is no address of one machine"),
            ("169.254.169.254", "is no address of one machine"),
            ("fe80::1", "is no address of one machine"),
            ("224.0.0.1", "is no address of one machine"),
            ("255.255.255.255", "is no address of one machine"),
            ("::ffff:10.0.0.7", "is no address of one machine"),
        ] {
            check("n1", "", Some(address), &[address], &format!("{address} {why}"));
        }
        for (name, why) in [
            ("kubernetes", "kubernetes is a name of the API server"),
            ("api.example", "api.example is a name of the API server"),
            ("web.default.svc", "web.default.svc is a name of a Service or of the machine itself"),
            ("a.cluster.local", "a.cluster.local is a name of a Service or of the machine itself"),
            ("localhost", "localhost is a name of a Service or of the machine itself"),
        ] {
            check(name, "", Some("10.0.0.7"), &[name], why);
        }
        check(
            "10.43.0.1",
            "",
            Some("10.0.0.7"),
            &["dns:10.43.0.1"],
            "the node's name 10.43.0.1 is an address",
        );
    }

    #[test]
    fn an_administrator_vouches_for_more() {
        let noted = "10.0.0.9, fd01::9,10.0.0.8,127.0.0.1";
        check("n1", noted, Some("10.0.0.100"), &["n1", "10.0.0.9", "fd01::9", "10.0.0.8"], "");
        check("n1", noted, None, &["127.0.0.1"], "127.0.0.1 is no address of one machine");
        check(
            "n1",
            noted,
            Some("10.0.0.1"),
            &["10.0.0.1"],
            "10.0.0.1 is an address of the API server",
        );
    }
}
