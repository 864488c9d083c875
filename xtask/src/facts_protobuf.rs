//! `cargo xtask facts-protobuf`: the protobuf field numbers of `crates/api`.
//!
//! In: the `generated.proto` files of Kubernetes' Go modules, for types and numbers, and the Go types
//! beside them, whose tags have the JSON names, pointers and `omitempty`. Both come from Go's module
//! cache. Out: `crates/api/facts/protobuf.tsv`, which is
//! committed: facts, no prose. `machinery::protobuf::Table` describes its form and reads it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use crate::foreign;
use crate::sh::Outcome;

const OUTPUT: &str = "crates/api/facts/protobuf.tsv";

const MODULES: &[&str] = &[
    "k8s.io/apimachinery",
    "k8s.io/api",
    "k8s.io/apiextensions-apiserver",
    "k8s.io/kube-aggregator",
];

/// Packages of versions that no server of this release serves.
const RETIRED: &[&str] = &[
    "apiextensions.v1beta1",
    "apiregistration.v1beta1",
    "apps.v1beta1",
    "apps.v1beta2",
    "authorization.v1beta1",
    "batch.v1beta1",
    "discovery.v1beta1",
    "events.v1beta1",
    "extensions.v1beta1",
    "flowcontrol.v1beta1",
    "flowcontrol.v1beta2",
    "flowcontrol.v1beta3",
    "node.v1alpha1",
    "node.v1beta1",
    "policy.v1beta1",
    "rbac.v1alpha1",
    "rbac.v1beta1",
    "scheduling.v1beta1",
    "testapigroup.v1",
];

/// Messages whose JSON is not an object with their fields, and the column that says so.
const SPECIAL: &[(&str, &str)] = &[
    ("meta.v1.Time", "time"),
    ("meta.v1.MicroTime", "microtime"),
    ("meta.v1.Duration", "duration"),
    ("api.resource.Quantity", "quantity"),
    ("util.intstr.IntOrString", "intstr"),
    ("pkg.runtime.RawExtension", "raw"),
    ("meta.v1.FieldsV1", "raw"),
    ("apiextensions.v1.JSON", "raw"),
    ("apiextensions.v1.JSONSchemaPropsOrArray", "or-list:JSONSchemaProps"),
    ("apiextensions.v1.JSONSchemaPropsOrBool", "or-bool:JSONSchemaProps"),
    ("apiextensions.v1.JSONSchemaPropsOrStringArray", "or-strings:JSONSchemaProps"),
];

pub fn run(args: &[String]) -> Outcome<()> {
    if !args.is_empty() {
        return Err("usage: cargo xtask facts-protobuf".to_owned());
    }
    let mut packages = vec![];
    for module in MODULES {
        let mut files = vec![];
        find_protos(&foreign::module(module)?, &mut files)?;
        files.sort();
        for file in files {
            packages.extend(package(&file)?);
        }
    }
    let table = render(&packages);
    fs::write(OUTPUT, &table).map_err(|error| format!("{OUTPUT}: {error}"))?;
    println!("{OUTPUT}: {} lines", table.lines().count());
    Ok(())
}

fn find_protos(dir: &Path, found: &mut Vec<PathBuf>) -> Outcome<()> {
    for entry in fs::read_dir(dir).map_err(|error| format!("{}: {error}", dir.display()))? {
        let path = entry.map_err(|error| error.to_string())?.path();
        // Examples and test groups of the modules are not part of the API.
        if path.is_dir() && !path.ends_with("examples") && !path.ends_with("test") {
            find_protos(&path, found)?;
        } else if path.ends_with("generated.proto") {
            found.push(path);
        }
    }
    Ok(())
}

struct Package {
    /// The last two parts of the full name: `core.v1`.
    name: String,
    /// `v1`, `apps/v1`; empty for packages without kinds.
    group_version: String,
    messages: BTreeMap<String, Message>,
}

