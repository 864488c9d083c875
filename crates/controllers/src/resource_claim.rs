//! ResourceClaims of pods: created from templates, and released when no pod needs them.
//!
//! In: pods that name claims, templates, claims. Out: claims that pods own, `status` of pods (which
//! claim is theirs) and of claims (who still has them), deletions of claims whose pod is done.
//! Upstream: `pkg/controller/resourceclaim`.
//!
//! Cost: a change decodes the pod and the claims that it names. A template finds its pods by an index.

use std::sync::Arc;

use client::{
    Api, DeleteParams, ErrorExt, Event, EventType, Lister, ObjectKey, Outcome, Patch, PatchParams,
    PostParams, Result, WorkQueue,
};
use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{
    ResourceClaim, ResourceClaimConsumerReference, ResourceClaimTemplate,
};
use machinery::{ObjectMeta, OwnerReference};
use serde_json::json;

use crate::context::Context;
use crate::descriptor::{Descriptor, Row, Setup, further, on};
use crate::owner;
use crate::pod;

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "resourceclaim-controller",
    account: "resource-claim-controller",
    component: "resource_claim",
    queue: "resource_claim",
    workers: 10,
    new: Controller::new,
    watches: &[
        &on(|this: &Controller, _, event| this.pod_event(event)),
        &on(|this: &Controller, _, event| this.claim_event(event)),
        &on(|this: &Controller, _, event: &Event<ResourceClaimTemplate>| {
            this.wake_pods(event.object());
        }),
        &further(
            |this: &Controller| &this.claim_queue,
            10,
            |this, key| Box::pin(async move { this.sync_claim(&key).await }),
        ),
    ],
    reconcile: |this, key| Box::pin(async move { this.sync_pod(&key).await }),
};

/// Pods by the templates that they name.
const BY_TEMPLATE: &str = "claim template";
/// Which of its pod's claims a claim is.
const CLAIM_NAME: &str = "resource.kubernetes.io/pod-claim-name";
/// Held while something is allocated.
const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
/// The maximum length of a generated name without its five random characters.
const LONGEST_BASE: usize = 57;

#[derive(Clone)]
struct Controller {
    context: Context,
    pods: Lister<Pod>,
    claims: Lister<ResourceClaim>,
    templates: Lister<ResourceClaimTemplate>,
    pod_queue: WorkQueue<ObjectKey>,
    claim_queue: WorkQueue<ObjectKey>,
}

fn claims_of(pod: &Pod) -> impl Iterator<Item = &PodResourceClaim> {
    pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten())
}

/// Will not run any more. Upstream: `isPodDone`.
fn is_done(one: &Pod) -> bool {
    pod::is_finished(one) || (pod::is_deleting(one) && pod::node_name(one).is_empty())
}

fn owning_pod(claim: &ResourceClaim) -> Option<(&str, &str)> {
    let owner = owner::controller(&claim.metadata)?;
    let is_pod = owner.api_version == "v1" && owner.kind == "Pod";
    is_pod.then(|| (claim.metadata.namespace.as_deref().unwrap_or_default(), owner.name.as_str()))
}

/// The name of the claim that a pod has for one of its entries, as its status says.
fn known_name<'a>(one: &'a Pod, entry: &'a PodResourceClaim) -> Option<&'a str> {
    if let Some(name) = &entry.resource_claim_name {
        return Some(name);
    }
    let status = one.status.as_ref()?;
    let statuses = status.resource_claim_statuses.iter().flatten();
    let found = statuses.into_iter().find(|status| status.name == entry.name)?;
    found.resource_claim_name.as_deref()
}

/// The claims that a pod's status or spec names: the last is what the scheduler made for its extended
/// resources.
fn known_names(one: &Pod) -> impl Iterator<Item = &str> {
    let extended = one.status.as_ref().and_then(|one| one.extended_resource_claim_status.as_ref());
    let named = claims_of(one).filter_map(|entry| known_name(one, entry));
    named.chain(extended.map(|extended| extended.resource_claim_name.as_str()))
}

