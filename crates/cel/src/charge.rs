//! What a call costs, found out before it is made: what it looks at, and what it makes.
//!
//! In: a function's name and its arguments' values. Out: a cost, or that the result would be too big.
//!
//! Invariant: nothing that an expression makes takes memory that was not paid for. A function that
//! makes a text or a list has its size computed here first; one cost pays for ten bytes of text or for
//! one item. A function that compares values pays for all that they hold, because values share their
//! parts: a list of twice the same list is small in memory and twice as long to look through.
//!
//! Deviation: upstream counts the size of arguments alone, and comparisons by their outermost size.

use cel_parser::common::ast::operators as op;

use crate::functions;
use crate::types::ListKind;
use crate::value::Value;

/// Characters that cost as much as a node.
const BYTES_PER_COST: usize = 10;
/// The longest text, and the longest bytes, that an expression makes.
const TEXT_BYTES: usize = 16 << 20;
/// The longest list that a function makes.
const LIST_ITEMS: usize = 1 << 20;
/// Values in values: comparing and dropping calls itself for each.
const DEEPEST: usize = 500;
/// Bytes of a text that weigh as much as a value.
const BYTES_PER_WEIGHT: usize = 64;
/// Values that are compared for one cost.
const WEIGHT_PER_COST: u64 = 16;
/// As text, a value that is neither text nor a container is no longer.
const SCALAR_BYTES: u64 = 40;
/// As text, a number with a precision is no longer.
const PRECISE_BYTES: usize = 1400;

/// The cost besides one for the call. `None`: too big a result.
pub(crate) fn call(name: &str, of: &[&Value], left: u64) -> Option<u64> {
    let looked_at = looked_at(name, of, left);
    if looked_at > left {
        return Some(looked_at);
    }
    let made = match made(name, of, left) {
        Made::Nothing => 0,
        Made::Text(bytes) if bytes <= TEXT_BYTES => bytes / BYTES_PER_COST,
        Made::Items(count) if count <= LIST_ITEMS => count,
        Made::Text(_) | Made::Items(_) => return None,
    };
    Some(looked_at.max(made as u64))
}

/// The cost of handing a result out: who takes it may write out all that it holds.
pub(crate) fn result(value: &Value, left: u64) -> u64 {
    match value {
        Value::List(..) | Value::Map(_) | Value::Optional(Some(_)) => weight(value, left),
        _ => 0,
    }
}

fn looked_at(name: &str, of: &[&Value], left: u64) -> u64 {
    let plain = of.iter().map(|value| of_one(name, value)).fold(0, u64::saturating_add);
    plain.saturating_add(compared(name, of, left))
}

/// What a function costs for looking at one of its arguments.
fn of_one(name: &str, value: &Value) -> u64 {
    let size = match (name, value) {
        ("size" | "matches" | "find" | "findAll", _) => 0,
        (_, Value::String(text)) => text.len() / BYTES_PER_COST,
        (_, Value::Bytes(bytes)) => bytes.len() / BYTES_PER_COST,
        (op::EQUALS | op::NOT_EQUALS | op::IN | op::ADD, Value::List(..) | Value::Map(_)) => {
            value.size()
        }
        (
            "sum" | "min" | "max" | "indexOf" | "lastIndexOf" | "isSorted" | "sort" | "distinct"
            | "reverse" | "flatten" | "join",
            Value::List(items, _),
        ) => items.len(),
        _ => 0,
    };
    size as u64
}

