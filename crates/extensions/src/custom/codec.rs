//! Decodes custom resources from JSON: removes and reports unknown fields, and applies defaults.

use std::sync::Arc;

use machinery::object::{Codec, DecodeError, Decoded, Unstructured};
use machinery::{Object, ObjectMeta};
use serde_json::Value;

use super::{Family, Version};
use crate::schema::{embedded, normal};

pub struct Custom {
    pub family: Arc<Family>,
    pub index: usize,
}

impl Custom {
    fn version(&self) -> &Version {
        &self.family.versions[self.index]
    }
}

impl Codec for Custom {
    fn decode(&self, json: &[u8]) -> Result<Decoded, DecodeError> {
        self.decode_value(serde_json::from_slice(json)?)
    }

    fn decode_value(&self, value: Value) -> Result<Decoded, DecodeError> {
        let mut unknown_fields = vec![];
        if let Some(given) = value.get("metadata") {
            let (_, unknown) = embedded::metadata(given).map_err(DecodeError)?;
            unknown_fields = unknown.iter().map(|field| format!("metadata.{field}")).collect();
        }
        let mut object = Unstructured::from_value(value)?;
        unknown_fields.extend(normalize(&mut object, self.version())?);
        Ok(Decoded { object: Box::new(object), unknown_fields })
    }

    fn decode_stored(&self, json: &[u8]) -> Result<Box<dyn Object>, DecodeError> {
        Ok(Box::new(Unstructured::from_value(serde_json::from_slice(json)?)?))
    }

    fn empty(&self) -> Box<dyn Object> {
        Box::new(Unstructured {
            api_version: self.version().api_version.clone(),
            kind: self.family.kind.clone(),
            metadata: ObjectMeta::default(),
            fields: Default::default(),
        })
    }
}

/// The normal form of an object of this version, and the paths of unknown fields.
pub fn normalize(object: &mut Unstructured, version: &Version) -> Result<Vec<String>, DecodeError> {
    let Some(schema) = &version.schema else { return Ok(vec![]) };
    let mut unknown = normal::normalize(&mut object.fields, schema);
    embedded::coerce(&mut object.fields, schema, &mut unknown).map_err(DecodeError)?;
    Ok(unknown)
}
