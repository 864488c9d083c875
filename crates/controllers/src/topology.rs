//! Hints for `service.kubernetes.io/topology-mode: Auto`: endpoints are given to zones by the zones' CPUs.
//!
//! In: Nodes (zone, allocatable CPU), the slices of a Service in one family. Out: a zone for each ready endpoint,
//! or the reason why there are none. Pure.
//! Upstream: `k8s.io/endpointslice/topologycache`: the same threshold, texts and order of steps.
//!
//! Invariant: slices that did not change keep their hints while these leave each zone its share, because every
//! node watches slices. Cost: a Node changes two sums; a Service costs its endpoints.

use std::collections::{BTreeMap, HashMap};

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointHints, EndpointSlice, ForZone};
use machinery::quantity;

use crate::node_lifecycle::ready_status;

/// How much more than its share of the traffic an endpoint may get.
const OVERLOAD: f64 = 0.2;
const ZONE: &str = "topology.kubernetes.io/zone";
/// Nodes with these labels do not count.
const EXCLUDED: [&str; 2] =
    ["node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"];

/// The endpoints that are hinted to each zone.
pub type Zones = BTreeMap<String, usize>;
/// The zones' shares of all CPUs.
pub type Ratios = BTreeMap<String, f64>;

/// Why a Service gets no hints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Disabled {
    #[error(
        "Insufficient Node information: allocatable CPU or zone not specified on one or more nodes"
    )]
    NodeInfo,
    #[error("Insufficient number of endpoints ({0} endpoints, {1} zones)")]
    TooFew(usize, usize),
    #[error(
        "Unable to allocate minimum required endpoints to each zone without exceeding overload threshold ({0} endpoints, {1} zones)"
    )]
    Overload(usize, usize),
    #[error("One or more endpoints do not have a zone specified")]
    NoZone,
}

/// The CPUs of the zones.
#[derive(Debug, Default)]
pub struct Capacity {
    nodes: HashMap<Box<str>, Share>,
    by_zone: BTreeMap<String, i64>,
    /// The number of nodes without a zone or without CPUs.
    incomplete: usize,
}

/// A ready Node's zone and CPUs, in thousandths; `None` if it lacks one of them.
type Share = Option<(String, i64)>;

impl Capacity {
    /// Notes a Node, or that it is gone. Returns whether that changes the shares.
    pub fn set(&mut self, name: &str, node: Option<&Node>) -> bool {
        let new = node.and_then(share);
        let old = match new.clone() {
            Some(new) => self.nodes.insert(name.into(), new),
            None => self.nodes.remove(name),
        };
        if old == new {
            return false;
        }
        match old {
            Some(Some((zone, millis))) => self.add(zone, -millis),
            Some(None) => self.incomplete -= 1,
            None => {}
        }
        match new {
            Some(Some((zone, millis))) => self.add(zone, millis),
            Some(None) => self.incomplete += 1,
            None => {}
        }
        true
    }

    fn add(&mut self, zone: String, millis: i64) {
        let sum = self.by_zone.entry(zone.clone()).or_default();
        *sum += millis;
        if *sum == 0 {
            self.by_zone.remove(&zone);
        }
    }

    /// `None` if they are not known, or with fewer than two zones.
    pub fn ratios(&self) -> Option<Ratios> {
        if self.incomplete > 0 || self.by_zone.len() < 2 {
            return None;
        }
        let total: i64 = self.by_zone.values().sum();
        let ratio = |millis: &i64| *millis as f64 / total as f64;
        Some(self.by_zone.iter().map(|(zone, millis)| (zone.clone(), ratio(millis))).collect())
    }
}

/// `None` for a Node that does not count.
fn share(node: &Node) -> Option<Share> {
    let labels = node.metadata.labels.as_ref();
    let label = |name: &str| labels.and_then(|labels| labels.get(name));
    if EXCLUDED.iter().any(|name| label(name).is_some()) || ready_status(node) != "True" {
        return None;
    }
    let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
    let millis = allocatable.and_then(|all| all.get("cpu")).map_or(0, quantity::milli);
    let zone = label(ZONE).filter(|zone| !zone.is_empty());
    Some(zone.filter(|_| millis > 0).map(|zone| (zone.clone(), millis)))
}