/// What values cost that are compared with each other, and texts with patterns.
fn compared(name: &str, of: &[&Value], left: u64) -> u64 {
    // No weight beyond this can be paid.
    let limit = left.saturating_mul(WEIGHT_PER_COST);
    let weight = |value: &Value| weight(value, limit);
    let paid = |weight: u64| weight / WEIGHT_PER_COST;
    // Each of a list with each of another.
    let crossed = |a: &Value, b: &Value| {
        let (long, wide) = (a.size() as u64, b.size() as u64);
        let held = weight(a).saturating_mul(wide).min(weight(b).saturating_mul(long));
        long.saturating_mul(wide).saturating_add(paid(held))
    };
    match (name, of) {
        (op::EQUALS | op::NOT_EQUALS, [a, b]) => {
            let is_set =
                |value: &Value| matches!(value, Value::List(_, ListKind::Set | ListKind::Map(_)));
            match is_set(a) || is_set(b) {
                true => crossed(a, b),
                false => paid(weight(a).min(weight(b))),
            }
        }
        (op::IN, [item, list @ Value::List(items, _)]) => {
            paid(weight(list).min(weight(item).saturating_mul(items.len() as u64)))
        }
        (op::ADD, [a @ Value::List(_, ListKind::Set | ListKind::Map(_)), b]) => crossed(a, b),
        ("sets.contains" | "sets.intersects" | "sets.equivalent", [a, b]) => crossed(a, b),
        ("distinct", [list]) => crossed(list, list),
        ("sort", [list @ Value::List(items, _)]) => {
            let rounds = u64::from(items.len().max(1).ilog2()) + 1;
            paid(weight(list).saturating_mul(rounds))
        }
        ("isSorted" | "min" | "max" | "indexOf" | "lastIndexOf", [list @ Value::List(..), ..]) => {
            paid(weight(list))
        }
        ("matches" | "find" | "findAll", [Value::String(text), Value::String(pattern), ..]) => {
            let (text, pattern) = ((text.len() + 1).div_ceil(10), pattern.len().div_ceil(4));
            (text as u64).saturating_mul(pattern as u64)
        }
        _ => 0,
    }
}

/// What a function makes that is not part of its arguments.
enum Made {
    /// Bytes, of a text or of bytes.
    Text(usize),
    Items(usize),
    Nothing,
}

fn made(name: &str, of: &[&Value], left: u64) -> Made {
    match (name, of) {
        (op::ADD, [Value::String(a), Value::String(b)]) => Made::Text(a.len() + b.len()),
        (op::ADD, [Value::Bytes(a), Value::Bytes(b)]) => Made::Text(a.len() + b.len()),
        (op::ADD, [Value::List(a, _), Value::List(b, _)]) => Made::Items(a.len() + b.len()),
        ("replace", [Value::String(text), Value::String(from), Value::String(to), rest @ ..]) => {
            let most = match rest {
                [Value::Int(most)] => usize::try_from(*most).unwrap_or(usize::MAX),
                _ => usize::MAX,
            };
            let count = text.matches(&**from).take(most).count();
            let kept = text.len().saturating_sub(count.saturating_mul(from.len()));
            Made::Text(kept.saturating_add(count.saturating_mul(to.len())))
        }
        ("join", [Value::List(items, _), rest @ ..]) => {
            let between = rest.first().map_or(0, |one| one.size());
            let texts = items.iter().filter_map(Value::as_str).map(str::len);
            let sum = texts.fold(0_usize, usize::saturating_add);
            Made::Text(sum.saturating_add(between.saturating_mul(items.len())))
        }
        ("split", [Value::String(text), Value::String(between), ..]) => {
            Made::Items(text.matches(&**between).count() + 1)
        }
        ("findAll", [Value::String(text), Value::String(pattern), ..]) => {
            // One more than can be paid for is as good as all.
            let most =
                usize::try_from(left).unwrap_or(usize::MAX).min(LIST_ITEMS).saturating_add(1);
            Made::Items(functions::count_matches(pattern, text, most))
        }
        ("format", [Value::String(pattern), Value::List(items, _)]) => {
            formatted(pattern, items, left)
        }
        ("strings.quote", [Value::String(text)]) => Made::Text(
            text.chars().map(|one| one.escape_debug().len().max(one.len_utf8())).sum::<usize>() + 2,
        ),
        ("base64.encode", [Value::Bytes(bytes)]) => Made::Text(bytes.len().div_ceil(3) * 4),
        ("jsonpatch.escapeKey", [Value::String(text)]) => {
            Made::Text(text.len() + text.matches(['~', '/']).count())
        }
        ("lists.range", [Value::Int(count)]) => {
            Made::Items(usize::try_from(*count).unwrap_or_default())
        }
        ("slice", [Value::List(..), Value::Int(start), Value::Int(end)]) => {
            Made::Items(usize::try_from(end.saturating_sub(*start)).unwrap_or_default())
        }
        ("flatten", [Value::List(items, _), rest @ ..]) => {
            let depth = if let [Value::Int(depth)] = rest { *depth } else { 1 };
            let mut count = 0;
            flattened(items, depth, &mut count);
            Made::Items(count)
        }
        _ => Made::Nothing,
    }
}

