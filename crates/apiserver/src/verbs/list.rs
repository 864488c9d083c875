//! `GET` of a collection.

use http::Response;
use machinery::StatusError;
use transport::local::{Given, Objects};

use super::{Call, get, list_options};
use crate::codec;
use crate::resource::Body;

/// An answer for a client of this process.
pub(super) fn given(objects: Objects) -> Response<Body> {
    let mut response = Response::new(transport::empty());
    response.extensions_mut().insert(Given::new(objects));
    response
}

pub async fn list(call: Call) -> Result<Response<Body>, StatusError> {
    get::refuse_export(&call)?;
    let table_options = call.table_options()?;
    let options = list_options::read(&call, list_options::For::List)?;
    if call.takes_objects() {
        let list = call.registry().list_shared(&call.row, call.namespace(), &options).await?;
        return Ok(given(Objects::List(list)));
    }
    let list = call.registry().list(&call.row, call.namespace(), &options).await?;
    codec::list::list(&call.accept, &call.row, list, &table_options)
}
