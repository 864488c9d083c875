//! PodDisruptionBudgets: how many of the selected pods may be evicted now.
//!
//! In: budgets, pods, the scales of their controllers. Out: budgets' `status`; a `DisruptionTarget`
//! condition that nothing came of is set to False after two minutes.
//! Upstream: `pkg/controller/disruption`. The eviction subresource reads the status that is counted here.
//!
//! Cost: a change of a pod goes through the pods of the budgets that select it, by small facts, and decodes
//! the budgets and the controllers of these pods.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use client::{
    Api, Entry, ErrorExt, EventType, Gvr, Lister, Members, ObjectKey, Outcome, Patch, PatchParams,
    PostParams, RawEvent, Result, View, WorkQueue,
};
use jiff::Timestamp;
use k8s_openapi::Resource;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::autoscaling::v1::Scale;
use k8s_openapi::api::core::v1::{Pod, ReplicationController};
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetStatus};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use machinery::selector::Selector;
use machinery::{Condition, OwnerReference, Time};
use serde_json::json;

use crate::context::Context;
use crate::deployment::scaled;
use crate::descriptor::{Descriptor, Row, Setup, further, on_metadata, or_gone, own, selected_by};
use crate::owner;
use crate::pod::{self, Facts};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "disruption-controller",
    account: "disruption-controller",
    component: "controllermanager",
    queue: "disruption",
    workers: 1,
    new: Controller::new,
    watches: &[
        &own::<PodDisruptionBudget>(),
        &selected_by::<Pod, _>(|this: &Controller| this.members.selectors()),
        &on_metadata::<Pod, _, _>(Controller::pod_event),
        &further(
            |this: &Controller| &this.stale,
            1,
            |this, key| Box::pin(async move { this.reset_target(&key).await }),
        ),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

/// An eviction that no deletion followed is over after this.
const DELETION_TIMEOUT: Duration = Duration::from_secs(120);
const ALLOWED: &str = "DisruptionAllowed";

struct Controller {
    context: Context,
    budgets: Lister<PodDisruptionBudget>,
    /// The pods that budgets select.
    members: Members<Pod>,
    pods: Lister<Pod>,
    facts: View<Facts>,
    deployments: Lister<Deployment>,
    replica_sets: Lister<ReplicaSet>,
    stateful_sets: Lister<StatefulSet>,
    controllers: Lister<ReplicationController>,
    /// Pods with a `DisruptionTarget` condition.
    stale: WorkQueue<ObjectKey>,
}

fn selector(budget: &PodDisruptionBudget) -> Selector {
    let selector = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    Selector::from_api(selector).unwrap_or(Selector::nothing())
}

impl Controller {
    fn new(setup: &Setup<ObjectKey>) -> Option<Self> {
        let (budgets, pods) = (setup.informer(), setup.informer());
        Some(Self {
            context: setup.context.clone(),
            facts: pods.view(),
            members: Members::of(&budgets, selector, &pods),
            budgets: budgets.lister(),
            pods: pods.lister(),
            deployments: setup.lister(),
            replica_sets: setup.lister(),
            stateful_sets: setup.lister(),
            controllers: setup.lister(),
            stale: WorkQueue::new("stale_pod_disruption"),
        })
    }

    fn pod_event(&self, _: &WorkQueue<ObjectKey>, event: &RawEvent) {
        let header = &event.entry().header;
        let is_there = matches!(event, RawEvent::Applied { .. });
        if is_there && self.facts.get(&header.key).is_some_and(|facts| facts.disrupted) {
            self.stale.add(header.key.clone());
        }
    }

    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(budget) = self.budgets.get_key(key) else {
            return Ok(Outcome::Done);
        };
        let selector = selector(&budget);
        let entries = self.members.get(key);
        let facts = entries.iter().filter_map(|entry| self.facts.get(&entry.header.key));
        let pods: Vec<Arc<Facts>> = facts.collect();
        let events = &self.context.events;
        if pods.is_empty() {
            events.event(&*budget, EventType::Normal, "NoPods", "No matching pods found");
        }
        let now = base::clock::now();
        let scale = if needs_scale(&budget) { self.scale(key, &entries).await } else { Ok(None) };
        let (status, recheck) = match scale {
            Ok(scale) => {
                if scale.as_ref().is_some_and(|scale| scale.unmanaged) {
                    let message = format!(
                        "Pods selected by this PodDisruptionBudget (selector: {selector}) were found to be unmanaged. As a result, the status of the PDB cannot be calculated correctly, which may result in undefined behavior. To account for these pods please set \".spec.minAvailable\" field of the PDB to an integer value."
                    );
                    events.event(&*budget, EventType::Warning, "UnmanagedPods", message);
                }
                plan(&budget, &pods, scale.map(|scale| scale.total), now)
            }
            Err(why) => {
                let message = format!("Failed to calculate the number of expected pods: {why}");
                let reason = "CalculateExpectedPodCountFailed";
                events.event(&*budget, EventType::Warning, reason, message);
                (failed(&budget, &why, now), None)
            }
        };
        if budget.status.as_ref() != Some(&status) {
            let mut updated = (*budget).clone();
            updated.status = Some(status);
            let api: Api<PodDisruptionBudget> = self.context.client.api(Some(&key.namespace));
            match api.replace_status(&key.name, &PostParams::default(), &updated).await {
                Err(error) if error.is_not_found() => return Ok(Outcome::Done),
                done => drop(done?),
            }
        }
        Ok(recheck.map_or(Outcome::Done, Outcome::After))
    }

    /// The replicas that the pods' controllers want, together.
    async fn scale(
        &self,
        key: &ObjectKey,
        pods: &[Arc<Entry>],
    ) -> std::result::Result<Option<Total>, String> {
        let mut by_uid: BTreeMap<String, i32> = BTreeMap::new();
        let mut unmanaged = false;
        let mut seen = BTreeSet::new();
        for one in pods {
            let Some(owner) = one.header.controller() else {
                unmanaged = true;
                continue;
            };
            if !seen.insert(owner.uid.clone()) {
                continue;
            }
            match self.scale_of(&key.namespace, owner).await? {
                Some((uid, replicas)) => {
                    by_uid.insert(uid, replicas);
                }
                None => {
                    let name = &one.header.key.name;
                    return Err(format!("found no controllers for pod {name:?}"));
                }
            }
        }
        Ok(Some(Total { total: by_uid.values().sum(), unmanaged }))
    }

    async fn scale_of(
        &self,
        namespace: &str,
        owner: &OwnerReference,
    ) -> std::result::Result<Option<(String, i32)>, String> {
        let ours = |uid: &Option<String>| uid.as_ref() == Some(&owner.uid);
        let group = owner.api_version.split_once('/').map_or("", |(group, _)| group);
        let one =
            |uid: &str, replicas: Option<i32>| Ok(Some((uid.to_owned(), replicas.unwrap_or(1))));
        match (owner.kind.as_str(), group) {
            (ReplicaSet::KIND, "apps" | "extensions") => {
                let Some(set) = self.replica_sets.get(namespace, &owner.name) else {
                    return Ok(None);
                };
                if !ours(&set.metadata.uid) {
                    return Ok(None);
                }
                let parent = owner::controller(&set.metadata);
                let parent = parent.filter(|parent| parent.kind == Deployment::KIND);
                let Some(parent) = parent else {
                    let replicas = set.spec.as_ref().and_then(|spec| spec.replicas);
                    return one(&owner.uid, replicas);
                };
                let known = self.deployments.get(namespace, &parent.name);
                let known = known.filter(|one| one.metadata.uid.as_ref() == Some(&parent.uid));
                known.map_or(Ok(None), |found| {
                    one(&parent.uid, found.spec.as_ref().and_then(|spec| spec.replicas))
                })
            }
            (StatefulSet::KIND, "apps") => {
                let known = self.stateful_sets.get(namespace, &owner.name);
                known.filter(|set| ours(&set.metadata.uid)).map_or(Ok(None), |set| {
                    one(&owner.uid, set.spec.as_ref().and_then(|spec| spec.replicas))
                })
            }
            (ReplicationController::KIND, "") => {
                let known = self.controllers.get(namespace, &owner.name);
                known.filter(|one| ours(&one.metadata.uid)).map_or(Ok(None), |found| {
                    one(&owner.uid, found.spec.as_ref().and_then(|spec| spec.replicas))
                })
            }
            _ => self.scale_subresource(namespace, owner).await,
        }
    }

    /// Other kinds: by their scale subresource.
    async fn scale_subresource(
        &self,
        namespace: &str,
        owner: &OwnerReference,
    ) -> std::result::Result<Option<(String, i32)>, String> {
        let client = &self.context.client;
        let (group, version) = owner.api_version.split_once('/').unwrap_or(("", "v1"));
        let (all, _) = client::discovery::preferred(client).await.map_err(|error| error.text())?;
        let known = all.iter().find(|one| one.kind == owner.kind && one.gvr.group == group);
        let Some(known) = known else { return Ok(None) };
        let gvr = Gvr::new(group, version, &known.gvr.resource);
        let path = format!("{}/scale", gvr.object(Some(namespace), &owner.name));
        match client.get::<Scale>(&path).await {
            Ok(scale) if scale.metadata.uid.as_ref() == Some(&owner.uid) => {
                let replicas = scale.spec.and_then(|spec| spec.replicas).unwrap_or(0);
                Ok(Some((owner.uid.clone(), replicas)))
            }
            Ok(_) => Ok(None),
            Err(error) if error.is_not_found() => {
                if client
                    .get_raw(&gvr.object(Some(namespace), &owner.name), "application/json")
                    .await
                    .is_ok()
                {
                    let group = if group.is_empty() { String::new() } else { format!(".{group}") };
                    return Err(format!(
                        "{}{group} does not implement the scale subresource",
                        gvr.resource
                    ));
                }
                Ok(None)
            }
            Err(error) => Err(error.text()),
        }
    }

    async fn reset_target(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(one) = self.pods.get_key(key) else {
            return Ok(Outcome::Done);
        };
        let Some(left) = stale_target(&one, base::clock::now()) else {
            return Ok(Outcome::Done);
        };
        if !left.is_zero() {
            return Ok(Outcome::After(left));
        }
        let patch = json!({"metadata": {"uid": one.metadata.uid}, "status": {"conditions": [{
            "type": pod::DISRUPTION, "status": "False", "reason": null, "message": null,
            "observedGeneration": one.metadata.generation,
            "lastTransitionTime": Time(base::clock::now_seconds()),
        }]}});
        let api: Api<Pod> = self.context.client.api(Some(&key.namespace));
        let params = PatchParams::default();
        or_gone(api.patch_status(&key.name, &params, &Patch::Strategic(&patch)).await)
    }
}

