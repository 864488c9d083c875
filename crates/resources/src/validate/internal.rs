//! Parts of objects as upstream's errors show them: as its internal types.
//!
//! In: a part of an object, and the internal type's name. Out: the JSON that Go would make of it, on one
//! line or as a unified diff. `facts/internal.tsv` (see `cargo xtask facts-internal`) has the types:
//!
//! ```text
//! TYPE
//! ⇥ FIELD ⇥ SHAPE+KIND
//! ```
//!
//! SHAPE is `*` for pointers, `[]` for lists, `{}` for maps, `<>` for embedded structs. KIND is a type
//! of the table, `string`, `int`, `bool`, `quantity`, or `json` for types that have a JSON form of
//! their own. Internal fields are found under their external name, which differs by case; the few
//! others are listed here.

use serde_json::Value;

use super::at::At;

static TYPES: &str = include_str!("../../facts/internal.tsv");

/// Internal fields whose external name is another one.
const RENAMED: &[(&str, &str)] = &[
    ("CephMonitors", "monitors"),
    ("DataDiskURI", "diskURI"),
    ("DiscoveryCHAPAuth", "chapAuthDiscovery"),
    ("EndpointsName", "endpoints"),
    ("RBDImage", "image"),
    ("RBDPool", "pool"),
    ("RadosUser", "user"),
    ("SessionCHAPAuth", "chapAuthSession"),
];

/// JSON with its fields in Go's order.
enum Shown {
    Scalar(String),
    List(Vec<Shown>),
    Map(Vec<(String, Shown)>),
}

/// `{"Type":"X","RollingUpdate":null}`
pub(crate) fn shown(kind: &str, value: &Value) -> String {
    let mut out = String::new();
    of_type(kind, value).compact(&mut out);
    out
}

/// Reports a struct that is another one than before.
pub(crate) fn unchanged(at: &At<'_>, old: &At<'_>, kind: &str) {
    if at.value != old.value {
        let shown = if at.is_set() { shown(kind, at.value) } else { "null".to_owned() };
        at.errors().invalid_shown(&at.path, Some(&shown), "field is immutable");
    }
}

/// Reports a struct that is none of the supported.
pub(crate) fn unsupported(at: &At<'_>, shown: &str, supported: &[&str]) {
    let raw = serde_json::value::RawValue::from_string(shown.to_owned()).unwrap_or_default();
    at.errors().not_supported_value(&at.path, raw, supported);
}

/// What changed, as a unified diff of the indented forms.
pub(crate) fn diff(kind: &str, old: &Value, new: &Value) -> String {
    let lines = |value: &Value| {
        let mut out = String::new();
        of_type(kind, value).indented(0, &mut out);
        out.lines().map(str::to_owned).collect::<Vec<String>>()
    };
    super::diff::unified(&lines(old), &lines(new))
}

/// The lines of a type.
fn fields_of(kind: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    let mut all = TYPES.lines().skip_while({
        let kind = kind.to_owned();
        move |line| *line != kind
    });
    all.next();
    all.take_while(|line| line.starts_with('\t')).filter_map(|line| line[1..].split_once('\t'))
}

fn is_known(kind: &str) -> bool {
    fields_of(kind).next().is_some()
}

fn of_type(kind: &str, value: &Value) -> Shown {
    let mut fields = vec![];
    add_fields(kind, value, &mut fields);
    Shown::Map(fields)
}

fn add_fields(kind: &str, value: &Value, out: &mut Vec<(String, Shown)>) {
    for (name, column) in fields_of(kind) {
        match column.strip_prefix("<>") {
            // Metadata has JSON names of its own.
            Some("json") => {
                let meta = value.get("metadata").and_then(Value::as_object);
                out.extend(meta.into_iter().flatten().map(|(k, v)| (k.clone(), plain(v))));
            }
            Some(embedded) => add_fields(embedded, value, out),
            // Host namespaces are the pod's, but internally of its security context.
            None if kind == "PodSpec" && name == "SecurityContext" => {
                let inner = with_namespaces(value);
                out.push((name.into(), of_column(column, inner.as_ref())));
            }
            None => out.push((name.into(), of_column(column, external(value, name)))),
        }
    }
}

fn with_namespaces(spec: &Value) -> Option<Value> {
    let mut context = spec.get("securityContext")?.clone();
    for name in ["hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace", "hostUsers"] {
        if let (Value::Object(fields), Some(value)) = (&mut context, spec.get(name)) {
            fields.insert(name.into(), value.clone());
        }
    }
    Some(context)
}

fn external<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    let fields = value.as_object()?;
    let renamed = RENAMED.iter().find(|(internal, _)| *internal == name);
    let wanted = renamed.map_or(name, |(_, external)| external);
    fields.iter().find(|(key, _)| key.eq_ignore_ascii_case(wanted)).map(|(_, value)| value)
}

