//! The runtime's configuration of a pod's sandbox.
//!
//! In: the pod and the node's settings. Out: a CRI `PodSandboxConfig`. Pure.
//! Upstream: `kuberuntime_sandbox.go` generatePodSandboxConfig.

use cri::{
    DNSConfig, LinuxContainerResources, LinuxPodSandboxConfig, LinuxSandboxSecurityContext,
    NamespaceMode, NamespaceOption, PodSandboxConfig, PodSandboxMetadata, PortMapping, ProfileType,
    Protocol, SecurityProfile, UserNamespace,
};
use k8s_openapi::api::core::v1::{AppArmorProfile, Pod, SeccompProfile};

use crate::config::Config;
use crate::names;
use crate::pod::hosts::{self, Resolver};
use crate::pod::sysctls::with_dots;
use crate::resources::{self, Cfs, cpu_shares, pod_limits, pod_requests};

pub fn sandbox_config(
    pod: &Pod,
    attempt: u32,
    config: &Config,
    resolver: &Resolver,
    cgroup_parent: &str,
    users: &UserNamespace,
) -> PodSandboxConfig {
    let default_spec = Default::default();
    let spec = pod.spec.as_ref().unwrap_or(&default_spec);
    let on_host = spec.host_network == Some(true);
    let (hostname, domain) = hosts::hostname_and_domain(pod, &config.cluster_domain);
    let hostname = match spec.set_hostname_as_fqdn {
        Some(true) if !domain.is_empty() => format!("{hostname}.{domain}"),
        _ => hostname,
    };
    let dns = hosts::resolver(pod, resolver, &config.cluster_dns, &config.cluster_domain);
    let mut labels = pod.metadata.labels.clone().unwrap_or_default();
    labels.insert(names::POD_NAME.into(), names::name(pod).into());
    labels.insert(names::POD_NAMESPACE.into(), names::namespace(pod).into());
    labels.insert(names::POD_UID.into(), names::uid(pod).into());
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: names::name(pod).into(),
            uid: names::uid(pod).into(),
            namespace: names::namespace(pod).into(),
            attempt,
        }),
        // Upstream: no hostname if the pod uses the host's UTS namespace.
        hostname: if on_host { String::new() } else { hostname },
        log_directory: names::log_directory(&config.log_dir, pod).display().to_string(),
        dns_config: Some(DNSConfig {
            servers: dns.servers,
            searches: dns.searches,
            options: dns.options,
        }),
        port_mappings: if on_host { vec![] } else { port_mappings(pod) },
        labels,
        annotations: pod.metadata.annotations.clone().unwrap_or_default(),
        linux: Some(linux(pod, cgroup_parent, users, config.limits.cfs)),
    }
}

fn port_mappings(pod: &Pod) -> Vec<PortMapping> {
    let spec = pod.spec.iter();
    let all = spec.flat_map(|s| s.containers.iter().chain(s.init_containers.iter().flatten()));
    all.flat_map(|c| c.ports.iter().flatten())
        .map(|port| PortMapping {
            protocol: match port.protocol.as_deref() {
                Some("UDP") => Protocol::Udp as i32,
                Some("SCTP") => Protocol::Sctp as i32,
                _ => Protocol::Tcp as i32,
            },
            container_port: port.container_port,
            host_port: port.host_port.unwrap_or(0),
            host_ip: port.host_ip.clone().unwrap_or_default(),
        })
        .collect()
}

fn linux(pod: &Pod, cgroup_parent: &str, users: &UserNamespace, cfs: Cfs) -> LinuxPodSandboxConfig {
    let context = pod.spec.as_ref().and_then(|s| s.security_context.as_ref());
    let privileged = pod.spec.iter().flat_map(|s| &s.containers).any(|container| {
        container.security_context.as_ref().and_then(|c| c.privileged) == Some(true)
    });
    let mut groups = context.and_then(|c| c.supplemental_groups.clone()).unwrap_or_default();
    groups.extend(context.and_then(|c| c.fs_group));
    let sysctls = context.and_then(|c| c.sysctls.clone()).unwrap_or_default();
    LinuxPodSandboxConfig {
        cgroup_parent: cgroup_parent.into(),
        security_context: Some(LinuxSandboxSecurityContext {
            namespace_options: Some(namespaces(pod, None, users)),
            run_as_user: context.and_then(|c| c.run_as_user).map(Into::into),
            run_as_group: context.and_then(|c| c.run_as_group).map(Into::into),
            supplemental_groups: groups,
            privileged,
            seccomp: Some(SecurityProfile {
                profile_type: ProfileType::RuntimeDefault as i32,
                localhost_ref: String::new(),
            }),
            ..LinuxSandboxSecurityContext::default()
        }),
        // Runtimes expect dots.
        sysctls: sysctls.into_iter().map(|s| (with_dots(&s.name), s.value)).collect(),
        overhead: None,
        resources: Some(pod_resources(pod, cfs)),
    }
}

