//! PriorityClass: a name for a priority of pods.

use k8s_openapi::api::scheduling::v1::PriorityClass;

use crate::kind::{Kind, Rules, age, field, name};
use crate::validate::policy;

pub(crate) static KIND: Kind<PriorityClass> = Kind {
    short: &["pc"],
    default: |class| {
        class.preemption_policy.get_or_insert_with(|| "PreemptLowerPriority".into());
        class.global_default.take_if(|global| !*global);
    },
    // Objects start with a generation, which never changes.
    generation: Some(|_, _| false),
    rules: Rules {
        create: policy::priority_class,
        update: Some(policy::priority_class_update),
        ..Rules::NONE
    },
    columns: &[
        name(),
        field("Value", "integer", "api.scheduling.v1.PriorityClass.value", |class| {
            class.value.into()
        }),
        field(
            "Global-Default",
            "boolean",
            "api.scheduling.v1.PriorityClass.globalDefault",
            |class| class.global_default.unwrap_or_default().into(),
        ),
        age(),
        field(
            "PreemptionPolicy",
            "string",
            "api.scheduling.v1.PriorityClass.preemptionPolicy",
            |class| class.preemption_policy.clone().into(),
        ),
    ],
    ..Kind::BASE
};