/// How long a `DisruptionTarget` condition without a deletion may stay. Pure.
fn stale_target(one: &Pod, now: Timestamp) -> Option<Duration> {
    if pod::is_deleting(one) || pod::is_finished(one) {
        return None;
    }
    let condition = pod::condition(one, pod::DISRUPTION).filter(|found| found.status == "True")?;
    if condition.reason.as_deref() == Some("TerminationByKubelet") {
        return None;
    }
    let since = condition.last_transition_time.as_ref()?.0;
    let passed = Duration::try_from(now.duration_since(since)).unwrap_or_default();
    Some(DELETION_TIMEOUT.saturating_sub(passed))
}

struct Total {
    total: i32,
    unmanaged: bool,
}

fn needs_scale(budget: &PodDisruptionBudget) -> bool {
    budget.spec.as_ref().is_some_and(|spec| {
        spec.max_unavailable.is_some() || matches!(spec.min_available, Some(IntOrString::String(_)))
    })
}

/// The status that these pods make, and when to look again. Pure.
fn plan(
    budget: &PodDisruptionBudget,
    pods: &[Arc<Facts>],
    scale: Option<i32>,
    now: Timestamp,
) -> (PodDisruptionBudgetStatus, Option<Duration>) {
    let spec = budget.spec.clone().unwrap_or_default();
    let expected = scale.unwrap_or(pods.len() as i32);
    let (expected, desired) = match (&spec.max_unavailable, &spec.min_available) {
        (Some(most), _) => (expected, (expected - scaled(Some(most), expected, true)).max(0)),
        (None, Some(least)) => (expected, scaled(Some(least), expected, true)),
        (None, None) => (0, 0),
    };
    let old = budget.status.clone().unwrap_or_default();
    let mut disrupted = BTreeMap::new();
    let mut recheck: Option<Duration> = None;
    let mut healthy = 0;
    for one in pods.iter().filter(|one| !one.deleting) {
        let name = &*one.key.name;
        let since = old.disrupted_pods.as_ref().and_then(|all| all.get(name));
        let left = since.map(|since| {
            let passed = Duration::try_from(now.duration_since(since.0)).unwrap_or_default();
            DELETION_TIMEOUT.saturating_sub(passed)
        });
        match (since, left) {
            (Some(since), Some(left)) if !left.is_zero() => {
                disrupted.insert(name.to_owned(), since.clone());
                recheck = Some(recheck.map_or(left, |known| known.min(left)));
            }
            _ => healthy += i32::from(one.is_ready()),
        }
    }
    let allowed = if expected <= 0 { 0 } else { (healthy - desired).max(0) };
    let generation = budget.metadata.generation;
    let (value, reason) =
        if allowed > 0 { ("True", "SufficientPods") } else { ("False", "InsufficientPods") };
    let status = PodDisruptionBudgetStatus {
        current_healthy: Some(healthy),
        desired_healthy: Some(desired),
        expected_pods: Some(expected),
        disruptions_allowed: Some(allowed),
        disrupted_pods: (!disrupted.is_empty()).then_some(disrupted),
        observed_generation: generation,
        conditions: Some(with_condition(old.conditions, value, reason, "", generation, now)),
    };
    (status, recheck)
}

