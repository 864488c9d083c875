//! Gives every node its share of the cluster's pod addresses.
//!
//! In: nodes, `--cluster-cidr`. Out: `spec.podCIDR` and `spec.podCIDRs`.
//! Upstream: `pkg/controller/nodeipam/ipam/range_allocator.go`.
//!
//! Cost of a node: a look at the free list, whatever the number of nodes. Nodes that found the range
//! exhausted wait until a share is given back.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};

use client::{Api, Event, EventType, Lister, Outcome, Patch, PatchParams, Result, WorkQueue};
use k8s_openapi::api::core::v1::Node;
use serde_json::json;

use crate::context::Context;
use crate::descriptor::{Descriptor, Row, Setup, on, or_gone};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller, Arc<str>> {
    name: "node-ipam-controller",
    account: "node-controller",
    component: "node-controller",
    queue: "cidrallocator_node",
    // Shares are chosen one after the other.
    workers: 1,
    new: Controller::new,
    watches: &[&on(|this: &Controller, _, event| this.node_event(event))],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

struct Controller {
    context: Context,
    nodes: Lister<Node>,
    /// Guards who has which share; held for a few map operations.
    shares: Mutex<Shares>,
    queue: WorkQueue<Arc<str>>,
}

impl Controller {
    fn new(setup: &Setup<Arc<str>>) -> Option<Self> {
        let options = &setup.options;
        let cidr = options.cluster_cidr.as_deref().filter(|_| options.allocate_node_cidrs)?;
        let Some(range) = Range::parse(cidr, options.node_cidr_mask_size) else {
            tracing::error!(
                cidr,
                "the cluster CIDR cannot be split into node CIDRs: none are given out"
            );
            return None;
        };
        let mut shares = Shares::new(range);
        for cidr in options.service_cidr.iter().flat_map(|list| list.split(',')) {
            let cidr = cidr.trim();
            shares.note(format!("--service-cluster-ip-range={cidr}").into(), cidr.to_owned());
        }
        Some(Self {
            context: setup.context.clone(),
            nodes: setup.lister(),
            shares: Mutex::new(shares),
            queue: setup.queue.clone(),
        })
    }

    /// Nodes write their status all the time: only what comes, goes or has no share wakes the worker.
    fn node_event(&self, event: &Event<Node>) {
        let name = event.key().name;
        if event.is_deleted() {
            let waiting = self.shares().give_back(&name);
            waiting.into_iter().for_each(|one| self.queue.add(one));
            return;
        }
        match pod_cidr(event.object()) {
            Some(share) => self.shares().note(name, share),
            None => self.queue.add(name),
        }
    }

    async fn reconcile(&self, name: &Arc<str>) -> Result<Outcome> {
        let Some(node) = self.nodes.get("", name) else {
            let waiting = self.shares().give_back(name);
            waiting.into_iter().for_each(|one| self.queue.add(one));
            return Ok(Outcome::Done);
        };
        if pod_cidr(&node).is_some() {
            return Ok(Outcome::Done);
        }
        let share = self.shares().take(name);
        let Some(share) = share else {
            let message = format!("Node {name} status is now: CIDRNotAvailable");
            self.context.events.event(&*node, EventType::Normal, "CIDRNotAvailable", message);
            return Ok(Outcome::Done);
        };
        let patch = json!({"spec": {"podCIDR": share, "podCIDRs": [share]}});
        let api: Api<Node> = self.context.client.api(None);
        or_gone(api.patch(name, &PatchParams::default(), &Patch::Strategic(&patch)).await)
    }

    fn shares(&self) -> std::sync::MutexGuard<'_, Shares> {
        self.shares.lock().expect("no panic while held")
    }
}

/// The nodes' CIDRs of one cluster CIDR.
///
/// Invariant: an index is in `free`, above `untouched`, or in use. A node keeps its CIDR
/// until it is gone, though its patch may have failed.
struct Shares {
    range: Range,
    by_node: HashMap<Arc<str>, String>,
    /// The number of nodes with this CIDR: two only if another client wrote it.
    taken: BTreeMap<u32, usize>,
    /// Shares below `untouched` that were given back.
    free: BTreeSet<u32>,
    untouched: u32,
    /// Nodes that found nothing.
    waiting: BTreeSet<Arc<str>>,
}

impl Shares {
    fn new(range: Range) -> Self {
        Self {
            range,
            by_node: HashMap::new(),
            taken: BTreeMap::new(),
            free: BTreeSet::new(),
            untouched: 0,
            waiting: BTreeSet::new(),
        }
    }

    /// The node's share, or the lowest free one; `None` if all are taken.
    fn take(&mut self, node: &Arc<str>) -> Option<String> {
        if let Some(share) = self.by_node.get(node) {
            return Some(share.clone());
        }
        let Some(index) = self.first_free() else {
            self.waiting.insert(node.clone());
            return None;
        };
        let share = self.range.share(index);
        self.note(node.clone(), share.clone());
        Some(share)
    }

    fn first_free(&mut self) -> Option<u32> {
        if let Some(index) = self.free.pop_first() {
            return Some(index);
        }
        while self.untouched < self.range.count {
            let index = self.untouched;
            self.untouched += 1;
            if !self.taken.contains_key(&index) {
                return Some(index);
            }
        }
        None
    }

