//! `kubectl apply`: a three-way merge in the client, or server-side apply.
//!
//! Client-side, an annotation keeps the applied manifest, so that the next apply can detect fields that
//! were removed from it. Upstream: `kubectl/pkg/cmd/apply`.

use std::collections::HashMap;

use http::Method;
use machinery::patch::Schema;
use serde_json::{Value, json};

use super::console::Console;
use super::manifests::{self, Manifest};
use super::print::{Output, Printer, list_of, name_of, yaml};
use super::resources::{Catalog, Resource};
use super::three_way::{Differ, OpenApi};
use super::{DryRun, Validate};
use crate::cluster::{Cluster, JSON, with_query};
use crate::failure::{Failure, Result, own};

const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
const CLIENT_MANAGER: &str = "kubectl-client-side-apply";
const SERVER_MANAGER: &str = "kubectl";
/// The number of tries of a patch that conflicts with other writes.
const TRIES: usize = 5;

#[derive(clap::Args, Clone, Debug, Default)]
pub struct Apply {
    /// The files that contain the configurations to apply
    #[arg(short = 'f', long, required = true)]
    pub filename: Vec<String>,
    /// Process the directory used in -f, --filename recursively
    #[arg(short = 'R', long)]
    pub recursive: bool,
    /// Only the manifests with these labels
    #[arg(short = 'l', long)]
    pub selector: Option<String>,
    /// If true, apply runs in the server instead of the client
    #[arg(long, num_args = 0..=1, default_missing_value = "true", default_value = "false", require_equals = true)]
    pub server_side: bool,
    /// If true, server-side apply will force the changes against conflicts
    #[arg(long)]
    pub force_conflicts: bool,
    /// Name of the manager used to track field ownership
    #[arg(long)]
    pub field_manager: Option<String>,
    /// none, server or client
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "client", default_value = "none", require_equals = true)]
    pub dry_run: DryRun,
    /// strict (or true), warn, ignore (or false)
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "strict", default_value = "strict", require_equals = true)]
    pub validate: Validate,
    /// Output format: name, json, yaml, jsonpath=…
    #[arg(short = 'o', long)]
    pub output: Option<String>,
}

impl Apply {
    pub async fn run(self, cluster: &Cluster, console: &Console) -> Result<()> {
        if self.force_conflicts && !self.server_side {
            return Err(own("--force-conflicts only works with --server-side"));
        }
        if self.server_side && self.dry_run == DryRun::Client {
            return Err(own(
                "--dry-run=client doesn't work with --server-side (did you mean --dry-run=server instead?)",
            ));
        }
        let mut output =
            self.output.as_deref().map(|format| Output::parse(Some(format))).transpose()?;
        let catalog = Catalog::read(cluster).await?;
        let mut found = manifests::read(cluster, &catalog, &self.filename, self.recursive).await?;
        self.select(&mut found)?;
        let mut applier = Applier { cluster, flags: &self, schemas: HashMap::new() };
        let (mut failures, mut printed) = (vec![], vec![]);
        for one in found {
            match applier.apply(one, console).await {
                Ok((operation, object)) if output.is_none() => {
                    console.line(format!(
                        "{} {operation}{}",
                        name_of(&object),
                        self.dry_run.suffix()
                    ))?;
                }
                Ok((_, object)) => printed.push(object),
                Err(error) => failures.push(error),
            }
        }
        if let Some(output) = output.take().filter(|_| !printed.is_empty()) {
            let mut printer = Printer::new(output, false, false);
            let text = match printed.as_slice() {
                [one] => printer.object(one)?,
                _ if printer.wants_items() => printer.items(&printed)?,
                _ => printer.object(&list_of(printed))?,
            };
            console.print(text)?;
        }
        Failure::collect(failures)
    }

    fn select(&self, found: &mut Vec<Manifest>) -> Result<()> {
        let Some(text) = &self.selector else { return Ok(()) };
        let selector = machinery::selector::Selector::parse_labels(text)
            .map_err(|error| own(error.to_string()))?;
        found.retain(|one| {
            let labels = &one.object["metadata"]["labels"];
            selector.matches_with(|key| labels.get(key).and_then(Value::as_str))
        });
        Ok(())
    }

