//! This node's CSI drivers in the API: the CSINode object, the node's topology labels and the
//! annotation with its ids.
//!
//! In: drivers that register and unregister. Out: updates of those objects.
//! Upstream: `pkg/volume/csi/nodeinfomanager`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base::backoff::Backoff;
use client::{Api, DeleteParams, ErrorExt, PostParams};
use http::Method;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::{CSINode, CSINodeDriver, CSINodeSpec, VolumeNodeResources};
use machinery::{ObjectMeta, OwnerReference};
use serde_json::json;

use super::Csi;
use super::error::CsiError;
use super::messages::NodeInfo;

const IDS: &str = "csi.volume.kubernetes.io/nodeid";
/// In-tree plugins that CSI drivers replace; the scheduler counts volume limits by this.
const MIGRATED: &str = "storage.alpha.kubernetes.io/migrated-plugins";
const MIGRATED_PLUGINS: &str = "kubernetes.io/aws-ebs,kubernetes.io/azure-disk,\
                                kubernetes.io/azure-file,kubernetes.io/cinder,\
                                kubernetes.io/gce-pd,kubernetes.io/portworx-volume,\
                                kubernetes.io/vsphere-volume";
/// Upstream: updateBackoff.
const TRIES: u32 = 4;

/// Creates the CSINode, as soon as the node exists.
pub async fn keep(csi: Arc<Csi>) {
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(7));
    while let Err(error) = csi.csi_node().await {
        tracing::debug!(%error, "failed to create the CSINode");
        tokio::time::sleep(backoff.step()).await;
    }
}

/// The driver's entry in a CSINode.
fn entry(name: &str, info: &NodeInfo) -> CSINodeDriver {
    let topology = info.accessible_topology.clone().unwrap_or_default();
    let limit = i32::try_from(info.max_volumes_per_node).unwrap_or(i32::MAX);
    CSINodeDriver {
        name: name.into(),
        node_id: info.node_id.clone(),
        topology_keys: Some(topology.segments.into_keys().collect()),
        allocatable: (limit > 0).then_some(VolumeNodeResources { count: Some(limit) }),
    }
}

/// The annotation with this driver's id added, or removed; `None`: nothing changes.
fn ids(known: Option<&String>, driver: &str, id: Option<&str>) -> Option<Option<String>> {
    let old: BTreeMap<String, String> =
        known.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let mut new = old.clone();
    match id {
        Some(id) => new.insert(driver.into(), id.into()),
        None => new.remove(driver),
    };
    if new == old {
        return None;
    }
    Some(if new.is_empty() { None } else { serde_json::to_string(&new).ok() })
}

/// The driver's entry in the Node or CSINode was not changed.
fn failed(change: &'static str) -> impl FnOnce(CsiError) -> CsiError {
    move |why| CsiError::NodeInfo { change, why: Box::new(why) }
}

impl Csi {
    /// Adds the driver to the node and its CSINode.
    pub(super) async fn install(&self, driver: &str, info: &NodeInfo) -> Result<(), CsiError> {
        if info.node_id.is_empty() {
            return Err(CsiError::NoNodeId);
        }
        let topology = info.accessible_topology.clone().unwrap_or_default().segments;
        let updated = self.update_node(driver, Some(&info.node_id), topology).await;
        updated.map_err(failed("updating Node object with CSI driver node info:"))?;
        let install = self.update_csi_node(|drivers| {
            let new = entry(driver, info);
            if drivers.contains(&new) {
                return false;
            }
            drivers.retain(|known| known.name != driver);
            drivers.push(new);
            true
        });
        install.await.map_err(failed("updating CSINode object with CSI driver node info:"))
    }

    /// Removes the driver from the node and its CSINode.
    pub(super) async fn uninstall(&self, driver: &str) -> Result<(), CsiError> {
        let uninstall = self.update_csi_node(|drivers| {
            let before = drivers.len();
            drivers.retain(|known| known.name != driver);
            drivers.len() < before
        });
        uninstall.await.map_err(failed("uninstalling CSI driver from CSINode object"))?;
        let updated = self.update_node(driver, None, BTreeMap::new()).await;
        updated.map_err(failed("removing CSI driver node info from Node object"))
    }

    async fn update_node(
        &self,
        driver: &str,
        id: Option<&str>,
        topology: BTreeMap<String, String>,
    ) -> Result<(), CsiError> {
        let nodes: Api<Node> = self.client.api(None);
        let node = nodes.get(&self.node_name).await?;
        let labels = node.metadata.labels.unwrap_or_default();
        let other =
            topology.iter().find(|(key, value)| labels.get(*key).is_some_and(|v| v != *value));
        if let Some((key, value)) = other {
            let known = labels[key].clone();
            return Err(CsiError::Topology { key: key.clone(), value: value.clone(), known });
        }
        let annotations = node.metadata.annotations.unwrap_or_default();
        let ids = ids(annotations.get(IDS), driver, id);
        let is_labelled = topology.keys().all(|key| labels.contains_key(key));
        if ids.is_none() && is_labelled {
            return Ok(());
        }
        let mut metadata = json!({ "labels": topology });
        if let Some(ids) = ids {
            metadata["annotations"] = json!({ IDS: ids });
        }
        let path = format!("/api/v1/nodes/{}", self.node_name);
        let patch = json!({ "metadata": metadata }).to_string();
        let kind = "application/strategic-merge-patch+json";
        self.client.call(Method::PATCH, &path, kind, patch).await?;
        Ok(())
    }

