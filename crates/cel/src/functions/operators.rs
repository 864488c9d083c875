//! Operators, conversions, optionals.

use std::cmp::Ordering;
use std::sync::Arc;

use cel_parser::common::ast::operators as op;

use super::{Answer, times};
use crate::eval;
use crate::value::{Key, Value};

pub fn call(name: &str, of: &[Value]) -> Answer {
    match (name, of) {
        (op::EQUALS, [a, b]) => Some(Ok(Value::Bool(a == b))),
        (op::NOT_EQUALS, [a, b]) => Some(Ok(Value::Bool(a != b))),
        (op::LESS, [a, b]) => ordered(a, b, Ordering::is_lt),
        (op::LESS_EQUALS, [a, b]) => ordered(a, b, Ordering::is_le),
        (op::GREATER, [a, b]) => ordered(a, b, Ordering::is_gt),
        (op::GREATER_EQUALS, [a, b]) => ordered(a, b, Ordering::is_ge),
        (op::LOGICAL_NOT, [Value::Bool(flag)]) => Some(Ok(Value::Bool(!flag))),
        (op::NEGATE, [Value::Int(number)]) => {
            Some(number.checked_neg().map(Value::Int).ok_or_else(overflow))
        }
        (op::NEGATE, [Value::Double(number)]) => Some(Ok(Value::Double(-number))),
        (op::IN, [item, of]) => contains(item, of),
        (op::INDEX, [Value::Optional(inner), index]) => Some(Ok(optional(inner, index))),
        (op::INDEX, [of, index]) => Some(indexed(of, index)),
        (op::OPT_INDEX, [Value::Optional(inner), index]) => Some(Ok(optional(inner, index))),
        (op::OPT_INDEX, [of, index]) => {
            Some(Ok(Value::Optional(indexed(of, index).ok().map(Arc::new))))
        }
        (op::ADD | op::SUBSTRACT | op::MULTIPLY | op::DIVIDE | op::MODULO, [a, b]) => {
            arithmetic(name, a, b)
        }
        ("hasValue", [Value::Optional(inner)]) => Some(Ok(Value::Bool(inner.is_some()))),
        ("value", [Value::Optional(inner)]) => Some(match inner {
            Some(value) => Ok((**value).clone()),
            None => Err("optional.none() dereference".into()),
        }),
        ("optional.of", [value]) => Some(Ok(Value::Optional(Some(Arc::new(value.clone()))))),
        ("optional.none", []) => Some(Ok(Value::Optional(None))),
        ("optional.ofNonZeroValue", [value]) => {
            let value = Some(value).filter(|value| !is_zero(value)).cloned();
            Some(Ok(Value::Optional(value.map(Arc::new))))
        }
        ("type", [value]) => Some(Ok(Value::Type(value.type_name()))),
        ("dyn", [value]) => Some(Ok(value.clone())),
        ("size", [Value::String(text)]) => Some(Ok(Value::Int(text.chars().count() as i64))),
        ("size", [value @ (Value::Bytes(_) | Value::List(..) | Value::Map(_))]) => {
            Some(Ok(Value::Int(value.size() as i64)))
        }
        ("bool" | "int" | "uint" | "double" | "string" | "bytes", [value]) => convert(name, value),
        _ => None,
    }
}

fn overflow() -> String {
    "integer overflow".into()
}

fn ordered(a: &Value, b: &Value, test: fn(Ordering) -> bool) -> Answer {
    if let (Some(a), Some(b)) = (a.number(), b.number())
        && (a.is_nan() || b.is_nan())
    {
        return Some(Ok(Value::Bool(false)));
    }
    a.compare(b).map(|order| Ok(Value::Bool(test(order))))
}

fn contains(item: &Value, of: &Value) -> Answer {
    match of {
        Value::List(items, _) => Some(Ok(Value::Bool(items.contains(item)))),
        Value::Map(fields) => {
            let is_there = item.key().is_some_and(|key| fields.contains_key(&key));
            Some(Ok(Value::Bool(is_there)))
        }
        Value::Host(host) => contains(item, host.as_map()?.0),
        _ => None,
    }
}

fn optional(inner: &Option<Arc<Value>>, index: &Value) -> Value {
    let found = inner.as_ref().and_then(|value| indexed(value, index).ok());
    Value::Optional(found.map(Arc::new))
}

fn indexed(of: &Value, index: &Value) -> Result<Value, String> {
    match (of, index.key()) {
        (Value::List(items, _), Some(Key::Int(at))) => {
            let found = usize::try_from(at).ok().and_then(|at| items.get(at));
            found.cloned().ok_or_else(|| format!("index out of bounds: {at}"))
        }
        (Value::Map(fields), Some(key)) => {
            fields.get(&key).cloned().ok_or_else(|| format!("no such key: {key}"))
        }
        (Value::Host(host), Some(_)) if let Some((map, otherwise)) = host.as_map() => {
            Ok(indexed(map, index).unwrap_or_else(|_| otherwise.clone()))
        }
        _ => Err(format!("no such overload: {}[{}]", of.type_name(), index.type_name())),
    }
}

fn is_zero(value: &Value) -> bool {
    match value {
        Value::Null | Value::Optional(None) => true,
        Value::Bool(flag) => !flag,
        Value::Int(number) | Value::Duration(number) => *number == 0,
        Value::Uint(number) => *number == 0,
        Value::Double(number) => *number == 0.0,
        Value::String(_) | Value::Bytes(_) | Value::List(..) | Value::Map(_) => value.size() == 0,
        _ => false,
    }
}

