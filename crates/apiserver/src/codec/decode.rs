//! Request bodies: bytes to an object of the kind of the route.
//!
//! In: a body, its media type, the wanted kind. Out: the object, or upstream's 400, word by word. The
//! request says whether unknown and duplicate fields are refused, cause a warning, or are ignored.
//!
//! Invariant: the result has the wanted kind and version; a missing kind or version means the wanted one.

use std::borrow::Cow;

use machinery::object::{Codec, DecodeError, Decoded, Unstructured};
use machinery::protobuf::Envelope;
use machinery::{Object, StatusError};
use serde::Deserialize;
use serde_json::Value;

use super::cbor;
use super::explain::{Reader, cbor_kind, explain};
use super::gojson;
use super::media_type;
use super::protobuf::{self, Protobuf};
use crate::request::{FieldValidation, RequestContext};
use crate::resource::ResourceTable;
use crate::schemas::SchemaSource;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyFormat {
    Json,
    Yaml,
    Protobuf(Protobuf),
    Cbor,
}

/// The format of a Content-Type; without one it is JSON. `None`: a type that is not accepted.
pub fn body_format(content_type: Option<&str>, protobuf: Option<Protobuf>) -> Option<BodyFormat> {
    let Some(text) = content_type.filter(|text| !text.is_empty()) else {
        return Some(BodyFormat::Json);
    };
    match media_type::parse(text)?.as_str() {
        "application/json" => Some(BodyFormat::Json),
        "application/yaml" => Some(BodyFormat::Yaml),
        protobuf::MEDIA_TYPE => protobuf.map(BodyFormat::Protobuf),
        cbor::MEDIA_TYPE if cbor::is_served() => Some(BodyFormat::Cbor),
        _ => None,
    }
}

/// The kind of a route.
pub struct Wanted<'a> {
    pub group: &'a str,
    pub version: &'a str,
    pub kind: &'a str,
    pub codec: &'a dyn Codec,
    /// All kinds, to distinguish a wrong kind from an unknown one.
    pub table: &'a ResourceTable,
    /// Explains why a value does not fit.
    pub schemas: &'a dyn SchemaSource,
}

