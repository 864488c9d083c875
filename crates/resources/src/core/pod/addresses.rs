//! Pods reduced to what network policies need, for nodes.
//!
//! ```text
//!  GET /apis/network.decapod.io/v1/podaddresses ─► pods with labels, node, addresses, ports' names and phase
//! ```
//!
//! In: the stored pods. Out: the same pods in the same form, as another resource, so that RBAC can grant a node
//! the one without the other: no environment, volumes, annotations or images of other nodes' pods. Read only.
//!
//! Cost: an object's conversion reads its bytes once and keeps a few of its fields. Nothing is stored.

use std::sync::Arc;

use apiserver::resource::Conversion;
use k8s_openapi::api::core::v1::{Container, ContainerPort, Pod, PodIP, PodSpec, PodStatus};
use machinery::object::{Codec, DecodeError, Decoded};
use machinery::{Object, ObjectMeta, StatusError};
use serde::Deserialize;
use serde_json::Value;

use super::KIND;
use crate::generic::AnyKind;
use crate::row::Row;

pub(crate) const GROUP: &str = "network.decapod.io";

pub(crate) fn row() -> Row {
    KIND.row(None).alone(GROUP, "podaddresses").verbs(vec!["list", "watch"]).converted_by(Arc::new(
        Reduction { whole: api::kinds::codec("v1", "Pod").expect("pods have a codec") },
    ))
}

struct Reduction {
    whole: Arc<dyn Codec>,
}

impl Conversion for Reduction {
    fn to_stored(&self, _: Box<dyn Object>) -> Result<Box<dyn Object>, StatusError> {
        Err(StatusError::internal("a reduced pod cannot be written"))
    }

    fn to_served(&self, object: Box<dyn Object>) -> Result<Box<dyn Object>, StatusError> {
        // Decoding has left out the rest.
        Ok(object)
    }

    fn stored_codec(&self) -> &dyn Codec {
        self
    }
}

/// Decodes a stored pod to its reduced form.
impl Codec for Reduction {
    fn decode(&self, json: &[u8]) -> Result<Decoded, DecodeError> {
        Ok(Decoded { object: self.decode_stored(json)?, unknown_fields: vec![] })
    }

    fn decode_value(&self, value: Value) -> Result<Decoded, DecodeError> {
        self.decode(value.to_string().as_bytes())
    }

    fn decode_stored(&self, json: &[u8]) -> Result<Box<dyn Object>, DecodeError> {
        let part: Part = serde_json::from_slice(json)?;
        Ok(Box::new(part.reduced()))
    }

    fn empty(&self) -> Box<dyn Object> {
        self.whole.empty()
    }
}

/// The fields that are kept. The metadata is decoded whole and reduced after that.
#[derive(Deserialize)]
struct Part {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Spec {
    node_name: Option<String>,
    host_network: Option<bool>,
    containers: Vec<Ports>,
    init_containers: Vec<Ports>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Ports {
    name: String,
    ports: Vec<ContainerPort>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Status {
    phase: Option<String>,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    #[serde(rename = "podIPs")]
    pod_ips: Option<Vec<PodIP>>,
}

impl Part {
    fn reduced(self) -> Pod {
        let Self { metadata, spec, status } = self;
        let containers = |all: Vec<Ports>| -> Vec<Container> {
            let reduced = all.into_iter().map(|one| Container {
                name: one.name,
                ports: Some(one.ports).filter(|ports| !ports.is_empty()),
                ..Container::default()
            });
            reduced.collect()
        };
        let starting = containers(spec.init_containers);
        Pod {
            metadata: ObjectMeta {
                name: metadata.name,
                namespace: metadata.namespace,
                uid: metadata.uid,
                labels: metadata.labels,
                creation_timestamp: metadata.creation_timestamp,
                deletion_timestamp: metadata.deletion_timestamp,
                resource_version: metadata.resource_version,
                ..ObjectMeta::default()
            },
            spec: Some(PodSpec {
                node_name: spec.node_name,
                host_network: spec.host_network,
                containers: containers(spec.containers),
                init_containers: Some(starting).filter(|all| !all.is_empty()),
                ..PodSpec::default()
            }),
            status: Some(PodStatus {
                phase: status.phase,
                pod_ip: status.pod_ip,
                pod_ips: status.pod_ips,
                ..PodStatus::default()
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn nothing_else_is_left_of_a_pod() {
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "a", "namespace": "b", "uid": "c", "labels": {"app": "web"},
                "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "secret"},
                "managedFields": [{"manager": "secret"}], "finalizers": ["secret"],
            },
            "spec": {
                "nodeName": "n", "serviceAccountName": "secret",
                "volumes": [{"name": "secret"}],
                "containers": [{
                    "name": "c", "image": "secret", "env": [{"name": "A", "value": "secret"}],
                    "ports": [{"name": "http", "containerPort": 80, "protocol": "TCP"}],
                }],
            },
            "status": {
                "phase": "Running", "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}],
                "containerStatuses": [{"name": "secret"}],
            },
        });
        let whole = api::kinds::codec("v1", "Pod").expect("a codec");
        let found = Reduction { whole }.decode_stored(pod.to_string().as_bytes());
        let found = found.expect("a pod").to_value();
        assert_eq!(
            found,
            json!({
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "a", "namespace": "b", "uid": "c", "labels": {"app": "web"}},
                "spec": {
                    "nodeName": "n",
                    "containers": [{
                        "name": "c",
                        "ports": [{"name": "http", "containerPort": 80, "protocol": "TCP"}],
                    }],
                },
                "status": {
                    "phase": "Running", "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}],
                },
            })
        );
    }
}
