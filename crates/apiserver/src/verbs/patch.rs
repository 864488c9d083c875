//! `PATCH` of an object: four formats, told apart by their content type.

use bytes::Bytes;
use http::Response;
use machinery::StatusError;
use machinery::patch::PatchKind;
use machinery::status::Reason;

use super::Call;
use super::call::unsupported_media_type;
use super::options::{self, OptionsKind};
use super::update::status_of;
use crate::codec::{self, decode};
use crate::filters::body;
use crate::registry::{Intent, Written};
use crate::resource::Body;

pub async fn patch(mut call: Call, body: Body) -> Result<Response<Body>, StatusError> {
    let table_options = call.table_options()?;
    let written = write(&mut call, body).await?;
    codec::object(&call.accept, status_of(written.outcome), &written.object, &table_options)
}

/// Patches the object, or the view of it that the subresource shows.
pub async fn write(call: &mut Call, body: Body) -> Result<Written, StatusError> {
    let kind = kind(call)?;
    let bytes = body::read(body).await?;
    let is_apply = matches!(kind, PatchKind::Apply { .. });
    let Call { query, ctx, .. } = &mut *call;
    let options_kind = if is_apply { OptionsKind::Apply } else { OptionsKind::Patch };
    let force = options::read(options_kind, query, ctx)?;
    let (kind, body) = match kind {
        PatchKind::Apply { .. } => (PatchKind::Apply { force }, applied(&bytes)?),
        kind => (kind, bytes),
    };
    call.registry().write(&call.ctx, &call.key(), Intent::Patch { kind, body }).await
}

fn kind(call: &Call) -> Result<PatchKind, StatusError> {
    let content_type = call.content_type().unwrap_or_default();
    match content_type.split(';').next().unwrap_or_default().trim() {
        "application/json-patch+json" => Ok(PatchKind::Json),
        "application/merge-patch+json" => Ok(PatchKind::Merge),
        "application/apply-patch+yaml" => Ok(PatchKind::Apply { force: false }),
        // Which lists merge by what is known of built-in kinds only.
        "application/strategic-merge-patch+json" if !call.row.custom => Ok(PatchKind::Strategic),
        "application/strategic-merge-patch+json" => Err(unsupported_media_type(
            "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml",
        )),
        _ => Err(StatusError::new(Reason::UnsupportedMediaType, "415: Unsupported Media Type")),
    }
}

/// What is applied comes as YAML, of which JSON is a part.
fn applied(body: &Bytes) -> Result<Bytes, StatusError> {
    if decode::is_json(body) {
        return Ok(body.clone());
    }
    let (tree, _) = decode::yaml(body)
        .map_err(|why| StatusError::bad_request(format!("error decoding YAML: {why}")))?;
    Ok(tree.to_string().into())
}
