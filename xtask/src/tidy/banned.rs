//! Calls that are not allowed, and why.
//!
//! In: a source. Out: breaches. Clippy knows paths of functions (see clippy.toml) and resolves imports;
//! this finds macros, constructors, and places where clippy does not look.

use super::{Breach, Source};

struct Ban {
    rule: &'static str,
    /// Matched against code only: comments and strings are masked.
    needles: &'static [&'static str],
    /// Crates that may use it.
    home: &'static [&'static str],
    tests: Tests,
    why: &'static str,
}

#[derive(PartialEq)]
enum Tests {
    /// Forbidden in product code only.
    Free,
    /// Forbidden in tests too.
    Bound,
}

const BANS: &[Ban] = &[
    Ban {
        rule: "unfinished",
        needles: &["todo!", "unimplemented!", "dbg!("],
        home: &[],
        tests: Tests::Bound,
        why: "finish it, or leave it out",
    },
    Ban {
        rule: "sleep",
        needles: &["thread::sleep("],
        home: &[],
        tests: Tests::Bound,
        why: "wait for a condition, with a deadline",
    },
    Ban {
        rule: "detached",
        needles: &["tokio::spawn(", "task::spawn("],
        home: &["crates/base/"],
        tests: Tests::Free,
        why: "use base::task::Tasks: the code that starts a task must also end it",
    },
    Ban {
        rule: "clock",
        needles: &["std::time::Instant", "SystemTime::now(", "Timestamp::now(", "Zoned::now("],
        home: &["crates/base/", "crates/testkit/", "xtask/"],
        tests: Tests::Free,
        why: "use base::clock::now or tokio::time::Instant, which simulation can set and pause",
    },
    Ban {
        rule: "random",
        needles: &["thread_rng(", "rand::rng(", "fastrand::", "Uuid::new_v4("],
        home: &["crates/base/"],
        tests: Tests::Free,
        why: "use base::rng: a run repeats from its seed",
    },
    Ban {
        rule: "unbounded",
        needles: &["unbounded_channel(", "mpsc::unbounded(", "sync::mpsc::channel("],
        home: &[],
        tests: Tests::Free,
        why: "everything has a limit",
    },
];

/// A nearby line that gives its reason to clippy already.
const STATED: &str = "clippy::disallowed_methods";

pub fn check(source: &Source) -> Vec<Breach> {
    let mut breaches = Vec::new();
    for (number, line) in source.masked.lines.iter().enumerate() {
        let in_test = source.is_test || source.masked.in_test[number];
        for ban in BANS {
            let bound = !in_test || ban.tests == Tests::Bound;
            let at_home = ban.home.iter().any(|home| source.name.starts_with(home));
            if !bound || at_home || !ban.needles.iter().any(|needle| line.contains(needle)) {
                continue;
            }
            let before = number.saturating_sub(4);
            if source.raw[before..=number].iter().any(|line| line.contains(STATED)) {
                continue;
            }
            breaches.push(source.breach(number, ban.rule, ban.why));
        }
    }
    breaches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_rules(name: &str, text: &str, expected: &[&str]) {
        let breaches = check(&Source::new(name.to_owned(), text));
        let rules: Vec<&str> = breaches.iter().map(|breach| breach.rule).collect();
        assert_eq!(rules, expected, "{text}");
    }

    #[test]
    fn finds_banned_calls() {
        check_rules("crates/a/src/b.rs", "tokio::spawn(x);", &["detached"]);
        check_rules("crates/base/src/task.rs", "tokio::spawn(x);", &[]);
        check_rules("crates/a/src/b.rs", "// tokio::spawn(x)", &[]);
        check_rules("crates/a/tests/it/main.rs", "tokio::spawn(x);", &[]);
        check_rules("crates/a/tests/it/main.rs", "std::thread::sleep(x);", &["sleep"]);
        let stated = "#[expect(clippy::disallowed_methods, reason = \"so\")]\nthread::sleep(x);";
        check_rules("crates/a/src/b.rs", stated, &[]);
    }

    #[test]
    fn an_exception_is_stated_in_place() {
        let source = Source::new("a".to_owned(), "// tidy: allow(sleep): so\nthread::sleep(x);");
        assert!(check(&source).iter().all(|breach| source.allows(breach)));
        let other = Source::new("a".to_owned(), "// tidy: allow(clock): so\nthread::sleep(x);");
        assert!(check(&other).iter().all(|breach| !other.allows(breach)));
    }
}
