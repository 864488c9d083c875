//! The next actions of a StatefulSet. Pure.
//!
//! In order of ordinals: failed pods go, missing ones are made, identities are mended; then pods
//! beyond the scale go, last first; then pods of old revisions, last first. With the policy
//! `OrderedReady` the first pod that is not available ends the pass; with `Parallel` none does.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{StatefulSet, StatefulSetSpec, StatefulSetStatus};
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimVolumeSource, Pod, PodTemplateSpec, Volume,
};

use super::claims;
use super::revision::Revision;
use crate::deployment::scaled;
use crate::owner;
use crate::pod::{self, Availability};
use crate::replicaset::{pod_from, some_if_positive};

const REVISION: &str = "controller-revision-hash";
const POD_NAME: &str = "statefulset.kubernetes.io/pod-name";
const POD_INDEX: &str = "apps.kubernetes.io/pod-index";

pub struct Observed<'a> {
    pub set: &'a StatefulSet,
    pub spec: &'a StatefulSetSpec,
    pub current: &'a Revision,
    pub update: &'a Revision,
    pub collisions: i32,
    pub pods: &'a [Arc<Pod>],
    /// By name.
    pub claims: &'a BTreeMap<String, Arc<PersistentVolumeClaim>>,
    pub now: Timestamp,
}

#[derive(Clone, Debug)]
pub enum Action {
    /// Claims that are missing first, then the pod.
    Create {
        claims: Vec<PersistentVolumeClaim>,
        pod: Box<Pod>,
    },
    /// For a pod that waits for them.
    Claims {
        claims: Vec<PersistentVolumeClaim>,
        pod: Arc<Pod>,
    },
    Delete(Arc<Pod>),
    /// The name, the index or the volumes of a pod are not those of its place in the set; see [`mended`].
    Update(Arc<Pod>),
    /// New owners.
    Own(Box<PersistentVolumeClaim>),
    /// A claim with this name is going: nothing can be done until it is gone.
    Blocked(String),
}

/// `web-7` → 7.
pub fn ordinal_of(pod: &Pod) -> Option<i32> {
    let (_, ordinal) = pod.metadata.name.as_deref()?.rsplit_once('-')?;
    let digits = !ordinal.is_empty() && ordinal.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| ordinal.parse().ok()).flatten()
}

pub fn is_member(set: &StatefulSet, name: &str) -> bool {
    let parent = name.rsplit_once('-').map(|(parent, _)| parent);
    parent.is_some() && parent == set.metadata.name.as_deref()
}

fn start_of(set: &StatefulSet) -> i32 {
    let ordinals = set.spec.as_ref().and_then(|spec| spec.ordinals.as_ref());
    ordinals.and_then(|ordinals| ordinals.start).unwrap_or(0)
}

fn replicas_of(set: &StatefulSet) -> i32 {
    set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1).max(0)
}

pub fn in_range(set: &StatefulSet, ordinal: i32) -> bool {
    (start_of(set)..start_of(set) + replicas_of(set)).contains(&ordinal)
}

fn revision_of(pod: &Pod) -> &str {
    let labels = pod.metadata.labels.as_ref();
    labels.and_then(|labels| labels.get(REVISION)).map_or("", String::as_str)
}

/// A place in the set: a pod that is there, or one to make.
enum Replica {
    There(Arc<Pod>),
    Missing(Box<Pod>),
}

pub struct Outcome {
    pub actions: Vec<Action>,
    pub status: StatefulSetStatus,
    pub recheck: Option<Duration>,
}

struct Pass<'a> {
    observed: &'a Observed<'a>,
    ordered: bool,
    min_ready: Duration,
    actions: Vec<Action>,
}

/// Ends the pass.
struct Stop;

pub fn plan(observed: &Observed) -> Outcome {
    let spec = observed.spec;
    let mut pass = Pass {
        observed,
        ordered: spec.pod_management_policy.as_deref() != Some("Parallel"),
        min_ready: Duration::from_secs(spec.min_ready_seconds.unwrap_or(0).max(0) as u64),
        actions: vec![],
    };
    let (mut status, recheck) = pass.status();
    if observed.set.metadata.deletion_timestamp.is_none() && pass.run(&mut status).is_err() {
        // Something is waited for; what was decided so far is done.
    }
    complete(observed, &mut status);
    Outcome { actions: pass.actions, status, recheck }
}

