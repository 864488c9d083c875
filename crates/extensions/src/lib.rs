//! Extensions of the API: CustomResourceDefinitions and the rows that they stand for.
//!
//! ```text
//!  CRDs ► definition (row, validation) ► controller (names, rows, cleanup) ► the resource table
//!                                             └► openapi (what the rows' kinds look like)
//!  instances ► custom (codec, strategy, conversion) ◄ schema (normal form, validation)
//! ```
//!
//! In: a registry. Out: rows that come and go while it runs. Custom resources take the same write
//! path as all others; this crate says only how their kinds behave.

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

pub use custom::Post;

/// The schemas of all kinds, built-in and custom. Made before the server, which asks it; filled by
/// [`Extensions::start`].
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

    /// A schema source that knows the custom kinds, too.
    pub fn schemas(&self, built_in: Arc<dyn SchemaSource>) -> Arc<dyn SchemaSource> {
        Arc::new(openapi::Schemas::new(built_in, self.published.clone()))
    }

    /// Serves what the CRDs in the store say, and follows them until the tasks end. The rows of
    /// established CRDs are there when this returns.
    pub async fn start(&self, registry: &Registry, tasks: &Tasks) {
        let (published, post) = (self.published.clone(), self.post.clone());
        controller::start(registry.clone(), published, post, tasks).await;
    }
}
