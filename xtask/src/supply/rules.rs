//! The part of `deny.toml` that we use: accepted advisories, licences and sources, and banned packages.
//!
//! In: the file. Out: [`Rules`], or the line with the error. It reads a small part of TOML: tables,
//! strings, multi-line lists, inline tables.

use std::collections::BTreeMap;
use std::iter::Peekable;
use std::str::Chars;

use crate::sh::Outcome;

#[derive(Debug, Default, PartialEq)]
pub struct Rules {
    /// Ids of accepted advisories, with the reasons.
    pub ignored: BTreeMap<String, String>,
    pub licences: Vec<String>,
    /// Additional licences for single packages.
    pub exceptions: BTreeMap<String, Vec<String>>,
    /// Banned packages, with the reasons.
    pub banned: BTreeMap<String, String>,
    pub registries: Vec<String>,
}

#[derive(Clone, Debug, PartialEq)]
enum Value {
    Text(String),
    List(Vec<Value>),
    Table(BTreeMap<String, Value>),
    /// A number or a word.
    Other,
}

impl Value {
    fn text(&self, name: &str) -> Outcome<String> {
        match self {
            Self::Table(fields) => match fields.get(name) {
                Some(Self::Text(text)) if !text.is_empty() => Ok(text.clone()),
                _ => Err(format!("deny.toml: {name} is missing: {self:?}")),
            },
            _ => Err(format!("deny.toml: {self:?} is not a table")),
        }
    }

    fn texts(&self) -> Vec<String> {
        let Self::List(items) = self else { return vec![] };
        let text = |item: &Value| match item {
            Self::Text(text) => Some(text.clone()),
            _ => None,
        };
        items.iter().filter_map(text).collect()
    }

    fn items(&self) -> &[Value] {
        match self {
            Self::List(items) => items,
            _ => &[],
        }
    }
}

pub fn parse(text: &str) -> Outcome<Rules> {
    let mut rules = Rules::default();
    for (table, name, value) in entries(text)? {
        match (table.as_str(), name.as_str()) {
            ("advisories", "ignore") => {
                for item in value.items() {
                    rules.ignored.insert(item.text("id")?, item.text("reason")?);
                }
            }
            ("licenses", "allow") => rules.licences = value.texts(),
            ("licenses", "exceptions") => {
                for item in value.items() {
                    let Value::Table(fields) = item else { continue };
                    let allowed = fields.get("allow").map(Value::texts).unwrap_or_default();
                    rules.exceptions.insert(item.text("crate")?, allowed);
                }
            }
            ("bans", "deny") => {
                for item in value.items() {
                    rules.banned.insert(item.text("crate")?, item.text("reason")?);
                }
            }
            ("sources", "allow-registry") => rules.registries = value.texts(),
            _ => {}
        }
    }
    Ok(rules)
}

/// Tables, names and values.
fn entries(text: &str) -> Outcome<Vec<(String, String, Value)>> {
    let mut reader = Reader { chars: text.chars().peekable() };
    let (mut table, mut all) = (String::new(), vec![]);
    while let Some(first) = reader.skip() {
        if first == '[' {
            table = reader.line().trim().trim_matches(['[', ']']).to_owned();
            continue;
        }
        let (name, value) = reader.pair()?;
        all.push((table.clone(), name, value));
    }
    Ok(all)
}

struct Reader<'a> {
    chars: Peekable<Chars<'a>>,
}

impl Reader<'_> {
    /// The next character that is neither a space nor part of a comment.
    fn skip(&mut self) -> Option<char> {
        loop {
            let next = *self.chars.peek()?;
            if next == '#' {
                self.line();
            } else if next.is_whitespace() {
                self.chars.next();
            } else {
                return Some(next);
            }
        }
    }

    fn line(&mut self) -> String {
        self.chars.by_ref().take_while(|c| *c != '\n').collect()
    }

    fn pair(&mut self) -> Outcome<(String, Value)> {
        let is_of_name = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let mut name = String::new();
        while let Some(c) = self.chars.next_if(is_of_name) {
            name.push(c);
        }
        if name.is_empty() || self.skip() != Some('=') {
            return Err(format!("deny.toml: a name and `=` are expected behind {name:?}"));
        }
        self.chars.next();
        Ok((name, self.value()?))
    }

    fn value(&mut self) -> Outcome<Value> {
        match self.skip() {
            Some('"') => {
                self.chars.next();
                Ok(Value::Text(self.chars.by_ref().take_while(|c| *c != '"').collect()))
            }
            Some('[') => {
                let mut items = vec![];
                self.chars.next();
                while !self.ends(']')? {
                    items.push(self.value()?);
                }
                Ok(Value::List(items))
            }
            Some('{') => {
                let mut fields = BTreeMap::new();
                self.chars.next();
                while !self.ends('}')? {
                    let (name, value) = self.pair()?;
                    fields.insert(name, value);
                }
                Ok(Value::Table(fields))
            }
            Some(_) => {
                let is_of_word = |c: &char| c.is_ascii_alphanumeric();
                let mut is_empty = true;
                while self.chars.next_if(is_of_word).is_some() {
                    is_empty = false;
                }
                if is_empty {
                    Err("deny.toml: a value is expected".to_owned())
                } else {
                    Ok(Value::Other)
                }
            }
            None => Err("deny.toml: the file ends before a value".to_owned()),
        }
    }

    /// Takes commas, and the end if it is there.
    fn ends(&mut self, end: char) -> Outcome<bool> {
        loop {
            match self.skip() {
                Some(',') => drop(self.chars.next()),
                Some(c) if c == end => {
                    self.chars.next();
                    return Ok(true);
                }
                Some(_) => return Ok(false),
                None => return Err(format!("deny.toml: the file ends before {end}")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_read() {
        let text = r#"
            # A comment with [brackets] and = signs.
            [advisories]
            ignore = [{ id = "RUSTSEC-1", reason = "why, then" }] # at the end
            [licenses]
            allow = [
                "MIT", # first
                "Apache-2.0",
            ]
            exceptions = [{ crate = "a", allow = ["MPL-2.0"], version = 1 }]
            [bans]
            deny = [{ crate = "openssl", reason = "r" }]
            multiple-versions = "allow"
            [sources]
            allow-registry = ["https://x"]
        "#;
        let map = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
        };
        let expected = Rules {
            ignored: map(&[("RUSTSEC-1", "why, then")]),
            licences: vec!["MIT".into(), "Apache-2.0".into()],
            exceptions: [("a".to_owned(), vec!["MPL-2.0".to_owned()])].into(),
            banned: map(&[("openssl", "r")]),
            registries: vec!["https://x".into()],
        };
        assert_eq!(parse(text), Ok(expected));
        assert!(parse("[advisories]\nignore = [{ id = \"x\" }]").is_err(), "a reason is due");
        assert!(parse("[bans]\ndeny = [").is_err());
    }
}
