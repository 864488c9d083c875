//! What the runtime tells plugins about a pod.
//!
//! In: the sandbox's configuration, from the kubelet. Out: `CNI_ARGS`, and the runtime's configuration by
//! capability, of which each plugin gets the parts that it declares.
//! Upstream: `cniNamespaceOpts` of containerd. `ipRanges` are the node's pod CIDRs, as the kubelet's own network
//! plugins had them: a configuration file then needs no address ranges. `ips` and `mac` have no source in
//! Kubernetes' API, so no plugin gets them.

use cri::{PodSandboxConfig, Protocol};
use ipnet::IpNet;
use serde_json::{Map, Value, json};

use super::config::Plugin;
use crate::bandwidth::{Bandwidth, BandwidthError};

/// The capability for annotations, containerd's.
const ANNOTATIONS: &str = "io.kubernetes.cri.pod-annotations";
/// containerd's value: a burst without a limit.
const BURST: u32 = u32::MAX;

pub(super) fn args(sandbox: &str, config: &PodSandboxConfig) -> String {
    let metadata = config.metadata.clone().unwrap_or_default();
    [
        ("IgnoreUnknown", "1"),
        ("K8S_POD_NAMESPACE", &metadata.namespace),
        ("K8S_POD_NAME", &metadata.name),
        ("K8S_POD_INFRA_CONTAINER_ID", sandbox),
        ("K8S_POD_UID", &metadata.uid),
    ]
    .map(|(key, value)| format!("{key}={value}"))
    .join(";")
}

/// By capability.
pub(super) fn capabilities(
    config: &PodSandboxConfig,
    cidrs: &[IpNet],
) -> Result<Map<String, Value>, BandwidthError> {
    let mut all = Map::new();
    all.insert(ANNOTATIONS.into(), json!(config.annotations));
    let ports = config.port_mappings.iter().filter(|mapping| mapping.host_port > 0);
    let ports: Vec<Value> = ports
        .map(|mapping| {
            json!({
                "hostPort": mapping.host_port,
                "containerPort": mapping.container_port,
                "protocol": protocol(mapping.protocol()),
                "hostIP": mapping.host_ip,
            })
        })
        .collect();
    if !ports.is_empty() {
        all.insert("portMappings".into(), ports.into());
    }
    if let Some(limits) = limits(Bandwidth::of(&config.annotations)?) {
        all.insert("bandwidth".into(), limits);
    }
    if let Some(dns) = &config.dns_config {
        let dns = json!({
            "servers": dns.servers, "searches": dns.searches, "options": dns.options,
        });
        all.insert("dns".into(), dns);
    }
    let parent = config.linux.as_ref().map(|linux| linux.cgroup_parent.as_str());
    if let Some(parent) = parent.filter(|parent| !parent.is_empty()) {
        all.insert("cgroupPath".into(), parent.into());
    }
    if !cidrs.is_empty() {
        let ranges = cidrs.iter().map(|cidr| json!([{"subnet": cidr.trunc()}]));
        all.insert("ipRanges".into(), ranges.collect());
    }
    Ok(all)
}

fn protocol(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
        Protocol::Sctp => "sctp",
    }
}

fn limits(bandwidth: Bandwidth) -> Option<Value> {
    let mut limits = Map::new();
    for (rate, burst, value) in [
        ("ingressRate", "ingressBurst", bandwidth.ingress),
        ("egressRate", "egressBurst", bandwidth.egress),
    ] {
        if let Some(value) = value {
            limits.insert(rate.into(), value.into());
            limits.insert(burst.into(), BURST.into());
        }
    }
    (!limits.is_empty()).then_some(Value::Object(limits))
}

/// The plugin's configuration on stdin.
pub(super) fn conf(
    plugin: &Plugin,
    injected: &[(&str, Value)],
    capabilities: &Map<String, Value>,
) -> Vec<u8> {
    let mut conf = plugin.conf.clone();
    for (key, value) in injected {
        conf.insert((*key).to_owned(), value.clone());
    }
    let own = capabilities.iter().filter(|(name, _)| plugin.has_capability(name));
    let own: Map<String, Value> = own.map(|(name, value)| (name.clone(), value.clone())).collect();
    if !own.is_empty() {
        conf.insert("runtimeConfig".into(), own.into());
    }
    Value::Object(conf).to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use cri::{DNSConfig, LinuxPodSandboxConfig, PodSandboxMetadata, PortMapping};

    use super::*;

    fn pod() -> PodSandboxConfig {
        PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: "web".into(),
                uid: "u1".into(),
                namespace: "shop".into(),
                attempt: 0,
            }),
            annotations: [("kubernetes.io/ingress-bandwidth".into(), "1M".into())].into(),
            dns_config: Some(DNSConfig {
                servers: vec!["10.43.0.10".into()],
                ..Default::default()
            }),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: "/pods/u1".into(),
                ..Default::default()
            }),
            port_mappings: vec![
                PortMapping {
                    protocol: Protocol::Udp as i32,
                    container_port: 53,
                    host_port: 5353,
                    host_ip: "127.0.0.1".into(),
                },
                PortMapping { container_port: 80, ..Default::default() },
            ],
            ..Default::default()
        }
    }

    #[test]
    fn a_plugin_gets_the_capabilities_that_it_declares() {
        let cidrs = ["10.42.0.0/24", "fd00::/64"].map(|cidr| cidr.parse().expect("a network"));
        let all = capabilities(&pod(), &cidrs).expect("valid");
        let check = |declared: Value, expected: Value| {
            let conf = json!({"type": "a", "capabilities": declared});
            let Value::Object(conf) = conf else { unreachable!("an object") };
            let plugin = Plugin { kind: "a".into(), conf };
            let bytes = super::conf(&plugin, &[("name", "n".into())], &all);
            let sent: Value = serde_json::from_slice(&bytes).expect("JSON");
            assert_eq!(sent["name"], "n");
            assert_eq!(sent.get("runtimeConfig").cloned().unwrap_or_default(), expected);
        };
        check(json!({}), Value::Null);
        check(json!({"portMappings": false}), Value::Null);
        check(
            json!({"portMappings": true}),
            json!({"portMappings": [
                {"hostPort": 5353, "containerPort": 53, "protocol": "udp", "hostIP": "127.0.0.1"}]}),
        );
        check(
            json!({"bandwidth": true, "ipRanges": true}),
            json!({
                "bandwidth": {"ingressRate": 1_000_000, "ingressBurst": u32::MAX},
                "ipRanges": [[{"subnet": "10.42.0.0/24"}], [{"subnet": "fd00::/64"}]],
            }),
        );
        check(
            json!({"dns": true, "cgroupPath": true, ANNOTATIONS: true, "mac": true}),
            json!({
                "dns": {"servers": ["10.43.0.10"], "searches": [], "options": []},
                "cgroupPath": "/pods/u1",
                ANNOTATIONS: {"kubernetes.io/ingress-bandwidth": "1M"},
            }),
        );
    }

    #[test]
    fn args_name_the_pod() {
        let expected = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web;\
                        K8S_POD_INFRA_CONTAINER_ID=id1;K8S_POD_UID=u1";
        assert_eq!(args("id1", &pod()), expected);
    }
}
