//! House rules that the compiler does not check.
//!
//! In: the sources and manifests of the work tree. Out: one line per breach, or nothing. The sets of
//! rules: which crate may use which ([`edges`]), how long things may be and how a module opens
//! ([`shape`]), which calls are banned ([`banned`]), which packages the manifests name ([`unused`]),
//! where Kubernetes' version is spelled out ([`version`]), which rows their tables lack
//! ([`rows`]), how large crates may be ([`budgets`]), how comments read ([`english`]) and which packages
//! Cargo.lock contains ([`supply`]). A breach with a good reason says so in place:
//! `// tidy: allow(RULE): reason`, on the line or on one of the few before it.

mod banned;
mod budgets;
mod edges;
mod english;
mod mask;
mod rows;
mod shape;
mod unused;
mod version;

use std::fs;
use std::path::{Path, PathBuf};

use crate::sh::{self, Outcome};
use crate::{component_flags, supply};
use mask::Masked;

/// One broken rule.
pub struct Breach {
    pub file: String,
    pub line: usize,
    pub rule: &'static str,
    pub text: String,
}

/// A source file in the form that the rules need.
pub struct Source {
    pub name: String,
    pub raw: Vec<String>,
    pub masked: Masked,
    /// In a `tests`, `benches` or `examples` directory.
    pub is_test: bool,
}

pub fn run() -> Outcome {
    let breaches = check(&sh::root())?;
    if breaches.is_empty() {
        println!("tidy");
        return Ok(());
    }
    for breach in &breaches {
        println!("{}:{}: {}: {}", breach.file, breach.line, breach.rule, breach.text);
    }
    Err(format!("{} breaches of the house rules", breaches.len()))
}

fn check(root: &Path) -> Outcome<Vec<Breach>> {
    let mut breaches = edges::check(&root.join("crates"))?;
    breaches.extend(supply::check(root)?);
    breaches.extend(unused::check(root)?);
    breaches.extend(rows::check(root)?);
    breaches.extend(version::of_types(root)?);
    if let Err(text) = component_flags::check(root) {
        let file = component_flags::PAGE.to_owned();
        breaches.push(Breach { file, line: 1, rule: "flags", text });
    }
    let mut sizes = budgets::Sizes::default();
    for path in sources(vec![root.join("crates"), root.join("xtask")])? {
        let text =
            fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        let source = Source::new(name, &text);
        let found = shape::check(&source).into_iter().chain(banned::check(&source));
        let found = found.chain(version::check(&source)).chain(english::check(&source));
        breaches.extend(found.filter(|breach| !source.allows(breach)));
        sizes.add(&source);
    }
    breaches.extend(sizes.check());
    Ok(breaches)
}

impl Source {
    pub fn new(name: String, text: &str) -> Self {
        let is_test = ["/tests/", "/benches/", "/examples/"].iter().any(|part| name.contains(part));
        let raw = text.lines().map(str::to_owned).collect();
        Self { name, raw, masked: Masked::new(text), is_test }
    }

    pub fn breach(&self, line: usize, rule: &'static str, text: impl Into<String>) -> Breach {
        Breach { file: self.name.clone(), line: line + 1, rule, text: text.into() }
    }

    /// Whether the line of a breach, or a line shortly before it, states an exception.
    fn allows(&self, breach: &Breach) -> bool {
        let at = breach.line - 1;
        let marker = format!("tidy: allow({}): ", breach.rule);
        self.raw[at.saturating_sub(REACH)..=at.min(self.raw.len() - 1)]
            .iter()
            .any(|line| line.contains(&marker))
    }
}

/// How many lines above a breach its exception may be (attributes may be between them).
const REACH: usize = 4;

/// All Rust files in some directories.
fn sources(mut open: Vec<PathBuf>) -> Outcome<Vec<PathBuf>> {
    let mut found = Vec::new();
    while let Some(directory) = open.pop() {
        let entries = fs::read_dir(&directory)
            .map_err(|error| format!("{}: {error}", directory.display()))?;
        for entry in entries {
            let path = entry.map_err(|error| error.to_string())?.path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_tidy() {
        let breaches = check(&sh::root()).expect("the tree can be read");
        let lines: Vec<String> = breaches
            .iter()
            .map(|b| format!("{}:{}: {}: {}", b.file, b.line, b.rule, b.text))
            .collect();
        assert!(lines.is_empty(), "{}", lines.join("\n"));
    }
}
