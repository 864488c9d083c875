//! A CSI driver of this node, called over its socket.
//!
//! In: the parameters of a volume. Out: CSI v1 calls of the Node service.
//! Upstream: `pkg/volume/csi/csi_client.go`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use super::messages::{
    AccessMode, Capabilities, CapacityRange, ExpandRequest, MountVolume, NodeInfo, Nothing,
    PublishRequest, StageRequest, Stats, StatsRequest, UnpublishRequest, UnstageRequest,
    VolumeCapability,
};
use crate::plugins::rpc::{Rpc, RpcError};

/// Upstream: csiTimeout.
const LIMIT: Duration = Duration::from_secs(120);

macro_rules! node_call {
    ($name:literal) => {
        concat!("/csi.v1.Node/", $name)
    };
}

/// Capabilities of the Node service, by the protocol's numbers.
const STAGE_UNSTAGE: i32 = 1;
const VOLUME_STATS: i32 = 2;
const EXPAND: i32 = 3;
const SINGLE_NODE_MULTI_WRITER: i32 = 5;
const VOLUME_MOUNT_GROUP: i32 = 6;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Abilities(BTreeSet<i32>);

impl Abilities {
    pub fn stages(&self) -> bool {
        self.0.contains(&STAGE_UNSTAGE)
    }

    pub fn counts(&self) -> bool {
        self.0.contains(&VOLUME_STATS)
    }

    pub fn expands(&self) -> bool {
        self.0.contains(&EXPAND)
    }

    pub fn sets_group(&self) -> bool {
        self.0.contains(&VOLUME_MOUNT_GROUP)
    }

    /// The protocol's number of an access mode.
    pub fn access_mode(&self, mode: &str) -> i32 {
        let precise = self.0.contains(&SINGLE_NODE_MULTI_WRITER);
        match mode {
            "ReadWriteOnce" if precise => 7,
            "ReadWriteOncePod" if precise => 6,
            "ReadWriteOnce" | "ReadWriteOncePod" => 1,
            "ReadOnlyMany" => 3,
            "ReadWriteMany" => 5,
            _ => 0,
        }
    }
}

/// How a volume is used, in Kubernetes' terms.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    pub access_mode: String,
    pub fs_type: String,
    pub mount_options: Vec<String>,
    /// The pod's fsGroup, if the driver applies it.
    pub group: Option<i64>,
    pub is_block: bool,
}

impl Usage {
    fn capability(&self, abilities: &Abilities) -> VolumeCapability {
        let mount = MountVolume {
            fs_type: self.fs_type.clone(),
            mount_flags: self.mount_options.clone(),
            volume_mount_group: self.group.map(|group| group.to_string()).unwrap_or_default(),
        };
        VolumeCapability {
            block: self.is_block.then_some(Nothing {}),
            mount: (!self.is_block).then_some(mount),
            access_mode: Some(AccessMode { mode: abilities.access_mode(&self.access_mode) }),
        }
    }
}

/// The fields that staging and publishing share.
#[derive(Clone, Default)]
pub struct Volume {
    pub handle: String,
    pub usage: Usage,
    pub publish_context: BTreeMap<String, String>,
    pub context: BTreeMap<String, String>,
    pub secrets: BTreeMap<String, String>,
}

pub struct Driver {
    pub name: String,

    /// The highest CSI version that the driver supports.
    pub version: (u64, u64, u64),
    rpc: Rpc,
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

impl Driver {
    pub fn new(name: &str, endpoint: &Path, version: (u64, u64, u64)) -> Result<Self, RpcError> {
        Ok(Self { name: name.into(), version, rpc: Rpc::new(endpoint)? })
    }

    pub async fn info(&self) -> Result<NodeInfo, RpcError> {
        self.rpc.call(node_call!("NodeGetInfo"), Nothing {}, LIMIT).await
    }

    pub async fn abilities(&self) -> Result<Abilities, RpcError> {
        let call = self.rpc.call(node_call!("NodeGetCapabilities"), Nothing {}, LIMIT);
        let all: Capabilities = call.await?;
        let kinds = all.capabilities.into_iter().filter_map(|one| one.rpc).map(|rpc| rpc.kind);
        Ok(Abilities(kinds.collect()))
    }

