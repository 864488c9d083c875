//! The stack: the filters that every request passes before its verb, and every answer on its way out.
//!
//! In: a request. Out: a response, always. [`handle`] is the whole stack, in execution order; each layer
//! has a file. Layers before `authentication` must not trust anything that the client says about itself.

mod audit_id;
pub(crate) mod authentication;
pub(crate) mod authorization;
pub(crate) mod browsers;
mod goaway;
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
    // The request's id in logs and answers: first, so that every line and every error has it.
    let audit_id = audit_id::of(&request);
    if shared.options.audit.is_some() {
        request.extensions_mut().insert(audit::AuditId(audit_id.clone()));
    }
    // Limits, metrics, authorization and dispatch depend on method and path.
    let info = Arc::new(info::parse(&request));
    let is_compressible =
        gzip::is_accepted(&request) && features::enabled(Feature::APIResponseCompression);
    // Counts and measures everything below, including refusals and panics.
    let observed = observe::Observed::start(&shared, &info, &request);
    // Scripts of this origin may read the answer.
    let origin = shared.options.browsers.origin(&request);
    // The connection gets a GOAWAY with the answer, so that its client finds another server.
    let leaves = goaway::is_due(shared.options.goaway_chance, &request);
    // A panic in a handler ends one request, not the process.
    let work = panics::catch(async {
        // A browser asks without credentials whether a script may ask.
        if let Some(answer) = browsers::preflight(origin.as_ref(), &request) {
            return answer;
        }
        // A short request has a time-out; watches and streams have none.
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
    // Compression makes large answers ten times smaller, for little CPU.
    if is_compressible {
        response = gzip::compress(response);
    }
    // Answers may contain secrets, so proxies must not cache them.
    let private = HeaderValue::from_static("no-cache, private");
    response.headers_mut().entry(CACHE_CONTROL).or_insert(private);
    shared.options.browsers.mark(origin, response.headers_mut());
    if leaves {
        goaway::mark(&mut response);
    }
    audit_id::stamp(&mut response, audit_id);
    observed.finish(response)
}

/// The inner half of the stack, which returns refusals as errors.
async fn inside(
    shared: &Arc<Shared>,
    info: &Arc<RequestInfo>,
    request: Request<Body>,
    time: Duration,
) -> Result<Response<Body>, StatusError> {
    let audit = shared.options.audit.as_ref();
    let (mut parts, body) = request.into_parts();
    // Authentication: certificates, tokens, or the process itself.
    let user = match authentication::authenticate(shared, &parts).await {
        Ok(user) => user,
        Err(error) => {
            audit::failed_authentication(audit, info, &parts, &error).await;
            return Err(error);
        }
    };
    // From here on the audit log records the request, if the policy wants that.
    let trail = audit::Trail::begin(audit, info, &mut parts, &user).await?;
    let work = known(shared, info, user, parts, body, time);
    let protobuf = shared.options.protobuf.map(codec::protobuf::Protobuf);
    audit::follow(protobuf, trail, work).await
}

/// The part of the stack after authentication.
async fn known(
    shared: &Arc<Shared>,
    info: &Arc<RequestInfo>,
    user: UserInfo,
    mut parts: Parts,
    body: Body,
    time: Duration,
) -> Result<Response<Body>, StatusError> {
    // Impersonation is authorized as an action of its own.
    let user = match impersonation::impersonate(shared, info, &mut parts, user).await {
        Ok(user) => user,
        Err(refusal) => return Ok(codec::refused(&refusal)),
    };
    // Priority and fairness needs the user; no request continues without a place.
    let held = match in_flight::enter(shared, info, &user, &parts, time).await {
        Ok(held) => held,
        Err(refusal) => return Ok(refusal),
    };
    let answer = allowed(shared, info, user, parts, body).await;
    Ok(held.release(answer.unwrap_or_else(|error| codec::error(&codec::Accept::JSON, &error))))
}

/// The part of the stack inside the limits.
async fn allowed(
    shared: &Arc<Shared>,
    info: &Arc<RequestInfo>,
    user: UserInfo,
    parts: Parts,
    body: Body,
) -> Result<Response<Body>, StatusError> {
    // Authorization.
    let trail = audit::Trail::of(&parts).map(|trail| &**trail);
    if let Err(refusal) = authorization::authorize(shared, info, &user, trail).await {
        return Ok(codec::refused(&refusal));
    }
    // The verb reads the body with `body::read`, which has a limit.
    verbs::dispatch(shared, info, user, parts, body).await
}
