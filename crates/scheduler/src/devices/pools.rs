//! The pools of devices of a node that are complete and valid.
//!
//! A pool's slices may be many; while they are replaced, some are old or missing. Only devices of complete
//! pools are allocated. Upstream: `GatherPools`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::NodeSelector;
use k8s_openapi::api::resource::v1::{Device, DeviceCounterConsumption, ResourceSlice};
use machinery::quantity::Amount;

use super::{DeviceId, Place, Taken, capacity};
use api::node_selectors;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Ready,
    /// Slices are missing.
    Incomplete,
    Invalid,
}

/// Counters by set and name.
pub type Counters = BTreeMap<(String, String), Amount>;

pub struct Pool {
    pub driver: String,
    pub name: String,
    pub state: State,
    /// The remaining shared counters of the pool.
    pub counters: Counters,
}

/// A device of a pool that is ready.
pub struct Candidate<'a> {
    pub id: DeviceId,
    pub device: &'a Device,
    pub slice: &'a ResourceSlice,
    pub pool: usize,
}

#[derive(Default)]
pub struct Offer<'a> {
    pub pools: Vec<Pool>,
    /// In the order in which they are tried.
    pub candidates: Vec<Candidate<'a>>,
}

/// Is something for this node?
pub fn is_for(
    place: Place<'_>,
    name: Option<&str>,
    all: Option<bool>,
    nodes: Option<&NodeSelector>,
) -> bool {
    match name.filter(|name| !name.is_empty()) {
        Some(name) => name == place.node,
        None if all == Some(true) => true,
        None => nodes.is_some_and(|nodes| node_selectors::matches(nodes, place.node, place.labels)),
    }
}

pub fn device_is_for(place: Place<'_>, device: &Device) -> bool {
    let name = device.node_name.as_deref();
    is_for(place, name, device.all_nodes, device.node_selector.as_ref())
}

fn devices(slice: &ResourceSlice) -> impl Iterator<Item = &Device> {
    slice.spec.devices.iter().flatten()
}

fn has_counters(slice: &ResourceSlice) -> bool {
    slice.spec.shared_counters.as_ref().is_some_and(|sets| !sets.is_empty())
}

/// Slices with counters always are: without them the pool's devices cannot be judged.
fn is_relevant(slice: &ResourceSlice, place: Place<'_>) -> bool {
    let spec = &slice.spec;
    if has_counters(slice) {
        return true;
    }
    if spec.per_device_node_selection == Some(true) {
        return devices(slice).any(|device| device_is_for(place, device));
    }
    is_for(place, spec.node_name.as_deref(), spec.all_nodes, spec.node_selector.as_ref())
}

pub fn gather<'a>(slices: &'a [Arc<ResourceSlice>], place: Place<'_>, taken: &Taken) -> Offer<'a> {
    let mut found: BTreeMap<(&str, &str), Vec<&ResourceSlice>> = BTreeMap::new();
    for slice in slices.iter().filter(|slice| is_relevant(slice, place)) {
        let (driver, pool) = (slice.spec.driver.as_str(), &slice.spec.pool);
        let known = found.entry((driver, pool.name.as_str())).or_default();
        let newest = known.first().map_or(i64::MIN, |first| first.spec.pool.generation);
        if pool.generation > newest {
            known.clear();
        }
        if pool.generation >= newest {
            known.push(slice);
        }
    }
    let mut offer = Offer::default();
    let mut built: Vec<_> =
        found.into_values().filter_map(|mine| build(mine, slices, taken)).collect();
    // Devices that are not at hand at once are the last choice; sorting keeps the order otherwise.
    built.sort_by_key(|(_, mine)| mine.iter().any(|slice| waits(slice)));
    for (pool, mine) in built {
        let at = offer.pools.len();
        if pool.state == State::Ready {
            for slice in mine {
                offer.candidates.extend(devices(slice).map(|device| Candidate {
                    id: id_of(slice, device),
                    device,
                    slice,
                    pool: at,
                }));
            }
        }
        offer.pools.push(pool);
    }
    offer
}

fn waits(slice: &ResourceSlice) -> bool {
    devices(slice).any(|device| device.binding_conditions.is_some())
}

fn id_of(slice: &ResourceSlice, device: &Device) -> DeviceId {
    DeviceId {
        driver: slice.spec.driver.clone(),
        pool: slice.spec.pool.name.clone(),
        device: device.name.clone(),
    }
}

/// `None`: a newer generation is on its way.
fn build<'a>(
    mut mine: Vec<&'a ResourceSlice>,
    all: &'a [Arc<ResourceSlice>],
    taken: &Taken,
) -> Option<(Pool, Vec<&'a ResourceSlice>)> {
    let first = &mine[0].spec;
    let wanted = usize::try_from(first.pool.resource_slice_count).unwrap_or_default();
    let generation = first.pool.generation;
    let mut pool = Pool {
        driver: first.driver.clone(),
        name: first.pool.name.clone(),
        state: State::Ready,
        counters: Counters::new(),
    };
    mine.sort_unstable_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    let mut rest: Vec<&ResourceSlice> = vec![];
    if mine.len() != wanted {
        let of_pool = |slice: &&ResourceSlice| {
            slice.spec.driver == pool.driver && slice.spec.pool.name == pool.name
        };
        let others = all.iter().map(|slice| &**slice).filter(of_pool);
        if others.clone().any(|slice| slice.spec.pool.generation > generation) {
            return None;
        }
        let mut whole = others.filter(|slice| slice.spec.pool.generation == generation);
        if whole.clone().count() != wanted {
            pool.state = State::Incomplete;
            return Some((pool, mine));
        }
        rest =
            whole.by_ref().filter(|one| !mine.iter().any(|own| std::ptr::eq(*own, *one))).collect();
    }
    match counters_left(&mine, &rest, taken) {
        Some(counters) if names_differ(&mine) => pool.counters = counters,
        _ => pool.state = State::Invalid,
    }
    Some((pool, mine))
}

fn names_differ(slices: &[&ResourceSlice]) -> bool {
    let mut seen = BTreeSet::new();
    slices.iter().flat_map(|slice| devices(slice)).all(|device| seen.insert(&device.name))
}

/// Each counter that a device takes of.
pub fn consumption(device: &Device) -> impl Iterator<Item = ((String, String), Amount)> {
    let of_set = |one: &DeviceCounterConsumption| {
        let set = one.counter_set.clone();
        let each = one.counters.clone().into_iter();
        each.map(move |(name, counter)| ((set.clone(), name), capacity::amount(&counter.value)))
    };
    device.consumes_counters.iter().flatten().flat_map(of_set)
}

/// `None`: a counter set exists twice, or devices consume counters that do not exist.
fn counters_left(
    mine: &[&ResourceSlice],
    rest: &[&ResourceSlice],
    taken: &Taken,
) -> Option<Counters> {
    let mut left = Counters::new();
    let mut sets = BTreeSet::new();
    for set in mine.iter().flat_map(|slice| slice.spec.shared_counters.iter().flatten()) {
        if !sets.insert(&set.name) {
            return None;
        }
        for (name, counter) in &set.counters {
            left.insert((set.name.clone(), name.clone()), capacity::amount(&counter.value));
        }
    }
    for slice in mine.iter().chain(rest) {
        for device in devices(slice) {
            let is_taken = taken.has(&id_of(slice, device));
            for (counter, amount) in consumption(device) {
                let there = left.get_mut(&counter)?;
                if is_taken {
                    *there = *there - amount;
                }
            }
        }
    }
    Some(left)
}
