//! Defaults of pod specs and pod templates. Upstream: `pkg/apis/core/v1/defaults.go`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Container, ContainerPort, EnvVar, EphemeralContainer, ExecAction, HTTPGetAction, Lifecycle,
    PersistentVolumeClaimSpec, PodSpec, PodTemplateSpec, Probe, Volume,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::defaults::fill;

/// Files in volumes are readable by all, unless said otherwise: 0644.
const DEFAULT_MODE: i32 = 0o644;
/// Of a projected service account token, in seconds.
const TOKEN_EXPIRATION: i64 = 3600;

pub(crate) fn default_template(template: &mut PodTemplateSpec) {
    template.metadata.get_or_insert_default();
    if let Some(spec) = &mut template.spec {
        default_spec(spec);
    }
}

pub(crate) fn default_spec(spec: &mut PodSpec) {
    fill(&mut spec.restart_policy, "Always");
    fill(&mut spec.dns_policy, "ClusterFirst");
    fill(&mut spec.scheduler_name, "default-scheduler");
    spec.termination_grace_period_seconds.get_or_insert(30);
    spec.security_context.get_or_insert_default();
    for switch in [&mut spec.host_network, &mut spec.host_pid, &mut spec.host_ipc] {
        switch.take_if(|on| !*on);
    }
    // The old name of the same thing: both are always shown.
    match (&spec.service_account_name, &spec.service_account) {
        (Some(name), _) if !name.is_empty() => spec.service_account = Some(name.clone()),
        (_, Some(name)) if !name.is_empty() => spec.service_account_name = Some(name.clone()),
        _ => {}
    }
    for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
        default_container(container);
    }
    for ephemeral in spec.ephemeral_containers.iter_mut().flatten() {
        default_ephemeral(ephemeral);
    }
    spec.volumes.iter_mut().flatten().for_each(default_volume);
    round([&mut spec.overhead]);
    if let Some(resources) = &mut spec.resources {
        round([&mut resources.limits, &mut resources.requests]);
    }
    for constraint in spec.topology_spread_constraints.iter_mut().flatten() {
        constraint.node_affinity_policy.take_if(|policy| policy.is_empty());
    }
    spec.init_containers.take_if(|list| list.is_empty());
    spec.volumes.take_if(|list| list.is_empty());
    spec.image_pull_secrets.take_if(|list| list.is_empty());
    spec.tolerations.take_if(|list| list.is_empty());
    spec.node_selector.take_if(|map| map.is_empty());
    spec.host_aliases.take_if(|list| list.is_empty());
}

/// What pods have by default besides what templates have too.
pub(crate) fn default_pod(spec: &mut PodSpec) {
    spec.enable_service_links.get_or_insert(true);
    let host_network = spec.host_network == Some(true);
    for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
        let resources = container.resources.get_or_insert_default();
        // A limit without a request is also the request.
        if let Some(limits) = &resources.limits {
            let requests = resources.requests.get_or_insert_default();
            for (name, limit) in limits {
                requests.entry(name.clone()).or_insert_with(|| limit.clone());
            }
        }
        resources.requests.take_if(|requests: &mut BTreeMap<String, Quantity>| requests.is_empty());
        for port in container.ports.iter_mut().flatten().filter(|_| host_network) {
            port.host_port.get_or_insert(port.container_port);
        }
    }
    default_whole(spec);
}

