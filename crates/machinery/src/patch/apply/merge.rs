//! The merge itself: an applied configuration laid over an object, and fields taken out of one.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::path::Element;
use super::types::{Atom, Elements, ListType, MapType, Type};
use super::walk::element_of;
use super::{FieldsError, Set};

/// The object with the applied configuration on top. Lists keep their order; new elements come where the
/// applied list has them.
pub fn merge(live: &Value, applied: &Value, of: &Type) -> Result<Value, FieldsError> {
    let merged = merged(Some(live), Some(applied), of)?;
    Ok(merged.unwrap_or_else(|| Value::Object(Map::new())))
}

fn merged(
    live: Option<&Value>,
    applied: Option<&Value>,
    of: &Type,
) -> Result<Option<Value>, FieldsError> {
    let (was, is) = (of.atom(live), of.atom(applied));
    let atom = if applied.is_none() { was } else { is };
    let leaf = || Ok(applied.or(live).cloned());
    match atom {
        Atom::Nothing | Atom::Scalar(_) => leaf(),
        Atom::List(list) => {
            let old = live.and_then(Value::as_array).map_or(&[][..], |items| items);
            let new = applied.and_then(Value::as_array).map_or(&[][..], |items| items);
            if list.elements == Elements::Atomic || (old.is_empty() && new.is_empty()) {
                return leaf();
            }
            let items = merged_lists(old, new, list)?;
            Ok((!items.is_empty()).then_some(Value::Array(items)))
        }
        Atom::Map(map) => {
            let old = live.and_then(Value::as_object).filter(|fields| !fields.is_empty());
            let new = applied.and_then(Value::as_object).filter(|fields| !fields.is_empty());
            if map.atomic || (old.is_none() && new.is_none()) {
                return leaf();
            }
            let fields = merged_maps(old, new, map)?;
            Ok((!fields.is_empty()).then_some(Value::Object(fields)))
        }
    }
}

type Fields = Map<String, Value>;

fn merged_maps(
    old: Option<&Fields>,
    new: Option<&Fields>,
    map: &MapType,
) -> Result<Fields, FieldsError> {
    let mut out = Map::new();
    for (name, value) in old.into_iter().flatten() {
        let applied = new.and_then(|new| new.get(name));
        let value = match (applied, map.field(name)) {
            // The configuration does not set it.
            (None, _) => Some(value.clone()),
            (Some(_), Some(of)) => {
                merged(Some(value), applied, of).map_err(FieldsError::in_field(name))?
            }
            (Some(applied), None) => Some(applied.clone()),
        };
        out.extend(value.map(|value| (name.clone(), value)));
    }
    for (name, value) in new.into_iter().flatten() {
        if old.is_some_and(|old| old.contains_key(name)) {
            continue;
        }
        let value = match map.field(name) {
            Some(of) => merged(None, Some(value), of).map_err(FieldsError::in_field(name))?,
            None => Some(value.clone()),
        };
        out.extend(value.map(|value| (name.clone(), value)));
    }
    Ok(out)
}

