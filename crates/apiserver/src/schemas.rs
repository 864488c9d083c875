//! What the server asks of whoever knows the kinds' schemas: OpenAPI documents show them, decoding
//! explains by them what is wrong with a body.

use serde_json::Value;

/// Knows the schemas of kinds, as JSON schemas with references of the form `#/definitions/NAME`.
pub trait SchemaSource: Send + Sync {
    /// The definition of a kind, as `io.k8s.api.apps.v1.Deployment`.
    fn definition_name(&self, group: &str, version: &str, kind: &str) -> Option<String>;

    /// Is there a definition of this name?
    fn knows(&self, name: &str) -> bool;

    /// One definition, `x-kubernetes-*` extensions included.
    fn definition(&self, name: &str) -> Option<Value>;

    /// The same for OpenAPI v2, whose clients read less.
    fn definition_v2(&self, name: &str) -> Option<Value> {
        self.definition(name)
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