/// All pods run the update: it is the current revision now.
fn complete(observed: &Observed, status: &mut StatefulSetStatus) {
    let wanted = replicas_of(observed.set);
    let is_rolling = observed
        .spec
        .update_strategy
        .as_ref()
        .is_none_or(|strategy| strategy.type_.as_deref() != Some("OnDelete"));
    if is_rolling
        && status.updated_replicas.unwrap_or(0) == wanted
        && status.ready_replicas.unwrap_or(0) == wanted
        && status.replicas == wanted
    {
        status.current_replicas = status.updated_replicas;
        status.current_revision = status.update_revision.clone();
    }
}

impl Pass<'_> {
    fn status(&self) -> (StatefulSetStatus, Option<Duration>) {
        let observed = self.observed;
        let (mut ready, mut available, mut current, mut updated) = (0, 0, 0, 0);
        let mut recheck: Option<Duration> = None;
        for one in observed.pods {
            if pod::phase(one) == "Running" && pod::is_ready(one) {
                ready += 1;
                match pod::availability(one, self.min_ready, observed.now) {
                    Availability::Yes => available += 1,
                    Availability::No => {}
                    Availability::In(rest) => {
                        recheck = Some(recheck.map_or(rest, |known| known.min(rest)));
                    }
                }
            }
            if !pod::is_deleting(one) {
                current += i32::from(revision_of(one) == observed.current.name);
                updated += i32::from(revision_of(one) == observed.update.name);
            }
        }
        let status = StatefulSetStatus {
            observed_generation: observed.set.metadata.generation,
            replicas: observed.pods.len() as i32,
            ready_replicas: some_if_positive(ready),
            available_replicas: Some(available),
            current_replicas: some_if_positive(current),
            updated_replicas: some_if_positive(updated),
            current_revision: Some(observed.current.name.clone()),
            update_revision: Some(observed.update.name.clone()),
            collision_count: Some(observed.collisions),
            conditions: observed.set.status.as_ref().and_then(|status| status.conditions.clone()),
        };
        (status, recheck)
    }

    fn is_available(&self, one: &Pod) -> bool {
        pod::availability(one, self.min_ready, self.observed.now) == Availability::Yes
    }

    fn is_unavailable(&self, one: &Pod) -> bool {
        !self.is_available(one) || pod::is_deleting(one)
    }

    fn run(&mut self, status: &mut StatefulSetStatus) -> Result<(), Stop> {
        let set = self.observed.set;
        let mut there = BTreeMap::new();
        let mut condemned = vec![];
        for one in self.observed.pods {
            match ordinal_of(one) {
                Some(ordinal) if in_range(set, ordinal) => {
                    there.insert(ordinal, one.clone());
                }
                Some(ordinal) => condemned.push((ordinal, one.clone())),
                None => {}
            }
        }
        condemned.sort_unstable_by_key(|(ordinal, _)| -ordinal);
        let condemned: Vec<_> = condemned.into_iter().map(|(_, pod)| pod).collect();
        let start = start_of(set);
        let replicas: Vec<Replica> = (start..start + replicas_of(set))
            .map(|ordinal| match there.remove(&ordinal) {
                Some(pod) => Replica::There(pod),
                None => Replica::Missing(Box::new(self.new_pod(ordinal))),
            })
            .collect();
        for replica in &replicas {
            self.keep(replica)?;
        }
        for one in &condemned {
            self.mend_claims(one);
        }
        let weak = self.first_unavailable(&replicas, &condemned);
        for one in &condemned {
            self.condemn(one, weak.as_deref())?;
        }
        self.roll(&replicas, status)
    }

    fn first_unavailable(&self, replicas: &[Replica], condemned: &[Arc<Pod>]) -> Option<String> {
        for replica in replicas {
            match replica {
                Replica::Missing(pod) => return pod.metadata.name.clone(),
                Replica::There(pod) if self.is_unavailable(pod) => {
                    return pod.metadata.name.clone();
                }
                Replica::There(_) => {}
            }
        }
        let mut weak = condemned.iter().rev().filter(|pod| self.is_unavailable(pod));
        weak.next().and_then(|pod| pod.metadata.name.clone())
    }

    /// Brings one place of the set to what it should be.
    fn keep(&mut self, replica: &Replica) -> Result<(), Stop> {
        let pod = match replica {
            Replica::Missing(pod) => return self.create(pod),
            Replica::There(pod) => pod,
        };
        if pod::is_finished(pod) {
            if !pod::is_deleting(pod) {
                self.actions.push(Action::Delete(pod.clone()));
            }
            return if self.ordered { Err(Stop) } else { Ok(()) };
        }
        if pod::phase(pod) == "Pending" {
            let claims = self.missing_claims(pod)?;
            if !claims.is_empty() {
                self.actions.push(Action::Claims { claims, pod: pod.clone() });
            }
        }
        let steady = !pod::is_deleting(pod)
            && pod::phase(pod) == "Running"
            && pod::is_ready(pod)
            && self.is_available(pod);
        if self.ordered && !steady {
            return Err(Stop);
        }
        self.mend_claims(pod);
        self.mend_identity(pod);
        Ok(())
    }

    fn create(&mut self, pod: &Pod) -> Result<(), Stop> {
        if claims::are_deleted_when_scaled(self.observed.set) {
            let ordinal = ordinal_of(pod).unwrap_or_default();
            for (_, wanted) in claims::of_pod(self.observed.set, ordinal) {
                let name = wanted.metadata.name.unwrap_or_default();
                if self.observed.claims.get(&name).is_some_and(|one| claims::is_stale(one, pod)) {
                    // It goes with the pod that it belonged to.
                    return Err(Stop);
                }
            }
        }
        let missing = self.missing_claims(pod)?;
        self.actions.push(Action::Create { claims: missing, pod: Box::new(pod.clone()) });
        if self.ordered { Err(Stop) } else { Ok(()) }
    }

    fn missing_claims(&mut self, pod: &Pod) -> Result<Vec<PersistentVolumeClaim>, Stop> {
        let ordinal = ordinal_of(pod).unwrap_or_default();
        let mut missing = vec![];
        for (_, wanted) in claims::of_pod(self.observed.set, ordinal) {
            let name = wanted.metadata.name.clone().unwrap_or_default();
            match self.observed.claims.get(&name) {
                None => missing.push(wanted),
                Some(known) if known.metadata.deletion_timestamp.is_some() => {
                    self.actions.push(Action::Blocked(name));
                    return Err(Stop);
                }
                Some(_) => {}
            }
        }
        Ok(missing)
    }

    fn mend_claims(&mut self, pod: &Pod) {
        let set = self.observed.set;
        for (_, wanted) in claims::of_pod(set, ordinal_of(pod).unwrap_or_default()) {
            let name = wanted.metadata.name.unwrap_or_default();
            let Some(known) = self.observed.claims.get(&name) else { continue };
            if let Some(owners) = claims::wanted_owners(known, set, pod) {
                let mut claim = (**known).clone();
                claim.metadata.owner_references = Some(owners);
                self.actions.push(Action::Own(Box::new(claim)));
            }
        }
    }

    fn mend_identity(&mut self, pod: &Arc<Pod>) {
        if mended(self.observed.set, pod).is_some() {
            self.actions.push(Action::Update(pod.clone()));
        }
    }

    fn condemn(&mut self, pod: &Arc<Pod>, weak: Option<&str>) -> Result<(), Stop> {
        if pod::is_deleting(pod) {
            return if self.ordered { Err(Stop) } else { Ok(()) };
        }
        let steady = pod::phase(pod) == "Running" && pod::is_ready(pod) && self.is_available(pod);
        if self.ordered && !steady && pod.metadata.name.as_deref() != weak {
            return Err(Stop);
        }
        self.actions.push(Action::Delete(pod.clone()));
        if self.ordered { Err(Stop) } else { Ok(()) }
    }

    /// Deletes pods of old revisions, as many as may be missing.
    fn roll(&mut self, replicas: &[Replica], status: &mut StatefulSetStatus) -> Result<(), Stop> {
        let strategy = self.observed.spec.update_strategy.as_ref();
        if strategy.is_some_and(|one| one.type_.as_deref() == Some("OnDelete")) {
            return Ok(());
        }
        let rolling = strategy.and_then(|strategy| strategy.rolling_update.as_ref());
        let partition = rolling.and_then(|rolling| rolling.partition).unwrap_or(0).max(0) as usize;
        let maximum = rolling.and_then(|rolling| rolling.max_unavailable.as_ref());
        let limit =
            maximum.map_or(1, |most| scaled(Some(most), replicas.len() as i32, false).max(1));
        let unavailable = replicas.iter().filter(|replica| match replica {
            Replica::Missing(_) => true,
            Replica::There(pod) => self.is_unavailable(pod),
        });
        let mut room = limit - unavailable.count() as i32;
        for replica in replicas.iter().skip(partition).rev() {
            let Replica::There(pod) = replica else {
                if maximum.is_none() {
                    return Err(Stop);
                }
                continue;
            };
            let old = revision_of(pod) != self.observed.update.name;
            if old && !pod::is_deleting(pod) {
                if maximum.is_some() && room <= 0 {
                    return Err(Stop);
                }
                self.actions.push(Action::Delete(pod.clone()));
                let current = status.current_replicas.unwrap_or(0);
                if revision_of(pod) == self.observed.current.name {
                    status.current_replicas = some_if_positive(current - 1);
                }
                room -= 1;
                if maximum.is_none() {
                    return Err(Stop);
                }
            } else if maximum.is_none() && self.is_unavailable(pod) {
                return Err(Stop);
            }
        }
        Ok(())
    }

    /// A pod of the revision that this ordinal should have.
    fn new_pod(&self, ordinal: i32) -> Pod {
        let observed = self.observed;
        let strategy = observed.spec.update_strategy.as_ref();
        let is_rolling =
            strategy.is_none_or(|strategy| strategy.type_.as_deref() != Some("OnDelete"));
        let rolling = strategy.and_then(|strategy| strategy.rolling_update.as_ref());
        let kept = match rolling {
            Some(rolling) => rolling.partition.unwrap_or(0),
            None if is_rolling => {
                let status = observed.set.status.as_ref();
                status.and_then(|status| status.current_replicas).unwrap_or(0)
            }
            None => 0,
        };
        let is_old = ordinal < start_of(observed.set) + kept;
        let revision = if is_old { observed.current } else { observed.update };
        make_pod(observed.set, revision, ordinal)
    }
}

