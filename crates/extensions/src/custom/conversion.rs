//! Between the versions of a custom kind.
//!
//! Objects are put in the stored version; what is read may be in any version that once was the
//! stored one. Without a webhook versions differ in their name only.

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
    /// How stored bytes of the present version begin.
    head: Vec<u8>,
}

/// `None` where stored bytes are what is shown.
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
        mut object: Box<dyn Object>,
        wanted: &str,
    ) -> Result<Box<dyn Object>, StatusError> {
        let custom = object.expect_mut::<Unstructured>();
        if custom.api_version == wanted {
            return Ok(object);
        }
        match &self.family.webhook {
            Some(webhook) => *custom = webhook.convert(custom, wanted)?,
            None => custom.api_version = wanted.into(),
        }
        Ok(object)
    }
}

impl Conversion for Converter {
    fn to_stored(&self, object: Box<dyn Object>) -> Result<Box<dyn Object>, StatusError> {
        self.convert(object, &self.family.stored)
    }

    /// As upstream reads: the version that it is kept in fills its defaults and prunes, and so does
    /// the one that is shown.
    fn to_served(&self, mut object: Box<dyn Object>) -> Result<Box<dyn Object>, StatusError> {
        let served = &self.family.versions[self.index];
        let custom = object.expect_mut::<Unstructured>();
        let kept = custom.api_version.clone();
        if kept != served.api_version
            && let Some(version) = self.family.version(&kept)
        {
            normalize(custom, version).map_err(StatusError::internal)?;
        }
        let mut object = self.convert(object, &served.api_version)?;
        let custom = object.expect_mut::<Unstructured>();
        normalize(custom, served).map_err(StatusError::internal)?;
        Ok(object)
    }

    fn stored_codec(&self) -> &dyn Codec {
        &self.stored
    }

    fn is_stale(&self, value: &[u8]) -> bool {
        !value.starts_with(&self.head)
    }
}
