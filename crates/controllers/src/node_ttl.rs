//! Tells kubelets how long they may trust cached Secrets: longer in larger clusters.
//!
//! In: nodes. Out: annotation `node.alpha.kubernetes.io/ttl`. Upstream: `pkg/controller/ttl`.

use std::sync::Arc;

use client::{Api, ErrorExt, Outcome, Patch, PatchParams, WorkQueue, spawn_workers};
use k8s_openapi::api::core::v1::Node;
use serde_json::json;

use crate::context::{Context, Descriptor};

pub const DESCRIPTOR: Descriptor = Descriptor {
    name: "ttl-controller",
    account: "ttl-controller",
    component: "ttl-controller",
    start,
};

const TTL: &str = "node.alpha.kubernetes.io/ttl";
/// Seconds, from as many nodes on.
const STEPS: [(usize, u32); 5] = [(0, 0), (101, 15), (501, 30), (1001, 60), (2001, 300)];

fn start(context: Context) {
    let nodes = context.informers.of::<Node>();
    let queue: WorkQueue<Arc<str>> = WorkQueue::new("ttlcontroller");
    let adds = queue.clone();
    nodes.subscribe_raw(move |event| adds.add(event.entry().header.key.name.clone()));
    let (tasks, lister) = (context.tasks.clone(), nodes.lister());
    tasks.clone().spawn("ttl", async move {
        nodes.synced().await;
        spawn_workers(&tasks, &queue, 1, move |name: Arc<str>| {
            let wanted = seconds(lister.len()).to_string();
            let has = lister.get("", &name).map(|node| {
                node.metadata.annotations.as_ref().and_then(|all| all.get(TTL).cloned())
            });
            let api: Api<Node> = context.client.api(None);
            async move {
                if has.is_none_or(|has| has.as_ref() == Some(&wanted)) {
                    return Ok(Outcome::Done);
                }
                let patch = json!({"metadata": {"annotations": {TTL: wanted}}});
                let params = PatchParams::default();
                match api.patch(&name, &params, &Patch::Strategic(&patch)).await {
                    Err(error) if error.is_not_found() => Ok(Outcome::Done),
                    done => done.map(|_| Outcome::Done),
                }
            }
        });
    });
}

/// Pure.
fn seconds(nodes: usize) -> u32 {
    STEPS.iter().rev().find(|(from, _)| nodes >= *from).map_or(0, |(_, seconds)| *seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_clusters_cache_longer() {
        let check = |nodes: usize, expected: u32| assert_eq!(seconds(nodes), expected, "{nodes}");
        check(0, 0);
        check(100, 0);
        check(101, 15);
        check(1000, 30);
        check(5000, 300);
    }
}
