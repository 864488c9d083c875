//! The table of devices and their containers, behind [`super::DevicePlugins`].
//!
//! ```text
//!              listed                       stopped             5 minutes
//!  (nothing) ─────────► LIVE, devices ──────────────► STOPPED ───────────► GONE
//!                        ▲  capacity: all             capacity: all        0
//!                        │  allocatable: healthy      allocatable: 0       0
//!                        └──────────── connected, listed ◄──┘
//! ```
//! Once the node's status says 0, the kubelet no longer overwrites an amount that others write there.
//!
//! In: the plugins' lists, the containers' requests. Out: devices for containers, amounts for the node.
//! Invariants: a device belongs to one container at a time, except that later containers may reuse those
//! of init containers; a restarted kubelet knows the pods' devices, and the names of the resources.
//! Upstream: `devicemanager/manager.go`, `pod_devices.go`. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use super::DevicePluginError;
use super::messages::{self, Allocated, HEALTHY};
use crate::managers::hints::{Hint, Hints, Mask};
use crate::names;
use crate::resources::is_sidecar;

/// How long a stopped plugin's devices still count. Upstream: `endpointStopGracePeriod`.
const GRACE: Duration = Duration::from_secs(300);
/// The NUMA node of a device that reports none.
pub const NO_NODE: i64 = -1;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    pub is_healthy: bool,
    /// The NUMA nodes that it is near.
    pub nodes: Vec<i64>,
}

impl Device {
    fn mask(&self) -> Mask {
        Mask::of(self.nodes.iter().filter_map(|node| usize::try_from(*node).ok()))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PluginState {
    Live,
    Stopped(Instant),
    Gone,
    /// Like `Gone`, and the node's status says so.
    Reported,
}

/// The parts of the state that a new list changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct News {
    pub record: bool,
    pub amounts: bool,
    /// The health of allocated devices changed.
    pub health: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Resource {
    devices: BTreeMap<String, Device>,
    /// The current plugin has sent its list.
    is_listed: bool,
    standing: PluginState,
}

impl Resource {
    fn counts(&self) -> bool {
        !matches!(self.standing, PluginState::Gone | PluginState::Reported)
    }

    fn has_topology(&self) -> bool {
        self.devices.values().any(|device| !device.nodes.is_empty())
    }

    /// Upstream: generateDeviceTopologyHints.
    fn hints(
        &self,
        nodes: &[usize],
        free: &BTreeSet<String>,
        reusable: &BTreeSet<String>,
        required: usize,
    ) -> Vec<Hint> {
        let is_placed =
            |id: &&String| self.devices.get(*id).is_some_and(|one| !one.nodes.is_empty());
        let placed = reusable.iter().filter(is_placed).count();
        let is_near = |id: &&String, mask: Mask| {
            self.devices.get(*id).is_some_and(|one| one.mask().and(mask).count() > 0)
        };
        let mut fewest = nodes.len();
        let mut masks = vec![];
        for mask in Mask::subsets(nodes) {
            let count = |ids: &BTreeSet<String>| ids.iter().filter(|id| is_near(id, mask)).count();
            let total = self.devices.keys().filter(|id| is_near(id, mask)).count();
            if total >= required {
                fewest = fewest.min(mask.count());
            }
            let reused = count(reusable);
            if reused == placed && count(free) + reused >= required {
                masks.push(mask);
            }
        }
        let hint = |mask: Mask| Hint { affinity: Some(mask), is_preferred: mask.count() == fewest };
        masks.into_iter().map(hint).collect()
    }

    fn healthy(&self) -> BTreeSet<String> {
        let listed = self.devices.iter().filter(|(_, device)| self.is_listed && device.is_healthy);
        listed.map(|(id, _)| id.clone()).collect()
    }
}

/// A container's devices of one resource.
#[derive(Clone, Debug, PartialEq)]
pub struct Given {
    /// By NUMA node; a device that is near two nodes appears twice.
    pub devices: BTreeMap<i64, Vec<String>>,
    /// `None`: the plugin's answer is pending.
    pub answer: Option<Allocated>,
}

impl Given {
    pub fn ids(&self) -> BTreeSet<String> {
        self.devices.values().flatten().cloned().collect()
    }
}

/// One pod's devices, by container and resource.
pub type OfPod = BTreeMap<String, BTreeMap<String, Given>>;

/// For the node's status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Amounts {
    pub capacity: BTreeMap<String, i64>,
    pub allocatable: BTreeMap<String, i64>,
}

/// The devices that a container can choose from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    pub required: usize,
    /// Devices of the pod's init containers, already allocated to the pod.
    pub reused: BTreeSet<String>,
    pub free: BTreeSet<String>,
}

