//! The moves of a rollout. Pure: each works on a [`Pass`].

use std::sync::Arc;

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::Pod;

use super::arithmetic::{
    DESIRED_REPLICAS, actual, available, by_age, by_size_newer, by_size_older, is_rolling,
    max_surge, max_unavailable, number, proportion, replicas, revision, wanted,
};
use super::plan::{Action, Pass, named};
use super::status;
use crate::{owner, pod};

/// New pods up to the surge, then old ones down to what may be unavailable.
pub fn rolling(pass: &mut Pass) {
    if pass.ensure_new() {
        return;
    }
    let Some(new) = pass.new.clone() else {
        return;
    };
    let size = new_set_size(&pass.deployment, &new, &pass.all());
    if pass.resize(named(&new), size) {
        return;
    }
    if scale_old_down(pass, &new) {
        return;
    }
    clean_up_if_complete(pass);
}

/// All old pods go, then the new ones come.
pub fn recreate(pass: &mut Pass, pods: &[Arc<Pod>]) {
    pass.adopt_new();
    let active: Vec<_> =
        pass.old.iter().filter(|set| replicas(set) > 0).map(|set| named(set).to_owned()).collect();
    let mut scaled = false;
    for name in active {
        scaled |= pass.resize(&name, 0);
    }
    if scaled {
        return;
    }
    let new_uid = pass.new.as_ref().and_then(|set| set.metadata.uid.clone());
    let is_old = |pod: &Arc<Pod>| {
        owner::controller(&pod.metadata).map(|owner| &owner.uid) != new_uid.as_ref()
    };
    if pods.iter().any(|pod| is_old(pod) && !pod::is_finished(pod)) {
        return;
    }
    if pass.new.is_none() && pass.ensure_new() {
        return;
    }
    if let Some(name) = pass.new.as_ref().map(|set| named(set).to_owned()) {
        pass.resize(&name, wanted(&pass.deployment));
    }
    clean_up_if_complete(pass);
}

/// How many replicas the new set should have now; `all` are all sets but a new one not yet created.
pub fn new_set_size(deployment: &Deployment, new: &ReplicaSet, all: &[&ReplicaSet]) -> i32 {
    let wanted = wanted(deployment);
    if !is_rolling(deployment) {
        return wanted;
    }
    let current = replicas(new);
    if current >= wanted {
        return wanted;
    }
    let total: i32 = all.iter().map(|set| replicas(set)).sum();
    let room = wanted + max_surge(deployment) - total;
    if room <= 0 {
        return current;
    }
    current + room.min(wanted - current)
}

/// True if something was scaled.
fn scale_old_down(pass: &mut Pass, new: &ReplicaSet) -> bool {
    let old: i32 = pass.old.iter().map(replicas).sum();
    if old == 0 {
        return false;
    }
    let min_available = wanted(&pass.deployment) - max_unavailable(&pass.deployment);
    let all: i32 = pass.all().into_iter().map(replicas).sum();
    let new_unavailable = replicas(new) - available(new);
    let budget = all - min_available - new_unavailable;
    if budget <= 0 {
        return false;
    }
    let mut names: Vec<_> = pass.old.iter().filter(|set| replicas(set) > 0).cloned().collect();
    names.sort_unstable_by(by_age);
    // Pods that do not serve go first: they cost nothing.
    let mut cleaned = 0;
    for set in &mut names {
        let unhealthy = (replicas(set) - available(set)).clamp(0, budget - cleaned);
        if unhealthy > 0 {
            let to = replicas(set) - unhealthy;
            cleaned += unhealthy;
            pass.resize(named(set), to);
            set.spec.get_or_insert_default().replicas = Some(to);
        }
    }
    let serving: i32 = pass.all().into_iter().map(available).sum();
    let mut surplus = serving - min_available;
    let mut scaled = cleaned;
    for set in &names {
        let less = replicas(set).min(surplus);
        if less > 0 {
            pass.resize(named(set), replicas(set) - less);
            surplus -= less;
            scaled += less;
        }
    }
    scaled > 0
}

