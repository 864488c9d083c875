//! Conversion between the versions of a custom kind.
//!
//! Objects are written in the storage version. The store may also have objects in former storage
//! versions. Without a webhook, versions differ in their name only.

use std::sync::Arc;

use apiserver::StatusError;
use apiserver::resource::Conversion;
use machinery::Object;
use machinery::object::{Codec, Unstructured, Untyped};

use super::Family;
use super::codec::normalize;

struct Converter {
    family: Arc<Family>,
    index: usize,
    stored: Untyped,
    /// The first bytes of objects in the present storage version.
    head: Vec<u8>,
}

/// `None` if stored bytes are served unchanged.
pub fn of(family: &Arc<Family>, index: usize) -> Option<Arc<dyn Conversion>> {
    if family.is_settled {
        return None;
    }
    let stored = Untyped { api_version: family.stored.clone(), kind: family.kind.clone() };
    let head = format!(r#"{{"apiVersion":"{}","#, family.stored).into_bytes();
    Some(Arc::new(Converter { family: family.clone(), index, stored, head }))
}

impl Converter {
    fn convert(
        &self,
        mut objects: Vec<Box<dyn Object>>,
        wanted: &str,
    ) -> Result<Vec<Box<dyn Object>>, StatusError> {
        let custom = objects.iter_mut().map(|object| object.expect_mut::<Unstructured>());
        let others: Vec<&mut Unstructured> =
            custom.filter(|object| object.api_version != wanted).collect();
        match &self.family.webhook {
            Some(webhook) => webhook.convert(others, wanted)?,
            None => others.into_iter().for_each(|object| object.api_version = wanted.into()),
        }
        Ok(objects)
    }
}

fn one(mut objects: Vec<Box<dyn Object>>) -> Box<dyn Object> {
    objects.pop().expect("as many come back as were sent")
}

impl Conversion for Converter {
    fn to_stored(&self, object: Box<dyn Object>) -> Result<Box<dyn Object>, StatusError> {
        Ok(one(self.convert(vec![object], &self.family.stored)?))
    }

    fn to_served(&self, object: Box<dyn Object>) -> Result<Box<dyn Object>, StatusError> {
        Ok(one(self.all_to_served(vec![object])?))
    }

    /// As upstream, the storage version applies its defaults and prunes, and then the requested version
    /// does.
    fn all_to_served(
        &self,
        mut objects: Vec<Box<dyn Object>>,
    ) -> Result<Vec<Box<dyn Object>>, StatusError> {
        let served = &self.family.versions[self.index];
        for object in &mut objects {
            let custom = object.expect_mut::<Unstructured>();
            let kept = custom.api_version.clone();
            if kept != served.api_version
                && let Some(version) = self.family.version(&kept)
            {
                normalize(custom, version).map_err(StatusError::internal)?;
            }
        }
        let mut objects = self.convert(objects, &served.api_version)?;
        for object in &mut objects {
            normalize(object.expect_mut::<Unstructured>(), served)
                .map_err(StatusError::internal)?;
        }
        Ok(objects)
    }

    fn stored_codec(&self) -> &dyn Codec {
        &self.stored
    }

    fn is_stale(&self, value: &[u8]) -> bool {
        !value.starts_with(&self.head)
    }
}
