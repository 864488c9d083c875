//! ResourceQuota: rejects requests that would exceed a namespace's quotas.
//!
//! ```text
//! usage of the object ─► relevant quotas ─► fits all? ─► added to each status by compare-and-put
//! ```
//!
//! Invariant: this plugin never raises a quota's recorded usage above its limits: the same compare-and-put
//! checks and adds. The quota controller gives back the charge of writes that failed later, and of deleted
//! objects.

mod usage;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use apiserver::registry::Intent;
use apiserver::request::Key;
use async_trait::async_trait;
use k8s_openapi::api::core::v1::ResourceQuota as Quota;
use machinery::Object;
use tokio::sync::Mutex;

use crate::Row;
use crate::resources::{Measure, Resources, add, resources};
use usage::Evaluator;

/// Kinds that are never counted.
const IGNORED: [(&str, &str); 2] = [("", "events"), ("events.k8s.io", "events")];
/// Requests of one namespace are checked one after the other; namespaces share this many locks.
const PLACES: usize = 64;

pub(crate) const ROW: Row = Row::enabled("ResourceQuota", |_| Ok(Box::new(ResourceQuota::new())));

pub(crate) struct ResourceQuota {
    places: [Mutex<()>; PLACES],
}

impl ResourceQuota {
    pub fn new() -> Self {
        Self { places: std::array::from_fn(|_| Mutex::new(())) }
    }

    fn place(&self, namespace: &str) -> &Mutex<()> {
        let mut hasher = DefaultHasher::new();
        namespace.hash(&mut hasher);
        &self.places[hasher.finish() as usize % PLACES]
    }
}

/// The amounts that a request adds to one quota.
struct Charge {
    quota: Quota,
    delta: Resources,
}

#[async_trait]
impl Plugin for ResourceQuota {
    fn name(&self) -> &'static str {
        "ResourceQuota"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let row = &attributes.ctx.resource;
        let ignored = IGNORED.contains(&(row.group.as_str(), row.plural.as_str()));
        if !row.namespaced || !row.is_stored() || ignored {
            return Ok(());
        }
        let mut evaluator = Evaluator::of(&row.group, &row.plural);
        if !evaluator.handles(attributes) {
            return Ok(());
        }
        let namespace = attributes.key.namespace.as_str();
        let registry = attributes.registry;
        if registry.cached::<Quota>(namespace).await?.is_empty() {
            return Ok(());
        }
        let _place = self.place(namespace).lock().await;
        evaluator.look(attributes).await?;
        let quotas = registry.cached::<Quota>(namespace).await?;
        let charges = charges(attributes, &evaluator, quotas)?;
        for charge in &charges {
            let used = resources(charge.quota.status.as_ref().and_then(|s| s.used.as_ref()));
            exceeded(&charge.quota, &used, &charge.delta)
                .map_or(Ok(()), |why| Err(attributes.forbidden(why)))?;
        }
        if attributes.ctx.dry_run {
            return Ok(());
        }
        for charge in charges {
            record(attributes, charge).await?;
        }
        Ok(())
    }
}

/// The quotas that the request affects, with the amounts.
fn charges(
    attributes: &Attributes<'_>,
    evaluator: &Evaluator,
    quotas: Vec<Quota>,
) -> Result<Vec<Charge>, StatusError> {
    let Some(object) = attributes.object.as_deref().map(|object| &**object) else {
        return Ok(vec![]);
    };
    let now = evaluator.usage(object);
    let before = attributes.old.map(|old| evaluator.usage(old));
    let mut charges = vec![];
    for quota in quotas {
        if !evaluator.matches(&quota, object) {
            continue;
        }
        let status = quota.status.clone().unwrap_or_default();
        let hard = status.hard.unwrap_or_default();
        let names: Vec<&str> =
            hard.keys().map(String::as_str).filter(|name| evaluator.counts(name)).collect();
        if let Some(why) = evaluator.constraint(&names, object) {
            let why = format!("failed quota: {}: {why}", quota.name());
            return Err(attributes.forbidden(why));
        }
        let used = status.used.unwrap_or_default();
        if names.iter().any(|name| !used.contains_key(*name)) {
            return Err(attributes.forbidden(format!(
                "status unknown for quota: {}, resources: {}",
                quota.name(),
                names.join(",")
            )));
        }
        let was_counted = attributes.old.is_some_and(|old| evaluator.matches(&quota, old));
        let mut delta = match &before {
            Some(before) if was_counted => increase(&now, before),
            _ => now.clone(),
        };
        delta.retain(|name, one| !one.amount.is_zero() && hard.contains_key(name));
        if !delta.is_empty() {
            charges.push(Charge { quota, delta });
        }
    }
    Ok(charges)
}

/// The amounts that increase; the controller gives back the decreases.
fn increase(now: &Resources, before: &Resources) -> Resources {
    let more = now.iter().map(|(name, one)| {
        let before = before.get(name).copied().unwrap_or_default();
        (name.clone(), one.minus(before))
    });
    more.filter(|(_, one)| !one.amount.is_negative()).collect()
}

fn exceeded(quota: &Quota, used: &Resources, delta: &Resources) -> Option<String> {
    let hard = resources(quota.status.as_ref().and_then(|status| status.hard.as_ref()));
    let mut sum = used.clone();
    add(&mut sum, delta);
    let over: Vec<&str> = delta
        .keys()
        .filter(|name| {
            let limit = hard.get(*name).copied().unwrap_or_default();
            sum.get(*name).is_some_and(|sum| sum.amount > limit.amount)
        })
        .map(String::as_str)
        .collect();
    if over.is_empty() {
        return None;
    }
    let shown = |all: &Resources| {
        let some = over.iter().filter_map(|name| Some((name, all.get(*name)?)));
        some.map(|(name, one): (_, &Measure)| format!("{name}={one}")).collect::<Vec<_>>().join(",")
    };
    Some(format!(
        "exceeded quota: {}, requested: {}, used: {}, limited: {}",
        quota.name(),
        shown(delta),
        shown(used),
        shown(&hard)
    ))
}

/// Adds the charge to the current quota, if it still fits.
async fn record(attributes: &Attributes<'_>, charge: Charge) -> Result<(), StatusError> {
    let Charge { quota, delta } = charge;
    let mut ctx = attributes.registry.own_context::<Quota>();
    ctx.subresource = "status".into();
    let key = Key::new(quota.namespace(), quota.name());
    let row = Arc::clone(&attributes.ctx.resource);
    let name = attributes.key.name.clone();
    let modify = move |object: &mut dyn Object| {
        let quota = object.expect_mut::<Quota>();
        let used = resources(quota.status.as_ref().and_then(|status| status.used.as_ref()));
        if let Some(why) = exceeded(quota, &used, &delta) {
            return Err(StatusError::forbidden(&row.group, &row.plural, &name, why));
        }
        let mut sum = used;
        add(&mut sum, &delta);
        let status = quota.status.get_or_insert_default();
        status.used = Some(sum.into_iter().map(|(name, one)| (name, one.quantity())).collect());
        Ok(())
    };
    let intent = Intent::Modify(Box::new(modify));
    match attributes.registry.write(&ctx, &key, intent).await {
        // A deleted quota limits nothing.
        Err(error) if error.is(machinery::status::Reason::NotFound) => Ok(()),
        other => other.map(|_| ()),
    }
}
