//! The history of a DaemonSet's template, as ControllerRevisions. Pure.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use machinery::ObjectMeta;
use serde_json::{Value, json};

use crate::deployment::template_hash;
use crate::owner;

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
    let data = data_of(set);
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
            let made = new_revision(set, data, highest + 1);
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

/// What `kubectl rollout undo` patches a DaemonSet with.
fn data_of(set: &DaemonSet) -> Value {
    let template = set.spec.as_ref().map(|spec| &spec.template);
    let mut template = serde_json::to_value(template).expect("API structs have string keys");
    template["$patch"] = "replace".into();
    json!({"spec": {"template": template}})
}

fn new_revision(set: &DaemonSet, data: Value, revision: i64) -> ControllerRevision {
    let template = set.spec.as_ref().map(|spec| spec.template.clone()).unwrap_or_default();
    let collisions = set.status.as_ref().and_then(|status| status.collision_count);
    let hash = template_hash(&template, collisions);
    let mut labels =
        template.metadata.as_ref().and_then(|meta| meta.labels.clone()).unwrap_or_default();
    labels.insert(HASH.into(), hash.clone());
    ControllerRevision {
        metadata: ObjectMeta {
            name: Some(format!("{}-{hash}", set.metadata.name.as_deref().unwrap_or_default())),
            namespace: set.metadata.namespace.clone(),
            labels: Some(labels),
            annotations: set.metadata.annotations.clone(),
            owner_references: Some(vec![owner::reference(set)]),
            ..Default::default()
        },
        data: Some(RawExtension(data)),
        revision,
    }
}
