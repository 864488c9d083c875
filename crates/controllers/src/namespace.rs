//! Namespaces: empties those that are deleted, then lets them go.
//!
//! In: namespaces that terminate, discovery. Out: deletions of everything inside, conditions, the
//! `kubernetes` finalizer removed.
//! Upstream: `pkg/controller/namespace/deletion`, with `OrderedNamespaceDeletion`: pods go before
//! what may protect them (network policies).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use client::discovery::{self, Discovered};
use client::{
    Api, Client, Error, ErrorExt, Lister, Outcome, PostParams, RawEvent, Result, WorkQueue,
    spawn_workers,
};
use http::Method;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, NamespaceCondition, Pod};
use machinery::Time;
use serde::Deserialize;
use serde_json::json;

use crate::context::{Context, Descriptor};

pub const DESCRIPTOR: Descriptor = Descriptor {
    name: "namespace-controller",
    account: "namespace-controller",
    component: "namespace-controller",
    start,
};

const WORKERS: usize = 10;
const FINALIZER: &str = "kubernetes";
/// When nothing tells how long what is left takes.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
const AT_MOST: Duration = Duration::from_secs(15);

struct Controller {
    client: Client,
    namespaces: Lister<Namespace>,
}

fn start(context: Context) {
    let namespaces = context.informers.of::<Namespace>();
    let queue: WorkQueue<Arc<str>> = WorkQueue::new("namespace");
    let adds = queue.clone();
    namespaces.subscribe_raw(move |event| {
        let header = &event.entry().header;
        if header.deleting {
            adds.add(header.key.name.clone());
        }
    });
    // The last pod is what a namespace most often waits for.
    let (pods, adds) = (context.informers.of::<Pod>(), queue.clone());
    pods.subscribe_raw(move |event| {
        if matches!(event, RawEvent::Deleted(_)) {
            adds.add(event.entry().header.key.namespace.clone());
        }
    });
    let controller =
        Arc::new(Controller { client: context.client, namespaces: namespaces.lister() });
    let tasks = context.tasks;
    tasks.clone().spawn("namespace", async move {
        namespaces.synced().await;
        spawn_workers(&tasks, &queue, WORKERS, move |name: Arc<str>| {
            let this = controller.clone();
            async move { this.reconcile(&name).await }
        });
    });
}

/// What a pass over the contents found.
#[derive(Default)]
struct Sweep {
    /// Objects left, by resource.
    left: BTreeMap<String, usize>,
    /// Objects left that wait for a finalizer.
    finalizers: BTreeMap<String, usize>,
    discovery: Option<String>,
    failed: Vec<String>,
    /// The longest grace of the pods left.
    grace: Option<i64>,
}

#[derive(Deserialize)]
struct List {
    #[serde(default)]
    items: Vec<Item>,
}

#[derive(Deserialize)]
struct Item {
    metadata: machinery::ObjectMeta,
}

impl Controller {
    async fn reconcile(&self, name: &str) -> Result<Outcome> {
        let Some(namespace) = self.namespaces.get("", name) else {
            return Ok(Outcome::Done);
        };
        let finalizers =
            namespace.spec.as_ref().and_then(|spec| spec.finalizers.clone()).unwrap_or_default();
        if namespace.metadata.deletion_timestamp.is_none()
            || !finalizers.iter().any(|one| one == FINALIZER)
        {
            return Ok(Outcome::Done);
        }
        let sweep = self.sweep(name).await;
        self.write_conditions(&namespace, &sweep).await?;
        if let Some(error) = sweep.failed.first().or(sweep.discovery.as_ref()) {
            tracing::debug!(namespace = name, error, "contents cannot be deleted yet");
            return Ok(Outcome::Backoff);
        }
        if !sweep.left.is_empty() {
            let grace = sweep.grace.map(|grace| Duration::from_secs(grace.max(0) as u64 / 2 + 1));
            // Deletions of contents are not watched: with pods on their way, a quick look pays.
            return Ok(Outcome::After(
                grace.unwrap_or(LOOK_AGAIN).min(AT_MOST).min(Duration::from_secs(1)),
            ));
        }
        self.finalize(&namespace, finalizers).await.map(|()| Outcome::Done)
    }

