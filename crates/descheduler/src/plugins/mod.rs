//! The plugins: a row each, in the plugin's own file.

mod failed_pods;
mod inter_pod_anti_affinity;
mod node_affinity;
mod node_taints;
mod node_utilization;
mod pod_life_time;
mod remove_duplicates;
mod too_many_restarts;
mod topology_spread;

use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use machinery::selector::Selector;
use serde::Deserialize;
use serde_json::Value;

use crate::cycle::{Cycle, Refused};
use crate::policy::Mistakes;
use crate::snapshot::namespace;

/// When a plugin runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    Deschedule,
    Balance,
}

impl Point {
    pub fn name(self) -> &'static str {
        match self {
            Self::Deschedule => "deschedule",
            Self::Balance => "balance",
        }
    }
}

/// Makes a plugin of its arguments.
type Build = fn(Option<&Value>) -> Result<Box<dyn Plugin>, Mistakes>;

pub struct Row {
    pub name: &'static str,
    pub point: Point,
    pub build: Build,
}

#[async_trait]
pub trait Plugin: Send + Sync {
    /// Evicts pods until nothing is left to do, or a limit of the cycle is reached.
    async fn run(&self, cycle: &Cycle<'_>);
}

const PLUGINS: [&Row; 10] = [
    &pod_life_time::ROW,
    &failed_pods::ROW,
    &too_many_restarts::ROW,
    &node_affinity::ROW,
    &node_taints::ROW,
    &inter_pod_anti_affinity::ROW,
    &remove_duplicates::ROW,
    &node_utilization::LOW,
    &node_utilization::HIGH,
    &topology_spread::ROW,
];

pub fn row(name: &str) -> Option<&'static Row> {
    PLUGINS.into_iter().find(|row| row.name == name)
}

/// Namespaces that a plugin looks at.
#[derive(Deserialize, Default, Clone)]
#[serde(default, deny_unknown_fields)]
struct Namespaces {
    include: Vec<String>,
    exclude: Vec<String>,
}

/// The pods that a plugin looks at: by namespace and labels.
struct Scope {
    namespaces: Namespaces,
    labels: Selector,
}

impl Scope {
    fn new(
        namespaces: Option<Namespaces>,
        labels: Option<&LabelSelector>,
        mistakes: &mut Mistakes,
    ) -> Self {
        let namespaces = namespaces.unwrap_or_default();
        if !namespaces.include.is_empty() && !namespaces.exclude.is_empty() {
            mistakes.push("only one of Include/Exclude namespaces can be set".into());
        }
        let labels = labels.map_or(Ok(Selector::everything()), |one| Selector::from_api(Some(one)));
        let labels = labels.unwrap_or_else(|error| {
            mistakes.push(format!("failed to get label selectors from strategy's params: {error}"));
            Selector::nothing()
        });
        Self { namespaces, labels }
    }

    fn has(&self, pod: &Pod) -> bool {
        let Namespaces { include, exclude } = &self.namespaces;
        let own = namespace(pod);
        (include.is_empty() || include.iter().any(|one| one == own))
            && !exclude.iter().any(|one| one == own)
            && self.labels.matches(pod.metadata.labels.as_ref())
    }

    /// Whether the pod is in scope and the profile lets it go and move.
    fn may_evict(&self, cycle: &Cycle<'_>, pod: &Pod) -> bool {
        self.has(pod) && cycle.may_go(pod) && cycle.may_move(pod)
    }
}

/// Evicts pods of one node, up to the node's limit. False: the cycle may evict no more.
async fn evict_all(cycle: &Cycle<'_>, pods: impl IntoIterator<Item = &Arc<Pod>>) -> bool {
    for pod in pods {
        match cycle.evict(pod).await {
            Ok(()) | Err(Refused::ThisPod) => {}
            Err(Refused::NodeLimit) => return true,
            Err(Refused::TotalLimit) => return false,
        }
    }
    true
}

/// No mistakes, or all of them.
fn checked<P: Plugin + 'static>(
    plugin: P,
    mistakes: Mistakes,
) -> Result<Box<dyn Plugin>, Mistakes> {
    if mistakes.is_empty() { Ok(Box::new(plugin)) } else { Err(mistakes) }
}

/// The statuses of the pod's containers, with those of init containers if wanted.
fn statuses(status: &PodStatus, with_init: bool) -> impl Iterator<Item = &ContainerStatus> {
    let init = status.init_container_statuses.iter().flatten().filter(move |_| with_init);
    status.container_statuses.iter().flatten().chain(init)
}

fn waiting_reason(status: &ContainerStatus) -> Option<&str> {
    status.state.as_ref()?.waiting.as_ref()?.reason.as_deref()
}

fn end_reason(status: &ContainerStatus) -> Option<&str> {
    status.state.as_ref()?.terminated.as_ref()?.reason.as_deref()
}

fn exit_code(status: &ContainerStatus) -> Option<i32> {
    Some(status.state.as_ref()?.terminated.as_ref()?.exit_code)
}

fn has_owner_of(pod: &Pod, kinds: &[String]) -> bool {
    let mut owners = pod.metadata.owner_references.iter().flatten();
    owners.any(|owner| kinds.contains(&owner.kind))
}

/// Lowest priority first; of one priority BestEffort, Burstable, Guaranteed; of one class those that do not
/// ask to stay.
fn sort_for_eviction(pods: &mut [Arc<Pod>]) {
    pods.sort_by_cached_key(|pod| {
        let spec = pod.spec.as_ref();
        let class = spec.map_or(api::qos::BEST_EFFORT, api::qos::class);
        let order = [api::qos::BEST_EFFORT, api::qos::BURSTABLE, api::qos::GUARANTEED];
        let annotations = pod.metadata.annotations.as_ref();
        let stays =
            annotations.is_some_and(|all| all.contains_key(crate::evictor::PREFER_NO_EVICTION));
        let priority = spec.and_then(|spec| spec.priority);
        (priority, order.iter().position(|one| *one == class), stays)
    });
}
