//! Other servers that answer for groups of this one: what the rest of this crate asks of whoever
//! knows them (crate `extensions`, from APIService objects).
//!
//! In: requests for `/apis/GROUP/VERSION/…` that passed the filters. Out: the other server's
//! answers. Discovery and OpenAPI list what is elsewhere beside what is here.

use std::sync::Arc;

use async_trait::async_trait;
use http::{Request, Response};
use serde_json::Value;

use crate::Registry;
use crate::request::UserInfo;
use crate::resource::Body;

/// A group's version that is served elsewhere.
#[derive(Clone, Debug, PartialEq)]
pub struct Remote {
    pub group: String,
    pub version: String,
    /// Groups with a higher one are listed first.
    pub group_priority: i32,
    pub version_priority: i32,
    /// As in aggregated discovery; those of the last answer when the server is away.
    pub resources: Vec<Value>,
    pub is_available: bool,
}

#[async_trait]
pub trait Aggregator: Send + Sync {
    /// What is served elsewhere. The registry's generation changes when this does.
    fn remotes(&self) -> Arc<Vec<Remote>>;

    /// Passes a request on to the server of a group's version, on behalf of the user.
    async fn pass(
        &self,
        registry: &Registry,
        user: &UserInfo,
        group: &str,
        version: &str,
        request: Request<Body>,
    ) -> Response<Body>;
}

/// The group and version in `/apis/GROUP/VERSION` and what is below, or in its OpenAPI document, if
/// they are served elsewhere.
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
