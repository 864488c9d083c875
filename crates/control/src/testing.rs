//! An API server's registry for tests: all rows, a simulated store, kubelets that are not there.

use std::sync::Arc;

use apiserver::Registry;
use apiserver::admission::Chain;
use apiserver::registry::Intent;
use apiserver::request::{Key, RequestContext};
use apiserver::resource::{CreateHandler, Created};
use async_trait::async_trait;
use base::task::Tasks;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use machinery::object::{Codec, Typed};
use machinery::{Object, StatusError};
use serde_json::{Value, from_value, json};
use transport::{ClientOptions, HttpClient};

use crate::kubelets::Kubelets;

struct NoTokens;

#[async_trait]
impl CreateHandler for NoTokens {
    fn codec(&self) -> &dyn Codec {
        static CODEC: Typed<TokenRequest> = Typed::new();
        &CODEC
    }

    async fn create(
        &self,
        _: &Registry,
        _: &RequestContext,
        _: &Key,
        _: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        Ok(Created::Success)
    }
}

pub(crate) fn registry(tasks: &Tasks) -> Registry {
    let options = ClientOptions { insecure: true, ..ClientOptions::default() };
    let http = HttpClient::new(&options).expect("a client without server is valid");
    let table = resources::table(resources::Options {
        schema: Some(Arc::new(api::facts::Facts)),
        node_ports: 30_000..=30_001,
        connections: crate::connections(&Arc::new(Kubelets::new(http.clone(), http))),
        tokens: Arc::new(NoTokens),
        is_on: Box::new(|_| false),
        allow_privileged: true,
        event_ttl: std::time::Duration::from_secs(3600),
    });
    Registry::new(store::Sim::open(), table, Chain::default(), tasks.clone())
}

/// With a range that Services get their addresses from.
pub(crate) async fn with_range() -> Registry {
    let registry = registry(&Tasks::new("test"));
    let cidr = json!({"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/24"]}});
    let cidr: ServiceCIDR = from_value(cidr).expect("a range");
    let ctx = registry.own_context::<ServiceCIDR>();
    let intent = Intent::Create { object: Box::new(cidr) };
    registry.write(&ctx, &Key::new("", "kubernetes"), intent).await.expect("written");
    registry
}

pub(crate) async fn write(registry: &Registry, intent: Intent) -> Result<(), StatusError> {
    let ctx = registry.own_context::<Service>();
    let key = match &intent {
        Intent::Create { object } | Intent::Update { object } => Key::new("ns", object.name()),
        _ => unreachable!("only these are tried"),
    };
    registry.write(&ctx, &key, intent).await.map(drop)
}

pub(crate) fn service(name: &str, spec: Value) -> Box<Service> {
    let service = json!({"metadata": {"name": name, "namespace": "ns"}, "spec": spec});
    Box::new(from_value(service).expect("a Service"))
}
