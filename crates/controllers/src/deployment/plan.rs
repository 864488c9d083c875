//! The actions of one pass over a Deployment. Pure: `plan(observed) → actions`.
//!
//! A pass makes one move: it creates or scales the new ReplicaSet, or scales old ones down; the
//! events of that move bring the next pass. The status is computed from the ReplicaSets as they
//! will be.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet, ReplicaSetSpec};
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use machinery::ObjectMeta;
use serde_json::Value;

use super::arithmetic::{
    DESIRED_REPLICAS, MAX_REPLICAS, REVISION, REVISION_HISTORY, by_age, is_paused, is_rolling,
    max_surge, number, replicas, revision, spec, wanted,
};
use super::{rollout, status};
use crate::owner;

pub const HASH_LABEL: &str = "pod-template-hash";
const HISTORY_LENGTH: usize = 2000;
/// Annotations of a Deployment that its ReplicaSets do not get.
const OWN_ANNOTATIONS: [&str; 6] = [
    "kubectl.kubernetes.io/last-applied-configuration",
    REVISION,
    REVISION_HISTORY,
    DESIRED_REPLICAS,
    MAX_REPLICAS,
    "deprecated.deployment.rollback.to",
];

pub struct Observed {
    pub deployment: Deployment,
    pub sets: Vec<ReplicaSet>,
    /// The sum over all ReplicaSets.
    pub pods: Vec<Arc<Pod>>,
    pub now: Timestamp,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    Create { set: ReplicaSet, event: Option<String> },
    Update { set: ReplicaSet, event: Option<String> },
    Delete(String),
}

pub struct Plan {
    pub actions: Vec<Action>,
    /// With the status and annotations to write.
    pub deployment: Deployment,
    /// When to look at the progress deadline.
    pub recheck: Option<Duration>,
}

/// The state of a pass: the observed objects with the actions so far.
pub struct Pass {
    pub deployment: Deployment,
    pub new: Option<ReplicaSet>,
    /// Oldest first.
    pub old: Vec<ReplicaSet>,
    pub actions: Vec<Action>,
    pub now: Timestamp,
}

pub fn plan(observed: Observed) -> Plan {
    let Observed { deployment, mut sets, pods, now } = observed;
    sets.sort_unstable_by(by_age);
    let found = sets.iter().position(|set| same_template(set, &deployment));
    let new = found.map(|at| sets.remove(at));
    let mut pass = Pass { deployment, new, old: sets, actions: vec![], now };
    if pass.deployment.metadata.deletion_timestamp.is_some() {
        let status = pass.counted();
        return pass.finish(status);
    }
    pass.note_pause();
    if is_paused(&pass.deployment) || pass.is_scaling() {
        pass.adopt_new();
        rollout::scale(&mut pass);
        if is_paused(&pass.deployment) {
            rollout::clean_up(&mut pass);
        }
        let status = pass.counted();
        return pass.finish(status);
    }
    if is_rolling(&pass.deployment) {
        rollout::rolling(&mut pass);
    } else {
        rollout::recreate(&mut pass, &pods);
    }
    let status = pass.rolled();
    pass.finish(status)
}

impl Pass {
    pub fn all(&self) -> Vec<&ReplicaSet> {
        self.old.iter().chain(self.new.as_ref()).collect()
    }

    fn counted(&self) -> k8s_openapi::api::apps::v1::DeploymentStatus {
        status::count(&self.deployment, &self.all(), self.new.as_ref(), self.now)
    }

    fn rolled(&self) -> k8s_openapi::api::apps::v1::DeploymentStatus {
        status::rolling(&self.deployment, &self.all(), self.new.as_ref(), self.now)
    }

    fn finish(mut self, status: k8s_openapi::api::apps::v1::DeploymentStatus) -> Plan {
        let recheck = status::recheck(&self.deployment, &status, self.now);
        self.deployment.status = Some(status);
        Plan { actions: self.actions, deployment: self.deployment, recheck }
    }

    /// Some set was last scaled for another number of replicas.
    fn is_scaling(&self) -> bool {
        let wanted = wanted(&self.deployment);
        let active = self.all().into_iter().filter(|set| replicas(set) > 0);
        active
            .into_iter()
            .any(|set| number(set, DESIRED_REPLICAS).is_some_and(|desired| desired != wanted))
    }

