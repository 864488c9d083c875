//! Removes pods that nobody else will.
//!
//! In: pods, nodes. Out: deletions without grace.
//! Upstream: `pkg/controller/podgc`: pods of nodes that are gone (after 40 s), pods deleted before
//! they got a node, and finished pods beyond a threshold, oldest first.

use std::sync::Arc;
use std::time::Duration;

use client::{
    Api, Client, DeleteParams, ErrorExt, Lister, ObjectKey, Outcome, Patch, PatchParams,
    Preconditions, Result, WorkQueue, spawn_workers,
};
use k8s_openapi::api::core::v1::{Node, Pod};
use machinery::Time;
use machinery::selector::Selector;
use serde_json::json;

use crate::context::{Context, Descriptor};
use crate::pod;

pub const DESCRIPTOR: Descriptor = Descriptor {
    name: "pod-garbage-collector-controller",
    account: "pod-garbage-collector",
    component: "pod-garbage-collector",
    start,
};

const WORKERS: usize = 4;
/// A node that is missing may be registering.
const QUARANTINE: Duration = Duration::from_secs(40);

struct Controller {
    client: Client,
    nodes: Lister<Node>,
    pods: Lister<Pod>,
    threshold: usize,
    queue: WorkQueue<ObjectKey>,
}

fn start(context: Context) {
    let (nodes, pods) = (context.informers.of::<Node>(), context.informers.of::<Pod>());
    pods.index("node", |pod| vec![pod::node_name(pod).to_owned()]);
    let controller = Arc::new(Controller {
        client: context.client,
        nodes: nodes.lister(),
        pods: pods.lister(),
        threshold: context.options.terminated_pod_gc_threshold,
        queue: WorkQueue::new("orphaned_pods_nodes"),
    });
    let this = controller.clone();
    nodes.subscribe_raw(move |event| {
        if matches!(event, client::RawEvent::Deleted(_)) {
            let pods = this.pods.by_index("node", &event.entry().header.key.name);
            pods.iter()
                .for_each(|pod| this.queue.add_after(ObjectKey::of(&pod.metadata), QUARANTINE));
        }
    });
    let this = controller.clone();
    pods.subscribe(move |event| {
        let pod = event.object();
        let unplaced = pod::node_name(pod).is_empty();
        if event.is_deleted() {
            return;
        }
        if unplaced && pod::is_deleting(pod) {
            this.queue.add(event.key());
        } else if !unplaced && this.nodes.get("", pod::node_name(pod)).is_none() {
            this.queue.add_after(event.key(), QUARANTINE);
        }
        if pod::is_finished(pod) && this.threshold > 0 && this.pods.len() > this.threshold {
            this.trim();
        }
    });
    let tasks = context.tasks;
    tasks.clone().spawn("pod-gc", async move {
        nodes.synced().await;
        pods.synced().await;
        let queue = controller.queue.clone();
        spawn_workers(&tasks, &queue, WORKERS, move |key: ObjectKey| {
            let this = controller.clone();
            async move { this.reconcile(&key).await }
        });
    });
}

impl Controller {
    /// Finished pods beyond the threshold, oldest first.
    fn trim(&self) {
        for key in surplus(&self.pods.list(None, &Selector::everything()), self.threshold) {
            self.queue.add(key);
        }
    }

    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(pod) = self.pods.get_key(key) else {
            return Ok(Outcome::Done);
        };
        let node = pod::node_name(&pod);
        let orphaned = !node.is_empty() && self.nodes.get("", node).is_none() && {
            let api: Api<Node> = self.client.api(None);
            api.get_opt(node).await?.is_none()
        };
        let unplaced = node.is_empty() && pod::is_deleting(&pod);
        let trimmed = pod::is_finished(&pod)
            && self.threshold > 0
            && self.pods.len() > self.threshold
            && surplus(&self.pods.list(None, &Selector::everything()), self.threshold)
                .contains(key);
        if !(orphaned || unplaced || trimmed) {
            return Ok(Outcome::Done);
        }
        let api: Api<Pod> = self.client.api(Some(&key.namespace));
        if orphaned && !pod::is_finished(&pod) {
            let patch = json!({"metadata": {"uid": pod.metadata.uid}, "status": {"phase": "Failed", "conditions": [{
                "type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC",
                "message": "PodGC: node no longer exists", "lastTransitionTime": Time(base::clock::now_seconds()),
            }]}});
            match api
                .patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(&patch))
                .await
            {
                Err(error) if error.is_not_found() => return Ok(Outcome::Done),
                done => drop(done?),
            }
        }
        let preconditions = Preconditions { uid: pod.metadata.uid.clone(), resource_version: None };
        let options = DeleteParams::default().grace_period(0).preconditions(preconditions);
        match api.delete(&key.name, &options).await {
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(Outcome::Done),
            done => done.map(|_| Outcome::Done),
        }
    }
}

/// Pure.
fn surplus(pods: &[Arc<Pod>], threshold: usize) -> Vec<ObjectKey> {
    let mut finished: Vec<_> = pods.iter().filter(|pod| pod::is_finished(pod)).collect();
    let count = finished.len().saturating_sub(threshold);
    finished.sort_by_key(|pod| pod.metadata.creation_timestamp.as_ref().map(|time| time.0));
    finished.into_iter().take(count).map(|pod| ObjectKey::of(&pod.metadata)).collect()
}
