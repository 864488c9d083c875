//! DaemonSet: a pod on each node.

use apiserver::request::RequestContext;
use k8s_openapi::api::apps::v1::{DaemonSet, DaemonSetStatus, RollingUpdateDaemonSet};
use k8s_openapi::api::core::v1::Container;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{COUNTS, tidy_counts};
use crate::core::podspec;
use crate::defaults::fill;
use crate::gated::close_template;
use crate::kind::{Hooks, Kind, Rules, STATUS, age, field, name, spec_and_status, text, wide};
use crate::print::{images, labels, names, selector};
use crate::validate::{warnings, workloads};

/// Upstream keeps here how often the template changed.
const TEMPLATE_GENERATION: &str = "deprecated.daemonset.template.generation";

pub(crate) static KIND: Kind<DaemonSet> = Kind {
    short: &["ds"],
    categories: &["all"],
    subresources: &[STATUS],
    default,
    parts: Some(spec_and_status!()),
    generation: Some(|new, old| new.spec != old.spec),
    gated: |new, old| {
        let before = old.and_then(|old| old.spec.as_ref()).map(|spec| &spec.template);
        close_template(new.spec.as_mut().map(|spec| &mut spec.template), before);
    },
    rules: Rules {
        create: workloads::daemon_set,
        update: Some(workloads::daemon_set_update),
        parts: COUNTS,
        ..Rules::NONE
    },
    warnings: Some(|at, out| warnings::template(&at.get("spec.template"), out)),
    annotation_of_whole_objects: Some(TEMPLATE_GENERATION),
    columns: &[
        name(),
        field("Desired", "integer", "api.apps.v1.DaemonSetStatus.desiredNumberScheduled", |set| {
            let status = set.status.as_ref();
            status.map_or(0, |status| status.desired_number_scheduled).into()
        }),
        field("Current", "integer", "api.apps.v1.DaemonSetStatus.currentNumberScheduled", |set| {
            let status = set.status.as_ref();
            status.map_or(0, |status| status.current_number_scheduled).into()
        }),
        field("Ready", "integer", "api.apps.v1.DaemonSetStatus.numberReady", |set| {
            let status = set.status.as_ref();
            status.map_or(0, |status| status.number_ready).into()
        }),
        field(
            "Up-to-date",
            "integer",
            "api.apps.v1.DaemonSetStatus.updatedNumberScheduled",
            |set| {
                let status = set.status.as_ref();
                status.and_then(|status| status.updated_number_scheduled).unwrap_or_default().into()
            },
        ),
        field("Available", "integer", "api.apps.v1.DaemonSetStatus.numberAvailable", |set| {
            let status = set.status.as_ref();
            status.and_then(|status| status.number_available).unwrap_or_default().into()
        }),
        field("Node Selector", "string", "api.core.v1.PodSpec.nodeSelector", |set| {
            let inner = set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
            labels(inner.and_then(|spec| spec.node_selector.as_ref())).into()
        }),
        age(),
        wide(text("Containers", "string", "Names of each container in the template.", |set| {
            names(containers(set)).into()
        })),
        wide(text(
            "Images",
            "string",
            "Images referenced by each container in the template.",
            |set| images(containers(set)).into(),
        )),
        wide(field("Selector", "string", "api.apps.v1.DaemonSetSpec.selector", |set| {
            selector(set.spec.as_ref().map(|spec| &spec.selector)).into()
        })),
    ],
    hooks: &Life,
    ..Kind::BASE
};

fn default(set: &mut DaemonSet) {
    let spec = set.spec.get_or_insert_default();
    spec.revision_history_limit.get_or_insert(10);
    let strategy = spec.update_strategy.get_or_insert_default();
    fill(&mut strategy.type_, "RollingUpdate");
    if strategy.type_.as_deref() == Some("RollingUpdate") {
        let rolling: &mut RollingUpdateDaemonSet = strategy.rolling_update.get_or_insert_default();
        rolling.max_unavailable.get_or_insert(IntOrString::Int(1));
        rolling.max_surge.get_or_insert(IntOrString::Int(0));
    }
    podspec::default_template(&mut spec.template);
    let notes = set.metadata.annotations.get_or_insert_default();
    notes.entry(TEMPLATE_GENERATION.into()).or_insert_with(|| "1".into());
    let status: &mut DaemonSetStatus = set.status.get_or_insert_default();
    tidy_counts([
        &mut status.number_available,
        &mut status.number_unavailable,
        &mut status.updated_number_scheduled,
    ]);
}

struct Life;

impl Hooks<DaemonSet> for Life {
    fn prepare_create(&self, _ctx: &RequestContext, set: &mut DaemonSet) {
        let generation = template_generation(set).max(1);
        set_template_generation(set, generation);
    }

    fn prepare_update(&self, _ctx: &RequestContext, set: &mut DaemonSet, old: &DaemonSet) {
        count_template(set, old);
    }
}

/// The number is the server's: it counts changes of the template, whatever a client writes.
fn count_template(set: &mut DaemonSet, old: &DaemonSet) {
    let [new_template, old_template] =
        [&*set, old].map(|set| set.spec.as_ref().map(|spec| &spec.template));
    let changed = i64::from(new_template != old_template);
    set_template_generation(set, template_generation(old) + changed);
}

fn template_generation(set: &DaemonSet) -> i64 {
    let notes = set.metadata.annotations.as_ref();
    notes.and_then(|notes| notes.get(TEMPLATE_GENERATION)?.parse().ok()).unwrap_or_default()
}

fn set_template_generation(set: &mut DaemonSet, generation: i64) {
    let notes = set.metadata.annotations.get_or_insert_default();
    notes.insert(TEMPLATE_GENERATION.into(), generation.to_string());
}

fn containers(set: &DaemonSet) -> &[Container] {
    let spec = set.spec.as_ref();
    spec.and_then(|spec| spec.template.spec.as_ref()).map_or(&[], |spec| &spec.containers)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn set(image: &str, annotation: Option<&str>) -> DaemonSet {
        let template = json!({ "spec": { "containers": [{ "name": "c", "image": image }] } });
        let mut made = json!({ "metadata": { "name": "a" }, "spec": { "selector": {}, "template": template } });
        if let Some(value) = annotation {
            made["metadata"]["annotations"] = json!({ TEMPLATE_GENERATION: value });
        }
        serde_json::from_value(made).expect("a DaemonSet")
    }

    #[test]
    fn the_template_generation_counts_changes_of_the_template() {
        let check = |new: DaemonSet, expected: i64| {
            let (mut new, old) = (new, set("a", Some("3")));
            count_template(&mut new, &old);
            assert_eq!(template_generation(&new), expected);
        };
        check(set("a", None), 3);
        check(set("a", Some("9")), 3);
        check(set("b", Some("3")), 4);
    }
}
