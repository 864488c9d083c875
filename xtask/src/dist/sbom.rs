//! The packages that the program is made of, as CycloneDX 1.5.
//!
//! In: `cargo tree`, which knows what is linked on this machine, with licences; checksums of Cargo.lock. Out: JSON
//! without a time and a serial number, so that the same tree makes the same file.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use super::{Release, VERSION};
use crate::sh::{self, Outcome};

/// A package of the program.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Package {
    name: String,
    version: String,
    licence: String,
    is_ours: bool,
}

pub fn make(release: &Release) -> Outcome<PathBuf> {
    let format = "{p}|{l}";
    let tree = ["tree", "--locked", "--package", "decapod", "--edges", "normal"];
    let text = sh::capture(sh::cargo().args(tree).args(["--prefix", "none", "--format", format]))?;
    let lock = sh::root().join("Cargo.lock");
    let lock = fs::read_to_string(&lock).map_err(|error| format!("Cargo.lock: {error}"))?;
    let mut packages: Vec<Package> = text.lines().filter_map(package).collect();
    packages.sort();
    packages.dedup();
    let path = release.output.join(format!("decapod-{VERSION}.cdx.json"));
    release.write(&path, document(&packages, &checksums(&lock)).as_bytes())?;
    Ok(path)
}

/// `serde v1.0.228 (*)|MIT OR Apache-2.0`, with a path for packages of this tree.
fn package(line: &str) -> Option<Package> {
    let (what, licence) = line.split_once('|')?;
    let mut words = what.split(' ');
    let (name, version) = (words.next()?, words.next()?.strip_prefix('v')?);
    let is_ours = words.any(|word| word.starts_with("(/"));
    let licence = licence.trim_end_matches("(*)").trim().replace('/', " OR ");
    Some(Package { name: name.into(), version: version.into(), licence, is_ours })
}

/// By name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let mut found = BTreeMap::new();
    for entry in lock.split("[[package]]") {
        let value = |key: &str| {
            let line =
                entry.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "))?;
            Some(line.trim_matches('"').to_owned())
        };
        if let (Some(name), Some(version), Some(sum)) =
            (value("name"), value("version"), value("checksum"))
        {
            found.insert((name, version), sum);
        }
    }
    found
}

fn document(packages: &[Package], sums: &BTreeMap<(String, String), String>) -> String {
    let components: Vec<String> = packages.iter().map(|one| component(one, sums)).collect();
    format!(
        "{{\n  \"bomFormat\": \"CycloneDX\",\n  \"specVersion\": \"1.5\",\n  \"version\": 1,\n  \"metadata\": {{\"component\": {{\"type\": \"application\", \"name\": \"decapod\", \"version\": {}}}}},\n  \"components\": [\n    {}\n  ]\n}}\n",
        quoted(VERSION),
        components.join(",\n    ")
    )
}

fn component(package: &Package, sums: &BTreeMap<(String, String), String>) -> String {
    let Package { name, version, licence, is_ours } = package;
    let mut fields = vec![
        "\"type\": \"library\"".to_owned(),
        format!("\"name\": {}", quoted(name)),
        format!("\"version\": {}", quoted(version)),
    ];
    if !licence.is_empty() {
        fields.push(format!("\"licenses\": [{{\"expression\": {}}}]", quoted(licence)));
    }
    if !is_ours {
        fields.push(format!("\"purl\": {}", quoted(&format!("pkg:cargo/{name}@{version}"))));
    }
    if let Some(sum) = sums.get(&(name.clone(), version.clone())) {
        let sum = quoted(sum);
        fields.push(format!("\"hashes\": [{{\"alg\": \"SHA-256\", \"content\": {sum}}}]"));
    }
    format!("{{{}}}", fields.join(", "))
}

/// Names, versions and licences have no control characters.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_have_licences_and_checksums() {
        let line = "serde v1.0.228 (*)|MIT OR Apache-2.0";
        let serde = package(line).expect("a package");
        assert_eq!((serde.name.as_str(), serde.is_ours), ("serde", false));
        assert!(package("decapod v0.1.0 (/src/decapod)|Apache-2.0").is_some_and(|it| it.is_ours));
        let lock = "[[package]]\nname = \"serde\"\nversion = \"1.0.228\"\nchecksum = \"abc\"\n";
        let text = document(&[serde], &checksums(lock));
        for part in [
            "\"purl\": \"pkg:cargo/serde@1.0.228\"",
            "{\"expression\": \"MIT OR Apache-2.0\"}",
            "{\"alg\": \"SHA-256\", \"content\": \"abc\"}",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
}
