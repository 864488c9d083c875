//! `GET` of a collection with `watch`: frames, one per event, until the time is up.

use std::time::Duration;

use futures::StreamExt;
use http::{Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use machinery::StatusError;
use machinery::status::Reason;

use super::{Call, get, list_options};
use crate::codec::frames::Framer;
use crate::codec::{self, Media, cbor};
use crate::resource::Body;

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
    let events = call.registry().watch(&call.row, call.namespace(), &options).await?;
    let mut framer = Framer::new(call.row.clone(), &call.accept, table_options);
    let numbers = call.shared.metrics.watch(&call.row);
    let frames = events
        .map(move |event| {
            let frame = framer.frame(&event);
            numbers.sent(frame.len());
            Ok(Frame::data(frame))
        })
        .take_until(call.shared.shutdown());
    let body = StreamBody::new(frames).boxed_unsync();
    Ok(codec::respond(StatusCode::OK, content_type, body))
}

/// Watches end at different times, so that their clients do not come back all at once.
fn default_timeout(least: Duration) -> Duration {
    least.mul_f64(1.0 + base::rng::unit())
}
