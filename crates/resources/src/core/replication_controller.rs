//! ReplicationController: a number of pods that are all the same; ReplicaSets came after it.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::core::v1::{Container, ReplicationController};

use super::podspec;
use crate::gated::close_template;
use crate::kind::{Fields, Kind, Rules, STATUS, age, field, name, spec_and_status, text, wide};
use crate::print::{images, labels, names};
use crate::scale;
use crate::validate::{warnings, workloads};

pub(crate) static KIND: Kind<ReplicationController> = Kind {
    short: &["rc"],
    categories: &["all"],
    storage: Some("controllers"),
    subresources: &[STATUS, scale::sub::<ReplicationController>()],
    default,
    parts: Some(spec_and_status!()),
    generation: Some(|new, old| new.spec != old.spec),
    gated: |new, old| {
        let before = old.and_then(|old| old.spec.as_ref()?.template.as_ref());
        close_template(new.spec.as_mut().and_then(|spec| spec.template.as_mut()), before);
    },
    rules: Rules {
        create: workloads::replication_controller,
        parts: &[("status", workloads::counts)],
        metadata: MetadataRules { checks_prefix: false, ..MetadataRules::FULL },
        ..Rules::NONE
    },
    warnings: Some(|at, out| warnings::hostname(at, "spec.template", out)),
    orphans: true,
    columns: &[
        name(),
        field("Desired", "integer", "api.core.v1.ReplicationControllerSpec.replicas", |rc| {
            rc.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or_default().into()
        }),
        field("Current", "integer", "api.core.v1.ReplicationControllerStatus.replicas", |rc| {
            rc.status.as_ref().map_or(0, |status| status.replicas).into()
        }),
        field("Ready", "integer", "api.core.v1.ReplicationControllerStatus.readyReplicas", |rc| {
            let status = rc.status.as_ref();
            status.and_then(|status| status.ready_replicas).unwrap_or_default().into()
        }),
        age(),
        wide(text("Containers", "string", "Names of each container in the template.", |rc| {
            names(containers(rc)).into()
        })),
        wide(text(
            "Images",
            "string",
            "Images referenced by each container in the template.",
            |rc| images(containers(rc)).into(),
        )),
        wide(field("Selector", "string", "api.core.v1.ReplicationControllerSpec.selector", |rc| {
            labels(rc.spec.as_ref().and_then(|spec| spec.selector.as_ref())).into()
        })),
    ],
    fields: Fields::Of(&[("status.replicas", |rc| {
        rc.status.as_ref().map_or(0, |status| status.replicas).to_string()
    })]),
    ..Kind::BASE
};

fn default(rc: &mut ReplicationController) {
    let spec = rc.spec.get_or_insert_default();
    spec.replicas.get_or_insert(1);
    let Some(template) = &mut spec.template else { return };
    podspec::default_template(template);
    let of_template = template.metadata.as_ref().and_then(|meta| meta.labels.clone());
    if let Some(of_template) = of_template.filter(|map| !map.is_empty()) {
        if spec.selector.as_ref().is_none_or(|selector| selector.is_empty()) {
            spec.selector = Some(of_template.clone());
        }
        if rc.metadata.labels.as_ref().is_none_or(|own| own.is_empty()) {
            rc.metadata.labels = Some(of_template);
        }
    }
    rc.status.get_or_insert_default();
}

fn containers(rc: &ReplicationController) -> &[Container] {
    let template = rc.spec.as_ref().and_then(|spec| spec.template.as_ref());
    template.and_then(|template| template.spec.as_ref()).map_or(&[], |spec| &spec.containers)
}
