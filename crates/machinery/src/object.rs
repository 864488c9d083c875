//! The object in flight.
//!
//! Built-in kinds are `k8s-openapi` structs, custom resources are [`Unstructured`] value trees; both
//! are `dyn Object`, so the generic server compiles no handler per kind. A [`Codec`] makes objects
//! of one kind from bytes or trees.
//!
//! Invariant: `encode` writes `apiVersion`, `kind`, `metadata` first, in that order, and whatever
//! was decoded and not changed encodes to the same fields.

use std::any::Any;
use std::marker::PhantomData;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// One API object of whatever kind.
pub trait Object: Any + Send + Sync {
    /// `apps/v1`, or `v1` for the core group.
    fn api_version(&self) -> &str;
    fn kind(&self) -> &str;
    fn meta(&self) -> &ObjectMeta;
    fn meta_mut(&mut self) -> &mut ObjectMeta;
    /// The object as a value tree: for patches, CEL, webhooks, managedFields.
    fn to_value(&self) -> Value;
    /// Compact JSON.
    fn encode(&self) -> Vec<u8>;
    fn boxed_clone(&self) -> Box<dyn Object>;
    fn as_any(&self) -> &dyn Any;
    fn as_any_mut(&mut self) -> &mut dyn Any;

    fn name(&self) -> &str {
        self.meta().name.as_deref().unwrap_or_default()
    }

    fn namespace(&self) -> &str {
        self.meta().namespace.as_deref().unwrap_or_default()
    }

    fn uid(&self) -> &str {
        self.meta().uid.as_deref().unwrap_or_default()
    }
}

impl dyn Object {
    /// The typed struct, where the caller knows the kind (strategies do).
    pub fn downcast<T: 'static>(&self) -> Option<&T> {
        self.as_any().downcast_ref()
    }

    /// As [`downcast`](Self::downcast), without a copy.
    pub fn into_typed<T: 'static>(self: Box<Self>) -> Option<T> {
        let any: Box<dyn Any> = self;
        any.downcast().ok().map(|object| *object)
    }

    pub fn downcast_mut<T: 'static>(&mut self) -> Option<&mut T> {
        self.as_any_mut().downcast_mut()
    }

    /// As [`downcast`](Self::downcast), in a strategy of that very kind.
    ///
    /// # Panics
    /// If a row of the resource table pairs a strategy with another kind's codec.
    pub fn expect<T: 'static>(&self) -> &T {
        self.downcast().expect("a row pairs a strategy with its own kind")
    }

    pub fn expect_mut<T: 'static>(&mut self) -> &mut T {
        self.downcast_mut().expect("a row pairs a strategy with its own kind")
    }
}

impl Clone for Box<dyn Object> {
    fn clone(&self) -> Self {
        self.boxed_clone()
    }
}