impl Wanted<'_> {
    fn api_version(&self) -> String {
        group_version(self.group, self.version)
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct TypeMeta {
    #[serde(rename = "apiVersion")]
    api_version: Option<String>,
    kind: Option<String>,
}

impl TypeMeta {
    /// Empty texts count as missing.
    fn is_partly_empty(&self) -> bool {
        [&self.api_version, &self.kind].iter().any(|text| text.as_deref() == Some(""))
    }
}

/// An object without `apiVersion` and `kind` that are empty.
fn without_empty_types(json: &[u8]) -> Vec<u8> {
    let Ok(Value::Object(mut object)) = serde_json::from_slice(json) else { return json.to_vec() };
    object.retain(|name, value| !matches!(&**name, "apiVersion" | "kind") || value != "");
    Value::Object(object).to_string().into_bytes()
}

/// Decodes a body; warnings of strict decoding go to the context's sink.
pub fn decode(
    body: &[u8],
    format: BodyFormat,
    wanted: &Wanted<'_>,
    ctx: &RequestContext,
) -> Result<Box<dyn Object>, StatusError> {
    let unrecognized = |why: &str| unrecognized(wanted.kind, why, body);
    let (json, mut strict) = as_json(body, format, wanted)?;
    let reader = if format == BodyFormat::Cbor { Reader::Cbor } else { Reader::Json };
    if json.trim_ascii() == b"null" {
        return Ok(wanted.codec.empty());
    }
    // serde would accept an array for a struct.
    let is_object = json.trim_ascii_start().first() == Some(&b'{');
    let types: Option<TypeMeta> = serde_json::from_slice(&json).ok().filter(|_| is_object);
    let types = types.ok_or_else(|| unrecognized(&type_meta_error(reader, &json)))?;
    check_type(&types, wanted, body, (reader, &json))?;
    let json = match types.is_partly_empty() {
        true => Cow::Owned(without_empty_types(&json)),
        false => json,
    };
    let cannot = |why: &str| cannot_be_handled(&types, wanted, why);
    let Decoded { mut object, unknown_fields } = wanted
        .codec
        .decode(&json)
        .or_else(|error| match gojson::without_negative_zeros(&json) {
            Some(other) => wanted.codec.decode(&other),
            None => Err(error),
        })
        .map_err(|error| cannot(&misfit(reader, &json, wanted, &error)))?;
    if strict.is_empty() || format != BodyFormat::Json || ctx.resource.custom {
        strict.extend(unknown_fields.iter().map(|path| unknown(path)));
    } else {
        let all = gojson::in_order(&json, unknown_fields).into_iter();
        let shown = |(path, is_unknown): (String, bool)| match is_unknown {
            true => unknown(&path),
            false => duplicate(&path),
        };
        strict = all.map(shown).collect();
    }
    match ctx.field_validation {
        FieldValidation::Strict if !strict.is_empty() => {
            return Err(cannot(&format!("strict decoding error: {}", strict.join(", "))));
        }
        FieldValidation::Warn => strict.into_iter().for_each(|note| ctx.warn(note)),
        _ => {}
    }
    if let Some(custom) = object.downcast_mut::<Unstructured>() {
        custom.api_version = wanted.api_version();
        custom.kind = wanted.kind.into();
    }
    Ok(object)
}

/// The body as JSON, and its duplicate keys.
fn as_json<'a>(
    body: &'a [u8],
    format: BodyFormat,
    wanted: &Wanted<'_>,
) -> Result<(Cow<'a, [u8]>, Vec<String>), StatusError> {
    let unrecognized = |why: &str| unrecognized(wanted.kind, why, body);
    Ok(match format {
        BodyFormat::Json => {
            let duplicates = gojson::check(body).map_err(|why| {
                unrecognized(&format!("couldn't get version/kind; json parse error: {why}"))
            })?;
            let notes = duplicates.iter().map(|path| duplicate(path)).collect();
            (gojson::as_utf8(body), notes)
        }
        BodyFormat::Yaml => {
            let (value, note) = yaml(body).map_err(|why| unrecognized(&format!("yaml: {why}")))?;
            (value.to_string().into_bytes().into(), note.into_iter().collect())
        }
        BodyFormat::Protobuf(protobuf) => (from_protobuf(body, protobuf, wanted)?.into(), vec![]),
        BodyFormat::Cbor => (from_cbor(body, wanted)?.into(), vec![]),
    })
}

fn unknown(path: &str) -> String {
    format!("unknown field {path:?}")
}

fn duplicate(path: &str) -> String {
    format!("duplicate field {path:?}")
}

fn misfit(reader: Reader, json: &[u8], wanted: &Wanted<'_>, error: &DecodeError) -> String {
    let definition = wanted.schemas.definition_name(wanted.group, wanted.version, wanted.kind);
    let explained = definition.and_then(|name| explain(reader, json, &name, wanted.schemas));
    explained.unwrap_or_else(|| match plain(error) {
        why if reader == Reader::Cbor && why.starts_with("illegal base64") => {
            format!("cbor: failed to decode base64 from byte string: {why}")
        }
        why => why,
    })
}

/// Why the JSON after a patch is not an object of the kind of `api_version`.
pub(crate) fn patched_misfit(
    reader: Reader,
    json: &[u8],
    (api_version, kind): (&str, &str),
    schemas: &dyn SchemaSource,
    error: &DecodeError,
) -> String {
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let definition = schemas.definition_name(group, version, kind);
    let explained = definition.and_then(|name| explain(reader, json, &name, schemas));
    explained.unwrap_or_else(|| match plain(error) {
        why if reader == Reader::Tree && why.starts_with("illegal base64") => {
            format!("error decoding from json: {why}")
        }
        why => why,
    })
}

