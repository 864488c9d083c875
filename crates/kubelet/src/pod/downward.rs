//! The downward API: a pod's own fields and resources as text.
//!
//! In: a pod, its addresses, a selector. Out: the value, or an error. Pure.
//! Upstream: `pkg/fieldpath`, `pkg/api/v1/resource`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceFieldSelector};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::resources;

/// Addresses that the pod object does not have yet when its containers start.
#[derive(Clone, Debug, Default)]
pub struct Addresses {
    pub pod: Vec<IpAddr>,
    pub host: Vec<IpAddr>,
}

impl Addresses {
    fn joined(ips: &[IpAddr]) -> String {
        ips.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(",")
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DownwardError {
    #[error("unsupported fieldPath: {0}")]
    Field(String),
    #[error("unsupported container resource : {0}")]
    Resource(String),
    #[error("container {0} not found")]
    Container(String),
}

/// The field at `path`.
pub fn field(pod: &Pod, path: &str, addresses: &Addresses) -> Result<String, DownwardError> {
    let meta = &pod.metadata;
    let spec = pod.spec.as_ref();
    if let Some((map, key)) = subscript(path) {
        let map = match map {
            "metadata.labels" => &meta.labels,
            "metadata.annotations" => &meta.annotations,
            _ => return Err(DownwardError::Field(path.into())),
        };
        return Ok(map.as_ref().and_then(|m| m.get(key)).cloned().unwrap_or_default());
    }
    let first = |ips: &[IpAddr]| ips.first().map(IpAddr::to_string).unwrap_or_default();
    let text = |value: Option<&String>| value.cloned().unwrap_or_default();
    Ok(match path {
        "metadata.name" => text(meta.name.as_ref()),
        "metadata.namespace" => text(meta.namespace.as_ref()),
        "metadata.uid" => text(meta.uid.as_ref()),
        "metadata.labels" => format_map(meta.labels.as_ref()),
        "metadata.annotations" => format_map(meta.annotations.as_ref()),
        "spec.nodeName" => text(spec.and_then(|s| s.node_name.as_ref())),
        "spec.serviceAccountName" => text(spec.and_then(|s| s.service_account_name.as_ref())),
        "status.hostIP" => first(&addresses.host),
        "status.hostIPs" => Addresses::joined(&addresses.host),
        "status.podIP" => first(&addresses.pod),
        "status.podIPs" => Addresses::joined(&addresses.pod),
        _ => return Err(DownwardError::Field(path.into())),
    })
}

/// `metadata.labels['a.b/c']` → (`metadata.labels`, `a.b/c`)
fn subscript(path: &str) -> Option<(&str, &str)> {
    path.strip_suffix("']")?.split_once("['")
}

/// One `key="value"` per line, sorted by key, with values quoted like in Go.
fn format_map(map: Option<&BTreeMap<String, String>>) -> String {
    let lines = map.into_iter().flatten().map(|(key, value)| format!("{key}={}", quote(value)));
    lines.collect::<Vec<_>>().join("\n")
}

fn quote(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{7}' => out.push_str("\\a"),
            '\u{8}' => out.push_str("\\b"),
            '\u{b}' => out.push_str("\\v"),
            '\u{c}' => out.push_str("\\f"),
            c if c.is_control() && (c as u32) < 0x100 => {
                out.push_str(&format!("\\x{:02x}", c as u32));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// A container's request or limit. An unset limit reads as the pod's limit, else as the node's
/// allocatable.
/// `container` is used when the selector names none (env); volumes always name one.
pub fn resource(
    pod: &Pod,
    container: Option<&Container>,
    selector: &ResourceFieldSelector,
    allocatable: &resources::ResourceList,
) -> Result<String, DownwardError> {
    let container = match &selector.container_name {
        Some(name) if !name.is_empty() => {
            find_container(pod, name).ok_or_else(|| DownwardError::Container(name.clone()))?
        }
        _ => container.ok_or_else(|| DownwardError::Container(String::new()))?,
    };
    let unsupported = || DownwardError::Resource(selector.resource.clone());
    let (kind, name) = selector.resource.split_once('.').ok_or_else(unsupported)?;
    let known =
        matches!(name, "cpu" | "memory" | "ephemeral-storage") || name.starts_with("hugepages-");
    if !known {
        return Err(unsupported());
    }
    let own = container.resources.as_ref();
    let value = match kind {
        "limits" => {
            let positive = |q: &&Quantity| resources::milli(q) != 0;
            let set = resources::limit(own, name).filter(positive);
            let of_pod = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
            let of_pod = resources::limit(of_pod, name).filter(positive);
            let of_pod = of_pod.filter(|_| matches!(name, "cpu" | "memory"));
            set.or(of_pod).or_else(|| allocatable.get(name)).cloned()
        }
        "requests" => resources::request(own, name).cloned(),
        _ => return Err(unsupported()),
    };
    let value = value.unwrap_or_else(|| Quantity("0".into()));
    Ok(divided(name, &value, selector.divisor.as_ref()).to_string())
}

/// The value in units of the divisor, rounded up.
fn divided(name: &str, value: &Quantity, divisor: Option<&Quantity>) -> i64 {
    let divisor = divisor.filter(|d| resources::milli(d) != 0);
    if name == "cpu" {
        let by = divisor.map_or(1000, resources::milli).max(1);
        return (resources::milli(value) + by - 1) / by;
    }
    let by = divisor.map_or(1, resources::units).max(1);
    (resources::units(value).saturating_add(by - 1)) / by
}

fn find_container<'a>(pod: &'a Pod, name: &str) -> Option<&'a Container> {
    let spec = pod.spec.as_ref()?;
    spec.containers.iter().chain(spec.init_containers.iter().flatten()).find(|c| c.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod() -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "ns", "uid": "u1",
                "labels": {"b": "2", "a": "say \"hi\"\n"}, "annotations": {"x.y/z": "v"}},
            "spec": {"nodeName": "n1", "serviceAccountName": "sa", "containers": [
                {"name": "c", "resources": {"limits": {"memory": "64Mi"}, "requests": {"cpu": "250m"}}}]}
        }))
        .expect("a pod")
    }

    #[test]
    fn fields() {
        let addresses = Addresses {
            pod: vec![
                "10.42.0.5".parse().expect("an address"),
                "fd00::5".parse().expect("an address"),
            ],
            host: vec!["192.168.1.1".parse().expect("an address")],
        };
        let check = |path: &str, expected: &str| {
            assert_eq!(field(&pod(), path, &addresses).as_deref(), Ok(expected), "{path}");
        };
        check("metadata.name", "web");
        check("metadata.labels", "a=\"say \\\"hi\\\"\\n\"\nb=\"2\"");
        check("metadata.labels['b']", "2");
        check("metadata.labels['none']", "");
        check("metadata.annotations['x.y/z']", "v");
        check("spec.nodeName", "n1");
        check("spec.serviceAccountName", "sa");
        check("status.podIP", "10.42.0.5");
        check("status.podIPs", "10.42.0.5,fd00::5");
        check("status.hostIP", "192.168.1.1");
        assert!(field(&pod(), "spec.foo", &addresses).is_err());
    }

    #[test]
    fn resource_fields() {
        let allocatable = ResourceList::from([("cpu".into(), Quantity("2".into()))]);
        let check = |resource_name: &str, divisor: Option<&str>, expected: &str| {
            let selector = ResourceFieldSelector {
                container_name: Some("c".into()),
                resource: resource_name.into(),
                divisor: divisor.map(|d| Quantity(d.into())),
            };
            let got = resource(&pod(), None, &selector, &allocatable);
            assert_eq!(got.as_deref(), Ok(expected), "{resource_name}");
        };
        check("limits.memory", None, "67108864");
        check("limits.memory", Some("1Mi"), "64");
        check("requests.cpu", None, "1");
        check("requests.cpu", Some("1m"), "250");
        check("limits.cpu", None, "2");
        check("requests.memory", None, "0");
    }

    #[test]
    fn unset_limits_are_the_pods() {
        let mut pod = pod();
        let spec = pod.spec.as_mut().expect("a spec");
        spec.containers[0].resources = None;
        let node = [("cpu", "2"), ("memory", "8Gi"), ("ephemeral-storage", "1Gi")];
        let allocatable: ResourceList =
            node.map(|(name, amount)| (name.to_string(), Quantity(amount.into()))).into();
        let mut check = |limits: serde_json::Value, name: &str, expected: &str| {
            let spec = pod.spec.as_mut().expect("a spec");
            spec.resources = serde_json::from_value(json!({"limits": limits})).ok();
            let selector = ResourceFieldSelector {
                resource: format!("limits.{name}"),
                ..ResourceFieldSelector::default()
            };
            let container = pod.spec.as_ref().map(|spec| &spec.containers[0]);
            let got = resource(&pod, container, &selector, &allocatable);
            assert_eq!(got.as_deref(), Ok(expected), "{name} {limits}");
        };
        check(json!({"memory": "64Mi"}), "memory", "67108864");
        check(json!({"memory": "64Mi"}), "cpu", "2");
        check(json!({"cpu": "1", "memory": "0"}), "memory", "8589934592");
        check(json!({"cpu": "1"}), "cpu", "1");
        check(json!({"cpu": "1"}), "ephemeral-storage", "1073741824");
    }

    use crate::resources::ResourceList;
}
