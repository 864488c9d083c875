//! Types of values, as far as they are known before evaluation.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

#[derive(Clone, Debug, Default, PartialEq)]
pub enum Type {
    /// Any type; checked during evaluation.
    #[default]
    Dyn,
    Null,
    Bool,
    Int,
    Uint,
    Double,
    String,
    Bytes,
    Timestamp,
    Duration,
    /// A type as a value.
    Type,
    List(Arc<Type>, ListKind),
    /// A map with string keys.
    Map(Arc<Type>),
    Object(Arc<Object>),
    Optional(Arc<Type>),
    /// A type of a library: `kubernetes.Quantity`.
    Opaque(&'static str),
}

/// How two lists are compared and added.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ListKind {
    #[default]
    Atomic,
    /// Order does not matter; the sum has no duplicates.
    Set,
    /// Elements with equal keys are the same element.
    Map(Arc<[String]>),
}

/// A type with named fields. Other fields are errors, unless it is open.
#[derive(Debug, Default, PartialEq)]
pub struct Object {
    pub name: String,
    pub fields: BTreeMap<String, Type>,
    pub is_open: bool,
}

impl Type {
    pub fn list(of: Type) -> Self {
        Self::List(Arc::new(of), ListKind::Atomic)
    }

    pub fn optional(of: Type) -> Self {
        Self::Optional(Arc::new(of))
    }

    /// The name that upstream shows outside the compiler's own messages.
    pub fn declared(&self) -> String {
        match self {
            Self::Null => "null_type".into(),
            Self::Timestamp => "google.protobuf.Timestamp".into(),
            Self::Duration => "google.protobuf.Duration".into(),
            Self::List(of, _) => format!("list({})", of.declared()),
            Self::Map(of) => format!("map(string, {})", of.declared()),
            Self::Optional(of) => format!("optional_type({})", of.declared()),
            other => other.to_string(),
        }
    }

    /// Whether a value may have both types.
    pub fn fits(&self, other: &Type) -> bool {
        match (self, other) {
            (Self::Dyn, _) | (_, Self::Dyn) => true,
            (Self::List(a, _), Self::List(b, _))
            | (Self::Map(a), Self::Map(b))
            | (Self::Optional(a), Self::Optional(b)) => a.fits(b),
            (Self::Map(_), Self::Object(_)) | (Self::Object(_), Self::Map(_)) => true,
            (Self::Object(a), Self::Object(b)) => Arc::ptr_eq(a, b) || a.name == b.name,
            // Messages and wrappers may be null.
            (Self::Null, other) | (other, Self::Null) => {
                matches!(
                    other,
                    Self::Null
                        | Self::Object(_)
                        | Self::Opaque(_)
                        | Self::Timestamp
                        | Self::Duration
                )
            }
            (a, b) => a == b,
        }
    }

    /// The type of a value that has one of the two types.
    pub fn join(self, other: Type) -> Self {
        match (&self, &other) {
            (Self::Null, _) => other,
            (_, Self::Null) => self,
            (a, b) if a == b => self,
            // An empty list fits every list type.
            (Self::List(a, _), Self::List(..)) if **a == Self::Dyn => other,
            (Self::List(..), Self::List(b, _)) if **b == Self::Dyn => self,
            (Self::Object(a), Self::Object(b)) if a.name == b.name => self,
            _ => Self::Dyn,
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dyn => f.write_str("dyn"),
            Self::Null => f.write_str("null"),
            Self::Bool => f.write_str("bool"),
            Self::Int => f.write_str("int"),
            Self::Uint => f.write_str("uint"),
            Self::Double => f.write_str("double"),
            Self::String => f.write_str("string"),
            Self::Bytes => f.write_str("bytes"),
            Self::Timestamp => f.write_str("timestamp"),
            Self::Duration => f.write_str("duration"),
            Self::Type => f.write_str("type(dyn)"),
            Self::List(of, _) => write!(f, "list({of})"),
            Self::Map(of) => write!(f, "map(string, {of})"),
            Self::Object(object) => f.write_str(&object.name),
            Self::Optional(of) => write!(f, "optional_type({of})"),
            Self::Opaque(name) => f.write_str(name),
        }
    }
}
