//! Conditions of a CRD's status. Upstream: `apiextensions/v1 helpers`.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionCondition, CustomResourceDefinitionStatus,
};
use machinery::Time;

type Condition = CustomResourceDefinitionCondition;

pub fn new(kind: &str, is_true: bool, reason: &str, message: &str) -> Condition {
    Condition {
        type_: kind.into(),
        status: if is_true { "True" } else { "False" }.into(),
        reason: Some(reason.into()),
        message: Some(message.into()),
        last_transition_time: None,
        ..Condition::default()
    }
}

/// Puts a condition in the place of its kind; its time changes with its status only.
pub fn set(status: &mut CustomResourceDefinitionStatus, mut condition: Condition) {
    let all = status.conditions.get_or_insert_default();
    let now = Some(Time(base::clock::now_seconds()));
    match all.iter_mut().find(|one| one.type_ == condition.type_) {
        Some(known) => {
            let stays = known.status == condition.status && known.last_transition_time.is_some();
            condition.last_transition_time =
                if stays { known.last_transition_time.clone() } else { now };
            *known = condition;
        }
        None => {
            condition.last_transition_time = now;
            all.push(condition);
        }
    }
}

pub fn find<'a>(crd: &'a CustomResourceDefinition, kind: &str) -> Option<&'a Condition> {
    let all = crd.status.as_ref()?.conditions.as_ref()?;
    all.iter().find(|one| one.type_ == kind)
}

pub fn is_true(crd: &CustomResourceDefinition, kind: &str) -> bool {
    find(crd, kind).is_some_and(|condition| condition.status == "True")
}
