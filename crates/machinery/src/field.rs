//! Validation errors with the paths and the wording of upstream's `field` package.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use crate::status::Cause;

/// A path in an object: `spec.template.spec.containers[0].image`.
///
/// Checks name hundreds of places of an object in which nothing is wrong: a place knows its parent and its
/// own step, and its text is made for errors only.
#[derive(Clone, Default)]
pub struct Path(Option<Arc<Place>>);

struct Place {
    parent: Path,
    step: Step,
}

enum Step {
    /// A field, or several steps below each other (`template.spec`).
    Field(Cow<'static, str>),
    Index(usize),
    Key(Box<str>),
}

impl Path {
    pub fn new(root: &'static str) -> Self {
        Self::default().child(root)
    }

    pub fn child(&self, name: &'static str) -> Self {
        self.below(Step::Field(name.into()))
    }

    /// A field whose name comes from an object.
    pub fn named(&self, name: &str) -> Self {
        self.below(Step::Field(name.to_owned().into()))
    }

    pub fn index(&self, index: usize) -> Self {
        self.below(Step::Index(index))
    }

    pub fn key(&self, key: &str) -> Self {
        self.below(Step::Key(key.into()))
    }

    fn below(&self, step: Step) -> Self {
        Self(Some(Arc::new(Place { parent: self.clone(), step })))
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(first) = &self.0 else { return f.write_str("<nil>") };
        let mut places = vec![first];
        while let Some(parent) = &places[places.len() - 1].parent.0 {
            places.push(parent);
        }
        for (index, place) in places.iter().rev().enumerate() {
            match &place.step {
                // As Go's paths show a name that is none.
                Step::Field(name) if name.is_empty() => f.write_str("[]")?,
                Step::Field(name) if index == 0 => f.write_str(name)?,
                Step::Field(name) => write!(f, ".{name}")?,
                Step::Index(index) => write!(f, "[{index}]")?,
                Step::Key(key) => write!(f, "[{key}]")?,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One thing that is wrong with an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// `FieldValueRequired` and its like: the cause's reason.
    pub reason: &'static str,
    pub field: String,
    /// Without the field: `Required value`, `Invalid value: "x": must be …`.
    pub message: String,
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.message)
    }
}

/// All that is wrong with an object, in the order it was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FieldErrors(pub Vec<FieldError>);

impl FieldErrors {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn append(&mut self, mut other: FieldErrors) {
        self.0.append(&mut other.0);
    }

    fn push(&mut self, reason: &'static str, path: &Path, message: String) {
        self.0.push(FieldError { reason, field: path.to_string(), message });
    }

    pub fn required(&mut self, path: &Path, detail: &str) {
        self.push("FieldValueRequired", path, with_detail("Required value", detail));
    }

    /// `value` is shown as upstream shows it: strings quoted, other values as JSON.
    pub fn invalid(&mut self, path: &Path, value: impl serde::Serialize, detail: &str) {
        self.push(
            "FieldValueInvalid",
            path,
            with_detail(&format!("Invalid value: {}", shown(&value)), detail),
        );
    }

    pub fn not_supported(&mut self, path: &Path, value: &str, supported: &[&str]) {
        let listed: Vec<String> = supported.iter().map(|value| format!("{value:?}")).collect();
        let message =
            format!("Unsupported value: {value:?}: supported values: {}", listed.join(", "));
        self.push("FieldValueNotSupported", path, message);
    }

    /// As [`not_supported`](Self::not_supported), of a value that is no string.
    pub fn not_supported_value(
        &mut self,
        path: &Path,
        value: impl serde::Serialize,
        supported: &[&str],
    ) {
        let listed: Vec<String> = supported.iter().map(|value| format!("{value:?}")).collect();
        let message = format!(
            "Unsupported value: {}: supported values: {}",
            shown(&value),
            listed.join(", ")
        );
        self.push("FieldValueNotSupported", path, message);
    }

    /// An invalid value that is not shown, or in a form of its own.
    pub fn invalid_shown(&mut self, path: &Path, shown: Option<&str>, detail: &str) {
        let head = shown.map_or("Invalid value".into(), |shown| format!("Invalid value: {shown}"));
        self.push("FieldValueInvalid", path, with_detail(&head, detail));
    }

    pub fn duplicate(&mut self, path: &Path, value: impl serde::Serialize) {
        self.push("FieldValueDuplicate", path, format!("Duplicate value: {}", shown(&value)));
    }

    pub fn not_found(&mut self, path: &Path, value: impl serde::Serialize) {
        self.push("FieldValueNotFound", path, format!("Not found: {}", shown(&value)));
    }

    pub fn not_found_because(&mut self, path: &Path, value: impl serde::Serialize, detail: &str) {
        let head = format!("Not found: {}", shown(&value));
        self.push("FieldValueNotFound", path, with_detail(&head, detail));
    }