    fn note_pause(&mut self) {
        let old = self.deployment.status.clone().unwrap_or_default();
        let reason =
            status::condition(&old, status::PROGRESSING).and_then(|one| one.reason.as_deref());
        let (paused, noted) = (is_paused(&self.deployment), reason == Some(status::PAUSED));
        if reason == Some(status::TIMED_OUT) || paused == noted {
            return;
        }
        if paused {
            status::set_progress(
                &mut self.deployment,
                "Unknown",
                status::PAUSED,
                "Deployment is paused",
            );
        } else {
            status::set_progress(
                &mut self.deployment,
                "Unknown",
                "DeploymentResumed",
                "Deployment is resumed",
            );
        }
    }

    /// Brings the new set's annotations, and the Deployment's revision, up to date.
    pub fn adopt_new(&mut self) {
        let Some(mut set) = self.new.take() else {
            return;
        };
        let before = set.clone();
        let revision = self.next_revision();
        annotate(&self.deployment, &mut set, revision, true);
        let min_ready = spec(&self.deployment).min_ready_seconds;
        if let Some(spec) = &mut set.spec
            && spec.min_ready_seconds.unwrap_or(0) != min_ready.unwrap_or(0)
        {
            spec.min_ready_seconds = min_ready;
        }
        if set != before {
            self.actions.push(Action::Update { set: set.clone(), event: None });
        }
        let revision = set.metadata.annotations.as_ref().and_then(|all| all.get(REVISION)).cloned();
        self.set_revision(revision);
        let old = self.deployment.status.clone().unwrap_or_default();
        if status::condition(&old, status::PROGRESSING).is_none() {
            let name = set.metadata.name.clone().unwrap_or_default();
            let message = format!("Found new replica set {name:?}");
            status::set_progress(&mut self.deployment, "True", "FoundNewReplicaSet", &message);
        }
        self.new = Some(set);
    }

    /// As [`adopt_new`](Self::adopt_new); creates the set if there is none. True if it was created.
    pub fn ensure_new(&mut self) -> bool {
        if self.new.is_some() {
            self.adopt_new();
            return false;
        }
        let revision = self.next_revision();
        let mut set = new_set(&self.deployment);
        let count = rollout::new_set_size(&self.deployment, &set, &self.all());
        if let Some(spec) = &mut set.spec {
            spec.replicas = Some(count);
        }
        annotate(&self.deployment, &mut set, revision, false);
        let name = set.metadata.name.clone().unwrap_or_default();
        let event = (count > 0).then(|| format!("Scaled up replica set {name} from 0 to {count}"));
        self.actions.push(Action::Create { set: set.clone(), event });
        self.set_revision(Some(revision.to_string()));
        let message = format!("Created new replica set {name:?}");
        status::set_progress(&mut self.deployment, "True", "NewReplicaSetCreated", &message);
        self.new = Some(set);
        true
    }

    fn next_revision(&self) -> i64 {
        self.old.iter().map(revision).max().unwrap_or(0) + 1
    }

    fn set_revision(&mut self, revision: Option<String>) {
        if let Some(revision) = revision {
            let annotations = self.deployment.metadata.annotations.get_or_insert_default();
            annotations.insert(REVISION.into(), revision);
        }
    }

    /// Scales a set (annotations included). True if its size changes.
    pub fn resize(&mut self, name: &str, to: i32) -> bool {
        let (wanted, surge) = (wanted(&self.deployment), max_surge(&self.deployment));
        let Some(set) = self.old.iter_mut().chain(self.new.as_mut()).find(|set| named(set) == name)
        else {
            return false;
        };
        let before = replicas(set);
        let annotated = note_sizes(set, wanted, wanted + surge);
        if before == to && !annotated {
            return false;
        }
        set.spec.get_or_insert_default().replicas = Some(to);
        let direction = if to > before { "up" } else { "down" };
        let event = (before != to)
            .then(|| format!("Scaled {direction} replica set {name} from {before} to {to}"));
        let set = set.clone();
        // One write per set: an update planned before carries on with this one's content.
        let planned = self.actions.iter_mut().find_map(|action| match action {
            Action::Update { set: planned, event } if named(planned) == name => {
                Some((planned, event))
            }
            _ => None,
        });
        match planned {
            Some((planned, told)) => {
                *planned = set;
                *told = event;
            }
            None => self.actions.push(Action::Update { set, event }),
        }
        before != to
    }
}

pub fn named(set: &ReplicaSet) -> &str {
    set.metadata.name.as_deref().unwrap_or_default()
}

/// Whether a set runs the Deployment's template, not minding the hash label.
pub fn same_template(set: &ReplicaSet, deployment: &Deployment) -> bool {
    let theirs = set.spec.as_ref().and_then(|spec| spec.template.clone()).unwrap_or_default();
    let ours = deployment.spec.as_ref().map(|spec| spec.template.clone()).unwrap_or_default();
    let plain = |mut template: PodTemplateSpec| {
        if let Some(labels) = template.metadata.as_mut().and_then(|meta| meta.labels.as_mut()) {
            labels.remove(HASH_LABEL);
        }
        template
    };
    let (theirs, ours) = (plain(theirs), plain(ours));
    theirs == ours || canonical(&theirs) == canonical(&ours)
}

