//! Writes YAML and JSON like kubectl.
//!
//! In: JSON trees. Out: YAML with sorted keys, unindented lists, long texts folded at 80 columns, and
//! quotes where a YAML 1.1 parser would not read a string; JSON indented by four with Go's escapes.
//!
//! It has its own emitter, because users compare and store this output: its quoting and folding must equal
//! those of Go's emitter, which no crate provides.

use serde_json::{Map, Value};

const WIDTH: usize = 80;

/// A document, with its final newline.
pub fn to_yaml(value: &Value) -> String {
    let mut out = String::new();
    match value {
        Value::Object(map) if !map.is_empty() => block_map(&mut out, map, 0, false),
        Value::Array(list) if !list.is_empty() => block_list(&mut out, list, 0),
        other => {
            scalar(&mut out, other, 0, 0);
            out.push('\n');
        }
    }
    out
}

pub fn to_json(value: &Value) -> String {
    let mut bytes = vec![];
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, formatter);
    serde::Serialize::serialize(value, &mut serializer).expect("a tree is always JSON");
    let text = String::from_utf8(bytes).expect("JSON is UTF-8");
    go_escapes(&text)
}

/// Go's encoder escapes characters that could end a script in a web page.
pub fn go_escapes(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                out.push_str(&format!("\\u{:04x}", c as u32));
            }
            _ => out.push(c),
        }
    }
    out
}

fn block_map(out: &mut String, map: &Map<String, Value>, indent: usize, is_first_inline: bool) {
    let mut keys: Vec<&String> = map.keys().collect();
    keys.sort_unstable_by(|a, b| natural(a, b));
    for (index, key) in keys.into_iter().enumerate() {
        if index > 0 || !is_first_inline {
            out.extend(std::iter::repeat_n(' ', indent));
        }
        let key_text = key_text(key);
        out.push_str(&key_text);
        out.push(':');
        entry(out, &map[key], indent, indent + key_text.chars().count() + 1);
    }
}

/// Go's order of keys: numbers by value, and letters after other characters. For the keys of API objects
/// this is the order of bytes, except for numbers.
fn natural(a: &str, b: &str) -> std::cmp::Ordering {
    let (mut a_rest, mut b_rest) = (a, b);
    loop {
        let (Some(x), Some(y)) = (a_rest.chars().next(), b_rest.chars().next()) else {
            return a_rest.len().cmp(&b_rest.len()).then_with(|| a.cmp(b));
        };
        if x.is_ascii_digit() && y.is_ascii_digit() {
            let number = |text: &str| {
                let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
                (text[..end].trim_start_matches('0').to_owned(), end)
            };
            let ((p, p_end), (q, q_end)) = (number(a_rest), number(b_rest));
            let order = p.len().cmp(&q.len()).then_with(|| p.cmp(&q));
            if order.is_ne() {
                return order;
            }
            (a_rest, b_rest) = (&a_rest[p_end..], &b_rest[q_end..]);
            continue;
        }
        if x != y {
            return match (x.is_alphabetic(), y.is_alphabetic()) {
                (true, false) => std::cmp::Ordering::Greater,
                (false, true) => std::cmp::Ordering::Less,
                _ => x.cmp(&y),
            };
        }
        (a_rest, b_rest) = (&a_rest[x.len_utf8()..], &b_rest[y.len_utf8()..]);
    }
}

/// The text after a key's colon, with its newline.
fn entry(out: &mut String, value: &Value, indent: usize, column: usize) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            out.push('\n');
            block_map(out, map, indent + 2, false);
        }
        Value::Array(list) if !list.is_empty() => {
            out.push('\n');
            block_list(out, list, indent);
        }
        other => {
            out.push(' ');
            scalar(out, other, indent, column + 1);
            out.push('\n');
        }
    }
}

fn block_list(out: &mut String, list: &[Value], indent: usize) {
    for element in list {
        out.extend(std::iter::repeat_n(' ', indent));
        inline_element(out, element, indent);
    }
}

/// Writes `- ` and the element after the indentation, with its newline.
fn inline_element(out: &mut String, element: &Value, indent: usize) {
    out.push_str("- ");
    match element {
        Value::Object(map) if !map.is_empty() => block_map(out, map, indent + 2, true),
        Value::Array(list) if !list.is_empty() => {
            for (index, nested) in list.iter().enumerate() {
                if index > 0 {
                    out.extend(std::iter::repeat_n(' ', indent + 2));
                }
                inline_element(out, nested, indent + 2);
            }
        }
        other => {
            scalar(out, other, indent, indent + 2);
            out.push('\n');
        }
    }
}

