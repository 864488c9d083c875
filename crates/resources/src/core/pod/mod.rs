//! Pods.

use api::qos;
use apiserver::request::RequestContext;
use apiserver::resource::{Grace, MetadataRules};
use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, PodIP, PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use release::features::Feature;
use serde::Deserialize;

use super::{app_armor, podspec};
use crate::connect::{PROXY_VERBS, Target, to};
use crate::gated::{Gated, POD_SPEC, any, close_part, gated, taken};
use crate::kind::{Fields, Hooks, Kind, Made, Rules, STATUS, Sub, Updates, part};
use crate::validate::{self, podupdate, warnings};

pub(crate) mod actions;
pub(crate) mod addresses;
mod label_keys;
mod print;

pub(crate) static KIND: Kind<Pod> = Kind {
    short: &["po"],
    categories: &["all"],
    subresources: &[
        STATUS,
        part("ephemeralcontainers"),
        part("resize"),
        sub("binding", core("Binding"), &["create"], Made::Plain(actions::binding)),
        sub(
            "eviction",
            Some(("policy", "v1", "Eviction")),
            &["create"],
            Made::Plain(actions::eviction),
        ),
        sub("log", None, &["get"], Made::Wired(|wiring| to(Target::PodLog, wiring))),
        sub(
            "exec",
            core("PodExecOptions"),
            STREAM,
            Made::Wired(|wiring| to(Target::PodExec, wiring)),
        ),
        sub(
            "attach",
            core("PodAttachOptions"),
            STREAM,
            Made::Wired(|wiring| to(Target::PodAttach, wiring)),
        ),
        sub(
            "portforward",
            core("PodPortForwardOptions"),
            STREAM,
            Made::Wired(|wiring| to(Target::PodPortForward, wiring)),
        ),
        sub(
            "proxy",
            core("PodProxyOptions"),
            PROXY_VERBS,
            Made::Wired(|wiring| to(Target::PodProxy, wiring)),
        ),
    ],
    default: |pod| {
        let spec = pod.spec.get_or_insert_default();
        podspec::default_spec(spec);
        podspec::default_pod(spec);
        // Upstream: conversion of pods, not of templates.
        if spec.termination_grace_period_seconds.is_some_and(|seconds| seconds < 0) {
            spec.termination_grace_period_seconds = Some(1);
        }
        spec.preemption_policy.take_if(|policy| policy.is_empty());
    },
    generation: Some(|new, old| new.spec != old.spec),
    gated: |new, old| {
        close_part(POD_SPEC, new.spec.as_mut(), old.map(|old| old.spec.as_ref()));
        close_part(POD_STATUS, new.status.as_mut(), old.map(|old| old.status.as_ref()));
    },
    rules: Rules {
        create: validate::pod::create,
        update: Some(podupdate::update),
        parts: &[
            ("ephemeralcontainers", podupdate::ephemeral),
            ("resize", podupdate::resize),
            ("status", podupdate::status),
        ],
        metadata: MetadataRules::UPDATE_AND_WHOLE,
        ..Rules::NONE
    },
    warnings: Some(warnings::pod),
    warns_on_update: Updates::None,
    status_warnings: Some(warnings::addresses::pod_status),
    returns_deleted: true,
    columns: print::COLUMNS,
    row_conditions: print::row_conditions,
    fields: Fields::InBytes(SELECTABLE, read),
    hooks: &Life,
    ..Kind::BASE
};

const STREAM: &[&str] = &["create", "get"];

