//! Walking values by their type: which fields are there ([`extract`]), and what changed between two
//! states ([`Comparison`]).

use std::collections::BTreeMap;

use serde_json::Value;

use super::node::{Node, Shape};
use super::path::{Element, equal};
use super::types::{Atom, Elements, ListType, MapType, Type};
use super::{FieldsError, Set};

/// All fields of a value.
pub fn extract<N: Node>(value: &N, of: &Type) -> Set {
    fields_of(value, of).1
}

/// Whether the path itself is a field of its own, and the set below it.
fn fields_of<N: Node>(value: &N, of: &Type) -> (bool, Set) {
    match (of.atom(Some(value)), value.shape()) {
        (Atom::Scalar(_), _) => (true, Set::EMPTY),
        (Atom::List(list), _) if list.elements == Elements::Atomic => (true, Set::EMPTY),
        (Atom::Map(map), _) if map.atomic => (true, Set::EMPTY),
        (Atom::List(list), Shape::List) => (false, fields_of_list(value.items(), list)),
        (Atom::Map(map), Shape::Map) => {
            let mut set = Set::EMPTY;
            for (name, value) in value.fields() {
                let of = map.field(name);
                let (member, below) = of.map_or((true, Set::EMPTY), |of| fields_of(value, of));
                let is_empty = match value.shape() {
                    Shape::Null => true,
                    Shape::Map => value.is_empty(),
                    _ => false,
                };
                set.push(Element::field(name), member || is_empty || !map.declares(name), below);
            }
            (false, set)
        }
        _ => (false, Set::EMPTY),
    }
}

fn fields_of_list<N: Node>(items: &[N], list: &ListType) -> Set {
    let mut set = Set::EMPTY;
    for (element, values) in keyed(items, list) {
        let below = match values[..] {
            [one] => fields_of(one, list.element.get()).1,
            _ => Set::EMPTY,
        };
        set.push(element, true, below);
    }
    set
}

/// The elements of a list by their identity; elements without an identity are left out.
fn keyed<'a, N: Node>(items: &'a [N], list: &ListType) -> BTreeMap<Element, Vec<&'a N>> {
    let mut all: BTreeMap<Element, Vec<&N>> = BTreeMap::new();
    for item in items {
        if let Ok(element) = element_of(item, list) {
            all.entry(element).or_default().push(item);
        }
    }
    all
}

/// The identity of an element of a list.
pub(super) fn element_of<N: Node>(item: &N, list: &ListType) -> Result<Element, FieldsError> {
    let keys = match &list.elements {
        Elements::Atomic => return Err(FieldsError::AtomicList),
        Elements::Map(keys) => keys,
        Elements::Set => {
            return match item.shape() {
                Shape::Map => Err(FieldsError::MapInSet),
                Shape::List => Err(FieldsError::ListInSet),
                Shape::Null => Err(FieldsError::NullInSet),
                Shape::Scalar => Ok(Element::Value(item.to_value())),
            };
        }
    };
    match item.shape() {
        Shape::Map => {}
        Shape::Null => return Err(FieldsError::NullInList),
        _ => return Err(FieldsError::ScalarInList),
    }
    let mut found: Vec<(Box<str>, Value)> = keys
        .iter()
        .filter_map(|key| {
            let value = item.get(&key.name).map(N::to_value).or_else(|| key.default.clone())?;
            Some((key.name.clone(), value))
        })
        .collect();
    if found.is_empty() {
        let names: Vec<String> = keys.iter().map(|key| format!("{:?}", key.name)).collect();
        return Err(FieldsError::NoKeys(names.join(" ")));
    }
    found.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    Ok(Element::Key(found.into()))
}

/// How a state differs from the one before. No field is in two of the sets.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    pub removed: Set,
    pub modified: Set,
    pub added: Set,
}

#[derive(Clone, Copy, PartialEq)]
enum Change {
    No,
    Removed,
    Modified,
    Added,
}

impl Comparison {
    pub fn of<N: Node>(before: &N, after: &N, of: &Type) -> Self {
        let mut whole = Self::default();
        compare(Some(before), Some(after), of, &mut whole);
        whole
    }

    pub fn map(self, each: impl Fn(Set) -> Set) -> Self {
        Self { removed: each(self.removed), modified: each(self.modified), added: each(self.added) }
    }

    /// Adds what became of one element; elements come in their order.
    fn push(&mut self, element: Element, change: Change, below: Self) {
        let sets = [
            (&mut self.removed, Change::Removed, below.removed),
            (&mut self.modified, Change::Modified, below.modified),
            (&mut self.added, Change::Added, below.added),
        ];
        let mut sets =
            sets.into_iter().filter(|(_, kind, below)| change == *kind || !below.is_empty());
        // Nearly always it is in one of them.
        let Some((set, kind, below)) = sets.next() else { return };
        for (set, kind, below) in sets {
            set.push(element.clone(), change == kind, below);
        }
        set.push(element, change == kind, below);
    }
}

