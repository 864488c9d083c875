//! Prints the server's tables.
//!
//! In: `meta.k8s.io/v1` Tables. Out: lines of cells, with columns that flags add (namespace, labels, the
//! kind before the name, a watch's event) or hide (those of lower priority without `-o wide`). Upstream:
//! `cli-runtime/pkg/printers/tableprinter.go`.

use serde::Deserialize;
use serde_json::Value;

use crate::grid::Grid;

/// The Accept header that requests a table.
pub const ACCEPT: &str = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Table {
    #[serde(deserialize_with = "or_default")]
    pub column_definitions: Vec<Column>,
    #[serde(deserialize_with = "or_default")]
    pub rows: Vec<Row>,
}

/// Go encodes an empty list as `null`.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Column {
    pub name: String,
    pub priority: i32,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Row {
    pub cells: Vec<Value>,
    pub object: Value,
}

#[derive(Clone, Debug, Default)]
pub struct Options {
    pub wide: bool,
    pub no_headers: bool,
    pub show_labels: bool,
    pub label_columns: Vec<String>,
    pub with_namespace: bool,
    /// `deployment.apps` before each name.
    pub kind: Option<String>,
}

/// Prints tables of one resource, one after another: headers once, columns aligned over all.
pub struct Printer {
    options: Options,
    grid: Grid,
    columns: Vec<Column>,
    has_headers: bool,
}

impl Printer {
    pub fn new(options: Options) -> Self {
        Self { options, grid: Grid::default(), columns: vec![], has_headers: false }
    }

    /// The text of the tables' rows. `event` is the type of a watch event, if it is printed.
    pub fn print(&mut self, tables: Vec<Table>, event: Option<&str>) -> String {
        let mut lines = vec![];
        for table in tables {
            // The events of a watch may omit the columns.
            if !table.column_definitions.is_empty() {
                self.columns = table.column_definitions;
            }
            if table.rows.is_empty() {
                continue;
            }
            if !self.has_headers && !self.options.no_headers {
                lines.push(self.headers(event.is_some()));
            }
            self.has_headers = true;
            lines.extend(table.rows.iter().map(|row| self.row(row, event)));
        }
        self.grid.render(&lines)
    }

    fn is_shown(&self, column: &Column) -> bool {
        self.options.wide || column.priority == 0
    }

    fn headers(&self, has_event: bool) -> Vec<String> {
        let mut out = vec![];
        out.extend(has_event.then(|| "EVENT".to_owned()));
        out.extend(self.options.with_namespace.then(|| "NAMESPACE".to_owned()));
        let shown = self.columns.iter().filter(|column| self.is_shown(column));
        out.extend(shown.map(|column| column.name.to_uppercase()));
        // Upstream: the part of a label's key after the last slash.
        let short = |key: &String| key.rsplit('/').next().unwrap_or_default().to_uppercase();
        out.extend(self.options.label_columns.iter().map(short));
        out.extend(self.options.show_labels.then(|| "LABELS".to_owned()));
        out
    }

    fn row(&self, row: &Row, event: Option<&str>) -> Vec<String> {
        let metadata = &row.object["metadata"];
        let mut out = vec![];
        out.extend(event.map(str::to_owned));
        if self.options.with_namespace {
            out.push(metadata["namespace"].as_str().unwrap_or_default().to_owned());
        }
        for (column, cell) in self.columns.iter().zip(&row.cells) {
            if !self.is_shown(column) {
                continue;
            }
            let text = cell_text(cell);
            out.push(match &self.options.kind {
                Some(kind) if column.name == "Name" => format!("{kind}/{text}"),
                _ => text,
            });
        }
        for key in &self.options.label_columns {
            out.push(metadata["labels"][key].as_str().unwrap_or_default().to_owned());
        }
        if self.options.show_labels {
            out.push(labels(&metadata["labels"]));
        }
        out
    }
}

/// `a=1,b=2`, sorted; `<none>` without labels.
fn labels(labels: &Value) -> String {
    let pair =
        |(key, value): (&String, &Value)| format!("{key}={}", value.as_str().unwrap_or_default());
    match labels.as_object().filter(|map| !map.is_empty()) {
        Some(map) => map.iter().map(pair).collect::<Vec<_>>().join(","),
        None => "<none>".into(),
    }
}

fn cell_text(cell: &Value) -> String {
    match cell {
        Value::Null => String::new(),
        Value::String(text) => match text.find(['\u{c}', '\n', '\r']) {
            Some(end) => format!("{}...", escaped(&text[..end])),
            None => escaped(text),
        },
        other => other.to_string(),
    }
}

/// Replaces characters that control a terminal.
fn escaped(text: &str) -> String {
    text.replace('\u{1b}', "^[").replace('\t', " ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn table() -> Table {
        serde_json::from_value(json!({
            "columnDefinitions": [{"name":"Name"},{"name":"Ready","priority":0},{"name":"IP","priority":1}],
            "rows": [
                {"cells":["web-1", "1/1", "10.0.0.1"],
                 "object":{"metadata":{"namespace":"default","labels":{"b":"2","a":"1"}}}},
                {"cells":["db", 3, null], "object":{"metadata":{"namespace":"kube-system"}}},
            ],
        }))
        .expect("a table")
    }

    #[test]
    fn flags_choose_columns() {
        let check = |options: Options, event, expected: &str| {
            assert_eq!(Printer::new(options).print(vec![table()], event), expected);
        };
        let plain = Options::default;
        check(plain(), None, "NAME    READY\nweb-1   1/1\ndb      3\n");
        check(
            Options { wide: true, ..plain() },
            None,
            "NAME    READY   IP\nweb-1   1/1     10.0.0.1\ndb      3       \n",
        );
        check(Options { no_headers: true, ..plain() }, None, "web-1   1/1\ndb      3\n");
        check(
            Options { with_namespace: true, kind: Some("pod".into()), ..plain() },
            None,
            "NAMESPACE     NAME        READY\ndefault       pod/web-1   1/1\nkube-system   pod/db      3\n",
        );
        check(
            Options { show_labels: true, label_columns: vec!["x/a".into(), "b".into()], ..plain() },
            None,
            "NAME    READY   A     B     LABELS\nweb-1   1/1           2     a=1,b=2\ndb      3                   <none>\n",
        );
        check(
            plain(),
            Some("ADDED"),
            "EVENT   NAME    READY\nADDED   web-1   1/1\nADDED   db      3\n",
        );
    }

    #[test]
    fn headers_are_printed_once() {
        let mut printer = Printer::new(Options::default());
        assert_eq!(printer.print(vec![Table::default()], None), "");
        assert!(printer.print(vec![table()], None).starts_with("NAME"));
        let later = Table { column_definitions: vec![], ..table() };
        assert_eq!(printer.print(vec![later], None), "web-1   1/1\ndb      3\n");
    }

    #[test]
    fn the_events_of_a_watch_have_no_columns() {
        let event = json!({"columnDefinitions":null,"rows":[{"cells":["a"]}]});
        let table: Table = serde_json::from_value(event).expect("a table");
        assert_eq!((table.column_definitions.len(), table.rows.len()), (0, 1));
    }

    #[test]
    fn cells_stay_on_their_line() {
        for (cell, expected) in [
            (json!("a\nb"), "a..."),
            (json!("\u{1b}[31mred"), "^[[31mred"),
            (json!(true), "true"),
            (json!(null), ""),
        ] {
            assert_eq!(cell_text(&cell), expected);
        }
    }
}
