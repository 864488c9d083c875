//! Finds selectors by the labels that they demand.
//!
//! In: selectors of pods, in one namespace or in all. Out: those that may match a pod. A look-up costs the
//! pod's labels plus the selectors that share one with it, and those that demand no value of a label.
//! The same idea as `client::Selectors`, for selectors that are no objects.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

use machinery::Pairs;
use machinery::selector::Selector;

/// The namespace; empty for all.
type Scope = String;

pub struct Index<K> {
    by_pair: HashMap<(Scope, String, String), BTreeSet<K>>,
    rest: HashMap<Scope, BTreeSet<K>>,
}

impl<K> Default for Index<K> {
    fn default() -> Self {
        Self { by_pair: HashMap::new(), rest: HashMap::new() }
    }
}

impl<K: Ord + Clone> Index<K> {
    pub fn insert(&mut self, scope: &str, selector: &Selector, key: K) {
        let set = match pair(selector) {
            Some((name, value)) => self.by_pair.entry((scope.to_owned(), name, value)).or_default(),
            None => self.rest.entry(scope.to_owned()).or_default(),
        };
        set.insert(key);
    }

    pub fn remove(&mut self, scope: &str, selector: &Selector, key: &K) {
        match pair(selector) {
            Some((name, value)) => {
                drop_from(&mut self.by_pair, &(scope.to_owned(), name, value), key);
            }
            None => drop_from(&mut self.rest, &scope.to_owned(), key),
        }
    }

    /// The selectors of the namespace, and those of all namespaces, that may match the labels.
    pub fn candidates<'a>(
        &'a self,
        namespace: &'a str,
        labels: &'a Pairs,
    ) -> impl Iterator<Item = &'a K> {
        ["", namespace].into_iter().flat_map(move |scope| {
            let pairs = labels.iter().filter_map(move |(name, value)| {
                self.by_pair.get(&(scope.to_owned(), name.to_owned(), value.to_owned()))
            });
            pairs.chain(self.rest.get(scope)).flatten()
        })
    }
}

/// A label and the one value that the selector demands of it.
fn pair(selector: &Selector) -> Option<(String, String)> {
    let mut names = selector.requirements.iter().map(|one| one.key.as_str());
    names.find_map(|name| Some((name.to_owned(), selector.exact(name)?.to_owned())))
}

fn drop_from<P: Hash + Eq, K: Ord>(sets: &mut HashMap<P, BTreeSet<K>>, place: &P, key: &K) {
    if let Some(set) = sets.get_mut(place) {
        set.remove(key);
        if set.is_empty() {
            sets.remove(place);
        }
    }
}
