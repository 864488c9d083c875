//! The difference of two rulesets as one transaction.
//!
//! Sets and chains keep their identity, rules do not: a chain whose rules differ is flushed and
//! refilled (service chains are short). The order within the transaction follows the kernel's
//! reference counts: an object is created before, and deleted after, the objects that refer to it.
//!
//! ```text
//! 1 add new sets and chains    so that rules and elements can name them
//! 2 delete old elements, flush changed and old chains, delete old sets
//! 3 recreate sets of another shape
//! 4 add rules of new and changed chains, new elements
//! 5 delete old chains
//! ```
//!
//! A table that only the new ruleset has is added, deleted and added. So the transaction replaces a
//! former process's table of that name atomically.

use std::collections::BTreeSet;

use super::encode::Encoder;
use super::model::{Chain, Family, Ruleset, Set, Table};
use super::wire::Batch;

/// The transaction that changes `old`, the kernel's present ruleset, into `new`.
pub fn diff(old: &Ruleset, new: &Ruleset) -> Batch {
    let mut batch = Batch::default();
    let mut set_id = 0;
    let keys: BTreeSet<&(Family, String)> = old.tables.keys().chain(new.tables.keys()).collect();
    for key in keys {
        let mut to =
            Encoder { family: key.0, table: &key.1, set_id: &mut set_id, out: &mut batch.messages };
        match (old.tables.get(key), new.tables.get(key)) {
            (Some(old), Some(new)) if old == new => {}
            (Some(old), Some(new)) if keeps_frame(old, new) => change(&mut to, old, new),
            (_, Some(new)) => replace(&mut to, new),
            (_, None) => {
                // Adding first makes the deletion safe when another program removed the table.
                to.new_table(&Table::default());
                to.delete_table();
            }
        }
    }
    batch
}

/// Hooks and comments of tables and base chains cannot be changed in place.
fn keeps_frame(old: &Table, new: &Table) -> bool {
    old.comment == new.comment
        && old.chains.iter().all(|(name, chain)| match new.chains.get(name) {
            Some(other) => chain.base == other.base && chain.comment == other.comment,
            None => true,
        })
}

fn replace(to: &mut Encoder<'_>, table: &Table) {
    to.new_table(&Table::default());
    to.delete_table();
    to.new_table(table);
    change(to, &Table::default(), table);
}

fn change(to: &mut Encoder<'_>, old: &Table, new: &Table) {
    let remade: BTreeSet<&str> = new
        .sets
        .iter()
        .filter(|(name, set)| old.sets.get(*name).is_some_and(|was| !same_shape(was, set)))
        .map(|(name, _)| name.as_str())
        .collect();
    let is_changed = |name: &String, chain: &Chain| match old.chains.get(name) {
        Some(was) => was.rules != chain.rules || uses_any(chain, &remade),
        None => true,
    };
    let changed: Vec<(&String, &Chain)> =
        new.chains.iter().filter(|(name, chain)| is_changed(name, chain)).collect();

    for (name, set) in new.sets.iter().filter(|(name, _)| !old.sets.contains_key(*name)) {
        to.new_set(name, set);
    }
    for (name, chain) in new.chains.iter().filter(|(name, _)| !old.chains.contains_key(*name)) {
        to.new_chain(name, chain);
    }
    for (name, was, now) in shared_sets(old, new).filter(|(name, ..)| !remade.contains(*name)) {
        let gone = was.elements.iter().filter(|(k, v)| now.elements.get(*k) != Some(*v));
        to.delete_elements(name, gone.map(|(key, _)| key));
    }
    for (name, _) in changed.iter().filter(|(name, _)| old.chains.contains_key(*name)) {
        to.flush_chain(name);
    }
    let dying: Vec<&String> = old.chains.keys().filter(|n| !new.chains.contains_key(*n)).collect();
    for name in &dying {
        to.flush_chain(name);
    }
    for name in old.sets.keys() {
        if !new.sets.contains_key(name) || remade.contains(name.as_str()) {
            to.delete_set(name);
        }
    }
    for (name, set) in new.sets.iter().filter(|(name, _)| remade.contains(name.as_str())) {
        to.new_set(name, set);
    }
    for (name, chain) in changed {
        for rule in &chain.rules {
            to.new_rule(name, rule);
        }
    }
    add_elements(to, old, new, &remade);
    for name in dying {
        to.delete_chain(name);
    }
}

fn add_elements(to: &mut Encoder<'_>, old: &Table, new: &Table, remade: &BTreeSet<&str>) {
    for (name, set) in &new.sets {
        let was = old.sets.get(name).filter(|_| !remade.contains(name.as_str()));
        let added = set
            .elements
            .iter()
            .filter(|(key, value)| was.and_then(|was| was.elements.get(*key)) != Some(*value));
        to.new_elements(name, added);
    }
}

fn shared_sets<'a>(
    old: &'a Table,
    new: &'a Table,
) -> impl Iterator<Item = (&'a str, &'a Set, &'a Set)> {
    old.sets.iter().filter_map(|(name, was)| Some((name.as_str(), was, new.sets.get(name)?)))
}

/// Equal except for the elements. Sets of intervals are made again as a whole.
fn same_shape(a: &Set, b: &Set) -> bool {
    (&a.key, a.map, a.interval, a.dynamic, a.timeout, a.size, &a.comment)
        == (&b.key, b.map, b.interval, b.dynamic, b.timeout, b.size, &b.comment)
        && (!a.interval || a.elements == b.elements)
}

fn uses_any(chain: &Chain, sets: &BTreeSet<&str>) -> bool {
    let mut names = chain.rules.iter().flat_map(|r| &r.stmts).filter_map(|s| s.set_name());
    names.any(|name| sets.contains(name))
}