    pub async fn stage(
        &self,
        abilities: &Abilities,
        volume: Volume,
        target: &Path,
    ) -> Result<(), RpcError> {
        let request = StageRequest {
            volume_capability: Some(volume.usage.capability(abilities)),
            volume_id: volume.handle,
            publish_context: volume.publish_context,
            staging_target_path: text(target),
            secrets: volume.secrets,
            volume_context: volume.context,
        };
        self.rpc.call::<_, Nothing>(node_call!("NodeStageVolume"), request, LIMIT).await.map(drop)
    }

    pub async fn unstage(&self, handle: &str, target: &Path) -> Result<(), RpcError> {
        let request =
            UnstageRequest { volume_id: handle.into(), staging_target_path: text(target) };
        self.rpc.call::<_, Nothing>(node_call!("NodeUnstageVolume"), request, LIMIT).await.map(drop)
    }

    pub async fn publish(
        &self,
        abilities: &Abilities,
        volume: Volume,
        staged: Option<&Path>,
        target: &Path,
        readonly: bool,
    ) -> Result<(), RpcError> {
        let request = PublishRequest {
            volume_capability: Some(volume.usage.capability(abilities)),
            volume_id: volume.handle,
            publish_context: volume.publish_context,
            staging_target_path: staged.map(text).unwrap_or_default(),
            target_path: text(target),
            readonly,
            secrets: volume.secrets,
            volume_context: volume.context,
        };
        self.rpc.call::<_, Nothing>(node_call!("NodePublishVolume"), request, LIMIT).await.map(drop)
    }

    pub async fn unpublish(&self, handle: &str, target: &Path) -> Result<(), RpcError> {
        let request = UnpublishRequest { volume_id: handle.into(), target_path: text(target) };
        let call = node_call!("NodeUnpublishVolume");
        self.rpc.call::<_, Nothing>(call, request, LIMIT).await.map(drop)
    }

    pub async fn expand(
        &self,
        abilities: &Abilities,
        volume: Volume,
        at: &Path,
        staged: Option<&Path>,
        bytes: i64,
    ) -> Result<(), RpcError> {
        let request = ExpandRequest {
            volume_capability: Some(volume.usage.capability(abilities)),
            volume_id: volume.handle,
            volume_path: text(at),
            capacity_range: Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
            staging_target_path: staged.map(text).unwrap_or_default(),
            secrets: volume.secrets,
        };
        // The answer has a size, which upstream ignores, too.
        self.rpc.call::<_, Nothing>(node_call!("NodeExpandVolume"), request, LIMIT).await.map(drop)
    }

    pub async fn stats(&self, handle: &str, at: &Path) -> Result<Stats, RpcError> {
        let request = StatsRequest {
            volume_id: handle.into(),
            volume_path: text(at),
            staging_target_path: String::new(),
        };
        self.rpc.call(node_call!("NodeGetVolumeStats"), request, LIMIT).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_modes_are_the_protocols_numbers() {
        let check = |precise: bool, mode: &str, expected: i32| {
            let known = if precise { vec![SINGLE_NODE_MULTI_WRITER] } else { vec![] };
            let abilities = Abilities(known.into_iter().collect());
            assert_eq!(abilities.access_mode(mode), expected, "{mode} {precise}");
        };
        check(false, "ReadWriteOnce", 1);
        check(false, "ReadWriteOncePod", 1);
        check(true, "ReadWriteOnce", 7);
        check(true, "ReadWriteOncePod", 6);
        check(true, "ReadOnlyMany", 3);
        check(false, "ReadWriteMany", 5);
        check(false, "?", 0);
    }

    #[test]
    fn a_volume_is_a_mount_or_a_device() {
        let check = |is_block: bool| {
            let usage = Usage { is_block, group: Some(7), ..Usage::default() };
            let capability = usage.capability(&Abilities::default());
            assert_eq!(capability.block.is_some(), is_block);
            let group = capability.mount.map(|mount| mount.volume_mount_group);
            assert_eq!(group.as_deref(), (!is_block).then_some("7"));
        };
        check(true);
        check(false);
    }
}
