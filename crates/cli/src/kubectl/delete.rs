//! `kubectl delete`: by name, selector or manifest; waits until the objects are gone.
//!
//! Upstream: `kubectl/pkg/cmd/delete`.

use std::time::Duration;

use http::Method;
use serde_json::{Value, json};

use super::console::Console;
use super::get::items_of;
use super::resources::{Catalog, Resource};
use super::watch::{self, Event};
use super::{DryRun, manifests, target};
use crate::cluster::{Cluster, JSON, with_query};
use crate::failure::{Failure, Result, own};

#[derive(clap::Args, Clone, Debug, Default)]
pub struct Delete {
    /// TYPE NAME… or TYPE/NAME…
    pub resources: Vec<String>,
    /// Files that contain the resources to delete
    #[arg(short = 'f', long)]
    pub filename: Vec<String>,
    /// Process the directory used in -f, --filename recursively
    #[arg(short = 'R', long)]
    pub recursive: bool,
    /// Selector (label query) to filter on
    #[arg(short = 'l', long)]
    pub selector: Option<String>,
    /// Selector (field query) to filter on
    #[arg(long)]
    pub field_selector: Option<String>,
    /// Delete all resources of the types, in the namespace
    #[arg(long)]
    pub all: bool,
    /// In all namespaces
    #[arg(short = 'A', long)]
    pub all_namespaces: bool,
    /// Treat "resource not found" as a successful delete
    #[arg(long)]
    pub ignore_not_found: bool,
    /// Wait for resources to be gone before returning
    #[arg(long, num_args = 0..=1, default_missing_value = "true", default_value = "true", require_equals = true, action = clap::ArgAction::Set)]
    pub wait: bool,
    /// How long to wait; 0 means without a limit
    #[arg(long, value_parser = crate::duration::parse, default_value = "0")]
    pub timeout: Duration,
    /// Seconds given to the resource to terminate gracefully; negative: the object's own
    #[arg(long, default_value_t = -1, allow_hyphen_values = true)]
    pub grace_period: i64,
    /// Signal immediate shutdown (same as --grace-period=1)
    #[arg(long)]
    pub now: bool,
    /// Remove resources from the API at once and bypass graceful deletion
    #[arg(long)]
    pub force: bool,
    /// background, orphan or foreground
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "background", default_value = "background", require_equals = true)]
    pub cascade: Cascade,
    /// none, server or client
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "client", default_value = "none", require_equals = true)]
    pub dry_run: DryRun,
    /// Output mode: name
    #[arg(short = 'o', long)]
    pub output: Option<String>,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cascade {
    #[default]
    Background,
    Foreground,
    Orphan,
}

struct Victim {
    resource: Resource,
    namespace: Option<String>,
    name: String,
    source: Option<String>,
}

impl Delete {
    pub async fn run(mut self, cluster: &Cluster, console: &Console) -> Result<()> {
        self.check(console)?;
        let catalog = Catalog::read(cluster).await?;
        let mut failures = vec![];
        let victims = self.victims(cluster, &catalog, &mut failures).await?;
        if victims.is_empty() && failures.is_empty() && !self.ignore_not_found {
            console.note("No resources found");
        }
        let mut leaving = vec![];
        for victim in victims {
            match self.delete(cluster, &victim).await {
                Ok(uid) => {
                    self.tell(console, &victim)?;
                    leaving.push((victim, uid));
                }
                Err(error) if error.is_not_found() && self.forgives() => {}
                Err(error) => failures.push(match &victim.source {
                    Some(source) => error.during("deleting", source),
                    None => error,
                }),
            }
        }
        if self.wait && self.dry_run == DryRun::None {
            let all = futures::future::join_all(
                leaving.iter().map(|(victim, uid)| gone(cluster, victim, uid.as_deref())),
            );
            let outcomes = if self.timeout.is_zero() {
                all.await
            } else {
                let names = || leaving.iter().map(|(victim, _)| victim.name.as_str());
                tokio::time::timeout(self.timeout, all).await.map_err(|_| {
                    own(format!(
                        "timed out waiting for the condition on {}",
                        names().collect::<Vec<_>>().join(", ")
                    ))
                })?
            };
            failures.extend(outcomes.into_iter().filter_map(Result::err));
        }
        Failure::collect(failures)
    }

    /// With `--all` or a selector, an object that is already gone counts as deleted.
    fn forgives(&self) -> bool {
        self.ignore_not_found
            || self.all
            || self.selector.is_some()
            || self.field_selector.is_some()
    }

    fn check(&mut self, console: &Console) -> Result<()> {
        if self.output.as_deref().is_some_and(|format| format != "name") {
            return Err(own("unexpected -o output mode: only 'name' is supported"));
        }
        if self.all && self.selector.is_some() {
            return Err(own("cannot set --all and --selector at the same time"));
        }
        if self.now {
            if self.grace_period >= 0 {
                return Err(own("--now and --grace-period cannot be specified together"));
            }
            self.grace_period = 1;
        }
        if self.grace_period == 0 && !self.force {
            // Upstream: a grace period of 0 needs --force.
            self.grace_period = 1;
        }
        if self.force && self.grace_period < 0 {
            self.grace_period = 0;
        }
        if self.grace_period == 0 {
            console.note("Warning: Immediate deletion does not wait for confirmation that the running resource has been terminated. The resource may continue to run on the cluster indefinitely.");
        }
        Ok(())
    }

