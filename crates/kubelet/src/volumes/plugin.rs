//! A volume plugin: one type of volume, how it is set up for a pod, and how that is undone.
//!
//! In: a mount [`Request`] of one pod, and the [`Host`]. Out: the [`Mounted`] volume, or the error that
//! becomes an event.
//! Invariants: a repeated `set_up` changes nothing; `tear_down` may follow a `set_up` that failed or
//! that an earlier kubelet made, and is retried until it succeeds.
//! Upstream: `pkg/volume/plugins.go`.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use client::{Client, EventType};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec, Pod, Volume,
};

use super::csi::Csi;
use super::csi::error::CsiError;
use super::dir::PodDir;
use super::payload::PayloadError;
use super::turns::Turns;
use crate::pod::env::Surroundings;
use crate::pod::events::Events;
use crate::pod::input::Inputs;
pub use crate::pod::objects::References;
use crate::pod::objects::{ObjectError, Objects};
use crate::reason::Reason;

/// A row of [`super::PLUGINS`].
#[async_trait]
pub trait VolumePlugin: Sync {
    /// The name in paths: `kubernetes.io~<name>`.
    fn name(&self) -> &'static str;

    fn supports(&self, source: &Source<'_>) -> bool;

    /// The objects of a volume of this plugin; they are in [`Surroundings`] when it is set up.
    fn references(&self, _volume: &Volume) -> References {
        References::default()
    }

    /// The volume is set up again whenever its running pod wakes.
    fn refreshes(&self) -> bool {
        false
    }

    /// The volume's files are the pod's own, and count as its local storage.
    fn is_local_storage(&self) -> bool {
        false
    }

    async fn set_up(&self, host: &Host, request: &Request<'_>) -> Result<Mounted, VolumeError>;

    /// Undoes all volumes of a pod that has ended, before its directory is removed. Not needed by
    /// plugins that only mount below that directory.
    async fn tear_down(&self, _host: &Host, _uid: &str, _dir: &PodDir) -> Result<(), VolumeError> {
        Ok(())
    }

    /// Takes over what an earlier kubelet left on the node; called once, before all other calls. It may
    /// block.
    fn recover(&self, _host: &Host) {}
}

/// What plugins use of the kubelet.
pub struct Host {
    pub client: Client,
    pub events: Events,
    pub objects: Arc<Objects>,
    pub csi: Arc<Csi>,
    pub node_name: String,
    /// The kubelet's directory.
    pub root: PathBuf,
    /// False without the privilege to mount: files that upstream keeps in a tmpfs are on disk.
    pub may_mount: bool,
    /// One caller at a time works on a volume that pods share.
    pub turns: Turns,
}

impl Host {
    /// Reports a mapped block device. Upstream sends a second event for the device's global path, which
    /// does not exist here.
    pub fn tell_mapped(&self, pod: &Pod, link: &Path) {
        let (dir, name) = (link.parent().unwrap_or(link), link.file_name().unwrap_or_default());
        let text = format!(
            "MapVolume.MapPodDevice succeeded for volume {:?} volumeMapPath {:?}",
            name.to_string_lossy(),
            dir.display().to_string()
        );
        self.events.tell(pod, EventType::Normal, "SuccessfulMountVolume", text);
    }
}

/// A mount request: one volume for one pod.
pub struct Request<'a> {
    pub pod: &'a Pod,
    pub dir: &'a PodDir,
    pub source: Source<'a>,
    pub around: &'a Surroundings<'a>,
    /// Tells when the pod must stop.
    pub input: &'a Inputs,
}

/// A volume of a pod's spec, with the PersistentVolume if a claim provides it.
pub struct Source<'a> {
    pub volume: &'a Volume,
    pub bound: Option<&'a Bound>,
}

/// A claim with the volume that it is bound to.
pub struct Bound {
    pub claim: PersistentVolumeClaim,
    pub volume: PersistentVolume,
    pub read_only: bool,
}

impl Source<'_> {
    /// The PersistentVolume's name, else the volume's name in the pod.
    pub fn name(&self) -> &str {
        let bound = self.bound.map(|bound| bound.volume.metadata.name.as_deref());
        bound.map_or(&self.volume.name, Option::unwrap_or_default)
    }

    pub fn persistent(&self) -> Option<&PersistentVolumeSpec> {
        self.bound?.volume.spec.as_ref()
    }

    pub fn is_read_only(&self) -> bool {
        self.bound.is_some_and(|bound| bound.read_only)
    }

    pub fn is_block(&self) -> bool {
        self.bound.is_some_and(|bound| is_block(&bound.volume))
    }
}

pub fn is_block(volume: &PersistentVolume) -> bool {
    volume.spec.as_ref().is_some_and(|spec| spec.volume_mode.as_deref() == Some("Block"))
}

/// A mounted volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    pub path: PathBuf,
    /// The volume itself is read-only, independent of the mount.
    pub read_only: bool,
    /// A block device: containers get the device that the path leads to.
    pub is_device: bool,
    /// When it must be set up again.
    pub again: Option<Timestamp>,
}

impl Mounted {
    pub fn directory(path: PathBuf, read_only: bool) -> Self {
        Self { path, read_only, is_device: false, again: None }
    }
}

/// Why a volume is not set up. The text follows `MountVolume.SetUp failed for volume "x" : `.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    #[error(transparent)]
    Payload(#[from] PayloadError),
    #[error(transparent)]
    Object(#[from] ObjectError),
    #[error("hostPath type check failed: {0}")]
    HostPath(String),
    #[error("{0}")]
    Claim(String),
    #[error(transparent)]
    Driver(#[from] CsiError),
    #[error("no volume plugin matched")]
    Unsupported,
    #[error("{context}: {source}")]
    Io { context: &'static str, source: io::Error },
    /// Another step than `SetUp`: `MountVolume.NewMounter initialization`, `MapVolume.MapBlockVolume`.
    #[error("{why}")]
    Step { step: &'static str, why: String },
    /// An event with a text of its own.
    #[error(transparent)]
    Event(#[from] Reason),
    #[error("the task ended")]
    Aborted(#[from] tokio::task::JoinError),
}

pub const FAILED_MOUNT: &str = "FailedMount";
/// The reason of a failure to map a block device.
pub const FAILED_MAP: &str = "FailedMapVolume";

impl VolumeError {
    pub fn io(context: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { context, source }
    }

    pub fn step(step: &'static str, why: impl ToString) -> Self {
        Self::Step { step, why: why.to_string() }
    }

    /// The event about a volume.
    pub fn about(self, volume: &str) -> Reason {
        let step = match &self {
            Self::Event(reason) => return reason.clone(),
            Self::Step { step, .. } => *step,
            _ => "MountVolume.SetUp",
        };
        let reason = if step.starts_with("MapVolume") { FAILED_MAP } else { FAILED_MOUNT };
        Reason::new(reason, format!("{step} failed for volume {volume:?} : {self}"))
    }
}
