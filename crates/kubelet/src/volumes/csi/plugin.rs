//! Volumes of CSI drivers: of claims, and in the pod itself.

use std::collections::BTreeMap;
use std::path::Path;

use async_trait::async_trait;
use client::{ErrorExt, EventType};
use http::Method;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimCondition};
use serde_json::{Value, json};

use super::mounting::{MountRequest, Origin};
use super::record::{entries, last};
use super::{Use, UseKey, place};
use crate::resources::units;
use crate::volumes::dir::PodDir;
use crate::volumes::plugin::{Bound, Host, Mounted, Request, Source, VolumeError, VolumePlugin};

const STORAGE: &str = "storage";

pub struct CsiPlugin;

#[async_trait]
impl VolumePlugin for CsiPlugin {
    fn name(&self) -> &'static str {
        "csi"
    }

    fn supports(&self, source: &Source<'_>) -> bool {
        let own = source.bound.is_none() && source.volume.csi.is_some();
        own || source.persistent().is_some_and(|spec| spec.csi.is_some())
    }

    /// Drivers may want to publish a volume again and again.
    fn refreshes(&self) -> bool {
        true
    }

    async fn set_up(&self, host: &Host, request: &Request<'_>) -> Result<Mounted, VolumeError> {
        let source = &request.source;
        let origin = match (source.bound, &source.volume.csi) {
            (Some(bound), _) => {
                Origin::Persistent { volume: &bound.volume, read_only: bound.read_only }
            }
            (None, Some(csi)) => Origin::Inline(csi),
            (None, None) => return Err(VolumeError::Unsupported),
        };
        let (pod, name) = (request.pod, source.volume.name.as_str());
        let (objects, input) = (&host.objects, request.input);
        let order = MountRequest { pod, dir: request.dir, name, origin, objects, input };
        let (mounted, is_new) = host.csi.mount(&order).await?;
        if let Some(bound) = source.bound {
            grow(host, &order, bound).await;
        }
        if mounted.is_device && is_new {
            host.tell_mapped(pod, &mounted.path);
        }
        Ok(mounted)
    }

    async fn tear_down(&self, host: &Host, uid: &str, dir: &PodDir) -> Result<(), VolumeError> {
        host.csi.unmount_pod(uid, dir).await.map_err(VolumeError::from)
    }

    fn recover(&self, host: &Host) {
        host.csi.adopt(uses(&host.root));
    }
}

/// The volumes that an earlier kubelet mounted into pods.
pub(super) fn uses(root: &Path) -> BTreeMap<UseKey, Use> {
    let mut out = BTreeMap::new();
    for pod in entries(&root.join("pods")) {
        for (volume, _, data) in place::of_pod(root, &pod) {
            if let Ok(Some(data)) = data {
                let is_attachable = place::is_persistent(&data);
                let (name, unique) = (String::new(), data.unique());
                let one = Use { name, unique, is_attachable, published: None };
                out.insert((last(&pod), volume), one);
            }
        }
    }
    out
}

/// Has the driver expand the file system if the volume is larger than the claim's status says.
async fn grow(host: &Host, order: &MountRequest<'_>, bound: &Bound) {
    let Some((size, bytes)) = grown(bound) else { return };
    let name = bound.volume.metadata.name.as_deref().unwrap_or_default();
    match host.csi.expand(order, bytes).await {
        Ok(false) => {}
        Ok(true) => {
            let node = &host.node_name;
            let text = format!("MountVolume.NodeExpandVolume succeeded for volume {name:?} {node}");
            let reason = "FileSystemResizeSuccessful";
            host.events.tell(order.pod, EventType::Normal, reason, text);
            if let Err(error) = tell_size(host, &bound.claim, &size).await {
                tracing::warn!(
                    volume = name,
                    error = error.text(),
                    "failed to update the claim's capacity"
                );
            }
        }
        Err(why) => {
            let text =
                format!("NodeExpandVolume.NodeExpandVolume failed for volume {name:?} : {why}");
            host.events.warn(order.pod, "VolumeResizeFailed", text);
        }
    }
}

/// Upstream: MarkNodeExpansionFinishedWithRecovery.
async fn tell_size(host: &Host, claim: &PersistentVolumeClaim, size: &str) -> client::Result<()> {
    let meta = &claim.metadata;
    let path = format!(
        "/api/v1/namespaces/{}/persistentvolumeclaims/{}/status",
        meta.namespace.as_deref().unwrap_or_default(),
        meta.name.as_deref().unwrap_or_default()
    );
    let patch = size_patch(claim, size).to_string();
    let kind = "application/merge-patch+json";
    host.client.call(Method::PATCH, &path, kind, patch).await.map(drop)
}

fn size_patch(claim: &PersistentVolumeClaim, size: &str) -> Value {
    let status = claim.status.clone().unwrap_or_default();
    let is_done = |condition: &PersistentVolumeClaimCondition| {
        let of_resizes =
            ["Resizing", "FileSystemResizePending", "ControllerResizeError", "NodeResizeError"];
        of_resizes.contains(&condition.type_.as_str())
    };
    let left: Vec<_> =
        status.conditions.into_iter().flatten().filter(|condition| !is_done(condition)).collect();
    let mut patch = json!({"capacity": {STORAGE: size}, "conditions": left});
    if status.allocated_resource_statuses.is_some() {
        patch["allocatedResourceStatuses"] = json!({STORAGE: null});
    }
    json!({ "status": patch })
}

/// The volume's size, if it is larger than in the claim's status.
fn grown(bound: &Bound) -> Option<(String, i64)> {
    let size = bound.volume.spec.as_ref()?.capacity.as_ref()?.get(STORAGE)?;
    let known = bound.claim.status.as_ref()?.capacity.as_ref()?.get(STORAGE)?;
    (units(size) > units(known)).then(|| (size.0.clone(), units(size)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_that_grew() {
        let check = |volume: &str, known: Value, expected: Option<i64>| {
            let bound = Bound {
                claim: serde_json::from_value(json!({"status": {"capacity": known}})).expect("one"),
                volume: serde_json::from_value(json!({"spec": {"capacity": {"storage": volume}}}))
                    .expect("a volume"),
                read_only: false,
            };
            assert_eq!(grown(&bound).map(|(_, bytes)| bytes), expected, "{volume} {known}");
        };
        check("2Gi", json!({"storage": "1Gi"}), Some(2 << 30));
        check("1Gi", json!({"storage": "1Gi"}), None);
        check("1Gi", json!({"storage": "2Gi"}), None);
        check("1Gi", json!(null), None);
    }

    #[test]
    fn the_patch_of_a_claims_status() {
        let claim: PersistentVolumeClaim = serde_json::from_value(json!({"status": {
            "allocatedResourceStatuses": {"storage": "NodeResizePending"},
            "conditions": [{"type": "FileSystemResizePending", "status": "True"},
                {"type": "Other", "status": "True"}]}}))
        .expect("a claim");
        let expected = json!({"status": {"capacity": {"storage": "2Gi"},
            "allocatedResourceStatuses": {"storage": null},
            "conditions": [{"type": "Other", "status": "True"}]}});
        assert_eq!(size_patch(&claim, "2Gi"), expected);
    }
}
