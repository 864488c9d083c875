//! `PUT` of an object.

use http::{Response, StatusCode};
use machinery::StatusError;

use super::Call;
use super::body;
use super::options::{self, OptionsKind};
use crate::codec::{self, decode::decode};
use crate::registry::{Intent, Outcome};
use crate::resource::Body;

pub async fn update(mut call: Call, body: Body) -> Result<Response<Body>, StatusError> {
    let format = call.body_format()?;
    let table_options = call.table_options()?;
    let bytes = body::read(body).await?;
    let Call { query, ctx, .. } = &mut call;
    options::read(OptionsKind::Update, query, ctx)?;
    let mut object = decode(&bytes, format, &call.wanted(), &call.ctx)?;
    call.check_name(&*object)?;
    call.place(&mut *object)?;
    call.note_object(&*object, &*call.row.codec);
    let written = call.registry().write(&call.ctx, &call.key(), Intent::Update { object }).await?;
    codec::object(&call.accept, status_of(written.outcome), &written.object, &table_options)
}

pub fn status_of(outcome: Outcome) -> StatusCode {
    if outcome == Outcome::Created { StatusCode::CREATED } else { StatusCode::OK }
}
