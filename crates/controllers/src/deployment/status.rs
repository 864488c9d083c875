//! A Deployment's status and conditions. Pure.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, DeploymentCondition, DeploymentStatus, ReplicaSet};
use machinery::Time;

use super::arithmetic::{actual, available, max_unavailable, ready, replicas, terminating, wanted};
use crate::replicaset::some_if_positive;

pub const PROGRESSING: &str = "Progressing";
pub const AVAILABLE: &str = "Available";
pub const FAILURE: &str = "ReplicaFailure";
pub const NEW_SET_AVAILABLE: &str = "NewReplicaSetAvailable";
pub const TIMED_OUT: &str = "ProgressDeadlineExceeded";
pub const PAUSED: &str = "DeploymentPaused";

pub fn condition<'a>(status: &'a DeploymentStatus, kind: &str) -> Option<&'a DeploymentCondition> {
    status.conditions.iter().flatten().find(|condition| condition.type_ == kind)
}

/// Upstream: `SetDeploymentCondition`: the same status and reason change nothing; the transition
/// time stays while the status does.
pub fn set_condition(status: &mut DeploymentStatus, mut new: DeploymentCondition) {
    if let Some(known) = condition(status, &new.type_) {
        if known.status == new.status && known.reason == new.reason {
            return;
        }
        if known.status == new.status {
            new.last_transition_time = known.last_transition_time.clone();
        }
    }
    remove_condition(status, &new.type_.clone());
    status.conditions.get_or_insert_default().push(new);
}

pub fn remove_condition(status: &mut DeploymentStatus, kind: &str) {
    if let Some(conditions) = &mut status.conditions {
        conditions.retain(|condition| condition.type_ != kind);
        if conditions.is_empty() {
            status.conditions = None;
        }
    }
}

pub fn new_condition(
    kind: &str,
    status: &str,
    reason: &str,
    message: &str,
    now: Timestamp,
) -> DeploymentCondition {
    DeploymentCondition {
        type_: kind.into(),
        status: status.into(),
        reason: Some(reason.into()),
        message: Some(message.into()),
        last_update_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
    }
}

pub fn has_deadline(deployment: &Deployment) -> bool {
    let deadline = deployment.spec.as_ref().and_then(|spec| spec.progress_deadline_seconds);
    deadline.is_some_and(|deadline| deadline != i32::MAX)
}

/// Sets `Progressing`, where there is a deadline to progress by.
pub fn set_progress(deployment: &mut Deployment, status: &str, reason: &str, message: &str) {
    if has_deadline(deployment) {
        let condition =
            new_condition(PROGRESSING, status, reason, message, base::clock::now_seconds());
        set_condition(deployment.status.get_or_insert_default(), condition);
    }
}

/// The counts, and whether enough is available.
pub fn count(
    deployment: &Deployment,
    all: &[&ReplicaSet],
    new: Option<&ReplicaSet>,
    now: Timestamp,
) -> DeploymentStatus {
    let sum = |count: fn(&ReplicaSet) -> i32| all.iter().map(|set| count(set)).sum::<i32>();
    let (total, is_available) = (sum(replicas), sum(available));
    let old = deployment.status.clone().unwrap_or_default();
    let mut status = DeploymentStatus {
        observed_generation: deployment.metadata.generation,
        replicas: some_if_positive(sum(actual)),
        updated_replicas: some_if_positive(new.map_or(0, actual)),
        ready_replicas: some_if_positive(sum(ready)),
        available_replicas: some_if_positive(is_available),
        unavailable_replicas: some_if_positive(total - is_available),
        terminating_replicas: Some(sum(terminating)),
        collision_count: old.collision_count,
        conditions: old.conditions,
    };
    let enough = is_available >= wanted(deployment) - max_unavailable(deployment);
    set_condition(
        &mut status,
        if enough {
            let message = "Deployment has minimum availability.";
            new_condition(AVAILABLE, "True", "MinimumReplicasAvailable", message, now)
        } else {
            let message = "Deployment does not have minimum availability.";
            new_condition(AVAILABLE, "False", "MinimumReplicasUnavailable", message, now)
        },
    );
    status
}

pub fn is_complete(deployment: &Deployment, status: &DeploymentStatus) -> bool {
    let wanted = wanted(deployment);
    status.updated_replicas.unwrap_or(0) == wanted
        && status.replicas.unwrap_or(0) == wanted
        && status.available_replicas.unwrap_or(0) == wanted
        && status.observed_generation.unwrap_or(0) >= deployment.metadata.generation.unwrap_or(0)
}

