//! Watch frames: `{"type":…,"object":…}` lines with the object in the requested form; in protobuf,
//! messages with a length prefix; in CBOR, a sequence of maps.

use std::sync::Arc;

use bytes::Bytes;
use machinery::StatusError;
use store::Revision;

use super::table::{self, TableOptions};
use super::{Accept, As, Media, cbor, partial};
use crate::resource::Resource;
use crate::stored::{Stored, WatchEvent};

const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// Encodes the frames of one watch.
pub struct Framer {
    row: Arc<Resource>,
    media: Media,
    shown_as: As,
    options: TableOptions,
}

impl Framer {
    pub fn new(row: Arc<Resource>, accept: &Accept, options: TableOptions) -> Self {
        Self { row, media: accept.media, shown_as: accept.shown_as, options }
    }

    pub fn frame(&mut self, event: &WatchEvent) -> Bytes {
        let framed = match event {
            WatchEvent::Added(stored) => self.object("ADDED", stored),
            WatchEvent::Modified(stored) => self.object("MODIFIED", stored),
            WatchEvent::Deleted(stored) => self.object("DELETED", stored),
            WatchEvent::Bookmark { revision, initial_events_end } => {
                self.bookmark(*revision, *initial_events_end)
            }
            WatchEvent::Error(error) => Ok(self.error(error)),
        };
        framed.unwrap_or_else(|error| self.error(&error)).into()
    }

    /// A frame around the object that `write` appends.
    fn wrap(&self, kind: &str, write: impl FnOnce(&mut Vec<u8>)) -> Result<Vec<u8>, StatusError> {
        let mut out = if self.is_json() { open(kind) } else { vec![] };
        write(&mut out);
        match self.media {
            Media::Protobuf(protobuf) => protobuf.watch_frame(kind, &out),
            Media::Cbor => cbor::watch_frame(kind, &out),
            Media::Json | Media::Yaml => Ok(close(out)),
        }
    }

    /// Watches are never in YAML.
    fn is_json(&self) -> bool {
        matches!(self.media, Media::Json | Media::Yaml)
    }

    fn error(&self, error: &StatusError) -> Vec<u8> {
        let json = error.to_json().to_string();
        let framed = self.wrap("ERROR", |out| out.extend_from_slice(json.as_bytes()));
        // A watch in protobuf requires a message for errors, so this is never empty.
        framed.unwrap_or_default()
    }

    fn object(&mut self, kind: &str, stored: &Stored) -> Result<Vec<u8>, StatusError> {
        match self.shown_as {
            As::Itself => self.wrap(kind, |out| stored.write_to(out)),
            As::Table(version) => {
                let table = table::one(version, stored, &self.options)?;
                // The headers are sent only once.
                self.options.no_headers = true;
                self.wrap(kind, |out| out.extend_from_slice(&table))
            }
            As::PartialObjectMetadata(version) | As::PartialObjectMetadataList(version) => {
                self.wrap(kind, |out| partial::write_object(out, version, stored))
            }
        }
    }

    /// An empty object of the kind, at a revision.
    fn bookmark(
        &mut self,
        revision: Revision,
        initial_events_end: bool,
    ) -> Result<Vec<u8>, StatusError> {
        let table = matches!(self.shown_as, As::Table(_));
        let mut object =
            if table { self.row.stored_codec().empty() } else { self.row.codec.empty() };
        let meta = object.meta_mut();
        if initial_events_end {
            meta.annotations = Some([(INITIAL_EVENTS_END.to_owned(), "true".to_owned())].into());
        }
        if table {
            let value = self.row.stored_codec().settle(object.encode());
            let stored = Stored::new(self.row.clone(), value, revision);
            return self.object("BOOKMARK", &stored);
        }
        meta.resource_version = Some(revision.to_string());
        let json = self.row.codec.settle(object.encode());
        self.wrap("BOOKMARK", |out| match self.shown_as {
            As::PartialObjectMetadata(version) | As::PartialObjectMetadataList(version) => {
                partial::write(out, version, partial::metadata(&json));
            }
            _ => out.extend_from_slice(&json),
        })
    }
}

fn open(kind: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(1024);
    out.extend_from_slice(br#"{"type":""#);
    out.extend_from_slice(kind.as_bytes());
    out.extend_from_slice(br#"","object":"#);
    out
}

fn close(mut out: Vec<u8>) -> Vec<u8> {
    out.extend_from_slice(b"}\n");
    out
}