fn make_pod(set: &StatefulSet, revision: &Revision, ordinal: i32) -> Pod {
    let template: &PodTemplateSpec = &revision.template;
    let mut pod = pod_from(Some(template), &set.metadata, owner::reference(set));
    let name = format!("{}-{ordinal}", set.metadata.name.as_deref().unwrap_or_default());
    pod.metadata.name = Some(name.clone());
    identify(&mut pod);
    let labels = pod.metadata.labels.get_or_insert_default();
    labels.insert(REVISION.into(), revision.name.clone());
    let spec = pod.spec.get_or_insert_default();
    spec.hostname = Some(name);
    let service = set.spec.as_ref().and_then(|spec| spec.service_name.clone());
    spec.subdomain = service.filter(|name| !name.is_empty());
    mount(set, &mut pod);
    pod
}

/// The pod with the name, the index and the volumes of its place in the set; `None` if it has them.
pub fn mended(set: &StatefulSet, pod: &Pod) -> Option<Pod> {
    let mut mended = pod.clone();
    identify(&mut mended);
    let volumes = mended.spec.as_ref().and_then(|spec| spec.volumes.clone());
    let named = |volume: &str, claim: Option<&String>| {
        volumes.iter().flatten().any(|one| {
            let source = one.persistent_volume_claim.as_ref();
            one.name == volume && source.map(|source| &source.claim_name) == claim
        })
    };
    let ordinal = ordinal_of(pod).unwrap_or_default();
    let all = claims::of_pod(set, ordinal);
    if !all.iter().all(|(volume, claim)| named(volume, claim.metadata.name.as_ref())) {
        mount(set, &mut mended);
    }
    // Labels of older versions lack the index; only names and volumes are worth a write.
    let label =
        |pod: &Pod| pod.metadata.labels.as_ref().and_then(|labels| labels.get(POD_NAME).cloned());
    (label(&mended) != label(pod) || mended.spec != pod.spec).then_some(mended)
}

fn identify(pod: &mut Pod) {
    let name = pod.metadata.name.clone().unwrap_or_default();
    let index = ordinal_of(pod).unwrap_or_default().to_string();
    let labels = pod.metadata.labels.get_or_insert_default();
    labels.insert(POD_NAME.into(), name);
    labels.insert(POD_INDEX.into(), index);
}

/// Volumes of claims come first and replace those of the template with their names.
fn mount(set: &StatefulSet, pod: &mut Pod) {
    let claims = claims::of_pod(set, ordinal_of(pod).unwrap_or_default());
    if claims.is_empty() {
        return;
    }
    let spec = pod.spec.get_or_insert_default();
    let mut others = spec.volumes.take().unwrap_or_default();
    others.retain(|volume| !claims.iter().any(|(name, _)| *name == volume.name));
    let mut volumes: Vec<Volume> = claims
        .into_iter()
        .map(|(name, claim)| Volume {
            name,
            persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                claim_name: claim.metadata.name.unwrap_or_default(),
                read_only: None,
            }),
            ..Volume::default()
        })
        .collect();
    volumes.extend(others);
    spec.volumes = Some(volumes);
}