/// Why JSON is not of a type that all kinds share.
pub(crate) fn shared_misfit(
    json: &[u8],
    definition: &str,
    schemas: &dyn SchemaSource,
    error: &serde_json::Error,
) -> String {
    explain(Reader::Json, json, definition, schemas).unwrap_or_else(|| error.to_string())
}

/// The decoder's own message.
fn plain(error: &DecodeError) -> String {
    base64_error(&error.to_string()).unwrap_or_else(|| error.to_string())
}

/// The error of invalid base64, in the words of Go's decoder.
fn base64_error(why: &str) -> Option<String> {
    let (_, rest) = why.split_once("Invalid symbol ").or(why.split_once("Invalid last symbol "))?;
    let (_, at) = rest.split_once(", offset ")?;
    let end = at.find(|c: char| !c.is_ascii_digit()).unwrap_or(at.len());
    Some(format!("illegal base64 data at input byte {}", &at[..end]))
}

/// A protobuf body as the JSON that the client would have sent.
fn from_protobuf(
    body: &[u8],
    protobuf: Protobuf,
    wanted: &Wanted<'_>,
) -> Result<Vec<u8>, StatusError> {
    let envelope = Envelope::open(body)
        .map_err(|error| unrecognized(wanted.kind, &error.to_string(), body))?;
    protobuf.body(&envelope, &wanted.api_version(), wanted.kind).map_err(|error| {
        let types = TypeMeta { api_version: Some(envelope.api_version), kind: Some(envelope.kind) };
        cannot_be_handled(&types, wanted, &error.to_string())
    })
}

/// A CBOR body as JSON. The kind of invalid CBOR is unknown.
fn from_cbor(body: &[u8], wanted: &Wanted<'_>) -> Result<Vec<u8>, StatusError> {
    cbor::to_json(body).map_err(|error| match error {
        cbor::Error::Malformed(why) => {
            let why = format!("unable to determine group/version/kind: {why}");
            unrecognized(wanted.kind, &why, body)
        }
        cbor::Error::Inadmissible(why) => {
            let types = TypeMeta { api_version: Some(wanted.api_version()), kind: None };
            cannot_be_handled(&types, wanted, &why)
        }
    })
}

/// Checks the kind and version.
fn check_type(
    types: &TypeMeta,
    wanted: &Wanted<'_>,
    body: &[u8],
    (reader, json): (Reader, &[u8]),
) -> Result<(), StatusError> {
    let wanted_version = wanted.api_version();
    let api_version = given(&types.api_version).unwrap_or(&wanted_version);
    let kind = given(&types.kind).unwrap_or(wanted.kind);
    if api_version == wanted_version && kind == wanted.kind {
        return Ok(());
    }
    if api_version.matches('/').count() > 1 {
        let why = format!("unexpected GroupVersion string: {api_version}");
        return Err(unrecognized(wanted.kind, &why, body));
    }
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    // Upstream first decodes into the kind that the body names.
    let definition = wanted.schemas.definition_name(group, version, kind);
    if is_registered(wanted.table, group, version, kind)
        && let Some(why) = definition.and_then(|name| explain(reader, json, &name, wanted.schemas))
    {
        return Err(cannot_be_handled(types, wanted, &why));
    }
    let of = (wanted.group, wanted.kind);
    Err(match type_misfit(wanted.table, api_version, kind, of) {
        Some(why) => cannot_be_handled(types, wanted, &why),
        None => StatusError::bad_request(format!(
            "the API version in the data ({api_version}) does not match the expected API version ({wanted_version})"
        )),
    })
}

