//! `cargo xtask facts-go`: the fields of Kubernetes' Go types as Go's decoders and encoders name them.
//!
//! In: the types of Kubernetes' Go modules, from Go's module cache, and the definitions in
//! `crates/api/facts/fields.tsv`. Out: `crates/api/facts/go.tsv`, which is committed: facts, no prose.
//!
//! ```text
//! NAME
//! ⇥ FIELD ⇥ TYPE ⇥ EMBEDDED
//! ```
//!
//! Fields come in Go's order. TYPE is there if the schema does not tell it: named texts, numbers, lists and maps
//! (`v1.ServiceType`), and bytes. EMBEDDED names the structs between the definition's own and the field's.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::foreign;
use crate::sh::Outcome;

const OUTPUT: &str = "crates/api/facts/go.tsv";
const FIELDS: &str = "crates/api/facts/fields.tsv";

/// The beginning of a definition's name, and the module that has its package.
const MODULES: &[(&str, &str)] = &[
    ("io.k8s.api.", "k8s.io/api"),
    ("io.k8s.apimachinery.", "k8s.io/apimachinery"),
    ("io.k8s.apiextensions-apiserver.", "k8s.io/apiextensions-apiserver"),
    ("io.k8s.kube-aggregator.", "k8s.io/kube-aggregator"),
];
/// Packages whose named types others use under `v1`.
const SHARED: &[&str] = &["io.k8s.api.core.v1", "io.k8s.apimachinery.pkg.apis.meta.v1"];

/// A field of a Go struct; an embedded one has no name.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Field {
    name: String,
    kind: String,
}

#[derive(Default)]
struct Package {
    structs: BTreeMap<String, Vec<Field>>,
    /// Named texts, numbers, lists and maps.
    named: Vec<String>,
}

pub fn run(args: &[String]) -> Outcome<()> {
    if !args.is_empty() {
        return Err("usage: cargo xtask facts-go".to_owned());
    }
    let text = fs::read_to_string(FIELDS).map_err(|error| format!("{FIELDS}: {error}"))?;
    let names = text.lines().filter(|line| !line.starts_with('\t'));
    let definitions: Vec<&str> = names.filter_map(|line| line.split('\t').next()).collect();
    let mut packages = BTreeMap::new();
    for name in &definitions {
        let Some((package, _)) = name.rsplit_once('.') else { continue };
        if !packages.contains_key(package) {
            packages.insert(package.to_owned(), read(package)?);
        }
    }
    let table = render(&packages, &definitions);
    fs::write(OUTPUT, &table).map_err(|error| format!("{OUTPUT}: {error}"))?;
    println!("{OUTPUT}: {} lines", table.lines().count());
    Ok(())
}

fn read(package: &str) -> Outcome<Package> {
    let mut found = Package::default();
    let Some((prefix, module)) = MODULES.iter().find(|(prefix, _)| package.starts_with(prefix))
    else {
        return Ok(found);
    };
    let folder = foreign::module(module)?.join(package[prefix.len()..].replace('.', "/"));
    let entries =
        fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut files: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.sort();
    for file in files.iter().filter(|file| is_source(file)) {
        let text =
            fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        parse(&text, &mut found);
    }
    Ok(found)
}

fn is_source(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let is_generated = name.starts_with("zz_") || name.starts_with("generated.");
    name.ends_with(".go") && !name.ends_with("_test.go") && !is_generated
}

fn parse(text: &str, package: &mut Package) {
    let mut current: Option<(String, Vec<Field>)> = None;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("type ") {
            match rest.split_once(' ') {
                Some((name, "struct {")) => current = Some((name.to_owned(), vec![])),
                Some((name, what)) if !what.starts_with("struct") && !what.starts_with("func") => {
                    package.named.push(name.to_owned());
                }
                _ => {}
            }
        } else if line.starts_with('}') {
            package.structs.extend(current.take());
        } else if let Some((_, fields)) = &mut current {
            fields.extend(field(line));
        }
    }
}

/// The field of a line with a JSON tag.
fn field(line: &str) -> Option<Field> {
    let (words, tag) = line.trim().split_once('`')?;
    let json = tag.split_once("json:\"")?.1.split('"').next()?;
    let mut words = words.split_whitespace();
    let (first, second) = (words.next()?, words.next());
    let name = json.split(',').next()?;
    match second {
        // Embedded, and its fields are in the place of this one.
        None if name.is_empty() => Some(Field { name: String::new(), kind: first.to_owned() }),
        None => Some(Field { name: name.to_owned(), kind: first.to_owned() }),
        Some(_) if matches!(name, "" | "-") => None,
        Some(kind) => Some(Field { name: name.to_owned(), kind: kind.to_owned() }),
    }
}

