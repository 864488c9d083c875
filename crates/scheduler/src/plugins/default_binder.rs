//! Binds through the API's `/binding` subresource.

use std::sync::Arc;

use client::{Client, Gvr};
use futures::future::BoxFuture;
use http::Method;
use serde_json::json;

use crate::error::BindError;
use crate::framework::{Bind, ExtensionPoints, Row};
use crate::pod::PodInfo;

pub const ROW: Row = Row {
    name: "DefaultBinder",
    weight: 0,
    build: |handle| ExtensionPoints {
        bind: Some(Arc::new(DefaultBinder { client: handle.client.clone() })),
        ..Default::default()
    },
    hint: super::hints::never,
};

struct DefaultBinder {
    client: Client,
}

impl Bind for DefaultBinder {
    fn bind<'a>(&'a self, pod: &'a PodInfo, node: &'a str) -> BoxFuture<'a, Result<(), BindError>> {
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding",
            "metadata": {"name": pod.key.name, "namespace": pod.key.namespace, "uid": pod.uid},
            "target": {"kind": "Node", "name": node},
        });
        Box::pin(async move {
            let pods = Gvr::new("", "v1", "pods");
            let path = format!("{}/binding", pods.object(Some(&pod.key.namespace), &pod.key.name));
            let body = binding.to_string();
            self.client.call(Method::POST, &path, "application/json", body).await?;
            Ok(())
        })
    }
}
