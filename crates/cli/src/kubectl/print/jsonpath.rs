//! kubectl's JSONPath templates: `{.metadata.name}`, `{range .items[*]}…{end}`, filters.
//!
//! In: a template and a JSON tree. Out: text, or the values found by one path (for columns and
//! sorting). Upstream: `k8s.io/client-go/util/jsonpath`.
//!
//! A template is text with actions in braces; an action is a path (`.a.b`, `['a']`, `[0]`, `[-1]`,
//! `[1:3]`, `[*]`, `..name`, `[?(@.a=="b")]`, unions `[0,2]`), a quoted text, `range PATH` or `end`.

use serde_json::Value;

#[derive(Clone, Debug, PartialEq)]
enum Node {
    Text(String),
    Path(Vec<Step>),
    /// The nodes up to `end`, once for each value.
    Range(Vec<Step>, Vec<Node>),
}

#[derive(Clone, Debug, PartialEq)]
enum Step {
    Root,
    Field(String),
    Fields(Vec<String>),
    Wildcard,
    Recursive,
    Slice(Option<i64>, Option<i64>, i64),
    Indexes(Vec<i64>),
    Filter(Operand, Option<(Operator, Operand)>),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Operator {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

#[derive(Clone, Debug, PartialEq)]
enum Operand {
    Path(Vec<Step>),
    Literal(Value),
}

#[derive(Clone, Debug)]
pub struct Template(Vec<Node>);

type Parsed<T> = Result<T, String>;

impl Template {
    pub fn parse(text: &str) -> Parsed<Self> {
        let mut parser = Parser { rest: text };
        let nodes = parser.nodes(false)?;
        Ok(Self(nodes))
    }

    /// A path for columns and `--sort-by`: braces and the first dot are optional.
    pub fn relaxed(text: &str) -> Parsed<Self> {
        let trimmed = text.trim();
        let inner = trimmed.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
        let inner = inner.unwrap_or(trimmed);
        if inner.is_empty() {
            return Err("unexpected path string, expected a 'name1.name2' or '.name1.name2' or '{name1.name2}' or '{.name1.name2}'".into());
        }
        let dot = if inner.starts_with(['.', '[', '$']) { "" } else { "." };
        Self::parse(&format!("{{{dot}{inner}}}"))
    }

    pub fn print(&self, value: &Value) -> String {
        let mut out = String::new();
        print(&self.0, value, value, &mut out);
        out
    }

    /// The values that the template's paths find.
    pub fn find<'v>(&self, value: &'v Value) -> Vec<&'v Value> {
        let paths = self.0.iter().filter_map(|node| match node {
            Node::Path(steps) => Some(steps),
            _ => None,
        });
        paths.flat_map(|steps| walk(steps, value, value)).collect()
    }
}

fn print(nodes: &[Node], root: &Value, here: &Value, out: &mut String) {
    for node in nodes {
        match node {
            Node::Text(text) => out.push_str(text),
            Node::Path(steps) => {
                let found: Vec<String> = walk(steps, root, here).into_iter().map(text_of).collect();
                out.push_str(&found.join(" "));
            }
            Node::Range(steps, body) => {
                for value in walk(steps, root, here) {
                    print(body, root, value, out);
                }
            }
        }
    }
}

/// A string without quotes, other values as JSON.
pub fn text_of(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => super::yaml::go_escapes(&other.to_string()),
    }
}

fn walk<'v>(steps: &[Step], root: &'v Value, here: &'v Value) -> Vec<&'v Value> {
    let mut found = vec![here];
    for step in steps {
        found = found.into_iter().flat_map(|value| take(step, root, value)).collect();
    }
    found
}

fn take<'v>(step: &Step, root: &'v Value, value: &'v Value) -> Vec<&'v Value> {
    match step {
        Step::Root => vec![root],
        Step::Field(name) => value.get(name).into_iter().collect(),
        Step::Fields(names) => names.iter().filter_map(|name| value.get(name)).collect(),
        Step::Wildcard => children(value),
        Step::Recursive => {
            let mut all = vec![value];
            let mut at = 0;
            while at < all.len() {
                all.extend(children(all[at]));
                at += 1;
            }
            all
        }
        Step::Indexes(indexes) => {
            let Some(list) = value.as_array() else { return vec![] };
            indexes.iter().filter_map(|index| list.get(position(*index, list.len())?)).collect()
        }
        Step::Slice(start, end, stride) => slice(value, *start, *end, *stride),
        Step::Filter(left, test) => {
            let passes = |element: &&Value| passes(left, test.as_ref(), root, element);
            children(value).into_iter().filter(passes).collect()
        }
    }
}