#[derive(Default)]
pub struct Table {
    resources: BTreeMap<String, Resource>,
    pods: BTreeMap<String, OfPod>,
}

impl Table {
    /// The table of an earlier kubelet: resources have no devices until their plugins list them.
    pub fn restored(names: Vec<String>, pods: BTreeMap<String, OfPod>, now: Instant) -> Self {
        let standing = PluginState::Stopped(now);
        let empty = Resource { devices: BTreeMap::new(), is_listed: false, standing };
        Self { resources: names.into_iter().map(|name| (name, empty.clone())).collect(), pods }
    }

    /// For the record: the healthy devices of each resource that is not gone.
    pub fn registered(&self) -> BTreeMap<String, BTreeSet<String>> {
        let counting = self.resources.iter().filter(|(_, one)| one.counts());
        counting.map(|(name, one)| (name.clone(), one.healthy())).collect()
    }

    pub fn pods(&self) -> &BTreeMap<String, OfPod> {
        &self.pods
    }

    /// Takes over a plugin's list.
    pub fn listed(&mut self, resource: &str, devices: Vec<messages::Device>) -> News {
        let nodes = |topology: Option<messages::Topology>| {
            topology.map(|all| all.nodes.iter().map(|node| node.id).collect()).unwrap_or_default()
        };
        let one = |device: messages::Device| {
            let is_healthy = device.health == HEALTHY;
            (device.id, Device { is_healthy, nodes: nodes(device.topology) })
        };
        let fresh = Resource {
            devices: devices.into_iter().map(one).collect(),
            is_listed: true,
            standing: PluginState::Live,
        };
        if self.resources.get(resource) == Some(&fresh) {
            return News::default();
        }
        let used = self.used(resource, &BTreeSet::new());
        let old = self.resources.insert(resource.to_owned(), fresh);
        let health = |of: &Resource, id: &String| of.devices.get(id).map(|one| one.is_healthy);
        let fresh = &self.resources[resource];
        let healthy = old.as_ref().filter(|old| old.counts()).map(Resource::healthy);
        let now_healthy = fresh.healthy();
        let count = old.as_ref().map(|old| old.devices.len());
        News {
            amounts: healthy.as_ref().map(BTreeSet::len) != Some(now_healthy.len())
                || count != Some(fresh.devices.len()),
            record: healthy.as_ref() != Some(&now_healthy),
            health: used.iter().any(|id| {
                let before = old.as_ref().and_then(|old| health(old, id));
                health(fresh, id).is_some_and(|now| before != Some(now))
            }),
        }
    }

    /// Marks the resource's plugin as connected; its devices are not known yet.
    pub fn connected(&mut self, resource: &str) {
        if let Some(known) = self.resources.get_mut(resource) {
            known.standing = PluginState::Live;
        }
    }

    pub fn stopped(&mut self, resource: &str, now: Instant) {
        let known = self.resources.get_mut(resource);
        // A plugin that has stopped already keeps its time.
        if let Some(known) = known.filter(|known| known.standing == PluginState::Live) {
            known.is_listed = false;
            known.standing = PluginState::Stopped(now);
        }
    }

    pub fn is_stopped(&self, resource: &str) -> bool {
        let known = self.resources.get(resource);
        known.is_some_and(|known| known.standing != PluginState::Live)
    }

