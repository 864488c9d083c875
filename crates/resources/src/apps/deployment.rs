//! Deployment: pods that are replaced step by step when their template changes.

use apiserver::request::RequestContext;
use k8s_openapi::api::apps::v1::{
    Deployment, DeploymentStatus, DeploymentStrategy, RollingUpdateDeployment,
};
use k8s_openapi::api::core::v1::Container;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use release::features::Feature;

use super::{COUNTS, tidy_counts};
use crate::core::podspec;
use crate::defaults::fill;
use crate::gated::{Gated, close_part, close_template, gated, taken};
use crate::kind::{Hooks, Kind, Rules, STATUS, age, field, name, spec_and_status, text, wide};
use crate::print::{images, names, selector};
use crate::scale;
use crate::validate::{warnings, workloads};

pub(crate) static KIND: Kind<Deployment> = Kind {
    short: &["deploy"],
    categories: &["all"],
    subresources: &[STATUS, scale::sub::<Deployment>()],
    default,
    parts: Some(spec_and_status!()),
    generation: Some(|new, old| {
        new.spec != old.spec || new.metadata.annotations != old.metadata.annotations
    }),
    gated: |new, old| {
        let before = old.and_then(|old| old.spec.as_ref()).map(|spec| &spec.template);
        close_template(new.spec.as_mut().map(|spec| &mut spec.template), before);
        let before = old.map(|old| old.status.as_ref());
        close_part(STATUS_FIELDS, new.status.as_mut(), before);
    },
    rules: Rules {
        create: workloads::deployment,
        update: Some(workloads::deployment_update),
        parts: COUNTS,
        ..Rules::NONE
    },
    warnings: Some(|at, out| warnings::hostname(at, "spec.template", out)),
    columns: &[
        name(),
        text("Ready", "string", "Number of the pod with ready state", |deployment| {
            let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas);
            let ready = deployment.status.as_ref().and_then(|status| status.ready_replicas);
            format!("{}/{}", ready.unwrap_or_default(), wanted.unwrap_or_default()).into()
        }),
        field(
            "Up-to-date",
            "string",
            "api.apps.v1.DeploymentStatus.updatedReplicas",
            |deployment| {
                let status = deployment.status.as_ref();
                status.and_then(|status| status.updated_replicas).unwrap_or_default().into()
            },
        ),
        field(
            "Available",
            "string",
            "api.apps.v1.DeploymentStatus.availableReplicas",
            |deployment| {
                let status = deployment.status.as_ref();
                status.and_then(|status| status.available_replicas).unwrap_or_default().into()
            },
        ),
        age(),
        wide(text(
            "Containers",
            "string",
            "Names of each container in the template.",
            |deployment| names(containers(deployment)).into(),
        )),
        wide(text(
            "Images",
            "string",
            "Images referenced by each container in the template.",
            |deployment| images(containers(deployment)).into(),
        )),
        wide(field("Selector", "string", "api.apps.v1.DeploymentSpec.selector", |deployment| {
            selector(deployment.spec.as_ref().map(|spec| &spec.selector)).into()
        })),
    ],
    hooks: &Life,
    ..Kind::BASE
};

const STATUS_FIELDS: &[Gated<DeploymentStatus>] =
    &[gated(&[Feature::DeploymentReplicaSetTerminatingReplicas], |status| {
        taken(&mut status.terminating_replicas)
    })];

fn default(deployment: &mut Deployment) {
    let spec = deployment.spec.get_or_insert_default();
    spec.replicas.get_or_insert(1);
    spec.revision_history_limit.get_or_insert(10);
    spec.progress_deadline_seconds.get_or_insert(600);
    spec.min_ready_seconds.take_if(|seconds| *seconds == 0);
    spec.paused.take_if(|paused| !*paused);
    let strategy: &mut DeploymentStrategy = spec.strategy.get_or_insert_default();
    fill(&mut strategy.type_, "RollingUpdate");
    if strategy.type_.as_deref() == Some("RollingUpdate") {
        let rolling: &mut RollingUpdateDeployment = strategy.rolling_update.get_or_insert_default();
        rolling.max_surge.get_or_insert_with(|| IntOrString::String("25%".into()));
        rolling.max_unavailable.get_or_insert_with(|| IntOrString::String("25%".into()));
    }
    podspec::default_template(&mut spec.template);
    let status: &mut DeploymentStatus = deployment.status.get_or_insert_default();
    tidy_counts([
        &mut status.replicas,
        &mut status.ready_replicas,
        &mut status.available_replicas,
        &mut status.unavailable_replicas,
        &mut status.updated_replicas,
    ]);
    status.observed_generation.take_if(|generation| *generation == 0);
}

struct Life;

impl Hooks<Deployment> for Life {
    /// Upstream keeps the labels on status updates of Deployments, not of the other workloads.
    fn prepare_update(&self, ctx: &RequestContext, object: &mut Deployment, old: &Deployment) {
        if ctx.subresource == "status" {
            object.metadata.labels = old.metadata.labels.clone();
        }
    }
}

fn containers(deployment: &Deployment) -> &[Container] {
    let spec = deployment.spec.as_ref();
    spec.and_then(|spec| spec.template.spec.as_ref()).map_or(&[], |spec| &spec.containers)
}
