//! Tells kubelets how long they may trust cached Secrets: longer in larger clusters.
//!
//! In: nodes. Out: annotation `node.alpha.kubernetes.io/ttl`. Upstream: `pkg/controller/ttl`.

use std::sync::Arc;

use client::{Api, Client, Lister, Outcome, Patch, PatchParams, Result};
use k8s_openapi::api::core::v1::Node;
use serde_json::json;

use crate::descriptor::{Descriptor, Row, or_gone, own};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller, Arc<str>> {
    name: "ttl-controller",
    account: "ttl-controller",
    component: "ttl-controller",
    queue: "ttlcontroller",
    workers: 1,
    new: |setup| Some(Controller { client: setup.client.clone(), nodes: setup.lister() }),
    watches: &[&own::<Node>()],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

struct Controller {
    client: Client,
    nodes: Lister<Node>,
}

impl Controller {
    async fn reconcile(&self, name: &str) -> Result<Outcome> {
        let wanted = seconds(self.nodes.len()).to_string();
        let Some(node) = self.nodes.get("", name) else { return Ok(Outcome::Done) };
        let annotations = node.metadata.annotations.as_ref();
        if annotations.and_then(|all| all.get(TTL)) == Some(&wanted) {
            return Ok(Outcome::Done);
        }
        let patch = json!({"metadata": {"annotations": {TTL: wanted}}});
        let api: Api<Node> = self.client.api(None);
        or_gone(api.patch(name, &PatchParams::default(), &Patch::Strategic(&patch)).await)
    }
}

const TTL: &str = "node.alpha.kubernetes.io/ttl";
/// Seconds, from as many nodes on.
const STEPS: [(usize, u32); 5] = [(0, 0), (101, 15), (501, 30), (1001, 60), (2001, 300)];

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