/// The resources of a pod as a whole, where they are stated in part: huge pages are limited to what the
/// containers are limited to together, and requests are the containers', or else the limits.
/// Upstream: `defaultHugePagePodLimits`, `defaultPodRequests`.
fn default_whole(spec: &mut PodSpec) {
    let is_huge = |name: &str| name.starts_with("hugepages-");
    let is_shared = |name: &str| matches!(name, "cpu" | "memory");
    let stated =
        |list: &Option<BTreeMap<String, Quantity>>| list.as_ref().is_some_and(|it| !it.is_empty());
    let Some(mut whole) = spec.resources.take() else { return };
    if stated(&whole.limits) || stated(&whole.requests) {
        for (name, limit) in api::quota::container_limits(spec) {
            let is_requested = whole.requests.as_ref().is_some_and(|it| it.contains_key(&name));
            if is_huge(&name) && !is_requested {
                whole.limits.get_or_insert_default().entry(name).or_insert(limit);
            }
        }
    }
    if let Some(limits) = whole.limits.as_ref().filter(|limits| !limits.is_empty()) {
        let requests = whole.requests.get_or_insert_default();
        for (name, request) in api::quota::container_requests(spec) {
            if is_shared(&name) {
                requests.entry(name).or_insert(request);
            }
        }
        for (name, limit) in limits {
            if is_shared(name) || is_huge(name) {
                requests.entry(name.clone()).or_insert_with(|| limit.clone());
            }
        }
        whole.requests.take_if(|requests| requests.is_empty());
    }
    spec.resources = Some(whole);
}

/// Amounts of resources are kept in thousandths, rounded up. Upstream: `SetDefaults_ResourceList`.
pub(crate) fn round<'a>(
    lists: impl IntoIterator<Item = &'a mut Option<BTreeMap<String, Quantity>>>,
) {
    for quantity in lists.into_iter().flatten().flat_map(BTreeMap::values_mut) {
        if let Some(rounded) = machinery::quantity::rounded_to_milli(quantity) {
            *quantity = rounded;
        }
    }
}

/// The part of a claim's defaults that templates of claims have, too.
pub(crate) fn default_claim(spec: &mut PersistentVolumeClaimSpec) {
    spec.volume_mode.get_or_insert_with(|| "Filesystem".into());
    if let Some(resources) = &mut spec.resources {
        round([&mut resources.limits, &mut resources.requests]);
    }
}

fn default_container(container: &mut Container) {
    fill(&mut container.image_pull_policy, pull_policy(container.image.as_deref()));
    fill(&mut container.termination_message_path, "/dev/termination-log");
    fill(&mut container.termination_message_policy, "File");
    let resources = container.resources.get_or_insert_default();
    round([&mut resources.limits, &mut resources.requests]);
    for port in container.ports.iter_mut().flatten() {
        default_port(port);
    }
    default_env(container.env.iter_mut().flatten());
    for probe in [
        &mut container.liveness_probe,
        &mut container.readiness_probe,
        &mut container.startup_probe,
    ] {
        probe.iter_mut().for_each(default_probe);
    }
    container.lifecycle.iter_mut().for_each(default_lifecycle);
    container.args.take_if(|list| list.is_empty());
    container.command.take_if(|list| list.is_empty());
    container.env.take_if(|list| list.is_empty());
    container.env_from.take_if(|list| list.is_empty());
    container.ports.take_if(|list| list.is_empty());
    container.volume_mounts.take_if(|list| list.is_empty());
}

/// What these containers must not have gets its defaults, too: it is refused later, and as a whole.
fn default_ephemeral(container: &mut EphemeralContainer) {
    fill(&mut container.image_pull_policy, pull_policy(container.image.as_deref()));
    fill(&mut container.termination_message_path, "/dev/termination-log");
    fill(&mut container.termination_message_policy, "File");
    container.resources.get_or_insert_default();
    container.ports.iter_mut().flatten().for_each(default_port);
    default_env(container.env.iter_mut().flatten());
    for probe in [
        &mut container.liveness_probe,
        &mut container.readiness_probe,
        &mut container.startup_probe,
    ] {
        probe.iter_mut().for_each(default_probe);
    }
    container.lifecycle.iter_mut().for_each(default_lifecycle);
}

fn default_port(port: &mut ContainerPort) {
    fill(&mut port.protocol, "TCP");
    port.host_port.take_if(|port| *port == 0);
}

