//! ResourceQuotas: counts what a namespace uses.
//!
//! In: quotas, pods, services, claims, and objects of what `count/…` names. Out: quotas' `status`.
//! Upstream: `pkg/controller/resourcequota`. The rules are in `api::quota`, which the admission
//! plugin counts by as well; a write is refused when the plugin wrote meanwhile, and tried again.
//!
//! Invariant: recorded use is lowered only when something was given back, when the limits changed, or
//! every [`RESYNC`]. The plugin charges before the object is there to be counted: whoever counted at
//! each change of a status would take back charges that are on their way.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::quota::{self, Amounts};
use client::discovery::Discovered;
use client::{
    Api, ErrorExt, Event, Kind, Lister, ObjectKey, Outcome, PostParams, RawInformer, Result,
    WorkQueue, spawn_workers,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, Pod, ResourceQuota, ResourceQuotaStatus, Service,
};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use machinery::selector::Selector;
use tokio::time::Instant;

use crate::context::{Context, Descriptor};

pub const DESCRIPTOR: Descriptor = Descriptor {
    name: "resourcequota-controller",
    account: "resourcequota-controller",
    component: "resourcequota-controller",
    start,
};

const WORKERS: usize = 5;
/// Gives back what objects were charged for that failed to be written.
const RESYNC: Duration = Duration::from_secs(300);

struct Controller {
    context: Context,
    quotas: Lister<ResourceQuota>,
    pods: Lister<Pod>,
    services: Lister<Service>,
    claims: Lister<PersistentVolumeClaim>,
    device_claims: Lister<ResourceClaim>,
    classes: Lister<DeviceClass>,
    queue: WorkQueue<ObjectKey>,
    /// When a quota's use may next be lowered; unknown ones at once. Guarded for a lookup.
    due: Mutex<BTreeMap<ObjectKey, Instant>>,
    /// By `count/…` name: resources that a quota once named. Guarded for a lookup.
    counted: Mutex<BTreeMap<String, RawInformer>>,
}

fn start(context: Context) {
    let quotas = context.informers.of::<ResourceQuota>();
    let pods = context.informers.of::<Pod>();
    let services = context.informers.of::<Service>();
    let claims = context.informers.of::<PersistentVolumeClaim>();
    let device_claims = context.informers.of::<ResourceClaim>();
    let classes = context.informers.of::<DeviceClass>();
    let controller = Arc::new(Controller {
        quotas: quotas.lister(),
        pods: pods.lister(),
        services: services.lister(),
        claims: claims.lister(),
        device_claims: device_claims.lister(),
        classes: classes.lister(),
        queue: WorkQueue::new("resourcequota_primary"),
        due: Mutex::default(),
        counted: Mutex::default(),
        context,
    });
    let this = controller.clone();
    quotas.subscribe(move |event| {
        let hard = |quota: &ResourceQuota| quota.spec.as_ref().and_then(|spec| spec.hard.clone());
        let same = event.old().is_some_and(|old| hard(&old) == hard(event.object()));
        if event.is_deleted() || !same {
            this.recount(event.key());
        }
    });
    let this = controller.clone();
    pods.subscribe(move |event| this.changed(event, gives_back_pod));
    let this = controller.clone();
    services.subscribe(move |event| {
        this.changed(event, |old, new| less(&quota::of_service(old), &quota::of_service(new)));
    });
    let this = controller.clone();
    claims.subscribe(move |event| {
        this.changed(event, gives_back_claim);
    });
    let this = controller.clone();
    // What a claim asks for does not change.
    device_claims.subscribe(move |event| this.changed(event, |_, _| false));
    let tasks = controller.context.tasks.clone();
    tasks.clone().spawn("resourcequota", async move {
        quotas.synced().await;
        pods.synced().await;
        services.synced().await;
        claims.synced().await;
        device_claims.synced().await;
        classes.synced().await;
        let queue = controller.queue.clone();
        spawn_workers(&tasks, &queue, WORKERS, move |key| {
            let this = controller.clone();
            async move { this.reconcile(&key).await }
        });
    });
}

