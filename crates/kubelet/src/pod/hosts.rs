//! Name resolution inside a pod: the /etc/hosts that the kubelet writes, and the sandbox's DNS
//! settings.
//!
//! In: pod specs and the node's settings. Out: text and lists. Pure.
//! Upstream: `kubelet_pods.go` managedHostsFileContent, `pkg/kubelet/network/dns`.

use std::fmt::Write;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{HostAlias, Pod};

const MANAGED: &str = "# Kubernetes-managed hosts file.\n";
const MANAGED_HOST_NETWORK: &str = "# Kubernetes-managed hosts file (host network).\n";

/// Limits of glibc that upstream applies.
const MAX_NAMESERVERS: usize = 3;
const MAX_SEARCHES: usize = 32;

/// The hosts file of a pod with its own network.
pub fn hosts_file(ips: &[IpAddr], hostname: &str, domain: &str, aliases: &[HostAlias]) -> String {
    let mut out = String::from(MANAGED);
    out.push_str("127.0.0.1\tlocalhost\n");
    out.push_str("::1\tlocalhost ip6-localhost ip6-loopback\n");
    out.push_str("fe00::0\tip6-localnet\n");
    out.push_str("fe00::0\tip6-mcastprefix\n");
    out.push_str("fe00::1\tip6-allnodes\n");
    out.push_str("fe00::2\tip6-allrouters\n");
    for ip in ips {
        if domain.is_empty() {
            let _ = writeln!(out, "{ip}\t{hostname}");
        } else {
            let _ = writeln!(out, "{ip}\t{hostname}.{domain}\t{hostname}");
        }
    }
    append_aliases(&mut out, aliases);
    out
}

/// The node's hosts file, and the pod's aliases.
pub fn host_network_hosts_file(node_file: &str, aliases: &[HostAlias]) -> String {
    let mut out = format!("{MANAGED_HOST_NETWORK}{node_file}");
    append_aliases(&mut out, aliases);
    out
}

fn append_aliases(out: &mut String, aliases: &[HostAlias]) {
    if aliases.is_empty() {
        return;
    }
    out.push_str("\n# Entries added by HostAliases.\n");
    for alias in aliases {
        let names = alias.hostnames.as_deref().unwrap_or_default().join("\t");
        let _ = writeln!(out, "{}\t{names}", alias.ip);
    }
}

/// (hostname, domain): the domain is empty without a subdomain.
pub fn hostname_and_domain(pod: &Pod, cluster_domain: &str) -> (String, String) {
    let spec = pod.spec.as_ref();
    let text = |value: Option<&String>| value.cloned().unwrap_or_default();
    let name = text(pod.metadata.name.as_ref());
    if let Some(forced) = spec.and_then(|s| s.hostname_override.as_ref()).filter(|h| !h.is_empty())
    {
        return (forced.clone(), String::new());
    }
    let mut hostname = text(spec.and_then(|s| s.hostname.as_ref()));
    if hostname.is_empty() {
        hostname = truncated(&name);
    }
    let subdomain = text(spec.and_then(|s| s.subdomain.as_ref()));
    if subdomain.is_empty() {
        return (hostname, String::new());
    }
    let namespace = text(pod.metadata.namespace.as_ref());
    (hostname, format!("{subdomain}.{namespace}.svc.{cluster_domain}"))
}

/// Host names have at most 63 characters and do not end in `-` or `.`.
fn truncated(name: &str) -> String {
    let cut: String = name.chars().take(63).collect();
    if cut.len() == name.len() { cut } else { cut.trim_end_matches(['-', '.']).to_string() }
}

/// A resolv.conf, as lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resolver {
    pub servers: Vec<String>,
    pub searches: Vec<String>,
    pub options: Vec<String>,
}

impl Resolver {
    /// Reads the node's resolv.conf; the last `search` line counts.
    pub fn parse(text: &str) -> Self {
        let mut out = Self::default();
        for line in text.lines() {
            let line = line.split(['#', ';']).next().unwrap_or_default();
            let mut words = line.split_whitespace();
            match words.next() {
                Some("nameserver") => out.servers.extend(words.next().map(str::to_string)),
                Some("search" | "domain") => out.searches = words.map(str::to_string).collect(),
                Some("options") => out.options = words.map(str::to_string).collect(),
                _ => {}
            }
        }
        out
    }
}