/// Compares one path: changes below it go into `below`, its own change is returned.
fn compare<N: Node>(
    before: Option<&N>,
    after: Option<&N>,
    of: &Type,
    below: &mut Comparison,
) -> Change {
    let (was, is) = (of.atom(before), of.atom(after));
    let leaf = match (before, after) {
        (_, None) => compare_as(was, before, after, below),
        (None, _) => compare_as(is, before, after, below),
        _ if was.is_like(is) => compare_as(is, before, after, below),
        // It became something else: a leaf changed, or all that was in it goes and comes.
        _ => {
            let mut other = Comparison::default();
            let first = compare_as(was, before, after, below);
            let second = compare_as(is, before, after, &mut other);
            let sets = std::mem::take(below);
            *below = Comparison {
                removed: sets.removed.union(other.removed),
                modified: sets.modified.union(other.modified),
                added: sets.added.union(other.added),
            };
            first.or(second)
        }
    };
    match (leaf, before, after) {
        (Some(change), ..) => change,
        (None, None, _) => Change::Added,
        (None, _, None) => Change::Removed,
        _ => Change::No,
    }
}

/// `Some`: the place is a leaf, and this became of it.
fn compare_as<N: Node>(
    atom: Atom<'_>,
    before: Option<&N>,
    after: Option<&N>,
    below: &mut Comparison,
) -> Option<Change> {
    let leaf = || {
        Some(match (before, after) {
            (None, _) => Change::Added,
            (_, None) => Change::Removed,
            (Some(before), Some(after)) if equal(before, after) => Change::No,
            _ => Change::Modified,
        })
    };
    match atom {
        Atom::Nothing => Some(Change::No),
        Atom::Scalar(_) => leaf(),
        Atom::List(list) => {
            let items = |value: Option<&N>| value.is_some_and(|value| !value.items().is_empty());
            if list.elements == Elements::Atomic || !(items(before) || items(after)) {
                return leaf();
            }
            compare_lists(before, after, list, below);
            None
        }
        Atom::Map(map) => {
            // One that comes or goes is not empty if Go's struct never is.
            let never_empty = before.is_some() != after.is_some() && map.always().next().is_some();
            let fields = |value: Option<&N>| {
                let map = value.filter(|value| value.is_map());
                map.is_some_and(|map| never_empty || !map.is_empty())
            };
            if map.atomic || !(fields(before) || fields(after)) {
                return leaf();
            }
            compare_maps(before, after, map, below);
            None
        }
    }
}

/// Goes through both maps at once: their fields are sorted. A struct of Go's that comes or goes does so
/// with the fields that it always has.
fn compare_maps<N: Node>(
    before: Option<&N>,
    after: Option<&N>,
    map: &MapType,
    out: &mut Comparison,
) {
    let is_map = |value: Option<&N>| value.is_some_and(N::is_map);
    let (was_there, is_there) = (is_map(before), is_map(after));
    let mut old = before.into_iter().flat_map(N::fields).peekable();
    let mut new = after.into_iter().flat_map(N::fields).peekable();
    let unsaid = map.always().filter(|_| was_there != is_there);
    let mut unsaid = unsaid.peekable();
    loop {
        let names = [
            old.peek().map(|(name, _)| *name),
            new.peek().map(|(name, _)| *name),
            unsaid.peek().copied(),
        ];
        let Some(name) = names.into_iter().flatten().min() else { return };
        let before = old.next_if(|(old, _)| *old == name).map(|(_, value)| value);
        let after = new.next_if(|(new, _)| *new == name).map(|(_, value)| value);
        unsaid.next_if_eq(&name);
        // Most of most objects does not change.
        if before.is_some() && before == after {
            continue;
        }
        let mut below = Comparison::default();
        let change = match map.field(name) {
            Some(of) => {
                let zero = map.fields.get(name).filter(|field| field.always).map(|_| of.zero());
                let before = before.or(zero.filter(|_| was_there));
                let after = after.or(zero.filter(|_| is_there));
                compare(before, after, of, &mut below)
            }
            None => Change::No,
        };
        out.push(Element::field(name), change, below);
    }
}

fn compare_lists<N: Node>(
    before: Option<&N>,
    after: Option<&N>,
    list: &ListType,
    out: &mut Comparison,
) {
    let (old, new) = (before.map_or(&[][..], N::items), after.map_or(&[][..], N::items));
    let mut all: BTreeMap<Element, (Vec<&N>, Vec<&N>)> = BTreeMap::new();
    for (element, values) in keyed(old, list) {
        all.entry(element).or_default().0 = values;
    }
    for (element, values) in keyed(new, list) {
        all.entry(element).or_default().1 = values;
    }
    for (element, (old, new)) in all {
        let mut below = Comparison::default();
        let mut one = |before, after| compare(before, after, list.element.get(), &mut below);
        let change = match (&old[..], &new[..]) {
            ([] | [_], [] | [_]) => one(old.first().copied(), new.first().copied()),
            // Duplicates on both sides are one thing.
            ([_, _, ..], [_, _, ..]) if old == new => Change::No,
            ([_, _, ..], [_, _, ..]) => Change::Modified,
            ([_, _, ..], rest) => {
                let change = rest.first().map_or(Change::No, |value| one(None, Some(*value)));
                // Both may be: the marker of the duplicates goes, the single one comes.
                if change == Change::Added {
                    out.added.push(element.clone(), true, Set::EMPTY);
                }
                Change::Removed
            }
            (rest, _) => {
                let change = rest.first().map_or(Change::No, |value| one(Some(*value), None));
                if change == Change::Removed {
                    out.removed.push(element.clone(), true, Set::EMPTY);
                }
                Change::Added
            }
        };
        // The markers above may have put a node there already.
        let Comparison { removed, modified, added } = below;
        for (set, kind, below) in [
            (&mut out.removed, Change::Removed, removed),
            (&mut out.modified, Change::Modified, modified),
            (&mut out.added, Change::Added, added),
        ] {
            set.insert(element.clone(), change == kind, below);
        }
    }
}