fn arithmetic(name: &str, a: &Value, b: &Value) -> Answer {
    match (a, b) {
        (Value::Int(a), Value::Int(b)) => Some(match (name, *b) {
            (op::DIVIDE, 0) => Err("division by zero".into()),
            (op::MODULO, 0) => Err("modulus by zero".into()),
            _ => {
                let result = match name {
                    op::ADD => a.checked_add(*b),
                    op::SUBSTRACT => a.checked_sub(*b),
                    op::MULTIPLY => a.checked_mul(*b),
                    op::DIVIDE => a.checked_div(*b),
                    _ => a.checked_rem(*b),
                };
                result.map(Value::Int).ok_or_else(overflow)
            }
        }),
        (Value::Uint(a), Value::Uint(b)) => Some(match (name, *b) {
            (op::DIVIDE, 0) => Err("division by zero".into()),
            (op::MODULO, 0) => Err("modulus by zero".into()),
            _ => {
                let result = match name {
                    op::ADD => a.checked_add(*b),
                    op::SUBSTRACT => a.checked_sub(*b),
                    op::MULTIPLY => a.checked_mul(*b),
                    op::DIVIDE => a.checked_div(*b),
                    _ => a.checked_rem(*b),
                };
                result.map(Value::Uint).ok_or_else(|| "unsigned integer overflow".into())
            }
        }),
        (Value::Double(a), Value::Double(b)) => match name {
            op::ADD => Some(Ok(Value::Double(a + b))),
            op::SUBSTRACT => Some(Ok(Value::Double(a - b))),
            op::MULTIPLY => Some(Ok(Value::Double(a * b))),
            op::DIVIDE => Some(Ok(Value::Double(a / b))),
            _ => None,
        },
        (Value::String(a), Value::String(b)) if name == op::ADD => {
            Some(Ok(Value::string(format!("{a}{b}"))))
        }
        (Value::Bytes(a), Value::Bytes(b)) if name == op::ADD => {
            Some(Ok(Value::Bytes([&**a, &**b].concat().into())))
        }
        (Value::List(a, kind), Value::List(b, _)) if name == op::ADD => {
            Some(Ok(eval::concat(a, b, kind)))
        }
        _ => times::arithmetic(name, a, b),
    }
}

fn convert(name: &str, value: &Value) -> Answer {
    let bad = |text: &str| format!("type conversion error from 'string' to '{name}': {text:?}");
    let range = || "integer overflow".to_owned();
    Some(match (name, value) {
        ("bool", Value::Bool(_))
        | ("int", Value::Int(_))
        | ("uint", Value::Uint(_))
        | ("double", Value::Double(_))
        | ("string", Value::String(_))
        | ("bytes", Value::Bytes(_)) => Ok(value.clone()),
        ("bool", Value::String(text)) => match &**text {
            "true" | "True" | "TRUE" | "t" | "1" => Ok(Value::Bool(true)),
            "false" | "False" | "FALSE" | "f" | "0" => Ok(Value::Bool(false)),
            other => Err(bad(other)),
        },
        ("int", Value::Uint(number)) => i64::try_from(*number).map(Value::Int).map_err(|_| range()),
        ("int", Value::Double(number)) if number.abs() < 9.223_372_036_854_775e18 => {
            Ok(Value::Int(*number as i64))
        }
        ("int" | "uint", Value::Double(_)) => Err(range()),
        ("int", Value::String(text)) => text.parse().map(Value::Int).map_err(|_| bad(text)),
        ("int", Value::Timestamp(time)) => Ok(Value::Int(time.as_second())),
        ("int", Value::Duration(nanos)) => Ok(Value::Int(nanos / 1_000_000_000)),
        ("uint", Value::Int(number)) => {
            u64::try_from(*number).map(Value::Uint).map_err(|_| range())
        }
        ("uint", Value::String(text)) => text.parse().map(Value::Uint).map_err(|_| bad(text)),
        ("double", Value::Int(_) | Value::Uint(_)) => {
            Ok(Value::Double(value.number().unwrap_or_default()))
        }
        ("double", Value::String(text)) => text.parse().map(Value::Double).map_err(|_| bad(text)),
        ("string", Value::Bytes(bytes)) => match std::str::from_utf8(bytes) {
            Ok(text) => Ok(Value::string(text)),
            Err(_) => Err("invalid UTF-8 in bytes, cannot convert to string".into()),
        },
        ("bytes", Value::String(text)) => Ok(Value::Bytes(text.as_bytes().into())),
        ("string", Value::Host(host)) => match host.text() {
            Some(text) => Ok(Value::string(text)),
            None => return None,
        },
        ("string", Value::Bool(flag)) => Ok(Value::string(flag.to_string())),
        ("string", Value::Int(number)) => Ok(Value::string(number.to_string())),
        ("string", Value::Uint(number)) => Ok(Value::string(number.to_string())),
        ("string", Value::Double(number)) => Ok(Value::string(number.to_string())),
        ("string", Value::Timestamp(time)) => Ok(Value::string(time.to_string())),
        ("string", Value::Duration(nanos)) => Ok(Value::string(times::show_duration(*nanos))),
        _ => return None,
    })
}
