//! The part of a Pod that a hollow kubelet looks at, decoded from the watch's bytes.
//!
//! A typed pod is ten times as large and most of it matters to containers only.

use jiff::Timestamp;
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};

#[derive(Debug, Default, Deserialize)]
pub struct Pod {
    pub metadata: Meta,
    #[serde(default)]
    pub spec: Spec,
    #[serde(default)]
    pub status: Status,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Meta {
    pub uid: String,
    pub resource_version: String,
    pub generation: i64,
    #[serde(deserialize_with = "own_annotation")]
    pub annotations: Option<String>,
    pub deletion_timestamp: Option<Timestamp>,
    pub deletion_grace_period_seconds: Option<i64>,
}

/// The annotation with the settings of simulated pods.
fn own_annotation<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    struct Own {
        #[serde(rename = "decapod.io/simulate")]
        own: Option<String>,
    }
    let own = Option::<Own>::deserialize(deserializer).map_err(D::Error::custom)?;
    Ok(own.and_then(|own| own.own))
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    pub node_name: String,
    pub restart_policy: RestartPolicy,
    pub host_network: bool,
    pub active_deadline_seconds: Option<i64>,
    pub containers: Vec<Container>,
    pub init_containers: Vec<Container>,
    pub readiness_gates: Vec<Gate>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum RestartPolicy {
    #[default]
    Always,
    OnFailure,
    Never,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Container {
    pub name: String,
    pub image: String,
    pub restart_policy: Option<RestartPolicy>,
}

impl Container {
    /// An init container that runs as long as the pod.
    pub fn is_sidecar(&self) -> bool {
        self.restart_policy == Some(RestartPolicy::Always)
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Gate {
    pub condition_type: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    pub phase: String,
    #[serde(rename = "podIP")]
    pub pod_ip: String,
    pub start_time: Option<Timestamp>,
    pub conditions: Vec<Condition>,
    pub container_statuses: Vec<ContainerStatus>,
    pub init_container_statuses: Vec<ContainerStatus>,
}

impl Status {
    pub fn condition(&self, kind: &str) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.r#type == kind)
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Condition {
    pub r#type: String,
    pub status: String,
    pub reason: Option<String>,
    pub last_transition_time: Option<Timestamp>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerStatus {
    pub restart_count: u32,
    pub state: State,
    pub last_state: State,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct State {
    pub running: Option<Running>,
    pub terminated: Option<Terminated>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Running {
    pub started_at: Option<Timestamp>,
}

/// Kept whole, as a status names the last end again.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Terminated {
    pub exit_code: i32,
    pub reason: String,
    pub started_at: Option<Timestamp>,
    pub finished_at: Option<Timestamp>,
    #[serde(rename = "containerID")]
    pub container_id: String,
}

impl Pod {
    pub fn decode(json: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(json)
    }

    pub fn is_ended(&self) -> bool {
        matches!(&*self.status.phase, "Succeeded" | "Failed")
    }

    pub fn version(&self) -> u64 {
        self.metadata.resource_version.parse().unwrap_or(0)
    }

    /// When it was bound.
    pub fn scheduled_at(&self) -> Option<Timestamp> {
        self.status.condition("PodScheduled")?.last_transition_time
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_matters_is_decoded_and_the_rest_is_not() {
        let json = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a","namespace":"n",
            "uid":"u","resourceVersion":"77","generation":2,"managedFields":null,
            "annotations":{"decapod.io/simulate":"run-for=5s","other":"x"},
            "deletionTimestamp":"2026-01-01T00:00:30Z","deletionGracePeriodSeconds":30},
            "spec":{"nodeName":"sim-1","restartPolicy":"OnFailure","volumes":[{"name":"v"}],
            "containers":[{"name":"c","image":"i","env":[]}],
            "initContainers":[{"name":"s","image":"i","restartPolicy":"Always"}]},
            "status":{"phase":"Pending","podIP":"10.0.0.2","conditions":[{"type":"PodScheduled",
            "status":"True","lastTransitionTime":"2026-01-01T00:00:00Z"}]}}"#;
        let pod = Pod::decode(json.as_bytes()).expect("a pod");
        assert_eq!(pod.metadata.annotations.as_deref(), Some("run-for=5s"));
        assert_eq!((pod.version(), pod.metadata.deletion_grace_period_seconds), (77, Some(30)));
        assert_eq!(pod.spec.restart_policy, RestartPolicy::OnFailure);
        assert!(pod.spec.init_containers[0].is_sidecar() && !pod.spec.containers[0].is_sidecar());
        assert_eq!(pod.status.pod_ip, "10.0.0.2");
        assert!(pod.scheduled_at().is_some() && !pod.is_ended());
    }
}
