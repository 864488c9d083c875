//! Resolves a pod's claims and CSI volumes to mounted volumes.
//!
//! In: PersistentVolumeClaims and their volumes, inline CSI volumes. Out: the path of each on this
//! node; volumes that grew are expanded there.
//! Upstream: `pkg/kubelet/volumemanager/populator`, `operation_generator.go`.

use std::path::{Path, PathBuf};

use client::{Api, ErrorExt, EventType};
use http::Method;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimCondition, Pod, Volume,
};
use serde_json::{Value, json};

use crate::csi::{Failure, Mounted, Order, Source, place};
use crate::local_volume::{self, Kind};
use crate::names;
use crate::resources::units;
use crate::volumes::{Claims, Occasion, Ready, of_host};
use crate::worker::Worker;

const STORAGE: &str = "storage";

/// A claim with the volume that it is bound to.
struct Bound {
    claim: PersistentVolumeClaim,
    volume: PersistentVolume,
    read_only: bool,
}

/// The pod's resolved claims and CSI volumes.
#[derive(Default)]
pub(crate) struct Claimed {
    pub claims: Claims,
    pub failures: Vec<Failure>,
    pub again: Option<Timestamp>,
}

impl Worker {
    /// Resolves claims and CSI volumes one by one, and says when the first of them must be published
    /// again. A failure has the text of its event.
    pub(crate) async fn claims(&self, occasion: Occasion) -> Claimed {
        let pod = self.pod.clone();
        let mut all = Claimed::default();
        for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
            let claimed = match &volume.csi {
                Some(csi) => {
                    let source = Source::Inline(Box::new(csi.clone()));
                    self.mounted(volume, source, None).await
                }
                None => match self.bound(volume).await {
                    None => continue,
                    Some(Err(why)) => Err(not_set_up(&volume.name, &why)),
                    // Like a hostPath, a path of this node is checked only when containers start.
                    Some(Ok(bound)) if !is_drivers(&bound.volume) => match occasion {
                        Occasion::Running => continue,
                        _ => self.local(&bound).await.map(|ready| (ready, None)),
                    },
                    Some(Ok(bound)) => {
                        let source = Source::Persistent {
                            volume: Box::new(bound.volume.clone()),
                            read_only: bound.read_only,
                        };
                        self.mounted(volume, source, Some(bound)).await
                    }
                },
            };
            let ready = match claimed {
                Ok((ready, again)) => {
                    all.again = [all.again, again].into_iter().flatten().min();
                    Some(ready)
                }
                Err(failure) => {
                    all.failures.push(failure);
                    None
                }
            };
            all.claims.insert(volume.name.clone(), ready);
        }
        all
    }

    /// Mounts a CSI volume, and says when it must be published again.
    async fn mounted(
        &self,
        volume: &Volume,
        source: Source,
        bound: Option<Bound>,
    ) -> Result<(Ready, Option<Timestamp>), Failure> {
        let order = Order {
            pod: &self.pod,
            dir: &self.dir,
            name: &volume.name,
            source,
            objects: &self.context.objects,
            input: &self.input,
        };
        let mounted = self.context.csi.mount(&order).await?;
        if let Some(bound) = &bound {
            self.grow(&order, bound).await;
        }
        let Mounted { path, read_only, is_device, is_new, again } = mounted;
        if is_device && is_new {
            self.tell_mapped(&path);
        }
        Ok((Ready { path, read_only, is_device }, again))
    }

    /// A volume that is a path of this node: a directory, or a block device.
    async fn local(&self, bound: &Bound) -> Result<Ready, Failure> {
        if !is_block(&bound.volume) {
            return self.file_system(bound).await;
        }
        let name = bound.volume.metadata.name.as_deref().unwrap_or_default();
        let failed = |step: &str, why: String| {
            Failure::map(format!("MapVolume.{step} failed for volume {name:?} : {why}"))
        };
        let spec = bound.volume.spec.as_ref();
        let Some(local) = spec.and_then(|spec| spec.local.as_ref()) else {
            // Deviation: upstream only logs this.
            let why = "failed to find BlockVolumeMapper plugin. Volume plugin is nil.";
            let text = format!("MapVolume.FindMapperPluginBySpec {why} for volume {name:?} ");
            return Err(Failure::map(text));
        };
        let path = std::fs::canonicalize(&local.path)
            .map_err(|error| failed("EvalHostSymlinks", format!("{}: {error}", local.path)))?;
        if !place::is_device(&path) {
            let why = format!("{} is not a block device", path.display());
            return Err(failed("MapBlockVolume", why));
        }
        let link = place::links(&self.dir.0, "local-volume").join(name);
        let is_new = place::make_link(&link, &path)
            .map_err(|error| failed("MapBlockVolume", error.to_string()))?;
        if is_new {
            self.tell_mapped(&link);
        }
        Ok(Ready { path: link, read_only: bound.read_only, is_device: true })
    }

    /// A hostPath is checked by its type; a local volume is a directory, or a device that is mounted.
    async fn file_system(&self, bound: &Bound) -> Result<Ready, Failure> {
        let name = bound.volume.metadata.name.clone().unwrap_or_default();
        let failed = |step: &str, why: String| {
            Failure::mount(format!("MountVolume.{step} failed for volume {name:?} : {why}"))
        };
        let unmounted = |why: String| failed("NewMounter initialization", why);
        let spec = bound.volume.spec.clone().unwrap_or_default();
        if let Some(source) = &spec.host_path {
            let ready = of_host(source).map_err(|error| failed("SetUp", error.to_string()))?;
            return Ok(Ready { read_only: bound.read_only, ..ready });
        }
        let Some(local) = spec.local else {
            return Err(unmounted("no volume plugin matched".into()));
        };
        let path = PathBuf::from(&local.path);
        if is_ours(&bound.volume) {
            make(&path).map_err(|error| failed("SetUp", error.to_string()))?;
        }
        match local_volume::kind(&path).map_err(unmounted)? {
            Kind::Directory => return Ok(Ready::directory(path, bound.read_only)),
            Kind::Device => {}
        }
        let security = self.pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
        let group = security.and_then(|security| u32::try_from(security.fs_group?).ok());
        let change = security.and_then(|security| security.fs_group_change_policy.as_deref());
        let order = local_volume::Order {
            name: name.clone(),
            device: path,
            fs_type: local.fs_type.unwrap_or_else(|| "ext4".into()),
            read_only: bound.read_only,
            options: spec.mount_options.unwrap_or_default(),
            group: group.map(|group| (group, change == Some("OnRootMismatch"))),
        };
        let _turn = self.context.csi.turn(&format!("kubernetes.io/local-volume/{name}")).await;
        let (root, pod) = (self.context.config.root_dir.clone(), self.dir.0.clone());
        let done =
            tokio::task::spawn_blocking(move || local_volume::set_up(&root, &pod, &order)).await;
        let place = match done {
            Ok(done) => done.map_err(|error| failed(error.step, error.why))?,
            Err(error) => return Err(failed("MountDevice", error.to_string())),
        };
        Ok(Ready::directory(place, bound.read_only))
    }

    /// Unmounts devices that no pod uses any more.
    pub(crate) async fn release_devices(&self) -> std::io::Result<()> {
        let root = self.context.config.root_dir.clone();
        for name in local_volume::mounted(&root) {
            let _turn = self.context.csi.turn(&format!("kubernetes.io/local-volume/{name}")).await;
            let root = root.clone();
            tokio::task::spawn_blocking(move || local_volume::release(&root, &name))
                .await
                .unwrap_or_else(|error| Err(std::io::Error::other(error)))?;
        }
        Ok(())
    }

    /// Upstream sends a second event for the device's global path, which does not exist here.
    fn tell_mapped(&self, link: &Path) {
        let (dir, name) = (link.parent().unwrap_or(link), link.file_name().unwrap_or_default());
        let text = format!(
            "MapVolume.MapPodDevice succeeded for volume {:?} volumeMapPath {:?}",
            name.to_string_lossy(),
            dir.display().to_string()
        );
        self.context.tell(&self.pod, EventType::Normal, "SuccessfulMountVolume", text);
    }

    /// `None`: the volume comes from no claim.
    async fn bound(&self, wanted: &Volume) -> Option<Result<Bound, String>> {
        let source = wanted.persistent_volume_claim.as_ref();
        let own = format!("{}-{}", names::name(&self.pod), wanted.name);
        let name = source
            .map(|source| source.claim_name.clone())
            .or(wanted.ephemeral.as_ref().map(|_| own))?;
        let read_only = source.and_then(|source| source.read_only) == Some(true);
        let bound = async {
            let home = Some(names::namespace(&self.pod));
            let claims: Api<PersistentVolumeClaim> = self.context.client.api(home);
            let claim = claims.get(&name).await.map_err(|error| error.text())?;
            let named = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone());
            let named = named.filter(|name| !name.is_empty());
            let named = named.ok_or("persistentvolumeclaim is not bound")?;
            let volumes: Api<PersistentVolume> = self.context.client.api(None);
            let volume = volumes.get(&named).await.map_err(|error| error.text())?;
            check_mode(&self.pod, &wanted.name, &volume)?;
            Ok(Bound { claim, volume, read_only })
        };
        Some(bound.await)
    }

    /// Has the driver expand the file system if the volume is larger than the claim's status says.
    async fn grow(&self, order: &Order<'_>, bound: &Bound) {
        let Some((size, bytes)) = grown(bound) else { return };
        let name = bound.volume.metadata.name.as_deref().unwrap_or_default();
        match self.context.csi.expand(order, bytes).await {
            Ok(false) => {}
            Ok(true) => {
                let node = &self.context.config.node_name;
                let text =
                    format!("MountVolume.NodeExpandVolume succeeded for volume {name:?} {node}");
                let reason = "FileSystemResizeSuccessful";
                self.context.tell(order.pod, EventType::Normal, reason, text);
                if let Err(error) = self.tell_size(&bound.claim, &size).await {
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
                self.context.tell(order.pod, EventType::Warning, "VolumeResizeFailed", text);
            }
        }
    }

    /// Upstream: MarkNodeExpansionFinishedWithRecovery.
    async fn tell_size(&self, claim: &PersistentVolumeClaim, size: &str) -> client::Result<()> {
        let meta = &claim.metadata;
        let path = format!(
            "/api/v1/namespaces/{}/persistentvolumeclaims/{}/status",
            meta.namespace.as_deref().unwrap_or_default(),
            meta.name.as_deref().unwrap_or_default()
        );
        let patch = size_patch(claim, size).to_string();
        let kind = "application/merge-patch+json";
        self.context.client.call(Method::PATCH, &path, kind, patch).await.map(drop)
    }
}

