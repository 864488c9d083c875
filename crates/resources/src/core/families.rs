//! Which IP families a Service gets. Upstream: `initIPFamilyFields` of
//! `pkg/registry/core/service/storage/alloc.go`.
//!
//! In: the spec of a Service that is about to be judged, the one before, the cluster's families. Out: the
//! spec with a policy and families, or the errors of the requested ones.
//!
//! Invariant: nothing is taken here, so that a refusal has nothing to give back.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Service, ServiceSpec};
use machinery::StatusError;
use machinery::field::{FieldErrors, Path};
use machinery::status::Reason;

const SINGLE: &str = "SingleStack";
const PREFER: &str = "PreferDualStack";
const REQUIRE: &str = "RequireDualStack";

pub(crate) fn family_of(ip: &IpAddr) -> &'static str {
    if ip.is_ipv4() { "IPv4" } else { "IPv6" }
}

/// The families of the cluster, the default first.
pub(crate) fn of_cluster(cidrs: &[IpNet]) -> Vec<&'static str> {
    let mut there: Vec<&'static str> = vec![];
    for cidr in cidrs {
        let family = family_of(&cidr.addr());
        if !there.contains(&family) {
            there.push(family);
        }
    }
    there
}

/// An update must not give one number to two ports. Upstream names no reason and no field here.
pub(crate) fn distinct_node_ports(service: &Service) -> Result<(), StatusError> {
    let has_them =
        |spec: &&ServiceSpec| matches!(spec.type_.as_deref(), Some("NodePort" | "LoadBalancer"));
    let ports = service.spec.as_ref().filter(has_them).and_then(|spec| spec.ports.as_ref());
    let mut seen = BTreeSet::new();
    for port in ports.into_iter().flatten() {
        let Some(number) = port.node_port.filter(|number| *number != 0) else { continue };
        let protocol = port.protocol.as_deref().unwrap_or("TCP");
        if !seen.insert((protocol, number)) {
            let message = format!("duplicate nodePort: {{{protocol} {number}}}");
            return Err(StatusError::new(Reason::Unknown, message));
        }
    }
    Ok(())
}

fn list(field: Option<&Vec<String>>) -> &[String] {
    field.map(Vec::as_slice).unwrap_or_default()
}

fn ips(spec: &ServiceSpec) -> &[String] {
    list(spec.cluster_ips.as_ref())
}

fn families(spec: &ServiceSpec) -> &[String] {
    list(spec.ip_families.as_ref())
}

fn is_headless_without_selector(spec: &ServiceSpec) -> bool {
    let selects = spec.selector.as_ref().is_some_and(|selector| !selector.is_empty());
    spec.cluster_ip.as_deref() == Some("None") && !selects
}

/// A Service that prefers two families keeps those it has, whatever became of the cluster.
pub(crate) fn keeps(spec: &ServiceSpec, old: Option<&ServiceSpec>) -> bool {
    old.is_some_and(|old| {
        let prefers = |spec: &ServiceSpec| spec.ip_family_policy.as_deref() == Some(PREFER);
        prefers(spec)
            && (prefers(old) || old.ip_family_policy.is_none())
            && old.type_ == spec.type_
            && ips(old) == ips(spec)
            && families(old) == families(spec)
    })
}

/// The policy of a Service that names none.
pub(crate) fn infer_policy(spec: &mut ServiceSpec, old: Option<&ServiceSpec>) {
    if spec.ip_family_policy.is_none() {
        let before = old.and_then(|old| old.ip_family_policy.clone());
        let inferred = if is_headless_without_selector(spec) { REQUIRE } else { SINGLE };
        spec.ip_family_policy = Some(before.unwrap_or_else(|| inferred.to_owned()));
    }
}

