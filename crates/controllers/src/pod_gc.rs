//! Removes pods that no other component removes.
//!
//! In: pods, nodes. Out: deletions without grace.
//! Upstream: `pkg/controller/podgc`: pods of nodes that are gone (after 40 s), pods deleted before
//! they got a node, and finished pods beyond a threshold: evicted ones first, then the oldest.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use client::{
    Api, Client, DeleteParams, ErrorExt, Event, Lister, ObjectKey, Outcome, Patch, PatchParams,
    Preconditions, RawEvent, Result, WorkQueue,
};
use k8s_openapi::api::core::v1::{Node, Pod};
use machinery::Time;
use serde_json::json;
use tokio::sync::Notify;

use crate::descriptor::{Descriptor, Row, Setup, on, on_metadata, task};
use crate::pod;

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "pod-garbage-collector-controller",
    account: "pod-garbage-collector",
    component: "pod-garbage-collector",
    queue: "orphaned_pods_nodes",
    workers: 4,
    new: Controller::new,
    watches: &[
        &on_metadata::<Node, _, _>(|this: &Controller, _, event| this.node_event(event)),
        &on(|this: &Controller, _, event| this.pod_event(event)),
        &task(|this: Arc<Controller>| Box::pin(this.trim_when_finished())),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

/// A node that is missing may be registering.
const QUARANTINE: Duration = Duration::from_secs(40);
/// Finished pods are counted no more often. Upstream: gcCheckPeriod.
const TRIM: Duration = Duration::from_secs(20);
/// The index of finished pods, and its one value.
const FINISHED: (&str, &str) = ("finished", "true");

struct Controller {
    client: Client,
    nodes: Lister<Node>,
    pods: Lister<Pod>,
    threshold: usize,
    queue: WorkQueue<ObjectKey>,
    /// A pod has finished since they were counted.
    finished: Notify,
    /// Guards the uids of the finished pods that are too many, as the last count found them.
    surplus: Mutex<HashSet<String>>,
}

impl Controller {
    fn new(setup: &Setup<ObjectKey>) -> Option<Self> {
        let pods = setup.informer::<Pod>();
        pods.index("node", |pod| vec![pod::node_name(pod).to_owned()]);
        pods.index(FINISHED.0, |pod| match pod::is_finished(pod) {
            true => vec![FINISHED.1.to_owned()],
            false => vec![],
        });
        Some(Self {
            client: setup.client.clone(),
            nodes: setup.lister(),
            pods: pods.lister(),
            threshold: setup.options.terminated_pod_gc_threshold,
            queue: setup.queue.clone(),
            finished: Notify::new(),
            surplus: Mutex::default(),
        })
    }

    fn node_event(&self, event: &RawEvent) {
        if let RawEvent::Deleted(node) = event {
            for pod in self.pods.entries_by_index("node", &node.header.key.name) {
                self.queue.add_after(pod.header.key.clone(), QUARANTINE);
            }
        }
    }

    fn pod_event(&self, event: &Event<Pod>) {
        let pod = event.object();
        let unplaced = pod::node_name(pod).is_empty();
        if event.is_deleted() {
            return;
        }
        if unplaced && pod::is_deleting(pod) {
            self.queue.add(event.key());
        } else if !unplaced && self.nodes.get("", pod::node_name(pod)).is_none() {
            self.queue.add_after(event.key(), QUARANTINE);
        }
        if pod::is_finished(pod) && self.threshold > 0 {
            self.finished.notify_one();
        }
    }

    async fn trim_when_finished(self: Arc<Self>) {
        loop {
            self.finished.notified().await;
            tokio::time::sleep(TRIM).await;
            self.trim();
        }
    }

    /// Finished pods beyond the threshold. All of them are looked at only when there are so many.
    fn trim(&self) {
        let (index, value) = FINISHED;
        let found = match self.pods.count_by_index(index, value) > self.threshold {
            true => surplus(self.pods.by_index(index, value), self.threshold),
            false => vec![],
        };
        let uids = found.iter().filter_map(|pod| pod.metadata.uid.clone()).collect();
        *self.surplus.lock().expect("no panic while held") = uids;
        found.iter().for_each(|pod| self.queue.add(ObjectKey::of(&pod.metadata)));
    }

    fn is_surplus(&self, pod: &Pod) -> bool {
        let surplus = self.surplus.lock().expect("no panic while held");
        pod::is_finished(pod) && pod.metadata.uid.as_ref().is_some_and(|uid| surplus.contains(uid))
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
        if !(orphaned || unplaced || self.is_surplus(&pod)) {
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

/// Upstream: eviction.PodIsEvicted.
fn was_evicted(pod: &Pod) -> bool {
    let reason = pod.status.as_ref().and_then(|status| status.reason.as_deref());
    pod::phase(pod) == "Failed" && reason == Some("Evicted")
}

/// The pods beyond the threshold: evicted pods first, then the oldest. Pure.
fn surplus(mut finished: Vec<Arc<Pod>>, threshold: usize) -> Vec<Arc<Pod>> {
    finished.sort_by_cached_key(|pod| {
        let meta = &pod.metadata;
        let created = meta.creation_timestamp.as_ref().map(|time| time.0);
        (!was_evicted(pod), created, meta.name.clone())
    });
    finished.truncate(finished.len().saturating_sub(threshold));
    finished
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use base::task::Tasks;
    use client::{EventRecorder, Informers};
    use serde_json::Value;

    use super::*;
    use crate::context::Options;
    use crate::testing;

    fn pod(name: &str, phase: &str, reason: &str, minute: u32) -> Value {
        json!({"metadata": {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "1",
                "creationTimestamp": format!("2026-01-01T00:{minute:02}:00Z")},
            "spec": {"nodeName": "n", "containers": []},
            "status": {"phase": phase, "reason": reason}})
    }

    /// Each pod that finished had all pods of the cluster looked at.
    #[tokio::test(start_paused = true)]
    async fn finished_pods_are_counted_now_and_then() {
        let lists = BTreeMap::from([
            (
                "/api/v1/nodes",
                vec![json!({"metadata": {"name": "n", "uid": "n", "resourceVersion": "1"}})],
            ),
            (
                "/api/v1/pods",
                vec![
                    pod("running", "Running", "", 0),
                    pod("second", "Succeeded", "", 2),
                    pod("first", "Failed", "Error", 1),
                    pod("third", "Succeeded", "", 3),
                    pod("evicted", "Failed", "Evicted", 9),
                ],
            ),
        ]);
        let deleted: Arc<Mutex<Vec<String>>> = Arc::default();
        let log = deleted.clone();
        let client = testing::client(move |request| {
            if request.method == http::Method::DELETE {
                log.lock().expect("no panic").push(request.path().to_owned());
                return Some(json!({"kind": "Status", "status": "Success"}));
            }
            let items = lists.get(request.path())?;
            Some(json!({"metadata": {"resourceVersion": "1"}, "items": items}))
        });
        let tasks = Tasks::new("test");
        let options = Options { terminated_pod_gc_threshold: 2, ..Options::default() };
        DESCRIPTOR.start(crate::context::Context {
            informers: Informers::new(client.clone(), tasks.clone()),
            events: EventRecorder::new(client.clone(), &tasks, "test", None),
            client,
            tasks: tasks.clone(),
            options: Arc::new(options),
        });
        tokio::time::sleep(TRIM - Duration::from_secs(1)).await;
        assert!(deleted.lock().expect("no panic").is_empty(), "not at each event");
        tokio::time::sleep(TRIM).await;
        let mut found = deleted.lock().expect("no panic").clone();
        found.sort();
        let path = |name: &str| format!("/api/v1/namespaces/ns/pods/{name}");
        assert_eq!(found, [path("evicted"), path("first")]);
        tasks.shutdown(Duration::from_secs(5)).await;
    }
}