    /// Deletes all contents; pods first, the rest once they are gone.
    async fn sweep(&self, name: &str) -> Sweep {
        let mut sweep = Sweep::default();
        let resources = match discovery::preferred(&self.client).await {
            Ok((resources, complete)) => {
                if !complete {
                    sweep.discovery = Some("not every API group answers".into());
                }
                resources
            }
            Err(error) => {
                sweep.discovery = Some(error.text());
                return sweep;
            }
        };
        let (pods, others): (Vec<_>, Vec<_>) = resources
            .into_iter()
            .filter(|one| one.namespaced && one.can("delete"))
            .partition(|one| one.gvr.group.is_empty() && one.gvr.resource == "pods");
        for resource in &pods {
            self.empty(name, resource, &mut sweep).await;
        }
        if sweep.left.is_empty() {
            for resource in &others {
                self.empty(name, resource, &mut sweep).await;
            }
        }
        sweep
    }

    async fn empty(&self, namespace: &str, resource: &Discovered, sweep: &mut Sweep) {
        if let Err(error) = self.try_empty(namespace, resource, sweep).await
            && !error.is_not_found()
            && error.code() != 405
        {
            sweep.failed.push(error.text());
        }
    }

    async fn try_empty(
        &self,
        namespace: &str,
        resource: &Discovered,
        sweep: &mut Sweep,
    ) -> Result<()> {
        let path = resource.gvr.collection(Some(namespace));
        let list = || async { self.client.get::<List>(&path).await };
        let found = if resource.can("list") { list().await?.items } else { vec![] };
        if found.is_empty() && resource.can("list") {
            return Ok(());
        }
        let fresh = found.iter().any(|item| item.metadata.deletion_timestamp.is_none());
        if fresh || !resource.can("list") {
            self.delete_all(namespace, resource, &found).await?;
        }
        let left = if resource.can("list") { list().await?.items } else { vec![] };
        if left.is_empty() {
            return Ok(());
        }
        let name = resource.gvr.to_string();
        for item in &left {
            for finalizer in item.metadata.finalizers.iter().flatten() {
                *sweep.finalizers.entry(finalizer.clone()).or_default() += 1;
            }
            let grace = item.metadata.deletion_grace_period_seconds;
            sweep.grace = sweep.grace.max(grace);
        }
        *sweep.left.entry(name).or_default() += left.len();
        Ok(())
    }

