//! Mounts CSI volumes into pods, and unmounts them.
//!
//! ```text
//!  in use, reported ─► attached ─► staged (once for all pods) ─► published ─► owned by the pod's group
//!  subpaths undone ─► unpublished ─► unstaged (by the last pod) ─► forgotten
//! ```
//!
//! In: an [`MountRequest`]. Out: the mounted volume, or an event's text.
//! Invariants: repeating a step changes nothing, also after a restart, because drivers' calls are
//! idempotent. A volume keeps its record while a driver may still work on it.
//! Upstream: `csi_mounter.go`, `csi_attacher.go`, `expander.go`.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use client::{Api, ErrorExt};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, CSIVolumeSource, PersistentVolume, Pod, Secret,
};
use k8s_openapi::api::storage::v1::{CSIDriverSpec, VolumeAttachment};
use serde_json::json;

use super::driver::{Abilities, Driver, Usage, Volume};
use super::error::CsiError;
use super::place::{self, Published, Stage};
use super::record::{self, EPHEMERAL, PERSISTENT, VolumeData};
use super::{Csi, PLUGIN, Use, unique_name};
use crate::names;
use crate::pod::input::{Inputs, told_to_stop};
use crate::pod::objects::{Objects, TokenSpec};
use crate::reason::Reason;
use crate::volumes::PodDir;
use crate::volumes::ownership;
use crate::volumes::plugin::{FAILED_MAP, FAILED_MOUNT, Mounted};

/// Upstream: podAttachAndMountTimeout.
const ATTACH_LIMIT: Duration = Duration::from_secs(123);
/// Upstream: roughly the interval at which it syncs a pod.
const REPUBLISH: Duration = Duration::from_secs(60);
/// `CSIDriver.spec.fsGroupPolicy`, if there is no CSIDriver.
const DEFAULT_POLICY: &str = "ReadWriteOnceWithFSType";

fn failed_mount(text: impl Into<String>) -> Reason {
    Reason::new(FAILED_MOUNT, text)
}

/// The source of a pod's volume.
#[derive(Clone, Copy)]
pub enum Origin<'a> {
    Inline(&'a CSIVolumeSource),
    Persistent { volume: &'a PersistentVolume, read_only: bool },
}

/// A mount request.
pub struct MountRequest<'a> {
    pub pod: &'a Pod,
    pub dir: &'a PodDir,
    /// The volume's name in the pod.
    pub name: &'a str,
    pub origin: Origin<'a>,
    pub objects: &'a Objects,
    /// Tells when the pod must stop.
    pub input: &'a Inputs,
}

/// Both kinds of source in one form.
struct Spec {
    /// The name of the volume's directory: the PersistentVolume's, or the volume's name in the pod.
    name: String,
    driver: String,
    handle: String,
    mode: &'static str,
    is_device: bool,
    read_only: bool,
    fs_type: String,
    attributes: BTreeMap<String, String>,
    access_modes: Option<Vec<String>>,
    mount_options: Vec<String>,
    /// (namespace, name)
    publish_secret: Option<(String, String)>,
    stage_secret: Option<(String, String)>,
    expand_secret: Option<(String, String)>,
}

impl Spec {
    fn of(order: &MountRequest<'_>) -> Result<Self, Reason> {
        match order.origin {
            Origin::Inline(source) => Ok(Self::inline(order, source)),
            Origin::Persistent { volume, read_only } => {
                let found = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
                let csi = found.ok_or_else(|| failed_mount("no volume plugin matched"))?;
                Ok(Self::persistent(volume, csi, read_only))
            }
        }
    }

    fn inline(order: &MountRequest<'_>, source: &CSIVolumeSource) -> Self {
        let home = names::namespace(order.pod).to_string();
        let secret = source.node_publish_secret_ref.as_ref();
        Self {
            name: order.name.into(),
            driver: source.driver.clone(),
            handle: record::inline_handle(names::uid(order.pod), order.name),
            mode: EPHEMERAL,
            is_device: false,
            read_only: source.read_only == Some(true),
            fs_type: source.fs_type.clone().unwrap_or_default(),
            attributes: source.volume_attributes.clone().unwrap_or_default(),
            access_modes: Some(vec!["ReadWriteOnce".into()]),
            mount_options: vec![],
            publish_secret: secret.map(|secret| (home, secret.name.clone())),
            stage_secret: None,
            expand_secret: None,
        }
    }

