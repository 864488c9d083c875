//! Objects at rest, on their way out: alone, in lists, in watches. Bytes, revision, and where the one
//! goes into the other.
//!
//! Stored values carry no resourceVersion: it is the store's mod revision, and is spliced in right
//! behind `"metadata":{`. For `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web"},…}` at
//! revision 7, [`Stored::json`] copies the prefix, `"resourceVersion":"7",` and the rest. What others
//! wrote may have its members in another order, other objects named `metadata` in front, and spaces.

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures::Stream;
use machinery::Object;
use machinery::object::DecodeError;
use store::{Revision, Value};

use crate::StatusError;
use crate::resource::Resource;

/// Objects of a list that are converted together: as many as a client's page has.
const AT_ONCE: usize = 500;
const METADATA: &[u8] = br#""metadata":{"#;

/// Where the revision goes in an object's JSON.
#[derive(Clone, Copy)]
struct Place {
    /// Just behind the brace of the object's own `metadata`.
    splice: usize,
    /// Nothing but apiVersion and kind stands in front of it.
    is_usual: bool,
}

/// An object as one row serves it. Clones share the bytes, and what is packed stays so until it is
/// written: a list of many objects is unpacked one by one.
#[derive(Clone)]
pub struct Stored {
    row: Arc<Resource>,
    /// JSON in the row's version, without resourceVersion.
    value: Value,
    revision: Revision,
    /// Nothing where it cannot be told without unpacking the value: it is looked for when that is done.
    place: Option<Place>,
    /// Kept in a version that is no longer the stored one: any write, even of nothing, mends it.
    is_stale: bool,
    /// Why it could not be converted to the row's version.
    failure: Option<StatusError>,
}

impl Stored {
    /// `value` is as the store has it; it is converted when the row serves another version.
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
        // Of what is packed some of the beginning can be seen: of most kinds as much as is needed.
        let place = find_metadata(value.head());
        if place.is_none() && !value.is_packed() {
            failure.get_or_insert_with(|| StatusError::internal("a stored object has no metadata"));
        }
        Self { row, value, revision, place, is_stale, failure }
    }

    /// The objects of a list, converted together; the first that cannot be is the error.
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

    /// Is it an object in the row's version? A webhook may not have answered.
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
        // What a dry run would create has no revision, and what is no object no place for it.
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

    /// Appends the object as lists have it: built-in kinds without kind and version, as Go's typed
    /// lists, custom ones whole.
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

    /// The value as it is shown, without resourceVersion: shared, not copied, unless it is packed.
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

    /// The object as strategies see it, with its resourceVersion: a built-in one in the stored
    /// version, a custom one in the row's, whose schema is the version's own.
    pub(crate) fn stored_object(&self) -> Result<Box<dyn Object>, StatusError> {
        match &self.row.conversion {
            Some(conversion) if !self.row.custom => conversion.to_stored(self.object()?),
            _ => self.object(),
        }
    }
}

pub struct List {
    pub items: Vec<Stored>,
    /// Of the store at the read.
    pub revision: Revision,
    pub continue_token: Option<String>,
    /// How many follow; only known for lists without selectors.
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
    /// The watch ends with this.
    Error(StatusError),
}

pub type EventStream = Pin<Box<dyn Stream<Item = WatchEvent> + Send>>;

/// The values in the row's own version; `None` where they are that already.
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

/// Where the members of an object's own `metadata` begin, and whether only its type stands in front.
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

/// The next byte that is no space.
fn token(json: &[u8], at: usize) -> usize {
    let rest = json.get(at..).unwrap_or_default();
    at + (rest.len() - rest.trim_ascii_start().len())
}

/// Just behind the next token, if it is this one.
fn behind(json: &[u8], at: usize, wanted: u8) -> Option<usize> {
    let at = token(json, at);
    (*json.get(at)? == wanted).then_some(at + 1)
}

/// Just behind the string that begins here.
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

/// Just behind the value that begins here.
fn value_end(json: &[u8], start: usize) -> Option<usize> {
    let (mut at, mut depth) = (start, 0_usize);
    loop {
        match json.get(at)? {
            b'"' => at = string_end(json, at)?,
            b'{' | b'[' => (at, depth) = (at + 1, depth + 1),
            // The end of what it stands in: a number or a word is over.
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
    fn the_revision_goes_into_the_own_metadata() {
        let check = |value: &str, expected: &str, item: &str| {
            let stored = stored(value, 7);
            let text = |bytes: Bytes| String::from_utf8(bytes.into()).expect("text");
            assert_eq!(text(stored.json()), expected);
            assert_eq!(text(stored.list_item()), item, "{value}");
            let metadata = &serde_json::from_slice::<serde_json::Value>(&stored.json())
                .expect("JSON")["metadata"];
            assert_eq!(metadata["resourceVersion"], "7", "{value}");
            assert!(stored.check().is_ok());
            // The same where the value is packed: one that says the same again and again.
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
        // Keys in order, as upstream keeps custom objects: others of this name come first.
        let whole = r#"{"apiVersion":"v1","data":{"metadata":{"x":"}\"{"},"l":[{"metadata":{}},1]},"kind":"X","metadata":{"resourceVersion":"7","name":"a"}}"#;
        let value = whole.replace(r#""resourceVersion":"7","#, "");
        check(&value, whole, whole);
        let whole = r#"{"a":1.5,"b":null,"c":"metadata","d":[],"metadata":{"resourceVersion":"7","name":"a"}}"#;
        check(&whole.replace(r#""resourceVersion":"7","#, ""), whole, whole);
        // By hand, or by a backup's tool.
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
    fn what_has_no_metadata_is_an_error_and_no_panic() {
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
