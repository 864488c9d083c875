//! ResourceQuotas: counts what a namespace uses.
//!
//! In: quotas, pods, services, claims, and objects of what `count/…` names. Out: quotas' `status`.
//! Upstream: `pkg/controller/resourcequota`. The rules are in `api::quota`, which the admission
//! plugin counts by as well; a write is refused when the plugin wrote meanwhile, and tried again.
//!
//! Invariant: recorded use is lowered only when something was given back, when the limits changed, or
//! every [`RESYNC`]. The plugin charges a quota before the object is stored: a count at each change of
//! a status would take back charges for writes that are still running.
//!
//! Cost: a new quota reads its namespace once. From then on a change of an object changes the sums by its part
//! ([`ledger`]), and decodes the object and the quota. Namespaces without a quota cost nothing.

mod ledger;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::quota::{self, Amounts};
use client::discovery::Discovered;
use client::{
    Api, ErrorExt, Event, Kind, Lister, ObjectKey, Outcome, PostParams, RawEvent, Result, View,
    Whole, WorkQueue,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, Pod, ResourceQuota, ResourceQuotaStatus,
    ScopedResourceSelectorRequirement, Service,
};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use machinery::selector::Selector;
use tokio::time::Instant;

use crate::context::Context;
use crate::descriptor::{Descriptor, Row, on, on_metadata};
use crate::pod;
use ledger::{Effect, Ledger, Subject};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "resourcequota-controller",
    account: "resourcequota-controller",
    component: "resourcequota-controller",
    queue: "resourcequota_primary",
    workers: 5,
    new: |setup| {
        Some(Controller {
            context: setup.context.clone(),
            quotas: setup.lister(),
            pods: setup.lister(),
            services: setup.lister(),
            claims: setup.lister(),
            device_claims: setup.lister(),
            classes: setup.view::<DeviceClass, _>(),
            queue: setup.queue.clone(),
            due: Mutex::default(),
            ledgers: Mutex::default(),
            counted: Mutex::default(),
        })
    },
    watches: &[
        &on(|this: &Controller, _, event| this.quota_event(event)),
        &on(|this: &Controller, _, event| this.pod_event(event)),
        &on(|this: &Controller, _, event: &Event<Service>| {
            let part = |scopes: &Scopes| part_of_service(event.object(), scopes);
            this.changed(event, Subject::Service, part);
        }),
        &on(|this: &Controller, _, event: &Event<PersistentVolumeClaim>| {
            let part = |scopes: &Scopes| part_of_claim(event.object(), scopes);
            this.changed(event, Subject::Claim, part);
        }),
        &on(|this: &Controller, _, event| this.device_claim_event(event)),
        &on_metadata::<DeviceClass, _, _>(|this: &Controller, _, _| {
            this.read_device_claims_again();
        }),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

/// Gives back what objects were charged for that failed to be written.
const RESYNC: Duration = Duration::from_secs(300);

struct Controller {
    context: Context,
    quotas: Lister<ResourceQuota>,
    pods: Lister<Pod>,
    services: Lister<Service>,
    claims: Lister<PersistentVolumeClaim>,
    device_claims: Lister<ResourceClaim>,
    classes: View<Whole<DeviceClass>>,
    queue: WorkQueue<ObjectKey>,
    /// When a quota's use may next be lowered; unknown ones at once. Guarded for a lookup.
    due: Mutex<BTreeMap<ObjectKey, Instant>>,
    /// By quota. Guarded for the change of one object.
    ledgers: Mutex<BTreeMap<ObjectKey, Ledger>>,
    /// By `count/…` name: resources that a quota once named. Guarded for a lookup.
    counted: Mutex<BTreeMap<String, Counter>>,
}

/// How many objects of a resource there are, by namespace.
#[derive(Clone, Default)]
struct Counter(
    /// Guards the numbers; written by the reflector's task.
    Arc<Mutex<HashMap<Arc<str>, usize>>>,
);

impl Counter {
    fn change(&self, namespace: &Arc<str>, came: bool) {
        let mut numbers = self.0.lock().expect("no panic while held");
        let number = numbers.entry(namespace.clone()).or_default();
        *number = if came { *number + 1 } else { number.saturating_sub(1) };
        if *number == 0 {
            numbers.remove(namespace);
        }
    }

    fn of(&self, namespace: &str) -> usize {
        self.0.lock().expect("no panic while held").get(namespace).copied().unwrap_or_default()
    }
}

type Scopes = [ScopedResourceSelectorRequirement];
/// The usage of an object.
type Part = (Subject, Amounts);

fn part_of_pod(pod: &Pod, scopes: &Scopes, now: Timestamp) -> Amounts {
    match scopes.iter().all(|scope| quota::pod_is_in_scope(pod, scope)) {
        true => quota::of_pod(pod, now),
        false => Amounts::new(),
    }
}

fn part_of_claim(claim: &PersistentVolumeClaim, scopes: &Scopes) -> Amounts {
    match scopes.iter().all(|scope| quota::claim_is_in_scope(claim, scope)) {
        true => quota::of_claim(claim),
        false => Amounts::new(),
    }
}

/// Services have no scope.
fn part_of_service(service: &Service, scopes: &Scopes) -> Amounts {
    if scopes.is_empty() { quota::of_service(service) } else { Amounts::new() }
}

/// When a pod that goes stops to count, though it is there.
fn end_of(pod: &Pod) -> Option<i64> {
    let deletion = pod.metadata.deletion_timestamp.as_ref()?.0.as_second();
    Some(deletion + pod.metadata.deletion_grace_period_seconds?)
}

impl Controller {
    fn quota_event(&self, event: &Event<ResourceQuota>) {
        let hard = |quota: &ResourceQuota| quota.spec.as_ref().and_then(|spec| spec.hard.clone());
        let same = event.old().is_some_and(|old| hard(&old) == hard(event.object()));
        if event.is_deleted() || !same {
            self.recount(event.key());
        }
    }

    /// The quotas of a namespace.
    fn quotas_of(&self, namespace: Option<&str>) -> Vec<ObjectKey> {
        let all = self.quotas.entries(namespace, &Selector::everything());
        all.iter().map(|entry| entry.header.key.clone()).collect()
    }

    /// Tells the ledgers of a namespace what an object uses now. A use that came is charged already, and
    /// counted only if it was not; one that goes gives back.
    fn put(&self, namespace: Option<&str>, put: impl Fn(&mut Ledger) -> Effect) {
        for key in self.quotas_of(namespace) {
            let effect = self.ledgers().get_mut(&key).map(&put);
            match effect {
                // This quota has no ledger yet: its first reconcile reads the namespace.
                None => self.queue.add(key),
                Some(Effect::None) => {}
                Some(Effect::More) => self.queue.add(key),
                Some(Effect::Less) => self.recount(key),
            }
        }
    }

    fn changed<T: Kind>(
        &self,
        event: &Event<T>,
        subject: fn(ObjectKey) -> Subject,
        part: impl Fn(&Scopes) -> Amounts,
    ) {
        let namespace = event.object().metadata().namespace.as_deref();
        self.put(namespace, |ledger| {
            let part = if event.is_deleted() { Amounts::new() } else { part(ledger.scopes()) };
            ledger.put(subject(event.key()), part)
        });
    }

    fn pod_event(&self, event: &Event<Pod>) {
        let pod = event.object();
        let namespace = pod.metadata.namespace.as_deref();
        // Most namespaces have no quota: nothing is computed for them.
        if self.quotas_of(namespace).is_empty() {
            return;
        }
        let now = base::clock::now();
        self.changed(event, Subject::Pod, |scopes| part_of_pod(pod, scopes, now));
        let end = end_of(pod).filter(|_| !event.is_deleted() && !pod::is_finished(pod));
        if let Some(end) = end {
            self.put(namespace, |ledger| {
                ledger.ends(end, event.key());
                Effect::None
            });
        }
        // The usage of a ResourceClaim depends on its pod's usage.
        for claim in self.device_claims.by_owner(pod.metadata.uid.as_deref().unwrap_or_default()) {
            self.put_device_claim(&claim);
        }
    }

    fn device_claim_event(&self, event: &Event<ResourceClaim>) {
        let claim = event.object();
        if event.is_deleted() {
            self.changed(event, Subject::DeviceClaim, |_| Amounts::new());
        } else {
            self.put_device_claim(claim);
        }
        // If a pod has several claims, it is counted for the oldest one.
        let owner = quota::extended_owner(claim).map(|(_, uid)| uid.to_owned());
        for sibling in owner.iter().flat_map(|uid| self.device_claims.by_owner(uid)) {
            self.put_device_claim(&sibling);
        }
    }

    fn put_device_claim(&self, claim: &ResourceClaim) {
        let namespace = claim.metadata.namespace.as_deref();
        if self.quotas_of(namespace).is_empty() {
            return;
        }
        let part = self.part_of_device_claim(claim, &self.device_classes());
        let subject = Subject::DeviceClaim(ObjectKey::of(&claim.metadata));
        self.put(namespace, |ledger| {
            let part = if ledger.scopes().is_empty() { part.clone() } else { Amounts::new() };
            ledger.put(subject.clone(), part)
        });
    }

    fn part_of_device_claim(
        &self,
        claim: &ResourceClaim,
        classes: &quota::DeviceClasses,
    ) -> Amounts {
        let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
        let owner = quota::extended_owner(claim);
        let pod = owner.and_then(|(name, _)| self.pods.get(namespace, name));
        let siblings = owner.map(|(_, uid)| self.device_claims.by_owner(uid)).unwrap_or_default();
        let siblings = siblings.iter().map(|sibling| &**sibling);
        let counted = quota::of_owner(claim, pod.as_deref(), siblings, base::clock::now());
        quota::of_device_claim(claim, classes, &counted)
    }

    fn device_classes(&self) -> quota::DeviceClasses {
        let all = self.classes.objects(None);
        quota::DeviceClasses::new(all.iter().map(|class| &**class))
    }

    /// The usage of ResourceClaims depends on the DeviceClasses.
    fn read_device_claims_again(&self) {
        let mut again = vec![];
        self.ledgers().retain(|key, ledger| {
            let stays = !ledger.has_device_claims();
            if !stays {
                again.push(key.clone());
            }
            stays
        });
        again.into_iter().for_each(|key| self.recount(key));
    }

    fn wake(&self, namespace: Option<&str>, gave_back: bool) {
        for key in self.quotas_of(namespace) {
            if gave_back { self.recount(key) } else { self.queue.add(key) }
        }
    }

    /// Tells the sums, downwards too.
    fn recount(&self, key: ObjectKey) {
        self.due().insert(key.clone(), Instant::now());
        self.queue.add(key);
    }

    fn ledgers(&self) -> std::sync::MutexGuard<'_, BTreeMap<ObjectKey, Ledger>> {
        self.ledgers.lock().expect("no panic while held")
    }

    /// What the namespace uses of a quota, and whether some of it was given back by the mere passing of time.
    /// `None` if it has to be read again.
    fn used(&self, key: &ObjectKey, quota: &ResourceQuota) -> Option<(Amounts, bool)> {
        let scopes = quota::scopes(quota);
        let is_known = |ledger: &Ledger| ledger.is_filled() && ledger.scopes() == scopes;
        if !self.ledgers().get(key).is_some_and(is_known) {
            self.ledgers().insert(key.clone(), Ledger::new(scopes.clone()));
            let (read, ends) = self.read(&key.namespace, &scopes);
            if let Some(ledger) = self.ledgers().get_mut(key) {
                ledger.fill(read);
                ends.into_iter().for_each(|(end, pod)| ledger.ends(end, pod));
            }
        }
        let now = base::clock::now();
        let mut gave_back = false;
        let mut ledgers = self.ledgers();
        let ledger = ledgers.get_mut(key)?;
        for pod in ledger.ended(now.as_second()) {
            let part = match self.pods.get_key(&pod) {
                Some(found) => part_of_pod(&found, &scopes, now),
                None => Amounts::new(),
            };
            gave_back |= ledger.put(Subject::Pod(pod), part) == Effect::Less;
        }
        Some((ledger.used(), gave_back))
    }

    /// The parts of all objects of a namespace, and when pods that go stop to count.
    fn read(&self, namespace: &str, scopes: &Scopes) -> (Vec<Part>, Vec<(i64, ObjectKey)>) {
        let (here, all) = (Some(namespace), Selector::everything());
        let now = base::clock::now();
        let (mut parts, mut ends) = (vec![], vec![]);
        for one in self.pods.list(here, &all) {
            let key = ObjectKey::of(&one.metadata);
            ends.extend(
                end_of(&one).filter(|_| !pod::is_finished(&one)).map(|end| (end, key.clone())),
            );
            parts.push((Subject::Pod(key), part_of_pod(&one, scopes, now)));
        }
        for one in self.services.list(here, &all) {
            let part = part_of_service(&one, scopes);
            parts.push((Subject::Service(ObjectKey::of(&one.metadata)), part));
        }
        for one in self.claims.list(here, &all) {
            let part = part_of_claim(&one, scopes);
            parts.push((Subject::Claim(ObjectKey::of(&one.metadata)), part));
        }
        if scopes.is_empty() {
            let classes = self.device_classes();
            for one in self.device_claims.list(here, &all) {
                let part = self.part_of_device_claim(&one, &classes);
                parts.push((Subject::DeviceClaim(ObjectKey::of(&one.metadata)), part));
            }
        }
        (parts, ends)
    }

    fn due(&self) -> std::sync::MutexGuard<'_, BTreeMap<ObjectKey, Instant>> {
        self.due.lock().expect("no panic while held")
    }

    async fn reconcile(self: &Arc<Self>, key: &ObjectKey) -> Result<Outcome> {
        let Some(quota) = self.quotas.get_key(key) else {
            self.due().remove(key);
            self.ledgers().remove(key);
            return Ok(Outcome::Done);
        };
        let start = Instant::now();
        let due = self.due().get(key).copied();
        let mut counts = BTreeMap::new();
        for name in others(&quota) {
            if let Some(counter) = self.counter(&name).await? {
                counts.insert(name, counter.of(&key.namespace));
            }
        }
        // The classes of devices changed just now: this quota is in the queue again.
        let Some((used, gave_back)) = self.used(key, &quota) else { return Ok(Outcome::Done) };
        let lowers = gave_back || due.is_none_or(|due| due <= start);
        if let Some(status) = plan(&quota, used, &counts, lowers) {
            let mut updated = (*quota).clone();
            updated.status = Some(status);
            let api: Api<ResourceQuota> = self.context.client.api(Some(&key.namespace));
            match api.replace_status(&key.name, &PostParams::default(), &updated).await {
                Err(error) if error.is_not_found() => return Ok(Outcome::Done),
                done => done.map(drop)?,
            }
        }
        let mut table = self.due();
        // Objects that were deleted during the count are counted again.
        if lowers && table.get(key).copied() == due {
            table.insert(key.clone(), start + RESYNC);
        }
        let rest = table.get(key).map_or(RESYNC, |due| due.saturating_duration_since(start));
        drop(table);
        let end = self.ledgers().get(key).and_then(Ledger::next_end);
        // The second is over when the next begins.
        let end =
            end.map(|end| u64::try_from(end + 1 - base::clock::now().as_second()).unwrap_or(0));
        Ok(Outcome::After(
            end.map_or(rest, |seconds| rest.min(Duration::from_secs(seconds.max(1)))),
        ))
    }

    /// Counts objects of the resource behind a quota's name; `None` if the server has none.
    async fn counter(self: &Arc<Self>, name: &str) -> Result<Option<Counter>> {
        let table = || self.counted.lock().expect("no panic while held");
        if let Some(known) = table().get(name) {
            return Ok(Some(known.clone()));
        }
        let (all, _) = client::discovery::preferred(&self.context.client).await?;
        let by_count = |one: &&Discovered| {
            let (group, resource) = (one.gvr.group.as_str(), one.gvr.resource.as_str());
            one.namespaced && one.can("watch") && quota::is_used_by(name, group, resource)
        };
        let Some(found) = all.iter().find(by_count) else {
            return Ok(None);
        };
        let informer = self.context.informers.metadata(&found.gvr);
        informer.synced().await;
        let counter = Counter::default();
        let (this, counts) = (self.clone(), counter.clone());
        informer.subscribe(move |event| {
            if !matches!(event, RawEvent::Applied { old: Some(_), .. }) {
                let is_gone = matches!(event, RawEvent::Deleted(_));
                let namespace = &event.entry().header.key.namespace;
                counts.change(namespace, !is_gone);
                this.wake(Some(namespace), is_gone);
            }
        });
        // Another worker may have been as fast: one of the two is dropped with what it counted.
        Ok(Some(table().entry(name.to_owned()).or_insert(counter).clone()))
    }
}

