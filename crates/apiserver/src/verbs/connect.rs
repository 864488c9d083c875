//! Byte streams: `exec`, `attach`, `portforward`, `proxy`, `log`. The handler speaks HTTP itself.

use http::{Request, Response};
use machinery::StatusError;

use super::Call;
use crate::resource::{Body, Connect};

pub async fn connect(
    call: Call,
    handler: &dyn Connect,
    body: Body,
) -> Result<Response<Body>, StatusError> {
    let key = call.key();
    // Reading a log is a read; the others open a way into the pod, which admission may refuse.
    if call.info.subresource != "log" {
        call.registry().admit_connect(&call.ctx, &key).await?;
    }
    let registry = call.shared.registry.clone();
    let request = Request::from_parts(call.parts, body);
    handler.connect(&registry, &call.ctx, &key, request).await
}
