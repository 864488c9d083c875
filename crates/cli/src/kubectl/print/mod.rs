//! The output formats of `-o`.
//!
//! In: `-o`'s value; objects or server-made tables. Out: text. [`table`] prints tables, [`Printer`] all
//! other formats; it remembers its earlier output (headers, separators).

pub mod columns;
pub mod jsonpath;
pub mod table;
pub mod yaml;

use serde_json::{Value, json};

use self::columns::Columns;
use self::jsonpath::Template;
use crate::failure::{Failure, Result, own};
use crate::grid::Grid;

pub enum Output {
    Table { wide: bool },
    Json,
    Yaml,
    Name,
    JsonPath { template: Template, as_json: bool },
    Columns(Columns),
}

const FORMATS: &str = "custom-columns,custom-columns-file,json,jsonpath,jsonpath-as-json,jsonpath-file,name,wide,yaml";

impl Output {
    pub fn parse(text: Option<&str>) -> Result<Self> {
        let text = text.unwrap_or_default();
        let (format, argument) = text.split_once('=').unwrap_or((text, ""));
        // Like upstream, accepts `-o jsonpath={…}` and `-o jsonpath {…}` joined by the caller.
        let template = |argument: &str| {
            if argument.is_empty() {
                return Err(own("template format specified but no template given"));
            }
            Template::parse(argument)
                .map_err(|error| own(format!("error parsing jsonpath {argument}, {error}")))
        };
        let file = || {
            std::fs::read_to_string(argument).map_err(|error| own(format!("{argument}: {error}")))
        };
        Ok(match format {
            "" => Self::Table { wide: false },
            "wide" => Self::Table { wide: true },
            "json" => Self::Json,
            "yaml" => Self::Yaml,
            "name" => Self::Name,
            "jsonpath" => Self::JsonPath { template: template(argument)?, as_json: false },
            "jsonpath-as-json" => Self::JsonPath { template: template(argument)?, as_json: true },
            "jsonpath-file" => Self::JsonPath { template: template(&file()?)?, as_json: false },
            "custom-columns" => Self::Columns(Columns::parse(argument).map_err(own)?),
            "custom-columns-file" => Self::Columns(Columns::parse_file(&file()?).map_err(own)?),
            _ => {
                return Err(own(format!(
                    "unable to match a printer suitable for the output format {text:?}, allowed formats are: {FORMATS}"
                )));
            }
        })
    }

    pub fn is_table(&self) -> bool {
        matches!(self, Self::Table { .. })
    }
}

/// Prints objects one after another in any format except tables.
pub struct Printer {
    output: Output,
    no_headers: bool,
    show_managed_fields: bool,
    grid: Grid,
    printed: usize,
}

impl Printer {
    pub fn new(output: Output, no_headers: bool, show_managed_fields: bool) -> Self {
        Self { output, no_headers, show_managed_fields, grid: Grid::default(), printed: 0 }
    }

    /// Whether the format needs a list's items instead of the list.
    pub fn wants_items(&self) -> bool {
        matches!(self.output, Output::Name | Output::Columns(_))
    }

    /// Prints all items of a list at once, so that their columns are aligned.
    pub fn items(&mut self, items: &[Value]) -> Result<String> {
        if let Output::Columns(columns) = &self.output {
            let mut lines = vec![];
            if self.printed == 0 && !self.no_headers {
                lines.push(columns.headers());
            }
            self.printed += 1;
            lines.extend(items.iter().map(|item| columns.row(item)));
            return Ok(self.grid.render(&lines));
        }
        items.iter().map(|item| self.object(item)).collect()
    }

    pub fn object(&mut self, object: &Value) -> Result<String> {
        let is_first = self.printed == 0;
        let stripped = |object: &Value| match self.show_managed_fields {
            true => object.clone(),
            false => without_managed_fields(object),
        };
        let text = match &self.output {
            Output::Json => yaml::to_json(&stripped(object)) + "\n",
            Output::Yaml => {
                let separator = if is_first { "" } else { "---\n" };
                separator.to_owned() + &yaml::to_yaml(&stripped(object))
            }
            Output::Name => format!("{}\n", name_of(object)),
            Output::JsonPath { template, as_json: false } => template.print(object),
            Output::JsonPath { template, as_json: true } => {
                let found: Vec<Value> = template.find(object).into_iter().cloned().collect();
                yaml::to_json(&Value::Array(found)) + "\n"
            }
            Output::Columns(_) => return self.items(std::slice::from_ref(object)),
            Output::Table { .. } => {
                return Err(Failure::Own("this is printed as a table by the server only".into()));
            }
        };
        self.printed += 1;
        Ok(text)
    }
}

/// Joins objects of several requests into one list, like `get -o json`.
pub fn list_of(items: Vec<Value>) -> Value {
    json!({ "apiVersion": "v1", "items": items, "kind": "List", "metadata": { "resourceVersion": "" } })
}

/// `deployment.apps/web`.
pub fn name_of(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let kind = text(&object["kind"]).to_lowercase();
    let name = text(&object["metadata"]["name"]);
    match text(&object["apiVersion"]).split_once('/') {
        Some((group, _)) => format!("{kind}.{group}/{name}"),
        None => format!("{kind}/{name}"),
    }
}

fn without_managed_fields(object: &Value) -> Value {
    let mut object = object.clone();
    let strip = |object: &mut Value| {
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
        }
    };
    strip(&mut object);
    if let Some(items) = object.get_mut("items").and_then(Value::as_array_mut) {
        items.iter_mut().for_each(strip);
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str) -> Value {
        json!({"apiVersion":"v1","kind":"Pod","metadata":{"name":name,"managedFields":[1]}})
    }

    #[test]
    fn formats_are_chosen_by_name() {
        let check = |format: &str, expected: &str| {
            let output = Output::parse(Some(format)).expect("a format");
            let mut printer = Printer::new(output, false, false);
            assert_eq!(printer.items(&[pod("a"), pod("b")]).expect("prints"), expected, "{format}");
        };
        check("name", "pod/a\npod/b\n");
        check("jsonpath={.metadata.name}", "ab");
        check("custom-columns=N:.metadata.name", "N\na\nb\n");
        check(
            "yaml",
            "apiVersion: v1\nkind: Pod\nmetadata:\n  name: a\n---\napiVersion: v1\nkind: Pod\nmetadata:\n  name: b\n",
        );
        for bad in ["nonsense", "jsonpath", "jsonpath={", "custom-columns=", "go-template={{.x}}"] {
            assert!(Output::parse(Some(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_have_their_group() {
        assert_eq!(name_of(&pod("a")), "pod/a");
        let web = json!({"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"web"}});
        assert_eq!(name_of(&web), "deployment.apps/web");
    }
}