fn scalar(out: &mut String, value: &Value, indent: usize, column: usize) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(flag) => out.push_str(if *flag { "true" } else { "false" }),
        Value::Number(number) => out.push_str(&number.to_string()),
        Value::Object(_) => out.push_str("{}"),
        Value::Array(_) => out.push_str("[]"),
        Value::String(text) => string(out, text, indent, column),
    }
}

fn key_text(key: &str) -> String {
    match style(key) {
        Style::Plain => key.to_owned(),
        Style::Single => format!("'{}'", key.replace('\'', "''")),
        Style::Double | Style::Literal => {
            let mut out = String::new();
            double_quoted(&mut out, key, 0, 0, false);
            out
        }
    }
}

fn string(out: &mut String, text: &str, indent: usize, column: usize) {
    match style(text) {
        Style::Plain => folded(out, text, indent, column),
        Style::Single => {
            out.push('\'');
            folded(out, &text.replace('\'', "''"), indent, column + 1);
            out.push('\'');
        }
        Style::Double => double_quoted(out, text, indent, column, true),
        Style::Literal => literal(out, text, indent),
    }
}

/// Writes words, with a line break instead of a blank when the line is full.
fn folded(out: &mut String, text: &str, indent: usize, mut column: usize) {
    let characters: Vec<char> = text.chars().collect();
    let mut after_space = false;
    for (index, &c) in characters.iter().enumerate() {
        let inside = index > 0 && index + 1 < characters.len();
        let breaks =
            c == ' ' && inside && !after_space && column > WIDTH && characters[index + 1] != ' ';
        after_space = c == ' ';
        if breaks {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent + 2));
            column = indent + 2;
        } else {
            out.push(c);
            column += 1;
        }
    }
}

fn double_quoted(out: &mut String, text: &str, indent: usize, mut column: usize, folds: bool) {
    out.push('"');
    column += 1;
    let characters: Vec<char> = text.chars().collect();
    let mut after_space = false;
    for (index, &c) in characters.iter().enumerate() {
        if !is_printable(c) || matches!(c, '"' | '\\' | '\n' | '\u{feff}') {
            let escape = escape(c);
            column += escape.chars().count();
            out.push_str(&escape);
            after_space = false;
        } else if c == ' ' {
            let inside = index > 0 && index + 1 < characters.len();
            if folds && !after_space && column > WIDTH && inside {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent + 2));
                column = indent + 2;
                if characters[index + 1] == ' ' {
                    out.push('\\');
                    column += 1;
                }
            } else {
                out.push(' ');
                column += 1;
            }
            after_space = true;
        } else {
            out.push(c);
            column += 1;
            after_space = false;
        }
    }
    out.push('"');
}

fn escape(c: char) -> String {
    match c {
        '"' => "\\\"".into(),
        '\\' => "\\\\".into(),
        '\n' => "\\n".into(),
        '\t' => "\\t".into(),
        '\r' => "\\r".into(),
        '\0' => "\\0".into(),
        '\u{7}' => "\\a".into(),
        '\u{8}' => "\\b".into(),
        '\u{b}' => "\\v".into(),
        '\u{c}' => "\\f".into(),
        '\u{1b}' => "\\e".into(),
        '\u{85}' => "\\N".into(),
        '\u{a0}' => "\\_".into(),
        '\u{2028}' => "\\L".into(),
        '\u{2029}' => "\\P".into(),
        c if (c as u32) <= 0xff => format!("\\x{:02X}", c as u32),
        c if (c as u32) <= 0xffff => format!("\\u{:04X}", c as u32),
        c => format!("\\U{:08X}", c as u32),
    }
}

fn literal(out: &mut String, text: &str, indent: usize) {
    out.push('|');
    if text.starts_with([' ', '\n']) {
        out.push('2');
    }
    if !text.ends_with('\n') {
        out.push('-');
    } else if text.ends_with("\n\n") || text == "\n" {
        out.push('+');
    }
    let body = text.strip_suffix('\n').unwrap_or(text);
    for line in body.split('\n') {
        out.push('\n');
        if !line.is_empty() {
            out.extend(std::iter::repeat_n(' ', indent + 2));
            out.push_str(line);
        }
    }
}

#[derive(Debug, PartialEq)]
enum Style {
    Plain,
    Single,
    Double,
    Literal,
}

fn style(text: &str) -> Style {
    let has_break = text.contains('\n');
    let special = text.chars().any(|c| !is_printable(c) && c != '\n') || text.contains('\u{feff}');
    let space_break = text.contains(" \n");
    if has_break {
        let ends_blank = text.ends_with(' ');
        return if special || space_break || ends_blank { Style::Double } else { Style::Literal };
    }
    if !is_text_to_readers(text) || special {
        return Style::Double;
    }
    if text.starts_with(' ') || text.ends_with(' ') || has_indicator(text) {
        return Style::Single;
    }
    Style::Plain
}