/// Weaves two lists. Elements of both come in the applied order; those that only the object has stay
/// before the shared ones that they stood before.
fn merged_lists(old: &[Value], new: &[Value], list: &ListType) -> Result<Vec<Value>, FieldsError> {
    let elements = |items: &[Value]| -> Result<Vec<Element>, FieldsError> {
        let each = items.iter().enumerate();
        each.map(|(at, item)| {
            element_of(item, list).map_err(|why| FieldsError::At { at, why: Box::new(why) })
        })
        .collect()
    };
    let (ours, theirs) = (elements(old)?, elements(new)?);
    // Duplicates are not merged with applied elements.
    let mut in_old: BTreeMap<&Element, Option<&Value>> = BTreeMap::new();
    for (element, value) in ours.iter().zip(old) {
        in_old.entry(element).and_modify(|value| *value = None).or_insert(Some(value));
    }
    let in_new: BTreeMap<&Element, &Value> = theirs.iter().zip(new).collect();
    let mut shared = theirs.iter().filter(|element| in_old.contains_key(element)).peekable();
    let mut out = Vec::with_capacity(old.len().max(new.len()));
    let take = |element: &Element| {
        let (live, applied) = (in_old.get(element).copied().flatten(), in_new.get(element));
        merged(live, applied.copied(), list.element.get())
            .map_err(|why| FieldsError::InElement { element: element.clone(), why: Box::new(why) })
    };
    let (mut left, mut right) = (0, 0);
    let mut done: BTreeSet<&Element> = BTreeSet::new();
    while left < ours.len() || right < theirs.len() {
        if left < ours.len() && right < theirs.len() {
            let element = &ours[left];
            if *element == theirs[right] {
                done.insert(element);
                out.extend(take(element)?);
                (left, right) = (left + 1, right + 1);
                shared.next();
                continue;
            }
            // It is shared, but its turn comes later.
            if in_new.contains_key(element) && shared.peek().is_some_and(|next| **next != *element)
            {
                left += 1;
                continue;
            }
        }
        if left < ours.len() {
            let element = &ours[left];
            if !in_new.contains_key(element) {
                out.push(old[left].clone());
                left += 1;
                continue;
            }
            if done.contains(element) {
                left += 1;
            }
        }
        if right < theirs.len() {
            let element = &theirs[right];
            done.insert(element);
            out.extend(take(element)?);
            right += 1;
            if shared.peek() == Some(&element) {
                shared.next();
            }
        }
    }
    Ok(out)
}

/// The value without the members of a set and all that is below them. `None`: nothing is left.
pub fn remove(value: &Value, gone: &Set, of: &Type) -> Option<Value> {
    match (of.atom(Some(value)), value) {
        (Atom::Scalar(_), _) => Some(value.clone()),
        (Atom::List(list), Value::Array(items)) if list.elements != Elements::Atomic => {
            remove_from_list(items, gone, list)
        }
        (Atom::Map(map), Value::Object(fields)) if !map.atomic => {
            remove_from_map(fields, gone, map)
        }
        _ => None,
    }
}

fn remove_from_list(items: &[Value], gone: &Set, list: &ListType) -> Option<Value> {
    let (mut out, mut emptied) = (vec![], false);
    for item in items {
        let Ok(element) = element_of(item, list) else {
            out.push(item.clone());
            continue;
        };
        if gone.has(&element) {
            continue;
        }
        match gone.below(&element) {
            None => out.push(item.clone()),
            Some(below) => {
                emptied = true;
                out.push(remove_below(item, below, list.element.get()));
            }
        }
    }
    (!out.is_empty() || emptied).then_some(Value::Array(out))
}

fn remove_from_map(fields: &Fields, gone: &Set, map: &MapType) -> Option<Value> {
    let (mut out, mut emptied) = (Map::new(), false);
    for (name, value) in fields {
        let element = Element::field(name);
        if gone.has(&element) {
            continue;
        }
        let value = match (gone.below(&element), map.field(name)) {
            (Some(below), Some(of)) => {
                emptied = true;
                remove_below(value, below, of)
            }
            _ => value.clone(),
        };
        out.insert(name.clone(), value);
    }
    (!out.is_empty() || emptied).then_some(Value::Object(out))
}

/// A map or list that loses all it has stays, empty.
fn remove_below(value: &Value, below: &Set, of: &Type) -> Value {
    remove(value, below, of).unwrap_or_else(|| match value {
        Value::Object(_) => Value::Object(Map::new()),
        Value::Array(_) => Value::Array(vec![]),
        _ => Value::Null,
    })
}

/// The set with the structs on the way to its members as members themselves: `.a.b.c` makes `.a` one
/// where it is a declared field.
pub(super) fn with_parents(set: &Set, of: Option<&Type>) -> Set {
    let mut out = Set::EMPTY;
    let map = of.and_then(|of| of.map.as_ref());
    let list = of.and_then(|of| of.list.as_ref());
    for (element, member, below) in set.nodes() {
        let (is_parent, of) = match element {
            Element::Field(name) => {
                let declared = map.is_some_and(|map| map.declares(name));
                (declared && !below.is_empty(), map.and_then(|map| map.field(name)))
            }
            Element::Key(_) => (false, list.map(|list| list.element.get())),
            _ => (false, None),
        };
        out.push(element.clone(), member || is_parent, with_parents(below, of));
    }
    out
}
