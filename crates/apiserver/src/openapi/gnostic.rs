//! The OpenAPI v2 document as protobuf for Go clients: gnostic's `openapi.v2.Document`.
//!
//! In: the document as JSON. Out: its bytes. A table per message maps JSON keys to fields; maps and
//! alternatives, which have no key in protobuf, have a [`Form`].
//! Upstream: `github.com/google/gnostic-models/openapiv2`.

use serde_json::Value;

/// How a JSON value is encoded.
#[derive(Clone, Copy)]
enum Form {
    Text,
    Flag,
    Whole,
    Number,
    Texts,
    /// Any JSON, as text.
    Any,
    Anys,
    Message(&'static [Field]),
    Messages(&'static [Field]),
    /// A message with one field, which has a pair of name and value per member.
    Named(u32, &'static Form),
    /// A message around the value, in the field with this number.
    In(u32, &'static Form),
    /// A boolean or a schema.
    Additional,
    /// A parameter or a reference to one.
    Parameters,
    /// Security schemes: only API keys are supported.
    Securities,
}

/// Key, number, form.
type Field = (&'static str, u32, Form);

/// Keys with this prefix go to the field `vendor_extension`.
const EXTENSIONS: &str = "x-";

static DOCUMENT: [Field; 7] = [
    ("swagger", 1, Form::Text),
    ("info", 2, Form::Message(&INFO)),
    ("paths", 8, Form::Named(2, &A_PATH_ITEM)),
    ("definitions", 9, Form::Named(1, &A_SCHEMA)),
    ("security", 12, Form::Securities),
    ("securityDefinitions", 13, Form::Named(1, &AN_API_KEY)),
    (EXTENSIONS, 16, Form::Any),
];

static INFO: [Field; 3] =
    [("title", 1, Form::Text), ("version", 2, Form::Text), ("description", 3, Form::Text)];

static API_KEY: [Field; 4] = [
    ("type", 1, Form::Text),
    ("name", 2, Form::Text),
    ("in", 3, Form::Text),
    ("description", 4, Form::Text),
];

static PATH_ITEM: [Field; 9] = [
    ("get", 2, Form::Message(&OPERATION)),
    ("put", 3, Form::Message(&OPERATION)),
    ("post", 4, Form::Message(&OPERATION)),
    ("delete", 5, Form::Message(&OPERATION)),
    ("options", 6, Form::Message(&OPERATION)),
    ("head", 7, Form::Message(&OPERATION)),
    ("patch", 8, Form::Message(&OPERATION)),
    ("parameters", 9, Form::Parameters),
    (EXTENSIONS, 10, Form::Any),
];

static OPERATION: [Field; 10] = [
    ("tags", 1, Form::Texts),
    ("description", 3, Form::Text),
    ("operationId", 5, Form::Text),
    ("produces", 6, Form::Texts),
    ("consumes", 7, Form::Texts),
    ("parameters", 8, Form::Parameters),
    ("responses", 9, Form::Named(1, &A_RESPONSE)),
    ("schemes", 10, Form::Texts),
    ("deprecated", 11, Form::Flag),
    (EXTENSIONS, 13, Form::Any),
];

static RESPONSE: [Field; 2] =
    [("description", 1, Form::Text), ("schema", 2, Form::In(1, &A_SCHEMA))];

static BODY_PARAMETER: [Field; 5] = [
    ("description", 1, Form::Text),
    ("name", 2, Form::Text),
    ("in", 3, Form::Text),
    ("required", 4, Form::Flag),
    ("schema", 5, Form::Message(&SCHEMA)),
];

static QUERY_PARAMETER: [Field; 7] = [
    ("required", 1, Form::Flag),
    ("in", 2, Form::Text),
    ("description", 3, Form::Text),
    ("name", 4, Form::Text),
    ("type", 6, Form::Text),
    ("format", 7, Form::Text),
    ("uniqueItems", 20, Form::Flag),
];

static PATH_PARAMETER: [Field; 7] = [
    ("required", 1, Form::Flag),
    ("in", 2, Form::Text),
    ("description", 3, Form::Text),
    ("name", 4, Form::Text),
    ("type", 5, Form::Text),
    ("format", 6, Form::Text),
    ("uniqueItems", 19, Form::Flag),
];

static SCHEMA: [Field; 27] = [
    ("$ref", 1, Form::Text),
    ("format", 2, Form::Text),
    ("title", 3, Form::Text),
    ("description", 4, Form::Text),
    ("default", 5, Form::Any),
    ("multipleOf", 6, Form::Number),
    ("maximum", 7, Form::Number),
    ("exclusiveMaximum", 8, Form::Flag),
    ("minimum", 9, Form::Number),
    ("exclusiveMinimum", 10, Form::Flag),
    ("maxLength", 11, Form::Whole),
    ("minLength", 12, Form::Whole),
    ("pattern", 13, Form::Text),
    ("maxItems", 14, Form::Whole),
    ("minItems", 15, Form::Whole),
    ("uniqueItems", 16, Form::Flag),
    ("maxProperties", 17, Form::Whole),
    ("minProperties", 18, Form::Whole),
    ("required", 19, Form::Texts),
    ("enum", 20, Form::Anys),
    ("additionalProperties", 21, Form::Additional),
    ("type", 22, Form::In(1, &Form::Text)),
    ("items", 23, Form::In(1, &A_SCHEMA)),
    ("allOf", 24, Form::Messages(&SCHEMA)),
    ("properties", 25, Form::Named(1, &A_SCHEMA)),
    ("example", 30, Form::Any),
    (EXTENSIONS, 31, Form::Any),
];

// Forms of messages, and of nested messages: static, because schemas contain schemas.
static A_SCHEMA: Form = Form::Message(&SCHEMA);
static IN_SCHEMA: Form = Form::In(1, &A_SCHEMA);
static A_PATH_ITEM: Form = Form::Message(&PATH_ITEM);
static RESPONSE_ITSELF: Form = Form::Message(&RESPONSE);
static A_RESPONSE: Form = Form::In(1, &RESPONSE_ITSELF);
static KEY_ITSELF: Form = Form::Message(&API_KEY);
static AN_API_KEY: Form = Form::In(2, &KEY_ITSELF);
static REFERENCE: [Field; 1] = [("$ref", 1, Form::Text)];
static A_REFERENCE: Form = Form::Message(&REFERENCE);
static A_BODY: Form = Form::Message(&BODY_PARAMETER);
static IN_BODY: Form = Form::In(1, &A_BODY);
static A_PATH: Form = Form::Message(&PATH_PARAMETER);
static OTHER_PATH: Form = Form::In(4, &A_PATH);
static IN_PATH: Form = Form::In(2, &OTHER_PATH);
static A_QUERY: Form = Form::Message(&QUERY_PARAMETER);
static OTHER_QUERY: Form = Form::In(3, &A_QUERY);
static IN_QUERY: Form = Form::In(2, &OTHER_QUERY);

pub fn document(json: &Value) -> Vec<u8> {
    message(json, &DOCUMENT)
}

fn message(json: &Value, fields: &[Field]) -> Vec<u8> {
    let mut out = vec![];
    let Some(members) = json.as_object() else { return out };
    for (key, number, form) in fields {
        if *key == EXTENSIONS {
            for (name, value) in members.iter().filter(|(name, _)| name.starts_with(EXTENSIONS)) {
                pair(&mut out, *number, name, value, form);
            }
        } else if let Some(value) = members.get(*key) {
            write(&mut out, *number, value, form);
        }
    }
    out
}

fn write(out: &mut Vec<u8>, number: u32, value: &Value, form: &Form) {
    let items = || value.as_array().into_iter().flatten();
    match form {
        Form::Text => bytes(out, number, value.as_str().unwrap_or_default().as_bytes()),
        Form::Flag => whole(out, number, u64::from(value.as_bool().unwrap_or_default())),
        Form::Whole => whole(out, number, value.as_u64().unwrap_or_default()),
        Form::Number => {
            const FIXED: u32 = 1;
            varint(out, u64::from(number << 3 | FIXED));
            out.extend(value.as_f64().unwrap_or_default().to_le_bytes());
        }
        Form::Texts => items().for_each(|item| write(out, number, item, &Form::Text)),
        Form::Any => bytes(out, number, &any(value)),
        Form::Anys => items().for_each(|item| write(out, number, item, &Form::Any)),
        Form::Message(fields) => bytes(out, number, &message(value, fields)),
        Form::Messages(fields) => {
            items().for_each(|item| write(out, number, item, &Form::Message(fields)));
        }
        Form::Named(inner, form) => {
            let mut named = vec![];
            for (name, value) in value.as_object().into_iter().flatten() {
                pair(&mut named, *inner, name, value, form);
            }
            bytes(out, number, &named);
        }
        Form::In(inner, form) => {
            let mut wrapped = vec![];
            write(&mut wrapped, *inner, value, form);
            bytes(out, number, &wrapped);
        }
        Form::Additional => match value.as_bool() {
            Some(_) => write(out, number, value, &Form::In(2, &Form::Flag)),
            None => write(out, number, value, &IN_SCHEMA),
        },
        Form::Parameters => items().for_each(|item| bytes(out, number, &parameter(item))),
        Form::Securities => items().for_each(|item| {
            // One member per scheme: its name, and the scopes.
            write(out, number, item, &Form::Named(1, &Form::In(1, &Form::Texts)));
        }),
    }
}

/// `NamedX`: a name and its value.
fn pair(out: &mut Vec<u8>, number: u32, name: &str, value: &Value, form: &Form) {
    let mut named = vec![];
    bytes(&mut named, 1, name.as_bytes());
    write(&mut named, 2, value, form);
    bytes(out, number, &named);
}

/// `Any` with its text: JSON is valid YAML.
fn any(value: &Value) -> Vec<u8> {
    let mut out = vec![];
    bytes(&mut out, 2, format!("{value}\n").as_bytes());
    out
}

/// `ParametersItem` around a parameter.
fn parameter(item: &Value) -> Vec<u8> {
    let mut out = vec![];
    match item["in"].as_str().unwrap_or_default() {
        _ if item.get("$ref").is_some() => write(&mut out, 2, item, &A_REFERENCE),
        "body" => write(&mut out, 1, item, &IN_BODY),
        "path" => write(&mut out, 1, item, &IN_PATH),
        _ => write(&mut out, 1, item, &IN_QUERY),
    }
    out
}

fn bytes(out: &mut Vec<u8>, number: u32, content: &[u8]) {
    const LENGTH_DELIMITED: u32 = 2;
    varint(out, u64::from(number << 3 | LENGTH_DELIMITED));
    varint(out, content.len() as u64);
    out.extend_from_slice(content);
}

fn whole(out: &mut Vec<u8>, number: u32, value: u64) {
    varint(out, u64::from(number << 3));
    varint(out, value);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn documents_become_messages() {
        let check = |json: Value, expected: &[u8]| {
            assert_eq!(document(&json), expected, "{json}");
        };
        check(json!({"swagger": "2.0"}), b"\x0a\x032.0");
        check(json!({"info": {"title": "K", "version": "v"}}), b"\x12\x06\x0a\x01K\x12\x01v");
        // Definitions { NamedSchema { name, Schema { TypeItem { "object" } } } }
        check(
            json!({"definitions": {"A": {"type": "object"}}}),
            b"\x4a\x12\x0a\x10\x0a\x01A\x12\x0b\xb2\x01\x08\x0a\x06object",
        );
        // Paths, a path without operations, an extension of it.
        check(
            json!({"paths": {"/a": {"x-k": 1}}}),
            b"\x42\x15\x12\x13\x0a\x02/a\x12\x0d\x52\x0b\x0a\x03x-k\x12\x04\x12\x021\n",
        );
        // A parameter in the query: Parameter { NonBodyParameter { QueryParameterSubSchema } }
        let item = json!({"in": "query", "name": "a"});
        assert_eq!(parameter(&item), b"\x0a\x0e\x12\x0c\x1a\x0a\x12\x05query\x22\x01a");
        let item = json!({"$ref": "#/parameters/p"});
        assert_eq!(parameter(&item), b"\x12\x10\x0a\x0e#/parameters/p");
    }
}
