//! The rules as they are to be, with a journal of what changed since the kernel last heard of them.
//!
//! In: sets, elements and chains. Out: a transaction that holds the changed ones only, so that its size does
//! not depend on how many there are.
//!
//! Invariant: the tables without the journal's changes are those of the last [`Live::take`].

use std::collections::BTreeMap;

use net::nft::{Batch, Chain, Element, Family, Ruleset, Set, Value, diff};

type Name = (Family, String);

#[derive(Default)]
pub struct Live {
    rules: Ruleset,
    sets: BTreeMap<Name, Before>,
    chains: BTreeMap<Name, Option<Chain>>,
}

/// A set as it was at the last transaction.
enum Before {
    /// The whole set; `None`: there was none.
    Whole(Option<Set>),
    /// Some of its elements; the rest is unchanged.
    Elements(BTreeMap<Vec<Value>, Option<Element>>),
}

impl Live {
    pub fn new(rules: Ruleset) -> Self {
        Self { rules, ..Self::default() }
    }

    pub fn rules(&self) -> &Ruleset {
        &self.rules
    }

    pub fn put_set(&mut self, family: Family, table: &str, name: &str, set: Set) {
        let key = (family, name.to_owned());
        self.sets.entry(key).or_insert(Before::Whole(None));
        self.rules.table(family, table).sets.insert(name.to_owned(), set);
    }

    pub fn remove_set(&mut self, family: Family, table: &str, name: &str) {
        let Some(mut set) = self.rules.table(family, table).sets.remove(name) else { return };
        let key = (family, name.to_owned());
        let before = match self.sets.remove(&key) {
            Some(Before::Whole(before)) => before,
            Some(Before::Elements(changed)) => {
                for (element, was) in changed {
                    match was {
                        Some(was) => set.elements.insert(element, was),
                        None => set.elements.remove(&element),
                    };
                }
                Some(set)
            }
            None => Some(set),
        };
        if before.is_some() {
            self.sets.insert(key, Before::Whole(before));
        }
    }

    /// Adds, replaces or (with `None`) removes an element of an existing set.
    pub fn set_element(
        &mut self,
        family: Family,
        table: &str,
        set: &str,
        key: Vec<Value>,
        element: Option<Element>,
    ) {
        let Some(known) = self.rules.table(family, table).sets.get_mut(set) else { return };
        let was = match element {
            Some(element) => known.elements.insert(key.clone(), element),
            None => known.elements.remove(&key),
        };
        let before = self.sets.entry((family, set.to_owned()));
        match before.or_insert_with(|| Before::Elements(BTreeMap::new())) {
            Before::Whole(_) => {}
            Before::Elements(changed) => {
                changed.entry(key).or_insert(was);
            }
        }
    }

    pub fn has_element(&self, family: Family, table: &str, set: &str, key: &[Value]) -> bool {
        let table = self.rules.tables.get(&(family, table.to_owned()));
        let set = table.and_then(|table| table.sets.get(set));
        set.is_some_and(|set| set.elements.contains_key(key))
    }

    pub fn put_chain(&mut self, family: Family, table: &str, name: &str, chain: Chain) {
        let was = self.rules.table(family, table).chains.insert(name.to_owned(), chain);
        self.chains.entry((family, name.to_owned())).or_insert(was);
    }

    pub fn remove_chain(&mut self, family: Family, table: &str, name: &str) {
        let was = self.rules.table(family, table).chains.remove(name);
        self.chains.entry((family, name.to_owned())).or_insert(was);
    }

    /// The changes since the last call, as a transaction.
    pub fn take(&mut self) -> Batch {
        let (mut old, mut new) = (Ruleset::default(), Ruleset::default());
        for ((family, table), live) in &self.rules.tables {
            for rules in [&mut old, &mut new] {
                rules.table(*family, table).comment.clone_from(&live.comment);
            }
            let (old, new) = (old.table(*family, table), new.table(*family, table));
            let of_family = |key: &Name| key.0 == *family;
            let keys: Vec<Name> = self.sets.keys().filter(|key| of_family(key)).cloned().collect();
            for key in keys {
                let Some(before) = self.sets.remove(&key) else { continue };
                let now = live.sets.get(&key.1);
                match before {
                    Before::Whole(before) => {
                        old.sets.extend(before.map(|set| (key.1.clone(), set)));
                        new.sets.extend(now.map(|set| (key.1.clone(), set.clone())));
                    }
                    Before::Elements(changed) => {
                        let Some(now) = now else { continue };
                        let (was, is) = only(now, changed);
                        old.sets.insert(key.1.clone(), was);
                        new.sets.insert(key.1, is);
                    }
                }
            }
            let keys: Vec<Name> =
                self.chains.keys().filter(|key| of_family(key)).cloned().collect();
            for key in keys {
                let before = self.chains.remove(&key).flatten();
                old.chains.extend(before.map(|chain| (key.1.clone(), chain)));
                let now = live.chains.get(&key.1);
                new.chains.extend(now.map(|chain| (key.1, chain.clone())));
            }
        }
        diff(&old, &new)
    }

    /// The transaction that replaces whatever the kernel has.
    pub fn take_all(&mut self) -> Batch {
        self.sets.clear();
        self.chains.clear();
        diff(&Ruleset::default(), &self.rules)
    }
}

/// The set with nothing but its changed elements: as they were, and as they are.
fn only(now: &Set, changed: BTreeMap<Vec<Value>, Option<Element>>) -> (Set, Set) {
    let shape = Set {
        key: now.key.clone(),
        comment: now.comment.clone(),
        elements: BTreeMap::new(),
        map: now.map,
        interval: now.interval,
        dynamic: now.dynamic,
        timeout: now.timeout,
        size: now.size,
    };
    let (mut was, mut is) = (shape.clone(), shape);
    for (key, before) in changed {
        if let Some(element) = now.elements.get(&key) {
            is.elements.insert(key.clone(), element.clone());
        }
        if let Some(element) = before {
            was.elements.insert(key, element);
        }
    }
    (was, is)
}
