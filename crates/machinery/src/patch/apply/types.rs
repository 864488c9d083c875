//! Types of values: their shape, and what their parts mean for ownership.
//!
//! In: what a kind's schema says, told once per kind as a [`Type`]. Out: for a value and a type, the
//! [`Atom`] that decides how to walk it. A type is a tree whose branches may be shared; the two
//! types that contain themselves ([`TypeRef::Deduced`], [`TypeRef::Untyped`]) are known by name.
//!
//! How a structural schema of a custom resource becomes a type:
//!
//! | schema | type |
//! |---|---|
//! | `type: integer` or `number` · `string` without format, or `byte` · `boolean` | `scalar` [`Scalar::Numeric`] · [`Scalar::String`] · [`Scalar::Boolean`] |
//! | any other format, `x-kubernetes-int-or-string` | `scalar` [`Scalar::Untyped`] |
//! | `type: array` with list type `atomic` or none · `set` · `map` | `list` with [`Elements::Atomic`] · [`Elements::Set`] · [`Elements::Map`] and the map keys with their defaults |
//! | `type: object` with `properties` | `map` with `fields` and no `rest`: others are not declared |
//! | … with `additionalProperties` of a schema · of `true` | `rest` is its type · [`TypeRef::Deduced`] |
//! | … with neither, or below `x-kubernetes-preserve-unknown-fields` | `rest` is [`TypeRef::Deduced`] |
//! | `x-kubernetes-map-type: atomic` · `granular` or none | `atomic` is true · false |
//! | `x-kubernetes-embedded-resource` | a `map` whose `fields` have `apiVersion`, `kind` and `metadata` (the latter of [`Schema::type_of`](crate::patch::Schema::type_of) of `ObjectMeta`, or deduced) besides its own |
//! | no type at all | `scalar` untyped, and `list` and `map` as above |
//!
//! Below a schema that preserves unknown fields, all schemas do.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use serde_json::Value;

use super::node::{Node, Shape};

/// What a value may be. Of a value that is none of it the first there is decides: map, scalar, list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Type {
    pub scalar: Option<Scalar>,
    pub list: Option<ListType>,
    pub map: Option<MapType>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scalar {
    Numeric,
    String,
    Boolean,
    /// Any of them.
    Untyped,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ListType {
    pub elements: Elements,
    pub element: TypeRef,
}

/// What identifies the elements of a list.
#[derive(Clone, Debug, PartialEq)]
pub enum Elements {
    /// Not at all: the list is owned as a whole.
    Atomic,
    /// By themselves; they are scalars.
    Set,
    /// By some of their fields.
    Map(Vec<Key>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Key {
    pub name: Box<str>,
    /// The default for elements without the field.
    pub default: Option<Value>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct MapType {
    /// Owned as a whole.
    pub atomic: bool,
    pub fields: BTreeMap<Box<str>, Field>,
    /// The type of fields that `fields` does not name; `None`: there are no others.
    pub rest: Option<TypeRef>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Field {
    pub of: TypeRef,
    /// Whether an empty object already has the field, like Go's structs that are no pointers. Then no
    /// manager adds it: `metadata`, `spec`. Always false for custom resources.
    pub always: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub enum TypeRef {
    To(Arc<Type>),
    /// Whatever it is: maps are granular, lists atomic. For fields that no schema describes.
    Deduced,
    /// Whatever it is, owned as a whole.
    Untyped,
}

static DEDUCED: LazyLock<Type> = LazyLock::new(|| any(false, TypeRef::Deduced));
static UNTYPED: LazyLock<Type> = LazyLock::new(|| any(true, TypeRef::Untyped));

fn any(atomic: bool, rest: TypeRef) -> Type {
    Type {
        scalar: Some(Scalar::Untyped),
        list: Some(ListType { elements: Elements::Atomic, element: TypeRef::Untyped }),
        map: Some(MapType { atomic, rest: Some(rest), ..MapType::default() }),
    }
}

impl TypeRef {
    pub fn to(of: Type) -> Self {
        Self::To(Arc::new(of))
    }

    pub fn get(&self) -> &Type {
        match self {
            Self::To(of) => of,
            Self::Deduced => &DEDUCED,
            Self::Untyped => &UNTYPED,
        }
    }
}

/// The part of a type that a value is of.
#[derive(Clone, Copy, Debug)]
pub(super) enum Atom<'a> {
    Map(&'a MapType),
    Scalar(Scalar),
    List(&'a ListType),
    /// The type allows nothing.
    Nothing,
}

impl Atom<'_> {
    pub fn is_like(self, other: Self) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }
}

impl Type {
    pub fn scalar(scalar: Scalar) -> Self {
        Self { scalar: Some(scalar), ..Self::default() }
    }

    /// Null and nothing are whatever the type is first.
    pub(super) fn atom<N: Node>(&self, value: Option<&N>) -> Atom<'_> {
        match value.map(N::shape) {
            Some(Shape::Map) if self.map.is_some() => {}
            Some(Shape::List) if let Some(list) = &self.list => return Atom::List(list),
            Some(Shape::Scalar) if let Some(scalar) = self.scalar => return Atom::Scalar(scalar),
            _ => {}
        }
        self.first()
    }

    /// The type without a value.
    pub(super) fn first(&self) -> Atom<'_> {
        match (&self.map, self.scalar, &self.list) {
            (Some(map), ..) => Atom::Map(map),
            (_, Some(scalar), _) => Atom::Scalar(scalar),
            (.., Some(list)) => Atom::List(list),
            _ => Atom::Nothing,
        }
    }

    /// The zero value of a Go field that is always present.
    pub(super) fn zero<'x, N: Node + 'x>(&self) -> &'x N {
        let which = match (&self.map, self.scalar) {
            (Some(_), _) => 0,
            (_, Some(Scalar::String)) => 1,
            (_, Some(Scalar::Numeric)) => 2,
            (_, Some(Scalar::Boolean)) => 3,
            _ => 4,
        };
        &N::zeros()[which]
    }
}

impl MapType {
    /// The type of a field; `None`: it is not declared.
    pub(super) fn field(&self, name: &str) -> Option<&Type> {
        let named = self.fields.get(name).map(|field| &field.of);
        named.or(self.rest.as_ref()).map(TypeRef::get)
    }

    /// Names of the fields that are there in an empty object already, sorted.
    pub(super) fn always(&self) -> impl Iterator<Item = &str> {
        self.fields.iter().filter(|(_, field)| field.always).map(|(name, _)| &**name)
    }

    pub(super) fn declares(&self, name: &str) -> bool {
        self.fields.contains_key(name)
    }
}
