//! The search: for each claim, request and device in turn the first candidate that will do; where
//! that leads nowhere, the next.
//!
//! Within a request only combinations are tried, no permutations: the next device is looked for
//! behind the last. Upstream: `allocateOne`.

use std::collections::{BTreeSet, HashMap};

use k8s_openapi::api::resource::v1::{DeviceAttribute, DeviceConstraint, DeviceTaint};
use tokio::time::Instant;

use super::capacity::{self, Wanted};
use super::plan::{Ask, Plan};
use super::pools::{self, Counters, Offer, State};
use super::selectors::Selectors;
use super::{Consumed, DeviceId, Failure, MOST_RESULTS, Place, Taken};

/// A device that was given to a request.
pub struct Chosen {
    /// Its place among the candidates.
    pub candidate: usize,
    pub request: usize,
    pub ask: usize,
    /// Set if others may have the device too.
    pub consumed: Option<Wanted>,
}

/// The allocation of one claim.
pub struct Solution {
    pub chosen: Vec<Chosen>,
    /// Which way each request went.
    pub picked: Vec<usize>,
}

/// Why a branch ends that is neither good nor bad.
enum Stop {
    /// The claim would get more devices than it may.
    TooMany,
    Failed(Failure),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct At {
    claim: usize,
    request: usize,
    ask: usize,
}

struct Search<'a> {
    offer: &'a Offer<'a>,
    plans: &'a [Plan<'a>],
    taken: &'a Taken,
    place: Place<'a>,
    selectors: &'a Selectors,
    /// Whether a device fits a request does not depend on the other choices.
    selected: HashMap<(At, usize), bool>,
    /// The candidates of those that ask for all.
    all: HashMap<At, Vec<usize>>,
    solutions: Vec<Solution>,
    steps: usize,
    /// When it is given up.
    deadline: Option<Instant>,
}

/// Steps between two looks at the clock.
const BREATH: usize = 256;

pub fn search<'a>(
    offer: &'a Offer<'a>,
    plans: &'a [Plan<'a>],
    taken: &'a Taken,
    place: Place<'a>,
    selectors: &'a Selectors,
) -> Result<Option<Vec<Solution>>, Failure> {
    let empty = |plan: &Plan<'_>| Solution { chosen: vec![], picked: vec![0; plan.requests.len()] };
    let mut search = Search {
        offer,
        plans,
        taken,
        place,
        selectors,
        selected: HashMap::new(),
        all: HashMap::new(),
        solutions: plans.iter().map(empty).collect(),
        steps: 0,
        deadline: place.limit.time.map(|time| Instant::now() + time),
    };
    search.prepare()?;
    match search.request(0, 0) {
        Ok(true) => Ok(Some(search.solutions)),
        Ok(false) | Err(Stop::TooMany) => Ok(None),
        Err(Stop::Failed(failure)) => Err(failure),
    }
}

