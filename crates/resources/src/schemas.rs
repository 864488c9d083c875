//! The built-in kinds' schemas as the server's OpenAPI documents want them: crate `api` knows them,
//! crate `apiserver` asks; this joins the two.

use apiserver::schemas::{GoField, SchemaSource};
use serde_json::{Map, Value, json};

/// What `/version` answers, which is no kind.
const VERSION: &str = "io.k8s.apimachinery.pkg.version.Info";

/// Name, whether it is always there, and what it is.
const VERSION_FIELDS: &[(&str, bool, &str)] = &[
    ("major", true, "Major is the major version of the binary version"),
    ("minor", true, "Minor is the minor version of the binary version"),
    ("emulationMajor", false, "EmulationMajor is the major version of the emulation version"),
    ("emulationMinor", false, "EmulationMinor is the minor version of the emulation version"),
    (
        "minCompatibilityMajor",
        false,
        "MinCompatibilityMajor is the major version of the minimum compatibility version",
    ),
    (
        "minCompatibilityMinor",
        false,
        "MinCompatibilityMinor is the minor version of the minimum compatibility version",
    ),
    ("gitVersion", true, ""),
    ("gitCommit", true, ""),
    ("gitTreeState", true, ""),
    ("buildDate", true, ""),
    ("goVersion", true, ""),
    ("compiler", true, ""),
    ("platform", true, ""),
];

fn version() -> Value {
    let mut properties = Map::new();
    for (name, _, description) in VERSION_FIELDS {
        let mut property = json!({ "type": "string" });
        if !description.is_empty() {
            property["description"] = (*description).into();
        }
        properties.insert((*name).into(), property);
    }
    let required: Vec<&str> =
        VERSION_FIELDS.iter().filter(|(_, always, _)| *always).map(|(name, ..)| *name).collect();
    json!({
        "description": "Info contains versioning information. how we'll want to distribute that information.",
        "type": "object",
        "required": required,
        "properties": properties,
    })
}

#[derive(Clone, Copy, Debug, Default)]
pub struct BuiltIn;

impl SchemaSource for BuiltIn {
    fn definition_name(&self, group: &str, version: &str, kind: &str) -> Option<String> {
        api::facts::definition_name(group, version, kind).map(str::to_owned)
    }

    fn knows(&self, name: &str) -> bool {
        name == VERSION || api::schema::knows(name)
    }

    fn definition(&self, name: &str) -> Option<Value> {
        if name == VERSION { Some(version()) } else { api::schema::definition(name) }
    }

    fn go_fields(&self, name: &str) -> Vec<GoField> {
        let known = api::facts::definition(name);
        let made = |field: api::go::Field| {
            let fact = known.and_then(|known| known.field(field.name)).unwrap_or_default();
            let api::go::Field { name, kind, embedded } = field;
            GoField { name, kind, embedded, definition: fact.definition }
        };
        api::go::fields(name).into_iter().map(made).collect()
    }

    fn revision(&self) -> String {
        api::schema::revision().into()
    }
}
