//! Attaches volumes to the nodes of their pods, and detaches them when no pod of the node needs them.
//!
//! In: pods with nodes, their claims and volumes, drivers, what nodes say is in use. Out:
//! VolumeAttachments, which the drivers' attachers act on, and `status.volumesAttached` of nodes,
//! which kubelets wait for.
//!
//! ```text
//!  pod gets a node ► VolumeAttachment ► its driver attaches ► node's volumesAttached ► mounted
//!  pod is done ► not in use any more ► leaves volumesAttached ► VolumeAttachment is deleted
//! ```
//!
//! Invariant: nothing that a node has in use is detached, unless the node was silent for too long.
//! Upstream: `pkg/controller/volume/attachdetach`, the CSI half of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use client::{
    Api, DeleteParams, ErrorExt, Event, Lister, ObjectKey, Outcome, Patch, PatchParams, PostParams,
    Result, WorkQueue,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    AttachedVolume, Node, PersistentVolume, PersistentVolumeClaim, Pod,
};
use k8s_openapi::api::storage::v1::{
    CSIDriver, VolumeAttachment, VolumeAttachmentSource, VolumeAttachmentSpec,
};
use machinery::ObjectMeta;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::protection::{BY_CLAIM, claims_of, index_claims};
use crate::context::Context;
use crate::descriptor::{Descriptor, Row, Setup, on};
use crate::pod;

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller, Arc<str>> {
    name: "persistentvolume-attach-detach-controller",
    account: "attachdetach-controller",
    component: "attachdetach-controller",
    queue: "attachdetach",
    workers: 4,
    new: Controller::new,
    watches: &[
        &on(|this: &Controller, _, event: &Event<Pod>| this.wake(event.object())),
        &on(|_: &Controller, queue, event: &Event<VolumeAttachment>| {
            queue.add(event.object().spec.node_name.as_str().into());
        }),
        &on(|_: &Controller, queue, event: &Event<Node>| {
            let used =
                |node: &Node| node.status.as_ref().and_then(|one| one.volumes_in_use.clone());
            // Heartbeats say nothing about volumes.
            if event.old().is_none_or(|old| used(&old) != used(event.object())) {
                queue.add(event.key().name);
            }
        }),
        &on(|this: &Controller, _, event: &Event<PersistentVolumeClaim>| {
            this.wake_users(&event.key());
        }),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

const BY_NODE: &str = "node";
/// After this a volume is taken from a node that does not answer.
/// Upstream: `ReconcilerMaxWaitForUnmountDuration`.
const LONGEST_WAIT: Duration = Duration::from_secs(360);
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

struct Controller {
    context: Context,
    pods: Lister<Pod>,
    nodes: Lister<Node>,
    claims: Lister<PersistentVolumeClaim>,
    volumes: Lister<PersistentVolume>,
    drivers: Lister<CSIDriver>,
    attachments: Lister<VolumeAttachment>,
    /// Names of nodes.
    queue: WorkQueue<Arc<str>>,
}

/// A volume that a driver attaches.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Wanted {
    driver: String,
    handle: String,
    /// The PersistentVolume's name.
    volume: String,
}

impl Wanted {
    fn of(volume: &PersistentVolume) -> Option<Self> {
        let csi = volume.spec.as_ref()?.csi.as_ref()?;
        Some(Self {
            driver: csi.driver.clone(),
            handle: csi.volume_handle.clone(),
            volume: volume.metadata.name.clone()?,
        })
    }

    /// As nodes name it in their status.
    fn unique_name(&self) -> String {
        format!("kubernetes.io/csi/{}^{}", self.driver, self.handle)
    }

    /// Upstream: `getAttachmentName`.
    fn attachment_name(&self, node: &str) -> String {
        let digest = Sha256::digest(format!("{}{}{node}", self.handle, self.driver));
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("csi-{hex}")
    }

    fn attachment(&self, node: &str) -> VolumeAttachment {
        VolumeAttachment {
            metadata: ObjectMeta {
                name: Some(self.attachment_name(node)),
                ..ObjectMeta::default()
            },
            spec: VolumeAttachmentSpec {
                attacher: self.driver.clone(),
                node_name: node.into(),
                source: VolumeAttachmentSource {
                    persistent_volume_name: Some(self.volume.clone()),
                    ..VolumeAttachmentSource::default()
                },
            },
            status: None,
        }
    }
}

/// An attachment that is there.
#[derive(Clone, Debug)]
struct Present {
    name: String,
    volume: Wanted,
    is_attached: bool,
    is_going: bool,
}

/// The observed state of a node.
struct Observed<'a> {
    name: &'a str,
    wanted: BTreeSet<Wanted>,
    present: Vec<Present>,
    /// Unique names.
    in_use: BTreeSet<String>,
    /// As the node's status says it now.
    attached: BTreeMap<String, String>,
    /// It is gone, out of service, or was silent for too long: what it says does not count.
    is_lost: bool,
}

