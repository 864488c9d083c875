//! An API server for tests: a function from requests to answers.
//!
//! In: what the test says about a request; `None` is 404. Out: a client. Watches tell nothing, ever.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use client::Client;
use futures::stream;
use http::{Method, Request, Response, header};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use serde_json::{Value, json};

/// What a test sees of a request.
pub struct Asked {
    pub method: Method,
    pub uri: http::Uri,
    pub accept: String,
}

impl Asked {
    pub fn path(&self) -> &str {
        self.uri.path()
    }

    /// The value of a query parameter.
    pub fn query(&self, name: &str) -> Option<&str> {
        let pairs = self.uri.query().unwrap_or_default().split('&');
        pairs
            .filter_map(|pair| pair.split_once('='))
            .find(|(key, _)| *key == name)
            .map(|pair| pair.1)
    }
}

pub fn client(answer: impl Fn(&Asked) -> Option<Value> + Send + Sync + 'static) -> Client {
    let answer = Arc::new(answer);
    let service = tower::service_fn(move |request: Request<_>| {
        let answer = answer.clone();
        async move { Ok::<_, Infallible>(respond(request, &*answer)) }
    });
    Client::new(service, "test")
}

fn respond<B>(
    request: Request<B>,
    answer: &impl Fn(&Asked) -> Option<Value>,
) -> Response<UnsyncBoxBody<Bytes, Infallible>> {
    let (parts, _) = request.into_parts();
    let accept = parts.headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let accept = accept.unwrap_or_default().to_owned();
    let asked = Asked { method: parts.method, uri: parts.uri, accept };
    if asked.query("watch").is_some() {
        let nothing = stream::pending::<Result<Frame<Bytes>, Infallible>>();
        return Response::new(StreamBody::new(nothing).boxed_unsync());
    }
    let (code, value) = match answer(&asked) {
        Some(value) => (200, value),
        None => {
            (404, json!({"kind": "Status", "code": 404, "reason": "NotFound", "message": "none"}))
        }
    };
    let body = Full::new(Bytes::from(value.to_string())).boxed_unsync();
    Response::builder().status(code).body(body).expect("a response")
}
