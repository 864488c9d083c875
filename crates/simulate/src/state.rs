//! The state of a process about its nodes and their pods, beside the informers' caches.
//!
//! In: pods and nodes as they are seen. Out: who is where, addresses, since when a pod is in its stage.
//! Invariants: a pod's address is its own until it has ended or is gone; every operation looks at one node or
//! one pod, and at the pods of one node when that node appears or changes its mode.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use client::{Entry, ObjectKey};
use ipnet::IpNet;
use jiff::Timestamp;
use tokio::time::Instant;

use crate::addresses::Pool;
use crate::lifecycle::Stage;
use crate::pod::Pod;
use crate::settings::Mode;

/// A Node that exists and is of the fleet.
#[derive(Debug)]
pub struct Known {
    pub uid: Arc<str>,
    pub mode: Mode,
    pub ip: String,
    /// The addresses of its pods, if it has a pod CIDR.
    pool: Option<Pool>,
    /// The resource version of its Lease, when this process wrote it last.
    pub lease: Option<Box<str>>,
    /// When its status was reported last.
    pub reported: Instant,
    /// Older events are ignored: this process has written since.
    pub floor: u64,
}

/// Which pool an address is of.
#[derive(Clone, Copy, Debug)]
enum Slot {
    OfNode(u128),
    OfAll(u128),
}

#[derive(Debug)]
pub struct PodState {
    pub entry: Arc<Entry>,
    pub node: Arc<str>,
    slot: Option<Slot>,
    stage: Option<(Stage, Timestamp)>,
    pub floor: u64,
}

pub struct State {
    /// Nodes that this process has yet to register: their group and number.
    pub wanted: HashMap<Arc<str>, (usize, usize)>,
    nodes: HashMap<Arc<str>, Known>,
    pods: HashMap<ObjectKey, PodState>,
    on_node: HashMap<Arc<str>, HashSet<ObjectKey>>,
    /// The addresses of nodes.
    addresses: Pool,
    /// The addresses of pods on nodes without a pod CIDR.
    pod_addresses: Pool,
}

impl State {
    /// `None` without ranges.
    pub fn new(addresses: IpNet, pod_addresses: IpNet) -> Option<Self> {
        Some(Self {
            wanted: HashMap::new(),
            nodes: HashMap::new(),
            pods: HashMap::new(),
            on_node: HashMap::new(),
            addresses: Pool::new(vec![addresses])?,
            pod_addresses: Pool::new(vec![pod_addresses])?,
        })
    }

    pub fn node(&mut self, name: &str) -> Option<&mut Known> {
        self.nodes.get_mut(name)
    }

    pub fn pod(&mut self, key: &ObjectKey) -> Option<&mut PodState> {
        self.pods.get_mut(key)
    }

    /// An address for a node that has none.
    pub fn take_node_address(&mut self) -> Option<IpAddr> {
        let offset = self.addresses.take()?;
        self.addresses.at(offset).into_iter().next()
    }

    pub fn give_back_node_address(&mut self, address: IpAddr) {
        if let Some(offset) = self.addresses.note(address) {
            self.addresses.give_back(offset);
        }
    }

    /// Stores a Node; returns whether it is new or has changed its mode.
    pub fn see_node(&mut self, name: &Arc<str>, seen: Seen) -> bool {
        self.wanted.remove(name);
        if let Ok(address) = seen.ip.parse() {
            self.addresses.note(address);
        }
        let known = self.nodes.get_mut(name).filter(|known| *known.uid == *seen.uid);
        let Some(known) = known else {
            let known = Known {
                uid: seen.uid.into(),
                mode: seen.mode,
                ip: seen.ip,
                pool: Pool::new(seen.pod_ranges),
                lease: None,
                reported: Instant::now() - seen.reported_before,
                floor: 0,
            };
            self.nodes.insert(name.clone(), known);
            return true;
        };
        known.ip = seen.ip;
        if known.pool.as_ref().is_none_or(|pool| pool.ranges() != seen.pod_ranges) {
            known.pool = Pool::new(seen.pod_ranges);
        }
        std::mem::replace(&mut known.mode, seen.mode) != seen.mode
    }

    pub fn forget_node(&mut self, name: &str) {
        let Some(known) = self.nodes.remove(name) else { return };
        if let Ok(address) = known.ip.parse() {
            self.give_back_node_address(address);
        }
    }