fn render(packages: &BTreeMap<String, Package>, definitions: &[&str]) -> String {
    let mut out = String::new();
    for definition in definitions {
        let Some((package, name)) = definition.rsplit_once('.') else { continue };
        let mut lines = String::new();
        add(packages, package, name, "", &mut lines);
        if !lines.is_empty() {
            let _ = write!(out, "{definition}\n{lines}");
        }
    }
    out
}

fn add(
    packages: &BTreeMap<String, Package>,
    package: &str,
    name: &str,
    within: &str,
    out: &mut String,
) {
    let fields = packages.get(package).and_then(|known| known.structs.get(name));
    for Field { name, kind } in fields.into_iter().flatten() {
        if name.is_empty() {
            let embedded = kind.trim_start_matches('*');
            if embedded == "metav1.TypeMeta" || embedded == "TypeMeta" {
                out.push_str("\tkind\n\tapiVersion\n");
            } else {
                let dot = if within.is_empty() { "" } else { "." };
                add(packages, package, embedded, &format!("{within}{dot}{embedded}"), out);
            }
            continue;
        }
        let shown = go_type(packages, package, kind).unwrap_or_default();
        let line = format!("\t{name}\t{shown}\t{within}");
        let _ = writeln!(out, "{}", line.trim_end_matches('\t'));
    }
}

/// The type as Go's errors name it, if the schema does not tell it.
fn go_type(packages: &BTreeMap<String, Package>, package: &str, kind: &str) -> Option<String> {
    let kind = kind.trim_start_matches('*');
    if kind == "[]byte" {
        return Some("[]uint8".to_owned());
    }
    if let Some(item) = kind.strip_prefix("[]") {
        return go_type(packages, package, item).map(|item| format!("[]{item}"));
    }
    if let Some((key, value)) = kind.strip_prefix("map[").and_then(|rest| rest.split_once(']')) {
        let plain = |kind: &str| qualified(package, kind);
        let is_told = key == "string" && go_type(packages, package, value).is_none();
        return (!is_told).then(|| format!("map[{}]{}", plain(key), plain(value)));
    }
    let names = |package: &str, name: &str| {
        packages.get(package).is_some_and(|known| known.named.iter().any(|one| one == name))
    };
    let is_named = match kind.split_once('.') {
        Some(("types", _)) => true,
        Some((_, name)) => SHARED.iter().any(|package| names(package, name)),
        None => names(package, kind),
    };
    is_named.then(|| qualified(package, kind))
}

/// `v1.ServiceType`, whatever the file calls the package.
fn qualified(package: &str, kind: &str) -> String {
    let kind = kind.trim_start_matches('*');
    let own = package.rsplit('.').next().unwrap_or_default();
    match kind.split_once('.') {
        Some((other @ ("types" | "resource" | "intstr" | "runtime"), name)) => {
            format!("{other}.{name}")
        }
        Some((_, name)) => format!("v1.{name}"),
        None if kind.starts_with(char::is_uppercase) => format!("{own}.{kind}"),
        None if kind == "byte" => "uint8".to_owned(),
        None => match kind.strip_prefix("[]") {
            Some(item) => format!("[]{}", qualified(package, item)),
            None => kind.to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_types_make_the_table() {
        let mut core = Package::default();
        parse(
            "type A struct {\n\tmetav1.TypeMeta `json:\",inline\"`\n\t// Prose.\n\tZ Kind `json:\"z,omitempty\" protobuf:\"x\"`\n\tB `json:\",inline\"`\n\
             \tList []Kind `json:\"list\"`\n\tU *types.UID `json:\"u\"`\n\tBytes []byte `json:\"bytes\"`\n\tMap map[string][]byte `json:\"map\"`\n\tS B `json:\"s\"`\n\tN *int32 `json:\"n\"`\n}\n\
             type B struct {\n\tOn bool `json:\"on\"`\n\tHidden int\n}\ntype Kind string\n",
            &mut core,
        );
        let packages = BTreeMap::from([("io.k8s.api.core.v1".to_owned(), core)]);
        let expected = "io.k8s.api.core.v1.A\n\tkind\n\tapiVersion\n\tz\tv1.Kind\n\ton\t\tB\n\tlist\t[]v1.Kind\n\tu\ttypes.UID\n\
                        \tbytes\t[]uint8\n\tmap\tmap[string][]uint8\n\ts\n\tn\n";
        assert_eq!(render(&packages, &["io.k8s.api.core.v1.A"]), expected);
    }
}
