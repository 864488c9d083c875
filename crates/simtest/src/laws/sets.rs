//! Laws of ReplicaSets, Deployments, StatefulSets and DaemonSets.

use std::time::Duration;

use serde_json::Value;

use super::{
    Law, Recent, View, WINDOW, controller, goes, is_active, is_created, is_deleted, is_finished,
    is_owned_by, is_ready, number, share, text, uid,
};
use crate::history::{Event, Key};

pub fn laws() -> Vec<Box<dyn Law>> {
    vec![
        Box::<Replicas>::default(),
        Box::<Surge>::default(),
        Box::<Available>::default(),
        Box::<Ordinals>::default(),
        Box::<OnePerNode>::default(),
    ]
}

/// Creations of pods whose creator does not know that they took place.
fn lost_pods(view: &View<'_>) -> u64 {
    view.lost(|request| request.starts_with("POST") && request.ends_with("/pods"))
}

fn count(view: &View<'_>, namespace: &str, matches: impl Fn(&Value) -> bool) -> u64 {
    view.state.within("pods", namespace).filter(|(_, pod)| matches(pod)).count() as u64
}

#[derive(Default)]
struct Replicas(Recent);

impl Law for Replicas {
    fn name(&self) -> &'static str {
        "a ReplicaSet creates no more pods than it wants"
    }

    fn see(&mut self, view: &View<'_>, event: &Event) -> Result<(), String> {
        let Some(now) = event.after.as_deref() else { return Ok(()) };
        if event.key.resource == "replicasets" {
            self.0.set(uid(now), view.now, number(now, "/spec/replicas"));
        }
        let owner = controller(now).filter(|(kind, _)| *kind == "ReplicaSet");
        let Some((_, owner)) = owner.filter(|_| is_created(event, "pods")) else { return Ok(()) };
        let there =
            count(view, &event.key.namespace, |pod| is_owned_by(pod, owner) && is_active(pod));
        let most = self.0.most(owner, view).unwrap_or_default() + lost_pods(view);
        match there > most {
            true => Err(format!("{}: {there} active pods, wanted are at most {most}", event.key)),
            false => Ok(()),
        }
    }
}

/// Replicas and what a rolling update may add.
#[derive(Default)]
struct Surge(Recent);

