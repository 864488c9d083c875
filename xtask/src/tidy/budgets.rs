//! How many lines a crate may have, tests not counted.
//!
//! In: the sources. Out: a breach for each crate above its budget. A feature that needs more lines raises
//! the budget in the same commit, or pays with lines that it removes: growth is then a decision.

use std::collections::BTreeMap;

use super::{Breach, Source};

/// The budgets in lines with comments and empty lines.
const BUDGETS: &[(&str, usize)] = &[
    ("admission", 7_800),
    ("api", 2_400),
    ("apiserver", 20_800),
    ("auth", 7_600),
    ("base", 1_600),
    ("binary", 15_100),
    ("cel", 5_100),
    ("cli", 9_600),
    ("client", 4_300),
    ("cloud", 5_200),
    ("control", 4_400),
    ("controllers", 21_000),
    ("cri", 2_600),
    ("descheduler", 3_100),
    ("dns", 4_900),
    ("encryption", 1_700),
    ("etcd", 4_500),
    ("extensions", 7_100),
    ("kubelet", 28_000),
    ("machinery", 8_900),
    ("manifests", 1_100),
    ("net", 4_400),
    ("pki", 2_100),
    ("policy", 2_200),
    ("proxy", 3_200),
    ("release", 900),
    ("resources", 22_200),
    ("runtime", 14_300),
    ("scheduler", 12_700),
    ("simtest", 3_900),
    ("simulate", 2_600),
    ("store", 7_200),
    ("testkit", 9_100),
    ("transport", 5_100),
    ("xtask", 7_800),
];

/// The lines of each crate.
#[derive(Default)]
pub struct Sizes(BTreeMap<String, usize>);

impl Sizes {
    pub fn add(&mut self, source: &Source) {
        let Some(name) = owner(&source.name).filter(|_| !source.is_test) else { return };
        let lines = source.masked.in_test.iter().filter(|in_test| !**in_test).count();
        *self.0.entry(name.to_owned()).or_default() += lines;
    }

    pub fn check(&self) -> Vec<Breach> {
        let breach = |name: &String, text: String| {
            let file = "xtask/src/tidy/budgets.rs".to_owned();
            Breach { file, line: 1, rule: "budget", text: format!("{name}: {text}") }
        };
        let breaches = self.0.iter().filter_map(|(name, lines)| {
            match BUDGETS.iter().find(|(known, _)| known == name) {
                Some((_, budget)) if lines <= budget => None,
                Some((_, budget)) => {
                    Some(breach(name, format!("{lines} lines, the budget is {budget}")))
                }
                None => Some(breach(name, format!("{lines} lines and no budget"))),
            }
        });
        breaches.collect()
    }
}

/// The crate of a file: `crates/NAME/src/…` or `xtask/src/…`.
fn owner(file: &str) -> Option<&str> {
    let name = file.strip_prefix("crates/").unwrap_or(file).split_once("/src/")?.0;
    // Fixtures and examples of the fuzzer are no crate.
    (!name.contains('/')).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_outside_of_tests_count() {
        let mut sizes = Sizes::default();
        let mut add = |name: &str, text: &str| sizes.add(&Source::new(name.to_owned(), text));
        add("crates/a/src/b.rs", "fn a() {}\n#[cfg(test)]\nmod tests {\n}\n");
        add("crates/a/src/c/d.rs", "fn a() {}\nfn b() {}\n");
        add("crates/a/tests/it/main.rs", "fn a() {}\n");
        assert_eq!(sizes.0, [("a".to_owned(), 3)].into());
        assert_eq!(sizes.check().len(), 1);
    }
}
