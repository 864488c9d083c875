//! Subresources: parts of an object, views of it, actions on it, streams from it.

use std::sync::Arc;

use http::{Response, StatusCode};
use machinery::StatusError;

use super::body;
use super::create::created;
use super::options::{self, OptionsKind};
use super::update::status_of;
use super::{Call, connect, get, patch, update};
use crate::codec::decode::{Wanted, decode};
use crate::codec::{self};
use crate::registry::{Intent, Stored, Written};
use crate::resource::{Behaviour, Body, CreateHandler, Resource, Subresource, View};

/// The router has checked that the row has the subresource with this verb.
pub async fn serve(call: Call, body: Body) -> Result<Response<Body>, StatusError> {
    let row = call.row.clone();
    let subresource = of(&row, &call)?;
    match &subresource.behaviour {
        Behaviour::Part => match call.info.verb.as_str() {
            "get" => get::get(call).await,
            "patch" => patch::patch(call, body).await,
            _ => update::update(call, body).await,
        },
        Behaviour::View(view) => serve_view(call, subresource, &**view, body).await,
        Behaviour::Create(handler) => create(call, subresource, &**handler, body).await,
        Behaviour::Connect(handler) => connect::connect(call, &**handler, body).await,
    }
}

fn of<'a>(row: &'a Arc<Resource>, call: &Call) -> Result<&'a Subresource, StatusError> {
    row.subresource(&call.info.subresource).ok_or_else(crate::codec::no_route)
}

/// The kind of a subresource: its own, or the parent's.
fn wanted<'a>(
    call: &'a Call,
    subresource: &'a Subresource,
    codec: &'a dyn machinery::object::Codec,
) -> Wanted<'a> {
    let mut wanted = Wanted { codec, ..call.wanted() };
    if let Some(kind) = subresource.kind {
        (wanted.group, wanted.version, wanted.kind) = (kind.group, kind.version, kind.kind);
    }
    wanted
}

async fn serve_view(
    mut call: Call,
    subresource: &Subresource,
    view: &dyn View,
    body: Body,
) -> Result<Response<Body>, StatusError> {
    let (code, stored) = match call.info.verb.as_str() {
        "get" => {
            let version = call.query.first("resourceVersion");
            (StatusCode::OK, call.registry().get(&call.row, &call.key(), version).await?)
        }
        "patch" => answer(patch::write(&mut call, body).await?),
        _ => answer(update_view(&mut call, subresource, view, body).await?),
    };
    let shown = view.view(&*stored.stored_object()?)?;
    let json = view.codec().settle(shown.encode());
    Ok(codec::json(&call.accept, code, json.into()))
}

fn answer(written: Written) -> (StatusCode, Stored) {
    (status_of(written.outcome), written.object)
}

async fn update_view(
    call: &mut Call,
    subresource: &Subresource,
    view: &dyn View,
    body: Body,
) -> Result<Written, StatusError> {
    let format = call.body_format()?;
    let bytes = body::read(body).await?;
    let Call { query, ctx, .. } = &mut *call;
    options::read(OptionsKind::Update, query, ctx)?;
    let mut object = decode(&bytes, format, &wanted(call, subresource, view.codec()), &call.ctx)?;
    call.check_name(&*object)?;
    call.place(&mut *object)?;
    call.note_object(&*object, view.codec());
    call.registry().write(&call.ctx, &call.key(), Intent::Update { object }).await
}

async fn create(
    mut call: Call,
    subresource: &Subresource,
    handler: &dyn CreateHandler,
    body: Body,
) -> Result<Response<Body>, StatusError> {
    let format = call.body_format()?;
    let bytes = body::read(body).await?;
    let Call { query, ctx, .. } = &mut call;
    options::read(OptionsKind::Create, query, ctx)?;
    let mut object =
        decode(&bytes, format, &wanted(&call, subresource, handler.codec()), &call.ctx)?;
    call.place(&mut *object)?;
    call.note_object(&*object, handler.codec());
    let answer =
        call.registry().create_subresource(&call.ctx, &call.key(), handler, object).await?;
    Ok(created(&call, handler.codec(), answer))
}
