//! The CustomResourceDefinitions of well-known projects, applied server-side, as their users do. On a
//! separate API server, because these kinds stay.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testkit::control_plane::ControlPlane;
use testkit::http::{Connection, Response};
use testkit::modules::{PROJECTS, Project};
use testkit::wait;

use crate::story::{LONG, Story};

const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const APPLY: [(&str, &str); 1] = [("Content-Type", "application/apply-patch+yaml")];

pub fn of_well_known_projects(story: &mut Story) -> Result<()> {
    let server = ControlPlane::start(&story.binary)?;
    let mut connection = Connection::new(server.client()?, LONG);
    let mut applied = BTreeSet::new();
    for project in PROJECTS {
        let names = apply(&mut connection, project).with_context(|| project.module)?;
        println!("  {} {}: {} definitions", project.module, project.version, names.len());
        applied.extend(names);
    }
    wait::until(LONG, "all definitions are established", || {
        let list = connection.send("GET", DEFINITIONS, &[], b"")?;
        let list: Value = serde_json::from_str(&list.body)?;
        let items = list["items"].as_array().context("a list has items")?;
        let waiting: Vec<&str> = items
            .iter()
            .filter(|one| !is_established(one))
            .filter_map(|one| one["metadata"]["name"].as_str())
            .collect();
        ensure!(waiting.is_empty() && items.len() == applied.len(), "{waiting:?} are not");
        Ok(())
    })
}

fn is_established(definition: &Value) -> bool {
    let conditions = definition["status"]["conditions"].as_array();
    conditions
        .into_iter()
        .flatten()
        .any(|one| one["type"] == "Established" && one["status"] == "True")
}

/// Applies each definition twice: the second time changes nothing, and the applier owns its fields.
fn apply(connection: &mut Connection, project: &Project) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for text in project.definitions()?.into_iter().flatten() {
        let name = name(&text).context("a definition has a name")?;
        let path = format!("{DEFINITIONS}/{name}?fieldManager=story&fieldValidation=Strict");
        let mut send = || connection.send("PATCH", &path, &APPLY, text.as_bytes());
        let first = object(send()?, 201).with_context(|| name.clone())?;
        let again = object(send()?, 200).with_context(|| name.clone())?;
        ensure!(
            first["metadata"]["generation"] == again["metadata"]["generation"],
            "{name}: the same again is a change"
        );
        let owners = again["metadata"]["managedFields"].as_array().context("owners")?;
        ensure!(
            owners.iter().any(|one| one["manager"] == "story" && one["operation"] == "Apply"),
            "{name}: {owners:?}"
        );
        names.insert(name);
    }
    Ok(names)
}

fn object(answer: Response, wanted: u16) -> Result<Value> {
    ensure!(answer.status == wanted, "{} {}", answer.status, answer.body);
    Ok(serde_json::from_str(&answer.body)?)
}

/// The first `name` with the indentation of `metadata.name`.
fn name(text: &str) -> Option<String> {
    let metadata = text.split_once("\nmetadata:\n")?.1;
    let own = metadata.lines().take_while(|line| line.starts_with(' '));
    let found = own.into_iter().find_map(|line| line.strip_prefix("  name: "))?;
    Some(found.trim().trim_matches(['"', '\'']).to_owned())
}