impl<T> Object for T
where
    T: k8s_openapi::Metadata<Ty = ObjectMeta> + Serialize + Clone + Send + Sync + 'static,
{
    fn api_version(&self) -> &str {
        T::API_VERSION
    }

    fn kind(&self) -> &str {
        T::KIND
    }

    fn meta(&self) -> &ObjectMeta {
        self.metadata()
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.metadata_mut()
    }

    /// By way of bytes: a second serializer for every field of every kind would double the build.
    fn to_value(&self) -> Value {
        let json =
            serde_json::to_vec(self).expect("API structs have string keys and finite numbers");
        serde_json::from_slice(&json).expect("what was just written is JSON")
    }

    fn encode(&self) -> Vec<u8> {
        let json =
            serde_json::to_vec(self).expect("API structs have string keys and finite numbers");
        metadata_third(json)
    }

    fn boxed_clone(&self) -> Box<dyn Object> {
        Box::new(self.clone())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// Moves `metadata` behind `apiVersion` and `kind`: the structs of some kinds (ConfigMap, Event) have
/// other fields before it.
fn metadata_third(json: Vec<u8>) -> Vec<u8> {
    let mut at = 1;
    let mut third = 0;
    for index in 0.. {
        let start = at;
        let key_end = value_end(&json, start);
        let end = value_end(&json, key_end + 1);
        if index == 2 {
            third = start;
        }
        if &json[start..key_end] == b"\"metadata\"" {
            if index <= 2 {
                return json;
            }
            let mut moved = Vec::with_capacity(json.len());
            moved.extend_from_slice(&json[..third]);
            moved.extend_from_slice(&json[start..end]);
            moved.push(b',');
            // Without the comma before it.
            moved.extend_from_slice(&json[third..start - 1]);
            moved.extend_from_slice(&json[end..]);
            return moved;
        }
        if json[end] != b',' {
            break;
        }
        at = end + 1;
    }
    json
}

/// The end of the value that starts at `at` in compact JSON.
fn value_end(json: &[u8], mut at: usize) -> usize {
    let mut depth = 0usize;
    loop {
        match json[at] {
            b'"' => {
                at += 1;
                while json[at] != b'"' {
                    at += if json[at] == b'\\' { 2 } else { 1 };
                }
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth == 0 => return at,
            b'}' | b']' => depth -= 1,
            b',' | b':' if depth == 0 => return at,
            _ => {}
        }
        at += 1;
        if depth == 0 && matches!(json[at - 1], b'"' | b'}' | b']') {
            return at;
        }
    }
}

/// An object whose kind has no Rust type: a custom resource.
#[derive(Clone, Debug, PartialEq)]
pub struct Unstructured {
    pub api_version: String,
    pub kind: String,
    pub metadata: ObjectMeta,
    /// Everything but the three above.
    pub fields: serde_json::Map<String, Value>,
}

impl Unstructured {
    /// Takes the tree of a whole object apart.
    pub fn from_value(value: Value) -> Result<Self, DecodeError> {
        let Value::Object(mut fields) = value else {
            return Err(DecodeError("expected a JSON object".into()));
        };
        let mut text = |name: &str| match fields.remove(name) {
            Some(Value::String(text)) => text,
            _ => String::new(),
        };
        let (api_version, kind) = (text("apiVersion"), text("kind"));
        let metadata = match fields.remove("metadata") {
            Some(metadata) => serde_json::from_value(metadata).map_err(DecodeError::from)?,
            None => ObjectMeta::default(),
        };
        Ok(Self { api_version, kind, metadata, fields })
    }
}

impl Object for Unstructured {
    fn api_version(&self) -> &str {
        &self.api_version
    }

    fn kind(&self) -> &str {
        &self.kind
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }

    fn to_value(&self) -> Value {
        let metadata = serde_json::to_value(&self.metadata).expect("metadata has string keys");
        let mut tree = serde_json::Map::new();
        tree.insert("apiVersion".into(), self.api_version.clone().into());
        tree.insert("kind".into(), self.kind.clone().into());
        tree.insert("metadata".into(), metadata);
        tree.extend(self.fields.iter().map(|(key, value)| (key.clone(), value.clone())));
        Value::Object(tree)
    }

    fn encode(&self) -> Vec<u8> {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Whole<'a> {
            api_version: &'a str,
            kind: &'a str,
            metadata: &'a ObjectMeta,
            #[serde(flatten)]
            fields: &'a serde_json::Map<String, Value>,
        }
        let whole = Whole {
            api_version: &self.api_version,
            kind: &self.kind,
            metadata: &self.metadata,
            fields: &self.fields,
        };
        serde_json::to_vec(&whole).expect("value trees have string keys")
    }

    fn boxed_clone(&self) -> Box<dyn Object> {
        Box::new(self.clone())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// Why bytes are no object of the kind: serde's words, which name the field.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct DecodeError(pub String);

impl From<serde_json::Error> for DecodeError {
    fn from(error: serde_json::Error) -> Self {
        Self(error.to_string())
    }
}

/// An object and what strict decoding would have refused.
pub struct Decoded {
    pub object: Box<dyn Object>,
    /// Paths of fields that the kind does not have, as `spec.template.spec.foo`.
    pub unknown_fields: Vec<String>,
}

/// Makes objects of one kind.
pub trait Codec: Send + Sync {
    fn decode(&self, json: &[u8]) -> Result<Decoded, DecodeError>;
    fn decode_value(&self, value: Value) -> Result<Decoded, DecodeError>;
    /// For stored objects: they were checked when they were written, so unknown fields are ignored.
    fn decode_stored(&self, json: &[u8]) -> Result<Box<dyn Object>, DecodeError>;
    /// A new, empty object of the kind.
    fn empty(&self) -> Box<dyn Object>;

    /// Encoded JSON as the store and clients get it: with the habits of the kind's Go struct, where it
    /// has any.
    fn settle(&self, json: Vec<u8>) -> Vec<u8> {
        json
    }
}

/// The codec of a built-in kind.
pub struct Typed<T>(PhantomData<fn() -> T>);

impl<T> Typed<T> {
    pub const fn new() -> Self {
        Self(PhantomData)
    }
}

impl<T> Default for Typed<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// Go's zero time: `null` in JSON.
const ZERO_TIME: &[u8] = b"\"0001-01-01T00:00:00Z\"";
/// The times that structs of ours cannot be without, when they are Go's zero time.
const ABSENT_TIMES: [&[u8]; 2] = [b"\"lastTransitionTime\":null", b"\"lastObservedTime\":null"];

/// Reads what Go may have written: a time that is `null` where our struct must have one is Go's zero
/// time, which [`Codec::settle`] shows as `null` again.
pub fn from_json<T: DeserializeOwned>(json: &[u8]) -> Result<T, serde_json::Error> {
    let again =
        |error| with_zero_times(json).map_or(Err(error), |json| serde_json::from_slice(&json));
    serde_json::from_slice(json).or_else(again)
}

fn with_zero_times(json: &[u8]) -> Option<Vec<u8>> {
    const NULL: &[u8] = b"null";
    let found = |at: usize| {
        let here = |absent: &&&[u8]| json[at..].starts_with(absent);
        ABSENT_TIMES.iter().find(here).map(|absent| absent.len())
    };
    let (mut out, mut at, mut copied) = (vec![], 0, 0);
    while at < json.len() {
        match found(at) {
            Some(length) => {
                at += length;
                out.extend_from_slice(&json[copied..at - NULL.len()]);
                out.extend_from_slice(ZERO_TIME);
                copied = at;
            }
            None => at += 1,
        }
    }
    out.extend_from_slice(&json[copied..]);
    (copied > 0).then_some(out)
}

impl<T> Codec for Typed<T>
where
    T: k8s_openapi::Metadata<Ty = ObjectMeta>
        + Serialize
        + DeserializeOwned
        + Default
        + Clone
        + Send
        + Sync
        + 'static,
{
    fn decode(&self, json: &[u8]) -> Result<Decoded, DecodeError> {
        let read = |json: &[u8]| {
            let mut unknown_fields = vec![];
            let object: T =
                decode_noting(json, &mut |path| unknown_fields.push(field_path(&path)))?;
            Ok(Decoded { object: Box::new(object), unknown_fields })
        };
        read(json).or_else(|error| with_zero_times(json).map_or(Err(error), |json| read(&json)))
    }

    /// By way of bytes, for the same reason as `to_value`.
    fn decode_value(&self, value: Value) -> Result<Decoded, DecodeError> {
        self.decode(&serde_json::to_vec(&value).map_err(DecodeError::from)?)
    }

    fn decode_stored(&self, json: &[u8]) -> Result<Box<dyn Object>, DecodeError> {
        Ok(Box::new(from_json::<T>(json)?))
    }

    fn empty(&self) -> Box<dyn Object> {
        Box::new(T::default())
    }
}

/// `note` is no type parameter: its type would be one of all that a kind is made of, and a pod's
/// specification be compiled once per kind that holds one.
fn decode_noting<T: DeserializeOwned>(
    json: &[u8],
    note: &mut dyn FnMut(serde_ignored::Path<'_>),
) -> Result<T, DecodeError> {
    let mut decoder = serde_json::Deserializer::from_slice(json);
    let object = serde_ignored::deserialize(&mut decoder, note)?;
    decoder.end()?;
    Ok(object)
}

/// serde's path in Kubernetes' notation: `spec.containers[0].foo`.
fn field_path(path: &serde_ignored::Path<'_>) -> String {
    use serde_ignored::Path;
    match path {
        Path::Root => String::new(),
        Path::Seq { parent, index } => format!("{}[{index}]", field_path(parent)),
        Path::Map { parent, key } => match field_path(parent) {
            parent if parent.is_empty() => key.clone(),
            parent => format!("{parent}.{key}"),
        },
        Path::Some { parent }
        | Path::NewtypeStruct { parent }
        | Path::NewtypeVariant { parent } => field_path(parent),
    }
}

/// The codec of kinds without a Rust type: it accepts any tree.
pub struct Untyped {
    pub api_version: String,
    pub kind: String,
}

impl Codec for Untyped {
    fn decode(&self, json: &[u8]) -> Result<Decoded, DecodeError> {
        self.decode_value(serde_json::from_slice(json)?)
    }

    fn decode_value(&self, value: Value) -> Result<Decoded, DecodeError> {
        let object = Unstructured::from_value(value)?;
        Ok(Decoded { object: Box::new(object), unknown_fields: vec![] })
    }

    fn decode_stored(&self, json: &[u8]) -> Result<Box<dyn Object>, DecodeError> {
        Ok(self.decode(json)?.object)
    }

    fn empty(&self) -> Box<dyn Object> {
        Box::new(Unstructured {
            api_version: self.api_version.clone(),
            kind: self.kind.clone(),
            metadata: ObjectMeta::default(),
            fields: Default::default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::Pod;

    #[test]
    fn unknown_fields_are_named_by_their_path() {
        let json = br#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a"},
            "spec":{"containers":[{"name":"c","imagee":"x"}],"foo":1}}"#;
        let decoded = Typed::<Pod>::new().decode(json).expect("a pod");
        assert_eq!(decoded.unknown_fields, ["spec.containers[0].imagee", "spec.foo"]);
        assert_eq!(decoded.object.name(), "a");
    }

    /// A condition without a time was refused once.
    #[test]
    fn gos_zero_time_is_a_time() {
        use k8s_openapi::api::core::v1::Service;
        let json = br#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"a"},
            "status":{"conditions":[{"lastTransitionTime":null,"type":"A"},{"lastTransitionTime":"2026-01-02T03:04:05Z"}]}}"#;
        for object in [
            Typed::<Service>::new().decode(json).expect("a service").object,
            Typed::<Service>::new().decode_stored(json).expect("a service"),
        ] {
            let tree = object.to_value();
            let times = ["/status/conditions/0", "/status/conditions/1"]
                .map(|at| tree.pointer(at).map(|one| one["lastTransitionTime"].to_string()));
            let expected = ["\"0001-01-01T00:00:00Z\"", "\"2026-01-02T03:04:05Z\""];
            assert_eq!(times, expected.map(|time| Some(time.to_owned())));
        }
    }

    #[test]
    fn metadata_comes_third_whatever_the_struct_has_first() {
        use k8s_openapi::api::core::v1::ConfigMap;
        let json = br#"{"data":{"a":"\\\"{,","b":""},"immutable":true,"metadata":{"name":"x","labels":{"k":"v"}}}"#;
        let object = Typed::<ConfigMap>::new().decode(json).expect("a map").object;
        assert_eq!(
            String::from_utf8_lossy(&object.encode()),
            r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"labels":{"k":"v"},"name":"x"},"data":{"a":"\\\"{,","b":""},"immutable":true}"#
        );
        let empty = Typed::<ConfigMap>::new().empty();
        assert_eq!(
            String::from_utf8_lossy(&empty.encode()),
            r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{}}"#
        );
    }

    #[test]
    fn typed_and_untyped_encode_the_same() {
        let json = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a"},"spec":{"containers":[{"name":"c"}]}}"#;
        let untyped = Untyped { api_version: "v1".into(), kind: "Pod".into() };
        for codec in [&Typed::<Pod>::new() as &dyn Codec, &untyped] {
            let object = codec.decode(json.as_bytes()).expect("a pod").object;
            assert_eq!(String::from_utf8_lossy(&object.encode()), json);
        }
    }
}