    /// The node's amounts, and whether a resource has just gone.
    pub fn amounts(&mut self, now: Instant) -> (Amounts, bool) {
        let mut out = Amounts::default();
        let mut has_gone = false;
        for (name, one) in &mut self.resources {
            if let PluginState::Stopped(since) = one.standing
                && now.duration_since(since) > GRACE
            {
                one.standing = PluginState::Gone;
                has_gone = true;
            }
            if one.standing == PluginState::Reported {
                continue;
            }
            let all = if one.standing == PluginState::Gone { 0 } else { one.devices.len() };
            out.capacity.insert(name.clone(), all as i64);
            out.allocatable.insert(name.clone(), one.healthy().len() as i64);
        }
        (out, has_gone)
    }

    /// Records that the node's status no longer has amounts of resources that are gone.
    pub fn told(&mut self, is_none: impl Fn(&str) -> bool) {
        for (name, one) in &mut self.resources {
            if one.standing == PluginState::Gone && is_none(name) {
                one.standing = PluginState::Reported;
            }
        }
    }

    /// Whether a plugin provides this resource, or did so within the grace period.
    pub fn counts(&self, resource: &str) -> bool {
        self.resources.get(resource).is_some_and(Resource::counts)
    }

    /// Whether a plugin provides this resource, or pods hold devices of it.
    pub fn is_known(&self, resource: &str) -> bool {
        let mut all = self.pods.values().flat_map(BTreeMap::values);
        self.counts(resource) || all.any(|container| container.contains_key(resource))
    }

    /// The devices that pods hold, except the pods of `without`.
    fn used(&self, resource: &str, without: &BTreeSet<String>) -> BTreeSet<String> {
        let pods = self.pods.iter().filter(|(uid, _)| !without.contains(*uid));
        let containers = pods.flat_map(|(_, of)| of.values());
        containers.filter_map(|of| of.get(resource)).flat_map(Given::ids).collect()
    }

    pub fn of_container(
        &self,
        pod: &str,
        container: &str,
    ) -> impl Iterator<Item = (&String, &Given)> {
        self.pods.get(pod).and_then(|of| of.get(container)).into_iter().flatten()
    }

    fn given(&self, pod: &str, container: &str, resource: &str) -> Option<&Given> {
        self.pods.get(pod)?.get(container)?.get(resource)
    }

    /// Whether the container has devices that the plugin has allocated.
    pub fn has(&self, pod: &str, container: &str, resource: &str) -> bool {
        self.given(pod, container, resource).is_some_and(|given| given.answer.is_some())
    }

    pub fn ids(&self, pod: &str, container: &str, resource: &str) -> Option<BTreeSet<String>> {
        self.given(pod, container, resource).map(Given::ids)
    }

    /// The devices of earlier init containers that no later container has taken.
    fn reusable(&self, pod: &Pod, container: &str, resource: &str) -> BTreeSet<String> {
        let mut free = BTreeSet::new();
        let Some(spec) = &pod.spec else { return free };
        let inits = spec.init_containers.iter().flatten().map(|one| (one, !is_sidecar(one)));
        for (before, gives_back) in inits.chain(spec.containers.iter().map(|one| (one, false))) {
            if before.name == container {
                break;
            }
            let ids = self.ids(names::uid(pod), &before.name, resource).unwrap_or_default();
            match gives_back {
                true => free.extend(ids),
                false => free.retain(|id| !ids.contains(id)),
            }
        }
        free
    }

    /// The devices that a container can get; `None` if it needs no more.
    pub fn room(
        &self,
        pod: &Pod,
        container: &str,
        resource: &str,
        required: usize,
    ) -> Result<Option<Room>, DevicePluginError> {
        self.room_without(pod, container, resource, required, &BTreeSet::new())
    }

