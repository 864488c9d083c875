//! Fields behind feature gates: while a gate is closed, a write loses what stands in its fields,
//! unless the object had something there before.
//!
//! In: an object that is about to be written, and what it was. Out: the object without such fields. A
//! field that a gate guards is a line of a table here. It is done after ownership is noted, as
//! upstream does. Upstream: `dropDisabledFields` of each strategy.

use k8s_openapi::api::apps::v1 as apps;
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::batch::v1 as batch;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{
    ContainerRestartRule, ContainerStatus, EnvVar, Lifecycle, Node, PersistentVolumeClaim, Pod,
    PodSpec, PodStatus, PodTemplate, PodTemplateSpec, ReplicationController, VolumeProjection,
};
use k8s_openapi::api::resource::v1 as devices;
use k8s_openapi::api::scheduling::v1alpha2::{PodGroup, PodGroupTemplate, Workload};
use k8s_openapi::api::storage::v1::CSIDriver;
use release::features::{self, Feature};

/// What of a `T` is behind gates, all of which must be open.
struct Gated<T> {
    gates: &'static [Feature],
    /// Takes it out; was there anything?
    take: fn(&mut T) -> bool,
}

const fn gated<T>(gates: &'static [Feature], take: fn(&mut T) -> bool) -> Gated<T> {
    Gated { gates, take }
}

fn close<T: Clone + PartialEq>(rows: &[Gated<T>], new: &mut T, old: Option<&T>) {
    if old.is_some_and(|old| old == new) {
        return;
    }
    let mut before = old.cloned();
    let is_closed = |row: &&Gated<T>| !row.gates.iter().all(|gate| features::enabled(*gate));
    for row in rows.iter().filter(is_closed) {
        if !before.as_mut().is_some_and(row.take) {
            (row.take)(new);
        }
    }
}

/// As [`close`], of a part that may not be there.
fn close_part<T: Clone + PartialEq>(
    rows: &[Gated<T>],
    new: Option<&mut T>,
    old: Option<Option<&T>>,
) {
    if let Some(new) = new {
        close(rows, new, old.flatten());
    }
}

fn taken<T>(field: &mut Option<T>) -> bool {
    field.take().is_some()
}

/// All of them are taken, which `Iterator::any` would not do.
fn any(taken: impl Iterator<Item = bool>) -> bool {
    taken.fold(false, |any, one| any | one)
}

const POD_SPEC: &[Gated<PodSpec>] = &[
    gated(&[Feature::PodLevelResources], |spec| taken(&mut spec.resources)),
    gated(&[Feature::MatchLabelKeysInPodTopologySpread], |spec| {
        let constraints = spec.topology_spread_constraints.iter_mut().flatten();
        any(constraints.map(|one| taken(&mut one.match_label_keys)))
    }),
    gated(&[Feature::ClusterTrustBundleProjection], |spec| {
        any(projections(spec).map(|one| taken(&mut one.cluster_trust_bundle)))
    }),
    gated(&[Feature::PodCertificateRequest], |spec| {
        any(projections(spec).map(|one| taken(&mut one.pod_certificate)))
    }),
    gated(&[Feature::GenericWorkload], |spec| taken(&mut spec.scheduling_group)),
    gated(&[Feature::ContainerRestartRules], |spec| any(containers(spec).map(Part::take_restarts))),
    gated(&[Feature::HostnameOverride], |spec| taken(&mut spec.hostname_override)),
    gated(&[Feature::EnvFiles], |spec| any(containers(spec).map(Part::take_file_keys))),
    gated(&[Feature::ContainerStopSignals], |spec| {
        any(containers(spec).map(Part::take_stop_signal))
    }),
];

fn projections(spec: &mut PodSpec) -> impl Iterator<Item = &mut VolumeProjection> {
    let volumes = spec.volumes.iter_mut().flatten();
    let projected = volumes.filter_map(|volume| volume.projected.as_mut());
    projected.flat_map(|projected| projected.sources.iter_mut().flatten())
}

/// What containers have in common, ephemeral ones too, which are a type of their own.
struct Part<'a> {
    env: &'a mut Option<Vec<EnvVar>>,
    lifecycle: &'a mut Option<Lifecycle>,
    restart_policy: &'a mut Option<String>,
    restart_policy_rules: &'a mut Option<Vec<ContainerRestartRule>>,
    is_init: bool,
}

macro_rules! part {
    ($container:expr, $is_init:expr) => {{
        let container = $container;
        Part {
            env: &mut container.env,
            lifecycle: &mut container.lifecycle,
            restart_policy: &mut container.restart_policy,
            restart_policy_rules: &mut container.restart_policy_rules,
            is_init: $is_init,
        }
    }};
}