/// Whether a zone has too few of the endpoints. Upstream: `serviceOverloaded`.
pub fn is_overloaded(zones: &Zones, ratios: Option<&Ratios>) -> bool {
    let total: usize = zones.values().sum();
    if total == 0 {
        return false;
    }
    let Some(ratios) = ratios else { return true };
    ratios.iter().any(|(zone, ratio)| {
        zones.get(zone).copied().unwrap_or_default() < minimum(total as f64 * ratio)
    })
}

fn minimum(desired: f64) -> usize {
    (desired * (1.0 / (1.0 + OVERLOAD))).ceil() as usize
}

#[derive(Clone, Copy, Debug)]
struct Allocation {
    maximum: usize,
    desired: f64,
}

fn allocations(count: usize, ratios: &Ratios) -> Result<BTreeMap<&str, Allocation>, Disabled> {
    if ratios.len() > count {
        return Err(Disabled::TooFew(count, ratios.len()));
    }
    let of = |ratio: &f64| (minimum(ratio * count as f64), ratio * count as f64);
    let all: BTreeMap<&str, (usize, f64)> =
        ratios.iter().map(|(zone, ratio)| (zone.as_str(), of(ratio))).collect();
    let needed: usize = all.values().map(|(minimum, _)| minimum).sum();
    let Some(spare) = count.checked_sub(needed) else {
        return Err(Disabled::Overload(count, ratios.len()));
    };
    let allocation = |(minimum, desired): (usize, f64)| Allocation {
        maximum: minimum + spare,
        desired: desired.max(minimum as f64),
    };
    Ok(all.into_iter().map(|(zone, one)| (zone, allocation(one))).collect())
}

/// Sets the hints of the slices of one family. A slice with `true` did not change otherwise: its hints stay if
/// they are good. Upstream: `AddHints`.
pub fn spread(
    slices: &mut [(&mut EndpointSlice, bool)],
    ratios: Option<&Ratios>,
) -> Result<Zones, Disabled> {
    let zones = spread_or_not(slices, ratios);
    if zones.is_err() {
        for endpoint in slices.iter_mut().flat_map(|(slice, _)| endpoints(slice)) {
            endpoint.hints = None;
        }
    }
    zones
}

fn spread_or_not(
    slices: &mut [(&mut EndpointSlice, bool)],
    ratios: Option<&Ratios>,
) -> Result<Zones, Disabled> {
    let all = slices.iter().flat_map(|(slice, _)| slice.endpoints.iter().flatten());
    let count = all.filter(|endpoint| is_ready_endpoint(endpoint)).count();
    let ratios = ratios.ok_or(Disabled::NodeInfo)?;
    let allocations = allocations(count, ratios)?;
    let mut zones = Zones::new();
    for (slice, is_unchanged) in slices.iter_mut().filter(|(_, is_unchanged)| *is_unchanged) {
        match kept(slice, &zones, &allocations) {
            Some(kept) => {
                kept.into_iter().for_each(|(zone, n)| *zones.entry(zone).or_default() += n)
            }
            None => *is_unchanged = false,
        }
    }
    let open = slices.iter_mut().filter(|(_, is_unchanged)| !is_unchanged);
    let mut open: Vec<&mut Endpoint> = open.flat_map(|(slice, _)| endpoints(slice)).collect();
    for endpoint in &mut open {
        endpoint.hints = None;
        if is_ready_endpoint(endpoint) {
            let zone = endpoint.zone.clone().filter(|zone| !zone.is_empty());
            let zone = zone.ok_or(Disabled::NoZone)?;
            *zones.entry(zone.clone()).or_default() += 1;
            endpoint.hints = hint(zone);
        }
    }
    redistribute(&mut open, &allocations, &mut zones);
    Ok(zones)
}

/// The endpoints by hinted zone of an unchanged slice; `None` if its hints cannot stay.
/// Upstream: `getHintsByZone`.
fn kept(
    slice: &EndpointSlice,
    zones: &Zones,
    allocations: &BTreeMap<&str, Allocation>,
) -> Option<Zones> {
    let mut found = Zones::new();
    for endpoint in slice.endpoints.iter().flatten().filter(|one| is_ready_endpoint(one)) {
        let hinted = endpoint.hints.as_ref().and_then(|hints| hints.for_zones.as_ref());
        for zone in hinted.filter(|zones| !zones.is_empty())? {
            *found.entry(zone.name.clone()).or_default() += 1;
        }
    }
    let fits = |(zone, count): (&String, &usize)| {
        let already = zones.get(zone).copied().unwrap_or_default();
        allocations.get(zone.as_str()).is_some_and(|one| count + already <= one.maximum)
    };
    found.iter().all(fits).then_some(found)
}

