//! `cargo xtask facts-internal`: the fields of Kubernetes' internal types.
//!
//! Some errors show a part of an object, and upstream shows it as its internal type: fields in Go's
//! order under Go's names, absent ones as `null`. In: `pkg/apis/*/types.go` of Kubernetes' Go module,
//! from Go's module cache. Out: `crates/resources/facts/internal.tsv`, which is committed: facts, no
//! prose. `resources::validate::internal` describes its form and reads it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;

use crate::foreign;
use crate::sh::Outcome;

const OUTPUT: &str = "crates/resources/facts/internal.tsv";

/// The types that errors show, by package.
const ROOTS: &[(&str, &str)] = &[
    ("core", "EphemeralContainer"),
    ("core", "EventSource"),
    ("core", "HostIP"),
    ("core", "ObjectReference"),
    ("core", "PersistentVolumeClaimSpec"),
    ("core", "PersistentVolumeSource"),
    ("core", "PodIP"),
    ("core", "PodResourceClaim"),
    ("core", "PodSpec"),
    ("core", "PodTemplateSpec"),
    ("core", "Taint"),
    ("apps", "DaemonSetUpdateStrategy"),
    ("apps", "DeploymentStrategy"),
    ("apps", "StatefulSetUpdateStrategy"),
    ("authorization", "NonResourceAttributes"),
    ("batch", "PodFailurePolicy"),
    ("batch", "SuccessPolicy"),
    ("flowcontrol", "FlowSchemaSpec"),
    ("flowcontrol", "PriorityLevelConfigurationSpec"),
    ("networking", "ParentReference"),
    ("policy", "PodDisruptionBudgetSpec"),
    ("rbac", "RoleRef"),
    ("resource", "ResourceClaimSpec"),
    ("resource", "ResourceClaimTemplateSpec"),
    ("storage", "CSINodeDriver"),
    ("storage", "VolumeAttachmentSpec"),
];

pub fn run(args: &[String]) -> Outcome<()> {
    if !args.is_empty() {
        return Err("usage: cargo xtask facts-internal".to_owned());
    }
    let dir = foreign::module("k8s.io/kubernetes")?;
    let mut packages = BTreeMap::new();
    for (package, _) in ROOTS {
        let file = dir.join("pkg/apis").join(package).join("types.go");
        let text =
            fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        packages.entry(*package).or_insert_with(|| parse(&text));
    }
    let table = render(&packages, ROOTS)?;
    fs::write(OUTPUT, &table).map_err(|error| format!("{OUTPUT}: {error}"))?;
    println!("{OUTPUT}: {} lines", table.lines().count());
    Ok(())
}

#[derive(Default)]
struct Package {
    /// Fields by struct, in order: name (empty for embedded ones) and Go type.
    structs: BTreeMap<String, Vec<(String, String)>>,
    /// `type RestartPolicy string`
    aliases: BTreeMap<String, String>,
}

fn parse(text: &str) -> Package {
    let mut package = Package::default();
    let mut current: Option<(String, Vec<(String, String)>)> = None;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("type ") {
            let (name, what) = rest.split_once(' ').unwrap_or((rest, ""));
            match what {
                "struct {" => current = Some((name.to_owned(), vec![])),
                what => {
                    package.aliases.insert(name.to_owned(), what.trim().to_owned());
                }
            }
        } else if line.starts_with('}') {
            package.structs.extend(current.take());
        } else if let Some((_, fields)) = &mut current {
            let line = line.split("//").next().unwrap_or_default().trim();
            let mut words = line.split_whitespace();
            match (words.next(), words.next()) {
                (Some(name), Some(kind)) => fields.push((name.to_owned(), kind.to_owned())),
                (Some(embedded), None) => fields.push((String::new(), embedded.to_owned())),
                _ => {}
            }
        }
    }
    package
}

/// The column of a Go type, and the struct that it names.
fn column(
    packages: &BTreeMap<&str, Package>,
    package: &str,
    kind: &str,
) -> (String, Option<(String, String)>) {
    for (mark, column_mark) in [("*", "*"), ("[]", "[]")] {
        if let Some(rest) = kind.strip_prefix(mark) {
            if kind == "[]byte" {
                return ("[]string".into(), None);
            }
            let (inner, named) = column(packages, package, rest);
            return (format!("{column_mark}{inner}"), named);
        }
    }
    if let Some((_, rest)) = kind.strip_prefix("map[").and_then(|rest| rest.split_once(']')) {
        let (inner, named) = column(packages, package, rest);
        return (format!("{{}}{inner}"), named);
    }
    match kind {
        "string" | "bool" | "types.UID" => return (kind.replace("types.UID", "string"), None),
        "int32" | "int64" | "int" => return ("int".into(), None),
        "resource.Quantity" => return ("quantity".into(), None),
        "intstr.IntOrString" => return ("int".into(), None),
        _ => {}
    }
    let (other, name) = match kind.split_once('.') {
        Some(("api" | "core", name)) => ("core", name),
        Some(_) => return ("json".into(), None),
        None => (package, kind),
    };
    let Some(known) = packages.get(other) else { return ("json".into(), None) };
    if known.structs.contains_key(name) {
        return (name.to_owned(), Some((other.to_owned(), name.to_owned())));
    }
    match known.aliases.get(name) {
        Some(alias) => column(packages, other, alias),
        None => ("json".into(), None),
    }
}

fn render(packages: &BTreeMap<&str, Package>, roots: &[(&str, &str)]) -> Outcome<String> {
    let mut waiting: Vec<(String, String)> =
        roots.iter().map(|(package, name)| ((*package).into(), (*name).into())).collect();
    let mut done: BTreeSet<(String, String)> = BTreeSet::new();
    let mut lines: BTreeMap<String, String> = BTreeMap::new();
    while let Some(next) = waiting.pop() {
        if !done.insert(next.clone()) {
            continue;
        }
        let (package, name) = next;
        let known = packages.get(package.as_str()).and_then(|known| known.structs.get(&name));
        let fields = known.ok_or_else(|| format!("{package} has no {name}"))?;
        let mut text = String::new();
        for (field, kind) in fields {
            let (column, named) = column(packages, &package, kind);
            let mark = if field.is_empty() { "<>" } else { "" };
            let _ = writeln!(text, "\t{field}\t{mark}{column}");
            waiting.extend(named);
        }
        if lines.insert(name.clone(), text).is_some() {
            return Err(format!("two packages have a {name}"));
        }
    }
    Ok(lines.into_iter().map(|(name, fields)| format!("{name}\n{fields}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_types_make_the_table() {
        let core = parse(
            "// A is prose.\ntype A struct {\n\tmetav1.ObjectMeta\n\n\t// Prose.\n\tName string // more\n\tB\n\tList []C\n\tP *C\n\tM map[string]resource.Quantity\n\tK Kind\n}\n\
             type B struct {\n\tOn bool\n}\ntype C struct {\n\tN *int32\n}\ntype Kind string\n",
        );
        let packages = BTreeMap::from([("core", core)]);
        let expected = "A\n\t\t<>json\n\tName\tstring\n\t\t<>B\n\tList\t[]C\n\tP\t*C\n\tM\t{}quantity\n\tK\tstring\nB\n\tOn\tbool\nC\n\tN\t*int\n";
        assert_eq!(render(&packages, &[("core", "A")]).as_deref(), Ok(expected));
    }
}
