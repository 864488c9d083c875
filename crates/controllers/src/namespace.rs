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
use client::{Api, Client, Error, ErrorExt, Lister, Outcome, PostParams, RawEvent, Result};
use http::Method;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, NamespaceCondition, Pod};
use machinery::Time;
use serde::Deserialize;
use serde_json::json;

use crate::descriptor::{Descriptor, Row, on_metadata};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller, Arc<str>> {
    name: "namespace-controller",
    account: "namespace-controller",
    component: "namespace-controller",
    queue: "namespace",
    workers: 10,
    new: |setup| Some(Controller { client: setup.client.clone(), namespaces: setup.lister() }),
    watches: &[
        &on_metadata::<Namespace, _, _>(|_: &Controller, queue, event| {
            let header = &event.entry().header;
            if header.deleting {
                queue.add(header.key.name.clone());
            }
        }),
        // A namespace waits most often for its last pod.
        &on_metadata::<Pod, _, _>(|_: &Controller, queue, event| {
            if matches!(event, RawEvent::Deleted(_)) {
                queue.add(event.entry().header.key.namespace.clone());
            }
        }),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

const FINALIZER: &str = "kubernetes";
/// The retry period if no remaining object tells how long it needs.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
const AT_MOST: Duration = Duration::from_secs(15);

struct Controller {
    client: Client,
    namespaces: Lister<Namespace>,
}

/// The result of a pass over the contents.
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

/// Objects per page of a list.
const PAGE: usize = 500;

/// A page of a list, metadata only.
#[derive(Deserialize)]
struct List {
    #[serde(default)]
    metadata: machinery::ListMeta,
    /// `null` where there is none: so the API has empty lists of metadata.
    items: Option<Vec<Item>>,
}

#[derive(Deserialize)]
struct Item {
    metadata: machinery::ObjectMeta,
}

/// The objects of one resource in a namespace.
#[derive(Default)]
struct Contents {
    count: usize,
    /// Names of the objects that are not yet deleted.
    fresh: Vec<String>,
    finalizers: BTreeMap<String, usize>,
    /// The longest grace.
    grace: Option<i64>,
}

impl Contents {
    fn add(&mut self, items: Vec<Item>) {
        self.count += items.len();
        for Item { metadata } in items {
            for finalizer in metadata.finalizers.into_iter().flatten() {
                *self.finalizers.entry(finalizer).or_default() += 1;
            }
            self.grace = self.grace.max(metadata.deletion_grace_period_seconds);
            if metadata.deletion_timestamp.is_none() {
                self.fresh.extend(metadata.name);
            }
        }
    }
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
        if !resource.can("list") {
            return self.delete_all(namespace, resource).await;
        }
        // Most often nothing is there, or all of it is going already: one look is enough then.
        let found = self.contents(namespace, resource, true).await?;
        let left = match found.fresh.is_empty() {
            true => found,
            false => {
                self.delete_all(namespace, resource).await?;
                self.contents(namespace, resource, false).await?
            }
        };
        if left.count == 0 {
            return Ok(());
        }
        for (finalizer, count) in left.finalizers {
            *sweep.finalizers.entry(finalizer).or_default() += count;
        }
        sweep.grace = sweep.grace.max(left.grace);
        *sweep.left.entry(resource.gvr.to_string()).or_default() += left.count;
        Ok(())
    }

    /// Lists the objects page by page; up to the first page with an object that is not yet deleted, if
    /// that is all that matters.
    async fn contents(
        &self,
        namespace: &str,
        resource: &Discovered,
        until_fresh: bool,
    ) -> Result<Contents> {
        let path = resource.gvr.collection(Some(namespace));
        let (mut contents, mut token) = (Contents::default(), None);
        loop {
            let list: List = self.client.metadata_page(&path, PAGE, token.as_deref()).await?;
            contents.add(list.items.unwrap_or_default());
            token = list.metadata.continue_.filter(|token| !token.is_empty());
            if token.is_none() || (until_fresh && !contents.fresh.is_empty()) {
                return Ok(contents);
            }
        }
    }

    async fn delete_all(&self, namespace: &str, resource: &Discovered) -> Result<()> {
        let options =
            json!({"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"});
        let options = options.to_string();
        if resource.can("deletecollection") {
            let path = resource.gvr.collection(Some(namespace));
            match self.client.delete_collection(&path, options.clone()).await {
                Err(error) if error.code() == 405 => {}
                done => return done,
            }
        }
        if !resource.can("list") {
            return Ok(());
        }
        for name in self.contents(namespace, resource, false).await?.fresh {
            let path = resource.gvr.object(Some(namespace), &name);
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

/// Upstream writes a dot after the resources of the core group, too.
fn remaining(name: &str, count: usize) -> String {
    let dot = if name.contains('.') { "" } else { "." };
    format!("{name}{dot} has {count} resource instances")
}

/// The result of a pass as the five conditions.
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
    let content = (!sweep.left.is_empty())
        .then(|| format!("Some resources are remaining: {}", listed(&sweep.left, remaining)));
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use base::task::Tasks;
    use client::{Gvr, Informers};
    use serde_json::Value;

    use super::*;
    use crate::testing::{self, Asked};

    const PATH: &str = "/api/v1/namespaces/ns/secrets";

    /// A collection that marks deleted objects: a finalizer holds all of them.
    struct Held {
        items: Vec<Value>,
        asked: Vec<String>,
    }

    impl Held {
        fn new(count: usize) -> Self {
            let item =
                |at: usize| json!({"metadata": {"name": format!("s{at}"), "finalizers": ["x/y"]}});
            Self { items: (0..count).map(item).collect(), asked: vec![] }
        }

        fn answer(&mut self, request: &Asked) -> Option<Value> {
            if request.path() != PATH {
                return None;
            }
            assert!(request.accept.contains("as=PartialObjectMetadataList"), "{}", request.uri);
            self.asked.push(format!(
                "{} {}",
                request.method,
                request.uri.query().unwrap_or_default()
            ));
            if request.method == Method::DELETE {
                self.items.iter_mut().for_each(|item| {
                    item["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
                });
                return Some(json!({"metadata": {}, "items": self.items}));
            }
            let from: usize = request.query("continue").map_or(0, |at| at.parse().expect("ours"));
            let limit: usize = request.query("limit")?.parse().expect("a number");
            let next = from + limit;
            let token = if next < self.items.len() { next.to_string() } else { String::new() };
            let page: Vec<_> = self.items.iter().skip(from).take(limit).collect();
            let page = Some(page).filter(|page| !page.is_empty());
            Some(json!({"metadata": {"continue": token}, "items": page}))
        }
    }

    #[tokio::test]
    async fn contents_are_read_by_pages_and_without_their_bytes() {
        let held = Arc::new(Mutex::new(Held::new(1200)));
        let server = held.clone();
        let client =
            testing::client(move |request| server.lock().expect("no panic").answer(request));
        let tasks = Tasks::new("test");
        let namespaces = Informers::new(client.clone(), tasks.clone()).of::<Namespace>().lister();
        let controller = Controller { client, namespaces };
        let secrets = Discovered {
            gvr: Gvr::new("", "v1", "secrets"),
            kind: "Secret".into(),
            namespaced: true,
            verbs: ["list", "delete", "deletecollection"].map(String::from).to_vec(),
        };
        let whole = ["GET limit=500", "GET limit=500&continue=500", "GET limit=500&continue=1000"];
        let first = [&["GET limit=500", "DELETE "][..], &whole].concat();
        // Whether there are objects, their deletion, the rest; then only the rest.
        for expected in [first, whole.to_vec()] {
            let mut sweep = Sweep::default();
            controller.try_empty("ns", &secrets, &mut sweep).await.expect("emptied");
            assert_eq!(sweep.left, BTreeMap::from([("secrets".to_owned(), 1200)]));
            assert_eq!(sweep.finalizers, BTreeMap::from([("x/y".to_owned(), 1200)]));
            assert_eq!(std::mem::take(&mut held.lock().expect("no panic").asked), expected);
        }
        held.lock().expect("no panic").items.clear();
        let mut sweep = Sweep::default();
        controller.try_empty("ns", &secrets, &mut sweep).await.expect("there is nothing");
        assert!(sweep.left.is_empty());
        tasks.shutdown(Duration::from_secs(5)).await;
    }
}
