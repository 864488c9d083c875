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

/// Replaces the condition of the same type. Its transition time changes only with its status. It keeps
/// its observedGeneration: upstream's controllers set none.
pub fn set(status: &mut CustomResourceDefinitionStatus, mut condition: Condition) {
    let all = status.conditions.get_or_insert_default();
    let now = Some(Time(base::clock::now_seconds()));
    match all.iter_mut().find(|one| one.type_ == condition.type_) {
        Some(known) => {
            let stays = known.status == condition.status && known.last_transition_time.is_some();
            condition.last_transition_time =
                if stays { known.last_transition_time.clone() } else { now };
            condition.observed_generation = known.observed_generation;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_takes_the_place_of_its_kind() {
        let long_ago: Time = Time("2026-01-01T00:00:00Z".parse().expect("a time"));
        let known = Condition {
            last_transition_time: Some(long_ago.clone()),
            observed_generation: Some(7),
            ..new("Established", true, "Before", "")
        };
        let check = |condition: Condition, expected: (usize, bool, Option<i64>)| {
            let conditions = Some(vec![known.clone()]);
            let mut status = CustomResourceDefinitionStatus { conditions, ..Default::default() };
            set(&mut status, condition.clone());
            let all = status.conditions.expect("some");
            let one = all.iter().find(|one| one.type_ == condition.type_).expect("is there");
            assert_eq!((&one.status, &one.reason), (&condition.status, &condition.reason));
            let kept_time = one.last_transition_time.as_ref() == Some(&long_ago);
            assert_eq!((all.len(), kept_time, one.observed_generation), expected);
        };
        check(new("Established", true, "After", ""), (1, true, Some(7)));
        check(new("Established", false, "After", ""), (1, false, Some(7)));
        check(new("Terminating", true, "After", ""), (2, false, None));
    }
}
