//! Lists and sets. Upstream: Kubernetes' list library, cel-go's `ext.Lists` and `ext.Sets`.

use std::cmp::Ordering;
use std::sync::Arc;

use cel_parser::common::ast::operators as op;

use super::Answer;
use crate::value::Value;

/// The maximum length of the result of `lists.range`.
const LONGEST_RANGE: i64 = 1_000_000;

pub fn call(name: &str, of: &[Value]) -> Answer {
    match (name, of) {
        ("lists.range", [Value::Int(count)]) if *count <= LONGEST_RANGE => {
            return Some(Ok(Value::list((0..*count).map(Value::Int).collect())));
        }
        ("sets.contains", [Value::List(a, _), Value::List(b, _)]) => {
            return flag(b.iter().all(|one| a.contains(one)));
        }
        ("sets.equivalent", [Value::List(a, _), Value::List(b, _)]) => {
            let within = |a: &[Value], b: &[Value]| a.iter().all(|one| b.contains(one));
            return flag(within(a, b) && within(b, a));
        }
        ("sets.intersects", [Value::List(a, _), Value::List(b, _)]) => {
            return flag(a.iter().any(|one| b.contains(one)));
        }
        _ => {}
    }
    let [Value::List(items, _), rest @ ..] = of else { return None };
    match (name, rest) {
        ("isSorted", []) => {
            flag(items.windows(2).all(|pair| pair[0].compare(&pair[1]).is_none_or(Ordering::is_le)))
        }
        ("sum", []) => sum(items),
        ("min" | "max", []) => {
            let wanted = if name == "min" { Ordering::Less } else { Ordering::Greater };
            let best = items
                .iter()
                .reduce(|best, one| if one.compare(best) == Some(wanted) { one } else { best });
            Some(best.cloned().ok_or_else(|| format!("{name} called on empty list")))
        }
        ("indexOf" | "lastIndexOf", [item]) => {
            let is_it = |one: &Value| one == item;
            let found = if name == "indexOf" {
                items.iter().position(is_it)
            } else {
                items.iter().rposition(is_it)
            };
            Some(Ok(Value::Int(found.map_or(-1, |at| at as i64))))
        }
        ("sort", []) => {
            let mut sorted = items.to_vec();
            sorted.sort_by(|a, b| a.compare(b).unwrap_or(Ordering::Equal));
            Some(Ok(Value::list(sorted)))
        }
        ("reverse", []) => Some(Ok(Value::list(items.iter().rev().cloned().collect()))),
        ("distinct", []) => {
            let mut seen: Vec<Value> = vec![];
            for item in items.iter() {
                if !seen.contains(item) {
                    seen.push(item.clone());
                }
            }
            Some(Ok(Value::list(seen)))
        }
        ("flatten", []) => Some(Ok(Value::list(flatten(items, 1)))),
        ("flatten", [Value::Int(depth)]) => Some(Ok(Value::list(flatten(items, *depth)))),
        ("slice", [Value::Int(start), Value::Int(end)]) => slice(items, *start, *end),
        ("first", []) => Some(Ok(Value::Optional(items.first().cloned().map(Arc::new)))),
        ("last", []) => Some(Ok(Value::Optional(items.last().cloned().map(Arc::new)))),
        _ => None,
    }
}

fn flag(flag: bool) -> Answer {
    Some(Ok(Value::Bool(flag)))
}

fn slice(items: &[Value], start: i64, end: i64) -> Answer {
    let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
    let slice = range.and_then(|(start, end)| items.get(start..end));
    Some(match slice {
        Some(slice) => Ok(Value::list(slice.to_vec())),
        None => Err(format!("cannot slice({start}, {end}), list is length {}", items.len())),
    })
}

fn sum(items: &[Value]) -> Answer {
    // Texts and lists cannot be summed, because each step would copy the sum.
    let is_number = |item: &Value| item.number().is_some() || matches!(item, Value::Duration(_));
    if !items.iter().all(is_number) {
        return None;
    }
    let mut items = items.iter();
    let Some(first) = items.next() else { return Some(Ok(Value::Int(0))) };
    let mut sum = first.clone();
    for item in items {
        match super::call(op::ADD, None, &[sum, item.clone()])? {
            Ok(value) => sum = value,
            Err(why) => return Some(Err(why)),
        }
    }
    Some(Ok(sum))
}

fn flatten(items: &[Value], depth: i64) -> Vec<Value> {
    let mut flat = vec![];
    for item in items {
        match item {
            Value::List(inner, _) if depth > 0 => flat.extend(flatten(inner, depth - 1)),
            other => flat.push(other.clone()),
        }
    }
    flat
}
