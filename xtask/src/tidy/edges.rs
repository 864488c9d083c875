//! Which crate may use which crates.
//!
//! In: the manifests under `crates/`. Out: breaches. The table is the map of ARCHITECTURE.md. A crate may
//! use its neighbours in the table, the crates that those may use, and `base`. A crate without a row is a
//! breach: a new crate needs a place on the map first.

use std::fs;
use std::path::Path;

use super::Breach;
use crate::sh::Outcome;

/// A crate and what it may use directly.
const ROOMS: &[(&str, &[&str])] = &[
    ("base", &[]),
    ("release", &[]),
    ("machinery", &["base"]),
    ("transport", &["base"]),
    ("pki", &["base"]),
    ("net", &["base"]),
    ("store", &["base"]),
    ("etcd", &["store", "transport"]),
    ("encryption", &["machinery", "store", "pki"]),
    ("api", &["release", "machinery"]),
    ("cri", &["transport"]),
    ("client", &["machinery", "api", "transport"]),
    ("apiserver", &["release", "machinery", "store", "transport"]),
    ("cel", &["base"]),
    ("extensions", &["apiserver", "api", "cel"]),
    ("resources", &["apiserver", "api", "cel", "pki"]),
    ("admission", &["apiserver", "api", "cel", "pki"]),
    ("auth", &["apiserver", "api", "cel", "pki"]),
    ("control", &["extensions", "resources", "admission", "auth"]),
    ("controllers", &["client", "cel", "pki"]),
    ("scheduler", &["client", "cel"]),
    ("runtime", &["cri", "net", "transport"]),
    ("kubelet", &["client", "cri", "transport", "pki"]),
    ("policy", &["client", "net"]),
    ("proxy", &["client", "net"]),
    ("dns", &["client"]),
    ("descheduler", &["client"]),
    ("simulate", &["client"]),
    ("cloud", &["client"]),
    ("manifests", &["client"]),
    ("cli", &["client", "manifests", "store", "encryption", "cri", "pki", "runtime", "transport"]),
    ("testkit", &["base"]),
    ("simtest", &["control", "controllers", "scheduler", "simulate"]),
];

/// The crate that wires all others.
const WIRING: &str = "binary";
/// Only tests may use them.
const TEST_ONLY: &[&str] = &["testkit", "simtest"];
/// Crates that may use an opaque error, because only people read it.
const MAY_USE_ANYHOW: &[&str] = &["binary", "cli", "testkit", "simtest"];

pub fn check(crates: &Path) -> Outcome<Vec<Breach>> {
    let entries = fs::read_dir(crates).map_err(|error| format!("{}: {error}", crates.display()))?;
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| crates.join(name).join("Cargo.toml").is_file())
        .collect();
    names.sort();
    let mut breaches = Vec::new();
    for name in &names {
        let path = crates.join(name).join("Cargo.toml");
        let text =
            fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        breaches.extend(manifest(name, &text, &names));
    }
    Ok(breaches)
}

/// `ours` is the list of our own crates: this rule ignores others.
fn manifest(name: &str, text: &str, ours: &[String]) -> Vec<Breach> {
    let breach = |line: usize, text: String| Breach {
        file: format!("crates/{name}/Cargo.toml"),
        line: line + 1,
        rule: "edges",
        text,
    };
    let Some(allowed) = reachable(name) else {
        return vec![breach(0, format!("{name} has no row in the table of crates"))];
    };
    let mut breaches = Vec::new();
    let mut section = "";
    for (number, line) in text.lines().enumerate() {
        if line.starts_with('[') {
            section = line.trim();
            continue;
        }
        let Some(used) = dependency(section, line) else { continue };
        let for_tests = section == "[dev-dependencies]";
        if used == "anyhow" && !for_tests && !MAY_USE_ANYHOW.contains(&name) {
            breaches.push(breach(
                number,
                "anyhow: callers of a library need errors they can match".to_owned(),
            ));
        }
        // Tests may use any crate: they test from outside.
        if !ours.iter().any(|own| own == used) || for_tests {
            continue;
        }
        if TEST_ONLY.contains(&used) || (name != WIRING && !allowed.contains(&used)) {
            breaches.push(breach(number, format!("{name} must not use {used}")));
        }
    }
    breaches
}

/// The name on a dependency line; `None` for other lines.
pub fn dependency<'a>(section: &str, line: &'a str) -> Option<&'a str> {
    if !section.trim_end_matches(']').ends_with("dependencies") {
        return None;
    }
    let end = line.find(|c: char| !c.is_alphanumeric() && c != '_' && c != '-')?;
    (end > 0).then(|| &line[..end])
}

/// The crates that a crate may use, directly and indirectly. `None` for a crate without a row.
fn reachable(name: &str) -> Option<Vec<&'static str>> {
    if name == WIRING {
        return Some(Vec::new());
    }
    let row = |name: &str| ROOMS.iter().find(|(room, _)| *room == name).map(|(_, uses)| *uses);
    let mut found = vec!["base"];
    let mut open: Vec<&'static str> = row(name)?.to_vec();
    while let Some(next) = open.pop() {
        if !found.contains(&next) {
            found.push(next);
            open.extend(row(next).unwrap_or_default());
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_manifest(name: &str, text: &str, expected: &[&str]) {
        let ours: Vec<String> = ROOMS.iter().map(|(room, _)| (*room).to_owned()).collect();
        let found: Vec<String> = manifest(name, text, &ours).into_iter().map(|b| b.text).collect();
        assert_eq!(found, expected, "{name}: {text}");
    }

    #[test]
    fn judges_edges() {
        check_manifest(
            "scheduler",
            "[dependencies]\nclient.workspace = true\nserde.workspace = true\n",
            &[],
        );
        check_manifest("scheduler", "[dependencies]\nmachinery.workspace = true\n", &[]);
        check_manifest(
            "scheduler",
            "[dependencies]\nstore.workspace = true\n",
            &["scheduler must not use store"],
        );
        check_manifest("scheduler", "[package]\nstore = 1\n", &[]);
        check_manifest("store", "[dev-dependencies]\ntestkit.workspace = true\n", &[]);
        check_manifest(
            "store",
            "[dependencies]\ntestkit.workspace = true\n",
            &["store must not use testkit"],
        );
        check_manifest("binary", "[dependencies]\nstore.workspace = true\n", &[]);
        check_manifest("shed", "", &["shed has no row in the table of crates"]);
    }

    #[test]
    fn the_map_names_every_room() {
        let map = crate::sh::root().join("ARCHITECTURE.md");
        let map = fs::read_to_string(map).expect("the map is there");
        for (room, _) in ROOMS {
            assert!(map.contains(room), "ARCHITECTURE.md does not name {room}");
        }
    }

    #[test]
    fn the_plan_has_no_circle() {
        for (room, _) in ROOMS {
            let uses = reachable(room).expect("a room of the table has a row");
            assert!(*room == "base" || !uses.contains(room), "{room} reaches itself");
        }
    }
}
