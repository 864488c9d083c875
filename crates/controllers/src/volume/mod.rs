//! PersistentVolumes: claims are bound to them, volumes without claims reclaimed.
//!
//! In: claims, volumes, classes. Out: both sides of a binding, phases, volumes of the built-in
//! class. Upstream: `pkg/controller/volume/persistentvolume`. [`plan`] decides.
//!
//! Cost: a claim that names a volume looks at that one. Another goes through the free volumes of its class and
//! those reserved for it, by their shapes, and decodes the one that it gets. A volume that becomes free, and a
//! class that changes, wake the claims that wait for that class.

pub mod attach;
pub mod ephemeral;
pub mod expand;
mod local_path;
mod plan;
pub mod protection;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use api::volumes as matching;
use client::{
    Api, ErrorExt, Event, EventType, Lister, ObjectKey, Outcome, PostParams, Projection, Result,
    View, Whole, WorkQueue,
};
use k8s_openapi::api::core::v1::{
    ObjectReference, PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec,
};
use k8s_openapi::api::storage::v1::StorageClass;
use machinery::{ObjectMeta, Time};

use crate::context::Context;
use crate::descriptor::{Descriptor, Row, Setup, on, on_metadata};
use local_path::LocalPath;
use plan::{Fate, Observed, Step};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller, Work> {
    name: "persistentvolume-binder-controller",
    account: "persistent-volume-binder",
    component: "persistentvolume-controller",
    queue: "volumes",
    workers: 1,
    new: Controller::new,
    watches: &[
        &on(|this: &Controller, _, event| this.claim_event(event)),
        &on(|this: &Controller, _, event| this.volume_event(event)),
        &on_metadata::<StorageClass, _, _>(|this: &Controller, _, event| {
            this.wake_pending(&event.entry().header.key.name);
            // It may be the default, or have been.
            this.wake_pending("");
        }),
    ],
    reconcile: |this, work| {
        Box::pin(async move {
            match work {
                Work::Claim(key) => this.claim(&key).await,
                Work::Volume(key) => this.volume(&key).await,
            }
        })
    },
};

/// One: two claims must not take one volume. A binding is a few writes.
/// Volumes by where claims find them; see [`place_of`].
const BY_PLACE: &str = "place";
/// Claims by the volume that they name.
const BY_VOLUME: &str = "volume";

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Work {
    Claim(ObjectKey),
    Volume(ObjectKey),
}

struct Controller {
    context: Context,
    claims: Lister<PersistentVolumeClaim>,
    volumes: Lister<PersistentVolume>,
    shapes: View<Shape>,
    classes: View<Whole<StorageClass>>,
    local_path: Option<LocalPath>,
    queue: WorkQueue<Work>,
    pending: Pending,
}

/// The fields of a volume that decide whether it fits a claim; without its source.
struct Shape(Arc<PersistentVolume>);

impl Projection<PersistentVolume> for Shape {
    fn of(volume: &PersistentVolume) -> Self {
        let metadata = ObjectMeta {
            name: volume.metadata.name.clone(),
            labels: volume.metadata.labels.clone(),
            annotations: volume.metadata.annotations.clone(),
            deletion_timestamp: volume.metadata.deletion_timestamp.clone(),
            ..ObjectMeta::default()
        };
        let spec = volume.spec.as_ref().map(|spec| PersistentVolumeSpec {
            access_modes: spec.access_modes.clone(),
            capacity: spec.capacity.clone(),
            claim_ref: spec.claim_ref.clone(),
            storage_class_name: spec.storage_class_name.clone(),
            volume_attributes_class_name: spec.volume_attributes_class_name.clone(),
            volume_mode: spec.volume_mode.clone(),
            ..PersistentVolumeSpec::default()
        });
        Self(Arc::new(PersistentVolume { metadata, spec, status: volume.status.clone() }))
    }

    /// Others are looked at by their claim alone.
    fn concerns(volume: &PersistentVolume) -> bool {
        volume.spec.as_ref().is_some_and(|spec| spec.claim_ref.is_none())
    }
}

/// Where a claim finds a volume: under its class if it is free, under the claim if it is for one.
fn place_of(volume: &PersistentVolume) -> Vec<String> {
    let Some(reference) = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()) else {
        return vec![free_of(matching::class_of_volume(volume))];
    };
    vec![claim_of(reference).to_string()]
}