    fn persistent(
        volume: &PersistentVolume,
        csi: &CSIPersistentVolumeSource,
        read_only: bool,
    ) -> Self {
        use k8s_openapi::api::core::v1::SecretReference;
        let secret = |reference: &Option<SecretReference>| {
            let reference = reference.clone()?;
            Some((reference.namespace.unwrap_or_default(), reference.name.unwrap_or_default()))
        };
        let spec = volume.spec.clone().unwrap_or_default();
        Self {
            name: volume.metadata.name.clone().unwrap_or_default(),
            driver: csi.driver.clone(),
            handle: csi.volume_handle.clone(),
            mode: PERSISTENT,
            is_device: spec.volume_mode.as_deref() == Some("Block"),
            read_only,
            fs_type: csi.fs_type.clone().unwrap_or_default(),
            attributes: csi.volume_attributes.clone().unwrap_or_default(),
            access_modes: spec.access_modes,
            mount_options: spec.mount_options.unwrap_or_default(),
            publish_secret: secret(&csi.node_publish_secret_ref),
            stage_secret: secret(&csi.node_stage_secret_ref),
            expand_secret: secret(&csi.node_expand_secret_ref),
        }
    }

    fn unique(&self) -> String {
        unique_name(&self.driver, &self.handle)
    }

    fn failed(&self, step: &str, why: impl std::fmt::Display) -> Reason {
        let text = |what: &str| format!("{what} failed for volume {:?} : {why}", self.name);
        if !self.is_device {
            return failed_mount(text(&format!("MountVolume.{step}")));
        }
        let step = match step {
            "MountDevice" => "SetUpDevice",
            "SetUp" => "MapPodDevice",
            other => other,
        };
        Reason::new(FAILED_MAP, text(&format!("MapVolume.{step}")))
    }

    fn stage(&self, root: &Path) -> Stage {
        match self.is_device {
            true => Stage::of_device(root, &self.name),
            false => Stage::of_mount(root, &self.driver, &self.handle),
        }
    }

    fn published(&self, root: &Path, pod: &Path) -> Published {
        match self.is_device {
            true => Published::of_device(root, pod, &self.name),
            false => Published::of_mount(pod, &self.name),
        }
    }

    /// The volume's record.
    fn data(&self, node: &str) -> VolumeData {
        VolumeData {
            attachment_id: record::attachment_name(&self.handle, &self.driver, node),
            driver_name: self.driver.clone(),
            node_name: node.into(),
            volume: self.name.clone(),
            volume_handle: self.handle.clone(),
            mode: self.mode.into(),
        }
    }

    fn usage(&self, group: Option<i64>) -> Usage {
        let first = self.access_modes.as_ref().and_then(|modes| modes.first().cloned());
        Usage {
            access_mode: first.unwrap_or_else(|| "ReadWriteOnce".into()),
            fs_type: self.fs_type.clone(),
            mount_options: self.mount_options.clone(),
            group,
            is_block: self.is_device,
        }
    }

    fn volume(&self, group: Option<i64>, publish_context: BTreeMap<String, String>) -> Volume {
        Volume {
            handle: self.handle.clone(),
            usage: self.usage(group),
            publish_context,
            context: self.attributes.clone(),
            secrets: BTreeMap::new(),
        }
    }

    /// Upstream: supportsFSGroup.
    fn is_owned_by_group(&self, policy: &str) -> bool {
        if policy == "None" || self.read_only {
            return false;
        }
        let once = |mode: &String| matches!(mode.as_str(), "ReadWriteOnce" | "ReadWriteOncePod");
        let is_once = self.access_modes.iter().flatten().any(once);
        policy == "File" || (!self.fs_type.is_empty() && is_once)
    }

