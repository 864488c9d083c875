//! Stored objects on their way to clients: single, in lists, in watches. Their bytes, their revision, and
//! the position of the revision in the bytes.
//!
//! Stored values have no resourceVersion: it is the store's mod revision, and is inserted right after
//! `"metadata":{`. For `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web"},…}` at revision 7,
//! [`Stored::json`] copies the prefix, `"resourceVersion":"7",` and the rest. Other writers may have another
//! order of members, nested objects named `metadata` before it, and spaces.

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures::Stream;
use machinery::Object;
use machinery::object::DecodeError;
use store::{Revision, Value};

use crate::StatusError;
use crate::resource::Resource;

/// Number of a list's objects that are converted together: the page size of clients.
const AT_ONCE: usize = 500;
const METADATA: &[u8] = br#""metadata":{"#;

/// The position of the revision in an object's JSON.
#[derive(Clone, Copy)]
struct Place {
    /// Right after the brace of the object's own `metadata`.
    splice: usize,
    /// Only apiVersion and kind are before it.
    is_usual: bool,
}

/// An object as one row serves it. Clones share the bytes. Compressed values stay compressed until they are
/// written: a list of many objects is decompressed one by one.
#[derive(Clone)]
pub struct Stored {
    row: Arc<Resource>,
    /// JSON in the row's version, without resourceVersion.
    value: Value,
    revision: Revision,
    /// `None` if it is unknown without decompressing the value: it is searched for after that.
    place: Option<Place>,
    /// Stored in a version that is no longer the stored one: any write converts it, even without a change.
    is_stale: bool,
    /// Why it could not be converted to the row's version.
    failure: Option<StatusError>,
}

impl Stored {
    /// `value` is as in the store; it is converted if the row serves another version.
    pub(crate) fn new(row: Arc<Resource>, value: impl Into<Value>, revision: Revision) -> Self {
        let value = value.into();
        let Some(conversion) = &row.conversion else {
            return Self::shown(row, value, revision, false, None);
        };
        let kept = value.bytes();
        let is_stale = conversion.is_stale(&kept);
        let (value, failure) = match convert(&row, &[&kept]) {
            Ok(Some(mut converted)) => (converted.pop().map_or(value, Value::from), None),
            Ok(None) => (value, None),
            Err(error) => (value, Some(error)),
        };
        Self::shown(row, value, revision, is_stale, failure)
    }

    /// `value` is in the row's version, unless there is a failure.
    fn shown(
        row: Arc<Resource>,
        value: Value,
        revision: Revision,
        is_stale: bool,
        mut failure: Option<StatusError>,
    ) -> Self {
        // A compressed value has a readable beginning, which is enough for most kinds.
        let place = find_metadata(value.head());
        if place.is_none() && !value.is_packed() {
            failure.get_or_insert_with(|| StatusError::internal("a stored object has no metadata"));
        }
        Self { row, value, revision, place, is_stale, failure }
    }

    /// The objects of a list, converted together; the first failure is the error.
    pub(crate) fn all(
        row: &Arc<Resource>,
        values: &[(Value, Revision)],
    ) -> Result<Vec<Self>, StatusError> {
        if row.conversion.is_none() {
            let new = |(value, revision): &(Value, Revision)| {
                let stored = Self::new(row.clone(), value.clone(), *revision);
                stored.check().map(|()| stored)
            };
            return values.iter().map(new).collect();
        }
        let mut all = Vec::with_capacity(values.len());
        for chunk in values.chunks(AT_ONCE) {
            let kept: Vec<Bytes> = chunk.iter().map(|(value, _)| value.bytes()).collect();
            let kept: Vec<&[u8]> = kept.iter().map(|value| &value[..]).collect();
            let shown = convert(row, &kept)?.unwrap_or_default();
            let all_of_them = shown.into_iter().zip(kept).zip(chunk);
            all.extend(all_of_them.map(|((shown, kept), (_, revision))| {
                let is_stale = row.conversion.as_ref().is_some_and(|one| one.is_stale(kept));
                Self::shown(row.clone(), shown.into(), *revision, is_stale, None)
            }));
        }
        Ok(all)
    }

    /// Returns an error if the object could not be converted, for example because a webhook did not answer.
    pub fn check(&self) -> Result<(), StatusError> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    pub fn revision(&self) -> Revision {
        self.revision
    }

    pub fn row(&self) -> &Arc<Resource> {
        &self.row
    }

    pub(crate) fn is_stale(&self) -> bool {
        self.is_stale
    }

    /// Appends the whole object.
    pub fn write_to(&self, out: &mut Vec<u8>) {
        let value = self.value.bytes();
        self.write_whole(&value, self.place_in(&value), out);
    }

    fn place_in(&self, value: &[u8]) -> Place {
        let none = Place { splice: value.len(), is_usual: false };
        self.place.or_else(|| find_metadata(value)).unwrap_or(none)
    }

