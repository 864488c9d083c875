//! Keeps claims that pods use, volumes that claims use, and attribute classes that either names, until
//! they are free.
//!
//! In: claims, pods, volumes, classes. Out: their finalizers.
//! Upstream: `pkg/controller/volume/{pvcprotection,pvprotection,vacprotection}`.
//!
//! Cost: indexes say who names a claim or a class. A claim that goes decodes the pods that mount it, a class
//! that goes decodes nothing but itself. Pods, claims and volumes that change cost nothing until one goes.

use std::collections::BTreeSet;
use std::sync::Arc;

use client::{
    Api, Client, Event, Informer, Kind, Lister, ObjectKey, Outcome, PostParams, Result, WorkQueue,
};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use machinery::ObjectMeta;

use crate::descriptor::{Descriptor, Row, Setup, on, on_metadata, or_gone, own};
use crate::pod;

pub const CLAIMS: &dyn Row = &Descriptor::<Claims> {
    name: "persistentvolumeclaim-protection-controller",
    account: "pvc-protection-controller",
    component: "pvc-protection-controller",
    queue: "pvcprotection",
    workers: 1,
    new: |setup| {
        let pods = setup.informer();
        index_claims(&pods);
        let client = setup.client.clone();
        Some(Claims { client, claims: setup.lister(), pods: pods.lister() })
    },
    watches: &[
        &own::<PersistentVolumeClaim>(),
        &on(|_: &Claims, queue, event: &Event<Pod>| {
            let pod = event.object();
            if event.is_deleted() || pod::is_finished(pod) {
                for name in claims_of(pod) {
                    queue.add(ObjectKey::new(&event.key().namespace, &name));
                }
            }
        }),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

pub const VOLUMES: &dyn Row = &Descriptor::<Volumes> {
    name: "persistentvolume-protection-controller",
    account: "pv-protection-controller",
    component: "pv-protection-controller",
    queue: "pvprotection",
    workers: 1,
    new: |setup| Some(Volumes { client: setup.client.clone(), volumes: setup.lister() }),
    watches: &[&own::<PersistentVolume>()],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

pub const CLASSES: &dyn Row = &Descriptor::<Classes> {
    name: "volumeattributesclass-protection-controller",
    account: "volumeattributesclass-protection-controller",
    component: "vac-protection-controller",
    queue: "vacprotection",
    workers: 1,
    new: Classes::new,
    watches: &[
        &own::<VolumeAttributesClass>(),
        // A claim or volume that changes may have let a class go that waits for that.
        &on_metadata::<PersistentVolumeClaim, _, _>(|this: &Classes, queue, _| this.wake(queue)),
        &on_metadata::<PersistentVolume, _, _>(|this: &Classes, queue, _| this.wake(queue)),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

/// Pods by the claims that they mount.
pub const BY_CLAIM: &str = "claim";
/// Claims and volumes by the attribute classes that they name.
const BY_CLASS: &str = "attributes class";
const CLAIM: &str = "kubernetes.io/pvc-protection";
const VOLUME: &str = "kubernetes.io/pv-protection";
const CLASS: &str = "kubernetes.io/vac-protection";
/// Classes that have a deletion timestamp.
const GOING: &str = "going";

struct Claims {
    client: Client,
    claims: Lister<PersistentVolumeClaim>,
    pods: Lister<Pod>,
}

impl Claims {
    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(claim) = self.claims.get_key(key) else { return Ok(Outcome::Done) };
        let in_use = || {
            let mounting = self.pods.by_index(BY_CLAIM, &key.to_string());
            mounting.iter().any(|pod| uses(pod, &key.name))
        };
        let finalizers = plan(&claim.metadata, CLAIM, in_use);
        write(&self.client.api(Some(&key.namespace)), &claim, finalizers).await
    }
}

struct Volumes {
    client: Client,
    volumes: Lister<PersistentVolume>,
}

impl Volumes {
    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(volume) = self.volumes.get_key(key) else { return Ok(Outcome::Done) };
        let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref());
        let finalizers = plan(&volume.metadata, VOLUME, || phase == Some("Bound"));
        write(&self.client.api(None), &volume, finalizers).await
    }
}

struct Classes {
    client: Client,
    classes: Lister<VolumeAttributesClass>,
    claims: Lister<PersistentVolumeClaim>,
    volumes: Lister<PersistentVolume>,
}

impl Classes {
    fn new(setup: &Setup<ObjectKey>) -> Option<Self> {
        let classes = setup.informer::<VolumeAttributesClass>();
        let (claims, volumes) = (setup.informer(), setup.informer());
        claims.index(BY_CLASS, classes_of);
        volumes.index(BY_CLASS, |volume| {
            class_of(volume).into_iter().map(ToOwned::to_owned).collect()
        });
        classes.index_headers(GOING, |header| {
            let going = header.deleting.then(|| GOING.to_owned());
            going.into_iter().collect()
        });
        Some(Self {
            client: setup.client.clone(),
            classes: classes.lister(),
            claims: claims.lister(),
            volumes: volumes.lister(),
        })
    }

    fn wake(&self, queue: &WorkQueue<ObjectKey>) {
        for class in self.classes.entries_by_index(GOING, GOING) {
            queue.add(class.header.key.clone());
        }
    }

    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(class) = self.classes.get_key(key) else { return Ok(Outcome::Done) };
        let in_use = || {
            self.claims.count_by_index(BY_CLASS, &key.name) > 0
                || self.volumes.count_by_index(BY_CLASS, &key.name) > 0
        };
        let finalizers = plan(&class.metadata, CLASS, in_use);
        write(&self.client.api(None), &class, finalizers).await
    }
}

fn class_of(volume: &PersistentVolume) -> Option<&str> {
    volume.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.as_deref())
}

