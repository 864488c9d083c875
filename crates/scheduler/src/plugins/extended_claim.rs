//! The special claim of a pod whose extended resources are devices.
//!
//! ```text
//! PreFilter  which resources classes provide; one left over from an earlier attempt is in the way
//! Filter     what this node does not offer itself becomes a claim in memory, for this node
//! Reserve    the devices are decided, the claim is promised
//! PreBind    the claim is written: created, allocated, reserved; the pod's status names it
//! take_back, PostFilter   it is deleted
//! ```
//!
//! Invariant: a promise lives from Reserve until the pod is bound or everything is undone.
//! Upstream: `extendeddynamicresources.go`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use client::{
    Api, Client, DeleteParams, ErrorExt, Patch, PatchParams, PostParams, retry_on_conflict,
};
use k8s_openapi::api::core::v1::{ContainerExtendedResourceRequest, Pod};
use k8s_openapi::api::resource::v1::{DeviceClaim, ResourceClaim, ResourceClaimSpec};
use machinery::{ObjectMeta, OwnerReference};
use serde_json::json;

use crate::claims::{Claims, EXTENDED, FINALIZER, name_of};
use crate::error::BindError;
use crate::extended;
use crate::framework::Rejection;
use crate::metrics;
use crate::pod::PodInfo;
use crate::resources::Resources;

/// The effect of a pod's extended resources on an attempt.
pub enum Extended {
    /// A claim of an earlier attempt is still there: what it has may not do any more.
    Stale(Arc<ResourceClaim>),
    /// The class of each resource that has one.
    Backed(BTreeMap<String, String>),
}

/// A claim for one node, before the API knows it.
#[derive(Clone)]
pub struct Promise {
    pub claim: Arc<ResourceClaim>,
    mappings: Vec<ContainerExtendedResourceRequest>,
    /// Its name, once it is there.
    created: Option<String>,
}

impl Extended {
    /// `None`: no class provides a resource that the pod requests.
    pub fn of(claims: &Claims, pod: &PodInfo) -> Option<Self> {
        if pod.extended.is_empty() {
            return None;
        }
        let asked = pod.requests.scalar.iter().filter(|(_, amount)| **amount > 0);
        let class = |(name, _): (&String, &i64)| {
            let class = claims.class_for(name).filter(|_| extended::is_name(name))?;
            Some((name.clone(), class.metadata.name.clone()?))
        };
        let backed: BTreeMap<_, _> = asked.filter_map(class).collect();
        if backed.is_empty() {
            return None;
        }
        Some(claims.extended(&pod.uid).map_or(Self::Backed(backed), Self::Stale))
    }

    /// The classes that the pod needs on a node with these resources; `None`: the node has all resources itself.
    pub fn on(&self, pod: &PodInfo, allocatable: &Resources) -> Result<Option<Promise>, Rejection> {
        let Self::Backed(backed) = self else {
            return Err(Rejection::unresolvable("cannot schedule extended resource claim"));
        };
        let mut wanted = BTreeMap::new();
        for (name, amount) in &pod.requests.scalar {
            if *amount == 0 || !extended::is_name(name) {
                continue;
            }
            let offered = allocatable.scalar.get(name).copied();
            match backed.get(name) {
                Some(class) if offered.unwrap_or(0) == 0 => {
                    wanted.insert(name.clone(), class.clone());
                }
                _ if offered.is_none() => {
                    return Err(Rejection::unresolvable("cannot fit resource"));
                }
                _ => {}
            }
        }
        let (requests, mappings) = extended::requests(&pod.extended, &wanted);
        if requests.is_empty() {
            return Ok(None);
        }
        let devices = DeviceClaim { requests: Some(requests), ..DeviceClaim::default() };
        let claim = ResourceClaim {
            metadata: metadata(pod),
            spec: ResourceClaimSpec { devices: Some(devices) },
            status: None,
        };
        Ok(Some(Promise { claim: Arc::new(claim), mappings, created: None }))
    }
}

