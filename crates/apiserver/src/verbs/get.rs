//! `GET` of one object.

use http::{Response, StatusCode};
use machinery::StatusError;

use super::Call;
use crate::codec;
use crate::resource::Body;

pub async fn get(call: Call) -> Result<Response<Body>, StatusError> {
    refuse_export(&call)?;
    let options = call.table_options()?;
    let version = call.query.first("resourceVersion");
    let stored = call.registry().get(&call.row, &call.key(), version).await?;
    codec::object(&call.accept, StatusCode::OK, &stored, &options)
}

pub fn refuse_export(call: &Call) -> Result<(), StatusError> {
    if call.query.flag("export") {
        return Err(StatusError::bad_request(
            "the export parameter, deprecated since v1.14, is no longer supported",
        ));
    }
    Ok(())
}
