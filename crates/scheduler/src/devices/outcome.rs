//! The allocation result: devices, configuration, and the nodes that can use them.

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationConfiguration, DeviceAllocationResult,
    DeviceRequestAllocationResult, ResourceClaim,
};

use super::plan::{Ask, Plan};
use super::pools::Offer;
use super::search::{Chosen, Solution};
use super::{Failure, Place};

/// Alternatives of a request. Upstream: `FirstAvailableDeviceRequestMaxSize`.
const MOST_ALTERNATIVES: usize = 8;

pub fn result(
    plan: &Plan<'_>,
    solution: Solution,
    offer: &Offer<'_>,
    place: Place<'_>,
) -> Result<AllocationResult, Failure> {
    let config = configuration(plan, &solution.picked);
    let node_selector = node_selector(&solution.chosen, offer, place).map_err(|terms| {
        let name = plan.claim.metadata.name.as_deref().unwrap_or_default();
        let why = format!("unsupported ResourceSlice.NodeSelector with {terms} terms");
        Failure::Broken(format!("create NodeSelector for claim {name}: {why}"))
    })?;
    let results = solution.chosen.into_iter().map(|one| device_result(plan, one, offer)).collect();
    Ok(AllocationResult {
        devices: Some(DeviceAllocationResult {
            config: Some(config).filter(|config| !config.is_empty()),
            results: Some(results),
        }),
        node_selector,
        ..AllocationResult::default()
    })
}

fn device_result(plan: &Plan<'_>, one: Chosen, offer: &Offer<'_>) -> DeviceRequestAllocationResult {
    let ask = &plan.requests[one.request].asks[one.ask];
    let candidate = &offer.candidates[one.candidate];
    DeviceRequestAllocationResult {
        request: ask.name(),
        driver: candidate.id.driver.clone(),
        pool: candidate.id.pool.clone(),
        device: candidate.id.device.clone(),
        admin_access: ask.admin.then_some(true),
        tolerations: Some(ask.tolerations.clone()).filter(|all| !all.is_empty()),
        binding_conditions: candidate.device.binding_conditions.clone(),
        binding_failure_conditions: candidate.device.binding_failure_conditions.clone(),
        share_id: one.consumed.is_some().then(base::rng::uuid),
        consumed_capacity: one.consumed.filter(|consumed| !consumed.is_empty()),
    }
}

/// The configuration of the classes, each once, then of the claim.
fn configuration(plan: &Plan<'_>, picked: &[usize]) -> Vec<DeviceAllocationConfiguration> {
    let mut all: Vec<DeviceAllocationConfiguration> = vec![];
    let mut of_class: Vec<(Option<&str>, std::ops::Range<usize>)> = vec![];
    let asks = plan.requests.iter().zip(picked).map(|(request, ask)| &request.asks[*ask]);
    let asks: Vec<&Ask> = asks.collect();
    for ask in &asks {
        let class = ask.class.metadata.name.as_deref();
        if let Some((_, range)) = of_class.iter().find(|(known, _)| *known == class) {
            for config in &mut all[range.clone()] {
                config.requests.get_or_insert_default().push(ask.name());
            }
            continue;
        }
        let start = all.len();
        let configs = ask.class.spec.config.iter().flatten();
        all.extend(configs.map(|config| DeviceAllocationConfiguration {
            source: "FromClass".into(),
            requests: Some(vec![ask.name()]),
            opaque: config.opaque.clone(),
        }));
        of_class.push((class, start..all.len()));
    }
    let configs = plan.claim.spec.devices.iter().flat_map(|one| one.config.iter().flatten());
    for config in configs {
        let times = match config.requests.as_deref().unwrap_or_default() {
            [] => 1,
            _ => asks.iter().filter(|ask| ask.is_one_of(config.requests.as_ref())).count(),
        };
        let copy = DeviceAllocationConfiguration {
            source: "FromClaim".into(),
            requests: config.requests.clone(),
            opaque: config.opaque.clone(),
        };
        all.extend(std::iter::repeat_n(copy, times));
    }
    all
}

/// The node selector of all devices; an error is the number of selector terms, if it is not one.
fn node_selector(
    chosen: &[Chosen],
    offer: &Offer<'_>,
    place: Place<'_>,
) -> Result<Option<NodeSelector>, usize> {
    let mut fields: Vec<NodeSelectorRequirement> = vec![];
    let mut labels: Vec<NodeSelectorRequirement> = vec![];
    for one in chosen {
        let candidate = &offer.candidates[one.candidate];
        let (spec, device) = (&candidate.slice.spec, candidate.device);
        let (name, nodes) = match spec.per_device_node_selection {
            Some(true) => (&device.node_name, &device.node_selector),
            _ => (&spec.node_name, &spec.node_selector),
        };
        if name.is_some() || device.binds_to_node == Some(true) {
            return Ok(Some(only(place.node)));
        }
        let terms = nodes.as_ref().map_or(&[][..], |nodes| &nodes.node_selector_terms);
        let [term] = terms else {
            if terms.is_empty() {
                continue;
            }
            return Err(terms.len());
        };
        add(&mut fields, term.match_fields.as_deref());
        add(&mut labels, term.match_expressions.as_deref());
    }
    if fields.is_empty() && labels.is_empty() {
        return Ok(None);
    }
    let some = |all: Vec<NodeSelectorRequirement>| Some(all).filter(|all| !all.is_empty());
    let term = NodeSelectorTerm { match_fields: some(fields), match_expressions: some(labels) };
    Ok(Some(NodeSelector { node_selector_terms: vec![term] }))
}

fn only(node: &str) -> NodeSelector {
    let by_name = NodeSelectorRequirement {
        key: "metadata.name".into(),
        operator: "In".into(),
        values: Some(vec![node.to_owned()]),
    };
    let term = NodeSelectorTerm { match_fields: Some(vec![by_name]), match_expressions: None };
    NodeSelector { node_selector_terms: vec![term] }
}

fn add(all: &mut Vec<NodeSelectorRequirement>, more: Option<&[NodeSelectorRequirement]>) {
    for one in more.unwrap_or_default() {
        if !all.contains(one) {
            all.push(one.clone());
        }
    }
}

/// How well a claim did with alternatives: more for those named first. Upstream: `computeScore`.
pub fn score(claim: &ResourceClaim, allocation: &AllocationResult) -> i64 {
    let results = allocation.devices.iter().flat_map(|one| one.results.iter().flatten());
    let allocated: std::collections::BTreeSet<&str> =
        results.map(|result| result.request.as_str()).collect();
    let requests = claim.spec.devices.iter().flat_map(|one| one.requests.iter().flatten());
    let mut score = 0;
    for request in requests {
        for (at, sub) in request.first_available.iter().flatten().enumerate() {
            if allocated.contains(format!("{}/{}", request.name, sub.name).as_str()) {
                score += MOST_ALTERNATIVES.saturating_sub(at) as i64;
            }
        }
    }
    score
}