    /// Like `room`, as if the pods of `without` did not exist.
    pub fn room_without(
        &self,
        pod: &Pod,
        container: &str,
        resource: &str,
        required: usize,
        others: &BTreeSet<String>,
    ) -> Result<Option<Room>, DevicePluginError> {
        let uid = names::uid(pod);
        let had = self.ids(uid, container, resource);
        let count = had.as_ref().map_or(required, BTreeSet::len);
        if count != required {
            return Err(DevicePluginError::Changed {
                pod: uid.to_owned(),
                container: container.to_owned(),
                resource: resource.to_owned(),
                from: count,
                to: required,
            });
        }
        let known = self.resources.get(resource).filter(|one| one.counts());
        let Some(known) = known else {
            return Err(DevicePluginError::Unregistered(resource.to_owned()));
        };
        let healthy = known.healthy();
        if healthy.is_empty() {
            return Err(DevicePluginError::NoneHealthy(resource.to_owned()));
        }
        if had.as_ref().is_some_and(|had| !had.is_subset(&healthy)) {
            return Err(DevicePluginError::NoLongerHealthy(resource.to_owned()));
        }
        if had.is_some() || required == 0 {
            return Ok(None);
        }
        let reusable = self.reusable(pod, container, resource);
        let reused: BTreeSet<String> = reusable.into_iter().take(required).collect();
        let free: BTreeSet<String> = &healthy - &self.used(resource, others);
        let needed = required - reused.len();
        if free.len() < needed {
            let (resource, free) = (resource.to_owned(), free.len());
            return Err(DevicePluginError::Unavailable { resource, needed, free });
        }
        Ok(Some(Room { required, reused, free }))
    }

    /// Takes devices for a container: first those of init containers, then preferred ones, then any.
    pub fn take(
        &mut self,
        pod: &Pod,
        container: &str,
        resource: &str,
        required: usize,
        preferred: &[String],
    ) -> Result<Vec<String>, DevicePluginError> {
        let Some(room) = self.room(pod, container, resource, required)? else { return Ok(vec![]) };
        let mut taken = room.reused;
        let preferred = preferred.iter().filter(|id| room.free.contains(*id));
        for id in preferred.chain(&room.free) {
            if taken.len() < required {
                taken.insert(id.clone());
            }
        }
        let mut devices: BTreeMap<i64, Vec<String>> = BTreeMap::new();
        for id in &taken {
            let near = self.resources[resource].devices.get(id).map(|one| one.nodes.clone());
            let near = near.filter(|nodes| !nodes.is_empty()).unwrap_or_else(|| vec![NO_NODE]);
            for node in near {
                devices.entry(node).or_default().push(id.clone());
            }
        }
        let of_pod = self.pods.entry(names::uid(pod).to_owned()).or_default();
        let of_container = of_pod.entry(container.to_owned()).or_default();
        of_container.insert(resource.to_owned(), Given { devices, answer: None });
        Ok(taken.into_iter().collect())
    }

    /// The free devices near these NUMA nodes, in the order in which they should be taken.
    /// Upstream: filterByAffinity.
    pub fn near(
        &self,
        resource: &str,
        free: &BTreeSet<String>,
        affinity: Option<Mask>,
    ) -> Vec<String> {
        let (Some(mask), Some(known)) = (affinity, self.resources.get(resource)) else {
            return vec![];
        };
        let mut out: Vec<(usize, String)> = vec![];
        for id in free {
            let nodes = known.devices.get(id).map(|one| one.mask()).unwrap_or_default();
            if nodes.and(mask).count() > 0 {
                // Devices near few other nodes first.
                out.push((nodes.count(), id.clone()));
            }
        }
        out.sort();
        out.into_iter().map(|(_, id)| id).collect()
    }

    /// Where the requested devices can come from. `container`: `None` for all of the pod's together.
    /// Upstream: `devicemanager/topology_hints.go`.
    pub fn hints(
        &self,
        nodes: &[usize],
        pod: &Pod,
        container: Option<&str>,
        asked: &[(String, usize)],
    ) -> Hints {
        let mut out = Hints::new();
        for (resource, required) in asked.iter().filter(|(_, required)| *required > 0) {
            let Some(known) = self.resources.get(resource).filter(|one| one.has_topology()) else {
                out.insert(resource.clone(), None);
                continue;
            };
            let had = container.and_then(|name| self.ids(names::uid(pod), name, resource));
            let list = match had {
                Some(had) if had.len() != *required => vec![],
                Some(had) => known.hints(nodes, &had, &BTreeSet::new(), *required),
                None => {
                    let reusable = container
                        .map(|name| self.reusable(pod, name, resource))
                        .unwrap_or_default();
                    let free = &known.healthy() - &self.used(resource, &BTreeSet::new());
                    match free.len() + reusable.len() < *required {
                        true => vec![],
                        false => known.hints(nodes, &free, &reusable, *required),
                    }
                }
            };
            out.insert(resource.clone(), Some(list));
        }
        out
    }