/// Counts until there are too many.
fn flattened(items: &[Value], depth: i64, count: &mut usize) {
    for item in items {
        if *count > LIST_ITEMS {
            return;
        }
        match item {
            Value::List(inner, _) if depth > 0 => flattened(inner, depth - 1, count),
            _ => *count += 1,
        }
    }
}

fn formatted(pattern: &str, items: &[Value], left: u64) -> Made {
    let limit = left.saturating_mul(BYTES_PER_COST as u64).min(TEXT_BYTES as u64);
    let each = if pattern.contains("%.") { PRECISE_BYTES } else { 0 };
    let mut sum = (pattern.len() as u64).saturating_add((each * items.len()) as u64);
    for item in items {
        // In hexadecimal a text is twice as long.
        text_bytes(item, 0, limit, &mut sum);
        text_bytes(item, 0, limit, &mut sum);
    }
    Made::Text(usize::try_from(sum).unwrap_or(usize::MAX))
}

/// Adds how long a value is as text, until that is over the limit.
fn text_bytes(value: &Value, depth: usize, limit: u64, sum: &mut u64) {
    if *sum > limit {
        return;
    }
    if depth > DEEPEST {
        *sum = u64::MAX;
        return;
    }
    let own = match value {
        Value::String(text) => text.len() as u64,
        Value::Bytes(bytes) => bytes.len() as u64 * 3,
        Value::Host(host) => host.text().map_or(SCALAR_BYTES, |text| text.len() as u64),
        _ => SCALAR_BYTES,
    };
    *sum = sum.saturating_add(own);
    match value {
        Value::List(items, _) => {
            items.iter().for_each(|item| text_bytes(item, depth + 1, limit, sum));
        }
        Value::Map(fields) => {
            for (key, value) in fields.iter() {
                text_bytes(&key.value(), depth + 1, limit, sum);
                text_bytes(value, depth + 1, limit, sum);
            }
        }
        Value::Optional(Some(inner)) => text_bytes(inner, depth + 1, limit, sum),
        _ => {}
    }
}

/// How many values a value holds, long texts as several. More than the limit: the count was given up.
fn weight(value: &Value, limit: u64) -> u64 {
    let mut sum = 0;
    weigh(value, 0, limit, &mut sum);
    sum
}

