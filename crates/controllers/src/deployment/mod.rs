//! Deployment: rolls ReplicaSets out.
//!
//! In: Deployments, their ReplicaSets, and pods. Out: ReplicaSets created, scaled and cleaned up,
//! `status`, the revision annotation.
//! Upstream: `pkg/controller/deployment`. The decisions are in [`plan`], pure; here they are carried
//! out, in order, up to the first error.
//!
//! Deviation: upstream writes a Deployment's status up to three times in one pass, of which the
//! later ones conflict and are repeated; here a pass writes it once, at its end.

mod arithmetic;
mod plan;
mod rollout;
mod status;

use std::sync::Arc;

use client::{
    Api, DeleteParams, ErrorExt, EventType, Lister, ObjectKey, Outcome, PostParams, RawEvent,
    Result, Selectors, WorkQueue,
};
use k8s_openapi::Resource;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::Pod;
use machinery::selector::Selector;

use crate::context::Context;
use crate::descriptor::{Descriptor, Row, on_metadata, own, owned_by};
use crate::owner;
use plan::{Action, Observed, Plan};

pub use arithmetic::scaled;
pub use plan::template_hash;

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "deployment-controller",
    account: "deployment-controller",
    component: "deployment-controller",
    queue: "deployment",
    workers: 5,
    new: |setup| {
        let (deployments, sets) = (setup.informer(), setup.informer());
        owner::index_orphans(&sets);
        Some(Controller {
            context: setup.context.clone(),
            selectors: Selectors::of(&deployments, |one| {
                selector_of(one).unwrap_or(Selector::nothing())
            }),
            deployments: deployments.lister(),
            sets: sets.lister(),
            pods: setup.lister(),
        })
    },
    watches: &[
        &own::<Deployment>(),
        &owned_by::<ReplicaSet, Deployment, _>().adopted(|this: &Controller| &this.selectors),
        &on_metadata::<Pod, _, _>(Controller::pod_event),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

struct Controller {
    context: Context,
    deployments: Lister<Deployment>,
    selectors: Selectors,
    sets: Lister<ReplicaSet>,
    pods: Lister<Pod>,
}

impl Controller {
    /// A Recreate rollout waits for the last old pod to be gone.
    fn pod_event(&self, queue: &WorkQueue<ObjectKey>, event: &RawEvent) {
        let header = &event.entry().header;
        if !matches!(event, RawEvent::Deleted(_)) {
            return;
        }
        let Some(owner) = header.controller().filter(|owner| owner.kind == ReplicaSet::KIND) else {
            return;
        };
        let set = self.sets.get(&header.key.namespace, &owner.name);
        let Some(deployment) = set.as_ref().and_then(|set| owner::controller(&set.metadata)) else {
            return;
        };
        queue.add(ObjectKey::new(&header.key.namespace, &deployment.name));
    }

    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(deployment) = self.deployments.get_key(key) else {
            return Ok(Outcome::Done);
        };
        let Some(spec) = &deployment.spec else {
            return Ok(Outcome::Done);
        };
        let selector = Selector::from_api(Some(&spec.selector)).unwrap_or(Selector::nothing());
        if selector.is_everything() {
            let message =
                "This deployment is selecting all pods. A non-empty selector is required.";
            self.context.events.event(&*deployment, EventType::Warning, "SelectingAll", message);
            return Ok(Outcome::Done);
        }
        let sets = self.claim(&deployment, &selector).await?;
        let pods_of = |set: &Arc<ReplicaSet>| {
            self.pods.by_owner(set.metadata.uid.as_deref().unwrap_or_default())
        };
        let pods = sets.iter().flat_map(pods_of).collect();
        let observed = Observed {
            deployment: (*deployment).clone(),
            sets: sets.iter().map(|set| (**set).clone()).collect(),
            pods,
            now: base::clock::now_seconds(),
        };
        let plan = plan::plan(observed);
        self.carry_out(key, &deployment, plan).await
    }

    async fn claim(
        &self,
        deployment: &Deployment,
        selector: &Selector,
    ) -> Result<Vec<Arc<ReplicaSet>>> {
        let (client, meta) = (&self.context.client, &deployment.metadata);
        let mine =
            owner::claim_all::<_, Deployment>(client, &self.sets, meta, selector, |_, _| true);
        let keys = mine.await?.into_iter().map(|entry| entry.header.key.clone());
        Ok(keys.filter_map(|key| self.sets.get_key(&key)).collect())
    }

    async fn carry_out(
        &self,
        key: &ObjectKey,
        deployment: &Deployment,
        plan: Plan,
    ) -> Result<Outcome> {
        let mut updated = plan.deployment;
        let mut failure = None;
        for action in plan.actions {
            if let Err(error) = self.act(key, deployment, &mut updated, action).await {
                failure = Some(error);
                break;
            }
        }
        if updated.status != deployment.status
            || updated.metadata.annotations != deployment.metadata.annotations
        {
            let api: Api<Deployment> = self.context.client.api(Some(&key.namespace));
            match api.replace_status(&key.name, &PostParams::default(), &updated).await {
                Err(error) if error.is_not_found() => return Ok(Outcome::Done),
                Err(error) => failure = failure.or(Some(error)),
                Ok(_) => {}
            }
        }
        match (failure, plan.recheck) {
            (Some(error), _) => Err(error),
            (None, Some(delay)) => Ok(Outcome::After(delay)),
            (None, None) => Ok(Outcome::Done),
        }
    }

    async fn act(
        &self,
        key: &ObjectKey,
        deployment: &Deployment,
        updated: &mut Deployment,
        action: Action,
    ) -> Result<()> {
        let api: Api<ReplicaSet> = self.context.client.api(Some(&key.namespace));
        match action {
            Action::Create { set, event } => match api.create(&PostParams::default(), &set).await {
                Ok(_) => self.tell(deployment, event),
                Err(error) if error.is_already_exists() => {
                    self.collide(&api, updated, &set, error).await?
                }
                Err(error) if error.is_namespace_terminating() => return Err(error),
                Err(error) => {
                    let name = set.metadata.name.as_deref().unwrap_or_default();
                    let message =
                        format!("Failed to create new replica set {name:?}: {}", error.text());
                    status::set_progress(updated, "False", "ReplicaSetCreateError", &message);
                    self.context.events.event(
                        deployment,
                        EventType::Warning,
                        "ReplicaSetCreateError",
                        message,
                    );
                    return Err(error);
                }
            },
            Action::Update { set, event } => {
                let name = set.metadata.name.as_deref().unwrap_or_default();
                api.replace(name, &PostParams::default(), &set).await?;
                self.tell(deployment, event);
            }
            Action::Delete(name) => match api.delete(&name, &DeleteParams::default()).await {
                Err(error) if !error.is_not_found() => return Err(error),
                _ => {}
            },
        }
        Ok(())
    }

    fn tell(&self, deployment: &Deployment, message: Option<String>) {
        if let Some(message) = message {
            self.context.events.event(deployment, EventType::Normal, "ScalingReplicaSet", message);
        }
    }

    /// The name is taken: by our own set that the cache does not show yet, or by a set whose other
    /// template has the same hash; then the next pass tries another hash.
    async fn collide(
        &self,
        api: &Api<ReplicaSet>,
        updated: &mut Deployment,
        set: &ReplicaSet,
        error: client::Error,
    ) -> Result<()> {
        let name = set.metadata.name.as_deref().unwrap_or_default();
        let existing = api.get(name).await?;
        let ours = owner::controller(&existing.metadata).map(|owner| &owner.uid)
            == updated.metadata.uid.as_ref();
        if ours && plan::same_template(&existing, updated) {
            return Ok(());
        }
        let status = updated.status.get_or_insert_default();
        status.collision_count = Some(status.collision_count.unwrap_or(0) + 1);
        Err(error)
    }
}

fn selector_of(deployment: &Deployment) -> Option<Selector> {
    let spec = deployment.spec.as_ref()?;
    let selector = Selector::from_api(Some(&spec.selector)).ok()?;
    (!selector.is_everything()).then_some(selector)
}

#[cfg(test)]
mod tests;
