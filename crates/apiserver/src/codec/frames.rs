//! Watch frames: `{"type":…,"object":…}` lines, the object in the form that the client asked for.

use std::sync::Arc;

use bytes::Bytes;
use machinery::StatusError;
use store::Revision;

use super::table::{self, TableOptions};
use super::{Accept, As, partial};
use crate::registry::{Stored, WatchEvent};
use crate::resource::Resource;

const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// Makes the frames of one watch.
pub struct Framer {
    row: Arc<Resource>,
    shown_as: As,
    options: TableOptions,
}

impl Framer {
    pub fn new(row: Arc<Resource>, accept: &Accept, options: TableOptions) -> Self {
        Self { row, shown_as: accept.shown_as, options }
    }

    pub fn frame(&mut self, event: &WatchEvent) -> Bytes {
        let framed = match event {
            WatchEvent::Added(stored) => self.object("ADDED", stored),
            WatchEvent::Modified(stored) => self.object("MODIFIED", stored),
            WatchEvent::Deleted(stored) => self.object("DELETED", stored),
            WatchEvent::Bookmark { revision, initial_events_end } => {
                self.bookmark(*revision, *initial_events_end)
            }
            WatchEvent::Error(error) => Ok(error_frame(error)),
        };
        framed.unwrap_or_else(|error| error_frame(&error)).into()
    }

    fn object(&mut self, kind: &str, stored: &Stored) -> Result<Vec<u8>, StatusError> {
        let mut out = open(kind);
        match self.shown_as {
            As::Itself => stored.write_to(&mut out),
            As::Table(version) => {
                out.extend_from_slice(&table::one(version, stored, &self.options)?);
                // Once the headers are sent, they are not sent again.
                self.options.no_headers = true;
            }
            As::PartialObjectMetadata(version) | As::PartialObjectMetadataList(version) => {
                partial::write_object(&mut out, version, &stored.json());
            }
        }
        Ok(close(out))
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
            let stored = Stored::new(self.row.clone(), object.encode().into(), revision);
            return self.object("BOOKMARK", &stored);
        }
        meta.resource_version = Some(revision.to_string());
        let json = object.encode();
        let mut out = open("BOOKMARK");
        match self.shown_as {
            As::PartialObjectMetadata(version) | As::PartialObjectMetadataList(version) => {
                partial::write_object(&mut out, version, &json);
            }
            _ => out.extend_from_slice(&json),
        }
        Ok(close(out))
    }
}

pub fn error_frame(error: &StatusError) -> Vec<u8> {
    let mut out = open("ERROR");
    out.extend_from_slice(error.to_json().to_string().as_bytes());
    close(out)
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
