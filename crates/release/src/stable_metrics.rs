//! The metrics whose names, types and labels this release of Kubernetes promises, as a table of facts.
//!
//! In: `stable_metrics.txt`. Out: its rows. Only tests use it: pages of metrics are compared with it.

use std::collections::{BTreeMap, BTreeSet};

/// A family of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promised {
    pub name: &'static str,
    /// `counter`, `gauge`, `histogram`, or `custom`: a counter or a gauge.
    kind: &'static str,
    /// `STABLE` or `BETA`.
    pub stability: &'static str,
    labels: &'static str,
}

pub fn all() -> impl Iterator<Item = Promised> {
    let rows = include_str!("stable_metrics.txt").lines().filter(|line| !line.starts_with('#'));
    rows.filter_map(|row| {
        let mut words = row.split_whitespace();
        Some(Promised {
            name: words.next()?,
            kind: words.next()?,
            stability: words.next()?,
            labels: words.next()?,
        })
    })
}

impl Promised {
    /// Compares a page with the promise. `None`: the family is as promised; else what is wrong.
    pub fn judge(&self, page: &str) -> Option<String> {
        let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
        let types: BTreeMap<&str, &str> = types.collect();
        let Some(kind) = types.get(self.name) else { return Some("it is missing".to_owned()) };
        let fits = *kind == self.kind || (self.kind == "custom" && *kind != "histogram");
        if !fits {
            return Some(format!("it is a {kind}, not a {}", self.kind));
        }
        let wanted: BTreeSet<&str> = self.labels.split(',').filter(|label| *label != "-").collect();
        let names = [self.name.to_owned(), format!("{}_bucket", self.name)];
        let is_own = |line: &&str| {
            let end = line.find(['{', ' ']).unwrap_or(line.len());
            names.iter().any(|name| *name == line[..end])
        };
        for line in page.lines().filter(is_own) {
            let mut labels = labels_of(line);
            labels.remove("le");
            if labels != wanted {
                return Some(format!("it has the labels {labels:?}, not {wanted:?}"));
            }
        }
        None
    }
}

/// The names of a sample's labels. Values may contain any character, quotes with a backslash in front.
fn labels_of(line: &str) -> BTreeSet<&str> {
    let mut names = BTreeSet::new();
    let Some(at) = line.find('{') else { return names };
    let mut rest = &line[at + 1..];
    while let Some((name, value)) = rest.split_once("=\"") {
        names.insert(name.trim_start_matches(','));
        let mut is_escaped = false;
        let end = value.find(|character| {
            let ends = character == '"' && !is_escaped;
            is_escaped = character == '\\' && !is_escaped;
            ends
        });
        let Some(end) = end else { break };
        rest = &value[end + 1..];
        if rest.starts_with('}') {
            break;
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_has_all_its_rows() {
        assert_eq!(all().count(), 90);
        assert!(all().all(|one| ["STABLE", "BETA"].contains(&one.stability)));
    }

    #[test]
    fn pages_are_compared() {
        let family = Promised { name: "f", kind: "histogram", stability: "BETA", labels: "a,b" };
        let check = |page: &str, wrong: Option<&str>| {
            assert_eq!(family.judge(page).as_deref(), wrong, "{page}");
        };
        check("# TYPE g counter\n", Some("it is missing"));
        check("# TYPE f counter\n", Some("it is a counter, not a histogram"));
        let head = "# TYPE f histogram\n";
        check(head, None);
        let right = "f_bucket{a=\"x,y=\\\"\",b=\"}\",le=\"1\"} 3\nf_sum{a=\"1\"} 2\n";
        check(&format!("{head}{right}"), None);
        let wrong = Some("it has the labels {\"a\"}, not {\"a\", \"b\"}");
        check(&format!("{head}f_bucket{{a=\"x\",le=\"1\"}} 3\n"), wrong);
    }
}