    fn query(&self, manager: &str) -> Vec<(&'static str, String)> {
        let manager = self.field_manager.as_deref().unwrap_or(manager).to_owned();
        let dry = if self.dry_run == DryRun::Server { "All" } else { "" };
        vec![
            ("fieldManager", manager),
            ("fieldValidation", self.validate.as_query().into()),
            ("dryRun", dry.into()),
        ]
    }
}

struct Applier<'a> {
    cluster: &'a Cluster,
    flags: &'a Apply,
    /// OpenAPI documents by group and version; `None` if the server has none.
    schemas: HashMap<(String, String), Option<OpenApi>>,
}

impl Applier<'_> {
    /// Applies a manifest; returns the action's word and the resulting object.
    async fn apply(&mut self, one: Manifest, console: &Console) -> Result<(&'static str, Value)> {
        if self.flags.server_side {
            return self.by_server(&one).await.map(|object| ("serverside-applied", object));
        }
        let modified = with_annotation(&one.object);
        for _ in 0..TRIES {
            let path = one.resource.object(one.namespace.as_deref(), &one.name);
            let current = match self.cluster.get(&path).await {
                Ok(current) => current,
                Err(error) if error.is_not_found() => {
                    match self.create(&one, &modified).await {
                        // Another client created it meanwhile.
                        Err(error)
                            if error.status().is_some_and(|s| s.reason == "AlreadyExists") =>
                        {
                            continue;
                        }
                        done => return done.map(|object| ("created", object)),
                    }
                }
                Err(error) => {
                    let doing = format!(
                        "retrieving current configuration of {:?} from server for",
                        one.name
                    );
                    return Err(error.during(&doing, &one.source));
                }
            };
            match self.patch(&one, &modified, current, &path, console).await {
                Err(error) if error.is_conflict() => {}
                done => return done,
            }
        }
        Err(own(format!("{}: the patch failed, because the object keeps changing", one.name)))
    }

    async fn by_server(&self, one: &Manifest) -> Result<Value> {
        let mut query = self.flags.query(SERVER_MANAGER);
        query.push(("force", if self.flags.force_conflicts { "true" } else { "" }.into()));
        let path = one.resource.object(one.namespace.as_deref(), &one.name);
        let mut object = one.object.clone();
        if let Some(metadata) = object["metadata"].as_object_mut() {
            metadata.remove("managedFields");
        }
        let body = object.to_string().into_bytes();
        self.cluster
            .call(Method::PATCH, &query_path(&path, &query), "application/apply-patch+yaml", body)
            .await
            .map_err(explained)
    }

    async fn create(&self, one: &Manifest, modified: &Value) -> Result<Value> {
        if self.flags.dry_run == DryRun::Client {
            return Ok(modified.clone());
        }
        let path = one.resource.collection(one.namespace.as_deref());
        let path = query_path(&path, &self.flags.query(CLIENT_MANAGER));
        let body = modified.to_string().into_bytes();
        let created = self.cluster.call(Method::POST, &path, JSON, body).await;
        created.map_err(|error| error.during("creating", &one.source))
    }

    async fn patch(
        &mut self,
        one: &Manifest,
        modified: &Value,
        current: Value,
        path: &str,
        console: &Console,
    ) -> Result<(&'static str, Value)> {
        let original = current["metadata"]["annotations"][LAST_APPLIED].as_str();
        if original.is_none() {
            console.note(format!(
                "Warning: resource {}/{} is missing the {LAST_APPLIED} annotation which is required by kubectl apply. kubectl apply should only be used on resources created declaratively by either kubectl create --save-config or kubectl apply. The missing annotation will be patched automatically.",
                one.resource.name, one.name
            ));
        }
        let original: Value =
            original.and_then(|text| serde_json::from_str(text).ok()).unwrap_or(json!({}));
        let (flags, cluster) = (self.flags, self.cluster);
        let schema = self.schema(&one.resource).await;
        let known = schema.and_then(|document| {
            let Resource { group, version, kind, .. } = &one.resource;
            document.definition(group, version, kind).map(|name| (document, name))
        });
        let differ =
            Differ { schema: known.as_ref().map(|(document, _)| *document as &dyn Schema) };
        let definition = known.as_ref().map(|(_, name)| name.as_str());
        let patch = differ.patch(&original, modified, &current, definition).map_err(own)?;
        if patch == json!({}) {
            return Ok(("unchanged", current));
        }
        if flags.dry_run == DryRun::Client {
            return Ok(("configured", current));
        }
        let content_type = match known {
            Some(_) => "application/strategic-merge-patch+json",
            None => "application/merge-patch+json",
        };
        let path = query_path(path, &flags.query(CLIENT_MANAGER));
        let body = patch.to_string().into_bytes();
        match cluster.call(Method::PATCH, &path, content_type, body).await {
            Ok(object) => Ok(("configured", object)),
            Err(error) => Err(error.during("applying patch", &one.source)),
        }
    }

    async fn schema(&mut self, resource: &Resource) -> Option<&OpenApi> {
        let Resource { group, version, .. } = resource;
        let key = (group.clone(), version.clone());
        if !self.schemas.contains_key(&key) {
            let path = match group.as_str() {
                "" => format!("/openapi/v3/api/{version}"),
                group => format!("/openapi/v3/apis/{group}/{version}"),
            };
            // Without the document, the server still accepts merge patches.
            let document = self.cluster.get(&path).await.ok().map(OpenApi::new);
            self.schemas.insert(key.clone(), document);
        }
        self.schemas.get(&key).and_then(Option::as_ref)
    }
}

