//! Lets a new pod's containers start when the kernel has the rules of its policies.
//!
//! In: a pod of this node with its addresses, from the kubelet. Out: a wait of a second at most.
//! While a cluster has no policy there is nothing to wait for. Without this, or after a second, the kernel
//! still drops the packets of pods that it does not know (`rules.rs`); the pod then only starts without a network.

use std::net::IpAddr;
use std::time::Duration;

use client::ObjectKey;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::oneshot;

use crate::inbox::{Announced, Inbox};
use crate::objects::PodFacts;

const PATIENCE: Duration = Duration::from_secs(1);

/// Cheap to clone; clones are the same gate.
#[derive(Clone, Default)]
pub struct Gate(pub(crate) Inbox);

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the rules of the pod's network policies are not in the kernel yet")]
pub struct NotReady;

impl Gate {
    /// Resolves when the kernel has the rules for these addresses of the pod.
    pub async fn admit(&self, pod: &Pod, addresses: &[IpAddr]) -> Result<(), NotReady> {
        // Without a node's name no pod is local, which this one is.
        let Some(facts) = PodFacts::of(pod, "") else { return Ok(()) };
        if addresses.is_empty() {
            return Ok(());
        }
        let key = ObjectKey::of(&pod.metadata);
        let pod = PodFacts { addresses: addresses.to_vec(), is_local: true, ..facts };
        let (done, told) = oneshot::channel();
        self.0.put(|changes| changes.announced.push(Announced { key, pod, done }));
        match tokio::time::timeout(PATIENCE, told).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(NotReady),
        }
    }
}