fn children(value: &Value) -> Vec<&Value> {
    match value {
        Value::Array(list) => list.iter().collect(),
        Value::Object(map) => map.values().collect(),
        _ => vec![],
    }
}

fn position(index: i64, length: usize) -> Option<usize> {
    let length = i64::try_from(length).ok()?;
    usize::try_from(if index < 0 { index + length } else { index }).ok()
}

fn slice(value: &Value, start: Option<i64>, end: Option<i64>, stride: i64) -> Vec<&Value> {
    let Some(list) = value.as_array() else { return vec![] };
    let bound = |index: i64| position(index, list.len()).unwrap_or(0).min(list.len());
    let (start, end) = (bound(start.unwrap_or(0)), end.map_or(list.len(), bound));
    let stride = usize::try_from(stride).unwrap_or(1).max(1);
    list.get(start..end.max(start)).unwrap_or_default().iter().step_by(stride).collect()
}

fn passes(
    left: &Operand,
    test: Option<&(Operator, Operand)>,
    root: &Value,
    element: &Value,
) -> bool {
    let value = |operand: &Operand| match operand {
        Operand::Literal(value) => Some(value.clone()),
        Operand::Path(steps) => walk(steps, root, element).first().map(|found| (*found).clone()),
    };
    let Some(left) = value(left) else { return false };
    let Some((operator, right)) = test else { return true };
    let Some(right) = value(right) else { return false };
    let order = match (left.as_f64(), right.as_f64()) {
        (Some(a), Some(b)) => a.partial_cmp(&b),
        _ => match (&left, &right) {
            (Value::String(a), Value::String(b)) => Some(a.cmp(b)),
            // Like upstream, compares a string with a bare word or number as text.
            (a, b) => (text_of(a) == text_of(b)).then_some(std::cmp::Ordering::Equal),
        },
    };
    match operator {
        Operator::Equal => order.is_some_and(|order| order.is_eq()),
        Operator::NotEqual => order.is_none_or(|order| order.is_ne()),
        Operator::Less => order.is_some_and(|order| order.is_lt()),
        Operator::LessOrEqual => order.is_some_and(|order| order.is_le()),
        Operator::Greater => order.is_some_and(|order| order.is_gt()),
        Operator::GreaterOrEqual => order.is_some_and(|order| order.is_ge()),
    }
}

/// For sorting: numbers by value, others as text; missing values come first.
pub fn compare(a: Option<&Value>, b: Option<&Value>) -> std::cmp::Ordering {
    match (a, b) {
        (Some(a), Some(b)) => match (a.as_f64(), b.as_f64()) {
            (Some(a), Some(b)) => a.total_cmp(&b),
            _ => text_of(a).cmp(&text_of(b)),
        },
        (a, b) => a.is_some().cmp(&b.is_some()),
    }
}

struct Parser<'t> {
    rest: &'t str,
}

impl Parser<'_> {
    /// Parses text and actions up to the end, or up to `{end}` inside a range.
    fn nodes(&mut self, in_range: bool) -> Parsed<Vec<Node>> {
        let mut nodes = vec![];
        while !self.rest.is_empty() {
            let Some(at) = self.rest.find('{') else {
                nodes.push(Node::Text(std::mem::take(&mut self.rest).to_owned()));
                break;
            };
            if at > 0 {
                nodes.push(Node::Text(self.rest[..at].to_owned()));
            }
            self.rest = &self.rest[at + 1..];
            let action = self.action_text()?;
            let action = action.trim();
            if action == "end" {
                return if in_range {
                    Ok(nodes)
                } else {
                    Err("not in range, nothing to end".into())
                };
            }
            if let Some(path) = action.strip_prefix("range ") {
                let steps = parse_path(path.trim())?;
                nodes.push(Node::Range(steps, self.nodes(true)?));
            } else {
                nodes.extend(parse_action(action)?);
            }
        }
        if in_range { Err("unexpected end of range".into()) } else { Ok(nodes) }
    }

    /// The text up to the closing brace, outside of quotes.
    fn action_text(&mut self) -> Parsed<String> {
        let mut quote = None;
        let mut escaped = false;
        for (at, c) in self.rest.char_indices() {
            match quote {
                _ if escaped => escaped = false,
                Some(_) if c == '\\' => escaped = true,
                Some(mark) if c == mark => quote = None,
                Some(_) => {}
                None if c == '"' || c == '\'' => quote = Some(c),
                None if c == '}' => {
                    let text = self.rest[..at].to_owned();
                    self.rest = &self.rest[at + 1..];
                    return Ok(text);
                }
                None => {}
            }
        }
        Err("unclosed action".into())
    }
}

