//! Lists: the items' bytes in sequence, sent in pieces if there are many.

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use machinery::StatusError;
use serde_json::{Value, json};

use super::decode::package;
use super::table::{self, TableOptions};
use super::{Accept, As, Media, cbor, full, not_acceptable, partial, respond};
use crate::resource::{Body, Resource};
use crate::stored::{List, Stored};

/// Lists up to about this size are sent in one piece; longer ones use this much memory at a time.
const PIECE_BYTES: usize = 256 << 10;

/// Marks a large answer of unknown length, which is worth compressing.
#[derive(Clone, Copy)]
pub struct Large;

pub fn list(
    accept: &Accept,
    row: &Resource,
    list: List,
    options: &TableOptions,
) -> Result<Response<Body>, StatusError> {
    let mut metadata = metadata(&list);
    match accept.shown_as {
        As::Itself => match accept.media {
            Media::Protobuf(protobuf) => {
                let bytes = protobuf.list(row, list, &metadata)?;
                let mut response =
                    respond(StatusCode::OK, accept.media.content_type(), full(bytes));
                response.extensions_mut().insert(Large);
                Ok(response)
            }
            _ => {
                // Go's type for lists of custom resources always has it.
                if row.custom && list.continue_token.is_none() {
                    metadata["continue"] = "".into();
                }
                items(accept, row, list, &metadata)
            }
        },
        As::Table(version) => {
            let bytes = table::whole(version, row, &list.items, &metadata, options)?;
            Ok(super::json(accept, StatusCode::OK, bytes.into()))
        }
        As::PartialObjectMetadataList(version) => {
            let bytes = partial_list(version, &list, &metadata);
            Ok(super::json(accept, StatusCode::OK, bytes.into()))
        }
        As::PartialObjectMetadata(_) => Err(not_acceptable(format!(
            "you requested PartialObjectMetadata, but the requested object is a list (*{}.{}List)",
            package(&row.group),
            row.kind
        ))),
    }
}

fn metadata(list: &List) -> Value {
    let mut metadata = json!({});
    // A computed list has no revision.
    if list.revision.0 > 0 {
        metadata["resourceVersion"] = list.revision.to_string().into();
    }
    if let Some(token) = &list.continue_token {
        metadata["continue"] = token.as_str().into();
    }
    if let Some(remaining) = list.remaining {
        metadata["remainingItemCount"] = remaining.into();
    }
    metadata
}

fn head(row: &Resource, metadata: &Value) -> Vec<u8> {
    let api_version = row.api_version();
    let mut out = Vec::with_capacity(1024);
    out.extend_from_slice(
        format!(
            r#"{{"kind":"{}","apiVersion":"{api_version}","metadata":{metadata},"items":["#,
            row.list_kind
        )
        .as_bytes(),
    );
    out
}

/// The same head in CBOR, which contains the number of items.
fn cbor_head(mut json: Vec<u8>, items: usize) -> Result<Vec<u8>, StatusError> {
    json.extend_from_slice(b"]}");
    let mut out = cbor::object(&json)?;
    // The empty list at the end.
    out.pop();
    cbor::array_head(&mut out, items);
    Ok(out)
}

fn items(
    accept: &Accept,
    row: &Resource,
    list: List,
    metadata: &Value,
) -> Result<Response<Body>, StatusError> {
    let is_cbor = accept.media == Media::Cbor;
    let mut out = head(row, metadata);
    if is_cbor {
        out = cbor_head(out, list.items.len())?;
    }
    let items = list.items.into_iter();
    let mut writer = Writer { out, items, is_cbor, is_first: true, is_closed: false };
    let is_streamed = is_cbor || (accept.media == Media::Json && !accept.pretty);
    writer.fill(if is_streamed { PIECE_BYTES } else { usize::MAX })?;
    if writer.is_closed && is_cbor {
        return Ok(respond(StatusCode::OK, cbor::MEDIA_TYPE, full(writer.out)));
    }
    if writer.is_closed {
        return Ok(super::json(accept, StatusCode::OK, writer.out.into()));
    }
    // After the head an error can only end the answer.
    let frame = |piece: Result<Bytes, StatusError>| Ok(Frame::data(piece?));
    let pieces = futures::stream::iter(writer.map(frame));
    let body = StreamBody::new(pieces).boxed_unsync();
    let mut response = respond(StatusCode::OK, accept.media.content_type(), body);
    response.extensions_mut().insert(Large);
    Ok(response)
}

/// Writes a list as pieces.
struct Writer {
    out: Vec<u8>,
    items: std::vec::IntoIter<Stored>,
    /// CBOR has neither commas nor an end: its head contains the number of items.
    is_cbor: bool,
    is_first: bool,
    is_closed: bool,
}

impl Writer {
    /// Writes items until `limit` bytes are there, and the end after the last.
    fn fill(&mut self, limit: usize) -> Result<(), StatusError> {
        while !self.is_closed && self.out.len() < limit {
            let Some(item) = self.items.next() else {
                self.out.extend_from_slice(if self.is_cbor { b"" } else { b"]}" });
                self.is_closed = true;
                break;
            };
            if self.is_cbor {
                cbor::put_item(&item.list_item(), &mut self.out)?;
                continue;
            }
            if !std::mem::take(&mut self.is_first) {
                self.out.push(b',');
            }
            item.write_item_to(&mut self.out);
        }
        Ok(())
    }
}

impl Iterator for Writer {
    type Item = Result<Bytes, StatusError>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Err(error) = self.fill(PIECE_BYTES) {
            return Some(Err(error));
        }
        (!self.out.is_empty()).then(|| Ok(std::mem::take(&mut self.out).into()))
    }
}

fn partial_list(version: &str, list: &List, metadata: &Value) -> Vec<u8> {
    let mut out = format!(
        r#"{{"kind":"PartialObjectMetadataList","apiVersion":"{version}","metadata":{metadata},"items":"#
    )
    .into_bytes();
    if list.items.is_empty() {
        out.extend_from_slice(b"null}");
        return out;
    }
    for (index, item) in list.items.iter().enumerate() {
        out.push(if index == 0 { b'[' } else { b',' });
        partial::write_object(&mut out, version, item);
    }
    out.extend_from_slice(b"]}");
    out
}
