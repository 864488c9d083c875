//! JSON trees to messages, byte by byte as Go's generated code writes them: fields by number, maps
//! by key, and fields that are no pointers always.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Map, Value};

use super::descriptors::{Descriptors, Field, Kind, MessageId, Shape};
use super::envelope;
use super::wire::{FIXED64, put_bytes, put_key, put_nested, put_number};
use super::{Error, MAX_DEPTH, scalar};

impl Descriptors {
    /// Appends the message of a tree.
    pub fn encode(&self, message: MessageId, tree: &Value, out: &mut Vec<u8>) -> Result<(), Error> {
        self.write(message, tree, 0, out)
    }

    fn write(
        &self,
        message: MessageId,
        tree: &Value,
        depth: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::TooDeep);
        }
        for field in self.fields(message) {
            let value = tree.get(field.name).filter(|value| !value.is_null());
            match (field.shape, field.kind, value) {
                (Shape::Inline, Kind::Message(message), _) => {
                    put_nested(out, field.number, |out| self.write(message, tree, depth + 1, out))?;
                }
                (Shape::Single | Shape::Inline, _, Some(value)) => {
                    self.write_value(field, field.number, value, depth, out)?;
                }
                (Shape::Single | Shape::Inline, _, None) => self.write_absent(field, depth, out)?,
                (Shape::List, _, Some(Value::Array(list))) => {
                    for element in list {
                        self.write_value(field, field.number, element, depth, out)?;
                    }
                }
                (Shape::Map, _, Some(Value::Object(map))) => {
                    self.write_map(field, map, depth, out)?
                }
                (Shape::List | Shape::Map, _, None) => {}
                (Shape::List | Shape::Map, _, Some(value)) => return Err(unexpected(field, value)),
            }
        }
        Ok(())
    }

    fn write_map(
        &self,
        field: &Field,
        map: &Map<String, Value>,
        depth: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let mut entries: Vec<_> = map.iter().collect();
        entries.sort_unstable_by_key(|(key, _)| *key);
        for (key, value) in entries {
            put_nested(out, field.number, |out| {
                put_bytes(out, 1, key.as_bytes());
                self.write_value(field, 2, value, depth, out)
            })?;
        }
        Ok(())
    }

    /// Go writes a field that is no pointer even if it has no value.
    fn write_absent(&self, field: &Field, depth: usize, out: &mut Vec<u8>) -> Result<(), Error> {
        if field.pointer {
            return Ok(());
        }
        let empty = match field.kind {
            Kind::String => "".into(),
            Kind::Bool => false.into(),
            Kind::Int32 | Kind::Int64 | Kind::Double | Kind::IntOrString => 0.into(),
            Kind::Duration => "0s".into(),
            Kind::Quantity => "0".into(),
            Kind::Message(_) => Value::Object(Map::new()),
            Kind::Time | Kind::MicroTime | Kind::Raw => Value::Null,
            // Slices are never written when they are nil.
            Kind::Bytes | Kind::Strings => return Ok(()),
            Kind::OrList(_) | Kind::OrBool(_) | Kind::OrStrings(_) => return Ok(()),
        };
        self.write_value(field, field.number, &empty, depth, out)
    }

    fn write_value(
        &self,
        field: &Field,
        number: u32,
        value: &Value,
        depth: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let wrong = |why: String| Error::Value { field: field.name, why };
        match (field.kind, value) {
            (Kind::String, Value::String(text)) => put_bytes(out, number, text.as_bytes()),
            (Kind::Bytes, Value::String(text)) => {
                let bytes = BASE64.decode(text).map_err(|error| wrong(error.to_string()))?;
                put_bytes(out, number, &bytes);
            }
            (Kind::Bool, Value::Bool(value)) => put_number(out, number, i64::from(*value)),
            (Kind::Int32 | Kind::Int64, Value::Number(value)) => {
                let value = value.as_i64().or_else(|| whole(value.as_f64()?));
                let value = value.ok_or_else(|| wrong("no whole number".into()))?;
                put_number(out, number, value);
            }
            (Kind::Double, Value::Number(value)) => {
                put_key(out, number, FIXED64);
                let value = value.as_f64().unwrap_or_default();
                out.extend_from_slice(&value.to_le_bytes());
            }
            // Lists of structs may have `null`, which Go takes for an empty one.
            (Kind::Message(message), Value::Object(_) | Value::Null) => {
                put_nested(out, number, |out| self.write(message, value, depth + 1, out))?;
            }
            (Kind::Raw, value) => put_nested(out, number, |out| {
                if !value.is_null() {
                    put_bytes(out, 1, value.to_string().as_bytes());
                }
                Ok(())
            })?,
            (Kind::Strings, Value::Array(list)) => {
                put_nested(out, number, |out| write_strings(field, 1, list, out))?;
            }
            (Kind::OrList(message), Value::Array(list)) => put_nested(out, number, |out| {
                list.iter().try_for_each(|tree| {
                    put_nested(out, 2, |out| self.write(message, tree, depth + 1, out))
                })
            })?,
            (Kind::OrBool(_), Value::Bool(allows)) => put_nested(out, number, |out| {
                put_number(out, 1, i64::from(*allows));
                Ok(())
            })?,
            (Kind::OrBool(message), Value::Object(_)) => put_nested(out, number, |out| {
                put_number(out, 1, 1);
                put_nested(out, 2, |out| self.write(message, value, depth + 1, out))
            })?,
            (Kind::OrStrings(_), Value::Array(list)) => {
                put_nested(out, number, |out| write_strings(field, 2, list, out))?;
            }
            (Kind::OrList(message) | Kind::OrStrings(message), Value::Object(_)) => {
                put_nested(out, number, |out| {
                    put_nested(out, 1, |out| self.write(message, value, depth + 1, out))
                })?;
            }
            _ => put_nested(out, number, |out| write_word(field, value, out))?,
        }
        Ok(())
    }
}

