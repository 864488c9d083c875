//! Objects at rest, on their way out: alone, in lists, in watches. Bytes, revision, and where the one
//! goes into the other.
//!
//! Stored values carry no resourceVersion: it is the store's mod revision, and is spliced in right
//! behind `"metadata":{`. For `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web"},…}` at
//! revision 7, [`Stored::json`] copies the prefix, `"resourceVersion":"7",` and the rest.

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures::Stream;
use machinery::Object;
use machinery::object::DecodeError;
use store::Revision;

use crate::StatusError;
use crate::resource::Resource;

/// Objects of a list that are converted together: as many as a client's page has.
const AT_ONCE: usize = 500;
const METADATA: &[u8] = br#""metadata":{"#;

/// An object as one row serves it. Clones share the bytes.
#[derive(Clone)]
pub struct Stored {
    row: Arc<Resource>,
    /// JSON in the row's version, without resourceVersion.
    value: Bytes,
    revision: Revision,
    /// Just behind `"metadata":{`.
    splice: usize,
    /// Kept in a version that is no longer the stored one: any write, even of nothing, mends it.
    is_stale: bool,
    /// Why it could not be converted to the row's version.
    failure: Option<StatusError>,
}

impl Stored {
    /// `value` is as the store has it; it is converted when the row serves another version.
    pub(crate) fn new(row: Arc<Resource>, value: Bytes, revision: Revision) -> Self {
        let is_stale = row.conversion.as_ref().is_some_and(|one| one.is_stale(&value));
        let (value, failure) = match convert(&row, &[&value]) {
            Ok(Some(mut converted)) => (converted.pop().map_or(value, Bytes::from), None),
            Ok(None) => (value, None),
            Err(error) => (value, Some(error)),
        };
        let splice = splice_offset(&value);
        Self { row, value, revision, splice, is_stale, failure }
    }

    /// The objects of a list, converted together; the first that cannot be is the error.
    pub(crate) fn all(
        row: &Arc<Resource>,
        values: &[(Bytes, Revision)],
    ) -> Result<Vec<Self>, StatusError> {
        if row.conversion.is_none() {
            let new = |(value, revision): &(Bytes, Revision)| {
                Self::new(row.clone(), value.clone(), *revision)
            };
            return Ok(values.iter().map(new).collect());
        }
        let mut all = Vec::with_capacity(values.len());
        for chunk in values.chunks(AT_ONCE) {
            let kept: Vec<&[u8]> = chunk.iter().map(|(value, _)| &value[..]).collect();
            let shown = convert(row, &kept)?.unwrap_or_default();
            all.extend(shown.into_iter().zip(chunk).map(|(shown, (kept, revision))| Self {
                row: row.clone(),
                splice: splice_offset(&shown),
                value: shown.into(),
                revision: *revision,
                is_stale: row.conversion.as_ref().is_some_and(|one| one.is_stale(kept)),
                failure: None,
            }));
        }
        Ok(all)
    }

    /// Is it in the row's version? A webhook may not have answered.
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

    /// The same state, as if at another revision: a DELETED event carries the deleting one.
    pub(crate) fn at(mut self, revision: Revision) -> Self {
        self.revision = revision;
        self
    }

    /// Appends the whole object.
    pub fn write_to(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.value[..self.splice]);
        self.write_behind_splice(out);
    }

    fn write_behind_splice(&self, out: &mut Vec<u8>) {
        let rest = &self.value[self.splice..];
        // What a dry run would create has no revision.
        if self.revision == Revision(0) {
            return out.extend_from_slice(rest);
        }
        out.extend_from_slice(br#""resourceVersion":""#);
        out.extend_from_slice(self.revision.to_string().as_bytes());
        out.push(b'"');
        if rest.first() != Some(&b'}') {
            out.push(b',');
        }
        out.extend_from_slice(rest);
    }

    /// Appends the object as lists have it: built-in kinds without kind and version, as Go's typed
    /// lists, custom ones whole.
    pub fn write_item_to(&self, out: &mut Vec<u8>) {
        if self.row.custom {
            return self.write_to(out);
        }
        out.push(b'{');
        out.extend_from_slice(METADATA);
        self.write_behind_splice(out);
    }

    /// The value as it is shown, without resourceVersion: shared, not copied.
    pub fn bytes(&self) -> Bytes {
        self.value.clone()
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
            self.row.codec.decode_stored(&self.value).map_err(StatusError::internal)?;
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

fn splice_offset(value: &[u8]) -> usize {
    let at = value.windows(METADATA.len()).position(|window| window == METADATA);
    at.map(|at| at + METADATA.len()).expect("every encoded object has metadata")
}
