//! `kubectl get`.
//!
//! The server makes tables; other formats are made here from plain objects. A failure for one object does
//! not prevent printing the others. Upstream: `kubectl/pkg/cmd/get/get.go`.

use http::Method;
use serde_json::Value;

use super::console::Console;
use super::past::{self, Past};
use super::print::{Output, Printer, jsonpath, list_of, table};
use super::resources::{Catalog, Resource};
use super::target::{self, Target, Targets};
use super::watch::{self, Event};
use crate::cluster::{Cluster, JSON, with_query};
use crate::failure::{Failure, Result, own};

#[derive(clap::Args, Clone, Debug, Default)]
pub struct Get {
    /// TYPE[,TYPE…] [NAME…] or TYPE/NAME…
    pub resources: Vec<String>,
    /// List the requested object(s) across all namespaces
    #[arg(short = 'A', long)]
    pub all_namespaces: bool,
    /// Selector (label query) to filter on
    #[arg(short = 'l', long)]
    pub selector: Option<String>,
    /// Selector (field query) to filter on
    #[arg(long)]
    pub field_selector: Option<String>,
    /// Output format: json, yaml, name, wide, jsonpath=…, custom-columns=…
    #[arg(short = 'o', long)]
    pub output: Option<String>,
    /// After listing/getting the requested object, watch for changes
    #[arg(short = 'w', long)]
    pub watch: bool,
    /// Watch for changes to the requested object(s), without listing/getting first
    #[arg(long)]
    pub watch_only: bool,
    /// Output watch event objects when --watch or --watch-only is used
    #[arg(long)]
    pub output_watch_events: bool,
    /// Don't print headers
    #[arg(long)]
    pub no_headers: bool,
    /// Show all labels as the last column
    #[arg(long)]
    pub show_labels: bool,
    /// Labels that are presented as columns
    #[arg(short = 'L', long, value_delimiter = ',')]
    pub label_columns: Vec<String>,
    /// List the resource type for the requested object(s)
    #[arg(long)]
    pub show_kind: bool,
    /// Keep the managedFields when printing objects in JSON or YAML format
    #[arg(long)]
    pub show_managed_fields: bool,
    /// Sort list types using this field specification
    #[arg(long)]
    pub sort_by: Option<String>,
    /// If the requested object does not exist the command will return exit code 0
    #[arg(long)]
    pub ignore_not_found: bool,
    #[command(flatten)]
    pub past: Past,
    /// Raw URI to request from the server
    #[arg(long)]
    pub raw: Option<String>,
    /// Filename, directory, or URL to files identifying the resource to get
    #[arg(short = 'f', long)]
    pub filename: Vec<String>,
    /// Process the directory used in -f, --filename recursively
    #[arg(short = 'R', long)]
    pub recursive: bool,
}

impl Get {
    pub async fn run(self, cluster: &Cluster, console: &Console) -> Result<()> {
        if let Some(path) = &self.raw {
            let response = cluster.send(Method::GET, path, JSON, None).await?;
            return copy(response.into_body(), console).await;
        }
        let output = Output::parse(self.output.as_deref())?;
        let catalog = Catalog::read(cluster).await?;
        let mut cluster = cluster.clone();
        let targets = self.targets(&mut cluster, &catalog).await?;
        let at = self.past.revision(&cluster).await?;
        if at.is_some() && (self.watch || self.watch_only) {
            return Err(own(
                "the past does not change: --watch cannot be used with --at-revision and --at-time",
            ));
        }
        if targets.all.is_empty() {
            console.note("You must specify the type of resource to get. Use \"kubectl api-resources\" for a complete list of supported resources.\n");
            return Err(own("Required resource not specified."));
        }
        if targets.all.iter().any(|one| one.name.is_some()) {
            self.check_named(&targets)?;
        }
        if self.watch || self.watch_only {
            return self.watch(&cluster, console, &targets, output).await;
        }
        match output {
            Output::Table { wide } => self.tables(&cluster, console, &targets, wide, at).await,
            _ => self.objects(&cluster, console, &targets, output, at).await,
        }
    }

    async fn targets(&self, cluster: &mut Cluster, catalog: &Catalog) -> Result<Targets> {
        if self.filename.is_empty() {
            return target::parse(&self.resources, catalog);
        }
        let found =
            super::manifests::read(cluster, catalog, &self.filename, self.recursive).await?;
        let mut targets = Targets::default();
        for one in found {
            // Manifests of several namespaces in one call are rare; the first one's namespace is used.
            if let Some(namespace) = one.namespace.filter(|_| targets.all.is_empty()) {
                cluster.namespace = namespace;
            }
            targets.has_many_types |=
                targets.all.first().is_some_and(|first: &Target| first.resource != one.resource);
            targets.all.push(Target { resource: one.resource, name: Some(one.name) });
        }
        Ok(targets)
    }

