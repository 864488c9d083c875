//! ServiceCIDRs: ranges of Service addresses stay while Services use them.
//!
//! In: ServiceCIDRs, IPAddresses. Out: a finalizer, the condition `Ready`.
//! Upstream: `pkg/controller/servicecidrs`.
//!
//! Cost: the ranges, which are few, are kept whole. Only a range that goes looks at the names of addresses.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::Bound::{Excluded, Included};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use client::{
    Api, ErrorExt, Lister, Outcome, Patch, PatchParams, PostParams, RawEvent, Result, View, Whole,
    WorkQueue,
};
use ipnet::IpNet;
use jiff::Timestamp;
use k8s_openapi::api::networking::v1::{IPAddress, ServiceCIDR};
use machinery::{Condition, Time};
use serde_json::json;

use crate::context::Context;
use crate::descriptor::{Descriptor, Row, Setup, on_metadata};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller, Arc<str>> {
    name: "service-cidr-controller",
    account: "service-cidrs-controller",
    component: "service-cidr-controller",
    queue: "ipaddresses",
    workers: 1,
    new: Controller::new,
    watches: &[
        // A range that comes or goes may free another.
        &on_metadata::<ServiceCIDR, _, _>(|this: &Controller, queue, event| {
            queue.add(event.entry().header.key.name.clone());
            this.wake_deleted(queue);
        }),
        &on_metadata::<IPAddress, _, _>(|this: &Controller, queue, event| {
            let Ok(address) = event.entry().header.key.name.parse() else { return };
            if let RawEvent::Applied { .. } = event {
                this.used().insert(address);
                return;
            }
            this.used().remove(&address);
            this.wake_deleted(queue);
        }),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

/// Ranges that have a deletion timestamp.
const DELETED: &str = "deleted";
const FINALIZER: &str = "networking.k8s.io/service-cidr-finalizer";
/// An allocator that has not heard of the deletion yet may still hand out an address.
const GRACE: Duration = Duration::from_secs(10);

struct Controller {
    context: Context,
    ranges: Lister<ServiceCIDR>,
    all: View<Whole<ServiceCIDR>>,
    /// Guards the addresses in use, in order; held for a change or a look.
    used: Mutex<BTreeSet<IpAddr>>,
}

#[derive(Debug, PartialEq)]
enum Step {
    AddFinalizer,
    RemoveFinalizer,
    Condition(&'static str, &'static str, &'static str),
    Wait(Duration),
}

impl Controller {
    fn new(setup: &Setup<Arc<str>>) -> Option<Self> {
        let ranges = setup.informer::<ServiceCIDR>();
        ranges.index_headers(DELETED, |header| {
            let deleted = header.deleting.then(|| DELETED.to_owned());
            deleted.into_iter().collect()
        });
        Some(Self {
            context: setup.context.clone(),
            all: ranges.view(),
            ranges: ranges.lister(),
            used: Mutex::default(),
        })
    }

    fn used(&self) -> MutexGuard<'_, BTreeSet<IpAddr>> {
        self.used.lock().expect("no panic while held")
    }

    fn wake_deleted(&self, queue: &WorkQueue<Arc<str>>) {
        for range in self.ranges.entries_by_index(DELETED, DELETED) {
            queue.add(range.header.key.name.clone());
        }
    }

    async fn reconcile(&self, name: &str) -> Result<Outcome> {
        let Some(range) = self.ranges.get("", name) else {
            return Ok(Outcome::Done);
        };
        let all = self.all.objects(None);
        let api: Api<ServiceCIDR> = self.context.client.api(None);
        let now = base::clock::now();
        let steps = plan(&range, &all, &self.used(), now);
        for step in steps {
            let params = PatchParams::default();
            let done = match step {
                Step::AddFinalizer => {
                    let patch = json!({"metadata": {"finalizers": [FINALIZER]}});
                    api.patch(name, &params, &Patch::Strategic(&patch)).await
                }
                Step::RemoveFinalizer => {
                    let key = "$deleteFromPrimitiveList/finalizers";
                    let patch = json!({"metadata": {key: [FINALIZER]}});
                    api.patch(name, &params, &Patch::Strategic(&patch)).await
                }
                Step::Wait(delay) => return Ok(Outcome::After(delay)),
                Step::Condition(value, reason, message) => {
                    let Some(mut fresh) = api.get_opt(name).await? else {
                        return Ok(Outcome::Done);
                    };
                    let condition = Condition {
                        type_: "Ready".into(),
                        status: value.into(),
                        reason: reason.into(),
                        message: message.into(),
                        observed_generation: None,
                        last_transition_time: Time(crate::replicaset::seconds(now)),
                    };
                    let status = fresh.status.get_or_insert_default();
                    let conditions = status.conditions.get_or_insert_default();
                    conditions.retain(|one| one.type_ != "Ready");
                    conditions.push(condition);
                    api.replace_status(name, &PostParams::default(), &fresh).await
                }
            };
            match done {
                Err(error) if error.is_not_found() => return Ok(Outcome::Done),
                done => drop(done?),
            }
        }
        Ok(Outcome::Done)
    }
}

fn networks(range: &ServiceCIDR) -> Vec<IpNet> {
    let cidrs = range.spec.iter().flat_map(|spec| spec.cidrs.iter().flatten());
    cidrs.filter_map(|cidr| cidr.parse().ok()).collect()
}

/// Pure.
fn plan(
    range: &ServiceCIDR,
    all: &[Arc<ServiceCIDR>],
    used: &BTreeSet<IpAddr>,
    now: Timestamp,
) -> Vec<Step> {
    let has_finalizer =
        range.metadata.finalizers.iter().flatten().any(|finalizer| finalizer == FINALIZER);
    let conditions = range.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let known = conditions.into_iter().find(|one| one.type_ == "Ready");
    let ensure = |value, reason, message| {
        let same = known.is_some_and(|known| {
            known.status == value && known.reason == reason && known.message == message
        });
        (!same).then_some(Step::Condition(value, reason, message))
    };
    let Some(deletion) = &range.metadata.deletion_timestamp else {
        let ready = ensure("True", "", "Kubernetes Service CIDR is ready");
        return (!has_finalizer).then_some(Step::AddFinalizer).into_iter().chain(ready).collect();
    };
    if !has_finalizer {
        return vec![];
    }
    if !is_free(range, all, used) {
        let message = "There are still IPAddresses referencing the ServiceCIDR, please remove them or create a new ServiceCIDR";
        return ensure("False", "Terminating", message).into_iter().collect();
    }
    let passed = Duration::try_from(now.duration_since(deletion.0)).unwrap_or_default();
    match GRACE.checked_sub(passed).filter(|left| !left.is_zero()) {
        Some(left) => vec![Step::Wait(left)],
        None => vec![Step::RemoveFinalizer],
    }
}

/// Whether other ranges hold all of this one, or at least every address in use.
/// Costs a look-up for each of the other ranges, not for each address.
fn is_free(range: &ServiceCIDR, all: &[Arc<ServiceCIDR>], used: &BTreeSet<IpAddr>) -> bool {
    let others: Vec<IpNet> = all
        .iter()
        .filter(|one| one.metadata.name != range.metadata.name)
        .filter(|one| one.metadata.deletion_timestamp.is_none())
        .flat_map(|one| networks(one))
        .collect();
    networks(range).iter().all(|network| {
        let last = network.broadcast();
        let mut next = used.range(network.network()..=last).next();
        while let Some(address) = next {
            let holders = others.iter().filter(|other| other.contains(address));
            match holders.map(IpNet::broadcast).max() {
                None => return false,
                Some(held) if held >= last => return true,
                Some(held) => next = used.range((Excluded(held), Included(last))).next(),
            }
        }
        true
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{Value, from_value};

    use super::*;

    fn range(name: &str, cidr: &str, meta: Value) -> Arc<ServiceCIDR> {
        let mut metadata = meta;
        metadata["name"] = name.into();
        Arc::new(from_value(json!({"metadata": metadata, "spec": {"cidrs": [cidr]}})).unwrap())
    }

    #[test]
    fn a_range_stays_while_it_is_used() {
        let check = |meta: Value, others: &[(&str, &str)], used: &[&str], expected: &[Step]| {
            let one = range("one", "10.0.0.0/24", meta.clone());
            let mut all: Vec<_> =
                others.iter().map(|(name, cidr)| range(name, cidr, json!({}))).collect();
            all.push(one.clone());
            let used: BTreeSet<IpAddr> =
                used.iter().map(|address| address.parse().unwrap()).collect();
            let now = "2026-01-01T00:01:00Z".parse().unwrap();
            assert_eq!(plan(&one, &all, &used, now), expected, "{meta} {used:?}");
        };
        let ready = || Step::Condition("True", "", "Kubernetes Service CIDR is ready");
        check(json!({}), &[], &[], &[Step::AddFinalizer, ready()]);
        check(json!({"finalizers": [FINALIZER]}), &[], &[], &[ready()]);
        let going =
            || json!({"finalizers": [FINALIZER], "deletionTimestamp": "2026-01-01T00:00:00Z"});
        check(going(), &[], &[], &[Step::RemoveFinalizer]);
        let held = plan(
            &range("one", "10.0.0.0/24", going()),
            &[],
            &BTreeSet::from(["10.0.0.5".parse().unwrap()]),
            "2026-01-01T00:01:00Z".parse().unwrap(),
        );
        assert!(matches!(held[..], [Step::Condition("False", "Terminating", _)]));
        check(going(), &[("two", "10.0.0.0/16")], &["10.0.0.5"], &[Step::RemoveFinalizer]);
        let half = [("two", "10.0.0.0/25")];
        check(going(), &half, &["10.0.0.5", "10.0.0.9"], &[Step::RemoveFinalizer]);
        let terminating = "There are still IPAddresses referencing the ServiceCIDR, please remove them or create a new ServiceCIDR";
        let used = ["10.0.0.5", "10.0.0.200"];
        let held = Step::Condition("False", "Terminating", terminating);
        check(going(), &half, &used, &[held]);
        check(going(), &[half[0], ("three", "10.0.0.128/25")], &used, &[Step::RemoveFinalizer]);
        check(going(), &[], &["10.9.0.5"], &[Step::RemoveFinalizer]);
        let fresh = json!({"finalizers": [FINALIZER], "deletionTimestamp": "2026-01-01T00:00:55Z"});
        check(fresh, &[], &[], &[Step::Wait(Duration::from_secs(5))]);
    }
}