fn claim_of(reference: &ObjectReference) -> ObjectKey {
    ObjectKey::new(
        reference.namespace.as_deref().unwrap_or_default(),
        reference.name.as_deref().unwrap_or_default(),
    )
}

/// No claim's key begins with a slash.
fn free_of(class: &str) -> String {
    format!("/{class}")
}

type ByClass = BTreeMap<String, BTreeSet<ObjectKey>>;

/// Claims that have no volume, by the class that they wait for; empty for those that name none.
#[derive(Default)]
struct Pending(
    /// Guards both sides; held for a change or a look-up.
    Mutex<(ByClass, BTreeMap<ObjectKey, String>)>,
);

impl Pending {
    fn hear(&self, key: &ObjectKey, claim: Option<&PersistentVolumeClaim>) {
        let is_bound = |claim: &&PersistentVolumeClaim| {
            claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound")
        };
        let waits = claim.filter(|claim| !is_bound(claim));
        let class = waits.map(|claim| matching::class_of(claim).unwrap_or_default().to_owned());
        let mut both = self.0.lock().expect("no panic while held");
        let (by_class, by_claim) = &mut *both;
        if by_claim.get(key) == class.as_ref() {
            return;
        }
        if let Some(old) = by_claim.remove(key)
            && let Some(all) = by_class.get_mut(&old)
        {
            all.remove(key);
            if all.is_empty() {
                by_class.remove(&old);
            }
        }
        if let Some(class) = class {
            by_claim.insert(key.clone(), class.clone());
            by_class.entry(class).or_default().insert(key.clone());
        }
    }

    fn of(&self, class: &str) -> Vec<ObjectKey> {
        let both = self.0.lock().expect("no panic while held");
        both.0.get(class).into_iter().flatten().cloned().collect()
    }
}

