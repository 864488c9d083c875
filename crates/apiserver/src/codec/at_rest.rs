//! Values in the format in which upstream's API server keeps them in etcd.
//!
//! In: the JSON that the registry writes, or upstream's stored value. Out: protobuf for kinds with a
//! message, JSON for the others (CBOR if it is served); and the registry's JSON again. So both API servers
//! can use one etcd. If upstream stores a version that is not served here, a [`Modern`] converts it.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use machinery::object::DecodeError;
use machinery::protobuf::{Error, MAGIC};
use serde::Deserialize;
use serde_json::Value;
use store::{Transform, Transformed};

use super::cbor;
use super::protobuf::Protobuf;

/// Upstream's `--storage-media-type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaType {
    Json,
    Protobuf,
}

/// Converts a stored older version to the served one; `None`: the object needs no conversion.
pub type Modern = fn(&[u8], &[u8]) -> Option<Result<Bytes, serde_json::Error>>;

/// The possible formats of stored values.
#[derive(Clone, Copy)]
pub struct Formats {
    pub protobuf: Protobuf,
    pub modern: Modern,
    /// An object's JSON as this server would have written it: protobuf has no empty lists or nulls, and
    /// upstream applies defaults when it reads.
    pub native: fn(Vec<u8>) -> Result<Vec<u8>, DecodeError>,
}

struct AtRest {
    formats: Formats,
    writes: MediaType,
}

/// The store for the registry: it writes the format `writes` and reads all formats.
pub fn like_upstream(
    store: Arc<dyn store::Store>,
    formats: Formats,
    writes: MediaType,
) -> Arc<dyn store::Store> {
    Transformed::over(store, Arc::new(AtRest { formats, writes }))
}

/// A stored value as the registry's JSON, whichever server wrote it.
pub fn plain(formats: Formats, key: &[u8], value: Bytes) -> store::Result<Bytes> {
    AtRest { formats, writes: MediaType::Json }.open(key, value)
}

impl Transform for AtRest {
    fn seal(&self, key: &[u8], value: Bytes) -> store::Result<Bytes> {
        if self.writes == MediaType::Json && !cbor::is_served() {
            return Ok(value);
        }
        if self.writes == MediaType::Json {
            return Ok(if self.has_message(&value) { value } else { in_cbor(value) });
        }
        let Ok(tree) = serde_json::from_slice::<Value>(&value) else { return Ok(value) };
        match (self.formats.protobuf.0)().seal(&tree) {
            Ok(message) => Ok(message.into()),
            // Custom resources.
            Err(Error::NoMessage(_)) if cbor::is_served() => Ok(in_cbor(value)),
            Err(Error::NoMessage(_)) => Ok(value),
            Err(error) => Err(unreadable(key, error)),
        }
    }

    /// Custom objects change to the format of the gate when they are written again.
    fn is_stale(&self, _: &[u8], value: &Bytes) -> bool {
        match value.starts_with(cbor::MAGIC) {
            true => !cbor::is_served(),
            false => cbor::is_served() && !value.starts_with(MAGIC) && !self.has_message(value),
        }
    }

    fn open(&self, key: &[u8], value: Bytes) -> store::Result<Bytes> {
        // Also if CBOR is not served: the gate may have been on before.
        if value.starts_with(cbor::MAGIC) {
            return cbor::to_json(&value).map(Bytes::from).map_err(|error| unreadable(key, error));
        }
        if !value.starts_with(MAGIC) {
            let modern = (self.formats.modern)(key, &value);
            return modern.unwrap_or(Ok(value)).map_err(|error| unreadable(key, error));
        }
        let descriptors = (self.formats.protobuf.0)();
        let json = descriptors.to_json(&value).map_err(|error| unreadable(key, error))?;
        let native = (self.formats.native)(json).map_err(|error| unreadable(key, error))?;
        Ok(native.into())
    }
}

impl AtRest {
    /// Whether its kind has a message. A value that is not an object has no other format, either.
    fn has_message(&self, json: &[u8]) -> bool {
        #[derive(Deserialize)]
        struct Type<'a> {
            #[serde(borrow, rename = "apiVersion")]
            api_version: Cow<'a, str>,
            #[serde(borrow)]
            kind: Cow<'a, str>,
        }
        serde_json::from_slice(json).map_or(true, |Type { api_version, kind }| {
            (self.formats.protobuf.0)().kind(&api_version, &kind).is_some()
        })
    }
}

/// CBOR, or the JSON itself if it is nested too deeply.
fn in_cbor(json: Bytes) -> Bytes {
    cbor::object(&json).map_or(json, Bytes::from)
}

fn unreadable(key: &[u8], why: impl std::fmt::Display) -> store::Error {
    let key = String::from_utf8_lossy(key);
    store::Error::Unusable(format!("the value under {key} cannot be transcoded: {why}").into())
}

#[cfg(test)]
mod tests {
    use release::features::{self, Feature, Gates};

    use super::*;

    fn at_rest(writes: MediaType) -> AtRest {
        let protobuf = Protobuf(crate::testing::descriptors);
        AtRest { formats: Formats { protobuf, modern: |_, _| None, native: Ok }, writes }
    }

    #[test]
    fn custom_objects_are_stored_as_cbor_if_served_and_always_readable() {
        const KEY: &[u8] = b"/registry/decapod.test/widgets/default/w";
        let custom = Bytes::from_static(
            br#"{"apiVersion":"decapod.test/v1","kind":"Widget","metadata":{"name":"w"},"n":[1.5,1.0,0.18078399346030394]}"#,
        );
        let built_in = Bytes::from_static(
            br#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"m"}}"#,
        );
        let gates = Gates::DEFAULT.with(Feature::CBORServingAndStorage, true);
        for (writes, starts) in [(MediaType::Json, &b"{"[..]), (MediaType::Protobuf, MAGIC)] {
            let at_rest = at_rest(writes);
            let kept = |value: &Bytes| at_rest.seal(KEY, value.clone()).expect("sealed");
            assert_eq!(kept(&custom), custom);
            let stale = |value: &Bytes| at_rest.is_stale(KEY, value);
            let (own, others) = features::scoped(gates, || (kept(&custom), kept(&built_in)));
            assert!(own.starts_with(cbor::MAGIC) && others.starts_with(starts), "{writes:?}");
            assert!(stale(&own) && !stale(&custom) && !stale(&others));
            features::scoped(gates, || {
                assert!(!stale(&own) && stale(&custom) && !stale(&built_in) && !stale(&others));
            });
            assert_eq!(at_rest.open(KEY, own).expect("read"), custom);
        }
    }
}
