//! Resource lists and pods' requests: shared by limit ranges and quotas.
//!
//! Amounts keep the format in which they were written, because messages and sums show it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, PodSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use machinery::quantity::{Amount, Format};

/// A quantity for arithmetic, with its format.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Measure {
    pub amount: Amount,
    format: Format,
}

pub(crate) type Resources = BTreeMap<String, Measure>;

impl Measure {
    pub fn of(quantity: &Quantity) -> Self {
        let amount = Amount::parse(&quantity.0).unwrap_or_default();
        Self { amount, format: Format::of(&quantity.0) }
    }

    pub fn count(number: usize) -> Self {
        let number = i64::try_from(number).unwrap_or(i64::MAX);
        Self { amount: Amount::from(number), format: Format::Decimal }
    }

    pub fn plus(self, other: Self) -> Self {
        let format = if self.amount.is_zero() { other.format } else { self.format };
        Self { amount: self.amount + other.amount, format }
    }

    pub fn minus(self, other: Self) -> Self {
        Self { amount: self.amount - other.amount, format: self.format }
    }

    pub fn quantity(self) -> Quantity {
        Quantity(self.to_string())
    }
}

impl std::fmt::Display for Measure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.amount.canonical(self.format))
    }
}

pub(crate) fn resources(list: Option<&BTreeMap<String, Quantity>>) -> Resources {
    list.into_iter().flatten().map(|(name, one)| (name.clone(), Measure::of(one))).collect()
}

pub(crate) fn add(to: &mut Resources, more: &Resources) {
    for (name, measure) in more {
        let sum = to.entry(name.clone()).or_default();
        *sum = sum.plus(*measure);
    }
}

fn raise(to: &mut Resources, at_least: &Resources) {
    for (name, measure) in at_least {
        let there = to.entry(name.clone()).or_default();
        if measure.amount >= there.amount {
            *there = *measure;
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    Requests,
    Limits,
}

fn of_container(container: &Container, which: Which) -> Resources {
    let asked = container.resources.as_ref();
    resources(asked.and_then(|asked| match which {
        Which::Requests => asked.requests.as_ref(),
        Which::Limits => asked.limits.as_ref(),
    }))
}

/// A pod's resources: the sum of containers and sidecars, or the largest init container plus the sidecars
/// before it; pod-level resources override these.
pub(crate) fn of_pod(spec: &PodSpec, which: Which) -> Resources {
    let mut sum = Resources::new();
    for container in &spec.containers {
        add(&mut sum, &of_container(container, which));
    }
    let (mut sidecars, mut start) = (Resources::new(), Resources::new());
    for container in spec.init_containers.iter().flatten() {
        let mut needs = of_container(container, which);
        if container.restart_policy.as_deref() == Some("Always") {
            add(&mut sum, &needs);
            add(&mut sidecars, &needs);
            needs = sidecars.clone();
        } else {
            add(&mut needs, &sidecars);
        }
        raise(&mut start, &needs);
    }
    raise(&mut sum, &start);
    let whole = spec.resources.as_ref().and_then(|whole| match which {
        Which::Requests => whole.requests.as_ref(),
        Which::Limits => whole.limits.as_ref(),
    });
    for (name, measure) in resources(whole) {
        if matches!(&*name, "cpu" | "memory") || name.starts_with("hugepages-") {
            sum.insert(name, measure);
        }
    }
    sum
}