fn containers(spec: &mut PodSpec) -> impl Iterator<Item = Part<'_>> {
    let init = spec.init_containers.iter_mut().flatten().map(|one| part!(one, true));
    let main = spec.containers.iter_mut().map(|one| part!(one, false));
    let ephemeral = spec.ephemeral_containers.iter_mut().flatten().map(|one| part!(one, false));
    init.chain(main).chain(ephemeral)
}

impl Part<'_> {
    /// A sidecar's policy is older than the gate.
    fn take_restarts(self) -> bool {
        let is_init = self.is_init;
        let policy = self.restart_policy.take_if(|policy| !is_init || policy != "Always");
        taken(self.restart_policy_rules) | policy.is_some()
    }

    fn take_file_keys(self) -> bool {
        let sources = self.env.iter_mut().flatten().filter_map(|one| one.value_from.as_mut());
        any(sources.map(|source| taken(&mut source.file_key_ref)))
    }

    fn take_stop_signal(self) -> bool {
        let had = self.lifecycle.as_mut().is_some_and(|hooks| taken(&mut hooks.stop_signal));
        self.lifecycle.take_if(|hooks| had && *hooks == Lifecycle::default());
        had
    }
}

const POD_STATUS: &[Gated<PodStatus>] = &[
    gated(&[Feature::InPlacePodLevelResourcesVerticalScaling], |status| {
        taken(&mut status.resources) | taken(&mut status.allocated_resources)
    }),
    gated(&[Feature::DRAExtendedResource], |status| {
        taken(&mut status.extended_resource_claim_status)
    }),
    gated(&[Feature::ResourceHealthStatus], |status| {
        any(statuses(status).map(|one| taken(&mut one.allocated_resources_status)))
    }),
    gated(&[Feature::ResourceHealthStatusMessage], |status| {
        let resources = statuses(status).flat_map(|one| one.allocated_resources_status.iter_mut());
        let healths = resources.flatten().flat_map(|one| one.resources.iter_mut().flatten());
        any(healths.map(|health| taken(&mut health.message)))
    }),
    gated(&[Feature::ImageVolumeWithDigest], |status| {
        let mounts = statuses(status).flat_map(|one| one.volume_mounts.iter_mut().flatten());
        any(mounts.map(|mount| taken(&mut mount.volume_status)))
    }),
    gated(&[Feature::DRANodeAllocatableResources], |status| {
        taken(&mut status.node_allocatable_resource_claim_statuses)
    }),
];

fn statuses(status: &mut PodStatus) -> impl Iterator<Item = &mut ContainerStatus> {
    let init = status.init_container_statuses.iter_mut();
    let all = init.chain(&mut status.container_statuses);
    all.chain(&mut status.ephemeral_container_statuses).flatten()
}

pub(crate) fn pod(new: &mut Pod, old: Option<&Pod>) {
    close_part(POD_SPEC, new.spec.as_mut(), old.map(|old| old.spec.as_ref()));
    close_part(POD_STATUS, new.status.as_mut(), old.map(|old| old.status.as_ref()));
}

fn template(new: Option<&mut PodTemplateSpec>, old: Option<&PodTemplateSpec>) {
    let new = new.and_then(|template| template.spec.as_mut());
    close_part(POD_SPEC, new, old.map(|old| old.spec.as_ref()));
}

const DEPLOYMENT_STATUS: &[Gated<apps::DeploymentStatus>] =
    &[gated(&[Feature::DeploymentReplicaSetTerminatingReplicas], |status| {
        taken(&mut status.terminating_replicas)
    })];

pub(crate) fn deployment(new: &mut apps::Deployment, old: Option<&apps::Deployment>) {
    let before = old.and_then(|old| old.spec.as_ref()).map(|spec| &spec.template);
    template(new.spec.as_mut().map(|spec| &mut spec.template), before);
    let old = old.map(|old| old.status.as_ref());
    close_part(DEPLOYMENT_STATUS, new.status.as_mut(), old);
}

const REPLICA_SET_STATUS: &[Gated<apps::ReplicaSetStatus>] =
    &[gated(&[Feature::DeploymentReplicaSetTerminatingReplicas], |status| {
        taken(&mut status.terminating_replicas)
    })];

pub(crate) fn replica_set(new: &mut apps::ReplicaSet, old: Option<&apps::ReplicaSet>) {
    let before = old.and_then(|old| old.spec.as_ref()?.template.as_ref());
    template(new.spec.as_mut().and_then(|spec| spec.template.as_mut()), before);
    let old = old.map(|old| old.status.as_ref());
    close_part(REPLICA_SET_STATUS, new.status.as_mut(), old);
}

pub(crate) fn daemon_set(new: &mut apps::DaemonSet, old: Option<&apps::DaemonSet>) {
    let before = old.and_then(|old| old.spec.as_ref()).map(|spec| &spec.template);
    template(new.spec.as_mut().map(|spec| &mut spec.template), before);
}

