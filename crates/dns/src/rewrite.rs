//! Other names for names: `rewrite name exact www.example.com web.ns.svc.cluster.local`.
//!
//! In: a name as text, in lower case, without its last dot. Out: the name to look up. Upstream: CoreDNS' `rewrite name`
//! with exact, prefix, suffix and substring names; the records of an answer have the name of the question, as
//! CoreDNS does for these. Deviation: no regular expressions, no other fields.

#[derive(Clone, Debug, PartialEq)]
pub struct Rewrite {
    kind: Kind,
    from: String,
    to: String,
    /// The next rule applies too.
    goes_on: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Exact,
    Prefix,
    Suffix,
    Substring,
}

impl Rewrite {
    /// The words after `rewrite`, and the lines between its braces.
    pub fn parse(words: &[String], lines: &[Vec<String>]) -> Result<Self, &'static str> {
        const USAGE: &str =
            "supported is: rewrite [continue|stop] name [exact|prefix|suffix|substring] FROM TO";
        // `rewrite stop { name regex … }` has its rule between the braces.
        let first = lines.first().map(Vec::as_slice).unwrap_or_default();
        let words: Vec<&str> = words.iter().chain(first).map(String::as_str).collect();
        if lines.len() > 1 {
            return Err(USAGE);
        }
        let (goes_on, words) = match words.as_slice() {
            ["continue", rest @ ..] => (true, rest),
            ["stop", rest @ ..] => (false, rest),
            rest => (false, rest),
        };
        let words = match words {
            [rest @ .., "answer", "auto"] => rest,
            rest => rest,
        };
        let (kind, from, to) = match words {
            ["name", "exact", from, to] => (Kind::Exact, from, to),
            ["name", "prefix", from, to] => (Kind::Prefix, from, to),
            ["name", "suffix", from, to] => (Kind::Suffix, from, to),
            ["name", "substring", from, to] => (Kind::Substring, from, to),
            ["name", "regex", ..] => return Err("regular expressions are not supported"),
            ["name", from, to] => (Kind::Exact, from, to),
            _ => return Err(USAGE),
        };
        let [from, to] = [from, to].map(|text| match kind {
            Kind::Exact | Kind::Suffix => text.strip_suffix('.').unwrap_or(text).to_lowercase(),
            Kind::Prefix | Kind::Substring => text.to_lowercase(),
        });
        if from.is_empty() {
            return Err(USAGE);
        }
        Ok(Self { kind, from, to, goes_on })
    }

    fn apply(&self, name: &str) -> Option<String> {
        let (from, to) = (self.from.as_str(), self.to.as_str());
        match self.kind {
            Kind::Exact => (name == from).then(|| to.to_owned()),
            Kind::Prefix => name.strip_prefix(from).map(|rest| format!("{to}{rest}")),
            Kind::Suffix => name.strip_suffix(from).map(|rest| format!("{rest}{to}")),
            Kind::Substring => name.contains(from).then(|| name.replacen(from, to, 1)),
        }
    }
}

/// The name after all rules; `None` if none concerns it.
pub fn apply(rules: &[Rewrite], name: &str) -> Option<String> {
    let mut current: Option<String> = None;
    for rule in rules {
        if let Some(next) = rule.apply(current.as_deref().unwrap_or(name)) {
            current = Some(next);
            if !rule.goes_on {
                break;
            }
        }
    }
    current
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(all: &[&str]) -> Vec<Rewrite> {
        let parse = |text: &&str| {
            let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
            Rewrite::parse(&words, &[]).expect("a rule")
        };
        all.iter().map(parse).collect()
    }

    #[test]
    fn names_are_rewritten() {
        let check = |all: &[&str], name: &str, expected: Option<&str>| {
            assert_eq!(apply(&rules(all), name).as_deref(), expected, "{all:?} {name}");
        };
        check(&["name a.example B.example."], "a.example", Some("b.example"));
        check(&["name exact a.example b.example"], "x.a.example", None);
        check(
            &["stop name suffix .a.example .b.example answer auto"],
            "x.a.example",
            Some("x.b.example"),
        );
        check(&["name prefix a- b-"], "a-x.example", Some("b-x.example"));
        check(&["name substring mid dle"], "x.mid.example", Some("x.dle.example"));
        check(&["name a b", "name b c"], "a", Some("b"));
        check(&["continue name a b", "name b c"], "a", Some("c"));
    }

    #[test]
    fn other_rules_are_refused() {
        for text in ["name regex (.*) x", "type ANY HINFO", "name a", "name exact . x"] {
            let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
            assert!(Rewrite::parse(&words, &[]).is_err(), "{text}");
        }
    }
}
