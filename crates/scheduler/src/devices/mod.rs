//! Which devices claims get: dynamic resource allocation with structured parameters.
//!
//! ```text
//!  slices ─► pools (per node: complete? valid? counters left) ─┐
//!  claims, classes ─► plans (what is asked for) ───────────────┴► search ─► allocations
//! ```
//!
//! In: drivers' ResourceSlices, allocated devices, a node, claims. Out: an allocation for each claim, or none
//! for any. Upstream: `k8s.io/dynamic-resource-allocation/structured`.
//!
//! Invariants: pure; the same question has the same answer (pools by name, slices by name, devices in
//! their order; the first solution is it), unless time ran out; the search is bounded by [`Limit`].

mod capacity;
mod outcome;
mod plan;
mod pools;
mod search;
mod selectors;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim, ResourceSlice};
use machinery::quantity::Amount;

pub use outcome::score;
pub use selectors::Selectors;

/// The maximum number of results of one claim. Upstream: `AllocationResultsMaxSize`.
const MOST_RESULTS: usize = 32;
/// The number of devices that the search tries for one node, unless the configuration sets a timeout:
/// a long search delays all other pods.
const MOST_STEPS: usize = 100_000;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceId {
    pub driver: String,
    pub pool: String,
    pub device: String,
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.driver, self.pool, self.device)
    }
}

/// Capacities by name.
pub type Consumed = BTreeMap<String, Amount>;

/// The devices that claims already have.
#[derive(Clone, Debug, Default)]
pub struct Taken {
    whole: BTreeSet<DeviceId>,
    /// Devices that several claims have, with what of their capacity is gone.
    shared: BTreeMap<DeviceId, Consumed>,
}

impl Taken {
    pub fn add(&mut self, allocation: &AllocationResult) {
        let results =
            allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten());
        for result in results {
            // Admin access does not allocate the device.
            if result.admin_access == Some(true) {
                continue;
            }
            let id = DeviceId {
                driver: result.driver.clone(),
                pool: result.pool.clone(),
                device: result.device.clone(),
            };
            if result.share_id.is_none() {
                self.whole.insert(id);
                continue;
            }
            let consumed = self.shared.entry(id).or_default();
            for (name, quantity) in result.consumed_capacity.iter().flatten() {
                let sum = consumed.entry(name.clone()).or_default();
                *sum = *sum + capacity::amount(quantity);
            }
        }
    }

    fn has(&self, id: &DeviceId) -> bool {
        self.whole.contains(id) || self.shared.contains_key(id)
    }
}

/// The devices that can be allocated.
#[derive(Clone, Debug, Default)]
pub struct World {
    pub slices: Vec<Arc<ResourceSlice>>,
    pub classes: BTreeMap<String, Arc<DeviceClass>>,
    pub taken: Taken,
}

/// How long is looked for devices on one node.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    /// Devices that are looked at.
    pub steps: usize,
    pub time: Option<Duration>,
}

impl Default for Limit {
    /// Upstream: ten seconds, and as many devices as that is enough for.
    fn default() -> Self {
        Self { steps: MOST_STEPS, time: Some(Duration::from_secs(10)) }
    }
}

impl Limit {
    /// From the configuration file; `None`: no timeout.
    pub fn of(time: Option<Duration>) -> Self {
        Self { steps: usize::MAX, time }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    pub node: &'a str,
    pub labels: &'a BTreeMap<String, String>,
    pub limit: Limit,
}

/// Why it cannot be told whether claims can be allocated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// A claim or a class is wrong, whichever node it is.
    #[error("{0}")]
    Broken(String),
    /// The pools of this node.
    #[error("invalid resource pools were encountered")]
    InvalidPools,
    #[error("timed out trying to allocate devices")]
    Exhausted,
}

/// `ns/name`
fn title(claim: &ResourceClaim) -> String {
    let meta = &claim.metadata;
    let name = meta.name.as_deref().unwrap_or_default();
    meta.namespace.as_deref().map_or(name.to_owned(), |namespace| format!("{namespace}/{name}"))
}

/// An allocation for each claim, in their order; `None`: there is none for all of them on this node.
pub fn allocate(
    world: &World,
    place: Place<'_>,
    claims: &[Arc<ResourceClaim>],
    selectors: &Selectors,
) -> Result<Option<Vec<AllocationResult>>, Failure> {
    let offer = pools::gather(&world.slices, place, &world.taken);
    let plans = claims.iter().map(|claim| plan::plan(claim, &world.classes));
    let plans: Vec<_> = plans.collect::<Result<_, _>>()?;
    let Some(solution) = search::search(&offer, &plans, &world.taken, place, selectors)? else {
        let is_invalid = offer.pools.iter().any(|pool| pool.state == pools::State::Invalid);
        return if is_invalid { Err(Failure::InvalidPools) } else { Ok(None) };
    };
    let results = plans.iter().zip(solution);
    results
        .map(|(plan, one)| outcome::result(plan, one, &offer, place))
        .collect::<Result<_, _>>()
        .map(Some)
}