    /// Upstream: supportsVolumeLifecycleMode.
    fn check_mode(&self, driver: Option<&CSIDriverSpec>) -> Result<(), CsiError> {
        let unsupported =
            |why| CsiError::Mode { mode: self.mode, driver: self.driver.clone(), why };
        match driver {
            None if self.mode == PERSISTENT => Ok(()),
            None => Err(unsupported("no CSIDriver object".into())),
            Some(spec) => {
                let modes = spec.volume_lifecycle_modes.clone().unwrap_or_default();
                let known = modes.iter().any(|mode| mode == self.mode);
                let list = modes.iter().map(|mode| format!("{mode:?}")).collect::<Vec<_>>();
                let why = format!("only supports [{}]", list.join(" "));
                if known { Ok(()) } else { Err(unsupported(why)) }
            }
        }
    }
}

fn group_of(pod: &Pod) -> Option<i64> {
    pod.spec.as_ref()?.security_context.as_ref()?.fs_group
}

impl Csi {
    /// Mounts a volume into a pod, and says whether this process had not mounted it before. Repeating it
    /// is harmless.
    pub async fn mount(&self, order: &MountRequest<'_>) -> Result<(Mounted, bool), Reason> {
        let spec = Spec::of(order)?;
        let object = self.object(&spec.driver).await;
        let about = object.as_ref().map(|object| &object.spec);
        let attaches =
            spec.mode == PERSISTENT && about.and_then(|about| about.attach_required) != Some(false);
        let republishes =
            !spec.is_device && about.and_then(|about| about.requires_republish) == Some(true);
        let key = (names::uid(order.pod).to_string(), spec.name.clone());
        let place = spec.published(&self.root, &order.dir.0);
        let again = republishes.then(|| base::clock::now() + REPUBLISH);
        let mounted = Mounted {
            path: place.link.clone().unwrap_or_else(|| place.path.clone()),
            read_only: spec.read_only,
            is_device: spec.is_device,
            again,
        };
        let published = self.begin(&key, order.name, &spec.unique(), attaches);
        if published.is_some_and(|at| !republishes || at.elapsed() < REPUBLISH) {
            return Ok((mounted, false));
        }
        spec.check_mode(about).map_err(|why| {
            let text = "mounter.SetupAt failed to check volume lifecycle mode";
            spec.failed("SetUp", format!("{PLUGIN}: {text}: {why}"))
        })?;
        let context = match attaches {
            true => self.attached(order, &spec).await?,
            false => BTreeMap::new(),
        };
        let _turn = self.turns.take(&spec.unique()).await;
        let (driver, abilities) = self.ready_driver(&spec).await?;
        let group = group_of(order.pod).filter(|_| abilities.sets_group() && !spec.is_device);
        let volume = spec.volume(group, context);
        let staged = match spec.mode == PERSISTENT && abilities.stages() {
            true => Some(self.stage(&spec, &driver, &abilities, volume.clone()).await?),
            false => None,
        };
        let site = Site { driver: &driver, abilities: &abilities, staged: staged.as_deref() };
        self.publish(order, &spec, about, site, volume, &place, published.is_some()).await?;
        if spec.is_device && !place::is_device(&place.path) {
            let why = format!("{} is not a block device", place.path.display());
            return Err(spec.failed("MapBlockVolume", why));
        }
        if group.is_none() && published.is_none() && !spec.is_device {
            own(order.pod, &spec, about, &place.path).await?;
        }
        if let Some(known) = self.uses().get_mut(&key) {
            known.published = Some(tokio::time::Instant::now());
        }
        Ok((mounted, published.is_none()))
    }

    /// Marks the volume as in use; returns when it was last published.
    fn begin(
        &self,
        key: &(String, String),
        name: &str,
        unique: &str,
        is_attachable: bool,
    ) -> Option<tokio::time::Instant> {
        let mut uses = self.uses();
        let old = uses.get(key).filter(|known| known.unique == unique);
        let published = old.and_then(|known| known.published);
        let is_new = old.is_none_or(|known| known.is_attachable != is_attachable);
        let (name, unique) = (name.to_string(), unique.to_string());
        uses.insert(key.clone(), Use { name, unique, is_attachable, published });
        if is_new && is_attachable {
            self.hurry.notify_one();
        }
        published
    }

