//! The schema of one version of a custom kind, in the server's internal form.
//!
//! In: the `openAPIV3Schema` of a CRD, validated by [`crate::definition`]. Out: objects with
//! defaults and without unknown fields ([`normal`]), and their errors ([`validate`],
//! [`lists`], [`embedded`], [`rules`]).
//!
//! A [`Schema`] is small: descriptions stay in the stored CRD, absent keywords
//! take no memory, and regular expressions are compiled at their first use.

pub mod embedded;
pub mod extent;
pub mod formats;
pub mod lists;
pub mod normal;
mod pattern;
pub mod rules;
pub mod validate;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use serde_json::Value;

pub use pattern::Pattern;
use rules::Rule;

/// One node.
#[derive(Debug, Default)]
pub struct Schema {
    pub kind: Kind,
    pub nullable: bool,
    pub int_or_string: bool,
    /// `x-kubernetes-preserve-unknown-fields`
    pub preserves: bool,
    /// `x-kubernetes-embedded-resource`
    pub embedded: bool,
    /// `x-kubernetes-map-type: atomic`
    pub atomic_map: bool,
    pub additional: Additional,
    pub list: List,
    /// Sorted by name.
    pub properties: Box<[(Box<str>, Schema)]>,
    pub items: Option<Box<Schema>>,
    pub default: Option<Box<Value>>,
    /// The format, if the server checks it.
    pub format: Option<Box<str>>,
    pub checks: Option<Box<Checks>>,
    /// `x-kubernetes-validations`
    pub rules: Box<[Rule]>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    #[default]
    Any,
    Object,
    Array,
    String,
    Integer,
    Number,
    Boolean,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Any => "",
            Self::Object => "object",
            Self::Array => "array",
            Self::String => "string",
            Self::Integer => "integer",
            Self::Number => "number",
            Self::Boolean => "boolean",
        }
    }

    fn parse(text: Option<&str>) -> Self {
        match text.unwrap_or_default() {
            "object" => Self::Object,
            "array" => Self::Array,
            "string" => Self::String,
            "integer" => Self::Integer,
            "number" => Self::Number,
            "boolean" => Self::Boolean,
            _ => Self::Any,
        }
    }
}

/// `additionalProperties`
#[derive(Debug, Default)]
pub enum Additional {
    #[default]
    Unsaid,
    Allowed,
    Forbidden,
    Schema(Box<Schema>),
}

/// `x-kubernetes-list-type`
#[derive(Debug, Default)]
pub enum List {
    #[default]
    Atomic,
    Set,
    /// With the keys that identify elements.
    Map(Box<[Box<str>]>),
}

/// The restrictions of values other than their type.
#[derive(Debug, Default)]
pub struct Checks {
    pub maximum: Option<f64>,
    pub exclusive_maximum: bool,
    pub minimum: Option<f64>,
    pub exclusive_minimum: bool,
    pub multiple_of: Option<f64>,
    pub max_length: Option<i64>,
    pub min_length: Option<i64>,
    pub pattern: Option<Pattern>,
    pub max_items: Option<i64>,
    pub min_items: Option<i64>,
    pub max_properties: Option<i64>,
    pub min_properties: Option<i64>,
    pub required: Box<[Box<str>]>,
    pub enumeration: Box<[Value]>,
    pub all_of: Box<[Schema]>,
    pub any_of: Box<[Schema]>,
    pub one_of: Box<[Schema]>,
    pub not: Option<Box<Schema>>,
}

