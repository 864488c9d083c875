//! Values: converted from JSON by a type, compared, and converted back to JSON.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use serde_json::Value as Json;

use crate::types::{ListKind, Type};

/// Clones are cheap, because large data is shared.
#[derive(Clone)]
pub enum Value {
    Null,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Double(f64),
    String(Arc<str>),
    Bytes(Arc<[u8]>),
    Timestamp(Timestamp),
    /// Nanoseconds.
    Duration(i64),
    List(Arc<Vec<Value>>, ListKind),
    Map(Arc<BTreeMap<Key, Value>>),
    Optional(Option<Arc<Value>>),
    /// The name of a type.
    Type(&'static str),
    Host(Arc<dyn Host>),
}

/// A key of a map.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    Bool(bool),
    Int(i64),
    String(Arc<str>),
}

/// A value with its own methods, of a library or of the calling program: quantities, URLs, an authorizer.
pub trait Host: Send + Sync {
    fn type_name(&self) -> &'static str;
    /// `None`: there is no such method.
    fn call(&self, method: &str, arguments: &[Value]) -> Option<Result<Value, String>>;
    fn equals(&self, _other: &dyn Host) -> bool {
        false
    }
    /// The map that it behaves like, with one difference: an index that is not in the map returns the second
    /// value instead of an error.
    fn as_map(&self) -> Option<(&Value, &Value)> {
        None
    }
    /// Its text for printing and comparing; library values have one.
    fn text(&self) -> Option<String> {
        None
    }
    fn as_any(&self) -> &dyn std::any::Any;
}

impl Value {
    pub fn string(text: impl Into<Arc<str>>) -> Self {
        Self::String(text.into())
    }

    pub fn list(items: Vec<Value>) -> Self {
        Self::List(Arc::new(items), ListKind::Atomic)
    }

    pub fn map(fields: impl IntoIterator<Item = (String, Value)>) -> Self {
        let fields = fields.into_iter().map(|(key, value)| (Key::String(key.into()), value));
        Self::Map(Arc::new(fields.collect()))
    }

    pub fn host(host: impl Host + 'static) -> Self {
        Self::Host(Arc::new(host))
    }

    /// Converts a JSON tree to a value of a type. Data that does not fit keeps its own type.
    pub fn from_json(json: &Json, kind: &Type) -> Self {
        match (json, kind) {
            (Json::Null, _) => Self::Null,
            (Json::Bool(flag), _) => Self::Bool(*flag),
            (Json::Number(number), Type::Double) => {
                Self::Double(number.as_f64().unwrap_or(f64::NAN))
            }
            (Json::Number(number), _) => match number.as_i64() {
                Some(whole) => Self::Int(whole),
                None => {
                    let float = number.as_f64().unwrap_or(f64::NAN);
                    let is_whole = float.fract() == 0.0 && float.abs() < 9.2e18;
                    if *kind == Type::Int && is_whole {
                        Self::Int(float as i64)
                    } else {
                        Self::Double(float)
                    }
                }
            },
            (Json::String(text), Type::Timestamp) => {
                let day = text.parse::<jiff::civil::Date>().ok();
                let day = day.filter(|_| text.len() == 10);
                let start = day.and_then(|day| day.to_zoned(jiff::tz::TimeZone::UTC).ok());
                match start.map(|zoned| zoned.timestamp()).or_else(|| text.parse().ok()) {
                    Some(time) => Self::Timestamp(time),
                    None => Self::string(text.as_str()),
                }
            }
            (Json::String(text), Type::Duration) => base::duration::nanos(text)
                .map_or_else(|_| Self::string(text.as_str()), Self::Duration),
            (Json::String(text), Type::Bytes) => match STANDARD.decode(text) {
                Ok(bytes) => Self::Bytes(bytes.into()),
                Err(_) => Self::string(text.as_str()),
            },
            (Json::String(text), _) => Self::string(text.as_str()),
            (Json::Array(items), kind) => {
                let (of, list) = match kind {
                    Type::List(of, list) => (&**of, list.clone()),
                    _ => (&Type::Dyn, ListKind::Atomic),
                };
                let items = items.iter().map(|item| Self::from_json(item, of)).collect();
                Self::List(Arc::new(items), list)
            }
            (Json::Object(fields), kind) => {
                let field = |(name, value): (&String, &Json)| {
                    let kind = match kind {
                        Type::Map(of) => &**of,
                        Type::Object(object) => object.fields.get(name).unwrap_or(&Type::Dyn),
                        _ => &Type::Dyn,
                    };
                    (Key::String(name.as_str().into()), Self::from_json(value, kind))
                };
                Self::Map(Arc::new(fields.iter().map(field).collect()))
            }
        }
    }

