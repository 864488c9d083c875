//! `cargo xtask supply`: whether the build may use the packages of Cargo.lock.
//!
//! In: `deny.toml`, Cargo.lock, the table `lists/advisories.txt`, and the licences that cargo reports. Out:
//! one line per refused package. cargo-deny does the same and more; it takes minutes to compile, and
//! needs a database from the network.
//!
//! Invariant: an exception has a reason, and an exception that nothing needs any more is a breach, too.

mod licences;
mod rules;
mod versions;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::sh::{self, Outcome};
use crate::tidy::Breach;
use rules::Rules;
use versions::Version;

const ADVISORIES: &str = "xtask/lists/advisories.txt";
/// Packages whose manifests name a licence file instead of a licence, and the licence in that file.
/// (cargo-deny reads the files.)
const IN_A_FILE: &[(&str, &str)] = &[("rust-criu", "MIT")];

#[derive(Debug, Default, PartialEq)]
struct Package {
    name: String,
    version: String,
    /// Empty for a package of this tree.
    source: String,
}

/// All checks, including those that ask cargo about the packages.
pub fn run() -> Outcome {
    let mut breaches = check(&sh::root())?;
    breaches.extend(licences(&sh::root())?);
    for breach in &breaches {
        println!("{}: {}: {}", breach.file, breach.rule, breach.text);
    }
    match breaches.len() {
        0 => Ok(()),
        count => Err(format!("{count} breaches of deny.toml")),
    }
}

/// The checks that need only Cargo.lock.
pub fn check(root: &Path) -> Outcome<Vec<Breach>> {
    let rules = rules::parse(&read(root, "deny.toml")?)?;
    let packages = packages(&read(root, "Cargo.lock")?);
    let mut breaches = sources(&rules, &packages);
    breaches.extend(advisories(&rules, &packages, &read(root, ADVISORIES)?)?);
    Ok(breaches)
}

fn read(root: &Path, name: &str) -> Outcome<String> {
    fs::read_to_string(root.join(name)).map_err(|error| format!("{name}: {error}"))
}

fn breach(file: &str, rule: &'static str, text: String) -> Breach {
    Breach { file: file.to_owned(), line: 1, rule, text }
}

fn packages(lock: &str) -> Vec<Package> {
    let mut all: Vec<Package> = vec![];
    for line in lock.lines() {
        let value = |name: &str| {
            let rest = line.strip_prefix(name)?.strip_prefix(" = ")?;
            Some(rest.trim_matches('"').to_owned())
        };
        if line == "[[package]]" {
            all.push(Package::default());
        } else if let Some(package) = all.last_mut() {
            package.name = value("name").unwrap_or_else(|| std::mem::take(&mut package.name));
            package.version =
                value("version").unwrap_or_else(|| std::mem::take(&mut package.version));
            package.source = value("source").unwrap_or_else(|| std::mem::take(&mut package.source));
        }
    }
    all
}

/// Checks the sources of packages, and the banned packages.
fn sources(rules: &Rules, packages: &[Package]) -> Vec<Breach> {
    let is_known = |source: &str| {
        let registry = source.strip_prefix("registry+");
        source.is_empty()
            || registry.is_some_and(|url| rules.registries.iter().any(|one| one == url))
    };
    let foreign = packages.iter().filter(|one| !is_known(&one.source)).map(|one| {
        let text = format!("{} {} comes from {}", one.name, one.version, one.source);
        breach("Cargo.lock", "sources", text)
    });
    let banned = packages.iter().filter_map(|one| {
        let reason = rules.banned.get(&one.name)?;
        Some(breach("Cargo.lock", "bans", format!("{}: {reason}", one.name)))
    });
    foreign.chain(banned).collect()
}

/// Advisories that affect a package of Cargo.lock.
fn advisories(rules: &Rules, packages: &[Package], table: &str) -> Outcome<Vec<Breach>> {
    let mut needed = BTreeSet::new();
    let mut breaches = vec![];
    for line in table.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [id, name, kind, fixed @ ..] = words.as_slice() else {
            return Err(format!("{ADVISORIES}: not understood: {line}"));
        };
        for package in packages.iter().filter(|one| one.name == *name) {
            if is_fixed(fixed, package)
                .ok_or_else(|| format!("{ADVISORIES}: not understood: {line}"))?
            {
                continue;
            }
            needed.insert((*id).to_owned());
            if !rules.ignored.contains_key(*id) {
                let place = format!("{} {}", package.name, package.version);
                let fixed = fixed.join(" or ");
                let text = format!("{place}: {id} ({kind}); good versions: {fixed}");
                breaches.push(breach("Cargo.lock", "advisories", text));
            }
        }
    }
    let stale = rules.ignored.keys().filter(|id| !needed.contains(*id));
    breaches.extend(
        stale.map(|id| breach("deny.toml", "advisories", format!("{id} concerns no package"))),
    );
    Ok(breaches)
}

