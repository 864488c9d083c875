//! Binding: `POST …/bindings` assigns a pod to a node by the Binding's own name.

use std::sync::Arc;

use apiserver::Registry;
use apiserver::request::{Key, RequestContext};
use apiserver::resource::{CreateHandler, Created, Review, Storage};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Binding, Pod};
use machinery::{Object, StatusError};

use super::pod::actions::Bind;
use crate::kind::Kind;

pub(crate) static KIND: Kind<Binding> = Kind {
    unstored: Some(|| Storage::Review(Arc::new(Bindings))),
    verbs: &["create"],
    ..Kind::BASE
};

struct Bindings;

#[async_trait]
impl Review for Bindings {
    async fn review(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        object: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        let key = Key::new(object.namespace(), object.name());
        let mut inner = ctx.clone();
        inner.resource = registry.row_of::<Pod>();
        inner.subresource = "binding".into();
        Bind.create(registry, &inner, &key, object).await
    }
}