type KindOf = Option<(&'static str, &'static str, &'static str)>;

const fn core(kind: &'static str) -> KindOf {
    Some(("", "v1", kind))
}

const fn sub(
    name: &'static str,
    kind: KindOf,
    verbs: &'static [&'static str],
    behaviour: Made,
) -> Sub {
    Sub { name, kind, verbs, behaviour }
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

struct Life;

impl Hooks<Pod> for Life {
    fn prepare_create(&self, ctx: &RequestContext, pod: &mut Pod) {
        app_armor::from_annotations(pod).into_iter().for_each(|text| ctx.warn(text));
        let gated = pod
            .spec
            .as_ref()
            .and_then(|spec| spec.scheduling_gates.as_ref())
            .is_some_and(|g| !g.is_empty());
        let mut status = PodStatus {
            phase: Some("Pending".into()),
            qos_class: pod.spec.as_ref().map(|spec| qos::class(spec).into()),
            ..PodStatus::default()
        };
        if gated {
            let now = base::clock::now().as_second();
            let condition = k8s_openapi::api::core::v1::PodCondition {
                last_transition_time: jiff::Timestamp::from_second(now).ok().map(Time),
                type_: "PodScheduled".into(),
                status: "False".into(),
                reason: Some("SchedulingGated".into()),
                message: Some("Scheduling is blocked due to non-empty scheduling gates".into()),
                ..Default::default()
            };
            status.conditions = Some(vec![condition]);
        }
        pod.status = Some(status);
        label_keys::merge(pod);
    }

    fn prepare_update(&self, ctx: &RequestContext, pod: &mut Pod, old: &Pod) {
        match ctx.subresource.as_str() {
            "status" => {
                pod.spec = old.spec.clone();
                pod.metadata.owner_references = old.metadata.owner_references.clone();
                let status = pod.status.get_or_insert_default();
                if status.qos_class.is_none() {
                    status.qos_class =
                        old.status.as_ref().and_then(|status| status.qos_class.clone());
                }
            }
            "ephemeralcontainers" => {
                let added = pod.spec.take().and_then(|spec| spec.ephemeral_containers);
                keep_but_owners(pod, old);
                pod.spec.get_or_insert_default().ephemeral_containers = added;
            }
            "resize" => {
                let wanted = pod.spec.take();
                keep_but_owners(pod, old);
                take_resources(pod.spec.get_or_insert_default(), wanted.unwrap_or_default());
            }
            "binding" => {}
            _ => pod.status = old.status.clone(),
        }
    }

    fn grace(&self, pod: &Pod, requested: Option<i64>) -> Grace {
        let spec = pod.spec.as_ref();
        let scheduled =
            spec.and_then(|spec| spec.node_name.as_deref()).is_some_and(|name| !name.is_empty());
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        if !scheduled || matches!(phase, Some("Succeeded" | "Failed")) {
            return Grace::Seconds(0);
        }
        let own = spec.and_then(|spec| spec.termination_grace_period_seconds);
        // Upstream: a negative grace period means one second.
        match requested.or(own).unwrap_or(30) {
            seconds if seconds < 0 => Grace::Seconds(1),
            seconds => Grace::Seconds(seconds),
        }
    }
}

/// Takes everything from the old pod, except who owns which field.
fn keep_but_owners(pod: &mut Pod, old: &Pod) {
    let owners = pod.metadata.managed_fields.take();
    *pod = old.clone();
    pod.metadata.managed_fields = owners;
}

/// In the order of [`selectable`].
const SELECTABLE: &[&str] = &[
    "spec.nodeName",
    "spec.restartPolicy",
    "spec.schedulerName",
    "spec.serviceAccountName",
    "spec.hostNetwork",
    "status.phase",
    "status.podIP",
    "status.nominatedNodeName",
];

/// What of a pod can be selected by. Nothing else of it is decoded, for this is read whenever a pod
/// changes.
#[derive(Deserialize)]
struct Selectable {
    spec: Option<Spec>,
    status: Option<Status>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    node_name: Option<String>,
    restart_policy: Option<String>,
    scheduler_name: Option<String>,
    service_account_name: Option<String>,
    host_network: Option<bool>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    phase: Option<String>,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    #[serde(rename = "podIPs")]
    pod_ips: Option<Vec<PodIP>>,
    nominated_node_name: Option<String>,
}

/// The fields of a pod's JSON.
fn read(json: &[u8]) -> serde_json::Result<Vec<String>> {
    serde_json::from_slice(json).map(selectable)
}

fn selectable(pod: Selectable) -> Vec<String> {
    let (spec, status) = (pod.spec.unwrap_or_default(), pod.status.unwrap_or_default());
    let text = |text: Option<String>| text.unwrap_or_default();
    let first = status.pod_ips.unwrap_or_default().into_iter().next();
    let ip = first.map(|one| one.ip).or(status.pod_ip);
    vec![
        text(spec.node_name),
        text(spec.restart_policy),
        text(spec.scheduler_name),
        text(spec.service_account_name),
        (spec.host_network == Some(true)).to_string(),
        text(status.phase),
        text(ip),
        text(status.nominated_node_name),
    ]
}

/// Takes what a resize may change; containers that were renamed, reordered, added or removed are
/// left for validation to refuse.
fn take_resources(spec: &mut PodSpec, wanted: PodSpec) {
    spec.resources = wanted.resources;
    let inits = wanted.init_containers.unwrap_or_default();
    let own = spec.init_containers.get_or_insert_default();
    take_container_resources(own, inits);
    spec.init_containers.take_if(|list| list.is_empty());
    take_container_resources(&mut spec.containers, wanted.containers);
}

fn take_container_resources(own: &mut Vec<Container>, wanted: Vec<Container>) {
    let names = |list: &[Container]| list.iter().map(|c| c.name.clone()).collect::<Vec<_>>();
    if names(own) != names(&wanted) {
        *own = wanted;
        return;
    }
    for (own, new) in own.iter_mut().zip(wanted) {
        own.resources = new.resources;
        own.resize_policy = new.resize_policy;
    }
}

#[cfg(test)]
mod tests {
    use release::features;
    use serde_json::{Value, json};

    use super::*;
    use crate::gated::tests::{check, pod_with};

    #[test]
    fn fields_are_found_in_the_bytes() {
        let check = |pod: Value, expected: [&str; SELECTABLE.len()]| {
            let fields = read(pod.to_string().as_bytes());
            assert_eq!(fields.expect("a pod"), expected, "{pod}");
        };
        check(json!({"metadata": {}}), ["", "", "", "", "false", "", "", ""]);
        check(json!({"spec": null, "status": null}), ["", "", "", "", "false", "", "", ""]);
        check(
            json!({
                "spec": {
                    "nodeName": "n", "restartPolicy": "Always", "schedulerName": "a\"b",
                    "serviceAccountName": "s", "hostNetwork": true, "containers": [{"name": "c"}],
                },
                "status": {
                    "phase": "Running", "podIP": "10.0.0.1", "nominatedNodeName": "m",
                    "podIPs": [{"ip": "10.0.0.2"}, {"ip": "fd00::1"}],
                },
            }),
            ["n", "Always", "a\"b", "s", "true", "Running", "10.0.0.2", "m"],
        );
        check(
            json!({"status": {"podIP": "10.0.0.1", "podIPs": []}}),
            ["", "", "", "", "false", "", "10.0.0.1", ""],
        );
        assert!(read(b"[").is_err());
    }

    #[test]
    fn pods_lose_what_is_behind_closed_gates() {
        use Feature as F;
        const C: &str = "/spec/containers/0";
        let of_container = |gate, field: &str, container: Value| {
            check(KIND.gated, gate, &format!("{C}{field}"), pod_with(container, json!({})));
        };
        let of_spec = |gate, field: &str, rest: Value| {
            check(KIND.gated, gate, &format!("/spec{field}"), pod_with(json!({}), rest));
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
            check(KIND.gated, gate, &format!("/status{field}"), object);
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
        (KIND.gated)(&mut new, Some(&old));
        let spec = new.spec.expect("a spec");
        assert!(spec.containers[0].lifecycle.is_some() && spec.scheduling_group.is_none());
        // What goes leaves no empty shell.
        let mut new = object("b", json!({}));
        (KIND.gated)(&mut new, None);
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
        features::scoped(gates, || (KIND.gated)(&mut object, None));
        let spec = object.spec.expect("a spec");
        let policies: Vec<Option<String>> =
            spec.init_containers.into_iter().flatten().map(|one| one.restart_policy).collect();
        assert_eq!(policies, [Some("Always".to_owned()), None]);
    }
}
