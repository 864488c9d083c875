//! `PATCH` of an object: four formats, one of them in two encodings; the content type selects one.

use std::borrow::Cow;

use bytes::Bytes;
use http::Response;
use machinery::StatusError;
use machinery::patch::PatchKind;
use machinery::status::Reason;
use serde_json::value::RawValue;

use super::Call;
use super::body;
use super::call::unsupported_media_type;
use super::options::{self, OptionsKind};
use super::update::status_of;
use crate::codec::explain::{self, cbor_kind};
use crate::codec::{self, cbor, decode, gojson};
use crate::registry::{Intent, Written};
use crate::request::FieldValidation;
use crate::resource::Body;

pub async fn patch(mut call: Call, body: Body) -> Result<Response<Body>, StatusError> {
    let table_options = call.table_options()?;
    let written = write(&mut call, body).await?;
    codec::object(&call.accept, status_of(written.outcome), &written.object, &table_options)
}

/// Patches the object, or the view of the subresource.
pub async fn write(call: &mut Call, body: Body) -> Result<Written, StatusError> {
    let kind = kind(call)?;
    let bytes = body::read(body).await?;
    let is_apply = matches!(kind, PatchKind::Apply { .. });
    let Call { query, ctx, .. } = &mut *call;
    let options_kind = if is_apply { OptionsKind::Apply } else { OptionsKind::Patch };
    let force = options::read(options_kind, query, ctx)?;
    let (kind, body, note) = match kind {
        PatchKind::Apply { .. } => {
            let (body, note) = match is_cbor(call) {
                true => (applied_cbor(&bytes)?, None),
                false => applied(&bytes)?,
            };
            (PatchKind::Apply { force }, body, note)
        }
        kind => {
            let replaced = match gojson::as_utf8(&bytes) {
                Cow::Owned(text) => Some(text),
                Cow::Borrowed(_) => None,
            };
            let body = replaced.map_or(bytes, Bytes::from);
            if kind == PatchKind::Json {
                check_operations(&body)?;
            }
            (kind, body, None)
        }
    };
    if let Some(note) =
        note.as_ref().filter(|_| call.ctx.field_validation == FieldValidation::Strict)
    {
        return Err(StatusError::bad_request(format!(
            "error strict decoding YAML: error converting YAML to JSON: yaml: unmarshal errors:\n  {note}"
        )));
    }
    call.note_json(&body);
    let written =
        call.registry().write(&call.ctx, &call.key(), Intent::Patch { kind, body }).await?;
    // A refused request gets no further warnings.
    if let Some(note) = note.filter(|_| call.ctx.field_validation == FieldValidation::Warn) {
        call.ctx.warn(note);
    }
    Ok(written)
}

/// Upstream: `maxJSONPatchOperations`.
/// What upstream refuses before it looks at the object. An operation that is none is found out
/// when it is applied.
fn check_operations(body: &[u8]) -> Result<(), StatusError> {
    const MOST: usize = 10_000;
    let undecodable = |why: &str| StatusError::bad_request(format!("error decoding patch: {why}"));
    gojson::check(body).map_err(|why| undecodable(&why.to_string()))?;
    let operations: Vec<&RawValue> = match body.trim_ascii_start().first() {
        Some(b'[') => serde_json::from_slice(body).unwrap_or_default(),
        Some(b'n') | None => vec![],
        _ => return Err(undecodable(&not_go(body, "[]handlers.jsonPatchOp"))),
    };
    let strange = operations.iter().find(|one| !one.get().starts_with(['{', 'n']));
    if let Some(strange) = strange {
        return Err(undecodable(&not_go(strange.get().as_bytes(), "handlers.jsonPatchOp")));
    }
    if operations.len() <= MOST {
        return Ok(());
    }
    let message = format!(
        "Request entity too large: The allowed maximum operations in a JSON patch is {MOST}, got {}",
        operations.len()
    );
    Err(StatusError::new(Reason::RequestEntityTooLarge, message).without_details())
}

/// Go's words for JSON of another kind than the type that it reads.
fn not_go(json: &[u8], wanted: &str) -> String {
    let kind = match json.trim_ascii_start().first() {
        Some(b'{') => "object",
        Some(b'[') => "array",
        Some(b'"') => "string",
        Some(b't' | b'f') => "bool",
        _ => "number",
    };
    format!("json: cannot unmarshal {kind} into Go value of type {wanted}")
}

/// The media type without its parameters.
fn media_type(call: &Call) -> &str {
    let content_type = call.content_type().unwrap_or_default();
    content_type.split(';').next().unwrap_or_default().trim()
}

fn is_cbor(call: &Call) -> bool {
    media_type(call) == cbor::APPLY_PATCH
}

