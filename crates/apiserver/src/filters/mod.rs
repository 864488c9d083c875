//! The stack: what every request passes before a verb sees it, and every answer on its way out.
//!
//! In: a request. Out: a response, always. [`handle`] is the whole stack, in execution order; each
//! layer has a file. Layers before `authentication` may not trust anything the client says about
//! itself.

mod audit_id;
pub(crate) mod authentication;
pub(crate) mod authorization;
mod gzip;
pub(crate) mod impersonation;
pub(crate) mod in_flight;
pub(crate) mod info;
mod observe;
mod panics;
mod timeout;

use std::sync::Arc;
use std::time::Duration;

use http::header::{CACHE_CONTROL, HeaderValue};
use http::request::Parts;
use http::{Request, Response};
use machinery::StatusError;
use release::features::{self, Feature};

use crate::audit;
use crate::codec;
use crate::request::{RequestInfo, UserInfo};
use crate::resource::Body;
use crate::shared::Shared;
use crate::verbs;

/// The stack.
pub(crate) async fn handle(shared: Arc<Shared>, mut request: Request<Body>) -> Response<Body> {
    // Names the request in logs and answers: first, so that every line and every error has it.
    let audit_id = audit_id::of(&request);
    if shared.options.audit.is_some() {
        request.extensions_mut().insert(audit::AuditId(audit_id.clone()));
    }
    // What is asked for decides limits, metrics, authorization and dispatch.
    let info = Arc::new(info::parse(&request));
    let is_compressible =
        gzip::is_accepted(&request) && features::enabled(Feature::APIResponseCompression);
    // Counts and measures everything below, refusals and panics included.
    let observed = observe::Observed::start(&shared, &info, &request);
    // A bug in a handler costs one request, not the process.
    let work = panics::catch(async {
        // A client that waits for more than a minute has lost; watches and streams may take long.
        let answer = match timeout::of(&shared, &info, request.uri()) {
            Ok(time) => {
                let work = inside(&shared, &info, request, time);
                timeout::limit(time, &info, work).await
            }
            Err(error) => Err(error),
        };
        answer.unwrap_or_else(|error| codec::error(&codec::Accept::JSON, &error))
    });
    let mut response = work.await;
    // Large answers shrink tenfold for a little CPU.
    if is_compressible {
        response = gzip::compress(response);
    }
    // What is secret today may not be answered from a proxy's cache tomorrow.
    let private = HeaderValue::from_static("no-cache, private");
    response.headers_mut().entry(CACHE_CONTROL).or_insert(private);
    audit_id::stamp(&mut response, audit_id);
    observed.finish(response)
}

/// The inner half, whose refusals are errors.
async fn inside(
    shared: &Arc<Shared>,
    info: &Arc<RequestInfo>,
    request: Request<Body>,
    time: Duration,
) -> Result<Response<Body>, StatusError> {
    let audit = shared.options.audit.as_ref();
    let (mut parts, body) = request.into_parts();
    // Who is it? Certificates, tokens, or the process itself.
    let user = match authentication::authenticate(shared, &parts).await {
        Ok(user) => user,
        Err(error) => {
            audit::failed_authentication(audit, info, &parts, &error).await;
            return Err(error);
        }
    };
    // What is asked, what is decided and what comes of it is noted from here on, if anybody wants.
    let trail = audit::Trail::begin(audit, info, &mut parts, &user).await?;
    let work = known(shared, info, user, parts, body, time);
    let protobuf = shared.options.protobuf.map(codec::protobuf::Protobuf);
    audit::follow(protobuf, trail, work).await
}

/// What follows once it is known who asks.
async fn known(
    shared: &Arc<Shared>,
    info: &Arc<RequestInfo>,
    user: UserInfo,
    mut parts: Parts,
    body: Body,
    time: Duration,
) -> Result<Response<Body>, StatusError> {
    // Who do they want to be? Authorized as an action of its own.
    let user = impersonation::impersonate(shared, info, &mut parts, user).await?;
    // No request holds a place here before it is known whose it is, and none without limit.
    let held = match in_flight::enter(shared, info, &user, &parts, time).await {
        Ok(held) => held,
        Err(refusal) => return Ok(refusal),
    };
    let answer = allowed(shared, info, user, parts, body).await;
    Ok(held.release(answer.unwrap_or_else(|error| codec::error(&codec::Accept::JSON, &error))))
}

/// What is done with a place.
async fn allowed(
    shared: &Arc<Shared>,
    info: &Arc<RequestInfo>,
    user: UserInfo,
    parts: Parts,
    body: Body,
) -> Result<Response<Body>, StatusError> {
    // May they?
    let trail = audit::Trail::of(&parts).map(|trail| &**trail);
    authorization::authorize(shared, info, &user, trail).await?;
    // A body is read by the verb that wants one, through `body::read`, which has a limit.
    verbs::dispatch(shared, info, user, parts, body).await
}