/// Why an object of one kind is not of another (group and kind). `None` if it is, in some version.
pub fn type_misfit(
    table: &ResourceTable,
    api_version: &str,
    kind: &str,
    wanted: (&str, &str),
) -> Option<String> {
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let (wanted_group, wanted_kind) = wanted;
    if !is_registered(table, group, version, kind) {
        return Some(format!(
            "no kind {kind:?} is registered for version {api_version:?} in scheme {:?}",
            scheme(wanted_group)
        ));
    }
    if group == wanted_group && kind == wanted_kind {
        return None;
    }
    let package = package(wanted_group);
    Some(format!("converting ({version}.{kind}) to ({package}.{wanted_kind}): unknown conversion"))
}

/// The package of upstream's internal types of a group, which errors show.
pub(super) fn package(group: &str) -> &str {
    match group {
        "" | "events.k8s.io" => "core",
        group => group.split('.').next().unwrap_or_default(),
    }
}

/// The name of upstream's scheme of a group, which errors show.
fn scheme(group: &str) -> &'static str {
    match group {
        "apiextensions.k8s.io" => "pkg/apiserver/apiserver.go:55",
        "apiregistration.k8s.io" => "pkg/apiserver/scheme/scheme.go:28",
        _ => "pkg/api/legacyscheme/scheme.go:30",
    }
}

fn given(text: &Option<String>) -> Option<&str> {
    text.as_deref().filter(|text| !text.is_empty())
}

fn is_registered(table: &ResourceTable, group: &str, version: &str, kind: &str) -> bool {
    let single = kind.strip_suffix("List").unwrap_or(kind);
    let generic = group.is_empty() && version == "v1" && matches!(kind, "List" | "Status");
    generic
        || table
            .by_kind(group, version, kind)
            .or_else(|| table.by_kind(group, version, single))
            .is_some()
}

/// `Pod in version "v1" cannot be handled as a Pod: …`
fn cannot_be_handled(types: &TypeMeta, wanted: &Wanted<'_>, why: &str) -> StatusError {
    let kind = given(&types.kind).unwrap_or(wanted.kind);
    let api_version = given(&types.api_version);
    let version =
        api_version.map_or(wanted.version, |text| text.rsplit('/').next().unwrap_or(text));
    StatusError::bad_request(format!(
        "{kind} in version {version:?} cannot be handled as a {}: {why}",
        wanted.kind
    ))
}

/// `the object provided is unrecognized (must be of type Pod): … (the body's beginning)`
fn unrecognized(kind: &str, why: &str, body: &[u8]) -> StatusError {
    StatusError::bad_request(format!(
        "the object provided is unrecognized (must be of type {kind}): {why} ({})",
        summary(body)
    ))
}

/// Upstream: `summarizeData` with 30 bytes.
fn summary(body: &[u8]) -> String {
    const LENGTH: usize = 30;
    let cut = &body[..body.len().min(LENGTH)];
    let shown = match body.first() {
        None => return "<empty>".into(),
        Some(b'{') => String::from_utf8_lossy(cut).into_owned(),
        Some(_) => cut.iter().map(|byte| format!("{byte:02x}")).collect(),
    };
    if body.len() > LENGTH { format!("{shown} ...") } else { shown }
}

/// Why kind and version cannot be read from JSON that is not an object's.
pub(crate) fn type_meta_error(reader: Reader, json: &[u8]) -> String {
    if reader == Reader::Cbor {
        return cbor_type_meta_error(json);
    }
    const STRUCT: &str = r#"struct { APIVersion string "json:\"apiVersion,omitempty\""; Kind string "json:\"kind,omitempty\"" }"#;
    let what = match serde_json::from_slice(json) {
        Ok(Value::Object(fields)) => {
            let wrong = ["apiVersion", "kind"].iter().find_map(|name| {
                fields.get(*name).filter(|value| !value.is_string()).map(|value| (name, value))
            });
            match wrong {
                Some((name, value)) => {
                    format!("{} into Go struct field .{name} of type string", go_type(value))
                }
                None => format!("object into Go value of type {STRUCT}"),
            }
        }
        Ok(other) => format!("{} into Go value of type {STRUCT}", go_type(&other)),
        Err(error) => return format!("couldn't get version/kind; json parse error: {error}"),
    };
    format!("couldn't get version/kind; json parse error: json: cannot unmarshal {what}")
}

