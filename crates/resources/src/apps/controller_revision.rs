//! ControllerRevision: what a workload's template was at some time.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::apps::v1::ControllerRevision;

use crate::kind::{Kind, Rules, age, field, name, text};
use crate::validate::workloads;

pub(crate) static KIND: Kind<ControllerRevision> = Kind {
    rules: Rules {
        create: workloads::controller_revision,
        update: Some(workloads::controller_revision_update),
        metadata: MetadataRules::UPDATE_AND_WHOLE,
        ..Rules::NONE
    },
    columns: &[
        name(),
        text("Controller", "string", "Controller of the object", |revision| {
            controller(revision).into()
        }),
        field("Revision", "string", "api.apps.v1.ControllerRevision.revision", |revision| {
            revision.revision.into()
        }),
        age(),
    ],
    ..Kind::BASE
};

fn controller(revision: &ControllerRevision) -> String {
    let mut owners = revision.metadata.owner_references.iter().flatten();
    let Some(owner) = owners.find(|owner| owner.controller == Some(true)) else {
        return "<none>".into();
    };
    let group = owner.api_version.split_once('/').map(|(group, _)| format!(".{group}"));
    format!("{}{}/{}", owner.kind.to_lowercase(), group.unwrap_or_default(), owner.name)
}