/// Chooses the families of a Service with a policy; `there` are the cluster's, the default first.
pub(crate) fn choose(
    spec: &mut ServiceSpec,
    old: Option<&ServiceSpec>,
    there: &[&'static str],
) -> FieldErrors {
    let mut errors = FieldErrors::default();
    let policy = spec.ip_family_policy.clone().unwrap_or_default();
    if let Some(old) = old {
        release_second(spec, old, &policy, &mut errors);
    }
    fits_policy(spec, &policy, &mut errors);
    infer_from_addresses(spec, there, &mut errors);
    if !errors.is_empty() {
        return errors;
    }
    if !is_headless_without_selector(spec) {
        is_configured(spec, &policy, there, &mut errors);
        if !errors.is_empty() {
            return errors;
        }
    }
    let wants_both = policy != SINGLE && (is_headless_without_selector(spec) || there.len() == 2);
    let chosen = spec.ip_families.get_or_insert_default();
    if chosen.is_empty() {
        chosen.extend(there.first().map(|family| (*family).to_owned()));
    }
    if wants_both && chosen.len() == 1 {
        let other = if chosen[0] == "IPv4" { "IPv6" } else { "IPv4" };
        chosen.push(other.to_owned());
    }
    errors
}

fn policy_path() -> Path {
    Path::new("spec").child("ipFamilyPolicy")
}

/// A client that requests one family drops the second one; a client that requests two must name both.
fn release_second(
    spec: &mut ServiceSpec,
    old: &ServiceSpec,
    policy: &str,
    errors: &mut FieldErrors,
) {
    if policy == SINGLE {
        if ips(spec) == ips(old) {
            spec.cluster_ips.iter_mut().for_each(|list| list.truncate(1));
        }
        if families(spec) == families(old) {
            spec.ip_families.iter_mut().for_each(|list| list.truncate(1));
        }
        return;
    }
    let is_reduced = |new: &[String], old: &[String]| {
        !new.is_empty() && new.len() < old.len() && new.first() == old.first()
    };
    for (reduced, what) in [
        (is_reduced(ips(spec), ips(old)), "cluster IP"),
        (is_reduced(families(spec), families(old)), "IP family"),
    ] {
        if reduced {
            let detail = format!("must be 'SingleStack' to release the secondary {what}");
            errors.invalid(&policy_path(), policy, &detail);
        }
    }
}

fn fits_policy(spec: &ServiceSpec, policy: &str, errors: &mut FieldErrors) {
    if policy != SINGLE {
        return;
    }
    for (count, what) in [(ips(spec).len(), "cluster IPs"), (families(spec).len(), "IP families")] {
        if count == 2 {
            let detail = format!(
                "must be 'RequireDualStack' or 'PreferDualStack' when multiple {what} are specified"
            );
            errors.invalid(&policy_path(), policy, &detail);
        }
    }
}

fn infer_from_addresses(spec: &mut ServiceSpec, there: &[&'static str], errors: &mut FieldErrors) {
    let all = ips(spec).to_vec();
    for (index, ip) in all.iter().enumerate() {
        let Ok(address) = ip.parse::<IpAddr>() else { break };
        if index < families(spec).len() {
            continue;
        }
        let family = family_of(&address);
        if there.contains(&family) {
            spec.ip_families.get_or_insert_default().push(family.to_owned());
        } else {
            let path = Path::new("spec").child("clusterIPs").index(index);
            let detail = format!("{family} is not configured on this cluster");
            errors.invalid(&path, &all, &detail);
        }
    }
}

fn is_configured(
    spec: &ServiceSpec,
    policy: &str,
    there: &[&'static str],
    errors: &mut FieldErrors,
) {
    if policy == REQUIRE && there.len() < 2 {
        let detail = "this cluster is not configured for dual-stack services";
        errors.invalid(&policy_path(), policy, detail);
    }
    for (index, family) in families(spec).iter().enumerate() {
        if !there.contains(&family.as_str()) {
            let path = Path::new("spec").child("ipFamilies").index(index);
            errors.invalid(&path, family, "not configured on this cluster");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, from_value, json};

    const FOUR: &[&str] = &["IPv4"];
    const BOTH: &[&str] = &["IPv6", "IPv4"];

    fn spec(value: Value) -> ServiceSpec {
        from_value(value).expect("a spec")
    }

    #[test]
    fn a_new_service_gets_what_it_asks_for_or_a_reason() {
        let select = |mut value: Value| {
            value["selector"] = json!({"a": "b"});
            value
        };
        let headless = json!({"clusterIP": "None", "clusterIPs": ["None"]});
        for (sent, there, expected) in [
            (select(json!({})), FOUR, Ok(("SingleStack", vec!["IPv4"]))),
            (select(json!({})), BOTH, Ok(("SingleStack", vec!["IPv6"]))),
            (select(json!({"ipFamilyPolicy": PREFER})), FOUR, Ok((PREFER, vec!["IPv4"]))),
            (select(json!({"ipFamilyPolicy": PREFER})), BOTH, Ok((PREFER, vec!["IPv6", "IPv4"]))),
            (
                select(json!({"ipFamilyPolicy": REQUIRE, "ipFamilies": ["IPv4"]})),
                BOTH,
                Ok((REQUIRE, vec!["IPv4", "IPv6"])),
            ),
            (headless.clone(), FOUR, Ok((REQUIRE, vec!["IPv4", "IPv6"]))),
            (select(headless), FOUR, Ok((SINGLE, vec!["IPv4"]))),
            (
                select(json!({"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1"]})),
                BOTH,
                Ok((SINGLE, vec!["IPv4"])),
            ),
            (
                select(json!({"ipFamilies": ["IPv6"]})),
                FOUR,
                Err("spec.ipFamilies[0]: Invalid value: \"IPv6\": not configured on this cluster"),
            ),
            (
                select(json!({"ipFamilyPolicy": REQUIRE})),
                FOUR,
                Err(
                    "spec.ipFamilyPolicy: Invalid value: \"RequireDualStack\": this cluster is not configured for dual-stack services",
                ),
            ),
            (
                select(json!({"ipFamilies": ["IPv4", "IPv6"]})),
                BOTH,
                Err(
                    "spec.ipFamilyPolicy: Invalid value: \"SingleStack\": must be 'RequireDualStack' or 'PreferDualStack' when multiple IP families are specified",
                ),
            ),
            (
                select(json!({"clusterIP": "fd00::1", "clusterIPs": ["fd00::1"]})),
                FOUR,
                Err(
                    "spec.clusterIPs[0]: Invalid value: [\"fd00::1\"]: IPv6 is not configured on this cluster",
                ),
            ),
        ] {
            let mut spec = spec(sent.clone());
            infer_policy(&mut spec, None);
            let errors = choose(&mut spec, None, there);
            match expected {
                Ok((policy, families)) => {
                    assert!(errors.is_empty(), "{sent}: {errors:?}");
                    assert_eq!(spec.ip_family_policy.as_deref(), Some(policy), "{sent}");
                    assert_eq!(spec.ip_families.unwrap_or_default(), families, "{sent}");
                }
                Err(why) => assert_eq!(errors.summary(), why, "{sent}"),
            }
        }
    }

    #[test]
    fn an_update_gives_a_number_to_one_port() {
        for (first, second, kind, expected) in [
            (30001, "TCP", "NodePort", Some("duplicate nodePort: {TCP 30001}")),
            (30001, "UDP", "NodePort", None),
            (30002, "TCP", "LoadBalancer", None),
            (30001, "TCP", "ClusterIP", None),
        ] {
            let ports = json!([{"port": 1, "nodePort": first}, {"port": 2, "nodePort": 30001, "protocol": second}]);
            let spec = spec(json!({"type": kind, "ports": ports}));
            let service = Service { spec: Some(spec), ..Service::default() };
            let why = distinct_node_ports(&service).err().map(|error| error.to_string());
            assert_eq!(why.as_deref(), expected, "{first} {second} {kind}");
        }
    }

    #[test]
    fn a_second_family_goes_only_when_that_is_said() {
        let old = spec(json!({"ipFamilyPolicy": REQUIRE, "ipFamilies": ["IPv4", "IPv6"],
            "clusterIPs": ["10.0.0.1", "fd00::1"], "selector": {"a": "b"}}));
        let mut single = ServiceSpec { ip_family_policy: Some(SINGLE.into()), ..old.clone() };
        assert!(choose(&mut single, Some(&old), BOTH).is_empty());
        assert_eq!(ips(&single), ["10.0.0.1"]);
        assert_eq!(families(&single), ["IPv4"]);
        let mut fewer = ServiceSpec { ip_families: Some(vec!["IPv4".into()]), ..old.clone() };
        assert_eq!(
            choose(&mut fewer, Some(&old), BOTH).summary(),
            "spec.ipFamilyPolicy: Invalid value: \"RequireDualStack\": must be 'SingleStack' to release the secondary IP family"
        );
        let prefers = ServiceSpec { ip_family_policy: Some(PREFER.into()), ..old.clone() };
        assert!(keeps(&prefers, Some(&prefers)));
        assert!(!keeps(&prefers, Some(&old)));
        assert!(!keeps(&prefers, None));
    }
}
