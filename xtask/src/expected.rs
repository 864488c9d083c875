//! Lists of expected differences from upstream: known failures of a test suite.
//!
//! In: a file `xtask/expected/NAME.txt`, the cases that ran, the cases that failed. Out: a verdict. A line
//! is the name of a case, two spaces, `#` and the reason:
//!
//! ```text
//! tables/Pod/list  # columns lack descriptions
//! ```
//!
//! Invariant: a list only shrinks. A listed case that passes is a failure, like an unlisted case that
//! fails. No version of a list may name a case that an earlier committed version does not.
//! Why git history and not a number: a number could stay the same while cases are swapped.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::sh::{self, Outcome};

/// Names of cases, and why each is expected to fail.
pub struct Expected {
    path: PathBuf,
    entries: BTreeMap<String, String>,
}

/// The differences between a run and its list.
#[derive(Debug, Default, PartialEq)]
pub struct Verdict {
    /// Failed, and not listed.
    pub unexpected: Vec<String>,
    /// Listed, run, and passed.
    pub mended: Vec<String>,
}

const SEPARATOR: &str = "  # ";

impl Expected {
    /// Reads a list; a missing file is an empty list.
    pub fn load(name: &str) -> Outcome<Self> {
        let path = sh::root().join("xtask/expected").join(format!("{name}.txt"));
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        Ok(Self { entries: parse(&text)?, path })
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Why a case is expected to fail, if it is listed.
    pub fn reason(&self, name: &str) -> Option<&str> {
        self.entries.get(name).map(String::as_str)
    }

    /// Compares a run with the list. `ran` says which listed cases took part.
    pub fn judge(&self, failed: &BTreeSet<String>, ran: impl Fn(&str) -> bool) -> Verdict {
        Verdict {
            unexpected: failed
                .iter()
                .filter(|name| !self.entries.contains_key(*name))
                .cloned()
                .collect(),
            mended: self
                .entries
                .keys()
                .filter(|name| ran(name) && !failed.contains(*name))
                .cloned()
                .collect(),
        }
    }

    /// Removes passing cases from the list. A list that git does not know yet takes all failures.
    pub fn accept(&mut self, verdict: &Verdict, reason: impl Fn(&str) -> String) -> Outcome {
        for name in &verdict.mended {
            self.entries.remove(name);
        }
        if self.history()?.is_empty() {
            for name in &verdict.unexpected {
                self.entries.insert(name.clone(), reason(name));
            }
        }
        let lines = self.entries.iter().map(|(name, why)| format!("{name}{SEPARATOR}{why}\n"));
        fs::write(&self.path, lines.collect::<String>())
            .map_err(|error| format!("{}: {error}", self.path.display()))
    }

    /// Refuses a list with a case that is missing in any committed version of it.
    pub fn check_history(&self) -> Outcome {
        for commit in self.history()? {
            let text = sh::capture(git().arg("show").arg(format!("{commit}:{}", self.name())))?;
            let earlier = parse(&text)?;
            let grown: Vec<&str> = self
                .entries
                .keys()
                .filter(|name| !earlier.contains_key(*name))
                .map(String::as_str)
                .collect();
            if !grown.is_empty() {
                return Err(format!(
                    "{} only shrinks, but these cases are not in its version of commit {commit}:\n  {}",
                    self.name(),
                    grown.join("\n  ")
                ));
            }
        }
        Ok(())
    }

    /// Commits that contain a version of this list; none without git or without history.
    fn history(&self) -> Outcome<Vec<String>> {
        if !sh::exists("git") || sh::capture(git().args(["rev-parse", "--git-dir"])).is_err() {
            return Ok(Vec::new());
        }
        let text = sh::capture(
            git().args(["log", "--format=%H", "--diff-filter=AM", "--"]).arg(&self.path),
        )?;
        Ok(text.lines().map(str::to_owned).collect())
    }

    /// The path in git.
    fn name(&self) -> String {
        let path = self.path.strip_prefix(sh::root()).unwrap_or(&self.path);
        path.to_string_lossy().into_owned()
    }
}

impl Verdict {
    pub fn is_good(&self) -> bool {
        self.unexpected.is_empty() && self.mended.is_empty()
    }

    /// The text for the user; empty if everything is as expected.
    pub fn text(&self) -> String {
        let list = |title: &str, names: &[String]| match names {
            [] => String::new(),
            _ => format!("{} {title}:\n  {}\n", names.len(), names.join("\n  ")),
        };
        list("failed and are not expected to", &self.unexpected)
            + &list("are listed as failing but pass (take them off with --accept)", &self.mended)
    }
}

fn git() -> Command {
    let mut command = Command::new("git");
    command.current_dir(sh::root());
    command
}

/// The lines of a list: names and reasons.
pub fn parse(text: &str) -> Outcome<BTreeMap<String, String>> {
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| {
            let (name, reason) = line
                .rsplit_once(SEPARATOR)
                .ok_or_else(|| format!("no reason is given in the line: {line}"))?;
            Ok((name.trim().to_owned(), reason.trim().to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> Expected {
        let entries = parse(text).expect("the test's list is right");
        Expected { path: PathBuf::new(), entries }
    }

    #[test]
    fn a_line_has_a_reason() {
        assert!(parse("a/b\n").is_err());
        assert_eq!(list("a #1/b  # so\n\n").reason("a #1/b"), Some("so"));
    }

    #[test]
    fn both_directions_count() {
        let check = |failed: &[&str], ran: &str, unexpected: &[&str], mended: &[&str]| {
            let failed = failed.iter().map(|name| (*name).to_owned()).collect();
            let verdict =
                list("a/1  # x\na/2  # x\nb/1  # y\n").judge(&failed, |name| name.starts_with(ran));
            assert_eq!(verdict.unexpected, unexpected);
            assert_eq!(verdict.mended, mended);
        };
        check(&["a/1", "a/2"], "a/", &[], &[]);
        check(&["a/1", "a/3"], "a/", &["a/3"], &["a/2"]);
        check(&[], "", &[], &["a/1", "a/2", "b/1"]);
    }
}
