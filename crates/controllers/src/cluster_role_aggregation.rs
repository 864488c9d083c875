//! ClusterRoles that are made of others: `aggregationRule` selects them by labels.
//!
//! In: ClusterRoles. Out: `rules`. Upstream: `pkg/controller/clusterroleaggregation`.
//!
//! Cost: ClusterRoles are kept whole, as any may be a part of any other. A new rule or label of one goes
//! through all; nothing but the changed one is decoded.

use std::sync::Arc;

use client::{
    Api, Client, Event, Lister, ObjectKey, Outcome, PostParams, Result, View, Whole, WorkQueue,
};
use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule};
use machinery::selector::Selector;

use crate::descriptor::{Descriptor, Row, on, or_gone};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "clusterrole-aggregation-controller",
    account: "clusterrole-aggregation-controller",
    component: "clusterrole-aggregation-controller",
    queue: "ClusterRoleAggregator",
    workers: 5,
    new: |setup| {
        Some(Controller {
            client: setup.client.clone(),
            roles: setup.lister(),
            all: setup.view::<ClusterRole, _>(),
        })
    },
    watches: &[
        // Any role may be a part of any other.
        &on(Controller::role_event),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

struct Controller {
    client: Client,
    roles: Lister<ClusterRole>,
    all: View<Whole<ClusterRole>>,
}

impl Controller {
    fn role_event(&self, queue: &WorkQueue<ObjectKey>, event: &Event<ClusterRole>) {
        let same = event.old().is_some_and(|old| {
            old.rules == event.object().rules
                && old.metadata.labels == event.object().metadata.labels
                && old.aggregation_rule == event.object().aggregation_rule
        });
        if same && !event.is_deleted() {
            return;
        }
        for role in self.all.objects(None) {
            if role.aggregation_rule.is_some() {
                queue.add(ObjectKey::of(&role.metadata));
            }
        }
    }

    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        carry_out(&self.client.api(None), plan(&self.roles, &self.all, key)).await
    }
}

async fn carry_out(api: &Api<ClusterRole>, write: Option<ClusterRole>) -> Result<Outcome> {
    let Some(role) = write else {
        return Ok(Outcome::Done);
    };
    let name = role.metadata.name.clone().unwrap_or_default();
    or_gone(api.replace(&name, &PostParams::default(), &role).await)
}

fn plan(
    lister: &Lister<ClusterRole>,
    all: &View<Whole<ClusterRole>>,
    key: &ObjectKey,
) -> Option<ClusterRole> {
    let role = lister.get_key(key)?;
    role.aggregation_rule.as_ref()?;
    let rules = aggregate(&role, &all.objects(None));
    if role.rules.clone().unwrap_or_default() == rules {
        return None;
    }
    let mut updated = (*role).clone();
    updated.rules = Some(rules);
    Some(updated)
}

/// The rules of the selected roles, by name, each once. Pure.
fn aggregate(role: &ClusterRole, all: &[Arc<ClusterRole>]) -> Vec<PolicyRule> {
    let selectors = role.aggregation_rule.as_ref().and_then(|rule| {
        let all = rule.cluster_role_selectors.as_ref()?;
        all.iter().map(|one| Selector::from_api(Some(one)).ok()).collect::<Option<Vec<_>>>()
    });
    let mut sorted: Vec<_> =
        all.iter().filter(|one| one.metadata.name != role.metadata.name).collect();
    sorted.sort_unstable_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    let mut rules: Vec<PolicyRule> = vec![];
    for selector in selectors.unwrap_or_default() {
        for part in sorted.iter().filter(|one| selector.matches(one.metadata.labels.as_ref())) {
            for rule in part.rules.iter().flatten() {
                if !rules.contains(rule) {
                    rules.push(rule.clone());
                }
            }
        }
    }
    rules
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{from_value, json};

    use super::*;

    #[test]
    fn rules_are_gathered_once_in_order() {
        let role = |name: &str, labels, verbs: &[&str]| -> Arc<ClusterRole> {
            let rules: Vec<_> =
                verbs.iter().map(|verb| json!({"verbs": [verb], "resources": ["pods"]})).collect();
            let value = json!({"metadata": {"name": name, "labels": labels}, "rules": rules});
            Arc::new(from_value(value).unwrap())
        };
        let part = json!({"part": "yes"});
        let all = [
            role("b", part.clone(), &["get", "watch"]),
            role("a", part.clone(), &["list", "get"]),
            role("c", json!({}), &["delete"]),
        ];
        let whole: ClusterRole = from_value(json!({"metadata": {"name": "whole"},
            "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": part}]}}))
        .unwrap();
        let verbs: Vec<_> =
            aggregate(&whole, &all).into_iter().flat_map(|rule| rule.verbs).collect();
        assert_eq!(verbs, ["list", "get", "watch"]);
    }
}
