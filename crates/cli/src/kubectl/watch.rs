//! Continuous watches: the server ends each after some time, and the next one starts where the last one
//! stopped.

use serde_json::Value;

use crate::cluster::{Cluster, decode, with_query};
use crate::failure::{ApiStatus, Failure, Result};

pub struct Event {
    /// `ADDED`, `MODIFIED` or `DELETED`.
    pub kind: String,
    pub object: Value,
}

/// Calls `on_event` until it or the server fails. `path` is a collection's, with selectors.
pub async fn run(
    cluster: &Cluster,
    path: &str,
    accept: &str,
    mut version: String,
    mut on_event: impl AsyncFnMut(Event) -> Result<()>,
) -> Result<()> {
    loop {
        let pairs =
            [("watch", "true"), ("allowWatchBookmarks", "true"), ("resourceVersion", &*version)];
        let mut lines = cluster.lines(&with_query(path, &pairs), accept).await?;
        let mut any = false;
        while let Some(line) = lines.next().await? {
            if line.trim_ascii().is_empty() {
                continue;
            }
            any = true;
            let mut event = decode(&line)?;
            let object = event["object"].take();
            let kind = event["type"].as_str().unwrap_or_default().to_owned();
            if kind == "ERROR" {
                let code = http::StatusCode::INTERNAL_SERVER_ERROR;
                let status = ApiStatus::of(code, object.to_string().as_bytes());
                return Err(Failure::Status(Box::new(status)));
            }
            if let Some(latest) = version_of(&object) {
                version = latest;
            }
            if kind != "BOOKMARK" {
                on_event(Event { kind, object }).await?;
            }
        }
        if !any {
            // Avoids a tight loop with a server that ends watches at once.
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        }
    }
}

/// The resourceVersion of an object, or of the (single) row of a table.
fn version_of(object: &Value) -> Option<String> {
    let row = &object["rows"][0]["object"]["metadata"]["resourceVersion"];
    let own = &object["metadata"]["resourceVersion"];
    let text = row.as_str().or(own.as_str()).filter(|text| !text.is_empty());
    text.map(str::to_owned)
}