const STATEFUL_SET: &[Gated<apps::StatefulSetUpdateStrategy>] =
    &[gated(&[Feature::MaxUnavailableStatefulSet], |strategy| {
        strategy.rolling_update.as_mut().is_some_and(|rolling| taken(&mut rolling.max_unavailable))
    })];

pub(crate) fn stateful_set(new: &mut apps::StatefulSet, old: Option<&apps::StatefulSet>) {
    let old = old.and_then(|old| old.spec.as_ref());
    let Some(spec) = &mut new.spec else { return };
    template(Some(&mut spec.template), old.map(|old| &old.template));
    let before = old.map(|old| old.update_strategy.as_ref());
    close_part(STATEFUL_SET, spec.update_strategy.as_mut(), before);
}

pub(crate) fn replication_controller(
    new: &mut ReplicationController,
    old: Option<&ReplicationController>,
) {
    let before = old.and_then(|old| old.spec.as_ref()?.template.as_ref());
    template(new.spec.as_mut().and_then(|spec| spec.template.as_mut()), before);
}

pub(crate) fn pod_template(new: &mut PodTemplate, old: Option<&PodTemplate>) {
    template(new.template.as_mut(), old.and_then(|old| old.template.as_ref()));
}

pub(crate) fn job(new: &mut batch::Job, old: Option<&batch::Job>) {
    let before = old.and_then(|old| old.spec.as_ref()).map(|spec| &spec.template);
    template(new.spec.as_mut().map(|spec| &mut spec.template), before);
}

pub(crate) fn cron_job(new: &mut batch::CronJob, old: Option<&batch::CronJob>) {
    let before = old.and_then(|old| old.spec.job_template.spec.as_ref()).map(|spec| &spec.template);
    template(new.spec.job_template.spec.as_mut().map(|spec| &mut spec.template), before);
}

/// Where a claim's data comes from stands in two fields, an older and a newer one. Upstream:
/// `DropDisabledFields`, `EnforceDataSourceBackwardsCompatibility` and `NormalizeDataSources` of
/// claims.
pub(crate) fn claim(new: &mut PersistentVolumeClaim, old: Option<&PersistentVolumeClaim>) {
    let old = old.and_then(|old| old.spec.as_ref());
    let Some(spec) = &mut new.spec else { return };
    let had_reference = old.is_some_and(|old| old.data_source_ref.is_some());
    let had_source = old.is_some_and(|old| old.data_source.is_some());
    let is_foreign =
        |namespace: &Option<String>| namespace.as_ref().is_some_and(|it| !it.is_empty());
    if !features::enabled(Feature::CrossNamespaceVolumeDataSource) && !had_reference {
        spec.data_source_ref.take_if(|reference| is_foreign(&reference.namespace));
    }
    // What the older field may not say was always left out without a word.
    if !had_source && !had_reference && spec.data_source_ref.is_none() {
        spec.data_source.take_if(|source| {
            let group = source.api_group.as_deref().unwrap_or_default();
            !matches!(
                (group, source.kind.as_str()),
                ("", "PersistentVolumeClaim") | ("snapshot.storage.k8s.io", "VolumeSnapshot")
            )
        });
    }
    // A claim that was kept before both were filled in stays as it is: it may not change.
    if had_source && !had_reference {
        return;
    }
    match (&spec.data_source, &spec.data_source_ref) {
        (Some(source), None) => {
            spec.data_source_ref = Some(k8s_openapi::api::core::v1::TypedObjectReference {
                api_group: source.api_group.clone(),
                kind: source.kind.clone(),
                name: source.name.clone(),
                namespace: None,
            });
        }
        (None, Some(reference)) if !is_foreign(&reference.namespace) => {
            spec.data_source = Some(k8s_openapi::api::core::v1::TypedLocalObjectReference {
                api_group: reference.api_group.clone(),
                kind: reference.kind.clone(),
                name: reference.name.clone(),
            });
        }
        _ => {}
    }
}

const NODE: &[Gated<Node>] = &[gated(&[Feature::NodeDeclaredFeatures], |node| {
    node.status.as_mut().is_some_and(|status| taken(&mut status.declared_features))
})];

pub(crate) fn node(new: &mut Node, old: Option<&Node>) {
    close(NODE, new, old);
}

const LEASE: &[Gated<Lease>] = &[
    gated(&[Feature::CoordinatedLeaderElection], |lease| {
        lease.spec.as_mut().is_some_and(|spec| taken(&mut spec.strategy))
    }),
    gated(&[Feature::CoordinatedLeaderElection], |lease| {
        lease.spec.as_mut().is_some_and(|spec| taken(&mut spec.preferred_holder))
    }),
];

pub(crate) fn lease(new: &mut Lease, old: Option<&Lease>) {
    close(LEASE, new, old);
}