/// The limits of the pod as a whole: upstream's pod-level cgroup values.
pub fn pod_resources(pod: &Pod, cfs: Cfs) -> LinuxContainerResources {
    let Some(spec) = &pod.spec else { return LinuxContainerResources::default() };
    let (requests, limits) = (pod_requests(spec), pod_limits(spec));
    let all_limit = |name: &str| {
        let set = |r: &Option<_>| resources::limit(r.as_ref(), name).is_some();
        let mut all = spec.containers.iter().chain(spec.init_containers.iter().flatten());
        set(&spec.resources) || all.all(|c| set(&c.resources))
    };
    let of = |map: &std::collections::BTreeMap<String, i64>, name: &str| {
        map.get(name).copied().unwrap_or(0)
    };
    let cpu = Some(of(&requests, "cpu")).filter(|r| *r > 0).unwrap_or_else(|| of(&limits, "cpu"));
    LinuxContainerResources {
        cpu_shares: cpu_shares(cpu),
        cpu_period: cfs.period(),
        cpu_quota: if all_limit("cpu") { cfs.quota(of(&limits, "cpu")) } else { 0 },
        memory_limit_in_bytes: if all_limit("memory") { of(&limits, "memory") / 1000 } else { 0 },
        ..LinuxContainerResources::default()
    }
}

/// The namespaces of the pod's containers; `target` is the target container of an ephemeral one.
pub fn namespaces(pod: &Pod, target: Option<&str>, users: &UserNamespace) -> NamespaceOption {
    let spec = pod.spec.as_ref();
    let node_or = |on_host: Option<bool>, otherwise: NamespaceMode| match on_host {
        Some(true) => NamespaceMode::Node as i32,
        _ => otherwise as i32,
    };
    let shared = spec.and_then(|s| s.share_process_namespace) == Some(true);
    let pid = if shared { NamespaceMode::Pod } else { NamespaceMode::Container };
    let mut options = NamespaceOption {
        network: node_or(spec.and_then(|s| s.host_network), NamespaceMode::Pod),
        pid: node_or(spec.and_then(|s| s.host_pid), pid),
        ipc: node_or(spec.and_then(|s| s.host_ipc), NamespaceMode::Pod),
        target_id: String::new(),
        userns_options: Some(users.clone()),
    };
    if let Some(target) = target
        && options.pid == NamespaceMode::Container as i32
    {
        options.pid = NamespaceMode::Target as i32;
        options.target_id = target.into();
    }
    options
}

/// Converts the API's profile to the runtime's; absent means unconfined, unless the runtime's default is
/// the node's default (`seccompDefault`).
pub fn seccomp(profile: Option<&SeccompProfile>, is_default: bool) -> SecurityProfile {
    let (kind, path) = match profile.map(|p| p.type_.as_str()) {
        None if is_default => (ProfileType::RuntimeDefault, None),
        Some("RuntimeDefault") => (ProfileType::RuntimeDefault, None),
        Some("Localhost") => {
            (ProfileType::Localhost, profile.and_then(|p| p.localhost_profile.as_deref()))
        }
        _ => (ProfileType::Unconfined, None),
    };
    SecurityProfile {
        profile_type: kind as i32,
        localhost_ref: path.map(|p| format!("/var/lib/kubelet/seccomp/{p}")).unwrap_or_default(),
    }
}

pub fn apparmor(profile: Option<&AppArmorProfile>) -> Option<SecurityProfile> {
    let profile = profile?;
    let kind = match profile.type_.as_str() {
        "RuntimeDefault" => ProfileType::RuntimeDefault,
        "Localhost" => ProfileType::Localhost,
        _ => ProfileType::Unconfined,
    };
    Some(SecurityProfile {
        profile_type: kind as i32,
        localhost_ref: profile.localhost_profile.clone().unwrap_or_default(),
    })
}