/// Whether a plain scalar would be parsed as structure.
fn has_indicator(text: &str) -> bool {
    if text.starts_with("---") || text.starts_with("...") {
        return true;
    }
    let characters: Vec<char> = text.chars().collect();
    let blank_after = |index: usize| characters.get(index + 1).is_none_or(|c| *c == ' ');
    characters.iter().enumerate().any(|(index, c)| match c {
        '#' | ',' | '[' | ']' | '{' | '}' | '&' | '*' | '!' | '|' | '>' | '\'' | '"' | '%'
        | '@' | '`'
            if index == 0 =>
        {
            true
        }
        '-' | '?' if index == 0 => blank_after(0),
        ':' => blank_after(index),
        '#' => characters[index - 1] == ' ',
        _ => false,
    })
}

/// Go's emitter does not count a tab as printable.
fn is_printable(c: char) -> bool {
    matches!(c, ' '..='~' | '\u{a0}'..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'..)
        && !matches!(c, '\u{a0}' | '\u{2028}' | '\u{2029}')
        || c == '\u{a0}'
}

/// False if a YAML 1.1 parser would not read the plain text as a string.
fn is_text_to_readers(text: &str) -> bool {
    const WORDS: &[&str] = &[
        "", "~", "null", "Null", "NULL", "true", "True", "TRUE", "false", "False", "FALSE", "y",
        "Y", "yes", "Yes", "YES", "n", "N", "no", "No", "NO", "on", "On", "ON", "off", "Off",
        "OFF", ".nan", ".NaN", ".NAN", ".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF", "-.inf",
        "-.Inf", "-.INF", "<<",
    ];
    !WORDS.contains(&text) && !is_number(text) && !is_base_60(text) && !is_timestamp(text)
}

fn is_number(text: &str) -> bool {
    let plain = text.replace('_', "");
    let unsigned = plain.strip_prefix(['+', '-']).unwrap_or(&plain);
    let starts = unsigned.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    if !starts || text.starts_with('_') {
        return false;
    }
    for (prefix, radix) in [("0x", 16), ("0X", 16), ("0b", 2), ("0o", 8)] {
        if let Some(digits) = unsigned.strip_prefix(prefix) {
            return !digits.is_empty() && digits.chars().all(|c| c.is_digit(radix));
        }
    }
    let (mantissa, exponent) = match unsigned.find(['e', 'E']) {
        Some(at) => (&unsigned[..at], Some(&unsigned[at + 1..])),
        None => (unsigned, None),
    };
    let digits = |text: &str| text.chars().all(|c| c.is_ascii_digit());
    let exponent_fits = exponent.is_none_or(|text| {
        let text = text.strip_prefix(['+', '-']).unwrap_or(text);
        !text.is_empty() && digits(text)
    });
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    exponent_fits && digits(whole) && digits(fraction) && !(whole.is_empty() && fraction.is_empty())
}

/// `1:20`: a base-60 number in YAML 1.1, so it is quoted.
fn is_base_60(text: &str) -> bool {
    let text = text.strip_prefix(['+', '-']).unwrap_or(text);
    let mut parts = text.split(':');
    let first = parts.next().unwrap_or_default();
    let rest: Vec<&str> = parts.collect();
    let digits = |text: &str| text.chars().all(|c| c.is_ascii_digit() || c == '_');
    let is_sixty = |text: &str| match text.as_bytes() {
        [one] => one.is_ascii_digit(),
        [ten, one] => (b'0'..=b'5').contains(ten) && one.is_ascii_digit(),
        _ => false,
    };
    let Some((last, middle)) = rest.split_last() else { return false };
    let (last, fraction) = last.split_once('.').unwrap_or((last, ""));
    first.starts_with(|c: char| c.is_ascii_digit())
        && digits(first)
        && middle.iter().all(|part| is_sixty(part))
        && is_sixty(last)
        && digits(fraction)
}

/// `2006-1-2`, alone or with a time after it.
fn is_timestamp(text: &str) -> bool {
    let bytes = text.as_bytes();
    if bytes.len() < 8 || !bytes[..4].iter().all(u8::is_ascii_digit) || bytes[4] != b'-' {
        return false;
    }
    let (date, time) = match text.find(['T', 't', ' ']) {
        Some(at) => (&text[..at], Some(text[at + 1..].trim_start())),
        None => (text, None),
    };
    let parts: Vec<&str> = date.split('-').collect();
    let is_date = parts.len() == 3
        && parts[1..].iter().all(|part| {
            matches!(part.len(), 1 | 2) && part.bytes().all(|byte| byte.is_ascii_digit())
        })
        && parts[1].parse().is_ok_and(|month: u8| (1..=12).contains(&month))
        && parts[2].parse().is_ok_and(|day: u8| (1..=31).contains(&day));
    let is_time = |time: &str| {
        let clock = time.find(['Z', '+', '-', ' ']).map_or(time, |at| &time[..at]);
        let zone = &time[clock.len()..];
        let fields: Vec<&str> = clock.split(':').collect();
        fields.len() == 3
            && fields.iter().all(|field| {
                !field.is_empty() && field.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
            })
            // Go's layouts: with `T` a time zone is required.
            && (zone == "Z" || zone.len() == 6 || zone.is_empty() && text.contains(' '))
    };
    is_date && time.is_none_or(is_time)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn structure_equals_gos() {
        let value = json!({
            "spec": {"containers": [{"name": "a", "args": ["-x", "y z"], "empty": {}}, {"name": "b", "none": []}],
                "matrix": [[1, 2], ["a"]]},
            "apiVersion": "v1",
            "nothing": null,
        });
        let expected = "\
apiVersion: v1
nothing: null
spec:
  containers:
  - args:
    - -x
    - y z
    empty: {}
    name: a
  - name: b
    none: []
  matrix:
  - - 1
    - 2
  - - a
";
        assert_eq!(to_yaml(&value), expected);
        assert_eq!(to_yaml(&json!("x")), "x\n");
    }

    #[test]
    fn scalars_are_quoted_like_gos() {
        for (text, expected) in [
            ("plain", "plain"),
            ("", "\"\""),
            ("true", "\"true\""),
            ("y", "\"y\""),
            ("null", "\"null\""),
            ("123", "\"123\""),
            ("1.5e3", "\"1.5e3\""),
            ("0x1F", "\"0x1F\""),
            ("1_000", "\"1_000\""),
            ("1:20", "\"1:20\""),
            ("2024-01-02T03:04:05Z", "\"2024-01-02T03:04:05Z\""),
            ("2024-01-02", "\"2024-01-02\""),
            ("1.2.3", "1.2.3"),
            ("10.42.0.1", "10.42.0.1"),
            ("100m", "100m"),
            ("a: b", "'a: b'"),
            ("a:b", "a:b"),
            ("a #b", "'a #b'"),
            ("*", "'*'"),
            ("- x", "'- x'"),
            ("-x", "-x"),
            ("it's", "it's"),
            ("'q'", "'''q'''"),
            ("{a}", "'{a}'"),
            (" x", "' x'"),
            ("a\tb", "\"a\\tb\""),
            ("a\nb", "|-\n  a\n  b"),
            ("a\nb\n", "|\n  a\n  b"),
            ("a\n\nb\n\n", "|+\n  a\n\n  b\n"),
            (" a\nb", "|2-\n   a\n  b"),
            ("a \nb", "\"a \\nb\""),
            ("größer", "größer"),
            ("2024-1-2 3:04:05", "\"2024-1-2 3:04:05\""),
            ("=", "="),
            (".", "."),
            ("0o7", "\"0o7\""),
            ("08", "\"08\""),
            ("0b1", "\"0b1\""),
            ("-", "'-'"),
            ("?x", "?x"),
            ("\"dq\"", "'\"dq\"'"),
            ("x: ", "'x: '"),
            ("a,b", "a,b"),
            ("~", "\"~\""),
            ("NaN", "NaN"),
            (".5", "\".5\""),
            ("+1", "\"+1\""),
            ("--- a", "'--- a'"),
            ("1_", "\"1_\""),
            ("_1", "_1"),
            ("1e", "1e"),
            ("e1", "e1"),
            ("\u{1b}[0m", "\"\\e[0m\""),
        ] {
            let mut out = String::new();
            string(&mut out, text, 0, 0);
            assert_eq!(out, expected, "{text:?}");
        }
    }

    #[test]
    fn long_lines_are_folded() {
        let text = format!("{} end", ["word"; 16].join(" "));
        let got = to_yaml(&json!({ "m": text }));
        let expected = format!("m: {}\n  end\n", ["word"; 16].join(" "));
        assert_eq!(got, expected);
    }

    #[test]
    fn json_equals_gos() {
        let got = to_json(&json!({"b": "<none>", "a": [1], "e": [], "m": {}}));
        let expected = "{\n    \"a\": [\n        1\n    ],\n    \"b\": \"\\u003cnone\\u003e\",\n    \"e\": [],\n    \"m\": {}\n}";
        assert_eq!(got, expected);
    }

    #[test]
    fn numbers_in_keys_are_numbers() {
        let mut keys = ["a10", "a9", "a", "b-1", "A"];
        keys.sort_by(|a, b| natural(a, b));
        assert_eq!(keys, ["A", "a", "a9", "a10", "b-1"]);
    }
}