/// Is any amount smaller than before?
fn less(old: &Amounts, new: &Amounts) -> bool {
    let smaller = |name: &String, amount: &Quantity| {
        new.get(name).is_none_or(|new| quota::value(new) < quota::value(amount))
    };
    old.iter().any(|(name, amount)| smaller(name, amount))
}

/// Does the pod use less than before, or fall out of a quota's scope? That it is bound, starts or
/// reports does not count.
fn gives_back_pod(old: &Pod, new: &Pod) -> bool {
    let scope = |pod: &Pod| pod.spec.as_ref().and_then(|spec| spec.active_deadline_seconds);
    let now = base::clock::now();
    scope(old) != scope(new) || less(&quota::of_pod(old, now), &quota::of_pod(new, now))
}

fn gives_back_claim(old: &PersistentVolumeClaim, new: &PersistentVolumeClaim) -> bool {
    quota::attributes_classes(old) != quota::attributes_classes(new)
        || less(&quota::of_claim(old), &quota::of_claim(new))
}

/// What a namespace has that is counted otherwise than by existing.
struct Observed<'a> {
    pods: &'a [Arc<Pod>],
    services: &'a [Arc<Service>],
    claims: &'a [Arc<PersistentVolumeClaim>],
    device_claims: &'a [Arc<ResourceClaim>],
    classes: quota::DeviceClasses,
    /// By the names that quotas use.
    counts: &'a BTreeMap<String, usize>,
    now: Timestamp,
}

impl Controller {
    /// What comes is charged already, and counted only if it was not; what changes or goes gives back.
    fn changed<T: Kind>(&self, event: &Event<T>, gives_back: impl Fn(&T, &T) -> bool) {
        let namespace = event.object().metadata().namespace.clone();
        let namespace = namespace.as_deref();
        // Most namespaces have no quota: nothing is compared for them.
        if self.quotas.entries(namespace, &Selector::everything()).is_empty() {
            return;
        }
        match event {
            Event::Applied { old: None, .. } => self.wake(namespace, false),
            Event::Applied { old: Some(old), new }
                if old.get().is_some_and(|old| !gives_back(&old, new)) => {}
            Event::Applied { .. } | Event::Deleted(_) => self.wake(namespace, true),
        }
    }

    fn wake(&self, namespace: Option<&str>, gave_back: bool) {
        for entry in self.quotas.entries(namespace, &Selector::everything()) {
            let key = entry.header.key.clone();
            if gave_back { self.recount(key) } else { self.queue.add(key) }
        }
    }

    /// Counts all anew, downwards too.
    fn recount(&self, key: ObjectKey) {
        self.due().insert(key.clone(), Instant::now());
        self.queue.add(key);
    }

