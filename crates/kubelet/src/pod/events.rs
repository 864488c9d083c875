//! Events about pods and their containers.

use std::sync::Arc;

use client::{EventRecorder, EventType};
use k8s_openapi::api::core::v1::{ObjectReference, Pod};

use tokio::time::Instant;

use crate::bucket::Bucket;
use crate::config::Rate;
use crate::names;
use crate::pod::observed::Role;

/// Cheap to clone.
#[derive(Clone)]
pub struct Events(pub EventRecorder, Option<Arc<Bucket>>);

impl Events {
    /// Events beyond the rate are dropped, as upstream does.
    pub fn new(recorder: EventRecorder, rate: Rate) -> Self {
        let bucket = rate.map(|(rate, burst)| Arc::new(Bucket::new(rate, burst, Instant::now())));
        Self(recorder, bucket)
    }

    /// Sends an event about a pod.
    pub fn tell(&self, pod: &Pod, kind: EventType, reason: &str, message: impl Into<String>) {
        self.about(reference(pod, None), kind, reason, message);
    }

    pub fn warn(&self, pod: &Pod, reason: &str, message: impl Into<String>) {
        self.tell(pod, EventType::Warning, reason, message);
    }

    pub fn about(
        &self,
        object: ObjectReference,
        kind: EventType,
        reason: &str,
        message: impl Into<String>,
    ) {
        if self.1.as_ref().is_none_or(|bucket| bucket.allows(Instant::now())) {
            self.0.event_about(object, kind, reason, message);
        }
    }
}

/// The object of an event: the pod, or one of its containers. Like upstream, events of static pods
/// name the static pod's own uid, not the mirror's.
pub fn reference(pod: &Pod, container: Option<(Role, &str)>) -> ObjectReference {
    let mut out = client::events::reference(pod);
    out.namespace = Some(names::namespace(pod).into());
    if let Some((role, name)) = container {
        let list = match role {
            Role::Init => "initContainers",
            Role::Main => "containers",
            Role::Ephemeral => "ephemeralContainers",
        };
        out.field_path = Some(format!("spec.{list}{{{name}}}"));
    }
    out
}
