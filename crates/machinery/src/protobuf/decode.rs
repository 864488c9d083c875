//! Messages to JSON trees.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Map, Value};

use super::descriptors::{Descriptors, Field, Kind, MessageId, Shape};
use super::wire::{Reader, Wire};
use super::{Envelope, Error, MAGIC, MAX_DEPTH, scalar};

impl Descriptors {
    /// Decodes a message into a JSON tree.
    pub fn decode(&self, message: MessageId, bytes: &[u8]) -> Result<Map<String, Value>, Error> {
        let mut tree = Map::new();
        self.read(message, bytes, 0, &mut tree)?;
        Ok(tree)
    }

    fn read(
        &self,
        message: MessageId,
        bytes: &[u8],
        depth: usize,
        into: &mut Map<String, Value>,
    ) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::TooDeep);
        }
        let fields = self.fields(message);
        let mut reader = Reader(bytes);
        while let Some((number, wire)) = reader.field()? {
            if let Ok(at) = fields.binary_search_by_key(&number, |field| field.number) {
                self.read_field(&fields[at], wire, depth + 1, into)?;
            }
        }
        Ok(())
    }

    fn read_field(
        &self,
        field: &Field,
        wire: Wire<'_>,
        depth: usize,
        into: &mut Map<String, Value>,
    ) -> Result<(), Error> {
        match (field.shape, field.kind, wire) {
            (Shape::Inline, Kind::Message(message), Wire::Bytes(bytes)) => {
                self.read(message, bytes, depth, into)
            }
            // One message may come in pieces.
            (Shape::Single, Kind::Message(message), Wire::Bytes(bytes)) => {
                let present = into.entry(field.name).or_insert_with(|| Map::new().into());
                if let Value::Object(tree) = present {
                    self.read(message, bytes, depth, tree)?;
                    if field.omit_zero && tree.is_empty() {
                        into.remove(field.name);
                    }
                }
                Ok(())
            }
            (Shape::Single | Shape::Inline, ..) => {
                let value = self.value(field, wire, depth)?;
                if value.is_null() || (field.omit_empty && !field.pointer && is_empty(&value)) {
                    into.remove(field.name);
                } else {
                    into.insert(field.name.to_owned(), value);
                }
                Ok(())
            }
            (Shape::List, ..) => {
                let present = into.entry(field.name).or_insert_with(|| Value::Array(vec![]));
                let Value::Array(list) = present else { return Ok(()) };
                self.read_elements(field, wire, depth, list)
            }
            (Shape::Map, _, Wire::Bytes(bytes)) => {
                let (key, value) = self.entry(field, bytes, depth)?;
                let present = into.entry(field.name).or_insert_with(|| Map::new().into());
                if let Value::Object(map) = present {
                    map.insert(key, value);
                }
                Ok(())
            }
            (Shape::Map, _, wire) => Err(wrong(field, wire)),
        }
    }

    /// One element, or a run of numbers packed into one field.
    fn read_elements(
        &self,
        field: &Field,
        wire: Wire<'_>,
        depth: usize,
        list: &mut Vec<Value>,
    ) -> Result<(), Error> {
        let is_varint = matches!(field.kind, Kind::Bool | Kind::Int32 | Kind::Int64);
        let Wire::Bytes(bytes) = wire else {
            list.push(self.value(field, wire, depth)?);
            return Ok(());
        };
        if !is_varint && field.kind != Kind::Double {
            list.push(self.value(field, wire, depth)?);
            return Ok(());
        }
        let mut reader = Reader(bytes);
        while !reader.is_empty() {
            let one = if is_varint {
                Wire::Varint(reader.varint()?)
            } else {
                Wire::Fixed64(reader.fixed64()?)
            };
            list.push(self.value(field, one, depth)?);
        }
        Ok(())
    }

    /// An entry is a message of key and value; either is absent when empty.
    fn entry(&self, field: &Field, bytes: &[u8], depth: usize) -> Result<(String, Value), Error> {
        let (mut key, mut value) = (String::new(), None);
        let mut reader = Reader(bytes);
        while let Some((number, wire)) = reader.field()? {
            match (number, wire) {
                (1, Wire::Bytes(bytes)) => key = text(bytes),
                (2, wire) => value = Some(self.value(field, wire, depth)?),
                _ => {}
            }
        }
        let value = match value {
            Some(value) => value,
            None => self.value(field, absent(field.kind), depth)?,
        };
        Ok((key, value))
    }

    /// The value of a field that is no list and no map, or one element of such.
    fn value(&self, field: &Field, wire: Wire<'_>, depth: usize) -> Result<Value, Error> {
        let value = match (field.kind, wire) {
            (Kind::String, Wire::Bytes(bytes)) => text(bytes).into(),
            (Kind::Bytes, Wire::Bytes(bytes)) => BASE64.encode(bytes).into(),
            (Kind::Bool, Wire::Varint(value)) => (value != 0).into(),
            (Kind::Int32, Wire::Varint(value)) => (value as i32).into(),
            (Kind::Int64, Wire::Varint(value)) => value.cast_signed().into(),
            (Kind::Double, Wire::Fixed64(bits)) => {
                scalar::double(f64::from_bits(bits)).unwrap_or(Value::Null)
            }
            (Kind::Message(message), Wire::Bytes(bytes)) => {
                let mut tree = Map::new();
                self.read(message, bytes, depth, &mut tree)?;
                tree.into()
            }
            (Kind::Time, Wire::Bytes(bytes)) => scalar::read_time(bytes, false)?,
            (Kind::MicroTime, Wire::Bytes(bytes)) => scalar::read_time(bytes, true)?,
            (Kind::Duration, Wire::Bytes(bytes)) => {
                base::duration::text(Small::read(bytes)?.numbers[1]).into()
            }
            (Kind::Quantity, Wire::Bytes(bytes)) => match Small::read(bytes)?.texts[1] {
                [] => "0".into(),
                quantity => text(quantity).into(),
            },
            (Kind::IntOrString, Wire::Bytes(bytes)) => {
                let small = Small::read(bytes)?;
                match small.numbers[1] {
                    0 => (small.numbers[2] as i32).into(),
                    _ => text(small.texts[3]).into(),
                }
            }
            (Kind::Raw, Wire::Bytes(bytes)) => {
                self.raw(field, Small::read(bytes)?.texts[1], depth)?
            }
            (Kind::Strings, Wire::Bytes(bytes)) => strings(bytes, 1)?.into(),
            (Kind::OrList(message), Wire::Bytes(bytes)) => self.or_list(message, bytes, depth)?,
            (Kind::OrBool(message), Wire::Bytes(bytes)) => {
                match self.alternative(message, Reader(bytes), 2, depth)? {
                    Some(tree) => tree,
                    None => (Small::read(bytes)?.numbers[1] != 0).into(),
                }
            }
            (Kind::OrStrings(message), Wire::Bytes(bytes)) => {
                match self.alternative(message, Reader(bytes), 1, depth)? {
                    Some(tree) => tree,
                    None => strings(bytes, 2)?.into(),
                }
            }
            (_, wire) => return Err(wrong(field, wire)),
        };
        Ok(value)
    }

    /// JSON in a message, or an object in its envelope.
    fn raw(&self, field: &Field, raw: &[u8], depth: usize) -> Result<Value, Error> {
        if raw.is_empty() {
            return Ok(Value::Null);
        }
        if depth > MAX_DEPTH {
            return Err(Error::TooDeep);
        }
        if raw.starts_with(MAGIC) {
            let envelope = Envelope::open(raw)?;
            let mut tree = Map::new();
            let message = envelope.message(self)?;
            tree.insert("apiVersion".into(), envelope.api_version.into());
            tree.insert("kind".into(), envelope.kind.into());
            self.read(message, envelope.raw, depth + 1, &mut tree)?;
            return Ok(tree.into());
        }
        serde_json::from_slice(raw)
            .map_err(|error| Error::Value { field: field.name, why: error.to_string() })
    }

    /// The message in field `wanted` of an alternative, if that is the one.
    fn alternative(
        &self,
        message: MessageId,
        mut reader: Reader<'_>,
        wanted: u32,
        depth: usize,
    ) -> Result<Option<Value>, Error> {
        while let Some((number, wire)) = reader.field()? {
            if let (true, Wire::Bytes(bytes)) = (number == wanted, wire) {
                let mut tree = Map::new();
                self.read(message, bytes, depth, &mut tree)?;
                return Ok(Some(tree.into()));
            }
        }
        Ok(None)
    }

    fn or_list(&self, message: MessageId, bytes: &[u8], depth: usize) -> Result<Value, Error> {
        if let Some(tree) = self.alternative(message, Reader(bytes), 1, depth)? {
            return Ok(tree);
        }
        let mut list: Vec<Value> = vec![];
        let mut reader = Reader(bytes);
        while let Some((number, wire)) = reader.field()? {
            if let (2, Wire::Bytes(bytes)) = (number, wire) {
                let mut tree = Map::new();
                self.read(message, bytes, depth, &mut tree)?;
                list.push(tree.into());
            }
        }
        Ok(list.into())
    }
}

