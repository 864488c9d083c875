//! Keeps the cpusets of running containers: those that share CPUs follow the shared pool.
//!
//! In: changes of the pool, the pods' containers. Out: UpdateContainerResources with a cpuset.
//! Cost: one pass over the node's pods when the pool changed and each period (10 s by default), and one call
//! for each container whose cpuset differs, or that the loop sees for the first time. Without the static policy the loop never wakes.
//! Upstream: `cpu_manager.go` reconcileState.

use std::collections::BTreeMap;
use std::sync::Arc;

use cri::LinuxContainerResources;

use super::Managers;
use super::cpuset::CpuSet;
use crate::names;
use crate::node::upkeep::Upkeep;
use crate::pod::observed::State;

/// Never returns.
pub async fn keep(own: Arc<Upkeep>, managers: Arc<Managers>) {
    if !managers.pins().0 {
        return std::future::pending().await;
    }
    let mut changed = managers.changed.subscribe();
    // By container id: the cpuset that the runtime was told.
    let mut told: BTreeMap<String, CpuSet> = BTreeMap::new();
    loop {
        told = reconcile(&own, &managers, told).await;
        // The sender lives as long as the managers.
        let _ = tokio::time::timeout(managers.period, changed.changed()).await;
    }
}

/// Updates the containers that differ; returns the cpusets of all running ones.
async fn reconcile(
    own: &Upkeep,
    managers: &Managers,
    mut known: BTreeMap<String, CpuSet>,
) -> BTreeMap<String, CpuSet> {
    let mut out = BTreeMap::new();
    for view in own.pods.views() {
        let Some(pod) = &view.pod else { continue };
        for container in view.observed.containers.iter().filter(|c| c.state == State::Running) {
            let Some(wanted) = managers.cpus(names::uid(pod), &container.name) else { continue };
            let is_told = known.remove(&container.id).is_some_and(|set| set == wanted);
            if wanted.is_empty() {
                continue;
            }
            if !is_told {
                let resources = LinuxContainerResources {
                    cpuset_cpus: wanted.to_string(),
                    ..LinuxContainerResources::default()
                };
                let done = own.runtime.update_container_resources(&container.id, resources).await;
                if let Err(error) = done {
                    let (pod, container) = (names::full(pod), &container.name);
                    tracing::warn!(pod, container, %error, "failed to update the container's cpuset");
                    continue;
                }
            }
            out.insert(container.id.clone(), wanted);
        }
    }
    out
}