fn is_fixed(requirements: &[&str], package: &Package) -> Option<bool> {
    let version = Version::of(&package.version)?;
    let mut any = false;
    for requirement in requirements {
        any |= versions::matches(requirement, &version)?;
    }
    Some(any)
}

/// Packages without an accepted licence.
fn licences(root: &Path) -> Outcome<Vec<Breach>> {
    let rules = rules::parse(&read(root, "deny.toml")?)?;
    let mut command = sh::cargo();
    command.args(["tree", "--workspace", "--locked", "--target", "all", "--no-dedupe"]);
    command.args(["--edges", "normal,build,dev", "--prefix", "none", "--format", "{p}|{l}"]);
    let tree = sh::capture(&mut command)?;
    Ok(judged(&rules, &tree, IN_A_FILE))
}

/// Lines are `NAME vVERSION [(PLACE)]|LICENCE`.
fn judged(rules: &Rules, tree: &str, in_a_file: &[(&str, &str)]) -> Vec<Breach> {
    let lines: BTreeSet<&str> = tree.lines().filter(|line| !line.is_empty()).collect();
    let mut needed = BTreeSet::new();
    let mut breaches = vec![];
    for line in lines {
        let (package, licence) = line.rsplit_once('|').unwrap_or((line, ""));
        let name = package.split_whitespace().next().unwrap_or_default();
        let licence = match in_a_file.iter().find(|(known, _)| *known == name) {
            Some((_, found)) if licence.is_empty() => *found,
            _ => licence,
        };
        let is_good = |one: &str| rules.licences.iter().any(|good| good == one);
        let more = rules.exceptions.get(name).map(Vec::as_slice).unwrap_or_default();
        let is_excepted = |one: &str| is_good(one) || more.iter().any(|good| good == one);
        match licences::is_kept(licence, &is_good) {
            Some(true) => {}
            Some(false) if licences::is_kept(licence, &is_excepted) == Some(true) => {
                needed.insert(name);
            }
            _ => breaches.push(breach("Cargo.lock", "licenses", format!("{package}: {licence:?}"))),
        }
    }
    let stale = rules.exceptions.keys().filter(|name| !needed.contains(name.as_str()));
    breaches.extend(
        stale.map(|name| breach("deny.toml", "licenses", format!("{name} needs no exception"))),
    );
    breaches
}

