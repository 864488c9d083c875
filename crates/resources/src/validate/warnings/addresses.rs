//! Warnings of addresses and address ranges that are valid but not in their usual form.
//! Upstream: `GetWarningsForIP` and `GetWarningsForCIDR`.
//!
//! In: an object that was found valid. Out: warnings, in the order of the fields.

use std::net::IpAddr;

use super::say;
use crate::validate::at::At;
use crate::validate::ip as rules;

pub(super) fn ip(at: &At<'_>, out: &mut Vec<String>) {
    let Some(address) = rules::sloppy(at.str()) else { return };
    let text = at.str();
    let (is_standard, usual) = match address {
        IpAddr::V6(six) => match six.to_ipv4_mapped() {
            Some(four) => (false, four.to_string()),
            None => (true, six.to_string()),
        },
        IpAddr::V4(four) => (text.parse::<IpAddr>().is_ok(), four.to_string()),
    };
    if !is_standard {
        say(at, &format!("non-standard IP address {text:?} is invalid: use {usual:?}"), out);
    } else if usual != text {
        let text =
            format!("IPv6 address {text:?} should be in RFC 5952 canonical format ({usual:?})");
        say(at, &text, out);
    }
}

pub(super) fn cidr(at: &At<'_>, out: &mut Vec<String>) {
    let Some(range) = rules::sloppy_cidr(at.str()) else { return };
    let (text, usual) = (at.str(), range.trunc().to_string());
    let before = out.len();
    if range.addr() != range.network() {
        let single = format!("{}/{}", range.addr(), range.max_prefix_len());
        say(
            at,
            &format!(
                "CIDR value {text:?} is ambiguous in this context (should be {usual:?} or {single:?}?)"
            ),
            out,
        );
    }
    let is_mapped = matches!(range.addr(), IpAddr::V6(six) if six.to_ipv4_mapped().is_some());
    let has_leading_zeros = {
        let (address, length) = text.split_once('/').unwrap_or((text, ""));
        address.parse::<IpAddr>().is_err() || (length.len() > 1 && length.starts_with('0'))
    };
    if is_mapped || has_leading_zeros {
        say(at, &format!("non-standard CIDR value {text:?} is invalid: use {usual:?}"), out);
    }
    if out.len() == before && range.addr().is_ipv6() && range.to_string() != text {
        let usual = range.to_string();
        say(
            at,
            &format!("IPv6 CIDR value {text:?} should be in RFC 5952 canonical format ({usual:?})"),
            out,
        );
    }
}

pub(crate) fn network_policy(at: &At<'_>, out: &mut Vec<String>) {
    let spec = at.get("spec");
    let peers = spec.get("ingress").items().map(|rule| rule.get("from"));
    let peers = peers.chain(spec.get("egress").items().map(|rule| rule.get("to")));
    for peer in peers.flat_map(|list| list.items()) {
        let block = peer.get("ipBlock");
        cidr(&block.get("cidr"), out);
        block.get("except").items().for_each(|one| cidr(&one, out));
    }
}

pub(crate) fn endpoints(at: &At<'_>, out: &mut Vec<String>) {
    let labels = at.get("metadata.labels");
    if labels.key("endpoints.kubernetes.io/managed-by").is("endpoint-controller") {
        return;
    }
    for subset in at.get("subsets").items() {
        for list in ["addresses", "notReadyAddresses"] {
            subset.get(list).items().for_each(|one| ip(&one.get("ip"), out));
        }
    }
}

pub(crate) fn endpoint_slice(at: &At<'_>, out: &mut Vec<String>) {
    const CONTROLLERS: &[&str] =
        &["endpointslice-controller.k8s.io", "endpointslicemirroring-controller.k8s.io"];
    if at.old().is_none() && at.get("addressType").is("FQDN") {
        out.push("spec.addressType: FQDN endpoints are deprecated".into());
    }
    let manager = at.get("metadata.labels").key("endpointslice.kubernetes.io/managed-by");
    if CONTROLLERS.contains(&manager.str()) {
        return;
    }
    for endpoint in at.get("endpoints").items() {
        endpoint.get("addresses").items().for_each(|one| ip(&one, out));
    }
}

pub(crate) fn node(at: &At<'_>, out: &mut Vec<String>) {
    let spec = at.get("spec");
    if spec.has("configSource") {
        out.push("spec.configSource: the feature is removed".into());
    }
    if !spec.get("externalID").is_empty() {
        out.push("spec.externalID: this field is deprecated, and is unused by Kubernetes".into());
    }
    spec.get("podCIDRs").items().for_each(|one| cidr(&one, out));
}

/// Of a pod's status.
pub(crate) fn pod_status(at: &At<'_>, out: &mut Vec<String>) {
    for list in ["podIPs", "hostIPs"] {
        at.get("status").get(list).items().for_each(|one| ip(&one.get("ip"), out));
    }
}

/// Of the status of Services and Ingresses.
pub(crate) fn load_balancer(at: &At<'_>, out: &mut Vec<String>) {
    for one in at.get("status.loadBalancer.ingress").items() {
        // Upstream's path ends at the item.
        let address = one.get("ip");
        ip(&address.called(one.path), out);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::validate::at::judge;

    #[test]
    fn unusual_forms_have_upstreams_words() {
        let check = |of: fn(&At<'_>, &mut Vec<String>), text: &str, expected: &[&str]| {
            let mut out = vec![];
            judge(&json!({ "a": text }), |at| of(&at.get("a"), &mut out));
            assert_eq!(out, expected, "{text}");
        };
        check(ip, "10.0.0.1", &[]);
        check(ip, "fd00::1", &[]);
        check(
            ip,
            "010.0.0.1",
            &["a: non-standard IP address \"010.0.0.1\" is invalid: use \"10.0.0.1\""],
        );
        check(
            ip,
            "::ffff:1.2.3.4",
            &["a: non-standard IP address \"::ffff:1.2.3.4\" is invalid: use \"1.2.3.4\""],
        );
        check(
            ip,
            "FD00::1",
            &["a: IPv6 address \"FD00::1\" should be in RFC 5952 canonical format (\"fd00::1\")"],
        );
        check(cidr, "10.0.0.0/8", &[]);
        check(
            cidr,
            "10.0.0.1/8",
            &[
                "a: CIDR value \"10.0.0.1/8\" is ambiguous in this context (should be \"10.0.0.0/8\" or \"10.0.0.1/32\"?)",
            ],
        );
        check(
            cidr,
            "010.0.0.0/8",
            &["a: non-standard CIDR value \"010.0.0.0/8\" is invalid: use \"10.0.0.0/8\""],
        );
        check(
            cidr,
            "FD00::/64",
            &[
                "a: IPv6 CIDR value \"FD00::/64\" should be in RFC 5952 canonical format (\"fd00::/64\")",
            ],
        );
    }
}
