//! The fields of definitions as Go has them: their order, the named types, the structs that embed them.
//!
//! In: `facts/go.tsv` (see `cargo xtask facts-go` for its form). Out: the fields of one definition. The errors of
//! decoders and the text of a patched object show these.
//!
//! The table stays text: it is read only for such an error.

use std::iter;

static FIELDS: &str = include_str!("../facts/go.tsv");

/// A field of a Go struct.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Field {
    /// Its name in JSON.
    pub name: &'static str,
    /// Go's name of its type; empty if the schema tells it.
    pub kind: &'static str,
    /// The structs between the definition's own and the field's, with dots.
    pub embedded: &'static str,
}

/// The fields of a definition, in Go's order.
pub fn fields(definition: &str) -> Vec<Field> {
    let mut lines = FIELDS.lines().skip_while(|line| *line != definition);
    lines.next();
    let lines = lines.map_while(|line| line.strip_prefix('\t'));
    let parsed = lines.map(|line| {
        let mut columns = line.split('\t').chain(iter::repeat(""));
        let mut next = || columns.next().unwrap_or_default();
        Field { name: next(), kind: next(), embedded: next() }
    });
    parsed.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_gos() {
        let selector = fields("io.k8s.api.core.v1.SecretKeySelector");
        let names: Vec<&str> = selector.iter().map(|field| field.name).collect();
        assert_eq!(names, ["name", "key", "optional"]);
        assert_eq!(selector[0].embedded, "LocalObjectReference");
        let service = fields("io.k8s.api.core.v1.ServiceSpec");
        let kind = service.iter().find(|field| field.name == "type").map(|field| field.kind);
        assert_eq!(kind, Some("v1.ServiceType"));
        assert_eq!(fields("io.k8s.None"), []);
    }
}
