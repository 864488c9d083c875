//! The history of a StatefulSet's template. Pure.
//!
//! Invariant: the revision of the current template has the highest number; going back to an old
//! template gives the old revision a new number.

use std::sync::Arc;

use client::ObjectKey;
use k8s_openapi::api::apps::v1::{ControllerRevision, StatefulSet};
use k8s_openapi::api::core::v1::PodTemplateSpec;

use crate::revision;

const HASH: &str = "controller.kubernetes.io/hash";

/// The name of a revision and its template.
#[derive(Clone, Debug)]
pub struct Revision {
    pub name: String,
    pub template: PodTemplateSpec,
}

impl Revision {
    /// `None` if the data was not made by a StatefulSet.
    pub fn of(revision: &ControllerRevision) -> Option<Self> {
        let mut template = revision.data.as_ref()?.0.pointer("/spec/template")?.clone();
        template.as_object_mut()?.remove("$patch");
        let template = serde_json::from_value(template).ok()?;
        Some(Self { name: revision.metadata.name.clone()?, template })
    }
}

/// The change of the history.
pub enum Change {
    /// The newest is the current template's.
    None(Arc<ControllerRevision>),
    Create(ControllerRevision),
    /// An old one becomes the newest again.
    Renumber(ControllerRevision),
}

pub fn change(set: &StatefulSet, sorted: &[Arc<ControllerRevision>], collisions: i32) -> Change {
    let template = set.spec.as_ref().map(|spec| &spec.template);
    let data = revision::data_of(template);
    let same =
        |one: &&Arc<ControllerRevision>| one.data.as_ref().map(|data| &data.0) == Some(&data);
    let next = sorted.last().map_or(1, |newest| newest.revision + 1);
    match (sorted.iter().rev().find(same), sorted.last()) {
        (Some(same), Some(newest)) if same.revision == newest.revision => {
            Change::None(same.clone())
        }
        (Some(same), _) => {
            let mut newest = (**same).clone();
            newest.revision = next;
            Change::Renumber(newest)
        }
        (None, _) => {
            let collisions = Some(collisions).filter(|count| *count > 0);
            Change::Create(revision::new(set, template, HASH, (data, next), collisions))
        }
    }
}

pub fn sort(revisions: &mut [Arc<ControllerRevision>]) {
    revisions.sort_unstable_by_key(|one| {
        let created = one.metadata.creation_timestamp.as_ref().map(|time| time.0);
        (one.revision, created, one.metadata.name.clone())
    });
}

/// Names of revisions beyond the limit that nothing uses.
pub fn surplus(
    set: &StatefulSet,
    sorted: &[Arc<ControllerRevision>],
    live: &[&str],
) -> Vec<ObjectKey> {
    let limit = set.spec.as_ref().and_then(|spec| spec.revision_history_limit).unwrap_or(10);
    let is_old = |one: &&Arc<ControllerRevision>| {
        !live.contains(&one.metadata.name.as_deref().unwrap_or_default())
    };
    let old: Vec<_> = sorted.iter().filter(is_old).collect();
    let count = old.len().saturating_sub(usize::try_from(limit).unwrap_or(usize::MAX));
    old.into_iter().take(count).map(|one| ObjectKey::of(&one.metadata)).collect()
}