    fn check_named(&self, targets: &Targets) -> Result<()> {
        if self.all_namespaces && targets.all.iter().any(|one| one.resource.namespaced) {
            return Err(own("a resource cannot be retrieved by name across all namespaces"));
        }
        if self.selector.is_some() {
            return Err(own("name cannot be provided when a selector is specified"));
        }
        if self.field_selector.is_some() {
            return Err(own("field selectors and names cannot be used together"));
        }
        Ok(())
    }

    /// The path of the current objects, or of a list at a past revision: past objects can only be listed.
    fn path(
        &self,
        cluster: &Cluster,
        target: &Target,
        at: Option<u64>,
        extra: &[(&str, &str)],
    ) -> String {
        if let Some(revision) = at {
            let all = Target { resource: target.resource.clone(), name: None };
            let path = self.path(cluster, &all, None, extra);
            return past::exact(&path, target.name.as_deref(), revision);
        }
        let namespace = (!self.all_namespaces).then_some(cluster.namespace.as_str());
        let path = match &target.name {
            Some(name) => target.resource.object(namespace, name),
            None => target.resource.collection(namespace),
        };
        let mut pairs = vec![
            ("labelSelector", self.selector.as_deref().unwrap_or_default()),
            ("fieldSelector", self.field_selector.as_deref().unwrap_or_default()),
        ];
        pairs.extend(extra);
        with_query(&path, &pairs)
    }

    fn table_printer(&self, resource: &Resource, many: bool, wide: bool) -> table::Printer {
        table::Printer::new(table::Options {
            wide,
            no_headers: self.no_headers,
            show_labels: self.show_labels,
            label_columns: self.label_columns.clone(),
            with_namespace: self.all_namespaces && resource.namespaced,
            kind: (many || self.show_kind).then(|| resource.kind_name()),
        })
    }

    async fn tables(
        &self,
        cluster: &Cluster,
        console: &Console,
        targets: &Targets,
        wide: bool,
        at: Option<u64>,
    ) -> Result<()> {
        let sort = self.sort_by.as_deref().map(jsonpath::Template::relaxed).transpose();
        let sort = sort.map_err(own)?;
        let include = if sort.is_some() { "Object" } else { "" };
        let mut failures = vec![];
        let mut groups: Vec<(&Resource, Vec<table::Table>)> = vec![];
        for target in &targets.all {
            let path = self.path(cluster, target, at, &[("includeObject", include)]);
            match fetch_table(cluster, &path).await {
                Ok(table) if table.rows.is_empty() && at.is_some() && target.name.is_some() => {
                    failures.extend(past::missing(target, at));
                }
                Ok(table) => match groups.last_mut() {
                    Some((resource, tables)) if **resource == target.resource => tables.push(table),
                    _ => groups.push((&target.resource, vec![table])),
                },
                Err(error) if error.is_not_found() && self.ignore_not_found => {}
                Err(error) => failures.push(error),
            }
        }
        let mut printed = false;
        for (resource, mut tables) in groups {
            if let Some(path) = &sort {
                for table in &mut tables {
                    table.rows.sort_by(|a, b| {
                        let value =
                            |row: &table::Row| path.find(&row.object).first().copied().cloned();
                        jsonpath::compare(value(a).as_ref(), value(b).as_ref())
                    });
                }
            }
            let mut printer = self.table_printer(resource, targets.has_many_types, wide);
            let text = printer.print(tables, None);
            if !text.is_empty() {
                let separator = if printed && !self.no_headers { "\n" } else { "" };
                console.print(format!("{separator}{text}"))?;
                printed = true;
            }
        }
        if !printed && failures.is_empty() && !self.ignore_not_found {
            let all_namespaced = targets.all.iter().all(|one| one.resource.namespaced);
            console.note(match all_namespaced && !self.all_namespaces {
                true => format!("No resources found in {} namespace.", cluster.namespace),
                false => "No resources found".into(),
            });
        }
        Failure::collect(failures)
    }