    /// The node has this share.
    fn note(&mut self, node: Arc<str>, share: String) {
        if self.by_node.get(&node) == Some(&share) {
            return;
        }
        self.release(&node);
        self.waiting.remove(&node);
        for index in self.range.indexes(&share) {
            self.free.remove(&index);
            *self.taken.entry(index).or_default() += 1;
        }
        self.by_node.insert(node, share);
    }

    /// The node is gone. Nodes that wait for a share and may have one now.
    fn give_back(&mut self, node: &Arc<str>) -> Vec<Arc<str>> {
        self.waiting.remove(node);
        let freed = self.release(node);
        (0..freed).map_while(|_| self.waiting.pop_first()).collect()
    }

    /// How many shares became free.
    fn release(&mut self, node: &Arc<str>) -> usize {
        let Some(share) = self.by_node.remove(node) else { return 0 };
        let mut freed = 0;
        for index in self.range.indexes(&share) {
            let Some(count) = self.taken.get_mut(&index) else { continue };
            *count -= 1;
            if *count == 0 {
                self.taken.remove(&index);
                freed += 1;
                if index < self.untouched {
                    self.free.insert(index);
                }
            }
        }
        freed
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

    fn share(&self, index: u32) -> String {
        format!("{}/{}", Ipv4Addr::from(self.first + index * self.size()), self.mask)
    }

    /// Addresses of a share; a share of all addresses is the only one.
    fn size(&self) -> u32 {
        1u32.checked_shl(u32::from(32 - self.mask)).unwrap_or(0)
    }

    /// The indexes that a network covers: one, unless another client wrote a network of another size.
    fn indexes(&self, network: &str) -> std::ops::Range<u32> {
        let parsed = network.split_once('/').and_then(|(address, bits)| {
            let bits = bits.parse::<u32>().ok().filter(|bits| *bits <= 32)?;
            Some((u64::from(u32::from(address.parse::<Ipv4Addr>().ok()?)), bits))
        });
        let Some((address, bits)) = parsed else { return 0..0 };
        let size = 1u64 << (32 - u32::from(self.mask));
        let first = u64::from(self.first);
        let whole = first..first + size * u64::from(self.count);
        let start = address.clamp(whole.start, whole.end);
        let end = (address + (1u64 << (32 - bits))).clamp(whole.start, whole.end);
        let index = |at: u64| u32::try_from((at - first).div_ceil(size)).unwrap_or(self.count);
        let begin = u32::try_from((start - first) / size).unwrap_or(self.count);
        if start >= end { 0..0 } else { begin..index(end) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_each_other() {
        let range = Range::parse("10.244.0.0/16", 24).expect("a range");
        let mut shares = Shares::new(range);
        let [a, b, c] = ["a", "b", "c"].map(Arc::<str>::from);
        shares.note(a.clone(), "10.244.0.0/24".into());
        assert_eq!(shares.take(&b).as_deref(), Some("10.244.1.0/24"));
        assert_eq!(shares.take(&b).as_deref(), Some("10.244.1.0/24"), "a node keeps its share");
        assert_eq!(shares.take(&c).as_deref(), Some("10.244.2.0/24"));
        assert!(shares.give_back(&b).is_empty());
        assert_eq!(shares.take(&"d".into()).as_deref(), Some("10.244.1.0/24"), "the lowest first");
        assert!(Range::parse("10.0.0.0/28", 24).is_none());
    }

    #[test]
    fn nodes_wait_for_a_share_of_an_exhausted_range() {
        let mut shares = Shares::new(Range::parse("fd00::/48,10.1.2.0/23", 24).expect("a range"));
        let [a, b, c, d] = ["a", "b", "c", "d"].map(Arc::<str>::from);
        assert_eq!(shares.take(&a).as_deref(), Some("10.1.2.0/24"));
        assert_eq!(shares.take(&b).as_deref(), Some("10.1.3.0/24"));
        assert_eq!(shares.take(&c), None);
        assert_eq!(shares.take(&d), None);
        assert_eq!(*shares.give_back(&a), *std::slice::from_ref(&c), "one share for one node");
        assert_eq!(shares.take(&c).as_deref(), Some("10.1.2.0/24"));
        assert!(shares.give_back(&a).is_empty());
        assert_eq!(shares.give_back(&b), [d]);
    }

    #[test]
    fn what_others_wrote_is_not_given_out() {
        let mut shares = Shares::new(Range::parse("10.0.0.0/22", 24).expect("a range"));
        let node = |name: &str| Arc::<str>::from(name);
        shares.note(node("large"), "10.0.0.0/23".into());
        shares.note(node("elsewhere"), "192.168.0.0/24".into());
        shares.note(node("nonsense"), "10.0.2.0".into());
        shares.note(node("twin"), "10.0.1.0/24".into());
        assert_eq!(shares.take(&node("a")).as_deref(), Some("10.0.2.0/24"));
        shares.give_back(&node("large"));
        assert_eq!(
            shares.take(&node("b")).as_deref(),
            Some("10.0.0.0/24"),
            "the twin has 10.0.1.0/24"
        );
        assert_eq!(shares.take(&node("c")).as_deref(), Some("10.0.3.0/24"));
        assert_eq!(shares.take(&node("d")), None);
    }
}