/// The Deployment's size changed: one active set takes all, several share in proportion.
pub fn scale(pass: &mut Pass) {
    let total = wanted(&pass.deployment);
    if let Some(only) = active_or_latest(pass) {
        if replicas_of(pass, &only) != total {
            pass.resize(&only, total);
        }
        return;
    }
    if pass.new.as_ref().is_some_and(|new| is_saturated(&pass.deployment, new)) {
        let active: Vec<_> = pass
            .old
            .iter()
            .filter(|set| replicas(set) > 0)
            .map(|set| named(set).to_owned())
            .collect();
        for name in active {
            pass.resize(&name, 0);
        }
        return;
    }
    if is_rolling(&pass.deployment) {
        scale_in_proportion(pass);
    }
}

fn scale_in_proportion(pass: &mut Pass) {
    let wanted = wanted(&pass.deployment);
    let mut active: Vec<_> =
        pass.all().into_iter().filter(|set| replicas(set) > 0).cloned().collect();
    let total: i32 = active.iter().map(replicas).sum();
    let allowed = if wanted > 0 { wanted + max_surge(&pass.deployment) } else { 0 };
    let to_add = allowed - total;
    if to_add > 0 {
        active.sort_unstable_by(by_size_newer);
    } else {
        active.sort_unstable_by(by_size_older);
    }
    let mut added = 0;
    let mut sizes = vec![];
    for set in &active {
        let share = proportion(set, &pass.deployment, to_add, added);
        added += share;
        sizes.push(replicas(set) + share);
    }
    // The remainder of rounding goes to the largest ReplicaSet.
    if let Some(first) = sizes.first_mut() {
        *first = (*first + to_add - added).max(0);
    }
    for (set, size) in active.iter().zip(sizes) {
        pass.resize(named(set), size);
    }
}

fn replicas_of(pass: &Pass, name: &str) -> i32 {
    pass.all().into_iter().find(|set| named(set) == name).map_or(0, replicas)
}

/// The one active set, or the newest if none is active; `None` if several are.
fn active_or_latest(pass: &Pass) -> Option<String> {
    let all = pass.all();
    let active: Vec<_> = all.iter().filter(|set| replicas(set) > 0).collect();
    match active.as_slice() {
        [] => {
            let latest = pass.new.as_ref().or_else(|| pass.old.iter().max_by(|a, b| by_age(a, b)));
            latest.map(|set| named(set).to_owned())
        }
        [one] => Some(named(one).to_owned()),
        _ => None,
    }
}

fn is_saturated(deployment: &Deployment, new: &ReplicaSet) -> bool {
    let wanted = wanted(deployment);
    number(new, DESIRED_REPLICAS) == Some(wanted)
        && replicas(new) == wanted
        && available(new) == wanted
}

fn clean_up_if_complete(pass: &mut Pass) {
    if let Some(status) = &pass.deployment.status
        && status::is_complete(&pass.deployment, status)
    {
        clean_up(pass);
    }
}

/// Old sets beyond the history limit go, lowest revision first.
pub fn clean_up(pass: &mut Pass) {
    let limit = pass.deployment.spec.as_ref().and_then(|spec| spec.revision_history_limit);
    let Some(limit) = limit.filter(|limit| *limit != i32::MAX) else {
        return;
    };
    let mut old: Vec<_> =
        pass.old.iter().filter(|set| set.metadata.deletion_timestamp.is_none()).collect();
    let Some(surplus) = old.len().checked_sub(limit.max(0) as usize) else {
        return;
    };
    old.sort_by_key(|set| revision(set));
    let is_idle = |set: &&ReplicaSet| {
        let observed =
            set.status.as_ref().and_then(|status| status.observed_generation).unwrap_or(0);
        actual(set) == 0 && replicas(set) == 0 && set.metadata.generation.unwrap_or(0) <= observed
    };
    let gone: Vec<_> =
        old.into_iter().take(surplus).filter(is_idle).map(|set| named(set).to_owned()).collect();
    pass.actions.extend(gone.into_iter().map(Action::Delete));
}