/// It has this uid until the API sets one.
fn metadata(pod: &PodInfo) -> ObjectMeta {
    let owner = OwnerReference {
        api_version: "v1".into(),
        kind: "Pod".into(),
        name: pod.key.name.to_string(),
        uid: pod.uid.clone(),
        controller: Some(true),
        block_owner_deletion: None,
    };
    ObjectMeta {
        namespace: Some(pod.key.namespace.to_string()),
        name: Some("<extended-resources>".into()),
        generate_name: Some(format!("{}-extended-resources-", pod.key.name)),
        uid: Some(format!("extended-resources-{}", pod.uid)),
        annotations: Some([(EXTENDED.to_owned(), "true".to_owned())].into()),
        owner_references: Some(vec![owner]),
        ..ObjectMeta::default()
    }
}

/// Promises by the pod's uid.
#[derive(Default)]
pub struct Promises(Mutex<BTreeMap<String, Promise>>);

impl Promises {
    /// Guards lookups; never held across await.
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Promise>> {
        self.0.lock().expect("lookups do not panic")
    }

    pub fn make(&self, pod: &PodInfo, promise: Promise) {
        self.all().insert(pod.uid.clone(), promise);
    }

    /// The promise is fulfilled or given up.
    pub fn end(&self, pod: &PodInfo) {
        self.all().remove(&pod.uid);
    }

    /// The claim as the API knows it from now on, without its allocation.
    pub async fn create(
        &self,
        client: &Client,
        claims: &Claims,
        pod: &PodInfo,
    ) -> Result<Option<ResourceClaim>, BindError> {
        let Some(promise) = self.all().get(&pod.uid).cloned() else { return Ok(None) };
        let mut claim = (*promise.claim).clone();
        claim.metadata.name = None;
        claim.metadata.uid = None;
        let api: Api<ResourceClaim> = client.api(Some(&pod.key.namespace));
        let created = api.create(&PostParams::default(), &claim).await;
        metrics::claim_created(created.is_ok());
        let created = created.map_err(|error| {
            let namespace = &pod.key.namespace;
            let action = format!("create claim for extended resources {namespace}/");
            BindError::Write { action, error: Box::new(error) }
        })?;
        if let Some(promise) = self.all().get_mut(&pod.uid) {
            promise.created = Some(name_of(&created).to_owned());
        }
        claims.created(&promise.claim, &created);
        Ok(Some(created))
    }

    /// Writes the containers' requests of the claim into the pod's status.
    pub async fn tell(&self, client: &Client, pod: &PodInfo, claim: &str) -> Result<(), BindError> {
        let mappings = self.all().get(&pod.uid).map(|one| one.mappings.clone());
        let patch = json!({"metadata": {"uid": pod.uid}, "status": {"extendedResourceClaimStatus":
            {"requestMappings": mappings.unwrap_or_default(), "resourceClaimName": claim}}});
        let api: Api<Pod> = client.api(Some(&pod.key.namespace));
        let patch = Patch::Strategic(&patch);
        let done = api.patch_status(&pod.key.name, &PatchParams::default(), &patch).await;
        done.map(drop).map_err(|error| {
            let action = format!("update pod {} ExtendedResourceClaimStatus", pod.key);
            BindError::Write { action, error: Box::new(error) }
        })
    }

    /// Deletes the claim of a pod that was not bound.
    pub async fn take_back(&self, client: &Client, pod: &PodInfo) {
        let created = self.all().get(&pod.uid).and_then(|promise| promise.created.clone());
        if let Some(name) = created {
            delete(client, &pod.key.namespace, &name).await;
        }
    }
}

/// Deletes a claim, its finalizer included.
pub async fn delete(client: &Client, namespace: &str, name: &str) {
    let api: &Api<ResourceClaim> = &client.api(Some(namespace));
    let freed = retry_on_conflict(|| async move {
        let mut claim = api.get(name).await?;
        let finalizers = claim.metadata.finalizers.get_or_insert_default();
        finalizers.retain(|one| one != FINALIZER);
        api.replace(name, &PostParams::default(), &claim).await.map(drop)
    })
    .await;
    let done = match freed {
        Ok(()) => api.delete(name, &DeleteParams::default()).await.map(drop),
        Err(error) => Err(error),
    };
    match done {
        Err(error) if !error.is_not_found() => {
            tracing::warn!(
                claim = name,
                error = error.text(),
                "failed to delete the ResourceClaim"
            );
        }
        _ => {}
    }
}
