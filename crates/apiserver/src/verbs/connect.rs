//! Byte streams: `exec`, `attach`, `portforward`, `proxy`, `log`. The handler itself speaks HTTP.

use http::{Request, Response};
use machinery::StatusError;
use machinery::object::Unstructured;
use serde_json::Value;

use super::Call;
use crate::query::Query;
use crate::resource::{Body, Connect};

/// Boolean fields of the options kinds (`PodExecOptions`, `NodeProxyOptions`).
const FLAGS: [&str; 4] = ["stdin", "stdout", "stderr", "tty"];
const LISTS: [&str; 1] = ["command"];
const NUMBER_LISTS: [&str; 1] = ["ports"];
const TEXTS: [&str; 1] = ["container"];

pub async fn connect(
    call: Call,
    handler: &dyn Connect,
    body: Body,
) -> Result<Response<Body>, StatusError> {
    let key = call.key();
    // Reading a log is a read; the others give access to the pod, which admission may refuse.
    if call.info.subresource != "log" {
        let options = Box::new(options_object(&call));
        call.registry().admit_connect(&call.ctx, &key, options).await?;
    }
    let registry = call.shared.registry.clone();
    let request = Request::from_parts(call.parts, body);
    handler.connect(&registry, &call.ctx, &key, request).await
}

/// The object for admission: the query as an object of the subresource's own kind.
fn options_object(call: &Call) -> Unstructured {
    let sub = call.row.subresource(&call.info.subresource);
    let kind = sub.and_then(|sub| sub.kind);
    let (api_version, kind) = match kind {
        Some(kind) if kind.group.is_empty() => (kind.version.to_owned(), kind.kind.to_owned()),
        Some(kind) => (format!("{}/{}", kind.group, kind.version), kind.kind.to_owned()),
        None => (call.row.api_version(), call.row.kind.clone()),
    };
    let mut fields = option_fields(&call.query);
    if !call.info.rest.is_empty() {
        fields.insert("path".into(), call.info.rest.clone().into());
    }
    Unstructured { api_version, kind, metadata: Default::default(), fields }
}

fn option_fields(query: &Query) -> serde_json::Map<String, Value> {
    let mut fields = serde_json::Map::new();
    for name in FLAGS {
        if query.flag(name) {
            fields.insert(name.into(), true.into());
        }
    }
    for name in TEXTS {
        if let Some(text) = query.first(name) {
            fields.insert(name.into(), text.into());
        }
    }
    for name in LISTS {
        let all: Vec<Value> = query.all(name).map(Value::from).collect();
        if !all.is_empty() {
            fields.insert(name.into(), all.into());
        }
    }
    for name in NUMBER_LISTS {
        let all = query.all(name).flat_map(|text| text.split(','));
        let all: Vec<Value> =
            all.filter_map(|text| text.parse::<i64>().ok()).map(Value::from).collect();
        if !all.is_empty() {
            fields.insert(name.into(), all.into());
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admission_sees_the_query_as_options() {
        let query = Query::parse("stdin=true&tty=0&container=c&command=sh&command=-c&ports=80");
        assert_eq!(
            Value::Object(option_fields(&query)),
            serde_json::json!({"stdin": true, "container": "c", "command": ["sh", "-c"], "ports": [80]})
        );
    }
}