    /// Stores the plugin's answer; without one, the container loses the devices.
    pub fn answered(
        &mut self,
        pod: &str,
        container: &str,
        resource: &str,
        answer: Option<Allocated>,
    ) {
        let Some(of_pod) = self.pods.get_mut(pod) else { return };
        let Some(of) = of_pod.get_mut(container) else { return };
        if answer.is_some() {
            of.entry(resource.to_owned()).and_modify(|given| given.answer = answer);
            return;
        }
        of.remove(resource);
        of_pod.retain(|_, of| !of.is_empty());
        if of_pod.is_empty() {
            self.pods.remove(pod);
        }
    }

    /// Frees a pod's devices. True if it had any.
    pub fn forget(&mut self, pod: &str) -> bool {
        self.pods.remove(pod).is_some()
    }

    /// Frees the devices of all pods but these. True if there were any.
    pub fn keep_only(&mut self, pods: &BTreeSet<String>) -> bool {
        let before = self.pods.len();
        self.pods.retain(|uid, _| pods.contains(uid));
        before != self.pods.len()
    }

    /// Upstream: a device that its plugin no longer lists keeps its health.
    pub fn is_healthy(&self, resource: &str, id: &str) -> bool {
        let known = self.resources.get(resource).and_then(|one| one.devices.get(id));
        known.is_none_or(|device| device.is_healthy)
    }

