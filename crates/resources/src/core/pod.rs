//! Pods.

use api::qos;
use apiserver::request::RequestContext;
use apiserver::resource::{Column, Grace, Strategy};
use k8s_openapi::api::core::v1::{Container, Pod, PodIP, PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use machinery::Object;
use serde::Deserialize;
use serde_json::Value;

use super::{app_armor, label_keys, pod_actions, pod_print, podspec};
use crate::Row;
use crate::connect::{Connections, PROXY_VERBS, Target, to};
use crate::gated;

pub(crate) fn row(connections: &Connections) -> Row {
    const STREAM: &[&str] = &["create", "get"];
    let core = |kind| Some(("", "v1", kind));
    Row::new::<Pod>(PodStrategy)
        .short(&["po"])
        .categories(&["all"])
        .status()
        .part("ephemeralcontainers")
        .part("resize")
        .sub("binding", core("Binding"), &["create"], pod_actions::binding())
        .sub("eviction", Some(("policy", "v1", "Eviction")), &["create"], pod_actions::eviction())
        .sub("log", None, &["get"], to(Target::PodLog, connections))
        .sub("exec", core("PodExecOptions"), STREAM, to(Target::PodExec, connections))
        .sub("attach", core("PodAttachOptions"), STREAM, to(Target::PodAttach, connections))
        .sub(
            "portforward",
            core("PodPortForwardOptions"),
            STREAM,
            to(Target::PodPortForward, connections),
        )
        .sub("proxy", core("PodProxyOptions"), PROXY_VERBS, to(Target::PodProxy, connections))
}

struct PodStrategy;

impl Strategy for PodStrategy {
    crate::validate::checked!(Pod);

    fn default(&self, object: &mut dyn Object) {
        let pod = object.expect_mut::<Pod>();
        let spec = pod.spec.get_or_insert_default();
        podspec::default_spec(spec);
        podspec::default_pod(spec);
        // Upstream: conversion of pods, not of templates.
        if spec.termination_grace_period_seconds.is_some_and(|seconds| seconds < 0) {
            spec.termination_grace_period_seconds = Some(1);
        }
        spec.preemption_policy.take_if(|policy| policy.is_empty());
    }

    fn prepare_create(&self, ctx: &RequestContext, object: &mut dyn Object) {
        let pod = object.expect_mut::<Pod>();
        gated::pod(pod, None);
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

    fn prepare_update(&self, ctx: &RequestContext, object: &mut dyn Object, old: &dyn Object) {
        let (pod, old) = (object.expect_mut::<Pod>(), old.expect::<Pod>());
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
                *pod = old.clone();
                pod.spec.get_or_insert_default().ephemeral_containers = added;
            }
            "resize" => {
                let wanted = pod.spec.take();
                *pod = old.clone();
                take_resources(pod.spec.get_or_insert_default(), wanted.unwrap_or_default());
            }
            "binding" => {}
            _ => pod.status = old.status.clone(),
        }
        gated::pod(pod, Some(old));
    }

    fn has_generation(&self) -> bool {
        true
    }

    fn bumps_generation(&self, object: &dyn Object, old: &dyn Object) -> bool {
        object.expect::<Pod>().spec != old.expect::<Pod>().spec
    }

    fn grace(&self, object: &dyn Object, requested: Option<i64>) -> Grace {
        let pod = object.expect::<Pod>();
        let spec = pod.spec.as_ref();
        let scheduled =
            spec.and_then(|spec| spec.node_name.as_deref()).is_some_and(|name| !name.is_empty());
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        if !scheduled || matches!(phase, Some("Succeeded" | "Failed")) {
            return Grace::Seconds(0);
        }
        let own = spec.and_then(|spec| spec.termination_grace_period_seconds);
        // Upstream: negative means at once, and at once is one second where nobody insists.
        match requested.or(own).unwrap_or(30) {
            seconds if seconds < 0 => Grace::Seconds(1),
            seconds => Grace::Seconds(seconds),
        }
    }

    fn returns_deleted_object(&self) -> bool {
        true
    }

    fn selectable_names(&self) -> &'static [&'static str] {
        SELECTABLE
    }

    fn fields_in(&self, json: &[u8]) -> Option<serde_json::Result<Vec<(&'static str, String)>>> {
        Some(serde_json::from_slice(json).map(selectable))
    }

    fn columns(&self) -> Vec<Column> {
        crate::columns::of::<Pod>()
    }

    fn cells(&self, object: &dyn Object) -> Vec<Value> {
        pod_print::cells(object.expect())
    }

    fn row_conditions(&self, object: &dyn Object) -> Vec<Value> {
        pod_print::row_conditions(object.expect())
    }
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

fn selectable(pod: Selectable) -> Vec<(&'static str, String)> {
    let (spec, status) = (pod.spec.unwrap_or_default(), pod.status.unwrap_or_default());
    let text = |text: Option<String>| text.unwrap_or_default();
    let first = status.pod_ips.unwrap_or_default().into_iter().next();
    let ip = first.map(|one| one.ip).or(status.pod_ip);
    SELECTABLE
        .iter()
        .copied()
        .zip([
            text(spec.node_name),
            text(spec.restart_policy),
            text(spec.scheduler_name),
            text(spec.service_account_name),
            (spec.host_network == Some(true)).to_string(),
            text(status.phase),
            text(ip),
            text(status.nominated_node_name),
        ])
        .collect()
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
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_are_found_in_the_bytes() {
        let check = |pod: Value, expected: [&str; 8]| {
            let fields = PodStrategy.fields_in(pod.to_string().as_bytes()).expect("it can");
            let expected = SELECTABLE.iter().copied().zip(expected.map(str::to_owned));
            assert_eq!(fields.expect("a pod"), expected.collect::<Vec<_>>(), "{pod}");
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
        assert!(PodStrategy.fields_in(b"[").expect("it can").is_err());
    }
}