/// No pod may be evicted while the counts are unknown. Pure.
fn failed(budget: &PodDisruptionBudget, why: &str, now: Timestamp) -> PodDisruptionBudgetStatus {
    let mut status = budget.status.clone().unwrap_or_default();
    status.disruptions_allowed = Some(0);
    let seen = status.observed_generation;
    let conditions = status.conditions.take();
    status.conditions = Some(with_condition(conditions, "False", "SyncFailed", why, seen, now));
    status
}

fn with_condition(
    conditions: Option<Vec<Condition>>,
    value: &str,
    reason: &str,
    message: &str,
    generation: Option<i64>,
    now: Timestamp,
) -> Vec<Condition> {
    let mut all = conditions.unwrap_or_default();
    let at = all.iter().position(|one| one.type_ == ALLOWED);
    let since = at.filter(|at| all[*at].status == value);
    let since = since.map(|at| all[at].last_transition_time.clone());
    let condition = Condition {
        type_: ALLOWED.into(),
        status: value.into(),
        reason: reason.into(),
        message: message.into(),
        observed_generation: generation,
        last_transition_time: since.unwrap_or_else(|| Time(crate::replicaset::seconds(now))),
    };
    match at {
        Some(at) => all[at] = condition,
        None => all.push(condition),
    }
    all
}

