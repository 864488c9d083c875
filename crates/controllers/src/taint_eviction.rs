//! Removes pods from nodes whose NoExecute taints they do not tolerate (any longer).
//!
//! In: nodes, pods. Out: deletions, after `tolerationSeconds`.
//! Upstream: `pkg/controller/tainteviction`. The time runs from when the taint was added, so that a
//! restart does not start it again.

use std::time::Duration;

use api::taints::tolerates;
use client::{
    Api, Client, DeleteParams, ErrorExt, Event, EventRecorder, EventType, Lister, ObjectKey,
    Outcome, Patch, PatchParams, Result, WorkQueue,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod, Taint, Toleration};
use machinery::Time;
use serde_json::json;

use crate::descriptor::{Descriptor, Row, on, or_gone};
use crate::pod;

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "taint-eviction-controller",
    account: "node-controller",
    component: "taint-eviction-controller",
    queue: "noexec_taint_pod",
    workers: 8,
    new: |setup| {
        let pods = setup.informer::<Pod>();
        pods.index("node", |pod| vec![pod::node_name(pod).to_owned()]);
        Some(Controller {
            client: setup.client.clone(),
            events: setup.events.clone(),
            nodes: setup.lister(),
            pods: pods.lister(),
        })
    },
    watches: &[&on(Controller::node_event), &on(Controller::pod_event)],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

struct Controller {
    client: Client,
    events: EventRecorder,
    nodes: Lister<Node>,
    pods: Lister<Pod>,
}

fn evicting(node: &Node) -> Vec<Taint> {
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    taints.filter(|taint| taint.effect == "NoExecute").cloned().collect()
}

/// When the pod has to go, if ever. Pure.
fn deadline(tolerations: &[Toleration], taints: &[Taint], now: Timestamp) -> Option<Timestamp> {
    let mut earliest: Option<Timestamp> = None;
    for taint in taints {
        let since = taint.time_added.as_ref().map_or(now, |time| time.0);
        let tolerating: Vec<_> = tolerations.iter().filter(|one| tolerates(one, taint)).collect();
        let seconds = tolerating.iter().filter_map(|one| one.toleration_seconds).min();
        let until = match (tolerating.is_empty(), seconds) {
            (true, _) => now,
            (false, None) => continue,
            (false, Some(seconds)) => since + Duration::from_secs(seconds.max(0) as u64),
        };
        earliest = Some(earliest.map_or(until, |known| known.min(until)));
    }
    earliest
}

impl Controller {
    fn node_event(&self, queue: &WorkQueue<ObjectKey>, event: &Event<Node>) {
        let old = event.old().map(|old| evicting(&old)).unwrap_or_default();
        if evicting(event.object()) != old && !event.is_deleted() {
            for pod in self.pods.entries_by_index("node", &event.key().name) {
                queue.add(pod.header.key.clone());
            }
        }
    }

    fn pod_event(&self, queue: &WorkQueue<ObjectKey>, event: &Event<Pod>) {
        let pod = event.object();
        let node = pod::node_name(pod);
        let tainted = !node.is_empty()
            && self.nodes.get("", node).is_some_and(|node| !evicting(&node).is_empty());
        if tainted && !event.is_deleted() && !pod::is_deleting(pod) {
            queue.add(event.key());
        }
    }

    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(pod) = self.pods.get_key(key).filter(|pod| !pod::is_deleting(pod)) else {
            return Ok(Outcome::Done);
        };
        let taints = self
            .nodes
            .get("", pod::node_name(&pod))
            .map(|node| evicting(&node))
            .unwrap_or_default();
        let tolerations =
            pod.spec.as_ref().and_then(|spec| spec.tolerations.clone()).unwrap_or_default();
        let now = base::clock::now();
        let Some(deadline) = deadline(&tolerations, &taints, now) else {
            return Ok(Outcome::Done);
        };
        if let Ok(wait) = Duration::try_from(deadline.duration_since(now))
            && !wait.is_zero()
        {
            return Ok(Outcome::After(wait));
        }
        self.events.event(
            &*pod,
            EventType::Normal,
            "TaintManagerEviction",
            format!("Marking for deletion Pod {key}"),
        );
        let condition = json!({"metadata": {"uid": pod.metadata.uid}, "status": {"conditions": [{
            "type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager",
            "message": "Taint manager: deleting due to NoExecute taint",
            "lastTransitionTime": Time(base::clock::now_seconds()),
        }]}});
        let api: Api<Pod> = self.client.api(Some(&key.namespace));
        match api
            .patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(&condition))
            .await
        {
            Err(error) if error.is_not_found() => return Ok(Outcome::Done),
            done => drop(done?),
        }
        or_gone(api.delete(&key.name, &DeleteParams::default()).await)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::from_value;

    use super::*;

    #[test]
    fn the_shortest_toleration_decides() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let taint = |key: &str| Taint {
            key: key.into(),
            effect: "NoExecute".into(),
            time_added: Some(Time(at(100))),
            value: None,
        };
        let check = |tolerations: serde_json::Value, taints: &[Taint], expected: Option<i64>| {
            let tolerations: Vec<Toleration> = from_value(tolerations).unwrap();
            assert_eq!(
                deadline(&tolerations, taints, at(150)),
                expected.map(at),
                "{tolerations:?}"
            );
        };
        let both = [taint("a"), taint("b")];
        check(json!([]), &both, Some(150));
        check(json!([]), &[], None);
        check(json!([{"operator": "Exists"}]), &both, None);
        check(
            json!([{"key": "a", "operator": "Exists", "tolerationSeconds": 300}]),
            &both[..1],
            Some(400),
        );
        check(
            json!([{"operator": "Exists"}, {"key": "b", "operator": "Exists", "tolerationSeconds": 60}]),
            &both,
            Some(160),
        );
    }
}
