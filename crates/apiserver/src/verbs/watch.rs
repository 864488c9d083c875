//! `GET` of a collection with `watch`: frames, one per event, until the timeout.
//!
//! In: a call, the events of its row. Out: a body that streams them, or messages of a WebSocket if the client
//! requests one: text if the frames are JSON, else binary. A task of the server writes to the WebSocket.
//! A client in this process may get the changes themselves.
//! Upstream: `endpoints/handlers/watch.go`.
//!
//! Deviation: upstream refuses a WebSocket without an `Origin` header (403), although the header proves
//! nothing about the client.

use std::time::Duration;

use base::metrics::Timer;
use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::{Request, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use machinery::StatusError;
use machinery::status::Reason;
use transport::local::Objects;
use transport::ws::{self, Message};

use super::list::given;
use super::{Call, get, list_options};
use crate::codec::frames::Framer;
use crate::codec::{self, Media, cbor};
use crate::metrics::families::WATCH_LIST;
use crate::registry::parse_version;
use crate::relay;
use crate::resource::Body;
use crate::stored::WatchEvent;

pub async fn watch(call: Call) -> Result<Response<Body>, StatusError> {
    get::refuse_export(&call)?;
    if call.accept.media == Media::Yaml {
        let types = cbor::listed(
            cbor::is_served(),
            "application/json;stream=watch, application/vnd.kubernetes.protobuf;stream=watch",
            cbor::SEQUENCE,
        );
        let message = format!("only the following media types are accepted: {types}");
        return Err(StatusError::new(Reason::NotAcceptable, message).without_details());
    }
    let content_type = match call.accept.media {
        Media::Protobuf(_) => "application/vnd.kubernetes.protobuf;stream=watch",
        Media::Cbor => cbor::SEQUENCE,
        _ => "application/json",
    };
    let table_options = call.table_options()?;
    let mut options = list_options::read(&call, list_options::For::Watch)?;
    options.timeout =
        Some(options.timeout.unwrap_or_else(|| default_timeout(call.shared.options.min_watch)));
    let after = parse_version(options.resource_version.as_deref())?;
    if let Some(after) = after.filter(|after| after.0 > 0 && call.takes_objects()) {
        let (registry, namespace) = (call.registry(), call.namespace());
        let changes = registry.watch_shared(&call.row, namespace, &options, after).await?;
        let changes = changes.take_until(call.shared.shutdown());
        return Ok(given(Objects::Changes(Box::pin(changes))));
    }
    let events = call.registry().watch(&call.row, call.namespace(), &options).await?;
    let mut framer = Framer::new(call.row.clone(), &call.accept, table_options);
    let numbers = call.shared.metrics.watch(&call.row);
    let (row, timer) = (call.row.clone(), Timer::start());
    let scope = if call.namespace().is_empty() { "cluster" } else { "namespace" };
    let frames = events
        .map(move |event| {
            let frame = framer.frame(&event);
            numbers.sent(frame.len());
            if matches!(event, WatchEvent::Bookmark { initial_events_end: true, .. }) {
                let labels = [row.group.as_str(), &row.plural, scope, &row.version];
                WATCH_LIST.took(&labels, timer.elapsed());
            }
            frame
        })
        .take_until(call.shared.shutdown());
    if ws::is_websocket(&call.parts.headers) {
        return in_messages(call, content_type, frames);
    }
    let body = StreamBody::new(frames.map(|frame| Ok(Frame::data(frame)))).boxed_unsync();
    Ok(codec::respond(StatusCode::OK, content_type, body))
}

fn in_messages(
    mut call: Call,
    content_type: &'static str,
    frames: impl Stream<Item = Bytes> + Send + 'static,
) -> Result<Response<Body>, StatusError> {
    relay::remove_token(&mut call.parts.headers);
    let response = ws::accept_sole(&call.parts.headers);
    let mut response = response.map_err(|error| StatusError::bad_request(error.to_string()))?;
    let content_type = header::HeaderValue::from_static(content_type);
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    let (tasks, media) = (call.registry().tasks().clone(), call.accept.media);
    let io = transport::server_io(&mut Request::from_parts(call.parts, ()));
    tasks.spawn_contained("a watch in messages", async move {
        match io.await {
            Ok(io) => {
                let messages = frames.map(move |frame| message(media, frame));
                ws::send_all(ws::server(io).await, messages).await;
            }
            Err(error) => tracing::debug!(%error, "the client disconnected before its watch began"),
        }
    });
    Ok(response.map(|()| transport::empty()))
}

/// A frame as a message, which needs no length prefix.
fn message(media: Media, frame: Bytes) -> Message {
    /// Bytes of the length prefix of a protobuf frame.
    const LENGTH: usize = 4;
    match media {
        Media::Protobuf(_) => Message::Binary(frame.slice(LENGTH.min(frame.len())..)),
        Media::Cbor => Message::Binary(frame),
        Media::Json | Media::Yaml => match frame.try_into() {
            Ok(text) => Message::Text(text),
            // Stored bytes are text; invalid text would break the connection.
            Err(_) => Message::Text("".into()),
        },
    }
}

/// Watches get different timeouts, so that their clients do not all reconnect at once.
fn default_timeout(least: Duration) -> Duration {
    least.mul_f64(1.0 + base::rng::unit())
}
