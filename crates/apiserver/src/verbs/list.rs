//! `GET` of a collection.

use http::Response;
use machinery::StatusError;

use super::{Call, get, list_options};
use crate::codec;
use crate::resource::Body;

pub async fn list(call: Call) -> Result<Response<Body>, StatusError> {
    get::refuse_export(&call)?;
    let table_options = call.table_options()?;
    let options = list_options::read(&call, list_options::For::List)?;
    let list = call.registry().list(&call.row, call.namespace(), &options).await?;
    codec::list::list(&call.accept, &call.row, list, &table_options)
}