/// The same for CBOR.
fn cbor_type_meta_error(json: &[u8]) -> String {
    const STRUCT: &str = "v1.TypeMeta";
    let value: Value = serde_json::from_slice(json).unwrap_or_default();
    let is_wrong = |name: &&str| value.get(*name).is_some_and(|value| !value.is_string());
    let what = match ["apiVersion", "kind"].into_iter().find(is_wrong) {
        Some(name) => {
            let kind = cbor_kind(&value[name].to_string());
            format!("{kind} into Go struct field {STRUCT}.{name} of type string")
        }
        None => format!("{} into Go value of type {STRUCT}", cbor_kind(&value.to_string())),
    };
    let why = if value.is_array() {
        " (cannot decode CBOR array to struct without toarray option)"
    } else {
        ""
    };
    format!("unable to determine group/version/kind: cbor: cannot unmarshal {what}{why}")
}

fn go_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Enough for the deepest document that the parser accepts, in an unoptimised build.
const YAML_STACK: usize = 16 << 20;

/// YAML 1.1, as clients write it: octal file modes, `yes` and `no`. The note names a duplicate key; the last
/// one wins.
pub fn yaml(body: &[u8]) -> Result<(Value, Option<String>), String> {
    use serde_saphyr::DuplicateKeyPolicy;
    let read = |policy: DuplicateKeyPolicy| -> Result<Value, serde_saphyr::Error> {
        let options = serde_saphyr::options! {
            duplicate_keys: policy,
            legacy_octal_numbers: true,
            with_snippet: false,
            // The same depth as for JSON.
            budget: serde_saphyr::budget! { max_depth: 127 },
        };
        // Only the first document counts.
        let parse = || serde_saphyr::from_slice_multiple_with_options::<Value>(body, options);
        // The parser recurses with large stack frames: the deepest allowed document would overflow a
        // worker's stack.
        let all: Vec<Value> = stacker::maybe_grow(YAML_STACK, YAML_STACK, parse)?;
        Ok(all.into_iter().next().unwrap_or_default())
    };
    if body.trim_ascii().is_empty() {
        return Ok((Value::Null, None));
    }
    if body.starts_with(b"%YAML ") && !body.starts_with(b"%YAML 1.1\n") {
        return Err("found incompatible YAML document".into());
    }
    match read(DuplicateKeyPolicy::Error) {
        Ok(value) => Ok((value, None)),
        Err(error) => {
            let value = read(DuplicateKeyPolicy::LastWins)
                .map_err(|error| go_yaml_error(&error.to_string(), body))?;
            let note = duplicate_note(body, &error.to_string());
            Ok((value, Some(format!("yaml: unmarshal errors:\n  {note}"))))
        }
    }
}

/// A scanner's error in Go's words: the line comes first, unless it is line 1; no context.
fn go_yaml_error(error: &str, body: &[u8]) -> String {
    if let Some(why) = unclosed(body) {
        return why;
    }
    if error.contains("unknown anchor")
        && let Some(name) = unknown_anchor(body)
    {
        return format!("unknown anchor '{name}' referenced");
    }
    let (what, place) = error.rsplit_once(" at line ").unwrap_or((error, ""));
    let digits = place.find(|c: char| !c.is_ascii_digit()).unwrap_or(place.len());
    let mut line: usize = place[..digits].parse().unwrap_or_default();
    let what = match what.split_once(", ") {
        Some((context, problem)) if context.starts_with("while ") => problem,
        _ => what,
    };
    let what = if what.starts_with("found a tab") {
        // Go names the line of the tab, not the beginning of the text before it.
        let is_tabbed =
            |text: &[u8]| text.trim_ascii_start().len() < text.len() && text.contains(&b'\t');
        let at = body.split(|byte| *byte == b'\n').position(is_tabbed);
        line = at.map_or(line, |at| at + 1);
        "found a tab character that violates indentation"
    } else {
        what
    };
    if line > 1 { format!("line {line}: {what}") } else { what.to_owned() }
}

