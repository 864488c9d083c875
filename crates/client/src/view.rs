//! Views: a controller's knowledge of many objects, without decoding them.
//!
//! In: changes of an informer. Out: one small typed value for each object, made once for each change.
//! Invariant: a view agrees with the informer's cache when the handlers that subscribed after it run.
//!
//! A lister decodes the object under reconcile. A query over all objects of a kind or namespace would
//! decode all of them each time. A view answers it from values that exist already.

use std::collections::BTreeMap;
use std::sync::{Arc, RwLock, RwLockReadGuard};

use crate::cache::ObjectKey;
use crate::resource::Kind;

/// A small typed projection of an object of the kind `T`.
pub trait Projection<T>: Send + Sync + 'static {
    fn of(object: &T) -> Self;

    /// Reports whether the view has a value for this object.
    fn concerns(_: &T) -> bool {
        true
    }
}

/// The whole object. For kinds with few or small objects, of which a reader needs most fields.
pub struct Whole<T>(pub Arc<T>);

impl<T: Kind> Projection<T> for Whole<T> {
    fn of(object: &T) -> Self {
        Self(Arc::new(object.clone()))
    }
}

impl<T> View<Whole<T>> {
    /// The objects of a namespace, or all for `None`, in the order of keys.
    pub fn objects(&self, namespace: Option<&str>) -> Vec<Arc<T>> {
        let found = namespace.map_or_else(|| self.all(), |namespace| self.in_namespace(namespace));
        found.into_iter().map(|(_, whole)| whole.0.clone()).collect()
    }
}

/// Cheap to clone; clones share the view. See [`Informer::view`](crate::Informer::view).
pub struct View<P>(
    /// Guards the values; written by the reflector's task, for one change at a time.
    Arc<RwLock<BTreeMap<ObjectKey, Arc<P>>>>,
);

impl<P> Clone for View<P> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<P> Default for View<P> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<P> View<P> {
    pub fn get(&self, key: &ObjectKey) -> Option<Arc<P>> {
        self.read().get(key).cloned()
    }

    /// All values, in the order of keys.
    pub fn all(&self) -> Vec<(ObjectKey, Arc<P>)> {
        self.read().iter().map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    /// The values of a namespace, in the order of names.
    pub fn in_namespace(&self, namespace: &str) -> Vec<(ObjectKey, Arc<P>)> {
        self.read()
            .range(ObjectKey::new(namespace, "")..)
            .take_while(|(key, _)| &*key.namespace == namespace)
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect()
    }

    pub(crate) fn put(&self, key: ObjectKey, value: P) {
        self.0.write().expect("no panic while held").insert(key, Arc::new(value));
    }

    pub(crate) fn remove(&self, key: &ObjectKey) {
        self.0.write().expect("no panic while held").remove(key);
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<ObjectKey, Arc<P>>> {
        self.0.read().expect("no panic while held")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_by_key_and_namespace() {
        let view = View::default();
        for (namespace, name, value) in [("b", "x", 1), ("a", "y", 2), ("b", "a", 3), ("c", "", 4)]
        {
            view.put(ObjectKey::new(namespace, name), value);
        }
        view.put(ObjectKey::new("b", "x"), 5);
        view.remove(&ObjectKey::new("a", "y"));
        let values = |found: Vec<(ObjectKey, Arc<i32>)>| -> Vec<i32> {
            found.iter().map(|(_, value)| **value).collect()
        };
        assert_eq!(view.get(&ObjectKey::new("b", "x")).as_deref(), Some(&5));
        assert_eq!(view.get(&ObjectKey::new("a", "y")), None);
        assert_eq!(values(view.in_namespace("b")), [3, 5]);
        assert!(view.in_namespace("a").is_empty());
        assert_eq!(values(view.all()), [3, 5, 4]);
    }
}
