//! The built-in storage class: directories below the data directory of a node.
//!
//! In: a claim and the node that the scheduler chose. Out: a volume of type `local` that only that
//! node can use; its directory is made by the kubelet when a pod first mounts it.
//! Deviation: directories of nodes other than the control plane's own stay behind when their volume
//! goes; an event says so. The class itself is among the objects that a server makes at its start.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{
    LocalVolumeSource, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, ObjectReference,
    PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec, VolumeNodeAffinity,
};
use k8s_openapi::api::storage::v1::StorageClass;
use machinery::ObjectMeta;

use super::plan::PROVISIONED_BY;
use crate::context::Options;

pub const PROVISIONER: &str = "decapod.io/local-path";
const HOSTNAME: &str = "kubernetes.io/hostname";

pub struct LocalPath {
    directory: PathBuf,
    /// The node whose disk this process sees.
    node: Option<String>,
}

impl LocalPath {
    pub fn new(options: &Options) -> Option<Self> {
        let directory = options.local_path_directory.clone()?;
        Some(Self { directory, node: options.local_node.clone() })
    }

    /// Pure.
    pub fn volume_for(
        &self,
        claim: &PersistentVolumeClaim,
        class: &StorageClass,
        node: Option<&str>,
    ) -> Result<PersistentVolume, String> {
        let node = node.or(self.node.as_deref()).ok_or("no node is selected for this claim")?;
        let spec = claim.spec.clone().unwrap_or_default();
        if spec.volume_mode.as_deref() == Some("Block") {
            return Err("only filesystem volumes can be provisioned".into());
        }
        if spec.selector.is_some() {
            return Err("claim.Spec.Selector is not supported".into());
        }
        let meta = &claim.metadata;
        let name = format!("pvc-{}", meta.uid.as_deref().unwrap_or_default());
        let directory = format!(
            "{name}_{}_{}",
            meta.namespace.as_deref().unwrap_or_default(),
            meta.name.as_deref().unwrap_or_default()
        );
        let requests = spec.resources.and_then(|resources| resources.requests);
        let size = requests.and_then(|mut requests| requests.remove("storage"));
        let size = size.ok_or("the claim asks for no storage")?;
        Ok(PersistentVolume {
            metadata: ObjectMeta {
                name: Some(name),
                annotations: Some(BTreeMap::from([(PROVISIONED_BY.into(), PROVISIONER.into())])),
                ..ObjectMeta::default()
            },
            spec: Some(PersistentVolumeSpec {
                capacity: Some(BTreeMap::from([("storage".into(), size)])),
                access_modes: spec.access_modes,
                claim_ref: Some(ObjectReference {
                    api_version: Some("v1".into()),
                    kind: Some("PersistentVolumeClaim".into()),
                    namespace: meta.namespace.clone(),
                    name: meta.name.clone(),
                    uid: meta.uid.clone(),
                    resource_version: meta.resource_version.clone(),
                    field_path: None,
                }),
                local: Some(LocalVolumeSource {
                    path: self.directory.join(directory).display().to_string(),
                    fs_type: None,
                }),
                mount_options: class.mount_options.clone(),
                node_affinity: Some(only_on(node)),
                persistent_volume_reclaim_policy: Some(
                    class.reclaim_policy.clone().unwrap_or_else(|| "Delete".into()),
                ),
                storage_class_name: class.metadata.name.clone(),
                volume_mode: Some("Filesystem".into()),
                ..PersistentVolumeSpec::default()
            }),
            status: None,
        })
    }

    /// Removes the volume's directory if it is on this host.
    pub async fn remove(&self, volume: &PersistentVolume) -> Result<(), String> {
        let local = volume.spec.as_ref().and_then(|spec| spec.local.as_ref());
        let path = self.own(&local.ok_or("it is not a local volume")?.path)?;
        let node = node_of(volume).unwrap_or_default();
        if self.node.as_deref() != Some(node) {
            return Err(format!("the directory {} of node {node} is left", path.display()));
        }
        match tokio::fs::remove_dir_all(path).await {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.to_string()),
            _ => Ok(()),
        }
    }
}

impl LocalPath {
    /// Anybody who may make volumes writes their paths: only a directory right below ours is ours.
    fn own<'a>(&self, path: &'a str) -> Result<&'a Path, String> {
        let path = Path::new(path);
        // `..` has a parent and no name.
        match path.parent() == Some(&self.directory) && path.file_name().is_some() {
            true => Ok(path),
            false => Err(format!("{} is not below {}", path.display(), self.directory.display())),
        }
    }
}

fn only_on(node: &str) -> VolumeNodeAffinity {
    VolumeNodeAffinity {
        required: Some(NodeSelector {
            node_selector_terms: vec![NodeSelectorTerm {
                match_expressions: Some(vec![NodeSelectorRequirement {
                    key: HOSTNAME.into(),
                    operator: "In".into(),
                    values: Some(vec![node.into()]),
                }]),
                match_fields: None,
            }],
        }),
    }
}

fn node_of(volume: &PersistentVolume) -> Option<&str> {
    let affinity = volume.spec.as_ref()?.node_affinity.as_ref()?;
    let term = affinity.required.as_ref()?.node_selector_terms.first()?;
    let requirement = term.match_expressions.as_ref()?.first()?;
    requirement.values.as_ref()?.first().map(String::as_str)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{from_value, json};

    use super::*;

    #[test]
    fn no_path_leads_out_of_the_directory() {
        let local = LocalPath { directory: "/data/storage".into(), node: None };
        let check = |path: &str, fine| assert_eq!(local.own(path).is_ok(), fine, "{path}");
        check("/data/storage/pvc-1", true);
        check("/data/storage/..", false);
        check("/data/storage/../storage/pvc-1", false);
        check("/data/storage/.", false);
        check("/data/storage", false);
        check("/data/storage/pvc-1/..", false);
        check("/etc", false);
        check("", false);
    }

    #[test]
    fn a_volume_belongs_to_its_node_and_its_claim() {
        let local = LocalPath { directory: "/data/storage".into(), node: None };
        let claim: PersistentVolumeClaim = from_value(json!({
            "metadata": {"name": "data", "namespace": "ns", "uid": "u"},
            "spec": {"accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "1Gi"}}},
        }))
        .unwrap();
        let class: StorageClass =
            from_value(json!({"metadata": {"name": "local-path"}, "provisioner": PROVISIONER}))
                .unwrap();
        assert!(local.volume_for(&claim, &class, None).is_err(), "no node is known");
        let volume = local.volume_for(&claim, &class, Some("n1")).unwrap();
        assert_eq!(volume.metadata.name.as_deref(), Some("pvc-u"));
        assert_eq!(node_of(&volume), Some("n1"));
        let spec = volume.spec.unwrap();
        assert_eq!(spec.local.unwrap().path, "/data/storage/pvc-u_ns_data");
        assert_eq!(spec.claim_ref.unwrap().uid.as_deref(), Some("u"));
        assert_eq!(spec.persistent_volume_reclaim_policy.as_deref(), Some("Delete"));
    }
}
