//! ReplicationController: the ReplicaSet's controller, seen through another struct.
//!
//! In: ReplicationControllers and pods. Out: pods and `status`.
//! Upstream: `pkg/controller/replication`, which converts and delegates in the same way.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::{
    ReplicaSet, ReplicaSetCondition, ReplicaSetSpec, ReplicaSetStatus,
};
use k8s_openapi::api::core::v1::{
    ReplicationController, ReplicationControllerCondition, ReplicationControllerStatus,
};
use machinery::LabelSelector;

use crate::descriptor::Row;
use crate::replicaset::{Replicated, row};

pub const DESCRIPTOR: &dyn Row = &row::<ReplicationController>(
    "replicationcontroller-controller",
    "replication-controller",
    "replicationmanager",
);

impl Replicated for ReplicationController {
    fn as_replica_set(this: &Arc<Self>) -> Arc<ReplicaSet> {
        let spec = this.spec.as_ref().map(|spec| ReplicaSetSpec {
            min_ready_seconds: spec.min_ready_seconds,
            replicas: spec.replicas,
            selector: LabelSelector {
                match_labels: spec.selector.clone(),
                match_expressions: None,
            },
            template: spec.template.clone(),
        });
        Arc::new(ReplicaSet {
            metadata: this.metadata.clone(),
            spec,
            status: this.status.as_ref().map(to_set),
        })
    }

    fn set_status(&mut self, status: ReplicaSetStatus) {
        self.status = Some(from_set(status));
    }
}

fn to_set(status: &ReplicationControllerStatus) -> ReplicaSetStatus {
    let condition = |one: &ReplicationControllerCondition| ReplicaSetCondition {
        type_: one.type_.clone(),
        status: one.status.clone(),
        reason: one.reason.clone(),
        message: one.message.clone(),
        last_transition_time: one.last_transition_time.clone(),
    };
    ReplicaSetStatus {
        replicas: status.replicas,
        fully_labeled_replicas: status.fully_labeled_replicas,
        ready_replicas: status.ready_replicas,
        available_replicas: status.available_replicas,
        observed_generation: status.observed_generation,
        conditions: status.conditions.as_ref().map(|all| all.iter().map(condition).collect()),
        // It is always computed and never stored, so the comparison must not depend on it.
        terminating_replicas: None,
    }
}

fn from_set(status: ReplicaSetStatus) -> ReplicationControllerStatus {
    let condition = |one: ReplicaSetCondition| ReplicationControllerCondition {
        type_: one.type_,
        status: one.status,
        reason: one.reason,
        message: one.message,
        last_transition_time: one.last_transition_time,
    };
    ReplicationControllerStatus {
        replicas: status.replicas,
        fully_labeled_replicas: status.fully_labeled_replicas,
        ready_replicas: status.ready_replicas,
        available_replicas: status.available_replicas,
        observed_generation: status.observed_generation,
        conditions: status.conditions.map(|all| all.into_iter().map(condition).collect()),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{from_value, json};

    use super::*;

    #[test]
    fn a_status_survives_the_way_there_and_back() {
        let status: ReplicationControllerStatus = from_value(json!({
            "replicas": 3, "fullyLabeledReplicas": 2, "readyReplicas": 1, "observedGeneration": 4,
            "conditions": [{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate"}],
        }))
        .unwrap();
        assert_eq!(from_set(to_set(&status)), status);
    }

    #[test]
    fn the_selector_is_a_map() {
        let controller: ReplicationController = from_value(json!({
            "metadata": {"name": "web"},
            "spec": {"replicas": 2, "selector": {"app": "web"}, "minReadySeconds": 5},
        }))
        .unwrap();
        let spec = ReplicationController::as_replica_set(&Arc::new(controller)).spec.clone();
        let spec = spec.unwrap();
        assert_eq!(spec.selector.match_labels.unwrap()["app"], "web");
        assert_eq!((spec.replicas, spec.min_ready_seconds), (Some(2), Some(5)));
    }
}
