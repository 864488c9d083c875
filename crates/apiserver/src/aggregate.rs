//! Aggregated API servers: the interface of this crate to the code that knows them (crate `extensions`,
//! from APIService objects).
//!
//! In: requests for `/apis/GROUP/VERSION/…` that passed the filters. Out: the other server's answers.
//! Discovery and OpenAPI contain its resources beside the local ones.

use std::sync::Arc;

use async_trait::async_trait;
use http::{Request, Response};
use serde_json::Value;

use crate::Registry;
use crate::request::UserInfo;
use crate::resource::Body;

/// A group's version that another server serves.
#[derive(Clone, Debug, PartialEq)]
pub struct Remote {
    pub group: String,
    pub version: String,
    /// Groups with a higher priority are listed first.
    pub group_priority: i32,
    pub version_priority: i32,
    /// As in aggregated discovery; if the server is unavailable, those of its last answer.
    pub resources: Vec<Value>,
    pub is_available: bool,
}

#[async_trait]
pub trait Aggregator: Send + Sync {
    /// All remote versions. The registry's generation changes when they do.
    fn remotes(&self) -> Arc<Vec<Remote>>;

    /// Forwards a request to the server of a group's version, on behalf of the user.
    async fn pass(
        &self,
        registry: &Registry,
        user: &UserInfo,
        group: &str,
        version: &str,
        request: Request<Body>,
    ) -> Response<Body>;
}

/// The group and version of a path `/apis/GROUP/VERSION/…`, or of their OpenAPI document, if another server
/// serves them.
pub(crate) fn elsewhere(
    aggregator: Option<&Arc<dyn Aggregator>>,
    path: &str,
) -> Option<(String, String)> {
    let aggregator = aggregator?;
    let path = path.strip_prefix("/openapi/v3").unwrap_or(path);
    let mut parts = path.strip_prefix("/apis/")?.split('/');
    let (group, version) = (parts.next()?, parts.next()?);
    let remotes = aggregator.remotes();
    let found = remotes.iter().any(|remote| remote.group == group && remote.version == version);
    found.then(|| (group.to_owned(), version.to_owned()))
}