impl Schema {
    pub fn new(from: &JSONSchemaProps) -> Self {
        let is = |flag: Option<bool>| flag == Some(true);
        let int_or_string = is(from.x_kubernetes_int_or_string);
        let mut properties: Vec<(Box<str>, Schema)> = from
            .properties
            .iter()
            .flatten()
            .map(|(name, schema)| (name.as_str().into(), Schema::new(schema)))
            .collect();
        properties.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        let kind = if int_or_string { Kind::Any } else { Kind::parse(from.type_.as_deref()) };
        let list = match from.x_kubernetes_list_type.as_deref() {
            Some("set") => List::Set,
            Some("map") => List::Map(names(from.x_kubernetes_list_map_keys.as_deref())),
            _ => List::Atomic,
        };
        let additional = match &from.additional_properties {
            None => Additional::Unsaid,
            Some(JSONSchemaPropsOrBool::Bool(true)) => Additional::Allowed,
            Some(JSONSchemaPropsOrBool::Bool(false)) => Additional::Forbidden,
            Some(JSONSchemaPropsOrBool::Schema(schema)) => {
                Additional::Schema(Box::new(Schema::new(schema)))
            }
        };
        let items = match &from.items {
            Some(JSONSchemaPropsOrArray::Schema(schema)) => Some(Box::new(Schema::new(schema))),
            _ => None,
        };
        let format = from.format.as_deref().filter(|format| formats::is_checked(kind, format));
        Self {
            kind,
            nullable: is(from.nullable),
            int_or_string,
            preserves: is(from.x_kubernetes_preserve_unknown_fields),
            embedded: is(from.x_kubernetes_embedded_resource),
            atomic_map: from.x_kubernetes_map_type.as_deref() == Some("atomic"),
            additional,
            list,
            properties: properties.into(),
            items,
            default: from.default.as_ref().map(|json| Box::new(json.0.clone())),
            format: format.map(Into::into),
            checks: Checks::new(from),
            rules: from.x_kubernetes_validations.iter().flatten().map(Rule::new).collect(),
        }
    }

    pub fn property(&self, name: &str) -> Option<&Schema> {
        let at = self.properties.binary_search_by(|(known, _)| (**known).cmp(name)).ok()?;
        Some(&self.properties[at].1)
    }

    /// The schema of a field: its property, or else `additionalProperties`.
    pub fn field(&self, name: &str) -> Option<&Schema> {
        self.property(name).or(match &self.additional {
            Additional::Schema(schema) => Some(schema),
            _ => None,
        })
    }

    /// Reports whether any node passes `test`.
    pub fn any(&self, test: &mut dyn FnMut(&Schema) -> bool) -> bool {
        test(self)
            || self.properties.iter().any(|(_, schema)| schema.any(test))
            || self.items.as_ref().is_some_and(|schema| schema.any(test))
            || matches!(&self.additional, Additional::Schema(schema) if schema.any(test))
    }
}

impl Checks {
    fn new(from: &JSONSchemaProps) -> Option<Box<Self>> {
        let schemas = |list: &Option<Vec<JSONSchemaProps>>| -> Box<[Schema]> {
            list.iter().flatten().map(Schema::new).collect()
        };
        let checks = Self {
            maximum: from.maximum,
            exclusive_maximum: from.exclusive_maximum == Some(true),
            minimum: from.minimum,
            exclusive_minimum: from.exclusive_minimum == Some(true),
            multiple_of: from.multiple_of,
            max_length: from.max_length,
            min_length: from.min_length,
            pattern: from.pattern.as_deref().filter(|text| !text.is_empty()).map(Pattern::new),
            max_items: from.max_items,
            min_items: from.min_items,
            max_properties: from.max_properties,
            min_properties: from.min_properties,
            required: names(from.required.as_deref()),
            enumeration: from.enum_.iter().flatten().map(|json| json.0.clone()).collect(),
            all_of: schemas(&from.all_of),
            any_of: schemas(&from.any_of),
            one_of: schemas(&from.one_of),
            not: from.not.as_ref().map(|schema| Box::new(Schema::new(schema))),
        };
        checks.says_something().then(|| Box::new(checks))
    }

    fn says_something(&self) -> bool {
        let numbers = [self.maximum, self.minimum, self.multiple_of];
        let sizes = [
            self.max_length,
            self.min_length,
            self.max_items,
            self.min_items,
            self.max_properties,
            self.min_properties,
        ];
        let lists = [&self.all_of, &self.any_of, &self.one_of];
        numbers.iter().any(Option::is_some)
            || sizes.iter().any(Option::is_some)
            || lists.iter().any(|list| !list.is_empty())
            || self.pattern.is_some()
            || self.not.is_some()
            || !self.required.is_empty()
            || !self.enumeration.is_empty()
    }
}

fn names(list: Option<&[String]>) -> Box<[Box<str>]> {
    list.unwrap_or_default().iter().map(|name| name.as_str().into()).collect()
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    pub fn schema(json: Value) -> Schema {
        let props: JSONSchemaProps = serde_json::from_value(json).expect("a schema");
        Schema::new(&props)
    }
}
