//! Facts about fields besides their types: how lists merge, which keys identify their elements, which
//! kinds a definition belongs to.
//!
//! In: `facts/fields.tsv` (see `cargo xtask facts` for its form). Out: look-ups by definition and
//! field. The table stays text. Only an index from definitions to their lines is built, because a
//! look-up reads a few dozen short lines at most.
//!
//! Invariant: strategic merge and server-side apply have separate columns. A Service's ports merge by
//! `port`, but server-side apply identifies them by `port` and `protocol`.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use machinery::patch::apply::{Resets, types::Type};
use machinery::patch::{FieldFacts, Schema, Topology};

pub(crate) static FIELDS: &str = include_str!("../facts/fields.tsv");

/// Defaults of the keys of list-maps, for elements that omit them. Upstream: the `default` of the
/// key's field.
const KEY_DEFAULTS: &[(&str, &str, &str)] = &[
    ("io.k8s.api.core.v1.ContainerPort", "protocol", "TCP"),
    ("io.k8s.api.core.v1.ServicePort", "protocol", "TCP"),
];

/// Definitions of arbitrary content. Managed fields own them as a whole.
pub(crate) const OPAQUE: &[&str] = &[
    "io.k8s.apimachinery.pkg.runtime.RawExtension",
    "io.k8s.apimachinery.pkg.apis.meta.v1.FieldsV1",
    "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSON",
    "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps",
];

/// One definition of the table.
#[derive(Clone, Copy, Debug)]
pub struct Definition {
    pub name: &'static str,
    /// `atomic`, or empty.
    pub map_type: &'static str,
    /// `GROUP/VERSION/KIND`, comma-separated.
    kinds: &'static str,
    /// The field lines.
    lines: &'static str,
}

/// The line of a field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Field {
    pub name: &'static str,
    /// `[]` for lists, `{}` for maps, empty for the rest.
    pub shape: &'static str,
    /// The definition of the field or its elements; empty for scalars.
    pub definition: &'static str,
    /// `atomic`, `set`, `map`, `granular` or empty.
    pub list_type: &'static str,
    /// Comma-separated.
    pub map_keys: &'static str,
    pub merge_key: &'static str,
    /// `merge`, `retainKeys`, `replace`, comma-separated.
    pub strategy: &'static str,
}

impl Definition {
    /// Group, version and kind, if the definition belongs to a kind.
    pub fn kinds(self) -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
        self.kinds.split(',').filter_map(|kind| {
            let mut parts = kind.splitn(3, '/');
            Some((parts.next()?, parts.next()?, parts.next()?))
        })
    }

    pub fn fields(self) -> impl Iterator<Item = Field> {
        self.lines.lines().map(parse_field)
    }

    pub fn field(self, name: &str) -> Option<Field> {
        let line = self.lines.lines().find(|line| {
            line[1..]
                .strip_prefix(name)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('\t'))
        })?;
        Some(parse_field(line))
    }
}

fn parse_field(line: &'static str) -> Field {
    let mut columns = line[1..].split('\t');
    let mut next = || columns.next().unwrap_or_default();
    let name = next();
    let (shape, definition) = match next() {
        text if text.starts_with("[]") || text.starts_with("{}") => text.split_at(2),
        text => ("", text),
    };
    Field {
        name,
        shape,
        definition,
        list_type: next(),
        map_keys: next(),
        merge_key: next(),
        strategy: next(),
    }
}

struct Index {
    by_name: HashMap<&'static str, Definition>,
    by_kind: HashMap<(&'static str, &'static str, &'static str), &'static str>,
}

fn index() -> &'static Index {
    static INDEX: OnceLock<Index> = OnceLock::new();
    INDEX.get_or_init(|| {
        let mut index = Index { by_name: HashMap::new(), by_kind: HashMap::new() };
        let mut rest = FIELDS;
        while let Some((head, behind)) = rest.split_once('\n') {
            let end = behind
                .match_indices('\n')
                .map(|(at, _)| at + 1)
                .find(|at| !behind[*at..].starts_with('\t'))
                .filter(|_| behind.starts_with('\t'))
                .unwrap_or(0);
            let mut columns = head.split('\t');
            let mut next = || columns.next().unwrap_or_default();
            let definition =
                Definition { name: next(), map_type: next(), kinds: next(), lines: &behind[..end] };
            // Options and Status are part of every group. They belong to no kind.
            if definition.kinds().count() == 1 {
                index.by_kind.extend(definition.kinds().map(|kind| (kind, definition.name)));
            }
            index.by_name.insert(definition.name, definition);
            rest = &behind[end..];
        }
        index
    })
}

/// A definition by its name, as `io.k8s.api.core.v1.Pod`.
pub fn definition(name: &str) -> Option<Definition> {
    index().by_name.get(name).copied()
}

/// All definitions, in no order.
pub fn definitions() -> impl Iterator<Item = Definition> {
    index().by_name.values().copied()
}

/// The definition of a kind.
pub fn definition_name(group: &str, version: &str, kind: &str) -> Option<&'static str> {
    index().by_kind.get(&(group, version, kind)).copied()
}

