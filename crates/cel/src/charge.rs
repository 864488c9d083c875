//! Computes the cost of a call before it is made: for its arguments, and for its result.
//!
//! In: a function's name and the values of its arguments. Out: a cost, or that the result is too large.
//!
//! Invariant: an expression gets only memory that it has paid for. The size of a text or list that a
//! function creates is computed here first; a cost of one pays for ten bytes of text or one item. A
//! function that compares values pays for all nested values, because values share their parts: a list
//! that contains the same list twice is small in memory, but takes twice as long to compare.
//!
//! Deviation: upstream counts the size of arguments alone, and comparisons by their outermost size.

use cel_parser::common::ast::operators as op;

use crate::functions;
use crate::types::ListKind;
use crate::value::Value;

/// Bytes that cost as much as a node.
const BYTES_PER_COST: usize = 10;
/// The maximum size of a text, or of bytes, that an expression creates.
const TEXT_BYTES: usize = 16 << 20;
/// The maximum length of a list that a function creates.
const LIST_ITEMS: usize = 1 << 20;
/// The maximum nesting of values: comparing and dropping recurse.
const DEEPEST: usize = 500;
/// Bytes of a text that have the weight of one value.
const BYTES_PER_WEIGHT: usize = 64;
/// Values that are compared for a cost of one.
const WEIGHT_PER_COST: u64 = 16;
/// The maximum length, as text, of a value that is neither text nor a container.
const SCALAR_BYTES: u64 = 40;
/// The maximum length, as text, of a number with a precision.
const PRECISE_BYTES: usize = 1400;

/// The cost in addition to one for the call. `None`: the result is too large.
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

/// The cost of returning a result: the caller may write out all that it contains.
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

/// The cost of reading one argument of a function.
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

/// The cost of comparing values with each other, or texts with patterns.
fn compared(name: &str, of: &[&Value], left: u64) -> u64 {
    // A weight beyond this cannot be paid.
    let limit = left.saturating_mul(WEIGHT_PER_COST);
    let weight = |value: &Value| weight(value, limit);
    let paid = |weight: u64| weight / WEIGHT_PER_COST;
    // Each item of a list with each of another.
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

/// The new data that a function creates.
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
            // One more than can be paid suffices.
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

/// Counts until the limit.
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
        // In hexadecimal a text has twice the length.
        text_bytes(item, 0, limit, &mut sum);
        text_bytes(item, 0, limit, &mut sum);
    }
    Made::Text(usize::try_from(sum).unwrap_or(usize::MAX))
}

/// Adds the length of a value as text, until the sum exceeds the limit.
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

/// The number of values in a value; long texts count as several. Stops above the limit.
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

    /// The cost of an evaluation; `None` if it was stopped.
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
    fn too_large_results_are_not_created() {
        let a = |count: usize| "a".repeat(count);
        let four = Value::string("aaaa");
        let grown =
            |times: usize| format!("self{}", ".replace('', 'aaaaaaaaaaaaaaaaaaaa')".repeat(times));
        assert!(spent(&format!("size({}) > 0", grown(2)), four.clone(), LIMIT).is_some());
        for rule in [
            // The attack of the report: three chained calls made a GiB from four characters.
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
        // The same functions with small results.
        for rule in ["self + self", "self.split('')", "self.findAll('a')", "'%s'.format([self])"] {
            assert!(spent(&format!("size({rule}) > 0"), four.clone(), 100).is_some(), "{rule}");
        }
    }

    #[test]
    fn texts_and_lists_are_limited_for_every_budget() {
        let long = Value::string("a".repeat(9 << 20));
        assert_eq!(spent("size(self + self) > 0", long, u64::MAX), None);
        assert_eq!(spent("size(lists.range(2000000)) > 0", Value::Null, u64::MAX), None);
    }

    /// A value of 2^40 values in a few bytes.
    fn doubled(times: usize) -> Value {
        (0..times).fold(Value::Int(1), |inner, _| Value::list(vec![inner.clone(), inner]))
    }

    #[test]
    fn shared_parts_cost_each_time_they_are_read() {
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
    fn the_nesting_of_values_is_limited() {
        let nested = |depth| (0..depth).fold(Value::Int(1), |inner, _| Value::list(vec![inner]));
        for rule in ["self == [self[0]]", "self", "size('%s'.format([self])) > 0"] {
            assert!(spent(rule, nested(100), LIMIT).is_some(), "{rule}");
            assert_eq!(spent(rule, nested(DEEPEST + 10), LIMIT), None, "{rule}");
        }
    }

    #[test]
    fn comparisons_of_all_pairs_are_paid_for() {
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

    /// A loop that ends at its first item costs only that item.
    #[test]
    fn loops_do_not_copy_their_range() {
        let items = Value::list(vec![Value::Int(1); 300_000]);
        let rule = "self.exists(x, self.exists(y, y == 2))";
        assert_eq!(spent(rule, items.clone(), LIMIT), None);
        let rule = "lists.range(20000).all(x, self.exists(y, true))";
        assert!(spent(rule, items, LIMIT).is_some());
    }
}
