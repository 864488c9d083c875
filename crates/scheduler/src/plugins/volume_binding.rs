//! Pods go where their volumes are; claims that wait for a pod get a volume where it goes.
//!
//! Upstream: `volumebinding`. Before a pod is bound, each claim of a class that waits for its first
//! consumer is given either a volume that the node can use (by its claim reference) or the node's
//! name, for the provisioner; the pod is bound when the claims are.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use client::{Api, Client, ObjectKey, Patch, PatchParams, PostParams};
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use serde_json::json;

use super::hints;
use crate::capacity::{self, Room};
use crate::cluster::Cluster;
use crate::error::BindError;
use crate::framework::{
    ClusterEvent, CycleState, ExtensionPoints, Filter, Next, PreBind, PreFilter, Rejection, Row,
};
use crate::node::NodeInfo;
use crate::pod::PodInfo;
use crate::volumes::Volumes;
use api::node_selectors;

const NAME: &str = "VolumeBinding";
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
const NO_PROVISIONER: &str = "kubernetes.io/no-provisioner";

pub const ROW: Row = Row {
    name: NAME,
    weight: 0,
    build: |handle| {
        let Some(volumes) = handle.volumes.clone() else { return ExtensionPoints::default() };
        let plugin = Arc::new(VolumeBinding {
            client: handle.client.clone(),
            volumes,
            timeout: handle.args.bind_timeout,
        });
        ExtensionPoints {
            pre_filter: Some(plugin.clone()),
            filter: Some(plugin.clone()),
            pre_bind: Some(plugin),
            ..Default::default()
        }
    },
    hint: |pod, event| {
        matches!(event, ClusterEvent::RoomGrew)
            || hints::volumes_change(pod, event)
            || hints::is_labelled(pod, event)
    },
};

struct VolumeBinding {
    client: Client,
    volumes: Volumes,
    /// For a provisioner to be done; the pod is tried again after it.
    timeout: Duration,
}

/// The claims of a pod.
#[derive(Default)]
struct Found {
    bound: Vec<Arc<PersistentVolume>>,
    waiting: Vec<Waiting>,
    free: Vec<Arc<PersistentVolume>>,
}

/// A claim that waits for its first pod.
struct Waiting {
    claim: Arc<PersistentVolumeClaim>,
    class: Arc<StorageClass>,
    /// The nodes where a volume can be provisioned for it.
    room: Room,
}

fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    let annotations = claim.metadata.annotations.as_ref();
    let named = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
    annotations.is_some_and(|all| all.contains_key(BIND_COMPLETED))
        && named.is_some_and(|name| !name.is_empty())
}

fn fits(volume: &PersistentVolume, node: &str, labels: &BTreeMap<String, String>) -> bool {
    let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref());
    let required = affinity.and_then(|affinity| affinity.required.as_ref());
    required.is_none_or(|required| node_selectors::matches(required, node, labels))
}

impl VolumeBinding {
    fn find(&self, pod: &PodInfo) -> Result<Found, Rejection> {
        let mut found = Found::default();
        let no = Rejection::unresolvable;
        for name in &pod.claims {
            let claim = self.volumes.claim(&pod.key.namespace, name);
            let claim =
                claim.ok_or_else(|| no(format!("persistentvolumeclaim \"{name}\" not found")))?;
            if claim.metadata.deletion_timestamp.is_some() {
                return Err(no(format!("persistentvolumeclaim \"{name}\" is being deleted")));
            }
            let lost = claim.status.as_ref().and_then(|status| status.phase.as_deref());
            if lost == Some("Lost") {
                let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
                return Err(no(format!(
                    "persistentvolumeclaim \"{name}\" bound to non-existent persistentvolume \"{}\"",
                    volume.unwrap_or_default()
                )));
            }
            if is_bound(&claim) {
                let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
                let volume = self.volumes.volume(volume.unwrap_or_default());
                found.bound.push(volume.ok_or_else(|| {
                    no("node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)".to_owned())
                })?);
                continue;
            }
            let class = api::volumes::class_of(&claim).and_then(|name| self.volumes.class(name));
            match class.filter(|class| api::volumes::waits_for_consumer(Some(class))) {
                Some(class) => {
                    let room = self.room(&claim, &class);
                    found.waiting.push(Waiting { claim, class, room });
                }
                None => {
                    return Err(no("pod has unbound immediate PersistentVolumeClaims".to_owned()));
                }
            }
        }
        if !found.waiting.is_empty() {
            let claims = found.waiting.iter().map(|one| ObjectKey::of(&one.claim.metadata));
            found.free = self.volumes.free_for(&claims.collect::<Vec<_>>());
        }
        Ok(found)
    }

