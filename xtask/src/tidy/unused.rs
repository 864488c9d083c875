//! Finds dependencies that no code names.
//!
//! In: the manifests and the sources of the work tree. Out: breaches. A dependency that is needed only
//! for its features says so in a comment right before its line: `# tidy: allow(unused): reason`.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::edges::dependency;
use super::mask::Masked;
use super::{Breach, sources};
use crate::sh::Outcome;

const RULE: &str = "unused";

pub fn check(root: &Path) -> Outcome<Vec<Breach>> {
    let mut breaches = Vec::new();
    let mut inherited = BTreeSet::new();
    let mut manifests = vec!["xtask/Cargo.toml".to_owned()];
    let crates = root.join("crates");
    let entries =
        fs::read_dir(&crates).map_err(|error| format!("{}: {error}", crates.display()))?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    manifests.extend(names.map(|name| format!("crates/{name}/Cargo.toml")));
    manifests.retain(|name| root.join(name).is_file());
    manifests.sort();
    for name in &manifests {
        let path = root.join(name);
        let text = read(&path)?;
        let directory = path.parent().expect("a manifest lies in a directory");
        breaches.extend(manifest(name, &text, &words(directory)?));
        inherited.extend(dependencies(&text).map(|(_, name)| name.to_owned()));
    }
    let all = read(&root.join("Cargo.toml"))?;
    let unused = dependencies(&all).filter(|(_, name)| !inherited.contains(*name));
    breaches.extend(unused.map(|(line, name)| Breach {
        file: "Cargo.toml".to_owned(),
        line: line + 1,
        rule: RULE,
        text: format!("no crate uses {name}"),
    }));
    Ok(breaches)
}

fn read(path: &Path) -> Outcome<String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn manifest(file: &str, text: &str, words: &BTreeSet<String>) -> Vec<Breach> {
    let unused = dependencies(text).filter(|(_, name)| !words.contains(&name.replace('-', "_")));
    unused
        .map(|(line, name)| Breach {
            file: file.to_owned(),
            line: line + 1,
            rule: RULE,
            text: format!("no code of this crate names {name}"),
        })
        .collect()
}

/// Line and name of each dependency without an exception.
fn dependencies(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let marker = format!("# tidy: allow({RULE}): ");
    let (mut section, mut before) = ("", "");
    text.lines().enumerate().filter_map(move |(number, line)| {
        let is_allowed = before.starts_with(&marker);
        before = line;
        if line.starts_with('[') {
            section = line.trim();
            return None;
        }
        let name = dependency(section, line)?;
        (!is_allowed).then_some((number, name))
    })
}

/// Every word of a crate's code.
fn words(directory: &Path) -> Outcome<BTreeSet<String>> {
    let mut words = BTreeSet::new();
    for path in sources(vec![directory.to_owned()])? {
        for line in Masked::new(&read(&path)?).lines {
            let all = line.split(|c: char| !c.is_alphanumeric() && c != '_');
            words.extend(all.filter(|word| !word.is_empty()).map(str::to_owned));
        }
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unused_dependency_is_a_breach() {
        let words = ["serde_json", "tokio"].map(str::to_owned).into();
        let text = "[package]\nname = \"x\"\n[dependencies]\nserde-json = \"1\"\nrand.workspace = true\n\
                    # tidy: allow(unused): for its features\nnix.workspace = true\n[dev-dependencies]\n\
                    tokio = { workspace = true }\n";
        let found: Vec<_> =
            manifest("x", text, &words).into_iter().map(|b| (b.line, b.text)).collect();
        assert_eq!(found, [(5, "no code of this crate names rand".to_owned())]);
    }
}
