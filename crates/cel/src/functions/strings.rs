//! Strings and regular expressions. Upstream: cel-go's `ext.Strings`, Kubernetes' regex library.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};

use super::Answer;
use crate::value::Value;

const SIZE_LIMIT: usize = 1 << 20;

enum Regex {
    /// Character classes are ASCII, as in Go.
    Small(regex_lite::Regex),
    /// For patterns with Unicode classes.
    Big(regex::Regex),
}

impl Regex {
    fn new(pattern: &str) -> Result<Self, String> {
        let small = regex_lite::RegexBuilder::new(pattern).size_limit(SIZE_LIMIT).build();
        if let Ok(regex) = small {
            return Ok(Self::Small(regex));
        }
        let big = regex::RegexBuilder::new(pattern).size_limit(SIZE_LIMIT).build();
        big.map(Self::Big).map_err(|_| format!("error parsing regexp: `{pattern}`"))
    }

    fn is_match(&self, text: &str) -> bool {
        match self {
            Self::Small(regex) => regex.is_match(text),
            Self::Big(regex) => regex.is_match(text),
        }
    }

    fn find_all(&self, text: &str, limit: usize) -> Vec<String> {
        match self {
            Self::Small(regex) => {
                regex.find_iter(text).take(limit).map(|found| found.as_str().to_owned()).collect()
            }
            Self::Big(regex) => {
                regex.find_iter(text).take(limit).map(|found| found.as_str().to_owned()).collect()
            }
        }
    }
}

/// The number of matches of a pattern in a text, at most `most`. An invalid pattern has none.
pub(crate) fn count_matches(pattern: &str, text: &str, most: usize) -> usize {
    match Regex::new(pattern) {
        Ok(Regex::Small(regex)) => regex.find_iter(text).take(most).count(),
        Ok(Regex::Big(regex)) => regex.find_iter(text).take(most).count(),
        Err(_) => 0,
    }
}

fn text(text: impl Into<String>) -> Answer {
    Some(Ok(Value::string(text.into())))
}

fn texts(all: impl IntoIterator<Item = String>) -> Answer {
    Some(Ok(Value::list(all.into_iter().map(Value::string).collect())))
}

pub fn call(name: &str, of: &[Value]) -> Answer {
    match (name, of) {
        ("join", [Value::List(items, _), rest @ ..]) => return join(items, rest),
        ("strings.quote", [Value::String(given)]) => return text(format!("{:?}", &**given)),
        ("base64.encode", [Value::Bytes(bytes)]) => return text(STANDARD.encode(bytes)),
        ("base64.decode", [Value::String(given)]) => {
            let decoded = STANDARD.decode(&**given).or_else(|_| STANDARD_NO_PAD.decode(&**given));
            return Some(
                decoded.map(|bytes| Value::Bytes(bytes.into())).map_err(|e| e.to_string()),
            );
        }
        ("jsonpatch.escapeKey", [Value::String(key)]) => {
            return text(key.replace('~', "~0").replace('/', "~1"));
        }
        _ => {}
    }
    let [Value::String(given), rest @ ..] = of else { return None };
    match (name, rest) {
        ("contains", [Value::String(part)]) => Some(Ok(Value::Bool(given.contains(&**part)))),
        ("startsWith", [Value::String(part)]) => Some(Ok(Value::Bool(given.starts_with(&**part)))),
        ("endsWith", [Value::String(part)]) => Some(Ok(Value::Bool(given.ends_with(&**part)))),
        ("matches", [Value::String(pattern)]) => {
            Some(Regex::new(pattern).map(|regex| Value::Bool(regex.is_match(given))))
        }
        ("find", [Value::String(pattern)]) => Some(Regex::new(pattern).map(|regex| {
            Value::string(regex.find_all(given, 1).into_iter().next().unwrap_or_default())
        })),
        ("findAll", [Value::String(pattern), limit @ ..]) => {
            let limit = match limit {
                [Value::Int(limit)] => usize::try_from(*limit).unwrap_or(usize::MAX),
                _ => usize::MAX,
            };
            let found = Regex::new(pattern).map(|regex| regex.find_all(given, limit));
            Some(found.map(|all| Value::list(all.into_iter().map(Value::string).collect())))
        }
        ("lowerAscii", []) => text(given.to_ascii_lowercase()),
        ("upperAscii", []) => text(given.to_ascii_uppercase()),
        ("trim", []) => text(given.trim()),
        ("reverse", []) => text(given.chars().rev().collect::<String>()),
        ("charAt", [Value::Int(at)]) => {
            let count = given.chars().count() as i64;
            let found = usize::try_from(*at).ok().filter(|_| *at <= count);
            Some(match found {
                Some(at) => {
                    Ok(Value::string(given.chars().nth(at).map(String::from).unwrap_or_default()))
                }
                None => Err(format!("index out of range: {at}")),
            })
        }
        ("indexOf" | "lastIndexOf", [Value::String(part), start @ ..]) => {
            position(name == "lastIndexOf", given, part, start)
        }
        ("replace", [Value::String(from), Value::String(to), limit @ ..]) => match limit {
            [Value::Int(limit)] if *limit >= 0 => {
                text(given.replacen(&**from, to, usize::try_from(*limit).unwrap_or(usize::MAX)))
            }
            _ => text(given.replace(&**from, to)),
        },
        ("split", [Value::String(separator), limit @ ..]) => split(given, separator, limit),
        ("substring", [Value::Int(start)]) => substring(given, *start, None),
        ("substring", [Value::Int(start), Value::Int(end)]) => substring(given, *start, Some(*end)),
        ("format", [Value::List(arguments, _)]) => Some(format(given, arguments)),
        _ => None,
    }
}