/// The classes that a claim wants, has or is on its way to.
fn classes_of(claim: &PersistentVolumeClaim) -> Vec<String> {
    let (spec, status) = (claim.spec.as_ref(), claim.status.as_ref());
    let wanted = spec.and_then(|spec| spec.volume_attributes_class_name.as_deref());
    let present = status.and_then(|status| status.current_volume_attributes_class_name.as_deref());
    let change = status.and_then(|status| status.modify_volume_status.as_ref());
    let target = change.and_then(|it| it.target_volume_attributes_class_name.as_deref());
    let all: BTreeSet<&str> = [wanted, present, target].into_iter().flatten().collect();
    all.into_iter().map(ToOwned::to_owned).collect()
}

/// Prepares for look-ups of the pods that mount a claim.
pub fn index_claims(pods: &Informer<Pod>) {
    pods.index(BY_CLAIM, |pod| {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let key = |name: String| ObjectKey::new(namespace, &name).to_string();
        claims_of(pod).into_iter().map(key).collect()
    });
}

/// Names of the claims that a pod mounts.
pub fn claims_of(pod: &Pod) -> Vec<String> {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes
        .filter_map(|volume| {
            let named = volume.persistent_volume_claim.as_ref().map(|one| one.claim_name.clone());
            let own = || format!("{name}-{}", volume.name);
            named.or_else(|| volume.ephemeral.as_ref().map(|_| own()))
        })
        .collect()
}

/// A pod that was never placed, or has ended, holds nothing.
fn uses(pod: &Pod, claim: &str) -> bool {
    let waits_in_vain = pod::node_name(pod).is_empty() && pod::is_deleting(pod);
    !pod::is_finished(pod) && !waits_in_vain && claims_of(pod).iter().any(|name| name == claim)
}

/// The finalizers to write, if others than are there. Pure.
fn plan(meta: &ObjectMeta, ours: &str, in_use: impl Fn() -> bool) -> Option<Vec<String>> {
    let mut all = meta.finalizers.clone().unwrap_or_default();
    let has = all.iter().any(|one| one == ours);
    match (meta.deletion_timestamp.is_some(), has) {
        (false, false) => all.push(ours.into()),
        (true, true) if !in_use() => all.retain(|one| one != ours),
        _ => return None,
    }
    Some(all)
}

async fn write<T: Kind>(
    api: &Api<T>,
    object: &Arc<T>,
    finalizers: Option<Vec<String>>,
) -> Result<Outcome> {
    let Some(finalizers) = finalizers else {
        return Ok(Outcome::Done);
    };
    let mut updated = (**object).clone();
    updated.metadata_mut().finalizers = (!finalizers.is_empty()).then_some(finalizers);
    let name = object.metadata().name.clone().unwrap_or_default();
    or_gone(api.replace(&name, &PostParams::default(), &updated).await)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{Value, from_value, json};

    use super::*;

    #[test]
    fn finalizers_come_and_go() {
        let check = |meta: Value, in_use: bool, expected: Option<&[&str]>| {
            let found = plan(&from_value(meta.clone()).unwrap(), CLAIM, || in_use);
            let expected =
                expected.map(|all| all.iter().map(|one| one.to_string()).collect::<Vec<_>>());
            assert_eq!(found, expected, "{meta}");
        };
        check(json!({}), false, Some(&[CLAIM]));
        check(json!({"finalizers": [CLAIM]}), true, None);
        let going =
            json!({"finalizers": ["x", CLAIM], "deletionTimestamp": "2026-01-01T00:00:00Z"});
        check(going.clone(), true, None);
        check(going, false, Some(&["x"]));
    }

    #[test]
    fn claims_hold_the_classes_they_name() {
        let check = |claim: Value, expected: bool| {
            let claim: PersistentVolumeClaim = from_value(claim).unwrap();
            let is_named = classes_of(&claim).iter().any(|class| class == "gold");
            assert_eq!(is_named, expected, "{claim:?}");
        };
        check(json!({"metadata": {}, "spec": {}}), false);
        check(json!({"metadata": {}, "spec": {"volumeAttributesClassName": "gold"}}), true);
        let change = json!({"status": "Pending", "targetVolumeAttributesClassName": "gold"});
        check(json!({"metadata": {}, "status": {"modifyVolumeStatus": change}}), true);
        check(
            json!({"metadata": {}, "status": {"currentVolumeAttributesClassName": "gold"}}),
            true,
        );
    }

    #[test]
    fn pods_hold_what_they_mount() {
        let check = |pod: Value, expected: bool| {
            let pod: Pod = from_value(pod.clone()).unwrap();
            assert_eq!(uses(&pod, "data"), expected, "{pod:?}");
        };
        let volumes = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]);
        let spec = json!({"containers": [], "volumes": volumes});
        check(json!({"metadata": {"name": "p"}, "spec": spec}), true);
        check(
            json!({"metadata": {"name": "p"}, "spec": spec, "status": {"phase": "Failed"}}),
            false,
        );
        let own = json!({"containers": [], "volumes": [{"name": "data", "ephemeral": {}}]});
        let pod: Pod = from_value(json!({"metadata": {"name": "p"}, "spec": own})).unwrap();
        assert_eq!(claims_of(&pod), ["p-data"]);
    }
}