fn default_env<'a>(env: impl Iterator<Item = &'a mut EnvVar>) {
    for variable in env {
        variable.value.take_if(|value| value.is_empty());
        if let Some(field) = variable.value_from.as_mut().and_then(|from| from.field_ref.as_mut()) {
            fill(&mut field.api_version, "v1");
        }
        if let Some(resource) =
            variable.value_from.as_mut().and_then(|from| from.resource_field_ref.as_mut())
        {
            resource.divisor.get_or_insert_with(|| Quantity("0".into()));
        }
    }
}

fn default_probe(probe: &mut Probe) {
    for (value, default) in [
        (&mut probe.timeout_seconds, 1),
        (&mut probe.period_seconds, 10),
        (&mut probe.success_threshold, 1),
        (&mut probe.failure_threshold, 3),
    ] {
        let value = value.get_or_insert(default);
        if *value == 0 {
            *value = default;
        }
    }
    probe.initial_delay_seconds.take_if(|seconds| *seconds == 0);
    probe.http_get.iter_mut().for_each(default_http);
    if let Some(grpc) = &mut probe.grpc {
        grpc.service.get_or_insert_default();
    }
    probe.exec.iter_mut().for_each(tidy_exec);
}

fn default_http(action: &mut HTTPGetAction) {
    fill(&mut action.path, "/");
    fill(&mut action.scheme, "HTTP");
}

fn tidy_exec(exec: &mut ExecAction) {
    exec.command.take_if(|command| command.is_empty());
}

fn default_lifecycle(lifecycle: &mut Lifecycle) {
    for handler in [&mut lifecycle.post_start, &mut lifecycle.pre_stop].into_iter().flatten() {
        handler.http_get.iter_mut().for_each(default_http);
        handler.exec.iter_mut().for_each(tidy_exec);
    }
}

/// Sources that pods and PersistentVolumes share; some are types of their own in each, with the same
/// fields.
macro_rules! default_source {
    ($source:expr) => {{
        let source = &mut *$source;
        if let Some(path) = &mut source.host_path {
            path.type_.get_or_insert_default();
        }
        if let Some(iscsi) = &mut source.iscsi {
            $crate::defaults::fill(&mut iscsi.iscsi_interface, "default");
        }
        if let Some(rbd) = &mut source.rbd {
            $crate::defaults::fill(&mut rbd.pool, "rbd");
            $crate::defaults::fill(&mut rbd.user, "admin");
            $crate::defaults::fill(&mut rbd.keyring, "/etc/ceph/keyring");
        }
        if let Some(disk) = &mut source.azure_disk {
            $crate::defaults::fill(&mut disk.caching_mode, "ReadWrite");
            $crate::defaults::fill(&mut disk.fs_type, "ext4");
            $crate::defaults::fill(&mut disk.kind, "Shared");
            disk.read_only.get_or_insert(false);
        }
        if let Some(io) = &mut source.scale_io {
            $crate::defaults::fill(&mut io.storage_mode, "ThinProvisioned");
            $crate::defaults::fill(&mut io.fs_type, "xfs");
        }
    }};
}
pub(crate) use default_source;

fn default_volume(volume: &mut Volume) {
    if let Some(source) = &mut volume.secret {
        source.default_mode.get_or_insert(DEFAULT_MODE);
    }
    if let Some(source) = &mut volume.config_map {
        source.default_mode.get_or_insert(DEFAULT_MODE);
        source.name = std::mem::take(&mut source.name);
    }
    default_source!(volume);
    let template = volume.ephemeral.iter_mut().filter_map(|one| one.volume_claim_template.as_mut());
    for template in template {
        default_claim(&mut template.spec);
    }
    if let Some(image) = &mut volume.image {
        fill(&mut image.pull_policy, pull_policy(image.reference.as_deref()));
    }
    if let Some(source) = &mut volume.downward_api {
        source.default_mode.get_or_insert(DEFAULT_MODE);
        for item in source.items.iter_mut().flatten() {
            if let Some(field) = &mut item.field_ref {
                fill(&mut field.api_version, "v1");
            }
        }
    }
    if let Some(source) = &mut volume.projected {
        source.default_mode.get_or_insert(DEFAULT_MODE);
        for one in source.sources.iter_mut().flatten() {
            if let Some(token) = &mut one.service_account_token {
                token.expiration_seconds.get_or_insert(TOKEN_EXPIRATION);
            }
            for item in one.downward_api.iter_mut().flat_map(|api| api.items.iter_mut().flatten()) {
                if let Some(field) = &mut item.field_ref {
                    fill(&mut field.api_version, "v1");
                }
            }
        }
    }
    if has_no_source(volume) {
        volume.empty_dir.get_or_insert_default();
    }
}

