//! HTTP to intents: the verbs of method and path, executed by the registry.
//!
//! In: a request that passed the filters. Out: a response. [`VERBS`] is the table; a verb is a file. The
//! resource's row determines which requests have a route at all (404, 405).

mod body;
mod call;
mod connect;
mod create;
mod delete;
mod get;
mod list;
pub(crate) mod list_options;
mod options;
mod patch;
mod paths;
mod subresource;
mod update;
mod watch;

use std::sync::Arc;

use futures::future::BoxFuture;
use http::header::{HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Response};
use machinery::StatusError;
use machinery::status::Reason;

pub(crate) use call::Call;

use crate::aggregate::elsewhere;
use crate::audit::Trail;
use crate::codec;
use crate::request::{RequestInfo, UserInfo};
use crate::resource::{Body, Resource};
use crate::shared::Shared;

type Handler = fn(Call, Body) -> BoxFuture<'static, Result<Response<Body>, StatusError>>;

/// Verbs of [`RequestInfo`] and their handlers.
const VERBS: &[(&str, Handler)] = &[
    ("get", |call, _| Box::pin(get::get(call))),
    ("list", |call, _| Box::pin(list::list(call))),
    ("watch", |call, _| Box::pin(watch::watch(call))),
    ("create", |call, body| Box::pin(create::create(call, body))),
    ("update", |call, body| Box::pin(update::update(call, body))),
    ("patch", |call, body| Box::pin(patch::patch(call, body))),
    ("delete", |call, body| Box::pin(delete::delete(call, body))),
    ("deletecollection", |call, body| Box::pin(delete::delete_collection(call, body))),
];

pub(crate) async fn dispatch(
    shared: &Arc<Shared>,
    info: &Arc<RequestInfo>,
    user: UserInfo,
    parts: Parts,
    body: Body,
) -> Result<Response<Body>, StatusError> {
    let aggregator = shared.options.aggregator.as_ref();
    if let Some(aggregator) = aggregator
        && let Some((group, version)) = elsewhere(Some(aggregator), parts.uri.path())
    {
        let request = Request::from_parts(parts, body);
        return Ok(aggregator.pass(&shared.registry, &user, &group, &version, request).await);
    }
    if !info.is_resource {
        return paths::serve(shared, info, parts).await;
    }
    let table = shared.registry.resources();
    let Some(row) = table.get(&info.group, &info.version, &info.resource).cloned() else {
        let is_served = table.iter().any(|row| row.group == info.group && !row.custom);
        return if is_served { Err(codec::no_route()) } else { Ok(codec::page_not_found()) };
    };
    let handler = route(&row, info, &parts.method)?;
    let call = Call::new(shared, info, user, row, table, parts)?;
    let (accept, ctx) = (call.accept, call.ctx.clone());
    let trail = Trail::of(&call.parts).cloned();
    if let Some(text) = &ctx.resource.deprecation {
        crate::metrics::families::requested_deprecated(&ctx.resource, &ctx.subresource, text);
        ctx.warn(&**text);
        ctx.annotate("k8s.io/deprecated", "true");
    }
    let outcome = match handler {
        Route::Verb(handler) => handler(call, body).await,
        Route::Subresource => subresource::serve(call, body).await,
    };
    let mut response = outcome.unwrap_or_else(|error| codec::error(&accept, &error));
    if let Some(trail) = trail {
        trail.annotate_all(ctx.annotations());
    }
    for warning in ctx.take_warnings() {
        add_warning(&mut response, &warning);
    }
    Ok(response)
}

enum Route {
    Verb(Handler),
    Subresource,
}

/// Finds the handler of a request, or returns why there is none.
fn route(row: &Resource, info: &RequestInfo, method: &Method) -> Result<Route, StatusError> {
    let is_namespace = info.group.is_empty() && info.resource == "namespaces";
    if !info.namespace.is_empty() && !row.namespaced && !is_namespace {
        return Err(codec::no_route());
    }
    // Legacy paths: none has a proxy any more, and a watch is always read.
    if info.verb == "proxy" {
        return Err(codec::no_route());
    }
    if info.verb == "watch" && *method != Method::GET {
        return Err(no_method());
    }
    let by_verb = VERBS.iter().find(|(verb, _)| *verb == info.verb);
    if !info.subresource.is_empty() {
        let subresource = row.subresource(&info.subresource).ok_or_else(codec::no_route)?;
        if subresource.name == "proxy" {
            // The target of the proxy decides about methods.
            return Ok(Route::Subresource);
        }
        let is_method = !matches!(*method, Method::HEAD | Method::OPTIONS);
        return match by_verb {
            Some((verb, _)) if is_method && subresource.verbs.contains(verb) => {
                Ok(Route::Subresource)
            }
            _ => Err(no_method()),
        };
    }
    let on_collection =
        matches!(info.verb.as_str(), "list" | "watch" | "create" | "deletecollection");
    let everywhere = row.namespaced && info.namespace.is_empty();
    // Kinds that are only created have no path without a namespace.
    if everywhere && ((!on_collection && !info.name.is_empty()) || !row.allows("list")) {
        return Err(codec::no_route());
    }
    let has_place = match info.verb.as_str() {
        "list" | "watch" => true,
        "create" => info.name.is_empty() && !everywhere,
        "deletecollection" => !everywhere,
        _ => !info.name.is_empty(),
    };
    match by_verb {
        Some((verb, handler)) if has_place && row.allows(verb) && *method != Method::HEAD => {
            Ok(Route::Verb(*handler))
        }
        _ => Err(no_method()),
    }
}

pub(crate) fn no_method() -> StatusError {
    let message = "the server does not allow this method on the requested resource";
    StatusError::new(Reason::MethodNotAllowed, message)
}

/// `Warning: 299 - "text"`.
fn add_warning(response: &mut Response<Body>, text: &str) {
    const WARNING: HeaderName = HeaderName::from_static("warning");
    let quoted = text.replace('\\', "\\\\").replace('"', "\\\"").replace(['\n', '\r'], " ");
    if let Ok(value) = HeaderValue::try_from(format!("299 - \"{quoted}\"").into_bytes()) {
        response.headers_mut().append(WARNING, value);
    }
}
