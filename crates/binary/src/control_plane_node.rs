//! The server's own Node as a node of the control plane, as `kubeadm init` marks it.
//!
//! In: the Node of this process' kubelet. Out: the label `node-role.kubernetes.io/control-plane` and, with
//! `--taint-control-plane`, the taint of that name. The kubelet may not set the label itself: NodeRestriction.
//!
//! Invariant: a Node is marked once, when it has no such label. Who removes the taint later keeps it removed.
//! Cost: one watch of one Node.
//! Upstream: `cmd/kubeadm/app/phases/markcontrolplane`.

use std::sync::Arc;
use std::time::Duration;

use base::backoff::Backoff;
use base::task::Tasks;
use client::{Api, Client, Informers, Patch, PatchParams};
use k8s_openapi::api::core::v1::{Node, Taint};
use serde_json::{Value, json};
use tokio::sync::Notify;

const ROLE: &str = "node-role.kubernetes.io/control-plane";

/// Marks the Node, as a task of `tasks`. `client` may write labels and taints of any Node.
pub fn start(client: Client, node: &str, is_tainted: bool, tasks: &Tasks) {
    let (name, group) = (node.to_owned(), tasks.clone());
    tasks.spawn("control plane node", async move {
        let informers = Informers::new(client.clone(), group);
        let own = informers.scoped::<Node>(None, &format!("metadata.name={name}"), "");
        let changed = Arc::new(Notify::new());
        let tell = changed.clone();
        own.subscribe_raw(move |_| tell.notify_one());
        let mut backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30));
        loop {
            changed.notified().await;
            let Some(patch) = own.lister().get("", &name).and_then(|node| marks(&node, is_tainted))
            else {
                continue;
            };
            let api: Api<Node> = client.api(None);
            match api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await {
                Ok(_) => backoff.reset(),
                Err(error) => {
                    tracing::warn!(node = name, %error, "failed to mark the Node as control plane");
                    tokio::time::sleep(backoff.step()).await;
                    changed.notify_one();
                }
            }
        }
    });
}

/// The patch; `None` for a Node that is marked.
fn marks(node: &Node, is_tainted: bool) -> Option<Value> {
    let labels = node.metadata.labels.as_ref();
    if labels.is_some_and(|labels| labels.contains_key(ROLE)) {
        return None;
    }
    let mut patch = json!({"metadata": {
        "labels": {ROLE: ""},
        "resourceVersion": node.metadata.resource_version,
    }});
    let old = node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default();
    if is_tainted && old.iter().all(|taint| taint.key != ROLE) {
        let new = Taint { key: ROLE.into(), effect: "NoSchedule".into(), ..Taint::default() };
        let taints: Vec<Taint> = old.into_iter().chain([new]).collect();
        patch["spec"] = json!({ "taints": taints });
    }
    Some(patch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_marked_once() {
        let node = |labels: Value, taints: Value| -> Node {
            let value = json!({
                "metadata": {"name": "n", "labels": labels, "resourceVersion": "7"},
                "spec": {"taints": taints},
            });
            serde_json::from_value(value).expect("a node")
        };
        let other = json!({"key": "own", "effect": "NoExecute"});
        let patch = marks(&node(json!({}), json!([other])), true).expect("it is new");
        assert_eq!(patch["metadata"]["labels"][ROLE], "");
        assert_eq!(patch["metadata"]["resourceVersion"], "7");
        assert_eq!(patch["spec"]["taints"][0]["key"], "own");
        assert_eq!(patch["spec"]["taints"][1], json!({"key": ROLE, "effect": "NoSchedule"}));
        let patch = marks(&node(json!({}), json!([])), false).expect("it is new");
        assert!(patch.get("spec").is_none());
        assert!(marks(&node(json!({ROLE: ""}), json!([])), true).is_none(), "taint was removed");
    }
}