#[derive(Debug, Default, PartialEq)]
struct Plan {
    create: Vec<VolumeAttachment>,
    /// Names. Only after `attached` is written: from then on no kubelet mounts them.
    delete: Vec<String>,
    /// The new `volumesAttached`, if it is another.
    attached: Option<Vec<AttachedVolume>>,
}

/// Pure.
fn plan(observed: &Observed<'_>) -> Plan {
    let mut plan = Plan::default();
    let known: BTreeSet<&Wanted> = observed.present.iter().map(|one| &one.volume).collect();
    let missing = observed.wanted.iter().filter(|one| !known.contains(one));
    if !observed.is_lost {
        plan.create = missing.map(|one| one.attachment(observed.name)).collect();
    }
    let mut attached = BTreeMap::new();
    for one in &observed.present {
        let unique = one.volume.unique_name();
        let stays = observed.wanted.contains(&one.volume)
            || (observed.in_use.contains(&unique) && !observed.is_lost);
        if !stays && !one.is_going {
            plan.delete.push(one.name.clone());
        }
        if stays && one.is_attached && !one.is_going {
            let path = observed.attached.get(&unique).cloned().unwrap_or_default();
            attached.insert(unique, path);
        }
    }
    // Attachments of other components are not removed.
    let others =
        observed.attached.iter().filter(|(name, _)| !name.starts_with("kubernetes.io/csi/"));
    attached.extend(others.map(|(name, path)| (name.clone(), path.clone())));
    if attached != observed.attached {
        let volume = |(name, device_path)| AttachedVolume { name, device_path };
        plan.attached = Some(attached.into_iter().map(volume).collect());
    }
    plan
}

impl Controller {
    fn new(setup: &Setup<Arc<str>>) -> Option<Self> {
        let (pods, attachments) = (setup.informer::<Pod>(), setup.informer::<VolumeAttachment>());
        pods.index(BY_NODE, |pod| vec![pod::node_name(pod).to_owned()]);
        index_claims(&pods);
        attachments.index(BY_NODE, |one| vec![one.spec.node_name.clone()]);
        Some(Self {
            context: setup.context.clone(),
            pods: pods.lister(),
            nodes: setup.lister(),
            claims: setup.lister(),
            volumes: setup.lister(),
            drivers: setup.lister(),
            attachments: attachments.lister(),
            queue: setup.queue.clone(),
        })
    }

    fn wake(&self, one: &Pod) {
        let node = pod::node_name(one);
        if !node.is_empty() && !claims_of(one).is_empty() {
            self.queue.add(node.into());
        }
    }

    /// A claim got its volume: the pods that use it may have waited for that.
    fn wake_users(&self, claim: &ObjectKey) {
        for one in self.pods.by_index(BY_CLAIM, &claim.to_string()) {
            self.wake(&one);
        }
    }

    async fn reconcile(&self, name: &str) -> Result<Outcome> {
        let node = self.nodes.get("", name);
        let (observed, recheck) = self.observe(name, node.as_deref(), base::clock::now());
        let plan = plan(&observed);
        let api: Api<VolumeAttachment> = self.context.client.api(None);
        if let Some(attached) = plan.attached.filter(|_| node.is_some()) {
            // A list without merge key: the whole of it is replaced.
            let patch = json!({ "status": { "volumesAttached": attached } });
            let nodes: Api<Node> = self.context.client.api(None);
            let params = PatchParams::default();
            match nodes.patch_status(name, &params, &Patch::Merge(&patch)).await {
                Err(error) if error.is_not_found() => {}
                done => drop(done?),
            }
        }
        for attachment in &plan.create {
            match api.create(&PostParams::default(), attachment).await {
                Err(error) if error.is_already_exists() => {}
                done => drop(done?),
            }
        }
        for attachment in &plan.delete {
            match api.delete(attachment, &DeleteParams::default()).await {
                Err(error) if error.is_not_found() => {}
                done => drop(done?),
            }
        }
        Ok(recheck.map_or(Outcome::Done, Outcome::After))
    }

