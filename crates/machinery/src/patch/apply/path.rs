//! One step of a path to an owned field, and its text in `fieldsV1`.
//!
//! `f:NAME` is a field, `k:{"name":"a"}` the element of a list with that key, `v:"a"` the element of
//! a set, `i:0` an index, which nothing writes any more.

use std::cmp::Ordering;
use std::fmt;

use serde_json::{Number, Value};

use super::FieldsError;
use super::node::{Node, Shape};

/// Invariant: keys are sorted by their names.
#[derive(Clone, Debug)]
pub enum Element {
    Field(Box<str>),
    Key(Box<[(Box<str>, Value)]>),
    Value(Value),
    Index(i64),
}

impl Element {
    pub fn field(name: &str) -> Self {
        Self::Field(name.into())
    }

    /// `None`: of a kind that is not known yet, to be skipped.
    pub fn parse(text: &str) -> Result<Option<Self>, FieldsError> {
        let (kind, rest) = match text.as_bytes() {
            [kind, b':', ..] => (*kind, &text[2..]),
            [_, _, ..] => return Err(FieldsError::NoColon(text.into())),
            _ => return Err(FieldsError::ShortKey),
        };
        let wrong = |why: &dyn fmt::Display| FieldsError::Element {
            text: rest.into(),
            why: why.to_string(),
        };
        let json = || serde_json::from_str::<Value>(rest).map_err(|error| wrong(&error));
        Ok(Some(match kind {
            b'f' => Self::field(rest),
            b'v' => Self::Value(json()?),
            b'k' => match json()? {
                Value::Object(fields) => Self::Key(
                    fields.into_iter().map(|(name, value)| (name.into(), value)).collect(),
                ),
                other => return Err(FieldsError::NotAnObject(other)),
            },
            b'i' => {
                Self::Index(rest.parse().map_err(|error: std::num::ParseIntError| wrong(&error))?)
            }
            _ => return Ok(None),
        }))
    }

    /// As `fieldsV1` has it.
    pub fn text(&self) -> String {
        match self {
            Self::Field(name) => format!("f:{name}"),
            Self::Key(fields) => {
                let fields: Vec<String> = fields
                    .iter()
                    .map(|(name, value)| format!("{}:{value}", Value::from(&**name)))
                    .collect();
                format!("k:{{{}}}", fields.join(","))
            }
            Self::Value(value) => format!("v:{value}"),
            Self::Index(index) => format!("i:{index}"),
        }
    }

    fn rank(&self) -> u8 {
        match self {
            Self::Field(_) => 0,
            Self::Key(_) => 1,
            Self::Value(_) => 2,
            Self::Index(_) => 3,
        }
    }
}

/// The form in conflicts: `.spec`, `[name="a"]`, `[="a"]`.
impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field(name) => write!(f, ".{name}"),
            Self::Key(fields) => {
                let fields: Vec<String> =
                    fields.iter().map(|(name, value)| format!("{name}={value}")).collect();
                write!(f, "[{}]", fields.join(","))
            }
            Self::Value(value) => write!(f, "[={value}]"),
            Self::Index(index) => write!(f, "[{index}]"),
        }
    }
}

impl Ord for Element {
    fn cmp(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Field(a), Self::Field(b)) => a.cmp(b),
            (Self::Key(a), Self::Key(b)) => {
                let compared = a.iter().zip(b.iter()).map(|((name, value), (others, other))| {
                    name.cmp(others).then_with(|| compare(value, other))
                });
                let first = compared.into_iter().find(|order| order.is_ne());
                first.unwrap_or_else(|| a.len().cmp(&b.len()))
            }
            (Self::Value(a), Self::Value(b)) => compare(a, b),
            (Self::Index(a), Self::Index(b)) => a.cmp(b),
            (a, b) => a.rank().cmp(&b.rank()),
        }
    }
}

impl PartialOrd for Element {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Element {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Element {}

/// An order of all values: numbers, strings, booleans, lists, maps, null.
fn compare(a: &Value, b: &Value) -> Ordering {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => compare_numbers(a, b),
        (Value::String(a), Value::String(b)) => a.cmp(b),
        (Value::Bool(a), Value::Bool(b)) => a.cmp(b),
        (Value::Array(a), Value::Array(b)) => {
            let first = a.iter().zip(b).map(|(a, b)| compare(a, b)).find(|order| order.is_ne());
            first.unwrap_or_else(|| a.len().cmp(&b.len()))
        }
        (Value::Object(a), Value::Object(b)) => {
            let each = a.iter().zip(b).map(|(a, b)| a.0.cmp(b.0).then_with(|| compare(a.1, b.1)));
            let first = each.into_iter().find(|order| order.is_ne());
            first.unwrap_or_else(|| a.len().cmp(&b.len()))
        }
        (a, b) => rank(a).cmp(&rank(b)),
    }
}

fn compare_numbers(a: &Number, b: &Number) -> Ordering {
    match (a.as_i64(), b.as_i64()) {
        (Some(a), Some(b)) => a.cmp(&b),
        _ => a.as_f64().unwrap_or_default().total_cmp(&b.as_f64().unwrap_or_default()),
    }
}

fn rank(value: &Value) -> u8 {
    match value {
        Value::Number(_) => 0,
        Value::String(_) => 1,
        Value::Bool(_) => 2,
        Value::Array(_) => 3,
        Value::Object(_) => 4,
        Value::Null => 5,
    }
}

/// Are they the same to clients? Numbers are by their value: 1 is 1.0.
pub fn equal<N: Node>(a: &N, b: &N) -> bool {
    if let (Some(a), Some(b)) = (a.number(), b.number()) {
        return compare_numbers(a, b).is_eq();
    }
    match (a.shape(), b.shape()) {
        (Shape::List, Shape::List) => {
            let (a, b) = (a.items(), b.items());
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b))
        }
        (Shape::Map, Shape::Map) => {
            let (mut a, mut b) = (a.fields(), b.fields());
            let same = |a: (&str, &N), b: (&str, &N)| a.0 == b.0 && equal(a.1, b.1);
            loop {
                match (a.next(), b.next()) {
                    (None, None) => return true,
                    (Some(a), Some(b)) if same(a, b) => {}
                    _ => return false,
                }
            }
        }
        _ => a == b,
    }
}