/// Parses paths and quoted strings, one after another.
fn parse_action(action: &str) -> Parsed<Vec<Node>> {
    if action.starts_with(['"', '\'']) {
        let (text, rest) = quoted(action)?;
        let mut nodes = vec![Node::Text(text)];
        if !rest.trim().is_empty() {
            nodes.extend(parse_action(rest.trim())?);
        }
        return Ok(nodes);
    }
    Ok(vec![Node::Path(parse_path(action)?)])
}

/// A quoted string at the start, and the rest.
fn quoted(text: &str) -> Parsed<(String, &str)> {
    let mark = text.chars().next().unwrap_or('"');
    let mut out = String::new();
    let mut characters = text.char_indices().skip(1);
    while let Some((at, c)) = characters.next() {
        match c {
            '\\' => match characters.next().map(|(_, c)| c) {
                Some('n') => out.push('\n'),
                Some('t') => out.push('\t'),
                Some('r') => out.push('\r'),
                Some(other) => out.push(other),
                None => break,
            },
            c if c == mark => return Ok((out, &text[at + 1..])),
            c => out.push(c),
        }
    }
    Err("unterminated quoted string".into())
}

fn parse_path(text: &str) -> Parsed<Vec<Step>> {
    let mut steps = vec![];
    let mut rest = text;
    if let Some(after) = rest.strip_prefix('$') {
        steps.push(Step::Root);
        rest = after;
    } else if let Some(after) = rest.strip_prefix('@') {
        rest = after;
    }
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix("..") {
            steps.push(Step::Recursive);
            rest = after;
            // A name without its own dot may follow.
            if !rest.starts_with(['[', '.']) && !rest.is_empty() {
                rest = field(rest, &mut steps);
            }
        } else if let Some(after) = rest.strip_prefix('.') {
            rest = if after.starts_with('[') || after.is_empty() {
                after
            } else {
                field(after, &mut steps)
            };
        } else if rest.starts_with('[') {
            let end = closing(rest).ok_or("unterminated array")?;
            steps.push(bracket(&rest[1..end])?);
            rest = &rest[end + 1..];
        } else {
            return Err(format!("unrecognized identifier {rest}"));
        }
    }
    Ok(steps)
}

/// Parses a name (with `\.` for a dot in it) or `*`.
fn field<'t>(text: &'t str, steps: &mut Vec<Step>) -> &'t str {
    let mut name = String::new();
    let mut characters = text.char_indices();
    let mut end = text.len();
    while let Some((at, c)) = characters.next() {
        match c {
            '\\' => name.extend(characters.next().map(|(_, c)| c)),
            '.' | '[' | ' ' => {
                end = at;
                break;
            }
            c => name.push(c),
        }
    }
    steps.push(if name == "*" { Step::Wildcard } else { Step::Field(name) });
    text[end..].trim_start_matches(' ')
}