#[derive(Default)]
struct Message {
    fields: BTreeMap<u32, Field>,
    /// A named Go slice: in JSON an array.
    is_slice: bool,
}

struct Field {
    name: String,
    shape: &'static str,
    kind: String,
    flags: String,
}

/// `None` for packages that are left out, or have no messages.
fn package(file: &Path) -> Outcome<Option<Package>> {
    let text = fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let (full, mut messages) = proto(&text);
    let name = short(&full);
    if RETIRED.contains(&name.as_str()) || messages.is_empty() {
        return Ok(None);
    }
    let dir = file.parent().ok_or("a file has a folder")?;
    let mut group_version = String::new();
    for entry in fs::read_dir(dir).map_err(|error| format!("{}: {error}", dir.display()))? {
        let path = entry.map_err(|error| error.to_string())?.path();
        let file_name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_source = file_name.ends_with(".go") && !file_name.ends_with("_test.go");
        if !is_source || file_name.starts_with("zz_") || file_name.starts_with("generated.") {
            continue;
        }
        let text =
            fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        add_tags(&text, &mut messages);
        if let Some((_, rest)) = text.split_once("const GroupName = \"") {
            let group = rest.split('"').next().unwrap_or_default();
            let version = name.rsplit('.').next().unwrap_or_default();
            group_version =
                if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
        }
    }
    Ok(Some(Package { name, group_version, messages }))
}

/// `k8s.io.api.core.v1` is known as `core.v1` here.
fn short(package: &str) -> String {
    let mut parts: Vec<&str> = package.rsplit('.').take(2).collect();
    parts.reverse();
    parts.join(".")
}

/// Package and messages of a proto file, as Kubernetes' generator writes them: a field a line.
fn proto(text: &str) -> (String, BTreeMap<String, Message>) {
    let mut package = String::new();
    let mut messages = BTreeMap::new();
    let mut current: Option<(String, Message)> = None;
    let mut is_nullable = false;
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("package ") {
            package = name.trim_end_matches(';').to_owned();
        } else if line == "// +protobuf.nullable=true" {
            is_nullable = true;
        } else if let Some(rest) = line.strip_prefix("message ") {
            let name = rest.trim_end_matches('{').trim().to_owned();
            current = Some((
                name,
                Message { is_slice: std::mem::take(&mut is_nullable), ..Message::default() },
            ));
        } else if line == "}" {
            messages.extend(current.take());
        } else if let (Some((_, message)), Some((number, field))) =
            (&mut current, proto_field(line, &package))
        {
            message.fields.insert(number, field);
        }
    }
    (package, messages)
}

/// `optional .k8s.io.api.core.v1.Foo name = 3;`, `map<string, string> name = 1;`
fn proto_field(line: &str, package: &str) -> Option<(u32, Field)> {
    let (left, number) = line.strip_suffix(';')?.rsplit_once(" = ")?;
    let (kind, name) = left.rsplit_once(' ')?;
    let (shape, kind) = match kind.strip_prefix("map<string, ") {
        Some(value) => ("{}", value.strip_suffix('>')?),
        None => match kind.split_once(' ')? {
            ("repeated", kind) => ("[]", kind),
            (_, kind) => ("", kind),
        },
    };
    let kind = match kind.strip_prefix('.') {
        Some(full) => {
            let (other, message) = full.rsplit_once('.')?;
            if other == package {
                message.to_owned()
            } else {
                format!("{}.{message}", short(other))
            }
        }
        None => kind.to_owned(),
    };
    Some((number.parse().ok()?, Field { name: name.to_owned(), shape, kind, flags: "?".into() }))
}