    /// Waits until the volume is attached, and returns the attacher's metadata.
    async fn attached(
        &self,
        order: &MountRequest<'_>,
        spec: &Spec,
    ) -> Result<BTreeMap<String, String>, Reason> {
        let unique = spec.unique();
        let mut seen = self.seen.subscribe();
        let attached =
            seen.wait_for(|seen| seen.attached.contains(&unique) && seen.in_use.contains(&unique));
        let waited = tokio::select! {
            done = tokio::time::timeout(ATTACH_LIMIT, attached) => done.is_ok_and(|done| done.is_ok()),
            () = told_to_stop(order.input) => false,
        };
        if !waited {
            let name = order.name;
            return Err(failed_mount(format!(
                "Unable to attach or mount volumes: unmounted volumes=[{name}], unattached \
                 volumes=[{name}], failed to process volumes=[]: context deadline exceeded"
            )));
        }
        let id = record::attachment_name(&spec.handle, &spec.driver, &self.node_name);
        let api: Api<VolumeAttachment> = self.client.api(None);
        let attachment = api.get(&id).await.map_err(|error| {
            let why = format!("failed to get volume attachment [ID={id}]: {}", error.text());
            spec.failed("WaitForAttach", why)
        })?;
        let status = attachment.status.unwrap_or_default();
        Ok(status.attachment_metadata.unwrap_or_default())
    }

    async fn ready_driver(&self, spec: &Spec) -> Result<(Arc<Driver>, Abilities), Reason> {
        let step = if spec.mode == PERSISTENT { "MountDevice" } else { "SetUp" };
        let driver = self.driver(&spec.driver).map_err(|why| {
            let text = match spec.mode {
                PERSISTENT => "attacher.MountDevice failed to create newCsiDriverClient",
                _ => "mounter.SetUpAt failed to get CSI client",
            };
            spec.failed(step, format!("{PLUGIN}: {text}: {why}"))
        })?;
        let abilities = driver.abilities().await.map_err(|error| spec.failed(step, error))?;
        Ok((driver, abilities))
    }

    async fn stage(
        &self,
        spec: &Spec,
        driver: &Driver,
        abilities: &Abilities,
        volume: Volume,
    ) -> Result<PathBuf, Reason> {
        let failed = |why: CsiError| spec.failed("MountDevice", why);
        let stage = spec.stage(&self.root);
        if self.staged().contains(&spec.unique()) {
            return Ok(stage.path);
        }
        let secrets = match &spec.stage_secret {
            Some(secret) => self.secret("NodeStageSecretRef", secret).await.map_err(failed)?,
            None => BTreeMap::new(),
        };
        let data = match spec.is_device {
            true => spec.data(&self.node_name),
            false => VolumeData {
                driver_name: spec.driver.clone(),
                volume_handle: spec.handle.clone(),
                ..VolumeData::default()
            },
        };
        let recorded = record::make_dir(&stage.path)
            .and_then(|()| record::make_dir(&stage.record))
            .and_then(|()| data.write(&stage.record));
        recorded.map_err(|error| {
            spec.failed("MountDevice", format!("failed to save volume data: {error}"))
        })?;
        let volume = Volume { secrets, ..volume };
        if let Err(error) = driver.stage(abilities, volume, &stage.path).await {
            if error.is_final
                && let Err(error) = stage.forget()
            {
                let path = stage.path.display();
                tracing::warn!(%path, %error, "failed to remove the staging directory");
            }
            return Err(failed(error.into()));
        }
        self.staged().insert(spec.unique());
        Ok(stage.path)
    }