    /// A duplicate in a form of its own.
    pub fn duplicate_shown(&mut self, path: &Path, shown: &str, detail: &str) {
        let head = format!("Duplicate value: {shown}");
        self.push("FieldValueDuplicate", path, with_detail(&head, detail));
    }

    pub fn forbidden(&mut self, path: &Path, detail: &str) {
        self.push("FieldValueForbidden", path, with_detail("Forbidden", detail));
    }

    pub fn too_long(&mut self, path: &Path, limit: usize) {
        self.push(
            "FieldValueTooLong",
            path,
            format!("Too long: may not be more than {limit} bytes"),
        );
    }

    pub fn too_many(&mut self, path: &Path, actual: usize, limit: usize) {
        self.push(
            "FieldValueTooMany",
            path,
            format!("Too many: {actual}: must have at most {limit} items"),
        );
    }

    /// The text for the message of the `Status`: one error bare, several in brackets, without duplicates.
    pub fn summary(&self) -> String {
        let mut seen = HashSet::new();
        let texts = self.0.iter().map(ToString::to_string);
        let texts: Vec<String> = texts.filter(|text| seen.insert(text.clone())).collect();
        match texts.as_slice() {
            [one] => one.clone(),
            many => format!("[{}]", many.join(", ")),
        }
    }

    pub(crate) fn causes(&self) -> Vec<Cause> {
        let cause = |error: &FieldError| Cause {
            reason: error.reason.into(),
            message: error.message.clone(),
            field: error.field.clone(),
        };
        self.0.iter().map(cause).collect()
    }
}

fn with_detail(head: &str, detail: &str) -> String {
    if detail.is_empty() { head.into() } else { format!("{head}: {detail}") }
}

/// A value as Go shows it: a string by `%q`, anything else by its JSON encoder, which escapes HTML.
fn shown(value: &impl serde::Serialize) -> String {
    let json = match serde_json::to_string(value) {
        Ok(json) => json,
        Err(error) => return error.to_string(),
    };
    if json.starts_with('"')
        && let Ok(text) = serde_json::from_str::<String>(&json)
    {
        return quoted(&text);
    }
    let mut out = String::with_capacity(json.len());
    for char in json.chars() {
        match char {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                out.push_str(&format!("\\u{:04x}", u32::from(char)));
            }
            _ => out.push(char),
        }
    }
    out
}

/// A string as Go's `%q` shows it.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for char in text.chars() {
        match char {
            '"' | '\\' => out.extend(['\\', char]),
            '\'' => out.push(char),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{7}' => out.push_str("\\a"),
            '\u{8}' => out.push_str("\\b"),
            '\u{b}' => out.push_str("\\v"),
            '\u{c}' => out.push_str("\\f"),
            '\0'..=' ' | '\u{7f}' if char != ' ' => {
                out.push_str(&format!("\\x{:02x}", u32::from(char)));
            }
            // Rust calls marks unprintable that stand alone; Go does not.
            _ if char.is_control() || char.escape_debug().len() > 1 && !char.is_alphanumeric() => {
                match u32::from(char) {
                    code @ ..=0xffff => out.push_str(&format!("\\u{code:04x}")),
                    code => out.push_str(&format!("\\U{code:08x}")),
                }
            }
            _ => out.push(char),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_shown_as_go_shows_them() {
        let check = |value: serde_json::Value, expected: &str| {
            let mut errors = FieldErrors::default();
            errors.invalid(&Path::new("a"), value, "");
            assert_eq!(errors.summary(), format!("a: Invalid value: {expected}"));
        };
        check("a\"\\\n\u{1}\u{7f}'é😀<&".into(), r#""a\"\\\n\x01\x7f'é😀<&""#);
        check("\u{202e}\u{feff}\u{a0}".into(), r#""\u202e\ufeff\u00a0""#);
        check(serde_json::json!({ "a": ["<&>"] }), r#"{"a":["\u003c\u0026\u003e"]}"#);
        check(serde_json::json!(5), "5");
    }

    #[test]
    fn reads_as_upstream_writes_it() {
        let path = Path::new("spec").child("containers").index(0).child("image");
        let mut errors = FieldErrors::default();
        errors.required(&path, "");
        assert_eq!(errors.summary(), "spec.containers[0].image: Required value");
        assert_eq!(Path::default().to_string(), "<nil>");
        assert_eq!(Path::new("").to_string(), "[]");
        assert_eq!(Path::new("a").named("").child("x").key("k").to_string(), "a[].x[k]");
        errors.invalid(&Path::new("metadata").child("name"), "A", "must be lower case");
        assert_eq!(
            errors.summary(),
            "[spec.containers[0].image: Required value, metadata.name: Invalid value: \"A\": must be lower case]"
        );
    }
}