fn kind(call: &Call) -> Result<PatchKind, StatusError> {
    match media_type(call) {
        "application/json-patch+json" => Ok(PatchKind::Json),
        "application/merge-patch+json" => Ok(PatchKind::Merge),
        "application/apply-patch+yaml" => Ok(PatchKind::Apply { force: false }),
        cbor::APPLY_PATCH if cbor::is_served() => Ok(PatchKind::Apply { force: false }),
        // List merge keys are known for built-in kinds only.
        "application/strategic-merge-patch+json" if !call.row.custom => Ok(PatchKind::Strategic),
        "application/strategic-merge-patch+json" => Err(unsupported_media_type(&cbor::listed(
            cbor::is_served(),
            "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml",
            cbor::APPLY_PATCH,
        ))),
        _ => Err(StatusError::new(Reason::UnsupportedMediaType, "415: Unsupported Media Type")),
    }
}

/// The same for CBOR, where a duplicate key is always an error.
fn applied_cbor(body: &[u8]) -> Result<Bytes, StatusError> {
    // Upstream has this prefix for any applied format.
    let unreadable =
        |error: String| StatusError::bad_request(format!("error decoding YAML: {error}"));
    let json = cbor::to_json(body).map_err(|error| unreadable(error.to_string()))?;
    if !json.starts_with(b"{") && json != b"null" {
        let kind = cbor_kind(&String::from_utf8_lossy(&json));
        let wanted = "map[string]interface {}";
        return Err(unreadable(format!(
            "cbor: cannot unmarshal {kind} into Go value of type {wanted}"
        )));
    }
    Ok(json.into())
}

/// An applied configuration is YAML, which includes JSON. The note names a duplicate key.
fn applied(body: &Bytes) -> Result<(Bytes, Option<String>), StatusError> {
    let text = body.trim_ascii();
    if text.is_empty() {
        return Ok((Bytes::from_static(b"{}"), None));
    }
    let duplicates = if text.starts_with(b"{") { gojson::check(body).ok() } else { None };
    if let Some(duplicates) = &duplicates
        && duplicates.is_empty()
    {
        return Ok((body.clone(), None));
    }
    let unreadable = |why| StatusError::bad_request(format!("error decoding YAML: {why}"));
    let (tree, note) = decode::yaml(body)
        .map_err(|why| unreadable(format!("error converting YAML to JSON: yaml: {why}")))?;
    if !(tree.is_object() || tree.is_null()) {
        let found = explain::kind(&tree.to_string());
        return Err(unreadable(format!(
            "error unmarshaling JSON: while decoding JSON: json: cannot unmarshal {found} into Go value of type map[string]interface {{}}"
        )));
    }
    let note = note.map(|note| note.lines().last().unwrap_or_default().trim().to_owned());
    Ok((tree.to_string().into(), note))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_patches_have_a_maximum_length() {
        let patch = |count: usize| format!("[{}]", vec!["{}"; count].join(","));
        assert!(check_operations(patch(10_000).as_bytes()).is_ok());
        let error = check_operations(patch(10_001).as_bytes()).expect_err("one too many");
        assert_eq!(
            (error.code, error.message.as_str()),
            (
                413,
                "Request entity too large: The allowed maximum operations in a JSON patch is 10000, got 10001"
            )
        );
        for (body, expected) in [
            (
                "{\"op\":\"add\"}",
                "json: cannot unmarshal object into Go value of type []handlers.jsonPatchOp",
            ),
            ("[1]", "json: cannot unmarshal number into Go value of type handlers.jsonPatchOp"),
        ] {
            let error = check_operations(body.as_bytes()).expect_err("no patch");
            assert_eq!(error.message, format!("error decoding patch: {expected}"));
        }
        assert!(check_operations(b"[{\"op\":\"none\"}]").is_ok(), "told when it is applied");
    }

    #[test]
    fn duplicates_and_broken_texts_have_gos_errors() {
        for (body, note) in [
            ("{\"a\":1}", None),
            ("", None),
            ("a: 1\nb:\n  c: 1\n  c: 2\n", Some("line 4: key \"c\" already set in map")),
            ("{\"a\":1,\n\"a\":2}", Some("line 2: key \"a\" already set in map")),
        ] {
            let (_, got) = applied(&Bytes::from(body)).expect("YAML");
            assert_eq!(got.as_deref(), note, "{body}");
        }
        let error = applied(&Bytes::from("{")).expect_err("broken");
        assert_eq!(
            error.message,
            "error decoding YAML: error converting YAML to JSON: yaml: line 1: did not find expected node content"
        );
        let error = applied(&Bytes::from("- a\n")).expect_err("a list");
        assert_eq!(
            error.message,
            "error decoding YAML: error unmarshaling JSON: while decoding JSON: json: cannot unmarshal array into Go value of type map[string]interface {}"
        );
    }
}
