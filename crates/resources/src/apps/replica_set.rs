//! ReplicaSet: a number of pods that are all the same.

use k8s_openapi::api::apps::v1::{ReplicaSet, ReplicaSetStatus};
use k8s_openapi::api::core::v1::Container;
use release::features::Feature;

use super::{COUNTS, tidy_counts};
use crate::core::podspec;
use crate::gated::{Gated, close_part, close_template, gated, taken};
use crate::kind::{Kind, Rules, STATUS, age, field, name, spec_and_status, text, wide};
use crate::print::{images, names, selector};
use crate::scale;
use crate::validate::{warnings, workloads};

pub(crate) static KIND: Kind<ReplicaSet> = Kind {
    short: &["rs"],
    categories: &["all"],
    subresources: &[STATUS, scale::sub::<ReplicaSet>()],
    default,
    parts: Some(spec_and_status!()),
    generation: Some(|new, old| new.spec != old.spec),
    gated: |new, old| {
        let before = old.and_then(|old| old.spec.as_ref()?.template.as_ref());
        close_template(new.spec.as_mut().and_then(|spec| spec.template.as_mut()), before);
        let before = old.map(|old| old.status.as_ref());
        close_part(STATUS_FIELDS, new.status.as_mut(), before);
    },
    rules: Rules {
        create: workloads::replica_set,
        update: Some(workloads::replica_set_update),
        parts: COUNTS,
        ..Rules::NONE
    },
    warnings: Some(|at, out| warnings::hostname(at, "spec.template", out)),
    columns: &[
        name(),
        field("Desired", "integer", "api.apps.v1.ReplicaSetSpec.replicas", |set| {
            set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or_default().into()
        }),
        field("Current", "integer", "api.apps.v1.ReplicaSetStatus.replicas", |set| {
            set.status.as_ref().map_or(0, |status| status.replicas).into()
        }),
        field("Ready", "integer", "api.apps.v1.ReplicaSetStatus.readyReplicas", |set| {
            let status = set.status.as_ref();
            status.and_then(|status| status.ready_replicas).unwrap_or_default().into()
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
        wide(field("Selector", "string", "api.apps.v1.ReplicaSetSpec.selector", |set| {
            selector(set.spec.as_ref().map(|spec| &spec.selector)).into()
        })),
    ],
    ..Kind::BASE
};

const STATUS_FIELDS: &[Gated<ReplicaSetStatus>] =
    &[gated(&[Feature::DeploymentReplicaSetTerminatingReplicas], |status| {
        taken(&mut status.terminating_replicas)
    })];

fn default(set: &mut ReplicaSet) {
    let spec = set.spec.get_or_insert_default();
    spec.replicas.get_or_insert(1);
    spec.min_ready_seconds.take_if(|seconds| *seconds == 0);
    if let Some(template) = &mut spec.template {
        podspec::default_template(template);
    }
    let status: &mut ReplicaSetStatus = set.status.get_or_insert_default();
    tidy_counts([
        &mut status.ready_replicas,
        &mut status.available_replicas,
        &mut status.fully_labeled_replicas,
    ]);
    status.observed_generation.take_if(|generation| *generation == 0);
}

fn containers(set: &ReplicaSet) -> &[Container] {
    let template = set.spec.as_ref().and_then(|spec| spec.template.as_ref());
    template.and_then(|template| template.spec.as_ref()).map_or(&[], |spec| &spec.containers)
}