/// The facts of a field for patches. `None` if the definition has no such field.
pub fn facts(definition_name: &str, field: &str) -> Option<FieldFacts> {
    let field = definition(definition_name)?.field(field)?;
    let target = Some(field.definition).filter(|name| !name.is_empty()).and_then(definition);
    // Time, Quantity and similar definitions have no fields. For patches they are scalars.
    let is_opaque = OPAQUE.contains(&field.definition);
    let element = target.filter(|target| !target.lines.is_empty() && !is_opaque);
    let topology = match (field.shape, field.list_type) {
        (_, "map") => Some(Topology::Map),
        (_, "set") => Some(Topology::Set),
        (_, "atomic") | ("[]", _) => Some(Topology::Atomic),
        ("{}", _) => Some(Topology::Granular),
        _ if is_opaque => Some(Topology::Atomic),
        _ => element.map(|target| match target.map_type {
            "atomic" => Topology::Atomic,
            _ => Topology::Granular,
        }),
    };
    let map_keys = field.map_keys.split(',').filter(|key| !key.is_empty()).map(|key| {
        let default = KEY_DEFAULTS
            .iter()
            .find(|(name, field_name, _)| *name == field.definition && *field_name == key);
        (key.to_owned(), default.map(|(.., value)| (*value).into()))
    });
    let strategy = |name: &str| field.strategy.split(',').any(|one| one == name);
    Some(FieldFacts {
        merge_key: Some(field.merge_key).filter(|key| !key.is_empty()).map(str::to_owned),
        merges: strategy("merge"),
        retain_keys: strategy("retainKeys"),
        topology,
        map_keys: map_keys.collect(),
        definition: element.map(|target| target.name.to_owned()),
    })
}

/// The facts of all built-in kinds, for patches.
#[derive(Clone, Copy, Debug, Default)]
pub struct Facts;

impl Schema for Facts {
    fn field(&self, definition: &str, field: &str) -> Option<FieldFacts> {
        facts(definition, field)
    }

    fn type_of(&self, definition: &str) -> Option<Arc<Type>> {
        crate::types::of(definition)
    }

    fn resets(&self, definition: &str, subresource: &str) -> Resets {
        crate::types::resets(definition, subresource)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_definitions() {
        for ((group, version, kind), expected) in [
            (("", "v1", "Pod"), Some("io.k8s.api.core.v1.Pod")),
            (("apps", "v1", "Deployment"), Some("io.k8s.api.apps.v1.Deployment")),
            (("rbac.authorization.k8s.io", "v1", "Role"), Some("io.k8s.api.rbac.v1.Role")),
            (("autoscaling", "v1", "Scale"), Some("io.k8s.api.autoscaling.v1.Scale")),
            (("", "v1", "Zebra"), None),
        ] {
            assert_eq!(definition_name(group, version, kind), expected, "{kind}");
        }
    }

    #[test]
    fn merging_and_applying_have_facts_of_their_own() {
        let ports = facts("io.k8s.api.core.v1.Container", "ports").expect("a field");
        assert_eq!(ports.merge_key.as_deref(), Some("containerPort"));
        assert_eq!(
            ports.map_keys,
            [("containerPort".to_owned(), None), ("protocol".to_owned(), Some("TCP".into()))]
        );
        assert_eq!((ports.merges, ports.topology), (true, Some(Topology::Map)));
        assert_eq!(ports.definition.as_deref(), Some("io.k8s.api.core.v1.ContainerPort"));

        let check = |definition: &str, field: &str| {
            facts(definition, field).map(|facts| (facts.topology, facts.merges, facts.retain_keys))
        };
        let core = |name: &str| format!("io.k8s.api.core.v1.{name}");
        assert_eq!(
            check(&core("ServiceSpec"), "selector"),
            Some((Some(Topology::Atomic), false, false))
        );
        assert_eq!(
            check(&core("PodSpec"), "nodeSelector"),
            Some((Some(Topology::Atomic), false, false))
        );
        assert_eq!(
            check(&core("ConfigMap"), "data"),
            Some((Some(Topology::Granular), false, false))
        );
        assert_eq!(check(&core("PodSpec"), "volumes"), Some((Some(Topology::Map), true, true)));
        assert_eq!(
            check(&core("PodSpec"), "tolerations"),
            Some((Some(Topology::Atomic), false, false))
        );
        assert_eq!(check(&core("PodSpec"), "nodeName"), Some((None, false, false)));
        assert_eq!(
            check(&core("PodSpec"), "securityContext"),
            Some((Some(Topology::Granular), false, false))
        );
        assert_eq!(
            check(&core("EnvVarSource"), "fieldRef"),
            Some((Some(Topology::Atomic), false, false))
        );
        assert_eq!(check(&core("PodSpec"), "nope"), None);
        let meta = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";
        assert_eq!(check(meta, "finalizers"), Some((Some(Topology::Set), true, false)));
        assert_eq!(check(meta, "creationTimestamp"), Some((None, false, false)));
        assert_eq!(
            check("io.k8s.api.apps.v1.DeploymentSpec", "strategy"),
            Some((Some(Topology::Granular), false, true))
        );
    }

    #[test]
    fn defaults_of_keys_name_fields_that_there_are() {
        for (definition, field, _) in KEY_DEFAULTS {
            let known = super::definition(definition).and_then(|one| one.field(field));
            assert!(known.is_some(), "{definition}.{field}");
        }
        assert!(OPAQUE.iter().all(|name| super::definition(name).is_some()));
    }

    #[test]
    fn every_reference_has_a_definition() {
        for definition in index().by_name.values() {
            for field in definition.fields().filter(|field| !field.definition.is_empty()) {
                assert!(
                    super::definition(field.definition).is_some(),
                    "{}.{}",
                    definition.name,
                    field.name
                );
            }
        }
        assert!(index().by_name.len() > 700);
    }
}