const CSI_DRIVER: &[Gated<CSIDriver>] = &[gated(&[Feature::VolumeLimitScaling], |driver| {
    taken(&mut driver.spec.prevent_pod_scheduling_if_missing)
})];

pub(crate) fn csi_driver(new: &mut CSIDriver, old: Option<&CSIDriver>) {
    close(CSI_DRIVER, new, old);
}

const AUTOSCALER: &[Gated<HorizontalPodAutoscaler>] =
    &[gated(&[Feature::HPAConfigurableTolerance], |autoscaler| {
        let Some(behavior) = &mut autoscaler.spec.behavior else { return false };
        let rules = [&mut behavior.scale_up, &mut behavior.scale_down].into_iter().flatten();
        any(rules.map(|rules| taken(&mut rules.tolerance)))
    })];

pub(crate) fn autoscaler(new: &mut HorizontalPodAutoscaler, old: Option<&HorizontalPodAutoscaler>) {
    close(AUTOSCALER, new, old);
}

const DEVICE_CLASS: &[Gated<devices::DeviceClass>] =
    &[gated(&[Feature::DRAExtendedResource], |class| {
        taken(&mut class.spec.extended_resource_name)
    })];

pub(crate) fn device_class(new: &mut devices::DeviceClass, old: Option<&devices::DeviceClass>) {
    close(DEVICE_CLASS, new, old);
}

const SLICE: &[Gated<devices::ResourceSliceSpec>] = &[
    gated(&[Feature::DRADeviceTaints], |spec| {
        any(devices_of(spec).map(|one| taken(&mut one.taints)))
    }),
    gated(&[Feature::DRAPartitionableDevices], |spec| {
        let shared = taken(&mut spec.shared_counters) | taken(&mut spec.per_device_node_selection);
        let of_devices = any(devices_of(spec).map(|one| {
            taken(&mut one.consumes_counters)
                | taken(&mut one.node_name)
                | taken(&mut one.node_selector)
                | taken(&mut one.all_nodes)
        }));
        shared | of_devices
    }),
    gated(&[Feature::DRADeviceBindingConditions, Feature::DRAResourceClaimDeviceStatus], |spec| {
        any(devices_of(spec).map(|one| {
            taken(&mut one.binding_conditions)
                | taken(&mut one.binding_failure_conditions)
                | taken(&mut one.binds_to_node)
        }))
    }),
    gated(&[Feature::DRAConsumableCapacity], |spec| {
        any(devices_of(spec).map(|one| {
            let capacities = one.capacity.iter_mut().flat_map(|map| map.values_mut());
            let policies = any(capacities.map(|capacity| taken(&mut capacity.request_policy)));
            taken(&mut one.allow_multiple_allocations) | policies
        }))
    }),
    gated(&[Feature::DRANodeAllocatableResources], |spec| {
        any(devices_of(spec).map(|one| taken(&mut one.node_allocatable_resource_mappings)))
    }),
    gated(&[Feature::DRAListTypeAttributes], |spec| {
        let attributes = devices_of(spec).flat_map(|one| one.attributes.iter_mut());
        any(attributes.flat_map(|map| map.values_mut()).map(|one| {
            taken(&mut one.bools)
                | taken(&mut one.ints)
                | taken(&mut one.strings)
                | taken(&mut one.versions)
        }))
    }),
];

fn devices_of(spec: &mut devices::ResourceSliceSpec) -> impl Iterator<Item = &mut devices::Device> {
    spec.devices.iter_mut().flatten()
}

pub(crate) fn slice(new: &mut devices::ResourceSlice, old: Option<&devices::ResourceSlice>) {
    close(SLICE, &mut new.spec, old.map(|old| &old.spec));
}

const CLAIM_SPEC: &[Gated<devices::ResourceClaimSpec>] = &[
    gated(&[Feature::DRAPrioritizedList], |spec| {
        any(requests(spec).map(|one| taken(&mut one.first_available)))
    }),
    gated(&[Feature::DRADeviceTaints], |spec| {
        any(requests(spec).map(|one| {
            let exactly = one.exactly.as_mut().is_some_and(|one| taken(&mut one.tolerations));
            let rest = one.first_available.iter_mut().flatten();
            exactly | any(rest.map(|one| taken(&mut one.tolerations)))
        }))
    }),
    gated(&[Feature::DRAConsumableCapacity], |spec| {
        let of_requests = any(requests(spec).map(|one| {
            let exactly = one.exactly.as_mut().is_some_and(|one| taken(&mut one.capacity));
            let rest = one.first_available.iter_mut().flatten();
            exactly | any(rest.map(|one| taken(&mut one.capacity)))
        }));
        let constraints = spec.devices.iter_mut().flat_map(|one| one.constraints.iter_mut());
        of_requests | any(constraints.flatten().map(|one| taken(&mut one.distinct_attribute)))
    }),
];