    fn observe<'a>(
        &self,
        name: &'a str,
        node: Option<&Node>,
        now: Timestamp,
    ) -> (Observed<'a>, Option<Duration>) {
        let mut wanted = BTreeSet::new();
        for one in self.pods.by_index(BY_NODE, name) {
            // Finished pods give back at once; those that go do so when they are gone.
            if !pod::is_finished(&one) {
                wanted.extend(self.wanted_by(&one));
            }
        }
        let of_attachment = |one: &Arc<VolumeAttachment>| {
            let volume = one.spec.source.persistent_volume_name.as_deref()?;
            let volume = Wanted::of(&*self.volumes.get("", volume)?)?;
            Some(Present {
                name: one.metadata.name.clone()?,
                volume,
                is_attached: one.status.as_ref().is_some_and(|status| status.attached),
                is_going: one.metadata.deletion_timestamp.is_some(),
            })
        };
        let all = self.attachments.by_index(BY_NODE, name);
        let status = node.and_then(|node| node.status.as_ref());
        let attached = status.and_then(|status| status.volumes_attached.clone());
        let in_use = status.and_then(|status| status.volumes_in_use.clone());
        let silence = node.and_then(|node| silence(node, now));
        let is_lost = node.is_none_or(is_out_of_service)
            || silence.is_some_and(|silence| silence >= LONGEST_WAIT);
        let observed = Observed {
            name,
            wanted,
            present: all.iter().filter_map(of_attachment).collect(),
            in_use: in_use.into_iter().flatten().collect(),
            attached: attached
                .into_iter()
                .flatten()
                .map(|one| (one.name, one.device_path))
                .collect(),
            is_lost,
        };
        let waits = silence.filter(|_| !is_lost && !observed.present.is_empty());
        (observed, waits.map(|silence| LONGEST_WAIT.saturating_sub(silence)))
    }

    fn wanted_by(&self, one: &Pod) -> Vec<Wanted> {
        let namespace = one.metadata.namespace.as_deref().unwrap_or_default();
        let volumes = claims_of(one).into_iter().filter_map(|name| {
            let claim = self.claims.get(namespace, &name)?;
            let volume = claim.spec.as_ref()?.volume_name.clone()?;
            let wanted = Wanted::of(&*self.volumes.get("", &volume)?)?;
            let driver = self.drivers.get("", &wanted.driver);
            let attaches = driver.is_none_or(|one| one.spec.attach_required != Some(false));
            attaches.then_some(wanted)
        });
        volumes.collect()
    }
}

/// How long a node has not been Ready; `None` if it is.
fn silence(node: &Node, now: Timestamp) -> Option<Duration> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions.iter().find(|one| one.type_ == "Ready")?;
    let since = ready.last_transition_time.as_ref().filter(|_| ready.status != "True")?;
    Some(Duration::try_from(now.duration_since(since.0)).unwrap_or_default())
}

fn is_out_of_service(node: &Node) -> bool {
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    taints.into_iter().any(|taint| taint.key == OUT_OF_SERVICE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(name: &str) -> Wanted {
        Wanted { driver: "d.example.com".into(), handle: format!("h-{name}"), volume: name.into() }
    }

    fn present(name: &str, is_attached: bool, is_going: bool) -> Present {
        Present { name: format!("va-{name}"), volume: volume(name), is_attached, is_going }
    }

    /// Created, deleted, and what the node's status is to say.
    fn check(
        wanted: &[&str],
        present: Vec<Present>,
        in_use: &[&str],
        is_lost: bool,
        expected: (&[&str], &[&str], Option<&[&str]>),
    ) {
        let unique = |name: &&str| volume(name).unique_name();
        let observed = Observed {
            name: "n",
            wanted: wanted.iter().map(|name| volume(name)).collect(),
            present,
            in_use: in_use.iter().map(unique).collect(),
            attached: BTreeMap::from([(unique(&"old"), String::new())]),
            is_lost,
        };
        let plan = plan(&observed);
        let source = |one: &VolumeAttachment| one.spec.source.persistent_volume_name.clone();
        let created: Vec<String> = plan.create.iter().filter_map(source).collect();
        assert_eq!(created, expected.0);
        assert_eq!(plan.delete, expected.1);
        let names = |all: Vec<AttachedVolume>| -> Vec<String> {
            all.into_iter().map(|one| one.name).collect()
        };
        let attached = plan.attached.map(names);
        let wanted: Option<Vec<String>> = expected.2.map(|all| all.iter().map(unique).collect());
        assert_eq!(attached, wanted);
    }

    #[test]
    fn volumes_follow_their_pods() {
        check(&["a"], vec![], &[], false, (&["a"], &[], Some(&[])));
        check(&["a"], vec![present("a", false, false)], &[], false, (&[], &[], Some(&[])));
        let both = || vec![present("a", true, false), present("old", true, false)];
        check(&["a", "old"], both(), &[], false, (&[], &[], Some(&["a", "old"])));
        // Given back when the node has it in use no more, or cannot say.
        check(&[], vec![present("old", true, false)], &["old"], false, (&[], &[], None));
        check(&[], vec![present("old", true, false)], &[], false, (&[], &["va-old"], Some(&[])));
        check(
            &[],
            vec![present("old", true, false)],
            &["old"],
            true,
            (&[], &["va-old"], Some(&[])),
        );
        check(&[], vec![present("old", true, true)], &[], false, (&[], &[], Some(&[])));
        check(&["a"], vec![], &[], true, (&[], &[], Some(&[])));
    }

    #[test]
    fn attachments_have_upstreams_names() {
        let name = volume("a").attachment_name("n");
        assert!(name.starts_with("csi-") && name.len() == 68, "{name}");
        assert_ne!(name, volume("a").attachment_name("m"));
        assert_eq!(volume("a").unique_name(), "kubernetes.io/csi/d.example.com^h-a");
    }
}