/// `cargo xtask advisories DIR`: rewrites the table from a checkout of the RustSec database.
pub fn rewrite(args: &[String]) -> Outcome {
    let [place] = args else {
        return Err("usage: cargo xtask advisories DIR (a checkout of rustsec/advisory-db)".into());
    };
    let place = Path::new(place);
    let mut git = std::process::Command::new("git");
    git.arg("-C").arg(place).args(["log", "-1", "--format=%h of %cs"]);
    let state = sh::capture(&mut git)?;
    let mut rows = vec![];
    let list = |path: &Path| -> Outcome<Vec<std::path::PathBuf>> {
        let entries = fs::read_dir(path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
    };
    for directory in list(&place.join("crates"))? {
        for file in list(&directory)? {
            let text = fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
            rows.extend(row(&text).map_err(|why| format!("{}: {why}", file.display()))?);
        }
    }
    rows.sort();
    let head = format!(
        "# Facts of the RustSec advisory database (CC0), commit {}. `cargo xtask advisories DIR` rewrites\n\
         # them from a checkout. ID PACKAGE KIND and the versions that are good; without any, none is.\n",
        state.trim()
    );
    let text = head + &rows.join("\n") + "\n";
    fs::write(sh::root().join(ADVISORIES), text).map_err(|error| error.to_string())
}

/// One advisory as a line; `None`: it was withdrawn.
fn row(text: &str) -> Outcome<Option<String>> {
    let (mut id, mut name, mut kind) = (String::new(), String::new(), "vulnerability".to_owned());
    let mut fixed = vec![];
    let toml = text.split("```").nth(1).ok_or("it has no table")?;
    let toml = toml.strip_prefix("toml").unwrap_or(toml);
    let mut section = "";
    let mut lines = toml.lines();
    while let Some(line) = lines.next() {
        if line.starts_with('[') {
            section = line.trim();
            continue;
        }
        let Some((key, value)) = line.split_once('=') else { continue };
        let plain = || value.trim().trim_matches('"').to_owned();
        match (section, key.trim()) {
            ("[advisory]", "id") => id = plain(),
            ("[advisory]", "package") => name = plain(),
            ("[advisory]", "informational") => kind = plain(),
            ("[advisory]", "withdrawn") => return Ok(None),
            ("[versions]", "patched" | "unaffected") => {
                let mut list = value.to_owned();
                while !list.contains(']') {
                    list.push_str(lines.next().ok_or("a list has no end")?);
                }
                // Every second piece is in quotes.
                let quoted = list.split('"').skip(1).step_by(2);
                fixed.extend(quoted.map(|one| one.replace(' ', "")));
            }
            _ => {}
        }
    }
    if id.is_empty() || name.is_empty() {
        return Err("it has no id or no package".into());
    }
    let words = [id, name, kind].into_iter().chain(fixed);
    Ok(Some(words.collect::<Vec<_>>().join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCK: &str = r#"
version = 4

[[package]]
name = "ours"
version = "0.1.0"
dependencies = ["h2"]

[[package]]
name = "h2"
version = "0.4.3"
source = "registry+https://github.com/rust-lang/crates.io-index"

[[package]]
name = "strange"
version = "1.0.0"
source = "git+https://example.com/x#1"
"#;

    fn rules() -> Rules {
        Rules {
            licences: vec!["MIT".into()],
            registries: vec!["https://github.com/rust-lang/crates.io-index".into()],
            ..Rules::default()
        }
    }

    fn texts(breaches: Vec<Breach>) -> Vec<String> {
        breaches.into_iter().map(|one| format!("{}: {}", one.rule, one.text)).collect()
    }

    #[test]
    fn sources_and_bans_are_found_in_the_lock_file() {
        let packages = packages(LOCK);
        assert_eq!(packages.len(), 3);
        let strange = "sources: strange 1.0.0 comes from git+https://example.com/x#1";
        assert_eq!(texts(sources(&rules(), &packages)), [strange]);
        let mut strict = rules();
        strict.banned.insert("h2".into(), "too fast".into());
        assert_eq!(texts(sources(&strict, &packages)), [strange, "bans: h2: too fast"]);
    }

    #[test]
    fn advisories_concern_versions() {
        let table = "# a comment\n\
                     RUSTSEC-1 h2 vulnerability ^0.3.26 >=0.4.4\n\
                     RUSTSEC-2 h2 unsound >=0.4.1\n\
                     RUSTSEC-3 strange unmaintained\n\
                     RUSTSEC-4 absent vulnerability";
        let packages = packages(LOCK);
        let found = advisories(&rules(), &packages, table).map(texts);
        let h2 =
            "advisories: h2 0.4.3: RUSTSEC-1 (vulnerability); good versions: ^0.3.26 or >=0.4.4";
        let strange = "advisories: strange 1.0.0: RUSTSEC-3 (unmaintained); good versions: ";
        assert_eq!(found, Ok(vec![h2.to_owned(), strange.to_owned()]));
        let mut lenient = rules();
        lenient.ignored.insert("RUSTSEC-3".into(), "why".into());
        lenient.ignored.insert("RUSTSEC-4".into(), "why".into());
        let found = advisories(&lenient, &packages, table).map(texts);
        let stale = "advisories: RUSTSEC-4 concerns no package";
        assert_eq!(found, Ok(vec![h2.to_owned(), stale.to_owned()]));
        assert!(advisories(&rules(), &packages, "RUSTSEC-1 h2 unsound nonsense").is_err());
    }

    #[test]
    fn licences_of_all_packages_are_judged() {
        let tree = "a v1.0.0|MIT\nb v1.0.0 (/x)|GPL-3.0\nb v1.0.0 (/x)|GPL-3.0\n\nc v2.0.0|\n";
        let found = texts(judged(&rules(), tree, &[]));
        assert_eq!(found, ["licenses: b v1.0.0 (/x): \"GPL-3.0\"", "licenses: c v2.0.0: \"\""]);
        let mut lenient = rules();
        lenient.exceptions.insert("b".into(), vec!["GPL-3.0".into()]);
        lenient.exceptions.insert("a".into(), vec!["MIT".into()]);
        let found = texts(judged(&lenient, tree, &[("c", "MIT")]));
        assert_eq!(found, ["licenses: a needs no exception"]);
    }

    #[test]
    fn advisories_become_rows() {
        let text = "```toml\n[advisory]\nid = \"RUSTSEC-1\"\npackage = \"h2\"\n\
                    informational = \"unsound\"\n[versions]\npatched = [\n  \"^0.3.26\",\n  \
                    \">= 0.4.4, < 1\",\n]\nunaffected = [\"< 0.2\"]\n```\n\n# Text\n";
        let expected = "RUSTSEC-1 h2 unsound ^0.3.26 >=0.4.4,<1 <0.2";
        assert_eq!(row(text), Ok(Some(expected.to_owned())));
        assert_eq!(row("```toml\n[advisory]\nwithdrawn = \"x\"\n```"), Ok(None));
        assert!(row("no table").is_err());
    }

    /// The packages of this work tree.
    #[test]
    fn the_packages_of_this_tree_are_in_order() {
        assert_eq!(check(&sh::root()).map(texts), Ok(vec![]));
    }
}