/// The error for a text that ends inside a bracket.
fn unclosed(body: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(body).ok()?.trim_end();
    let mut open = vec![];
    for c in text.chars() {
        match c {
            '{' | '[' => open.push(c),
            '}' | ']' => drop(open.pop()),
            _ => {}
        }
    }
    let innermost = open.pop()?;
    let expected = match (text.chars().next_back()?, innermost) {
        ('{' | '[' | ',' | ':', _) => "node content",
        (_, '[') => "',' or ']'",
        _ => "',' or '}'",
    };
    let line = text.lines().count();
    Some(format!("line {line}: did not find expected {expected}"))
}

/// The first alias whose anchor the text does not have.
fn unknown_anchor(body: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(body).ok()?;
    text.match_indices('*').find_map(|(at, _)| {
        let rest = &text[at + 1..];
        let end = rest.find(|c: char| !c.is_alphanumeric()).unwrap_or(rest.len());
        let name = &rest[..end];
        (!name.is_empty() && !text.contains(&format!("&{name}"))).then_some(name)
    })
}

/// `line 8: key "dup" already set in map`: the position of the first duplicate key.
fn duplicate_note(body: &[u8], note: &str) -> String {
    let number = |word: &str| {
        let digits = note.split(word).nth(1)?.trim_start();
        let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
        digits[..end].parse::<usize>().ok()
    };
    let (Some(line), Some(column)) = (number("line "), number("column ")) else {
        return note.lines().last().unwrap_or(note).trim().to_owned();
    };
    let text = String::from_utf8_lossy(body);
    let rest: String = text
        .lines()
        .nth(line.saturating_sub(1))
        .unwrap_or_default()
        .chars()
        .skip(column.saturating_sub(1))
        .collect();
    let key = match rest.chars().next() {
        Some(quote @ ('"' | '\'')) => rest[1..].split(quote).next().unwrap_or_default(),
        _ => rest.split(':').next().unwrap_or_default().trim(),
    };
    format!("line {line}: key {key:?} already set in map")
}

/// Whether it is JSON already. (JSON is valid YAML, but has a faster parser.)
pub fn is_json(body: &[u8]) -> bool {
    body.trim_ascii_start().first() == Some(&b'{') && gojson::check(body).is_ok()
}