    pub fn pods_of(&self, node: &str) -> Vec<ObjectKey> {
        self.on_node.get(node).into_iter().flatten().cloned().collect()
    }

    /// Stores a pod. Only an unknown pod is decoded: a pod's node never changes.
    pub fn see_pod(&mut self, entry: &Arc<Entry>) {
        let key = &entry.header.key;
        if let Some(known) = self.pods.get_mut(key) {
            if known.entry.header.uid == entry.header.uid {
                known.entry = entry.clone();
                return;
            }
            self.forget_pod(key);
        }
        let Ok(pod) = Pod::decode(&entry.json()) else {
            tracing::error!(pod = %key, "failed to decode the pod");
            return;
        };
        let node: Arc<str> = pod.spec.node_name.as_str().into();
        self.on_node.entry(node.clone()).or_default().insert(key.clone());
        let slot = self.slot_of(&pod, &node);
        let state = PodState { entry: entry.clone(), node, slot, stage: None, floor: 0 };
        self.pods.insert(key.clone(), state);
    }

    /// The place of the address that a pod has already.
    fn slot_of(&mut self, pod: &Pod, node: &str) -> Option<Slot> {
        if pod.is_ended() || pod.spec.host_network {
            return None;
        }
        let address: IpAddr = pod.status.pod_ip.parse().ok()?;
        let pool = self.nodes.get_mut(node).and_then(|known| known.pool.as_mut());
        let of_node = pool.and_then(|pool| pool.note(address)).map(Slot::OfNode);
        of_node.or_else(|| self.pod_addresses.note(address).map(Slot::OfAll))
    }

    pub fn forget_pod(&mut self, key: &ObjectKey) {
        self.release(key);
        let Some(state) = self.pods.remove(key) else { return };
        if let Some(all) = self.on_node.get_mut(&state.node) {
            all.remove(key);
            if all.is_empty() {
                self.on_node.remove(&state.node);
            }
        }
    }

    /// Gives back the address of a pod that has ended.
    pub fn release(&mut self, key: &ObjectKey) {
        let Some(state) = self.pods.get_mut(key) else { return };
        match state.slot.take() {
            Some(Slot::OfAll(offset)) => self.pod_addresses.give_back(offset),
            Some(Slot::OfNode(offset)) => {
                let pool = self.nodes.get_mut(&state.node).and_then(|known| known.pool.as_mut());
                if let Some(pool) = pool {
                    pool.give_back(offset);
                }
            }
            None => {}
        }
    }

    /// The addresses of a pod; taken if it has none. `None`: there is none left.
    pub fn addresses(&mut self, key: &ObjectKey) -> Option<Vec<IpAddr>> {
        let state = self.pods.get_mut(key)?;
        let pool = self.nodes.get_mut(&state.node).and_then(|known| known.pool.as_mut());
        let slot = match (state.slot, pool.is_some()) {
            (Some(slot), _) => slot,
            (None, true) => Slot::OfNode(pool?.take()?),
            (None, false) => Slot::OfAll(self.pod_addresses.take()?),
        };
        state.slot = Some(slot);
        match slot {
            Slot::OfAll(offset) => Some(self.pod_addresses.at(offset)),
            Slot::OfNode(offset) => Some(self.nodes.get(&state.node)?.pool.as_ref()?.at(offset)),
        }
    }

    /// Since when a pod is in its stage. A status tells whole seconds: what this process sees begin is
    /// remembered more exactly.
    pub fn since(&mut self, key: &ObjectKey, stage: Stage, pod: &Pod, now: Timestamp) -> Timestamp {
        let Some(state) = self.pods.get_mut(key) else { return now };
        if let Some((known, since)) = state.stage
            && known == stage
        {
            return since;
        }
        let told = stage.since(pod).unwrap_or(now);
        let age = Duration::try_from(now.duration_since(told)).unwrap_or(Duration::ZERO);
        let since = if age < Duration::from_secs(1) { now } else { told };
        state.stage = Some((stage, since));
        since
    }
}