fn requests(
    spec: &mut devices::ResourceClaimSpec,
) -> impl Iterator<Item = &mut devices::DeviceRequest> {
    spec.devices.iter_mut().flat_map(|one| one.requests.iter_mut().flatten())
}

const CLAIM_STATUS: &[Gated<devices::ResourceClaimStatus>] = &[
    gated(&[Feature::DRAResourceClaimDeviceStatus], |status| taken(&mut status.devices)),
    gated(&[Feature::DRAConsumableCapacity], |status| {
        let of_results =
            any(results(status)
                .map(|one| taken(&mut one.share_id) | taken(&mut one.consumed_capacity)));
        let of_devices = status.devices.iter_mut().flatten();
        of_results | any(of_devices.map(|one| taken(&mut one.share_id)))
    }),
    gated(&[Feature::DRADeviceBindingConditions], |status| {
        any(results(status).map(|one| {
            taken(&mut one.binding_conditions) | taken(&mut one.binding_failure_conditions)
        }))
    }),
];

fn results(
    status: &mut devices::ResourceClaimStatus,
) -> impl Iterator<Item = &mut devices::DeviceRequestAllocationResult> {
    let allocated = status.allocation.iter_mut().filter_map(|one| one.devices.as_mut());
    allocated.flat_map(|one| one.results.iter_mut().flatten())
}

pub(crate) fn resource_claim(
    new: &mut devices::ResourceClaim,
    old: Option<&devices::ResourceClaim>,
) {
    close(CLAIM_SPEC, &mut new.spec, old.map(|old| &old.spec));
    close_part(CLAIM_STATUS, new.status.as_mut(), old.map(|old| old.status.as_ref()));
}

pub(crate) fn claim_template(
    new: &mut devices::ResourceClaimTemplate,
    old: Option<&devices::ResourceClaimTemplate>,
) {
    close(CLAIM_SPEC, &mut new.spec.spec, old.map(|old| &old.spec.spec));
}

/// What a group of pods and its template in a Workload have alike.
macro_rules! group_rows {
    () => {
        &[
            gated(&[Feature::TopologyAwareWorkloadScheduling], |one| {
                taken(&mut one.scheduling_constraints)
            }),
            gated(&[Feature::DRAWorkloadResourceClaims], |one| taken(&mut one.resource_claims)),
            gated(&[Feature::WorkloadAwarePreemption], |one| taken(&mut one.disruption_mode)),
            gated(&[Feature::WorkloadAwarePreemption], |one| taken(&mut one.priority_class_name)),
            gated(&[Feature::WorkloadAwarePreemption], |one| taken(&mut one.priority)),
        ]
    };
}

const POD_GROUP: &[Gated<k8s_openapi::api::scheduling::v1alpha2::PodGroupSpec>] = group_rows!();
const GROUP_TEMPLATE: &[Gated<PodGroupTemplate>] = group_rows!();

pub(crate) fn pod_group(new: &mut PodGroup, old: Option<&PodGroup>) {
    close(POD_GROUP, &mut new.spec, old.map(|old| &old.spec));
}

/// Templates are known by their place, as upstream knows them.
pub(crate) fn workload(new: &mut Workload, old: Option<&Workload>) {
    let before = old.map_or(&[][..], |old| &old.spec.pod_group_templates);
    for (at, template) in new.spec.pod_group_templates.iter_mut().enumerate() {
        close(GROUP_TEMPLATE, template, before.get(at));
    }
}

#[cfg(test)]
mod tests {
    use serde::Serialize;
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    /// What stands at `field` goes while the gate is closed, and stays while it is open and where it
    /// was before.
    fn check<T>(close: fn(&mut T, Option<&T>), gate: Feature, field: &str, object: Value)
    where
        T: Serialize + DeserializeOwned + Clone,
    {
        let object: T = serde_json::from_value(object).expect("an object");
        let survives = |is_on: bool, old: Option<&T>| {
            let gates = features::Gates::DEFAULT.with(gate, is_on);
            let mut new = object.clone();
            features::scoped(gates, || close(&mut new, old));
            let tree = serde_json::to_value(&new).expect("a tree");
            tree.pointer(field).is_some_and(|value| !value.is_null())
        };
        // An old object that differs elsewhere, as whoever updates sends it.
        let mut other = serde_json::to_value(&object).expect("a tree");
        other["metadata"]["labels"] = json!({"a": "b"});
        let old: T = serde_json::from_value(other).expect("an object");
        assert!(!survives(false, None), "{gate} {field}: closed");
        assert!(survives(true, None), "{gate} {field}: open");
        assert!(survives(false, Some(&old)), "{gate} {field}: there before");
    }

