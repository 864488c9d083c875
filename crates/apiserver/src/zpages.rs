//! `/statusz` and `/flagz`: the server's version, uptime and flags.
//!
//! In: the `Accept` header. Out: plain text, or a `config.k8s.io` object if the client requests its kind.
//! Upstream: `pkg/server/statusz`, `pkg/server/flagz`.

use std::fmt::Write;

use http::header::{CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, Response, StatusCode};
use machinery::StatusError;
use machinery::status::Reason;
use release::features::{self, Feature};
use serde_json::{Value, json};

use crate::codec::negotiate::{Clause, clauses};
use crate::codec::{self, Accept, Media, cbor};
use crate::resource::Body;
use crate::shared::Shared;

const COMPONENT: &str = "kube-apiserver";
const GROUP: &str = "config.k8s.io";
const WARNING: &str = "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for debugging purposes only.";
/// Paths that are not listed, because they are not for debugging.
const UNTOLD: &[&str] = &["/apis", "/api", "/openid", "/openapi", "/.well-known"];

struct Page {
    kind: &'static str,
    gate: Feature,
    text: fn(&Shared) -> String,
    json: fn(&Shared) -> Value,
}

const PAGES: &[(&str, Page)] = &[
    (
        "/flagz",
        Page {
            kind: "Flagz",
            gate: Feature::ComponentFlagz,
            text: flags_text,
            json: |shared| json!({ "flags": flags(shared) }),
        },
    ),
    (
        "/statusz",
        Page {
            kind: "Statusz",
            gate: Feature::ComponentStatusz,
            text: status_text,
            json: status_json,
        },
    ),
];

/// The page at a path, if there is one.
pub fn serve(shared: &Shared, path: &str, headers: &HeaderMap) -> Option<Response<Body>> {
    let (_, page) = PAGES.iter().find(|(at, page)| *at == path && features::enabled(page.gate))?;
    for clause in clauses(headers) {
        match clause.media {
            "*/*" | "text/*" | "text/plain" => {
                return Some(codec::text(StatusCode::OK, (page.text)(shared)));
            }
            name => {
                let version = version(&clause, page.kind);
                if let Some((media, version)) = media(name).zip(version) {
                    return Some(object(shared, page, version, media));
                }
            }
        }
    }
    let types = if cbor::is_served() {
        "application/json, application/yaml, text/plain, application/cbor"
    } else {
        "application/json, application/yaml, text/plain"
    };
    let message = format!("only the following media types are accepted: {types}");
    let error = StatusError::new(Reason::NotAcceptable, message).without_details();
    Some(codec::error(&Accept::JSON, &error))
}

/// Encodings of the objects.
fn media(name: &str) -> Option<Media> {
    match name {
        "application/json" => Some(Media::Json),
        "application/yaml" => Some(Media::Yaml),
        cbor::MEDIA_TYPE if cbor::is_served() => Some(Media::Cbor),
        _ => None,
    }
}

/// The version of the object that a clause requests.
fn version(clause: &Clause<'_>, kind: &str) -> Option<&'static str> {
    let is_kind = clause.param("as") == Some(kind) && clause.param("g") == Some(GROUP);
    let wanted = clause.param("v").filter(|_| is_kind)?;
    ["v1beta1", "v1alpha1"].into_iter().find(|version| *version == wanted)
}

fn object(shared: &Shared, page: &Page, version: &str, media: Media) -> Response<Body> {
    let mut json = json!({
        "kind": page.kind,
        "apiVersion": format!("{GROUP}/{version}"),
        "metadata": { "name": COMPONENT },
    });
    if let (Some(object), Value::Object(more)) = (json.as_object_mut(), (page.json)(shared)) {
        object.extend(more);
    }
    let accept = Accept { media, ..Accept::JSON };
    let mut response = codec::json(&accept, StatusCode::OK, json.to_string().into());
    let kind = format!("{};g={GROUP};v={version};as={}", media.content_type(), page.kind);
    let kind = HeaderValue::from_str(&kind).expect("a media type");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

fn status_text(shared: &Shared) -> String {
    let status = status_json(shared);
    let up = status["uptimeSeconds"].as_u64().unwrap_or_default();
    let text = |name: &str| status[name].as_str().unwrap_or_default().to_owned();
    let paths: Vec<&str> =
        status["paths"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    format!(
        "\n{COMPONENT} statusz\n{WARNING}\n\nStarted: {}\nUp: {} hr {:02} min {:02} sec\nGo version: {}\nBinary version: {}\nEmulation version: {}\nPaths: {}\n",
        text("startTime"),
        up / 3600,
        up / 60 % 60,
        up % 60,
        text("goVersion"),
        text("binaryVersion"),
        text("emulationVersion"),
        paths.join(" "),
    )
}

fn status_json(shared: &Shared) -> Value {
    let version = &shared.options.version;
    let mut paths: Vec<String> = shared
        .paths()
        .iter()
        .filter_map(|path| {
            Some(format!("/{}", path.split('/').nth(1).filter(|part| !part.is_empty())?))
        })
        .filter(|folder| !UNTOLD.contains(&folder.as_str()))
        .collect();
    paths.dedup();
    let up = base::clock::now().duration_since(shared.started).as_secs().max(0);
    json!({
        "startTime": shared.started.to_string(),
        "uptimeSeconds": up,
        "goVersion": "none",
        "binaryVersion": format!("{}.{}.2", version.major, version.minor),
        "emulationVersion": format!("{}.{}", version.major, version.minor),
        "paths": paths,
    })
}

fn flags_text(shared: &Shared) -> String {
    let mut out = format!("\n{COMPONENT} flagz\n{WARNING}\n\n");
    for (name, value) in flags(shared).as_object().into_iter().flatten() {
        let _ = writeln!(out, "{name}={}", value.as_str().unwrap_or_default());
    }
    out
}

/// The flags that configure this crate.
fn flags(shared: &Shared) -> Value {
    let options = &shared.options;
    json!({
        "anonymous-auth": options.anonymous.to_string(),
        "enable-priority-and-fairness": options.fairness.to_string(),
        "max-mutating-requests-inflight": options.writes_in_flight.to_string(),
        "max-requests-inflight": options.reads_in_flight.to_string(),
        "min-request-timeout": options.min_watch.as_secs().to_string(),
        "request-timeout": format!("{}s", options.request_timeout.as_secs()),
    })
}