/// The claim that a pod gets from a template. Pure.
fn made(one: &Pod, entry: &PodResourceClaim, template: &ResourceClaimTemplate) -> ResourceClaim {
    let pod_name = one.metadata.name.as_deref().unwrap_or_default();
    let whole = format!("{pod_name}-{}-", entry.name);
    let part = |text: &str| text[..text.len() * LONGEST_BASE / whole.len()].to_owned();
    let base = match whole.len() > LONGEST_BASE {
        // Names are ASCII.
        true => format!("{}-{}", part(pod_name), part(&entry.name)),
        false => whole.clone(),
    };
    let meta = template.spec.metadata.clone().unwrap_or_default();
    let mut annotations = meta.annotations.unwrap_or_default();
    annotations.insert(CLAIM_NAME.into(), entry.name.clone());
    let owner = OwnerReference { block_owner_deletion: None, ..owner::reference(one) };
    ResourceClaim {
        metadata: ObjectMeta {
            generate_name: Some(base),
            namespace: one.metadata.namespace.clone(),
            annotations: Some(annotations),
            labels: meta.labels,
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        spec: template.spec.spec.clone(),
        status: None,
    }
}

impl Controller {
    fn new(setup: &Setup<ObjectKey>) -> Option<Self> {
        let pods = setup.informer::<Pod>();
        pods.index(BY_TEMPLATE, |one| {
            let namespace = one.metadata.namespace.as_deref().unwrap_or_default();
            let names =
                claims_of(one).filter_map(|entry| entry.resource_claim_template_name.as_ref());
            names.map(|name| ObjectKey::new(namespace, name).to_string()).collect()
        });
        Some(Self {
            context: setup.context.clone(),
            pods: pods.lister(),
            claims: setup.lister(),
            templates: setup.lister(),
            pod_queue: setup.queue.clone(),
            claim_queue: WorkQueue::new("resource_claim_consumers"),
        })
    }

    fn pod_event(&self, event: &Event<Pod>) {
        let pod = event.object();
        if claims_of(pod).next().is_some() {
            self.pod_queue.add(event.key());
        }
        self.wake_claims(pod);
    }

    fn claim_event(&self, event: &Event<ResourceClaim>) {
        self.claim_queue.add(event.key());
        // A pod may have waited for it, or needs another if it is gone.
        if let Some((namespace, name)) = owning_pod(event.object()) {
            self.pod_queue.add(ObjectKey::new(namespace, name));
        }
    }

    fn wake_claims(&self, one: &Pod) {
        let namespace = one.metadata.namespace.as_deref().unwrap_or_default();
        for name in known_names(one) {
            self.claim_queue.add(ObjectKey::new(namespace, name));
        }
    }

    fn wake_pods(&self, template: &ResourceClaimTemplate) {
        let template = ObjectKey::of(&template.metadata).to_string();
        for one in self.pods.entries_by_index(BY_TEMPLATE, &template) {
            self.pod_queue.add(one.header.key.clone());
        }
    }

    async fn sync_pod(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(one) = self.pods.get_key(key) else { return Ok(Outcome::Done) };
        if pod::is_deleting(&one) || is_done(&one) {
            return Ok(Outcome::Done);
        }
        let mut statuses = vec![];
        for entry in claims_of(&one) {
            let Some(template) = entry.resource_claim_template_name.as_deref() else { continue };
            if known_name(&one, entry).is_some_and(|name| self.is_ours(key, &one, name)) {
                continue;
            }
            match self.claim_for(key, &one, entry, template).await {
                Ok(name) => {
                    statuses.push(json!({ "name": entry.name, "resourceClaimName": name }));
                }
                Err(why) => {
                    let message = format!("PodResourceClaim {}: {why}", entry.name);
                    let reason = "FailedResourceClaimCreation";
                    self.context.events.event(&*one, EventType::Warning, reason, message);
                    return Ok(Outcome::Backoff);
                }
            }
        }
        if !statuses.is_empty() {
            let patch = json!({ "metadata": { "uid": one.metadata.uid },
                "status": { "resourceClaimStatuses": statuses } });
            let api: Api<Pod> = self.context.client.api(Some(&key.namespace));
            let params = PatchParams::default();
            match api.patch_status(&key.name, &params, &Patch::Strategic(&patch)).await {
                Err(error) if error.is_not_found() || error.is_conflict() => {}
                done => drop(done?),
            }
        }
        self.reserve(key, &one).await
    }

    /// Does the claim exist, and is it this pod's?
    fn is_ours(&self, key: &ObjectKey, one: &Pod, claim: &str) -> bool {
        let found = self.claims.get(&key.namespace, claim);
        found.is_some_and(|claim| {
            owner::controller(&claim.metadata)
                .is_some_and(|owner| Some(&owner.uid) == one.metadata.uid.as_ref())
        })
    }

    /// The claim that is there already, or a new one.
    async fn claim_for(
        &self,
        key: &ObjectKey,
        one: &Pod,
        entry: &PodResourceClaim,
        template: &str,
    ) -> Result<String, String> {
        let uid = one.metadata.uid.as_deref().unwrap_or_default();
        let is_it = |claim: &&Arc<ResourceClaim>| {
            let annotations = claim.metadata.annotations.as_ref();
            annotations.and_then(|all| all.get(CLAIM_NAME)) == Some(&entry.name)
        };
        let name = |claim: &ResourceClaim| claim.metadata.name.clone().unwrap_or_default();
        if let Some(there) = self.claims.by_owner(uid).iter().find(is_it) {
            return Ok(name(there));
        }
        let found = self.templates.get(&key.namespace, template);
        let found = found.ok_or_else(|| {
            format!(
                "resource claim template {template:?}: resourceclaimtemplate.resource.k8s.io {template:?} not found"
            )
        })?;
        let api: Api<ResourceClaim> = self.context.client.api(Some(&key.namespace));
        let created = api.create(&PostParams::default(), &made(one, entry, &found)).await;
        created
            .map(|claim| name(&claim))
            .map_err(|error| format!("create ResourceClaim : {}", error.text()))
    }

    /// A pod that another scheduler has bound needs its claims, too.
    async fn reserve(&self, key: &ObjectKey, one: &Pod) -> Result<Outcome> {
        if pod::node_name(one).is_empty() {
            return Ok(Outcome::Done);
        }
        for name in claims_of(one).filter_map(|entry| known_name(one, entry)) {
            let Some(claim) = self.claims.get(&key.namespace, name) else { continue };
            let uid = one.metadata.uid.clone().unwrap_or_default();
            let mut updated = (*claim).clone();
            let status = updated.status.get_or_insert_default();
            let reserved = status.reserved_for.get_or_insert_default();
            // Upstream: `ResourceClaimReservedForMaxSize`.
            let is_full = reserved.len() >= 256;
            if status.allocation.is_none() || is_full || reserved.iter().any(|r| r.uid == uid) {
                continue;
            }
            reserved.push(ResourceClaimConsumerReference {
                api_group: None,
                resource: "pods".into(),
                name: key.name.to_string(),
                uid,
            });
            let api: Api<ResourceClaim> = self.context.client.api(Some(&key.namespace));
            api.replace_status(name, &PostParams::default(), &updated).await?;
        }
        Ok(Outcome::Done)
    }

    async fn sync_claim(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(claim) = self.claims.get_key(key) else { return Ok(Outcome::Done) };
        let status = claim.status.clone().unwrap_or_default();
        let before = status.reserved_for.clone().unwrap_or_default();
        let mut left = vec![];
        for consumer in &before {
            if self.keeps(key, consumer).await? {
                left.push(consumer.clone());
            }
        }
        let api: Api<ResourceClaim> = self.context.client.api(Some(&key.namespace));
        let held = claim.metadata.finalizers.iter().flatten().any(|one| one == FINALIZER);
        let is_free = left.is_empty();
        let is_going = claim.metadata.deletion_timestamp.is_some() && held && is_free;
        if left.len() < before.len() || is_going {
            let mut updated = (*claim).clone();
            let status = updated.status.get_or_insert_default();
            status.reserved_for = Some(left).filter(|left| !left.is_empty());
            if is_free && held {
                status.allocation = None;
            }
            if updated.status != claim.status {
                updated = api.replace_status(&key.name, &PostParams::default(), &updated).await?;
            }
            let allocation = updated.status.as_ref().and_then(|status| status.allocation.as_ref());
            if held && allocation.is_none() {
                let finalizers = updated.metadata.finalizers.get_or_insert_default();
                finalizers.retain(|one| one != FINALIZER);
                match api.replace(&key.name, &PostParams::default(), &updated).await {
                    Err(error) if error.is_not_found() => return Ok(Outcome::Done),
                    done => drop(done?),
                }
            }
        }
        if is_free && self.is_unused(&claim) && claim.metadata.deletion_timestamp.is_none() {
            match api.delete(&key.name, &DeleteParams::default()).await {
                Err(error) if error.is_not_found() => {}
                done => drop(done?),
            }
        }
        Ok(Outcome::Done)
    }

    /// Does this consumer still need the claim? The cache may not know a pod that is new.
    async fn keeps(
        &self,
        key: &ObjectKey,
        consumer: &ResourceClaimConsumerReference,
    ) -> Result<bool> {
        let group = consumer.api_group.as_deref().unwrap_or_default();
        if !group.is_empty() || consumer.resource != "pods" {
            return Ok(true);
        }
        if let Some(one) = self.pods.get(&key.namespace, &consumer.name) {
            let is_same = one.metadata.uid.as_deref() == Some(&consumer.uid);
            return Ok(is_same && !is_done(&one));
        }
        let api: Api<Pod> = self.context.client.api(Some(&key.namespace));
        let found = api.get_opt(&consumer.name).await?;
        Ok(found.is_some_and(|one| one.metadata.uid.as_deref() == Some(&consumer.uid)))
    }

    /// Was the claim made for a pod that is done? When the pod is gone, the garbage collector acts.
    fn is_unused(&self, claim: &ResourceClaim) -> bool {
        let Some((namespace, name)) = owning_pod(claim) else { return false };
        let owner = owner::controller(&claim.metadata);
        self.pods.get(namespace, name).is_some_and(|one| {
            is_done(&one) || owner.map(|owner| &owner.uid) != one.metadata.uid.as_ref()
        })
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{Value, from_value};

    use super::*;

    fn pod(name: &str, entry: &str, status: Value) -> Pod {
        from_value(json!({"metadata": {"name": name, "namespace": "ns", "uid": "u"},
            "spec": {"containers": [], "resourceClaims": [
                {"name": entry, "resourceClaimTemplateName": "t"}]}, "status": status}))
        .unwrap()
    }

    #[test]
    fn claims_are_named_after_pod_and_entry() {
        let template: ResourceClaimTemplate = from_value(json!({"metadata": {"name": "t"},
            "spec": {"metadata": {"labels": {"a": "b"}}, "spec": {"devices": {}}}}))
        .unwrap();
        let check = |name: &str, entry: &str, expected: &str| {
            let pod = pod(name, entry, json!({}));
            let claim = made(&pod, claims_of(&pod).next().unwrap(), &template);
            assert_eq!(claim.metadata.generate_name.as_deref(), Some(expected));
            let owners = claim.metadata.owner_references.clone().unwrap();
            assert_eq!((owners[0].uid.as_str(), owners[0].controller), ("u", Some(true)));
            assert_eq!(claim.metadata.labels.unwrap()["a"], "b");
            assert_eq!(claim.metadata.annotations.unwrap()[CLAIM_NAME], entry);
        };
        check("p", "gpu", "p-gpu-");
        let long = "a".repeat(80);
        check(&long, "gpu", &format!("{}-gp", "a".repeat(80 * 57 / 85)));
    }

    #[test]
    fn a_pods_status_names_its_claims() {
        let check = |status: Value, expected: Option<&str>| {
            let pod = pod("p", "gpu", status);
            assert_eq!(known_name(&pod, claims_of(&pod).next().unwrap()), expected);
        };
        check(json!({}), None);
        let other = json!({"resourceClaimStatuses": [{"name": "x", "resourceClaimName": "c"}]});
        check(other, None);
        let own = json!({"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "c"}]});
        check(own, Some("c"));
    }

    /// No other component releases the extended resources of a finished pod.
    #[test]
    fn claims_for_extended_resources_are_looked_at_with_their_pod() {
        let check = |status: Value, expected: &[&str]| {
            let pod = pod("p", "gpu", status);
            assert_eq!(known_names(&pod).collect::<Vec<_>>(), expected);
        };
        let extended = json!({"requestMappings": [], "resourceClaimName": "x"});
        check(json!({"extendedResourceClaimStatus": extended}), &["x"]);
        let own = json!([{"name": "gpu", "resourceClaimName": "c"}]);
        check(
            json!({"resourceClaimStatuses": own, "extendedResourceClaimStatus": extended}),
            &["c", "x"],
        );
    }

    #[test]
    fn pods_that_will_not_run_are_done() {
        let check = |extra: Value, status: Value, expected: bool| {
            let mut one = pod("p", "gpu", status);
            let meta: ObjectMeta = from_value(extra).unwrap();
            one.metadata.deletion_timestamp = meta.deletion_timestamp;
            assert_eq!(is_done(&one), expected);
        };
        let going = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        check(json!({}), json!({"phase": "Running"}), false);
        check(json!({}), json!({"phase": "Succeeded"}), true);
        check(going, json!({"phase": "Pending"}), true);
    }
}
