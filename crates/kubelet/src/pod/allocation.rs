//! The requests and limits that each pod was granted, and the order of the pending resizes.
//!
//! ```text
//!   spec (what the API asks for) ──► granted, if the node has room ──► actuated, container by container
//!             │                          allocated.json                  actuated.json
//!             └── no room: the condition PodResizePending, asked again when room appears
//! ```
//!
//! In: pods. Out: pods with the resources that they were granted, and the order in which pending
//! resizes are retried. Both files lie in the pod's directory: a restarted kubelet continues from them.
//! Invariant: a pod counts, runs and is reported with the granted resources, never with the requested.
//! Upstream: `pkg/kubelet/allocation`.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod, PodCondition, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::pod::amounts::Amounts;
use crate::resources::{GUARANTEED, milli, pod_requests, qos_class};
use crate::volumes::dir::PodDir;

pub const PENDING: &str = "PodResizePending";
pub const IN_PROGRESS: &str = "PodResizeInProgress";
pub const DEFERRED: &str = "Deferred";
pub const INFEASIBLE: &str = "Infeasible";
pub const ERROR: &str = "Error";

/// The resources that one pod was granted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Allocation {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pod: Option<ResourceRequirements>,
    /// By container; ephemeral containers have none.
    containers: BTreeMap<String, ResourceRequirements>,
}

impl Allocation {
    /// All resources that the pod's spec asks for.
    pub fn of(pod: &Pod) -> Self {
        let Some(spec) = &pod.spec else { return Self::default() };
        let all = spec.init_containers.iter().flatten().chain(&spec.containers);
        let own = |c: &Container| (c.name.clone(), c.resources.clone().unwrap_or_default());
        Self { pod: spec.resources.clone(), containers: all.map(own).collect() }
    }

    /// The pod with the granted resources; the same `Arc` when the spec asks for nothing else.
    pub fn applied(&self, pod: &Arc<Pod>) -> Arc<Pod> {
        if self.grants(pod) {
            return pod.clone();
        }
        let mut granted = Pod::clone(pod);
        if let Some(spec) = &mut granted.spec {
            spec.resources = self.pod.clone();
            let all = spec.init_containers.iter_mut().flatten().chain(&mut spec.containers);
            for container in all {
                if let Some(own) = self.containers.get(&container.name) {
                    container.resources = Some(own.clone());
                }
            }
        }
        Arc::new(granted)
    }

    fn grants(&self, pod: &Pod) -> bool {
        let Some(spec) = &pod.spec else { return true };
        let mut all = spec.init_containers.iter().flatten().chain(&spec.containers);
        same(self.pod.as_ref(), spec.resources.as_ref())
            && all.all(|container| match self.containers.get(&container.name) {
                Some(own) => same(Some(own), container.resources.as_ref()),
                None => true,
            })
    }

    fn path(dir: &PodDir) -> std::path::PathBuf {
        dir.0.join("allocated.json")
    }

    /// The allocation that an earlier kubelet recorded.
    pub fn read(dir: &PodDir) -> Option<Self> {
        read(&Self::path(dir))
    }

    pub fn write(&self, dir: &PodDir) {
        write(dir, &Self::path(dir), self);
    }
}

/// Compares amounts, however they are written.
fn same(a: Option<&ResourceRequirements>, b: Option<&ResourceRequirements>) -> bool {
    let amounts = |all: Option<&ResourceRequirements>| {
        let lists = all.map(|r| [r.requests.clone(), r.limits.clone()]).unwrap_or_default();
        lists.map(|list| {
            let amounts = list.into_iter().flatten().map(|(name, q)| (name, milli(&q)));
            amounts.collect::<BTreeMap<_, _>>()
        })
    };
    amounts(a) == amounts(b)
}

/// By container name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Actuated(BTreeMap<String, Amounts>);

impl Actuated {
    pub fn get(&self, container: &str) -> Option<Amounts> {
        self.0.get(container).copied()
    }

    pub fn set(&mut self, container: &str, amounts: Amounts) {
        self.0.insert(container.to_string(), amounts);
    }

    fn path(dir: &PodDir) -> std::path::PathBuf {
        dir.0.join("actuated.json")
    }

    pub fn read(dir: &PodDir) -> Self {
        read(&Self::path(dir)).unwrap_or_default()
    }

    pub fn write(&self, dir: &PodDir) {
        write(dir, &Self::path(dir), self);
    }
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// A lost record costs one needless update of a cgroup. Therefore a failure is only a warning.
fn write(dir: &PodDir, path: &Path, content: &impl Serialize) {
    let next = path.with_extension("new");
    let done = dir.create().and_then(|()| {
        std::fs::write(&next, serde_json::to_vec(content).map_err(io::Error::other)?)?;
        std::fs::rename(&next, path)
    });
    if let Err(error) = done {
        tracing::warn!(path = %path.display(), %error, "failed to record the pod's resources");
    }
}

/// Why a resize is pending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub reason: &'static str,
    pub message: String,
    pub generation: Option<i64>,
    /// When the resize was first refused for this reason.
    pub since: Timestamp,
    pub told: Timestamp,
}

/// The state of a resize that the pod set passes to the pod's worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocationState {
    pub refused: Option<Refusal>,
    /// The generation that was granted last, if it changed the resources.
    pub granted: Option<i64>,
}

/// A granted resize that is being actuated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    pub generation: Option<i64>,
    /// The last error.
    pub error: Option<String>,
    pub since: Timestamp,
}

