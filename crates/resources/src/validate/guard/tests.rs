//! All rules over objects with all fields, so that each name that they ask for is held against the
//! schema.
//!
//! The objects come from [`api::facts`]: every field of a definition, down to the scalars. Rules take
//! different ways for different values, so that there are rounds: one for each text that a rule may
//! compare with, one for each branch of a union, and some with fields that are there before or after
//! only. A name that no round reaches must at least be a field of some definition.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use api::facts::{self, Definition};
use machinery::field::Path;
use machinery::patch::apply::types::{Scalar, Type};
use release::features::{self, Feature, Gates};
use serde_json::{Map, Value, json};

use super::super::at::At;
use super::super::at::judged;
use super::super::service;
use super::schema::{Of, Record, SHARED, SHOWN, recorded, short};
use crate::kind::{Rules, Warn};

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src");

/// How the fields of an object are filled in.
#[derive(Clone, Copy)]
struct Fill<'a> {
    text: &'a str,
    number: i64,
    /// Which one of the structs beside each other is there; `None`: all of them.
    branch: Option<usize>,
}

/// Deeper than any kind.
const DEPTH: usize = 24;
/// Parts that rules reach the rest by.
const ALWAYS: &[&str] = &["metadata", "spec", "status", "template", "jobTemplate", "devices"];
const RESOURCES: &[&str] = &["cpu", "memory", "storage", "hugepages-2Mi", "example.com/a"];

impl Fill<'_> {
    fn object(self, definition: Definition, depth: usize) -> Value {
        let types = api::types::of(definition.name);
        let is_struct =
            |field: &facts::Field| field.shape.is_empty() && fields_of(*field).is_some();
        let branches = definition.fields().filter(is_struct).count().max(1);
        let mut index = 0;
        let mut object = Map::new();
        for field in definition.fields() {
            let is_branch = is_branch(&field);
            index += usize::from(is_branch);
            let is_other = self.branch.is_some_and(|one| one % branches + 1 != index);
            if depth == 0 || is_branch && is_other {
                continue;
            }
            let of = types.as_ref().and_then(|of| of.map.as_ref()?.fields.get(field.name));
            let scalar = of.map_or(Scalar::Untyped, |of| scalar_of(of.of.get()));
            object.insert(field.name.into(), self.field(field, scalar, depth));
        }
        object.into()
    }

    fn field(self, field: facts::Field, scalar: Scalar, depth: usize) -> Value {
        let one = |fill: Self| match fields_of(field) {
            Some(definition) => fill.object(definition, depth - 1),
            None => fill.scalar(field, scalar),
        };
        match field.shape {
            // An element for each branch.
            "[]" => {
                let branches = fields_of(field).map_or(1, branches);
                let of_branch =
                    |one: usize| self.branch.map_or(self, |_| Self { branch: Some(one), ..self });
                let count = if self.branch.is_some() { branches } else { 1 };
                Value::from_iter((0..count).map(|index| one(of_branch(index))))
            }
            "{}" if field.definition.ends_with(".Quantity") => {
                RESOURCES.iter().map(|name| ((*name).to_owned(), one(self))).collect()
            }
            "{}" => Map::from_iter([(self.text.to_owned(), one(self))]).into(),
            _ => one(self),
        }
    }

    fn scalar(self, field: facts::Field, scalar: Scalar) -> Value {
        match (scalar, field.definition.rsplit('.').next()) {
            (_, Some("Quantity")) => self.number.to_string().into(),
            (_, Some("Time" | "MicroTime")) => "2026-01-02T03:04:05Z".into(),
            (_, Some("IntOrString")) | (Scalar::Numeric, _) => self.number.into(),
            (Scalar::Boolean, _) => (self.number > 0).into(),
            _ => self.text.into(),
        }
    }
}

/// A struct beside others, of which an object may have to have one.
fn is_branch(field: &facts::Field) -> bool {
    field.shape.is_empty() && fields_of(*field).is_some() && !ALWAYS.contains(&field.name)
}

fn branches(definition: Definition) -> usize {
    definition.fields().filter(is_branch).count().max(1)
}