    #[expect(clippy::too_many_arguments, reason = "the call has as many fields")]
    async fn publish(
        &self,
        order: &MountRequest<'_>,
        spec: &Spec,
        about: Option<&CSIDriverSpec>,
        site: Site<'_>,
        mut volume: Volume,
        place: &Published,
        again: bool,
    ) -> Result<(), Reason> {
        let failed = |why: CsiError| spec.failed("SetUp", why);
        if let Some(secret) = &spec.publish_secret {
            volume.secrets = self.secret("NodePublishSecretRef", secret).await.map_err(failed)?;
        }
        if about.and_then(|about| about.pod_info_on_mount) == Some(true) {
            volume.context.extend(pod_info(order.pod, spec.mode));
        }
        let call = "mounter.SetUpAt failed to get service accoount token attributes";
        let tokens = tokens(order, about).await.map_err(CsiError::call(call)).map_err(failed)?;
        match about.and_then(|about| about.service_account_token_in_secrets) {
            Some(true) => volume.secrets.extend(tokens),
            _ => volume.context.extend(tokens),
        }
        let call = "mounter.SetUpAt failed to save volume info data";
        let prepared = place.prepare(&spec.data(&self.node_name));
        prepared.map_err(CsiError::call(call)).map_err(failed)?;
        let target = &place.path;
        let published =
            site.driver.publish(site.abilities, volume, site.staged, target, spec.read_only).await;
        published.map_err(|error| {
            if error.is_final
                && !again
                && let Err(error) = place.forget()
            {
                tracing::warn!(path = %target.display(), %error, "failed to remove the mount directory");
            }
            failed(error.into())
        })
    }

    async fn secret(
        &self,
        what: &'static str,
        (namespace, name): &(String, String),
    ) -> Result<BTreeMap<String, String>, CsiError> {
        let api: Api<Secret> = self.client.api(Some(namespace));
        let secret = api.get(name).await.map_err(|error| {
            let (namespace, name) = (namespace.clone(), name.clone());
            CsiError::Secret { what, namespace, name, error: Box::new(error) }
        })?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok(secret.data.into_iter().flatten().map(|(key, value)| (key, text(value.0))).collect())
    }

    /// Expands a volume to its PersistentVolume's size; false if the driver need not be called.
    pub async fn expand(&self, order: &MountRequest<'_>, bytes: i64) -> Result<bool, CsiError> {
        let spec = Spec::of(order)?;
        let _turn = self.turns.take(&spec.unique()).await;
        let driver = self.driver(&spec.driver)?;
        let abilities = driver.abilities().await?;
        if !abilities.expands() || spec.read_only {
            return Ok(false);
        }
        let mut volume = spec.volume(None, BTreeMap::new());
        if let Some(secret) = &spec.expand_secret {
            volume.secrets = self.secret("NodeExpandSecretRef", secret).await?;
        }
        let target = spec.published(&self.root, &order.dir.0).path;
        let staged = abilities.stages().then(|| spec.stage(&self.root).path);
        let expanded = driver.expand(&abilities, volume, &target, staged.as_deref(), bytes);
        expanded.await.map(|()| true).map_err(CsiError::Expand)
    }

    /// Unmounts all CSI volumes of a pod. After an `Err`, the caller must retry.
    pub async fn unmount_pod(&self, uid: &str, dir: &PodDir) -> Result<(), CsiError> {
        let all = place::of_pod(&self.root, &dir.0);
        for (name, published, data) in all {
            if let Some(data) = data? {
                self.unmount(&(uid.to_string(), name), &data, &published).await?;
            }
        }
        // Volumes without a record may still be staged.
        let before = self.in_use();
        let mut is_staged = false;
        self.uses().retain(|(owner, _), one| {
            is_staged |= owner == uid && self.staged().contains(&one.unique);
            owner != uid
        });
        if is_staged {
            let drivers: Vec<_> = self.drivers().values().cloned().collect();
            for driver in drivers {
                self.reclaim(&driver).await;
            }
        }
        if self.in_use() != before {
            self.hurry.notify_one();
        }
        Ok(())
    }