fn seconds(time: Timestamp) -> Option<Time> {
    Some(Time(Timestamp::from_second(time.as_second()).unwrap_or(time)))
}

/// The conditions PodResizePending and PodResizeInProgress.
pub fn conditions(refused: Option<&Refusal>, progress: Option<&Progress>) -> Vec<PodCondition> {
    let pending = refused.map(|refusal| PodCondition {
        type_: PENDING.into(),
        status: "True".into(),
        reason: Some(refusal.reason.into()),
        message: Some(refusal.message.clone()).filter(|m| !m.is_empty()),
        observed_generation: refusal.generation,
        last_probe_time: seconds(refusal.told),
        last_transition_time: seconds(refusal.since),
    });
    let running = progress.map(|progress| PodCondition {
        type_: IN_PROGRESS.into(),
        status: "True".into(),
        reason: progress.error.as_ref().map(|_| ERROR.into()),
        message: progress.error.clone(),
        observed_generation: progress.generation,
        last_probe_time: seconds(progress.since),
        last_transition_time: seconds(progress.since),
    });
    pending.into_iter().chain(running).collect()
}

/// The text of an event about a resize: the containers' resources and the generation.
pub fn told(what: &str, pod: &Pod, generation: Option<i64>, error: &str) -> String {
    let spec = pod.spec.clone().unwrap_or_default();
    let list = |containers: &[Container]| -> Vec<serde_json::Value> {
        let own = |c: &Container| json!({"name": c.name, "resources": c.resources.clone().unwrap_or_default()});
        containers.iter().map(own).collect()
    };
    let mut out = String::from("{");
    for (name, containers) in [
        ("initContainers", list(spec.init_containers.as_deref().unwrap_or_default())),
        ("containers", list(&spec.containers)),
    ] {
        if !containers.is_empty() {
            out.push_str(&format!("\"{name}\":{},", serde_json::Value::from(containers)));
        }
    }
    out.push_str(&format!("\"generation\":{}", generation.unwrap_or_default()));
    if !error.is_empty() {
        out.push_str(&format!(",\"error\":{}", serde_json::Value::from(error)));
    }
    format!("{what}: {out}}}")
}

/// The order in which pending resizes are retried, smaller first: resizes that request no more than
/// before, then by priority, QoS class, and waiting time.
pub fn rank(wanted: &Pod, granted: &Pod, waits_since: Option<Timestamp>) -> impl Ord + use<> {
    let requests = |pod: &Pod| pod.spec.as_ref().map(pod_requests).unwrap_or_default();
    let (new, old) = (requests(wanted), requests(granted));
    let grows = ["cpu", "memory"].iter().any(|name| new.get(*name) > old.get(*name));
    let priority = wanted.spec.as_ref().and_then(|s| s.priority).unwrap_or(0);
    let unsure = qos_class(wanted) != GUARANTEED;
    let since = waits_since.unwrap_or(Timestamp::MAX);
    (grows, std::cmp::Reverse(priority), unsure, since)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn pod(cpu: &str, priority: i32) -> Arc<Pod> {
        let resources = json!({"requests": {"cpu": cpu}});
        let spec: Value =
            json!({"priority": priority, "containers": [{"name": "a", "resources": resources}]});
        let pod = json!({"metadata": {"name": "p", "generation": 2}, "spec": spec});
        Arc::new(serde_json::from_value(pod).expect("a pod"))
    }

    #[test]
    fn a_pod_runs_with_what_it_was_granted() {
        let granted = Allocation::of(&pod("1", 0));
        let equal = pod("1000m", 0);
        assert!(Arc::ptr_eq(&granted.applied(&equal), &equal), "the same amount is no change");
        let cpu = |pod: &Pod| pod.spec.as_ref().map(pod_requests).expect("a spec")["cpu"];
        assert_eq!(cpu(&granted.applied(&pod("2", 0))), 1000);
    }

    #[test]
    fn records_survive_a_restart() {
        let root = tempfile::tempdir().expect("a directory");
        let dir = PodDir::new(root.path(), "u");
        assert_eq!(Allocation::read(&dir), None);
        let granted = Allocation::of(&pod("1", 0));
        granted.write(&dir);
        assert_eq!(Allocation::read(&dir), Some(granted));
        let mut actuated = Actuated::default();
        actuated.set("a", Amounts { cpu_request: 1000, ..Amounts::default() });
        actuated.write(&dir);
        assert_eq!(Actuated::read(&dir), actuated);
    }

    #[test]
    fn pending_resizes_are_ranked() {
        let at = |second| Timestamp::from_second(second).ok();
        let ranked = |cpu: &str, priority, since| rank(&pod(cpu, priority), &pod("1", 0), since);
        assert!(ranked("500m", 0, None) < ranked("2", 9, at(1)), "shrinking frees room");
        assert!(ranked("2", 9, None) < ranked("2", 1, at(1)), "then by priority");
        assert!(ranked("2", 1, at(1)) < ranked("2", 1, at(2)), "then by waiting time");
        assert!(ranked("2", 1, at(2)) < ranked("2", 1, None));
    }

    #[test]
    fn events_name_the_resources() {
        assert_eq!(
            told("Pod resize started", &pod("2", 0), Some(2), ""),
            r#"Pod resize started: {"containers":[{"name":"a","resources":{"requests":{"cpu":"2"}}}],"generation":2}"#
        );
        assert!(
            told("Pod resize error", &pod("2", 0), None, "no")
                .ends_with(r#""generation":0,"error":"no"}"#)
        );
    }
}
