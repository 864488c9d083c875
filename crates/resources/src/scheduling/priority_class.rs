//! PriorityClass: a name for a priority of pods.

use k8s_openapi::api::scheduling::v1::PriorityClass;

use crate::kind::{Kind, Rules, age, field, name};
use crate::validate::at::At;
use crate::validate::pod;

pub(crate) static KIND: Kind<PriorityClass> = Kind {
    short: &["pc"],
    default: |class| {
        class.preemption_policy.get_or_insert_with(|| "PreemptLowerPriority".into());
        class.global_default.take_if(|global| !*global);
    },
    // Objects start with a generation, which never changes.
    generation: Some(|_, _| false),
    rules: Rules { create: priority_class, update: Some(priority_class_update), ..Rules::NONE },
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

const SYSTEM_CLASSES: &[(&str, i64)] =
    &[("system-node-critical", 2_000_001_000), ("system-cluster-critical", 2_000_000_000)];

fn priority_class(at: &At<'_>) {
    let (name, value) = (at.get("metadata.name"), at.get("value"));
    if name.str().starts_with("system-") {
        let known = SYSTEM_CLASSES.iter().find(|(known, _)| name.is(known));
        let why = match known {
            None => format!("{} is not a known system priority class", name.str()),
            Some((known, wanted)) if value.int() != *wanted => {
                format!("value of {known} PriorityClass must be {wanted}")
            }
            Some((known, _)) if at.get("globalDefault").bool() => {
                format!("globalDefault of {known} PriorityClass must be false")
            }
            Some(_) => String::new(),
        };
        if !why.is_empty() {
            name.forbidden(&format!("priority class names with 'system-' prefix are reserved for system use only. error: {why}"));
        }
    } else if value.int() > 1_000_000_000 {
        value.forbidden("maximum allowed value of a user defined priority is 1000000000");
    }
    pod::preemption_policy(&at.get("preemptionPolicy"));
}

fn priority_class_update(at: &At<'_>, old: &At<'_>) {
    if at.get("value").int() != old.get("value").int() {
        at.get("value").forbidden("may not be changed in an update.");
    }
    at.get("preemptionPolicy").unchanged(&old.get("preemptionPolicy"));
}