fn query_path(path: &str, query: &[(&'static str, String)]) -> String {
    let pairs: Vec<(&str, &str)> =
        query.iter().map(|(name, value)| (*name, value.as_str())).collect();
    with_query(path, &pairs)
}

/// The manifest with its own text in the annotation.
fn with_annotation(object: &Value) -> Value {
    let mut object = object.clone();
    if !object["metadata"]["annotations"].is_object() {
        object["metadata"]["annotations"] = json!({});
    }
    let annotations = object["metadata"]["annotations"].as_object_mut();
    annotations.expect("it is a map now").remove(LAST_APPLIED);
    let text = yaml::go_escapes(&object.to_string()) + "\n";
    object["metadata"]["annotations"][LAST_APPLIED] = text.into();
    object
}

/// Adds upstream's hints about conflicts, and about servers without server-side apply.
fn explained(error: Failure) -> Failure {
    if let Some(status) = error.status().filter(|status| status.code == 415) {
        return Failure::Plain(format!(
            "Server-side apply not available on the server: ({})",
            status.message
        ));
    }
    let Some(status) = error.status().filter(|status| status.reason == "Conflict") else {
        return error;
    };
    Failure::Plain(format!(
        "error: {}\nPlease review the fields above--they currently have other managers. Here\nare the ways you can resolve this warning:\n* If you intend to manage all of these fields, please re-run the apply\n  command with the `--force-conflicts` flag.\n* If you do not intend to manage all of the fields, please edit your\n  manifest to remove references to the fields that should keep their\n  current managers.\n* You may co-own fields by updating your manifest to match the existing\n  value; in this case, you'll become the manager if the other manager(s)\n  stop managing the field (remove it from their configuration).\nSee https://kubernetes.io/docs/reference/using-api/server-side-apply/#conflicts",
        status.message
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_annotation_holds_the_manifest() {
        let object = json!({"kind":"X","metadata":{"name":"a"},"v":"<b>"});
        let expected = "{\"kind\":\"X\",\"metadata\":{\"annotations\":{},\"name\":\"a\"},\"v\":\"\\u003cb\\u003e\"}\n";
        let once = with_annotation(&object);
        assert_eq!(once["metadata"]["annotations"][LAST_APPLIED], expected);
        assert_eq!(with_annotation(&once), once);
    }
}
