//! The JSON paths of printer columns, scales and selectable fields: fields, list
//! indexes, `[*]`, and comparisons (`[?(@.type=="Ready")]`). The first match counts.
//! Upstream: `client-go/util/jsonpath`, as far as CRDs use it.

use serde_json::Value;

#[derive(Clone, Debug, PartialEq)]
pub struct JsonPath(Box<[Step]>);

#[derive(Clone, Debug, PartialEq)]
enum Step {
    Field(Box<str>),
    Index(i64),
    All,
    Filter {
        path: JsonPath,
        test: Test,
        value: Value,
    },
    /// Any depth below (`..name`).
    Below(Box<str>),
    /// An unsupported step, which matches nothing.
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Test {
    Exists,
    Equal,
    Unequal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

impl JsonPath {
    pub fn parse(text: &str) -> Self {
        let text = text.trim();
        let text = text.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')).unwrap_or(text);
        let mut rest = text.strip_prefix('$').unwrap_or(text);
        let mut steps = vec![];
        while !rest.is_empty() {
            let Some((step, after)) = step(rest) else {
                steps.push(Step::Nothing);
                break;
            };
            steps.extend(step);
            rest = after;
        }
        Self(steps.into())
    }

    /// The first match of the path.
    pub fn first<'a>(&self, root: &'a Value) -> Option<&'a Value> {
        let mut found = vec![root];
        for step in &self.0 {
            let mut next = vec![];
            found.into_iter().for_each(|value| step.follow(value, &mut next));
            found = next;
        }
        found.first().copied()
    }
}

impl Step {
    fn follow<'a>(&self, value: &'a Value, out: &mut Vec<&'a Value>) {
        match self {
            Self::Field(name) => out.extend(value.get(&**name)),
            Self::Index(index) => {
                let Some(items) = value.as_array() else { return };
                let length = i64::try_from(items.len()).unwrap_or(i64::MAX);
                let at = if *index < 0 { length + index } else { *index };
                out.extend(usize::try_from(at).ok().and_then(|at| items.get(at)));
            }
            Self::All => match value {
                Value::Array(items) => out.extend(items),
                Value::Object(fields) => out.extend(fields.values()),
                _ => {}
            },
            Self::Filter { path, test, value: wanted } => {
                let items = value.as_array().into_iter().flatten();
                out.extend(items.filter(|item| test.holds(path.first(item), wanted)));
            }
            Self::Below(name) => {
                out.extend(value.get(&**name));
                match value {
                    Value::Array(items) => items.iter().for_each(|item| self.follow(item, out)),
                    Value::Object(fields) => {
                        fields.values().for_each(|field| self.follow(field, out));
                    }
                    _ => {}
                }
            }
            Self::Nothing => {}
        }
    }
}

impl Test {
    fn holds(self, found: Option<&Value>, wanted: &Value) -> bool {
        let Some(found) = found else { return false };
        let order = match (found, wanted) {
            (Value::Number(a), Value::Number(b)) => a.as_f64().partial_cmp(&b.as_f64()),
            (Value::String(a), Value::String(b)) => a.partial_cmp(b),
            (a, b) if a == b => Some(std::cmp::Ordering::Equal),
            _ => None,
        };
        match self {
            Self::Exists => true,
            Self::Equal => order.is_some_and(|order| order.is_eq()),
            Self::Unequal => order.is_none_or(|order| order.is_ne()),
            Self::Less => order.is_some_and(|order| order.is_lt()),
            Self::LessOrEqual => order.is_some_and(|order| order.is_le()),
            Self::Greater => order.is_some_and(|order| order.is_gt()),
            Self::GreaterOrEqual => order.is_some_and(|order| order.is_ge()),
        }
    }
}

/// The next step (none for a lone dot) and the rest of the path.
fn step(text: &str) -> Option<(Option<Step>, &str)> {
    if let Some(after) = text.strip_prefix("..") {
        let (name, rest) = name(after);
        return (!name.is_empty()).then(|| (Some(Step::Below(name.into())), rest));
    }
    if let Some(after) = text.strip_prefix('.') {
        if after.starts_with('[') || after.is_empty() {
            return Some((None, after));
        }
        let (name, rest) = name(after);
        let step = if name == "*" { Step::All } else { Step::Field(name.into()) };
        return Some((Some(step), rest));
    }
    if let Some(after) = text.strip_prefix("[?(") {
        let end = after.find(")]")?;
        return Some((Some(filter(&after[..end])?), &after[end + 2..]));
    }
    if let Some(after) = text.strip_prefix('[') {
        let quote = after.chars().next().filter(|c| matches!(c, '\'' | '"'));
        let (inside, rest) = match quote {
            Some(quote) => {
                let end = after[1..].find(quote)? + 1;
                (&after[1..end], after[end + 1..].strip_prefix(']')?)
            }
            None => after.split_once(']')?,
        };
        let step = match inside {
            _ if quote.is_some() => Step::Field(inside.into()),
            "*" | ":" => Step::All,
            number => Step::Index(number.trim().parse().ok()?),
        };
        return Some((Some(step), rest));
    }
    let (name, rest) = name(text);
    (!name.is_empty()).then(|| (Some(Step::Field(name.into())), rest))
}

/// A field's name. A backslash escapes a dot.
fn name(text: &str) -> (String, &str) {
    let mut name = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => name.extend(chars.next().map(|(_, c)| c)),
            '.' | '[' => return (name, &text[at..]),
            c => name.push(c),
        }
    }
    (name, "")
}

fn filter(text: &str) -> Option<Step> {
    const TESTS: &[(&str, Test)] = &[
        ("==", Test::Equal),
        ("!=", Test::Unequal),
        ("<=", Test::LessOrEqual),
        (">=", Test::GreaterOrEqual),
        ("<", Test::Less),
        (">", Test::Greater),
    ];
    let split = TESTS.iter().find_map(|(sign, test)| {
        let (left, right) = text.split_once(sign)?;
        Some((left, *test, right))
    });
    let (left, test, right) = split.unwrap_or((text, Test::Exists, ""));
    let path = JsonPath::parse(left.trim().strip_prefix('@')?);
    let right = right.trim();
    let unquoted = ['"', '\'']
        .iter()
        .find_map(|quote| right.strip_prefix(*quote).and_then(|rest| rest.strip_suffix(*quote)));
    let value = match unquoted {
        Some(text) => Value::from(text),
        None => serde_json::from_str(right).unwrap_or(Value::Null),
    };
    Some(Step::Filter { path, test, value })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn paths_find_the_first_match() {
        let object = json!({
            "spec": { "a": 1, "list": ["x", "y"], "b.c": true },
            "status": { "conditions": [
                { "type": "Synced", "status": "False" }, { "type": "Ready", "status": "True" } ] },
        });
        let check = |path: &str, expected: Value| {
            let found = JsonPath::parse(path).first(&object).cloned().unwrap_or(Value::Null);
            assert_eq!(found, expected, "{path}");
        };
        check(".spec.a", json!(1));
        check("{.spec.a}", json!(1));
        check(".spec.list[1]", json!("y"));
        check(".spec.list[-1]", json!("y"));
        check(".spec.list[*]", json!("x"));
        check(".spec.b\\.c", json!(true));
        check(".spec['b.c']", json!(true));
        check(".status.conditions[?(@.type==\"Ready\")].status", json!("True"));
        check(".status.conditions[?(@.type=='Other')].status", Value::Null);
        check(".status..type", json!("Synced"));
        check(".nothing.there", Value::Null);
        check(".spec.list[", Value::Null);
    }
}