    pub fn to_json(&self) -> Json {
        match self {
            Self::Null => Json::Null,
            Self::Bool(flag) => (*flag).into(),
            Self::Int(number) => (*number).into(),
            Self::Uint(number) => (*number).into(),
            Self::Double(number) => (*number).into(),
            Self::String(text) => (**text).into(),
            Self::Bytes(bytes) => STANDARD.encode(bytes).into(),
            Self::Timestamp(time) => time.to_string().into(),
            Self::Duration(nanos) => crate::functions::times::show_duration(*nanos).into(),
            Self::List(items, _) => items.iter().map(Value::to_json).collect(),
            Self::Map(fields) => {
                let field = |(key, value): (&Key, &Value)| (key.to_string(), value.to_json());
                Json::Object(fields.iter().map(field).collect())
            }
            Self::Optional(inner) => inner.as_ref().map_or(Json::Null, |value| value.to_json()),
            Self::Type(name) => (*name).into(),
            Self::Host(host) => host.text().map_or(Json::Null, Json::from),
        }
    }

    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(flag) => Some(*flag),
            _ => None,
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Null => "null_type",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Uint(_) => "uint",
            Self::Double(_) => "double",
            Self::String(_) => "string",
            Self::Bytes(_) => "bytes",
            Self::Timestamp(_) => "google.protobuf.Timestamp",
            Self::Duration(_) => "google.protobuf.Duration",
            Self::List(..) => "list",
            Self::Map(_) => "map",
            Self::Optional(_) => "optional_type",
            Self::Type(_) => "type",
            Self::Host(host) => host.type_name(),
        }
    }

    /// The size, for costs.
    pub fn size(&self) -> usize {
        match self {
            Self::String(text) => text.len(),
            Self::Bytes(bytes) => bytes.len(),
            Self::List(items, _) => items.len(),
            Self::Map(fields) => fields.len(),
            _ => 1,
        }
    }

    /// Compares values, if they are ordered.
    pub fn compare(&self, other: &Value) -> Option<Ordering> {
        match (self, other) {
            (Self::Bool(a), Self::Bool(b)) => Some(a.cmp(b)),
            (Self::Int(a), Self::Int(b)) => Some(a.cmp(b)),
            (Self::Uint(a), Self::Uint(b)) => Some(a.cmp(b)),
            (Self::String(a), Self::String(b)) => Some(a.cmp(b)),
            (Self::Bytes(a), Self::Bytes(b)) => Some(a.cmp(b)),
            (Self::Timestamp(a), Self::Timestamp(b)) => Some(a.cmp(b)),
            (Self::Duration(a), Self::Duration(b)) => Some(a.cmp(b)),
            (Self::Int(a), Self::Uint(b)) => Some(i128::from(*a).cmp(&i128::from(*b))),
            (Self::Uint(a), Self::Int(b)) => Some(i128::from(*a).cmp(&i128::from(*b))),
            (a, b) => a.number()?.partial_cmp(&b.number()?),
        }
    }

    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Int(number) => Some(*number as f64),
            Self::Uint(number) => Some(*number as f64),
            Self::Double(number) => Some(*number),
            _ => None,
        }
    }

    pub fn key(&self) -> Option<Key> {
        Some(match self {
            Self::Bool(flag) => Key::Bool(*flag),
            Self::Int(number) => Key::Int(*number),
            Self::Uint(number) => Key::Int(i64::try_from(*number).ok()?),
            Self::Double(number) if number.fract() == 0.0 => Key::Int(*number as i64),
            Self::String(text) => Key::String(text.clone()),
            _ => return None,
        })
    }
}

impl Key {
    pub fn value(&self) -> Value {
        match self {
            Self::Bool(flag) => Value::Bool(*flag),
            Self::Int(number) => Value::Int(*number),
            Self::String(text) => Value::String(text.clone()),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(flag) => write!(f, "{flag}"),
            Self::Int(number) => write!(f, "{number}"),
            Self::String(text) => f.write_str(text),
        }
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Null, Self::Null) => true,
            (Self::List(a, ListKind::Set), Self::List(b, _))
            | (Self::List(a, _), Self::List(b, ListKind::Set)) => {
                a.len() == b.len() && a.iter().all(|one| b.contains(one))
            }
            (Self::List(a, ListKind::Map(keys)), Self::List(b, _)) => {
                let same = |one: &Value| {
                    b.iter().any(|other| key_of(one, keys) == key_of(other, keys) && one == other)
                };
                a.len() == b.len() && a.iter().all(same)
            }
            (Self::List(a, _), Self::List(b, _)) => a == b,
            (Self::Map(a), Self::Map(b)) => a == b,
            (Self::Optional(a), Self::Optional(b)) => a == b,
            (Self::Type(a), Self::Type(b)) => a == b,
            (Self::Host(a), Self::Host(b)) => a.equals(&**b),
            (a, b) => a.compare(b) == Some(Ordering::Equal),
        }
    }
}

/// The key fields of an element of a map-like list.
pub fn key_of(item: &Value, keys: &[String]) -> Vec<Option<Value>> {
    let field = |key: &String| match item {
        Value::Map(fields) => fields.get(&Key::String(key.as_str().into())).cloned(),
        _ => None,
    };
    keys.iter().map(field).collect()
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.type_name(), self.to_json())
    }
}