fn join(items: &[Value], rest: &[Value]) -> Answer {
    let separator = match rest {
        [Value::String(separator)] => &**separator,
        _ => "",
    };
    let parts: Option<Vec<&str>> = items.iter().map(Value::as_str).collect();
    text(parts?.join(separator))
}

fn position(last: bool, given: &str, part: &str, start: &[Value]) -> Answer {
    let bound = match start {
        [Value::Int(at)] => match byte_of(given, *at) {
            Some(byte) => Some(byte),
            None => return Some(Err(format!("index out of range: {at}"))),
        },
        _ => None,
    };
    let found = if last {
        // It may start at the bound, and end after it.
        let end = bound.unwrap_or(given.len()).saturating_add(part.len());
        given[..given.floor_char_boundary(end)].rfind(part)
    } else {
        let from = bound.unwrap_or_default();
        given[from..].find(part).map(|found| from + found)
    };
    Some(Ok(Value::Int(found.map_or(-1, |byte| given[..byte].chars().count() as i64))))
}

/// The byte offset of a character, or of the end.
fn byte_of(text: &str, at: i64) -> Option<usize> {
    let at = usize::try_from(at).ok()?;
    text.char_indices().map(|(byte, _)| byte).chain([text.len()]).nth(at)
}

fn split(given: &str, separator: &str, limit: &[Value]) -> Answer {
    let limit = match limit {
        [Value::Int(limit)] => *limit,
        _ => -1,
    };
    let parts: Vec<String> = match limit {
        0 => vec![],
        _ if separator.is_empty() => given.chars().map(String::from).collect(),
        1.. => {
            let limit = usize::try_from(limit).unwrap_or(usize::MAX);
            given.splitn(limit, separator).map(str::to_owned).collect()
        }
        _ => given.split(separator).map(str::to_owned).collect(),
    };
    texts(parts)
}

fn substring(given: &str, start: i64, end: Option<i64>) -> Answer {
    let Some(from) = byte_of(given, start) else {
        return Some(Err(format!("index out of range: {start}")));
    };
    let to = match end {
        Some(end) => match byte_of(given, end) {
            Some(to) => to,
            None => return Some(Err(format!("index out of range: {end}"))),
        },
        None => given.len(),
    };
    if from > to {
        let end = end.unwrap_or_default();
        return Some(Err(format!("invalid substring range. start: {start}, end: {end}")));
    }
    text(&given[from..to])
}

/// `'%s is %d'.format([a, b])`
fn format(pattern: &str, arguments: &[Value]) -> Result<Value, String> {
    let mut out = String::new();
    let mut arguments = arguments.iter();
    let mut chars = pattern.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        if chars.next_if_eq(&'%').is_some() {
            out.push('%');
            continue;
        }
        let mut precision = None;
        if chars.next_if_eq(&'.').is_some() {
            let mut digits = String::new();
            while let Some(digit) = chars.next_if(char::is_ascii_digit) {
                digits.push(digit);
            }
            precision = digits.parse::<usize>().ok();
        }
        let clause = chars
            .next()
            .ok_or("could not parse formatting clause: unexpected end of format string")?;
        let argument = arguments.next().ok_or("index out of range")?;
        let precision = precision.unwrap_or(6).min(1000);
        out.push_str(&format_clause(clause, precision, argument)?);
    }
    Ok(Value::string(out))
}

fn format_clause(clause: char, precision: usize, value: &Value) -> Result<String, String> {
    let wrong =
        || format!("error during formatting: {clause:?} cannot be used with {}", value.type_name());
    Ok(match (clause, value) {
        ('s', value) => shown(value),
        ('d', Value::Int(number)) => number.to_string(),
        ('d', Value::Uint(number)) => number.to_string(),
        ('b', Value::Int(number)) => format!("{number:b}"),
        ('b', Value::Bool(flag)) => u8::from(*flag).to_string(),
        ('o', Value::Int(number)) => format!("{number:o}"),
        ('x', Value::Int(number)) => format!("{number:x}"),
        ('X', Value::Int(number)) => format!("{number:X}"),
        ('x', Value::String(text)) => text.bytes().map(|byte| format!("{byte:02x}")).collect(),
        ('X', Value::String(text)) => text.bytes().map(|byte| format!("{byte:02X}")).collect(),
        ('f', value) => format!("{:.precision$}", value.number().ok_or_else(wrong)?),
        ('e', value) => format!("{:.precision$e}", value.number().ok_or_else(wrong)?),
        _ => return Err(wrong()),
    })
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.to_string(),
        Value::Null => "null".into(),
        Value::Bytes(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::List(items, _) => {
            format!("[{}]", items.iter().map(shown).collect::<Vec<_>>().join(", "))
        }
        Value::Map(fields) => {
            let field =
                |(key, value): (&crate::value::Key, &Value)| format!("{key}: {}", shown(value));
            format!("{{{}}}", fields.iter().map(field).collect::<Vec<_>>().join(", "))
        }
        other => match other.to_json() {
            serde_json::Value::String(text) => text,
            json => json.to_string(),
        },
    }
}