/// The number of rounds that reach each branch outside of lists. A list has all branches.
fn rounds(definition: Definition, is_element: bool) -> usize {
    let own = if is_element { 1 } else { branches(definition) };
    let below = definition.fields().filter_map(|field| {
        let below = fields_of(field).filter(|below| below.name != definition.name)?;
        Some(rounds(below, field.shape == "[]"))
    });
    below.max().unwrap_or(1).max(own)
}

/// The definition of a field's value or elements, if it has fields.
fn fields_of(field: facts::Field) -> Option<Definition> {
    facts::definition(field.definition).filter(|definition| definition.fields().next().is_some())
}

fn scalar_of(of: &Type) -> Scalar {
    let below = of.list.as_ref().map(|list| &list.element);
    let below = below.or_else(|| of.map.as_ref()?.rest.as_ref());
    match (of.scalar, below) {
        (Some(scalar), _) => scalar,
        (None, Some(below)) => scalar_of(below.get()),
        (None, None) => Scalar::Untyped,
    }
}

/// The checks of a stored kind.
struct Checked {
    group: String,
    kind: String,
    rules: &'static Rules,
    warn: Option<Warn>,
}

/// The kinds that are stored, each once.
fn checked() -> Vec<Checked> {
    let mut found: Vec<Checked> = vec![];
    for kind in crate::RESOURCES {
        let row = kind.row(None).build(None);
        let is_known = found.iter().any(|one| (&one.group, &one.kind) == (&row.group, &row.kind));
        if !row.is_stored() || is_known || kind.rules().typed.is_some() {
            continue;
        }
        let (rules, warn) = (kind.rules(), kind.warnings());
        found.push(Checked { group: row.group, kind: row.kind, rules, warn });
    }
    found
}

/// All that a kind demands, of a new object and of a changed one.
fn run(checked: &Checked, new: &Value, old: &Value) {
    let Checked { rules, .. } = checked;
    let of = Of::kind(&checked.group, &checked.kind);
    judged(of, new, None, |at, _| (rules.create)(at));
    judged(of, new, Some(old), |at, old| match rules.update {
        Some(update) => update(at, old),
        None => (rules.create)(at),
    });
    for (_, check) in rules.parts {
        judged(of, new, Some(old), check);
    }
    if checked.kind == "Service" {
        judged(of, new, Some(old), |at, old| service::addresses(at, Some(old)));
    }
    if let Some(warn) = checked.warn {
        judged(of, new, None, |at, _| warn(at, &mut vec![]));
    }
}

/// The program's part of a file of rules.
struct File {
    name: String,
    text: String,
    asked: Vec<Asked>,
}

/// A name that a rule spells out: where, and what.
struct Asked {
    file: String,
    line: u32,
    column: u32,
    names: String,
}

/// The files with checks: those that know places.
fn rule_files() -> Vec<File> {
    let (mut open, mut found) = (vec![PathBuf::from(SOURCES)], vec![]);
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(directory).expect("sources") {
            let path = entry.expect("a file").path();
            if path.is_dir() {
                open.push(path);
                continue;
            }
            let name = path.strip_prefix(SOURCES).expect("below").to_string_lossy().into_owned();
            let text = fs::read_to_string(&path).expect("a file of rules");
            if !text.contains("&At<'_>") || name.ends_with("tests.rs") {
                continue;
            }
            let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
            let asked = asked_in(&name, &text[..end]);
            found.push(File { name, text: text[..end].to_owned(), asked });
        }
    }
    found
}

/// The names that a file spells out.
fn asked_in(file: &str, text: &str) -> Vec<Asked> {
    let mut found = vec![];
    for (number, line) in text.lines().enumerate() {
        for method in ["get(\"", "has(\"", "child_path(\""] {
            for (at, _) in line.match_indices(&format!(".{method}")) {
                let names = &line[at + 1 + method.len()..];
                let names = names.split('"').next().unwrap_or_default().to_owned();
                let column = u32::try_from(line[..at].chars().count() + 2).unwrap_or_default();
                let line = u32::try_from(number + 1).unwrap_or_default();
                found.push(Asked { file: file.to_owned(), line, column, names });
            }
        }
    }
    found
}

impl Record {
    fn append(&mut self, other: Self) {
        self.misspelt.extend(other.misspelt);
        self.asked.extend(other.asked);
    }