pub fn group_version(group: &str, version: &str) -> String {
    if group.is_empty() { version.into() } else { format!("{group}/{version}") }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use k8s_openapi::api::core::v1::ConfigMap;
    use machinery::object::Typed;

    use super::*;
    use crate::request::UserInfo;
    use crate::testing;

    fn attempt(
        body: &str,
        format: BodyFormat,
        validation: FieldValidation,
    ) -> Result<(Box<dyn Object>, Vec<String>), String> {
        let table = testing::table();
        let row = Arc::clone(table.get("", "v1", "configmaps").expect("a row"));
        let mut ctx = RequestContext::new(UserInfo::apiserver(), row, "");
        ctx.field_validation = validation;
        let codec = Typed::<ConfigMap>::new();
        let wanted = Wanted {
            group: "",
            version: "v1",
            kind: "ConfigMap",
            codec: &codec,
            table: &table,
            schemas: &crate::schemas::NoSchemas,
        };
        let object = decode(body.as_bytes(), format, &wanted, &ctx)
            .map_err(|error| error.message.clone())?;
        Ok((object, ctx.take_warnings()))
    }

    #[test]
    fn refuses_in_upstreams_words() {
        for (body, expected) in [
            (
                "",
                "the object provided is unrecognized (must be of type ConfigMap): couldn't get version/kind; json parse error: unexpected end of JSON input (<empty>)",
            ),
            (
                "[]",
                r#"the object provided is unrecognized (must be of type ConfigMap): couldn't get version/kind; json parse error: json: cannot unmarshal array into Go value of type struct { APIVersion string "json:\"apiVersion,omitempty\""; Kind string "json:\"kind,omitempty\"" } (5b5d)"#,
            ),
            (
                r#"{"apiVersion":1,"kind":"ConfigMap"}"#,
                r#"the object provided is unrecognized (must be of type ConfigMap): couldn't get version/kind; json parse error: json: cannot unmarshal number into Go struct field .apiVersion of type string ({"apiVersion":1,"kind":"Config ...)"#,
            ),
            (
                r#"{"apiVersion":"a/b/c","kind":"ConfigMap","metadata":{"name":"t"}}"#,
                r#"the object provided is unrecognized (must be of type ConfigMap): unexpected GroupVersion string: a/b/c ({"apiVersion":"a/b/c","kind":" ...)"#,
            ),
            (
                r#"{"apiVersion":"v1","kind":"List","items":[]}"#,
                r#"List in version "v1" cannot be handled as a ConfigMap: converting (v1.List) to (core.ConfigMap): unknown conversion"#,
            ),
            (
                r#"{"apiVersion":"v1","kind":"Zebra"}"#,
                r#"Zebra in version "v1" cannot be handled as a ConfigMap: no kind "Zebra" is registered for version "v1" in scheme "pkg/api/legacyscheme/scheme.go:30""#,
            ),
            (
                r#"{"apiVersion":"bogus/v9","kind":"ConfigMap"}"#,
                r#"ConfigMap in version "v9" cannot be handled as a ConfigMap: no kind "ConfigMap" is registered for version "bogus/v9" in scheme "pkg/api/legacyscheme/scheme.go:30""#,
            ),
            (
                r#"{"zz":1,"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a","name":"b"}}"#,
                r#"ConfigMap in version "v1" cannot be handled as a ConfigMap: strict decoding error: unknown field "zz", duplicate field "metadata.name""#,
            ),
            (
                r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a","name":"b"},"zz":1}"#,
                r#"ConfigMap in version "v1" cannot be handled as a ConfigMap: strict decoding error: duplicate field "metadata.name", unknown field "zz""#,
            ),
        ] {
            let got = attempt(body, BodyFormat::Json, FieldValidation::Strict);
            assert_eq!(got.err().as_deref(), Some(expected), "{body}");
        }
    }

    #[test]
    fn deep_yaml_fits_on_the_stack() {
        for (depth, is_read) in [(60, true), (5_000, false)] {
            let text = format!("a: {}{}", "[".repeat(depth), "]".repeat(depth));
            assert_eq!(yaml(text.as_bytes()).is_ok(), is_read, "{depth}");
        }
    }

    #[test]
    fn yaml_errors_have_gos_words() {
        for (body, expected) in [
            ("a: b: c", "mapping values are not allowed in this context"),
            ("a:\n  b: c: d", "line 2: mapping values are not allowed in this context"),
            (
                "apiVersion: v1\n\tkind: Pod",
                "line 2: found a tab character that violates indentation",
            ),
        ] {
            assert_eq!(yaml(body.as_bytes()).expect_err("bad"), expected, "{body}");
        }
    }

    #[test]
    fn a_missing_kind_means_the_wanted_one() {
        for body in [r#"{"metadata":{"name":"t"}}"#, "null"] {
            assert!(attempt(body, BodyFormat::Json, FieldValidation::Strict).is_ok(), "{body}");
        }
        let (object, warnings) = attempt(
            "kind: ConfigMap\nmetadata: {name: t}\nzz: 0755\n",
            BodyFormat::Yaml,
            FieldValidation::Warn,
        )
        .expect("decodes");
        assert_eq!((object.name(), warnings), ("t", vec!["unknown field \"zz\"".to_owned()]));
    }
}
