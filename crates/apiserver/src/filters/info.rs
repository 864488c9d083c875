//! Parses method and path of a request.
//! Upstream: `k8s.io/apiserver/pkg/endpoints/request.RequestInfoFactory`.
//!
//! ```text
//! /api/v1/namespaces/NS/pods/NAME/log      /apis/GROUP/VERSION/namespaces/NS/RESOURCE/NAME/SUB
//! /api/v1/nodes/NAME/proxy/REST            /api/v1/watch/…  (deprecated: the verb in the path)
//! ```

use base::percent;
use http::{Method, Request};

use crate::query::Query;
use crate::request::RequestInfo;

pub fn parse<B>(request: &Request<B>) -> RequestInfo {
    let path = request.uri().path();
    let verb = request.method().as_str().to_ascii_lowercase();
    let mut info = RequestInfo { path: percent::decode(path), verb, ..RequestInfo::default() };
    let mut parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let has_group = match parts.first() {
        Some(&"api") => false,
        Some(&"apis") => true,
        _ => return info,
    };
    // A version or a group itself: discovery.
    if parts.len() < if has_group { 4 } else { 3 } {
        return info;
    }
    parts.remove(0);
    if has_group {
        info.group = percent::decode(parts.remove(0));
    }
    info.version = percent::decode(parts.remove(0));
    info.is_resource = true;
    info.verb = method_verb(request.method()).into();
    if let [special @ ("watch" | "proxy"), ..] = parts[..] {
        if parts.len() < 2 {
            info.is_resource = false;
            return info;
        }
        info.verb = special.into();
        parts.remove(0);
    }
    place(&mut info, &parts, path);
    refine_verb(&mut info, &Query::of(request.uri()));
    info
}

fn method_verb(method: &Method) -> &'static str {
    match *method {
        Method::POST => "create",
        Method::GET | Method::HEAD => "get",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "",
    }
}

/// Namespace, resource, name, subresource and the rest.
fn place(info: &mut RequestInfo, parts: &[&str], path: &str) {
    let mut parts = parts;
    if let ["namespaces", namespace, rest @ ..] = parts {
        info.namespace = percent::decode(namespace);
        // These are subresources of the namespace, not resources in it.
        if !rest.is_empty() && !matches!(rest[0], "status" | "finalize") {
            parts = rest;
        }
    }
    let part =
        |index: usize| parts.get(index).map(|part| percent::decode(part)).unwrap_or_default();
    info.resource = part(0);
    info.name = part(1);
    if info.verb == "proxy" {
        info.rest = rest_after(path, parts, 2);
        return;
    }
    info.subresource = part(2);
    if info.subresource == "proxy" {
        info.rest = rest_after(path, parts, 3);
    }
}

/// The raw path after the first `count` of `parts`: it is forwarded unchanged, with all its slashes.
fn rest_after(path: &str, parts: &[&str], count: usize) -> String {
    let behind = parts.iter().skip(count).count();
    let mut rest = path.trim_end_matches('/');
    let trailing = path.len() - rest.len();
    for _ in 0..behind {
        rest = rest.rsplit_once('/').map_or("", |(before, _)| before).trim_end_matches('/');
    }
    if behind == 0 && trailing == 0 {
        return String::new();
    }
    path[rest.len()..].to_owned()
}

/// Without a name, get means list or watch, and delete means deletecollection.
fn refine_verb(info: &mut RequestInfo, query: &Query) {
    match (info.verb.as_str(), info.name.is_empty()) {
        ("get", true) => {
            info.verb = if query.flag("watch") { "watch" } else { "list" }.into();
        }
        ("delete", true) => info.verb = "deletecollection".into(),
        _ => {}
    }
    if !matches!(info.verb.as_str(), "list" | "watch" | "deletecollection") {
        return;
    }
    info.field_selector = query.first("fieldSelector").unwrap_or_default().to_owned();
    // A user who may read only one object selects it by field: authorizers check the name.
    if info.name.is_empty()
        && let Some(fields) = query.first("fieldSelector")
        && let Ok(selector) = machinery::selector::Selector::parse_fields(fields)
        && let Some(name) = selector.exact("metadata.name")
        && machinery::names::path_segment(name).is_empty()
    {
        info.name = name.to_owned();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(request: &str, expected: [&str; 8]) {
        let (method, uri) = request.split_once(' ').expect("method and path");
        let request = Request::builder().method(method).uri(uri).body(()).expect("a request");
        let info = parse(&request);
        let got = [
            &info.verb,
            &info.group,
            &info.version,
            &info.namespace,
            &info.resource,
            &info.subresource,
            &info.name,
            &info.rest,
        ];
        assert_eq!(got, expected.each_ref(), "{uri}");
        assert_eq!(info.is_resource, !info.resource.is_empty(), "{uri}");
    }

    #[test]
    fn paths_are_parsed_as_upstream() {
        check("GET /api", ["get", "", "", "", "", "", "", ""]);
        check("GET /apis/apps/v1", ["get", "", "", "", "", "", "", ""]);
        check("POST /healthz", ["post", "", "", "", "", "", "", ""]);
        check("GET /api/v1/pods", ["list", "", "v1", "", "pods", "", "", ""]);
        check("GET /api/v1/pods?watch=1", ["watch", "", "v1", "", "pods", "", "", ""]);
        check(
            "GET /api/v1/watch/namespaces/a/pods/x",
            ["watch", "", "v1", "a", "pods", "", "x", ""],
        );
        check("GET /api/v1/namespaces", ["list", "", "v1", "", "namespaces", "", "", ""]);
        check("GET /api/v1/namespaces/a", ["get", "", "v1", "a", "namespaces", "", "a", ""]);
        check(
            "PUT /api/v1/namespaces/a/finalize",
            ["update", "", "v1", "a", "namespaces", "finalize", "a", ""],
        );
        check(
            "DELETE /apis/apps/v1/namespaces/a/deployments",
            ["deletecollection", "apps", "v1", "a", "deployments", "", "", ""],
        );
        check(
            "PATCH /apis/apps/v1/namespaces/a/deployments/d/scale",
            ["patch", "apps", "v1", "a", "deployments", "scale", "d", ""],
        );
        check(
            "GET /api/v1/namespaces/a/services/s:80/proxy/x/y/",
            ["get", "", "v1", "a", "services", "proxy", "s:80", "/x/y/"],
        );
        check("GET /api/v1/nodes/n/proxy", ["get", "", "v1", "", "nodes", "proxy", "n", ""]);
        check("GET /api/v1/nodes/n/proxy/", ["get", "", "v1", "", "nodes", "proxy", "n", "/"]);
        check(
            "GET /api/v1/secrets?fieldSelector=metadata.name%3Dx&watch=true",
            ["watch", "", "v1", "", "secrets", "", "x", ""],
        );
    }
}
