//! The owners of selectors that match given labels: Services, PodDisruptionBudgets, workloads.
//!
//! In: selectors by the key of their owner. Out: the owners whose selector matches some labels.
//!
//! Most selectors demand a value of some label. They are kept under that label and value, so that a look-up
//! costs the labels of the object plus the selectors that share one with it, not all selectors of the
//! namespace:
//!
//! ```text
//!   Service web: app=web,tier=front      by_pair[(ns, app, web)]  = {web}
//!   Service all: env notin (dev)         rest[ns]                 = {all}
//!   labels {app: web, env: prod}    ──►  candidates web, all; each selector is then evaluated
//! ```

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, RwLock};

use machinery::Pairs;
use machinery::selector::Selector;

use crate::cache::ObjectKey;
use crate::informer::{Event, Informer};
use crate::resource::Kind;

type Pair = (Arc<str>, String, String);

/// Cheap to clone; clones share the set.
#[derive(Clone, Default)]
pub struct Selectors(
    /// Guards the set; written by the reflector's task, for one change at a time.
    Arc<RwLock<Known>>,
);

#[derive(Default)]
struct Known {
    all: HashMap<ObjectKey, Selector>,
    by_pair: HashMap<Pair, BTreeSet<ObjectKey>>,
    rest: HashMap<Arc<str>, BTreeSet<ObjectKey>>,
}

impl Selectors {
    /// The selectors of all objects of a kind, as `selector` reads them from the objects.
    pub fn of<T: Kind>(
        informer: &Informer<T>,
        selector: impl Fn(&T) -> Selector + Send + Sync + 'static,
    ) -> Self {
        let selectors = Self::default();
        let kept = selectors.clone();
        informer.subscribe(move |event| match event {
            Event::Applied { new, .. } => kept.put(event.key(), selector(new)),
            Event::Deleted(_) => kept.remove(&event.key()),
        });
        selectors
    }

    /// The objects of a namespace whose selector matches any of `labels`, in the order of names.
    pub fn matching(&self, namespace: &str, labels: &[&Pairs]) -> BTreeSet<ObjectKey> {
        let known = self.0.read().expect("no panic while held");
        let mut found = BTreeSet::new();
        for labels in labels {
            let pairs = labels.iter().filter_map(|(name, value)| {
                known.by_pair.get(&(namespace.into(), name.to_owned(), value.to_owned()))
            });
            let candidates = pairs.chain(known.rest.get(namespace)).flatten();
            let matches = |key: &&ObjectKey| {
                known.all.get(*key).is_some_and(|selector| selector.matches_pairs(labels))
            };
            found.extend(candidates.filter(matches).cloned());
        }
        found
    }

    /// The selector of an object, as it was read from it.
    pub fn get(&self, key: &ObjectKey) -> Option<Selector> {
        self.0.read().expect("no panic while held").all.get(key).cloned()
    }

    pub(crate) fn put(&self, key: ObjectKey, selector: Selector) {
        let mut known = self.0.write().expect("no panic while held");
        if known.all.get(&key) == Some(&selector) {
            return;
        }
        known.remove(&key);
        match pair(&key, &selector) {
            Some(pair) => known.by_pair.entry(pair).or_default().insert(key.clone()),
            None => known.rest.entry(key.namespace.clone()).or_default().insert(key.clone()),
        };
        known.all.insert(key, selector);
    }

    pub(crate) fn remove(&self, key: &ObjectKey) {
        self.0.write().expect("no panic while held").remove(key);
    }
}

impl Known {
    fn remove(&mut self, key: &ObjectKey) {
        let Some(selector) = self.all.remove(key) else { return };
        match pair(key, &selector) {
            Some(pair) => drop_from(&mut self.by_pair, &pair, key),
            None => drop_from(&mut self.rest, &key.namespace, key),
        }
    }
}

fn drop_from<K: std::hash::Hash + Eq>(
    sets: &mut HashMap<K, BTreeSet<ObjectKey>>,
    place: &K,
    key: &ObjectKey,
) {
    if let Some(set) = sets.get_mut(place) {
        set.remove(key);
        if set.is_empty() {
            sets.remove(place);
        }
    }
}

/// A label and the one value that the selector demands of it.
fn pair(key: &ObjectKey, selector: &Selector) -> Option<Pair> {
    let names = selector.requirements.iter().map(|one| one.key.as_str());
    names.into_iter().find_map(|name| {
        let value = selector.exact(name)?;
        Some((key.namespace.clone(), name.to_owned(), value.to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_are_found_by_the_labels_that_they_demand() {
        let selectors = Selectors::default();
        let put = |namespace: &str, name: &str, text: &str| {
            let selector = Selector::parse_labels(text).expect("a selector");
            selectors.put(ObjectKey::new(namespace, name), selector);
        };
        put("a", "web", "app=web,tier in (front,back)");
        put("a", "changed", "app=other");
        put("a", "all", "");
        put("a", "negative", "env notin (dev)");
        put("a", "set", "app in (web)");
        put("b", "elsewhere", "app=web");
        put("a", "changed", "app=web");
        selectors.put(ObjectKey::new("a", "nothing"), Selector::nothing());
        let check = |namespace: &str, labels: &[&[(&str, &str)]], expected: &[&str]| {
            let labels: Vec<Pairs> =
                labels.iter().map(|labels| labels.iter().copied().collect()).collect();
            let found = selectors.matching(namespace, &labels.iter().collect::<Vec<_>>());
            let names: Vec<_> = found.iter().map(|key| &*key.name).collect();
            assert_eq!(names, expected, "{namespace}");
        };
        check("a", &[&[("app", "web")]], &["all", "changed", "negative", "set"]);
        check(
            "a",
            &[&[("app", "web"), ("tier", "front"), ("env", "dev")]],
            &["all", "changed", "set", "web"],
        );
        check("a", &[&[("env", "dev")], &[("app", "web")]], &["all", "changed", "negative", "set"]);
        check("b", &[&[("app", "web")]], &["elsewhere"]);
        check("c", &[&[("app", "web")]], &[]);
        selectors.remove(&ObjectKey::new("a", "changed"));
        selectors.remove(&ObjectKey::new("a", "all"));
        check("a", &[&[("app", "web")]], &["negative", "set"]);
    }
}