    fn write_whole(&self, value: &[u8], place: Place, out: &mut Vec<u8>) {
        let (before, behind) = value.split_at(place.splice);
        out.extend_from_slice(before);
        self.write_behind_splice(behind, out);
    }

    fn write_behind_splice(&self, rest: &[u8], out: &mut Vec<u8>) {
        // An object of a dry run has no revision, and an invalid one no position for it.
        let Some(next) = rest.trim_ascii_start().first().filter(|_| self.revision != Revision(0))
        else {
            return out.extend_from_slice(rest);
        };
        out.extend_from_slice(br#""resourceVersion":""#);
        out.extend_from_slice(self.revision.to_string().as_bytes());
        out.push(b'"');
        if *next != b'}' {
            out.push(b',');
        }
        out.extend_from_slice(rest);
    }

    /// Appends the object as a list item: built-in kinds without kind and version, like Go's typed lists;
    /// custom kinds whole.
    pub fn write_item_to(&self, out: &mut Vec<u8>) {
        let value = self.value.bytes();
        let place = self.place_in(&value);
        if self.row.custom || !place.is_usual {
            return self.write_whole(&value, place, out);
        }
        out.push(b'{');
        out.extend_from_slice(METADATA);
        self.write_behind_splice(&value[place.splice..], out);
    }

    /// The served value without resourceVersion: shared, not copied, unless it is compressed.
    pub fn bytes(&self) -> Bytes {
        self.value.bytes()
    }

    pub fn json(&self) -> Bytes {
        let mut out = Vec::with_capacity(self.value.len() + 40);
        self.write_to(&mut out);
        out.into()
    }

    pub fn list_item(&self) -> Bytes {
        let mut out = Vec::with_capacity(self.value.len() + 40);
        self.write_item_to(&mut out);
        out.into()
    }

    /// The object in the row's version, with its resourceVersion.
    pub fn object(&self) -> Result<Box<dyn Object>, StatusError> {
        self.check()?;
        let mut object =
            self.row.codec.decode_stored(&self.value.bytes()).map_err(StatusError::internal)?;
        object.meta_mut().resource_version = Some(self.revision.to_string());
        Ok(object)
    }

    /// The object for strategies, with its resourceVersion: a built-in one in the stored version, a custom
    /// one in the row's version, because each version has its own schema.
    pub(crate) fn stored_object(&self) -> Result<Box<dyn Object>, StatusError> {
        match &self.row.conversion {
            Some(conversion) if !self.row.custom => conversion.to_stored(self.object()?),
            _ => self.object(),
        }
    }
}

pub struct List {
    pub items: Vec<Stored>,
    /// The store's revision at the time of the read.
    pub revision: Revision,
    pub continue_token: Option<String>,
    /// Number of remaining objects; only known for lists without selectors.
    pub remaining: Option<u64>,
}

pub enum WatchEvent {
    Added(Stored),
    Modified(Stored),
    /// The last state, at the deleting revision.
    Deleted(Stored),
    Bookmark {
        revision: Revision,
        initial_events_end: bool,
    },
    /// The watch ends with this error.
    Error(StatusError),
}

pub type EventStream = Pin<Box<dyn Stream<Item = WatchEvent> + Send>>;

/// The values in the row's version; `None` if they are in it already.
fn convert(row: &Resource, values: &[&[u8]]) -> Result<Option<Vec<Vec<u8>>>, StatusError> {
    let Some(conversion) = &row.conversion else { return Ok(None) };
    let decoded = |value: &&[u8]| {
        let stored = conversion.stored_codec().decode_stored(value);
        stored.map_err(|DecodeError(why)| StatusError::internal(why))
    };
    let stored: Result<Vec<_>, _> = values.iter().map(decoded).collect();
    let served = conversion.all_to_served(stored?)?;
    Ok(Some(served.iter().map(|object| row.codec.settle(object.encode())).collect()))
}

/// The position of the first member of an object's own `metadata`, and whether only its type is before it.
fn find_metadata(value: &[u8]) -> Option<Place> {
    let mut at = behind(value, 0, b'{')?;
    let mut is_usual = true;
    loop {
        let start = token(value, at);
        let end = string_end(value, start)?;
        at = token(value, behind(value, end, b':')?);
        match &value[start..end] {
            br#""metadata""# => {
                return behind(value, at, b'{').map(|splice| Place { splice, is_usual });
            }
            name => is_usual &= matches!(name, br#""apiVersion""# | br#""kind""#),
        }
        at = behind(value, value_end(value, at)?, b',')?;
    }
}

/// The next byte that is not a space.
fn token(json: &[u8], at: usize) -> usize {
    let rest = json.get(at..).unwrap_or_default();
    at + (rest.len() - rest.trim_ascii_start().len())
}

/// Right after the next token, if it is the wanted one.
fn behind(json: &[u8], at: usize, wanted: u8) -> Option<usize> {
    let at = token(json, at);
    (*json.get(at)? == wanted).then_some(at + 1)
}

/// Right after the string that begins here.
fn string_end(json: &[u8], start: usize) -> Option<usize> {
    let mut at = behind(json, start, b'"')?;
    loop {
        match json.get(at)? {
            b'"' => return Some(at + 1),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

/// Right after the value that begins here.
fn value_end(json: &[u8], start: usize) -> Option<usize> {
    let (mut at, mut depth) = (start, 0_usize);
    loop {
        match json.get(at)? {
            b'"' => at = string_end(json, at)?,
            b'{' | b'[' => (at, depth) = (at + 1, depth + 1),
            // The end of the container: a number or a literal is complete.
            b'}' | b']' | b',' if depth == 0 => return Some(at),
            b'}' | b']' => (at, depth) = (at + 1, depth - 1),
            _ => at += 1,
        }
        if depth == 0 && matches!(json[at - 1], b'"' | b'}' | b']') {
            return Some(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    fn stored(value: &str, revision: u64) -> Stored {
        let row = Arc::new(crate::testing::row::<ConfigMap>("configmaps", &[], true));
        Stored::new(row, Bytes::copy_from_slice(value.as_bytes()), Revision(revision))
    }

    #[test]
    fn the_revision_is_inserted_into_the_objects_own_metadata() {
        let check = |value: &str, expected: &str, item: &str| {
            let stored = stored(value, 7);
            let text = |bytes: Bytes| String::from_utf8(bytes.into()).expect("text");
            assert_eq!(text(stored.json()), expected);
            assert_eq!(text(stored.list_item()), item, "{value}");
            let metadata = &serde_json::from_slice::<serde_json::Value>(&stored.json())
                .expect("JSON")["metadata"];
            assert_eq!(metadata["resourceVersion"], "7", "{value}");
            assert!(stored.check().is_ok());
            // The same with a compressed value: a repetitive text.
            let longer = |text: &str| {
                let (text, brace) = text.trim_end().split_at(text.trim_end().len() - 1);
                format!("{text},\"z\":\"{}\"{brace}", "metadata".repeat(100))
            };
            let packed = Value::from(Bytes::from(longer(value))).packed();
            assert!(packed.is_packed());
            let stored = Stored::new(stored.row.clone(), packed, stored.revision);
            assert_eq!(text(stored.json()), longer(expected));
            assert_eq!(text(stored.list_item()), longer(item), "{value}");
        };
        check(
            r#"{"apiVersion":"v1","kind":"X","metadata":{"name":"a"},"data":{"k":"v"}}"#,
            r#"{"apiVersion":"v1","kind":"X","metadata":{"resourceVersion":"7","name":"a"},"data":{"k":"v"}}"#,
            r#"{"metadata":{"resourceVersion":"7","name":"a"},"data":{"k":"v"}}"#,
        );
        check(
            r#"{"apiVersion":"v1","kind":"X","metadata":{}}"#,
            r#"{"apiVersion":"v1","kind":"X","metadata":{"resourceVersion":"7"}}"#,
            r#"{"metadata":{"resourceVersion":"7"}}"#,
        );
        // Sorted keys, as upstream stores custom objects: nested `metadata` come first.
        let whole = r#"{"apiVersion":"v1","data":{"metadata":{"x":"}\"{"},"l":[{"metadata":{}},1]},"kind":"X","metadata":{"resourceVersion":"7","name":"a"}}"#;
        let value = whole.replace(r#""resourceVersion":"7","#, "");
        check(&value, whole, whole);
        let whole = r#"{"a":1.5,"b":null,"c":"metadata","d":[],"metadata":{"resourceVersion":"7","name":"a"}}"#;
        check(&whole.replace(r#""resourceVersion":"7","#, ""), whole, whole);
        // Written by hand, or by a backup tool.
        check(
            "{\n  \"kind\" : \"X\",\n  \"metadata\": {\n    \"name\": \"a\"\n  }\n}\n",
            "{\n  \"kind\" : \"X\",\n  \"metadata\": {\"resourceVersion\":\"7\",\n    \"name\": \"a\"\n  }\n}\n",
            "{\"metadata\":{\"resourceVersion\":\"7\",\n    \"name\": \"a\"\n  }\n}\n",
        );
        check(
            r#"{"kind":"X","metadata": { }}"#,
            r#"{"kind":"X","metadata": {"resourceVersion":"7" }}"#,
            r#"{"metadata":{"resourceVersion":"7" }}"#,
        );
    }

    #[test]
    fn an_object_without_metadata_is_an_error_not_a_panic() {
        let broken = [
            "",
            "x",
            "{}",
            "[]",
            r#"{"metadata":[]}"#,
            r#"{"metadata""#,
            r#"{"metadata":"#,
            r#"{"a":{"metadata":{}}}"#,
            r#"{"a":"\"#,
            r#"{"a":{{"#,
            r#"{"a":}}"#,
        ];
        for value in broken {
            let stored = stored(value, 7);
            assert!(stored.check().is_err() && stored.object().is_err(), "{value}");
            assert_eq!(stored.json(), value.as_bytes());
        }
    }
}