    async fn victims(
        &self,
        cluster: &Cluster,
        catalog: &Catalog,
        failures: &mut Vec<Failure>,
    ) -> Result<Vec<Victim>> {
        if !self.filename.is_empty() {
            let found = manifests::read(cluster, catalog, &self.filename, self.recursive).await?;
            let victim = |one: manifests::Manifest| Victim {
                resource: one.resource,
                namespace: one.namespace,
                name: one.name,
                source: Some(one.source),
            };
            return Ok(found.into_iter().map(victim).collect());
        }
        let targets = target::parse(&self.resources, catalog)?;
        if targets.all.is_empty() {
            return Err(own("You must provide one or more resources by argument or filename."));
        }
        let mut victims = vec![];
        for target in targets.all {
            let resource = target.resource;
            let here = Some(cluster.namespace.clone()).filter(|_| resource.namespaced);
            if let Some(name) = target.name {
                victims.push(Victim { resource, namespace: here, name, source: None });
                continue;
            }
            if !self.all && self.selector.is_none() && self.field_selector.is_none() {
                return Err(own("resource(s) were provided, but no name was specified"));
            }
            match self.list(cluster, &resource).await {
                Ok(found) => victims.extend(found),
                Err(error) => failures.push(error),
            }
        }
        Ok(victims)
    }

    async fn list(&self, cluster: &Cluster, resource: &Resource) -> Result<Vec<Victim>> {
        let namespace = (!self.all_namespaces).then_some(cluster.namespace.as_str());
        let pairs = [
            ("labelSelector", self.selector.as_deref().unwrap_or_default()),
            ("fieldSelector", self.field_selector.as_deref().unwrap_or_default()),
        ];
        let list = cluster.get(&with_query(&resource.collection(namespace), &pairs)).await?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let victim = |item: Value| Victim {
            resource: resource.clone(),
            namespace: text(&item["metadata"]["namespace"]),
            name: text(&item["metadata"]["name"]).unwrap_or_default(),
            source: None,
        };
        Ok(items_of(list).into_iter().map(victim).collect())
    }

    /// Deletes the object; returns its uid if the server sends it.
    async fn delete(&self, cluster: &Cluster, victim: &Victim) -> Result<Option<String>> {
        let path = victim.resource.object(victim.namespace.as_deref(), &victim.name);
        if self.dry_run == DryRun::Client {
            return Ok(None);
        }
        let policy = format!("{:?}", self.cascade);
        let mut options =
            json!({ "kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": policy });
        if self.grace_period >= 0 {
            options["gracePeriodSeconds"] = self.grace_period.into();
        }
        if self.dry_run == DryRun::Server {
            options["dryRun"] = json!(["All"]);
        }
        let body = options.to_string().into_bytes();
        let answer = cluster.call(Method::DELETE, &path, JSON, body).await?;
        let uid = answer["details"]["uid"].as_str().or(answer["metadata"]["uid"].as_str());
        Ok(uid.map(str::to_owned))
    }

    fn tell(&self, console: &Console, victim: &Victim) -> Result<()> {
        let kind = victim.resource.kind_name();
        if self.output.is_some() {
            return console.line(format!("{kind}/{}", victim.name));
        }
        let done = if self.grace_period == 0 { "force deleted" } else { "deleted" };
        let place = match &victim.namespace {
            Some(namespace) => format!(" from {namespace} namespace"),
            None => String::new(),
        };
        console.line(format!("{kind} {:?} {done}{place}{}", victim.name, self.dry_run.suffix()))
    }
}

/// Returns when the object with this uid is gone. Another object of the same name does not count.
async fn gone(cluster: &Cluster, victim: &Victim, uid: Option<&str>) -> Result<()> {
    let field = format!("metadata.name={}", victim.name);
    let path = victim.resource.collection(victim.namespace.as_deref());
    let path = with_query(&path, &[("fieldSelector", &field)]);
    let is_ours = |object: &Value| uid.is_none_or(|uid| object["metadata"]["uid"] == uid);
    loop {
        let list = match cluster.get(&path).await {
            Ok(list) => list,
            // The object's definition or namespace is gone, and the object with it.
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) => return Err(error),
        };
        let version = list["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_owned();
        if !items_of(list).iter().any(is_ours) {
            return Ok(());
        }
        let mut is_gone = false;
        let watched = watch::run(cluster, &path, JSON, version, async |Event { kind, object }| {
            if kind == "DELETED" && is_ours(&object) {
                is_gone = true;
                // Any failure ends the watch.
                return Err(own(""));
            }
            Ok(())
        })
        .await;
        match watched {
            _ if is_gone => return Ok(()),
            Err(error) if error.is_expired() => {}
            other => other?,
        }
    }
}