/// The position of the bracket that closes the one at the start of `text`.
fn closing(text: &str) -> Option<usize> {
    let (mut depth, mut quote) = (0, None);
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some(mark), c) if c == mark => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, '[') => depth += 1,
            (None, ']') => {
                depth -= 1;
                if depth == 0 {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}

fn bracket(inner: &str) -> Parsed<Step> {
    let inner = inner.trim();
    let bad = || format!("invalid array index {inner}");
    if inner == "*" {
        return Ok(Step::Wildcard);
    }
    if let Some(filter) = inner.strip_prefix("?(").and_then(|rest| rest.strip_suffix(')')) {
        return parse_filter(filter);
    }
    if inner.starts_with(['"', '\'']) {
        let names = inner.split(',').map(|part| Ok(quoted(part.trim())?.0));
        let mut names = names.collect::<Parsed<Vec<String>>>()?;
        return Ok(if names.len() == 1 {
            Step::Field(names.remove(0))
        } else {
            Step::Fields(names)
        });
    }
    if inner.contains(':') {
        let number = |part: Option<&str>| match part.map(str::trim) {
            None | Some("") => Ok(None),
            Some(text) => text.parse().map(Some).map_err(|_| bad()),
        };
        let mut parts = inner.split(':');
        let (start, end) = (number(parts.next())?, number(parts.next())?);
        return Ok(Step::Slice(start, end, number(parts.next())?.unwrap_or(1)));
    }
    let indexes = inner.split(',').map(|part| part.trim().parse().map_err(|_| bad()));
    Ok(Step::Indexes(indexes.collect::<Parsed<_>>()?))
}

fn parse_filter(text: &str) -> Parsed<Step> {
    const OPERATORS: [(&str, Operator); 6] = [
        ("==", Operator::Equal),
        ("!=", Operator::NotEqual),
        ("<=", Operator::LessOrEqual),
        (">=", Operator::GreaterOrEqual),
        ("<", Operator::Less),
        (">", Operator::Greater),
    ];
    let mut quote = None;
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some(mark), c) if c == mark => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, _) => {
                let found = OPERATORS.iter().find(|(sign, _)| text[at..].starts_with(sign));
                if let Some((sign, operator)) = found {
                    let right = operand(&text[at + sign.len()..])?;
                    return Ok(Step::Filter(operand(&text[..at])?, Some((*operator, right))));
                }
            }
        }
    }
    Ok(Step::Filter(operand(text)?, None))
}

fn operand(text: &str) -> Parsed<Operand> {
    let text = text.trim();
    if text.starts_with(['@', '$', '.']) {
        return Ok(Operand::Path(parse_path(text)?));
    }
    if text.starts_with(['"', '\'']) {
        return Ok(Operand::Literal(Value::String(quoted(text)?.0)));
    }
    let literal = serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()));
    Ok(Operand::Literal(literal))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn templates_print_as_upstreams() {
        let value = json!({
            "kind": "List",
            "items": [
                {"metadata": {"name": "a", "labels": {"app.io/x": "1"}}, "spec": {"n": 1, "ok": true}},
                {"metadata": {"name": "b"}, "spec": {"n": 2, "ports": [80, 443]}},
            ],
        });
        let check = |template: &str, expected: &str| {
            let got = Template::parse(template).map(|template| template.print(&value));
            assert_eq!(got.as_deref(), Ok(expected), "{template}");
        };
        check("{.kind}", "List");
        check("kind={.kind};", "kind=List;");
        check("{.items[0].metadata.name}", "a");
        check("{.items[-1:].metadata.name}", "b");
        check("{.items[-1].metadata.name}", "b");
        check("{.items[*].metadata.name}", "a b");
        check("{.items[0,1].metadata.name}", "a b");
        check("{.items[0].metadata['name']}", "a");
        check("{.items[0].metadata.labels.app\\.io/x}", "1");
        check("{.items[0].metadata.labels['app.io/x']}", "1");
        check("{..name}", "a b");
        check("{.items[0].spec}", r#"{"n":1,"ok":true}"#);
        check("{.items[1].spec.ports}", "[80,443]");
        check("{.missing}", "");
        check("{range .items[*]}{.metadata.name}{\"\\t\"}{.spec.n}{\"\\n\"}{end}", "a\t1\nb\t2\n");
        check("{.items[?(@.metadata.name==\"b\")].spec.n}", "2");
        check("{.items[?(@.spec.n>1)].metadata.name}", "b");
        check("{.items[?(@.spec.ok)].metadata.name}", "a");
        check("{.items[?(@.spec.ok==true)].metadata.name}", "a");
        check("{$.kind}", "List");
        check("{@.kind}", "List");
        check("{'quoted'}", "quoted");
    }

    #[test]
    fn mistakes_are_errors() {
        for bad in ["{.a", "{end}", "{range .a}", "{.a[x]}", "{.a[0}", "{foo}"] {
            assert!(Template::parse(bad).is_err(), "{bad}");
        }
        assert!(Template::relaxed("").is_err());
    }

    #[test]
    fn relaxed_paths_need_no_braces() {
        let value = json!({"a": {"b": 1}});
        for path in ["a.b", ".a.b", "{a.b}", "{.a.b}"] {
            let template = Template::relaxed(path).expect("parses");
            assert_eq!(template.find(&value), [&json!(1)], "{path}");
        }
    }
}