    async fn objects(
        &self,
        cluster: &Cluster,
        console: &Console,
        targets: &Targets,
        output: Output,
        at: Option<u64>,
    ) -> Result<()> {
        let (mut items, mut failures) = (vec![], vec![]);
        for target in &targets.all {
            match cluster.get(&self.path(cluster, target, at, &[])).await {
                Ok(list) if at.is_some() => {
                    let found = items_of(list);
                    let missing = past::missing(target, at).filter(|_| found.is_empty());
                    failures.extend(missing);
                    items.extend(found);
                }
                Ok(object) if target.name.is_some() => items.push(object),
                Ok(list) => items.extend(items_of(list)),
                Err(error) if error.is_not_found() && self.ignore_not_found => {}
                Err(error) => failures.push(error),
            }
        }
        if let Some(spec) = &self.sort_by {
            let path = jsonpath::Template::relaxed(spec).map_err(own)?;
            items.sort_by(|a, b| {
                jsonpath::compare(path.find(a).first().copied(), path.find(b).first().copied())
            });
        }
        let is_single = matches!(targets.all.as_slice(), [Target { name: Some(_), .. }]);
        let mut printer = Printer::new(output, self.no_headers, self.show_managed_fields);
        let nothing = items.is_empty() && (is_single || !failures.is_empty());
        if !nothing {
            let text = if printer.wants_items() {
                printer.items(&items)?
            } else if is_single {
                printer.object(&items[0])?
            } else {
                printer.object(&list_of(items))?
            };
            console.print(text)?;
        }
        Failure::collect(failures)
    }

    async fn watch(
        &self,
        cluster: &Cluster,
        console: &Console,
        targets: &Targets,
        output: Output,
    ) -> Result<()> {
        let first = &targets.all[0];
        if targets.all.len() != 1 {
            return Err(own("you may only specify a single resource type to watch"));
        }
        let mut path = self.path(cluster, first, None, &[]);
        let accept = if output.is_table() { table::ACCEPT } else { JSON };
        if let Some(name) = &first.name {
            // A missing name is reported at once, not waited for.
            if !self.watch_only {
                cluster.get(&path).await?;
            }
            let all = Target { resource: first.resource.clone(), name: None };
            let field = format!("metadata.name={name}");
            path = with_query(&self.path(cluster, &all, None, &[]), &[("fieldSelector", &field)]);
        }
        let list = cluster.get_as(&path, accept).await?;
        let version = list["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_owned();
        let mut sink = match output {
            Output::Table { wide } => Sink::Table(self.table_printer(&first.resource, false, wide)),
            other => Sink::Objects(Printer::new(other, self.no_headers, self.show_managed_fields)),
        };
        let event = |kind: &str| self.output_watch_events.then(|| kind.to_owned());
        if !self.watch_only {
            console.print(sink.list(list, event("ADDED").as_deref())?)?;
        }
        watch::run(cluster, &path, accept, version, async |Event { kind, object }| {
            console.print(sink.event(object, event(&kind).as_deref())?)
        })
        .await
    }
}

enum Sink {
    Table(table::Printer),
    Objects(Printer),
}

impl Sink {
    fn list(&mut self, list: Value, event: Option<&str>) -> Result<String> {
        match self {
            Self::Table(printer) => Ok(printer.print(vec![parse_table(list)?], event)),
            Self::Objects(printer) if printer.wants_items() => printer.items(&items_of(list)),
            Self::Objects(printer) => {
                items_of(list).iter().map(|object| printer.object(object)).collect()
            }
        }
    }

    fn event(&mut self, object: Value, event: Option<&str>) -> Result<String> {
        match self {
            Self::Table(printer) => Ok(printer.print(vec![parse_table(object)?], event)),
            Self::Objects(printer) => printer.object(&object),
        }
    }
}

async fn fetch_table(cluster: &Cluster, path: &str) -> Result<table::Table> {
    parse_table(cluster.get_as(path, table::ACCEPT).await?)
}

fn parse_table(value: Value) -> Result<table::Table> {
    if value["kind"] != "Table" {
        return Err(own(format!("the server sent a {} instead of a table", value["kind"])));
    }
    serde_json::from_value(value).map_err(|error| own(format!("the server's table: {error}")))
}

/// A list's items, each with its kind and apiVersion, which only the list has.
pub fn items_of(mut list: Value) -> Vec<Value> {
    let kind = list["kind"].as_str().and_then(|kind| kind.strip_suffix("List")).map(str::to_owned);
    let version = list["apiVersion"].clone();
    let Value::Array(mut items) = list["items"].take() else { return vec![] };
    for item in items.iter_mut().filter_map(Value::as_object_mut) {
        if let Some(kind) = &kind {
            item.entry("kind").or_insert_with(|| kind.clone().into());
            item.entry("apiVersion").or_insert_with(|| version.clone());
        }
    }
    items
}

pub async fn copy(mut body: transport::Body, console: &Console) -> Result<()> {
    use http_body_util::BodyExt;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| own(format!("the answer broke off: {error}")))?;
        if let Ok(data) = frame.into_data() {
            console.print(&data)?;
        }
    }
    Ok(())
}