    async fn unmount(
        &self,
        key: &(String, String),
        data: &VolumeData,
        published: &Published,
    ) -> Result<(), CsiError> {
        let unique = data.unique();
        let _turn = self.turns.take(&unique).await;
        let in_step = |step| {
            let volume = data.volume.clone();
            move |why: CsiError| CsiError::Step { step, volume, why: Box::new(why) }
        };
        let failed = || {
            in_step(match published.link {
                Some(_) => "UnmapVolume.UnmapPodDevice",
                None => "UnmountVolume.TearDown",
            })
        };
        let call = "Unmounter.TearDownAt failed to get CSI client";
        let driver = self.driver(&data.driver_name);
        let driver = driver.map_err(CsiError::call(call)).map_err(failed())?;
        let unpublished = driver.unpublish(&data.volume_handle, &published.path).await;
        let call = "Unmounter.TearDownAt failed";
        unpublished.map_err(CsiError::call(call)).map_err(failed())?;
        let is_last = !self.uses().iter().any(|(other, one)| other != key && one.unique == unique);
        published.clear().map_err(CsiError::from).map_err(failed())?;
        if is_last && place::is_persistent(data) {
            let stage = match published.link {
                Some(_) => Stage::of_device(&self.root, &data.volume),
                None => Stage::of_mount(&self.root, &data.driver_name, &data.volume_handle),
            };
            let unstaged = self.unstage(&driver, &data.volume_handle, &stage).await;
            unstaged.map_err(in_step("UnmountDevice"))?;
        }
        published.forget().map_err(CsiError::from).map_err(failed())?;
        self.uses().remove(key);
        self.hurry.notify_one();
        Ok(())
    }

    /// The caller holds the volume's lock.
    async fn unstage(&self, driver: &Driver, handle: &str, stage: &Stage) -> Result<(), CsiError> {
        if VolumeData::read(&stage.record)?.is_none() {
            return Ok(());
        }
        let abilities = driver.abilities().await?;
        if abilities.stages() {
            let unstaged = driver.unstage(handle, &stage.path).await;
            unstaged.map_err(CsiError::call("attacher.UnmountDevice failed"))?;
        }
        self.staged().remove(&unique_name(&driver.name, handle));
        Ok(stage.forget()?)
    }

    /// Unstages volumes that no pod uses any more.
    pub(super) async fn reclaim(&self, driver: &Driver) {
        for (stage, data) in place::staged(&self.root, &driver.name) {
            let unique = data.unique();
            let _turn = self.turns.take(&unique).await;
            if self.uses().values().any(|one| one.unique == unique) {
                continue;
            }
            if let Err(error) = self.unstage(driver, &data.volume_handle, &stage).await {
                tracing::warn!(volume = unique, %error, "failed to unstage an unused volume");
            }
        }
    }
}

/// The driver that publishes, and the staged volume.
struct Site<'a> {
    driver: &'a Driver,
    abilities: &'a Abilities,
    staged: Option<&'a Path>,
}

/// Applies the pod's fsGroup to the volume, if the fsGroupPolicy asks for that.
async fn own(
    pod: &Pod,
    spec: &Spec,
    about: Option<&CSIDriverSpec>,
    path: &Path,
) -> Result<(), Reason> {
    let policy = about.and_then(|about| about.fs_group_policy.as_deref()).unwrap_or(DEFAULT_POLICY);
    let Some(group) = group_of(pod).and_then(|group| u32::try_from(group).ok()) else {
        return Ok(());
    };
    if !spec.is_owned_by_group(policy) {
        return Ok(());
    }
    let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    let change = context.and_then(|context| context.fs_group_change_policy.as_deref());
    let only_on_mismatch = change == Some("OnRootMismatch");
    let path = path.to_path_buf();
    let done =
        tokio::task::spawn_blocking(move || ownership::give(&path, group, only_on_mismatch)).await;
    done.unwrap_or_else(|error| Err(io::Error::other(error))).map_err(|error| {
        spec.failed("SetUp", format!("applyFSGroup failed for vol {}: {error}", spec.handle))
    })
}

