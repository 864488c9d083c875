//! What browsers look at: CORS for scripts of other origins, and Strict-Transport-Security.
//!
//! In: `--cors-allowed-origins`, `--strict-transport-security-directives`, a request's `Origin`. Out:
//! headers of the answer; the whole answer to a preflight request, before authentication.
//! Upstream: `apiserver/pkg/server/filters/{cors,hsts}.go`.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use regex_lite::Regex;

use crate::codec;
use crate::error::ConfigError;
use crate::resource::Body;

const HEADERS: &[(HeaderName, &str)] = &[
    (header::ACCESS_CONTROL_ALLOW_METHODS, "POST, GET, OPTIONS, PUT, DELETE, PATCH"),
    (
        header::ACCESS_CONTROL_ALLOW_HEADERS,
        "Content-Type, Content-Length, Accept-Encoding, X-CSRF-Token, Authorization, X-Requested-With, If-Modified-Since",
    ),
    (header::ACCESS_CONTROL_EXPOSE_HEADERS, "Date"),
    (header::ACCESS_CONTROL_ALLOW_CREDENTIALS, "true"),
];

/// The settings for browsers; none by default.
#[derive(Clone, Debug, Default)]
pub struct Browsers {
    origins: Vec<Regex>,
    transport_security: Option<HeaderValue>,
}

impl Browsers {
    /// # Errors
    /// Upstream's, for each wrong value.
    pub fn new(origins: &[String], directives: &[String]) -> Result<Self, ConfigError> {
        let mut expressions = vec![];
        for origin in origins {
            expressions.push(Regex::new(origin).map_err(ConfigError::Origin)?);
            if !is_pinned(origin) {
                return Err(ConfigError::LooseOrigin);
            }
        }
        for directive in directives {
            check_directive(directive)?;
        }
        let all = directives.join("; ");
        let transport_security = (!all.is_empty()).then(|| HeaderValue::from_str(&all));
        Ok(Self { origins: expressions, transport_security: transport_security.transpose()? })
    }

    /// The request's origin, if scripts of it may read answers.
    pub(crate) fn origin<B>(&self, request: &Request<B>) -> Option<HeaderValue> {
        let origin = request.headers().get(header::ORIGIN).filter(|_| !self.origins.is_empty())?;
        let text = origin.to_str().ok()?;
        self.origins.iter().any(|one| one.is_match(text)).then(|| origin.clone())
    }

    /// Adds the headers for the origin, and those for all.
    pub(crate) fn mark(&self, origin: Option<HeaderValue>, headers: &mut HeaderMap) {
        if let Some(directives) = &self.transport_security {
            headers.entry(header::STRICT_TRANSPORT_SECURITY).or_insert_with(|| directives.clone());
        }
        let Some(origin) = origin else { return };
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        for (name, value) in HEADERS {
            headers.insert(name, HeaderValue::from_static(value));
        }
    }
}

/// The answer to a preflight request.
pub(crate) fn preflight<B>(
    origin: Option<&HeaderValue>,
    request: &Request<B>,
) -> Option<Response<Body>> {
    let is_preflight = origin.is_some() && request.method() == Method::OPTIONS;
    is_preflight.then(|| {
        let mut response = Response::new(codec::full(""));
        *response.status_mut() = StatusCode::NO_CONTENT;
        response
    })
}

/// An expression that pins neither end of the host matches other hosts, too (CVE-2022-1996).
fn is_pinned(expression: &str) -> bool {
    let has = |marks: [&str; 2]| marks.iter().any(|mark| expression.contains(mark));
    has(["^", "//"]) && has(["$", ":"])
}

fn check_directive(directive: &str) -> Result<(), ConfigError> {
    if directive.trim().is_empty() {
        return Err(ConfigError::NoDirective);
    }
    let is_age = matches!(directive.split('=').collect::<Vec<_>>()[..], ["max-age", _]);
    match is_age || ["includeSubDomains", "preload"].contains(&directive) {
        true => Ok(()),
        false => Err(ConfigError::Directive),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn origins_get_headers_and_preflights_an_answer() {
        let browsers =
            Browsers::new(&texts(&["^https://a\\.example$"]), &texts(&["max-age=60", "preload"]));
        let browsers = browsers.expect("valid");
        let check = |origin: &str, method: Method, allowed: bool, ends: bool| {
            let request = Request::builder().method(method).header("Origin", origin);
            let request = request.body(()).expect("a request");
            let found = browsers.origin(&request);
            assert_eq!(found.is_some(), allowed, "{origin}");
            assert_eq!(preflight(found.as_ref(), &request).is_some(), ends, "{origin}");
            let mut headers = HeaderMap::new();
            browsers.mark(found, &mut headers);
            assert_eq!(headers["strict-transport-security"], "max-age=60; preload");
            assert_eq!(headers.contains_key("access-control-allow-origin"), allowed);
            assert_eq!(headers.contains_key("access-control-allow-methods"), allowed);
        };
        check("https://a.example", Method::GET, true, false);
        check("https://a.example", Method::OPTIONS, true, true);
        check("https://b.example", Method::OPTIONS, false, false);
        check("https://a.example.evil", Method::GET, false, false);
    }

    #[test]
    fn wrong_values_are_refused() {
        let check = |origins: &[&str], directives: &[&str], expected: &str| {
            let error =
                Browsers::new(&texts(origins), &texts(directives)).expect_err("wrong").to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(&["a"], &[], "does not pin to start/end");
        check(&["^("], &[], "--cors-allowed-origins has an invalid regular expression");
        check(&[], &[" "], "empty value in strict-transport-security-directives");
        check(&[], &["max-age"], "allowed values: max-age=expireTime");
    }
}