/// The content of messages that are one word in JSON.
fn write_word(field: &Field, value: &Value, out: &mut Vec<u8>) -> Result<(), Error> {
    let wrong = |why: String| Error::Value { field: field.name, why };
    match (field.kind, value) {
        // Go's zero time.
        (Kind::Time | Kind::MicroTime, Value::Null) => {}
        (Kind::Time | Kind::MicroTime, Value::String(text)) => {
            scalar::write_time(out, text, field.kind == Kind::MicroTime).map_err(wrong)?;
        }
        (Kind::Duration, Value::String(text)) => {
            let nanos = base::duration::nanos(text).ok();
            put_number(out, 1, nanos.ok_or_else(|| wrong(format!("no duration: {text:?}")))?);
        }
        (Kind::Quantity, Value::String(text)) => put_bytes(out, 1, text.as_bytes()),
        (Kind::Quantity, Value::Number(number)) => put_bytes(out, 1, number.to_string().as_bytes()),
        (Kind::IntOrString, Value::Number(_) | Value::String(_)) => {
            put_number(out, 1, i64::from(value.is_string()));
            put_number(out, 2, value.as_i64().unwrap_or_default());
            put_bytes(out, 3, value.as_str().unwrap_or_default().as_bytes());
        }
        _ => return Err(unexpected(field, value)),
    }
    Ok(())
}

fn write_strings(
    field: &Field,
    number: u32,
    list: &[Value],
    out: &mut Vec<u8>,
) -> Result<(), Error> {
    for element in list {
        let text = element.as_str().ok_or_else(|| unexpected(field, element))?;
        put_bytes(out, number, text.as_bytes());
    }
    Ok(())
}

fn whole(value: f64) -> Option<i64> {
    const EXACT: f64 = 9e15;
    (value.fract() == 0.0 && value.abs() < EXACT).then_some(value as i64)
}

fn unexpected(field: &Field, value: &Value) -> Error {
    let what = match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    Error::Value { field: field.name, why: format!("unexpected {what}") }
}

/// Writes a list item by item, so that there is one item's tree at a time.
pub struct ListWriter<'a> {
    table: &'a Descriptors,
    api_version: String,
    kind: String,
    item: MessageId,
    items_number: u32,
    /// The list's message so far.
    out: Vec<u8>,
}

impl<'a> ListWriter<'a> {
    /// `metadata`: the list's.
    pub fn new(
        table: &'a Descriptors,
        api_version: &str,
        kind: &str,
        metadata: &Value,
    ) -> Result<Self, Error> {
        let unknown = || Error::NoMessage(format!("{kind} in version {api_version:?}"));
        let message = table.kind(api_version, kind).ok_or_else(unknown)?;
        let items = table.fields(message).iter().find(|field| field.name == "items");
        let Some(&Field { number, kind: Kind::Message(item), .. }) = items else {
            return Err(unknown());
        };
        let mut out = Vec::with_capacity(1024);
        let head = Map::from_iter([("metadata".to_owned(), metadata.clone())]);
        table.encode(message, &head.into(), &mut out)?;
        let (api_version, kind) = (api_version.to_owned(), kind.to_owned());
        Ok(Self { table, api_version, kind, item, items_number: number, out })
    }

    pub fn push(&mut self, item: &Value) -> Result<(), Error> {
        put_nested(&mut self.out, self.items_number, |out| {
            self.table.write(self.item, item, 1, out)
        })
    }

    /// The list in its envelope.
    pub fn finish(self) -> Result<Vec<u8>, Error> {
        let mut sealed = Vec::with_capacity(self.out.len() + 64);
        envelope::seal(&mut sealed, &self.api_version, &self.kind, |out| {
            out.extend_from_slice(&self.out);
            Ok(())
        })?;
        Ok(sealed)
    }
}