fn hard(quota: &ResourceQuota) -> Amounts {
    quota.spec.as_ref().and_then(|spec| spec.hard.clone()).unwrap_or_default()
}

const TYPED: [(&str, &str); 4] = [
    ("", "pods"),
    ("", "services"),
    ("", "persistentvolumeclaims"),
    ("resource.k8s.io", "resourceclaims"),
];

/// Is this name for a resource that is counted by its contents?
fn is_typed(name: &str) -> bool {
    TYPED.iter().any(|(group, resource)| quota::is_used_by(name, group, resource))
}

/// The quota's names that are for other resources than those counted by their contents.
fn others(quota: &ResourceQuota) -> Vec<String> {
    hard(quota).into_keys().filter(|name| !is_typed(name)).collect()
}

/// The status to write, if it changes. Pure. Without `lowers`, amounts only increase.
fn plan(
    quota: &ResourceQuota,
    mut used: Amounts,
    counts: &BTreeMap<String, usize>,
    lowers: bool,
) -> Option<ResourceQuotaStatus> {
    let hard = hard(quota);
    let old = quota.status.clone().unwrap_or_default();
    let old_used = old.used.clone().unwrap_or_default();
    if quota::scopes(quota).is_empty() {
        let amount = |count: &usize| Quantity(count.to_string());
        used.extend(counts.iter().map(|(name, count)| (name.clone(), amount(count))));
    }
    let count = |name: &String| {
        let known = is_typed(name) || counts.contains_key(name);
        let zero = || Quantity("0".into());
        match used.get(name) {
            Some(amount) => amount.clone(),
            None if known => zero(),
            // No controller counts this resource: the recorded use stays.
            None => old_used.get(name).cloned().unwrap_or_else(zero),
        }
    };
    let count = |name: &String| {
        let counted = count(name);
        match old_used.get(name) {
            Some(old) if !lowers && quota::value(old) > quota::value(&counted) => old.clone(),
            _ => counted,
        }
    };
    let used: Amounts = hard
        .keys()
        .filter(|name| is_typed(name) || counts.contains_key(*name) || old_used.contains_key(*name))
        .map(|name| (name.clone(), count(name)))
        .collect();
    let equal = |a: &Amounts, b: &Amounts| {
        a.len() == b.len()
            && a.iter().all(|(name, one)| {
                b.get(name).is_some_and(|other| quota::value(one) == quota::value(other))
            })
    };
    let same = old.hard.as_ref().is_some_and(|known| equal(known, &hard))
        && old.used.as_ref().is_some_and(|known| equal(known, &used));
    (!same).then_some(ResourceQuotaStatus { hard: Some(hard), used: Some(used) })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{Value, from_value, json, to_value};

    use super::*;

    fn check(spec: Value, status: Value, expected: Value) {
        check_lowered(spec, status, true, expected);
    }

    fn check_lowered(spec: Value, status: Value, lowers: bool, expected: Value) {
        let quota: ResourceQuota =
            from_value(json!({"metadata": {"name": "q"}, "spec": spec, "status": status})).unwrap();
        let pod = |cpu: &str| -> Pod {
            from_value(json!({"metadata": {}, "spec": {"containers": [
                {"name": "c", "resources": {"requests": {"cpu": cpu}}}]}}))
            .unwrap()
        };
        let service: Service = from_value(json!({"metadata": {}, "spec": {"type": "NodePort",
            "ports": [{"port": 1}, {"port": 2}]}}))
        .unwrap();
        let devices: ResourceClaim = from_value(json!({"metadata": {}, "spec": {"devices":
            {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu", "count": 2}}]}}}))
        .unwrap();
        let scopes = quota::scopes(&quota);
        let mut ledger = Ledger::new(scopes.clone());
        let key = |name: &str| ObjectKey::new("ns", name);
        for (name, cpu) in [("a", "100m"), ("b", "1")] {
            let part = part_of_pod(&pod(cpu), &scopes, Timestamp::UNIX_EPOCH);
            ledger.put(Subject::Pod(key(name)), part);
        }
        ledger.put(Subject::Service(key("s")), part_of_service(&service, &scopes));
        if scopes.is_empty() {
            let classes = quota::DeviceClasses::default();
            let part = quota::of_device_claim(&devices, &classes, &Amounts::new());
            ledger.put(Subject::DeviceClaim(key("d")), part);
        }
        let counts = BTreeMap::from([("count/jobs.batch".to_owned(), 3)]);
        let found = plan(&quota, ledger.used(), &counts, lowers);
        assert_eq!(to_value(found).unwrap(), expected, "{spec}");
    }

    #[test]
    fn only_less_use_gives_back() {
        let pod = |spec: Value, phase: &str| -> Pod {
            let containers = json!([{"name": "c", "resources": {"requests": spec["cpu"]}}]);
            let node = spec["node"].clone();
            from_value(json!({"metadata": {}, "status": {"phase": phase},
                "spec": {"nodeName": node, "containers": containers}}))
            .unwrap()
        };
        let one = pod(json!({"cpu": {"cpu": "1"}}), "Pending");
        let bound = pod(json!({"cpu": {"cpu": "1"}, "node": "n"}), "Running");
        let smaller = pod(json!({"cpu": {"cpu": "500m"}, "node": "n"}), "Running");
        let over = pod(json!({"cpu": {"cpu": "1"}, "node": "n"}), "Succeeded");
        let check = |old: &Pod, new: &Pod, expected: Effect| {
            let part = |pod: &Pod| part_of_pod(pod, &[], Timestamp::UNIX_EPOCH);
            let mut ledger = Ledger::new(vec![]);
            let subject = || Subject::Pod(ObjectKey::new("ns", "p"));
            ledger.put(subject(), part(old));
            assert_eq!(ledger.put(subject(), part(new)), expected, "{new:?}");
        };
        // Another may be charged for at this moment.
        check(&one, &bound, Effect::None);
        check(&smaller, &bound, Effect::More);
        check(&bound, &smaller, Effect::Less);
        check(&bound, &over, Effect::Less);
    }

    /// A pod that was charged for and is not there yet must not be given back.
    #[test]
    fn what_is_charged_already_is_not_taken_back_without_a_reason() {
        let spec = json!({"hard": {"pods": "5", "services": "2"}});
        let charged =
            json!({"hard": {"pods": "5", "services": "2"}, "used": {"pods": "3", "services": "0"}});
        for (lowers, pods) in [(false, "3"), (true, "2")] {
            let expected = json!({"hard": {"pods": "5", "services": "2"},
                "used": {"pods": pods, "services": "1"}});
            check_lowered(spec.clone(), charged.clone(), lowers, expected);
        }
    }

    #[test]
    fn a_namespace_is_counted() {
        let hard = json!({"pods": "5", "cpu": "2", "services": "3", "services.nodeports": "4",
            "count/jobs.batch": "9", "limits.cpu": "1",
            "gpu.deviceclass.resource.k8s.io/devices": "3"});
        let used = json!({"pods": "2", "cpu": "1100m", "services": "1", "services.nodeports": "2",
            "count/jobs.batch": "3", "limits.cpu": "0",
            "gpu.deviceclass.resource.k8s.io/devices": "2"});
        check(json!({"hard": hard}), json!({}), json!({"hard": hard, "used": used}));
        check(json!({"hard": hard}), json!({"hard": hard, "used": used}), json!(null));
        let scoped = json!({"hard": {"pods": "5"}, "scopes": ["Terminating"]});
        let found = json!({"hard": {"pods": "5"}, "used": {"pods": "0"}});
        check(scoped, json!({}), found);
        let unknown = json!({"hard": {"count/nothing.example.com": "1"}});
        let found = json!({"hard": {"count/nothing.example.com": "1"}, "used": {}});
        check(unknown, json!({}), found);
    }
}
