//! Rows, defaults and columns of the workloads.

use apiserver::request::RequestContext;
use apiserver::resource::{Column, Strategy};
use k8s_openapi::api::apps::v1::{
    ControllerRevision, DaemonSet, DaemonSetStatus, Deployment, DeploymentStatus,
    DeploymentStrategy, ReplicaSet, ReplicaSetStatus, RollingUpdateDaemonSet,
    RollingUpdateDeployment, StatefulSet, StatefulSetStatus,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use machinery::Object;
use release::features::{self, Feature};
use serde_json::Value;

use crate::Row;
use crate::core::podspec;
use crate::defaults::fill;
use crate::gated;
use crate::parts::{Parts, Simple, parts};
use crate::print::{age, containers, labels, selector};

const SCALE: Option<(&str, &str, &str)> = Some(("autoscaling", "v1", "Scale"));
const TEMPLATE_GENERATION: &str = "deprecated.daemonset.template.generation";
const FACE_VERBS: &[&str] = &["get", "patch", "update"];

/// What the workloads share: spec and status apart, and a generation.
struct Workload<T: 'static> {
    parts: Parts<T>,
    default: fn(&mut T),
    cells: fn(&T) -> Vec<Value>,
    /// Takes out fields behind closed gates, see [`gated`].
    closed: fn(&mut T, Option<&T>),
    /// Upstream keeps the labels on status updates of Deployments, not of the others.
    status_keeps_labels: bool,
}

impl<T: Object + k8s_openapi::Resource> Strategy for Workload<T> {
    crate::validate::checked!(T);

    fn default(&self, object: &mut dyn Object) {
        (self.default)(object.expect_mut());
    }

    fn prepare_create(&self, _ctx: &RequestContext, object: &mut dyn Object) {
        self.parts.prepare_create(object);
        (self.default)(object.expect_mut());
        (self.closed)(object.expect_mut(), None);
    }

    fn prepare_update(&self, ctx: &RequestContext, object: &mut dyn Object, old: &dyn Object) {
        self.parts.prepare_update(ctx, object, old);
        (self.closed)(object.expect_mut(), Some(old.expect()));
        if ctx.subresource == "status" && self.status_keeps_labels {
            object.meta_mut().labels = old.meta().labels.clone();
        }
    }

    fn has_generation(&self) -> bool {
        true
    }

    fn bumps_generation(&self, object: &dyn Object, old: &dyn Object) -> bool {
        self.parts.spec_differs(object, old)
            || object.meta().annotations != old.meta().annotations && self.status_keeps_labels
    }

    fn columns(&self) -> Vec<Column> {
        crate::columns::of::<T>()
    }

    fn cells(&self, object: &dyn Object) -> Vec<Value> {
        (self.cells)(object.expect())
    }
}

pub(super) fn controller_revision() -> Row {
    fn cells(revision: &ControllerRevision) -> Vec<Value> {
        let owner = revision
            .metadata
            .owner_references
            .iter()
            .flatten()
            .find(|owner| owner.controller == Some(true));
        let owner = owner.map_or("<none>".into(), |owner| {
            let group = owner.api_version.split_once('/').map(|(group, _)| format!(".{group}"));
            format!("{}{}/{}", owner.kind.to_lowercase(), group.unwrap_or_default(), owner.name)
        });
        vec![revision.name().into(), owner.into(), revision.revision.into(), age(revision)]
    }
    Row::new::<ControllerRevision>(Simple::new(cells))
}