impl Controller {
    fn new(setup: &Setup<Work>) -> Option<Self> {
        let claims = setup.informer::<PersistentVolumeClaim>();
        let volumes = setup.informer();
        volumes.index(BY_PLACE, place_of);
        claims.index(BY_VOLUME, |claim| {
            let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone());
            volume.filter(|name| !name.is_empty()).into_iter().collect()
        });
        Some(Self {
            context: setup.context.clone(),
            claims: claims.lister(),
            shapes: volumes.view(),
            volumes: volumes.lister(),
            classes: setup.view::<StorageClass, _>(),
            pending: Pending::default(),
            local_path: LocalPath::new(&setup.options),
            queue: setup.queue.clone(),
        })
    }

    fn claim_event(&self, event: &Event<PersistentVolumeClaim>) {
        let claim = (!event.is_deleted()).then(|| &**event.object());
        self.pending.hear(&event.key(), claim);
        self.queue.add(Work::Claim(event.key()));
        let spec = event.object().spec.as_ref();
        let volume = spec.and_then(|spec| spec.volume_name.as_deref());
        if let Some(name) = volume.filter(|name| !name.is_empty()) {
            self.queue.add(Work::Volume(ObjectKey::new("", name)));
        }
    }

    fn volume_event(&self, event: &Event<PersistentVolume>) {
        self.queue.add(Work::Volume(event.key()));
        let spec = event.object().spec.as_ref();
        for claim in self.claims.entries_by_index(BY_VOLUME, &event.key().name) {
            self.queue.add(Work::Claim(claim.header.key.clone()));
        }
        match spec.and_then(|spec| spec.claim_ref.as_ref()) {
            Some(reference) => self.queue.add(Work::Claim(claim_of(reference))),
            None => self.wake_pending(matching::class_of_volume(event.object())),
        }
    }

    /// Claims that wait for a volume of this class.
    fn wake_pending(&self, class: &str) {
        for claim in self.pending.of(class) {
            self.queue.add(Work::Claim(claim));
        }
    }

    /// The candidates for a claim: the volume that it names, or those reserved for it and the free ones of its
    /// class.
    fn candidates(
        &self,
        key: &ObjectKey,
        claim: &PersistentVolumeClaim,
    ) -> Vec<Arc<PersistentVolume>> {
        let named = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
        if let Some(name) = named.filter(|name| !name.is_empty()) {
            return self.volumes.get("", name).into_iter().collect();
        }
        let class = matching::class_of(claim).unwrap_or_default();
        let mut all = self.volumes.by_index(BY_PLACE, &key.to_string());
        let free = self.volumes.entries_by_index(BY_PLACE, &free_of(class));
        let shapes = free.iter().filter_map(|entry| self.shapes.get(&entry.header.key));
        all.extend(shapes.map(|shape| shape.0.clone()));
        all
    }

    async fn claim(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(claim) = self.claims.get_key(key) else {
            return Ok(Outcome::Done);
        };
        let observed = Observed {
            claim: &claim,
            volumes: &self.candidates(key, &claim),
            classes: &self.classes.objects(None),
        };
        let api: Api<PersistentVolumeClaim> = self.context.client.api(Some(&key.namespace));
        match plan::of_claim(&observed) {
            Step::Nothing => self.set_pending(&api, &claim).await?,
            Step::TakeClass(class) => {
                let mut updated = (*claim).clone();
                updated.spec.get_or_insert_default().storage_class_name = Some(class);
                api.replace(&key.name, &PostParams::default(), &updated).await?;
            }
            Step::Bind(shape) => {
                let name = shape.metadata.name.as_deref().unwrap_or_default();
                // One that went meanwhile wakes its claim.
                if let Some(volume) = self.volumes.get("", name) {
                    self.bind(&api, &claim, &volume).await?;
                }
            }
            Step::Provision { class, node } => {
                return self.provision(&api, &claim, &class, node.as_deref()).await;
            }
            Step::Lost(reason, message) => {
                let known = claim.status.clone().unwrap_or_default();
                if known.phase.as_deref() != Some("Lost") {
                    let mut updated = (*claim).clone();
                    updated.status.get_or_insert_default().phase = Some("Lost".into());
                    api.replace_status(&key.name, &PostParams::default(), &updated).await?;
                    let events = &self.context.events;
                    events.event(&*claim, EventType::Warning, reason, message);
                }
            }
            Step::Wait { reason, message, warning } => {
                let kind = if warning { EventType::Warning } else { EventType::Normal };
                self.context.events.event(&*claim, kind, reason, message);
                self.set_pending(&api, &claim).await?;
            }
        }
        Ok(Outcome::Done)
    }

    async fn set_pending(
        &self,
        api: &Api<PersistentVolumeClaim>,
        claim: &PersistentVolumeClaim,
    ) -> Result<()> {
        let known = claim.status.as_ref().and_then(|status| status.phase.as_deref());
        if known == Some("Pending") || claim.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        let mut updated = claim.clone();
        updated.status.get_or_insert_default().phase = Some("Pending".into());
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        match api.replace_status(name, &PostParams::default(), &updated).await {
            Err(error) if error.is_not_found() => Ok(()),
            done => done.map(drop),
        }
    }

    /// The volume comes first: the first writer of its claimRef gets it.
    async fn bind(
        &self,
        api: &Api<PersistentVolumeClaim>,
        claim: &PersistentVolumeClaim,
        volume: &PersistentVolume,
    ) -> Result<()> {
        let volumes: Api<PersistentVolume> = self.context.client.api(None);
        let volume_name = volume.metadata.name.as_deref().unwrap_or_default();
        let mut volume = volume.clone();
        if let Some(bound) = plan::bound_volume(&volume, claim) {
            volume = volumes.replace(volume_name, &PostParams::default(), &bound).await?;
        }
        self.set_phase(&volume, "Bound").await?;
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        let mut claim = claim.clone();
        if let Some(bound) = plan::bound_claim(&claim, &volume) {
            claim = api.replace(name, &PostParams::default(), &bound).await?;
        }
        if let Some(status) = plan::bound_status(&claim, &volume) {
            claim.status = Some(status);
            api.replace_status(name, &PostParams::default(), &claim).await?;
        }
        Ok(())
    }

    async fn set_phase(&self, volume: &PersistentVolume, phase: &str) -> Result<()> {
        let known = volume.status.as_ref().and_then(|status| status.phase.as_deref());
        if known == Some(phase) {
            return Ok(());
        }
        let mut updated = volume.clone();
        let status = updated.status.get_or_insert_default();
        status.phase = Some(phase.into());
        status.last_phase_transition_time = Some(Time(base::clock::now_seconds()));
        let volumes: Api<PersistentVolume> = self.context.client.api(None);
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        match volumes.replace_status(name, &PostParams::default(), &updated).await {
            Err(error) if error.is_not_found() => Ok(()),
            done => done.map(drop),
        }
    }

    async fn provision(
        &self,
        api: &Api<PersistentVolumeClaim>,
        claim: &PersistentVolumeClaim,
        class: &StorageClass,
        node: Option<&str>,
    ) -> Result<Outcome> {
        let events = &self.context.events;
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        let annotations = claim.metadata.annotations.clone().unwrap_or_default();
        if plan::PROVISIONER.iter().any(|key| annotations.get(*key) != Some(&class.provisioner)) {
            let mut updated = claim.clone();
            let annotations = updated.metadata.annotations.get_or_insert_default();
            for key in plan::PROVISIONER {
                annotations.insert(key.into(), class.provisioner.clone());
            }
            // The write comes back as an event, and with it this claim.
            api.replace(name, &PostParams::default(), &updated).await?;
            return Ok(Outcome::Done);
        }
        let ours =
            self.local_path.as_ref().filter(|_| class.provisioner == local_path::PROVISIONER);
        let Some(ours) = ours else {
            let message = format!(
                "Waiting for a volume to be created either by the external provisioner '{}' or manually by the system administrator. If volume creation is delayed, please verify that the provisioner is running and correctly registered.",
                class.provisioner
            );
            events.event(claim, EventType::Normal, "ExternalProvisioning", message);
            return Ok(Outcome::Done);
        };
        let volume = match ours.volume_for(claim, class, node) {
            Ok(volume) => volume,
            Err(why) => {
                let message = format!(
                    "failed to provision volume with StorageClass \"{}\": {why}",
                    class.metadata.name.as_deref().unwrap_or_default()
                );
                events.event(claim, EventType::Warning, "ProvisioningFailed", message);
                return Ok(Outcome::Backoff);
            }
        };
        let volume_name = volume.metadata.name.clone().unwrap_or_default();
        let volumes: Api<PersistentVolume> = self.context.client.api(None);
        match volumes.create(&PostParams::default(), &volume).await {
            Err(error) if error.is_already_exists() => {}
            done => {
                done?;
                let message = format!("Successfully provisioned volume {volume_name}");
                events.event(claim, EventType::Normal, "ProvisioningSucceeded", message);
            }
        }
        Ok(Outcome::Done)
    }

    async fn volume(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(volume) = self.volumes.get_key(key) else {
            return Ok(Outcome::Done);
        };
        let reference = volume.spec.as_ref().and_then(|spec| spec.claim_ref.clone());
        let mut claim = None;
        if let Some(reference) = &reference {
            let namespace = reference.namespace.as_deref().unwrap_or_default();
            let name = reference.name.as_deref().unwrap_or_default();
            claim = self.claims.get(namespace, name);
            if claim.is_none() {
                // The cache may lag behind a claim that was just made.
                let api: Api<PersistentVolumeClaim> = self.context.client.api(Some(namespace));
                claim = api.get_opt(name).await?.map(Arc::new);
            }
        }
        match plan::of_volume(&volume, claim.as_deref()) {
            Fate::Phase(phase) => self.set_phase(&volume, phase).await?,
            Fate::Delete => {
                self.set_phase(&volume, "Released").await?;
                self.reclaim(&volume).await?;
            }
        }
        Ok(Outcome::Done)
    }

    /// Volumes of other provisioners are theirs to delete.
    async fn reclaim(&self, volume: &PersistentVolume) -> Result<()> {
        let annotations = volume.metadata.annotations.as_ref();
        let by = annotations.and_then(|all| all.get(plan::PROVISIONED_BY));
        let (Some(ours), true) =
            (&self.local_path, by.is_some_and(|by| by == local_path::PROVISIONER))
        else {
            if by.is_none() {
                let message = "error getting deleter volume plugin for volume: no deletable volume plugin matched";
                let events = &self.context.events;
                events.event(volume, EventType::Warning, "VolumeFailedDelete", message);
                self.set_phase(volume, "Failed").await?;
            }
            return Ok(());
        };
        if let Err(why) = ours.remove(volume).await {
            let events = &self.context.events;
            events.event(volume, EventType::Warning, "VolumeFailedDelete", why);
        }
        let volumes: Api<PersistentVolume> = self.context.client.api(None);
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        match volumes.delete(name, &Default::default()).await {
            Err(error) if error.is_not_found() => Ok(()),
            done => done.map(drop),
        }
    }
}