impl<'a> Search<'a> {
    fn ask(&self, at: At) -> &'a Ask {
        &self.plans[at.claim].requests[at.request].asks[at.ask]
    }

    fn count(&self, at: At) -> usize {
        let all = || self.all.get(&at).map_or(0, Vec::len);
        self.ask(at).count.unwrap_or_else(all)
    }

    /// Counts the devices of requests for all, and refuses requests that exceed the limit.
    fn prepare(&mut self) -> Result<(), Failure> {
        let plans = self.plans;
        for (claim, plan) in plans.iter().enumerate() {
            let mut least = 0usize;
            for (request, one) in plan.requests.iter().enumerate() {
                let mut fewest = usize::MAX;
                for ask in 0..one.asks.len() {
                    let at = At { claim, request, ask };
                    if self.ask(at).count.is_none() {
                        let all = self.all_of(at)?;
                        self.all.insert(at, all);
                    }
                    fewest = fewest.min(self.count(at));
                }
                least = least.saturating_add(fewest);
            }
            if least > MOST_RESULTS {
                let title = &plan.title;
                return Err(Failure::Broken(format!(
                    "claim {title}: number of requested devices {least} exceeds the claim limit of {MOST_RESULTS}"
                )));
            }
        }
        Ok(())
    }

    fn all_of(&mut self, at: At) -> Result<Vec<usize>, Failure> {
        let ask = self.ask(at);
        for pool in &self.offer.pools {
            let state = match pool.state {
                State::Ready => continue,
                State::Incomplete => "being updated",
                State::Invalid => "invalid",
            };
            let (title, name) = (&self.plans[at.claim].title, ask.short_name());
            let pool = format!("{}/{}", pool.driver, pool.name);
            return Err(Failure::Broken(format!(
                "claim {title}, request {name}: asks for all devices, but resource pool {pool} is currently {state}"
            )));
        }
        let mut found = vec![];
        for candidate in 0..self.offer.candidates.len() {
            if self.is_selected(at, candidate)? && self.suffices(ask, candidate) {
                found.push(candidate);
            }
        }
        Ok(found)
    }

    /// This request of this claim, and all behind it.
    fn request(&mut self, claim: usize, request: usize) -> Result<bool, Stop> {
        let plans = self.plans;
        let Some(plan) = plans.get(claim) else { return Ok(true) };
        let Some(one) = plan.requests.get(request) else {
            // Another way of an earlier claim may leave this one what it needs.
            return match self.request(claim + 1, 0) {
                Err(Stop::TooMany) => Ok(false),
                done => done,
            };
        };
        let at = At { claim, request, ask: 0 };
        if !one.has_alternatives {
            return self.device(at, 0, 0);
        }
        let mut all_too_many = true;
        for ask in 0..one.asks.len() {
            self.solutions[claim].picked[request] = ask;
            match self.device(At { ask, ..at }, 0, 0) {
                Err(Stop::TooMany) => continue,
                Ok(false) => all_too_many = false,
                done => return done,
            }
        }
        if all_too_many { Err(Stop::TooMany) } else { Ok(false) }
    }

    /// The device with this number of a request, and all behind it; `start`: the first candidate.
    fn device(&mut self, at: At, number: usize, start: usize) -> Result<bool, Stop> {
        let count = self.count(at);
        let all = self.all.get(&at);
        if all.is_some_and(Vec::is_empty) {
            return Ok(false);
        }
        if number >= count {
            return self.request(at.claim, at.request + 1);
        }
        if self.solutions[at.claim].chosen.len() + count - number > MOST_RESULTS {
            return Err(Stop::TooMany);
        }
        if let Some(candidate) = all.map(|all| all[number]) {
            if !self.take(at, candidate, true)? {
                return Ok(false);
            }
            return self.after(at, number, 0);
        }
        for candidate in start..self.offer.candidates.len() {
            if !self.take(at, candidate, false)? {
                continue;
            }
            if self.after(at, number, candidate + 1)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Continues the search with an allocated device, and releases it if the search fails.
    fn after(&mut self, at: At, number: usize, start: usize) -> Result<bool, Stop> {
        let done = self.device(at, number + 1, start);
        if !matches!(done, Ok(true)) {
            self.solutions[at.claim].chosen.pop();
        }
        done
    }

    /// Takes a device if it will do. `must`: there is no other.
    fn take(&mut self, at: At, index: usize, must: bool) -> Result<bool, Failure> {
        self.steps += 1;
        let is_late = || {
            let looks = self.steps.is_multiple_of(BREATH);
            looks && self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
        };
        if self.steps > self.place.limit.steps || is_late() {
            return Err(Failure::Exhausted);
        }
        let ask = self.ask(at);
        let candidate = &self.offer.candidates[index];
        let is_shared = candidate.device.allow_multiple_allocations == Some(true);
        if self.is_in_use(at.claim, ask, index, is_shared)
            || !self.is_selected(at, index)?
            || !self.suffices(ask, index)
            || !self.has_counters(index)
            || is_tainted(candidate.device.taints.as_deref(), ask)
        {
            return Ok(false);
        }
        if !self.is_consistent(at, index) {
            if must {
                let (title, name) = (&self.plans[at.claim].title, ask.short_name());
                return Err(Failure::Broken(format!(
                    "claim {title}, request {name}: cannot add device {} because a claim constraint would not be satisfied",
                    candidate.id
                )));
            }
            return Ok(false);
        }
        let consumed = || capacity::consumed(ask.wanted.as_ref(), candidate.device);
        self.solutions[at.claim].chosen.push(Chosen {
            candidate: index,
            request: at.request,
            ask: at.ask,
            consumed: is_shared.then(consumed),
        });
        Ok(true)
    }

    fn is_in_use(&self, claim: usize, ask: &Ask, index: usize, is_shared: bool) -> bool {
        let has = |one: &Solution| {
            one.chosen.iter().any(|chosen| chosen.candidate == index && chosen.consumed.is_none())
        };
        match ask.admin {
            true => !is_shared && has(&self.solutions[claim]),
            false => {
                self.taken.whole.contains(&self.offer.candidates[index].id)
                    || self.solutions.iter().any(has)
            }
        }
    }

    fn is_selected(&mut self, at: At, index: usize) -> Result<bool, Failure> {
        if let Some(known) = self.selected.get(&(at, index)) {
            return Ok(*known);
        }
        let found = self.select(at, index)?;
        self.selected.insert((at, index), found);
        Ok(found)
    }

    fn select(&self, at: At, index: usize) -> Result<bool, Failure> {
        let ask = self.ask(at);
        let candidate = &self.offer.candidates[index];
        let class = ask.class.metadata.name.as_deref().unwrap_or_default();
        let of_class = ask.class.spec.selectors.as_deref().unwrap_or_default();
        let whose = [
            (format!("class {class}"), of_class),
            (format!("claim {}", self.plans[at.claim].title), &ask.selectors),
        ];
        for (whose, selectors) in whose {
            for (number, one) in selectors.iter().enumerate() {
                let text = one.cel.as_ref().map_or("", |cel| cel.expression.as_str());
                let matches = self.selectors.matches(text, &candidate.id.driver, candidate.device);
                let matches = matches.map_err(|why| {
                    Failure::Broken(format!("{whose}: selector #{number}: {why}"))
                })?;
                if !matches {
                    return Ok(false);
                }
            }
        }
        let each = candidate.slice.spec.per_device_node_selection == Some(true);
        Ok(!each || pools::device_is_for(self.place, candidate.device))
    }

    fn suffices(&self, ask: &Ask, index: usize) -> bool {
        let candidate = &self.offer.candidates[index];
        let mut gone: Consumed = self.taken.shared.get(&candidate.id).cloned().unwrap_or_default();
        let chosen = self.solutions.iter().flat_map(|one| &one.chosen);
        for one in chosen.filter(|one| one.candidate == index) {
            for (name, quantity) in one.consumed.iter().flatten() {
                let sum = gone.entry(name.clone()).or_default();
                *sum = *sum + capacity::amount(quantity);
            }
        }
        capacity::suffices(ask.wanted.as_ref(), candidate.device, &gone)
    }

    /// Is enough left of the counters that the pool's devices share? A shared device takes of them once.
    fn has_counters(&self, index: usize) -> bool {
        let candidate = &self.offer.candidates[index];
        if candidate.device.consumes_counters.is_none() {
            return true;
        }
        let mut counted: BTreeSet<&DeviceId> = BTreeSet::new();
        let mut gone = Counters::new();
        for one in self.solutions.iter().flat_map(|one| &one.chosen) {
            let other = &self.offer.candidates[one.candidate];
            if other.pool == candidate.pool && counted.insert(&other.id) {
                if other.id != candidate.id && self.taken.shared.contains_key(&other.id) {
                    continue;
                }
                for (counter, amount) in pools::consumption(other.device) {
                    let sum = gone.entry(counter).or_default();
                    *sum = *sum + amount;
                }
            }
        }
        if self.taken.shared.contains_key(&candidate.id)
            || (counted.contains(&candidate.id)
                && candidate.device.allow_multiple_allocations == Some(true))
        {
            return true;
        }
        let left = &self.offer.pools[candidate.pool].counters;
        pools::consumption(candidate.device).all(|(counter, amount)| {
            let gone = gone.get(&counter).copied().unwrap_or_default();
            left.get(&counter).is_some_and(|left| gone + amount <= *left)
        })
    }

    /// Do the claim's constraints hold with this device too?
    fn is_consistent(&self, at: At, index: usize) -> bool {
        let plan = &self.plans[at.claim];
        let own = self.ask(at);
        let applying = |one: &&DeviceConstraint| own.is_one_of(one.requests.as_ref());
        plan.constraints.iter().filter(applying).all(|constraint| {
            let others = self.solutions[at.claim].chosen.iter().filter(|one| {
                let ask = &plan.requests[one.request].asks[one.ask];
                ask.is_one_of(constraint.requests.as_ref())
            });
            let values = |name: &str| {
                others.clone().map(|one| self.attribute(one.candidate, name)).collect::<Vec<_>>()
            };
            if let Some(name) = &constraint.match_attribute {
                let own = self.attribute(index, name);
                return own.is_some() && values(name).iter().all(|other| *other == own);
            }
            let name = constraint.distinct_attribute.as_deref().unwrap_or_default();
            let own = self.attribute(index, name);
            own.is_some() && values(name).iter().all(|other| *other != own)
        })
    }

    /// An attribute by its full name; one of the driver's own domain goes without.
    fn attribute(&self, index: usize, name: &str) -> Option<&DeviceAttribute> {
        let candidate = &self.offer.candidates[index];
        let attributes = candidate.device.attributes.as_ref()?;
        attributes.get(name).or_else(|| {
            let (domain, id) = name.split_once('/')?;
            attributes.get(id).filter(|_| domain == candidate.id.driver)
        })
    }
}

/// Upstream: `ToleratesTaint`.
fn is_tainted(taints: Option<&[DeviceTaint]>, ask: &Ask) -> bool {
    let is_one = |own: &Option<String>, other: &str| {
        own.as_deref().is_none_or(|own| own.is_empty() || own == other)
    };
    let tolerated = |taint: &DeviceTaint| {
        ask.tolerations.iter().any(|one| {
            is_one(&one.effect, &taint.effect)
                && is_one(&one.key, &taint.key)
                && match one.operator.as_deref().unwrap_or_default() {
                    "" | "Equal" => {
                        one.value.as_deref().unwrap_or_default()
                            == taint.value.as_deref().unwrap_or_default()
                    }
                    operator => operator == "Exists",
                }
        })
    };
    let mut taints = taints.unwrap_or_default().iter();
    taints.any(|taint| {
        matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute") && !tolerated(taint)
    })
}
