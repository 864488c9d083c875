//! The numbers of a rollout. Pure. Upstream: `pkg/controller/deployment/util`.

use std::cmp::Ordering;

use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, ReplicaSet};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

pub const REVISION: &str = "deployment.kubernetes.io/revision";
pub const REVISION_HISTORY: &str = "deployment.kubernetes.io/revision-history";
pub const DESIRED_REPLICAS: &str = "deployment.kubernetes.io/desired-replicas";
pub const MAX_REPLICAS: &str = "deployment.kubernetes.io/max-replicas";

/// The parts of a spec with their defaults.
pub fn spec(deployment: &Deployment) -> DeploymentSpec {
    deployment.spec.clone().unwrap_or_default()
}

pub fn wanted(deployment: &Deployment) -> i32 {
    deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
}

pub fn is_rolling(deployment: &Deployment) -> bool {
    let strategy = deployment.spec.as_ref().and_then(|spec| spec.strategy.as_ref());
    strategy.and_then(|strategy| strategy.type_.as_deref()).unwrap_or("RollingUpdate")
        == "RollingUpdate"
}

pub fn is_paused(deployment: &Deployment) -> bool {
    deployment.spec.as_ref().and_then(|spec| spec.paused).unwrap_or(false)
}

pub fn replicas(set: &ReplicaSet) -> i32 {
    set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
}

pub fn actual(set: &ReplicaSet) -> i32 {
    set.status.as_ref().map_or(0, |status| status.replicas)
}

pub fn ready(set: &ReplicaSet) -> i32 {
    set.status.as_ref().and_then(|status| status.ready_replicas).unwrap_or(0)
}

pub fn available(set: &ReplicaSet) -> i32 {
    set.status.as_ref().and_then(|status| status.available_replicas).unwrap_or(0)
}

pub fn terminating(set: &ReplicaSet) -> i32 {
    set.status.as_ref().and_then(|status| status.terminating_replicas).unwrap_or(0)
}

/// (max surge, max unavailable): percentages of the surge round up, of the other down; not both
/// may be zero.
pub fn fenceposts(deployment: &Deployment) -> (i32, i32) {
    let strategy = deployment.spec.as_ref().and_then(|spec| spec.strategy.as_ref());
    let rolling = strategy.and_then(|strategy| strategy.rolling_update.clone()).unwrap_or_default();
    let total = wanted(deployment);
    let surge = scaled(rolling.max_surge.as_ref(), total, true);
    let unavailable = scaled(rolling.max_unavailable.as_ref(), total, false);
    if surge == 0 && unavailable == 0 { (0, 1) } else { (surge, unavailable) }
}

pub fn max_surge(deployment: &Deployment) -> i32 {
    if is_rolling(deployment) { fenceposts(deployment).0 } else { 0 }
}

pub fn max_unavailable(deployment: &Deployment) -> i32 {
    let total = wanted(deployment);
    if !is_rolling(deployment) || total == 0 {
        return 0;
    }
    fenceposts(deployment).1.min(total)
}

/// A number, or a percentage of `total`; the default is 25%.
pub fn scaled(value: Option<&IntOrString>, total: i32, up: bool) -> i32 {
    let percent = match value {
        Some(IntOrString::Int(number)) => return *number,
        Some(IntOrString::String(text)) => text.trim_end_matches('%').parse::<i64>().unwrap_or(0),
        None => 25,
    };
    let hundredfold = percent * i64::from(total);
    let scaled = if up {
        hundredfold.div_euclid(100) + i64::from(hundredfold.rem_euclid(100) > 0)
    } else {
        hundredfold / 100
    };
    i32::try_from(scaled).unwrap_or(i32::MAX)
}

pub fn annotation<'a>(set: &'a ReplicaSet, name: &str) -> Option<&'a str> {
    set.metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

pub fn number(set: &ReplicaSet, name: &str) -> Option<i32> {
    annotation(set, name)?.parse().ok()
}

pub fn revision(set: &ReplicaSet) -> i64 {
    annotation(set, REVISION).and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// How far `set` moves when the whole is scaled by `to_add`, of which `added` is spent.
pub fn proportion(set: &ReplicaSet, deployment: &Deployment, to_add: i32, added: i32) -> i32 {
    if replicas(set) == 0 || to_add == 0 || to_add == added {
        return 0;
    }
    let share = fraction(set, deployment);
    let allowed = to_add - added;
    if to_add > 0 { share.min(allowed) } else { share.max(allowed) }
}

fn fraction(set: &ReplicaSet, deployment: &Deployment) -> i32 {
    if wanted(deployment) == 0 {
        return -replicas(set);
    }
    let target = wanted(deployment) + max_surge(deployment);
    let status = deployment.status.as_ref().and_then(|status| status.replicas).unwrap_or(0);
    let before = number(set, MAX_REPLICAS).filter(|before| *before > 0).unwrap_or(status);
    if before == 0 {
        return 0;
    }
    let size = f64::from(replicas(set)) * f64::from(target) / f64::from(before);
    size.round() as i32 - replicas(set)
}

/// Oldest first; names decide between equals.
pub fn by_age(a: &ReplicaSet, b: &ReplicaSet) -> Ordering {
    let created = |set: &ReplicaSet| set.metadata.creation_timestamp.as_ref().map(|time| time.0);
    created(a).cmp(&created(b)).then_with(|| a.metadata.name.cmp(&b.metadata.name))
}

pub fn by_size_newer(a: &ReplicaSet, b: &ReplicaSet) -> Ordering {
    replicas(b).cmp(&replicas(a)).then_with(|| by_age(b, a))
}

pub fn by_size_older(a: &ReplicaSet, b: &ReplicaSet) -> Ordering {
    replicas(b).cmp(&replicas(a)).then_with(|| by_age(a, b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_round_in_favour_of_the_rollout() {
        let check = |text: &str, total: i32, up: bool, expected: i32| {
            let value = IntOrString::String(text.into());
            assert_eq!(scaled(Some(&value), total, up), expected, "{text} of {total}");
        };
        check("25%", 10, true, 3);
        check("25%", 10, false, 2);
        check("100%", 7, false, 7);
        check("0%", 7, true, 0);
        assert_eq!(scaled(None, 4, true), 1);
    }
}
