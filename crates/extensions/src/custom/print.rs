//! Rows of Tables: the name and the CRD's printer columns.
//! Upstream: `registry/customresource/tableconvertor`.

use apiserver::resource::{Column, Doc};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceColumnDefinition;
use serde_json::Value;

use super::PrintedColumn;
use super::jsonpath::JsonPath;

/// The CRD's columns, or the age if it has none.
pub fn columns(given: &[CustomResourceColumnDefinition]) -> Vec<PrintedColumn> {
    if !given.is_empty() {
        return given.iter().map(column).collect();
    }
    vec![column(&CustomResourceColumnDefinition {
        name: "Age".into(),
        type_: "date".into(),
        description: Some(apiserver::resource::CREATED_AT_COLUMN.description.text().into()),
        json_path: ".metadata.creationTimestamp".into(),
        ..CustomResourceColumnDefinition::default()
    })]
}

pub fn column(from: &CustomResourceColumnDefinition) -> PrintedColumn {
    let path = &from.json_path;
    let given = from.description.clone().filter(|text| !text.is_empty());
    let description = given.unwrap_or_else(|| {
        format!("Custom resource definition column (in JSONPath format): {path}")
    });
    PrintedColumn {
        column: Column {
            name: from.name.clone().into(),
            kind: from.type_.clone().into(),
            format: from.format.clone().unwrap_or_default().into(),
            description: Doc::Text(description.into()),
            priority: from.priority.unwrap_or_default(),
        },
        path: JsonPath::parse(path),
    }
}

pub fn cell(column: &PrintedColumn, object: &Value) -> Value {
    let Some(value) = column.path.first(object) else { return Value::Null };
    match (&*column.column.kind, value) {
        (_, Value::Null) => Value::Null,
        ("string", Value::String(text)) => text.as_str().into(),
        ("string", other) => other.to_string().into(),
        ("integer", Value::Number(number)) => {
            number.as_i64().or_else(|| number.as_f64().map(|float| float as i64)).into()
        }
        ("number", Value::Number(number)) => number.as_f64().into(),
        ("boolean", Value::Bool(flag)) => (*flag).into(),
        ("date", Value::String(text)) => match text.parse::<jiff::Timestamp>() {
            Ok(time) => {
                base::duration::human(base::clock::now().as_second() - time.as_second()).into()
            }
            Err(_) => "<invalid>".into(),
        },
        _ => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn cells_have_their_columns_type() {
        let object = json!({ "a": 1.7, "b": "x", "c": { "d": 1 }, "e": true });
        let check = |kind: &str, path: &str, expected: Value| {
            let column = column(&CustomResourceColumnDefinition {
                type_: kind.into(),
                json_path: path.into(),
                ..CustomResourceColumnDefinition::default()
            });
            assert_eq!(cell(&column, &object), expected, "{kind} {path}");
        };
        check("integer", ".a", json!(1));
        check("number", ".a", json!(1.7));
        check("string", ".a", json!("1.7"));
        check("string", ".c", json!("{\"d\":1}"));
        check("string", ".b", json!("x"));
        check("integer", ".b", Value::Null);
        check("boolean", ".e", json!(true));
        check("date", ".b", json!("<invalid>"));
    }
}