fn has_no_source(volume: &Volume) -> bool {
    *volume == Volume { name: volume.name.clone(), ..Volume::default() }
}

/// Images without a tag, or with `latest`, are always pulled.
fn pull_policy(image: Option<&str>) -> &'static str {
    let image = image.unwrap_or_default();
    if image.contains('@') {
        return "IfNotPresent";
    }
    let last = image.rsplit('/').next().unwrap_or_default();
    match last.split_once(':') {
        None | Some((_, "latest")) => "Always",
        Some(_) => "IfNotPresent",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pull_policies_follow_the_tag() {
        for (image, expected) in [
            ("nginx", "Always"),
            ("nginx:latest", "Always"),
            ("host:5000/nginx", "Always"),
            ("host:5000/nginx:1.2", "IfNotPresent"),
            ("nginx@sha256:0000", "IfNotPresent"),
        ] {
            assert_eq!(pull_policy(Some(image)), expected, "{image}");
        }
    }

    #[test]
    fn a_pod_as_a_whole_requests_what_its_containers_do() {
        let check = |whole: serde_json::Value,
                     container: serde_json::Value,
                     expected: serde_json::Value| {
            let mut spec: PodSpec = serde_json::from_value(serde_json::json!({
                "resources": whole, "containers": [{"name": "c", "resources": container}],
            }))
            .expect("a pod spec");
            default_pod(&mut spec);
            assert_eq!(serde_json::to_value(&spec.resources).expect("JSON"), expected);
        };
        use serde_json::json;
        check(
            json!({"limits": {"cpu": "1", "memory": "1Gi"}}),
            json!({"requests": {"cpu": "2", "example.com/gpu": "1"}}),
            json!({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "2", "memory": "1Gi"}}),
        );
        check(
            json!({"requests": {"cpu": "1"}}),
            json!({"limits": {"hugepages-2Mi": "4Mi"}}),
            json!({
                "limits": {"hugepages-2Mi": "4Mi"}, "requests": {"cpu": "1", "hugepages-2Mi": "4Mi"},
            }),
        );
        check(json!({}), json!({"requests": {"cpu": "1"}}), json!({}));
    }

    #[test]
    fn defaulting_twice_changes_nothing() {
        let mut spec: PodSpec = serde_json::from_value(serde_json::json!({
            "containers": [{"name": "c", "image": "x", "ports": [{"containerPort": 80}],
                "livenessProbe": {"httpGet": {"port": 80}}, "resources": {"limits": {"cpu": "1"}}}],
            "volumes": [{"name": "v"}, {"name": "s", "secret": {"secretName": "s"}}],
        }))
        .expect("a pod spec");
        default_spec(&mut spec);
        default_pod(&mut spec);
        let once = spec.clone();
        default_spec(&mut spec);
        default_pod(&mut spec);
        assert_eq!(spec, once);
        assert_eq!(
            spec.containers[0].resources.as_ref().and_then(|r| r.requests.clone()).map(|r| r.len()),
            Some(1)
        );
        assert!(spec.volumes.as_ref().is_some_and(|volumes| volumes[0].empty_dir.is_some()));
    }
}
