//! Capacities of devices that several claims share, and what a request takes of them.
//! Upstream: `consumable_capacity.go`.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceCapacity,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use machinery::quantity::{Amount, Format};

use super::Consumed;

/// The requested amounts by the capacity's name.
pub type Wanted = BTreeMap<String, Quantity>;

/// Nought where it is none: the API lets none in.
pub fn amount(quantity: &Quantity) -> Amount {
    Amount::parse(&quantity.0).unwrap_or_default()
}

/// Whether the rest is enough. `gone` is the amount that others use.
pub fn suffices(wanted: Option<&Wanted>, device: &Device, gone: &Consumed) -> bool {
    let empty = BTreeMap::new();
    let capacity = device.capacity.as_ref().unwrap_or(&empty);
    if wanted.into_iter().flatten().any(|(name, _)| !capacity.contains_key(name)) {
        return false;
    }
    capacity.iter().all(|(name, one)| {
        let taken = consumed_of(wanted, name, one);
        if violates(&taken, one.request_policy.as_ref()) {
            return false;
        }
        let gone = gone.get(name).copied().unwrap_or_default();
        gone + amount(&taken) <= amount(&one.value)
    })
}

/// The capacity that a request consumes of a device.
pub fn consumed(wanted: Option<&Wanted>, device: &Device) -> Wanted {
    let capacity = device.capacity.iter().flatten();
    capacity.map(|(name, one)| (name.clone(), consumed_of(wanted, name, one))).collect()
}

fn consumed_of(wanted: Option<&Wanted>, name: &str, capacity: &DeviceCapacity) -> Quantity {
    let policy = capacity.request_policy.as_ref();
    let Some(wanted) = wanted.and_then(|wanted| wanted.get(name)) else {
        let default = policy.and_then(|policy| policy.default.clone());
        return default.unwrap_or_else(|| capacity.value.clone());
    };
    if let Some(range) = policy.and_then(|policy| policy.valid_range.as_ref()) {
        return rounded_up(wanted, range);
    }
    let values = policy.and_then(|policy| policy.valid_values.as_ref());
    let enough = values.into_iter().flatten().find(|one| amount(wanted) <= amount(one));
    enough.unwrap_or(wanted).clone()
}

/// To the next step from the least.
fn rounded_up(wanted: &Quantity, range: &CapacityRequestPolicyRange) -> Quantity {
    let least = &range.min;
    if amount(wanted) < amount(least) {
        return least.clone();
    }
    let Some(step) = range.step.as_ref().map(|step| amount(step).units()).filter(|step| *step > 0)
    else {
        return wanted.clone();
    };
    let least = amount(least).units();
    let steps = (amount(wanted).units() - least + step - 1) / step;
    Quantity(Amount::from(least + steps * step).canonical(Format::Binary))
}

fn violates(taken: &Quantity, policy: Option<&CapacityRequestPolicy>) -> bool {
    let Some(policy) = policy else { return false };
    let taken = amount(taken);
    if policy.default.as_ref().is_some_and(|default| amount(default) == taken) {
        return false;
    }
    if let Some(range) = &policy.valid_range {
        let is_over = range.max.as_ref().is_some_and(|most| taken > amount(most));
        let least = amount(&range.min).units();
        let step = range.step.as_ref().map_or(0, |step| amount(step).units());
        return is_over || (step > 0 && (taken.units() - least) % step != 0);
    }
    let mut values = policy.valid_values.iter().flatten().peekable();
    values.peek().is_some() && !values.any(|one| amount(one) == taken)
}
