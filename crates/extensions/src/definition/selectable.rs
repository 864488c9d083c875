//! Paths of fields in a schema: selectable fields, and the fields that rules blame.
//! Upstream: `apiserver/schema/cel.ValidFieldPath`.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSONSchemaProps, SelectableField,
};
use machinery::field::{FieldErrors, Path};

use super::schemas;

/// The largest number of selectable fields of a version.
const LIMIT: usize = 8;

/// A path in parts, and whether each is a key (`['a']`) rather than a field (`.a`).
pub fn parse(text: &str, may_index: bool) -> Result<Vec<(String, bool)>, String> {
    let mut parts = vec![];
    let mut rest = text;
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix('.') {
            let end = after.find(['.', '[']).unwrap_or(after.len());
            let name = &after[..end];
            if name.is_empty() {
                return Err("unexpected end of JSON path".into());
            }
            parts.push((name.to_owned(), false));
            rest = &after[end..];
        } else if let Some(after) = rest.strip_prefix("['") {
            let end = after.find("']").ok_or("unterminated quoted string")?;
            parts.push((after[..end].replace("\\'", "'"), true));
            rest = &after[end + 2..];
        } else if rest.starts_with('[') && may_index {
            return Err("does not refer to a valid field".into());
        } else {
            let word: String = rest.chars().take_while(|c| !matches!(c, '.' | '[')).collect();
            return Err(format!("expected [ or . but got: {word}"));
        }
    }
    if parts.is_empty() { Err("must not be empty".into()) } else { Ok(parts) }
}

/// The schema at a path.
pub fn resolve<'a>(
    text: &str,
    schema: &'a JSONSchemaProps,
    may_index: bool,
) -> Result<&'a JSONSchemaProps, String> {
    let mut at = schema;
    for (name, is_key) in parse(text, may_index)? {
        let property = at.properties.as_ref().and_then(|all| all.get(&name));
        at = match (property, schemas::additional(at)) {
            (Some(property), _) => property,
            (None, Some(additional)) if is_key || may_index => additional,
            _ => return Err("does not refer to a valid field".into()),
        };
    }
    Ok(at)
}

pub fn check(
    fields: &[SelectableField],
    schema: &JSONSchemaProps,
    path: &Path,
    errors: &mut FieldErrors,
) {
    let mut seen: Vec<&str> = vec![];
    for (index, field) in fields.iter().enumerate() {
        let text = field.json_path.as_str();
        let path = path.index(index).child("jsonPath");
        if text.is_empty() {
            errors.required(&path, "");
            continue;
        }
        let found = match resolve(text, schema, false) {
            Ok(found) => found,
            Err(why) => {
                errors.invalid(&path, text, &format!("is an invalid path: {why}"));
                continue;
            }
        };
        if text.starts_with(".metadata.") || text == ".metadata" {
            errors.invalid(&path, text, "must not point to fields in metadata");
        }
        if !matches!(schemas::kind(found), "string" | "boolean" | "integer") {
            let detail = "must point to a field of type string, boolean or integer. Enum string fields and strings with formats are allowed.";
            errors.invalid(&path, text, detail);
        }
        if seen.contains(&text) {
            errors.duplicate(&path, text);
        } else {
            seen.push(text);
        }
    }
    if seen.len() > LIMIT {
        errors.too_many(path, seen.len(), LIMIT);
    }
}
