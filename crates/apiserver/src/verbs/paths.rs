//! Paths other than resources: health, version, metrics, discovery, OpenAPI.

use std::sync::Arc;

use http::header::{ACCEPT, CONTENT_TYPE, HeaderValue};
use http::request::Parts;
use http::{HeaderMap, Method, Response, StatusCode};
use machinery::StatusError;
use machinery::status::Reason;
use serde_json::json;

use super::no_method;
use crate::codec::cbor;
use crate::codec::negotiate::{Messages, Offer, Speaks, clauses, negotiate};
use crate::codec::protobuf::Protobuf;
use crate::codec::{self, Accept};
use crate::health::Health;
use crate::limiter::Limiter;
use crate::options::Page;
use crate::query::Query;
use crate::request::RequestInfo;
use crate::resource::Body;
use crate::shared::Shared;
use crate::zpages;

/// Paths that exist without a slash at the end only.
const EXACT: &[&str] = &["/healthz", "/livez", "/readyz", "/metrics", "/openapi/"];

pub async fn serve(
    shared: &Arc<Shared>,
    info: &RequestInfo,
    parts: Parts,
) -> Result<Response<Body>, StatusError> {
    let path = info.path.as_str();
    let query = Query::of(&parts.uri);
    if path.ends_with('/') && EXACT.iter().any(|head| path.starts_with(head)) {
        return Ok(codec::page_not_found());
    }
    if let Some(response) = shared.health.serve(path, &query).await {
        return Ok(response);
    }
    if let Some(page) = shared.options.pages.iter().find(|page| page.path == path) {
        only_get(&parts)?;
        return document(page, &parts.headers);
    }
    if let Some(response) = zpages::serve(shared, path, &parts.headers) {
        return Ok(response);
    }
    if path.starts_with("/openapi/") {
        return Ok(shared.openapi.serve(
            &shared.registry,
            shared.options.aggregator.as_deref(),
            path,
            &parts.headers,
        ));
    }
    match path.trim_end_matches('/') {
        "" | "/index.html" => {
            let paths = json!({ "paths": shared.paths() });
            Ok(codec::json(&Accept::JSON, StatusCode::OK, paths.to_string().into()))
        }
        "/version" => {
            only_get(&parts)?;
            version(shared, &parts)
        }
        REVISION => {
            only_get(&parts)?;
            revision_at(shared, &query).await
        }
        "/metrics" => {
            let mut page = shared.metrics.encode();
            shared.registry.encode_space(&mut page).await;
            base::metrics::encode_registered(&mut page);
            Ok(figures(page))
        }
        "/metrics/resources" => {
            let page = shared.metrics.encode_resources();
            Ok(page.map_or_else(codec::page_not_found, figures))
        }
        "/metrics/slis" => Ok(figures(Health::slis([&shared.health]))),
        path if path.starts_with("/debug/api_priority_and_fairness/") => {
            let page = match &shared.limiter {
                Limiter::Fair(fairness) => fairness.dump(path),
                Limiter::InFlight(_) => None,
            };
            Ok(page.map_or_else(codec::page_not_found, |page| codec::text(StatusCode::OK, page)))
        }
        path if path == "/api"
            || path == "/apis"
            || path.starts_with("/api/")
            || path.starts_with("/apis/") =>
        {
            discovery(shared, path, &query, &parts)
        }
        _ => Ok(codec::page_not_found()),
    }
}

fn discovery(
    shared: &Shared,
    path: &str,
    query: &Query,
    parts: &Parts,
) -> Result<Response<Body>, StatusError> {
    let protobuf = shared.options.protobuf.map(Protobuf);
    let protobuf = protobuf.map_or(Messages::None, Messages::All);
    let speaks = Speaks { protobuf, cbor: cbor::is_served() && is_version(shared, path) };
    let accept = negotiate(&parts.headers, query, Offer::Object, speaks);
    let answer =
        shared.discovery.serve(&shared.registry, &shared.options, path, &parts.headers, accept);
    // Upstream answers every method for the list of groups, for a group, and for what is not there.
    if !is_group(path) && answer.status() != StatusCode::NOT_FOUND {
        only_get(parts)?;
    }
    Ok(answer)
}

/// Whether the path is discovery of a version, which has the encodings of its resources. For custom groups
/// it has only the common encodings.
fn is_version(shared: &Shared, path: &str) -> bool {
    match *path.trim_end_matches('/').split('/').collect::<Vec<_>>() {
        ["", "api", _] => true,
        ["", "apis", group, _] => {
            shared.registry.resources().iter().any(|row| !row.custom && row.group == group)
        }
        _ => false,
    }
}

fn document(page: &Page, headers: &HeaderMap) -> Result<Response<Body>, StatusError> {
    if !accepts(headers, page.content_type) {
        return Err(not_routed(page.content_type));
    }
    Ok(codec::respond(StatusCode::OK, page.content_type, codec::full(page.body.clone())))
}

fn not_routed(served: &str) -> StatusError {
    let message = format!("406: Not Acceptable\n\nAvailable representations: {served}");
    StatusError::new(Reason::NotAcceptable, message)
}

fn figures(text: String) -> Response<Body> {
    let mut response = codec::text(StatusCode::OK, text);
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

/// Not an upstream path: `?time=2026-01-31T12:00:00Z` returns the revision of that time, which a list accepts
/// as its exact resourceVersion.
const REVISION: &str = "/decapod/revision";

async fn revision_at(shared: &Shared, query: &Query) -> Result<Response<Body>, StatusError> {
    let text = query.first("time").unwrap_or_default();
    let wrong = || {
        let message =
            format!("time: {text:?} is invalid; expected a time such as 2026-01-31T12:00:00Z");
        StatusError::new(Reason::BadRequest, message)
    };
    let at: jiff::Timestamp = text.parse().map_err(|_| wrong())?;
    let millis = u64::try_from(at.as_millisecond()).map_err(|_| wrong())?;
    match shared.registry.store().revision_at(millis).await {
        Ok(revision) => {
            let answer = json!({ "revision": revision.to_string(), "time": at.to_string() });
            Ok(codec::json(&Accept::JSON, StatusCode::OK, answer.to_string().into()))
        }
        Err(store::Error::Compacted { floor, .. }) => {
            let message = format!(
                "the state at {at} is no longer kept; the oldest revision is {floor} (--store-history keeps more)"
            );
            Err(StatusError::new(Reason::Expired, message))
        }
        Err(error) => Err(StatusError::new(Reason::ServiceUnavailable, error.to_string())),
    }
}

/// Whether the answer may have this type. Clients without Accept take any type.
fn accepts(headers: &HeaderMap, content_type: &str) -> bool {
    if !headers.contains_key(ACCEPT) {
        return true;
    }
    // Upstream's router does not know `application/*`.
    clauses(headers).iter().any(|clause| clause.media == content_type || clause.media == "*/*")
}

/// The groups, or one of them.
fn is_group(path: &str) -> bool {
    path.strip_prefix("/apis").is_some_and(|rest| rest.matches('/').count() <= 1)
}

fn only_get(parts: &Parts) -> Result<(), StatusError> {
    if parts.method == Method::GET { Ok(()) } else { Err(no_method()) }
}

fn version(shared: &Shared, parts: &Parts) -> Result<Response<Body>, StatusError> {
    let json = Accept::JSON.media.content_type();
    if !accepts(&parts.headers, json) {
        return Err(not_routed(json));
    }
    let text = shared.options.version.json().to_string();
    // Upstream always indents this one.
    Ok(codec::json(&Accept { pretty: true, ..Accept::JSON }, StatusCode::OK, text.into()))
}