fn weigh(value: &Value, depth: usize, limit: u64, sum: &mut u64) {
    if *sum > limit {
        return;
    }
    if depth > DEEPEST {
        *sum = u64::MAX;
        return;
    }
    let bytes = match value {
        Value::String(_) | Value::Bytes(_) => value.size(),
        _ => 0,
    };
    *sum = sum.saturating_add(1 + (bytes / BYTES_PER_WEIGHT) as u64);
    match value {
        Value::List(items, _) => items.iter().for_each(|item| weigh(item, depth + 1, limit, sum)),
        Value::Map(fields) => {
            for (key, value) in fields.iter() {
                weigh(&key.value(), depth + 1, limit, sum);
                weigh(value, depth + 1, limit, sum);
            }
        }
        Value::Optional(Some(inner)) => weigh(inner, depth + 1, limit, sum),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Budget, EvalError, Type, compile};

    /// What evaluation spent, or that it was stopped.
    fn spent(rule: &str, given: Value, budget: u64) -> Option<u64> {
        let variables = [("self", Type::Dyn)];
        let program = compile(rule, &variables).expect("an expression");
        let mut left = Budget::new(budget);
        let of = |name: &str| (name == "self").then(|| given.clone());
        match program.evaluate(&of, &mut left) {
            Err(EvalError::TooExpensive) => None,
            Ok(_) | Err(EvalError::Failed(_)) => Some(budget - left.left),
        }
    }

    const LIMIT: u64 = 1_000_000;

    #[test]
    fn what_would_be_too_big_is_not_made() {
        let a = |count: usize| "a".repeat(count);
        let four = Value::string("aaaa");
        let grown =
            |times: usize| format!("self{}", ".replace('', 'aaaaaaaaaaaaaaaaaaaa')".repeat(times));
        assert!(spent(&format!("size({}) > 0", grown(2)), four.clone(), LIMIT).is_some());
        for rule in [
            // The report's bomb: three chained calls made a GiB of four characters.
            format!("size(self{}) > 0", format!(".replace('a', '{}')", a(1000)).repeat(3)),
            format!("size({}) > 0", grown(6)),
            "lists.range(100000000).size() > 0".into(),
            "size(lists.range(100000).map(x, lists.range(100000))) > 0".into(),
            "size(lists.range(2000).map(x, lists.range(2)).map(x, lists.range(2000)).flatten()) > 0".into(),
        ] {
            assert_eq!(spent(&rule, four.clone(), LIMIT), None, "{rule}");
        }
        let long = Value::string(a(1 << 20));
        for rule in [
            "size(self + self + self + self + self + self + self + self + self + self) > 0",
            "size(self.split('')) > 0",
            "size(self.findAll('a')) > 0",
            "size([self, self, self, self, self, self, self, self, self, self].join('')) > 0",
            "size('%s%s%s%s%s%s%s%s%s%s%s'.format([[self, self, self, self, self, self, self, self, self, self]])) > 0",
        ] {
            assert_eq!(spent(rule, long.clone(), LIMIT), None, "{rule}");
        }
        let rule = "size(strings.quote(strings.quote(strings.quote(strings.quote(self))))) > 0";
        assert_eq!(spent(rule, Value::string("\\".repeat(1 << 20)), LIMIT), None);
        // The same with little.
        for rule in ["self + self", "self.split('')", "self.findAll('a')", "'%s'.format([self])"] {
            assert!(spent(&format!("size({rule}) > 0"), four.clone(), 100).is_some(), "{rule}");
        }
    }

    #[test]
    fn one_text_and_one_list_have_an_end_whatever_may_be_spent() {
        let long = Value::string("a".repeat(9 << 20));
        assert_eq!(spent("size(self + self) > 0", long, u64::MAX), None);
        assert_eq!(spent("size(lists.range(2000000)) > 0", Value::Null, u64::MAX), None);
    }

    /// A value of 2^40 values in a few bytes.
    fn doubled(times: usize) -> Value {
        (0..times).fold(Value::Int(1), |inner, _| Value::list(vec![inner.clone(), inner]))
    }

    #[test]
    fn shared_parts_are_paid_for_as_often_as_they_are_looked_at() {
        for rule in [
            "self == [self[0], self[1]]",
            "optional.of(self) == optional.of([self[0], self[1]])",
            "size([self, self].sortBy(x, self)) > 0",
            "self in [self, self]",
            "self",
            "[self].indexOf(self) == 0",
            "sets.contains([self], [self])",
            "size('%s'.format([self])) > 0",
            "size([self, self].distinct()) > 0",
        ] {
            assert_eq!(spent(rule, doubled(40), LIMIT), None, "{rule}");
            assert!(spent(rule, doubled(3), LIMIT).is_some(), "{rule}");
        }
    }

    #[test]
    fn values_nest_to_a_depth() {
        let nested = |depth| (0..depth).fold(Value::Int(1), |inner, _| Value::list(vec![inner]));
        for rule in ["self == [self[0]]", "self", "size('%s'.format([self])) > 0"] {
            assert!(spent(rule, nested(100), LIMIT).is_some(), "{rule}");
            assert_eq!(spent(rule, nested(DEEPEST + 10), LIMIT), None, "{rule}");
        }
    }

    #[test]
    fn each_with_each_is_paid_for() {
        let items = |count: i64| Value::list((0..count).map(Value::Int).collect());
        for rule in ["sets.contains(self, self)", "size(self.distinct()) > 0"] {
            assert_eq!(spent(rule, items(2000), LIMIT), None, "{rule}");
            assert!(spent(rule, items(100), LIMIT).is_some(), "{rule}");
        }
        let set = Value::List(Arc::new((0..2000).map(Value::Int).collect()), ListKind::Set);
        assert_eq!(spent("self == self", set, LIMIT), None);
        let text = Value::string("a".repeat(100_000));
        assert_eq!(spent(&format!("self.matches('{}')", "a?".repeat(500)), text, LIMIT), None);
    }

    /// A loop that ends at its first item costs no more than that item.
    #[test]
    fn loops_do_not_copy_what_they_go_through() {
        let items = Value::list(vec![Value::Int(1); 300_000]);
        let rule = "self.exists(x, self.exists(y, y == 2))";
        assert_eq!(spent(rule, items.clone(), LIMIT), None);
        let rule = "lists.range(20000).all(x, self.exists(y, true))";
        assert!(spent(rule, items, LIMIT).is_some());
    }
}
