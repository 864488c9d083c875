//! ResourceQuotas: counts what a namespace uses.
//!
//! In: quotas, pods, services, claims, and objects of what `count/…` names. Out: quotas' `status`.
//! Upstream: `pkg/controller/resourcequota`. The rules are in `api::quota`, which the admission
//! plugin counts by as well; a write is refused when the plugin wrote meanwhile, and tried again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use api::quota::{self, Amounts};
use client::discovery::Discovered;
use client::{
    Api, ErrorExt, Lister, ObjectKey, Outcome, PostParams, RawInformer, Result, WorkQueue,
    spawn_workers,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, Pod, ResourceQuota, ResourceQuotaStatus, Service,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use machinery::selector::Selector;

use crate::context::{Context, Descriptor};

pub const DESCRIPTOR: Descriptor = Descriptor {
    name: "resourcequota-controller",
    account: "resourcequota-controller",
    component: "resourcequota-controller",
    start,
};

const WORKERS: usize = 5;

struct Controller {
    context: Context,
    quotas: Lister<ResourceQuota>,
    pods: Lister<Pod>,
    services: Lister<Service>,
    claims: Lister<PersistentVolumeClaim>,
    queue: WorkQueue<ObjectKey>,
    /// By `count/…` name: resources that a quota once named. Guarded for a lookup.
    counted: Mutex<BTreeMap<String, RawInformer>>,
}

fn start(context: Context) {
    let quotas = context.informers.of::<ResourceQuota>();
    let pods = context.informers.of::<Pod>();
    let services = context.informers.of::<Service>();
    let claims = context.informers.of::<PersistentVolumeClaim>();
    let controller = Arc::new(Controller {
        quotas: quotas.lister(),
        pods: pods.lister(),
        services: services.lister(),
        claims: claims.lister(),
        queue: WorkQueue::new("resourcequota_primary"),
        counted: Mutex::default(),
        context,
    });
    let this = controller.clone();
    quotas.subscribe_raw(move |event| this.queue.add(event.entry().header.key.clone()));
    let this = controller.clone();
    pods.subscribe(move |event| {
        let facts = |pod: &Pod| {
            let status = pod.status.as_ref().and_then(|status| status.phase.clone());
            (status, pod.metadata.deletion_timestamp.clone(), pod.spec.clone())
        };
        let same = event.old().is_some_and(|old| facts(old) == facts(event.object()));
        if event.is_deleted() || !same {
            this.wake(event.object().metadata.namespace.as_deref());
        }
    });
    let this = controller.clone();
    services.subscribe(move |event| this.wake(event.object().metadata.namespace.as_deref()));
    let this = controller.clone();
    claims.subscribe(move |event| this.wake(event.object().metadata.namespace.as_deref()));
    let tasks = controller.context.tasks.clone();
    tasks.clone().spawn("resourcequota", async move {
        quotas.synced().await;
        pods.synced().await;
        services.synced().await;
        claims.synced().await;
        let queue = controller.queue.clone();
        spawn_workers(&tasks, &queue, WORKERS, move |key| {
            let this = controller.clone();
            async move { this.reconcile(&key).await }
        });
    });
}

/// What a namespace has that is counted otherwise than by existing.
struct Observed<'a> {
    pods: &'a [Arc<Pod>],
    services: &'a [Arc<Service>],
    claims: &'a [Arc<PersistentVolumeClaim>],
    /// By the names that quotas use.
    counts: &'a BTreeMap<String, usize>,
    now: Timestamp,
}

impl Controller {
    fn wake(&self, namespace: Option<&str>) {
        for entry in self.quotas.entries(namespace, &Selector::everything()) {
            self.queue.add(entry.header.key.clone());
        }
    }

    async fn reconcile(self: &Arc<Self>, key: &ObjectKey) -> Result<Outcome> {
        let Some(quota) = self.quotas.get_key(key) else {
            return Ok(Outcome::Done);
        };
        let mut counts = BTreeMap::new();
        for name in others(&quota) {
            if let Some(informer) = self.counter(&name).await? {
                let all = informer.entries();
                let here = all.iter().filter(|one| one.header.key.namespace == key.namespace);
                counts.insert(name, here.count());
            }
        }
        let (namespace, all) = (Some(&*key.namespace), Selector::everything());
        let observed = Observed {
            pods: &self.pods.list(namespace, &all),
            services: &self.services.list(namespace, &all),
            claims: &self.claims.list(namespace, &all),
            counts: &counts,
            now: base::clock::now(),
        };
        let Some(status) = plan(&quota, &observed) else {
            return Ok(Outcome::Done);
        };
        let mut updated = (*quota).clone();
        updated.status = Some(status);
        let api: Api<ResourceQuota> = self.context.client.api(namespace);
        match api.replace_status(&key.name, &PostParams::default(), &updated).await {
            Err(error) if error.is_not_found() => Ok(Outcome::Done),
            done => done.map(|_| Outcome::Done),
        }
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
                this.wake(Some(&event.entry().header.key.namespace));
            }
        });
        Ok(Some(informer))
    }
}

fn hard(quota: &ResourceQuota) -> Amounts {
    quota.spec.as_ref().and_then(|spec| spec.hard.clone()).unwrap_or_default()
}

const TYPED: [&str; 3] = ["pods", "services", "persistentvolumeclaims"];

/// The quota's names that are for other resources than those counted by their contents.
fn others(quota: &ResourceQuota) -> Vec<String> {
    let typed = |name: &str| TYPED.iter().any(|resource| quota::is_used_by(name, "", resource));
    hard(quota).into_keys().filter(|name| !typed(name)).collect()
}

/// The status to write, if it is another. Pure.
fn plan(quota: &ResourceQuota, observed: &Observed) -> Option<ResourceQuotaStatus> {
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
        for (name, count) in observed.counts {
            used.insert(name.clone(), Quantity(count.to_string()));
        }
    }
    let count = |name: &String| {
        let known = TYPED.iter().any(|resource| quota::is_used_by(name, "", resource))
            || observed.counts.contains_key(name);
        let zero = || Quantity("0".into());
        match used.get(name) {
            Some(amount) => amount.clone(),
            None if known => zero(),
            // Nobody counts it: what was written stays.
            None => old_used.get(name).cloned().unwrap_or_else(zero),
        }
    };
    let used: Amounts = hard
        .keys()
        .filter(|name| {
            TYPED.iter().any(|resource| quota::is_used_by(name, "", resource))
                || observed.counts.contains_key(*name)
                || old_used.contains_key(*name)
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
            counts: &BTreeMap::from([("count/jobs.batch".to_owned(), 3)]),
            now: Timestamp::UNIX_EPOCH,
        };
        let found = plan(&quota, &observed);
        assert_eq!(to_value(found).unwrap(), expected, "{spec}");
    }

    #[test]
    fn a_namespace_is_counted() {
        let hard = json!({"pods": "5", "cpu": "2", "services": "3", "services.nodeports": "4",
            "count/jobs.batch": "9", "limits.cpu": "1"});
        let used = json!({"pods": "2", "cpu": "1100m", "services": "1", "services.nodeports": "2",
            "count/jobs.batch": "3", "limits.cpu": "0"});
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