/// The status of a rollout under way: counts, `Progressing`, failures.
pub fn rolling(
    deployment: &Deployment,
    all: &[&ReplicaSet],
    new: Option<&ReplicaSet>,
    now: Timestamp,
) -> DeploymentStatus {
    let mut status = count(deployment, all, new, now);
    if !has_deadline(deployment) {
        remove_condition(&mut status, PROGRESSING);
    }
    let old = deployment.status.clone().unwrap_or_default();
    let current = condition(&old, PROGRESSING);
    let was_complete = status.replicas == status.updated_replicas
        && current.is_some_and(|current| current.reason.as_deref() == Some(NEW_SET_AVAILABLE));
    if has_deadline(deployment) && !was_complete {
        progress(deployment, &old, &mut status, new, now);
    }
    match failure(all, new) {
        Some(failure) => set_condition(&mut status, failure),
        None => remove_condition(&mut status, FAILURE),
    }
    status
}

fn progress(
    deployment: &Deployment,
    old: &DeploymentStatus,
    status: &mut DeploymentStatus,
    new: Option<&ReplicaSet>,
    now: Timestamp,
) {
    let name = |meta: &machinery::ObjectMeta| meta.name.clone().unwrap_or_default();
    let subject = match new {
        Some(new) => format!("ReplicaSet {:?}", name(&new.metadata)),
        None => format!("Deployment {:?}", name(&deployment.metadata)),
    };
    if is_complete(deployment, status) {
        let message = format!("{subject} has successfully progressed.");
        set_condition(status, new_condition(PROGRESSING, "True", NEW_SET_AVAILABLE, &message, now));
    } else if is_progressing(old, status) {
        let message = format!("{subject} is progressing.");
        let mut condition = new_condition(PROGRESSING, "True", "ReplicaSetUpdated", &message, now);
        // The update time moves with every step forward: the deadline counts from there.
        if let Some(current) = self::condition(old, PROGRESSING) {
            if current.status == "True" {
                condition.last_transition_time = current.last_transition_time.clone();
            }
            remove_condition(status, PROGRESSING);
        }
        set_condition(status, condition);
    } else if is_timed_out(deployment, status, now) {
        let message = format!("{subject} has timed out progressing.");
        set_condition(status, new_condition(PROGRESSING, "False", TIMED_OUT, &message, now));
    }
}

fn is_progressing(old: &DeploymentStatus, new: &DeploymentStatus) -> bool {
    let count = |value: Option<i32>| value.unwrap_or(0);
    let outdated =
        |status: &DeploymentStatus| count(status.replicas) - count(status.updated_replicas);
    count(new.updated_replicas) > count(old.updated_replicas)
        || outdated(new) < outdated(old)
        || count(new.ready_replicas) > count(old.ready_replicas)
        || count(new.available_replicas) > count(old.available_replicas)
}

fn deadline_of(deployment: &Deployment) -> Duration {
    let seconds = deployment.spec.as_ref().and_then(|spec| spec.progress_deadline_seconds);
    Duration::from_secs(seconds.unwrap_or(600).max(0) as u64)
}

fn is_timed_out(deployment: &Deployment, status: &DeploymentStatus, now: Timestamp) -> bool {
    let Some(current) = condition(status, PROGRESSING) else {
        return false;
    };
    match current.reason.as_deref() {
        Some(NEW_SET_AVAILABLE) => false,
        Some(TIMED_OUT) => true,
        _ => {
            let from =
                current.last_update_time.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0);
            now.duration_since(from).as_secs() > deadline_of(deployment).as_secs() as i64
        }
    }
}

/// When to look whether the deadline has passed.
pub fn recheck(
    deployment: &Deployment,
    status: &DeploymentStatus,
    now: Timestamp,
) -> Option<Duration> {
    let current = condition(status, PROGRESSING)?;
    if !has_deadline(deployment)
        || is_complete(deployment, status)
        || current.reason.as_deref() == Some(TIMED_OUT)
    {
        return None;
    }
    let from = current.last_update_time.as_ref()?.0;
    let passed = Duration::try_from(now.duration_since(from)).unwrap_or_default();
    Some(deadline_of(deployment).saturating_sub(passed) + Duration::from_secs(1))
}

fn failure(all: &[&ReplicaSet], new: Option<&ReplicaSet>) -> Option<DeploymentCondition> {
    let of = |set: &ReplicaSet| {
        let conditions = set.status.as_ref().and_then(|status| status.conditions.clone());
        conditions.into_iter().flatten().find(|condition| condition.type_ == FAILURE)
    };
    let found = new.and_then(of).or_else(|| all.iter().find_map(|set| of(set)))?;
    Some(DeploymentCondition {
        type_: found.type_,
        status: found.status,
        reason: found.reason,
        message: found.message,
        last_update_time: found.last_transition_time.clone(),
        last_transition_time: found.last_transition_time,
    })
}
