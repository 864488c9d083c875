//! StorageVersionMigrations: all objects of a resource are rewritten, in the version and under
//! the key that things are stored with now.
//!
//! ```text
//!  new ► Running (one for each resource) ► the revision to beat is known ► Succeeded │ Failed
//!                                                                     └► no longer Running
//! ```
//!
//! In: migrations. Out: an apply without content for every object that is as old as the migration;
//! conditions; a CustomResourceDefinition's `StorageMigrating` and `storedVersions`. The API server
//! writes an object that is stored in an old way even when nothing in it changes.
//! Upstream: `pkg/controller/storageversionmigrator`. Objects are listed from the API, not from the
//! garbage collector's cache. The API is not served unless `--runtime-config` says so; then there is
//! nothing to do here. The rights are the garbage collector's, who may write everything, too.

use std::sync::Arc;
use std::time::Duration;

use client::discovery::{self, Discovered};
use client::{
    Api, Client, ErrorExt, Event, Gvr, Lister, Outcome, PostParams, Result, retry_on_conflict,
};
use http::Method;
use k8s_openapi::api::storagemigration::v1beta1::StorageVersionMigration;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use machinery::selector::Selector;
use machinery::{ObjectMeta, Time};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::descriptor::{Descriptor, Row, on};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller, Arc<str>> {
    name: "storage-version-migrator-controller",
    account: "generic-garbage-collector",
    component: "storage-version-migrator-controller",
    queue: MANAGER,
    workers: 1,
    new: |setup| Some(Controller { client: setup.client.clone(), migrations: setup.lister() }),
    watches: &[
        // Others of its resource may have waited for it.
        &on(|this: &Controller, queue, event: &Event<StorageVersionMigration>| {
            queue.add(event.key().name);
            let all = this.migrations.list(None, &Selector::everything());
            for one in all.iter().filter(|one| resource(one) == resource(event.object())) {
                queue.add(one.metadata.name.as_deref().unwrap_or_default().into());
            }
        })
        .if_served(),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

const MANAGER: &str = "storage-version-migrator-controller";
const RUNNER: &str = "migration-runner-controller";
const APPLY: &str = "application/apply-patch+yaml";
const PARTIAL_LIST: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
const CHUNK: usize = 500;
/// A resource that is new may not be known everywhere yet.
const NEW: Duration = Duration::from_secs(60);
const VERBS: [&str; 3] = ["update", "patch", "list"];

struct Controller {
    client: Client,
    migrations: Lister<StorageVersionMigration>,
}

/// Group and name.
fn resource(one: &StorageVersionMigration) -> (&str, &str) {
    let resource = one.spec.as_ref().map(|spec| &spec.resource);
    resource.map_or(("", ""), |resource| (&resource.group, &resource.resource))
}

fn is(one: &StorageVersionMigration, kind: &str) -> bool {
    let conditions = one.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|known| known.type_ == kind && known.status == "True")
}

fn is_over(one: &StorageVersionMigration) -> bool {
    is(one, "Succeeded") || is(one, "Failed")
}

#[derive(Debug, PartialEq, Eq)]
enum Next {
    Nothing,
    /// Its turn has come.
    Run,
    /// Find out which objects are old.
    Look,
    /// Objects up to this revision are to be written.
    Migrate(u64),
    Finish,
}

/// The next step of a migration. Pure.
fn next(one: &StorageVersionMigration, all: &[Arc<StorageVersionMigration>]) -> Next {
    match (is(one, "Running"), is_over(one)) {
        (true, true) => return Next::Finish,
        (false, true) => return Next::Nothing,
        (true, false) => {
            let version = one.status.as_ref().and_then(|status| status.resource_version.as_ref());
            return match version.and_then(|version| version.parse().ok()) {
                Some(revision) => Next::Migrate(revision),
                None => Next::Look,
            };
        }
        (false, false) => {}
    }
    let age = |one: &StorageVersionMigration| {
        let meta = &one.metadata;
        (meta.creation_timestamp.as_ref().map(|time| time.0), meta.name.clone())
    };
    let blocks = |other: &Arc<StorageVersionMigration>| {
        let is_other = other.metadata.uid != one.metadata.uid;
        let is_first = is(other, "Running") || (!is_over(other) && age(other) < age(one));
        is_other && resource(other) == resource(one) && is_first
    };
    if all.iter().any(blocks) { Next::Nothing } else { Next::Run }
}

fn with(
    one: &StorageVersionMigration,
    kind: &str,
    status: &str,
    reason: &str,
    message: &str,
) -> StorageVersionMigration {
    let mut changed = one.clone();
    let conditions = changed.status.get_or_insert_default().conditions.get_or_insert_default();
    conditions.retain(|known| known.type_ != kind);
    conditions.push(Condition {
        type_: kind.into(),
        status: status.into(),
        reason: reason.into(),
        message: message.into(),
        last_transition_time: Time(base::clock::now_seconds()),
        observed_generation: None,
    });
    changed
}

/// May it go better next time?
fn is_passing(error: &client::Error) -> bool {
    matches!(
        error.reason(),
        "" | "ServerTimeout"
            | "TooManyRequests"
            | "ServiceUnavailable"
            | "InternalError"
            | "Timeout"
    )
}

#[derive(Deserialize)]
struct Page {
    #[serde(default)]
    metadata: PageMeta,
    /// `null` where there is none.
    items: Option<Vec<Item>>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct PageMeta {
    resource_version: String,
    r#continue: String,
}

#[derive(Deserialize)]
struct Item {
    metadata: ObjectMeta,
}

impl Controller {
    async fn reconcile(&self, name: &str) -> Result<Outcome> {
        let Some(one) = self.migrations.get("", name) else { return Ok(Outcome::Done) };
        let all = self.migrations.list(None, &Selector::everything());
        match next(&one, &all) {
            Next::Nothing => {}
            Next::Run => {
                let message = format!("Migration {name} is running");
                self.tell_definition(&one, "True", "MigrationRunning", &message, false).await?;
                let message = "The migration is running";
                self.write(&with(&one, "Running", "True", "MigrationRunning", message)).await?;
            }
            Next::Look => return self.look(&one).await,
            Next::Migrate(revision) => return self.migrate(&one, revision).await,
            Next::Finish => {
                let succeeded = is(&one, "Succeeded");
                let (reason, message) = match succeeded {
                    true => ("MigrationSucceeded", "The migration has succeeded"),
                    false => ("MigrationFailed", "The migration has failed"),
                };
                self.tell_definition(&one, "False", reason, message, succeeded).await?;
                let (reason, message) = ("MigrationCompleted", "Migration completed");
                self.write(&with(&one, "Running", "False", reason, message)).await?;
            }
        }
        Ok(Outcome::Done)
    }

    async fn write(&self, one: &StorageVersionMigration) -> Result<()> {
        let api: Api<StorageVersionMigration> = self.client.api(None);
        let name = one.metadata.name.as_deref().unwrap_or_default();
        api.replace_status(name, &PostParams::default(), one).await.map(drop)
    }

    async fn fail(&self, one: &StorageVersionMigration, why: &str) -> Result<Outcome> {
        let reason = "StorageVersionMigrationFailed";
        self.write(&with(one, "Failed", "True", reason, why)).await.map(|()| Outcome::Done)
    }

    async fn discovered(&self, one: &StorageVersionMigration) -> Result<Option<Discovered>> {
        let (all, _) = discovery::preferred(&self.client).await?;
        let is_it = |found: &Discovered| (&*found.gvr.group, &*found.gvr.resource) == resource(one);
        Ok(all.into_iter().find(is_it))
    }

    async fn page(&self, gvr: &Gvr, limit: usize, token: &str) -> Result<Page> {
        let path = gvr.collection(None);
        let path = format!("{path}?limit={limit}&continue={token}");
        let bytes = self.client.get_raw(&path, PARTIAL_LIST).await?;
        serde_json::from_slice(&bytes).map_err(client::Error::SerdeError)
    }

    /// Notes the revision up to which objects are old.
    async fn look(&self, one: &StorageVersionMigration) -> Result<Outcome> {
        let Some(found) = self.discovered(one).await? else {
            let created = one.metadata.creation_timestamp.as_ref().map(|time| time.0);
            let age = created.map(|created| base::clock::now().duration_since(created));
            if age.is_some_and(|age| age.unsigned_abs() < NEW) {
                return Ok(Outcome::Backoff);
            }
            return self.fail(one, "resource does not exist in discovery").await;
        };
        if !VERBS.iter().all(|verb| found.can(verb)) {
            let gvr = &found.gvr;
            let shown = format!("{}/{}, Resource={}", gvr.group, gvr.version, gvr.resource);
            let why = format!(
                "resource {shown:?} does not support discovery operations: [{}]",
                VERBS.join(" ")
            );
            return self.fail(one, &why).await;
        }
        let page = self.page(&found.gvr, 1, "").await?;
        let mut changed = one.clone();
        changed.status.get_or_insert_default().resource_version =
            Some(page.metadata.resource_version);
        self.write(&changed).await.map(|()| Outcome::Done)
    }

    async fn migrate(&self, one: &StorageVersionMigration, revision: u64) -> Result<Outcome> {
        let head = "migration encountered unhandled error";
        let Some(found) = self.discovered(one).await? else {
            let why = format!("{head}: unable to obtain GVR from discovery");
            return self.fail(one, &why).await;
        };
        let mut token = String::new();
        loop {
            let page = self.page(&found.gvr, CHUNK, &token).await?;
            for item in page.items.into_iter().flatten() {
                let version = item.metadata.resource_version.as_deref().unwrap_or_default();
                if version.parse().is_ok_and(|version: u64| version > revision) {
                    continue;
                }
                match self.rewrite(&found, &item.metadata).await {
                    // Changed or deleted: the current object was written since.
                    Err(error) if error.is_conflict() || error.is_not_found() => {}
                    Err(error) if !is_passing(&error) => {
                        return self.fail(one, &format!("{head}: {}", error.text())).await;
                    }
                    done => drop(done?),
                }
            }
            if page.metadata.r#continue.is_empty() {
                break;
            }
            token = page.metadata.r#continue;
        }
        let done = with(one, "Succeeded", "True", "StorageVersionMigrationSucceeded", "");
        self.write(&done).await.map(|()| Outcome::Done)
    }

    /// An apply that changes nothing but how the object is stored.
    async fn rewrite(&self, found: &Discovered, meta: &ObjectMeta) -> Result<()> {
        let name = meta.name.as_deref().unwrap_or_default();
        let path = found.gvr.object(meta.namespace.as_deref(), name);
        let gvr = &found.gvr;
        let version = match gvr.group.as_str() {
            "" => gvr.version.clone(),
            group => format!("{group}/{}", gvr.version),
        };
        // With both, a deleted or recreated object is a conflict.
        let patch = json!({"apiVersion": version, "kind": found.kind, "metadata":
            {"uid": meta.uid, "resourceVersion": meta.resource_version}});
        let path = format!("{path}?fieldManager={MANAGER}");
        self.client.call(Method::PATCH, &path, APPLY, patch.to_string()).await.map(drop)
    }

    /// Says in the resource's definition, if it has one, how its migration goes; `done`: only the
    /// version that is stored now is, unless the definition changed since.
    async fn tell_definition(
        &self,
        one: &StorageVersionMigration,
        status: &str,
        reason: &str,
        message: &str,
        done: bool,
    ) -> Result<()> {
        let (group, plural) = resource(one);
        let name = format!("{plural}.{group}");
        let path = Gvr::of::<CustomResourceDefinition>().object(None, &name);
        let (name, path) = (&name, &path);
        retry_on_conflict(|| async move {
            let definition: CustomResourceDefinition = match self.client.get(path).await {
                Err(error) if error.is_not_found() => return Ok(()),
                found => found?,
            };
            let patch = definition_patch(&definition, name, [status, reason, message], done);
            let path = format!("{path}/status?fieldManager={RUNNER}&force=true");
            self.client.call(Method::PATCH, &path, APPLY, patch.to_string()).await.map(drop)
        })
        .await
    }
}

fn definition_patch(
    definition: &CustomResourceDefinition,
    name: &str,
    [status, reason, message]: [&str; 3],
    done: bool,
) -> Value {
    let generation = definition.metadata.generation;
    let known = definition.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let known = known.into_iter().find(|known| known.type_ == "StorageMigrating");
    let is_same = known.is_some_and(|known| known.observed_generation == generation);
    let mut message = message.to_owned();
    if done {
        message.push_str(match is_same {
            true => " and the stored versions have been updated",
            false => " but the stored versions have not been updated due to a generation mismatch",
        });
    }
    let mut patch = json!({
        "apiVersion": <CustomResourceDefinition as k8s_openapi::Resource>::API_VERSION,
        "kind": <CustomResourceDefinition as k8s_openapi::Resource>::KIND,
        "metadata": {"name": name, "resourceVersion": definition.metadata.resource_version},
        "status": {"conditions": [{"type": "StorageMigrating", "status": status, "reason": reason,
            "message": message, "observedGeneration": generation,
            "lastTransitionTime": Time(base::clock::now_seconds())}]},
    });
    if done && is_same {
        let stored = definition.spec.versions.iter().filter(|version| version.storage);
        let stored: Vec<_> = stored.map(|version| &version.name).collect();
        patch["status"]["storedVersions"] = json!(stored);
    }
    patch
}

#[cfg(test)]
mod tests {
    use serde_json::from_value;

    use super::*;

    fn migration(
        name: &str,
        resource: &str,
        conditions: &[(&str, &str)],
        version: &str,
    ) -> Arc<StorageVersionMigration> {
        let conditions: Vec<Value> = conditions
            .iter()
            .map(|(kind, status)| {
                json!({"type": kind, "status": status, "reason": "R", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z"})
            })
            .collect();
        let mut status = json!({"conditions": conditions});
        if !version.is_empty() {
            status["resourceVersion"] = version.into();
        }
        let object = json!({"metadata": {"name": name, "uid": name,
            "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"resource": {"group": "", "resource": resource}}, "status": status});
        Arc::new(from_value(object).unwrap())
    }

    #[test]
    fn migrations_of_a_resource_run_one_after_the_other() {
        let running = || migration("r", "secrets", &[("Running", "True")], "");
        let check = |one: Arc<StorageVersionMigration>,
                     others: &[Arc<StorageVersionMigration>],
                     expected: Next| {
            let mut all = others.to_vec();
            all.push(one.clone());
            assert_eq!(
                next(&one, &all),
                expected,
                "{}",
                one.metadata.name.as_deref().unwrap_or_default()
            );
        };
        let new = |name: &str| migration(name, "secrets", &[], "");
        check(new("a"), &[], Next::Run);
        check(new("a"), &[running()], Next::Nothing);
        check(new("a"), &[migration("r", "pods", &[("Running", "True")], "")], Next::Run);
        check(new("b"), &[new("a")], Next::Nothing);
        check(new("a"), &[new("b")], Next::Run);
        check(running(), &[], Next::Look);
        check(migration("r", "secrets", &[("Running", "True")], "17"), &[], Next::Migrate(17));
        let over = [("Running", "True"), ("Succeeded", "True")];
        check(migration("r", "secrets", &over, "17"), &[], Next::Finish);
        let done = [("Running", "False"), ("Failed", "True")];
        check(migration("r", "secrets", &done, "17"), &[], Next::Nothing);
        check(new("a"), &[migration("r", "secrets", &done, "17")], Next::Run);
    }

    #[test]
    fn a_definition_keeps_the_stored_version_alone_unless_it_changed() {
        let check = |observed: i64, done: bool, stored: Value, message: &str| {
            let definition: CustomResourceDefinition = from_value(json!({
                "metadata": {"name": "d", "generation": 2, "resourceVersion": "5"},
                "spec": {"group": "g", "names": {"kind": "D", "plural": "d"}, "scope": "Cluster",
                    "versions": [{"name": "v1", "served": true, "storage": false},
                        {"name": "v2", "served": true, "storage": true}]},
                "status": {"conditions": [{"type": "StorageMigrating", "status": "True",
                    "observedGeneration": observed}]}}))
            .unwrap();
            let patch = definition_patch(&definition, "d", ["False", "R", "done"], done);
            assert_eq!(patch["status"]["storedVersions"], stored);
            assert_eq!(patch["status"]["conditions"][0]["message"], message);
            assert_eq!(patch["metadata"]["resourceVersion"], "5");
        };
        check(2, true, json!(["v2"]), "done and the stored versions have been updated");
        let mismatch =
            "done but the stored versions have not been updated due to a generation mismatch";
        check(1, true, Value::Null, mismatch);
        check(2, false, Value::Null, "done");
    }
}
