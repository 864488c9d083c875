//! Label and field selectors: parse upstream's syntax, match against maps.

mod labels;

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use crate::Pairs;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Test {
    Exists,
    DoesNotExist,
    In(Vec<String>),
    NotIn(Vec<String>),
    GreaterThan(i64),
    LessThan(i64),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement {
    pub key: String,
    pub test: Test,
}

impl Requirement {
    fn matches(&self, value: Option<&str>) -> bool {
        let number = || value.and_then(|value| value.parse::<i64>().ok());
        match &self.test {
            Test::Exists => value.is_some(),
            Test::DoesNotExist => value.is_none(),
            Test::In(set) => value.is_some_and(|value| set.iter().any(|one| one == value)),
            Test::NotIn(set) => !value.is_some_and(|value| set.iter().any(|one| one == value)),
            Test::GreaterThan(limit) => number().is_some_and(|number| number > *limit),
            Test::LessThan(limit) => number().is_some_and(|number| number < *limit),
        }
    }
}

/// A conjunction of tests. The default matches everything; [`Selector::nothing`] matches nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    pub requirements: Vec<Requirement>,
    nothing: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParseError(pub String);

impl Selector {
    pub fn everything() -> Self {
        Self::default()
    }

    pub fn nothing() -> Self {
        Self { requirements: vec![], nothing: true }
    }

    pub fn is_everything(&self) -> bool {
        self.requirements.is_empty() && !self.nothing
    }

    /// All of these labels, as in a Service or ReplicationController.
    pub fn from_map(map: &BTreeMap<String, String>) -> Self {
        let one = |(key, value): (&String, &String)| Requirement {
            key: key.clone(),
            test: Test::In(vec![value.clone()]),
        };
        Self { requirements: map.iter().map(one).collect(), nothing: false }
    }

    /// The API's `LabelSelector`: absent matches nothing, empty matches everything.
    pub fn from_api(selector: Option<&LabelSelector>) -> Result<Self, ParseError> {
        let Some(selector) = selector else {
            return Ok(Self::nothing());
        };
        let mut all = selector.match_labels.as_ref().map(Self::from_map).unwrap_or_default();
        for one in selector.match_expressions.iter().flatten() {
            let values = one.values.clone().unwrap_or_default();
            let test = match one.operator.as_str() {
                "In" => Test::In(values),
                "NotIn" => Test::NotIn(values),
                "Exists" => Test::Exists,
                "DoesNotExist" => Test::DoesNotExist,
                other => {
                    return Err(ParseError(format!(
                        "{other:?} is not a valid label selector operator"
                    )));
                }
            };
            all.requirements.push(Requirement { key: one.key.clone(), test });
        }
        Ok(all)
    }

    pub fn matches(&self, labels: Option<&BTreeMap<String, String>>) -> bool {
        self.matches_with(|key| labels.and_then(|labels| labels.get(key)).map(String::as_str))
    }

    pub fn matches_pairs(&self, labels: &Pairs) -> bool {
        self.matches_with(|key| labels.get(key))
    }

    pub fn matches_with<'a>(&self, lookup: impl Fn(&str) -> Option<&'a str>) -> bool {
        !self.nothing && self.requirements.iter().all(|one| one.matches(lookup(&one.key)))
    }

    /// `a=b,c!=d,e in (f,g),h,!i,j>1`
    pub fn parse_labels(text: &str) -> Result<Self, ParseError> {
        Ok(Self { requirements: labels::parse(text)?, nothing: false })
    }

    /// `metadata.name=web,status.phase!=Running`: equality only, with `\` escapes.
    pub fn parse_fields(text: &str) -> Result<Self, ParseError> {
        let mut requirements = vec![];
        let mut terms = split_unescaped(text);
        terms.sort_unstable();
        for term in terms.into_iter().filter(|term| !term.is_empty()) {
            let (key, operator, value) = ["!=", "==", "="]
                .iter()
                .filter_map(|op| term.find(op).map(|at| (at, *op)))
                .min_by_key(|(at, op)| (*at, std::cmp::Reverse(op.len())))
                .map(|(at, op)| (&term[..at], op, &term[at + op.len()..]))
                .ok_or_else(|| {
                    ParseError(format!("invalid selector: '{text}'; can't understand '{term}'"))
                })?;
            let value = unescape(value)?;
            // To upstream a term that says nothing asks for nothing.
            if key.is_empty() && value.is_empty() {
                continue;
            }
            let test =
                if operator == "!=" { Test::NotIn(vec![value]) } else { Test::In(vec![value]) };
            requirements.push(Requirement { key: key.to_owned(), test });
        }
        Ok(Self { requirements, nothing: false })
    }

    /// The value that `key` must have, when the selector says so: for indexes.
    pub fn exact(&self, key: &str) -> Option<&str> {
        self.requirements.iter().find_map(|one| match &one.test {
            Test::In(set) if one.key == key && set.len() == 1 => Some(set[0].as_str()),
            _ => None,
        })
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Requirement { key, test }) in self.requirements.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            match test {
                Test::Exists => write!(f, "{key}")?,
                Test::DoesNotExist => write!(f, "!{key}")?,
                Test::In(set) if set.len() == 1 => write!(f, "{key}={}", set[0])?,
                Test::NotIn(set) if set.len() == 1 => write!(f, "{key}!={}", set[0])?,
                Test::In(set) => write!(f, "{key} in ({})", set.join(","))?,
                Test::NotIn(set) => write!(f, "{key} notin ({})", set.join(","))?,
                Test::GreaterThan(limit) => write!(f, "{key}>{limit}")?,
                Test::LessThan(limit) => write!(f, "{key}<{limit}")?,
            }
        }
        Ok(())
    }
}

