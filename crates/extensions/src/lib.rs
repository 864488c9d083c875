//! Extensions of the API: CustomResourceDefinitions and the kinds that they register.
//!
//! ```text
//!  CRDs ► definition (strategy, validation) ► controller (names, kinds, cleanup) ► resource table
//!                                             └► openapi (the kinds' schemas)
//!  instances ► custom (codec, strategy, conversion) ◄ schema (normal form, validation)
//! ```
//!
//! In: a registry. Out: kinds that are registered and removed while it runs. Custom resources take the
//! same write path as all others. This crate only has their strategy.

pub mod aggregation;
mod controller;
pub mod custom;
pub mod definition;
mod names;
pub mod openapi;
pub mod schema;

use std::sync::Arc;

use apiserver::Registry;
use apiserver::schemas::SchemaSource;
use arc_swap::ArcSwap;
use base::task::Tasks;

pub use custom::{Post, PostError};

/// The schemas of all kinds, built-in and custom. Created before the server, which reads it, and filled
/// by [`Extensions::start`].
#[derive(Clone)]
pub struct Extensions {
    published: Arc<ArcSwap<openapi::PublishedKinds>>,
    post: Post,
}

impl Extensions {
    /// `post` calls conversion webhooks.
    pub fn new(post: Post) -> Self {
        Self { published: Arc::default(), post }
    }

    /// A schema source that includes custom kinds.
    pub fn schemas(&self, built_in: Arc<dyn SchemaSource>) -> Arc<dyn SchemaSource> {
        Arc::new(openapi::Schemas::new(built_in, self.published.clone()))
    }

    /// Serves the CRDs in the store, and follows them until the tasks end. Established CRDs are registered
    /// when this returns.
    pub async fn start(&self, registry: &Registry, tasks: &Tasks) {
        let (published, post) = (self.published.clone(), self.post.clone());
        controller::start(registry.clone(), published, post, tasks).await;
    }
}