/// Absent and empty are one: upstream compares semantically.
fn canonical(template: &PodTemplateSpec) -> Value {
    let mut tree = serde_json::to_value(template).expect("API structs have string keys");
    prune(&mut tree);
    tree
}

fn prune(tree: &mut Value) {
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::Object(map) => map.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    };
    match tree {
        Value::Object(map) => {
            map.values_mut().for_each(prune);
            // An empty object can mean something (`emptyDir: {}`): only empty lists and maps of
            // metadata are dropped, and nulls.
            map.retain(|key, value| {
                !(is_empty(value)
                    && (value.is_null()
                        || value.is_array()
                        || key == "labels"
                        || key == "annotations"))
            });
        }
        Value::Array(items) => items.iter_mut().for_each(prune),
        _ => {}
    }
}

/// A name-safe hash of the template. Upstream: `ComputeHash`, `SafeEncodeString`; the value differs,
/// as it hashes Go's dump of the structs.
pub fn template_hash(template: &PodTemplateSpec, collisions: Option<i32>) -> String {
    const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut bytes = canonical(template).to_string().into_bytes();
    if let Some(collisions) = collisions {
        bytes.extend(collisions.to_le_bytes());
    }
    let hash = bytes
        .iter()
        .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    let digits = hash.to_string().into_bytes();
    digits.iter().map(|digit| ALPHABET[usize::from(*digit) % ALPHABET.len()] as char).collect()
}

fn new_set(deployment: &Deployment) -> ReplicaSet {
    let spec = spec(deployment);
    let collisions = deployment.status.as_ref().and_then(|status| status.collision_count);
    let hash = template_hash(&spec.template, collisions);
    let mut template = spec.template;
    let labels = template.metadata.get_or_insert_default().labels.get_or_insert_default();
    labels.insert(HASH_LABEL.into(), hash.clone());
    let labels = labels.clone();
    let mut selector = spec.selector;
    selector.match_labels.get_or_insert_default().insert(HASH_LABEL.into(), hash.clone());
    ReplicaSet {
        metadata: ObjectMeta {
            name: Some(format!(
                "{}-{hash}",
                deployment.metadata.name.as_deref().unwrap_or_default()
            )),
            namespace: deployment.metadata.namespace.clone(),
            owner_references: Some(vec![owner::reference(deployment)]),
            labels: Some(labels),
            ..Default::default()
        },
        spec: Some(ReplicaSetSpec {
            replicas: Some(0),
            min_ready_seconds: spec.min_ready_seconds,
            selector,
            template: Some(template),
        }),
        status: None,
    }
}

/// Upstream: `SetNewReplicaSetAnnotations`.
fn annotate(deployment: &Deployment, set: &mut ReplicaSet, new_revision: i64, exists: bool) {
    let inherited = deployment.metadata.annotations.clone().unwrap_or_default();
    let old_revision = revision(set);
    let annotations = set.metadata.annotations.get_or_insert_default();
    for (key, value) in inherited {
        if !OWN_ANNOTATIONS.contains(&key.as_str()) {
            annotations.insert(key, value);
        }
    }
    if old_revision < new_revision {
        let before = annotations.insert(REVISION.into(), new_revision.to_string());
        if let Some(before) = before {
            let history = annotations.get(REVISION_HISTORY).cloned().unwrap_or_default();
            annotations.insert(REVISION_HISTORY.into(), extend_history(&history, &before));
        }
    }
    if !exists {
        let wanted = wanted(deployment);
        note_sizes(set, wanted, wanted + max_surge(deployment));
    }
}

/// The oldest go when it grows too long.
fn extend_history(history: &str, revision: &str) -> String {
    let mut all: Vec<_> = history.split(',').filter(|one| !one.is_empty()).collect();
    all.push(revision);
    while all.join(",").len() > HISTORY_LENGTH {
        all.remove(0);
    }
    all.join(",")
}

/// True if something changed.
fn note_sizes(set: &mut ReplicaSet, desired: i32, max: i32) -> bool {
    let annotations = set.metadata.annotations.get_or_insert_default();
    let mut changed = false;
    for (name, value) in [(DESIRED_REPLICAS, desired), (MAX_REPLICAS, max)] {
        let value = value.to_string();
        changed |= annotations.insert(name.into(), value.clone()) != Some(value);
    }
    changed
}