/// Moves endpoints from zones with too many to zones with too few.
fn redistribute(
    open: &mut [&mut Endpoint],
    allocations: &BTreeMap<&str, Allocation>,
    zones: &mut Zones,
) {
    let (mut giving, mut receiving) = exchanges(allocations, zones);
    for endpoint in open.iter_mut().filter(|endpoint| is_ready_endpoint(endpoint)) {
        let Some(from) = endpoint.zone.clone() else { continue };
        let Some(gives) = giving.get_mut(&from).filter(|left| **left > 0) else { continue };
        let Some((to, takes)) = receiving.iter_mut().find(|(_, left)| **left > 0) else { return };
        *gives -= 1;
        *takes -= 1;
        *zones.entry(from).or_default() -= 1;
        *zones.entry(to.clone()).or_default() += 1;
        endpoint.hints = hint(to.clone());
    }
}

/// The endpoints that each zone gives and receives. Upstream: `getGivingAndReceivingZones`.
fn exchanges(allocations: &BTreeMap<&str, Allocation>, zones: &Zones) -> (Zones, Zones) {
    let (mut gives, mut takes) = (BTreeMap::new(), BTreeMap::new());
    for (zone, allocation) in allocations {
        let has = zones.get(*zone).copied().unwrap_or_default() as f64;
        let surplus = has - allocation.desired;
        if surplus > 0.0 {
            gives.insert((*zone).to_owned(), surplus);
        } else if surplus < 0.0 {
            takes.insert((*zone).to_owned(), -surplus);
        }
    }
    let (mut giving, mut receiving) = (Zones::new(), Zones::new());
    while let (Some((from, more)), Some((to, less))) = (most(&gives), most(&takes)) {
        if (more < 1.0 && less < 1.0) || more < 0.5 || less < 0.5 {
            break;
        }
        gives.insert(from.clone(), more - 1.0);
        takes.insert(to.clone(), less - 1.0);
        *giving.entry(from).or_default() += 1;
        *receiving.entry(to).or_default() += 1;
    }
    (giving, receiving)
}

fn most(zones: &BTreeMap<String, f64>) -> Option<(String, f64)> {
    let most = zones.iter().max_by(|a, b| a.1.total_cmp(b.1))?;
    Some((most.0.clone(), *most.1))
}

fn hint(zone: String) -> Option<EndpointHints> {
    Some(EndpointHints { for_zones: Some(vec![ForZone { name: zone }]), for_nodes: None })
}

fn endpoints(slice: &mut EndpointSlice) -> impl Iterator<Item = &mut Endpoint> {
    slice.endpoints.iter_mut().flatten()
}

