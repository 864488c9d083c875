//! The interface to the source of schemas: OpenAPI documents contain them, and decoding uses them to explain
//! errors in a body.

use serde_json::Value;

/// A field as Go has it.
#[derive(Clone, Copy, Debug, Default)]
pub struct GoField {
    pub name: &'static str,
    /// Go's name of its type; empty if the schema tells it.
    pub kind: &'static str,
    /// The structs between the definition's own and the field's, with dots.
    pub embedded: &'static str,
    /// The definition of the field or its elements; empty for scalars.
    pub definition: &'static str,
}

/// The schemas of kinds, as JSON schemas with references of the form `#/definitions/NAME`.
pub trait SchemaSource: Send + Sync {
    /// The definition of a kind, for example `io.k8s.api.apps.v1.Deployment`.
    fn definition_name(&self, group: &str, version: &str, kind: &str) -> Option<String>;

    /// Whether there is a definition with this name.
    fn knows(&self, name: &str) -> bool;

    /// One definition, `x-kubernetes-*` extensions included.
    fn definition(&self, name: &str) -> Option<Value>;

    /// The same for OpenAPI v2, whose clients support less.
    fn definition_v2(&self, name: &str) -> Option<Value> {
        self.definition(name)
    }

    /// The fields of a definition in Go's order; none for kinds that Go has no struct for.
    fn go_fields(&self, _name: &str) -> Vec<GoField> {
        vec![]
    }

    /// Changes with the definitions; part of the documents' hashes.
    fn revision(&self) -> String;
}

/// No schemas: the documents have paths only.
pub(crate) struct NoSchemas;

impl SchemaSource for NoSchemas {
    fn definition_name(&self, _: &str, _: &str, _: &str) -> Option<String> {
        None
    }

    fn knows(&self, _: &str) -> bool {
        false
    }

    fn definition(&self, _: &str) -> Option<Value> {
        None
    }

    fn revision(&self) -> String {
        String::new()
    }
}