    fn due(&self) -> std::sync::MutexGuard<'_, BTreeMap<ObjectKey, Instant>> {
        self.due.lock().expect("no panic while held")
    }

    async fn reconcile(self: &Arc<Self>, key: &ObjectKey) -> Result<Outcome> {
        let Some(quota) = self.quotas.get_key(key) else {
            self.due().remove(key);
            return Ok(Outcome::Done);
        };
        let start = Instant::now();
        let due = self.due().get(key).copied();
        let lowers = due.is_none_or(|due| due <= start);
        let mut counts = BTreeMap::new();
        for name in others(&quota) {
            if let Some(informer) = self.counter(&name).await? {
                let all = informer.entries();
                let here = all.iter().filter(|one| one.header.key.namespace == key.namespace);
                counts.insert(name, here.count());
            }
        }
        let (namespace, all) = (Some(&*key.namespace), Selector::everything());
        let classes = self.classes.list(None, &all);
        let observed = Observed {
            pods: &self.pods.list(namespace, &all),
            services: &self.services.list(namespace, &all),
            claims: &self.claims.list(namespace, &all),
            device_claims: &self.device_claims.list(namespace, &all),
            classes: quota::DeviceClasses::new(classes.iter().map(|class| &**class)),
            counts: &counts,
            now: base::clock::now(),
        };
        if let Some(status) = plan(&quota, &observed, lowers) {
            let mut updated = (*quota).clone();
            updated.status = Some(status);
            let api: Api<ResourceQuota> = self.context.client.api(namespace);
            match api.replace_status(&key.name, &PostParams::default(), &updated).await {
                Err(error) if error.is_not_found() => return Ok(Outcome::Done),
                done => done.map(drop)?,
            }
        }
        let mut table = self.due();
        // What was given back while it was counted is counted again.
        if lowers && table.get(key).copied() == due {
            table.insert(key.clone(), start + RESYNC);
        }
        let rest = table.get(key).map_or(RESYNC, |due| due.saturating_duration_since(start));
        Ok(Outcome::After(rest))
    }

    /// Counts objects of the resource behind a quota's name; `None` if the server has none.
    async fn counter(self: &Arc<Self>, name: &str) -> Result<Option<RawInformer>> {
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
        table().insert(name.to_owned(), informer.clone());
        let this = self.clone();
        informer.subscribe(move |event| {
            if !matches!(event, client::RawEvent::Applied { old: Some(_), .. }) {
                let is_gone = matches!(event, client::RawEvent::Deleted(_));
                this.wake(Some(&event.entry().header.key.namespace), is_gone);
            }
        });
        Ok(Some(informer))
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

/// The status to write, if it is another. Pure. Without `lowers` only more is told than there is.
fn plan(quota: &ResourceQuota, observed: &Observed, lowers: bool) -> Option<ResourceQuotaStatus> {
    let hard = hard(quota);
    let scopes = quota::scopes(quota);
    let old = quota.status.clone().unwrap_or_default();
    let old_used = old.used.clone().unwrap_or_default();
    let mut used = Amounts::new();
    for one in observed.pods {
        if scopes.iter().all(|scope| quota::pod_is_in_scope(one, scope)) {
            quota::add(&mut used, &quota::of_pod(one, observed.now));
        }
    }
    for one in observed.claims {
        if scopes.iter().all(|scope| quota::claim_is_in_scope(one, scope)) {
            quota::add(&mut used, &quota::of_claim(one));
        }
    }
    if scopes.is_empty() {
        for one in observed.services {
            quota::add(&mut used, &quota::of_service(one));
        }
        for one in observed.device_claims {
            let pods = observed.pods.iter().map(|pod| &**pod);
            let claims = observed.device_claims.iter().map(|claim| &**claim);
            let counted = quota::of_owner(one, pods, claims, observed.now);
            quota::add(&mut used, &quota::of_device_claim(one, &observed.classes, &counted));
        }
        for (name, count) in observed.counts {
            used.insert(name.clone(), Quantity(count.to_string()));
        }
    }
    let count = |name: &String| {
        let known = is_typed(name) || observed.counts.contains_key(name);
        let zero = || Quantity("0".into());
        match used.get(name) {
            Some(amount) => amount.clone(),
            None if known => zero(),
            // Nobody counts it: what was written stays.
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
        .filter(|name| {
            is_typed(name) || observed.counts.contains_key(*name) || old_used.contains_key(*name)
        })
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
        let pod = |cpu: &str| -> Arc<Pod> {
            Arc::new(
                from_value(json!({"metadata": {}, "spec": {"containers": [
                    {"name": "c", "resources": {"requests": {"cpu": cpu}}}]}}))
                .unwrap(),
            )
        };
        let service = from_value(json!({"metadata": {}, "spec": {"type": "NodePort", "ports": [
                {"port": 1}, {"port": 2}]}}));
        let observed = Observed {
            pods: &[pod("100m"), pod("1")],
            services: &[Arc::new(service.unwrap())],
            claims: &[],
            device_claims: &[Arc::new(
                from_value(json!({"metadata": {}, "spec": {"devices":
                {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu", "count": 2}}]}}}))
                .unwrap(),
            )],
            classes: quota::DeviceClasses::default(),
            counts: &BTreeMap::from([("count/jobs.batch".to_owned(), 3)]),
            now: Timestamp::UNIX_EPOCH,
        };
        let found = plan(&quota, &observed, lowers);
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
        assert!(!gives_back_pod(&one, &bound), "another may be charged for at this moment");
        assert!(!gives_back_pod(&smaller, &bound));
        assert!(gives_back_pod(&bound, &smaller));
        assert!(gives_back_pod(&bound, &over));
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