    /// Changes the drivers of the CSINode; `change` says whether it changed anything.
    async fn update_csi_node(
        &self,
        change: impl Fn(&mut Vec<CSINodeDriver>) -> bool,
    ) -> Result<(), CsiError> {
        let objects: Api<CSINode> = self.client.api(None);
        let mut backoff = Backoff::new(Duration::from_millis(10), Duration::from_secs(2));
        let mut last = None;
        for _ in 0..TRIES {
            let mut object = self.csi_node().await?;
            if !change(&mut object.spec.drivers) {
                return Ok(());
            }
            match objects.replace(&self.node_name, &PostParams::default(), &object).await {
                Ok(_) => return Ok(()),
                Err(error) => last = Some(Box::new(error)),
            }
            tokio::time::sleep(backoff.step()).await;
        }
        Err(CsiError::CsiNode(last))
    }

    /// The CSINode, created if missing. One that belongs to an earlier node of this name is deleted.
    async fn csi_node(&self) -> Result<CSINode, CsiError> {
        let nodes: Api<Node> = self.client.api(None);
        let objects: Api<CSINode> = self.client.api(None);
        let uid = nodes.get(&self.node_name).await?.metadata.uid;
        let uid = uid.unwrap_or_default();
        match objects.get(&self.node_name).await {
            Ok(object) if owner(&object, &self.node_name) == Some(&uid) => return Ok(object),
            Ok(_) => {
                let deleted = objects.delete(&self.node_name, &DeleteParams::default()).await;
                if let Err(error) = deleted.map(drop)
                    && !error.is_not_found()
                {
                    return Err(error.into());
                }
            }
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error.into()),
        }
        let object = self.new_csi_node(uid);
        Ok(objects.create(&PostParams::default(), &object).await?)
    }

    fn new_csi_node(&self, uid: String) -> CSINode {
        let owner = OwnerReference {
            api_version: "v1".into(),
            kind: "Node".into(),
            name: self.node_name.clone(),
            uid,
            ..OwnerReference::default()
        };
        CSINode {
            metadata: ObjectMeta {
                name: Some(self.node_name.clone()),
                annotations: Some([(MIGRATED.to_string(), MIGRATED_PLUGINS.to_string())].into()),
                owner_references: Some(vec![owner]),
                ..ObjectMeta::default()
            },
            spec: CSINodeSpec { drivers: vec![] },
        }
    }
}

/// The uid of the owner, if it is the node of that name.
fn owner<'a>(object: &'a CSINode, node: &str) -> Option<&'a String> {
    let mut owners = object.metadata.owner_references.iter().flatten();
    owners.find(|one| one.kind == "Node" && one.name == node).map(|one| &one.uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_by_driver() {
        let check = |known: Option<&str>, id: Option<&str>, expected: Option<Option<&str>>| {
            let known = known.map(str::to_string);
            let got = ids(known.as_ref(), "d", id);
            assert_eq!(got.as_ref().map(Option::as_deref), expected, "{known:?} {id:?}");
        };
        check(None, Some("n"), Some(Some(r#"{"d":"n"}"#)));
        check(Some(r#"{"d":"n"}"#), Some("n"), None);
        check(Some(r#"{"d":"o","e":"x"}"#), Some("n"), Some(Some(r#"{"d":"n","e":"x"}"#)));
        check(Some(r#"{"d":"n","e":"x"}"#), None, Some(Some(r#"{"e":"x"}"#)));
        check(Some(r#"{"d":"n"}"#), None, Some(None));
        check(None, None, None);
    }

    #[test]
    fn drivers_of_a_node() {
        let check = |limit: i64, expected: Option<i32>| {
            let segments = [("zone".to_string(), "a".to_string())].into();
            let topology = super::super::messages::Topology { segments };
            let info = NodeInfo {
                node_id: "id".into(),
                max_volumes_per_node: limit,
                accessible_topology: Some(topology),
            };
            let driver = entry("d", &info);
            assert_eq!(driver.topology_keys, Some(vec!["zone".to_string()]));
            assert_eq!(driver.allocatable.and_then(|one| one.count), expected);
        };
        check(0, None);
        check(-1, None);
        check(7, Some(7));
        check(i64::MAX, Some(i32::MAX));
    }
}