    fn has(&self, one: &Asked) -> bool {
        let mut here =
            self.asked.iter().filter(|at| (at.line(), at.column()) == (one.line, one.column));
        here.any(|at| is_file(at.file(), &one.file))
    }

    fn uses(&self, name: &str) -> bool {
        self.asked.iter().any(|at| is_file(at.file(), name))
    }
}

/// Is it the path of the file of rules of that name?
fn is_file(path: &str, name: &str) -> bool {
    path.strip_suffix(name).is_some_and(|rest| rest.ends_with("/src/"))
}

/// What rules may compare with: texts of one word that begin with a capital, and names with a slash.
fn texts_in(text: &str) -> BTreeSet<&str> {
    let quoted = text.split('"').skip(1).step_by(2);
    let is_value = |text: &&str| {
        let is_word = text.chars().all(|one| one.is_ascii_alphanumeric() || "/.-".contains(one));
        is_word
            && (text.starts_with(|first: char| first.is_ascii_uppercase()) || text.contains('/'))
    };
    quoted.filter(is_value).collect()
}

fn whole(rules: &Checked, definition: Definition, fill: Fill<'_>) -> Value {
    let mut object = fill.object(definition, DEPTH);
    object["kind"] = rules.kind.as_str().into();
    object
}

/// Rounds for one kind.
fn sweep(rules: &Checked, definition: Definition) -> Record {
    let object = |text, number, branch| whole(rules, definition, Fill { text, number, branch });
    let empty = Value::Object(Map::new());
    recorded(|| {
        for (text, number) in [("a", 1), ("", -1), ("10.0.0.1", 70_000)] {
            let (all, other) = (object(text, number, None), object("b", 2, None));
            for (new, old) in [(&all, &other), (&all, &empty), (&empty, &all)] {
                run(rules, new, old);
            }
        }
        // Compared with themselves: showing what changed in large objects takes most of the time.
        for branch in 0..rounds(definition, false) {
            let object = object("a", 1, Some(branch));
            run(rules, &object, &object);
        }
    })
}

/// A round for each text that rules of the files may compare with, while a file has names that no round
/// reached.
fn compare(rules: &Checked, definition: Definition, files: &[&File], record: &mut Record) {
    let object = |text| whole(rules, definition, Fill { text, number: 1, branch: None });
    for file in files {
        for text in texts_in(&file.text) {
            if file.asked.iter().all(|one| record.has(one)) {
                break;
            }
            let object = object(text);
            record.append(recorded(|| run(rules, &object, &object)));
        }
    }
}

/// Are the names fields of any definition, one below the other, or upstream's in errors?
fn is_known(names: &str) -> bool {
    let is_shown = |name: &str| SHOWN.iter().any(|(_, shown, _)| shown.contains(&name));
    let is_field = |name: &str| facts::definitions().any(|one| one.field(name).is_some());
    names.split('.').all(|name| is_field(name) || is_shown(name))
}

#[test]
fn rules_ask_for_fields_that_there_are() {
    let files = rule_files();
    let (mut record, mut of_pods) = (Record::default(), Record::default());
    for rules in &checked() {
        let Some(definition) = Of::definition_of(&rules.group, &rules.kind) else {
            panic!("{}: no definition of the kind that is stored", rules.kind)
        };
        let all = whole(rules, definition, Fill { text: "a", number: 1, branch: None });
        let closed = || recorded(|| run(rules, &all, &Value::Object(Map::new())));
        let mut own = features::scoped(Gates::DEFAULT, closed);
        own.append(features::scoped(all_open(), || sweep(rules, definition)));
        // The rules of templates are those of pods, which take the longest.
        let is_new = |file: &&File| own.uses(&file.name) && !of_pods.uses(&file.name);
        let used: Vec<&File> = files.iter().filter(is_new).collect();
        if rules.kind == "Pod" {
            of_pods.append(own.clone());
        }
        record.append(own);
        features::scoped(all_open(), || compare(rules, definition, &used, &mut record));
    }
    let misspelt = record.misspelt.iter().map(|((.., at), text)| format!("{text} ({at})"));
    assert_eq!(misspelt.collect::<Vec<_>>(), [""; 0]);
    let all = files.iter().flat_map(|file| &file.asked);
    let (reached, missed): (Vec<&Asked>, Vec<&Asked>) = all.partition(|one| record.has(one));
    for one in &missed {
        println!("not reached: {}:{}:{} {:?}", one.file, one.line, one.column, one.names);
    }
    println!("{} names reached, {} not", reached.len(), missed.len());
    for Asked { file, line, names, .. } in &missed {
        assert!(is_known(names), "{file}:{line}: {names:?} is no field of any definition");
    }
    assert!(missed.len() * 10 < reached.len(), "{} names are not reached", missed.len());
}