    fn room(&self, claim: &PersistentVolumeClaim, class: &StorageClass) -> Room {
        if !capacity::is_told(self.volumes.driver(&class.provisioner).as_deref()) {
            return Room::Everywhere;
        }
        let name = class.metadata.name.as_deref().unwrap_or_default();
        capacity::room(claim, name, &self.volumes.capacities())
    }

    /// A volume on the node for the claim, or whether one can be made there. Pure but for `found`.
    fn choose<'a>(
        free: &'a [Arc<PersistentVolume>],
        claim: &PersistentVolumeClaim,
        node: &str,
        labels: &BTreeMap<String, String>,
        taken: &[&Arc<PersistentVolume>],
    ) -> Option<&'a Arc<PersistentVolume>> {
        let usable: Vec<_> = free
            .iter()
            .filter(|volume| fits(volume, node, labels))
            .filter(|volume| !taken.iter().any(|one| Arc::ptr_eq(one, volume)))
            .cloned()
            .collect();
        let chosen = api::volumes::find(claim, &usable, true)?;
        free.iter().find(|volume| Arc::ptr_eq(volume, chosen))
    }
}

impl PreFilter for VolumeBinding {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        _: &Cluster,
    ) -> Result<Next, Rejection> {
        if pod.claims.is_empty() {
            return Ok(Next::Skip);
        }
        state.put(NAME, self.find(pod)?);
        Ok(Next::Filter)
    }
}

impl Filter for VolumeBinding {
    fn filter(&self, state: &CycleState, _: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let Some(found) = state.get::<Found>(NAME) else { return Ok(()) };
        if !found.bound.iter().all(|volume| fits(volume, &node.name, &node.labels)) {
            let why = "node(s) didn't match PersistentVolume's node affinity";
            return Err(Rejection::unresolvable(why));
        }
        let mut taken = vec![];
        for Waiting { claim, class, room } in &found.waiting {
            let annotations = claim.metadata.annotations.as_ref();
            let selected = annotations.and_then(|all| all.get(SELECTED_NODE));
            if selected.is_some_and(|selected| *selected != node.name) {
                return Err(Rejection::unresolvable(
                    "node(s) didn't find available persistent volumes to bind",
                ));
            }
            match Self::choose(&found.free, claim, &node.name, &node.labels, &taken) {
                Some(volume) => taken.push(volume),
                None if class.provisioner == NO_PROVISIONER
                    || !capacity::reaches(class, &node.labels) =>
                {
                    let why = "node(s) didn't find available persistent volumes to bind";
                    return Err(Rejection::unresolvable(why));
                }
                None if !room.has(&node.labels) => {
                    let why = "node(s) did not have enough free storage";
                    return Err(Rejection::unresolvable(why));
                }
                None => {}
            }
        }
        Ok(())
    }
}

impl PreBind for VolumeBinding {
    fn pre_bind<'a>(
        &'a self,
        pod: &'a PodInfo,
        node: &'a str,
    ) -> BoxFuture<'a, Result<(), BindError>> {
        Box::pin(async move {
            if pod.claims.is_empty() {
                return Ok(());
            }
            let found = self.find(pod).map_err(BindError::Rejected)?;
            if found.waiting.is_empty() {
                return Ok(());
            }
            let mut changes = self.volumes.changes();
            let nodes: Api<k8s_openapi::api::core::v1::Node> = self.client.api(None);
            let labels = nodes.get(node).await?.metadata.labels;
            let labels = labels.unwrap_or_default();
            let mut taken = vec![];
            for Waiting { claim, .. } in &found.waiting {
                match Self::choose(&found.free, claim, node, &labels, &taken) {
                    Some(volume) => {
                        taken.push(volume);
                        self.reserve(volume, claim).await?;
                    }
                    None => self.select_node(claim, node).await?,
                }
            }
            let all_bound = async {
                loop {
                    let bound = |name: &String| {
                        let claim = self.volumes.claim(&pod.key.namespace, name);
                        claim.is_some_and(|claim| is_bound(&claim))
                    };
                    if pod.claims.iter().all(bound) || changes.changed().await.is_err() {
                        return;
                    }
                }
            };
            let waited = tokio::time::timeout(self.timeout, all_bound).await;
            waited.map_err(|_| BindError::VolumesTimeout)
        })
    }
}

