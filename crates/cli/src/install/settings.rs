//! Changes keys of config.yaml and keeps the rest of its text, with the comments.
//!
//! In: the file's text, or none; keys with values. Out: the new text. A key that the file has is replaced where it is.
//! Invariant: the text is read again; a file in which a key is not found line by line (a map in braces) is refused.

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value};

const HEADER: &str = "# Flags of `decapod server` or `decapod agent`; `decapod server --help` lists them.\n\
                      # Files in config.yaml.d/ are read after this one.\n";

/// A key of config.yaml.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    pub key: String,
    pub value: Value,
}

impl Setting {
    pub fn text(key: &str, value: &str) -> Self {
        Self { key: key.to_owned(), value: value.into() }
    }

    /// One value is a scalar.
    pub fn list(key: &str, mut values: Vec<String>) -> Self {
        let value = match values.len() {
            1 => values.remove(0).into(),
            _ => values.into(),
        };
        Self { key: key.to_owned(), value }
    }

    /// JSON's scalars are YAML's.
    fn lines(&self) -> String {
        match &self.value {
            Value::Array(list) => {
                let items: String = list.iter().map(|one| format!("  - {one}\n")).collect();
                format!("{}:\n{items}", self.key)
            }
            scalar => format!("{}: {scalar}\n", self.key),
        }
    }
}

/// Whether the file sets the key.
pub fn has(text: &str, key: &str) -> bool {
    read(text).is_ok_and(|map| map.get(key).is_some_and(|value| !value.is_null()))
}

fn read(text: &str) -> Result<Map<String, Value>> {
    let value: Value = serde_saphyr::from_str(text).context("it is not valid YAML")?;
    match value {
        Value::Object(map) => Ok(map),
        Value::Null => Ok(Map::new()),
        _ => anyhow::bail!("it is not a YAML map of flags"),
    }
}

/// The text with these settings.
pub fn merged(old: Option<&str>, settings: &[Setting]) -> Result<String> {
    let mut text = old.unwrap_or(HEADER).to_owned();
    let before = read(&text)?;
    for setting in settings {
        if before.get(&setting.key) != Some(&setting.value) {
            text = with(&text, setting);
        }
    }
    let after = read(&text)?;
    for Setting { key, value } in settings {
        ensure!(
            after.get(key) == Some(value),
            "{key} is not on a line of its own; set it to {value} by hand"
        );
    }
    Ok(text)
}

fn with(text: &str, setting: &Setting) -> String {
    let start = format!("{}:", setting.key);
    let (mut out, mut is_replaced, mut is_inside) = (String::new(), false, false);
    for line in text.split_inclusive('\n') {
        // A value continues on indented lines, and as a list at the key's own depth.
        let continues = line.starts_with([' ', '\t']) || line.starts_with("- ");
        is_inside = is_inside && continues;
        if line.starts_with(&start) && !is_replaced {
            out.push_str(&setting.lines());
            (is_replaced, is_inside) = (true, true);
        } else if !is_inside {
            out.push_str(line);
        }
    }
    if !is_replaced {
        if !out.is_empty() && !out.ends_with('\n') {
            out.push('\n');
        }
        out.push_str(&setting.lines());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_of_the_file_stays() {
        let list = |values: &[&str]| {
            Setting::list("tls-san", values.iter().map(|one| (*one).to_owned()).collect())
        };
        let check = |old: Option<&str>, settings: &[Setting], expected: &str| {
            assert_eq!(merged(old, settings).expect("merged"), expected, "{old:?}");
        };
        let token = Setting::text("token-file", "/t");
        check(None, std::slice::from_ref(&token), &format!("{HEADER}token-file: \"/t\"\n"));
        let old = "# mine\ntls-san:\n- a # first\n- b\n# more\nnode-label: [x=y]";
        check(
            Some(old),
            &[list(&["c", "d"]), token.clone()],
            "# mine\ntls-san:\n  - \"c\"\n  - \"d\"\n# more\nnode-label: [x=y]\ntoken-file: \"/t\"\n",
        );
        check(Some("tls-san:\n  - a\nx: 1\n"), &[list(&["b"])], "tls-san: \"b\"\nx: 1\n");
        // What has the value already is left as it is written.
        check(Some("tls-san: [a,   b]\n"), &[list(&["a", "b"])], "tls-san: [a,   b]\n");
        check(Some(""), &[], "");
        let error = merged(Some("{tls-san: a}"), &[list(&["b"])]).expect_err("no line of its own");
        assert!(!error.to_string().is_empty());
        assert!(merged(Some("- a\n"), &[]).is_err());
        assert!(has(old, "tls-san") && !has(old, "token") && !has("token:\n", "token"));
    }
}