#[cfg(test)]
mod tests {
    use client::Projection;
    use k8s_openapi::serde_json::{Value, from_value};

    use super::*;

    fn pods(count: usize, ready: usize) -> Vec<Arc<Facts>> {
        let one = |at: usize| {
            let status = if at < ready { "True" } else { "False" };
            let pod: Pod = from_value(json!({"metadata": {"name": format!("p{at}")}, "status": {
                "phase": "Running", "conditions": [{"type": "Ready", "status": status}]}}))
            .unwrap();
            Arc::new(Facts::of(&pod))
        };
        (0..count).map(one).collect()
    }

    fn budget(spec: Value, status: Value) -> PodDisruptionBudget {
        from_value(json!({"metadata": {"generation": 2}, "spec": spec, "status": status})).unwrap()
    }

    fn now() -> Timestamp {
        "2026-01-01T00:01:00Z".parse().unwrap()
    }

    #[test]
    fn disruptions_are_counted() {
        let check = |spec: Value, count, ready, scale, expected: (i32, i32, i32)| {
            let status = json!({"currentHealthy": 0, "desiredHealthy": 0, "disruptionsAllowed": 0,
                "expectedPods": 0});
            let budget = budget(spec.clone(), status);
            let (status, _) = plan(&budget, &pods(count, ready), scale, now());
            let found = (status.expected_pods, status.desired_healthy, status.disruptions_allowed);
            let (pods, desired, allowed) = expected;
            assert_eq!(found, (Some(pods), Some(desired), Some(allowed)), "{spec}");
        };
        check(json!({"minAvailable": 2}), 3, 3, None, (3, 2, 1));
        check(json!({"minAvailable": 2}), 3, 2, None, (3, 2, 0));
        check(json!({"minAvailable": "50%"}), 3, 3, Some(5), (5, 3, 0));
        check(json!({"maxUnavailable": 1}), 3, 3, Some(3), (3, 2, 1));
        check(json!({"maxUnavailable": "30%"}), 10, 10, Some(10), (10, 7, 3));
        check(json!({"maxUnavailable": 5}), 3, 0, Some(3), (3, 0, 0));
        check(json!({"minAvailable": 0}), 0, 0, None, (0, 0, 0));
    }

    #[test]
    fn an_evicted_pod_does_not_count_until_it_goes() {
        let status = json!({"currentHealthy": 0, "desiredHealthy": 0, "disruptionsAllowed": 0,
            "expectedPods": 0, "disruptedPods": {"p0": "2026-01-01T00:00:00Z",
                "p1": "2025-12-31T23:00:00Z", "gone": "2026-01-01T00:00:00Z"}});
        let budget = budget(json!({"minAvailable": 1}), status);
        let (status, recheck) = plan(&budget, &pods(3, 3), None, now());
        assert_eq!((status.current_healthy, status.disruptions_allowed), (Some(2), Some(1)));
        assert_eq!(status.disrupted_pods.unwrap().keys().collect::<Vec<_>>(), ["p0"]);
        assert_eq!(recheck, Some(Duration::from_secs(60)));
    }

    #[test]
    fn a_condition_changes_its_time_with_its_status_only() {
        let old = vec![Condition {
            type_: ALLOWED.into(),
            status: "True".into(),
            reason: "SufficientPods".into(),
            message: String::new(),
            observed_generation: Some(1),
            last_transition_time: Time("2025-01-01T00:00:00Z".parse().unwrap()),
        }];
        let same = with_condition(Some(old.clone()), "True", "SufficientPods", "", Some(2), now());
        assert_eq!(same[0].last_transition_time, old[0].last_transition_time);
        let other = with_condition(Some(old), "False", "InsufficientPods", "", Some(2), now());
        assert_eq!(other[0].last_transition_time.0, now());
    }
}