fn default_deployment(deployment: &mut Deployment) {
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

/// Go leaves out counts of zero.
fn tidy_counts<const N: usize>(counts: [&mut Option<i32>; N]) {
    for count in counts {
        count.take_if(|count| *count == 0);
    }
}

pub(super) fn deployment() -> Row {
    fn cells(deployment: &Deployment) -> Vec<Value> {
        let (spec, status) = (
            deployment.spec.clone().unwrap_or_default(),
            deployment.status.clone().unwrap_or_default(),
        );
        let inner = spec.template.spec.unwrap_or_default();
        let (names, images) = containers(&inner.containers);
        let ready = format!(
            "{}/{}",
            status.ready_replicas.unwrap_or_default(),
            spec.replicas.unwrap_or_default()
        );
        vec![
            deployment.name().into(),
            ready.into(),
            status.updated_replicas.unwrap_or_default().into(),
            status.available_replicas.unwrap_or_default().into(),
            age(deployment),
            names.into(),
            images.into(),
            selector(Some(&spec.selector)).into(),
        ]
    }
    let strategy = Workload {
        parts: parts!(Deployment),
        default: default_deployment,
        cells,
        closed: gated::deployment,
        status_keeps_labels: true,
    };
    Row::new::<Deployment>(strategy).short(&["deploy"]).categories(&["all"]).status().sub(
        "scale",
        SCALE,
        FACE_VERBS,
        crate::scale::behaviour::<Deployment>(),
    )
}

fn default_replica_set(set: &mut ReplicaSet) {
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

pub(super) fn replica_set() -> Row {
    fn cells(set: &ReplicaSet) -> Vec<Value> {
        let (spec, status) =
            (set.spec.clone().unwrap_or_default(), set.status.clone().unwrap_or_default());
        let inner = spec.template.and_then(|template| template.spec).unwrap_or_default();
        let (names, images) = containers(&inner.containers);
        vec![
            set.name().into(),
            spec.replicas.unwrap_or_default().into(),
            status.replicas.into(),
            status.ready_replicas.unwrap_or_default().into(),
            age(set),
            names.into(),
            images.into(),
            selector(Some(&spec.selector)).into(),
        ]
    }
    let strategy = Workload {
        parts: parts!(ReplicaSet),
        default: default_replica_set,
        cells,
        closed: gated::replica_set,
        status_keeps_labels: false,
    };
    Row::new::<ReplicaSet>(strategy).short(&["rs"]).categories(&["all"]).status().sub(
        "scale",
        SCALE,
        FACE_VERBS,
        crate::scale::behaviour::<ReplicaSet>(),
    )
}

fn default_daemon_set(set: &mut DaemonSet) {
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
    // Upstream keeps here how often the template changed.
    let notes = set.metadata.annotations.get_or_insert_default();
    notes.entry(TEMPLATE_GENERATION.into()).or_insert_with(|| "1".into());
    let status: &mut DaemonSetStatus = set.status.get_or_insert_default();
    tidy_counts([
        &mut status.number_available,
        &mut status.number_unavailable,
        &mut status.updated_number_scheduled,
    ]);
}

pub(super) fn daemon_set() -> Row {
    fn cells(set: &DaemonSet) -> Vec<Value> {
        let (spec, status) =
            (set.spec.clone().unwrap_or_default(), set.status.clone().unwrap_or_default());
        let inner = spec.template.spec.unwrap_or_default();
        let (names, images) = containers(&inner.containers);
        vec![
            set.name().into(),
            status.desired_number_scheduled.into(),
            status.current_number_scheduled.into(),
            status.number_ready.into(),
            status.updated_number_scheduled.unwrap_or_default().into(),
            status.number_available.unwrap_or_default().into(),
            labels(inner.node_selector.as_ref()).into(),
            age(set),
            names.into(),
            images.into(),
            selector(Some(&spec.selector)).into(),
        ]
    }
    let strategy = Workload {
        parts: parts!(DaemonSet),
        default: default_daemon_set,
        cells,
        closed: gated::daemon_set,
        status_keeps_labels: false,
    };
    Row::new::<DaemonSet>(strategy).short(&["ds"]).categories(&["all"]).status()
}

fn default_stateful_set(set: &mut StatefulSet) {
    let spec = set.spec.get_or_insert_default();
    spec.replicas.get_or_insert(1);
    spec.revision_history_limit.get_or_insert(10);
    fill(&mut spec.pod_management_policy, "OrderedReady");
    let strategy = spec.update_strategy.get_or_insert_default();
    if strategy.type_.as_deref().is_none_or(str::is_empty) {
        fill(&mut strategy.type_, "RollingUpdate");
        strategy.rolling_update.get_or_insert_default();
    }
    if let Some(rolling) = &mut strategy.rolling_update
        && strategy.type_.as_deref() == Some("RollingUpdate")
    {
        rolling.partition.get_or_insert(0);
        if features::enabled(Feature::MaxUnavailableStatefulSet) {
            rolling.max_unavailable.get_or_insert(IntOrString::Int(1));
        }
    }
    let policy = spec.persistent_volume_claim_retention_policy.get_or_insert_default();
    fill(&mut policy.when_deleted, "Retain");
    fill(&mut policy.when_scaled, "Retain");
    podspec::default_template(&mut spec.template);
    for claim in spec.volume_claim_templates.iter_mut().flatten() {
        claim.spec.get_or_insert_default().volume_mode.get_or_insert_with(|| "Filesystem".into());
        fill(&mut claim.status.get_or_insert_default().phase, "Pending");
    }
    let status: &mut StatefulSetStatus = set.status.get_or_insert_default();
    tidy_counts([
        &mut status.current_replicas,
        &mut status.ready_replicas,
        &mut status.updated_replicas,
    ]);
    status.available_replicas.get_or_insert(0);
}

pub(super) fn stateful_set() -> Row {
    fn cells(set: &StatefulSet) -> Vec<Value> {
        let (spec, status) =
            (set.spec.clone().unwrap_or_default(), set.status.clone().unwrap_or_default());
        let inner = spec.template.spec.unwrap_or_default();
        let (names, images) = containers(&inner.containers);
        let ready = format!(
            "{}/{}",
            status.ready_replicas.unwrap_or_default(),
            spec.replicas.unwrap_or_default()
        );
        vec![set.name().into(), ready.into(), age(set), names.into(), images.into()]
    }
    let strategy = Workload {
        parts: parts!(StatefulSet),
        default: default_stateful_set,
        cells,
        closed: gated::stateful_set,
        status_keeps_labels: false,
    };
    Row::new::<StatefulSet>(strategy).short(&["sts"]).categories(&["all"]).status().sub(
        "scale",
        SCALE,
        FACE_VERBS,
        crate::scale::behaviour::<StatefulSet>(),
    )
}
