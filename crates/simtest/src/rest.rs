//! What the state has to be at rest: a naive model.
//!
//! In: the objects, the time. Out: how they differ from what their own specifications ask for, once nothing is
//! wrong any more; nothing if they do not. Cost: all objects, some of them for each other; it runs some tens of
//! times a round.

use std::collections::BTreeSet;

use jiff::Timestamp;
use serde_json::Value;

use crate::history::{Key, State};
use crate::laws::{
    controller, is_active, is_deleted, is_finished, is_owned_by, is_ready, is_true, number,
    selects, text, uid,
};

/// Whether a node is ready and takes pods.
pub fn is_usable(node: &Value) -> bool {
    let taints = node["spec"]["taints"].as_array().map_or(0, Vec::len);
    let has_range = !text(node, "/spec/podCIDR").is_empty();
    is_true(node, "Ready") && taints == 0 && has_range && node["spec"]["unschedulable"] != true
}

/// Namespaces whose quota for pods is used up: workloads there may stay incomplete.
pub fn full_namespaces(state: &State) -> BTreeSet<String> {
    let full = |quota: &Value| {
        let of = |field: &str| text(quota, field).parse::<u64>().ok();
        match (of("/status/used/pods"), of("/status/hard/pods")) {
            (Some(used), Some(hard)) => used >= hard,
            _ => false,
        }
    };
    let quotas = state.all("resourcequotas").filter(|(_, quota)| full(quota));
    quotas.map(|(key, _)| key.namespace.clone()).collect()
}

/// One line for each difference, at most some.
pub fn differences(state: &State, now: Timestamp) -> Vec<String> {
    let mut model = Model { state, now, full: full_namespaces(state), out: vec![] };
    model.everything();
    for (key, node) in state.all("minions") {
        model.expect(is_usable(node), key, || "is not usable".into());
    }
    state.all("pods").for_each(|(key, pod)| model.pod(key, pod));
    state.all("replicasets").for_each(|(key, set)| model.replicaset(key, set));
    state.all("deployments").for_each(|(key, one)| model.deployment(key, one));
    state.all("statefulsets").for_each(|(key, set)| model.statefulset(key, set));
    state.all("daemonsets").for_each(|(key, set)| model.daemonset(key, set));
    state.all("jobs").for_each(|(key, job)| model.job(key, job));
    state.all("services/specs").for_each(|(key, service)| model.service(key, service));
    state.all("poddisruptionbudgets").for_each(|(key, budget)| model.budget(key, budget));
    state.all("resourcequotas").for_each(|(key, quota)| model.quota(key, quota));
    model.out.truncate(12);
    model.out
}

struct Model<'a> {
    state: &'a State,
    now: Timestamp,
    full: BTreeSet<String>,
    out: Vec<String>,
}

impl<'a> Model<'a> {
    fn expect(&mut self, is_so: bool, key: &Key, why: impl FnOnce() -> String) {
        if !is_so {
            self.out.push(format!("{key} {}", why()));
        }
    }

    fn is(&mut self, key: &Key, object: &Value, field: &str, wanted: u64) {
        let found = number(object, field);
        self.expect(found == wanted, key, || format!("has {field} {found}, not {wanted}"));
    }