fn split_unescaped(text: &str) -> Vec<&str> {
    let mut parts = vec![];
    let (mut start, mut escaped) = (0, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            ',' => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

fn unescape(text: &str) -> Result<String, ParseError> {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some(next @ ('\\' | ',' | '=')) => out.push(next),
                other => {
                    let other = other.map(String::from).unwrap_or_default();
                    return Err(ParseError(format!(
                        "invalid field selector: invalid escape sequence: \\{other}"
                    )));
                }
            },
            // Upstream shows its number.
            ',' | '=' => {
                return Err(ParseError(format!(
                    "invalid field selector: unescaped character in value: {}",
                    c as u32
                )));
            }
            c => out.push(c),
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_selectors_match() {
        let labels: BTreeMap<String, String> = [("app", "web"), ("tier", "front"), ("n", "5")]
            .map(|(k, v)| (k.into(), v.into()))
            .into();
        for (text, expected) in [
            ("", true),
            ("app=web", true),
            ("app == web , tier", true),
            ("app!=web", false),
            ("other!=x", true),
            ("app in (a, web)", true),
            ("app notin (web)", false),
            ("!other,n>4,n<6", true),
            ("!app", false),
        ] {
            let selector =
                Selector::parse_labels(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(selector.matches(Some(&labels)), expected, "{text}");
        }
        for text in ["a=b,", "a in b", "=", "a b", "a>x"] {
            assert!(Selector::parse_labels(text).is_err(), "{text}");
        }
    }

    #[test]
    fn field_selectors_unescape() {
        let selector =
            Selector::parse_fields(r"metadata.name=a\,b,spec.nodeName!=").expect("valid");
        assert_eq!(selector.exact("metadata.name"), Some("a,b"));
        assert!(selector.matches_with(|key| Some(if key == "metadata.name" {
            "a,b"
        } else {
            "n1"
        })));
        for (text, expected) in [
            ("b,a", "invalid selector: 'b,a'; can't understand 'a'"),
            ("a=b=c", "invalid field selector: unescaped character in value: 61"),
            (r"a=b\x", r"invalid field selector: invalid escape sequence: \x"),
            (r"a=b\", r"invalid field selector: invalid escape sequence: \"),
        ] {
            let error = Selector::parse_fields(text).err().map(|error| error.0);
            assert_eq!(error.as_deref(), Some(expected), "{text}");
        }
        assert!(Selector::parse_fields("!=,=").expect("valid").is_everything());
    }
}