/// Upstream's names of selectors that are no fields: of a Namespace, and of a Job.
const SELECTED: &[&str] = &["name", "status.successful"];

#[test]
fn selectors_name_fields_that_there_are() {
    for row in crate::tests::built_in().iter().filter(|row| row.is_stored()) {
        let of = Of::kind(&row.group, &row.kind);
        let record = recorded(|| {
            let names = row.fields.names.iter().map(|name| &**name);
            for name in names.filter(|name| !SELECTED.contains(name)) {
                of.fields(name, &Path::default());
            }
        });
        assert!(record.misspelt.is_empty(), "{:?}", record.misspelt.values());
    }
}

#[test]
fn a_misspelt_name_is_told_with_its_kind_and_path() {
    let tree = json!({"spec": {"template": {"spec": {"containers": [{"name": "c"}]}}}});
    let deployment = Of::kind("apps", "Deployment");
    let misspell = |at: &At<'_>, _: &At<'_>| {
        at.get("spec.replcas").not_negative();
        at.has("sepc");
        at.child_path("spec.tepmlate");
        for container in at.get("spec.template.spec.containers").items() {
            container.get("imagge").need();
            container.get("name.nmae").need();
        }
        at.get("spec.template.metadata.labels").get("any").need();
        at.get("spec.template.spec.containers.name").need();
    };
    let record = recorded(|| _ = judged(deployment, &tree, None, misspell));
    let mut found: Vec<&str> = record.misspelt.values().map(String::as_str).collect();
    found.sort_unstable();
    assert_eq!(
        found,
        [
            "apps.v1.Deployment at <nil>: \"name\" is no field of []core.v1.Container",
            "apps.v1.Deployment at <nil>: \"replcas\" is no field of apps.v1.DeploymentSpec",
            "apps.v1.Deployment at <nil>: \"sepc\" is no field of apps.v1.Deployment",
            "apps.v1.Deployment at <nil>: \"tepmlate\" is no field of apps.v1.DeploymentSpec",
            "apps.v1.Deployment at spec.template.spec.containers[0]: \"imagge\" is no field of core.v1.Container",
            "apps.v1.Deployment at spec.template.spec.containers[0]: \"nmae\" is no field of a scalar",
        ]
    );
}

#[test]
#[should_panic(expected = "core.v1.Pod at spec: \"nodName\" is no field of core.v1.PodSpec")]
fn a_test_that_meets_a_misspelt_name_fails() {
    let pod = json!({"spec": {}});
    judged(Of::kind("", "Pod"), &pod, None, |at, _| at.get("spec").get("nodName").required(""));
}

/// An exception that the schema does not need any more is none.
#[test]
fn exceptions_are_needed() {
    let of_name = |name: &str| facts::definitions().find(|one| short(one.name) == name);
    for (place, names, why) in SHOWN {
        let definition = of_name(place.trim_start_matches("[]"));
        assert!(place.is_empty() || definition.is_some(), "{place}");
        assert!(!why.is_empty());
        let is_there = |name: &&str| definition.is_some_and(|one| one.field(name).is_some());
        assert!(place.starts_with("[]") || !names.iter().any(is_there), "{place}: {names:?}");
    }
    for (names, home, without) in SHARED {
        let home = of_name(home).unwrap_or_else(|| panic!("{home}"));
        assert!(names.iter().all(|name| home.field(name).is_some()), "{names:?}");
        for place in *without {
            let lacks = |name: &&str| of_name(place).is_some_and(|one| one.field(name).is_none());
            let is_home = short(home.name) == *place;
            assert!(is_home || names.iter().any(lacks), "{place}: {names:?}");
        }
    }
}

fn all_open() -> Gates {
    Feature::all().fold(Gates::DEFAULT, |gates, feature| gates.with(feature, true))
}