    fn pods_of(
        &self,
        key: &'a Key,
        owner: &'a str,
    ) -> impl Iterator<Item = (&'a Key, &'a Value)> + use<'a> {
        let pods = self.state.within("pods", &key.namespace).map(|(key, pod)| (key, &**pod));
        pods.filter(move |(_, pod)| is_owned_by(pod, owner))
    }

    /// Nothing is going, nothing is left behind.
    fn everything(&mut self) {
        let uids: BTreeSet<&str> = self.state.every().map(|(_, object)| uid(object)).collect();
        for (key, object) in self.state.every() {
            self.expect(!is_deleted(object), key, || "is still being deleted".into());
            let owners = object["metadata"]["ownerReferences"].as_array().into_iter().flatten();
            let mut owners = owners.map(|owner| text(owner, "/uid")).peekable();
            let is_orphan = owners.peek().is_some() && !owners.any(|owner| uids.contains(owner));
            self.expect(!is_orphan, key, || "has owners that are gone".into());
            let is_homeless = !key.namespace.is_empty()
                && !matches!(
                    key.resource.as_str(),
                    "masterleases" | "services/endpoints" | "ranges"
                )
                && self.state.get("namespaces", "", &key.namespace).is_none();
            self.expect(!is_homeless, key, || "is in a namespace that is gone".into());
        }
    }

    fn pod(&mut self, key: &Key, pod: &Value) {
        let phase = text(pod, "/status/phase");
        let is_well = is_finished(pod) || phase == "Running" && is_ready(pod);
        self.expect(is_well, key, || format!("is {phase} and not ready"));
        let node = text(pod, "/spec/nodeName");
        let is_somewhere = node.is_empty() || self.state.get("minions", "", node).is_some();
        self.expect(is_somewhere, key, || format!("is on {node}, which is gone"));
    }

    fn observed(&mut self, key: &Key, object: &Value) {
        self.is(key, object, "/status/observedGeneration", number(object, "/metadata/generation"));
    }

    fn replicaset(&mut self, key: &'a Key, set: &'a Value) {
        self.observed(key, set);
        let pods = self.pods_of(key, uid(set)).filter(|(_, pod)| is_active(pod)).count() as u64;
        let wanted = number(set, "/spec/replicas");
        if !self.full.contains(&key.namespace) {
            self.expect(pods == wanted, key, || format!("has {pods} pods, not {wanted}"));
        }
        for field in ["/status/replicas", "/status/readyReplicas", "/status/availableReplicas"] {
            self.is(key, set, field, pods);
        }
        let strays = self.state.within("pods", &key.namespace).find(|(_, pod)| {
            controller(pod).is_none() && is_active(pod) && selects(&set["spec"]["selector"], pod)
        });
        self.expect(strays.is_none(), key, || {
            format!("did not adopt {:?}", strays.map(|(key, _)| key))
        });
    }

    fn deployment(&mut self, key: &'a Key, one: &'a Value) {
        self.observed(key, one);
        if one["spec"]["paused"] == true || self.full.contains(&key.namespace) {
            return;
        }
        let wanted = number(one, "/spec/replicas");
        let sets = self.state.within("replicasets", &key.namespace);
        let own: Vec<_> = sets.filter(|(_, set)| is_owned_by(set, uid(one))).collect();
        let current: Vec<_> = own
            .iter()
            .filter(|(_, set)| template(set) == template(one))
            .map(|(key, set)| (*key, number(set, "/spec/replicas")))
            .collect();
        let is_one = matches!(current[..], [(_, replicas)] if replicas == wanted);
        self.expect(is_one, key, || {
            format!("wants {wanted}, its newest ReplicaSets are {current:?}")
        });
        let total: u64 = own.iter().map(|(_, set)| number(set, "/spec/replicas")).sum();
        self.expect(total == wanted, key, || {
            format!("has old ReplicaSets that want {total} in all")
        });
        for field in ["replicas", "updatedReplicas", "readyReplicas", "availableReplicas"] {
            self.is(key, one, &format!("/status/{field}"), wanted);
        }
    }

    fn statefulset(&mut self, key: &'a Key, set: &'a Value) {
        self.observed(key, set);
        if self.full.contains(&key.namespace) {
            return;
        }
        let wanted = number(set, "/spec/replicas");
        let names: BTreeSet<String> = (0..wanted).map(|at| format!("{}-{at}", key.name)).collect();
        let pods: Vec<_> = self.pods_of(key, uid(set)).collect();
        let found: BTreeSet<String> = pods.iter().map(|(key, _)| key.name.clone()).collect();
        self.expect(names == found, key, || format!("has {found:?}, not {names:?}"));
        let revision = text(set, "/status/updateRevision");
        for (pod_key, pod) in pods {
            let of = text(pod, "/metadata/labels/controller-revision-hash");
            self.expect(of == revision, pod_key, || format!("is of {of}, not of {revision}"));
        }
        let current = text(set, "/status/currentRevision");
        self.expect(current == revision, key, || format!("is at {current}, not at {revision}"));
        for field in ["replicas", "readyReplicas", "availableReplicas", "currentReplicas"] {
            self.is(key, set, &format!("/status/{field}"), wanted);
        }
    }

    fn daemonset(&mut self, key: &'a Key, set: &'a Value) {
        self.observed(key, set);
        if self.full.contains(&key.namespace) {
            return;
        }
        let nodes: Vec<&str> = self.state.all("minions").map(|(key, _)| &*key.name).collect();
        let pods = self.pods_of(key, uid(set)).filter(|(_, pod)| is_active(pod));
        let mut places: Vec<&str> = pods.map(|(_, pod)| text(pod, "/spec/nodeName")).collect();
        places.sort_unstable();
        self.expect(places == nodes, key, || format!("has pods on {places:?}"));
        let wanted = nodes.len() as u64;
        for field in
            ["desiredNumberScheduled", "currentNumberScheduled", "numberReady", "numberAvailable"]
        {
            self.is(key, set, &format!("/status/{field}"), wanted);
        }
        if text(set, "/spec/updateStrategy/type") == "RollingUpdate" {
            self.is(key, set, "/status/updatedNumberScheduled", wanted);
        }
    }

    fn job(&mut self, key: &'a Key, job: &'a Value) {
        let pods: Vec<_> = self.pods_of(key, uid(job)).collect();
        let active = pods.iter().filter(|(_, pod)| is_active(pod)).count() as u64;
        self.is(key, job, "/status/active", active);
        let is_over = is_true(job, "Complete") || is_true(job, "Failed");
        let is_suspended = job["spec"]["suspend"] == true;
        if !self.full.contains(&key.namespace) {
            self.expect(is_over || is_suspended, key, || "is not over".into());
        }
        self.expect(active == 0 || !(is_over || is_suspended), key, || {
            format!("runs {active} pods")
        });
        let uncounted = &job["status"]["uncountedTerminatedPods"];
        let is_counted = ["succeeded", "failed"]
            .iter()
            .all(|one| uncounted[one].as_array().is_none_or(Vec::is_empty));
        self.expect(!is_over || is_counted, key, || format!("has uncounted pods {uncounted}"));
        for (pod_key, pod) in pods {
            let has =
                |pod: &Value| !pod["metadata"]["finalizers"].as_array().is_none_or(Vec::is_empty);
            self.expect(!is_finished(pod) || !has(pod), pod_key, || "keeps its finalizer".into());
        }
        let ttl = job["spec"]["ttlSecondsAfterFinished"].as_i64();
        let ended =
            job["status"]["completionTime"].as_str().and_then(|at| at.parse::<Timestamp>().ok());
        if let (Some(ttl), Some(ended)) = (ttl, ended) {
            let age = self.now.duration_since(ended).as_secs();
            self.expect(age <= ttl + 2, key, || format!("is over for {age} s and not deleted"));
        }
    }

    fn service(&mut self, key: &'a Key, service: &'a Value) {
        let selector = &service["spec"]["selector"];
        if !selector.is_object() {
            return;
        }
        let pods = self.state.within("pods", &key.namespace);
        let ready = pods.filter(|(_, pod)| selects(selector, pod) && is_ready(pod));
        let wanted: BTreeSet<&str> = ready.map(|(_, pod)| text(pod, "/status/podIP")).collect();
        let slices = self.state.within("endpointslices", &key.namespace);
        let own = |slice: &Value| {
            slice["metadata"]["labels"]["kubernetes.io/service-name"] == key.name.as_str()
        };
        let endpoints = slices
            .filter(|(_, slice)| own(slice))
            .flat_map(|(_, slice)| slice["endpoints"].as_array().into_iter().flatten())
            .filter(|endpoint| endpoint["conditions"]["ready"] == true);
        let found: BTreeSet<&str> =
            endpoints.map(|endpoint| text(endpoint, "/addresses/0")).collect();
        self.expect(found == wanted, key, || format!("has endpoints {found:?}, not {wanted:?}"));
    }

    fn budget(&mut self, key: &'a Key, budget: &'a Value) {
        self.observed(key, budget);
        let state = self.state;
        let selected = || pods_selected(state, key, budget);
        // A budget cannot tell what pods without a controller are of.
        if !selected().all(|pod| controller(pod).is_some()) {
            return;
        }
        let healthy = selected().filter(|pod| is_ready(pod)).count() as u64;
        self.is(key, budget, "/status/currentHealthy", healthy);
        let desired = number(budget, "/status/desiredHealthy");
        let allowed = if healthy == 0 { 0 } else { healthy.saturating_sub(desired) };
        self.is(key, budget, "/status/disruptionsAllowed", allowed);
    }

    fn quota(&mut self, key: &'a Key, quota: &'a Value) {
        let pods = self.state.within("pods", &key.namespace);
        let used = pods.filter(|(_, pod)| !is_finished(pod)).count();
        let services = self.state.within("services/specs", &key.namespace).count();
        for (name, used) in [("pods", used), ("services", services)] {
            let found = text(quota, &format!("/status/used/{name}"));
            self.expect(found == used.to_string(), key, || {
                format!("counts {found} {name}, not {used}")
            });
            let (hard, wanted) = (
                text(quota, &format!("/status/hard/{name}")),
                text(quota, &format!("/spec/hard/{name}")),
            );
            self.expect(hard == wanted, key, || format!("is at {name} {hard}, not {wanted}"));
        }
    }
}

fn pods_selected<'a>(
    state: &'a State,
    key: &'a Key,
    budget: &'a Value,
) -> impl Iterator<Item = &'a Value> {
    let pods = state.within("pods", &key.namespace).map(|(_, pod)| &**pod);
    pods.filter(move |pod| selects(&budget["spec"]["selector"], pod))
}

/// The template of a Deployment, or of one of its ReplicaSets.
fn template(object: &Value) -> Value {
    let mut template = object["spec"]["template"].clone();
    if let Some(labels) = template["metadata"]["labels"].as_object_mut() {
        labels.remove("pod-template-hash");
    }
    template
}