/// The stored fields of a Node.
pub struct Seen {
    pub uid: String,
    pub mode: Mode,
    pub ip: String,
    pub pod_ranges: Vec<IpNet>,
    /// How long before now its status was reported, if it is new here.
    pub reported_before: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> State {
        let range = |text: &str| text.parse().expect("a range");
        State::new(range("198.18.0.0/15"), range("100.64.0.0/10")).expect("ranges")
    }

    fn node(ranges: &[&str], mode: Mode) -> Seen {
        let pod_ranges = ranges.iter().map(|range| range.parse().expect("a range")).collect();
        let ip = "198.18.0.2".to_owned();
        Seen { uid: "n".into(), mode, ip, pod_ranges, reported_before: Duration::ZERO }
    }

    fn pod(name: &str, status: &str) -> Arc<Entry> {
        let json = format!(
            r#"{{"metadata":{{"namespace":"d","name":"{name}","uid":"{name}"}},"spec":{{"nodeName":"n"}},"status":{status}}}"#
        );
        Arc::new(Entry::parse(json.as_bytes(), false).expect("an object"))
    }

    fn key(name: &str) -> ObjectKey {
        ObjectKey::new("d", name)
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_are_of_the_nodes_range_or_of_all() {
        let mut state = state();
        let name: Arc<str> = "n".into();
        assert!(state.see_node(&name, node(&[], Mode::Well)));
        state.see_pod(&pod("early", "{}"));
        let text = |found: Option<Vec<IpAddr>>| found.expect("free")[0].to_string();
        assert_eq!(text(state.addresses(&key("early"))), "100.64.0.2");
        assert!(!state.see_node(&name, node(&["10.0.0.0/29"], Mode::Well)));
        state.see_pod(&pod("known", r#"{"podIP":"10.0.0.2","phase":"Running"}"#));
        state.see_pod(&pod("over", r#"{"podIP":"10.0.0.3","phase":"Failed"}"#));
        state.see_pod(&pod("new", "{}"));
        assert_eq!(text(state.addresses(&key("new"))), "10.0.0.3");
        assert_eq!(text(state.addresses(&key("new"))), "10.0.0.3");
        assert_eq!(text(state.addresses(&key("early"))), "100.64.0.2");
        state.forget_pod(&key("known"));
        for name in ["a", "b", "c", "d"] {
            state.see_pod(&pod(name, "{}"));
        }
        let given: Vec<_> = ["a", "b", "c"].map(|name| text(state.addresses(&key(name)))).into();
        assert_eq!(given, ["10.0.0.4", "10.0.0.5", "10.0.0.6"]);
        assert_eq!(text(state.addresses(&key("d"))), "10.0.0.2");
        state.see_pod(&pod("e", "{}"));
        assert_eq!(state.addresses(&key("e")), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_tells_when_its_mode_changes_and_knows_its_pods() {
        let mut state = state();
        let name: Arc<str> = "n".into();
        state.see_pod(&pod("a", "{}"));
        assert!(state.see_node(&name, node(&[], Mode::Well)));
        assert!(!state.see_node(&name, node(&[], Mode::Well)));
        assert!(state.see_node(&name, node(&[], Mode::Silent)));
        assert_eq!(state.pods_of("n"), [key("a")]);
        state.forget_pod(&key("a"));
        assert!(state.pods_of("n").is_empty());
        state.forget_node("n");
        assert!(state.node("n").is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stage_begins_when_it_is_first_seen_or_when_its_status_says() {
        let mut state = state();
        let now = Timestamp::from_millisecond(1_800_000_000_700).expect("in range");
        let status = |second: i64| {
            let time = Timestamp::from_second(1_800_000_000 - second).expect("in range");
            let running = format!(r#"{{"state":{{"running":{{"startedAt":"{time}"}}}}}}"#);
            format!(r#"{{"phase":"Running","containerStatuses":[{running}]}}"#)
        };
        for (name, before, expected) in [("new", 0, 0), ("old", 9, 9700)] {
            let entry = pod(name, &status(before));
            state.see_pod(&entry);
            let decoded = Pod::decode(&entry.json()).expect("a pod");
            let stage = Stage::of(&decoded);
            let since = state.since(&key(name), stage, &decoded, now);
            assert_eq!(now.duration_since(since).as_millis(), expected, "{name}");
            let later = now + Duration::from_secs(5);
            assert_eq!(state.since(&key(name), stage, &decoded, later), since);
        }
    }
}
