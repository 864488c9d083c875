//! Notices nodes that fall silent, and tells the cluster by conditions and taints.
//!
//! In: nodes, their leases. Out: conditions `Unknown`, taints, pods' `Ready=False`.
//! Upstream: `pkg/controller/nodelifecycle`. A heartbeat is a change of the lease or of the Ready
//! condition's heartbeat time, timed by our clock.
//!
//! Cost of a node's change: its own conditions and taints; zones are counted as nodes change. Of pods only
//! those of a node that stopped being ready are looked at.
//!
//! Invariants: the work of a node that beats costs nothing but the lease's event; while no node at
//! all is ready, nothing is evicted: then it is more likely we who are cut off.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use client::{
    Api, ErrorExt, Event, EventType, Lister, Outcome, Patch, PatchParams, PostParams, Result,
    WorkQueue,
};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, NodeCondition, Pod, Taint};
use machinery::Time;
use serde_json::json;
use tokio::time::Instant;

use crate::context::{Context, Evictions};
use crate::descriptor::{Descriptor, Row, on};
use crate::pod;

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller, Arc<str>> {
    name: "node-lifecycle-controller",
    account: "node-controller",
    component: "node-controller",
    queue: "node_lifecycle_controller",
    workers: 8,
    new: |setup| {
        let pods = setup.informer::<Pod>();
        pods.index("node", |pod| vec![pod::node_name(pod).to_owned()]);
        Some(Controller {
            context: setup.context.clone(),
            nodes: setup.lister(),
            pods: pods.lister(),
            heard: Mutex::default(),
            zones: Mutex::default(),
            next_evictions: Mutex::default(),
        })
    },
    watches: &[
        &on(|this: &Controller, queue, event| {
            this.node_event(event);
            queue.add(event.key().name);
        }),
        &on(Controller::lease_event).within(Some(LEASES), ""),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

const LEASES: &str = "kube-node-lease";
const NOT_READY: &str = "node.kubernetes.io/not-ready";
const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
/// Taints that this controller adds and removes, by what makes them due.
const CONDITION_TAINTS: [(&str, &str, &str); 6] = [
    ("Ready", "False", NOT_READY),
    ("Ready", "Unknown", UNREACHABLE),
    ("MemoryPressure", "True", "node.kubernetes.io/memory-pressure"),
    ("DiskPressure", "True", "node.kubernetes.io/disk-pressure"),
    ("PIDPressure", "True", "node.kubernetes.io/pid-pressure"),
    ("NetworkUnavailable", "True", "node.kubernetes.io/network-unavailable"),
];
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";

struct Controller {
    context: Context,
    nodes: Lister<Node>,
    pods: Lister<Pod>,
    /// Guards what was heard of each node, and when by our clock.
    heard: Mutex<HashMap<String, Heard>>,
    /// Guards how many nodes of each zone are ready.
    zones: Mutex<Zones>,
    /// Guards when the next node of a zone may be marked for eviction.
    next_evictions: Mutex<HashMap<String, Instant>>,
}

#[derive(Clone, Default)]
struct Heard {
    lease: Option<Timestamp>,
    status: Option<Timestamp>,
    at: Option<Instant>,
}

impl Controller {
    fn lease_event(&self, queue: &WorkQueue<Arc<str>>, event: &Event<Lease>) {
        let lease = event.object();
        let name = lease.metadata.name.as_deref().unwrap_or_default();
        let renewed =
            lease.spec.as_ref().and_then(|spec| spec.renew_time.as_ref()).map(|time| time.0);
        // The pending look finds the node alive: waking for every beat is needless.
        if self.hear(name, |heard| std::mem::replace(&mut heard.lease, renewed) != renewed) {
            queue.add(name.into());
        }
    }

    fn node_event(&self, event: &Event<Node>) {
        let node = event.object();
        let name = node.metadata.name.as_deref().unwrap_or_default();
        if event.is_deleted() {
            self.heard.lock().expect("no panic while held").remove(name);
            self.zones().remove(name);
            return;
        }
        self.zones().put(name, zone_of(node), ready_status(node) == "True");
        let beat = condition(node, "Ready").filter(|ready| ready.status != "Unknown");
        let beat = beat.and_then(|ready| ready.last_heartbeat_time.as_ref()).map(|time| time.0);
        if beat.is_some() {
            self.hear(name, |heard| std::mem::replace(&mut heard.status, beat) != beat);
        }
    }

    fn zones(&self) -> std::sync::MutexGuard<'_, Zones> {
        self.zones.lock().expect("no panic while held")
    }

    /// True if the node was silent before.
    fn hear(&self, name: &str, update: impl Fn(&mut Heard) -> bool) -> bool {
        let mut all = self.heard.lock().expect("no panic while held");
        let heard = all.entry(name.to_owned()).or_default();
        let grace = self.context.options.node_monitor_grace_period;
        let was_silent = heard.at.is_none_or(|at| at.elapsed() > grace);
        if update(heard) {
            heard.at = Some(Instant::now());
            return was_silent;
        }
        false
    }

    async fn reconcile(&self, name: &str) -> Result<Outcome> {
        let Some(node) = self.nodes.get("", name) else {
            return Ok(Outcome::Done);
        };
        let heard =
            self.heard.lock().expect("no panic while held").get(name).cloned().unwrap_or_default();
        let options = &self.context.options;
        let ever = heard.at.is_some();
        let grace = if ever {
            options.node_monitor_grace_period
        } else {
            options.node_startup_grace_period
        };
        let now = base::clock::now_seconds();
        let silent = match heard.at {
            Some(at) => at.elapsed(),
            None => {
                let since = node.metadata.creation_timestamp.as_ref().map_or(now, |time| time.0);
                Duration::try_from(now.duration_since(since)).unwrap_or_default()
            }
        };
        let mut node = (*node).clone();
        if silent > grace && mark_unknown(&mut node, ever, now) {
            node = self.write_status(name, &node).await?;
            let message = format!("Node {name} status is now: NodeNotReady");
            self.context.events.event(&node, EventType::Normal, "NodeNotReady", message);
        }
        let delay = self.write_taints(name, &node, now).await?;
        if ready_status(&node) != "True" {
            self.mark_pods(name).await?;
        }
        let check = grace.saturating_sub(silent).max(options.node_monitor_period);
        Ok(Outcome::After(delay.map_or(check, |delay| delay.min(check))))
    }

    async fn write_status(&self, name: &str, node: &Node) -> Result<Node> {
        let api: Api<Node> = self.context.client.api(None);
        api.replace_status(name, &PostParams::default(), node).await
    }

    /// The taints that are due; how long to wait if eviction must.
    async fn write_taints(
        &self,
        name: &str,
        node: &Node,
        now: Timestamp,
    ) -> Result<Option<Duration>> {
        let any_ready = self.zones().any_ready();
        let old = node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default();
        let mut new = taints(node, &old, any_ready, now);
        let evicts =
            |taints: &[Taint]| taints.iter().any(|one| one.effect == "NoExecute" && is_ours(one));
        let mut delay = None;
        if evicts(&new) && !evicts(&old) {
            delay = self.eviction_delay(zone_of(node));
            if delay.is_some() {
                new.retain(|one| !(one.effect == "NoExecute" && is_ours(one)));
            }
        }
        if same_taints(&old, &new) {
            return Ok(delay);
        }
        let is_evicted = evicts(&new) && !evicts(&old);
        let version = node.metadata.resource_version.as_deref();
        let taints = (!new.is_empty()).then_some(new);
        let patch = json!({"metadata": {"resourceVersion": version}, "spec": {"taints": taints}});
        let api: Api<Node> = self.context.client.api(None);
        api.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        if is_evicted {
            crate::metrics::NODE_EVICTIONS.count(&[&zone_of(node)]);
        }
        Ok(delay)
    }

    /// `None`: now, and the next one of the zone waits.
    fn eviction_delay(&self, zone: String) -> Option<Duration> {
        let Some(pace) = self.zones().of(&zone).pace(&self.context.options.evictions) else {
            return Some(self.context.options.node_monitor_period);
        };
        let mut all = self.next_evictions.lock().expect("no panic while held");
        let now = Instant::now();
        all.retain(|_, next| *next > now);
        if let Some(next) = all.get(&zone) {
            return Some(*next - now);
        }
        all.insert(zone, now + pace);
        None
    }

    /// The pods of a node that is not ready are not ready either.
    async fn mark_pods(&self, name: &str) -> Result<()> {
        for pod in self.pods.by_index("node", name) {
            let Some(ready) = pod::condition(&pod, "Ready").filter(|ready| ready.status != "False")
            else {
                continue;
            };
            let mut condition = ready.clone();
            condition.status = "False".into();
            condition.last_transition_time = Some(Time(base::clock::now_seconds()));
            let patch = json!({"status": {"conditions": [condition]}, "metadata": {"uid": pod.metadata.uid}});
            let api: Api<Pod> = self.context.client.api(pod.metadata.namespace.as_deref());
            let pod_name = pod.metadata.name.as_deref().unwrap_or_default();
            match api
                .patch_status(pod_name, &PatchParams::default(), &Patch::Strategic(&patch))
                .await
            {
                Ok(_) => self.context.events.event(
                    &*pod,
                    EventType::Warning,
                    "NodeNotReady",
                    "Node is not ready",
                ),
                Err(error) if error.is_not_found() || error.is_conflict() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn condition<'a>(node: &'a Node, kind: &str) -> Option<&'a NodeCondition> {
    node.status.as_ref()?.conditions.as_ref()?.iter().find(|condition| condition.type_ == kind)
}

pub fn ready_status(node: &Node) -> &str {
    condition(node, "Ready").map_or("Unknown", |ready| ready.status.as_str())
}

/// How many nodes of a zone are ready, and how many are not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Zone {
    ready: usize,
    silent: usize,
}

impl Zone {
    /// Between two evictions; `None`: none for now. A small zone of which most is down is more likely
    /// cut off than broken; one that is down altogether is evicted, as others have room.
    fn pace(self, evictions: &Evictions) -> Option<Duration> {
        let size = self.ready + self.silent;
        let share = self.silent as f64 / size.max(1) as f64;
        let is_partial = self.silent > 2 && share >= evictions.unhealthy_share;
        let rate = match (is_partial && self.ready > 0, size > evictions.large_zone) {
            (false, _) => evictions.rate,
            (true, true) => evictions.secondary_rate,
            (true, false) => return None,
        };
        (rate > 0.0).then(|| Duration::from_secs_f64(1.0 / rate))
    }
}

/// Region and zone of a node. Upstream: `GetZoneKey`.
fn zone_of(node: &Node) -> String {
    let label = |name: &str| node.metadata.labels.as_ref()?.get(name).map(String::as_str);
    let region = label("topology.kubernetes.io/region").unwrap_or_default();
    let zone = label("topology.kubernetes.io/zone").unwrap_or_default();
    format!("{region}:\0:{zone}")
}

/// The zones of all nodes, counted as nodes change.
#[derive(Default)]
struct Zones {
    by_node: HashMap<String, (String, bool)>,
    by_zone: HashMap<String, Zone>,
    ready: usize,
}

impl Zones {
    fn put(&mut self, node: &str, zone: String, is_ready: bool) {
        if self.by_node.get(node).is_some_and(|(old, ready)| *old == zone && *ready == is_ready) {
            return;
        }
        self.remove(node);
        let count = self.by_zone.entry(zone.clone()).or_default();
        count.ready += usize::from(is_ready);
        count.silent += usize::from(!is_ready);
        self.ready += usize::from(is_ready);
        self.by_node.insert(node.to_owned(), (zone, is_ready));
    }

    fn remove(&mut self, node: &str) {
        let Some((zone, was_ready)) = self.by_node.remove(node) else { return };
        self.ready -= usize::from(was_ready);
        if let Some(count) = self.by_zone.get_mut(&zone) {
            count.ready -= usize::from(was_ready);
            count.silent -= usize::from(!was_ready);
            if *count == Zone::default() {
                self.by_zone.remove(&zone);
            }
        }
    }

    fn of(&self, zone: &str) -> Zone {
        self.by_zone.get(zone).copied().unwrap_or_default()
    }

    fn any_ready(&self) -> bool {
        self.ready > 0
    }
}

fn is_ours(taint: &Taint) -> bool {
    taint.key == NOT_READY || taint.key == UNREACHABLE
}

/// Sets the kubelet's conditions to Unknown. True if something changed. Pure.
fn mark_unknown(node: &mut Node, ever: bool, now: Timestamp) -> bool {
    let conditions = node.status.get_or_insert_default().conditions.get_or_insert_default();
    let mut changed = false;
    for kind in ["Ready", "MemoryPressure", "DiskPressure", "PIDPressure"] {
        match conditions.iter_mut().find(|condition| condition.type_ == kind) {
            Some(known) if known.status == "Unknown" => {}
            Some(known) => {
                known.status = "Unknown".into();
                known.reason = Some("NodeStatusUnknown".into());
                known.message = Some("Kubelet stopped posting node status.".into());
                known.last_transition_time = Some(Time(now));
                changed = true;
            }
            None if !ever => {
                conditions.push(NodeCondition {
                    type_: kind.into(),
                    status: "Unknown".into(),
                    reason: Some("NodeStatusNeverUpdated".into()),
                    message: Some("Kubelet never posted node status.".into()),
                    last_heartbeat_time: None,
                    last_transition_time: Some(Time(now)),
                });
                changed = true;
            }
            None => {}
        }
    }
    changed
}

/// The taints that the node should have: ours by its conditions, others as they are. Pure.
fn taints(node: &Node, old: &[Taint], evict: bool, now: Timestamp) -> Vec<Taint> {
    let mut due: BTreeMap<(String, String), ()> = BTreeMap::new();
    for (kind, status, key) in CONDITION_TAINTS {
        let found = condition(node, kind).is_some_and(|one| one.status == status);
        if found {
            due.insert((key.into(), "NoSchedule".into()), ());
            if evict && kind == "Ready" {
                due.insert((key.into(), "NoExecute".into()), ());
            }
        }
    }
    if node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true) {
        due.insert((UNSCHEDULABLE.into(), "NoSchedule".into()), ());
    }
    let managed = |taint: &Taint| {
        let conditional = CONDITION_TAINTS.iter().any(|(_, _, key)| *key == taint.key)
            || taint.key == UNSCHEDULABLE;
        conditional
            && (taint.effect == "NoSchedule" || (taint.effect == "NoExecute" && is_ours(taint)))
    };
    let mut all = vec![];
    for taint in old {
        let place = (taint.key.clone(), taint.effect.clone());
        if !managed(taint) || due.remove(&place).is_some() {
            all.push(taint.clone());
        }
    }
    all.extend(due.into_keys().map(|(key, effect)| Taint {
        key,
        effect,
        time_added: Some(Time(now)),
        value: None,
    }));
    all
}

fn same_taints(a: &[Taint], b: &[Taint]) -> bool {
    a.len() == b.len() && a.iter().all(|one| b.contains(one))
}

#[cfg(test)]
mod tests {
    use serde_json::from_value;

    use super::*;

    #[test]
    fn conditions_become_taints() {
        let now = Timestamp::from_second(1000).unwrap();
        let check = |ready: &str, evict: bool, expected: &[(&str, &str)]| {
            let node: Node = from_value(json!({"metadata": {"name": "n"}, "spec": {"unschedulable": false,
                "taints": [{"key": "own", "effect": "NoSchedule"}, {"key": NOT_READY, "effect": "NoSchedule"}]},
                "status": {"conditions": [{"type": "Ready", "status": ready}]}}))
            .unwrap();
            let old = node.spec.clone().unwrap().taints.unwrap();
            let new = taints(&node, &old, evict, now);
            let found: Vec<_> =
                new.iter().map(|one| (one.key.as_str(), one.effect.as_str())).collect();
            assert_eq!(found, expected, "{ready}");
        };
        check("True", true, &[("own", "NoSchedule")]);
        check(
            "False",
            true,
            &[("own", "NoSchedule"), (NOT_READY, "NoSchedule"), (NOT_READY, "NoExecute")],
        );
        check(
            "Unknown",
            true,
            &[("own", "NoSchedule"), (UNREACHABLE, "NoExecute"), (UNREACHABLE, "NoSchedule")],
        );
        check("Unknown", false, &[("own", "NoSchedule"), (UNREACHABLE, "NoSchedule")]);
    }

    #[test]
    fn zones_that_are_partly_down_are_left_alone() {
        let check = |ready, silent, expected: Option<u64>| {
            let pace = Zone { ready, silent }.pace(&Evictions::default());
            let expected = expected.map(Duration::from_secs);
            assert_eq!(pace, expected, "{ready} {silent}");
        };
        check(1, 1, Some(10));
        check(1, 2, Some(10));
        check(10, 3, Some(10));
        check(2, 3, None);
        check(20, 40, Some(100));
        check(0, 5, Some(10));
        let mut zones = Zones::default();
        zones.put("1", "a".into(), true);
        zones.put("2", "a".into(), true);
        zones.put("3", "b".into(), false);
        zones.put("2", "a".into(), false);
        assert_eq!(zones.of("a"), Zone { ready: 1, silent: 1 });
        assert_eq!(zones.of("b"), Zone { ready: 0, silent: 1 });
        assert!(zones.any_ready());
        zones.put("1", "b".into(), false);
        zones.remove("3");
        assert_eq!(zones.of("a"), Zone { ready: 0, silent: 1 });
        assert_eq!(zones.of("b"), Zone { ready: 0, silent: 1 });
        assert!(!zones.any_ready());
        zones.remove("1");
        zones.remove("2");
        assert!(zones.by_zone.is_empty());
    }

    #[test]
    fn a_silent_node_is_unknown_once() {
        let now = Timestamp::from_second(1000).unwrap();
        let mut node: Node =
            from_value(json!({"metadata": {}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}})).unwrap();
        assert!(mark_unknown(&mut node, true, now));
        assert_eq!(ready_status(&node), "Unknown");
        assert!(!mark_unknown(&mut node, true, now));
    }
}
