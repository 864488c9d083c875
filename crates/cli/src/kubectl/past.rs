//! Selects a past revision, and builds requests for it.
//!
//! In: `--at-revision` or `--at-time`. Out: a list's exact resourceVersion, which every API server supports
//! while it has that history; only the conversion of a time to a revision is specific to our server.

use jiff::Timestamp;

use super::target::Target;
use crate::cluster::{Cluster, with_query};
use crate::failure::{ApiStatus, Failure, Result, own};

#[derive(clap::Args, Clone, Debug, Default)]
pub struct Past {
    /// The state at this resourceVersion
    #[arg(long, value_name = "REVISION")]
    pub at_revision: Option<u64>,
    /// The state at this time (2026-01-31T12:00:00Z), or this long ago (10m)
    #[arg(long, value_name = "TIME", value_parser = crate::store::past, conflicts_with = "at_revision")]
    pub at_time: Option<Timestamp>,
}

impl Past {
    pub async fn revision(&self, cluster: &Cluster) -> Result<Option<u64>> {
        let Some(at) = self.at_time else { return Ok(self.at_revision) };
        let path = with_query("/decapod/revision", &[("time", &at.to_string())]);
        let answer = cluster.get(&path).await.map_err(|failure| match failure.is_not_found() {
            true => own("this server cannot convert a time to a revision; use --at-revision"),
            false => failure,
        })?;
        let revision = answer["revision"].as_str().and_then(|text| text.parse().ok());
        revision.map(Some).ok_or_else(|| own("the server named no revision of that time"))
    }
}

/// A collection's path with a selector for one name, at a revision.
pub fn exact(collection: &str, name: Option<&str>, revision: u64) -> String {
    let field = name.map_or(String::new(), |name| format!("metadata.name={name}"));
    let pairs = [
        ("fieldSelector", field.as_str()),
        ("resourceVersion", &revision.to_string()),
        ("resourceVersionMatch", "Exact"),
    ];
    with_query(collection, &pairs)
}

/// The error for a named object that did not exist, in upstream's words.
pub fn missing(target: &Target, at: Option<u64>) -> Option<Failure> {
    let name = target.name.as_ref()?;
    let resource = &target.resource;
    let kind = match resource.group.as_str() {
        "" => resource.name.clone(),
        group => format!("{}.{group}", resource.name),
    };
    let when = at.map_or(String::new(), |at| format!(" at revision {at}"));
    Some(Failure::Status(Box::new(ApiStatus {
        code: 404,
        reason: "NotFound".into(),
        message: format!("{kind} {name:?} not found{when}"),
        ..ApiStatus::default()
    })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_past_is_a_list_of_one() {
        assert_eq!(
            exact("/api/v1/namespaces/a/pods", Some("web"), 7),
            "/api/v1/namespaces/a/pods?fieldSelector=metadata.name%3Dweb&resourceVersion=7&resourceVersionMatch=Exact"
        );
        assert_eq!(
            exact("/api/v1/pods?labelSelector=a", None, 7),
            "/api/v1/pods?labelSelector=a&resourceVersion=7&resourceVersionMatch=Exact"
        );
    }
}
