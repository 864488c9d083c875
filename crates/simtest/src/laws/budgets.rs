//! Laws of PodDisruptionBudgets and ResourceQuotas.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use super::{
    Law, View, WINDOW, controller, goes, is_created, is_finished, is_ready, number, selects, share,
    text, uid,
};
use crate::history::{Event, Key};

pub fn laws() -> Vec<Box<dyn Law>> {
    vec![Box::<Evictions>::default(), Box::<Quota>::default()]
}

/// When pods of an app ceased to be ready by something else than an eviction.
#[derive(Default)]
struct Evictions(BTreeMap<String, Duration>);

/// How many ready pods a budget wants.
fn desired(view: &View<'_>, budget: &Value, namespace: &str) -> Option<u64> {
    let expected = expected(view, budget, namespace)?;
    let spec = &budget["spec"];
    Some(match (&spec["minAvailable"], &spec["maxUnavailable"]) {
        (Value::Null, most) => expected.saturating_sub(share(most, expected, true)),
        (least, _) => share(least, expected, true),
    })
}

/// The replicas of the controllers of the budget's pods. `None` where a pod has another kind of owner.
fn expected(view: &View<'_>, budget: &Value, namespace: &str) -> Option<u64> {
    let pods = view.state.within("pods", namespace);
    let mut owners = BTreeMap::new();
    for (_, pod) in pods.filter(|(_, pod)| selects(&budget["spec"]["selector"], pod)) {
        let (kind, owner) = controller(pod)?;
        let place = if kind == "ReplicaSet" { "replicasets" } else { "statefulsets" };
        let (_, set) = view.state.within(place, namespace).find(|(_, set)| uid(set) == owner)?;
        match controller(set) {
            Some((_, above)) => {
                let mut all = view.state.within("deployments", namespace);
                let (_, above) = all.find(|(_, one)| uid(one) == above)?;
                owners.insert(uid(above).to_owned(), number(above, "/spec/replicas"));
            }
            None => {
                owners.insert(owner.to_owned(), number(set, "/spec/replicas"));
            }
        }
    }
    Some(owners.values().sum())
}

impl Law for Evictions {
    fn name(&self) -> &'static str {
        "an eviction leaves as many ready pods as the budget wants"
    }

    fn see(&mut self, view: &View<'_>, event: &Event) -> Result<(), String> {
        let namespace = &event.key.namespace;
        if matches!(
            event.key.resource.as_str(),
            "deployments" | "statefulsets" | "poddisruptionbudgets"
        ) {
            // What is wanted changes: the budget's status follows later.
            let is_change = event.before.as_deref().zip(event.after.as_deref());
            if is_change.is_none_or(|(was, now)| was["spec"] != now["spec"]) {
                let selector = event.after.as_deref().or(event.before.as_deref());
                let app =
                    selector.map(|one| text(one, "/spec/selector/matchLabels/app").to_owned());
                self.0.insert(app.unwrap_or_default(), view.now);
            }
            return Ok(());
        }
        let Some(was) = event.before.as_deref().filter(|_| event.key.resource == "pods") else {
            return Ok(());
        };
        let ceases = is_ready(was) && !event.after.as_deref().is_some_and(is_ready);
        let app = text(was, "/metadata/labels/app").to_owned();
        let is_eviction = event.actor.request.ends_with("/eviction");
        if !is_eviction || !goes(event) {
            if ceases {
                self.0.insert(app, view.now);
            }
            return Ok(());
        }
        if !ceases || self.0.get(&app).is_some_and(|at| *at + WINDOW >= view.now) {
            return Ok(());
        }
        for (key, budget) in view.state.within("poddisruptionbudgets", namespace) {
            let selector = &budget["spec"]["selector"];
            if !selects(selector, was) {
                continue;
            }
            let pods = view.state.within("pods", namespace);
            let left =
                pods.filter(|(_, pod)| selects(selector, pod) && is_ready(pod)).count() as u64;
            if let Some(wanted) = desired(view, budget, namespace).filter(|wanted| left < *wanted) {
                return Err(format!(
                    "{} was evicted: {left} ready pods are left, {key} wants {wanted}",
                    event.key
                ));
            }
        }
        Ok(())
    }
}

/// The limit of each quota, and since when the law holds for it. As upstream's, the controller that gives back
/// counts in its cache: what was charged since then is missing in its sum.
#[derive(Default)]
struct Quota(BTreeMap<Key, (u64, Duration)>);

impl Law for Quota {
    fn name(&self) -> &'static str {
        "a quota is never exceeded"
    }

    fn see(&mut self, view: &View<'_>, event: &Event) -> Result<(), String> {
        if event.key.resource == "resourcequotas" {
            match event.after.as_deref() {
                Some(now) => {
                    let of = |object: &Value, field: &str| text(object, field).parse().ok();
                    let hard: u64 = of(now, "/status/hard/pods").unwrap_or(u64::MAX);
                    let used = |object: &Value| of(object, "/status/used/pods").unwrap_or(0_u64);
                    let is_lowered =
                        event.before.as_deref().is_some_and(|was| used(now) < used(was));
                    let known = self.0.get(&event.key).copied();
                    // A lower limit may be below what is there.
                    let since = match known {
                        Some((known, since)) if known == hard && !is_lowered => since,
                        _ if is_lowered => view.now + WINDOW,
                        _ => view.now + Duration::from_secs(5),
                    };
                    self.0.insert(event.key.clone(), (hard, since));
                }
                None => drop(self.0.remove(&event.key)),
            }
            return Ok(());
        }
        if !is_created(event, "pods") {
            return Ok(());
        }
        for (key, (hard, since)) in
            self.0.iter().filter(|(key, _)| key.namespace == event.key.namespace)
        {
            let pods = view.state.within("pods", &key.namespace);
            let used = pods.filter(|(_, pod)| !is_finished(pod)).count() as u64;
            if used > *hard && *since < view.now {
                return Err(format!("{}: {used} pods, {key} allows {hard}", event.key));
            }
        }
        Ok(())
    }
}