impl VolumeBinding {
    /// Writes the claim's reference into the volume. The first writer gets the volume.
    async fn reserve(
        &self,
        volume: &PersistentVolume,
        claim: &PersistentVolumeClaim,
    ) -> Result<(), BindError> {
        let spec = volume.spec.as_ref();
        if spec.is_some_and(|spec| spec.claim_ref.is_some()) {
            return Ok(());
        }
        let mut reserved = volume.clone();
        reserved.spec.get_or_insert_default().claim_ref = Some(ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("PersistentVolumeClaim".into()),
            namespace: claim.metadata.namespace.clone(),
            name: claim.metadata.name.clone(),
            uid: claim.metadata.uid.clone(),
            resource_version: claim.metadata.resource_version.clone(),
            field_path: None,
        });
        let annotations = reserved.metadata.annotations.get_or_insert_default();
        annotations.insert(BOUND_BY_CONTROLLER.into(), "yes".into());
        let api: Api<PersistentVolume> = self.client.api(None);
        let name = volume.metadata.name.clone().unwrap_or_default();
        api.replace(&name, &PostParams::default(), &reserved).await?;
        Ok(())
    }

    async fn select_node(
        &self,
        claim: &PersistentVolumeClaim,
        node: &str,
    ) -> Result<(), BindError> {
        let annotations = claim.metadata.annotations.as_ref();
        if annotations.and_then(|all| all.get(SELECTED_NODE)).is_some_and(|known| known == node) {
            return Ok(());
        }
        let api: Api<PersistentVolumeClaim> = self.client.api(claim.metadata.namespace.as_deref());
        let patch = json!({"metadata": {"uid": claim.metadata.uid,
            "annotations": {SELECTED_NODE: node}}});
        let name = claim.metadata.name.clone().unwrap_or_default();
        api.patch(&name, &PatchParams::default(), &Patch::Strategic(&patch)).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::from_value;

    use super::*;

    #[test]
    fn a_volume_is_chosen_where_the_node_can_use_it() {
        let volume = |name: &str, node: &str| -> Arc<PersistentVolume> {
            Arc::new(
                from_value(json!({"metadata": {"name": name}, "status": {"phase": "Available"},
                    "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
                        "storageClassName": "local", "nodeAffinity": {"required":
                        {"nodeSelectorTerms": [{"matchExpressions": [{"key": "host",
                            "operator": "In", "values": [node]}]}]}}}}))
                .unwrap(),
            )
        };
        let claim: PersistentVolumeClaim = from_value(json!({"metadata": {"name": "c"},
            "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "local",
                "resources": {"requests": {"storage": "1Gi"}}}}))
        .unwrap();
        let free = [volume("a", "n1"), volume("b", "n2"), volume("c", "n2")];
        let check = |node: &str, taken: &[&Arc<PersistentVolume>], expected: Option<&str>| {
            let labels = BTreeMap::from([("host".to_owned(), node.to_owned())]);
            let chosen = VolumeBinding::choose(&free, &claim, node, &labels, taken);
            let name = chosen.and_then(|volume| volume.metadata.name.as_deref());
            assert_eq!(name, expected, "{node}");
        };
        check("n1", &[], Some("a"));
        check("n2", &[], Some("b"));
        check("n2", &[&free[1]], Some("c"));
        check("n1", &[&free[0]], None);
        check("n3", &[], None);
    }
}
