//! Values as upstream's API server keeps them in etcd.
//!
//! In: the JSON that the registry writes, or what upstream wrote. Out: protobuf for kinds that have a
//! message, JSON for the others; and the registry's JSON again. So one etcd serves both, in turn.

use std::sync::Arc;

use bytes::Bytes;
use machinery::Object;
use machinery::object::Unstructured;
use machinery::protobuf::{Error, MAGIC};
use serde_json::Value;
use store::{Transform, Transformed};

use super::protobuf::Protobuf;

/// Upstream's `--storage-media-type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaType {
    Json,
    Protobuf,
}

struct AtRest {
    protobuf: Protobuf,
    writes: MediaType,
}

/// The store as the registry wants it: it writes `writes` and reads both.
pub fn like_upstream(
    store: Arc<dyn store::Store>,
    protobuf: Protobuf,
    writes: MediaType,
) -> Arc<dyn store::Store> {
    Transformed::over(store, Arc::new(AtRest { protobuf, writes }))
}

/// A value in the registry's JSON, whoever wrote it.
pub fn plain(protobuf: Protobuf, key: &[u8], value: Bytes) -> store::Result<Bytes> {
    AtRest { protobuf, writes: MediaType::Json }.open(key, value)
}

impl Transform for AtRest {
    fn seal(&self, key: &[u8], value: Bytes) -> store::Result<Bytes> {
        if self.writes == MediaType::Json {
            return Ok(value);
        }
        let Ok(tree) = serde_json::from_slice::<Value>(&value) else { return Ok(value) };
        match (self.protobuf.0)().seal(&tree) {
            Ok(message) => Ok(message.into()),
            Err(Error::NoMessage(_)) => Ok(value),
            Err(error) => Err(unreadable(key, error)),
        }
    }

    fn open(&self, key: &[u8], value: Bytes) -> store::Result<Bytes> {
        if !value.starts_with(MAGIC) {
            return Ok(value);
        }
        let json = (self.protobuf.0)().to_json(&value).map_err(|error| unreadable(key, error))?;
        let tree: Value = serde_json::from_slice(&json).map_err(|error| unreadable(key, error))?;
        let object = Unstructured::from_value(tree).map_err(|error| unreadable(key, error))?;
        Ok(object.encode().into())
    }
}

fn unreadable(key: &[u8], why: impl std::fmt::Display) -> store::Error {
    let key = String::from_utf8_lossy(key);
    store::Error::Unusable(format!("the value under {key} cannot be transcoded: {why}").into())
}
