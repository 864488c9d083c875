//! The objects in a manifest's text.
//!
//! In: YAML or JSON, one or more documents. Out: objects; Lists are expanded. YAML is read as upstream does (1.1: `yes`,
//! `0755`); documents are split at `---` lines.

use serde_json::Value;

/// The text is no manifest. The message is kubectl's.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("error converting YAML to JSON: {0}")]
pub struct Unreadable(String);

/// The objects in a file's text; empty documents are skipped.
pub fn documents(text: &str) -> Result<Vec<Value>, Unreadable> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.trim_start().starts_with('{') {
        let stream = serde_json::Deserializer::from_str(text).into_iter::<Value>();
        if let Ok(all) = stream.collect::<Result<Vec<_>, _>>() {
            return Ok(all);
        }
    }
    let mut parts = vec![String::new()];
    for line in text.lines() {
        if line.starts_with("---") && line[3..].trim_start().is_empty_or_comment() {
            parts.push(String::new());
            continue;
        }
        let last = parts.last_mut().expect("there is always one");
        last.push_str(line);
        last.push('\n');
    }
    let mut out = vec![];
    for part in parts {
        let blank = |line: &str| line.trim().is_empty() || line.trim_start().starts_with('#');
        if part.lines().all(blank) {
            continue;
        }
        match yaml(&part)? {
            Value::Null => {}
            object @ Value::Object(_) => out.push(object),
            _ => return Err(Unreadable("the document is not a map".into())),
        }
    }
    Ok(out)
}

trait Blank {
    fn is_empty_or_comment(&self) -> bool;
}

impl Blank for str {
    fn is_empty_or_comment(&self) -> bool {
        self.is_empty() || self.starts_with('#')
    }
}

fn yaml(text: &str) -> Result<Value, Unreadable> {
    let options = serde_saphyr::options! {
        legacy_octal_numbers: true,
        with_snippet: false,
        budget: serde_saphyr::budget! { max_depth: 127 },
    };
    serde_saphyr::from_str_with_options(text, options)
        .map_err(|error| Unreadable(format!("yaml: {error}")))
}

/// Expands a `v1.List`, or any list, into its items.
pub fn flatten(document: Value) -> Vec<Value> {
    let kind = document["kind"].as_str().unwrap_or_default().to_owned();
    let Some(of_item) = kind.strip_suffix("List").filter(|_| document["items"].is_array()) else {
        return vec![document];
    };
    let version = document["apiVersion"].clone();
    let mut items = document["items"].as_array().cloned().unwrap_or_default();
    // In a list of one kind, only the list has the kind.
    let untyped = items.iter_mut().filter_map(Value::as_object_mut).filter(|_| !of_item.is_empty());
    for item in untyped {
        item.entry("kind").or_insert_with(|| of_item.into());
        item.entry("apiVersion").or_insert_with(|| version.clone());
    }
    items.into_iter().flat_map(flatten).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn files_hold_documents() {
        let check = |text: &str, expected: &[Value]| {
            assert_eq!(documents(text).as_deref(), Ok(expected), "{text}");
        };
        check("", &[]);
        check("# nothing\n---\n", &[]);
        check(
            "a: 1\n---\nb: yes\n--- # more\nc: 0755\n",
            &[json!({"a":1}), json!({"b":true}), json!({"c":493})],
        );
        check("{\"a\":1}\n{\"b\":2}", &[json!({"a":1}), json!({"b":2})]);
        check("{a: 1}", &[json!({"a":1})]);
        check("a: |\n  --- inside\n  x\n", &[json!({"a":"--- inside\nx\n"})]);
        assert!(documents("a: [").is_err());
        assert!(documents("- 1").is_err());
    }

    #[test]
    fn lists_are_expanded() {
        let list = json!({"kind":"List","apiVersion":"v1","items":[{"kind":"Pod"},{"kind":"List","items":[{"kind":"Node"}]}]});
        assert_eq!(flatten(list), [json!({"kind":"Pod"}), json!({"kind":"Node"})]);
        let typed = json!({"kind":"PodList","apiVersion":"v1","items":[{"metadata":{}}]});
        assert_eq!(flatten(typed), [json!({"kind":"Pod","apiVersion":"v1","metadata":{}})]);
    }
}
