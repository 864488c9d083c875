//! StatefulSet: pods with names, an order, and volumes of their own.
//!
//! In: StatefulSets, their pods, revisions and claims. Out: pods, claims, revisions, `status`.
//! Upstream: `pkg/controller/statefulset`. [`plan`] decides; this file carries out in order and
//! stops at the first error.
//!
//! Cost: a change of a pod or claim decodes the set, its revisions, its claims and, of a
//! pod, only one whose identity must be mended. The rest of its pods is known from a view.

mod claims;
mod plan;
mod revision;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use client::{
    Api, DeleteParams, ErrorExt, EventType, Header, Lister, ObjectKey, Outcome, PostParams,
    Projection, RawEvent, Result, Selectors, View,
};
use k8s_openapi::Resource;
use k8s_openapi::api::apps::v1::{ControllerRevision, StatefulSet, StatefulSetStatus};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, PodSpec, PodStatus};
use machinery::selector::Selector;

use crate::context::Context;
use crate::descriptor::{Descriptor, Row, Setup, on_metadata, own, owned_by};
use crate::owner::{self, Claim};
use plan::{Action, Observed};
use revision::{Change, Revision};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "statefulset-controller",
    account: "statefulset-controller",
    component: "statefulset-controller",
    queue: "statefulset",
    workers: 5,
    new: Controller::new,
    watches: &[
        &own::<StatefulSet>(),
        &owned_by::<Pod, StatefulSet, _>().adopted(|this: &Controller| &this.selectors),
        // A claim that goes holds up the pod that needs another of its name.
        &on_metadata::<PersistentVolumeClaim, _, _>(|this: &Controller, queue, event| {
            if let RawEvent::Deleted(claim) = event {
                let (labels, namespace) = (&claim.header.labels, &claim.header.key.namespace);
                let found = this.selectors.matching(namespace, &[labels]);
                found.into_iter().for_each(|key| queue.add(key));
            }
        }),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

/// Claims by the sets that they may belong to.
const BY_SET: &str = "stateful set";

/// The fields of a pod that its set looks at.
struct Brief(Arc<Pod>);

impl Projection<Pod> for Brief {
    fn of(pod: &Pod) -> Self {
        let spec = pod
            .spec
            .as_ref()
            .map(|spec| PodSpec { volumes: spec.volumes.clone(), ..PodSpec::default() });
        let status = pod.status.as_ref().map(|status| PodStatus {
            phase: status.phase.clone(),
            conditions: status.conditions.clone(),
            ..PodStatus::default()
        });
        Self(Arc::new(Pod { metadata: pod.metadata.clone(), spec, status }))
    }

    /// A pod without a controller may be adopted.
    fn concerns(pod: &Pod) -> bool {
        let owner = owner::controller(&pod.metadata);
        owner.is_none_or(|owner| owner.kind == StatefulSet::KIND)
    }
}

struct Controller {
    context: Context,
    sets: Lister<StatefulSet>,
    selectors: Selectors,
    pods: Lister<Pod>,
    briefs: View<Brief>,
    revisions: Lister<ControllerRevision>,
    claims: Lister<PersistentVolumeClaim>,
}

/// The sets that a claim may belong to, by its name: `TEMPLATE-SET-ORDINAL`, where both names may have dashes
/// of their own. Pure.
fn sets_of(header: &client::Header) -> Vec<String> {
    let Some((rest, ordinal)) = header.key.name.rsplit_once('-') else { return vec![] };
    if ordinal.is_empty() || !ordinal.bytes().all(|byte| byte.is_ascii_digit()) {
        return vec![];
    }
    let dashes = rest.match_indices('-').map(|(at, _)| &rest[at + 1..]);
    dashes.map(|set| ObjectKey::new(&header.key.namespace, set).to_string()).collect()
}

/// The pods that a set may adopt. Pure.
fn selector_of(set: &StatefulSet) -> Selector {
    let selector = set.spec.as_ref().map(|spec| Selector::from_api(Some(&spec.selector)));
    let usable = selector.and_then(|parsed| parsed.ok()).filter(|one| !one.is_everything());
    usable.unwrap_or(Selector::nothing())
}

impl Controller {
    fn new(setup: &Setup<ObjectKey>) -> Option<Self> {
        let (sets, pods, revisions) = (setup.informer(), setup.informer(), setup.informer());
        let claims = setup.informer::<PersistentVolumeClaim>();
        owner::index_orphans(&pods);
        owner::index_orphans(&revisions);
        claims.index_headers(BY_SET, sets_of);
        Some(Self {
            context: setup.context.clone(),
            selectors: Selectors::of(&sets, selector_of),
            sets: sets.lister(),
            briefs: pods.view(),
            pods: pods.lister(),
            revisions: revisions.lister(),
            claims: claims.lister(),
        })
    }

    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(set) = self.sets.get_key(key) else {
            return Ok(Outcome::Done);
        };
        let Some(spec) = &set.spec else {
            return Ok(Outcome::Done);
        };
        let Ok(selector) = Selector::from_api(Some(&spec.selector)) else {
            tracing::warn!(%key, "failed to parse the selector of the StatefulSet");
            return Ok(Outcome::Done);
        };
        let mut revisions = self.revisions(&set, &selector).await?;
        revision::sort(&mut revisions);
        let pods = self.claim(&set, &selector).await?;
        let mut collisions =
            set.status.as_ref().and_then(|status| status.collision_count).unwrap_or(0);
        let update = self.update_revision(&set, &revisions, &mut collisions).await?;
        let Some(update) = Revision::of(&update) else {
            tracing::warn!(%key, "failed to read the template of the ControllerRevision");
            return Ok(Outcome::Done);
        };
        let named = set.status.as_ref().and_then(|status| status.current_revision.as_deref());
        let mut known = revisions.iter().filter(|one| one.metadata.name.as_deref() == named);
        let current = known.next().and_then(|one| Revision::of(one));
        let current = current.unwrap_or_else(|| update.clone());
        let claims = self.claims_of(key);
        let observed = Observed {
            set: &set,
            spec,
            current: &current,
            update: &update,
            collisions,
            pods: &pods,
            claims: &claims,
            now: base::clock::now(),
        };
        let decided = plan::plan(&observed);
        let done = self.carry_out(&set, decided.actions).await;
        self.write_status(&set, decided.status).await?;
        let labels = pods.iter().filter_map(|pod| pod.metadata.labels.as_ref());
        let mut live: Vec<&str> = labels
            .filter_map(|labels| labels.get("controller-revision-hash"))
            .map(String::as_str)
            .collect();
        live.extend([current.name.as_str(), update.name.as_str()]);
        let api: Api<ControllerRevision> = self.context.client.api(Some(&key.namespace));
        for old in revision::surplus(&set, &revisions, &live) {
            match api.delete(&old.name, &DeleteParams::default()).await {
                Err(error) if !error.is_not_found() => return Err(error),
                _ => {}
            }
        }
        match (done?, decided.recheck) {
            (false, _) => Ok(Outcome::Backoff),
            (true, Some(delay)) => Ok(Outcome::After(delay)),
            (true, None) => Ok(Outcome::Done),
        }
    }

    /// The set's revisions, orphans that match adopted.
    async fn revisions(
        &self,
        set: &StatefulSet,
        selector: &Selector,
    ) -> Result<Vec<Arc<ControllerRevision>>> {
        let namespace = set.metadata.namespace.as_deref().unwrap_or_default();
        let api: Api<ControllerRevision> = self.context.client.api(Some(namespace));
        let uid = set.metadata.uid.as_deref().unwrap_or_default();
        let mut all = self.revisions.by_owner(uid);
        for entry in owner::claimable(&self.revisions, &set.metadata) {
            if owner::claim(&set.metadata, selector, &entry.header) == Claim::Adopt {
                let sets: Api<StatefulSet> = self.context.client.api(Some(namespace));
                if owner::may_adopt(&sets, &set.metadata).await? {
                    let header = &entry.header;
                    owner::adopt(&api, &header.key.name, &header.uid, &owner::reference(set))
                        .await?;
                    all.extend(self.revisions.get_key(&header.key));
                }
            }
        }
        Ok(all)
    }

    async fn update_revision(
        &self,
        set: &StatefulSet,
        revisions: &[Arc<ControllerRevision>],
        collisions: &mut i32,
    ) -> Result<Arc<ControllerRevision>> {
        let api: Api<ControllerRevision> =
            self.context.client.api(set.metadata.namespace.as_deref());
        loop {
            let made = match revision::change(set, revisions, *collisions) {
                Change::None(newest) => return Ok(newest),
                Change::Renumber(old) => {
                    let name = old.metadata.name.clone().unwrap_or_default();
                    return api.replace(&name, &PostParams::default(), &old).await.map(Arc::new);
                }
                Change::Create(made) => made,
            };
            match api.create(&PostParams::default(), &made).await {
                Err(error) if error.is_already_exists() => {
                    let name = made.metadata.name.clone().unwrap_or_default();
                    let there = api.get(&name).await?;
                    if there.data == made.data {
                        // Ours that the cache does not show yet.
                        return Ok(Arc::new(there));
                    }
                    *collisions += 1;
                }
                done => return done.map(Arc::new),
            }
        }
    }

    async fn claim(&self, set: &StatefulSet, selector: &Selector) -> Result<Vec<Arc<Pod>>> {
        let (client, meta) = (&self.context.client, &set.metadata);
        let is_member = |header: &Header, _| plan::is_member(set, &header.key.name);
        let mine =
            owner::claim_all::<_, StatefulSet>(client, &self.pods, meta, selector, is_member);
        let pods = mine.await?.into_iter().filter_map(|entry| {
            let brief = self.briefs.get(&entry.header.key)?;
            let uid = brief.0.metadata.uid.as_deref();
            (uid == Some(&*entry.header.uid)).then(|| brief.0.clone())
        });
        Ok(pods.collect())
    }

    fn claims_of(&self, key: &ObjectKey) -> BTreeMap<String, Arc<PersistentVolumeClaim>> {
        let all = self.claims.by_index(BY_SET, &key.to_string());
        all.into_iter()
            .map(|claim| (claim.metadata.name.clone().unwrap_or_default(), claim))
            .collect()
    }

    /// False if something holds it up that no event will tell of.
    async fn carry_out(&self, set: &StatefulSet, actions: Vec<Action>) -> Result<bool> {
        let pods: Api<Pod> = self.context.client.api(set.metadata.namespace.as_deref());
        for action in actions {
            match action {
                Action::Create { claims, pod } => {
                    self.make_claims(set, &pod, &claims).await?;
                    let made = pods.create(&PostParams::default(), &pod).await;
                    match made {
                        Err(error)
                            if error.is_already_exists() || error.is_namespace_terminating() =>
                        {
                            return Ok(error.is_namespace_terminating());
                        }
                        made => self.told(set, "Create", &pod, made.map(drop))?,
                    }
                }
                Action::Claims { claims, pod } => self.make_claims(set, &pod, &claims).await?,
                Action::Delete(pod) => {
                    let name = pod.metadata.name.as_deref().unwrap_or_default();
                    let gone = match pods.delete(name, &DeleteParams::default()).await {
                        Err(error) if error.is_not_found() => Ok(()),
                        done => done.map(drop),
                    };
                    self.told(set, "Delete", &pod, gone)?;
                }
                Action::Update(pod) => {
                    // The view has a part of the pod, and a write needs all of it.
                    let whole = self.pods.get_key(&ObjectKey::of(&pod.metadata));
                    let Some(pod) = whole.and_then(|whole| plan::mended(set, &whole)) else {
                        continue;
                    };
                    let name = pod.metadata.name.as_deref().unwrap_or_default();
                    let done = pods.replace(name, &PostParams::default(), &pod).await;
                    self.told(set, "Update", &pod, done.map(drop))?;
                }
                Action::Own(claim) => {
                    let api: Api<PersistentVolumeClaim> =
                        self.context.client.api(set.metadata.namespace.as_deref());
                    let name = claim.metadata.name.as_deref().unwrap_or_default();
                    api.replace(name, &PostParams::default(), &claim).await?;
                }
                Action::Blocked(claim) => {
                    let message = format!("pvc {claim} is being deleted");
                    let reason = "FailedCreate";
                    self.context.events.event(set, EventType::Warning, reason, message);
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    async fn make_claims(
        &self,
        set: &StatefulSet,
        pod: &Pod,
        claims: &[PersistentVolumeClaim],
    ) -> Result<()> {
        let api: Api<PersistentVolumeClaim> =
            self.context.client.api(set.metadata.namespace.as_deref());
        for claim in claims {
            let subject = format!(
                "Claim {} Pod {} in StatefulSet {}",
                claim.metadata.name.as_deref().unwrap_or_default(),
                pod.metadata.name.as_deref().unwrap_or_default(),
                set.metadata.name.as_deref().unwrap_or_default()
            );
            match api.create(&PostParams::default(), claim).await {
                Ok(_) => {
                    let message = format!("Create {subject} success");
                    let events = &self.context.events;
                    events.event(set, EventType::Normal, "SuccessfulCreate", message);
                }
                Err(error) if error.is_already_exists() => {}
                Err(error) => {
                    let message = format!("Create {subject} failed error: {}", error.text());
                    let events = &self.context.events;
                    events.event(set, EventType::Warning, "FailedCreate", message);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn told(&self, set: &StatefulSet, verb: &str, pod: &Pod, done: Result<()>) -> Result<()> {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let set_name = set.metadata.name.as_deref().unwrap_or_default();
        let subject = format!("{verb} Pod {name} in StatefulSet {set_name}");
        let events = &self.context.events;
        match &done {
            Ok(()) => {
                let message = format!("{subject} successful");
                events.event(set, EventType::Normal, &format!("Successful{verb}"), message);
            }
            Err(error) => {
                let message = format!("{subject} failed error: {}", error.text());
                events.event(set, EventType::Warning, &format!("Failed{verb}"), message);
            }
        }
        done
    }

    async fn write_status(&self, set: &StatefulSet, status: StatefulSetStatus) -> Result<()> {
        if set.status.as_ref() == Some(&status) {
            return Ok(());
        }
        let name = set.metadata.name.as_deref().unwrap_or_default();
        let api: Api<StatefulSet> = self.context.client.api(set.metadata.namespace.as_deref());
        let mut updated = set.clone();
        for attempt in 0..2 {
            updated.status = Some(status.clone());
            match api.replace_status(name, &PostParams::default(), &updated).await {
                Err(error) if error.is_conflict() && attempt == 0 => match api.get_opt(name).await?
                {
                    Some(fresh) => updated = fresh,
                    None => return Ok(()),
                },
                Err(error) if error.is_not_found() => return Ok(()),
                done => return done.map(drop),
            }
        }
        Ok(())
    }
}
