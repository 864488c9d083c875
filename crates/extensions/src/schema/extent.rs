//! The largest values that a schema allows. The cost limits of its rules depend on them.
//!
//! In: a schema. Out: an [`Extent`], and the smallest size of a value in a request, in bytes:
//! the size of a request limits a list that has no `maxItems`. Upstream: `SchemaDeclType`.

use std::collections::BTreeMap;
use std::sync::Arc;

use cel::cost::Extent;

use super::{Additional, Kind, Schema};

/// The largest request, in bytes.
pub const REQUEST: u64 = 3 << 20;
const QUOTES: u64 = 2;
/// The size of a time and of a duration in JSON.
const DATE: u64 = 12;
const TIME: u64 = 21;
const LONGEST_TIME: u64 = 32;
const DURATION: u64 = 3;
/// Bytes of a character.
const WIDEST: u64 = 4;

/// An extent, and the smallest size in bytes. `None` if rules cannot see such values.
pub fn of(schema: &Schema, is_root: bool) -> Option<(Arc<Extent>, u64)> {
    let limit = |pick: fn(&super::Checks) -> Option<i64>| {
        let checks = schema.checks.as_deref()?;
        pick(checks).map(|most| u64::try_from(most).unwrap_or(0))
    };
    let max_length = limit(|checks| checks.max_length);
    if schema.int_or_string {
        let most = max_length.map_or(REQUEST - QUOTES, |most| most.saturating_mul(WIDEST));
        return Some((scalar(most), 1));
    }
    match schema.kind {
        Kind::Any => None,
        Kind::Integer | Kind::Number => Some((scalar(0), 1)),
        Kind::Boolean => Some((scalar(0), 4)),
        Kind::String => Some(text(schema, max_length)),
        Kind::Array => {
            let items = schema.items.as_deref()?;
            let (elements, least) = of(items, items.embedded)?;
            let most = limit(|checks| checks.max_items).unwrap_or((REQUEST - 2) / (least + 1));
            let extent = Extent { most, elements: Some(elements), ..Extent::default() };
            Some((Arc::new(extent), 2))
        }
        Kind::Object => {
            let Additional::Schema(values) = &schema.additional else {
                return Some(object(schema, is_root));
            };
            let (elements, least) = of(values, values.embedded)?;
            let most = limit(|checks| checks.max_properties).unwrap_or((REQUEST - 2) / (least + 6));
            let elements = Some(elements);
            Some((Arc::new(Extent { most, elements, is_map: true, ..Extent::default() }), 2))
        }
    }
}

fn scalar(most: u64) -> Arc<Extent> {
    Arc::new(Extent { most, ..Extent::default() })
}

fn text(schema: &Schema, max_length: Option<u64>) -> (Arc<Extent>, u64) {
    let longest_value = || {
        let values = schema.checks.iter().flat_map(|checks| checks.enumeration.iter());
        values.filter_map(|value| value.as_str()).map(|text| text.len() as u64).max()
    };
    let (most, least) = match schema.format.as_deref() {
        Some("byte") => (max_length.unwrap_or(REQUEST - QUOTES), QUOTES),
        Some("duration") => (LONGEST_TIME, DURATION),
        Some("date") => (DATE, DATE),
        Some("date-time") => (LONGEST_TIME, TIME),
        _ => {
            let most = max_length.map(|most| most.saturating_mul(WIDEST));
            (most.or_else(longest_value).unwrap_or(REQUEST - QUOTES), QUOTES)
        }
    };
    (scalar(most), least)
}

fn object(schema: &Schema, is_root: bool) -> (Arc<Extent>, u64) {
    let required = schema.checks.as_ref().map(|checks| &checks.required);
    let mut fields = BTreeMap::new();
    let mut bytes = 2;
    for (name, property) in &schema.properties {
        let Some((extent, least)) = of(property, property.embedded) else { continue };
        fields.insert(name.to_string(), extent);
        let is_required = required.is_some_and(|all| all.contains(name));
        if is_required && property.default.is_none() {
            bytes += name.len() as u64 + least + 4;
        }
    }
    if is_root || schema.embedded {
        let text = || scalar(REQUEST - QUOTES);
        let names = ["name", "generateName"].map(|name| (name.to_owned(), text()));
        let metadata = Extent { fields: names.into(), ..Extent::default() };
        fields.insert("apiVersion".into(), text());
        fields.insert("kind".into(), text());
        fields.insert("metadata".into(), Arc::new(metadata));
    }
    (Arc::new(Extent { fields, ..Extent::default() }), bytes)
}
