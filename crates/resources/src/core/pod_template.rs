//! PodTemplate: a stored template of pods; no controller reads it.

use k8s_openapi::api::core::v1::{Container, PodTemplate};

use super::podspec;
use crate::gated::close_template;
use crate::kind::{Kind, Rules, name, text};
use crate::print::{images, labels, names};
use crate::validate::{warnings, workloads};

pub(crate) static KIND: Kind<PodTemplate> = Kind {
    default: |template| podspec::default_template(template.template.get_or_insert_default()),
    generation: Some(|new, old| new.template != old.template),
    gated: |new, old| {
        close_template(new.template.as_mut(), old.and_then(|old| old.template.as_ref()));
    },
    rules: Rules { create: workloads::pod_template, ..Rules::NONE },
    warnings: Some(|at, out| warnings::template(&at.get("template"), out)),
    returns_deleted: true,
    columns: &[
        name(),
        text("Containers", "string", "Names of each container in the template.", |template| {
            names(containers(template)).into()
        }),
        text(
            "Images",
            "string",
            "Images referenced by each container in the template.",
            |template| images(containers(template)).into(),
        ),
        text("Pod Labels", "string", "The labels for the pod template.", |template| {
            let meta = template.template.as_ref().and_then(|inner| inner.metadata.as_ref());
            labels(meta.and_then(|meta| meta.labels.as_ref())).into()
        }),
    ],
    ..Kind::BASE
};

fn containers(template: &PodTemplate) -> &[Container] {
    let inner = template.template.as_ref();
    inner.and_then(|inner| inner.spec.as_ref()).map_or(&[], |spec| &spec.containers)
}