/// The event's failure for a volume that cannot be set up.
pub(crate) fn not_set_up(volume: &str, why: &str) -> Failure {
    Failure::mount(format!("MountVolume.SetUp failed for volume {volume:?} : {why}"))
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

fn is_block(volume: &PersistentVolume) -> bool {
    volume.spec.as_ref().is_some_and(|spec| spec.volume_mode.as_deref() == Some("Block"))
}

/// Checks that the containers use the volume according to its volumeMode.
/// Upstream: createVolumeSpec.
fn check_mode(pod: &Pod, name: &str, volume: &PersistentVolume) -> Result<(), String> {
    let mode = if is_block(volume) { "Block" } else { "Filesystem" };
    let Some(spec) = &pod.spec else { return Ok(()) };
    let init = spec.init_containers.iter().flatten();
    let (mut is_mounted, mut is_mapped) = (false, false);
    for one in init.chain(&spec.containers) {
        is_mounted |= one.volume_mounts.iter().flatten().any(|mount| mount.name == name);
        is_mapped |= one.volume_devices.iter().flatten().any(|device| device.name == name);
    }
    let wrong = |field: &str| {
        Err(format!("volume {name} has volumeMode {mode}, but is specified in {field}"))
    };
    match mode {
        "Block" if is_mounted => wrong("volumeMounts"),
        "Filesystem" if is_mapped => wrong("volumeDevices"),
        _ => Ok(()),
    }
}

fn is_drivers(volume: &PersistentVolume) -> bool {
    volume.spec.as_ref().is_some_and(|spec| spec.csi.is_some())
}

/// The volume's size, if it is larger than in the claim's status.
fn grown(bound: &Bound) -> Option<(String, i64)> {
    let size = bound.volume.spec.as_ref()?.capacity.as_ref()?.get(STORAGE)?;
    let known = bound.claim.status.as_ref()?.capacity.as_ref()?.get(STORAGE)?;
    (units(size) > units(known)).then(|| (size.0.clone(), units(size)))
}

/// Whether the built-in provisioner made the volume. It leaves its directory to the node.
fn is_ours(volume: &PersistentVolume) -> bool {
    let annotations = volume.metadata.annotations.as_ref();
    let by = annotations.and_then(|all| all.get("pv.kubernetes.io/provisioned-by"));
    by.is_some_and(|by| by == "decapod.io/local-path")
}

/// Creates the directory at its first use: containers of any user may write to it.
fn make(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    if path.exists() {
        return Ok(());
    }
    std::fs::create_dir_all(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777))
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
    fn volumes_are_used_by_their_mode() {
        let check = |mode: &str, container: Value, expected: Result<(), &str>| {
            let volume = serde_json::from_value(json!({"spec": {"volumeMode": mode}}));
            let pod = serde_json::from_value(json!({"spec": {"containers": [container]}}));
            let got = check_mode(&pod.expect("a pod"), "v", &volume.expect("a volume"));
            assert_eq!(got, expected.map_err(str::to_string));
        };
        let mounts = json!({"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]});
        let maps = json!({"name": "c", "volumeDevices": [{"name": "v", "devicePath": "/dev/v"}]});
        check("Filesystem", mounts.clone(), Ok(()));
        check("Block", maps.clone(), Ok(()));
        check("Block", json!({"name": "c"}), Ok(()));
        let text = "volume v has volumeMode Block, but is specified in volumeMounts";
        check("Block", mounts, Err(text));
        let text = "volume v has volumeMode Filesystem, but is specified in volumeDevices";
        check("Filesystem", maps, Err(text));
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