    async fn delete_all(
        &self,
        namespace: &str,
        resource: &Discovered,
        found: &[Item],
    ) -> Result<()> {
        let options =
            json!({"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"});
        let options = options.to_string();
        if resource.can("deletecollection") {
            let path = resource.gvr.collection(Some(namespace));
            let done =
                self.client.call(Method::DELETE, &path, "application/json", options.clone()).await;
            match done {
                Err(error) if error.code() == 405 => {}
                done => return done.map(drop),
            }
        }
        for item in found.iter().filter(|item| item.metadata.deletion_timestamp.is_none()) {
            let path = resource
                .gvr
                .object(Some(namespace), item.metadata.name.as_deref().unwrap_or_default());
            match self.client.call(Method::DELETE, &path, "application/json", options.clone()).await
            {
                Err(error) if !error.is_not_found() => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    async fn write_conditions(&self, namespace: &Namespace, sweep: &Sweep) -> Result<()> {
        let old = namespace
            .status
            .as_ref()
            .and_then(|status| status.conditions.clone())
            .unwrap_or_default();
        let new = conditions(&old, sweep, base::clock::now_seconds());
        if new == old {
            return Ok(());
        }
        let name = namespace.metadata.name.as_deref().unwrap_or_default();
        let mut updated = namespace.clone();
        let status = updated.status.get_or_insert_default();
        status.phase = Some("Terminating".into());
        status.conditions = Some(new);
        let api: Api<Namespace> = self.client.api(None);
        match api.replace_status(name, &PostParams::default(), &updated).await {
            Err(error) if error.is_not_found() => Ok(()),
            done => done.map(drop),
        }
    }

    async fn finalize(&self, namespace: &Namespace, finalizers: Vec<String>) -> Result<()> {
        let mut updated = namespace.clone();
        let rest: Vec<_> = finalizers.into_iter().filter(|one| one != FINALIZER).collect();
        updated.spec.get_or_insert_default().finalizers = Some(rest);
        let name = namespace.metadata.name.as_deref().unwrap_or_default();
        // A new status write moved the object on: the finalizer does not depend on it.
        updated.metadata.resource_version = None;
        let body = serde_json::to_vec(&updated).map_err(Error::SerdeError)?;
        let path = format!("/api/v1/namespaces/{name}/finalize");
        match self.client.call(Method::PUT, &path, "application/json", body).await {
            Err(error) if error.is_not_found() => Ok(()),
            done => done.map(drop),
        }
    }
}

/// A condition's kind with its status, reason and message.
type Verdict = (&'static str, (&'static str, &'static str, String));

/// What a sweep found, as the five conditions.
fn verdicts(sweep: &Sweep) -> [Verdict; 5] {
    let listed = |counts: &BTreeMap<String, usize>, form: fn(&str, usize) -> String| {
        counts.iter().map(|(name, count)| form(name, *count)).collect::<Vec<_>>().join(", ")
    };
    let verdict = |problem: Option<String>,
                   reason: &'static str,
                   fine: (&'static str, &'static str)| match problem {
        Some(message) => ("True", reason, message),
        None => ("False", fine.0, fine.1.to_owned()),
    };
    let content = (!sweep.left.is_empty()).then(|| {
        let list =
            listed(&sweep.left, |name, count| format!("{name} has {count} resource instances"));
        format!("Some resources are remaining: {list}")
    });
    let finalizers = (!sweep.finalizers.is_empty()).then(|| {
        let list = listed(&sweep.finalizers, |name, count| {
            format!("{name} in {count} resource instances")
        });
        format!("Some content in the namespace has finalizers remaining: {list}")
    });
    let failed = (!sweep.failed.is_empty()).then(|| {
        format!(
            "Failed to delete all resource types, {} remaining: {}",
            sweep.failed.len(),
            sweep.failed.join(", ")
        )
    });
    let discovery =
        sweep.discovery.as_ref().map(|error| format!("Discovery failed for some groups: {error}"));
    let removed = ("ContentRemoved", "All content successfully removed");
    [
        (
            "NamespaceDeletionDiscoveryFailure",
            verdict(
                discovery,
                "DiscoveryFailed",
                ("ResourcesDiscovered", "All resources successfully discovered"),
            ),
        ),
        (
            "NamespaceDeletionGroupVersionParsingFailure",
            verdict(
                None,
                "GroupVersionParsingFailed",
                ("ParsedGroupVersions", "All legacy kube types successfully parsed"),
            ),
        ),
        (
            "NamespaceDeletionContentFailure",
            verdict(
                failed,
                "ContentDeletionFailed",
                (
                    "ContentDeleted",
                    "All content successfully deleted, may be waiting on finalization",
                ),
            ),
        ),
        ("NamespaceContentRemaining", verdict(content, "SomeResourcesRemain", removed)),
        (
            "NamespaceFinalizersRemaining",
            verdict(
                finalizers,
                "SomeFinalizersRemain",
                ("ContentHasNoFinalizers", "All content-preserving finalizers finished"),
            ),
        ),
    ]
}

/// Upstream: `namespaceConditionUpdater`. Pure.
fn conditions(
    old: &[NamespaceCondition],
    sweep: &Sweep,
    now: Timestamp,
) -> Vec<NamespaceCondition> {
    let new = verdicts(sweep);
    let mut all: Vec<_> =
        old.iter().filter(|one| !new.iter().any(|(kind, _)| *kind == one.type_)).cloned().collect();
    for (kind, (status, reason, message)) in new {
        let known = old.iter().find(|one| one.type_ == kind);
        let since = known
            .filter(|known| known.status == status)
            .and_then(|known| known.last_transition_time.clone());
        all.push(NamespaceCondition {
            type_: kind.into(),
            status: status.into(),
            reason: Some(reason.into()),
            message: Some(message),
            last_transition_time: Some(since.unwrap_or(Time(now))),
        });
    }
    all
}
