//! `POST` to a collection.

use http::{Response, StatusCode};
use machinery::StatusError;
use machinery::object::Codec;
use serde_json::json;

use super::Call;
use super::body;
use super::options::{self, OptionsKind};
use crate::codec::{self, decode::decode};
use crate::registry::Intent;
use crate::request::Key;
use crate::resource::{Body, Created};

pub async fn create(mut call: Call, body: Body) -> Result<Response<Body>, StatusError> {
    let format = call.body_format()?;
    let table_options = call.table_options()?;
    let bytes = body::read(body).await?;
    let Call { query, ctx, .. } = &mut call;
    options::read(OptionsKind::Create, query, ctx)?;
    let mut object = decode(&bytes, format, &call.wanted(), &call.ctx)?;
    call.place(&mut *object)?;
    call.note_object(&*object, &*call.row.codec);
    if !call.row.is_stored() {
        let answer = call.registry().review(&call.ctx, object).await?;
        return Ok(created(&call, &*call.row.codec, answer));
    }
    let key = Key::new(call.namespace(), object.name());
    let written = call.registry().write(&call.ctx, &key, Intent::Create { object }).await?;
    codec::object(&call.accept, StatusCode::CREATED, &written.object, &table_options)
}

/// The answer to a POST whose object is not stored.
pub fn created(call: &Call, codec_of: &dyn Codec, answer: Created) -> Response<Body> {
    let json = match answer {
        Created::Object(object) => codec_of.settle(object.encode()),
        Created::Success => {
            let status = json!({
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201,
            });
            status.to_string().into_bytes()
        }
    };
    codec::json(&call.accept, StatusCode::CREATED, json.into())
}
