//! Gives every node its share of the cluster's pod addresses.
//!
//! In: nodes, `--cluster-cidr`. Out: `spec.podCIDR` and `spec.podCIDRs`.
//! Upstream: `pkg/controller/nodeipam/ipam/range_allocator.go`.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};

use client::{
    Api, ErrorExt, EventType, Lister, Outcome, Patch, PatchParams, Result, WorkQueue, spawn_workers,
};
use k8s_openapi::api::core::v1::Node;
use machinery::selector::Selector;
use serde_json::json;

use crate::context::{Context, Descriptor};

pub const DESCRIPTOR: Descriptor = Descriptor {
    name: "node-ipam-controller",
    account: "node-controller",
    component: "node-controller",
    start,
};

struct Controller {
    context: Context,
    nodes: Lister<Node>,
    range: Range,
    /// Guards shares given out that the cache may not show yet, with their nodes.
    given: Mutex<BTreeSet<(String, String)>>,
}

fn start(context: Context) {
    let options = context.options.clone();
    let Some(cidr) = options.cluster_cidr.as_deref().filter(|_| options.allocate_node_cidrs) else {
        return;
    };
    let Some(range) = Range::parse(cidr, options.node_cidr_mask_size) else {
        tracing::error!(
            cidr,
            "the cluster CIDR cannot be split into node CIDRs: none are given out"
        );
        return;
    };
    let nodes = context.informers.of::<Node>();
    let queue: WorkQueue<Arc<str>> = WorkQueue::new("cidrallocator_node");
    let adds = queue.clone();
    nodes.subscribe_raw(move |event| adds.add(event.entry().header.key.name.clone()));
    let tasks = context.tasks.clone();
    let controller =
        Arc::new(Controller { nodes: nodes.lister(), range, given: Mutex::default(), context });
    tasks.clone().spawn("node-ipam", async move {
        nodes.synced().await;
        // One worker: shares are chosen one after the other.
        spawn_workers(&tasks, &queue, 1, move |name: Arc<str>| {
            let this = controller.clone();
            async move { this.reconcile(&name).await }
        });
    });
}

impl Controller {
    async fn reconcile(&self, name: &str) -> Result<Outcome> {
        let Some(node) = self.nodes.get("", name) else {
            self.given().retain(|(of, _)| of != name);
            return Ok(Outcome::Done);
        };
        if pod_cidr(&node).is_some() {
            return Ok(Outcome::Done);
        }
        let all = self.nodes.list(None, &Selector::everything());
        let mut taken: BTreeSet<_> = all.iter().filter_map(|node| pod_cidr(node)).collect();
        taken.extend(
            self.given().iter().filter(|(of, _)| of != name).map(|(_, share)| share.clone()),
        );
        let mine = self.given().iter().find(|(of, _)| of == name).map(|(_, share)| share.clone());
        let Some(share) = mine.or_else(|| self.range.first_free(&taken)) else {
            let message = format!("Node {name} status is now: CIDRNotAvailable");
            self.context.events.event(&*node, EventType::Normal, "CIDRNotAvailable", message);
            return Ok(Outcome::Backoff);
        };
        self.given().insert((name.to_owned(), share.clone()));
        let patch = json!({"spec": {"podCIDR": share, "podCIDRs": [share]}});
        let api: Api<Node> = self.context.client.api(None);
        match api.patch(name, &PatchParams::default(), &Patch::Strategic(&patch)).await {
            Err(error) if error.is_not_found() => Ok(Outcome::Done),
            done => done.map(|_| Outcome::Done),
        }
    }

    fn given(&self) -> std::sync::MutexGuard<'_, BTreeSet<(String, String)>> {
        self.given.lock().expect("no panic while held")
    }
}

fn pod_cidr(node: &Node) -> Option<String> {
    node.spec.as_ref()?.pod_cidr.clone().filter(|cidr| !cidr.is_empty())
}

/// An IPv4 range in equal shares.
#[derive(Debug)]
struct Range {
    first: u32,
    count: u32,
    mask: u8,
}

impl Range {
    /// The first CIDR of a list, split into networks of `mask` bits.
    fn parse(list: &str, mask: u8) -> Option<Self> {
        let mut cidrs = list.split(',').filter_map(|cidr| cidr.trim().split_once('/'));
        let (address, bits) = cidrs.find_map(|(address, bits)| {
            Some((
                address.parse::<Ipv4Addr>().ok()?,
                bits.parse::<u8>().ok().filter(|bits| *bits <= 32)?,
            ))
        })?;
        if bits > mask || mask > 32 || mask - bits > 16 {
            return None;
        }
        let network = if bits == 0 { 0 } else { u32::from(address) & (u32::MAX << (32 - bits)) };
        Some(Self { first: network, count: 1 << (mask - bits), mask })
    }

    fn first_free(&self, taken: &BTreeSet<String>) -> Option<String> {
        let size = 1u32.checked_shl(u32::from(32 - self.mask)).unwrap_or(0);
        let share = |at: u32| format!("{}/{}", Ipv4Addr::from(self.first + at * size), self.mask);
        (0..self.count).map(share).find(|share| !taken.contains(share))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_each_other() {
        let range = Range::parse("10.244.0.0/16", 24).expect("a range");
        let taken = BTreeSet::from(["10.244.0.0/24".to_owned()]);
        assert_eq!(range.first_free(&taken).as_deref(), Some("10.244.1.0/24"));
        let small = Range::parse("fd00::/48,10.1.2.0/24", 24).expect("a range");
        assert_eq!(small.first_free(&BTreeSet::new()).as_deref(), Some("10.1.2.0/24"));
        assert_eq!(small.first_free(&BTreeSet::from(["10.1.2.0/24".to_owned()])), None);
        assert!(Range::parse("10.0.0.0/28", 24).is_none());
    }
}