    /// All healthy devices, by resource.
    pub fn healthy(&self) -> Vec<(&String, &String, &Device)> {
        let listed = self.resources.iter().filter(|(_, one)| one.is_listed);
        let all = listed.flat_map(|(name, one)| one.devices.iter().map(move |(i, d)| (name, i, d)));
        all.filter(|(_, _, device)| device.is_healthy).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    const RES: &str = "example.com/dongle";

    /// Devices a and b are near node 0, c is near node 1.
    #[test]
    fn hints_name_the_nodes_of_free_devices() {
        let mut table = Table::default();
        let one = |id: &str, node: i64| device(id, HEALTHY, &[node]);
        table.listed(RES, vec![one("a", 0), one("b", 0), one("c", 1)]);
        let owner: Pod = from_value(json!({"metadata": {"uid": "1"}, "spec": {"containers": []}}))
            .expect("a pod");
        let check = |table: &Table, container: &str, required: usize, expected: &[(u64, bool)]| {
            let asked = [(RES.to_owned(), required)];
            let mut all = table.hints(&[0, 1], &owner, Some(container), &asked);
            let list = all.remove(RES).flatten().expect("hints");
            let got: Vec<(u64, bool)> = list
                .iter()
                .map(|hint| (hint.affinity.expect("a mask").0, hint.is_preferred))
                .collect();
            assert_eq!(got, expected, "{required}");
        };
        check(&table, "x", 1, &[(1, true), (2, true), (3, false)]);
        check(&table, "x", 2, &[(1, true), (3, false)]);
        check(&table, "x", 3, &[(3, true)]);
        check(&table, "x", 4, &[]);
        let free = ["a", "b", "c"].map(str::to_owned).into();
        assert_eq!(table.near(RES, &free, Some(Mask(2))), ["c"]);
        assert_eq!(table.near(RES, &free, None), [""; 0]);
        table.take(&owner, "x", RES, 1, &["c".to_owned()]).expect("room");
        check(&table, "x", 1, &[(2, true), (3, false)]);
        check(&table, "y", 1, &[(1, true), (3, false)]);
    }

    fn device(id: &str, health: &str, nodes: &[i64]) -> messages::Device {
        let nodes = nodes.iter().map(|id| messages::NumaNode { id: *id }).collect();
        messages::Device {
            id: id.into(),
            health: health.into(),
            topology: Some(messages::Topology { nodes }),
        }
    }

    fn pod(uid: &str, inits: &[(&str, bool)], containers: &[&str]) -> Pod {
        let init = |(name, stays): &(&str, bool)| match stays {
            true => json!({"name": name, "restartPolicy": "Always"}),
            false => json!({"name": name}),
        };
        let inits: Vec<Value> = inits.iter().map(init).collect();
        let containers: Vec<Value> = containers.iter().map(|name| json!({"name": name})).collect();
        from_value(json!({"metadata": {"name": uid, "uid": uid},
            "spec": {"initContainers": inits, "containers": containers}}))
        .expect("a pod")
    }

    fn four() -> Table {
        let mut table = Table::default();
        let all = ["a", "b", "c", "d"].map(|id| device(id, HEALTHY, &[]));
        table.listed(RES, all.into());
        table
    }

    fn give(
        table: &mut Table,
        pod: &Pod,
        container: &str,
        count: usize,
        preferred: &[&str],
    ) -> Result<Vec<String>, DevicePluginError> {
        let preferred: Vec<String> = preferred.iter().map(|id| id.to_string()).collect();
        let taken = table.take(pod, container, RES, count, &preferred)?;
        if !taken.is_empty() {
            table.answered(names::uid(pod), container, RES, Some(Allocated::default()));
        }
        Ok(taken)
    }

    #[test]
    fn a_device_has_one_owner() {
        let mut table = four();
        let (first, second) = (pod("1", &[], &["x", "y"]), pod("2", &[], &["x"]));
        assert_eq!(give(&mut table, &first, "x", 2, &["d", "z"]).expect("room"), ["a", "d"]);
        assert_eq!(give(&mut table, &first, "y", 1, &["d"]).expect("room"), ["b"]);
        // A repeated request keeps the devices.
        assert_eq!(give(&mut table, &first, "x", 2, &[]), Ok(vec![]));
        let check = |table: &mut Table, container: &str, count: usize, why: &str| {
            let refused = give(table, &second, container, count, &[]).expect_err("no room");
            assert_eq!(refused.to_string(), why);
        };
        check(
            &mut table,
            "x",
            2,
            "requested number of devices unavailable for example.com/dongle. Requested: 2, Available: 1",
        );
        assert!(table.forget("1") && !table.forget("1"));
        assert_eq!(give(&mut table, &second, "x", 4, &[]).expect("room").len(), 4);
        check(
            &mut table,
            "x",
            3,
            "pod \"2\" container \"x\" changed request for resource \"example.com/dongle\" from 4 to 3",
        );
        // A plugin that refuses leaves no device taken.
        table.forget("2");
        table.take(&second, "x", RES, 4, &[]).expect("room");
        table.answered("2", "x", RES, None);
        assert_eq!(table.used(RES, &BTreeSet::new()).len(), 0);
    }

    #[test]
    fn devices_of_init_containers_are_reused() {
        let check = |inits: &[(&str, bool, usize)], count: usize, expected: &[&str]| {
            let mut table = four();
            let named: Vec<(&str, bool)> = inits.iter().map(|one| (one.0, one.1)).collect();
            let pod = pod("1", &named, &["x", "y"]);
            for (name, _, count) in inits {
                give(&mut table, &pod, name, *count, &[]).expect("room");
            }
            let taken = give(&mut table, &pod, "x", count, &[]).expect("room");
            assert_eq!(taken, expected, "{inits:?}");
        };
        check(&[("i", false, 2)], 1, &["a"]);
        check(&[("i", false, 2), ("j", false, 3)], 4, &["a", "b", "c", "d"]);
        // A sidecar keeps its devices.
        check(&[("i", true, 2)], 1, &["c"]);
        check(&[("i", false, 2), ("s", true, 1)], 2, &["b", "c"]);
    }

    #[test]
    fn plugins_connect_and_stop() {
        let now = Instant::now();
        let mut table = Table::default();
        let check = |table: &mut Table, after: u64, all: i64, healthy: i64| {
            let (amounts, _) = table.amounts(now + Duration::from_secs(after));
            assert_eq!((amounts.capacity[RES], amounts.allocatable[RES]), (all, healthy));
        };
        let list = vec![device("a", HEALTHY, &[]), device("b", "Unhealthy", &[])];
        let news = |record, amounts, health| News { record, amounts, health };
        assert_eq!(table.listed(RES, list.clone()), news(true, true, false), "no pod has them");
        check(&mut table, 0, 2, 1);
        let owner = pod("1", &[], &["x"]);
        assert_eq!(give(&mut table, &owner, "x", 1, &[]).expect("room"), ["a"]);
        assert_eq!(table.listed(RES, list), News::default(), "nothing changed");
        let ill = vec![device("a", "Unhealthy", &[])];
        assert_eq!(table.listed(RES, ill), news(true, true, true), "a pod's device is unhealthy");
        let refused = |table: &Table, expected: &str| {
            let other = pod("2", &[], &["x"]);
            let refused = table.room(&other, "x", RES, 1).expect_err("no device is healthy");
            assert_eq!(refused.to_string(), format!("{expected} {RES}"));
        };
        refused(&table, "no healthy devices present; cannot allocate unhealthy devices");
        table.listed(RES, vec![device("b", HEALTHY, &[])]);
        let lost = DevicePluginError::NoLongerHealthy(RES.to_owned());
        assert_eq!(table.room(&owner, "x", RES, 1), Err(lost));
        table.stopped(RES, now);
        check(&mut table, 300, 1, 0);
        table.connected(RES);
        check(&mut table, 900, 1, 0);
        table.stopped(RES, now);
        table.stopped(RES, now + Duration::from_secs(200));
        check(&mut table, 301, 0, 0);
        table.told(|_| false);
        check(&mut table, 302, 0, 0);
        table.told(|name| name == RES);
        assert_eq!(table.amounts(now).0, Amounts::default(), "others may report the amount");
        assert!(table.is_known(RES), "a pod has one");
        refused(&table, "cannot allocate unregistered device");
        table.forget("1");
        assert!(!table.is_known(RES));
    }

    #[test]
    fn a_restarted_kubelet_knows_the_allocations() {
        let mut table = four();
        let owner = pod("1", &[], &["x"]);
        give(&mut table, &owner, "x", 2, &[]).expect("room");
        let names = table.registered().into_keys().collect();
        let mut table = Table::restored(names, table.pods.clone(), Instant::now());
        let (amounts, _) = table.amounts(Instant::now());
        assert_eq!((amounts.capacity[RES], amounts.allocatable[RES]), (0, 0));
        table.listed(RES, ["a", "b", "c"].map(|id| device(id, HEALTHY, &[])).into());
        assert_eq!(give(&mut table, &pod("2", &[], &["x"]), "x", 1, &[]).expect("room"), ["c"]);
        assert_eq!(table.room(&owner, "x", RES, 2), Ok(None));
        assert!(table.keep_only(&["2".to_owned()].into()));
        assert_eq!(table.used(RES, &BTreeSet::new()), ["c".to_owned()].into());
        assert!(table.used(RES, &["2".to_owned()].into()).is_empty());
    }

    #[test]
    fn devices_have_numa_nodes() {
        let mut table = Table::default();
        table.listed(RES, vec![device("a", HEALTHY, &[0, 1]), device("b", HEALTHY, &[])]);
        give(&mut table, &pod("1", &[], &["x"]), "x", 2, &[]).expect("room");
        let given: Vec<_> = table.of_container("1", "x").map(|(_, g)| g.devices.clone()).collect();
        let at = |node: i64, id: &str| (node, vec![id.to_owned()]);
        assert_eq!(given, [[at(-1, "b"), at(0, "a"), at(1, "a")].into()]);
    }
}
