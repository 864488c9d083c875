//! Field ownership of a custom kind in server-side apply: which fields have an owner each, and which
//! are atomic. Derived from the schema at the first write.

use std::sync::{Arc, OnceLock};

use machinery::patch::apply::types::{
    Elements, Field, Key, ListType, MapType, Scalar, Type, TypeRef,
};
use machinery::patch::{FieldFacts, Schema as PatchFacts};

use super::Family;
use crate::schema::{Additional, Kind, List, Schema};

const OBJECT_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";

pub struct Ownership {
    pub family: Arc<Family>,
    pub index: usize,
    root: OnceLock<Arc<Type>>,
}

impl Ownership {
    pub fn new(family: Arc<Family>, index: usize) -> Self {
        Self { family, index, root: OnceLock::new() }
    }
}

impl PatchFacts for Ownership {
    fn field(&self, _: &str, _: &str) -> Option<FieldFacts> {
        None
    }

    fn type_of(&self, _: &str) -> Option<Arc<Type>> {
        let schema = self.family.versions[self.index].schema.as_ref()?;
        let make = || {
            let mut root = type_of(schema, schema.preserves);
            if let Some(map) = &mut root.map {
                add_head(map);
                map.atomic = false;
            }
            Arc::new(root)
        };
        Some(self.root.get_or_init(make).clone())
    }
}

fn add_head(map: &mut MapType) {
    let metadata = api::facts::Facts.type_of(OBJECT_META);
    let metadata = metadata.map_or(TypeRef::Deduced, TypeRef::To);
    let text = || TypeRef::to(scalar(Scalar::String));
    for (name, of) in [("apiVersion", text()), ("kind", text()), ("metadata", metadata)] {
        map.fields.insert(name.into(), Field { of, always: false });
    }
}

fn scalar(scalar: Scalar) -> Type {
    Type { scalar: Some(scalar), ..Type::default() }
}

/// `preserves`: a parent keeps unknown fields, and so do all nodes below it.
fn type_of(schema: &Schema, preserves: bool) -> Type {
    let preserves = preserves || schema.preserves;
    match schema.kind {
        _ if schema.int_or_string => scalar(Scalar::Untyped),
        Kind::Integer | Kind::Number if schema.format.is_none() => scalar(Scalar::Numeric),
        Kind::String => match schema.format.as_deref() {
            None | Some("byte") => scalar(Scalar::String),
            Some(_) => scalar(Scalar::Untyped),
        },
        Kind::Integer | Kind::Number => scalar(Scalar::Numeric),
        Kind::Boolean => scalar(Scalar::Boolean),
        Kind::Array => Type { list: Some(list(schema, preserves)), ..Type::default() },
        Kind::Object => Type { map: Some(map(schema, preserves)), ..Type::default() },
        Kind::Any => Type {
            scalar: Some(Scalar::Untyped),
            list: Some(list(schema, preserves)),
            map: Some(map(schema, preserves)),
        },
    }
}

fn list(schema: &Schema, preserves: bool) -> ListType {
    let items = schema.items.as_deref();
    let elements = match &schema.list {
        List::Atomic => Elements::Atomic,
        List::Set => Elements::Set,
        List::Map(keys) => {
            let default = |key: &str| items?.property(key)?.default.as_deref().cloned();
            let key = |key: &str| Key { name: key.into(), default: default(key) };
            Elements::Map(keys.iter().map(|name| key(name)).collect())
        }
    };
    let element = items.map_or(TypeRef::Deduced, |items| TypeRef::to(type_of(items, preserves)));
    ListType { elements, element }
}

fn map(schema: &Schema, preserves: bool) -> MapType {
    let rest = match &schema.additional {
        Additional::Schema(inner) => Some(TypeRef::to(type_of(inner, preserves))),
        Additional::Allowed => Some(TypeRef::Deduced),
        _ if preserves || schema.properties.is_empty() => Some(TypeRef::Deduced),
        _ => None,
    };
    let field = |(name, property): &(Box<str>, Schema)| {
        let of = TypeRef::to(type_of(property, preserves));
        (name.clone(), Field { of, always: false })
    };
    let fields = schema.properties.iter().map(field).collect();
    let mut map = MapType { atomic: schema.atomic_map, fields, rest };
    if schema.embedded {
        add_head(&mut map);
    }
    map
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::schema::testing::schema;

    #[test]
    fn lists_and_maps_are_owned_as_the_schema_says() {
        let of = type_of(
            &schema(json!({ "type": "object", "properties": {
                "set": { "type": "array", "x-kubernetes-list-type": "set", "items": { "type": "string" } },
                "map": { "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"],
                    "items": { "type": "object", "properties": { "k": { "type": "string", "default": "x" } } } },
                "free": { "type": "object", "x-kubernetes-preserve-unknown-fields": true },
            }})),
            false,
        );
        let map = of.map.expect("an object");
        assert_eq!(map.rest, None);
        let list = |name: &str| map.fields[name].of.get().list.clone().expect("a list").elements;
        assert_eq!(list("set"), Elements::Set);
        let keys = vec![Key { name: "k".into(), default: Some("x".into()) }];
        assert_eq!(list("map"), Elements::Map(keys));
        let free = map.fields["free"].of.get().map.clone().expect("an object");
        assert_eq!(free.rest, Some(TypeRef::Deduced));
    }
}