/// Upstream: getPodInfoAttrs.
fn pod_info(pod: &Pod, mode: &str) -> BTreeMap<String, String> {
    let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone());
    let pairs = [
        ("pod.name", names::name(pod).to_string()),
        ("pod.namespace", names::namespace(pod).to_string()),
        ("pod.uid", names::uid(pod).to_string()),
        ("serviceAccount.name", account.unwrap_or_default()),
        ("ephemeral", (mode == EPHEMERAL).to_string()),
    ];
    pairs.into_iter().map(|(key, value)| (format!("csi.storage.k8s.io/{key}"), value)).collect()
}

/// The service account tokens that the CSIDriver requests, as one attribute.
async fn tokens(
    order: &MountRequest<'_>,
    about: Option<&CSIDriverSpec>,
) -> Result<BTreeMap<String, String>, CsiError> {
    let requests = about.and_then(|about| about.token_requests.as_deref()).unwrap_or_default();
    if requests.is_empty() {
        return Ok(BTreeMap::new());
    }
    let mut out = serde_json::Map::new();
    for request in requests {
        let audience = Some(request.audience.as_str()).filter(|text| !text.is_empty());
        let seconds = request.expiration_seconds.unwrap_or(3600);
        let wanted = TokenSpec::of(order.pod, audience, seconds);
        let token = order.objects.token(&wanted).await?;
        let expires = Timestamp::from_second(token.expires.as_second()).unwrap_or(token.expires);
        let status = json!({"token": token.text, "expirationTimestamp": expires.to_string()});
        out.insert(request.audience.clone(), status);
    }
    let text = serde_json::Value::Object(out).to_string();
    Ok([("csi.storage.k8s.io/serviceAccount.tokens".to_string(), text)].into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(mode: &'static str, fs_type: &str, access: Option<&str>, read_only: bool) -> Spec {
        Spec {
            is_device: false,
            name: "v".into(),
            driver: "d".into(),
            handle: "h".into(),
            mode,
            read_only,
            fs_type: fs_type.into(),
            attributes: BTreeMap::new(),
            access_modes: access.map(|mode| vec![mode.to_string()]),
            mount_options: vec![],
            publish_secret: None,
            stage_secret: None,
            expand_secret: None,
        }
    }

    #[test]
    fn groups_own_volumes_by_policy() {
        let check = |policy: &str, fs: &str, access: Option<&str>, ro: bool, expected: bool| {
            let got = spec(PERSISTENT, fs, access, ro).is_owned_by_group(policy);
            assert_eq!(got, expected, "{policy} {fs} {access:?} {ro}");
        };
        let once = Some("ReadWriteOnce");
        check("None", "ext4", once, false, false);
        check("File", "", Some("ReadWriteMany"), false, true);
        check("File", "", once, true, false);
        check(DEFAULT_POLICY, "ext4", once, false, true);
        check(DEFAULT_POLICY, "ext4", Some("ReadWriteOncePod"), false, true);
        check(DEFAULT_POLICY, "", once, false, false);
        check(DEFAULT_POLICY, "ext4", Some("ReadWriteMany"), false, false);
        check(DEFAULT_POLICY, "ext4", None, false, false);
    }

    #[test]
    fn drivers_declare_lifecycle_modes() {
        let check = |mode: &'static str, listed: Option<&[&str]>, expected: Option<&str>| {
            let driver = listed.map(|modes| CSIDriverSpec {
                volume_lifecycle_modes: Some(modes.iter().map(|mode| mode.to_string()).collect()),
                ..CSIDriverSpec::default()
            });
            let got = spec(mode, "", None, false).check_mode(driver.as_ref());
            assert_eq!(got.err().map(|why| why.to_string()).as_deref(), expected);
        };
        check(PERSISTENT, None, None);
        check(
            EPHEMERAL,
            None,
            Some("volume mode \"Ephemeral\" not supported by driver d (no CSIDriver object)"),
        );
        check(EPHEMERAL, Some(&["Persistent", "Ephemeral"]), None);
        check(
            EPHEMERAL,
            Some(&["Persistent"]),
            Some(
                "volume mode \"Ephemeral\" not supported by driver d (only supports [\"Persistent\"])",
            ),
        );
    }
}