    fn pod_with(container: Value, rest: Value) -> Value {
        let mut spec = json!({"containers": [{"name": "c", "image": "i"}]});
        let merge = |into: &mut Value, from: Value| {
            let from = from.as_object().cloned().unwrap_or_default();
            into.as_object_mut().expect("a map").extend(from);
        };
        merge(&mut spec["containers"][0], container);
        merge(&mut spec, rest);
        json!({"metadata": {"name": "p"}, "spec": spec})
    }

    #[test]
    fn pods_lose_what_is_behind_closed_gates() {
        use Feature as F;
        const C: &str = "/spec/containers/0";
        let of_container = |gate, field: &str, container: Value| {
            check(pod, gate, &format!("{C}{field}"), pod_with(container, json!({})));
        };
        let of_spec = |gate, field: &str, rest: Value| {
            check(pod, gate, &format!("/spec{field}"), pod_with(json!({}), rest));
        };
        of_container(
            F::ContainerStopSignals,
            "/lifecycle/stopSignal",
            json!({"lifecycle": {"stopSignal": "SIGUSR1"}}),
        );
        of_container(
            F::ContainerRestartRules,
            "/restartPolicyRules",
            json!({"restartPolicyRules": [{"action": "Restart"}], "restartPolicy": "Never"}),
        );
        of_container(
            F::EnvFiles,
            "/env/0/valueFrom/fileKeyRef",
            json!({"env": [{"name": "a", "valueFrom": {"fileKeyRef":
                {"key": "k", "path": "p", "volumeName": "v"}}}]}),
        );
        of_spec(F::HostnameOverride, "/hostnameOverride", json!({"hostnameOverride": "h"}));
        of_spec(F::PodLevelResources, "/resources", json!({"resources": {"limits": {"cpu": "1"}}}));
        of_spec(
            F::GenericWorkload,
            "/schedulingGroup",
            json!({"schedulingGroup": {"podGroupName": "g"}}),
        );
        of_spec(
            F::MatchLabelKeysInPodTopologySpread,
            "/topologySpreadConstraints/0/matchLabelKeys",
            json!({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "k",
                "whenUnsatisfiable": "DoNotSchedule", "matchLabelKeys": ["a"]}]}),
        );
        let projected =
            |source: Value| json!({"volumes": [{"name": "v", "projected": {"sources": [source]}}]});
        of_spec(
            F::ClusterTrustBundleProjection,
            "/volumes/0/projected/sources/0/clusterTrustBundle",
            projected(json!({"clusterTrustBundle": {"path": "p", "name": "b"}})),
        );
        of_spec(
            F::PodCertificateRequest,
            "/volumes/0/projected/sources/0/podCertificate",
            projected(json!({"podCertificate": {"signerName": "a/b", "keyType": "ED25519"}})),
        );
    }

    #[test]
    fn statuses_of_pods_do_too() {
        use Feature as F;
        let of_status = |gate, field: &str, status: Value| {
            let mut object = pod_with(json!({}), json!({}));
            object["status"] = status;
            check(pod, gate, &format!("/status{field}"), object);
        };
        let of_container = |gate, field: &str, more: Value| {
            let mut one = json!({"name": "c", "image": "i", "imageID": "", "ready": true,
                "restartCount": 0});
            one.as_object_mut().expect("a map").extend(more.as_object().cloned().expect("a map"));
            of_status(
                gate,
                &format!("/containerStatuses/0{field}"),
                json!({"containerStatuses": [one]}),
            );
        };
        let requests = json!({"requests": {"cpu": "1"}});
        of_status(
            F::InPlacePodLevelResourcesVerticalScaling,
            "/resources",
            json!({"resources": requests}),
        );
        of_status(
            F::DRAExtendedResource,
            "/extendedResourceClaimStatus",
            json!({"extendedResourceClaimStatus":
                {"resourceClaimName": "n", "requestMappings": []}}),
        );
        let health = json!({"allocatedResourcesStatus": [{"name": "claim:a",
            "resources": [{"resourceID": "x", "health": "Healthy", "message": "m"}]}]});
        of_container(F::ResourceHealthStatus, "/allocatedResourcesStatus", health.clone());
        of_container(
            F::ResourceHealthStatusMessage,
            "/allocatedResourcesStatus/0/resources/0/message",
            health,
        );
        of_container(
            F::ImageVolumeWithDigest,
            "/volumeMounts/0/volumeStatus",
            json!({"volumeMounts": [{"name": "v", "mountPath": "/m",
                "volumeStatus": {"image": {"imageRef": "r"}}}]}),
        );
    }

    #[test]
    fn templates_are_like_pods() {
        const GATE: Feature = Feature::ContainerStopSignals;
        let template = || {
            let pod = pod_with(json!({"lifecycle": {"stopSignal": "SIGUSR1"}}), json!({}));
            json!({"metadata": {}, "spec": pod["spec"]})
        };
        let selector = || json!({"matchLabels": {"a": "b"}});
        let spec = || json!({"selector": selector(), "template": template()});
        let field = "/containers/0/lifecycle/stopSignal";
        let at = |path: &str| format!("{path}/spec{field}");
        let whole = |spec: Value| json!({"metadata": {"name": "x"}, "spec": spec});
        check(deployment, GATE, &at("/spec/template"), whole(spec()));
        check(replica_set, GATE, &at("/spec/template"), whole(spec()));
        check(daemon_set, GATE, &at("/spec/template"), whole(spec()));
        let mut with_service = spec();
        with_service["serviceName"] = "s".into();
        check(stateful_set, GATE, &at("/spec/template"), whole(with_service));
        check(job, GATE, &at("/spec/template"), whole(json!({"template": template()})));
        let job_template = json!({"spec": {"template": template()}});
        let cron = json!({"schedule": "* * * * *", "jobTemplate": job_template});
        check(cron_job, GATE, &at("/spec/jobTemplate/spec/template"), whole(cron));
        let controller = json!({"template": template()});
        check(replication_controller, GATE, &at("/spec/template"), whole(controller));
        let alone = json!({"metadata": {"name": "x"}, "template": template()});
        check(pod_template, GATE, &at("/template"), alone);
    }

    #[test]
    fn other_kinds_do_too() {
        use Feature as F;
        let spec = |spec: Value| json!({"metadata": {"name": "x"}, "spec": spec});
        let status = |status: Value| json!({"metadata": {"name": "x"}, "status": status});
        check(
            stateful_set,
            F::MaxUnavailableStatefulSet,
            "/spec/updateStrategy/rollingUpdate/maxUnavailable",
            spec(json!({"selector": {}, "serviceName": "s", "template": {},
                "updateStrategy": {"rollingUpdate": {"maxUnavailable": 2}}})),
        );
        check(
            node,
            F::NodeDeclaredFeatures,
            "/status/declaredFeatures",
            status(json!({"declaredFeatures": ["A"]})),
        );
        for field in ["strategy", "preferredHolder"] {
            let path = format!("/spec/{field}");
            check(lease, F::CoordinatedLeaderElection, &path, spec(json!({field: "x"})));
        }
        check(
            csi_driver,
            F::VolumeLimitScaling,
            "/spec/preventPodSchedulingIfMissing",
            spec(json!({"preventPodSchedulingIfMissing": true})),
        );
        check(
            autoscaler,
            F::HPAConfigurableTolerance,
            "/spec/behavior/scaleUp/tolerance",
            spec(json!({"maxReplicas": 3, "scaleTargetRef": {"kind": "D", "name": "d"},
                "behavior": {"scaleUp": {"tolerance": "100m"}}})),
        );
        check(
            device_class,
            F::DRAExtendedResource,
            "/spec/extendedResourceName",
            spec(json!({"extendedResourceName": "a/b"})),
        );
        let group = json!({"schedulingPolicy": {}, "priority": 3, "disruptionMode": "Pod"});
        for field in ["priority", "disruptionMode"] {
            let path = format!("/spec/{field}");
            check(pod_group, F::WorkloadAwarePreemption, &path, spec(group.clone()));
            let path = format!("/spec/podGroupTemplates/0/{field}");
            let mut template = group.clone();
            template["name"] = "t".into();
            let templates = spec(json!({"podGroupTemplates": [template]}));
            check(workload, F::WorkloadAwarePreemption, &path, templates);
        }
    }

    #[test]
    fn devices_and_claims_do_too() {
        use Feature as F;
        let slice_of = |device: Value| {
            let mut device = device;
            device["name"] = "d".into();
            json!({"metadata": {"name": "x"}, "spec": {"driver": "d", "devices": [device],
                "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1}}})
        };
        for (gate, field, value) in [
            (F::DRADeviceTaints, "taints", json!([{"key": "k", "effect": "NoSchedule"}])),
            (F::DRAPartitionableDevices, "nodeName", json!("n")),
            (F::DRADeviceBindingConditions, "bindingConditions", json!(["c"])),
            (F::DRAResourceClaimDeviceStatus, "bindsToNode", json!(true)),
            (F::DRAConsumableCapacity, "allowMultipleAllocations", json!(true)),
        ] {
            check(
                slice,
                gate,
                &format!("/spec/devices/0/{field}"),
                slice_of(json!({field: value})),
            );
        }
        check(
            slice,
            F::DRAListTypeAttributes,
            "/spec/devices/0/attributes/a/ints",
            slice_of(json!({"attributes": {"a": {"ints": [1]}}})),
        );
        let claim_of = |request: Value| {
            let mut request = request;
            request["name"] = "r".into();
            json!({"metadata": {"name": "x"}, "spec": {"devices": {"requests": [request]}}})
        };
        let exactly = |field: &str, value: Value| {
            claim_of(json!({"exactly": {"deviceClassName": "c", field: value}}))
        };
        const R: &str = "/spec/devices/requests/0";
        check(
            resource_claim,
            F::DRADeviceTaints,
            &format!("{R}/exactly/tolerations"),
            exactly("tolerations", json!([{"key": "k"}])),
        );
        check(
            resource_claim,
            F::DRAConsumableCapacity,
            &format!("{R}/exactly/capacity"),
            exactly("capacity", json!({"requests": {"a": "1"}})),
        );
        check(
            resource_claim,
            F::DRAPrioritizedList,
            &format!("{R}/firstAvailable"),
            claim_of(json!({"firstAvailable": [{"name": "s", "deviceClassName": "c"}]})),
        );
        let mut template =
            claim_of(json!({"firstAvailable": [{"name": "s", "deviceClassName": "c"}]}));
        template["spec"] = json!({"spec": template["spec"]});
        check(
            claim_template,
            F::DRAPrioritizedList,
            "/spec/spec/devices/requests/0/firstAvailable",
            template,
        );
        let mut with_status = claim_of(json!({}));
        with_status["status"] = json!({"devices": [{"driver": "d", "pool": "p", "device": "x"}]});
        check(resource_claim, F::DRAResourceClaimDeviceStatus, "/status/devices", with_status);
    }

    #[test]
    fn only_what_was_there_before_stays() {
        let object = |node: &str, rest: Value| -> Pod {
            let mut rest = rest;
            rest["nodeName"] = node.into();
            let stop = json!({"lifecycle": {"stopSignal": "SIGUSR1"}});
            serde_json::from_value(pod_with(stop, rest)).expect("a pod")
        };
        let old = object("a", json!({}));
        let group = json!({"schedulingGroup": {"podGroupName": "g"}});
        let mut new = object("b", group);
        pod(&mut new, Some(&old));
        let spec = new.spec.expect("a spec");
        assert!(spec.containers[0].lifecycle.is_some() && spec.scheduling_group.is_none());
        // What goes leaves no empty shell.
        let mut new = object("b", json!({}));
        pod(&mut new, None);
        assert_eq!(new.spec.expect("a spec").containers[0].lifecycle, None);
    }

    #[test]
    fn sidecars_keep_their_policy() {
        let object = pod_with(
            json!({}),
            json!({"initContainers": [
            {"name": "a", "restartPolicy": "Always"}, {"name": "b", "restartPolicy": "Never"}]}),
        );
        let mut object: Pod = serde_json::from_value(object).expect("a pod");
        let gates = features::Gates::DEFAULT.with(Feature::ContainerRestartRules, false);
        features::scoped(gates, || pod(&mut object, None));
        let spec = object.spec.expect("a spec");
        let policies: Vec<Option<String>> =
            spec.init_containers.into_iter().flatten().map(|one| one.restart_policy).collect();
        assert_eq!(policies, [Some("Always".to_owned()), None]);
    }

    #[test]
    fn both_fields_say_where_a_claims_data_comes_from() {
        let check = |is_on: bool, old: Option<Value>, new: Value, expected: Value| {
            let object = |spec: Value| -> PersistentVolumeClaim {
                serde_json::from_value(json!({"spec": spec})).expect("a claim")
            };
            let (old, mut object) = (old.map(object), object(new.clone()));
            let gates =
                features::Gates::DEFAULT.with(Feature::CrossNamespaceVolumeDataSource, is_on);
            features::scoped(gates, || claim(&mut object, old.as_ref()));
            let spec = serde_json::to_value(object.spec).expect("a tree");
            let of = |field: &str| spec.get(field).cloned().unwrap_or_default();
            assert_eq!(json!([of("dataSource"), of("dataSourceRef")]), expected, "{new}");
        };
        let pvc = json!({"kind": "PersistentVolumeClaim", "name": "a"});
        let other = json!({"apiGroup": "x.example", "kind": "Thing", "name": "a"});
        let far = json!({"kind": "PersistentVolumeClaim", "name": "a", "namespace": "n"});
        check(false, None, json!({"dataSource": pvc}), json!([pvc, pvc]));
        check(false, None, json!({"dataSourceRef": other}), json!([other, other]));
        check(false, None, json!({"dataSource": other}), json!([null, null]));
        check(false, None, json!({"dataSourceRef": far}), json!([null, null]));
        check(true, None, json!({"dataSourceRef": far}), json!([null, far]));
        let both = json!({"dataSource": other, "dataSourceRef": other});
        check(false, Some(both.clone()), json!({"dataSource": other}), json!([other, other]));
        let kept = json!({"dataSource": other});
        check(false, Some(kept.clone()), kept, json!([other, null]));
    }
}
