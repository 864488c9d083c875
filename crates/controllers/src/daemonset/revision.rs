//! The history of a DaemonSet's template, as ControllerRevisions. Pure.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet};

use crate::revision;

pub use crate::pod::REVISION as HASH;
const KEPT: i32 = 10;

#[derive(Debug, Default)]
pub struct RevisionPlan {
    pub hash: String,
    pub create: Option<ControllerRevision>,
    pub update: Vec<ControllerRevision>,
    pub delete: Vec<String>,
}

/// The revision whose data is the current template is the newest; old ones that no pod runs go
/// beyond the limit.
pub fn plan(
    set: &DaemonSet,
    known: &[Arc<ControllerRevision>],
    in_use: &BTreeSet<&str>,
) -> RevisionPlan {
    let template = set.spec.as_ref().map(|spec| &spec.template);
    let data = revision::data_of(template);
    let highest = known.iter().map(|one| one.revision).max().unwrap_or(0);
    let current = known.iter().find(|one| one.data.as_ref().map(|data| &data.0) == Some(&data));
    let mut plan = RevisionPlan::default();
    match current {
        Some(current) => {
            plan.hash = hash_of(current);
            if current.revision < highest {
                let mut newest = (**current).clone();
                newest.revision = highest + 1;
                plan.update.push(newest);
            }
        }
        None => {
            let collisions = set.status.as_ref().and_then(|status| status.collision_count);
            let made = revision::new(set, template, HASH, (data, highest + 1), collisions);
            plan.hash = hash_of(&made);
            plan.create = Some(made);
        }
    }
    let limit =
        set.spec.as_ref().and_then(|spec| spec.revision_history_limit).unwrap_or(KEPT).max(0);
    let is_old = |one: &&Arc<ControllerRevision>| {
        let hash = hash_of(one);
        hash != plan.hash && !in_use.contains(hash.as_str())
    };
    let mut old: Vec<_> = known.iter().filter(is_old).collect();
    old.sort_by_key(|one| one.revision);
    let surplus = old.len().saturating_sub(limit as usize);
    plan.delete =
        old.into_iter().take(surplus).filter_map(|one| one.metadata.name.clone()).collect();
    plan
}

fn hash_of(revision: &ControllerRevision) -> String {
    revision
        .metadata
        .labels
        .as_ref()
        .and_then(|labels| labels.get(HASH))
        .cloned()
        .unwrap_or_default()
}
