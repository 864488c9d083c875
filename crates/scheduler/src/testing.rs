//! An API for tests: collections that never change.

use std::convert::Infallible;
use std::sync::Arc;

use base::task::Tasks;
use bytes::Bytes;
use client::{Client, Informers};
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use serde_json::{Value, json};

use crate::objects::Objects;
use crate::volumes::Volumes;

/// The lookups of plugins. The tasks that fill them end with this value.
pub struct Lookups {
    pub client: Client,
    pub informers: Informers,
    pub volumes: Volumes,
    pub objects: Objects,
}

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// A client whose server has these objects, by the plural of their kind.
pub fn client(collections: Vec<(&'static str, Vec<Value>)>) -> Client {
    let collections = Arc::new(collections);
    let service = tower::service_fn(move |request: Request<kube::client::Body>| {
        let collections = collections.clone();
        async move { Ok::<_, Infallible>(answer(&collections, &request)) }
    });
    Client::new(service, "test")
}

fn answer(
    collections: &[(&'static str, Vec<Value>)],
    request: &Request<kube::client::Body>,
) -> Response<Body> {
    if request.uri().query().unwrap_or_default().contains("watch=") {
        let nothing = futures::stream::pending::<Result<http_body::Frame<Bytes>, Infallible>>();
        return Response::new(StreamBody::new(nothing).boxed_unsync());
    }
    let plural = request.uri().path().rsplit('/').next().unwrap_or_default();
    let found = collections.iter().find(|(known, _)| *known == plural);
    let items = found.map(|(_, items)| items.as_slice()).unwrap_or_default();
    let list = json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"},
        "items": items});
    Response::new(Full::from(list.to_string()).boxed_unsync())
}

pub async fn lookups(tasks: &Tasks, collections: Vec<(&'static str, Vec<Value>)>) -> Lookups {
    let client = client(collections);
    let informers = Informers::new(client.clone(), tasks.clone());
    let (volumes, objects) = (Volumes::new(&informers), Objects::new(&informers));
    volumes.synced().await;
    objects.synced().await;
    Lookups { client, informers, volumes, objects }
}
