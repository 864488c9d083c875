//! A cache of decoded objects that nearly every request needs, such as its namespace and service account.
//! Each revision is decoded once.
//!
//! In: an object's storage key. Out: the object in the store now, shared.
//! Invariant: each call asks the store for existence and revision; only decoding is saved.

use std::any::Any;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};

use lru::LruCache;
use machinery::ObjectMeta;
use store::Revision;

use super::{Registry, store_key};
use crate::StatusError;
use crate::request::Key;

/// Maximum number of decoded objects: of as many namespaces as get writes at the same time.
const MOST: NonZeroUsize = NonZeroUsize::new(256).expect("positive");
/// Larger objects are not cached: decoded they take several times as much memory.
const LARGEST: usize = 16 << 10;

type Decoded = (Revision, Arc<dyn Any + Send + Sync>);

/// By storage key. Locked for a look-up or an insert, never across an await.
pub(super) struct Known(Mutex<LruCache<String, Decoded>>);

impl Default for Known {
    /// Grows up to its limit: `LruCache::new` would allocate all memory at once.
    fn default() -> Self {
        let mut objects = LruCache::unbounded();
        objects.resize(MOST);
        Self(Mutex::new(objects))
    }
}

impl Registry {
    /// Like [`find`](Self::find), for objects that many requests need.
    pub async fn known<T>(&self, namespace: &str, name: &str) -> Result<Option<Arc<T>>, StatusError>
    where
        T: k8s_openapi::Metadata<Ty = ObjectMeta> + Send + Sync + 'static,
    {
        let row = self.row_of::<T>();
        let key = Key::new(namespace, name);
        let path = store_key(&row, &key);
        let objects = &self.0.known.0;
        let Some(stored) = self.current(&row, &key).await? else {
            objects.lock().expect("no panic under the lock").pop(&path);
            return Ok(None);
        };
        let revision = stored.revision();
        if let Some((at, object)) = objects.lock().expect("no panic under the lock").get(&path)
            && *at == revision
            && let Ok(object) = object.clone().downcast::<T>()
        {
            return Ok(Some(object));
        }
        let Some(object) = stored.object()?.into_typed::<T>() else { return Ok(None) };
        let object = Arc::new(object);
        if stored.bytes().len() <= LARGEST {
            let decoded: Decoded = (revision, object.clone());
            objects.lock().expect("no panic under the lock").put(path, decoded);
        }
        Ok(Some(object))
    }
}

#[cfg(test)]
mod tests {
    use base::task::Tasks;
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;
    use crate::admission::Chain;
    use crate::registry::{DeleteOptions, Intent};
    use crate::resource::ResourceTable;

    #[tokio::test]
    async fn it_returns_the_stored_object_and_shares_it_until_it_changes() {
        let table = ResourceTable::new([crate::testing::row::<ConfigMap>("configmaps", &[], true)]);
        let registry =
            Registry::new(store::Sim::open(), table, Chain::default(), Tasks::new("test"));
        let ctx = registry.own_context::<ConfigMap>();
        let key = Key::new("ns", "one");
        let object = |value: &str| {
            let mut object = ConfigMap::default();
            object.metadata.name = Some("one".into());
            object.metadata.namespace = Some("ns".into());
            object.data = Some([("a".to_owned(), value.to_owned())].into());
            Box::new(object)
        };
        let known = async || registry.known::<ConfigMap>("ns", "one").await.expect("reads");
        assert!(known().await.is_none());
        let create = Intent::Create { object: object("1") };
        registry.write(&ctx, &key, create).await.expect("creates");
        let (first, again) = (known().await.expect("there"), known().await.expect("there"));
        assert!(Arc::ptr_eq(&first, &again));
        assert_eq!(first.data.as_ref().expect("data")["a"], "1");
        let update = Intent::Update { object: object("2") };
        registry.write(&ctx, &key, update).await.expect("updates");
        let changed = known().await.expect("there");
        assert_eq!(changed.data.as_ref().expect("data")["a"], "2");
        assert_ne!(changed.metadata.resource_version, first.metadata.resource_version);
        let delete = Intent::Delete { options: DeleteOptions::default() };
        registry.write(&ctx, &key, delete).await.expect("deletes");
        assert!(known().await.is_none());
        let large = "x".repeat(LARGEST);
        for value in ["3", &large] {
            let create = Intent::Create { object: object(value) };
            registry.write(&ctx, &key, create).await.expect("creates again");
            let (new, again) = (known().await.expect("there"), known().await.expect("there"));
            assert_eq!(new.data.as_ref().expect("data")["a"], value);
            assert_ne!(new.metadata.uid, first.metadata.uid);
            assert_eq!(Arc::ptr_eq(&new, &again), value == "3");
            let delete = Intent::Delete { options: DeleteOptions::default() };
            registry.write(&ctx, &key, delete).await.expect("deletes");
        }
    }
}