fn is_ready_endpoint(endpoint: &Endpoint) -> bool {
    endpoint.conditions.as_ref().and_then(|conditions| conditions.ready) == Some(true)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn ratios(cpus: &[(&str, i64)]) -> Option<Ratios> {
        let mut capacity = Capacity::default();
        for (zone, cpu) in cpus {
            let labels = if zone.is_empty() { json!({}) } else { json!({(ZONE): zone}) };
            assert!(capacity.set(&format!("n-{zone}"), Some(&node(labels, *cpu, "True"))));
        }
        capacity.ratios()
    }

    fn node(labels: Value, cpu: i64, ready: &str) -> Node {
        let node = json!({"metadata": {"name": "n", "labels": labels}, "status": {
            "allocatable": {"cpu": cpu.to_string()},
            "conditions": [{"type": "Ready", "status": ready}]}});
        from_value(node).expect("a Node")
    }

    /// Endpoints by their zone; `!` in front: not ready.
    fn slice(zones: &[&str]) -> EndpointSlice {
        let endpoint = |text: &&str| {
            let zone = text.trim_start_matches('!');
            json!({"addresses": [], "conditions": {"ready": !text.starts_with('!')},
                "zone": (!zone.is_empty()).then_some(zone)})
        };
        let endpoints: Vec<_> = zones.iter().map(endpoint).collect();
        let slice = json!({"addressType": "IPv4", "endpoints": endpoints});
        from_value(slice).expect("a slice")
    }

    fn hinted(slice: &EndpointSlice) -> String {
        let zone = |endpoint: &Endpoint| {
            let zones = endpoint.hints.as_ref().and_then(|hints| hints.for_zones.clone());
            zones.map_or("-".to_owned(), |zones| zones[0].name.clone())
        };
        slice.endpoints.iter().flatten().map(zone).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn endpoints_are_spread_by_cpus() {
        let check = |cpus: &[(&str, i64)], zones: &[&str], expected: &str| {
            let mut slice = slice(zones);
            let outcome = spread(&mut [(&mut slice, false)], ratios(cpus).as_ref());
            let found = outcome.map_or_else(|why| why.to_string(), |_| hinted(&slice));
            assert_eq!(found, expected, "{cpus:?} {zones:?}");
        };
        let even: &[(&str, i64)] = &[("a", 4), ("b", 4)];
        check(even, &["a", "b"], "a b");
        check(even, &["a", "a"], "b a");
        check(even, &["a", "a", "b", "b", "!b"], "a a b b -");
        check(even, &["a", "a", "a", "b"], "b a a b");
        check(&[("a", 6), ("b", 2)], &["a", "b", "b", "b"], "a a a b");
        check(even, &["a"], "Insufficient number of endpoints (1 endpoints, 2 zones)");
        let overload = "Unable to allocate minimum required endpoints to each zone without exceeding overload threshold (3 endpoints, 3 zones)";
        check(&[("a", 8), ("b", 1), ("c", 1)], &["a", "b", "c"], overload);
        check(even, &["a", ""], "One or more endpoints do not have a zone specified");
        let unknown = "Insufficient Node information: allocatable CPU or zone not specified on one or more nodes";
        check(&[("a", 4)], &["a", "a"], unknown);
        check(&[("a", 4), ("b", 4), ("", 4)], &["a", "b"], unknown);
        check(&[("a", 4), ("b", 0)], &["a", "b"], unknown);
    }

    #[test]
    fn good_hints_of_unchanged_slices_stay() {
        let ratios = ratios(&[("a", 4), ("b", 4)]);
        let (mut old, mut new) = (slice(&["a", "a"]), slice(&["b", "b"]));
        let zones = spread(&mut [(&mut old, false)], ratios.as_ref()).expect("hints");
        assert_eq!(hinted(&old), "b a");
        assert!(!is_overloaded(&zones, ratios.as_ref()));
        assert!(is_overloaded(&zones, None));
        let zones = spread(&mut [(&mut old, true), (&mut new, false)], ratios.as_ref());
        assert_eq!((hinted(&old).as_str(), hinted(&new).as_str()), ("b a", "a b"));
        assert_eq!(zones.expect("hints").values().sum::<usize>(), 4);
        // Without enough endpoints nobody has hints.
        old.endpoints.as_mut().expect("there").truncate(1);
        assert!(spread(&mut [(&mut old, true)], ratios.as_ref()).is_err());
        assert_eq!(hinted(&old), "-");
    }

    #[test]
    fn sums_follow_the_nodes() {
        let mut capacity = Capacity::default();
        let of = |zone: &str, cpu, ready| node(json!({(ZONE): zone}), cpu, ready);
        capacity.set("a", Some(&of("a", 1, "True")));
        capacity.set("b", Some(&of("b", 3, "True")));
        let expected = Ratios::from([("a".into(), 0.25), ("b".into(), 0.75)]);
        assert_eq!(capacity.ratios(), Some(expected.clone()));
        assert!(!capacity.set("b", Some(&of("b", 3, "True"))));
        let master = json!({(ZONE): "a", (EXCLUDED[0]): ""});
        assert!(!capacity.set("c", Some(&node(master, 9, "True"))));
        assert!(capacity.set("d", Some(&node(json!({}), 9, "True"))));
        assert_eq!(capacity.ratios(), None, "a node without a zone");
        assert!(capacity.set("d", Some(&of("a", 9, "False"))));
        assert_eq!(capacity.ratios(), Some(expected));
        assert!(capacity.set("b", None));
        assert_eq!(capacity.ratios(), None, "one zone");
    }
}
