//! A value computed from all objects of one kind (webhooks from their configurations, policies), computed
//! again only after the kind changed.
//!
//! Invariant: the next [`Compiled::get`] sees the writes of this process.

use std::sync::{Arc, Mutex};

use machinery::ObjectMeta;
use store::Revision;

use super::Registry;
use crate::StatusError;
use crate::cacher::Scope;

type Compile<T, C> = fn(&[T]) -> C;

/// See the module.
pub struct Compiled<T, C> {
    compile: Compile<T, C>,
    /// The latest value, and the revision of the kind that it belongs to. Never locked across an await.
    latest: Mutex<Option<(Revision, Arc<C>)>>,
}

impl<T, C> Compiled<T, C>
where
    T: k8s_openapi::Metadata<Ty = ObjectMeta> + 'static,
{
    pub const fn new(compile: Compile<T, C>) -> Self {
        Self { compile, latest: Mutex::new(None) }
    }

    pub async fn get(&self, registry: &Registry) -> Result<Arc<C>, StatusError> {
        let cacher = registry.cacher(&registry.row_of::<T>());
        let changed = cacher.settled().await?;
        if let Some((at, latest)) = &*self.latest.lock().expect("no panic under the lock")
            && *at == changed
        {
            return Ok(latest.clone());
        }
        let (entries, ..) = cacher.list(&Scope::default(), 0);
        let mut all = Vec::with_capacity(entries.len());
        for entry in entries {
            all.extend(cacher.stored(&entry).object()?.into_typed::<T>());
        }
        let compiled = Arc::new((self.compile)(&all));
        *self.latest.lock().expect("no panic under the lock") = Some((changed, compiled.clone()));
        Ok(compiled)
    }
}