/// The first fields of a small message.
#[derive(Default)]
struct Small<'a> {
    numbers: [i64; 4],
    texts: [&'a [u8]; 4],
}

impl<'a> Small<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self, Error> {
        let mut small = Self::default();
        let mut reader = Reader(bytes);
        while let Some((number, wire)) = reader.field()? {
            let number = number as usize;
            match wire {
                Wire::Varint(value) if number < 4 => small.numbers[number] = value.cast_signed(),
                Wire::Bytes(bytes) if number < 4 => small.texts[number] = bytes,
                _ => {}
            }
        }
        Ok(small)
    }
}

fn strings(bytes: &[u8], wanted: u32) -> Result<Vec<Value>, Error> {
    let mut list = vec![];
    let mut reader = Reader(bytes);
    while let Some((number, wire)) = reader.field()? {
        if let (true, Wire::Bytes(bytes)) = (number == wanted, wire) {
            list.push(text(bytes).into());
        }
    }
    Ok(list)
}

/// Go takes any bytes for a string, and replaces those that are no text when it writes JSON.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn wrong(field: &Field, wire: Wire<'_>) -> Error {
    Error::WrongWireType { field: field.name, found: wire.wire_type() }
}

/// The value of a map's entry without a value.
fn absent(kind: Kind) -> Wire<'static> {
    match kind {
        Kind::Bool | Kind::Int32 | Kind::Int64 => Wire::Varint(0),
        Kind::Double => Wire::Fixed64(0),
        _ => Wire::Bytes(b""),
    }
}

/// What Go's `omitempty` leaves out; structs never are.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(_) => false,
    }
}
