//! Fields behind feature gates: while a gate is closed, a write loses what stands in its fields,
//! unless the object had something there before.
//!
//! In: an object that is about to be written, and what it was. Out: the object without such fields. A
//! field that a gate guards is a line of a table in its kind's file; the fields of pods that templates
//! have, too, are here. It is done after ownership is noted, as upstream does. Upstream:
//! `dropDisabledFields` of each strategy.

use k8s_openapi::api::core::v1::{
    ContainerRestartRule, EnvVar, Lifecycle, PodSpec, PodTemplateSpec, VolumeProjection,
};
use release::features::{self, Feature};

/// What of a `T` is behind gates, all of which must be open.
pub(crate) struct Gated<T> {
    gates: &'static [Feature],
    /// Takes it out; was there anything?
    take: fn(&mut T) -> bool,
}

pub(crate) const fn gated<T>(gates: &'static [Feature], take: fn(&mut T) -> bool) -> Gated<T> {
    Gated { gates, take }
}

pub(crate) fn close<T: Clone + PartialEq>(rows: &[Gated<T>], new: &mut T, old: Option<&T>) {
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
pub(crate) fn close_part<T: Clone + PartialEq>(
    rows: &[Gated<T>],
    new: Option<&mut T>,
    old: Option<Option<&T>>,
) {
    if let Some(new) = new {
        close(rows, new, old.flatten());
    }
}

pub(crate) fn taken<T>(field: &mut Option<T>) -> bool {
    field.take().is_some()
}

/// All of them are taken, which `Iterator::any` would not do.
pub(crate) fn any(taken: impl Iterator<Item = bool>) -> bool {
    taken.fold(false, |any, one| any | one)
}

pub(crate) const POD_SPEC: &[Gated<PodSpec>] = &[
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

/// As [`close`], of a template of pods.
pub(crate) fn close_template(new: Option<&mut PodTemplateSpec>, old: Option<&PodTemplateSpec>) {
    let new = new.and_then(|template| template.spec.as_mut());
    close_part(POD_SPEC, new, old.map(|old| old.spec.as_ref()));
}

#[cfg(test)]
pub(crate) mod tests {
    use serde::Serialize;
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    /// What stands at `field` goes while the gate is closed, and stays while it is open and where it
    /// was before.
    pub(crate) fn check<T>(close: fn(&mut T, Option<&T>), gate: Feature, field: &str, object: Value)
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
        // An old object that differs in other fields, as in an update.
        let mut other = serde_json::to_value(&object).expect("a tree");
        other["metadata"]["labels"] = json!({"a": "b"});
        let old: T = serde_json::from_value(other).expect("an object");
        assert!(!survives(false, None), "{gate} {field}: closed");
        assert!(survives(true, None), "{gate} {field}: open");
        assert!(survives(false, Some(&old)), "{gate} {field}: there before");
    }

    pub(crate) fn pod_with(container: Value, rest: Value) -> Value {
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
        check(crate::apps::deployment::KIND.gated, GATE, &at("/spec/template"), whole(spec()));
        check(crate::apps::replica_set::KIND.gated, GATE, &at("/spec/template"), whole(spec()));
        check(crate::apps::daemon_set::KIND.gated, GATE, &at("/spec/template"), whole(spec()));
        let mut with_service = spec();
        with_service["serviceName"] = "s".into();
        check(
            crate::apps::stateful_set::KIND.gated,
            GATE,
            &at("/spec/template"),
            whole(with_service),
        );
        check(
            crate::batch::job::KIND.gated,
            GATE,
            &at("/spec/template"),
            whole(json!({"template": template()})),
        );
        let job_template = json!({"spec": {"template": template()}});
        let cron = json!({"schedule": "* * * * *", "jobTemplate": job_template});
        check(
            crate::batch::cron_job::KIND.gated,
            GATE,
            &at("/spec/jobTemplate/spec/template"),
            whole(cron),
        );
        let controller = json!({"template": template()});
        check(
            crate::core::replication_controller::KIND.gated,
            GATE,
            &at("/spec/template"),
            whole(controller),
        );
        let alone = json!({"metadata": {"name": "x"}, "template": template()});
        check(crate::core::pod_template::KIND.gated, GATE, &at("/template"), alone);
    }
}