impl Law for Surge {
    fn name(&self) -> &'static str {
        "a Deployment never has its ReplicaSets want more than maxSurge above its replicas"
    }

    fn see(&mut self, view: &View<'_>, event: &Event) -> Result<(), String> {
        let Some(now) = event.after.as_deref() else { return Ok(()) };
        match event.key.resource.as_str() {
            "deployments" => {
                let replicas = number(now, "/spec/replicas");
                let surge = &now["spec"]["strategy"]["rollingUpdate"]["maxSurge"];
                let most = replicas + share(surge, replicas, true).max(1);
                self.0.set(uid(now), view.now, most);
                Ok(())
            }
            "replicasets" => {
                let wanted = number(now, "/spec/replicas");
                let grew = event
                    .before
                    .as_deref()
                    .is_none_or(|was| number(was, "/spec/replicas") < wanted);
                let is_own = event.actor.account == "deployment-controller";
                let Some((_, owner)) = controller(now).filter(|_| grew && is_own) else {
                    return Ok(());
                };
                let own = view.state.within("replicasets", &event.key.namespace);
                let own = own.filter(|(_, set)| is_owned_by(set, owner));
                let total: u64 = own.map(|(_, set)| number(set, "/spec/replicas")).sum();
                let most = self.0.most(owner, view).unwrap_or_default();
                match total > most {
                    true => Err(format!("{}: {total} wanted, {most} allowed", event.key)),
                    false => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }
}

/// What must be available, and when something else took pods away.
#[derive(Default)]
struct Available {
    least: Recent,
    disturbed: std::collections::BTreeMap<String, Duration>,
}

impl Available {
    fn deployment_of(
        view: &View<'_>,
        pod: &Value,
        namespace: &str,
    ) -> Option<(String, Vec<String>)> {
        let (_, set) = controller(pod).filter(|(kind, _)| *kind == "ReplicaSet")?;
        let sets = || view.state.within("replicasets", namespace);
        let (_, found) = sets().find(|(_, one)| uid(one) == set)?;
        let (_, owner) = controller(found)?;
        let all = sets().filter(|(_, one)| is_owned_by(one, owner));
        Some((owner.to_owned(), all.map(|(_, one)| uid(one).to_owned()).collect()))
    }
}

impl Law for Available {
    fn name(&self) -> &'static str {
        "a rolling update leaves no fewer pods ready than maxUnavailable allows"
    }

    fn see(&mut self, view: &View<'_>, event: &Event) -> Result<(), String> {
        if let Some(now) = event.after.as_deref().filter(|_| event.key.resource == "deployments") {
            let replicas = number(now, "/spec/replicas");
            let rolling = &now["spec"]["strategy"]["rollingUpdate"];
            let surge = share(&rolling["maxSurge"], replicas, true);
            let mut unavailable = share(&rolling["maxUnavailable"], replicas, false);
            if surge == 0 && unavailable == 0 {
                unavailable = 1;
            }
            let rolls = rolling.is_object();
            let least = if rolls { replicas.saturating_sub(unavailable) } else { 0 };
            self.least.set(uid(now), view.now, least);
        }
        if event.key.resource != "pods" {
            return Ok(());
        }
        let Some(was) = event.before.as_deref().filter(|pod| is_ready(pod)) else { return Ok(()) };
        if event.after.as_deref().is_some_and(is_ready) {
            return Ok(());
        }
        let namespace = &event.key.namespace;
        let Some((owner, sets)) = Self::deployment_of(view, was, namespace) else { return Ok(()) };
        if event.actor.account != "replicaset-controller" || !goes(event) {
            self.disturbed.insert(owner, view.now);
            return Ok(());
        }
        let is_disturbed = self.disturbed.get(&owner).is_some_and(|at| *at + WINDOW >= view.now);
        if is_disturbed {
            return Ok(());
        }
        let is_own =
            |pod: &Value| controller(pod).is_some_and(|(_, uid)| sets.iter().any(|one| one == uid));
        let left = count(view, namespace, |pod| is_own(pod) && is_ready(pod));
        let least = self.least.least(&owner, view).unwrap_or_default();
        match left < least {
            true => Err(format!("{}: {left} ready pods are left, {least} are needed", event.key)),
            false => Ok(()),
        }
    }
}

/// Wanted replicas; when pods were ready.
#[derive(Default)]
struct Ordinals {
    wanted: Recent,
    revisions: Recent,
    ready: std::collections::BTreeMap<Key, (String, Duration)>,
}

fn ordinal(name: &str) -> Option<u64> {
    name.rsplit_once('-')?.1.parse().ok()
}

impl Ordinals {
    /// Whether the pod before it is there, and was ready of late.
    fn follows(&self, view: &View<'_>, event: &Event, owner: &str, at: u64) -> Result<(), String> {
        let (stem, _) = event.key.name.rsplit_once('-').unwrap_or_default();
        for before in 0..at {
            let key = Key { name: format!("{stem}-{before}"), ..event.key.clone() };
            let was_ready = self.ready.get(&key).filter(|(of, _)| of == owner);
            if was_ready.is_none_or(|(_, ready)| *ready + WINDOW < view.now) {
                return Err(format!("{} was created, {key} was not ready", event.key));
            }
        }
        Ok(())
    }
}

impl Law for Ordinals {
    fn name(&self) -> &'static str {
        "a StatefulSet's pods come and go in the order of their ordinals, and none is beyond its replicas"
    }

    fn see(&mut self, view: &View<'_>, event: &Event) -> Result<(), String> {
        let shown = event.after.as_deref().or(event.before.as_deref());
        let Some(shown) = shown else { return Ok(()) };
        if event.key.resource == "statefulsets" {
            self.wanted.set(uid(shown), view.now, number(shown, "/spec/replicas"));
            self.revisions.set(uid(shown), view.now, number(shown, "/metadata/generation"));
            return Ok(());
        }
        let owner = controller(shown).filter(|(kind, _)| *kind == "StatefulSet");
        let Some((_, owner)) = owner.filter(|_| event.key.resource == "pods") else {
            return Ok(());
        };
        if event.after.as_deref().or(event.before.as_deref()).is_some_and(is_ready) {
            self.ready.insert(event.key.clone(), (owner.to_owned(), view.now));
        }
        let sets = view.state.within("statefulsets", &event.key.namespace);
        let set = sets.map(|(_, set)| set).find(|set| uid(set) == owner);
        let (Some(at), Some(set)) = (ordinal(&event.key.name), set) else { return Ok(()) };
        let is_ordered = text(set, "/spec/podManagementPolicy") != "Parallel";
        if event.before.is_none() {
            let most = self.wanted.most(owner, view).unwrap_or_default();
            if at >= most {
                return Err(format!("{} is beyond {most} replicas", event.key));
            }
            return if is_ordered { self.follows(view, event, owner, at) } else { Ok(()) };
        }
        let by_set = event.actor.account == "statefulset-controller" && goes(event);
        let is_settled = !self.revisions.changed(owner, view) && !is_deleted(set);
        if by_set && is_ordered && is_settled && at >= number(set, "/spec/replicas") {
            let mut pods = view.state.within("pods", &event.key.namespace);
            let beyond = |key: &Key| ordinal(&key.name).is_some_and(|other| other > at);
            if let Some((key, _)) =
                pods.find(|(key, pod)| is_owned_by(pod, owner) && beyond(key) && is_active(pod))
            {
                return Err(format!("{} goes before {key}", event.key));
            }
        }
        Ok(())
    }
}

/// The most that a DaemonSet may have on a node.
#[derive(Default)]
struct OnePerNode(Recent);

/// The node that a daemon's pod is for, bound or not.
fn node_of(pod: &Value) -> &str {
    let bound = text(pod, "/spec/nodeName");
    if !bound.is_empty() {
        return bound;
    }
    let terms = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms";
    text(pod, &format!("{terms}/0/matchFields/0/values/0"))
}

impl Law for OnePerNode {
    fn name(&self) -> &'static str {
        "a DaemonSet has one pod on a node, and its surge"
    }

    fn see(&mut self, view: &View<'_>, event: &Event) -> Result<(), String> {
        let Some(now) = event.after.as_deref() else { return Ok(()) };
        if event.key.resource == "daemonsets" {
            let surge = share(&now["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"], 1, true);
            self.0.set(uid(now), view.now, 1 + surge.min(1));
        }
        let owner = controller(now).filter(|(kind, _)| *kind == "DaemonSet");
        let Some((_, owner)) = owner.filter(|_| is_created(event, "pods")) else { return Ok(()) };
        let node = node_of(now);
        let here = |pod: &Value| is_owned_by(pod, owner) && node_of(pod) == node;
        let there = count(view, &event.key.namespace, |pod| {
            here(pod) && !is_finished(pod) && !is_deleted(pod)
        });
        let most = self.0.most(owner, view).unwrap_or(1) + lost_pods(view);
        match there > most {
            true => Err(format!("{}: {there} on {node}, {most} allowed", event.key)),
            false => Ok(()),
        }
    }
}