fn of_column(column: &str, value: Option<&Value>) -> Shown {
    let value = value.filter(|value| !value.is_null());
    let null = || Shown::Scalar("null".into());
    if let Some(inner) = column.strip_prefix('*') {
        return value.map_or_else(null, |value| of_column(inner, Some(value)));
    }
    if let Some(inner) = column.strip_prefix("[]") {
        let Some(Value::Array(list)) = value else { return null() };
        return Shown::List(list.iter().map(|value| of_column(inner, Some(value))).collect());
    }
    if let Some(inner) = column.strip_prefix("{}") {
        let Some(Value::Object(map)) = value else { return null() };
        let entry = |(key, value): (&String, &Value)| (key.clone(), of_column(inner, Some(value)));
        return Shown::Map(map.iter().map(entry).collect());
    }
    match (column, value) {
        (kind, value) if is_known(kind) => of_type(kind, value.unwrap_or(&Value::Null)),
        ("string", None) => Shown::Scalar("\"\"".into()),
        ("int", None) => Shown::Scalar("0".into()),
        ("bool", None) => Shown::Scalar("false".into()),
        ("quantity", None) => Shown::Scalar("\"0\"".into()),
        (_, None) => null(),
        (_, Some(value)) => plain(value),
    }
}

fn plain(value: &Value) -> Shown {
    match value {
        Value::Array(list) => Shown::List(list.iter().map(plain).collect()),
        Value::Object(map) => {
            Shown::Map(map.iter().map(|(key, value)| (key.clone(), plain(value))).collect())
        }
        scalar => Shown::Scalar(scalar.to_string()),
    }
}

impl Shown {
    fn compact(&self, out: &mut String) {
        match self {
            Self::Scalar(text) => out.push_str(text),
            Self::List(list) => {
                out.push('[');
                for (index, item) in list.iter().enumerate() {
                    if index > 0 {
                        out.push(',');
                    }
                    item.compact(out);
                }
                out.push(']');
            }
            Self::Map(map) => {
                out.push('{');
                for (index, (key, value)) in map.iter().enumerate() {
                    if index > 0 {
                        out.push(',');
                    }
                    out.push_str(&Value::from(key.as_str()).to_string());
                    out.push(':');
                    value.compact(out);
                }
                out.push('}');
            }
        }
    }

    /// As `json.MarshalIndent` with one space.
    fn indented(&self, depth: usize, out: &mut String) {
        let (open, close, count) = match self {
            Self::Scalar(text) => return out.push_str(text),
            Self::List(list) => ('[', ']', list.len()),
            Self::Map(map) => ('{', '}', map.len()),
        };
        out.push(open);
        for index in 0..count {
            out.push_str(if index > 0 { ",\n" } else { "\n" });
            out.push_str(&" ".repeat(depth + 1));
            match self {
                Self::List(list) => list[index].indented(depth + 1, out),
                Self::Map(map) => {
                    let (key, value) = &map[index];
                    out.push_str(&Value::from(key.as_str()).to_string());
                    out.push_str(": ");
                    value.indented(depth + 1, out);
                }
                Self::Scalar(_) => {}
            }
        }
        if count > 0 {
            out.push('\n');
            out.push_str(&" ".repeat(depth));
        }
        out.push(close);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn parts_are_shown_as_internal_types() {
        for (kind, value, expected) in [
            (
                "StatefulSetUpdateStrategy",
                json!({"type": "X"}),
                r#"{"Type":"X","RollingUpdate":null}"#,
            ),
            (
                "RoleRef",
                json!({"apiGroup": "g", "kind": "Role", "name": "r"}),
                r#"{"APIGroup":"g","Kind":"Role","Name":"r"}"#,
            ),
            (
                "PodDisruptionBudgetSpec",
                json!({"minAvailable": 1, "maxUnavailable": "1%"}),
                r#"{"MinAvailable":1,"Selector":null,"MaxUnavailable":"1%","UnhealthyPodEvictionPolicy":null}"#,
            ),
        ] {
            assert_eq!(shown(kind, &value), expected, "{kind}");
        }
    }

    #[test]
    fn changes_are_shown_as_diffs() {
        let old = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}});
        let new = json!({"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}});
        assert_eq!(
            diff("PersistentVolumeClaimSpec", &old, &new),
            "@@ -1,6 +1,6 @@\n {\n  \"AccessModes\": [\n-  \"ReadWriteOnce\"\n+  \"ReadWriteMany\"\n  ],\n  \"Selector\": null,\n  \"Resources\": {\n"
        );
    }
}
