//! `-o custom-columns=NAME:.path,…`.
//!
//! In: a specification and objects. Out: lines of cells for the [`Grid`](crate::grid::Grid).
//! Upstream: `kubectl/pkg/cmd/get/customcolumn.go`.

use serde_json::Value;

use super::jsonpath::Template;

pub struct Columns(Vec<(String, Template)>);

impl Columns {
    pub fn parse(spec: &str) -> Result<Self, String> {
        if spec.is_empty() {
            return Err("custom-columns format specified but no custom columns given".into());
        }
        let column = |part: &str| {
            let (header, path) = part.split_once(':').ok_or_else(|| {
                format!(
                    "unexpected custom-columns spec: {part}, expected <header>:<json-path-expr>"
                )
            })?;
            Ok((header.to_owned(), Template::relaxed(path)?))
        };
        split(spec).into_iter().map(column).collect::<Result<_, String>>().map(Self)
    }

    /// Parses a file: a line of headers, a line of paths.
    pub fn parse_file(text: &str) -> Result<Self, String> {
        let mut lines = text.lines();
        let bad = "expected two lines: headers, then paths";
        let (headers, paths) = (lines.next().ok_or(bad)?, lines.next().ok_or(bad)?);
        let (headers, paths): (Vec<_>, Vec<_>) =
            (headers.split_whitespace().collect(), paths.split_whitespace().collect());
        if headers.len() != paths.len() {
            return Err(format!(
                "number of headers ({}) and field specifications ({}) don't match",
                headers.len(),
                paths.len()
            ));
        }
        let column =
            |(header, path): (&str, &str)| Ok((header.to_owned(), Template::relaxed(path)?));
        headers.into_iter().zip(paths).map(column).collect::<Result<_, String>>().map(Self)
    }

    pub fn headers(&self) -> Vec<String> {
        self.0.iter().map(|(header, _)| header.clone()).collect()
    }

    pub fn row(&self, object: &Value) -> Vec<String> {
        let cell = |(_, path): &(String, Template)| {
            let found: Vec<String> = path.find(object).into_iter().map(go_text).collect();
            if found.is_empty() { "<none>".to_owned() } else { found.join(",") }
        };
        self.0.iter().map(cell).collect()
    }
}

/// Splits at commas, except inside brackets.
fn split(spec: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, vec![]);
    for (at, c) in spec.char_indices() {
        match c {
            '[' | '(' => depth += 1,
            ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&spec[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&spec[start..]);
    parts
}

/// Formats a value like Go.
fn go_text(value: &Value) -> String {
    match value {
        Value::Null => "<nil>".into(),
        Value::String(text) => text.clone(),
        Value::Array(list) => {
            format!("[{}]", list.iter().map(go_text).collect::<Vec<_>>().join(" "))
        }
        Value::Object(map) => {
            let pair = |(key, value): (&String, &Value)| format!("{key}:{}", go_text(value));
            format!("map[{}]", map.iter().map(pair).collect::<Vec<_>>().join(" "))
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn cells_are_found() {
        let object = json!({"metadata":{"name":"a","labels":{"x":"1"}},"spec":{"p":[1,2]}});
        let check = |spec: &str, headers: &[&str], row: &[&str]| {
            let columns = Columns::parse(spec).expect("parses");
            assert_eq!(columns.headers(), headers);
            assert_eq!(columns.row(&object), row);
        };
        check("NAME:.metadata.name,N:metadata.none", &["NAME", "N"], &["a", "<none>"]);
        check(
            "P:.spec.p[*],Q:.spec.p,L:.metadata.labels",
            &["P", "Q", "L"],
            &["1,2", "[1 2]", "map[x:1]"],
        );
        check(":.kind", &[""], &["<none>"]);
        for bad in ["", "NAME", "A:"] {
            assert!(Columns::parse(bad).is_err(), "{bad}");
        }
        let columns = Columns::parse_file("A  B\n.metadata.name .spec.p[0]\n").expect("parses");
        assert_eq!(
            (columns.headers(), columns.row(&object)),
            (vec!["A".into(), "B".into()], vec!["a".into(), "1".into()])
        );
    }
}
