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
use apiserver::openapi::SchemaSource;
use arc_swap::ArcSwap;
use base::task::Tasks;

/// The schemas of all kinds, built-in and custom. Made before the server, which asks it; filled by
/// [`Extensions::start`].
#[derive(Clone, Default)]
pub struct Extensions {
    published: Arc<ArcSwap<openapi::PublishedKinds>>,
}

impl Extensions {
    pub fn new() -> Self {
        Self::default()
    }

    /// A schema source that knows the custom kinds, too.
    pub fn schemas(&self, built_in: Arc<dyn SchemaSource>) -> Arc<dyn SchemaSource> {
        Arc::new(openapi::Schemas::new(built_in, self.published.clone()))
    }

    /// Serves what the CRDs in the store say, and follows them until the tasks end. The rows of
    /// established CRDs are there when this returns.
    pub async fn start(&self, registry: &Registry, tasks: &Tasks) {
        controller::start(registry.clone(), self.published.clone(), tasks).await;
    }
}
