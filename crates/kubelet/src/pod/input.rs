//! The pod set's orders to a worker.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;

use crate::pod::allocation::AllocationState;
use crate::reason::Reason;

/// The worker's side. The set holds the sender.
pub type Inputs = watch::Receiver<Input>;

#[derive(Clone)]
pub struct Input {
    pub pod: Arc<Pod>,
    /// The pod must be removed: its API object or its manifest is gone, or it is an orphan.
    pub removed: bool,
    /// The pod must fail.
    pub evict: Option<Reason>,
    /// The pod must go because the node needs its resources: a disruption.
    pub disrupts: bool,
    /// The maximum grace period of its containers.
    pub longest_grace: Option<Duration>,
    /// The state of its resize; `pod` has the granted resources.
    pub standing: AllocationState,
}

impl Input {
    pub fn new(pod: Arc<Pod>) -> Self {
        Self {
            pod,
            removed: false,
            evict: None,
            disrupts: false,
            longest_grace: None,
            standing: AllocationState::default(),
        }
    }

    /// The pod is deleted from the API, or removed from the node.
    pub fn is_gone(&self) -> bool {
        self.removed || self.pod.metadata.deletion_timestamp.is_some()
    }
}

/// Resolves when the pod must stop: then long work for it is dropped.
pub async fn told_to_stop(input: &Inputs) {
    let mut input = input.clone();
    // An error means that the pod set is gone: the task ends at its next await.
    if input.wait_for(|input| input.is_gone() || input.evict.is_some()).await.is_err() {
        std::future::pending::<()>().await;
    }
}
