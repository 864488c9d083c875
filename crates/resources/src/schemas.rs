//! The built-in kinds' schemas as the server's OpenAPI documents want them: crate `api` knows them,
//! crate `apiserver` asks; this joins the two.

use apiserver::openapi::SchemaSource;
use serde_json::Value;

#[derive(Clone, Copy, Debug, Default)]
pub struct BuiltIn;

impl SchemaSource for BuiltIn {
    fn definition_name(&self, group: &str, version: &str, kind: &str) -> Option<String> {
        api::facts::definition_name(group, version, kind).map(str::to_owned)
    }

    fn knows(&self, name: &str) -> bool {
        api::schema::knows(name)
    }

    fn definition(&self, name: &str) -> Option<Value> {
        api::schema::definition(name)
    }

    fn revision(&self) -> String {
        api::schema::REVISION.into()
    }
}