/// Adds the facts from the tags of Go structs.
fn add_tags(text: &str, messages: &mut BTreeMap<String, Message>) {
    let mut current = None;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("type ") {
            current = rest.strip_suffix(" struct {").map(str::to_owned);
        } else if line.starts_with('}') {
            current = None;
        }
        let Some(message) = current.as_ref().and_then(|name| messages.get_mut(name)) else {
            continue;
        };
        let Some((declaration, tag)) = line.split_once('`') else { continue };
        let Some(number) = tag_value(tag, "protobuf").and_then(|text| text.split(',').nth(1))
        else {
            continue;
        };
        let Some(field) =
            number.parse().ok().and_then(|number: u32| message.fields.get_mut(&number))
        else {
            continue;
        };
        let mut options = tag_value(tag, "json").unwrap_or_default().split(',');
        let name = options.next().unwrap_or_default();
        let options: Vec<&str> = options.collect();
        if name.is_empty() && options.contains(&"inline") {
            field.shape = "<>";
        } else if !name.is_empty() {
            field.name = name.to_owned();
        }
        let go_type = declaration.split_whitespace().last().unwrap_or_default();
        field.flags.clear();
        for (flag, holds) in [
            ('*', go_type.starts_with('*')),
            ('?', options.contains(&"omitempty")),
            ('0', options.contains(&"omitzero")),
        ] {
            field.flags.extend(holds.then_some(flag));
        }
    }
}

/// The text of `key:"…"` in a struct tag.
fn tag_value<'a>(tag: &'a str, key: &str) -> Option<&'a str> {
    let (_, rest) = tag.split_once(&format!("{key}:\""))?;
    rest.split('"').next()
}

fn render(packages: &[Package]) -> String {
    let slices: Vec<String> = packages
        .iter()
        .flat_map(|package| {
            package.messages.iter().map(move |(name, message)| (package, name, message))
        })
        .filter(|(_, _, message)| message.is_slice)
        .map(|(package, name, _)| format!("{}.{name}", package.name))
        .collect();
    let mut out = String::new();
    for package in packages {
        let _ = writeln!(out, "@{}\t{}", package.name, package.group_version);
        for (name, message) in &package.messages {
            if column(&package.name, name, &slices) != *name {
                continue;
            }
            let _ = writeln!(out, "{name}");
            for (number, field) in &message.fields {
                let kind = column(&package.name, &field.kind, &slices);
                let line =
                    format!("\t{number}\t{}\t{}{kind}\t{}", field.name, field.shape, field.flags);
                let _ = writeln!(out, "{}", line.trim_end());
            }
        }
    }
    out
}

/// A field's type in the form of the table.
fn column(package: &str, kind: &str, slices: &[String]) -> String {
    let full = if kind.contains('.') { kind.to_owned() } else { format!("{package}.{kind}") };
    if slices.contains(&full) {
        return "strings".to_owned();
    }
    let special = SPECIAL.iter().find(|(name, _)| *name == full);
    special.map_or(kind, |(_, column)| column).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proto_and_tags_make_the_table() {
        let (full, mut messages) = proto(
            "package k8s.io.api.a.v1;\n// +protobuf.nullable=true\nmessage Words {\n  repeated string items = 1;\n}\n\
             message B {\n  // prose = 9;\n  optional .k8s.io.apimachinery.pkg.apis.meta.v1.Time since = 2;\n\
             \n  repeated .k8s.io.api.a.v1.P ports = 1;\n  map<string, Words> extra = 3;\n  optional C source = 4;\n}\n",
        );
        add_tags(
            "type B struct {\n\tPorts []P `json:\"ports,omitempty\" protobuf:\"bytes,1,rep,name=ports\"`\n\
             \tSince *metav1.Time `json:\"sinceWhen\" protobuf:\"bytes,2,opt,name=since\"`\n\
             \tC `json:\",inline\" protobuf:\"bytes,4,opt,name=source\"`\n}\n",
            &mut messages,
        );
        let package = Package { name: short(&full), group_version: "a/v1".into(), messages };
        let expected = "@a.v1\ta/v1\nB\n\t1\tports\t[]P\t?\n\t2\tsinceWhen\ttime\t*\n\t3\textra\t{}strings\t?\n\t4\tsource\t<>C\n";
        assert_eq!(render(&[package]), expected);
    }
}