/// The resolver for the pod's dnsPolicy, from the node's resolver and the cluster's servers.
pub fn resolver(
    pod: &Pod,
    node: &Resolver,
    cluster_dns: &[IpAddr],
    cluster_domain: &str,
) -> Resolver {
    let Some(spec) = &pod.spec else { return node.clone() };
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let policy = spec.dns_policy.as_deref().unwrap_or("ClusterFirst");
    let on_host = spec.host_network == Some(true);
    let mut out = match policy {
        "None" => Resolver::default(),
        "ClusterFirstWithHostNet" if !cluster_dns.is_empty() => {
            cluster_resolver(node, namespace, cluster_dns, cluster_domain)
        }
        "ClusterFirst" if !on_host && !cluster_dns.is_empty() => {
            cluster_resolver(node, namespace, cluster_dns, cluster_domain)
        }
        _ => node.clone(),
    };
    if let Some(own) = &spec.dns_config {
        out.servers.extend(own.nameservers.iter().flatten().cloned());
        out.searches.extend(own.searches.iter().flatten().cloned());
        for option in own.options.iter().flatten() {
            let Some(name) = &option.name else { continue };
            out.options.retain(|known| known.split(':').next() != Some(name));
            out.options.push(match option.value.as_deref() {
                Some(value) if !value.is_empty() => format!("{name}:{value}"),
                _ => name.clone(),
            });
        }
    }
    dedup(&mut out.servers);
    dedup(&mut out.searches);
    out.servers.truncate(MAX_NAMESERVERS);
    out.searches.truncate(MAX_SEARCHES);
    out
}

fn cluster_resolver(
    node: &Resolver,
    namespace: &str,
    cluster_dns: &[IpAddr],
    domain: &str,
) -> Resolver {
    let mut searches =
        vec![format!("{namespace}.svc.{domain}"), format!("svc.{domain}"), domain.to_string()];
    searches.extend(node.searches.iter().cloned());
    Resolver {
        servers: cluster_dns.iter().map(IpAddr::to_string).collect(),
        searches,
        options: vec!["ndots:5".into()],
    }
}

fn dedup(list: &mut Vec<String>) {
    let mut seen = std::collections::HashSet::new();
    list.retain(|item| seen.insert(item.clone()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(spec: serde_json::Value) -> Pod {
        let mut spec = spec;
        spec["containers"] = json!([]);
        serde_json::from_value(
            json!({"metadata": {"name": "web-0", "namespace": "ns"}, "spec": spec}),
        )
        .expect("a pod")
    }

    #[test]
    fn policies() {
        let node = Resolver::parse("nameserver 9.9.9.9 # home\nsearch lan\noptions rotate\n");
        let dns: IpAddr = "10.43.0.10".parse().expect("an address");
        let check =
            |spec: serde_json::Value, servers: &[&str], searches: &[&str], options: &[&str]| {
                let got = resolver(&pod(spec.clone()), &node, &[dns], "cluster.local");
                assert_eq!(got.servers, servers, "{spec}");
                assert_eq!(got.searches, searches, "{spec}");
                assert_eq!(got.options, options, "{spec}");
            };
        let cluster = ["ns.svc.cluster.local", "svc.cluster.local", "cluster.local", "lan"];
        check(json!({}), &["10.43.0.10"], &cluster, &["ndots:5"]);
        check(json!({"dnsPolicy": "Default"}), &["9.9.9.9"], &["lan"], &["rotate"]);
        check(json!({"hostNetwork": true}), &["9.9.9.9"], &["lan"], &["rotate"]);
        check(
            json!({"hostNetwork": true, "dnsPolicy": "ClusterFirstWithHostNet"}),
            &["10.43.0.10"],
            &cluster,
            &["ndots:5"],
        );
        check(
            json!({"dnsPolicy": "None", "dnsConfig": {"nameservers": ["1.1.1.1"], "searches": ["a"],
                "options": [{"name": "ndots", "value": "2"}, {"name": "edns0"}]}}),
            &["1.1.1.1"],
            &["a"],
            &["ndots:2", "edns0"],
        );
        check(
            json!({"dnsConfig": {"options": [{"name": "ndots", "value": "1"}]}}),
            &["10.43.0.10"],
            &cluster,
            &["ndots:1"],
        );
    }

    #[test]
    fn names() {
        let check = |spec: serde_json::Value, hostname: &str, domain: &str| {
            let got = hostname_and_domain(&pod(spec), "cluster.local");
            assert_eq!((got.0.as_str(), got.1.as_str()), (hostname, domain));
        };
        check(json!({}), "web-0", "");
        check(json!({"hostname": "h"}), "h", "");
        check(json!({"subdomain": "web"}), "web-0", "web.ns.svc.cluster.local");
        assert_eq!(truncated(&format!("{}-x", "a".repeat(62))), "a".repeat(62));
    }

    #[test]
    fn hosts() {
        let ip: IpAddr = "10.42.0.7".parse().expect("an address");
        let alias =
            HostAlias { ip: "1.2.3.4".into(), hostnames: Some(vec!["a".into(), "b".into()]) };
        let text = hosts_file(&[ip], "web-0", "web.ns.svc.cluster.local", &[alias]);
        assert!(text.starts_with(MANAGED));
        assert!(text.contains("10.42.0.7\tweb-0.web.ns.svc.cluster.local\tweb-0\n"), "{text}");
        assert!(text.ends_with("\n# Entries added by HostAliases.\n1.2.3.4\ta\tb\n"), "{text}");
    }
}
