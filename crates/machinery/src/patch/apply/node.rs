//! What walking a value by its type asks of it: of a [`Value`], which apply changes, as of a [`Tree`],
//! which borrows from an object's JSON.

use std::sync::LazyLock;

use serde_json::{Number, Value};

use crate::tree::Tree;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Null,
    Scalar,
    List,
    Map,
}

/// See the module.
pub trait Node: PartialEq + Sized {
    fn shape(&self) -> Shape;
    fn number(&self) -> Option<&Number>;
    /// The elements of a list; empty for other values.
    fn items(&self) -> &[Self];
    /// The fields of a map, sorted by name; empty for other values.
    fn fields(&self) -> impl Iterator<Item = (&str, &Self)>;
    fn get(&self, name: &str) -> Option<&Self>;
    fn to_value(&self) -> Value;
    /// An empty map, an empty text, 0, false and null.
    fn zeros<'x>() -> &'x [Self; 5]
    where
        Self: 'x;

    fn is_map(&self) -> bool {
        self.shape() == Shape::Map
    }

    fn is_empty(&self) -> bool {
        self.items().is_empty() && self.fields().next().is_none()
    }
}

impl Node for Value {
    fn shape(&self) -> Shape {
        match self {
            Self::Null => Shape::Null,
            Self::Bool(_) | Self::Number(_) | Self::String(_) => Shape::Scalar,
            Self::Array(_) => Shape::List,
            Self::Object(_) => Shape::Map,
        }
    }

    fn number(&self) -> Option<&Number> {
        self.as_number()
    }

    fn items(&self) -> &[Self] {
        self.as_array().map_or(&[], |items| items)
    }

    fn fields(&self) -> impl Iterator<Item = (&str, &Self)> {
        self.as_object().into_iter().flatten().map(|(name, value)| (name.as_str(), value))
    }

    fn get(&self, name: &str) -> Option<&Self> {
        self.get(name)
    }

    fn to_value(&self) -> Value {
        self.clone()
    }

    fn zeros<'x>() -> &'x [Self; 5] {
        static ZEROS: LazyLock<[Value; 5]> = LazyLock::new(|| {
            let empty = Value::Object(Default::default());
            [empty, "".into(), 0.into(), false.into(), Value::Null]
        });
        &ZEROS
    }
}

impl<'a> Node for Tree<'a> {
    fn shape(&self) -> Shape {
        match self {
            Self::Null => Shape::Null,
            Self::Bool(_) | Self::Number(_) | Self::String(_) => Shape::Scalar,
            Self::List(_) => Shape::List,
            Self::Map(_) => Shape::Map,
        }
    }

    fn number(&self) -> Option<&Number> {
        if let Self::Number(number) = self { Some(number) } else { None }
    }

    fn items(&self) -> &[Self] {
        if let Self::List(items) = self { items } else { &[] }
    }

    fn fields(&self) -> impl Iterator<Item = (&str, &Self)> {
        let fields = if let Self::Map(fields) = self { &fields[..] } else { &[] };
        fields.iter().map(|(name, value)| (&**name, value))
    }

    fn get(&self, name: &str) -> Option<&Self> {
        self.get(name)
    }

    fn to_value(&self) -> Value {
        self.to_value()
    }

    fn zeros<'x>() -> &'x [Self; 5]
    where
        'a: 'x,
    {
        static ZEROS: LazyLock<[Tree<'static>; 5]> = LazyLock::new(|| {
            let (empty, text) = (Tree::Map(vec![]), Tree::String("".into()));
            [empty, text, Tree::Number(0.into()), Tree::Bool(false), Tree::Null]
        });
        &ZEROS
    }
}
